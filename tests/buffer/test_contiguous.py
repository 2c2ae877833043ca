"""Batches in one piece, batches by default, and batches gathered by torch: the same rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict, tensorclass

from replaykit import LazyTensorStorage, ListStorage, ReplayBuffer, TensorStorage
from replaykit.structure import contiguous
from tests.buffer.building import KINDS, buffer_of, check_whole, rows, same


def _tensors(data: Any) -> list[torch.Tensor]:
    if isinstance(data, torch.Tensor):
        return [data]
    if isinstance(data, dict):
        return [leaf for value in data.values() for leaf in _tensors(value)]
    if isinstance(data, (list, tuple)):
        return [leaf for value in data for leaf in _tensors(value)]
    return list(data.values(True, True))


def _pair(kind: str, **options: Any) -> list[ReplayBuffer]:
    """Two buffers that draw the same rows, of which the second gives them in one piece."""
    return [
        buffer_of(kind, seed=3, batch_size=6, contiguous=pieces, **options)
        for pieces in (False, True)
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prefetch", [None, 2])
@pytest.mark.parametrize("transform", [None, "keep", "slice", "lock"])
def test_batches_in_one_piece_hold_the_same_rows(kind: str, prefetch: Any, transform: Any) -> None:
    def apply(data: TensorDict) -> TensorDict:
        if transform == "slice":
            data["sliced"] = data["observation"][:, ::2]
            data["turned"] = data["pixels"].transpose(1, 2)
        return data.lock_() if transform == "lock" else data

    options = {"prefetch": prefetch} | ({"transform": apply} if transform else {})
    default, pieces = _pair(kind, **options)
    for buffer in (default, pieces):
        buffer.extend(rows(14))
    for _ in range(4):
        a, b = default.sample(), pieces.sample()
        same(a, b)
        assert list(a.keys()) == list(b.keys())
        check_whole(b)
        assert all(leaf.is_contiguous() for leaf in _tensors(b))
        if transform == "slice" and kind != "lazy_stack":  # which keeps values row by row
            assert not a["sliced"].is_contiguous()
    for buffer in (default, pieces):
        buffer.shutdown()


@pytest.mark.parametrize("kind", ["tensor", "memmap"])
def test_batches_of_lanes_in_one_piece_hold_the_same_rows(kind: str) -> None:
    default, pieces = _pair(kind, max_size=12, ndim=2)
    ids = torch.arange(24).view(3, 8)
    for buffer in (default, pieces):
        buffer.extend(TensorDict({"id": ids, "x": ids[..., None] + torch.zeros(2)}, [3, 8]))
    for _ in range(4):
        a, b = default.sample(), pieces.sample()
        same(a, b)
        assert all(leaf.is_contiguous() for leaf in _tensors(b))
        assert torch.equal(b["id"] // 8, b["index"][:, 1])


@pytest.mark.parametrize("kind", ["tensor", "memmap"])
def test_batches_have_the_keys_of_the_rows_in_their_order(kind: str) -> None:
    content = rows(9)
    for buffer in _pair(kind):
        buffer.extend(content)
        batch = buffer.sample()
        assert list(batch._tensordict) == [*content._tensordict, "index"]
        assert list(batch["next"]._tensordict) == list(content["next"]._tensordict)


@tensorclass
class _Point:
    x: torch.Tensor
    y: torch.Tensor


@pytest.mark.parametrize(
    "content",
    [
        torch.arange(5),
        {"a": torch.arange(5), "b": (torch.rand(5, 2), torch.rand(5, 300))},
        _Point(x=torch.arange(5), y=torch.rand(5, 3), batch_size=[5]),
        TensorDict({"x": torch.arange(10).view(2, 5).T, "y": torch.rand(5)}, [5]),
    ],
    ids=["tensor", "pytree", "tensorclass", "columns"],
)
@pytest.mark.parametrize("storage", [lambda data: LazyTensorStorage(5), TensorStorage])
def test_batches_of_tensors_and_pytrees_are_contiguous(content: Any, storage: Any) -> None:
    batches = []
    for pieces in (False, True):
        generator = torch.Generator().manual_seed(1)
        buffer = ReplayBuffer(storage=storage(content), contiguous=pieces, generator=generator)
        buffer.extend(content)
        batches.append(buffer.sample(7))
    same(*batches)
    assert all(leaf.is_contiguous() for leaf in _tensors(batches[1]))


def test_custom_storages_and_collate_functions_need_no_support_for_contiguous() -> None:
    class Own(LazyTensorStorage):
        def read(self, index: torch.Tensor, *, own: bool = True) -> Any:  # type: ignore[override]
            return super().read(index, own=own)

    def collate(rows: list[Any]) -> TensorDict:
        return TensorDict({"x": torch.stack(rows, -1).T}, [len(rows)])

    buffer = ReplayBuffer(storage=Own(4), contiguous=True, batch_size=3)
    buffer.extend(TensorDict({"x": torch.rand(4, 2), "y": torch.rand(4)}, [4]))
    assert all(leaf.is_contiguous() for leaf in _tensors(buffer.sample()))
    buffer = ReplayBuffer(storage=ListStorage(4), contiguous=True, collate_fn=collate)
    buffer.extend([torch.rand(3) for _ in range(4)])
    assert buffer.sample(2)["x"].is_contiguous()


def test_sparse_tensors_and_non_tensors_stay_unchanged() -> None:
    sparse, turned = torch.eye(3).to_sparse(), torch.rand(2, 3).T
    stack = LazyStackedTensorDict(TensorDict({"a": turned}, []), TensorDict({"a": turned[:2]}, []))
    data = [sparse, {"t": turned}, "text", None, stack]
    found = contiguous(data)
    assert found[0] is sparse
    assert found[1]["t"].is_contiguous()
    assert found[2:4] == ["text", None]
    assert all(row["a"].is_contiguous() for row in found[4].tensordicts)
    assert not turned.is_contiguous()
    rows = TensorDict({"t": turned, "s": NonTensorData("x", batch_size=[3])}, [3], names=["time"])
    found = contiguous(rows)
    assert found["t"].is_contiguous()
    assert (found["s"], found.names) == ("x", ["time"])
