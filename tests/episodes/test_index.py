"""The index of rings where rows move, are placed by hand, or are noted anew."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from replaykit import LazyTensorStorage, ReplayBuffer
from replaykit.episodes import EpisodeIndex, Head
from replaykit.episodes.streams import ColumnReader
from replaykit.schema import Rows

PLAIN = dict.fromkeys(("terminated", "truncated", "done", "episode"), 0) | {"is_init": 1}


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


def new_buffer(slots: int) -> ReplayBuffer:
    return ReplayBuffer(storage=LazyTensorStorage(slots))


def test_rows_are_read_where_the_memory_is_now() -> None:
    """Whoever holds a view may have the memory moved."""
    rb = new_buffer(50)
    for step in range(6):
        rows = [{**PLAIN, "episode": step // 2, "done": row == 3 and step % 2} for row in range(4)]
        rb.extend(as_batch(rows))
        assert rb.episodes.lengths.tolist() == [8] * (step // 2) + [4 + step % 2 * 4]
        assert rb.episodes.reasons.tolist() == [2] * (step // 2) + [2 * (step % 2)]
        memory = rb.storage.require()["episode",].untyped_storage()
        memory.resize_(memory.nbytes() + 2**20 * (step + 1))


def test_rows_placed_by_hand_sever_the_streams_there() -> None:
    """What is next to a placed row is no neighbour of it; what came before it is not known."""
    rb = new_buffer(6)
    rb.extend(as_batch([PLAIN] * 9))  # slots 3, 4, 5, 0, 1, 2 from the oldest on
    assert rb.storage.episodes.table().begin.tolist() == [0]
    rb.storage.set(
        [4], as_batch([PLAIN])
    )  # now the newest; the oldest in the ring's order is slot 5
    index = rb.storage.episodes
    slots = np.array([5, 0, 1, 2, 3, 4])
    time, lane = index.time_and_lane(slots)
    assert np.diff(time).tolist() == [1] * 5
    assert index.positions(time, lane).tolist() == [5, 6, 7, 8, 3, 9]
    assert index.ids(time, lane).tolist() == [5, 5, 5, 5, 3, 9]
    assert index.heads(time, lane).tolist() == [Head.CUT] * 6
    assert index.reasons(time, lane).tolist() == [3, 3, 3, 3, 3, 0]
    assert index.streams(time, lane)[0].tolist() == [*[time[0]] * 4, time[4], time[5]]
    rb.extend(as_batch([PLAIN] * 2))  # over slots 5 and 0
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
    seen: list[tuple[int, int]] = []
    for _ in range(3):
        for step in (1, 5):
            rb.extend(as_batch([PLAIN] * step))
            seen.append((rb.storage.episodes.version, rb.storage.episodes.rebuilt))
        rb.empty()
        rb.extend(as_batch([PLAIN] * 5))
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


@pytest.mark.filterwarnings("ignore:.*left out:UserWarning")
def test_flags_that_the_core_cannot_read_in_place_are_copied_from_the_stored_rows() -> None:
    """A write of rows of the buffer itself changes the values that the batch shows."""

    def lengths(dtype: torch.dtype) -> list[list[int]]:
        rb = new_buffer(8)
        done = torch.tensor([0, 0, 1, 0, 0, 1, 0, 0, 0, 0]).to(dtype)
        found = []
        rb.extend(TensorDict({"next": {"done": done}}, [10]))
        for change in (lambda: rb.extend(rb.storage[1:4]), lambda: rb.resize(5)):
            change()
            found.append(rb.episodes.lengths.tolist())
        return found

    assert lengths(torch.uint16) == lengths(torch.bool) == [[1, 6, 1], [4, 1]]


def test_rows_on_a_device_are_indexed_before_they_are_overwritten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their index may wait for more rows, but finds the same episodes."""
    monkeypatch.setattr("replaykit.episodes.index._LEAST", 8)
    monkeypatch.setattr("replaykit.episodes.index._PARTS", 2)

    def rows(count: int) -> TensorDict:
        return TensorDict({"done": torch.zeros(count, dtype=torch.bool)}, [count])

    def found() -> list[Any]:
        first, second = new_buffer(16), new_buffer(16)
        first.extend(rows(16))
        first.cut()
        first.extend(rows(3))  # the first rows of an episode
        first.extend(rows(16))
        second.extend(rows(15))
        second.cut()
        second.extend(rows(3))  # an episode in the last slot and the first two
        second.storage.set(13, rows(1)[0])
        for _ in range(2):  # up to the last slot
            second.extend(rows(1))
        return [(rb.episodes.ids.tolist(), rb.episodes.heads.tolist()) for rb in (first, second)]

    expected = found()
    assert expected[0] == ([16], [Head.EVICTED])
    assert (expected[1][0][0], expected[1][1][0]) == (15, Head.EVICTED)
    monkeypatch.setattr(ColumnReader, "_read_addresses", lambda self: None)
    monkeypatch.setattr(ColumnReader, "waits", True)
    monkeypatch.setattr(Rows, "on_cpu", lambda self: False)
    assert found() == expected


@pytest.mark.parametrize("lane_key", [None, "env"])
@pytest.mark.parametrize("away", [False, True])
@pytest.mark.parametrize("count", [3, 9])
def test_lazy_zeros_end_no_episode(
    lane_key: str | None, away: bool, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have no memory, from which the index of a batch could read them."""
    if away:
        monkeypatch.setattr(ColumnReader, "_read_addresses", lambda self: None)
        monkeypatch.setattr(ColumnReader, "waits", True)
    rb = ReplayBuffer(storage=LazyTensorStorage(4, lane_key=lane_key))
    for rows, zeros in ((2, torch.zeros), (count, torch._efficientzerotensor)):
        env, done = zeros((rows,), dtype=torch.int64), zeros((rows,), dtype=torch.bool)
        rb.extend(TensorDict({"env": env, "done": done}, [rows]))
    assert rb.episodes.lengths.tolist() == [4]
