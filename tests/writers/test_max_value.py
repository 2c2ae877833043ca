"""Only the records of largest rank, against a sorted list."""

from __future__ import annotations

import copy
import math
import multiprocessing
import pickle
import time
from bisect import insort
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from replaykit import (
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    RoundRobinWriter,
    TensorDictMaxValueWriter,
    TensorStorage,
)
from replaykit.episodes import Head
from tests.support.refusals import refuses

STORAGES = {
    "list": ListStorage,
    "lazy_stack": LazyStackStorage,
    "lazy_tensor": LazyTensorStorage,
    "memmap": LazyMemmapStorage,
}


def _rows(ranks: Any, start: int = 0) -> TensorDict:
    ranks = torch.as_tensor(ranks, dtype=torch.float64)
    count = len(ranks)
    return TensorDict(
        {"id": torch.arange(start, start + count), "next": {"reward": ranks[:, None]}}, [count]
    )


def _buffer(capacity: int, storage: Any = LazyTensorStorage, **arguments: Any) -> ReplayBuffer:
    return ReplayBuffer(storage=storage(capacity), writer=TensorDictMaxValueWriter(**arguments))


def _ids(rb: ReplayBuffer) -> list[int]:
    return [int(row["id"]) for row in rb.storage]


class SortedModel:
    """What is kept, smallest rank first, among equals the youngest; one row at a time."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.kept, self.count = capacity, [], 0
        self.generations: dict[int, int] = {}

    def add(self, number: int, rank: float) -> int | None:
        if len(self.kept) < self.capacity:
            slot = len(self.kept)
        elif rank > self.kept[0][0]:
            slot = self.kept.pop(0)[2]
        else:
            return None
        insort(self.kept, (rank, -self.count, slot, number))
        self.count += 1
        self.generations[slot] = self.generations.get(slot, -1) + 1
        return slot

    def ids(self) -> list[int]:
        return [record[3] for record in sorted(self.kept, key=lambda record: record[2])]

    def extend(self, start: int, ranks: list[float]) -> list[int]:
        """The slot of each row that is there at the end of the call, -1 for the others."""
        slots = [self.add(start + i, rank) for i, rank in enumerate(ranks)]
        by_slot = {record[2]: record[3] for record in self.kept}
        return [
            slot if slot is not None and by_slot[slot] == start + i else -1
            for i, slot in enumerate(slots)
        ]


RANK = st.sampled_from([-math.inf, -1.0, 0.0, 0.0, 1.0, 2.0, math.inf])


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    st.integers(1, 9),
    st.lists(st.lists(RANK, max_size=30), max_size=8),
    st.sampled_from(sorted(STORAGES)),
    st.booleans(),
)
@pytest.mark.pitfall("WR17")
def test_batches_of_any_size_equal_a_sorted_list_across_saving(
    capacity: int, batches: list[list[float]], name: str, reload: bool
) -> None:
    """WR17, 6.3: ties and infinities included, whatever the batches."""
    rb, model, start = _buffer(capacity, STORAGES[name]), SortedModel(capacity), 0
    for ranks in batches:
        rows = _rows(ranks, start)
        if len(ranks) == 1:
            assert rb.add(rows[0]) == model.add(start, *ranks)
        else:
            index = rb.extend(rows)
            assert (index.tolist(), index.dtype) == (model.extend(start, ranks), torch.int64)
        assert (_ids(rb), rb.write_count) == (model.ids(), model.count)
        ledger, slots = rb.storage.ledger, torch.arange(len(rb))
        wanted = [model.generations[slot] for slot in range(len(rb))]
        assert ledger.generations(slots).tolist() == wanted
        by_age = [record[2] for record in sorted(model.kept, key=lambda record: -record[1])]
        assert ledger.write_order().tolist() == by_age
        start += len(ranks)
        if reload and len(rb):
            again = _buffer(capacity, STORAGES[name])
            again.load_state_dict(rb.state_dict())
            rb = again


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [
        ("sum", [3.0, 1.0, 6.0]),
        ("mean", [1.0, 1 / 3, 2.0]),
        ("max", [3.0, 9.0, 2.0]),
        ("min", [-1.0, -5.0, 2.0]),
        ("median", [1.0, -3.0, 2.0]),
    ],
)
def test_the_rank_is_reduced_over_all_but_the_row(reduction: str, expected: list[float]) -> None:
    features = torch.tensor([[1.0, 3.0, -1.0], [9.0, -5.0, -3.0], [2.0, 2.0, 2.0]])
    layouts = {
        "features": TensorDict({"r": features}, [3]),
        "trajectories": TensorDict({"r": features}, [3, 3]),
        "trajectories of features": TensorDict({"r": features.unsqueeze(-1)}, [3, 3]),
        "integers": TensorDict({"r": features.to(torch.int32)}, [3]),
        "half": TensorDict({"r": features.to(torch.bfloat16)}, [3]),
    }
    order = sorted(range(3), key=lambda row: -expected[row])
    for name, data in layouts.items():
        for capacity in (1, 2):
            rb = _buffer(capacity, rank_key="r", reduction=reduction)
            index = rb.extend(data)
            kept = {row for row in range(3) if index[row] >= 0}
            assert kept == set(order[:capacity]), name
    text = rf"reduction: expected one of .*'{reduction}'.*, got 'total'"
    refuses(ValueError, text, TensorDictMaxValueWriter, reduction="total")
    for ranks, text in (
        (torch.tensor([[math.inf, -math.inf]]), "got NaN"),
        (torch.zeros(2, 0), r"a rank under 'r', got shape \[2, 0\]"),
    ):
        rows = TensorDict({"r": ranks}, [len(ranks)])
        refuses(ValueError, text, _buffer(2, rank_key="r").extend, rows)


def test_trajectories_are_kept_by_their_return() -> None:
    rb = _buffer(2)
    rewards = torch.tensor([[1.0, 1.0], [5.0, -9.0], [0.0, 3.0]])
    data = TensorDict(
        {"next": {"reward": rewards[..., None]}, "id": torch.arange(6).view(3, 2)}, [3, 2]
    )
    assert rb.extend(data).tolist() == [0, -1, 1]
    assert rb[:]["id"].tolist() == [[0, 1], [4, 5]]
    assert rb.add(data[1]) is None
    assert rb[:].batch_size == (2, 2)


@pytest.mark.pitfall("WR17")
@pytest.mark.parametrize("position", [0, 2, 4])
@pytest.mark.parametrize("name", STORAGES)
def test_nan_rank_is_refused_and_writes_nothing(snapshot: Any, name: str, position: int) -> None:
    rb = _buffer(4, STORAGES[name])
    rb.extend(_rows([3, 1, 2]))
    before = snapshot(rb)
    ranks = [9.0] * 5
    ranks[position] = math.nan
    message = rf"got NaN under \('next', 'reward'\) at row {position}"
    if name in ("list", "lazy_stack"):
        message = r"got NaN under \('next', 'reward'\)"
    refuses(ValueError, message, rb.extend, _rows(ranks))
    refuses(ValueError, "got NaN", rb.add, _rows(ranks)[position])
    assert snapshot(rb) == before
    # Nor does the writer remember the ranks that it saw.
    assert rb.extend(_rows([0.5, 0.4], 5)).tolist() == [3, -1]


def test_rows_without_a_rank_are_refused(snapshot: Any) -> None:
    for make in STORAGES.values():
        rb = _buffer(3, make)
        before = snapshot(rb)
        with pytest.raises(KeyError, match=r"the rank under \('next', 'reward'\), got none"):
            rb.extend(_rows([1, 2]).exclude(("next", "reward")))
        with pytest.raises(KeyError):
            rb.add(TensorDict({"id": torch.tensor(0)}, []))
        if make is not LazyStackStorage:  # which refuses them itself
            refuses(RuntimeError, "takes TensorDicts, got", rb.extend, torch.zeros(3))
        assert snapshot(rb) == before


def test_lanes_and_chosen_slots_are_refused() -> None:
    text = "a storage with ndim=1, got ndim=2"
    refuses(ValueError, text, _buffer, 4, partial(LazyTensorStorage, ndim=2))
    text = "chooses the slots of its rows itself"
    refuses(RuntimeError, text, _buffer(2).writer.write_at, torch.tensor([0]), _rows([1]))


def test_writer_knows_rows_of_other_writers() -> None:
    storage = LazyTensorStorage(3)
    ring = ReplayBuffer(storage=storage)
    best = ReplayBuffer(storage=storage, writer=TensorDictMaxValueWriter())
    ring.extend(_rows([5, 1, 4]))
    assert best.extend(_rows([3, 2], 3)).tolist() == [1, -1]
    ring.writer.write_at(torch.tensor([0]), _rows([0], 9))
    assert best.extend(_rows([1], 10)).tolist() == [0]
    assert _ids(best) == [10, 3, 2]


@pytest.mark.parametrize("stack_dim", [0, 1, -1])
def test_rows_of_a_lazy_stack_are_known_along_any_dimension(stack_dim: int) -> None:
    storage = LazyStackStorage(2, stack_dim=stack_dim)
    ring = ReplayBuffer(storage=storage)
    rewards = torch.tensor([[1.0, 1.0, 1.0], [2.0, 2.0, 2.0]])
    for row in TensorDict({"next": {"reward": rewards}}, [2, 3]).unbind(0):
        ring.add(row)
    best = ReplayBuffer(storage=storage, writer=TensorDictMaxValueWriter())
    assert best.add(TensorDict({"next": {"reward": torch.full((3,), 1.5)}}, [3])) == 0
    assert best.add(TensorDict({"next": {"reward": torch.full((3,), 1.5)}}, [3])) is None


def test_ring_continues_after_the_newest_row() -> None:
    """Records that are there are not displaced as long as there is room."""
    rb = _buffer(5)
    rb.extend(_rows([1, 2]))
    rb.set_writer(RoundRobinWriter())
    assert rb.extend(_rows([0, 0], 2)).tolist() == [2, 3]
    assert _ids(rb) == [0, 1, 2, 3]


def test_wrapped_rows_are_ranked() -> None:
    rb = ReplayBuffer(storage=TensorStorage(_rows([3, 1, 2])), writer=TensorDictMaxValueWriter())
    assert rb.extend(_rows([2.5, 0], 3)).tolist() == [1, -1]
    assert _ids(rb) == [0, 3, 2]
    other = ReplayBuffer(
        storage=TensorStorage(TensorDict({"x": torch.zeros(2)}, [2])),
        writer=TensorDictMaxValueWriter(),
    )
    refuses(KeyError, "the rank under", other.writer.state_dict)


def test_empty_forgets_the_ranks() -> None:
    rb = _buffer(2)
    rb.extend(_rows([8, 9]))
    rb.empty()
    assert rb.extend(_rows([1, 2, 3], 2)).tolist() == [-1, 1, 0]
    assert rb.storage.ledger.generations(torch.arange(2)).tolist() == [3, 2]


EDITS: dict[str, Callable[[ReplayBuffer, Any], None]] = {
    "key": lambda rb, row: rb.set_at_(("next", "reward"), row["next", "reward"], 0),
    "row": lambda rb, row: rb.__setitem__(0, row),
    "handle": lambda rb, row: rb.storage.set(torch.tensor([0]), row[None], set_cursor=False),
    "empty": lambda rb, row: rb.empty(),
}


@pytest.mark.pitfall("WR17")
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("way", ["state_dict", "dumps", "dumps twice", "pickle", "deepcopy"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_rows_are_ranked_by_their_stored_values_also_by_a_copy(
    tmp_path: Any, way: str, edit: str, when: str
) -> None:
    """WR17, 6.3: with equal ranks, so that ages decide, and a rank edited after it was written."""
    rb = _buffer(4)
    rb.extend(_rows([3, 1, 2, 2, 1, 2]))
    row = _rows([0.5], 0)[0]
    if when == "before":
        EDITS[edit](rb, row)
    twin = _buffer(4)
    if way == "pickle":
        twin = pickle.loads(pickle.dumps(rb))
    elif way == "deepcopy":
        twin = copy.deepcopy(rb)
    elif way == "state_dict":
        twin.load_state_dict(rb.state_dict())
    else:
        rb.dumps(tmp_path / "a")
        twin.loads(tmp_path / "a")
        if way == "dumps twice":
            twin.dumps(tmp_path / "b")
            twin = _buffer(4)
            twin.loads(tmp_path / "b")
    if when == "after":
        EDITS[edit](rb, row)
        EDITS[edit](twin, row)
    rows = _rows([2, 2.5, 1, 4, 3.5], 10)
    assert twin.extend(rows).tolist() == rb.extend(rows).tolist()
    kept = [2, 2.5, 3.5, 4]
    assert sorted(rb[:]["next", "reward"].flatten().tolist()) == kept
    assert _ids(twin) == _ids(rb)
    assert twin.write_count == rb.write_count


@pytest.mark.pitfall("WR17")
def test_failed_write_leaves_no_rank_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer knows ranks of stored records only, also after an error below it."""
    rb = _buffer(2)
    rb.extend(_rows([1, 2]))
    with monkeypatch.context() as patched:
        patched.setattr(rb.storage, "write", lambda *_: (_ for _ in ()).throw(OSError("disk")))
        refuses(OSError, "disk", rb.extend, _rows([9, 9], 2))
    assert rb.extend(_rows([1.5], 4)).tolist() == [0]
    assert _ids(rb) == [4, 1]


def test_loading_into_smaller_storage_keeps_largest_ranks() -> None:
    rb = _buffer(6)
    rb.extend(_rows([3, 1, 2, 2, 5, 0]))
    small = _buffer(3)
    with pytest.warns(UserWarning, match="3 rows do not fit"):
        small.load_state_dict(rb.state_dict())
    assert sorted(_ids(small)) == [0, 2, 4]  # ranks 3, 2 (the older), 5
    model = SortedModel(3)
    for number, rank in ((0, 3.0), (2, 2.0), (4, 5.0)):
        model.add(number, rank)
    assert small.extend(_rows([2, 4, 2.5], 10)).tolist() == model.extend(10, [2, 4, 2.5])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"_ranks": None}, r"_ranks as float64 \[K\]"),
        ({"_ranks": torch.zeros(2)}, r"_ranks as float64 \[K\]"),
        ({"_ranks": torch.zeros(3, dtype=torch.float64)}, "2 ranks, got 3"),
        ({"_ranks": torch.tensor([0.0, math.nan], dtype=torch.float64)}, "got NaN"),
        ({"_kind": "round_robin"}, "a 'max_value' writer"),
    ],
)
def test_invalid_state_is_refused(snapshot: Any, changes: dict[str, Any], message: str) -> None:
    rb = _buffer(3)
    rb.extend(_rows([1, 2]))
    before = snapshot(rb)
    refuses(ValueError, message, rb.writer.load_state_dict, {**rb.writer.state_dict(), **changes})
    assert snapshot(rb) == before


def test_max_value_writer_is_not_passed_to_a_spawned_process() -> None:
    process = multiprocessing.get_context("spawn").Process(target=print, args=(_buffer(2).writer,))
    refuses(RuntimeError, "cannot be handed to a spawned process", process.start)


@pytest.mark.pitfall("SL3")
def test_time_per_row_falls_with_the_size_of_the_batch() -> None:
    """SL3: no TensorDict work per row; a batch of 4000 costs far less than 4000 batches of 1."""

    def seconds(batch: int, rows: int) -> float:
        rb = _buffer(1000)
        data = _rows(torch.rand(rows, generator=torch.Generator().manual_seed(0)))
        pieces = data.split(batch)
        start = time.process_time()
        for piece in pieces:
            rb.extend(piece)
        return (time.process_time() - start) / rows

    one_by_one = min(seconds(1, 300) for _ in range(3))
    at_once = min(seconds(30_000, 30_000) for _ in range(3))
    assert at_once < one_by_one / 20


@pytest.mark.parametrize("asked", [False, True])
def test_episode_continues_after_empty_with_or_without_episode_queries(asked: bool) -> None:
    """The newest row ended nothing: what comes next is the middle of an episode."""
    rb = ReplayBuffer(storage=LazyTensorStorage(4), writer=TensorDictMaxValueWriter())

    def rows(*done: bool) -> TensorDict:
        flags = torch.tensor(done)[:, None]
        following = {"reward": torch.arange(len(done)) + 1.0, "done": flags}
        return TensorDict({"next": following}, [len(done)])

    rb.extend(rows(False, True, False, False, False, False))  # the larger ones displace others
    if asked:
        rb.storage.episodes.table()
    rb.empty()
    rb.extend(rows(False, True, False))
    assert rb.storage.episodes.table().head.tolist() == [Head.CUT, Head.RESET]


def test_commits_index_no_rows(tmp_path: Path) -> None:
    """Rows that replace others are indexed at the next use of episodes, not at each commit."""

    def opened() -> ReplayBuffer:
        storage = LazyMemmapStorage(8, scratch_dir=tmp_path, recover=True)
        return ReplayBuffer(storage=storage, writer=TensorDictMaxValueWriter(rank_key="rank"))

    def rows(*ranks: float) -> TensorDict:
        done = torch.zeros(len(ranks), dtype=torch.bool)
        rank = torch.tensor(ranks, dtype=torch.float32)
        return TensorDict({"rank": rank, "next": {"done": done}}, [len(ranks)])

    rb = opened()
    rb.extend(rows(*range(8, 0, -1)))
    index = rb.storage.episodes
    before = index.rebuilt
    for rank in (9.0, 10.0, 11.0, 12.0):
        rb.extend(rows(rank))
    assert index.rebuilt == before
    lengths = [1, 1, 1, 1, 4]  # the ids of rows by slot are 0, 1, 2, 3, 11, 10, 9, 8
    assert sorted(rb.storage.indexes.data().length.tolist()) == lengths
    rb.storage.close()
    rb = opened()
    assert rb[:]["rank"].tolist() == [8, 7, 6, 5, 12, 11, 10, 9]
    assert sorted(rb.storage.indexes.data().length.tolist()) == lengths
