"""No new records: every way of writing one is refused in the same words."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from replaykit import ImmutableDatasetWriter, ReplayBuffer, TensorStorage


@pytest.fixture
def buffer(make_rows: Any) -> ReplayBuffer:
    return ReplayBuffer(
        storage=TensorStorage(make_rows(0, 3)), writer=ImmutableDatasetWriter(), batch_size=2
    )


WRITES = {
    "add": lambda rb, rows: rb.add(rows[0]),
    "extend": lambda rb, rows: rb.extend(rows),
    "extend nothing": lambda rb, rows: rb.extend(rows[:0]),
    "empty": lambda rb, rows: rb.empty(),
    "empty, counts kept": lambda rb, rows: rb.empty(empty_write_count=False),
    "writer.add": lambda rb, rows: rb.writer.add(rows[0]),
    "writer.extend": lambda rb, rows: rb.writer.extend(rows),
    "writer.write_at": lambda rb, rows: rb.writer.write_at(torch.tensor([0]), rows[:1]),
    "writer.write": lambda rb, rows: rb.writer.write(rows),
    "writer.empty": lambda rb, rows: rb.writer.empty(),
}


@pytest.mark.parametrize("name", WRITES)
def test_every_write_is_refused_and_changes_nothing(
    buffer: ReplayBuffer, make_rows: Any, snapshot: Any, name: str
) -> None:
    before = snapshot(buffer)
    with pytest.raises(RuntimeError) as caught:
        WRITES[name](buffer, make_rows(7, 2))
    assert str(caught.value) == "This dataset doesn't allow writing."
    assert snapshot(buffer) == before
    assert buffer.write_count == 0


def test_rows_can_be_sampled_and_edited(buffer: ReplayBuffer, make_rows: Any) -> None:
    assert buffer.sample().batch_size == (2,)
    buffer[0] = make_rows(9, 1)[0]
    buffer.set_("action", torch.full((3,), 5, dtype=torch.uint8))
    assert buffer["id"].tolist() == [9, 1, 2]
    assert buffer["action"].tolist() == [5, 5, 5]
    assert buffer.write_count == 0


def test_its_state_is_that_of_the_storage(buffer: ReplayBuffer) -> None:
    state = buffer.writer.state_dict()
    assert state["_kind"] == "immutable"
    buffer.writer.load_state_dict(state)
    assert len(buffer) == 3
    assert repr(buffer.writer) == "ImmutableDatasetWriter(write_count=0)"
