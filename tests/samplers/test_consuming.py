"""ConsumingSampler against a plain model: how often records are drawn, which slots are reused."""

from __future__ import annotations

import copy
import functools
import operator
import pickle
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    ConsumingSampler,
    ImmutableDatasetWriter,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    NStep,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    Sequence,
    TensorDictMaxValueWriter,
    TensorStorage,
)
from replaykit.transforms import Transform
from tests.samplers.chi_square import chi_square_p
from tests.support.refusals import refuses


def numbers(first: int, count: int) -> TensorDict:
    return TensorDict({"number": torch.arange(first, first + count)}, [count])


def consuming(uses: int = 1, capacity: int = 10, **options: Any) -> ReplayBuffer:
    options.setdefault("storage", LazyTensorStorage(capacity))
    return ReplayBuffer(
        consume_after_n_samples=uses,
        generator=torch.Generator().manual_seed(options.pop("seed", 0)),
        **options,
    )


class Model:
    """Slots in a list, uses in another, and a queue of free ones."""

    def __init__(self, capacity: int, uses: int) -> None:
        self.capacity, self.most = capacity, uses
        self.rows: list[int] = []
        self.uses: list[int] = []
        self.free: list[int] = []
        self.cursor = 0

    def write(self, rows: list[int]) -> list[int]:
        return [self._put(row) for row in rows]

    def _put(self, row: int) -> int:
        if self.free:
            slot = self.free.pop(0)
        else:
            slot, self.cursor = self.cursor, (self.cursor + 1) % self.capacity
        if slot == len(self.rows):
            self.rows.append(row)
            self.uses.append(0)
        self.rows[slot], self.uses[slot] = row, 0
        return slot

    def put(self, slots: list[int], rows: list[int]) -> None:
        """What another writer stores is there as if it had never been drawn."""
        for slot, row in zip(slots, rows, strict=True):
            self.rows[slot], self.uses[slot] = row, 0
            self.free = [one for one in self.free if one != slot]

    def use(self, slots: list[int]) -> None:
        for slot in slots:
            self.uses[slot] += 1
            if self.uses[slot] == self.most:
                self.free.append(slot)

    @property
    def live(self) -> list[int]:
        return [slot for slot, uses in enumerate(self.uses) if uses < self.most]


class Fails(Transform):
    """Makes no batch while ``fails`` is set."""

    fails = False

    def forward(self, data: Any) -> Any:
        if self.fails:
            raise OSError("no")
        return data


AGAIN: list[Any] = [copy.deepcopy, lambda rb: pickle.loads(pickle.dumps(rb))]


@pytest.mark.parametrize("seed", range(12))
def test_consuming_buffer_matches_plain_model(seed: int, tmp_path: Path) -> None:
    """Writes, also by another buffer over the storage, draws that fail, copies, and `empty`."""
    chance = random.Random(seed)
    uses, capacity = chance.randint(1, 3), chance.choice([5, 9, 30])
    storage = [
        LazyTensorStorage(capacity),
        ListStorage(capacity),
        LazyMemmapStorage(capacity, scratch_dir=tmp_path / "rows"),
        LazyStackStorage(capacity),
    ][seed % 4]
    rb = consuming(uses, storage=storage, seed=seed, transform=Fails())
    model = Model(capacity, uses)
    next_row = 0
    for _ in range(150):
        turn = chance.random()
        other = ReplayBuffer(storage=rb.storage)
        if turn < 0.05 and model.rows:
            slots = chance.sample(range(len(model.rows)), chance.randint(1, len(model.rows)))
            other.writer.write_at(torch.tensor(slots), numbers(next_row, len(slots)))
            model.put(slots, list(range(next_row, next_row + len(slots))))
            next_row += len(slots)
        elif turn < 0.1 and model.live:
            rb.transform[0].fails = True
            refuses(OSError, "no", rb.sample, chance.randint(1, 8))
            rb.transform[0].fails = False
        elif turn < 0.13 and "Memmap" not in type(rb.storage).__name__:
            rb = chance.choice(AGAIN)(rb)
        elif turn < 0.16:
            chance.choice([rb, other]).empty()
            model = Model(capacity, uses)
        elif chance.random() < 0.5:
            # No more than there are slots: which row of a batch stays is a matter of the writer.
            n = chance.randint(1, min(7, capacity - len(model.free) or 7, capacity))
            index = rb.extend(numbers(next_row, n))
            assert index.tolist() == model.write(list(range(next_row, next_row + n)))
            next_row += n
        elif chance.random() < 0.2 and model.live:
            slot = rb.add(numbers(next_row, 1)[0])
            assert [slot] == model.write([next_row])
            next_row += 1
        elif model.live:
            n = chance.randint(1, 8)
            batch, info = rb.sample(n, return_info=True)
            drawn = info["index"].tolist()
            assert len(set(drawn)) == len(drawn) == min(n, len(model.live))
            assert set(drawn) <= set(model.live)
            assert batch["number"].tolist() == [model.rows[slot] for slot in drawn]
            model.use(drawn)
            assert rb.sampler.ran_out is (not model.live)
        elif model.rows:
            refuses(RuntimeError, f"has been sampled {uses} times", rb.sample, 1)
        assert len(rb) == len(model.live)
        assert rb.can_sample(1) is bool(model.live)
        assert rb.storage[:] is not None if model.rows else True
    assert rb.stats()["size"] == len(model.live)


def test_each_row_is_as_likely() -> None:
    """Counts of pairs over many first batches; seed fixed, so that it cannot flicker."""
    rb = consuming(1, 40, batch_size=4)
    found: Counter[int] = Counter()
    rb.extend(numbers(0, 40))
    for _ in range(1500):
        rb.sampler.attach(rb.storage)  # nothing was drawn
        found.update(rb.sampler.sample(rb.storage, 4)[0].tolist())  # repeated draws are dropped
        found.update(rb.sampler.sample(rb.storage, 20)[0].tolist())  # a permutation
    counts = [found[i] for i in range(40)]
    assert sum(counts) == 1500 * 24
    # Each batch is without repetition, so that counts vary less than independent draws would.
    assert chi_square_p(counts) > 0.01
    assert np.std(counts) > 5


@pytest.mark.pitfall("SL10")
def test_a_draw_does_not_look_at_all_rows() -> None:
    """Draws and writes of 64 of 10^6 rows take at most twice as long as of 10^4."""

    def seconds(count: int) -> float:
        rb = consuming(1, count)
        rb.extend(numbers(0, count))
        rb.extend(numbers(0, len(rb.sample(64))))  # the tables that reuse takes
        best = float("inf")
        for _ in range(60):
            began = time.perf_counter()
            rb.sample(64)
            rb.extend(batch)
            best = min(best, time.perf_counter() - began)
        return best

    batch = numbers(0, 64)
    # Who else uses the processor's caches may disturb one of them, hardly three in a row.
    assert any(seconds(1_000_000) < 2 * seconds(10_000) for _ in range(3))


def test_iteration_ends_when_nothing_is_left() -> None:
    rb = consuming(2, batch_size=4)
    rb.extend(numbers(0, 10))
    drawn = [batch["number"].tolist() for batch in rb]
    assert Counter(functools.reduce(operator.iadd, drawn, [])) == dict.fromkeys(range(10), 2)
    assert list(rb) == []
    assert rb.next() is None
    rb.extend(numbers(10, 3))
    assert sorted(
        functools.reduce(operator.iadd, (batch["number"].tolist() for batch in rb), [])
    ) == [*(10, 10, 11, 11, 12, 12)]
    rb.extend(numbers(20, 2))
    assert sorted((rb.next()["number"].tolist(), rb.next()["number"].tolist())[0]) == [20, 21]
    assert rb.next() is None


def test_a_batch_longer_than_the_capacity_leaves_its_newest_rows() -> None:
    rb = consuming(1, 4)
    rb.extend(numbers(0, 4))
    freed = rb.sample(2, return_info=True)[1]["index"].tolist()
    index = rb.extend(numbers(10, 9)).tolist()
    assert index[:2] == freed
    assert index[2:] == [0, 1, 2, 3, 0, 1, 2]
    last = {slot: 10 + i for i, slot in enumerate(index)}
    assert rb["number"].tolist() == [last[slot] for slot in range(4)]
    assert len(rb) == 4


def test_a_row_that_was_written_meanwhile_is_not_given_back() -> None:
    rb = consuming(2, 4, batch_size=4)

    def transform(data: Any) -> Any:
        rb.extend(numbers(10, 1))  # as another thread does
        raise OSError("no")

    rb.append_transform(transform)
    rb.extend(numbers(0, 4))
    rb.sampler.sample(rb.storage, 4)  # all of them once
    refuses(OSError, "no", rb.sample)
    # Their second use was taken back, but for the slot that holds another row now.
    uses = rb.sampler.state_dict()["_sample_count"]
    assert sorted(uses.tolist()) == [0, 1, 1, 1]
    assert len(rb) == 4


@pytest.mark.parametrize("capacity", [7, 40])
def test_loading_into_another_capacity_keeps_use_counts(capacity: int) -> None:
    rb = consuming(2, 10)
    rb.extend(numbers(0, 10))
    rb.sample(6)
    rb.sample(6)
    state = rb.sampler.state_dict()
    uses = dict(zip(rb["number"].tolist(), state["_sample_count"].tolist(), strict=True))
    again = consuming(2, capacity)
    if capacity < 10:
        with pytest.warns(UserWarning, match="3 rows"):
            again.load_state_dict(rb.state_dict())
    else:
        again.load_state_dict(rb.state_dict())
    kept = again["number"].tolist()
    assert kept == list(range(10 - min(capacity, 10), 10))
    assert again.sampler.state_dict()["_sample_count"].tolist() == [uses[row] for row in kept]
    assert len(again) == sum(uses[row] < 2 for row in kept)
    while len(again):
        again.sample(5)
    free = [uses[row] for row in kept]
    index = again.extend(numbers(100, len(free))).tolist()
    assert sorted(index) == list(range(len(free)))


def test_invalid_states_are_refused() -> None:
    rb = consuming(2, 6)
    rb.extend(numbers(0, 6))
    rb.sample(4)
    good = rb.state_dict()
    for name, bad in (
        ("_max_sample_count", 3),
        ("_ran_out", 1),
        ("_sampleable", torch.arange(5)),
        ("_sampleable", torch.zeros(6)),
        ("_free", torch.tensor([2])),
        ("_sample_count", torch.full((6,), 2)),
        ("_sample_count", torch.full((6,), -1)),
    ):
        with pytest.raises(ValueError, match="expected"):
            rb.load_state_dict({**good, "_sampler": {**good["_sampler"], name: bad}})
    assert len(rb) == 6
    refuses(ValueError, "sampler", ReplayBuffer(storage=LazyTensorStorage(6)).load_state_dict, good)


# -- what it goes with ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        *[(given, TypeError, "as an int") for given in (True, 1.5, "2")],
        *[(given, ValueError, "at least 1") for given in (0, -3)],
    ],
)
def test_uses_are_whole_numbers(given: Any, error: Any, text: str) -> None:
    refuses(error, f"max_sample_count .*{text}", ConsumingSampler, given)
    named = f"consume_after_n_samples .*{text}"
    refuses(error, named, ReplayBuffer, consume_after_n_samples=given)


def test_consume_argument_accepts_compatible_samplers() -> None:
    own = ConsumingSampler(3)
    for sampler in (None, RandomSampler(), RandomSampler, own, lambda: ConsumingSampler(3)):
        rb = ReplayBuffer(sampler=sampler, consume_after_n_samples=3)
        assert isinstance(rb.sampler, ConsumingSampler)
        assert rb.sampler.max_sample_count == 3
    for sampler in (
        ConsumingSampler(2),
        SamplerWithoutReplacement(),
        lambda: PrioritizedSampler(alpha=0.5, beta=0.5),
    ):
        with pytest.raises(ValueError, match="consume_after_n_samples=3 with a RandomSampler"):
            ReplayBuffer(sampler=sampler, consume_after_n_samples=3)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"prefetch": 2, "batch_size": 2}, ValueError, "prefetch"),
        ({"storage": lambda: LazyTensorStorage(8, ndim=2)}, ValueError, "ndim"),
        ({"shared": True, "storage": lambda: LazyTensorStorage(8)}, ValueError, "shared"),
        ({"sample_unit": Sequence(2)}, ValueError, "Sequence"),
        ({"transform": lambda: NStep(2, 0.9)}, ValueError, "rows around"),
        ({"writer": TensorDictMaxValueWriter()}, TypeError, "write_at"),
        (
            {"writer": ImmutableDatasetWriter(), "storage": TensorStorage(torch.zeros(4))},
            TypeError,
            "write_at",
        ),
    ],
)
def test_consuming_sampler_refuses_incompatible_options(
    options: Any, error: type[Exception], said: str
) -> None:
    def made(**more: Any) -> Any:
        given = {key: value() if callable(value) else value for key, value in options.items()}
        return ReplayBuffer(**{"storage": LazyTensorStorage(8), **given, **more})

    for more in ({"sampler": ConsumingSampler()}, {"consume_after_n_samples": 1}):
        refuses(error, said, made, **more)
    plain = made()
    if "shared" not in options:
        before = plain.sampler
        refuses(error, said, plain.set_sampler, ConsumingSampler())
        assert plain.sampler is before


def test_consuming_sampler_refuses_incompatible_parts() -> None:
    rb = consuming()
    refuses(TypeError, "write_at", rb.set_writer, TensorDictMaxValueWriter())
    refuses(ValueError, "ndim", rb.set_storage, LazyTensorStorage(8, ndim=2))
    refuses(ValueError, "rows around", rb.append_transform, NStep(2, 0.9))
    assert isinstance(rb.writer, RoundRobinWriter)
    assert len(rb.transform) == 0
    rb.extend(numbers(0, 3))
    assert len(rb) == 3


def test_rows_that_are_not_there_are_not_drawn() -> None:
    rb = consuming()
    rb.extend(numbers(0, 4))
    for outside in (4, 1000, -2):
        refuses(IndexError, r"\[0, 4\)", rb.mark_update, torch.tensor([0, outside]))
    rb.mark_update(torch.tensor([-1, 2]))
    longer = consuming()
    longer.extend(numbers(0, 7))
    longer.sample(3)
    rb.sampler.load_state_dict(longer.sampler.state_dict())
    left = len(rb)
    assert 1 <= left <= 4
    assert (rb.sample(8)["number"] < 4).all()
    assert len(rb.extend(numbers(4, 6))) == 6
    assert sorted(rb.sample(8)["number"].tolist()) == [4, 5, 6, 7, 8, 9]
