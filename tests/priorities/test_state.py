"""Trees saved and restored, copied, and sent to other processes."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from replaykit import MaxSegmentTree, MinSegmentTree, SumSegmentTree
from tests.support.refusals import refuses

TREES = [SumSegmentTree, MinSegmentTree, MaxSegmentTree]
DTYPES = [torch.float32, torch.float64]
Memory = Callable[[Any], Any]


def filled(tree_class: Any, capacity: int, dtype: torch.dtype) -> Any:
    tree = tree_class(capacity, dtype=dtype)
    generator = torch.Generator().manual_seed(capacity)
    for _ in range(5):
        index = torch.randint(0, capacity, (capacity,), generator=generator)
        tree.update(index, torch.rand(capacity, dtype=torch.float64, generator=generator) ** 20)
    return tree


def _through_a_file(tree: Any) -> Any:
    file = io.BytesIO()
    torch.save(tree.state_dict(), file)
    file.seek(0)
    other = type(tree)(tree.capacity, dtype=tree.dtype)
    other.fill(3)
    other.load_state_dict(torch.load(file, weights_only=True))
    return other


@pytest.mark.parametrize("tree_class", TREES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("capacity", [1, 9, 700])
def test_restored_trees_and_copies_are_the_same_bits_and_independent(
    kernel: str, tree_class: Any, dtype: torch.dtype, capacity: int, memory: Memory
) -> None:
    tree = filled(tree_class, capacity, dtype)
    assert list(tree.state_dict()) == ["leaves"]
    before = memory(tree)
    copies = (copy.deepcopy(tree), copy.copy(tree), pickle.loads(pickle.dumps(tree)))
    for other in (*copies, _through_a_file(tree)):
        assert type(other) is tree_class
        assert memory(other) == before
        other.update([capacity - 1], 100.0)
        other.update([capacity - 1], -0.0)
        assert memory(tree) == before


def test_returned_leaves_are_copies(kernel: str, memory: Memory) -> None:
    tree = filled(SumSegmentTree, 50, torch.float32)
    before = memory(tree)
    for given in (tree.leaves, tree.state_dict()["leaves"], tree[:], tree[3:9], tree[[1, 2]]):
        given.fill_(9)
    assert memory(tree) == before


def test_states_that_do_not_fit_are_refused(kernel: str, memory: Memory) -> None:
    tree = filled(SumSegmentTree, 50, torch.float32)
    before = memory(tree)
    cases: list[tuple[type[Exception], str, Any]] = [
        (TypeError, r"leaves of torch\.float32, got torch\.float64", torch.zeros(50).double()),
        (TypeError, r"leaves of torch\.float32, got list", [0.0] * 50),
        (ValueError, r"leaves of shape \[50\], got \[49\]", torch.zeros(49)),
        (ValueError, r"leaves of shape \[50\], got \[50, 1\]", torch.zeros(50, 1)),
        (ValueError, "got -1.0 at position 0", torch.full((50,), -1.0)),
        (ValueError, "got nan at position 0", torch.full((50,), torch.nan)),
    ]
    for error, message, leaves in cases:
        refuses(error, message, tree.load, leaves)
        refuses(error, message, tree.load_state_dict, {"leaves": leaves})
    refuses(KeyError, "expected the key 'leaves', got", tree.load_state_dict, {"nodes": 1})
    assert memory(tree) == before


def test_a_tree_from_another_machine_takes_the_kernel_that_is_there(
    with_kernel: Callable[[str], Any], kernel: str
) -> None:
    saved = pickle.dumps(filled(SumSegmentTree, 300, torch.float32))
    with with_kernel("torch"):
        assert pickle.loads(saved).kernel == "torch"
