"""The index of real buffers against a model that scans all rows that were ever written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from replaykit import LazyTensorStorage, ReplayBuffer
from replaykit.episodes import CountLaw, EpisodeIndex, Head
from replaykit.episodes.streams import ColumnReader

LAWS = [CountLaw.strict(1), CountLaw.strict(3), CountLaw(1, 1, past=1, open_future=1)]


class Model:
    """One lane: every row that was ever written; what is stored is looked at by scanning."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.rows: list[dict[str, int]] = []
        self.forgotten = 0  # rows before the last clear
        self.cut: dict[int, int] = {}  # row -> code
        self.gone: dict[int, int] = {}  # row that is stored no more -> how it ended
        self.went_on = False  # whether an episode was open when all was forgotten

    @property
    def lo(self) -> int:
        return max(self.forgotten, len(self.rows) - self.slots)

    def end(self, i: int) -> int:
        if i in self.gone:
            return self.gone[i]
        row = self.rows[i]
        if row["terminated"] or row["truncated"] or row["done"]:
            return 1 if row["terminated"] else 2
        if i in self.cut:
            return self.cut[i]
        return 3 if i + 1 < len(self.rows) and self.rows[i + 1]["episode"] != row["episode"] else 0

    def append(self, rows: list[dict[str, int]]) -> None:
        self.rows += rows
        for i in range(max(self.forgotten, 0), self.lo):
            self.gone.setdefault(i, self.end(i))

    def clear(self) -> None:
        self.went_on = self.lo < len(self.rows) and not self.end(len(self.rows) - 1)
        for i in range(self.lo, len(self.rows)):
            self.gone[i] = self.end(i)
        self.forgotten = len(self.rows)

    def sever(self, code: int) -> None:
        if self.lo < len(self.rows):
            self.cut.setdefault(len(self.rows) - 1, code)

    def episodes(self) -> list[tuple[int, int, int, int, int]]:
        """begin, first stored, last, reason, head; as positions."""
        found, begin = [], self.forgotten
        for i in range(self.forgotten, len(self.rows)):
            if self.end(i) or i + 1 == len(self.rows):
                if i >= self.lo:
                    before = self.end(begin - 1) if begin > self.forgotten else 4 * self.went_on
                    joined = before == 4 or not self.rows[begin]["is_init"]
                    head = Head.EVICTED if begin < self.lo else Head.CUT if joined else Head.RESET
                    found.append((begin, max(begin, self.lo), i, min(3, self.end(i)), int(head)))
                begin = i + 1
        return found


def as_batch(rows: list[dict[str, int]], shape: tuple[int, ...] = (1,)) -> TensorDict:
    def column(name: str, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([row[name] for row in rows], dtype=dtype).reshape(len(rows), *shape)

    flags = {name: column(name, torch.bool) for name in ("terminated", "truncated", "done")}
    return TensorDict(
        {
            "x": torch.arange(len(rows), dtype=torch.float32),
            "episode": column("episode", torch.int64),
            "is_init": column("is_init", torch.bool),
            "next": flags,
        },
        [len(rows)],
    )


def lane_of(
    model: Model, index: EpisodeIndex, lane: int, lanes: int, elements: np.ndarray[Any, Any]
) -> None:
    """Compares one lane; positions of the index and rows of the model are the same numbers."""
    time, at = index.time_and_lane(elements)
    order = np.argsort(time)
    time, at = time[order], at[order]
    assert at.tolist() == [lane] * len(elements)
    assert index.element(time, at).tolist() == elements[order].tolist()
    assert index.positions(time, at).tolist() == list(range(model.lo, len(model.rows)))
    shift = model.lo - int(time[0])
    episodes = model.episodes()
    per_row = [e for e in episodes for _ in range(e[1], e[2] + 1)]
    assert (index.begins(time, at) + shift).tolist() == [e[0] for e in per_row]
    first, last = index.spans(time, at)
    assert (first + shift).tolist() == [e[1] for e in per_row]
    assert (last + shift).tolist() == [e[2] for e in per_row]
    assert index.reasons(time, at).tolist() == [e[3] for e in per_row]
    assert index.heads(time, at).tolist() == [e[4] for e in per_row]
    assert index.ids(time, at).tolist() == [e[0] * lanes + lane for e in per_row]
    for law in LAWS:
        counts = [
            law.count(b - a + 1, reset=head == Head.RESET, is_open=not code)
            for _, a, b, code, head in episodes
        ]
        assert index.totals(law, 0)[lane] == sum(counts)
        before = int(index.totals(law, 0)[:lane].sum())
        found = index.find(law, 0, np.arange(before, before + sum(counts)))
        skip = [0 if e[4] == Head.RESET else law.past for e in episodes]
        want = [e[1] + s for e, s, n in zip(episodes, skip, counts, strict=True) for _ in range(n)]
        assert (found.base + shift).tolist() == want
        assert found.rest.tolist() == [i for n in counts for i in range(n)]
    severed = [i for i in model.cut if model.lo <= i]
    start, stop = index.streams(time, at)
    for i, (a, b) in enumerate(
        zip((start + shift).tolist(), (stop + shift).tolist(), strict=True), model.lo
    ):
        assert a == max([model.lo, *(s + 1 for s in severed if s < i)])
        assert b == min([len(model.rows) - 1, *(s for s in severed if s >= i)])


def assert_same(rb: ReplayBuffer, models: list[Model]) -> None:
    index = rb.storage.episodes
    lanes = len(models)
    stored = len(models[0].rows) - models[0].lo
    if not stored:
        assert index.stored_rows() == 0
        return
    for lane, model in enumerate(models):
        lane_of(model, index, lane, lanes, np.arange(stored) * lanes + lane)
    assert index.stored_rows() == stored * lanes
    assert index.longest() == max(e[2] - e[1] + 1 for m in models for e in m.episodes())


chance = st.sampled_from([0, 0, 0, 0, 1])
a_row = st.fixed_dictionaries({
    "terminated": chance, "truncated": chance, "done": chance, "switch": chance,
    "is_init": st.sampled_from([1, 1, 1, 0]),
})  # fmt: skip
steps = st.lists(
    st.one_of(
        st.tuples(st.just("extend"), st.lists(a_row, min_size=1, max_size=30)),
        st.tuples(st.just("extend"), st.lists(a_row, min_size=1, max_size=3)),
        st.tuples(st.just("edit"), st.sampled_from(["terminated", "done", "episode"]),
                  st.integers(0, 100)),
        st.sampled_from([("cut",), ("empty",), ("save",), ("dumps",)]),
    ),
    min_size=1, max_size=12,
)  # fmt: skip


def new_buffer(slots: int) -> ReplayBuffer:
    return ReplayBuffer(storage=LazyTensorStorage(slots))


def test_a_buffer_knows_its_episodes(tmp_path: Path) -> None:
    """Writes of any size, flags, ids, cuts, edits, restarts and clears, in any order."""

    @settings(max_examples=100, deadline=None)
    @given(slots=st.sampled_from([1, 2, 3, 5, 8, 13]), program=steps)
    def run(slots: int, program: list[Any]) -> None:
        rb, model, episode = new_buffer(slots), Model(slots), 0
        for step in program:
            if step[0] == "extend":
                rows = []
                for row in step[1]:
                    episode += row["switch"]
                    rows.append({**row, "episode": episode})
                rb.extend(as_batch(rows))
                model.append(rows)
            elif not len(rb):
                continue
            elif step[0] == "edit":
                slot = step[2] % len(rb)
                position = rb.storage.ledger.positions(torch.tensor([slot])).item()
                row = model.rows[position]
                row[step[1]] = 1 - row[step[1]] if step[1] != "episode" else row["episode"] + 7
                key = step[1] if step[1] == "episode" else ("next", step[1])
                rb.set_at_(key, as_batch([row])[key], [slot])
            elif step[0] == "cut":
                rb.writer.cut()
                model.sever(4)
            elif step[0] == "empty":
                rb.empty()
                model.clear()
            else:
                fresh = new_buffer(slots)
                if step[0] == "save":
                    fresh.load_state_dict(rb.state_dict())
                else:
                    rb.dumps(tmp_path / "saved")
                    fresh.loads(tmp_path / "saved")
                rb = fresh
                model.sever(5)
            if len(model.rows):
                assert_same(rb, [model])

    run()


@pytest.mark.parametrize("lanes", [(2,), (2, 3)])
def test_every_lane_is_a_separate_stream(lanes: tuple[int, ...]) -> None:
    count = int(np.prod(lanes))

    @settings(max_examples=30, deadline=None)
    @given(data=st.data(), slots=st.sampled_from([1, 3, 5, 8]))
    def run(data: st.DataObject, slots: int) -> None:
        rb = ReplayBuffer(storage=LazyTensorStorage(slots * count, ndim=1 + len(lanes)))
        models = [Model(slots) for _ in range(count)]
        episodes = [100 * lane for lane in range(count)]
        for _ in range(data.draw(st.integers(1, 5))):
            n = data.draw(st.sampled_from([1, 2, 5, 20]))
            batches = []
            for lane in range(count):
                rows = []
                for row in data.draw(st.lists(a_row, min_size=n, max_size=n)):
                    episodes[lane] += row["switch"]
                    rows.append({**row, "episode": episodes[lane]})
                models[lane].append(rows)
                batches.append(as_batch(rows))
            rb.extend(torch.stack(batches, 1).reshape(n, *lanes).transpose(0, -1))
            if data.draw(st.booleans()):
                lane = data.draw(st.integers(0, count - 1))
                rb.writer.cut(lane)
                models[lane].sever(4)
            if data.draw(st.booleans()):  # noted anew
                rb.storage.ledger.log.edit(None, rb.storage.episodes.bound.paths)
            assert_same(rb, models)

    run()


def test_rows_are_read_where_the_memory_is_now() -> None:
    """Whoever holds a view may have the memory moved."""
    rb, model = new_buffer(50), Model(50)
    row = dict.fromkeys(("terminated", "truncated", "done", "episode"), 0) | {"is_init": 1}
    for step in range(6):
        rows = [{**row, "episode": step // 2}] * 3 + [
            {**row, "episode": step // 2, "done": step % 2}
        ]
        rb.extend(as_batch(rows))
        model.append(rows)
        assert_same(rb, [model])
        memory = rb.storage.require()["episode",].untyped_storage()
        memory.resize_(memory.nbytes() + 2**20 * (step + 1))


def test_rows_placed_by_hand_sever_the_streams_there() -> None:
    """What is next to a placed row is no neighbour of it; what came before it is not known."""
    rb = new_buffer(6)
    row = dict.fromkeys(("terminated", "truncated", "done", "episode"), 0) | {"is_init": 1}
    rb.extend(as_batch([row] * 9))  # slots 3, 4, 5, 0, 1, 2 from the oldest on
    assert rb.storage.episodes.table().begin.tolist() == [0]
    rb.storage.set([4], as_batch([row]))  # now the newest; the oldest in the ring's order is slot 5
    index = rb.storage.episodes
    slots = np.array([5, 0, 1, 2, 3, 4])
    time, lane = index.time_and_lane(slots)
    assert np.diff(time).tolist() == [1] * 5
    assert index.positions(time, lane).tolist() == [5, 6, 7, 8, 3, 9]
    assert index.ids(time, lane).tolist() == [5, 5, 5, 5, 3, 9]
    assert index.heads(time, lane).tolist() == [Head.CUT] * 6
    assert index.reasons(time, lane).tolist() == [3, 3, 3, 3, 3, 0]
    assert index.streams(time, lane)[0].tolist() == [*[time[0]] * 4, time[4], time[5]]
    rb.extend(as_batch([row] * 2))  # over slots 5 and 0
    time, lane = index.time_and_lane(np.array([1, 2, 3, 4, 5, 0]))
    assert index.positions(time, lane).tolist() == [7, 8, 3, 9, 10, 11]
    assert index.ids(time, lane)[2:].tolist() == [3, 9, 9, 9]
    assert index.heads(time, lane).tolist() == [Head.EVICTED] * 2 + [Head.CUT] * 4


@pytest.mark.parametrize("lanes", [(), (3,)])
@pytest.mark.parametrize("read", [True, False])
def test_rows_placed_all_over_are_noted_in_one_go(
    lanes: tuple[int, ...], read: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if every stream had been cut by itself after each row that another one follows."""
    count, note, calls = int(np.prod(lanes)), EpisodeIndex._append_stored, []

    def counted(self: EpisodeIndex, first: int, until: int, cuts: Any = None) -> None:
        calls.append(cuts)
        note(self, first, until, cuts=cuts)

    def one_by_one(self: EpisodeIndex, first: int, until: int, cuts: Any = None) -> None:
        start = first
        for row, codes in zip(*(cuts or ((), ())), strict=True):
            note(self, first, start + row + 1)
            for code in set(codes.tolist()) - {0}:
                self._streams.close(codes == code, code)
            first = start + row + 1
        if first < until:
            note(self, first, until)

    if not read:  # columns that the core cannot read
        monkeypatch.setattr(ColumnReader, "_read_addresses", lambda self: None)
    for seed in range(8):
        random = np.random.default_rng(seed)
        rb = ReplayBuffer(storage=LazyTensorStorage(40 * count, ndim=1 + len(lanes)))

        def rows(n: int, random: np.random.Generator = random) -> TensorDict:
            names = ("terminated", "truncated", "done", "is_init", "episode")
            drawn = random.random((len(names), n * count)) < 0.2
            batch = [dict(zip(names, row, strict=True)) for row in drawn.T.astype(int).tolist()]
            return as_batch(batch).reshape(n, *lanes)

        rb.storage.set(list(range(40 if seed % 2 else 30)), rows(40 if seed % 2 else 30))
        for _ in range(4):
            slots = random.permutation(len(rb) // count)[:5].tolist()
            rb.storage.set(slots, rows(5))
            rb.writer.cut(int(random.integers(count)) if lanes else None)
        found = []
        for way in (counted, one_by_one):
            monkeypatch.setattr(EpisodeIndex, "_append_stored", way)
            rb.storage.ledger.log.edit(None, rb.storage.episodes.bound.paths)
            calls.clear()
            index = rb.storage.episodes
            assert len(calls) <= 2
            assert way is one_by_one or sum(len(ends[0]) for ends in calls if ends) > 9
            first = index._streams.lo  # times go on from one to the next
            table = index.table()._replace(
                **{n: getattr(index.table(), n) - first for n in ("begin", "first", "last")}
            )
            time = np.repeat(np.arange(first, index._streams.hi), count)
            parts = index.streams(time, np.tile(np.arange(count), len(time) // count))
            found.append((np.stack(table), np.stack(parts) - first))
        for once, each in zip(*found, strict=True):
            assert np.array_equal(once, each)


def test_index_version_only_increases() -> None:
    """Whoever keeps what it derived from an index goes by it: also where all rows are replaced."""
    rb = new_buffer(3)
    row = dict.fromkeys(("terminated", "truncated", "done", "episode"), 0) | {"is_init": 1}
    seen: list[tuple[int, int]] = []
    for _ in range(3):
        for step in (1, 5):
            rb.extend(as_batch([row] * step))
            seen.append((rb.storage.episodes.version, rb.storage.episodes.rebuilt))
        rb.empty()
        rb.extend(as_batch([row] * 5))
        seen.append((rb.storage.episodes.version, rb.storage.episodes.rebuilt))
        rb.set_at_("episode", torch.tensor([[1]]), [2])
        seen.append((rb.storage.episodes.version, rb.storage.episodes.rebuilt))
    versions = [version for version, _ in seen]
    assert versions == sorted(set(versions))
    assert [rebuilt for _, rebuilt in seen] == [0, 0, 1, 2, 2, 2, 3, 4, 4, 4, 5, 6]


@pytest.mark.parametrize("lane_key", [None, "env"])
def test_beginnings_outlive_a_rebuild_that_failed(
    lane_key: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(6, lane_key=lane_key))
    done = torch.arange(20) % 7 == 6
    rb.extend(TensorDict({"env": torch.zeros(20, dtype=torch.int64), "done": done}, [20]))
    before = rb.episodes.ids.tolist(), rb.episodes.begins.tolist(), rb.episodes.heads.tolist()
    assert before == ([14], [14], [Head.RESET])
    rb.extend(TensorDict({"env": torch.zeros(3, dtype=torch.int64), "done": done[:3]}, [3]))
    before = rb.episodes.ids.tolist(), rb.episodes.begins.tolist(), rb.episodes.heads.tolist()
    assert before == ([14], [14], [Head.EVICTED])

    def fails(self: ColumnReader, first: int, until: int) -> Any:
        raise RuntimeError("no memory")

    with rb.storage.lock:
        rb.storage.ledger.log.edit(None, [("done",)])
        with monkeypatch.context() as patch:
            patch.setattr(ColumnReader, "stored", fails)
            with pytest.raises(RuntimeError, match="no memory"):
                _ = rb.storage.episodes
    after = rb.episodes.ids.tolist(), rb.episodes.begins.tolist(), rb.episodes.heads.tolist()
    assert after == before
