"""A load that leaves the oldest rows out knows what a smaller ring would know."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from replaykit import (
    LaneWriter,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    StepCount,
    TensorStorage,
)
from replaykit.episodes import EpisodeIndex, Head

pytestmark = pytest.mark.filterwarnings("ignore:.*left out:UserWarning")

Maker = Callable[[int], ReplayBuffer]

HOW = ["files", "state", "storage"]


def loaded(make: Maker, capacity: int, source: ReplayBuffer, how: str, folder: Path) -> Any:
    """A new buffer of a capacity with what another one holds."""
    rb = make(capacity)
    if how == "files":
        source.dumps(folder / "saved")
        rb.loads(folder / "saved")
    elif how == "state":
        rb.load_state_dict(source.state_dict())
    else:  # the rows alone, and what is known of their episodes
        source.storage.dumps(folder / "rows")
        rb.storage.loads(folder / "rows")
    return rb


def known(rb: ReplayBuffer) -> dict[int, tuple[Any, ...]]:
    """All that is known of each row, by its number."""
    index: EpisodeIndex = rb.storage.episodes  # type: ignore[attr-defined]
    rows = rb[:] if rb.storage.ndim == 1 else rb[:].transpose(0, 1)
    number, count = rows["number"].reshape(-1), rows["step_count"].reshape(-1)
    element = np.arange(len(number))
    time, lane = index.time_and_lane(element)
    begin, last, _, head = index.episodes_at(time, lane)
    parts = (time - begin, last - time, head, index.reasons(time, lane), index.ids(time, lane))
    assert count.tolist() == (time - begin).tolist()
    table = zip(number.tolist(), *(part.tolist() for part in parts), strict=True)
    return {one: tuple(rest) for one, *rest in table}


def episodes(rb: ReplayBuffer) -> list[tuple[Any, ...]]:
    return [
        (one.length, one.reason, one.head, one.rows()["number"].reshape(-1).tolist())
        for one in rb.episodes
    ]


def check_same(one: ReplayBuffer, other: ReplayBuffer) -> None:
    assert known(one) == known(other)
    assert sorted(episodes(one), key=str) == sorted(episodes(other), key=str)


def check_loads(
    make: Maker,
    small: int,
    large: int,
    write: Callable[..., None],
    how: str,
    folder: Path,
    *,
    again: bool,
) -> None:
    """What is known after a load of a large buffer into a small one, and after it is written on.

    Args:
        write: writes the same rows to several buffers.
        again: whether what is loaded was itself loaded.
    """
    one, other = make(large), make(small)
    write(one, other)
    if again:
        one = loaded(make, large, one, how, folder)
        other = loaded(make, small, other, how, folder)
        write(one, other)
    moved = loaded(make, small, one, how, folder)
    other = loaded(make, small, other, how, folder)
    check_same(moved, other)
    write(moved, other)
    check_same(moved, other)


@st.composite
def codes(draw: st.DrawFn, rows: int) -> dict[str, torch.Tensor]:
    """Flags and ids of rows, ends being rare enough that episodes outgrow small rings."""
    rare = st.sampled_from([False] * 5 + [True])
    done = draw(st.lists(rare, min_size=rows, max_size=rows))
    truncated = draw(st.lists(rare, min_size=rows, max_size=rows))
    switch = draw(st.lists(rare, min_size=rows, max_size=rows))
    return {
        "done": torch.tensor(done) | torch.tensor(truncated),
        "truncated": torch.tensor(truncated),
        "episode": torch.tensor(switch).long().cumsum(0),
    }


def batch(given: dict[str, torch.Tensor], shape: list[int], start: int, **others: Any) -> Any:
    given = {name: value.reshape(shape) for name, value in given.items()}
    number = start + torch.arange(given["done"].numel()).reshape(shape)
    after = {"done": given["done"], "truncated": given["truncated"]}
    return TensorDict(
        {"number": number, "episode": given["episode"] + start, "next": after, **others}, shape
    )


LAYOUTS = {"ring": 1, "lanes": 3, "interleaved": 0, "by stream": 0}
"""How many lanes there are; 0: some streams."""

UNKNOWN = ("by stream", "storage")
"""Of how long its lanes are only a writer knows."""


@pytest.mark.parametrize(
    ("layout", "how"), [(each, how) for each in LAYOUTS for how in HOW if (each, how) != UNKNOWN]
)
@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_load_into_a_smaller_ring_keeps_episodes(
    layout: str, how: str, tmp_path: Path, data: st.DataObject
) -> None:
    """Every interleaved stream comes often enough for the smaller ring to know it still."""
    mixed = layout in ("interleaved", "by stream")
    streams = data.draw(st.integers(1, 3)) if mixed else LAYOUTS[layout]
    small, large = sorted(data.draw(st.tuples(st.integers(1, 9), st.integers(2, 14))))
    if layout == "interleaved":
        small, large = small + 4 * streams, large + 4 * streams
    start = 0

    def make(length: int) -> ReplayBuffer:
        slots = length if layout == "interleaved" else length * streams
        options = {"lane_key": "env"} if mixed else {"ndim": 2 if layout == "lanes" else 1}
        writer = LaneWriter(length) if layout == "by stream" else None
        storage = LazyTensorStorage(slots, **options)
        return ReplayBuffer(storage=storage, writer=writer, transform=StepCount())

    def write(*buffers: ReplayBuffer) -> None:
        nonlocal start
        for _ in range(data.draw(st.integers(1, 5))):
            if mixed:
                more = data.draw(st.lists(st.integers(0, streams - 1), max_size=streams))
                env = data.draw(st.permutations([*range(streams), *more]))
                made = batch(data.draw(codes(len(env))), [len(env)], start, env=torch.tensor(env))
                made["episode"] = torch.zeros(len(env), dtype=torch.long)
            else:
                rows = data.draw(st.integers(1, 7))
                shape = [streams, rows] if layout == "lanes" else [rows]
                made = batch(data.draw(codes(rows * streams)), shape, start)
            cut = data.draw(st.sampled_from([False, False, True]))
            for rb in buffers:
                rb.extend(made)
                if cut:
                    rb.cut(0 if mixed else None)
            start += made.numel()

    check_loads(make, small, large, write, how, tmp_path, again=data.draw(st.booleans()))


def stream(env: list[int], done: list[int] | None = None) -> TensorDict:
    rows = len(env)
    after = {"done": torch.tensor(done or [0] * rows, dtype=torch.bool)}
    return TensorDict(
        {"env": torch.tensor(env), "number": torch.arange(rows), "next": after}, [rows]
    )


def test_a_stream_that_the_smaller_ring_would_have_forgotten_is_known(tmp_path: Path) -> None:
    """The saved rows know more than a smaller ring can, and what they know is kept."""

    def make(slots: int) -> ReplayBuffer:
        return ReplayBuffer(storage=LazyTensorStorage(slots, lane_key="env"), transform=StepCount())

    rows = stream([0, 0, 1, 1, 1, 1, 1, 0, 1])
    large, small = make(9), make(3)
    large.extend(rows)
    small.extend(rows)
    assert known(small)[7][:3] == (0, 0, Head.RESET)  # forgotten, and then taken for a new one
    moved = loaded(make, 3, large, "files", tmp_path)
    assert {row: one[0] for row, one in known(moved).items()} == {6: 4, 7: 2, 8: 5}
    assert all(one[2] == Head.EVICTED for one in known(moved).values())


@pytest.mark.parametrize("lane_key", [None, "env"])
def test_load_from_a_list_storage_finds_the_beginnings_of_episodes(
    lane_key: Any, tmp_path: Path
) -> None:
    """Nobody has kept an index of them: the rows that were saved tell where episodes began."""
    source = ReplayBuffer(storage=ListStorage(10))
    source.extend(stream([0] * 7, [0, 0, 1, 0, 0, 0, 0]))
    source.dumps(tmp_path)
    rb = ReplayBuffer(storage=LazyTensorStorage(2, lane_key=lane_key), transform=StepCount())
    rb.loads(tmp_path)
    assert rb[:]["step_count"].flatten().tolist() == [2, 3]
    assert [one.head for one in rb.episodes] == [Head.EVICTED]


def test_flags_stored_once_are_read_correctly_by_a_smaller_ring(tmp_path: Path) -> None:
    """Of observations stored once, where a flag is one of them, and files are read by piece."""
    rows = stream([0] * 12, [0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0])
    rows["done"] = rows["next", "done"].roll(1)
    rows["x"], rows["next", "x"] = torch.arange(12.0), torch.arange(12.0) + 1
    for place in (LazyTensorStorage(10, dedup_next=True), LazyMemmapStorage(10, dedup_next=True)):
        rb = ReplayBuffer(storage=place)
        rb.extend(rows)
        rb.dumps(tmp_path / "saved")
        few = ReplayBuffer(storage=LazyTensorStorage(5), transform=StepCount())
        few.loads(tmp_path / "saved")
        assert few[:]["step_count"].flatten().tolist() == [3, 4, 5, 6, 7]


def test_rows_placed_by_hand_are_loaded_into_a_smaller_ring(tmp_path: Path) -> None:
    """Kept rows lie in the order in which they were written: another one than before."""

    def make(slots: int) -> ReplayBuffer:
        return ReplayBuffer(storage=LazyTensorStorage(slots), transform=StepCount())

    rb = make(6)
    rb.extend(stream([0] * 6, [0, 1, 0, 0, 0, 0]))
    rb.writer.write_at(torch.tensor([3]), stream([0]))
    few = loaded(make, 3, rb, "state", tmp_path)
    # What came before the fifth row was overwritten by the one that was placed.
    assert few[:]["step_count"].flatten().tolist() == [0, 1, 0]
    assert [one.head for one in few.episodes] == [Head.CUT, Head.CUT]


@pytest.mark.parametrize("lane_key", [None, "env"])
def test_the_first_write_after_a_load_takes_the_oldest_rows(lane_key: Any, tmp_path: Path) -> None:
    """Nobody had asked where the episodes of the loaded rows began before they were gone."""

    def make(slots: int) -> ReplayBuffer:
        storage = LazyTensorStorage(slots, lane_key=lane_key)
        return ReplayBuffer(storage=storage, transform=StepCount())

    rb = make(4)
    rb.extend(stream([0] * 9))
    again = loaded(make, 4, rb, "files", tmp_path)
    again.extend(stream([0] * 2))
    assert again[:]["step_count"].flatten().tolist() == [8, 0, 1, 7]


def test_first_write_over_wrapped_rows_keeps_step_counts() -> None:
    rb = ReplayBuffer(storage=TensorStorage(stream([0] * 5)), transform=StepCount())
    rb.extend(stream([0] * 2))
    assert rb[:]["step_count"].flatten().tolist() == [5, 6, 2, 3, 4]
