"""Every kernel that this machine can use, and what tests of trees compare with."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from replaykit.priorities.tree_kernels import available_kernels

KERNELS = available_kernels()


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a kernel, which all trees made in the test have."""
    monkeypatch.setenv("REPLAYKIT_TREE", request.param)
    return request.param


@pytest.fixture
def with_kernel(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """A context in which trees are made with the kernel of that name."""

    @contextmanager
    def chosen(name: str) -> Iterator[None]:
        with monkeypatch.context() as patch:
            patch.setenv("REPLAYKIT_TREE", name)
            yield

    return chosen


@pytest.fixture
def each_kernel(with_kernel: Callable[[str], Any]) -> Callable[[Callable[[], Any]], list[Any]]:
    """Calls a function once with each kernel chosen."""

    def call(make: Callable[[], Any]) -> list[Any]:
        results = []
        for name in KERNELS:
            with with_kernel(name):
                results.append(make())
        return results

    return call


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().numpy().tobytes()


@pytest.fixture
def memory() -> Callable[[Any], tuple[bytes, bytes]]:
    """Leaves with their padding, and nodes, bit for bit: what a refused call may not touch."""

    def read(tree: Any) -> tuple[bytes, bytes]:
        leaves = tree._leaves.as_strided((tree._levels.leaves,), (1,))
        return bits(leaves), bits(tree._nodes)

    return read


@pytest.fixture
def require_rebuilt(memory: Callable[[Any], tuple[bytes, bytes]]) -> Callable[[Any], None]:
    """The nodes are what a rebuild from the leaves gives, bit for bit; padding is the identity."""

    def check(tree: Any) -> None:
        before = memory(tree)
        assert tree.leaves.numpy().tobytes() == before[0][: tree.capacity * tree.dtype.itemsize]
        fresh = type(tree)(tree.capacity, dtype=tree.dtype)
        fresh.load(tree.leaves)
        assert before == memory(fresh)
        tree.rebuild()
        assert before == memory(tree)

    return check


@pytest.fixture
def chi_square_p() -> Callable[[torch.Tensor, torch.Tensor], float]:
    """p of Pearson's chi-square for counts against expectations; cells below 5 are merged."""

    def p_value(counts: torch.Tensor, expected: torch.Tensor) -> float:
        counts, expected = counts.double(), expected.double()
        assert float(counts[expected == 0].sum()) == 0
        small = (expected < 5) & (expected > 0)
        kept = expected >= 5
        pairs = [(counts[kept], expected[kept])]
        if small.any():
            pairs.append((counts[small].sum().reshape(1), expected[small].sum().reshape(1)))
        seen, hoped = (torch.cat(column) for column in zip(*pairs, strict=True))
        statistic = float(((seen - hoped) ** 2 / hoped).sum())
        degrees = len(hoped) - 1
        # Wilson and Hilferty: the cube root of chi-square over its degrees is nearly normal.
        scale = 2 / (9 * degrees)
        z = ((statistic / degrees) ** (1 / 3) - (1 - scale)) / math.sqrt(scale)
        return 0.5 * math.erfc(z / math.sqrt(2))

    return p_value
