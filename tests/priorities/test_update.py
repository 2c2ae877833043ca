"""Setting leaves: what is taken, in which order, and what a refusal leaves behind."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from replaykit import MaxSegmentTree, MinSegmentTree, SumSegmentTree
from tests.support.refusals import refuses

TREES = [SumSegmentTree, MinSegmentTree, MaxSegmentTree]
DTYPES = [torch.float32, torch.float64]


INDICES: dict[str, Callable[[], Any]] = {
    "tensor": lambda: torch.tensor([3, 1]),
    "int32": lambda: torch.tensor([3, 1], dtype=torch.int32),
    "uint8": lambda: torch.tensor([3, 1], dtype=torch.uint8),
    "strided": lambda: torch.tensor([3, 9, 1, 9])[::2],
    "list": lambda: [3, 1],
    "tuple": lambda: (3, 1),
    "numpy": lambda: np.array([3, 1]),
    "range": lambda: range(3, 0, -2),
    "slice": lambda: slice(3, 0, -2),
}
VALUES: dict[str, Callable[[], Any]] = {
    **{
        str(dtype): lambda dtype=dtype: torch.tensor([7, 2], dtype=dtype)
        for dtype in (
            torch.float64,
            torch.float32,
            torch.float16,
            torch.bfloat16,
            torch.int64,
            torch.int32,
            torch.uint8,
        )
    },
    "strided": lambda: torch.tensor([7.0, 9.0, 2.0, 9.0])[::2],
    "gradient": lambda: torch.tensor([7.0, 2.0], requires_grad=True),
    "lazy negative sign": lambda: torch.tensor([1 - 7j, 1 - 2j]).conj().imag,
    "list": lambda: [7, 2],
    "numpy": lambda: np.array([7.0, 2.0]),
}


@pytest.mark.covering(2)
@pytest.mark.parametrize("index", INDICES)
@pytest.mark.parametrize("value", VALUES)
def test_update_takes_indices_and_values_of_any_kind(kernel: str, index: str, value: str) -> None:
    for dtype in DTYPES:
        tree = SumSegmentTree(5, dtype=dtype)
        tree[INDICES[index]()] = VALUES[value]()
        assert tree.leaves.tolist() == [0, 2, 0, 7, 0]
        assert tree[INDICES[index]()].tolist() == [7, 2]
        assert tree.total == 9
        if index != "slice":
            other = SumSegmentTree(5, dtype=dtype)
            other.update(INDICES[index](), VALUES[value]())
            assert torch.equal(other.leaves, tree.leaves)


def test_single_value_is_set_for_many_slots(kernel: str) -> None:
    tree = SumSegmentTree(6)
    tree.update(torch.tensor([1, 4]), 2)
    tree[[0]] = torch.tensor(3.0)
    tree[5] = np.float32(0.5)
    tree[torch.tensor(2)] = torch.tensor([7])
    assert tree.leaves.tolist() == [3, 2, 7, 0, 2, 0.5]
    tree[2:4] = 1
    tree[4:4] = 9
    tree[5:2] = torch.empty(0)
    tree[3:] = torch.tensor([4, 5, 6])
    assert tree.leaves.tolist() == [3, 2, 1, 4, 5, 6]
    assert (tree[2], tree[2:4].tolist(), tree[::2].tolist()) == (1.0, [1, 4], [3, 1, 5])
    assert isinstance(tree[2], float)
    tree.fill(0.25)
    assert tree.total == 1.5
    tree.clear()
    assert (tree.total, tree.leaves.tolist()) == (0, [0] * 6)


BAD_WEIGHTS = [math.nan, -1.0, -1e-45, -1e-300, math.inf, -math.inf, 1e39]


@pytest.mark.covering(2)
@pytest.mark.parametrize("position", [0, 150, 299])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", BAD_WEIGHTS)
def test_a_bad_weight_changes_nothing(
    kernel: str, bad: float, dtype: torch.dtype, position: int, memory: Callable[[Any], Any]
) -> None:
    tree = SumSegmentTree(1000, dtype=dtype)
    tree.load(torch.rand(1000, dtype=dtype))
    before = memory(tree)
    sources = [torch.float64] if abs(bad) < 1e-40 else DTYPES
    sources = [source for source in sources if bad != 1e39 or source == torch.float64]
    for source in sources:
        value = torch.ones(300, dtype=source)
        value[position] = bad
        if dtype == torch.float64 and bad == 1e39:
            continue  # a float64 weight like any other
        message = rf"expected weights in \[0, .*\], got .* at position {position}$"
        refuses(ValueError, message, tree.update, torch.arange(300), value)
        refuses(ValueError, message, tree.update_range, 5, value)
        refuses(ValueError, "got", tree.update, torch.arange(300), bad)
        with pytest.raises(ValueError, match="got"):
            tree[3] = bad
        refuses(ValueError, "got", tree.fill, bad)
        leaves = torch.ones(1000, dtype=dtype)
        leaves[position] = torch.tensor(bad, dtype=torch.float64).to(dtype)
        if leaves[position] != 0:
            refuses(ValueError, message, tree.load, leaves)
    assert memory(tree) == before


@pytest.mark.covering(2)
@pytest.mark.parametrize("bad", [-1, -(2**63), 1000, 1001, 1007, 1008, 2**40, 2**63 - 1])
@pytest.mark.parametrize("tree_class", TREES)
@pytest.mark.parametrize("position", [0, 299])
@pytest.mark.pitfall("PR3")
def test_an_index_outside_changes_nothing(
    kernel: str, tree_class: Any, bad: int, position: int, memory: Callable[[Any], Any]
) -> None:
    """PR3: a sentence, not a crash; also for the padding behind the last leaf."""
    tree = tree_class(1000)
    tree.fill(2.5)
    before = memory(tree)
    index = torch.arange(300)
    index[position] = bad
    message = rf"expected indices in \[0, 1000\), got {bad} at position {position}$"
    for value in (torch.ones(300), torch.ones(300, dtype=torch.float64), 1.0):
        refuses(IndexError, message, tree.update, index, value)
    with pytest.raises(IndexError, match=message):
        tree[index]
    with pytest.raises(IndexError, match="expected indices"):
        tree[bad]
    with pytest.raises(IndexError, match="expected indices"):
        tree[bad] = 1.0
    assert memory(tree) == before


def test_refusals_have_the_same_words_for_all_kernels(
    kernel: str, memory: Callable[[Any], Any]
) -> None:
    """The first offender is named, and of one position its index."""
    tree, least = SumSegmentTree(10), MinSegmentTree(10)
    tree.fill(0.1)
    before = memory(tree)
    three = torch.arange(3)
    bad, out = torch.tensor([1.0, -0.1, -3.0]), torch.tensor([1, 30, 2])
    starts, F64 = torch.tensor([0, 5]), torch.float64
    cases: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (ValueError, r"\[0, .*\], got -0.1.* at position 1$", lambda: tree.update(three, bad)),
        (ValueError, r"got -0.1.* at position 1$", lambda: tree.update(three, bad.to(F64))),
        (ValueError, r"got -0.1.* at position 1$", lambda: tree.update_range(3, bad)),
        (ValueError, "got -2.0 at position 0$", lambda: tree.load(torch.full((10,), -2.0))),
        (ValueError, "numbers, got nan", lambda: least.update(three, bad / 0 * 0)),
        (IndexError, r"\[0, 10\), got 30 at position 1$", lambda: tree.update(out, bad)),
        (ValueError, r"got -0.1.* at position 1$", lambda: tree.update(out[[0, 2, 1]], bad)),
        (IndexError, r"\[0, 10\), got 30 at position 1$", lambda: tree[out]),
        (ValueError, "got -0.1.* at position 1$", lambda: tree.find_prefix(bad.to(F64))),
        (ValueError, "total, got 1.5 at position 1$", lambda: tree.find_prefix(three * 1.5)),
        (ValueError, "at least 0, got -0.1.* at position 1$", lambda: tree.find(bad.to(F64))),
        (ValueError, r"shape \[K\], got \[2, 2\]", lambda: tree.find_prefix(torch.ones(2, 2))),
        (TypeError, "real numbers, got torch.complex64", lambda: tree.find_prefix(bad + 0j)),
        (TypeError, "got torch.bool", lambda: tree.find_prefix(bad > 0)),
        (ValueError, r"got \[5, 4\)", lambda: tree.reduce(starts, torch.tensor([4, 4]))),
        (IndexError, r"got \[5, 101\)", lambda: tree.reduce(starts, torch.tensor([4, 101]))),
        (TypeError, "integers, got torch.float32", lambda: tree.update(torch.ones(3), 1)),
        (TypeError, "integers, got torch.bool", lambda: tree.update([True, False], 1)),
        (ValueError, r"shape \[K\], got \[3, 1\]", lambda: tree.update(three[:, None], 1)),
        (ValueError, r"shape \[K\], got \[\]", lambda: tree.update(torch.tensor(1), 1)),
        (ValueError, r"shape \[3\], got shape \[2\]", lambda: tree.update(three, torch.ones(2))),
        (ValueError, r"got shape \[1\]", lambda: tree.update(three, torch.ones(1))),
        (ValueError, r"got shape \[3, 1\]", lambda: tree.update(three, torch.ones(3, 1))),
        (TypeError, "complex", lambda: tree.update(three, torch.ones(3, dtype=torch.cfloat))),
        (TypeError, "got torch.bool", lambda: tree.update(three, torch.ones(3) > 0)),
        (ValueError, "expected a count", lambda: tree.update_range(0, 1.0)),
        (ValueError, r"shape \[3\]", lambda: tree.update_range(0, torch.ones(2), 3)),
        (IndexError, r"got \[8, 11\)", lambda: tree.update_range(8, 1.0, 3)),
        (IndexError, r"got \[-1, 2\)", lambda: tree.update_range(-1, torch.ones(3))),
        (IndexError, r"got \[11, 11\)", lambda: tree.update_range(11, 1.0, 0)),
        ((IndexError, ValueError), "range", lambda: tree.update_range(3, 1.0, -1)),  # type: ignore
    ]
    for error, message, call in cases:
        refuses(error, message, call)
    assert memory(tree) == before


def test_an_empty_batch_does_nothing(kernel: str, memory: Callable[[Any], Any]) -> None:
    tree = SumSegmentTree(10)
    before = memory(tree)
    tree.update(torch.empty(0, dtype=torch.int64), torch.empty(0))
    tree.update([], 1.0)
    tree.update([], [])
    tree.update_range(10, 1.0, 0)
    tree.update_range(3, torch.empty(0))
    assert tree[[]].tolist() == []
    assert memory(tree) == before


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_below_the_smallest_normal_number_are_zero(kernel: str, dtype: torch.dtype) -> None:
    tiny = torch.finfo(dtype).tiny
    tree = SumSegmentTree(6, dtype=dtype)
    below = math.nextafter(tiny, 0) if dtype == torch.float64 else 1.1754942e-38
    tree[0:5] = torch.tensor([tiny, below, below / 1e6, -0.0, 0.0], dtype=dtype)
    tree[5] = below
    assert tree.leaves.tolist() == [tiny, 0, 0, 0, 0, 0]
    assert not bool(tree.leaves.signbit().any())
    assert tree.nonzero_count == 1
    tree[0] = -0.0
    assert math.copysign(1, tree.total) == 1


def test_largest_weights_keep_a_finite_total(kernel: str) -> None:
    largest = torch.finfo(torch.float32).max
    tree = SumSegmentTree(1000)
    tree.fill(largest)
    assert tree.total == 1000 * largest
    wide = SumSegmentTree(1000, dtype=torch.float64)
    ceiling = torch.finfo(torch.float64).max / 1000
    wide.fill(ceiling)
    assert math.isfinite(wide.total)
    assert wide.find_prefix(wide.total) == 999
    with pytest.raises(ValueError, match="expected weights in"):
        wide[3] = math.nextafter(ceiling, math.inf)


def test_weight_is_cast_before_it_is_checked(kernel: str) -> None:
    """Just above the largest float32, and rounded to it."""
    largest = torch.finfo(torch.float32).max
    tree = SumSegmentTree(2)
    tree[0:2] = torch.tensor([math.nextafter(largest, math.inf), 1.0], dtype=torch.float64)
    assert tree[0] == largest


def test_extremes_take_every_number_but_nan(kernel: str, memory: Callable[[Any], Any]) -> None:
    for tree_class, identity in ((MinSegmentTree, math.inf), (MaxSegmentTree, -math.inf)):
        for dtype in DTYPES:
            tree = tree_class(20, dtype=dtype)
            assert tree.leaves.tolist() == [identity] * 20
            assert tree.root == tree.reduce() == identity
            tree[2:6] = torch.tensor([-3.0, math.inf, -math.inf, 1e39], dtype=torch.float64)
            assert tree[2] == -3
            assert tree[5] == (math.inf if dtype == torch.float32 else 1e39)
            assert tree.root == -identity
            tree[7] = -0.0
            assert math.copysign(1, tree[7]) == 1
            before = memory(tree)
            with pytest.raises(ValueError, match="expected values that are numbers, got nan"):
                tree.update([1, 2], [1.0, math.nan])
            with pytest.raises(ValueError, match="expected values that are numbers, got nan"):
                tree[3] = math.nan
            assert memory(tree) == before
            tree.clear()
            assert tree.root == identity
