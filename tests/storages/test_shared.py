"""Handles onto the same rows, in one process: whoever writes, all agree, with a plain buffer too.

What a handle does not know it has to learn from the files, in what order the others ever wrote.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from replaykit import (
    EpisodeWriter,
    LaneWriter,
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    SliceSampler,
)
from replaykit.storages import shared_storage as shared
from replaykit.storages.observation_table import ObservationTable
from tests.storages.sharing import another, drawn, shown

SLOTS, LANES = 7, 2

SAMPLERS: dict[str, Callable[[], Any]] = {
    "random": RandomSampler,
    "prioritized": lambda: PrioritizedSampler(alpha=0.7, beta=0.5),
    "slices": lambda: SliceSampler(num_slices=2, strict_length=False),
    "prioritized slices": lambda: PrioritizedSliceSampler(
        alpha=0.7, beta=0.5, num_slices=2, strict_length=False
    ),
    "episode priorities": lambda: PrioritizedSliceSampler(
        alpha=0.7, beta=0.5, num_slices=2, strict_length=False, unit="episode"
    ),
}


class Kind:
    """How the buffers of a test are made, and rows that fit them."""

    def __init__(
        self,
        sampler: str,
        *,
        ndim: int = 1,
        streams: bool = False,
        dedup: bool = False,
        length: int = 0,
        episodes: bool = False,
    ) -> None:
        self.sampler, self.ndim, self.streams, self.dedup = sampler, ndim, streams, dedup
        self.length, self.episodes = length, episodes

    def buffer(self, folder: Path | None, *, shared: bool) -> ReplayBuffer:
        lanes = LANES if self.ndim == 2 else 1
        options: dict[str, Any] = {"ndim": self.ndim}
        if self.streams:
            options["lane_key"] = "lane"
        if self.dedup and shared:  # the plain buffer stores all observations
            options |= {"dedup_next": ["observation"], "on_mismatch": "dense"}
        storage: Any = (
            LazyTensorStorage(SLOTS * lanes, **options)
            if folder is None
            else LazyMemmapStorage(SLOTS * lanes, scratch_dir=folder, **options)
        )
        return ReplayBuffer(
            storage=storage,
            sampler=SAMPLERS[self.sampler](),
            generator=torch.Generator(),
            priority_key="p",
            writer=self._writer(),
            shared=shared,
        )

    def _writer(self) -> Any:
        if self.episodes:
            return EpisodeWriter(over_long="split", on_duplicate="replace")
        return LaneWriter(self.length) if self.length else None

    def rows(self, first: int, count: int, bits: int, *, priorities: bool = False) -> TensorDict:
        shape = [LANES, count] if self.ndim == 2 else [count]
        steps = torch.arange(first, first + count)
        number = (steps * 10 + torch.arange(LANES)[:, None]) if self.ndim == 2 else steps * 10
        done = ((bits >> (number % 31)) & 3) == 0
        rows = TensorDict(
            {
                "number": number,
                "lane": (number // 10 + (bits >> (number % 7))) % 3,
                "wide": number[..., None].expand(*shape, 2100).to(torch.uint8).contiguous(),
                "next": {"done": done, "truncated": ((bits >> (number % 29)) & 7) == 1},
            },
            shape,
        )
        if self.episodes:
            rows["lane"] = torch.full((count,), bits % 6)
            rows["next", "done"] = (steps == first + count - 1) & bool(bits & 8)
            rows["next", "truncated"] = torch.zeros(count, dtype=torch.bool)
        if self.dedup:
            rows["observation"] = self._seen(number, bits)
            rows["next", "observation"] = self._seen(number + 10, bits)
        if priorities:
            rows["p"] = (number % 5 + 0.5) * (1 + bits % 3)
        return rows

    @staticmethod
    def _seen(number: torch.Tensor, bits: int) -> torch.Tensor:
        """Observations, of which some differ between batches."""
        values = number + (bits >> (number % 23)) % 2
        return values[..., None].expand(*number.shape, 40).float()


KINDS = {
    "random": Kind("random"),
    "prioritized": Kind("prioritized"),
    "slices": Kind("slices"),
    "prioritized slices": Kind("prioritized slices"),
    "lanes": Kind("prioritized", ndim=2),
    "slices of lanes": Kind("prioritized slices", ndim=2),
    "streams": Kind("prioritized", streams=True),
    "slices of streams": Kind("prioritized slices", streams=True),
    "references": Kind("prioritized", dedup=True),
    "references of lanes": Kind("prioritized", ndim=2, dedup=True),
    "references of streams": Kind("slices", streams=True, dedup=True),
    "slices of rings": Kind("prioritized slices", streams=True, length=2),
    "slices of episodes": Kind("prioritized slices", streams=True, episodes=True),
    "episode priorities": Kind("episode priorities"),
    "episode priorities of rings": Kind("episode priorities", streams=True, length=2),
    "references of rings": Kind("slices", streams=True, dedup=True, length=2),
    "references of episodes": Kind("prioritized slices", streams=True, dedup=True, episodes=True),
}


class Worked:
    """A plain buffer and handles onto a shared one, to which the same is done."""

    def __init__(self, kind: Kind, folder: Path | None, handles: int) -> None:
        self.kind, self.model = kind, kind.buffer(None, shared=False)
        self.handles = [kind.buffer(folder, shared=True)]
        self.handles += [another(self.handles[0]) for _ in range(handles - 1)]
        self.number = 0
        self.saved: list[Path] = []
        self.emptied = self.placed = False

    def do(self, at: int, what: Callable[[ReplayBuffer], Any]) -> None:
        """The same to one handle and to the plain buffer; both answer the same."""
        answers = []
        for buffer in (self.handles[at], self.model):
            try:
                answers.append(what(buffer))
            except (RuntimeError, ValueError, IndexError) as error:
                answers.append((type(error).__name__, str(error)))
        if len(self.model):
            _ = self.model.storage.episodes  # noted at every commit, where rows are shared
        one, other = answers
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            one, other = one.tolist(), other.tolist()
        assert one == other

    def check(self, at: int) -> None:
        """All that a handle knows is what the plain buffer knows."""
        self.forget_order(at)
        found, wanted = shown(self.handles[at]), shown(self.model)
        if self.emptied:  # whether a stream was open when rows were forgotten is known to one alone
            for one in (found, wanted):
                one["episodes' head"] = [max(2, head) for head in one.get("episodes' head", [])]
        if self.placed:
            for one in (found, wanted):
                for name in ("begin", "evicted", "head", "id"):
                    one.pop(f"episodes' {name}", None)
        different = [
            (name, found.get(name), wanted.get(name))
            for name in found.keys() | wanted.keys()
            if found.get(name) != wanted.get(name)
        ]
        assert not different, (at, different)

    def forget_order(self, at: int) -> None:
        """Where rows were placed, whoever saw in what order they came knows more than they tell."""
        if self.placed:
            for buffer in (self.handles[at], self.model):
                with buffer.storage.lock:
                    for index in buffer.storage.indexes._live():
                        index.edited()

    def rows(self, count: int, bits: int, **options: Any) -> TensorDict:
        first, self.number = self.number, self.number + count
        return self.kind.rows(first, count, bits, **options)

    def elements(self, picks: list[int]) -> torch.Tensor:
        """Some stored elements as an index."""
        stored = len(self.model)
        some = torch.tensor([pick % stored for pick in picks])
        return torch.stack([some // LANES, some % LANES], -1) if self.kind.ndim == 2 else some


numbers = st.integers(0, 2**31 - 1)
picks = st.lists(st.integers(0, 50), min_size=1, max_size=6)
steps = st.one_of(
    st.tuples(st.just("extend"), st.integers(0, 2 * SLOTS), numbers, st.booleans()),
    st.tuples(st.just("extend"), st.integers(1, 3), numbers, st.just(False)),
    st.tuples(st.just("add"), numbers),
    st.tuples(st.just("update"), picks, numbers),
    st.tuples(st.just("edit"), picks, numbers),
    st.tuples(st.just("flags"), st.integers(0, 50), st.booleans()),
    st.tuples(st.just("cut"), st.integers(0, 2)),
    st.tuples(st.just("empty"), st.booleans()),
    st.tuples(st.just("write_at"), picks, numbers),
    st.tuples(st.just("set"), picks, numbers),
    st.tuples(st.just("remove"), st.integers(1, 4)),
    st.tuples(st.just("tag"), st.integers(0, 50)),
    st.tuples(st.just("save")),
    st.tuples(st.just("load"), st.integers(0, 5)),
    st.tuples(st.just("sample"), numbers),
)


def streams_of(buffer: ReplayBuffer) -> int:
    """Return the number of streams that have rows."""
    return buffer.storage.episodes.lanes if len(buffer) else 0


def take(worked: Worked, at: int, step: tuple[Any, ...], folder: Path) -> None:
    """One step, through one of the handles."""
    what, *more = step
    kind, model = worked.kind, worked.model
    if what == "extend":
        prioritized = more[2] and "prioritized" in kind.sampler
        rows = worked.rows(more[0], more[1], priorities=prioritized)
        worked.do(at, lambda buffer: buffer.extend(rows))
    elif what == "add":
        row = worked.rows(1, more[0])
        row = row[:, 0] if kind.ndim == 2 else row[0]
        worked.do(at, lambda buffer: _plain(buffer.add(row)))
    elif what == "cut":
        lane = None if not more[0] or kind.streams or kind.ndim == 1 else more[0] - 1
        worked.do(at, lambda buffer: buffer.cut(lane))
    elif what == "empty":
        worked.emptied = True
        worked.do(at, lambda buffer: buffer.empty(more[0]))
    elif what == "remove" and kind.streams:
        before = streams_of(model)
        worked.do(at, lambda buffer: buffer.remove_oldest(more[0]))
        worked.emptied |= streams_of(model) < before
    elif what == "tag" and len(model) and kind.ndim == 1:
        worked.do(at, lambda buffer: buffer.tag(worked.elements([more[0]]), {"mark": more[0]}))
    elif what == "save":
        path = folder / f"saved {len(worked.saved)}"
        worked.handles[at].dumps(path)
        worked.saved.append(path)
    elif what == "load":
        if worked.saved:
            path = worked.saved[more[0] % len(worked.saved)]
            worked.do(at, lambda buffer: buffer.loads(path))
            worked.emptied |= not len(model)
    elif what == "sample":
        worked.forget_order(at)
        worked.do(at, lambda buffer: drawn(buffer, 4, more[0]))
    elif what in ("write_at", "set"):
        top = len(model) // (LANES if kind.ndim == 2 else 1)
        slots = sorted({pick % min(SLOTS, top + 1) for pick in more[0]})
        index = torch.tensor([slot for slot in slots if slot < top] or [top])
        rows = worked.rows(len(index), more[1])
        if what == "write_at":
            worked.do(at, lambda buffer: buffer.writer.write_at(index, rows))
        else:
            rows = rows.transpose(0, 1) if kind.ndim == 2 else rows
            worked.do(at, lambda buffer: buffer.storage.set(index, rows))
        worked.placed = True
    elif len(model):
        if what == "update" and "prioritized" in kind.sampler:
            index = worked.elements(more[0])
            values = torch.tensor([(more[1] % (n + 3)) / 2 for n in range(len(index))])
            worked.do(at, lambda buffer: buffer.update_priority(index, values))
        elif what == "edit" and kind.ndim == 1:
            index = torch.tensor(sorted({pick % len(model) for pick in more[0]}))
            rows = worked.rows(len(index), more[1])
            rows["lane"] = model["lane"][index]
            worked.do(at, lambda buffer: buffer.__setitem__(index, rows))
        elif what == "flags":
            column = model["next", "done"].contiguous()
            column.view(-1)[more[0] % column.numel()] = more[1]
            worked.do(at, lambda buffer: buffer.__setitem__(("next", "done"), column))


def _plain(answer: Any) -> Any:
    return answer.tolist() if isinstance(answer, torch.Tensor) else answer


def work(kind: Kind, data: st.DataObject, folder: Path, disk: bool) -> None:
    handles = data.draw(st.integers(2, 3))
    scratch = folder / "rows" if disk else None
    worked = Worked(kind, scratch, handles)
    for _ in range(data.draw(st.integers(1, 14))):
        at = data.draw(st.integers(0, handles - 1))
        take(worked, at, data.draw(steps), folder)
        # The others look now, or sleep on.
        for other in range(handles):
            if data.draw(st.booleans()):
                worked.check(other)
    for other in range(handles):
        worked.check(other)
    batches = [drawn(buffer, 4, 11) for buffer in (*worked.handles, worked.model)]
    assert all(batch == batches[-1] for batch in batches)


def relaxed(examples: int) -> Any:
    return settings(
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
        deadline=None,
        max_examples=examples,
    )


@pytest.mark.parametrize("name", KINDS)
@relaxed(12)
@given(data=st.data())
def test_handles_agree_with_a_plain_buffer(
    name: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    work(KINDS[name], data, tmp_path_factory.mktemp("work"), data.draw(st.booleans()))


@relaxed(12)
@given(data=st.data(), kind=st.sampled_from(["prioritized", "streams", "lanes", "references"]))
def test_handles_agree_with_a_short_log(
    data: st.DataObject, kind: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared, "_LOG_LENGTH", 8)
        work(KINDS[kind], data, tmp_path_factory.mktemp("work"), False)


@pytest.mark.long
@pytest.mark.parametrize("log", [8, 1 << 17])
@pytest.mark.parametrize("name", KINDS)
@relaxed(150)
@given(data=st.data())
def test_handles_agree_with_a_plain_buffer_in_long_runs(
    name: str, log: int, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared, "_LOG_LENGTH", log)
        work(KINDS[name], data, tmp_path_factory.mktemp("work"), data.draw(st.booleans()))


def test_rows_of_other_processes_are_indexed_without_a_pass_over_all_rows() -> None:
    options: dict[str, Any] = {"storage": LazyTensorStorage(40, lane_key="lane")}
    one = ReplayBuffer(**options, writer=LaneWriter(10), shared=True)
    handles, rebuilt = (one, another(one)), []
    for turn in range(12):  # the rings of four streams wrap
        for buffer in handles:
            buffer.extend(TensorDict.cat([steps_of(4 * turn, [0, 1], lane) for lane in range(4)]))
        rebuilt.append([buffer.storage.episodes.rebuilt for buffer in handles])
    assert rebuilt[0] == rebuilt[-1]
    assert [len(buffer.episodes.index) for buffer in handles] == [40, 40]
    one.remove_oldest(1)
    assert [len(buffer.episodes.index) for buffer in handles] == [36, 36]
    assert [buffer.storage.episodes.rebuilt for buffer in handles] == rebuilt[0]


# -- what was wrong once ----------------------------------------------------------------------


def steps_of(first: int, done: list[int], lane: int = 0) -> TensorDict:
    count = len(done)
    return TensorDict(
        {
            "number": torch.arange(first, first + count),
            "lane": torch.full((count,), lane),
            "next": {"done": torch.tensor(done, dtype=torch.bool)},
        },
        [count],
    )


def pair(slots: int, **options: Any) -> tuple[ReplayBuffer, ReplayBuffer]:
    buffer = ReplayBuffer(storage=LazyTensorStorage(slots, **options), shared=True)
    return buffer, another(buffer)


def begins(buffer: ReplayBuffer) -> list[tuple[int, int, int]]:
    """Id, rows that are gone, and rows that are stored of every episode, by id."""
    facts = buffer.episodes._facts
    found = zip(facts.id.tolist(), facts.evicted.tolist(), facts.length.tolist(), strict=True)
    return sorted(found)


def test_handle_notes_rows_of_others_before_overwriting_them() -> None:
    one, other = pair(7)
    one.extend(steps_of(0, [0] * 7))
    assert begins(one) == [(0, 0, 7)]
    one.cut()
    other.extend(steps_of(7, [0] * 7))
    one.extend(steps_of(14, [0]))  # the first row of what the other wrote goes
    assert begins(one) == begins(other) == [(7, 1, 7)]


@pytest.mark.parametrize("streams", [False, True])
def test_handles_share_begin_of_edited_episode(streams: bool) -> None:
    one, other = pair(8, **({"lane_key": "lane"} if streams else {}))
    one.extend(steps_of(0, [0] * 6))
    assert begins(other) == [(0, 0, 6)]
    one["next", "done"] = torch.tensor([0, 0, 0, 1, 0, 0], dtype=torch.bool)
    one.extend(steps_of(6, [0] * 7))  # rows 0 to 4 are gone, the edited one too
    assert begins(one) == begins(other) == [(4, 1, 8)]


def test_handles_share_begin_of_stream_after_the_ring_wraps() -> None:
    one, other = pair(4, lane_key="lane")
    one.extend(steps_of(0, [0, 0]))
    assert begins(other) == [(0, 0, 2)]
    one.extend(steps_of(2, [0] * 7))
    assert begins(one) == begins(other) == [(0, 5, 4)]


def test_handle_edits_flags_written_by_another_handle() -> None:
    one, other = pair(8, lane_key="lane")
    one.extend(steps_of(0, [0, 1, 0]))
    other.extend(steps_of(3, [0]))
    other.extend(steps_of(4, [0]))
    one["next", "done"] = torch.tensor([0, 0, 0, 0, 1], dtype=torch.bool)
    assert begins(one) == begins(other) == [(0, 0, 5)]


@pytest.mark.parametrize("options", [{}, {"lane_key": "lane"}])
def test_a_first_write_of_more_rows_than_slots_is_noted_from_its_begin(
    options: dict[str, Any], tmp_path: Path
) -> None:
    ReplayBuffer(storage=LazyTensorStorage(4, **options)).dumps(tmp_path / "nothing")
    for forget in (lambda b: b.empty(), lambda b: b.loads(tmp_path / "nothing")):
        one, other = pair(4, **options)
        one.extend(steps_of(0, [1]))
        forget(one)
        other.extend(steps_of(1, [0] * 6))
        assert begins(one) == begins(other) == [(1, 2, 4)]


@pytest.mark.parametrize("streams", [False, True])
def test_handles_share_episode_begin_at_a_stored_row(streams: bool) -> None:
    one, other = pair(4, **({"lane_key": "lane"} if streams else {}))
    one.extend(steps_of(0, [0] * 4))
    assert begins(other) == [(0, 0, 4)]
    one["next", "done"] = torch.tensor([1, 0, 0, 0], dtype=torch.bool)
    one.extend(steps_of(4, [0]))  # the row that was edited is gone
    assert begins(one) == begins(other) == [(1, 0, 4)]


def test_load_replaces_episode_begins_of_shared_rows(tmp_path: Path) -> None:
    plain = ReplayBuffer(storage=LazyTensorStorage(4))
    plain.extend(steps_of(0, [0] * 6))
    plain.dumps(tmp_path / "saved")
    one, other = pair(4)
    other.extend(steps_of(50, [0, 1, 0]))
    one.extend(steps_of(53, [0]))
    one.loads(tmp_path / "saved")
    plain.loads(tmp_path / "saved")
    wanted = [(evicted, length) for _, evicted, length in begins(plain)]
    for buffer in (one, other):
        assert [(evicted, length) for _, evicted, length in begins(buffer)] == wanted


@pytest.mark.parametrize("options", [{}, {"lane_key": "lane"}], ids=["ring", "streams"])
def test_references_that_are_followed_equal_those_that_are_read_again(
    options: dict[str, Any],
) -> None:
    one, other = pair(40, dedup_next=["number"], on_mismatch="dense", **options)
    draw, numbers = torch.Generator().manual_seed(3), [0, 0, 0, 0]
    for turn in range(150):
        count, lane, jump = (int(torch.randint(1, 4, (), generator=draw)) for _ in range(3))
        lane = lane if options else 0
        rows = steps_of(numbers[lane] + (jump == 1), [0] * count, lane)
        numbers[lane] += count + (jump == 1)
        rows["next", "number"] = rows["number"] + 1
        (one, other)[turn // 2 % 2].extend(rows)
        if turn % 5 == 0:
            third = another(one)  # reads all references
            expected = third[:]
            for buffer in (one, other):
                assert buffer.storage.overflow_rows == third.storage.overflow_rows
                assert (buffer[:] == expected).all()
    with one.storage.lock:
        stored = one[one.storage.ledger.write_order()]
    lanes = stored["lane"].unique() if options else [None]
    runs = [
        stored["number"][stored["lane"] == lane] if options else stored["number"] for lane in lanes
    ]
    alone = sum(1 + int((run.diff() != 1).sum()) for run in runs)
    assert one.storage.overflow_rows == alone
    assert (stored["next", "number"] == stored["number"] + 1).all()


@pytest.mark.parametrize("writer", [EpisodeWriter, lambda: LaneWriter(20)])
def test_removals_are_followed_without_a_pass_over_all_references(
    writer: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"dedup_next": ["number"], "on_mismatch": "dense"}
    one, plain = (
        ReplayBuffer(
            storage=LazyTensorStorage(400, lane_key="lane", **(options if share else {})),
            writer=writer(),
            shared=share,
        )
        for share in (True, False)
    )
    handles, draw, episodes = (one, another(one)), Random(4), writer is EpisodeWriter
    for turn in range(160):
        if turn == 50:  # each handle has written
            monkeypatch.setattr(ObservationTable, "reread", lambda *_: pytest.fail("reread"))
        lanes = plain["lane"].unique().tolist() if len(plain) else []
        if lanes and draw.random() < 0.4:
            count, lane = draw.randint(1, 3), draw.choice(lanes)
            for buffer in (handles[turn % 2], plain):
                buffer.remove_oldest(count, lane=lane)
        else:
            lane = turn if episodes else draw.randrange(20)
            rows = steps_of(10 * turn, [0] * 7 + [int(episodes)], lane)
            rows["next", "number"] = rows["number"] + 1
            for buffer in (handles[turn % 2], plain):
                buffer.extend(rows)
        for buffer in handles:
            assert (buffer[:] == plain[:]).all()
            assert shown(buffer)["order"] == shown(plain)["order"]
