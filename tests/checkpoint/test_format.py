"""What earlier versions of the package wrote is still read."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
)
from replaykit.checkpoint import FORMAT_VERSION, checkpoint_versions
from replaykit.checkpoint.dirty_chunks import RECORDS, Changes, TrackedTensor
from replaykit.errors import CheckpointError
from tests.checkpoint import make_parts
from tests.checkpoint.building import make, save
from tests.checkpoint.values import plain
from tests.support.refusals import refuses

FIXTURES = Path(__file__).parent / "fixtures"


def new(storage: Any) -> ReplayBuffer:
    sampler = PrioritizedSampler(alpha=0.7, beta=0.5)
    return ReplayBuffer(storage=storage, sampler=sampler, batch_size=4)


def check(buffer: ReplayBuffer, newest: int) -> None:
    slots = torch.arange(12)
    number = newest - (newest - slots) % 12  # slot and number of a row are equal modulo 12
    rows = buffer.storage.read(slots)
    assert torch.equal(rows["id"], number)
    assert torch.equal(rows["image"], number.to(torch.uint8)[:, None, None].expand(12, 4, 4))
    assert torch.equal(rows["next", "x"], number[:, None] + 0.5)
    assert torch.equal(rows["next", "done"], (number % 5 == 4)[:, None])
    if "wide" in rows.keys():  # noqa: SIM118
        assert torch.equal(rows["wide"], number.to(torch.uint8)[:, None].expand(12, 600))


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
@pytest.mark.parametrize("format_version", range(1, FORMAT_VERSION + 1))
def test_every_format_version_is_read(format_version: int, storage: Any):
    """Two checkpoints of a ring of 12 rows, of which the newer names chunks of the older again."""
    folder = FIXTURES / f"version-{format_version}"
    assert checkpoint_versions(folder) == [1, 2]
    files = [json.loads((folder / n).read_text()) for n in ("manifest-1.json", "manifest.json")]
    assert [manifest["format_version"] for manifest in files] == [format_version] * 2
    assert set(files[0]["files"]) & set(files[1]["files"])

    older = new(storage(12))
    older.loads(folder, version=1)
    check(older, 14)
    assert older.sampler.state_dict()["_priorities"].tolist() == [*range(1, 13)]

    newer = new(storage(12))
    newer.loads(folder)
    check(newer, 16)
    expected = [1, 2, 3, 12, 9, 6, 7, 0.25, 9, 10, 11, 12]
    assert newer.sampler.state_dict()["_priorities"].tolist() == expected
    assert (newer.write_count, len(newer)) == (17, 12)
    episodes = [episode.index.tolist() for episode in newer.episodes]
    assert episodes == [[5, 6, 7, 8, 9], [10, 11, 0, 1, 2], [3, 4]]
    assert newer.sample()["index"].tolist() == [11, 9, 6, 11]  # the generator's next draw


@pytest.mark.parametrize("format_version", range(2, FORMAT_VERSION + 1))
def test_every_part_of_a_format_version_is_read(format_version: int, tmp_path: Path) -> None:
    """Lists, lanes, streams and their rings, observations stored once, largest values, passes over
    rows and episodes, counts of draws, versions, rows held back, weights: as if saved today."""
    make_parts.filled().dumps(tmp_path)
    found, wanted = make_parts.empty(), make_parts.empty()
    found.loads(FIXTURES / f"parts-{format_version}")
    wanted.loads(tmp_path)
    assert plain(found.state_dict()) == plain(wanted.state_dict())
    for one, other in zip(*map(make_parts.buffers, (found, wanted)), strict=True):
        assert plain(list(one.storage)) == plain(list(other.storage))
        assert plain(one.sample()) == plain(other.sample())


def rows_of_manifest(folder: Path, record: dict[str, Any]) -> np.ndarray[Any, Any]:
    """The rows of a tensor, which lie as ``docs/format.md`` says: piece after piece."""
    dtype = {"bool": "?"}.get(record["dtype"], record["dtype"])
    row = record["shape"][1:]
    pieces = []
    for file, offset, rows in record["pieces"]:
        raw = (folder / file).read_bytes()
        count = rows * int(np.prod(row, dtype=int))
        pieces.append(np.frombuffer(raw, dtype, count, offset).reshape(rows, *row))
    return np.concatenate(pieces)


@pytest.mark.parametrize("lanes", [[], [3]])
def test_rows_lie_in_files_as_documented(tmp_path: Path, lanes: list[int]):
    """Read with NumPy alone: fields of records at their first bytes, padding zero."""
    shape = [20, *lanes]
    data = TensorDict(
        {
            "x": torch.randn(*shape, 3, dtype=torch.float64),
            "flag": torch.rand(*shape, 1) > 0.5,
            "half": torch.randn(*shape, 2, 2).half(),
            "wide": torch.randint(0, 255, (*shape, 700), dtype=torch.uint8),
        },
        shape,
    )
    storage = LazyTensorStorage(data.numel(), ndim=len(shape))
    buffer = ReplayBuffer(storage=storage, sampler=RandomSampler(), dim_extend=0)
    buffer.extend(data)
    assert storage._columns.records is not None
    storage._columns.records[..., 33:] = 255  # as memory that held something else before
    buffer.dumps(tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    (group,) = manifest["parts"]["storage"]["groups"]
    records = rows_of_manifest(tmp_path, manifest["tensors"][group["records"]["name"]])
    assert records.shape[:-1] == tuple(shape)
    covered = np.zeros(records.shape[-1], bool)
    columns = dict(zip(["x", "flag", "half", "wide"], group["columns"], strict=True))
    for key, column in columns.items():
        expected = data[key].numpy()
        if key == "wide":
            found = rows_of_manifest(tmp_path, manifest["tensors"][column["name"]])
        else:
            nbytes = expected[(0,) * len(shape)].nbytes
            part = slice(column["field"], column["field"] + nbytes)
            assert not covered[part].any()
            covered[part] = True
            assert column["dtype"] == str(data[key].dtype).removeprefix("torch.")
            assert column["shape"] == list(data[key].shape[len(shape) :])
            found = np.ascontiguousarray(records[..., part]).view(expected.dtype)
            found = found.reshape(expected.shape)
        assert np.array_equal(found, expected)
    assert covered.sum() == 33
    assert not records[..., ~covered].any()


@pytest.mark.parametrize("mmap", [False, True])
def test_records_of_another_layout_are_read_by_their_offsets(
    tmp_path: Path, mmap: bool, forge: Any
):
    """As a package would write them that lays records out in another order."""
    buffer = ReplayBuffer(storage=LazyTensorStorage(20_000), sampler=RandomSampler())
    data = TensorDict({"a": torch.randn(20_000, 8), "b": torch.randn(20_000, 8)}, [20_000])
    buffer.extend(data)
    buffer.dumps(tmp_path)

    def swap(manifest: dict[str, Any]) -> None:
        columns = manifest["parts"]["storage"]["groups"][0]["columns"]
        columns.reverse()

    forge(tmp_path, swap)
    loaded = ReplayBuffer(storage=LazyTensorStorage(20_000), sampler=RandomSampler())
    loaded.loads(tmp_path, mmap=mmap)
    assert torch.equal(loaded["a"], data["b"])
    assert torch.equal(loaded["b"], data["a"])
    drawn = loaded.storage.read(torch.arange(0, 20_000, 7))
    assert torch.equal(drawn["a"], data["b"][::7])
    loaded.extend(data[:5])
    assert torch.equal(loaded["a"][:5], data["a"][:5])


def test_padding_is_zero_in_chunks_that_were_overwritten_while_they_were_saved() -> None:
    rows = torch.full((4096, 16), 255, dtype=torch.uint8)
    changes = Changes(len(rows), 16)
    tracked = TrackedTensor(rows, changes, RECORDS, padding=3)
    with changes.freeze({"records": tracked}, threading.RLock()) as frozen:
        changes.wrote(0, 10)
        rows[:10] = 7
        found = torch.empty_like(rows)
        frozen.read("records", 0, len(rows), found)
    assert (found[:, :13] == 255).all()
    assert (found[:, 13:] == 0).all()


@pytest.mark.pitfall("CK10")
def test_newer_format_version_is_named_instead_of_damage(forge: Any, tmp_path: Path):
    """CK10: the message says which version wrote it and which one reads it."""
    save(tmp_path)
    forge(tmp_path, lambda m: m.update(format_version=FORMAT_VERSION + 1, library_version="9.9"))
    with pytest.raises(
        RuntimeError, match=rf"version {FORMAT_VERSION + 1}.*up to {FORMAT_VERSION}.*replaykit 9\.9"
    ):
        make().loads(tmp_path)
    # Also where the newer version puts its checksum somewhere else.
    (tmp_path / "manifest.json").write_text(
        json.dumps({"format": "replaykit-checkpoint", "format_version": 7})
    )
    refuses(CheckpointError, "version 7", make().loads, tmp_path)
