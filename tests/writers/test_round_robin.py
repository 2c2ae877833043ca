"""The ring: any write equals writing row by row, for every storage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from replaykit import (
    ImmutableDatasetWriter,
    LazyTensorStorage,
    ReplayBuffer,
    RoundRobinWriter,
    TensorDictMaxValueWriter,
    TensorDictRoundRobinWriter,
    Writer,
)
from tests.support.refusals import refuses


def _ids(rb: ReplayBuffer) -> list[int]:
    return [int(row["id"]) for row in rb.storage]


@pytest.mark.pitfall("WR5")
def test_empty_batch_writes_nothing(storage_kind: Any, make_rows: Any, snapshot: Any) -> None:
    """WR5, E5: an empty int64 index, nothing changed, no schema, in any state."""
    nothing = make_rows(0, 3)[:0]
    rb = storage_kind.buffer(4)
    for rows in (nothing, []):
        before = snapshot(rb)
        index = rb.extend(rows)
        assert (index.tolist(), index.shape, index.dtype) == ([], (0,), torch.int64)
        index = rb.writer.extend(rows)
        assert (index.shape, index.dtype) == ((0,), torch.int64)
        assert rb.writer.write_at(torch.empty(0, dtype=torch.int64), rows).shape == (0,)
        assert snapshot(rb) == before
    rb.extend(make_rows(0, 6))
    before = snapshot(rb)
    assert rb.extend(nothing).shape == (0,)
    assert snapshot(rb) == before


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("extend"), st.integers(0, 13)),
        st.tuples(st.just("add"), st.just(1)),
        st.tuples(st.just("list"), st.integers(0, 6)),
        st.tuples(st.just("write_at"), st.lists(st.integers(0, 3), min_size=1, max_size=5)),
        st.tuples(st.just("set"), st.lists(st.integers(0, 3), min_size=1, max_size=5)),
        st.tuples(st.just("replace"), st.lists(st.integers(0, 3), min_size=1, max_size=3)),
        st.tuples(st.just("empty"), st.booleans()),
    ),
    max_size=12,
)


@pytest.mark.pitfall("WR6")
@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(operations=OPERATIONS)
def test_any_sequence_of_writes_equals_a_dictionary(
    storage_kind: Any, make_rows: Any, operations: list[tuple[str, Any]]
) -> None:
    """Rows, counters and handles against slots kept in plain Python, row by row.

    6.2: no handle from before ``empty`` names a new record.
    """
    rb = storage_kind.buffer(4, writer=RoundRobinWriter(track_generations=True))
    rows: dict[int, int] = {}
    generations = rb.writer.generations_of(torch.arange(4)).tolist()
    cursor = count = written = 0
    for name, what in operations:
        length = len(rows)
        if name in ("write_at", "set", "replace"):
            limit = length + (name != "replace")
            slots = [slot for slot in what if slot < min(limit, 4)]
            if not slots:
                continue
            batch = make_rows(written, len(slots))
            numbers = range(written, written + len(slots))
            if name == "write_at":
                assert rb.writer.write_at(torch.tensor(slots), batch).tolist() == slots
                count += len(slots)
            elif name == "set":
                rb.storage.set(slots, batch)
                cursor = (slots[-1] + 1) % 4
            else:
                rb.storage.set(slots, batch, set_cursor=False)
            rows.update(zip(slots, numbers, strict=True))
        elif name == "empty":
            generations = [one + (one >= 0) for one in generations]  # of slots ever written
            rb.empty(what)
            rows, cursor = {}, 0
            count = 0 if what else count
            continue
        else:
            slots = [(cursor + i) % 4 for i in range(what)]
            batch = make_rows(written, what)
            if name == "add":
                index: Any = [rb.add(batch[0])]
            else:
                index = rb.extend(batch if name == "extend" else list(batch.unbind(0))).tolist()
            assert index == slots
            rows.update(zip(slots, range(written, written + what), strict=True))
            cursor = (cursor + what) % 4
            count += what
        written += len(slots)
        for slot in slots:
            generations[slot] += name != "replace"  # which edits the record
        assert rb.writer.generations_of(torch.arange(4)).tolist() == generations
        assert _ids(rb) == [rows[slot] for slot in range(len(rows))]
        assert rb.storage.ledger.cursor == cursor
        assert rb.write_count == count
        assert len(rb) == len(rows)


def test_invalid_write_at_changes_nothing(storage_kind: Any, make_rows: Any, snapshot: Any) -> None:
    rb = storage_kind.buffer(4)
    rb.extend(make_rows(0, 2))
    before = snapshot(rb)
    for index, count, error in (
        ([4], 1, IndexError),
        ([-1], 1, IndexError),
        ([3], 1, RuntimeError),
        ([0, 1], 1, ValueError),
        ([0], 2, ValueError),
        ([True, False], 1, TypeError),
    ):
        with pytest.raises(error):
            rb.writer.write_at(torch.tensor(index), make_rows(9, count))
    assert snapshot(rb) == before


def test_rows_of_lanes_are_addressed_by_step(make_lanes: Any) -> None:
    rb = ReplayBuffer(
        storage=LazyTensorStorage(8, ndim=2), writer=RoundRobinWriter(track_generations=True)
    )
    assert rb.extend(make_lanes(0, 5)[..., :0]).shape == (0, 2)
    index = rb.extend(make_lanes(0, 5))
    assert rb.extend(make_lanes(0, 5)[..., :0]).shape == (0, 2)
    assert rb.writer.generations_of(index).tolist() == [1, 1, 0, 0, 0, 0, 0, 0, 1, 1]
    assert rb.writer.generations_of(torch.tensor([0, 3])).tolist() == [1, 0]
    assert rb.sample(16)["index_generation"].shape == (16,)
    index = rb.writer.write_at(torch.tensor([1]), make_lanes(50, 1))
    assert index.tolist() == [[1, 0], [1, 1]]
    assert rb[:]["id"].tolist() == [[4, 50, 2, 3], [104, 150, 102, 103]]
    assert rb.write_count == 12


@pytest.mark.pitfall("WR15")
def test_writers_over_one_storage_share_its_cursor(storage_kind: Any, make_rows: Any) -> None:
    """WR15, E9: alternate extends leave what one writer would have left."""
    storage = storage_kind(5)
    one, two = ReplayBuffer(storage=storage), ReplayBuffer(storage=storage)
    alone = storage_kind.buffer(5)
    for start, count in ((0, 2), (2, 2), (4, 3), (7, 1), (8, 12)):
        rows = make_rows(start, count)
        writing = one if start % 4 == 0 else two
        assert writing.extend(rows).tolist() == alone.extend(rows).tolist()
    assert _ids(one) == _ids(two) == _ids(alone)
    assert storage.ledger.write_order().tolist() == alone.storage.ledger.write_order().tolist()
    assert one.write_count + two.write_count == alone.write_count == 20
    # Cursor and generations belong to the storage; each writer counts what it wrote.
    assert one.write_count == 17


@pytest.mark.pitfall("WR15")
def test_generations_are_those_of_the_storage(make_rows: Any) -> None:
    storage = LazyTensorStorage(3)
    one = ReplayBuffer(storage=storage, writer=RoundRobinWriter(track_generations=True))
    two = ReplayBuffer(storage=storage)
    two.extend(make_rows(0, 4))
    assert one.writer.generations_of(torch.arange(3)).tolist() == [1, 0, 0]
    one.extend(make_rows(4, 1))
    assert one.writer.generations_of(torch.tensor([1, -1, 7])).tolist() == [1, -1, -1]
    assert two.writer.generations_of(torch.arange(3)).tolist() == [-1, -1, -1]
    assert one.writer.tracks_generations
    assert not two.writer.tracks_generations


@pytest.mark.parametrize("kind", [RoundRobinWriter, TensorDictRoundRobinWriter])
def test_a_writer_can_be_saved_alone(kind: Any, make_rows: Any, tmp_path: Any) -> None:
    """With count, cursor and handles; the state does not follow later writes."""
    rb = ReplayBuffer(storage=LazyTensorStorage(3), writer=kind(track_generations=True))
    rb.extend(make_rows(0, 4))
    rb.writer.write_at(torch.tensor([2]), make_rows(9, 1))
    state, order = rb.writer.state_dict(), rb.storage.ledger.write_order().tolist()
    assert (state["_write_count"], state["_cursor"], state["_kind"]) == (5, 1, "round_robin")
    rb.writer.dumps(tmp_path / "writer")
    rb.extend(make_rows(5, 1))
    for load in (
        lambda: rb.writer.load_state_dict(state),
        lambda: rb.writer.loads(tmp_path / "writer"),
    ):
        rb.extend(make_rows(5, 1))
        load()
        assert (rb.write_count, rb.storage.ledger.cursor) == (5, 1)
        assert rb.storage.ledger.write_order().tolist() == order == [1, 0, 2]
        assert rb.storage.ledger.next_position > 7  # positions are not given out again
    assert repr(rb.writer) == f"{kind.__name__}(write_count=5)"
    other = ReplayBuffer(storage=LazyTensorStorage(4))
    other.extend(make_rows(0, 3))
    refuses(ValueError, "the state of 4 slots, got 3", other.writer.loads, tmp_path / "writer")
    assert other.write_count == 3
    with pytest.raises(FileNotFoundError):
        other.writer.loads(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"_kind": "max_value"}, "expected the state of a 'round_robin' writer, got 'max_value'"),
        ({"_write_count": -1}, "_write_count"),
        ({"_write_count": 1.0}, "_write_count"),
        ({"_ledger": {}}, "slots"),
        ({"_ledger": None}, "a mapping"),
    ],
)
def test_invalid_state_is_refused(
    make_rows: Any, snapshot: Any, changes: dict[str, Any], message: str
) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(3))
    rb.extend(make_rows(0, 2))
    before = snapshot(rb)
    refuses(ValueError, message, rb.writer.load_state_dict, {**rb.writer.state_dict(), **changes})
    refuses(ValueError, "the state of a 'round_robin' writer", rb.writer.load_state_dict, {})
    for capacity, count, text in ((4, 2, "3 slots, got 4"), (3, 3, "2 stored rows, got 3")):
        other = ReplayBuffer(storage=LazyTensorStorage(capacity))
        other.extend(make_rows(0, count))
        state = other.writer.state_dict()
        refuses(ValueError, f"the state of {text}", rb.writer.load_state_dict, state)
    assert snapshot(rb) == before


@pytest.mark.parametrize(
    "make", [RoundRobinWriter, TensorDictMaxValueWriter, ImmutableDatasetWriter]
)
def test_writer_without_storage_raises_error(make: Any) -> None:
    writer = make(compilable=True)  # which has no effect
    assert writer.write_count == 0
    refuses(RuntimeError, "has no storage", lambda: writer.storage)


def test_writers_work_without_a_buffer(make_rows: Any) -> None:
    told: list[Any] = []

    class Listens:
        def mark_update(self, index: torch.Tensor) -> None:
            told.append(index.tolist())

    listener = Listens()
    storage = LazyTensorStorage(3)
    storage.attach(listener)
    storage.attach(listener)  # once is enough
    writer = RoundRobinWriter()
    writer.register_storage(storage)
    assert writer.add(make_rows(0, 1)[0]) == 0
    assert writer.extend(make_rows(1, 3)).tolist() == [1, 2, 0]
    writer.write_at(torch.tensor([1]), make_rows(7, 1))
    storage.set(2, make_rows(8, 1)[0])
    assert told == [[0], [1, 2, 0], [1], [2]]
    storage.detach(listener)
    storage.detach(listener)
    writer.add(make_rows(0, 1)[0])
    assert len(told) == 4
    storage.attach(listener)
    del listener
    writer.add(make_rows(0, 1)[0])  # held weakly: nobody to tell any more


def test_custom_writer_needs_only_write(make_rows: Any, tmp_path: Any) -> None:
    class AlwaysFirst(Writer):
        """Every row displaces the one in slot 0."""

        def write(self, rows: Any) -> torch.Tensor:
            self.storage.accept(rows)
            self.storage.write(torch.tensor([0]), rows, slice(len(rows) - 1, None))
            self.storage.ledger.place(torch.zeros(len(rows), dtype=torch.int64), move_cursor=True)
            self._count(len(rows))
            return torch.zeros(len(rows), dtype=torch.int64)

    rb = ReplayBuffer(storage=LazyTensorStorage(3), writer=AlwaysFirst())
    assert rb.extend(make_rows(0, 4)).tolist() == [0, 0, 0, 0]
    assert rb.add(make_rows(9, 1)[0]) == 0
    assert _ids(rb) == [9]
    with pytest.raises(RuntimeError, match="AlwaysFirst chooses the slots of its rows itself"):
        rb.writer.write_at(torch.tensor([0]), make_rows(0, 1))
    rb.dumps(tmp_path)
    refuses(ValueError, "AlwaysFirst", ReplayBuffer(storage=LazyTensorStorage(3)).loads, tmp_path)


def test_trajectories_are_rows_of_the_ring() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(3))
    data = TensorDict({"x": torch.arange(8).view(2, 4)}, [2, 4])
    assert rb.extend(data).tolist() == [0, 1]
    assert rb.add(data[0]) == 2
    assert rb.extend(data).tolist() == [0, 1]
    assert rb[:]["x"].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]]
