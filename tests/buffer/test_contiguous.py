"""Batches in one piece, batches by default, and batches gathered by torch: the same rows."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict, tensorclass

from replaykit import LazyTensorStorage, ListStorage, ReplayBuffer, TensorStorage
from replaykit.structure import contiguous
from tests.buffer.building import buffer_of, check_whole, rows, same

KINDS = ["list", "lazy_stack", "tensor", "memmap"]


def _tensors(data: Any) -> list[torch.Tensor]:
    if isinstance(data, torch.Tensor):
        return [data]
    if isinstance(data, dict):
        return [leaf for value in data.values() for leaf in _tensors(value)]
    if isinstance(data, (list, tuple)):
        return [leaf for value in data for leaf in _tensors(value)]
    return list(data.values(True, True))


def _pair(kind: str, **options: Any) -> tuple[ReplayBuffer, ReplayBuffer]:
    """Two buffers that draw the same rows, of which the second gives them in one piece."""
    return (
        buffer_of(kind, seed=3, batch_size=6, **options),
        buffer_of(kind, seed=3, batch_size=6, contiguous=True, **options),
    )


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
        buffer.extend(
            TensorDict({"id": ids, "x": ids[..., None] + torch.rand(2)[:0].sum()}, [3, 8])
        )
    for _ in range(4):
        a, b = default.sample(), pieces.sample()
        same(a, b)
        assert all(leaf.is_contiguous() for leaf in _tensors(b))
        lanes = b["index"][:, 1]
        assert torch.equal(b["id"] // 8, lanes)


def test_batches_have_the_keys_of_the_rows_in_their_order() -> None:
    content = rows(9)
    for kind in ("tensor", "memmap"):
        for pieces in (True, False):
            buffer = buffer_of(kind, contiguous=pieces)
            buffer.extend(content)
            batch = buffer.sample(5)
            assert list(batch._tensordict) == [*content._tensordict, "index"]
            assert list(batch["next"]._tensordict) == list(content["next"]._tensordict)
            for key, value in content.items(True, True):
                assert batch[key].dtype == value.dtype
                assert batch[key].shape == (5, *value.shape[1:])
                assert torch.equal(batch[key], value[batch["index"]])


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


def test_custom_storage_needs_no_support_for_contiguous() -> None:
    class Own(LazyTensorStorage):
        def read(self, index: torch.Tensor, *, own: bool = True) -> Any:  # type: ignore[override]
            return super().read(index, own=own)

    buffer = ReplayBuffer(storage=Own(4), contiguous=True, batch_size=3)
    buffer.extend(TensorDict({"x": torch.rand(4, 2), "y": torch.rand(4)}, [4]))
    assert all(leaf.is_contiguous() for leaf in _tensors(buffer.sample()))


def test_output_of_a_collate_function_becomes_contiguous() -> None:
    def collate(rows: list[Any]) -> TensorDict:
        return TensorDict({"x": torch.stack(rows, -1).T}, [len(rows)])

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


_PROGRAM = """
import hashlib, json, sys, torch
from tensordict import TensorDict
import replaykit as rk
from replaykit.storages.row_kernels import NativeRows
from replaykit.structure import raw_bytes

if sys.argv[1] == "torch":
    NativeRows.over = classmethod(lambda cls, columns: None)

def rows(start, count):
    ids = torch.arange(start, start + count)
    column = ids[:, None]
    return TensorDict({
        "id": ids, "x": column + torch.tensor([0.1, 0.2, 0.3]),
        "wide": column * 2.0 + torch.zeros(200), "flag": column % 3 == 0,
        "z": torch.complex(column.double(), -column.double()), "empty": torch.zeros(count, 0),
        "next": {"x": column[..., None].half() + torch.zeros(2, 2)},
        "byte": (ids % 256).to(torch.uint8),
    }, [count])

def told(data):
    found = {}
    for key, value in sorted(data.items(True, True), key=str):
        digest = hashlib.sha256(raw_bytes(value).numpy().tobytes()).hexdigest()
        found[str(key)] = [str(value.dtype), list(value.shape), digest]
    return found

makers = {
    "lazy": lambda: rk.LazyTensorStorage(20),
    "memmap": lambda: rk.LazyMemmapStorage(20),
    "wrapped": lambda: rk.TensorStorage(rows(500, 20)),
    "list": lambda: rk.ListStorage(20),
    "stack": lambda: rk.LazyStackStorage(20),
}
result = {}
for name, make in makers.items():
    for contiguous in (False, True):
        rb = rk.ReplayBuffer(storage=make(), batch_size=9, contiguous=contiguous,
                             generator=torch.Generator().manual_seed(5))
        rb.extend(rows(0, 13)); rb.extend(rows(13, 12)); rb.add(rows(25, 1)[0])
        rb.extend(rows(26, 3)[[2, 0]])
        if name not in ("list", "stack"):
            rb[4] = rows(99, 1)[0]
            rb.storage.set(torch.tensor([7, 3]), rows(200, 2))
        result[f"{name} {contiguous}"] = [told(rb.sample()) for _ in range(3)] + [told(rb[:])]
for ndim in (2, 3):
    storage = rk.LazyTensorStorage(24, ndim=ndim)
    rb = rk.ReplayBuffer(storage=storage, batch_size=9, generator=torch.Generator().manual_seed(5))
    data = rows(0, 24)
    rb.extend(data.view(2, 12) if ndim == 2 else data.view(2, 2, 6))
    rb.extend(data.view(2, 12)[:, :2].clone() if ndim == 2 else data.view(2, 2, 6)[:, :, 1:3])
    result[f"lanes {ndim}"] = [told(rb.sample()) for _ in range(3)] + [told(rb[:])]
print(json.dumps(result))
"""


@pytest.mark.programs
def test_core_and_torch_gather_the_same_bits(run_python: Any) -> None:
    by_core, by_torch = (json.loads(run_python(_PROGRAM, by).stdout) for by in ("core", "torch"))
    assert by_core.keys() == by_torch.keys()
    for name, found in by_core.items():
        assert by_torch[name] == found, name
    for name in ("lazy", "memmap", "wrapped"):
        assert by_core[f"{name} True"] == by_core[f"{name} False"]
