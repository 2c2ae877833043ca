"""A checkpoint made by several saves: damage of any file is found, and nothing outside is read."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    ConsumingSampler,
    LaneWriter,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    NStep,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    SliceSamplerWithoutReplacement,
    StalenessAwareSampler,
    Storage,
    TensorDictMaxValueWriter,
    TensorStorage,
    native,
)
from replaykit.checkpoint import (
    Checkpoint,
    checkpoint_versions,
    chunks,
    dirty_chunks,
    reader,
    save_checkpoint,
)
from replaykit.errors import CheckpointError
from tests.checkpoint.building import flipped
from tests.checkpoint.values import plain, state_of
from tests.support.refusals import refuses

ROWS = 30


def new() -> ReplayBuffer:
    return ReplayBuffer(
        storage=LazyTensorStorage(ROWS),
        sampler=PrioritizedSampler(alpha=0.7, beta=0.5),
        generator=torch.Generator().manual_seed(0),
        batch_size=2,
    )


def extend(buffer: ReplayBuffer, start: int, count: int) -> None:
    number = torch.arange(start, start + count)
    done = (number % 4 == 3)[:, None]
    rows = {"id": number, "x": number[:, None].double().repeat(1, 9), "next": {"done": done}}
    buffer.extend(TensorDict(rows, [count]))


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Path, dict[int, Any]]:
    """A directory with three checkpoints that share files, and their states."""
    monkeypatch.setattr(dirty_chunks, "_LEAST_BYTES", 200)
    buffer, states = new(), {}
    extend(buffer, 0, ROWS)
    for version in (1, 2, 3):
        extend(buffer, 100 * version, 5)
        buffer.update_priority(torch.tensor([3, 17]), torch.tensor([0.5, 2.0 * version]))
        buffer.dumps(tmp_path / "good", keep=3)
        states[version] = state_of(buffer)
    assert checkpoint_versions(tmp_path / "good") == [1, 2, 3]
    return tmp_path / "good", states


def named_by(folder: Path) -> dict[int, set[str]]:
    """The files of each version, its manifest among them."""
    found = {}
    for version in (1, 2, 3):
        name = "manifest.json" if version == 3 else f"manifest-{version}.json"
        found[version] = {name, *json.loads((folder / name).read_text())["files"]}
    return found


def damaged_copies(good: Path, bad: Path, name: str) -> Iterator[bytes | None]:
    """Copies of a directory in which a file is gone (None), cut, longer, or has a bit flipped."""
    content = (good / name).read_bytes()
    damages: list[bytes | None] = [None, b"", content[: len(content) // 2], content[:-1]]
    damages += [content + b"\0", *flipped(content, max(1, len(content) // 12))]
    for damage in damages:
        shutil.rmtree(bad, ignore_errors=True)
        shutil.copytree(good, bad)
        (bad / name).unlink()
        if damage is not None:
            (bad / name).write_bytes(damage)
        yield damage


@pytest.mark.pitfall("CK2")
def test_every_version_names_its_damaged_file_and_no_other_one(
    three: tuple[Path, dict[int, Any]], tmp_path: Path
):
    """CK2, C6: each file gone, cut, longer, or with one bit flipped; what shares it, is told."""
    good, states = three
    files = named_by(good)
    assert files[1] & files[2] & files[3], "they share rows"
    live = new()
    extend(live, 7, 9)
    before = state_of(live)
    bad = tmp_path / "bad"
    for name in sorted(set.union(*files.values())):
        for damage in damaged_copies(good, bad, name):
            for version in (1, 2, 3):
                if name in files[version]:
                    gone = damage is None and name.startswith("manifest")
                    expected = FileNotFoundError if gone else CheckpointError
                    # Another version's number may have come into a manifest: it is named too.
                    refuses(expected, "no |bad" if gone else name, live.loads, bad, version=version)
                    assert state_of(live) == before
                elif name != "manifest.json":
                    other = new()
                    other.loads(bad, version=version)
                    assert state_of(other) == states[version]


def test_sizes_are_compared_also_without_checksums(three: tuple[Path, Any]):
    folder, states = three
    loaded = new()
    loaded.loads(folder, verify=False)
    assert state_of(loaded) == states[3]
    for file in folder.glob("data-*"):
        content = file.read_bytes()
        file.write_bytes(content[:-1])
        version = max(v for v, names in named_by(folder).items() if file.name in names)
        refuses(CheckpointError, file.name, loaded.loads, folder, version=version, verify=False)
        file.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "version"), [("data-", None), ("manifest.json", None), ("manifest-2.json", 2)]
)
def test_links_pipes_and_directories_are_not_read(
    three: tuple[Path, Any], tmp_path: Path, name: str, version: int | None
):
    """Only files inside of the directory are read, whatever else has the name of one."""
    folder, _ = three
    name = next(each for each in sorted(named_by(folder)[version or 3]) if each.startswith(name))
    file, outside = folder / name, tmp_path / "outside"
    shutil.move(file, outside)
    makes: list[Callable[[], object]] = [
        lambda: file.symlink_to(outside),
        lambda: file.mkdir(),
        lambda: os.mkfifo(file),  # would wait for a writer for ever
    ]
    for make in makes:
        make()
        loaded = new()
        refuses(
            CheckpointError, rf"{name} is damaged: it is", loaded.loads, folder, version=version
        )
        assert not len(loaded)
        (file.rmdir if file.is_dir() else file.unlink)()


def test_a_save_puts_a_manifest_in_the_place_of_a_pipe(three: tuple[Path, Any]):
    folder, states = three
    (folder / "manifest.json").unlink()
    os.mkfifo(folder / "manifest.json")
    buffer = new()
    buffer.loads(folder, version=1)
    extend(buffer, 400, 5)
    buffer.dumps(folder, keep=4)
    for number, state in ((None, state_of(buffer)), (1, states[1])):
        again = new()
        again.loads(folder, version=number)
        assert state_of(again) == state


def test_save_after_the_highest_version_is_refused(tmp_path: Path, forge: Any):
    buffer = new()
    extend(buffer, 0, ROWS)
    buffer.dumps(tmp_path)
    forge(tmp_path, lambda manifest: manifest.update(version=10**15 - 1))
    before = sorted(os.listdir(tmp_path))
    refuses(CheckpointError, "choose another directory", buffer.dumps, tmp_path)
    assert sorted(os.listdir(tmp_path)) == before
    new().loads(tmp_path)


@pytest.mark.parametrize(
    "text", ["[]", "null", "5", '"x"', "[{}]", "{}", '{"format": "x"}'], ids=lambda text: text
)
def test_foreign_manifest_is_not_overwritten(tmp_path: Path, text: str):
    buffer = new()
    extend(buffer, 0, ROWS)
    (tmp_path / "manifest.json").write_text(text)
    for save in (buffer.dumps, buffer.sampler.dumps, buffer.writer.dumps, buffer.storage.dumps):
        refuses(CheckpointError, r"manifest\.json is not that of a checkpoint", save, tmp_path)
    assert (tmp_path / "manifest.json").read_text() == text
    assert os.listdir(tmp_path) == ["manifest.json"]


def test_an_empty_path_is_not_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    buffer = new()
    extend(buffer, 0, ROWS)
    for save in (buffer.dumps, buffer.sampler.dumps, buffer.writer.dumps, buffer.storage.dumps):
        refuses(ValueError, "expected path as that of a directory, got ''", save, "")
    assert not os.listdir(tmp_path)
    buffer.dumps(".")
    assert checkpoint_versions(tmp_path) == [1]


SLOTS = 24


def rows(first: int, count: int) -> TensorDict:
    number = torch.arange(first, first + count)
    x = number[:, None].float()
    following = {"x": x + 1, "done": (number % 5 == 4)[:, None], "reward": x / 3}
    leaves = {"number": number, "env": number % 3, "age": -number, "x": x, "next": following}
    return TensorDict(leaves, [count])


def buffer(storage: Storage, **options: Any) -> ReplayBuffer:
    generator = torch.Generator().manual_seed(0)
    return ReplayBuffer(storage=storage, batch_size=4, generator=generator, **options)


def stored(**options: Any) -> LazyTensorStorage:
    return LazyTensorStorage(SLOTS, **options)


def members() -> ReplayBufferEnsemble:
    one = buffer(stored(), sampler=PrioritizedSampler(alpha=0.7, beta=0.5))
    inner = ReplayBufferEnsemble(buffer(ListStorage(SLOTS)))
    return ReplayBufferEnsemble(one, inner, batch_size=4, generator=torch.Generator())


KINDS: dict[str, Callable[[], Any]] = {
    "list": lambda: buffer(ListStorage(SLOTS)),
    "lazy stack": lambda: buffer(LazyStackStorage(SLOTS)),
    "wrapped": lambda: buffer(TensorStorage(rows(900, SLOTS))),
    "in files": lambda: buffer(LazyMemmapStorage(SLOTS), sampler=SamplerWithoutReplacement()),
    "streams": lambda: buffer(stored(lane_key="env")),
    "rings": lambda: buffer(stored(lane_key="env"), writer=LaneWriter(length=8)),
    "stored once": lambda: buffer(stored(dedup_next=True, on_mismatch="dense")),
    "best": lambda: buffer(stored(), writer=TensorDictMaxValueWriter(rank_key="x")),
    "prioritized slices": lambda: buffer(
        stored(), sampler=PrioritizedSliceSampler(alpha=0.7, beta=0.5, slice_len=2)
    ),
    "episodes": lambda: buffer(stored(), sampler=SliceSamplerWithoutReplacement(slice_len=2)),
    "consuming": lambda: buffer(stored(), sampler=ConsumingSampler(3)),
    "staleness": lambda: buffer(stored(), sampler=StalenessAwareSampler(version_key="age")),
    "held back": lambda: buffer(stored(), transform=NStep(3, 0.5, when="write")),
    "made ahead": lambda: buffer(stored(), prefetch=2),
    "shared": lambda: buffer(
        stored(), sampler=PrioritizedSampler(alpha=0.7, beta=0.5), shared=True
    ),
    "ensemble": members,
}


def fill(found: Any, first: int, count: int) -> None:
    if isinstance(found, ReplayBufferEnsemble):
        for member in found.members:
            fill(member, first, count)
        return
    for start in range(first, first + count, 9):
        found.extend(rows(start, min(9, first + count - start)))


@pytest.mark.pitfall("CK2")
@pytest.mark.parametrize("kind", KINDS)
def test_load_names_the_damaged_file_of_every_kind_of_buffer(kind: str, tmp_path: Path) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    source, live = KINDS[kind](), KINDS[kind]()
    fill(source, 0, 31)
    source.sample()
    source.dumps(good)
    fill(live, 400, 7)
    before = plain(live.state_dict())
    names = sorted({*os.listdir(good)} - {".lock"})
    assert len(names) >= 2
    for name in names:
        for damage in damaged_copies(good, bad, name):
            gone = damage is None and name == "manifest.json"
            error, match = (FileNotFoundError, "bad") if gone else (CheckpointError, name)
            refuses(error, match, live.loads, bad)
        assert plain(live.state_dict()) == before
    live.loads(good)
    assert plain(live.sample().to_dict()) == plain(source.sample().to_dict())
    for one in (source, live):
        one.shutdown()


def test_copied_tensors_do_not_wait_for_checks_of_earlier_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Priorities lie behind all rows, and are wanted before them."""
    monkeypatch.setattr(chunks, "_CHUNK_BYTES", 64)
    save_checkpoint(tmp_path, {"a": {"t": torch.arange(400)}, "b": {"t": torch.arange(3)}}, {})
    assert len(list(tmp_path.glob("*.bin"))) > 5
    continues = threading.Event()

    def crc32(data: Any, value: int = 0) -> int:
        if threading.current_thread() is not threading.main_thread():
            assert continues.wait(20)
        return native.crc32(data, value)

    monkeypatch.setattr(reader, "crc32", crc32)
    with Checkpoint(tmp_path) as saved:
        saved.verify(wait=False)
        assert saved.part("b")["t"].tolist() == [0, 1, 2]
        continues.set()
        saved.verify()
    last = max(tmp_path.glob("*.bin"))
    last.write_bytes(last.read_bytes()[:-1] + b"\1")
    with Checkpoint(tmp_path) as saved:
        continues.clear()
        saved.verify(wait=False)
        refuses(CheckpointError, last.name, saved.part, "b")
        continues.set()
        refuses(CheckpointError, last.name, saved.verify)
