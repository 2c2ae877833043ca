"""Exchanging components: rows, cursor, generator and listeners go along, or nothing changes."""

from __future__ import annotations

import gc
import itertools
import weakref
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    Compose,
    ImmutableDatasetWriter,
    LazyTensorStorage,
    ListStorage,
    RandomSampler,
    ReplayBuffer,
    RoundRobinWriter,
    Sampler,
    SamplerWithoutReplacement,
    Storage,
    TensorDictMaxValueWriter,
    TensorDictRoundRobinWriter,
)
from tests.buffer.building import (
    KINDS,
    buffer_of,
    check_whole,
    in_threads,
    rows,
    storage_of,
    unchanged,
)
from tests.support.refusals import refuses


class Noting(Sampler):
    """Draws slot 0 and notes what it is told."""

    def __init__(self, reject: int | None = None) -> None:
        super().__init__()
        self.told: list[Any] = []
        self.reject = reject

    def sample(self, storage: Storage, batch_size: int) -> Any:
        return torch.zeros(batch_size, dtype=torch.int64), {}

    def attach(self, storage: Storage) -> None:
        if storage.max_size == self.reject:
            raise ValueError(f"no room for {self.reject} rows")
        self.told.append(("attach", len(storage)))

    def add(self, index: Any) -> None:
        self.told.append(("add", index.tolist()))

    def extend(self, index: Any) -> None:
        self.told.append(("extend", index.tolist()))

    def mark_update(self, index: Any, *, storage: Storage | None = None) -> None:
        self.told.append(("mark_update", index.tolist()))

    def empty(self) -> None:
        super().empty()
        self.told.append(("empty",))

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "told": list(self.told)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.told = list(state_dict["told"])


# -- set_storage ----------------------------------------------------------------------------------


@pytest.mark.pitfall("WR12")
@pytest.mark.parametrize("new", KINDS)
@pytest.mark.parametrize("old", ["list", "tensor"])
def test_rows_written_after_set_storage_go_to_the_new_one(old: str, new: str):
    """WR12, D8: the writer stayed with the old storage, and the new one was empty for ever."""
    buffer = buffer_of(old, 10, filled=4, seed=0)
    first = buffer.storage
    storage = storage_of(new, 10)
    assert buffer.set_storage(storage) is first
    assert buffer.storage is storage
    assert len(buffer) == 0
    buffer.extend(rows(3, 20))
    assert (len(first), len(storage), len(buffer)) == (4, 3, 3)
    assert check_whole(buffer[:]) == [20, 21, 22]
    assert set(check_whole(buffer.sample(30))) == {20, 21, 22}
    assert len(first) == 4


def test_the_next_write_continues_after_the_new_storages_newest_row():
    other = buffer_of("tensor", 5, filled=5)
    other.extend(rows(2, 5))
    buffer = buffer_of("tensor", 3)
    buffer.set_storage(other.storage)
    assert buffer.extend(rows(2, 7)).tolist() == [2, 3]
    assert buffer["id"].tolist() == [5, 6, 7, 8, 4]
    assert other.extend(rows(1, 9)).tolist() == [4]


def test_set_storage_resets_the_collate_function():
    buffer = ReplayBuffer(storage=ListStorage(5), collate_fn=len)
    for options, expected in (({}, [1, 1, 1, 1]), ({"collate_fn": sum}, 4)):
        buffer.extend([1, 1])
        assert buffer.sample(4) == 4
        buffer.set_storage(ListStorage(5), **options)
        buffer.extend([1, 1])
        found = buffer.sample(4)
        assert (found.tolist() if isinstance(found, torch.Tensor) else found) == expected
        buffer.set_storage(ListStorage(5), collate_fn=len)
    refuses(TypeError, "collate_fn", buffer.set_storage, ListStorage(5), collate_fn=3)


@pytest.mark.parametrize("prefetch", [None, 3])
def test_set_storage_begins_a_new_pass_and_keeps_the_generator(prefetch: int | None):
    def drawn(buffer: ReplayBuffer) -> list[list[int]]:
        return [batch["id"].tolist() for batch in buffer]

    filler = buffer_of(filled=10)
    given = {"filled": 10, "sampler": "without", "batch_size": 4, "seed": 3}
    buffer, reference = buffer_of(**given, prefetch=prefetch), buffer_of(**given)
    buffer.set_storage(storage_of("tensor", 10))
    buffer.extend(rows(10))
    assert drawn(buffer) == drawn(reference)
    buffer.sample()
    buffer.set_storage(filler.storage)
    batches = drawn(buffer)
    assert [len(batch) for batch in batches] == [4, 4, 2]
    assert sorted(itertools.chain(*batches)) == list(range(10))


def test_the_default_time_dimension_follows_the_storage():
    buffer = ReplayBuffer(storage=LazyTensorStorage(10))
    buffer.set_storage(LazyTensorStorage(10, ndim=2))
    assert buffer.dim_extend == 1
    index = buffer.extend(TensorDict({"x": torch.arange(6).view(2, 3)}, [2, 3]))
    assert index.tolist() == [[t, lane] for t in range(3) for lane in range(2)]
    assert buffer["x"].tolist() == [[0, 1, 2], [3, 4, 5]]
    buffer.set_storage(LazyTensorStorage(10))
    assert buffer.extend(TensorDict({"x": torch.arange(6).view(2, 3)}, [2, 3])).tolist() == [0, 1]
    fixed = ReplayBuffer(storage=LazyTensorStorage(10, ndim=2), dim_extend=0)
    fixed.set_storage(LazyTensorStorage(12, ndim=3))
    assert fixed.dim_extend == 0


def test_two_buffers_may_exchange_their_storages_at_the_same_time():
    one, two = LazyTensorStorage(10), LazyTensorStorage(10)
    buffers = [ReplayBuffer(storage=one), ReplayBuffer(storage=two)]

    def swap(buffer: ReplayBuffer, order: list[Storage]) -> None:
        for _ in range(300):
            for storage in order:
                buffer.set_storage(storage)

    in_threads(lambda: swap(buffers[0], [two, one]), lambda: swap(buffers[1], [one, two]))
    for buffer in buffers:
        assert buffer.extend(rows(1)).tolist() == [0]


# -- set_sampler ----------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [None, 3])
def test_a_new_sampler_sees_the_stored_rows_at_once(prefetch: int | None):
    buffer = buffer_of(filled=7, batch_size=3, seed=0, prefetch=prefetch)
    buffer.sample()
    old = buffer.sampler
    assert buffer.set_sampler(SamplerWithoutReplacement(shuffle=False)) is old
    assert [batch["id"].tolist() for batch in buffer] == [[0, 1, 2], [3, 4, 5], [6]]


def test_new_sampler_gets_row_events_and_the_buffers_generator():
    buffer = buffer_of(filled=4, seed=9)
    sampler = Noting()
    buffer.set_sampler(sampler)
    buffer.add(rows(1, 4)[0])
    buffer.extend(rows(2, 5))
    buffer.empty()
    assert sampler.told == [("attach", 4), ("add", [4]), ("extend", [5, 6]), ("empty",)]
    assert sampler.generator is not None
    assert sampler.generator.initial_seed() == 9


# -- set_writer -----------------------------------------------------------------------------------


def test_new_writer_continues_at_the_cursor_and_in_the_layout_of_the_storage():
    buffer = buffer_of(max_size=5, filled=4)
    old = buffer.writer
    assert buffer.set_writer(RoundRobinWriter(track_generations=True)) is old
    assert buffer.extend(rows(3, 4)).tolist() == [4, 0, 1]
    assert (old.write_count, buffer.write_count) == (4, 3)
    assert buffer.sample(1)["index_generation"].shape == (1,)
    assert buffer.writer.generations_of(torch.arange(5)).tolist() == [1, 1, 0, 0, 0]
    lanes = ReplayBuffer(storage=LazyTensorStorage(6, ndim=2))
    lanes.set_writer(TensorDictRoundRobinWriter())
    lanes.extend(TensorDict({"x": torch.arange(6).view(2, 3)}, [2, 3]))
    assert lanes["x"].tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("prefetch", [None, 2, 4])
def test_other_parts_and_a_sampler_that_is_set_again_lose_no_row_of_a_pass(prefetch: int | None):
    def sample_by_another(buffer: ReplayBuffer) -> None:
        sampler = buffer.set_sampler(RandomSampler())
        buffer.sample()
        buffer.set_sampler(sampler)

    for change in (
        lambda b: b.set_writer(RoundRobinWriter()),
        lambda b: b.set_rng(torch.Generator()),
        lambda b: b.append_transform(lambda td: td),
        sample_by_another,
    ):
        buffer = buffer_of(filled=10, sampler="without", batch_size=3, prefetch=prefetch)
        seen = buffer.sample()["id"].tolist()
        change(buffer)
        for batch in buffer:
            seen += batch["id"].tolist()
        assert sorted(seen) == list(range(10))


# -- what does not go together ---------------------------------------------------------------------


def test_components_that_do_not_go_with_the_others_are_refused():
    best = buffer_of(max_size=5, writer=TensorDictMaxValueWriter("id"), sampler="ordered")
    best.extend(rows(5))
    ring = buffer_of(max_size=10, filled=10, sampler="ordered")
    picky = buffer_of(max_size=5, filled=3, sampler=Noting(reject=99))
    lanes = ReplayBuffer(storage=LazyTensorStorage(6, ndim=2))
    lanes.extend(TensorDict({"r": torch.zeros(2, 2)}, [2, 2]))
    last = SamplerWithoutReplacement(drop_last=True)
    cases: list[tuple[ReplayBuffer, str, Any, type[Exception], str]] = [
        (best, "storage", LazyTensorStorage(5, ndim=2), ValueError, "ndim"),
        (best, "storage", "storage", TypeError, "storage as a Storage"),
        (ring, "sampler", last, ValueError, "drop_last"),
        (ring, "sampler", RandomSampler, TypeError, "Sampler"),
        (ring, "sampler", Noting(reject=10), ValueError, "no room"),
        (picky, "storage", LazyTensorStorage(99), ValueError, "no room"),
        (lanes, "writer", TensorDictMaxValueWriter(), ValueError, "ndim"),
        (lanes, "writer", None, TypeError, "Writer"),
    ]
    ring.sample(4)
    for buffer, name, part, error, words in cases:
        before = getattr(buffer, name)
        unchanged(buffer, error, lambda b=buffer, n=name, p=part: getattr(b, f"set_{n}")(p), words)
        assert getattr(buffer, name) is before
    assert best.add(rows(1, 9)[0]) == 0
    assert picky.extend(rows(1, 3)).tolist() == [3]
    assert ring.sample(4)["id"].tolist() == [4, 5, 6, 7]
    lanes.set_writer(ImmutableDatasetWriter())
    refuses(RuntimeError, "doesn't allow writing", lanes.extend, lanes[:])


# -- transforms -----------------------------------------------------------------------------------


def test_transforms_are_inserted_at_the_given_position():
    buffer = ReplayBuffer(storage=LazyTensorStorage(3))
    assert buffer.append_transform(lambda x: x + 1) is buffer
    assert buffer.insert_transform(0, lambda x: x * 10) is buffer
    buffer.insert_transform(-1, lambda x: x - 5)
    buffer.extend(torch.tensor([1.0]))
    assert buffer.storage[:].tolist() == [1.0]
    assert buffer[:].tolist() == [(1 * 10 - 5) + 1]
    assert isinstance(buffer.transform, Compose)
    assert len(buffer.transform) == 3
    refuses(IndexError, "position", buffer.insert_transform, 5, torch.neg)
    refuses(RuntimeError, "transform", buffer.append_transform, "not a transform")
    assert len(buffer.transform) == 3


def test_a_chain_given_by_the_caller_is_not_changed():
    """G2: the caller's Compose keeps its length."""
    chain = Compose(torch.neg)
    buffer = ReplayBuffer(storage=LazyTensorStorage(3), transform=chain)
    buffer.append_transform(torch.neg)
    assert (len(chain), len(buffer.transform)) == (1, 2)


# -- two buffers over one storage -----------------------------------------------------------------


@pytest.mark.pitfall("WR15")
@pytest.mark.parametrize("kind", KINDS)
def test_buffers_over_one_storage_write_as_one_writer(kind: str):
    """WR15, E9: a cursor per writer made two buffers overwrite each other."""
    storage = storage_of(kind, 7)
    one = ReplayBuffer(storage=storage, writer=RoundRobinWriter(track_generations=True))
    two = ReplayBuffer(storage=storage, writer=TensorDictRoundRobinWriter(track_generations=True))
    single = ReplayBuffer(storage=storage_of(kind, 7))
    for start, count in [(0, 3), (3, 2), (5, 4), (9, 1), (10, 9)]:
        buffer = (one, two)[start % 2]
        assert buffer.extend(rows(count, start)).tolist() == [
            i % 7 for i in range(start, start + count)
        ]
        single.extend(rows(count, start))
        assert len(one) == len(two) == min(7, start + count)
        assert check_whole(one[:]) == check_whole(two[:]) == check_whole(single[:])
    assert one.write_count + two.write_count == 19
    slots = torch.arange(7)
    assert torch.equal(one.writer.generations_of(slots), two.writer.generations_of(slots))
    assert one.writer.generations_of(slots).tolist() == [(18 - s) // 7 for s in range(7)]


def test_write_notifies_samplers_of_all_buffers_over_the_storage():
    storage = LazyTensorStorage(10)
    writer, sampler = ReplayBuffer(storage=storage), Noting()
    listening = ReplayBuffer(storage=storage, sampler=sampler)
    writer.extend(rows(3))
    writer.add(rows(1, 3)[0])
    writer.writer.write_at(torch.tensor([0, 2]), rows(2, 4))
    listening.extend(rows(1, 6))
    assert sampler.told == [
        ("attach", 0),
        ("mark_update", [0, 1, 2]),
        ("mark_update", [3]),
        ("mark_update", [0, 2]),
        ("extend", [4]),
    ]
    listening.set_storage(LazyTensorStorage(10))
    sampler.told.clear()
    writer.extend(rows(1))
    assert sampler.told == []


def test_a_storage_does_not_keep_its_listeners_alive():
    storage = LazyTensorStorage(10)
    writer = ReplayBuffer(storage=storage)
    listening = ReplayBuffer(storage=storage)
    gone = weakref.ref(listening)
    del listening
    gc.collect()
    assert gone() is None
    writer.extend(rows(2))
    assert len(writer) == 2


@pytest.mark.pitfall("RD8")
@pytest.mark.parametrize("kind", KINDS)
def test_copying_rows_from_buffer_to_buffer_keeps_each_once(kind: str):
    """RD8: "copying" by sampling with replacement lost a third of the rows."""
    source = buffer_of(kind, 100, filled=100)
    source.extend(rows(30, 100))
    copies = [buffer_of("tensor", 100), buffer_of("tensor", 100), buffer_of("tensor", 100)]
    copies[0].extend(source[:])
    copies[1].load_state_dict(source.state_dict())
    for batch in buffer_of(storage=source.storage, sampler="without", batch_size=7):
        copies[2].extend(batch)
    for copy in copies:
        assert sorted(copy["id"].tolist()) == list(range(30, 130))
