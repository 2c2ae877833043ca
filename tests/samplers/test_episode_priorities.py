"""Priorities of episodes, and draws by priority among chosen episodes."""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    EpisodeWriter,
    LaneWriter,
    LazyMemmapStorage,
    LazyTensorStorage,
    LowestPriority,
    PrioritizedSliceSampler,
    ReplayBuffer,
    RoundRobinWriter,
)
from replaykit.errors import NotEnoughData
from tests.samplers.chi_square import chi_square_p
from tests.samplers.test_episode_measures import write
from tests.support.refusals import refuses


def make(storage: Any = None, writer: Any = None, *, seed: int = 0, **options: Any) -> ReplayBuffer:
    options = {"alpha": 1.0, "beta": 1.0, "eps": 0.0, "slice_len": 3, "unit": "episode", **options}
    return ReplayBuffer(
        storage=LazyTensorStorage(100) if storage is None else storage,
        sampler=PrioritizedSliceSampler(**options),
        writer=writer or RoundRobinWriter(),
        generator=torch.Generator().manual_seed(seed),
        batch_size=9,
    )


def drawn(rb: ReplayBuffer, batches: int = 1500) -> dict[int, tuple[int, float]]:
    """How often each window was drawn, by ``t`` of its first row, and its last weight."""
    found: dict[int, tuple[int, float]] = {}
    for _ in range(batches):
        batch = rb.sample()
        for t, weight in zip(
            *(batch[k][::3].tolist() for k in ("t", "priority_weight")), strict=True
        ):
            found[t] = found.get(t, (0, 0))[0] + 1, weight
    return found


@pytest.mark.acceptance("C29")
@pytest.mark.parametrize("alpha", [0.5, 1.0])
@pytest.mark.parametrize("draw", ["iid", "stratified", "without_replacement"])
@pytest.mark.parametrize("norm", ["global", "batch"])
def test_episodes_follow_their_priorities(alpha: float, draw: str, norm: str) -> None:
    rb = make(alpha=alpha, draw=draw, weight_norm=norm)
    write(rb, {0: 3, 1: 9, 2: 2, 3: 5, 4: 4})
    rb.update_priority(torch.tensor([1, 4, 12, 15, 3, 22]), torch.tensor([1.0, 2, 50, 3, 1, 0]))
    mass = {0: 1.0, 1: 2.0**alpha, 3: 3.0**alpha}
    windows = {0: 1, 1: 7, 3: 3}
    each = {100 * j + i: mass[j] / windows[j] for j in mass for i in range(windows[j])}
    found, total = drawn(rb), sum(mass.values())
    assert found.keys() == each.keys()
    if draw == "without_replacement":
        # Three draws, each from the windows that are left.
        once = {a: each[a] / total for a in each}
        law = dict.fromkeys(each, 0.0)
        for a in each:
            for b in each.keys() - {a}:
                both = once[a] * each[b] / (total - each[a])
                for c in each.keys() - {a, b}:
                    p = both * each[c] / (total - each[a] - each[b])
                    for w in (a, b, c):
                        law[w] += p / 3
    else:
        law = {a: each[a] / total for a in each}
    counts = [found[a][0] for a in law]
    if draw != "stratified":  # whose counts vary less
        assert chi_square_p(counts, [4500 * p for p in law.values()]) > 1e-3
    assert all(abs(n / 4500 - p) < 0.03 for n, p in zip(counts, law.values(), strict=True))
    if norm == "global":
        least = min(each.values())
        assert found == {a: (n, pytest.approx(least / each[a])) for a, (n, _) in found.items()}


def test_a_draw_needs_an_episode_of_weight_with_a_window() -> None:
    rb = make(where=lambda data: data.length > 2, draw="without_replacement")
    write(rb, {0: 2, 1: 5})
    assert drawn(rb, 20).keys() == {100, 101, 102}
    rb.update_priority(torch.tensor([2]), 0.0)
    refuses(RuntimeError, "every priority of an episode", rb.sample)
    write(rb, {2: 4})
    for size in (9, 3):
        assert rb.sampler.can_sample(rb.storage, size) is (size == 3)
    refuses(NotEnoughData, "2 with weight", rb.sample)
    rb.tag(torch.tensor([0]), {"task": 1})
    none = make(where=lambda data: data.length > 5)
    write(none, {0: 3})
    refuses(NotEnoughData, "where=", none.sample)


STORAGES: dict[str, Callable[[], tuple[Any, Any]]] = {
    "ring": lambda: (LazyTensorStorage(30), None),
    "lanes": lambda: (LazyTensorStorage(60, ndim=2), None),
    "rings of streams": lambda: (LazyTensorStorage(60, lane_key="lane"), LaneWriter(30, range(2))),
    "whole": lambda: (LazyTensorStorage(30, lane_key="e"), EpisodeWriter(LowestPriority())),
}


class Model:
    """The priority of each episode that was ever written, by its number ``e``."""

    def __init__(self, kind: str, seed: int) -> None:
        self.kind, self.random, self.strict = kind, random.Random(seed), seed % 2 == 0
        self.rb = make(*STORAGES[kind](), strict_length=self.strict)
        self.priority: dict[int, float] = {}
        self.most, self.dropped, self.rows = 1.0, 0, 0
        self.open: dict[int, int] = {}  # the number of the open episode of each lane
        self.length: Counter[int] = Counter()
        self.batches: list[TensorDict] = []

    def write(self) -> None:
        if self.kind == "whole":
            self.rb.extend(self._steps(-1, self.random.randrange(1, 8), True))
            return
        count, end = self.random.randrange(1, 7), self.random.random() < 0.5
        if self.kind in ("ring", "lanes") and self.random.random() < 0.1:
            count = self.random.randrange(28, 70)  # all rows from before are overwritten
        lanes = range(1 if self.kind == "ring" else 2)
        parts = [self._steps(lane, count, end) for lane in lanes]
        for part in [torch.stack(parts)] if self.kind == "lanes" else parts:
            self.rb.extend(part)

    def _steps(self, lane: int, count: int, end: bool) -> TensorDict:
        number = self.open.pop(lane, len(self.priority))
        self.priority.setdefault(number, self.most)
        if not end:
            self.open[lane] = number
        self.rows += count
        first = self.length[number]
        self.length[number] += count
        rows = {"n": torch.arange(self.rows - count, self.rows), "e": torch.full((count,), number)}
        rows["t"] = torch.arange(first, first + count)
        done = torch.arange(count) == (count - 1 if end else -1)
        lane_of = torch.full((count,), lane)
        return TensorDict({**rows, "lane": lane_of, "next": {"done": done}}, [count])

    def sample(self) -> None:
        if not self.rb.sampler.can_sample(self.rb.storage, 6):  # no episode has 3 rows
            return
        batch = self.rb.sample(6)
        same = batch["sequence_id"].diff() == 0
        assert ((batch["t"].diff() == 1) & (batch["e"].diff() == 0))[same].all()
        self.batches.append(batch)

    def learn(self) -> None:
        """Set priorities of rows of an earlier batch, of which some may be gone."""
        if not self.batches:
            return
        batch = self.random.choice(self.batches)
        stored = {tuple(at): n for at, n in zip(*self._stored(), strict=True)}
        value = torch.tensor([self.random.randrange(1, 40) / 4 for _ in range(len(batch))])
        self.rb.update_tensordict_priority(batch.set("td_error", value))
        largest: dict[int, float] = {}
        index = batch["index"].reshape(len(batch), -1).tolist()
        for at, n, e, p in zip(
            index, *(batch[k].tolist() for k in ("n", "e", "td_error")), strict=True
        ):
            if stored.get(tuple(at)) == n:
                largest[e] = max(largest.get(e, 0.0), p)
            else:
                self.dropped += 1
        self.priority.update(largest)
        self.most = max(self.most, *largest.values(), 1.0)

    def _stored(self) -> tuple[list[list[int]], list[int]]:
        n = self._column("n")
        return torch.ones_like(n).nonzero().tolist(), n.flatten().tolist()

    def _column(self, key: str) -> torch.Tensor:
        """The values of the stored rows, by time first, as an index has them."""
        return self.rb[:][key].T if self.kind == "lanes" else self.rb[:][key]

    def reload(self, folder: Path) -> None:
        self.rb.dumps(folder)
        self.rb = make(*STORAGES[self.kind](), strict_length=self.strict)
        self.rb.loads(folder)
        self.open.clear()  # no episode spans a load

    def check(self) -> None:
        found = self.rb.sampler.stored_priorities(self.rb.storage)
        expected = [self.priority[e] for e in self._column("e").flatten().tolist()]
        assert found.tolist() == expected
        assert self.rb.sampler.dropped_updates == self.dropped


@pytest.mark.parametrize("kind", STORAGES)
def test_priorities_stay_with_their_episodes(kind: str, tmp_path: Path) -> None:
    for seed in range(6):
        model = Model(kind, seed)
        model.write()
        for step in range(60):
            what = model.random.choice([model.write, model.write, model.sample, model.learn])
            what()
            if step == 40:
                model.reload(tmp_path)
            if model.random.random() < 0.3:
                model.check()
        model.check()


def test_priorities_of_episodes_are_recovered_and_copied(tmp_path: Path) -> None:
    def opened() -> ReplayBuffer:
        return make(LazyMemmapStorage(30, scratch_dir=tmp_path, recover=True))

    rb = opened()
    write(rb, {0: 4, 1: 5})
    rb.update_priority(torch.tensor([1, 5]), torch.tensor([4.0, 2.0]))
    del rb
    rb = opened()
    expected = [4.0] * 4 + [2.0] * 5
    assert rb.sampler.stored_priorities(rb.storage).tolist() == expected
    other = copy.copy(rb.sampler)
    other.update_priority(torch.tensor([0]), 9.0, storage=rb.storage)
    assert other.stored_priorities(rb.storage).tolist() == [9.0] * 4 + [2.0] * 5
    assert rb.sampler.stored_priorities(rb.storage).tolist() == expected


def test_priorities_come_with_rows_and_from_other_units(tmp_path: Path) -> None:
    rows = TensorDict(
        {
            "end": torch.tensor([0, 0, 1, 0, 1, 0, 0, 0, 1]),
            "t": torch.tensor([0, 1, 2, 100, 101, 200, 201, 202, 203]),
            "td_error": torch.tensor([1.0, 5, 2, 3, 1, 0, 0, 7, 0]),
        },
        [9],
    )
    step, own = (make(unit=unit, end_keys=["end"], slice_len=2) for unit in ("step", "episode"))

    def priorities() -> list[float]:
        return own.sampler.stored_priorities(own.storage).tolist()

    for rb in (step, own):
        rb.extend(rows)
    assert priorities() == [5.0] * 3 + [3.0] * 2 + [7.0] * 4
    for alpha, law in (
        (0.0, [0.5, 0.5, 1, 1 / 3, 1 / 3, 1 / 3]),
        (1.0, [2.5, 2.5, 3] + [7 / 3] * 3),
    ):
        own.sampler.alpha = alpha
        counts: Counter[int] = Counter()
        for _ in range(20):
            counts.update(own.sample(300)["t"][::2].tolist())
        expected = [3000 * p / sum(law) for p in law]
        found = [counts[t] for t in (0, 1, 100, 200, 201, 202)]
        assert chi_square_p(found, expected) > 1e-3
    step.dumps(tmp_path)
    own.loads(tmp_path)  # the priority of the last row
    assert priorities() == [2.0] * 3 + [1.0] * 2 + [0.0] * 4


@pytest.mark.parametrize("unit", ["step", "slice"])
def test_starts_are_drawn_in_chosen_episodes_only(unit: str) -> None:
    rb = make(LazyTensorStorage(20), unit=unit, where=lambda data: data["task"] == 1)
    write(rb, {0: 4, 1: 5, 2: 4})
    rb.tag(torch.tensor([4, 9]), {"task": torch.tensor([1, 1])})
    priority = {100 * e + i: 1.0 + (e + 2 * i) % 5 for e in range(5) for i in range(7)}
    rb.update_priority(torch.arange(13), torch.tensor([priority[t] for t in rb[:]["t"].tolist()]))

    def check(*starts: int) -> None:
        found = drawn(rb, 400)
        assert found.keys() == set(starts)
        mass = [priority[t] for t in starts]
        expected = [1200 * p / sum(mass) for p in mass]
        assert chi_square_p([found[t][0] for t in starts], expected) > 1e-3

    check(100, 101, 102, 200, 201)
    rb.tag(torch.tensor([0, 4]), {"task": torch.tensor([1, 0])})
    check(0, 1, 200, 201)
    index = write(rb, {3: 6})
    rb.update_priority(index, torch.tensor([priority[300 + i] for i in range(6)]))
    check(0, 1, 200, 201)
    rb.tag(index[:1], {"task": 1})
    check(0, 1, 200, 201, 300, 301, 302, 303)
    index = write(rb, {4: 5})  # overwrites episode 0
    rb.update_priority(index, torch.tensor([priority[400 + i] for i in range(5)]))
    check(200, 201, 300, 301, 302, 303)


def test_starts_of_windows_that_cross_ends() -> None:
    rb = make(LazyTensorStorage(30), unit="step", cross=True)
    write(rb, {0: 4, 1: 2, 2: 3})
    rb.update_priority(torch.arange(9), torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 50, 50]))
    found = drawn(rb)
    starts = [0, 1, 2, 3, 100, 101, 200]
    assert found.keys() == set(starts)
    expected = [4500 * p / 28 for p in range(1, 8)]
    assert chi_square_p([found[t][0] for t in starts], expected) > 1e-3


def test_options_that_exclude_each_other() -> None:
    for options, text in (
        ({"cross": True}, "cross=True"), ({"recent": (0.5, 3)}, "recent="),
        ({"max_priority_within_buffer": True}, "within_buffer"), ({"unit": "rows"}, "unit"),
        ({"unit": "step", "cross": True, "where": lambda data: data.length > 1}, "cross=True"),
    ):  # fmt: skip
        refuses(ValueError, text, make, **options)
    refuses(TypeError, "where", make, where=3)
