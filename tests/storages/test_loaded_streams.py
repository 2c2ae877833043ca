"""Interleaved streams that were loaded: what was open has ended, whenever somebody asks first."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import LaneWriter, LazyTensorStorage, ReplayBuffer

SLOTS, STREAMS = 60, 4


def buffer(*, by_stream: bool) -> ReplayBuffer:
    return ReplayBuffer(
        storage=LazyTensorStorage(SLOTS, lane_key="env"),
        writer=LaneWriter(SLOTS // STREAMS) if by_stream else None,
        batch_size=8,
        generator=torch.Generator().manual_seed(0),
    )


def rows(first: int, count: int) -> TensorDict:
    number = torch.arange(first, first + count)
    return TensorDict(
        {
            "number": number,
            "env": number % STREAMS,
            ("next", "reward"): number[:, None].float(),
            ("next", "done"): (number % 23 == 0)[:, None],
        },
        [count],
    )


def told(rb: ReplayBuffer) -> Any:
    """All that an index knows of the stored rows, by their numbers."""
    index = rb.storage.episodes
    slots = torch.arange(len(rb))
    found = index.around(slots.numpy())
    marks = rb.storage.indexes.marks
    return (
        rb[:]["number"].tolist(),
        [part.tolist() for part in (found if isinstance(found, tuple) else [found])],
        marks.numbers.tolist(),
        marks.codes.tolist(),
    )


def extend(rb: ReplayBuffer) -> None:
    rb.extend(rows(1000, 17))


def edit(rb: ReplayBuffer) -> None:
    stored = rb[:]["env"]
    with rb.storage.lock:
        rb.storage.put(torch.arange(len(stored)), {("env",): stored.flip(0)})


def cut(rb: ReplayBuffer) -> None:
    rb.cut(2)


def place(rb: ReplayBuffer) -> None:
    rb.storage.set(torch.tensor([3, 1]), rows(2000, 2))


def save(rb: ReplayBuffer) -> None:
    rb.state_dict()


CHANGES = [extend, edit, cut, place, save, lambda rb: rb.sample()]


@pytest.mark.covering(2)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("by_stream", [False, True])
@pytest.mark.parametrize("count", [40, 90])
def test_loaded_streams_do_not_depend_on_order_of_queries(
    change: Callable[[ReplayBuffer], Any], mapped: bool, by_stream: bool, count: int, tmp_path: Path
) -> None:
    saved = buffer(by_stream=by_stream)
    for first in range(0, count, 10):
        saved.extend(rows(first, 10))
    saved.dumps(tmp_path / "saved")
    loaded = []
    for asked in (True, False):
        rb = buffer(by_stream=by_stream)
        rb.loads(tmp_path / "saved", mmap=mapped)
        assert rb.storage.indexes._main is None
        if asked:
            assert len(rb.storage.indexes.marks.numbers) >= STREAMS - 1
            assert rb.storage.indexes._main is not None
        if change is not place or not by_stream:
            change(rb)
        loaded.append(rb)
    assert told(loaded[0]) == told(loaded[1])


@pytest.mark.parametrize("mapped", [False, True])
def test_uniform_draws_of_loaded_streams_read_no_stream(mapped: bool, tmp_path: Path) -> None:
    """Opening them, and drawing, takes no look at which stream a row is of."""
    saved = buffer(by_stream=False)
    saved.extend(rows(0, 50))
    saved.dumps(tmp_path / "saved")
    rb = buffer(by_stream=False)
    rb.loads(tmp_path / "saved", mmap=mapped)
    for _ in range(3):
        rb.sample()
    assert rb.storage.indexes._main is None
    at = rb.extend(rows(51, 1))  # of the stream of row 47, whose episode a restart has ended
    assert rb[at]["env"].item() == rows(47, 1)["env"].item()
    assert rb.episodes.begin(at).item() == at.item()
    assert rb.episodes.begin(torch.tensor([47])).item() < 47
