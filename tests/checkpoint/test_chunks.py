"""Tensors in files of raw rows: cut, aligned, checked, and read back piece by piece."""

from __future__ import annotations

import mmap
import os
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from replaykit import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
)
from replaykit.checkpoint import RowChunks, chunks, dirty_chunks
from replaykit.checkpoint.chunks import ChunkWriter, chunk_bytes
from replaykit.checkpoint.reader import map_tensor

EXOTIC = [torch.float8_e4m3fn, torch.bfloat16, torch.uint16, torch.complex32, torch.bool]
ignore_complex32 = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


class Written(ChunkWriter):
    """A writer with the records of the tensors that it has written."""

    def __init__(self, folder: Path, limit: int, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__(folder, "0" * 12, limit)
        self.tensors = {name: self.write(tensor) for name, tensor in tensors.items()}
        self.finish()


def write(folder: Path, limit: int, **tensors: torch.Tensor) -> Written:
    return Written(folder, limit, tensors)


def mapped(folder: Path, writer: Written) -> dict[str, Any]:
    mappings: dict[str, mmap.mmap | None] = {}
    for name, record in writer.files.items():
        with open(folder / name, "rb") as file:
            length = os.fstat(file.fileno()).st_size
            assert length == record["size"]
            opened = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) if length else None
            assert zlib.crc32(opened or b"") == record["crc32"]
        mappings[name] = opened
    return {name: map_tensor(record, mappings) for name, record in writer.tensors.items()}


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    raw = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(*raw)


@ignore_complex32
@given(
    limit=st.integers(1, 200),
    specs=st.lists(
        st.tuples(
            st.lists(st.integers(0, 9), max_size=3),
            st.sampled_from([torch.int64, torch.float32, *EXOTIC]),
        ),
        min_size=1,
        max_size=6,
    ),
)
@settings(max_examples=150, deadline=None)
def test_tensors_survive_any_limit_of_file_size(
    limit: int, specs: list[Any], tmp_path_factory: Any
):
    folder = tmp_path_factory.mktemp("chunks")
    tensors = {}
    for number, (shape, dtype) in enumerate(specs):
        count = torch.Size(shape).numel() * dtype.itemsize
        raw = (torch.arange(count) + number) % 120
        raw = raw % 2 if dtype == torch.bool else raw
        whole = raw.to(torch.uint8).view(dtype) if count else torch.empty(0, dtype=dtype)
        tensors[f"t{number}"] = whole.view(shape)
    writer = write(folder, limit, **tensors)
    found = mapped(folder, writer)
    assert set(os.listdir(folder)) == set(writer.files)
    for name, tensor in tensors.items():
        assert equal(found[name][:] if tensor.ndim else found[name], tensor)
    for record in writer.tensors.values():
        for file, offset, _ in record["pieces"]:
            assert offset % chunks.ALIGNMENT == 0
            assert offset <= writer.files[file]["size"]


def test_a_view_is_written_as_its_values(tmp_path: Path):
    base = torch.arange(24.0).view(4, 6)
    views = {
        "columns": base[:, 1:3],
        "transposed": base.T,
        "reversed": base.flip(0),
        "expanded": base[:1].expand(5, 6),
        "steps": base[::2],
        "conjugate": torch.tensor([1 + 2j, 3 - 1j]).conj(),
        "negative": torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
        "gradient": torch.ones(3, requires_grad=True),
    }
    found = mapped(tmp_path, write(tmp_path, 64, **views))
    for name, view in views.items():
        assert found[name][:].tolist() == view.tolist()


def test_the_number_of_files_is_bounded():
    """A mapped file keeps a descriptor open, of which a process commonly has 1024."""
    assert chunk_bytes(1) == chunk_bytes(2**29) == 64 * 2**20
    assert chunk_bytes(2**30) == 128 * 2**20
    assert chunk_bytes(2**31) == chunk_bytes(2**34) == 256 * 2**20
    for total in (10**10, 10**12, 10**14):
        assert total / chunk_bytes(total) <= 256


@ignore_complex32
@pytest.mark.parametrize("dtype", [torch.int64, *EXOTIC], ids=str)
@given(
    sizes=st.lists(st.integers(0, 5), min_size=1, max_size=5),
    picked=st.lists(st.integers(0, 10**6), max_size=8),
    bounds=st.tuples(*[st.one_of(st.none(), st.integers(-30, 30))] * 3),
)
@settings(max_examples=40, deadline=None)
def test_rows_in_pieces_read_like_one_tensor(
    dtype: torch.dtype, sizes: list[int], picked: list[int], bounds: Any
):
    raw = (torch.arange(sum(sizes) * 2 * dtype.itemsize) % 2).to(torch.uint8)
    whole = raw.view(dtype).view(-1, 2) if raw.numel() else torch.empty(0, 2, dtype=dtype)
    pieces = RowChunks(list(whole.split(sizes)))
    assert (len(pieces), pieces.shape, pieces.dtype) == (len(whole), whole.shape, dtype)
    assert pieces.device == whole.device
    assert equal(pieces[:], whole)
    start, stop, step = bounds
    cut = slice(start, stop, step if step and step > 0 else None)
    assert equal(pieces[cut], whole[cut])
    if len(whole):
        index = torch.tensor([p % len(whole) for p in picked], dtype=torch.int64)
        expected = [whole[i] for i in index.tolist()]
        assert equal(pieces[index], torch.stack(expected) if expected else whole[:0])
        for row in range(len(whole)):
            assert equal(pieces[row], whole[row])


@ignore_complex32
@pytest.mark.parametrize("limit", [1, 300])
@pytest.mark.parametrize(
    "make",
    [
        lambda size: LazyTensorStorage(size),
        lambda size: LazyTensorStorage(size, device="auto"),
        lambda size: LazyMemmapStorage(size),
        lambda size: ListStorage(size),
    ],
    ids=["tensor", "auto", "memmap", "list"],
)
@pytest.mark.filterwarnings("ignore:.*left out")
def test_a_checkpoint_of_many_files_goes_into_every_storage_and_capacity(
    limit: int, make: Any, monkeypatch: Any, tmp_path: Path
):
    monkeypatch.setattr(chunks, "_CHUNK_BYTES", limit)
    monkeypatch.setattr(dirty_chunks, "_LEAST_BYTES", 1)
    raw = (torch.arange(40 * 2) % 100).to(torch.uint8).view(40, 2)
    columns = {str(dtype): raw.view(dtype) for dtype in (torch.bfloat16, torch.uint16)}
    columns["float8"] = raw.view(torch.float8_e4m3fn)
    data = TensorDict({"id": torch.arange(40), "empty": torch.zeros(40, 0), **columns}, [40])
    source = ReplayBuffer(storage=LazyTensorStorage(30))
    source.extend(data)
    source.dumps(tmp_path)
    assert len(list(tmp_path.glob("data-*"))) > (1 if limit == 300 else 4)
    for capacity in (30, 50, 7):
        loaded = ReplayBuffer(storage=make(capacity))
        loaded.loads(tmp_path)
        ids = {30: [*range(30, 40), *range(10, 30)], 50: [*range(10, 40)], 7: [*range(33, 40)]}
        assert [int(loaded.storage[i]["id"]) for i in range(len(loaded))] == ids[capacity]
        for slot, number in enumerate(ids[capacity]):
            for key in columns:
                assert equal(loaded.storage[slot][key], data[key][number])


@given(
    row=st.integers(1, 150),
    count=st.integers(1, 40),
    limit=st.integers(1, 400),
    small=st.integers(0, 9),
)
@settings(max_examples=200, deadline=None)
def test_pieces_of_a_large_tensor_keep_their_offset_within_a_page(
    row: int, count: int, limit: int, small: int, tmp_path_factory: Any
):
    page, paged = 64, 128
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "PAGE_BYTES", page)
        patch.setattr(chunks, "PAGED_BYTES", paged)
        tensors = {
            "before": torch.arange(small, dtype=torch.uint8),
            "large": torch.arange(row * count).to(torch.uint8).view(count, row),
        }
        folder = tmp_path_factory.mktemp("chunks")
        writer = write(folder, limit, **tensors)
    found = mapped(folder, writer)
    assert all(equal(found[name][:], tensor) for name, tensor in tensors.items())
    if row * count < paged:
        return
    start = 0
    whole = limit >= row * page  # a piece may be of as many rows as make whole pages
    for _, offset, rows in writer.tensors["large"]["pieces"]:
        assert offset % page == start * row % page
        assert not whole or start * row % page == 0
        start += rows
