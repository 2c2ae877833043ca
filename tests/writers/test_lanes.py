"""A ring for each stream, against lists that keep all that was ever written."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from replaykit import (
    LaneWriter,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    NStep,
    PrioritizedSliceSampler,
    ReplayBuffer,
    RoundRobinWriter,
    SliceSampler,
    TensorStorage,
)
from replaykit.episodes import (
    EPISODES,
    ROWS,
    WINDOWS,
    BoundaryRule,
    CountLaw,
    EpisodeIndex,
    Head,
)
from replaykit.errors import BufferFull, SchemaError
from tests.episodes.test_interleaved import check_laws, set_ends
from tests.samplers.chi_square import chi_square_p
from tests.support.laws import window_count
from tests.support.refusals import refuses

SWITCHED, SEVERED, RESTORED = 3, 4, 5

KEYS = [3, 0, -(2**40)]

LAWS = [
    CountLaw.strict(1),
    CountLaw.strict(3),
    CountLaw(1, 1, past=1),
    CountLaw(2, 0, 1, past=2, open_future=1),
    CountLaw(1, 2, intact=True),
]


@dataclass(eq=False)
class Row:
    position: int
    code: int
    id: int
    init: bool
    mark: int = 0


@dataclass
class Run:
    """An episode: its stored rows, all of its rows, its head, and why it ended."""

    stored: list[Row]
    rows: list[Row]
    head: int
    code: int


class Model:
    """All rows of each stream since the last ``empty``, of which the newest are stored."""

    def __init__(self, length: int) -> None:
        self.length, self.written = length, 0
        self.lanes: dict[int, list[Row]] = {}
        self.first_head: dict[int, int] = {}
        self.kept: dict[int, int] = {}
        self.joined: set[int] = set()

    def write(self, key: int, code: int, id_: int, init: bool) -> None:
        if key not in self.lanes:
            self.lanes[key], self.kept[key] = [], 0
            self.first_head[key] = Head.CUT if key in self.joined else Head.RESET
            self.joined.discard(key)
        self.lanes[key].append(Row(self.written, code, id_, init))
        self.kept[key] = min(self.kept[key] + 1, self.length)
        self.written += 1

    def stored(self, key: int) -> list[Row]:
        return self.lanes[key][len(self.lanes[key]) - self.kept[key] :]

    def in_order(self) -> list[Row]:
        rows = [row for key in self.lanes for row in self.stored(key)]
        return sorted(rows, key=lambda row: row.position)

    def runs(self, key: int) -> list[Run]:
        found, head, rows = [], self.first_head[key], self.lanes[key]
        stored = set(map(id, self.stored(key)))
        run: list[Row] = []
        for row, after in zip(rows, [*rows[1:], None], strict=True):
            run.append(row)
            code = row.code or row.mark
            if not code and after is not None and after.id != row.id:
                code = SWITCHED
            if not code and after is not None:
                continue
            own = [one for one in run if id(one) in stored]
            if own:
                start = head if run[0].init else Head.CUT
                start = Head.EVICTED if len(own) < len(run) else start
                found.append(Run(own, run, start, code))
            head, run = Head.CUT if code == SEVERED else Head.RESET, []
        return found

    def all_runs(self) -> list[Run]:
        return [run for key in sorted(self.lanes) for run in self.runs(key)]

    def cut(self, keys: list[int], code: int) -> None:
        for key in keys:
            newest = self.lanes[key][-1]
            newest.mark = newest.mark or code

    def empty(self) -> None:
        ends = {key: rows[-1] for key, rows in self.lanes.items()}
        self.joined |= {key for key, row in ends.items() if not row.code and not row.mark}
        self.lanes, self.kept, self.first_head = {}, {}, {}

    def shrink(self, length: int, slots: int) -> None:
        """What loading into a buffer of other sizes leaves: as many of each as fit for all."""
        most = length
        while sum(min(kept, most) for kept in self.kept.values()) > slots:
            most -= 1
        self.length = length
        # Where their episodes began is known of those that are there.
        self.kept = {key: min(kept, most) for key, kept in self.kept.items()}

    def windows(self, law: CountLaw, kind: int) -> tuple[list[int], list[tuple[int, ...]]]:
        totals, found = [], []
        for lane, key in enumerate(sorted(self.lanes)):
            before = len(found)
            for run in self.runs(key):
                reset, is_open = run.head == Head.RESET, not run.code
                count = window_count(law, len(run.stored), reset=reset, is_open=is_open)
                mass = {WINDOWS: count, EPISODES: min(count, 1), ROWS: count and len(run.stored)}
                skip = 0 if reset else law.past
                rows = len(run.stored) - skip - (law.open_future if is_open else 0)
                base = run.stored[skip].position if mass[kind] else 0
                found += [(lane, base, rows, count, rest) for rest in range(mass[kind])]
            totals.append(len(found) - before)
        return totals, found


def batch(rows: list[tuple[int, int, int, bool]], first: int = 0) -> TensorDict:
    key, code, id_, init = (torch.tensor(column) for column in zip(*rows, strict=True))
    flags = {"terminated": code == 1, "truncated": code == 2, "done": code > 0}
    number = torch.arange(first, first + len(rows))
    data = {"env": key, "episode": id_, "is_init": init, "number": number, "next": flags}
    return TensorDict(data, [len(rows)])


def check(rb: ReplayBuffer, model: Model) -> None:
    if not rb.storage.initialized:
        assert not model.lanes
        return
    ledger, rows = rb.storage.ledger, model.in_order()
    slots = ledger.write_order()
    assert sorted(slots.tolist()) == list(range(len(rb))) == list(range(len(rows)))
    assert ledger.positions(slots).tolist() == [row.position for row in rows]
    if rows:
        assert rb[:]["number"][slots].tolist() == [row.position for row in rows]
    index, runs = rb.storage.episodes, model.all_runs()
    assert not index.in_ring
    assert index.stored_rows() == len(rows)
    assert index.sizes().tolist() == [model.kept[key] for key in sorted(model.lanes)]
    found = rb.episodes
    assert [one.rows()["number"].tolist() if len(one.index) else [] for one in found] == [
        [row.position for row in run.stored] for run in runs
    ]
    assert found.begins.tolist() == [run.rows[0].position for run in runs]
    assert found.heads.tolist() == [run.head for run in runs]
    assert found.reasons.tolist() == [min(run.code, 3) for run in runs]
    assert [one.evicted for one in found] == [len(run.rows) - len(run.stored) for run in runs]
    check_laws(rb, model, LAWS)
    if rows:
        check_streams(rb, model, index)


def check_streams(rb: ReplayBuffer, model: Model, index: EpisodeIndex) -> None:
    """Nothing is read across a cut, and everything across an eviction of other streams' rows."""
    ledger = rb.storage.ledger
    for lane, key in enumerate(sorted(model.lanes)):
        rows = model.stored(key)
        lo, hi = (int(bound) for bound in index.bounds(np.array(lane)))
        assert hi - lo == len(rows)
        time = np.arange(lo, hi)
        lanes = np.full(len(time), lane)
        slots = torch.from_numpy(index.element(time, lanes))
        assert ledger.positions(slots).tolist() == [row.position for row in rows]
        first, last = index.streams(time, lanes)
        marks = [n for n, row in enumerate(rows) if row.mark]
        for n in range(len(rows)):
            left = max([mark + 1 for mark in marks if mark < n], default=0)
            right = min([mark for mark in marks if mark >= n], default=len(rows) - 1)
            assert (first[n] - lo, last[n] - lo) == (left, right)
    for count in (1, 2, model.written):
        first = 0 if count >= len(model.in_order()) else model.written - count
        order = ledger.write_order()
        slots = order[ledger.positions(order) >= first]
        ended, lane, code = index.ended_among(slots.numpy())
        got = ledger.positions(torch.from_numpy(index.element(ended, lane))).tolist()
        newest = [row for row in model.in_order() if row.position >= first]
        assert sorted(zip(got, code.tolist(), strict=True)) == [
            (row.position, row.code) for row in newest if row.code
        ]


ROW = st.tuples(
    st.sampled_from([*KEYS, KEYS[0]]),
    st.sampled_from([0, 0, 0, 0, 1, 2]),
    st.sampled_from([0, 0, 0, 1]),
    st.sampled_from([True, True, True, False]),
)
KINDS = ["extend"] * 8 + ["add", "cut", "cut one", "empty", "edit", "load", "resize", "other rule"]


def made(length: int, slots: int) -> ReplayBuffer:
    storage = LazyTensorStorage(slots, lane_key="env")
    return ReplayBuffer(storage=storage, writer=LaneWriter(length, track_generations=True))


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 5), st.integers(0, 2))
def test_every_stream_keeps_its_newest_rows(data: st.DataObject, length: int, more: int) -> None:
    slots = 3 * length + more
    rb, model = made(length, slots), Model(length)
    held = []
    for _ in range(data.draw(st.integers(1, 12))):
        kind = data.draw(st.sampled_from(KINDS))
        if kind in ("extend", "add"):
            most = 1 if kind == "add" else 3 * slots
            # Often only some of the streams.
            keys = data.draw(st.sets(st.sampled_from(KEYS), min_size=1))
            rows = data.draw(st.lists(ROW, min_size=1, max_size=most))
            rows = [row for row in rows if row[0] in keys] or [(min(keys), 0, 0, True)]
            written = batch(rows, model.written)
            if kind == "add":
                index = torch.tensor([rb.add(written[0])])
                rows = rows[:1]
            else:
                index = rb.extend(written)
            for row in rows:
                model.write(*row)
            stored = rb.storage.ledger.positions(index).tolist()
            last = {slot: model.written - len(rows) + n for n, slot in enumerate(index.tolist())}
            assert stored == [last[slot] for slot in index.tolist()]
            assert rb.write_count == model.written
        elif kind == "empty":
            rb.empty(empty_write_count=False)
            model.empty()
        elif kind == "cut":
            rb.cut()
            model.cut(list(model.lanes), SEVERED)
        elif kind == "cut one" and model.lanes:
            key = data.draw(st.sampled_from(sorted(model.lanes)))
            rb.cut(key)
            model.cut([key], SEVERED)
        elif kind == "edit" and model.lanes:
            edit(rb, model, data)
        elif kind == "other rule" and rb.storage.initialized:
            held.append(rb.storage.indexes.of(BoundaryRule(flags=(), ids=())))
        elif kind == "load" and rb.storage.initialized:
            state, rb = rb.state_dict(), made(length, slots)
            rb.load_state_dict(state)
            model.joined = set()
            model.cut(list(model.lanes), RESTORED)
            held = []
        elif kind == "resize" and rb.storage.initialized:
            length = data.draw(st.integers(1, 5))
            state, slots = rb.state_dict(), data.draw(st.integers(3 * length, 16))
            rb = made(length, slots)
            if sum(min(length, kept) for kept in model.kept.values()) < len(model.in_order()):
                with pytest.warns(UserWarning, match="left out"):
                    rb.load_state_dict(state)
            else:
                rb.load_state_dict(state)
            model.shrink(length, slots)
            model.joined = set()
            model.cut(list(model.lanes), RESTORED)
            held = []
        if data.draw(st.booleans()):
            check(rb, model)
            for one in held:
                one.sync()
                table = one.table()
                assert one.stored_rows() == len(model.in_order())
                assert int((table.last - table.first + 1).sum()) == one.stored_rows()
    check(rb, model)


def edit(rb: ReplayBuffer, model: Model, data: st.DataObject) -> None:
    rows = model.in_order()
    codes = data.draw(
        st.lists(st.sampled_from([0, 0, 1, 2]), min_size=len(rows), max_size=len(rows))
    )
    set_ends(rb, codes)
    for row, value in zip(rows, codes, strict=True):
        row.code = value


def steps(lanes: list[int], t: list[int], *, every: int = 7) -> TensorDict:
    """One row for each of some lanes, with an episode every so many steps."""
    time = torch.tensor(t)
    done = (time % every == every - 1)[:, None]
    flags = {"terminated": done, "truncated": torch.zeros_like(done), "done": done}
    after = {"reward": time[:, None].float(), "observation": time[:, None] + 1.0, **flags}
    data = {"env": torch.tensor(lanes), "t": time, "observation": time[:, None].float()}
    return TensorDict({**data, "next": after}, [len(lanes)])


def contents(rb: ReplayBuffer, key: str = "t") -> dict[int, list[int]]:
    """What every lane has, from the oldest row on."""
    rows = rb.storage.read(rb.storage.ledger.write_order())
    found: dict[int, list[int]] = {}
    for env, value in zip(rows["env"].tolist(), rows[key].tolist(), strict=True):
        found.setdefault(env, []).append(value)
    return found


@pytest.mark.parametrize("length", [90, None])
def test_lanes_and_their_windows_are_drawn_equally_often(length: int | None) -> None:
    """ALF's law, also of streams in one ring: 1 / lanes * 1 / windows of the lane."""
    first = 0 if length is None else 210
    rb = ReplayBuffer(
        storage=LazyTensorStorage(3 * (length or 104), lane_key="env"),
        writer=None if length is None else LaneWriter(length),
        sampler=SliceSampler(slice_len=2, measure="lane"),
        generator=torch.Generator().manual_seed(0),
    )
    for lane, rows in ((0, 11), (1, 300), (2, 1)):
        rb.extend(steps([lane] * rows, list(range(rows)), every=1000))
    starts = rb.sample(2 * 40_000)[::2]
    count = Counter(zip(starts["env"].tolist(), starts["t"].tolist(), strict=True))
    assert set(count) == {(0, t) for t in range(10)} | {(1, t) for t in range(first, 299)}
    expected = [40_000 / 2 / (10, 299 - first)[lane] for lane, _ in count]
    assert chi_square_p(list(count.values()), expected) > 1e-4


def test_more_streams_than_fit_are_refused_before_anything_changed() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(11, lane_key="env"), writer=LaneWriter(4))
    with pytest.raises(BufferFull, match=r"at most 2 streams of 4 rows in 11 slots.*got 3, 3 of"):
        rb.extend(steps([0, 1, 2], [0, 0, 0]))
    assert not rb.storage.initialized
    rb.extend(steps([0, 1, 1], [0, 0, 1]))
    before = rb.state_dict()
    for lanes in ([2], [0, 1, 2, 5, 0]):
        with pytest.raises(BufferFull, match=f"got {1 + max(2, len(set(lanes)) - 1)}"):
            rb.extend(steps(lanes, [9] * len(lanes)))
        assert contents(rb) == {0: [0], 1: [0, 1]}
    with pytest.raises(RuntimeError):
        rb.add(steps([2], [0])[0])
    with pytest.raises(SchemaError):
        rb.extend(TensorDict({"env": torch.tensor([0])}, [1]))
    after = rb.state_dict()
    assert after["_writer"]["_ledger"]["next_position"] == 3
    assert str(after["_writer"]) == str(before["_writer"])
    rb.empty()
    rb.extend(steps([7, 8] * 9, list(range(18))))
    assert contents(rb) == {7: [10, 12, 14, 16], 8: [11, 13, 15, 17]}


def test_unsupported_storages_and_rows_are_refused() -> None:
    for storage in (LazyTensorStorage(8), LazyTensorStorage(8, ndim=2), ListStorage(8)):
        refuses(ValueError, "lane_key", ReplayBuffer, storage=storage, writer=LaneWriter(4))
    rb = ReplayBuffer(storage=LazyTensorStorage(8, lane_key="env"), writer=LaneWriter(4))
    refuses(KeyError, "lane_key", rb.extend, TensorDict({"x": torch.zeros(3)}, [3]))
    refuses(RuntimeError, "TensorDicts", rb.extend, {"env": torch.zeros(3)})
    assert not rb.storage.initialized
    assert rb.extend(steps([], [])).tolist() == []
    refuses(RuntimeError, "chooses", rb.writer.write_at, [0], steps([0], [0]))
    for wrong in (0, 2.0, True, None):
        refuses(ValueError, "length", LaneWriter, wrong)


def test_rows_in_unknown_order_are_not_continued() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(8, lane_key="env"), writer=LaneWriter(4))
    rb.extend(steps([0, 1] * 5, list(range(10))))
    rb.storage.set([0], steps([1], [50]))
    refuses(RuntimeError, r"empty\(\)", rb.extend, steps([0], [10]))
    assert rb["t"][0] == 50
    rb.empty()
    rb.extend(steps([0], [11]))
    assert contents(rb) == {0: [11]}


@pytest.mark.parametrize("rows", [5, 8, 13])
def test_lane_writer_continues_rows_of_a_ring(rows: int) -> None:
    """A ring is gone on with; a ring goes on too, with streams severed where rows are missing."""
    rb = ReplayBuffer(storage=LazyTensorStorage(12, lane_key="env"))
    lanes = [0, 0, 1, 0, 1, 0, 0, 1, 0, 0, 0, 0, 1][:rows]
    rb.extend(steps(lanes, list(range(rows)), every=1000))
    had = contents(rb)
    rb.set_writer(LaneWriter(3))
    most = {lane: max(3, len(had[lane])) for lane in had}
    for t in range(100, 104):
        rb.extend(steps([1, 0, 1], [t, t, t + 50], every=1000))
        had[0] = [*had[0], t][-most[0] :]
        had[1] = [*had[1], t, t + 50][-most[1] :]
        assert contents(rb) == had
        assert [one.rows()["t"].tolist() for one in rb.episodes] == [had[0], had[1]]
    rb.set_writer(RoundRobinWriter())
    for t in range(200, 220):
        rb.extend(steps([t % 2], [t], every=1000))
        rows_ = rb[:]
        at = rb.episodes.index
        assert sorted(at.tolist()) == list(range(len(rb)))
        for episode in rb.episodes:
            assert len(set(rows_["env"][episode.index].tolist())) == 1
    assert sorted(rb["t"].tolist()) == list(range(208, 220))
    rb.set_writer(LaneWriter(3))
    refuses(RuntimeError, r"empty\(\)", rb.extend, steps([0], [0]))


def test_a_wrapped_tensordict_and_files(tmp_path: Path) -> None:
    wrapped = TensorStorage(steps([0, 1, 0, 1, 0, 0], list(range(6))), lane_key="env")
    files = LazyMemmapStorage(6, scratch_dir=tmp_path, lane_key="env")
    for storage, length in ((wrapped, 2), (files, 3)):
        rb = ReplayBuffer(storage=storage, writer=LaneWriter(length))
        if storage is files:
            rb.extend(steps([1, 0, 0, 1, 0, 0], [1, 0, 2, 3, 4, 5]))
            assert contents(rb) == {0: [2, 4, 5], 1: [1, 3]}
        rb.extend(steps([1], [6]))
        rb.extend(steps([0, 1], [7, 8]))
        expected = (
            {0: [4, 5, 7], 1: [3, 6, 8]} if storage is files else {0: [2, 4, 5, 7], 1: [6, 8]}
        )
        assert contents(rb) == expected


def test_rows_that_an_edit_gave_to_a_stream_beyond_its_length_are_loaded(tmp_path: Path) -> None:
    def fresh(length: int) -> ReplayBuffer:
        return ReplayBuffer(
            storage=LazyTensorStorage(12, lane_key="env"), writer=LaneWriter(length)
        )

    rb = fresh(4)
    for t in range(4):
        rb.extend(steps([0, 1], [t, t], every=1000))
    rb.set_("env", torch.tensor([0, 1, 0, 1, 0, 0, 0, 1]))
    expected = contents(rb)
    assert {lane: len(ts) for lane, ts in expected.items()} == {0: 5, 1: 3}
    rb.dumps(tmp_path)
    for length, options in ((4, {}), (4, {"mmap": True}), (5, {})):
        found = fresh(length)
        found.loads(tmp_path, **options)
        assert contents(found) == expected
        assert torch.equal(found[:]["t"], rb[:]["t"])
    other = fresh(3)
    with pytest.warns(UserWarning, match="2"):
        other.loads(tmp_path)
    assert {lane: len(ts) for lane, ts in contents(other).items()} == {0: 3, 1: 3}
    found = fresh(4)
    found.loads(tmp_path)
    for one in (rb, found):
        one.extend(steps([0, 1, 0], [9, 9, 10], every=1000))
    assert contents(found) == contents(rb)


def test_states_that_fit_no_writer_of_lanes_are_refused() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(8, lane_key="env"), writer=LaneWriter(4))
    rb.extend(steps([0, 1, 0], [0, 0, 1]))
    state = rb.writer.state_dict()
    assert state["_lanes"].tolist() == [0, 1, 0]
    for key, wrong, text in (
        ("_lanes", None, "_lanes"),
        ("_lanes", torch.zeros(2).long(), "_lanes|streams"),
        ("_lanes", torch.tensor([0, 1, 3]), "_lanes|streams"),
        ("_lanes", torch.tensor([0, -1, 0]), "_lanes|streams"),
        ("_length", 0, "expected _length as an int of at least 1"),
        ("_length", "4", "expected _length as an int of at least 1"),
        ("_ledger", {**state["_ledger"], "by_stream": 1}, "by_stream"),
        ("_kind", "round_robin", "round_robin"),
    ):
        refuses(ValueError, text, rb.writer.load_state_dict, {**state, key: wrong})
    rb.writer.load_state_dict(state)
    assert contents(rb) == {0: [0, 1], 1: [0]}


def test_the_storage_alone_can_be_loaded_too(tmp_path: Path) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(8, lane_key="env"), writer=LaneWriter(4))
    for t in range(11):
        rb.extend(steps([0, 1][: 1 + (t > 8)], [t, t][: 1 + (t > 8)], every=1000))
    rb.storage.dumps(tmp_path / "saved")
    for slots in (8, 12):
        storage = LazyTensorStorage(slots, lane_key="env")
        storage.loads(tmp_path / "saved")
        other = ReplayBuffer(storage=storage, writer=LaneWriter(4))
        assert contents(other) == {0: [7, 8, 9, 10], 1: [9, 10]}
        other.extend(steps([0, 1], [11, 11], every=1000))
        assert contents(other) == {0: [8, 9, 10, 11], 1: [9, 10, 11]}


@pytest.mark.acceptance("F1")
@pytest.mark.acceptance("S10")
@pytest.mark.parametrize("options", [{}, {"pad": "left"}, {"draw": "stratified"}, None], ids=str)
def test_windows_never_mix_lanes(options: dict[str, Any] | None) -> None:
    """Whatever lanes are written, also once they have gone round, and those that start late."""
    prioritized = options is None
    options = options or {}
    kind: Any = SliceSampler(slice_len=4, **options)
    if prioritized:
        kind = PrioritizedSliceSampler(100, alpha=1.0, beta=1.0, slice_len=4)
    generator = torch.Generator().manual_seed(1)
    rb = ReplayBuffer(
        storage=LazyTensorStorage(100, lane_key="env"),
        writer=LaneWriter(20, track_generations=True),
        sampler=kind,
        batch_size=80,
        generator=generator,
    )
    t, drawn = [0] * 5, 0
    for n in range(60):
        count = int(torch.randint(1, 30, (), generator=generator))
        lanes = torch.randint(1 + n // 12, (count,), generator=generator)
        numbers = []
        for lane in lanes.tolist():
            numbers.append(t[lane])
            t[lane] += 1
        rb.extend(steps(lanes.tolist(), numbers))
        stored = contents(rb)
        assert stored == {k: list(range(max(0, c - 20), c)) for k, c in enumerate(t) if c}
        if not rb.can_sample(80):
            continue
        sample = rb.sample()
        drawn += 1
        if prioritized:
            rb.update_priority(sample["index"], torch.rand(80, generator=generator) + 0.1)
        rows = sample[sample["collector", "mask"]] if "pad" in options else sample
        for one in rows["sequence_id"].unique():
            part = rows[rows["sequence_id"] == one]
            assert (part["env"] == part["env"][0]).all()
            assert (part["t"].diff() == 1).all()
            assert not part["next", "done"][:-1].any()
            assert set(part["t"].tolist()) <= set(stored[int(part["env"][0])])
    assert drawn > 50


def test_every_start_is_drawn_by_its_priority() -> None:
    """Exactly: of a stratified draw each count is at most 2 from what it has to be."""
    sampler = PrioritizedSliceSampler(30, alpha=1.0, beta=1.0, slice_len=2, draw="stratified")
    rb = ReplayBuffer(
        storage=LazyTensorStorage(30, lane_key="env"),
        writer=LaneWriter(10),
        sampler=sampler,
        generator=torch.Generator().manual_seed(0),
    )
    t = [0, 0, 0]
    for n in range(40):
        lanes = [0, 1, 0] if n % 3 else [0, 2]
        numbers = []
        for lane in lanes:
            numbers.append(t[lane])
            t[lane] += 1
        index = rb.extend(steps(lanes, numbers))
        rb.update_priority(index, rb["t"][index] + 1.0)
        priority = {
            (lane, time): time + 1.0
            for lane, times in contents(rb).items()
            for time in times
            if time + 1 in times and time % 7 != 6
        }
        if not priority:
            continue
        starts = rb.sample(2 * 500)[::2]
        count = Counter(zip(starts["env"].tolist(), starts["t"].tolist(), strict=True))
        total = sum(priority.values())
        assert set(count) <= set(priority)
        for key, value in priority.items():
            assert abs(count[key] - 500 * value / total) < 2


def test_sequential_draw_takes_every_window_once_and_skips_lost_rows() -> None:
    sampler = SliceSampler(slice_len=2, draw="sequential")
    rb = ReplayBuffer(
        storage=LazyTensorStorage(12, lane_key="env"), writer=LaneWriter(6), sampler=sampler
    )
    for t in range(9):
        rb.extend(steps([0, 1][: 1 + (t > 3)], [t, t][: 1 + (t > 3)], every=4))
    wanted = {(0, 4), (0, 6), (1, 4), (1, 6)}
    starts = rb.sample(2 * 4)[::2]
    assert set(zip(starts["env"].tolist(), starts["t"].tolist(), strict=True)) == wanted
    starts = rb.sample(2)[::2]
    drawn = (int(starts["env"][0]), int(starts["t"][0]))
    # All of that lane is gone when the next window is drawn: no window twice in the pass.
    rb.extend(steps([drawn[0]] * 12, list(range(12, 24)), every=4))
    starts = rb.sample(2 * 5)[::2]
    got = list(zip(starts["env"].tolist(), starts["t"].tolist(), strict=True))
    other = 1 - drawn[0]
    assert sorted(got) == sorted([(other, 4), (other, 6), *((drawn[0], t) for t in (18, 20, 22))])


def test_sums_over_steps_stay_in_the_lane() -> None:
    rb = ReplayBuffer(
        storage=LazyTensorStorage(30, lane_key="env"),
        writer=LaneWriter(10),
        transform=NStep(3, gamma=0.5),
        generator=torch.Generator().manual_seed(0),
    )
    t = [0, 0, 0]
    for n in range(60):
        lanes = [0, 1, 0] if n % 3 else [2, 0]
        numbers = []
        for lane in lanes:
            numbers.append(t[lane])
            t[lane] += 1
        rb.extend(steps(lanes, numbers))
        sample = rb.sample(64)
        for env, time, reward in zip(
            sample["env"].tolist(),
            sample["t"].tolist(),
            sample["next", "reward"].flatten().tolist(),
            strict=True,
        ):
            rest = range(time, min(time + 3, time - time % 7 + 7, t[env]))
            assert reward == sum(k * 0.5 ** (k - time) for k in rest)
