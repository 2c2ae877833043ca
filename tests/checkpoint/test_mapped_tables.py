"""``loads(path, mmap=True)``: where positions do not follow from counters, tables stay unread."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    LaneWriter,
    LazyTensorStorage,
    ReplayBuffer,
    ReplayBufferEnsemble,
    RoundRobinWriter,
    SliceSampler,
    TensorDictMaxValueWriter,
)
from replaykit.checkpoint import ReadLater
from replaykit.episodes import EpisodeIndex
from replaykit.errors import CheckpointError
from tests.checkpoint.building import grown, opened_both_ways, overwrite
from tests.support.refusals import refuses

pytestmark = pytest.mark.usefixtures("small_files")

CAPACITY, LANES = 1200, 4


def rows(start: int, count: int) -> TensorDict:
    """Streams that take turns, of which row ``t`` holds ``t``; ranks that rise and fall."""
    number = torch.arange(start, start + count)
    step = (number // LANES).float()[:, None]
    return TensorDict(
        {
            "id": number,
            "lane": number % LANES,
            "obs": step,
            "next": {"obs": step + 1, "reward": step.sin(), "done": (number // LANES % 9 == 8)},
        },
        [count],
    )


class Kind:
    """How a buffer of one kind is made and filled, so that tables do not follow from counters."""

    def __init__(
        self,
        writer: Callable[[], Any],
        then: Callable[[ReplayBuffer], Any] = lambda _: None,
        *,
        slices: bool = True,
        **storage: Any,
    ) -> None:
        self.writer, self.then, self.slices, self.storage = writer, then, slices, storage

    def make(self, capacity: int = CAPACITY, *, slices: bool = False) -> ReplayBuffer:
        return ReplayBuffer(
            storage=LazyTensorStorage(capacity, **self.storage),
            sampler=SliceSampler(slice_len=3, strict_length=False) if slices else None,
            writer=self.writer(),
            batch_size=30,
            generator=torch.Generator().manual_seed(5),
        )

    def filled(self, count: int = CAPACITY + 300, *, slices: bool = False) -> ReplayBuffer:
        buffer = self.make(slices=slices)
        for start in range(0, count, 150):
            buffer.extend(rows(start, min(150, count - start)))
        self.then(buffer)
        return buffer


def _place(buffer: ReplayBuffer) -> None:
    buffer.writer.write_at(torch.tensor([700, 20, 21]), rows(9000, 3))
    buffer.extend(rows(9100, 5))


def _clear(buffer: ReplayBuffer) -> None:
    buffer.empty()
    buffer.extend(rows(4000, CAPACITY - 100))


def _ring() -> RoundRobinWriter:
    return RoundRobinWriter(track_generations=True)


KINDS = {
    "placed": Kind(_ring, _place),
    "cleared": Kind(_ring, _clear),
    "lanes": Kind(lambda: LaneWriter(CAPACITY // LANES, track_generations=True), lane_key="lane"),
    "lanes once": Kind(lambda: LaneWriter(CAPACITY // LANES), lane_key="lane", dedup_next=True),
    "ranked": Kind(lambda: TensorDictMaxValueWriter(), slices=False),
}
TABLES = {  # what can be wrong, and how it is named
    "placed": [("_ledger.positions", "the positions of rows"), ("_ledger.generations", "the gen")],
    "cleared": [("_ledger.generations", "the generations of slots")],
    "lanes": [("_ledger.positions", "the positions of rows"), ("_ledger.generations", "the gen")],
    "ranked": [("_ledger.positions", "the positions of rows"), ("_ranks", "the ranks of rows")],
}


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was read late since it was cleared last."""
    made: list[Any] = []
    original = ReadLater.read
    monkeypatch.setattr(ReadLater, "read", lambda self: made.append(self) or original(self))
    return made


def same(a: ReplayBuffer, b: ReplayBuffer) -> None:
    """Everything that can be asked of rows is the same."""
    assert len(a) == len(b)
    assert a.writer.write_count == b.writer.write_count
    ledgers = [buffer.storage.ledger for buffer in (a, b)]
    assert ledgers[0].cursor == ledgers[1].cursor
    assert ledgers[0].next_position == ledgers[1].next_position
    slots = torch.arange(2 * CAPACITY)
    for asked in ("positions", "generations"):
        found = [getattr(ledger, asked)(slots) for ledger in ledgers]
        assert torch.equal(*found), asked
    assert bool((a[:] == b[:]).all())
    states = [buffer.storage.episode_state() for buffer in (a, b)]
    assert states[0] == states[1]
    indexes = [buffer.storage.episodes for buffer in (a, b)]
    around = [index.around(np.arange(len(a))) for index in indexes]
    assert np.array_equal(np.sort(around[0][2:]), np.sort(around[1][2:]))


def damage(folder: Path, name: str, value: bytes) -> None:
    """Write into a table of the writer's state."""
    overwrite(folder, "writer", *name.split("."), value=value, at=5 * 8)


@pytest.mark.parametrize("slices", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_mapped_load_reads_no_table_and_equals_a_plain_load(
    name: str, slices: bool, tmp_path: Path, read: list[Any]
):
    kind = KINDS[name]
    if slices and not kind.slices:
        return
    buffer = kind.filled(slices=slices)
    buffer.sample()
    buffer.dumps(tmp_path / "saved")
    mapped, plain = opened_both_ways(lambda: kind.make(slices=slices), tmp_path / "saved")
    assert not read
    for turn in range(4):
        batches = [buffer.sample() for buffer in (mapped, plain)]
        assert set(batches[0].keys(True, True)) == set(batches[1].keys(True, True))
        assert bool((batches[0] == batches[1]).all())
        for buffer in (mapped, plain):
            buffer.extend(rows(20_000 + 400 * turn, 400))
    same(mapped, plain)
    mapped.dumps(tmp_path / "saved")
    again = kind.make(slices=slices)
    again.loads(tmp_path / "saved")
    plain.storage.resume(over=True)
    mapped.storage.resume(over=True)
    assert bool((again[:] == plain[:]).all())
    assert torch.equal(
        again.storage.ledger.positions(torch.arange(CAPACITY)),
        plain.storage.ledger.positions(torch.arange(CAPACITY)),
    )


@pytest.mark.parametrize("name", KINDS)
def test_order_of_first_uses_does_not_change_the_buffer(name: str, tmp_path: Path, read: list[Any]):
    kind = KINDS[name]
    kind.filled().dumps(tmp_path)
    plain = kind.make()
    plain.loads(tmp_path)
    asked: list[Callable[[ReplayBuffer], Any]] = [
        lambda rb: rb.storage.ledger.positions(torch.arange(9)),
        lambda rb: rb.storage.ledger.generations(torch.arange(9)),
        lambda rb: rb.storage.episodes,
        lambda rb: rb.storage.indexes.marks,
        lambda rb: rb.state_dict(),
        lambda rb: rb.writer.state_dict(),
    ]
    for ask in asked:
        mapped = kind.make()
        mapped.loads(tmp_path, mmap=True)
        ask(mapped)
        same(mapped, plain)


@pytest.mark.parametrize("name", ["placed", "cleared", "lanes", "ranked"])
def test_buffer_mapped_in_inference_mode_can_be_emptied(name: str, tmp_path: Path):
    kind = KINDS[name]
    kind.filled().dumps(tmp_path)
    mapped, plain = (kind.make() for _ in range(2))
    with torch.inference_mode():
        mapped.loads(tmp_path, mmap=True)
        mapped.storage.ledger.read_tables()
    plain.loads(tmp_path)
    for buffer in (mapped, plain):
        buffer.extend(rows(7000, 8))
        buffer.empty()
        buffer.extend(rows(8000, 100))
    same(mapped, plain)


@pytest.mark.parametrize("kind", [Kind(RoundRobinWriter), KINDS["ranked"]])
@pytest.mark.parametrize("mmap", [True, False])
def test_write_after_a_failed_first_write_rebuilds_the_episodes(
    kind: Kind, mmap: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    kind.filled().dumps(tmp_path)
    interrupted, other = kind.make(), kind.make()
    interrupted.loads(tmp_path, mmap=mmap)
    other.loads(tmp_path)
    before, after = interrupted[:].clone(), rows(20_000, 12)

    def rebuild(self: EpisodeIndex) -> None:
        raise MemoryError("no memory for an index")

    with monkeypatch.context() as patch:
        patch.setattr(EpisodeIndex, "_rebuild", rebuild)
        refuses(MemoryError, "for an index", interrupted.extend, after)
    assert bool((interrupted[:] == before).all())
    assert torch.equal(interrupted.extend(after), other.extend(after))
    same(interrupted, other)


@pytest.mark.parametrize(
    ("name", "entry", "match"), [(k, *pair) for k, pairs in TABLES.items() for pair in pairs]
)
def test_write_finds_inconsistent_tables_before_overwriting_rows(
    name: str, entry: str, match: str, tmp_path: Path
):
    kind = KINDS[name]
    kind.filled().dumps(tmp_path)
    wrong = np.array([np.nan]).tobytes() if entry == "_ranks" else b"\xff" * 8  # -1
    damage(tmp_path, entry, wrong)
    mapped = kind.make()
    mapped.loads(tmp_path, mmap=True)
    before = mapped[:].clone()
    named = rf"{match}.* of the checkpoint, in {tmp_path}/data-.*\d.bin: expected"
    for _ in range(2):
        refuses(CheckpointError, named, mapped.extend, rows(7000, 8))
        refuses(CheckpointError, named, mapped.writer.state_dict)
    if entry != "_ranks":
        refuses(CheckpointError, match, mapped.empty)
    assert len(mapped) == len(before)
    assert bool((mapped[:] == before).all())
    refuses(CheckpointError, "expected crc32", kind.make().loads, tmp_path, mmap=True, verify=True)
    with pytest.raises(ValueError, match=r"expected .*(position|generation|rank)"):
        kind.make().loads(tmp_path, verify=False)


@pytest.mark.parametrize("value", [2, CAPACITY * 50])
def test_positions_given_twice_or_never_are_found(value: int, tmp_path: Path):
    kind = KINDS["lanes"]
    buffer = kind.filled()
    buffer.dumps(tmp_path)
    there = int(buffer.storage.ledger.positions(torch.tensor([6])))
    damage(tmp_path, "_ledger.positions", np.int64(there if value == 2 else value).tobytes())
    mapped = kind.make()
    mapped.loads(tmp_path, mmap=True)
    with pytest.raises(CheckpointError, match="expected distinct 'positions'"):
        _ = mapped.storage.episodes


def test_in_another_capacity_tables_are_read_before_anything_changes(tmp_path: Path):
    kind = KINDS["ranked"]
    buffer = kind.make()
    buffer.extend(rows(0, 500))
    buffer.dumps(tmp_path)
    larger, plain = opened_both_ways(lambda: kind.make(2 * CAPACITY), tmp_path)
    for one in (larger, plain):
        one.extend(rows(500, 2 * CAPACITY))
    assert bool((larger[:] == plain[:]).all())
    for entry, match in (("_ledger.generations", "the gen"), ("_ledger.positions", "the pos")):
        damage(tmp_path, entry, b"\xff" * 8)
        other = kind.make(2 * CAPACITY)
        refuses(CheckpointError, match, other.loads, tmp_path, mmap=True)
        assert not other.storage.initialized
        assert not other.writer.write_count


@pytest.mark.parametrize("laps", [0, 3])
def test_generations_stay_unread_in_another_capacity(laps: int, tmp_path: Path, read: list[Any]):
    kind = KINDS["cleared"]
    buffer = kind.filled() if not laps else kind.make()
    for lap in range(laps):
        buffer.extend(rows(lap * CAPACITY, CAPACITY))
    buffer.dumps(tmp_path)
    mapped, plain = opened_both_ways(lambda: kind.make(2 * CAPACITY), tmp_path)
    assert not read
    same(mapped, plain)
    for one in (mapped, plain):
        one.extend(rows(10**5, 2 * CAPACITY + 7))
    same(mapped, plain)


@pytest.mark.parametrize("head", [[30, 20, -1, 3], [30, 20, 31, 3], [30, 20, 9, 0], [30, 20, 9, 4]])
def test_invalid_beginnings_of_streams_are_refused(
    head: list[int],
    tmp_path: Path,
    forge: Any,
):
    kind = KINDS["lanes"]
    kind.filled().dumps(tmp_path)

    def change(manifest: dict[str, Any]) -> None:
        heads = manifest["parts"]["writer"]["_episodes"]["heads"]
        assert heads["streams"]
        heads["streams"][0] = head

    forge(tmp_path, change)
    for options in ({}, {"mmap": True}):
        refuses(ValueError, r"_episodes\.heads", kind.make().loads, tmp_path, **options)


def test_an_older_checkpoint_of_rings_of_streams_is_read(tmp_path: Path, forge: Any):
    kind = KINDS["lanes"]
    buffer = kind.filled()
    buffer.dumps(tmp_path)
    forge(tmp_path, lambda manifest: manifest["parts"]["writer"].pop("_longest"))
    for options in ({}, {"mmap": True}):
        found = kind.make()
        found.loads(tmp_path, **options)
        assert bool((found[:] == buffer[:]).all())
    shorter = ReplayBuffer(
        storage=LazyTensorStorage(CAPACITY, lane_key="lane"),
        writer=LaneWriter(100, track_generations=True),
    )
    with pytest.warns(UserWarning, match="800"):
        shorter.loads(tmp_path)
    assert len(shorter) == 100 * LANES
    for wrong in (-1, CAPACITY + 1, 2.0):
        forge(tmp_path, lambda m, wrong=wrong: m["parts"]["writer"].update(_longest=wrong))
        refuses(ValueError, r"_longest|the longest", kind.make().loads, tmp_path)


def test_members_of_an_ensemble_are_opened_unread(tmp_path: Path, read: list[Any]):
    kinds = [KINDS["lanes"], KINDS["ranked"], KINDS["placed"], KINDS["lanes once"]]

    def ensemble(*members: ReplayBuffer) -> ReplayBufferEnsemble:
        return ReplayBufferEnsemble(
            *members, batch_size=12, generator=torch.Generator().manual_seed(1)
        )

    ensemble(*(kind.filled() for kind in kinds)).dumps(tmp_path)
    mapped, plain = (ensemble(*(kind.make() for kind in kinds)) for _ in range(2))
    mapped.loads(tmp_path, mmap=True)
    assert not read
    plain.loads(tmp_path)
    for one, other in zip(mapped.members, plain.members, strict=True):
        for buffer in (one, other):
            buffer.extend(rows(7000, 40))
        same(one, other)


@pytest.mark.parametrize("name", ["cleared", "lanes", "placed", "ranked"])
def test_tables_of_any_size_are_open_in_a_fifth_of_a_second(
    name: str,
    tmp_path: Path,
    forge: Any,
    read: list[Any],
):
    """Of 40 million rows, in files of holes; tables of zeros, which nobody reads."""
    kind, capacity = KINDS[name], 40_000_000
    kind.filled(CAPACITY).dumps(tmp_path)
    length = len(kind.filled(CAPACITY))

    forge(tmp_path, grown(tmp_path, [length, CAPACITY], capacity, capacity))
    times = []
    for _ in range(3):
        buffer = kind.make(capacity)
        start = time.perf_counter()
        buffer.loads(tmp_path, mmap=True)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.2
    assert len(buffer) == capacity
    assert not read
    if kind.writer().tracks_generations is False:
        assert not buffer.sample()["id"].any()
        assert not read
