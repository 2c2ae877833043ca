"""Saving again writes what has changed, and what is there is always the buffer as it was."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    RoundRobinWriter,
    TensorDictPrioritizedReplayBuffer,
    TensorStorage,
)
from replaykit.checkpoint import checkpoint_writer, chunks, dirty_chunks
from tests.checkpoint.values import plain, state_of
from tests.support.refusals import refuses

CAPACITY = 60


def rows(start: int, count: int, lanes: tuple[int, ...] = ()) -> TensorDict:
    """Rows that go on from each other: their number is in every leaf."""
    number = torch.arange(start, start + count)
    for size in lanes:
        number = number[None].repeat(size, *[1] * number.ndim)
    shape = number.shape
    return TensorDict(
        {
            "x": number[..., None].float().repeat(*[1] * len(shape), 3),
            "wide": number[..., None].double().repeat(*[1] * len(shape), 100),
            "env": number % 3,
            "next": {
                "x": number[..., None].float().repeat(*[1] * len(shape), 3) + 1,
                "reward": number[..., None].float(),
                "done": (number % 7 == 6)[..., None],
            },
        },
        shape,
    )


LONGER = [pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 30)]
STORAGES: dict[str, Callable[[Path], Any]] = {
    "tensor": lambda folder: LazyTensorStorage(CAPACITY),
    "memmap": lambda folder: LazyMemmapStorage(CAPACITY, scratch_dir=folder / "scratch"),
    "recover": lambda folder: LazyMemmapStorage(CAPACITY, scratch_dir=folder / "r", recover=True),
    "once": lambda folder: LazyTensorStorage(CAPACITY, dedup_next=["x"], on_mismatch="dense"),
    "streams": lambda folder: LazyTensorStorage(
        CAPACITY, dedup_next=["x"], on_mismatch="dense", lane_key="env"
    ),
    "lanes": lambda folder: LazyTensorStorage(2 * CAPACITY, ndim=2),
}


def make(storage: Any, seed: int = 0) -> ReplayBuffer:
    return ReplayBuffer(
        storage=storage,
        sampler=PrioritizedSampler(alpha=0.7, beta=0.5),
        writer=RoundRobinWriter(track_generations=True),
        generator=torch.Generator().manual_seed(seed),
        batch_size=4,
    )


def small_chunks(monkeypatch: pytest.MonkeyPatch, most: int = 4096) -> None:
    monkeypatch.setattr(dirty_chunks, "_LEAST_BYTES", 1)
    monkeypatch.setattr(dirty_chunks, "_MOST_CHUNKS", most)


class Player:
    """Does to a buffer, at random, whatever changes it."""

    def __init__(self, buffer: ReplayBuffer, chance: random.Random, lanes: tuple[int, ...]) -> None:
        self.buffer, self.chance, self.lanes = buffer, chance, lanes
        self.number = 0
        self.views: list[Any] = []

    def step(self) -> None:
        moves = [self.extend, self.extend, self.priorities]
        if len(self.buffer):
            moves += [self.edit, self.edit_column, self.patch, self.view, self.write_view]
            moves += [self.set_rows, self.sample, self.cut]
            if self.chance.random() < 0.1:
                moves.append(self.empty)
            if self.buffer.storage.recovery is None:
                moves.append(self.add_column)
        self.chance.choice(moves)()

    def fresh(self, count: int) -> TensorDict:
        self.number += count
        return rows(self.number - count, count, self.lanes)

    def extend(self) -> None:
        self.buffer.extend(self.fresh(self.chance.choice([1, 2, 5, 8, 30, CAPACITY + 3])))

    def steps(self) -> int:
        return self.buffer.storage.ledger.length

    def priorities(self) -> None:
        if not len(self.buffer):
            return
        batch = self.buffer.sample()
        self.buffer.update_priority(batch["index"], torch.rand(len(batch)) + 0.1)

    def edit(self) -> None:
        n = self.steps()
        first = self.chance.randrange(n)
        count = self.chance.randrange(1, n - first + 1)
        at: Any = slice(first, first + count)
        if not self.lanes and self.chance.random() < 0.5:
            at = sorted(self.chance.sample(range(n), count))
        self.buffer[(slice(None), at) if self.lanes else at] = self.fresh(count)

    def edit_column(self) -> None:
        key = self.chance.choice([("next", "reward"), "wide", "x", ("next", "x")])
        value = self.buffer[key].clone()
        self.buffer[key] = value + 1

    def add_column(self) -> None:
        size = self.chance.choice([1, 2, 200])
        rows = self.buffer["env"].shape
        self.buffer[self.chance.choice(["a", "next"]), f"added{size}"] = torch.rand(*rows, size)

    def patch(self) -> None:
        batch = self.buffer.sample()
        self.buffer.update_if_present(
            index=batch["index"],
            generation=batch["index_generation"],
            patch={("next", "reward"): torch.rand(len(batch), 1)},
        )

    def view(self) -> None:
        self.views = [] if self.views else [self.buffer[:], self.buffer.storage.column("env")]

    def write_view(self) -> None:
        for view in self.views[:1]:
            view["wide"].mul_(-1)
            view["next", "reward"].add_(0.5)

    def set_rows(self) -> None:
        if self.lanes:
            return
        slots = sorted(self.chance.sample(range(self.steps()), min(3, self.steps())))
        self.buffer.storage.set(
            torch.tensor(slots), self.fresh(len(slots)), set_cursor=self.chance.random() < 0.3
        )

    def sample(self) -> None:
        self.buffer.sample()

    def cut(self) -> None:
        self.buffer.cut()

    def empty(self) -> None:
        self.buffer.empty()


def exchange(one: Path, other: Path) -> None:
    aside = one.with_name("aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


@contextlib.contextmanager
def failing_after(count: int) -> Iterator[None]:
    """The disk is full after some writes, at the latest when all is written."""
    left, append = iter(range(count)), chunks.ChunkWriter._append

    def write(writer: Any, data: Any) -> None:
        if next(left, None) is None:
            raise OSError(errno.ENOSPC, "full")
        append(writer, data)

    def publish(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "full")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks.ChunkWriter, "_append", write)
        patch.setattr(checkpoint_writer, "publish", publish)
        yield


@pytest.mark.parametrize("kind", STORAGES)
@pytest.mark.parametrize("seed", [*range(2), *LONGER])
def test_next_save_contains_every_change(
    kind: str, seed: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """C1, C5: saved in turn into two directories, which change places now and then, after anything
    that changes a buffer; a save that fails leaves what was there, and so do the next ones."""
    chance = random.Random(f"{kind}{seed}")
    torch.manual_seed(seed)
    small_chunks(monkeypatch, chance.choice([7, 4096]))
    monkeypatch.setattr(chunks, "_CHUNK_BYTES", chance.choice([500, 5000, 2**20]))
    lanes = (2,) if kind == "lanes" else ()
    buffer = make(STORAGES[kind](tmp_path))
    player = Player(buffer, chance, lanes)
    folders = [tmp_path / "a", tmp_path / "b"]
    kept: dict[Path, list[tuple[int, Any]]] = {folder: [] for folder in folders}
    for _ in range(25):
        for _ in range(chance.randrange(4)):
            player.step()
        folder, keep = chance.choice(folders), chance.choice([1, 1, 2, 3])
        if chance.random() < 0.15 and all(map(Path.exists, folders)):
            exchange(*folders)
            kept = dict(zip(folders, reversed([kept[each] for each in folders]), strict=True))
        if chance.random() < 0.15:
            with failing_after(chance.randrange(12)), contextlib.suppress(OSError):
                buffer.dumps(folder, keep=keep)
                raise AssertionError("expected a save that fails")
        else:
            buffer.dumps(folder, keep=keep)
            number = kept[folder][-1][0] + 1 if kept[folder] else 1
            kept[folder] = [*kept[folder], (number, state_of(buffer))][-keep:]
        for version, expected in kept[folder]:
            loaded = make(LazyTensorStorage(buffer.storage.max_size, ndim=1 + len(lanes)), 99)
            loaded.loads(folder, version=version)
            assert state_of(loaded) == expected
        if not kept[folder]:
            continue
        manifests = [folder / "manifest.json", *folder.glob("manifest-*.json")]
        assert len(manifests) == len(kept[folder])
        named = {name for file in manifests for name in json.loads(file.read_text())["files"]}
        assert {file.name for file in folder.glob("data-*")} == named
        if chance.random() < 0.15:
            buffer.loads(folder)
            player.views = []


def written(folder: Path, save: Callable[[], None]) -> int:
    """How many bytes a save adds to a directory."""
    before = set(os.listdir(folder)) - {"manifest.json"}
    save()
    return sum(entry.stat().st_size for entry in os.scandir(folder) if entry.name not in before)


def filled(count: int = 20_000) -> ReplayBuffer:
    buffer = TensorDictPrioritizedReplayBuffer(
        alpha=0.7, beta=0.5, storage=LazyTensorStorage(count), batch_size=32
    )
    buffer.extend(rows(0, count))
    return buffer


def test_next_save_of_a_ring_writes_only_new_rows(tmp_path: Path):
    """One per cent of the rows and scattered priorities: at most three per cent of the bytes."""
    buffer, count = filled(), 20_000
    buffer.dumps(tmp_path)
    full = sum(entry.stat().st_size for entry in os.scandir(tmp_path))
    for turn in range(5):
        buffer.extend(rows(count + turn * count // 100, count // 100))
        buffer.update_priority(torch.randint(0, count, (10,)), torch.rand(10) + 0.1)
        assert written(tmp_path, lambda: buffer.dumps(tmp_path)) <= 0.03 * full
    assert written(tmp_path, lambda: buffer.dumps(tmp_path)) < 20_000  # nothing has changed
    buffer.dumps(tmp_path / "other")
    # Each directory goes on from its own last save.
    buffer.extend(rows(0, 10))
    for folder in (tmp_path, tmp_path / "other"):
        assert written(folder, lambda folder=folder: buffer.dumps(folder)) <= 0.03 * full


def test_an_edited_column_is_written_with_its_records_alone(tmp_path: Path):
    buffer = filled()
    buffer.dumps(tmp_path)
    buffer["next", "reward"] = torch.ones(20_000, 1)
    records = buffer.storage._columns.records.nbytes  # small columns lie side by side
    assert records <= written(tmp_path, lambda: buffer.dumps(tmp_path)) < records + 20_000
    buffer[10:20] = rows(0, 10)
    assert written(tmp_path, lambda: buffer.dumps(tmp_path)) < 40_000


@pytest.mark.parametrize(
    "view",
    [
        lambda rb: rb[:]["wide"],
        lambda rb: rb[10:15_000]["wide"].numpy(),
        lambda rb: rb["wide"],
        lambda rb: rb[77]["wide"],
        lambda rb: rb.storage[:]["wide"].untyped_storage(),
        lambda rb: rb.storage.get(slice(5, None))["wide"].T,
        lambda rb: rb.storage.column("wide"),
        lambda rb: rb.storage.flatten()[:]["wide"],
        lambda rb: next(iter(rb.storage))["wide"],
        lambda rb: rb.storage.view_at()["wide"],
    ],
)
def test_save_writes_everything_while_a_view_is_held(view: Any, tmp_path: Path):
    """Through a view anything can be written without a word; when it is gone, nothing can."""
    buffer = filled()
    buffer.dumps(tmp_path)
    held = view(buffer)
    for _ in range(2):
        assert written(tmp_path, lambda: buffer.dumps(tmp_path)) > 10**7
    del held
    assert written(tmp_path, lambda: buffer.dumps(tmp_path)) > 10**7  # what was written last
    if view(filled()) is not None:
        assert written(tmp_path, lambda: buffer.dumps(tmp_path)) < 20_000


def test_wrapped_tensors_are_always_written(tmp_path: Path):
    data = rows(0, 100)
    buffer = ReplayBuffer(storage=TensorStorage(data), sampler=RandomSampler())
    buffer.dumps(tmp_path)
    data["wide"].zero_()
    buffer.dumps(tmp_path)
    loaded = ReplayBuffer(storage=LazyTensorStorage(100))
    loaded.loads(tmp_path)
    assert not loaded["wide"].any()


@pytest.mark.parametrize("harm", ["removed", "cut", "manifest", "replaced"])
def test_save_over_a_damaged_checkpoint_writes_everything(harm: str, tmp_path: Path):
    """What cannot be named again is written; the memory has it all."""
    buffer = filled(2000)
    buffer.dumps(tmp_path)
    file = max(tmp_path.glob("data-*"), key=lambda file: file.stat().st_size)
    if harm == "removed":
        file.unlink()
    elif harm == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    elif harm == "manifest":
        (tmp_path / "manifest.json").write_text("{")
    else:
        filled(7).dumps(tmp_path)
    buffer.extend(rows(0, 3))
    buffer.dumps(tmp_path)
    loaded = filled(2000)
    loaded.loads(tmp_path)
    assert state_of(loaded)["_storage"] == state_of(buffer)["_storage"]


def test_saves_of_scattered_changes_keep_files_few(tmp_path: Path):
    """Files, and bytes that no row needs any more, stay few over many saves."""
    count = 3000
    buffer = ReplayBuffer(storage=LazyTensorStorage(count))
    buffer.extend(rows(0, count))
    buffer.dumps(tmp_path)
    full = sum(entry.stat().st_size for entry in os.scandir(tmp_path))
    chance, total = random.Random(0), 0
    for turn in range(150):
        at = torch.tensor(chance.sample(range(count), 20))
        buffer[at] = rows(turn, 20)
        newest = written(tmp_path, lambda: buffer.dumps(tmp_path))
        total += newest - (tmp_path / "manifest.json").stat().st_size
        entries = list(os.scandir(tmp_path))
        assert len(entries) <= 135
        data = sum(entry.stat().st_size for entry in entries if entry.name.startswith("data-"))
        assert data <= 1.5 * full + 2**20 + newest
    # Each time up to 20 chunks of 8 rows, a nineteenth of the buffer; half of that again for files
    # of which little was still in use.
    assert 2 * full < total <= 12 * full
    loaded = ReplayBuffer(storage=LazyTensorStorage(count))
    loaded.loads(tmp_path)
    assert plain(loaded.storage.state_dict()) == plain(buffer.storage.state_dict())


def test_copy_of_a_buffer_saves_everything(tmp_path: Path):
    """It has memory of its own, of whose changes the other one is not told."""
    import copy

    buffer = filled(100)
    buffer.dumps(tmp_path)
    other = copy.deepcopy(buffer)
    other.extend(rows(1000, 5))
    buffer.extend(rows(2000, 7))
    other.dumps(tmp_path)
    buffer.dumps(tmp_path)
    loaded = filled(100)
    loaded.loads(tmp_path)
    assert state_of(loaded)["_storage"] == state_of(buffer)["_storage"]


class Gate:
    """Stops a save before a file gets its bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.opened = threading.Semaphore(0), threading.Semaphore(0)
        append = chunks.ChunkWriter._append

        def gated(writer: Any, data: Any) -> None:
            self.reached.release()
            assert self.opened.acquire(timeout=60)
            append(writer, data)

        monkeypatch.setattr(chunks.ChunkWriter, "_append", gated)


@pytest.mark.covering(2)
@pytest.mark.parametrize("kind", STORAGES)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("resaved", [False, True])
def test_save_has_the_state_at_the_call_despite_later_changes(
    kind: str, seed: int, resaved: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Between any two blocks that are written the buffer is changed at random, by this thread."""
    chance = random.Random(f"{kind}{seed}{resaved}")
    torch.manual_seed(seed)
    small_chunks(monkeypatch, chance.choice([7, 20, 4096]))
    monkeypatch.setattr(
        "replaykit.checkpoint.checkpoint_writer._BLOCK_BYTES", chance.choice([300, 5000])
    )
    lanes = (2,) if kind == "lanes" else ()
    buffer = make(STORAGES[kind](tmp_path))
    player = Player(buffer, chance, lanes)
    player.view = player.write_view = player.sample  # nobody can be told of what a view changes
    for _ in range(4):
        player.extend()
        player.step()
    if resaved:
        buffer.dumps(tmp_path / "saved")
        for _ in range(3):
            player.step()
    expected = state_of(buffer)
    gate = Gate(monkeypatch)
    thread = threading.Thread(target=buffer.dumps, args=(tmp_path / "saved",))
    thread.start()
    while thread.is_alive():
        if gate.reached.acquire(timeout=0.01):
            if chance.random() < 0.5:
                player.step()
            gate.opened.release()
    thread.join()
    monkeypatch.undo()
    small_chunks(monkeypatch)
    for _ in range(2):
        loaded = make(LazyTensorStorage(buffer.storage.max_size, ndim=1 + len(lanes)), 99)
        loaded.loads(tmp_path / "saved")
        assert state_of(loaded) == expected
        # What was changed meanwhile is in the next one.
        expected = state_of(buffer)
        buffer.dumps(tmp_path / "saved")


def test_others_sample_and_write_while_a_save_waits_for_the_disk(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    buffer = filled(2000)
    gate = Gate(monkeypatch)
    thread = threading.Thread(target=buffer.dumps, args=(tmp_path,))
    thread.start()
    assert gate.reached.acquire(timeout=60)
    for turn in range(10):  # would never come back, were the lock held
        buffer.sample()
        buffer.extend(rows(turn, 8))
        buffer.update_priority(torch.arange(8), torch.ones(8))
    assert thread.is_alive()
    while thread.is_alive():
        gate.opened.release()
    thread.join()


def test_later_state_wins_when_two_saves_run_at_once(tmp_path: Path):
    """C12: also where the earlier one is published last."""
    buffer = make(LazyTensorStorage(1000))
    stop = threading.Event()

    def save() -> None:
        while not stop.is_set():
            least = buffer.write_count
            buffer.dumps(tmp_path)
            loaded = make(LazyTensorStorage(1000))
            loaded.loads(tmp_path)
            assert loaded.write_count >= least

    with ThreadPoolExecutor(3) as pool:
        saving = [pool.submit(save) for _ in range(3)]
        for number in range(150):
            buffer.extend(rows(number, 3))
        stop.set()
        for each in saving:
            each.result(60)


def test_the_last_checkpoints_are_kept(tmp_path: Path):
    from replaykit.checkpoint import checkpoint_versions

    buffer = ReplayBuffer(storage=LazyTensorStorage(10))
    for number in range(6):
        buffer.extend(torch.full((2,), number))
        buffer.dumps(tmp_path, keep=3)
        assert checkpoint_versions(tmp_path) == [*range(max(1, number - 1), number + 2)]
    for version in (4, 5, 6):
        loaded = ReplayBuffer(storage=LazyTensorStorage(10))
        loaded.loads(tmp_path, version=version)
        assert loaded.write_count == 2 * version
    refuses(FileNotFoundError, r"no version 3.*\[4, 5, 6\]", loaded.loads, tmp_path, version=3)
    with pytest.raises(TypeError, match="version"):
        loaded.loads(tmp_path, version="4")  # type: ignore[arg-type]
    for wrong in (0, -1, True, 1.5):
        with pytest.raises(ValueError, match="keep"):
            buffer.dumps(tmp_path, keep=wrong)  # type: ignore[arg-type]
    assert loaded.write_count == 12
    buffer.dumps(tmp_path)
    assert checkpoint_versions(tmp_path) == [7]
    assert not list(tmp_path.glob("manifest-*"))


def test_unreadable_kept_checkpoint_keeps_its_files(tmp_path: Path):
    """What it names is not known: nothing is removed until it is older than what is kept."""
    buffer = ReplayBuffer(storage=LazyTensorStorage(10))
    for number in range(3):
        buffer.extend(torch.full((3,), number))
        buffer.dumps(tmp_path, keep=3)
    good = (tmp_path / "manifest-2.json").read_bytes()
    (tmp_path / "manifest-2.json").write_bytes(good[:-3])
    buffer.dumps(tmp_path, keep=3)
    (tmp_path / "manifest-2.json").write_bytes(good)
    loaded = ReplayBuffer(storage=LazyTensorStorage(10))
    loaded.loads(tmp_path, version=2)
    assert loaded.write_count == 6
    (tmp_path / "manifest-2.json").write_bytes(good[:-3])
    for _ in range(2):
        buffer.dumps(tmp_path, keep=3)
    manifests = [tmp_path / "manifest.json", *tmp_path.glob("manifest-*.json")]
    named = {name for file in manifests for name in json.loads(file.read_text())["files"]}
    assert {file.name for file in tmp_path.glob("data-*")} == named
    (tmp_path / "manifest-9.json").write_bytes((tmp_path / "manifest.json").read_bytes())
    refuses(RuntimeError, r"manifest-9\.json", loaded.loads, tmp_path, version=9)
