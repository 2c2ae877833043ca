"""The index of rings, of lanes and of interleaved streams against lists that are scanned."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from replaykit import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ReplayBuffer,
    TensorStorage,
)
from replaykit.episodes import (
    EPISODES,
    ROWS,
    WINDOWS,
    BoundaryRule,
    CountLaw,
    EndReason,
    EpisodeIndex,
    Head,
    Needs,
)
from replaykit.episodes.streams import ColumnReader
from replaykit.schema import Rows
from replaykit.storages.indexing import unravel_index
from tests.support.laws import window_count
from tests.support.refusals import refuses

SWITCHED, SEVERED, RESTORED = 3, 4, 5


@dataclass(eq=False)
class Episode:
    key: int
    head: int
    rows: list[Row] = field(default_factory=list)
    code: int = 0
    before: int = 0  # rows that are forgotten by the model too
    begin: int = -1


@dataclass(eq=False)
class Row:
    position: int
    key: int
    code: int
    id: int
    init: bool
    episode: Episode | None = None
    mark: int = 0


@dataclass(eq=False)
class Lane:
    head: int
    rows: list[Row] = field(default_factory=list)
    open: Episode | None = None
    last_id: int | None = None


class Model:
    """What is to be known of streams, one row after the other.

    ``together``: number of lanes whose rows are written together, at one position.
    """

    def __init__(self, slots: int, together: int = 1) -> None:
        self.slots, self.together = slots, together
        self.rows: list[Row] = []
        self.lanes: dict[int, Lane] = {}
        self.joined: set[int] = set()
        self.written = 0

    def write(self, key: int, code: int, id_: int, init: bool) -> None:
        row = Row(self.written // self.together, key, code, id_, init)
        self.written += 1
        if key not in self.lanes:
            self.lanes[key] = Lane(Head.CUT if key in self.joined else Head.RESET)
            self.joined.discard(key)
        self._follow(self.lanes[key], row)
        self.rows.append(row)
        if len(self.rows) > self.slots:
            oldest = self.rows.pop(0)
            self.lanes[oldest.key].rows.pop(0)
            if not self.lanes[oldest.key].rows:
                del self.lanes[oldest.key]

    def _follow(self, lane: Lane, row: Row) -> None:
        if lane.open is not None and lane.last_id != row.id:
            self._end(lane, SWITCHED)
        lane.last_id = row.id
        if lane.open is None:
            lane.open = Episode(row.key, lane.head if row.init else Head.CUT, begin=row.position)
        lane.open.rows.append(row)
        row.episode = lane.open
        lane.rows.append(row)
        if row.code:
            self._end(lane, row.code)

    @staticmethod
    def _end(lane: Lane, code: int) -> None:
        if lane.open is not None:
            lane.open.code, lane.open = code, None
            lane.head = Head.CUT if code == SEVERED else Head.RESET

    def cut(self, key: int | None, code: int = SEVERED) -> None:
        for one in list(self.lanes) if key is None else [key]:
            newest = self.lanes[one].rows[-1]
            newest.mark = newest.mark or code  # what is severed already is not so once more
            self._end(self.lanes[one], code)

    def empty(self) -> None:
        self.joined |= {key for key, lane in self.lanes.items() if lane.open is not None}
        self.lanes, self.rows = {}, []

    def again(self) -> None:
        """Derives all from the rows, and from what is known of the oldest one of each stream."""
        for lane in self.lanes.values():
            rows, first = lane.rows, lane.rows[0].episode
            assert first is not None
            gone = first.before + first.rows.index(rows[0])
            head = Head(first.head) if gone or first.head != Head.RESET else Head.RESET
            lane.rows, lane.open, lane.last_id = [], None, None
            lane.head = Head.RESET
            for row in rows:
                self._follow(lane, row)
                if row.mark:
                    self._end(lane, row.mark)
            new = rows[0].episode
            assert new is not None
            if gone or head != Head.RESET:
                new.before, new.begin, new.head = gone, first.begin, head

    def stored(self, episode: Episode) -> list[Row]:
        return [row for row in episode.rows if row in self.rows]

    def episodes(self) -> list[Episode]:
        found: list[Episode] = []
        for key in sorted(self.lanes):
            for row in self.lanes[key].rows:
                assert row.episode is not None
                if row.episode not in found:
                    found.append(row.episode)
        return found

    def gone(self, episode: Episode) -> int:
        return episode.before + len(episode.rows) - len(self.stored(episode))

    def head(self, episode: Episode) -> int:
        return Head.EVICTED if self.gone(episode) else episode.head

    def windows(self, law: CountLaw, kind: int) -> tuple[list[int], list[tuple[int, ...]]]:
        """Totals by stream, and what every number stands for."""
        totals, found = [], []
        for lane, key in enumerate(sorted(self.lanes)):
            before = len(found)
            for episode in self.episodes():
                rows = self.stored(episode)
                if episode.key != key:
                    continue
                reset, is_open = self.head(episode) == Head.RESET, not episode.code
                count = window_count(law, len(rows), reset=reset, is_open=is_open)
                mass = {WINDOWS: count, EPISODES: min(count, 1), ROWS: count and len(rows)}[kind]
                skip = 0 if reset else law.past
                used = len(rows) - skip - (law.open_future if is_open else 0)
                found += [(lane, rows[skip].position, used, count, rest) for rest in range(mass)]
            totals.append(len(found) - before)
        return totals, found


def batch(rows: list[tuple[int, int, int, bool]]) -> TensorDict:
    key, code, id_, init = (torch.tensor(column) for column in zip(*rows, strict=True))
    flags = {"terminated": code == 1, "truncated": code == 2, "done": code > 0}
    data = {"env": key, "episode": id_, "is_init": init, "next": flags}
    return TensorDict(data, [len(rows)])


LAWS = [
    CountLaw.strict(1),
    CountLaw.strict(3),
    CountLaw(1, 1, past=1),
    CountLaw(2, 0, 1, past=2, open_future=1),
    CountLaw.strict(2).needing(Needs(closed=True)),
    CountLaw(1, 2, intact=True),
]


def check_laws(buffer: ReplayBuffer, model: Any, laws: list[CountLaw]) -> None:
    """Compare all windows, episodes and rows of each law with those of a model of streams."""
    index = buffer.storage.episodes
    for law in laws:
        for kind in (WINDOWS, EPISODES, ROWS):
            totals, numbers = model.windows(law, kind)
            assert index.totals(law, kind).tolist() == totals
            if numbers:
                got = index.find(law, kind, np.arange(len(numbers)))
                lanes = buffer.storage.lanes.numel()
                slots = torch.from_numpy(index.element(got.base, got.lane) // lanes)
                base = buffer.storage.ledger.positions(slots).tolist()
                rest = (got.lane, np.array(base), got.rows, got.count, got.rest)
                assert list(zip(*(part.tolist() for part in rest), strict=True)) == numbers


def set_ends(buffer: ReplayBuffer, codes: list[int]) -> None:
    """Give the stored rows, from the oldest on, other flags: 1 terminated, 2 truncated."""
    slots, lanes = buffer.storage.ledger.write_order(), buffer.storage.lanes
    code = torch.zeros(len(slots), *lanes, dtype=torch.int64)
    code[slots] = torch.tensor(codes).view(len(slots), *lanes)
    code = code.transpose(0, -1)
    flags = {"terminated": code == 1, "truncated": code == 2, "done": code > 0}
    buffer.update_({("next", name): flag[..., None] for name, flag in flags.items()})


def check(buffer: ReplayBuffer, model: Model) -> None:
    if not buffer.storage.initialized:
        assert not model.rows
        return
    index = buffer.storage.episodes
    assert index.in_ring is (buffer.storage.lane_key is None)
    assert index.stored_rows() == len(model.rows)
    if index.in_ring and not model.rows:
        return
    found, expected = buffer.episodes, model.episodes()
    assert index.lanes == len(model.lanes)
    assert found.lengths.tolist() == [len(model.stored(one)) for one in expected]
    assert found.begins.tolist() == [one.begin for one in expected]
    assert found.ids.tolist() == [
        one.begin * model.together + one.key * (model.together > 1) for one in expected
    ]
    assert found.heads.tolist() == [model.head(one) for one in expected]
    assert found.reasons.tolist() == [min(one.code, 3) for one in expected]
    assert [one.evicted for one in found] == [model.gone(one) for one in expected]
    assert index.longest() == max([len(model.stored(one)) for one in expected], default=0)
    check_laws(buffer, model, LAWS)
    if model.rows:
        check_rows(buffer, model, index)


def check_rows(buffer: ReplayBuffer, model: Model, index: EpisodeIndex) -> None:
    ledger, together = buffer.storage.ledger, model.together
    slots = ledger.write_order()
    elements = (slots[:, None] * together + torch.arange(together)).flatten()

    def positions(elements: Any) -> list[int]:
        return ledger.positions(torch.as_tensor(elements) // together).tolist()

    assert positions(elements) == [row.position for row in model.rows]
    time_, lane = index.time_and_lane(elements.numpy())
    assert index.element(time_, lane).tolist() == elements.tolist()
    assert index.positions(time_, lane).tolist() == [row.position for row in model.rows]
    whole, again = index.state(), index.state(slots)  # the second one reads all rows
    assert {key: np.array(value).tolist() for key, value in whole.items()} == {
        key: np.array(value).tolist() for key, value in again.items()
    }
    assert lane.tolist() == [sorted(model.lanes).index(row.key) for row in model.rows]
    lo, hi = (np.broadcast_to(bound, len(lane)) for bound in index.bounds(lane))
    first, last = index.streams(time_, lane)
    looks = buffer.episodes
    begins, lasts, codes, heads = index.episodes_at(time_, lane)
    found = index.around(elements.numpy()).tolist()
    assert found == [part.tolist() for part in (time_, lane, begins, lasts, codes, heads)]
    refuses(IndexError, "stored", index.around, np.array([len(model.rows)]))
    numbers = index.rows(CountLaw(1, 0), np.arange(len(model.rows)))
    lanes = [row for key in sorted(model.lanes) for row in model.lanes[key].rows]
    assert positions(numbers) == [row.position for row in lanes]
    for law in (law for law in LAWS if law.add < 1):
        starts = index.eligible_starts(law, time_, lane)
        chosen = index.find(law, WINDOWS, np.arange(int(index.totals(law, WINDOWS).sum())))
        can = index.element(chosen.base + chosen.rest, chosen.lane)
        assert sorted(elements[torch.from_numpy(starts)].tolist()) == sorted(can.tolist())
    assert begins.tolist() == index.begins(time_, lane).tolist()
    assert (index.spans(time_, lane)[0] == np.maximum(begins, lo)).all()
    assert lasts.tolist() == index.spans(time_, lane)[1].tolist()
    assert codes.tolist() == [row.episode.code for row in model.rows if row.episode]
    assert heads.tolist() == [model.head(row.episode) for row in model.rows if row.episode]
    for newest in (1, len(slots)):
        ended = index.ended_among(slots[-newest:].numpy())
        got = positions(index.element(*ended[:2]))
        expected = [
            (row.position, row.code) for row in model.rows[-newest * together :] if row.code
        ]
        assert sorted(zip(got, ended[2].tolist(), strict=True)) == sorted(expected)
    cells = elements if buffer.storage.ndim == 1 else unravel_index(elements, buffer.storage.lanes)
    steps, rest = looks.step(cells).tolist(), looks.steps_to_end(cells).tolist()
    begin, end = looks.begin(cells).tolist(), looks.end(cells).tolist()
    for at, row in enumerate(model.rows):
        rows = model.lanes[row.key].rows
        nth = rows.index(row)
        assert (time_[at] - lo[at], hi[at] - time_[at]) == (nth, len(rows) - nth)
        marks = [n for n, one in enumerate(rows) if one.mark]
        left = max([n + 1 for n in marks if n < nth], default=0)
        right = min([n for n in marks if n >= nth], default=len(rows) - 1)
        assert (first[at] - lo[at], last[at] - lo[at]) == (left, right)
        assert row.episode is not None
        stored = model.stored(row.episode)
        assert steps[at] == model.gone(row.episode) + stored.index(row)
        assert rest[at] == len(stored) - 1 - stored.index(row)
        assert (begin[at], end[at]) == (row.episode.begin, stored[-1].position)


ROW = st.tuples(
    st.sampled_from([0, 0, 1, 5, -(2**40)]),
    st.sampled_from([0, 0, 0, 0, 1, 2]),
    st.sampled_from([0, 0, 0, 1]),
    st.sampled_from([True, True, True, False]),
)
FRESH = st.tuples(st.integers(0, 40), st.sampled_from([0, 0, 1]), st.just(0), st.just(True))


LAYOUTS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "ring": (ROW, ()),
    "lanes": (ROW, (2,)),
    "grid": (ROW, (2, 3)),
    "environments": (ROW, ()),
    "trajectories": (FRESH, ()),
}


@pytest.mark.parametrize(
    ("layout", "behind", "away"),
    [
        *((name, False, False) for name in LAYOUTS),
        ("environments", True, False),
        ("trajectories", True, False),
        *((name, True, True) for name in LAYOUTS),
    ],
)
def test_index_equals_a_scan_of_the_rows(
    layout: str, behind: bool, away: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Writes of any size, flags, ids, cuts, edits, restarts and clears, in any order."""
    if behind:  # small writes are noted together also in small rings
        monkeypatch.setattr("replaykit.episodes.index._BEHIND", 4)
        monkeypatch.setattr("replaykit.episodes.index._LEAST", 8)
        monkeypatch.setattr("replaykit.episodes.index._PARTS", 2)
    if away:  # as on a device, to which some rows come from the CPU
        monkeypatch.setattr(ColumnReader, "_read_addresses", lambda self: None)
        monkeypatch.setattr(ColumnReader, "waits", True)
        monkeypatch.setattr(Rows, "on_cpu", lambda self: len(self) % 3 == 1)
    monkeypatch.setattr("replaykit.episodes.index._BLOCK", 3)
    kinds = ["extend"] * 8 + ["add", "add", "cut", "cut one", "empty", "edit", "load", "state"]
    rows, lanes = LAYOUTS[layout]
    together, streams = math.prod(lanes), layout in ("environments", "trajectories")

    def fresh(slots: int) -> ReplayBuffer:
        options: Any = {"lane_key": "env"} if streams else {"ndim": 1 + len(lanes)}
        return ReplayBuffer(storage=LazyTensorStorage(slots * together, **options))

    @settings(max_examples=40, deadline=None)
    @given(st.data(), st.integers(8, 13) if behind else st.integers(1, 9))
    def run(data: st.DataObject, slots: int) -> None:
        buffer, model = fresh(slots), Model(slots * together, together)
        for _ in range(data.draw(st.integers(1, 12))):
            kind = data.draw(st.sampled_from(kinds))
            if kind in ("extend", "add"):
                most = 1 if kind == "add" else 3 * slots
                written = data.draw(st.lists(rows, min_size=1, max_size=most))
                if not streams:
                    written = [
                        (lane, *written[(at + lane) % len(written)][1:])
                        for at in range(len(written))
                        for lane in range(together)
                    ]
                for row in written:
                    model.write(*row)
                made = batch(written).reshape(-1, *lanes).transpose(0, len(lanes))
                if kind == "add":
                    buffer.add(made[..., 0])
                else:
                    buffer.extend(made)
            elif kind == "empty":
                buffer.empty()
                model.empty()
            elif kind == "cut":
                buffer.cut()
                model.cut(None)
            elif model.rows and kind == "cut one":
                key = data.draw(st.sampled_from(sorted(model.lanes)))
                buffer.cut(key)
                model.cut(key)
            elif model.rows and kind == "edit":
                edit(buffer, model, data)
            elif model.rows and kind in ("load", "state"):
                saved, buffer = buffer, fresh(slots)
                if kind == "load":
                    saved.dumps(tmp_path / "saved")
                    buffer.loads(tmp_path / "saved")
                else:
                    buffer.load_state_dict(saved.state_dict())
                model.joined = set()
                model.cut(None, RESTORED)
            if data.draw(st.booleans()):
                check(buffer, model)
        check(buffer, model)

    run()


def edit(buffer: ReplayBuffer, model: Model, data: st.DataObject) -> None:
    codes = data.draw(
        st.lists(st.sampled_from([0, 0, 1, 2]), min_size=len(model.rows), max_size=len(model.rows))
    )
    set_ends(buffer, codes)
    for row, value in zip(model.rows, codes, strict=True):
        row.code = value
    model.again()


def stream(keys: list[Any], done: list[int] | None = None, key: Any = "env") -> TensorDict:
    flags = torch.zeros(len(keys), dtype=torch.bool) if done is None else torch.tensor(done) > 0
    data = TensorDict({"x": torch.arange(len(keys)), "next": {"done": flags}}, [len(keys)])
    data[key] = torch.tensor(keys)
    return data


def lengths(buffer: ReplayBuffer) -> list[int]:
    return list(buffer.episodes.lengths.tolist())


def test_without_lane_key_interleaved_ids_are_runs_of_one_row() -> None:
    data = stream([0, 1, 0, 1, 0, 1], key=("collector", "traj_ids"))
    plain = ReplayBuffer(storage=LazyTensorStorage(8))
    plain.extend(data)
    assert lengths(plain) == [1] * 6
    apart = ReplayBuffer(storage=LazyTensorStorage(8, lane_key=("collector", "traj_ids")))
    apart.extend(data)
    assert lengths(apart) == [3, 3]
    assert [one.rows()["x"].tolist() for one in apart.episodes] == [[0, 2, 4], [1, 3, 5]]


@pytest.mark.parametrize(
    "keys",
    [
        torch.tensor([0.5, -1.0, 0.5, -1.0]),
        torch.tensor([[1, 2], [1, 3], [1, 2], [1, 3]]),
        torch.tensor([True, False, True, False]),
        torch.tensor([[200], [3], [200], [3]], dtype=torch.uint8),
        torch.tensor([[0, 0], [0, 1], [0, 0], [0, 1]], dtype=torch.uint8),
    ],
    ids=["floats", "pairs", "flags", "bytes", "zeros"],
)
def test_lane_keys_may_have_any_dtype_and_shape(keys: torch.Tensor) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(8, lane_key="env"))
    for _ in range(2):
        buffer.extend(TensorDict({"env": keys, "next": {"done": torch.zeros(4).bool()}}, [4]))
    assert lengths(buffer) == [4, 4]
    buffer.cut(keys[1])
    buffer.extend(TensorDict({"env": keys[:2], "next": {"done": torch.zeros(2).bool()}}, [2]))
    assert sorted(lengths(buffer)) == [1, 3, 4]


def test_bad_input_is_refused_before_anything_changed() -> None:
    refuses(ValueError, "ndim=1", LazyTensorStorage, 8, ndim=2, lane_key="env")
    refuses(ValueError, "ndim=1", LazyMemmapStorage, 8, ndim=2, lane_key="env")
    refuses(TypeError, "key", LazyTensorStorage, 8, lane_key=3)
    buffer = ReplayBuffer(storage=LazyTensorStorage(8, lane_key=("collector", "env")))
    for wrong in (stream([0, 1]), torch.zeros(2)):
        refuses(KeyError, "lane_key", buffer.extend, wrong)
        assert not buffer.storage.initialized
        assert len(buffer) == buffer.write_count == 0
    refuses(KeyError, "'x'", TensorStorage, TensorDict({"y": torch.zeros(3)}, [3]), lane_key="x")
    buffer = ReplayBuffer(storage=LazyTensorStorage(8, lane_key="env"))
    buffer.cut()
    buffer.cut(7)
    buffer.extend(stream([0, 1]))
    refuses(IndexError, "got 7", buffer.cut, 7)
    refuses(TypeError, "int64", buffer.cut, torch.tensor([0.5]))


def test_rows_without_the_key_are_not_loaded(tmp_path: Path) -> None:
    plain = ReplayBuffer(storage=LazyTensorStorage(8))
    plain.extend(stream([0, 1], key="other"))
    plain.dumps(tmp_path / "saved")
    buffer = ReplayBuffer(storage=LazyTensorStorage(8, lane_key="env"))
    refuses(KeyError, "lane_key", buffer.loads, tmp_path / "saved")
    assert not buffer.storage.initialized


def test_wrapped_tensordict_is_split_into_streams_at_once() -> None:
    storage = TensorStorage(stream([3, 1, 3, 1, 1], [0, 0, 1, 0, 0]), lane_key="env")
    assert lengths(ReplayBuffer(storage=storage)) == [3, 2]


def test_files_and_copies_have_streams_too(tmp_path: Path) -> None:
    import pickle

    buffer = ReplayBuffer(storage=LazyMemmapStorage(6, scratch_dir=tmp_path, lane_key="env"))
    buffer.extend(stream([0, 1] * 4))
    copy = pickle.loads(pickle.dumps(buffer.storage))
    both = (buffer, ReplayBuffer(storage=copy))
    for one in both:
        assert lengths(one) == [3, 3]
        assert one.episodes.heads.tolist() == [Head.EVICTED] * 2
        assert one.episodes.begins.tolist() == [0, 1]
    copy.cut(None)
    assert both[1].episodes.reasons.tolist() == [EndReason.CUT] * 2


def test_load_restores_the_beginnings_of_streams(tmp_path: Path) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(6, lane_key="env"))
    buffer.extend(stream([0, 1] * 4))
    buffer.dumps(tmp_path / "saved")
    buffer.extend(stream([0, 1, 2]))
    buffer.loads(tmp_path / "saved")
    rows = buffer.episodes.of(buffer.storage.ledger.write_order())
    assert rows.heads.tolist() == [Head.EVICTED] * 6
    assert rows[:2].begins.tolist() == [
        int(buffer.storage.ledger.positions(torch.tensor([2]))) - 2 + lane for lane in (0, 1)
    ]
    assert [one.evicted for one in buffer.episodes] == [1, 1]


@pytest.mark.parametrize("read", [False, True])
def test_row_placed_by_hand_splits_streams_also_if_episodes_are_read_before_next_row(
    read: bool,
) -> None:
    """The row in slot 3 is the newest of stream 1, and another row follows it in the ring."""
    buffer = ReplayBuffer(storage=LazyTensorStorage(4, lane_key="env"))
    buffer.extend(stream([0, 0, 0, 1, 2]))
    buffer.storage.set([0], stream([2]))
    if read:
        assert len(buffer.episodes) == 3
    buffer.extend(stream([1]))
    shown = sorted(episode.index.tolist() for episode in buffer.episodes)
    assert shown == [[0], [1], [2], [3]]


@pytest.mark.parametrize("ends", ["cut of the stream", "cut", "load"])
def test_stream_is_cut_after_its_newest_row_if_that_was_placed_by_hand(ends: str) -> None:
    """The older row of stream 2 follows the newer one in the ring."""

    def made() -> ReplayBuffer:
        return ReplayBuffer(storage=LazyTensorStorage(9, lane_key="env"))

    buffer = made()
    buffer.extend(stream([1, 1, 1, 1, 0, 0, 1, 2]))
    buffer.storage.set([3], stream([2]))
    if ends == "load":
        state, buffer = buffer.state_dict(), made()
        buffer.load_state_dict(state)
    else:
        buffer.cut(2 if ends == "cut of the stream" else None)
    buffer.extend(stream([2]))
    shown = sorted(episode.index.tolist() for episode in buffer.episodes)
    assert shown == [[0, 1, 2], [3], [4], [5], [6], [7]]


@pytest.mark.parametrize("read", [True, False])
def test_a_load_ends_streams_that_a_row_placed_by_hand_had_ended(read: bool) -> None:
    """Stream 0 ends before the missing row. After a load, both streams begin with a reset."""
    saved, buffer = (ReplayBuffer(storage=LazyTensorStorage(9, lane_key="env")) for _ in range(2))
    saved.extend(stream([0, 1]))
    saved.storage.set([1], stream([1]))
    buffer.load_state_dict(saved.state_dict())
    if read:
        assert len(buffer.episodes) == 2
    buffer.extend(stream([0, 1]))
    assert buffer.episodes.head(torch.tensor([2, 3])).tolist() == [Head.RESET] * 2


def test_row_placed_by_hand_splits_all_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replaykit.episodes.index._BLOCK", 3)
    buffer = ReplayBuffer(storage=LazyTensorStorage(8, lane_key="env"))
    buffer.extend(stream([0, 1] * 4))
    assert lengths(buffer) == [4, 4]
    buffer.writer.write_at(3, stream([0])[0])
    # In ring order: 0 1 0 | 0 | 0 1 0 1, with nothing read across the new row.
    assert sorted(lengths(buffer)) == [1, 1, 2, 2, 2]
    index = buffer.storage.episodes
    first, last = index.streams(*index.time_and_lane(np.arange(8)))
    _, lane = index.time_and_lane(np.arange(8))
    assert index.element(first, lane).tolist() == [0, 1, 0, 3, 4, 5, 4, 5]
    assert index.element(last, lane).tolist() == [2, 1, 2, 3, 6, 7, 6, 7]
    buffer.extend(stream([0, 1] * 3))
    check_consistent(buffer)


def test_a_cursor_among_stored_rows_is_followed() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(10, lane_key="env"))
    buffer.extend(stream([0, 1] * 3))
    buffer.storage.set([1], stream([0]))
    for _ in range(4):
        buffer.extend(stream([1, 0, 2]))
        check_consistent(buffer)


def check_consistent(buffer: ReplayBuffer) -> None:
    """Every stored row is in one episode, of rows of its stream, in the order of the ring."""
    rows = buffer[:]
    index = buffer.episodes.index
    assert sorted(index.tolist()) == list(range(len(buffer)))
    for episode in buffer.episodes:
        assert len(set(rows["env"][episode.index].tolist())) == 1
        position = buffer.episodes.position(episode.index)
        assert (position.diff() > 0).all()


def test_another_rule_gets_a_separate_index() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(12, lane_key="env"))
    buffer.extend(stream([0, 1] * 3, [0, 0, 1, 0, 0, 1]))
    with buffer.storage.lock:
        other = buffer.storage.indexes.of(BoundaryRule(flags=(), ids=()))
        assert not other.in_ring
        assert other.table().last.tolist() == [2, 2]
        buffer.extend(stream([0, 1, 1]))
        table = buffer.storage.indexes.of(BoundaryRule(flags=(), ids=())).table()
    assert (table.last - table.first + 1).tolist() == [4, 5]
    assert lengths(buffer) == [2, 2, 3, 2]


def test_a_stream_whose_rows_are_gone_is_forgotten() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(500, lane_key="env"))
    for start in range(0, 20_000, 100):
        keys = torch.arange(start, start + 100).repeat_interleave(2)[torch.randperm(200)]
        buffer.extend(stream(keys.tolist()))
        index = buffer.storage.episodes
        assert index.lanes <= 500
    assert index.nbytes() < 500 * (24 + 34 + 100 + 64) * 2


def test_index_handles_many_and_long_streams() -> None:
    """Queues that grow, are left with too much room, and are laid out anew."""
    generator = torch.Generator().manual_seed(0)
    buffer = ReplayBuffer(storage=LazyTensorStorage(3000, lane_key="env"))
    written: list[int] = []
    for few in (1, 3, 50, 2, 700, 5) * 2:
        keys = torch.randint(few, (int(torch.randint(1, 2500, (), generator=generator)),))
        buffer.extend(stream(keys.tolist()))
        written += keys.tolist()
        stored = written[-3000:]
        index = buffer.storage.episodes
        expected = {key: stored.count(key) for key in set(stored)}
        assert index.totals(CountLaw(1, 0), ROWS).tolist() == [
            expected[key] for key in sorted(expected)
        ]
        check_consistent(buffer)


def test_interleaved_index_stays_within_memory_and_time_bounds() -> None:
    """At most 24 bytes a row beyond episodes; a write and a draw below a millisecond."""
    slots, envs = 2**18, 16
    buffer = ReplayBuffer(storage=LazyTensorStorage(slots, lane_key="env"))
    steps = slots // envs
    env = torch.arange(envs).repeat(steps)
    done = (torch.arange(slots) // envs + 7 * env) % 200 == 199
    data = TensorDict({"env": env, "next": {"done": done}}, [slots])
    buffer.extend(data)
    index = buffer.storage.episodes
    law, generator = CountLaw.strict(16), torch.Generator().manual_seed(0)
    episodes = len(index.table().last)
    assert index.nbytes() <= 24 * slots + 2 * 60 * episodes + 10_000
    writes, draws = [], []
    for start in range(0, 100_000, 1000):
        part = data[start : start + 1000]
        begin = time.process_time()
        buffer.extend(part)
        middle = time.process_time()
        total = int(index.totals(law, WINDOWS).sum())
        number = torch.randint(total, (16,), generator=generator)
        found = index.find(law, WINDOWS, number.numpy())
        times = (found.base + found.rest)[:, None] + np.arange(16)
        index.element(times, found.lane[:, None])
        draws.append(time.process_time() - middle)
        writes.append(middle - begin)
    assert sorted(draws)[50] < 1e-3
    assert sorted(writes)[50] < 2e-3  # half of that on a quiet machine
