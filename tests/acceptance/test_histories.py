"""Random histories of buffers against lists of rows that are scanned after every operation.

One model for rings, for lanes that advance together and for interleaved streams; one question
after the other: episodes, windows, sums, stacks, previous steps, observations stored once.
"""

from __future__ import annotations

import tempfile
import warnings
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from replaykit import (
    Compose,
    LazyTensorStorage,
    NStep,
    PreviousStep,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    StackFrames,
    StepCount,
)
from replaykit.episodes import EndReason, Head
from replaykit.errors import NotEnoughData
from tests.support.refusals import refuses

STEPS, GAMMA, FRAMES = 3, 0.5, 3


@dataclass
class Row:
    lane: int
    number: int  # tells it from every other row
    x: float
    next_x: float
    reward: float
    code: int  # 0 goes on, 1 terminated, 2 truncated
    position: int
    at: int  # how many rows were written before it
    severed: int = 0  # 1: cut by hand, 2: by a restart
    joined: bool = False  # the first one after a clear in the middle of an episode


@dataclass
class Run:
    """An episode: all of its rows, and those that are stored."""

    rows: list[Row]
    stored: list[Row]
    head: Head
    reason: EndReason


class Model:
    """All rows since the last clear in the order of writing; the last ``kept`` are stored."""

    def __init__(self, slots: int, lanes: int, streams: bool) -> None:
        self.slots, self.lanes, self.streams = slots, lanes, streams
        self.rows: list[Row] = []
        self.kept = 0  # time slots
        self.steps = 0  # time slots ever written
        self.clock = [0] * lanes
        self.joined = [False] * lanes

    @property
    def stored(self) -> list[Row]:
        count = self.kept * (1 if self.streams else self.lanes)
        return self.rows[len(self.rows) - count :]

    def newest(self, lane: int) -> Row | None:
        return next((row for row in reversed(self.rows) if row.lane == lane), None)

    def write(self, steps: list[list[tuple[int, int, float]]]) -> list[Row]:
        """Steps of ``(lane, code, reward)``; returns the new rows."""
        fresh = []
        for step in steps:
            for lane, code, reward in step:
                before = self.newest(lane)
                if before is None or before.code or before.severed:
                    self.clock[lane] += 10  # what comes is no continuation
                c = self.clock[lane]
                self.clock[lane] += 1
                end = c + 0.5 if code else c + 1.0
                fresh.append(
                    Row(lane, 100_000 * lane + c, float(c), end, reward, code, self.steps, 0)
                )
                fresh[-1].joined = before is None and self.joined[lane]
                self.joined[lane] = False
                self.rows.append(fresh[-1])
            self.steps += 1
            self.kept = min(self.slots, self.kept + 1)
        return fresh

    def cut(self, lane: int) -> None:
        newest = self.newest(lane)
        if newest is not None and not newest.code:
            newest.severed = newest.severed or 1

    def clear(self) -> None:
        for lane in range(self.lanes):
            newest = self.newest(lane)
            if newest is not None:
                self.joined[lane] = not (newest.code or newest.severed)
        self.rows, self.kept = [], 0

    def restart(self, slots: int) -> None:
        for lane in range(self.lanes):
            newest = self.newest(lane)
            if newest is not None and not newest.code:
                newest.severed = newest.severed or 2
        self.slots, self.kept = slots, min(self.kept, slots)
        # What came before the rows that were taken over is known, but of streams without any.
        lanes = {row.lane for row in self.stored}
        self.rows = [row for row in self.rows if row.lane in lanes]

    def runs(self) -> list[Run]:
        found = []
        stored = {id(row) for row in self.stored}
        for lane in range(self.lanes):
            own = [row for row in self.rows if row.lane == lane]
            start, head = 0, Head.CUT if own and own[0].joined else Head.RESET
            for at, row in enumerate(own):
                if not row.code and not row.severed and at < len(own) - 1:
                    continue
                rows = own[start : at + 1]
                left = [one for one in rows if id(one) in stored]
                if left:
                    reason = EndReason(row.code or (3 if row.severed else 0))
                    how = Head.EVICTED if len(left) < len(rows) else head
                    found.append(Run(rows, left, how, reason))
                start = at + 1
                head = Head.CUT if row.severed == 1 and not row.code else Head.RESET
        return found


class Histories:
    """Two buffers of the same history: one as it is, one seen through transforms."""

    def __init__(self, slots: int, lanes: int, streams: bool, once: bool) -> None:
        self.lanes, self.streams, self.once = lanes, streams, once
        self.model = Model(slots, lanes, streams)
        self.plain, self.seen = self.fresh(slots)

    def fresh(self, slots: int) -> tuple[ReplayBuffer, ReplayBuffer]:
        options: dict[str, Any] = {"ndim": 2 if self.lanes > 1 and not self.streams else 1}
        size = slots * (1 if self.streams else self.lanes)
        if self.streams:
            options["lane_key"] = "lane"
        once: dict[str, Any] = {"dedup_next": ["x"], "on_mismatch": "error"} if self.once else {}
        views = Compose(
            NStep(STEPS, GAMMA), StackFrames(["x"], FRAMES), PreviousStep(["number"]), StepCount()
        )
        plain = ReplayBuffer(
            storage=LazyTensorStorage(size, **options),
            generator=torch.Generator().manual_seed(0),
        )
        seen = ReplayBuffer(
            storage=LazyTensorStorage(size, **options, **once),
            sampler=SamplerWithoutReplacement(shuffle=False),
            transform=views,
            generator=torch.Generator().manual_seed(0),
        )
        return plain, seen

    def data(self, rows: list[Row]) -> TensorDict:
        shape = [len(rows)]
        if self.lanes > 1 and not self.streams:
            shape = [len(rows) // self.lanes, self.lanes]

        def column(values: list[Any], *end: int) -> torch.Tensor:
            return torch.tensor(values).view(*shape, *end)

        code = column([row.code for row in rows], 1)
        data = TensorDict(
            {
                "number": column([row.number for row in rows]),
                "lane": column([row.lane for row in rows]),
                "x": column([row.x for row in rows]),
                "next": {
                    "x": column([row.next_x for row in rows]),
                    "reward": column([row.reward for row in rows], 1),
                    "terminated": code == 1,
                    "truncated": code == 2,
                    "done": code > 0,
                },
            },
            shape,
        )
        return data if len(shape) == 1 else data.transpose(0, 1)

    # -- operations -----------------------------------------------------------------------------

    def write(self, draw: Any) -> None:
        model = self.model
        count = draw(st.integers(1, 2 * model.slots))
        codes = st.sampled_from([0, 0, 0, 0, 1, 2])
        rewards = st.integers(-8, 8).map(lambda n: n / 8)
        if self.streams:
            order = draw(st.lists(st.integers(0, self.lanes - 1), min_size=count, max_size=count))
            # A stream of which no row is left is forgotten: it is not let come to that.
            seen = [row.lane for row in model.rows]
            for at in range(count):
                recent = (seen + order[:at])[-(model.slots - self.lanes) :]
                for lane in range(self.lanes):
                    if lane in seen + order[:at] and lane not in recent:
                        order[at] = lane
            plan = [[lane] for lane in order]
        else:
            plan = [list(range(self.lanes))] * count
        total = sum(map(len, plan))
        values = iter(
            zip(
                draw(st.lists(codes, min_size=total, max_size=total)),
                draw(st.lists(rewards, min_size=total, max_size=total)),
                strict=True,
            )
        )
        steps = [[(lane, *next(values)) for lane in step] for step in plan]
        rows = model.write(steps)
        for buffer in (self.plain, self.seen):
            buffer.extend(self.data(rows))

    def edit(self, draw: Any) -> None:
        """Ends an episode where none ended, or joins what had ended."""
        stored = self.model.stored
        if not stored:
            return
        row = stored[draw(st.integers(0, len(stored) - 1))]
        # Of the newest row of a lane an end is not taken back: what is written next is made to
        # follow from what the model knew of it.
        continues = row is not self.model.newest(row.lane)
        row.code = draw(st.sampled_from([0, 1, 2])) if continues else row.code
        number = self.plain["number"]
        for key, value in (("terminated", 1), ("truncated", 2), ("done", 0)):
            column = self.plain["next", key].clone()
            column[number == row.number] = row.code == value if value else row.code > 0
            for buffer in (self.plain, self.seen):
                buffer["next", key] = column

    def cut(self, draw: Any) -> None:
        lanes = sorted({row.lane for row in self.model.stored})
        if not lanes:
            return
        lane = draw(st.sampled_from([None, *lanes]))
        for one in range(self.lanes) if lane is None else [lane]:
            self.model.cut(one)
        for buffer in (self.plain, self.seen):
            buffer.cut(lane)

    def clear(self, draw: Any) -> None:
        self.model.clear()
        self.plain.empty()
        self.seen.empty()

    def load(self, draw: Any) -> None:
        slots = max(1, self.model.slots + draw(st.integers(-3, 3)))
        if self.streams:
            slots = max(slots, self.lanes + 3)
        if not self.model.rows:
            return
        fresh = self.fresh(slots)
        self.plain.set_sampler(RandomSampler())  # that of the buffer it is loaded into
        for old, new in zip((self.plain, self.seen), fresh, strict=True):
            with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
                warnings.filterwarnings("ignore", "[0-9]+ rows do not fit")
                old.dumps(folder + "/saved")
                new.loads(folder + "/saved")
        self.plain, self.seen = fresh
        self.model.restart(slots)

    # -- questions ------------------------------------------------------------------------------

    def check_episodes(self) -> None:
        runs = self.model.runs()
        for buffer in (self.plain, self.seen):
            found = buffer.episodes
            assert found.lengths.tolist() == [len(run.stored) for run in runs]
            assert found.reasons.tolist() == [run.reason for run in runs]
            assert found.heads.tolist() == [run.head for run in runs]
            assert found.begins.tolist() == [run.rows[0].position for run in runs]
            if not runs:
                continue
            rows = found.rows()
            flat = [(run, row) for run in runs for row in run.stored]
            assert rows["number"].tolist() == [row.number for _, row in flat]
            assert rows["x"].tolist() == [row.x for _, row in flat]
            assert rows["next", "x"].tolist() == [row.next_x for _, row in flat]
            index = found.index
            assert found.steps_to_end(index).tolist() == [
                run.rows.index(run.rows[-1]) - run.rows.index(row) for run, row in flat
            ]
            assert found.step(index).tolist() == [run.rows.index(row) for run, row in flat]
            assert found.end(index).tolist() == [run.rows[-1].position for run, _ in flat]
            assert found.position(index).tolist() == [row.position for _, row in flat]

    def windows(self, length: int, kind: str) -> Counter[tuple[int, ...]]:
        """Numbers of the real rows of every window."""
        found: Counter[tuple[int, ...]] = Counter()
        for run in self.model.runs():
            own = [row.number for row in run.stored]
            n = len(own)
            over = {"left": (1, 0), "right": (0, 1), "both": (1, 1)}.get(kind.split()[0], (0, 0))
            low, high = -(length - 1) * over[0], n - length + (length - 1) * over[1]
            whole = any(over) and n <= length and "law" not in kind
            if whole or (kind == "shorter" and n < length):
                low = high = 0
            for start in range(low, high + 1):
                found[tuple(own[max(start, 0) : start + length])] += 1
        return found

    def check_windows(self, length: int, kind: str) -> None:
        expected = self.windows(length, kind)
        count = sum(expected.values())
        options: dict[str, Any] = {"slice_len": length, "flat": False}
        if kind == "shorter":
            options["strict_length"] = False
            options["pad_output"] = True
        elif kind != "inside":
            options["pad"] = kind.split()[0]
            options["short"] = "law" if "law" in kind else "whole"

        def drawn(sampler: Any, windows: int) -> Counter[tuple[int, ...]]:
            self.plain.set_sampler(sampler)
            batch = self.plain.sample(windows * length)
            mask = batch.get(("collector", "mask"), torch.ones_like(batch["number"] >= 0))
            rows = zip(batch["number"].tolist(), mask.tolist(), strict=True)
            return Counter(
                tuple(n for n, real in zip(numbers, reals, strict=True) if real)
                for numbers, reals in rows
            )

        if not count:
            for sampler in (SliceSampler(**options), SliceSampler(**options, measure="lane")):
                self.plain.set_sampler(sampler)
                assert not self.plain.can_sample(length)
                with pytest.raises(RuntimeError):
                    self.plain.sample(length)
            return
        every = SliceSampler(**options, draw="without_replacement")
        assert drawn(every, count) == expected
        with pytest.raises(NotEnoughData):
            self.plain.sample((count + 1) * length)
        for measure in ("window", "trajectory", "lane", "transition"):
            assert set(drawn(SliceSampler(**options, measure=measure), 20)) <= set(expected)
        even = drawn(SliceSampler(**options, draw="stratified"), 2 * count)
        assert even == Counter({window: 2 * times for window, times in expected.items()})
        if kind == "inside":
            weighted = PrioritizedSliceSampler(alpha=0.5, beta=0.5, draw="stratified", **options)
            assert set(drawn(weighted, 4 * count)) == set(expected)
            runs = [run for run in self.model.runs() if len(run.stored) >= length]
            passing = drawn(SliceSamplerWithoutReplacement(**options), len(runs))
            assert set(passing) <= set(expected)
            where = {row.number: at for at, run in enumerate(runs) for row in run.stored}
            assert sorted(where[window[0]] for window in passing.elements()) == [*range(len(runs))]

    def check_views(self) -> None:
        wanted = {}
        for run in self.model.runs():
            first = run.rows.index(run.stored[0])
            for row in run.stored:
                t = run.rows.index(row)
                if run.head != Head.RESET and t - first < FRAMES - 1:
                    continue  # history is missing
                wanted[row.number] = (run, t)
        if not wanted:
            assert not self.seen.can_sample(1)
            if self.model.stored:
                refuses(NotEnoughData, "history", self.seen.sample, 1)
            return
        self.seen.set_sampler(PrioritizedSampler(alpha=0.7, beta=0.4))
        assert set(self.seen.sample(20)["number"].tolist()) <= set(wanted)
        self.seen.set_sampler(SamplerWithoutReplacement(shuffle=False))
        batch = self.seen.sample(len(wanted))
        assert Counter(batch["number"].tolist()) == Counter(wanted.keys())
        for row in batch:
            run, t = wanted[int(row["number"])]
            rows, last = run.rows, len(run.rows) - 1
            m = min(STEPS, last - t + 1)
            to = rows[t + m - 1]
            assert row["steps_used"].item() == m
            total = sum(GAMMA**k * rows[t + k].reward for k in range(m))
            assert row["next", "reward"].item() == total
            assert row["next", "reward_1"].item() == rows[t].reward
            assert row["discount"].item() == GAMMA**m
            assert row["bootstrap"].item() == (to.code != 1)
            assert row["next", "done"].item() == (to.code > 0)
            assert row["x"].tolist() == [rows[max(t - k, 0)].x for k in (2, 1, 0)]
            end = t + m - 1
            assert row["next", "x"].tolist() == [
                *(rows[max(end - k, 0)].x for k in (1, 0)),
                to.next_x,
            ]
            assert row["previous_number"].item() == (rows[t - 1].number if t else 0)
            assert row["step_count"].item() == t


OPERATIONS = ["write", "write", "write", "edit", "cut", "clear", "load"]
KINDS = ["inside", "shorter", "left", "right", "both", "left law", "right law", "both law"]


@pytest.mark.acceptance("C6", "C11", "C24", "C25", "C34", "C38", "C39", "C48")
@pytest.mark.acceptance("S5", "S7", "S26", "F1", "F49", "F53")
@settings(max_examples=25, deadline=None, phases=[Phase.generate])
@given(st.data())
@pytest.mark.parametrize("layout", ["ring", "lanes", "streams"])
def test_random_histories_match_a_scan(layout: str, data: st.DataObject) -> None:
    lanes = 1 if layout == "ring" else data.draw(st.integers(2, 3))
    streams = layout == "streams"
    slots = data.draw(st.integers(lanes + 3 if streams else 1, 9))
    histories = Histories(slots, lanes, streams, once=True)
    for _ in range(data.draw(st.integers(1, 6))):
        name = data.draw(st.sampled_from(OPERATIONS))
        getattr(histories, name)(data.draw)
        histories.check_episodes()
        if not histories.model.steps:
            continue
        histories.check_views()
        length, kind = data.draw(st.integers(1, 4)), data.draw(st.sampled_from(KINDS))
        if length <= histories.model.slots:
            histories.check_windows(length, kind)
