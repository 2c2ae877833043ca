"""Trees on an accelerator: nothing waits for it, and what is refused is raised later.

Where there is none, a tree on the CPU takes over its ways of refusing, so that they are tested
everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from replaykit import MinSegmentTree, SumSegmentTree
from replaykit.priorities.tree_kernels import TorchKernel
from tests.support.accelerator import no_wait

F64 = torch.float64
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("REPLAYKIT_TREE", "torch")
    construct = TorchKernel.__init__

    def deferring(self: TorchKernel, *arguments: Any) -> None:
        construct(self, *arguments)
        self._deferred = True

    monkeypatch.setattr(TorchKernel, "__init__", deferring)
    return request.param


@contextmanager
def unwaited(device: str) -> Iterator[None]:
    """Fails where something in it waits for the accelerator."""
    if device == "cpu":
        yield
        return
    with no_wait():
        yield


def tensors(device: str, *values: Any) -> list[torch.Tensor]:
    return [torch.tensor(value, device=device) for value in values]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_accelerator_results_equal_the_cpu(
    device: str, dtype: torch.dtype, with_kernel: Callable[[str], Any]
) -> None:
    """Nodes bit for bit, and searches, after updates with repeated indices."""
    generator = torch.Generator().manual_seed(0)
    weights = (10 ** (torch.rand(10_007, generator=generator) * 6 - 3)).to(dtype)
    with_repeats = torch.randint(0, 5000, (4000,), generator=generator)
    value = torch.rand(4000, generator=generator)
    x = torch.rand(5000, dtype=F64, generator=generator)
    start, end = torch.randint(0, 10_008, (2, 500), generator=generator).sort(0).values
    results = []
    for where in ("cpu", device):
        tree = SumSegmentTree(10_007, dtype=dtype, device=where)
        tree.load(weights)
        moved = [part.to(where) for part in (with_repeats, value, x, start, end)]
        with unwaited(where):
            tree.update(moved[0], moved[1])
            tree.update_range(77, moved[1][:1000])
            found = tree.find(moved[2] * tree.total_tensor())
            parts = [*found, tree.reduce(moved[3], moved[4]), tree[moved[0]], tree.total_tensor()]
        parts += [tree.leaves, tree._nodes]
        results.append([part.cpu() for part in parts])
        assert all(part.device == tree.device for part in parts)
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("backwards", [False, True])
def test_last_of_equal_indices_wins_in_any_write_order(
    device: str, backwards: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal indices are written in no order that an accelerator would promise."""
    write = torch.Tensor.index_copy_

    def reordered(self: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor) -> Any:
        if backwards:
            index, source = index.flip(0), source.flip(0)
        return write(self, dim, index, source)

    tree = SumSegmentTree(1000, device=device)
    monkeypatch.setattr(torch.Tensor, "index_copy_", reordered)
    index = torch.arange(500, device=device) * 7 % 10
    tree.update(index, torch.arange(500.0, device=device))
    monkeypatch.undo()
    expected = [max(i for i in range(500) if i * 7 % 10 == slot) for slot in range(10)]
    assert tree.leaves[:10].tolist() == expected
    assert tree.total == sum(expected)


def test_tree_operations_do_not_wait_for_the_device(device: str) -> None:
    tree = SumSegmentTree(1000, device=device)
    least = MinSegmentTree(1000, device=device)
    generator = torch.Generator(device).manual_seed(0)
    index = torch.arange(300, device=device)
    value = torch.rand(300, device=device) + 0.1
    with unwaited(device):
        for _ in range(2):
            tree.update(index, value)
            tree.update(index, 0.5)
            tree.update_range(500, value)
            least.update(index, value)
            drawn, weight = tree.draw(64, generator=generator)
            tree.draw(64, generator=generator, stratified=True)
            tree.find_prefix(weight)
            tree.total_tensor()
            tree.reduce(index, index + 5)
            least.reduce(index, index + 5)
            tree[drawn]
            tree[3:9]
            tree.rebuild()
    assert bool((weight == tree[drawn]).all())


READS: dict[str, Callable[[SumSegmentTree], Any]] = {
    "total": lambda tree: tree.total,
    "leaves": lambda tree: tree.leaves,
    "state_dict": lambda tree: tree.state_dict(),
    "reduce": lambda tree: tree.reduce(0, 3),
    "one leaf": lambda tree: tree[0],
    "count": lambda tree: tree.nonzero_count,
}
REFUSED: dict[str, tuple[type[Exception], str, Callable[[SumSegmentTree, str], Any]]] = {
    "index": (
        IndexError,
        r"expected indices in \[0, 20\), got 4611686018427387905 at position 1$",
        lambda tree, on: tree.update(*tensors(on, [3, 2**62 + 1, -1], [9.0, 9.0, -9.0])),
    ),
    "value": (
        ValueError,
        r"expected weights in \[0, .*\], got -2.0 at position 2$",
        lambda tree, on: tree.update(*tensors(on, [3, 4, 5], [9.0, 9.0, -2.0])),
    ),
    "infinite after the cast": (
        ValueError,
        r"got 1e\+39 at position 0$",
        lambda tree, on: tree.update(torch.tensor([1], device=on), 1e39),
    ),
    "run": (
        ValueError,
        "got nan at position 1$",
        lambda tree, on: tree.update_range(3, torch.tensor([1, math.nan], device=on)),
    ),
    "search": (
        ValueError,
        r"expected values in \[0, 20.0\], the total, got 20.5 at position 1$",
        lambda tree, on: tree.find_prefix(torch.tensor([1, 20.5, -1.0], device=on)),
    ),
    "search without limit": (
        ValueError,
        "expected values of at least 0, got -1.0 at position 2$",
        lambda tree, on: tree.find(torch.tensor([1, 20.5, -1.0], device=on)),
    ),
    "range": (
        IndexError,
        r"expected a range within \[0, 20\), got \[3, 21\) at position 1$",
        lambda tree, on: tree.reduce(*tensors(on, [1, 3], [2, 21])),
    ),
    "gather": (
        IndexError,
        r"expected indices in \[0, 20\), got -1 at position 0$",
        lambda tree, on: tree[torch.tensor([-1, 50], device=on)],
    ),
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("case", REFUSED)
def test_refused_update_changes_nothing_and_raises_later_once(
    device: str, case: str, read: str
) -> None:
    error, message, refused = REFUSED[case]
    tree = SumSegmentTree(20, device=device)
    tree.fill(1.0)
    refused(tree, device)
    tree.draw(4)
    tree.update(torch.tensor([7], device=device), torch.tensor([-5.0], device=device))
    with pytest.raises(error, match=message):  # the first of the two
        READS[read](tree)
    assert tree.leaves.tolist() == [1.0] * 20
    assert tree.total == 20
    tree.update(torch.tensor([7], device=device), 3.0)
    assert tree[7] == 3


def test_a_tree_of_zeros_says_so_by_the_index(device: str) -> None:
    tree = SumSegmentTree(100, device=device)
    with unwaited(device):
        for drawn in (tree.draw(3), tree.draw(3, stratified=True)):
            index, weight = drawn
        found = tree.find(torch.zeros(3, dtype=F64, device=device))
    for index, weight in (drawn, found):
        assert index.tolist() == [-1] * 3
        assert weight.tolist() == [0] * 3
    tree.update(torch.tensor([77], device=device), 1.0)
    assert tree.draw(3)[0].tolist() == [77] * 3


def test_inputs_on_other_devices_are_moved_to_the_tree(device: str) -> None:
    tree = SumSegmentTree(10, device=device)
    tree.update(torch.tensor([1, 2]), torch.tensor([1.0, 2.0]))
    tree[[3, 4]] = [3, 4]
    tree[5] = torch.tensor(5.0, device=device)
    assert tree.find_prefix(torch.tensor([0.5, 1.0])).tolist() == [1, 2]
    assert tree.leaves.tolist() == [0, 1, 2, 3, 4, 5, 0, 0, 0, 0]
    assert tree[torch.tensor([4])].device == tree.device


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_updates_and_draws_can_be_captured_in_a_graph() -> None:
    tree = SumSegmentTree(100_000, device="cuda")
    tree.fill(1.0)
    index = torch.arange(256, device="cuda")
    value = torch.rand(256, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            tree.update(index, value)
            tree.draw(256)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tree.update(index, value)
        drawn, weight = tree.draw(256)
    for _ in range(1000):
        index.random_(100_000)
        value.uniform_()
        graph.replay()
    assert bool((weight == tree[drawn].double()).all())
    nodes = tree._nodes.clone()
    tree.rebuild()
    assert torch.equal(nodes, tree._nodes)
