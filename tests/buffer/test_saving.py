"""``dumps`` and ``loads``: going on as before, hooks, independence, what lies on disk."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import replaykit
from replaykit import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ReplayBuffer,
    RoundRobinWriter,
    Storage,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
    TensorStorage,
)
from replaykit.checkpoint import FORMAT_VERSION
from replaykit.errors import CheckpointError
from tests.buffer.building import KINDS, buffer_of, check_whole, rows, same, unchanged
from tests.support.refusals import refuses

# -- going on as before ---------------------------------------------------------------------------


@pytest.mark.pitfall("RD3")
def test_undelivered_draws_return_to_the_sampler_as_anchors(tmp_path: Path):
    """Where a sample unit expands them, batches of another size are drawn from the anchors."""

    class Pairs(replaykit.SampleUnit):
        def expand(self, index: torch.Tensor, info: Any, storage: Storage) -> Any:
            return index.repeat_interleave(2), info

    options = {"sampler": "ordered", "sample_unit": Pairs()}
    buffer = buffer_of(filled=10, batch_size=2, prefetch=2, **options)
    buffer.sample()
    buffer.dumps(tmp_path)
    for size, expected in ((2, [2, 2, 3, 3]), (3, [2, 2, 3, 3, 4, 4])):
        loaded = buffer_of(batch_size=size, **options)
        loaded.loads(tmp_path)
        assert loaded.sample()["id"].tolist() == expected


def test_load_creates_a_missing_generator(tmp_path: Path):
    buffer = buffer_of(filled=9, seed=5)
    buffer.dumps(tmp_path / "seeded")
    loaded = buffer_of()
    loaded.loads(tmp_path / "seeded")
    generator = torch.Generator().manual_seed(77)
    given_one = buffer_of(generator=generator)
    given_one.loads(tmp_path / "seeded")
    expected = buffer.sample(5)["id"].tolist()
    assert loaded.sample(5)["id"].tolist() == given_one.sample(5)["id"].tolist() == expected
    assert generator.initial_seed() == 5  # the user's own goes on in the saved state
    buffer_of(filled=9).dumps(tmp_path / "without")
    state = generator.get_state()
    given_one.loads(tmp_path / "without")
    assert torch.equal(generator.get_state(), state)


@pytest.mark.pitfall("IF1")
def test_buffers_of_equal_components_load_each_other(tmp_path: Path):
    """8.1: the name of the class does not matter, nor which of the ring writers it has."""
    named = TensorDictReplayBuffer(
        storage=LazyTensorStorage(5), writer=TensorDictRoundRobinWriter(), batch_size=2
    )
    named.extend(rows(7))
    named.save(tmp_path)
    plain = ReplayBuffer(storage=LazyTensorStorage(5), writer=RoundRobinWriter())
    plain.load(tmp_path)
    assert plain["id"].tolist() == named["id"].tolist()
    named.dump(tmp_path)
    assert plain.batch_size is None


# -- hooks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["list", "tensor", "lanes"])
def test_hooks_map_copies_in_the_order_they_came(kind: str, tmp_path: Path):
    seen: list[Any] = []

    def make() -> ReplayBuffer:
        if kind != "lanes":
            return buffer_of(kind)
        return ReplayBuffer(storage=LazyTensorStorage(10, ndim=2))

    buffer = make()
    ids = TensorDict({"id": torch.arange(6).view(2, 3)}, [2, 3])
    buffer.extend(ids if kind == "lanes" else rows(6))
    before, stored = buffer.state_dict(), buffer["id"].clone()

    def apply(data: Any, function: Any) -> Any:
        if isinstance(data, list):
            return [apply(row, function) for row in data]
        data.set_("id", function(data["id"]))  # in place: the hook has a copy
        return data

    def double(data: Any, path: Any = None) -> Any:
        seen.append(("double", path))
        return apply(data, lambda x: x * 2)

    def plus(data: Any, **keywords: Any) -> Any:
        seen.append(("plus", sorted(keywords)))
        return apply(data, lambda x: x + 1)

    buffer.register_save_hook(double)
    buffer.register_save_hook(plus)
    buffer.dumps(tmp_path)
    assert seen == [("double", tmp_path), ("plus", ["path"])]
    same(before, buffer.state_dict())
    unhooked = make()
    unhooked.loads(tmp_path)
    assert torch.equal(unhooked["id"], stored * 2 + 1)

    outs: list[Any] = []
    loaded = make()
    loaded.register_load_hook(lambda data: apply(data, lambda x: x - 1))
    loaded.register_load_hook(
        lambda data, out: (outs.append(out), apply(data, lambda x: x // 2))[1]
    )
    for _ in range(2):
        loaded.loads(tmp_path)
        assert torch.equal(loaded["id"], stored)
    assert outs[0] is None
    apply(outs[1], lambda x: x * 0)  # a copy too
    assert torch.equal(loaded["id"], stored)
    refuses(TypeError, "hook", buffer.register_save_hook, "hook")


def test_a_hook_that_drops_rows_needs_the_hook_that_undoes_it(tmp_path: Path):
    buffer = buffer_of(filled=6)
    buffer.register_save_hook(lambda data: data[::2])
    buffer.dumps(tmp_path)
    loaded = buffer_of(filled=2)
    unchanged(loaded, ValueError, lambda: loaded.loads(tmp_path), "load hook")
    loaded.register_load_hook(lambda data: torch.cat([data, data]))
    loaded.loads(tmp_path)
    assert loaded["id"].tolist() == [0, 2, 4, 0, 2, 4]


# -- independence ---------------------------------------------------------------------------------


@pytest.mark.pitfall("CK6")
@pytest.mark.pitfall("CK16")
@pytest.mark.parametrize("kind", KINDS)
def test_a_loaded_buffer_does_not_use_the_checkpoint(kind: str, tmp_path: Path):
    """CK6, CK16, C11: deleting it, replacing it and writing on change nothing on either side."""
    path = tmp_path / "saved"
    buffer = buffer_of(kind, filled=10)
    buffer.dumps(path)
    loaded = buffer_of(kind)
    loaded.loads(path)
    mapped = Path("/proc/self/maps")
    if mapped.exists():
        assert str(path) not in mapped.read_text()
    loaded.extend(rows(10, 50))
    loaded[0] = rows(1, 77)[0]
    again = buffer_of(kind)
    again.loads(path)
    assert check_whole(again[:]) == list(range(10))
    for _ in range(3):
        again.dumps(path)
        again.loads(path)
    shutil.rmtree(path)
    assert check_whole(again[:]) == list(range(10))
    assert check_whole(loaded[:]) == [77, *range(51, 60)]


@pytest.mark.pitfall("CK14")
@pytest.mark.parametrize("where", [".", "below", ".."])
def test_training_does_not_change_a_checkpoint_near_scratch_files(where: str, tmp_path: Path):
    """CK14: training goes on in the scratch files, wherever the checkpoint lies."""
    scratch = tmp_path / "parent" / "scratch"
    buffer = ReplayBuffer(storage=LazyMemmapStorage(6, scratch_dir=scratch))
    buffer.extend(rows(6))
    buffer.dumps(scratch / where)
    buffer.extend(rows(6, 50))
    assert check_whole(buffer[:]) == list(range(50, 56))
    loaded = buffer_of("tensor", 6)
    loaded.loads(scratch / where)
    assert check_whole(loaded[:]) == list(range(6))


@pytest.mark.pitfall("CK8")
@pytest.mark.parametrize("kind", ["list", "tensor", "memmap"])
def test_the_size_on_disk_does_not_depend_on_the_capacity(kind: str, tmp_path: Path):
    """Ten rows take kilobytes, of a million slots too."""
    sizes = []
    for capacity in (10, 10**6):
        path = tmp_path / str(capacity)
        buffer_of(kind, capacity, filled=10, sampler="without").dumps(path)
        sizes.append(sum(file.stat().st_size for file in path.iterdir()))
    assert sizes[1] < min(sizes[0] + 200, 10_000)


@pytest.mark.pitfall("CK10")
def test_manifest_describes_the_saved_buffer(tmp_path: Path):
    """CK10, C4: format, version, components, schema, counters, files with size and checksum."""
    buffer = buffer_of("tensor", 8, sampler="without", batch_size=3, seed=0)
    buffer.extend(rows(11))
    buffer.dumps(tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["format"] == "replaykit-checkpoint"
    assert manifest["format_version"] == FORMAT_VERSION
    assert manifest["library_version"] == replaykit.__version__
    assert manifest["components"] == {
        "buffer": "ReplayBuffer",
        "storage": "LazyTensorStorage",
        "sampler": "SamplerWithoutReplacement",
        "writer": "RoundRobinWriter",
    }
    keys = [child[0] for child in manifest["schema"]["children"]]
    assert keys == ["id", "observation", "pixels", "next"]
    numbers = ("ndim", "lanes", "len", "max_size", "cursor", "write_count", "batch_size")
    assert [manifest[name] for name in numbers] == [1, [], 8, 8, 3, 11, 3]
    assert manifest["consume_after_n_samples"] is None
    assert manifest["parts"]["generator"]["device"] == "cpu"
    for name, record in manifest["files"].items():
        assert (tmp_path / name).stat().st_size == record["size"]
        assert set(record) == {"size", "crc32"}
    named = {"manifest.json", ".lock", *manifest["files"]}
    assert set(os.listdir(tmp_path)) <= named


def test_a_wrapped_tensor_takes_rows_of_its_size(tmp_path: Path):
    buffer_of("list", 6, filled=4).dumps(tmp_path / "four")
    data = rows(6, 50)
    wrapped = ReplayBuffer(storage=TensorStorage(data))
    wrapped.loads(tmp_path / "four")
    assert (len(wrapped), wrapped["id"].tolist()) == (4, [0, 1, 2, 3])
    assert data["id"].tolist() == [0, 1, 2, 3, 54, 55]


def test_load_without_a_checkpoint_changes_nothing(tmp_path: Path):
    buffer = buffer_of(filled=3)
    unchanged(buffer, FileNotFoundError, lambda: buffer.loads(tmp_path / "none"), "none")
    unchanged(buffer, FileNotFoundError, lambda: buffer.loads(tmp_path), "no checkpoint")
    (tmp_path / "file").write_text("text")
    unchanged(buffer, FileNotFoundError, lambda: buffer.loads(tmp_path / "file"), "directory")
    unchanged(buffer, OSError, lambda: buffer.dumps(tmp_path / "file"))
    (tmp_path / "manifest.json").write_text('{"name": "another tool"}')
    unchanged(buffer, CheckpointError, lambda: buffer.loads(tmp_path), "not a checkpoint")
    unchanged(buffer, CheckpointError, lambda: buffer.dumps(tmp_path), "another directory")
    assert json.loads((tmp_path / "manifest.json").read_text()) == {"name": "another tool"}


@pytest.mark.parametrize("kind", ["list", "lazy_stack"])
def test_rows_with_text_are_saved(kind: str, tmp_path: Path):
    """What a list storage holds and JSON can say, it saves: an instruction beside the pixels."""
    buffer = buffer_of(kind)
    batch = TensorDict(
        {
            "x": torch.arange(3.0),
            "text": ["open the door", "", "\u00e9"],
            "info": TensorDict({"robot": "franka"}, [3]),
        },
        [3],
    )
    buffer.extend(batch)
    buffer.dumps(tmp_path)
    other = buffer_of(kind)
    other.loads(tmp_path)
    rows = list(other.storage)
    assert [row["text"] for row in rows] == ["open the door", "", "\u00e9"]
    assert [row["info", "robot"] for row in rows] == ["franka"] * 3
    assert [row["x"].item() for row in rows] == [0, 1, 2]
    assert {row.batch_size for row in rows} == {torch.Size([])}
