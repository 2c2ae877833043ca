"""``loads(path, mmap=True)``: opened at once, equal to a plain load, and the files never change."""

from __future__ import annotations

import copy
import gc
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    ConsumingSampler,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    StalenessAwareSampler,
    TensorDictMaxValueWriter,
    TensorStorage,
    Writer,
    filesystem,
)
from replaykit.checkpoint import MappedCheckpoint, save_checkpoint
from replaykit.errors import CheckpointError
from replaykit.storages.ledger import Ledger
from tests.checkpoint.building import equal, grown, opened_both_ways, overwrite
from tests.support.refusals import refuses

pytestmark = pytest.mark.usefixtures("small_files")

CAPACITY = 6000
SAMPLERS: dict[str, Callable[[], Any]] = {
    "random": RandomSampler,
    "without replacement": SamplerWithoutReplacement,
    "prioritized": lambda: PrioritizedSampler(alpha=0.7, beta=0.5),
    "slices": lambda: SliceSampler(slice_len=4),
    "prioritized slices": lambda: PrioritizedSliceSampler(alpha=0.7, beta=0.5, slice_len=4),
    "distinct slices": lambda: SliceSampler(slice_len=4, draw="without_replacement"),
    "slices in order": lambda: SliceSampler(slice_len=4, draw="sequential"),
    "slices without replacement": lambda: SliceSamplerWithoutReplacement(slice_len=4),
    "consuming": lambda: ConsumingSampler(2),
    "staleness": lambda: StalenessAwareSampler(staleness_weight_fn=torch.exp2, version_key="group"),
}


def rows(start: int, count: int) -> TensorDict:
    number = torch.arange(start, start + count)
    done = (number % 7 == 6)[:, None]
    return TensorDict(
        {
            "id": number,
            "group": -(number % 10),
            "pixels": (number[:, None] + torch.arange(640)).to(torch.uint8),
            "odd": (number[:, None] + torch.arange(601)).to(torch.uint8),  # cut inside of pages
            ("nested", "half"): number[:, None].to(torch.bfloat16),
            ("next", "reward"): number[:, None].double(),
            ("next", "done"): done,
        },
        [count],
    )


def make(sampler: str = "random", capacity: int = CAPACITY, **options: Any) -> ReplayBuffer:
    return ReplayBuffer(
        storage=LazyTensorStorage(capacity, **options),
        sampler=SAMPLERS[sampler](),
        batch_size=32,
        generator=torch.Generator().manual_seed(3),
    )


def filled(sampler: str = "random", count: int = CAPACITY + 1234, **options: Any) -> ReplayBuffer:
    buffer = make(sampler, **options)
    for start in range(0, count, 500):
        buffer.extend(rows(start, min(500, count - start)))
    if buffer.sampler.prioritized:
        buffer.update_priority(torch.arange(len(buffer)), torch.rand(len(buffer)))
    buffer.sample()
    return buffer


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize(
    ("sampler", "count"),
    [
        # A full ring that has wrapped is the most that a sampler can have to tell.
        pytest.param(sampler, count, marks=[] if count > CAPACITY or i < 3 else [pytest.mark.long])
        for i, sampler in enumerate(SAMPLERS)
        for count in (1, 2500, CAPACITY, CAPACITY + 1234)
    ],
)
def test_mapped_load_equals_a_plain_load(sampler: str, count: int, tmp_path: Path):
    if count == 1 and "slices" in sampler:
        return
    filled(sampler, count).dumps(tmp_path)
    before = content(tmp_path)
    mapped, plain = opened_both_ways(lambda: make(sampler), tmp_path)
    assert len(mapped) == min(count, CAPACITY)
    assert equal(mapped[:], plain[:])
    for round_ in range(6):
        batches = [buffer.sample() for buffer in (mapped, plain)]
        assert equal(*batches)
        for buffer, batch in zip((mapped, plain), batches, strict=True):
            buffer.extend(rows(10**5 + 900 * round_, 900))
            if buffer.sampler.prioritized:
                buffer.update_priority(batch["index"], torch.linspace(0, 9, len(batch)))
    assert equal(mapped[:], plain[:])
    assert content(tmp_path) == before


def test_rows_that_never_fill_whole_pages_are_mapped(tmp_path: Path):
    wide = torch.arange(50 * 30_001).to(torch.uint8).view(50, 30_001)
    save_checkpoint(tmp_path, {"part": {"wide": wide, "none": wide[:0], "empty": wide[:, :0]}}, {})
    with MappedCheckpoint(tmp_path) as saved:
        part = saved.part("part", mapped=["wide", "none", "empty"])
        found = {name: saved_rows.spanned() for name, saved_rows in part.items()}
    assert torch.equal(found["wide"], wide)
    assert found["none"].shape == (0, 30_001)
    assert found["empty"].shape == (50, 0)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_empty_and_unwritten_buffers_can_be_mapped(sampler: str, tmp_path: Path):
    buffer = make(sampler)
    buffer.dumps(tmp_path / "new")
    buffer.extend(rows(0, 10))
    buffer.empty()
    buffer.dumps(tmp_path / "emptied")
    for name in ("new", "emptied"):
        mapped, plain = opened_both_ways(lambda: make(sampler), tmp_path / name)
        assert len(mapped) == 0
        for loaded in (mapped, plain):
            loaded.extend(rows(0, 100))
        assert equal(mapped[:], rows(0, 100))
        assert equal(mapped.sample(), plain.sample())


@pytest.mark.parametrize(
    ("sampler", "count", "capacity"),
    [
        *((sampler, 2500, CAPACITY + 1000) for sampler in SAMPLERS),
        *((sampler, 2500, 2500) for sampler in ("prioritized", "consuming", "slices in order")),
        ("without replacement", CAPACITY, CAPACITY + 1000),
        ("prioritized", 2 * CAPACITY, CAPACITY + 1000),
    ],
)
def test_mapped_load_into_another_capacity_equals_a_moving_load(
    sampler: str, count: int, capacity: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The same as where all are told where each row lies now."""
    filled(sampler, count).dumps(tmp_path / "saved")
    mapped, told = make(sampler, capacity), make(sampler, capacity)
    with monkeypatch.context() as patch:
        patch.setattr(Writer, "survivors", None)
        mapped.loads(tmp_path / "saved", mmap=True)
    with monkeypatch.context() as patch:
        if sampler != "staleness":  # rows of a version would be in another order then
            patch.setattr(Ledger, "keeps_slots", lambda self, slots: slots == self.slots)
        told.loads(tmp_path / "saved")

    def check_same(mapped: ReplayBuffer, told: ReplayBuffer) -> None:
        assert equal(mapped[:], told[:])
        ledgers = [buffer.storage.ledger for buffer in (mapped, told)]
        every = torch.arange(capacity)
        for of in (Ledger.positions, Ledger.generations):
            assert torch.equal(*(of(ledger, every) for ledger in ledgers))
        assert len({ledger.cursor for ledger in ledgers}) == 1
        assert equal(mapped.sample(), told.sample())

    for round_ in range(4):
        check_same(mapped, told)
        more = rows(10**5 + 1200 * round_, 1200)
        for buffer in (mapped, told):
            buffer.extend(more)
            if buffer.sampler.prioritized:
                buffer.update_priority(torch.arange(9), torch.linspace(0, 9, 9))
    again = [make(sampler, capacity), make(sampler, capacity)]
    for number, buffer in enumerate((mapped, told)):
        buffer.dumps(tmp_path / str(number))
        again[number].loads(tmp_path / str(number), mmap=True)
    check_same(*again)


@pytest.mark.parametrize("mmap", [True, False])
def test_prefetched_draws_come_first_in_a_larger_buffer(mmap: bool, tmp_path: Path):
    def ahead(capacity: int) -> ReplayBuffer:
        return ReplayBuffer(
            storage=LazyTensorStorage(capacity),
            sampler=SamplerWithoutReplacement(),
            batch_size=32,
            prefetch=2,
            generator=torch.Generator().manual_seed(3),
        )

    buffer, larger = ahead(CAPACITY), ahead(2 * CAPACITY)
    buffer.extend(rows(0, 2500))
    buffer.sample()
    buffer.dumps(tmp_path)
    larger.loads(tmp_path, mmap=mmap)
    for _ in range(10):
        assert equal(larger.sample(), buffer.sample())


def test_updates_of_unread_priorities_equal_a_plain_load(tmp_path: Path):
    filled("prioritized").dumps(tmp_path)
    results = []
    for buffer in opened_both_ways(lambda: make("prioritized"), tmp_path):
        buffer.sampler.alpha = 0.3
        buffer.update_priority(torch.tensor([5, 6]), torch.tensor([100.0, 0.1]))
        saved = copy.deepcopy(buffer.sampler)
        results.append((buffer.sample(), saved.state_dict()))
    (a, first), (b, second) = results
    assert equal(a, b)
    assert torch.equal(first.pop("_priorities"), second.pop("_priorities"))
    assert first == second


def test_mapped_buffer_survives_removal_of_the_checkpoint(tmp_path: Path):
    buffer = filled()
    buffer.dumps(tmp_path / "saved")
    mapped = make()
    mapped.loads(tmp_path / "saved", mmap=True)
    mapped.extend(rows(10**6, 100))
    mapped.dumps(tmp_path / "saved")  # over the files that it reads from
    plain = make()
    plain.loads(tmp_path / "saved")
    buffer.extend(rows(10**6, 100))
    assert equal(plain[:], buffer[:])
    shutil.rmtree(tmp_path / "saved")
    assert equal(mapped[:], buffer[:])


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_no_file_stays_open_and_memory_is_given_back(tmp_path: Path):
    filled("prioritized").dumps(tmp_path)
    opened = len(os.listdir("/proc/self/fd"))
    mapped = make("prioritized")
    mapped.loads(tmp_path, mmap=True)
    assert len(os.listdir("/proc/self/fd")) == opened
    assert str(tmp_path) in Path("/proc/self/maps").read_text()
    mapped.sample()
    batch = mapped.sample()
    del mapped
    gc.collect()
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    assert len(batch) == 32


def test_a_torn_or_missing_file_is_named_and_nothing_changes(tmp_path: Path):
    filled().dumps(tmp_path)
    name = max(file.name for file in tmp_path.glob("data-*"))
    file, whole = tmp_path / name, (tmp_path / name).read_bytes()
    mapped = make()
    for damaged in (whole[:-1], whole + b"x", b""):
        file.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=f"{name} is torn: expected {len(whole)} bytes"):
            mapped.loads(tmp_path, mmap=True)
    file.rename(tmp_path / "elsewhere")
    refuses(CheckpointError, f"{name} is missing", mapped.loads, tmp_path, mmap=True)
    file.symlink_to(tmp_path / "elsewhere")
    refuses(CheckpointError, f"{name} is damaged: it is a link", mapped.loads, tmp_path, mmap=True)
    file.unlink()
    file.mkdir()
    refuses(CheckpointError, f"{name} is damaged: it is no file", mapped.loads, tmp_path, mmap=True)
    with pytest.raises(FileNotFoundError):
        mapped.loads(tmp_path / "nowhere", mmap=True)
    assert not mapped.storage.initialized
    file.rmdir()
    file.write_bytes(whole)
    mapped.loads(tmp_path, mmap=True)


def test_verify_option_decides_if_checksums_are_compared(tmp_path: Path):
    filled().dumps(tmp_path)
    file = max(tmp_path.glob("data-*"))
    damaged = bytearray(file.read_bytes())
    damaged[3] ^= 1
    file.write_bytes(damaged)
    buffer = make()
    for options in ({}, {"verify": True}, {"mmap": True, "verify": True}):
        with pytest.raises(CheckpointError, match=f"{file.name} is damaged: expected crc32"):
            buffer.loads(tmp_path, **options)
    make().loads(tmp_path, mmap=True)
    buffer.loads(tmp_path, verify=False)
    assert len(buffer) == CAPACITY


@pytest.mark.parametrize(
    ("name", "entry", "match"),
    [
        ("prioritized", "_priorities", "the priorities of the checkpoint"),
        ("consuming", "_sampleable", "the counts of draws of the checkpoint"),
        ("staleness", "_elements", "the versions of the checkpoint"),
        ("without replacement", "_remaining", "the pass of the checkpoint"),
        ("slices without replacement", "_remaining", "the pass over episodes of the checkpoint"),
    ],
)
def test_first_sample_finds_inconsistent_sampler_state(
    name: str, entry: str, match: str, tmp_path: Path
):
    filled(name).dumps(tmp_path)
    overwrite(tmp_path, "sampler", entry, value=b"\xff" * 8)  # -1, or not a number
    mapped = make(name)
    mapped.loads(tmp_path, mmap=True)
    for _ in range(2):
        refuses(CheckpointError, rf"{match}, in {tmp_path}/data-.*: expected", mapped.sample)


def opened_without_priorities(folder: Path) -> ReplayBuffer:
    """A full buffer whose priorities are not numbers, opened in place."""
    filled("prioritized").dumps(folder)
    overwrite(folder, "sampler", "_priorities", value=b"\xff" * 4)
    mapped = make("prioritized")
    mapped.loads(folder, mmap=True)
    return mapped


@pytest.mark.parametrize(
    "write",
    [
        lambda rb: rb.extend(rows(900, 3)),
        lambda rb: rb.add(rows(900, 1)[0]),
        lambda rb: rb.writer.extend(rows(900, 3)),
        lambda rb: rb.writer.write_at(torch.tensor([3, 7]), rows(900, 2)),
        lambda rb: rb.storage.set(torch.tensor([3, 7]), rows(900, 2)),
    ],
)
def test_write_reads_saved_priorities_before_it_changes_anything(
    write: Callable[[ReplayBuffer], Any], tmp_path: Path
):
    mapped = opened_without_priorities(tmp_path)
    ledger, before = mapped.storage.ledger, mapped[:].clone()
    counted = mapped.write_count, ledger.next_position, ledger.cursor
    for _ in range(2):
        refuses(CheckpointError, "the priorities of the checkpoint", write, mapped)
        assert equal(mapped[:], before)
        assert (mapped.write_count, ledger.next_position, ledger.cursor) == counted


def test_empty_discards_invalid_unread_priorities(tmp_path: Path):
    mapped = opened_without_priorities(tmp_path)
    mapped.empty()
    mapped.extend(rows(0, 20))
    assert mapped.sample()["priority_weight"].tolist() == [1.0] * 32


def test_storages_that_cannot_be_mapped_are_named(tmp_path: Path):
    filled(count=2500).dumps(tmp_path / "saved")

    def refused(buffer: ReplayBuffer, match: str) -> None:
        length = len(buffer)
        refuses(ValueError, match, buffer.loads, tmp_path / "saved", mmap=True)
        assert len(buffer) == length

    for storage in (
        LazyMemmapStorage(CAPACITY),
        ListStorage(CAPACITY),
        TensorStorage(rows(0, CAPACITY)),
    ):
        refused(ReplayBuffer(storage=storage), f"got a {type(storage).__name__}, which cannot map")
    used = make()
    used.extend(rows(0, 3))
    refused(used, "got one that was written to, with 3 rows")
    refused(make(dedup_next=True), "dedup_next=True: expected a key")
    hooked = make()
    hooked.register_load_hook(lambda data: data)
    refused(hooked, "got load hooks")
    refused(make(capacity=2000), "expected the saved capacity for mmap=True, got 2000")
    ranked = ReplayBuffer(storage=LazyTensorStorage(CAPACITY), writer=TensorDictMaxValueWriter())
    refused(ranked, "expected the state of a 'max_value' writer")


def test_failed_mapping_raises_an_error_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    filled("prioritized").dumps(tmp_path)
    buffer = make("prioritized")
    buffer.sampler.alpha = 0.9
    map_, calls = filesystem._map, []

    def refuse(address: Any, *arguments: Any) -> int:
        calls.extend([] if address is None else [address])  # of pieces of columns
        if len(calls) == 5:
            raise OSError(12, "Cannot allocate memory")
        return map_(address, *arguments)

    monkeypatch.setattr(filesystem, "_map", refuse)
    with pytest.raises(OSError, match=r"cannot map .*Cannot allocate") as caught:
        buffer.loads(tmp_path, mmap=True)
    assert caught.value.filename == str(tmp_path)
    assert not buffer.storage.initialized
    assert buffer.sampler.alpha == 0.9


def test_a_checkpoint_of_gigabytes_is_open_in_a_fifth_of_a_second(tmp_path: Path, forge: Any):
    """Of 6 GB that take no room on the disk: what is sampled is all that is read."""
    capacity, wide = 1_500_000, 4096

    def new(capacity: int) -> ReplayBuffer:
        return ReplayBuffer(
            storage=LazyTensorStorage(capacity),
            sampler=PrioritizedSampler(alpha=0.7, beta=0.5),
            batch_size=16,
        )

    small = new(8)
    small.extend(TensorDict({"id": torch.arange(8), "frame": torch.zeros(8, wide).byte()}, [8]))
    small.dumps(tmp_path)
    forge(tmp_path, grown(tmp_path, [8], capacity, 16_384))
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) > 6 * 10**9
    times = []
    for _ in range(3):
        buffer = new(capacity)
        start = time.perf_counter()
        buffer.loads(tmp_path, mmap=True)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.2
    assert len(buffer) == capacity
    ones = torch.ones(5, dtype=torch.int64)
    buffer.extend(TensorDict({"id": ones, "frame": ones[:, None].expand(5, wide).byte()}, [5]))
    buffer.update_priority(torch.arange(5), 10.0**9)
    batch = buffer.sample(64)
    written = (batch["index"] < 5).long()
    assert 0 < written.sum() < 64
    assert torch.equal(batch["id"], written)
    assert torch.equal(batch["frame"].long().amax(-1), written)
    assert torch.equal(batch["frame"].long().amin(-1), written)


def test_many_rows_open_in_a_fifth_of_a_second_with_more_room(tmp_path: Path, forge: Any):
    """One number for each of the rows, however made, takes longer."""
    capacity = 2**27

    def new(capacity: int) -> ReplayBuffer:
        return ReplayBuffer(storage=LazyTensorStorage(capacity), batch_size=16)

    small = new(8)
    small.extend(TensorDict({"frame": torch.zeros(8, 64).byte()}, [8]))
    small.dumps(tmp_path)
    forge(tmp_path, grown(tmp_path, [8], capacity, 2**24))
    times = []
    for room in (1, 2**20, capacity):
        buffer = new(capacity + room)
        start = time.perf_counter()
        buffer.loads(tmp_path, mmap=True)
        times.append(time.perf_counter() - start)
        assert len(buffer) == capacity
        assert not buffer.sample()["frame"].any()
    assert min(times) < 0.2
