"""Windows from the oldest on, batch after batch."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from replaykit import LaneWriter, LazyTensorStorage, ReplayBuffer, SliceSampler, StackFrames
from tests.samplers.building import rows, sliced
from tests.storages.sharing import another


def _firsts(rb: ReplayBuffer, slices: int, length: int) -> list[int]:
    batch = rb.sample(slices * length)
    return batch["t"].reshape(slices, length)[:, 0].tolist()


def test_remainder_of_an_episode_is_padded() -> None:
    rb = sliced([4, 2], slice_len=3, draw="sequential", pad="right", pad_value=-1)
    batch = rb.sample(9)
    assert batch["t"].tolist() == [0, 1, 2, 3, -1, -1, 4, 5, -1]
    assert batch["collector", "mask"].int().tolist() == [1, 1, 1, 1, 0, 0, 1, 1, 0]


def test_short_episodes_are_drawn_whole() -> None:
    rb = sliced([2, 5, 1], slice_len=3, draw="sequential", strict_length=False)
    assert rb.sample(9)["t"].tolist() == [0, 1, 2, 3, 4, 7]
    assert rb.sample(3)["t"].tolist() == [0, 1]
    rb.extend(rows([1], start=8))  # over the first row of the episode that was drawn
    assert rb.sample(3)["t"].tolist() == [2, 3, 4]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_sequence_continues_in_a_smaller_buffer(prefetch: int) -> None:
    rb, other = (
        ReplayBuffer(
            storage=LazyTensorStorage(capacity),
            sampler=SliceSampler(slice_len=2, draw="sequential"),
            batch_size=4,
            prefetch=prefetch,
        )
        for capacity in (12, 8)
    )
    rb.extend(rows([6, 6, 6], start=0))  # 6..17 are stored
    assert rb.sample()["t"].tolist() == [6, 7, 8, 9]
    with pytest.warns(UserWarning, match="rows"):
        other.load_state_dict(rb.state_dict())
    for buffer in (rb, other):
        assert buffer.sample()["t"].tolist() == [10, 11, 12, 13]
        assert buffer.sample()["t"].tolist()[:2] == [14, 15]
        buffer.shutdown()


def test_sequence_continues_in_its_lane_of_a_smaller_buffer() -> None:
    rb, other = (
        sliced(capacity=2 * slots, ndim=2, slice_len=2, draw="sequential") for slots in (12, 8)
    )
    rb.extend(torch.stack([rows([6, 6, 6], start=start) for start in (0, 100)]))
    assert _firsts(rb, 6, 2) == [6, 8, 10, 106, 108, 110]
    with pytest.warns(UserWarning, match="rows"):
        other.load_state_dict(rb.state_dict())
    assert _firsts(rb, 2, 2) == _firsts(other, 2, 2) == [12, 14]


def test_a_place_that_was_lost_before_a_save() -> None:
    def make() -> ReplayBuffer:
        sampler = SliceSampler(slice_len=2, draw="sequential")
        storage = LazyTensorStorage(8, lane_key="env")
        return ReplayBuffer(storage=storage, writer=LaneWriter(4), sampler=sampler, batch_size=2)

    def write(env: int, first: int, last: int) -> None:
        t = torch.arange(first, last)
        rows = {"env": torch.full_like(t, env), "t": t, "next": {"done": t < 0}}
        rb.extend(TensorDict(rows, [len(t)]))

    rb, other = make(), make()
    write(0, 0, 4)
    write(1, 100, 104)
    assert [int(rb.sample()["t"][0]) for _ in range(3)] == [0, 2, 100]
    write(1, 104, 106)  # over the rows of the last window
    other.load_state_dict(rb.state_dict())
    assert rb.sample()["t"].tolist() == other.sample()["t"].tolist() == [102, 103]
    rb.empty(lane=0)  # moves the rows of the last window
    assert rb.sample()["t"].tolist() == [104, 105]
    write(0, 4, 6)
    assert rb.sample()["t"].tolist() == [4, 5]
    rb.empty(lane=0)  # no later episode is left
    assert (rb.sample()["t"].tolist(), rb.sampler.pass_index) == ([102, 103], 1)


@pytest.mark.parametrize("draw", ["sequential", "round_robin"])
def test_another_process_overwrites_a_place_after_a_load(draw: Any) -> None:
    rb = ReplayBuffer(
        storage=LazyTensorStorage(8),
        sampler=SliceSampler(slice_len=2, draw=draw),
        batch_size=4,
        shared=True,
    )
    other = another(rb)

    def rows(first: int, last: int) -> TensorDict:
        t = torch.arange(first, last)
        return TensorDict({"t": t, "next": {"done": t % 2 == 1}}, [last - first])

    rb.extend(rows(0, 8))
    assert rb.sample()["t"].tolist() == [0, 1, 2, 3]
    rb.load_state_dict(rb.state_dict())
    other.extend(rows(8, 14))
    assert rb.sample()["t"].tolist() == [6, 7, 8, 9]


@pytest.mark.parametrize(
    "change", [{"element": "3"}, {"include": 1}, {"pass_index": None}, {"element": -2}]
)
def test_invalid_state_is_refused(change: dict[str, Any]) -> None:
    rb = sliced([6], slice_len=2, draw="sequential")
    rb.sample(2)
    state = {**rb.sampler.state_dict(), **change}
    with pytest.raises(ValueError, match=f"expected {next(iter(change))} as"):
        rb.sampler.load_state_dict(state)
    with pytest.raises(ValueError, match="expected the state of a 'slice_sequential'"):
        rb.sampler.load_state_dict(SliceSampler(slice_len=2).state_dict())
    assert _firsts(rb, 1, 2) == [2]


def test_returned_draws_are_drawn_again() -> None:
    rb = sliced([3, 9, 2, 5], slice_len=3, draw="sequential")
    sampler, storage = rb.sampler, rb.storage
    first = sampler.sample(storage, 6)[0]
    token = sampler.mark(storage)
    second = sampler.sample(storage, 12)[0]
    assert sampler.pass_index == 1
    sampler.rollback(token, storage)
    assert sampler.pass_index == 0
    assert torch.equal(sampler.sample(storage, 12)[0], second)
    sampler.put_back([first], storage)
    assert torch.equal(sampler.sample(storage, 6)[0], first)

    def broken(data: Any) -> Any:
        raise ArithmeticError

    rb.append_transform(broken)
    with pytest.raises(ArithmeticError):
        rb.sample(3)
    assert sampler.sample(storage, 6)[0].reshape(2, 3)[0].tolist() == second.tolist()[:3]


@settings(max_examples=150, deadline=None)
@given(
    slots=st.integers(3, 12),
    lanes=st.sampled_from([1, 3]),
    length=st.integers(1, 3),
    stride=st.integers(1, 4),
    history=st.lists(
        st.one_of(
            st.integers(1, 6),
            st.lists(st.booleans(), min_size=3, max_size=3),
            st.lists(st.booleans(), min_size=3, max_size=3),
            st.sampled_from(["empty", "load", "copy"]),
        ),
        min_size=8,
        max_size=40,
    ),
)
def test_pass_contains_every_window_of_the_grid_once(
    slots: int, lanes: int, length: int, stride: int, history: list[Any]
) -> None:
    """Against a model: all windows by (age of the episode, lane, time); the next is the least one
    above the last one drawn, or the least of all."""

    def fresh() -> ReplayBuffer:
        return ReplayBuffer(
            storage=LazyTensorStorage(slots * lanes, ndim=1 if lanes == 1 else 2),
            sampler=SliceSampler(slice_len=length, stride=stride, draw="sequential"),
        )

    rb, passes = fresh(), 0
    begin, clock, last = [0] * lanes, 0, None
    stored: list[list[tuple[int, int]]] = [[] for _ in range(lanes)]  # time, its episode's begin
    for step in history:
        if isinstance(step, list):
            ends = step[:lanes]
            for lane in range(lanes):
                stored[lane].append((clock, begin[lane]))
                del stored[lane][:-slots]
                begin[lane] = clock + 1 if ends[lane] else begin[lane]
            clock += 1
            t = torch.tensor([[(clock - 1) * lanes + lane] for lane in range(lanes)])
            done = torch.tensor(ends).reshape(lanes, 1)
            data = TensorDict({"t": t, "next": {"done": done}}, [lanes, 1])
            rb.extend(data if lanes > 1 else data[0])
            continue
        if step == "copy":
            rb = pickle.loads(pickle.dumps(rb))
            continue
        if isinstance(step, str):
            begin = [clock] * lanes  # nothing spans a restart
            if step == "empty":
                rb.empty()
                stored, last = [[] for _ in range(lanes)], None
            elif any(stored):
                state, rb = rb.state_dict(), fresh()
                rb.load_state_dict(state)
            continue
        grid = []
        for lane in range(lanes):
            times = dict(stored[lane])
            for time, age in times.items():
                fits = all(times.get(time + i) == age for i in range(length))
                if fits and (time - age) % stride == 0:
                    grid.append((age, lane, time))
        grid.sort()
        assert rb.can_sample(length) == bool(grid)
        if not grid:
            continue
        expected = []
        for _ in range(step):
            later = [one for one in grid if last is not None and one > last]
            passes += last is not None and not later
            last = (later or grid)[0]
            expected.append(last[2] * lanes + last[1])
        assert _firsts(rb, step, length) == expected
        assert (rb.sampler.pass_index, rb.sampler.ran_out) == (passes, False)


@pytest.mark.parametrize("length", [2, 3])
def test_can_sample_predicts_if_a_window_exists(length: int) -> None:
    """Windows begin every ``length`` rows of their episode; those of one that lost its head and
    needs a row before may all lie between."""
    without = 0
    for written in range(1, 30):
        rb = ReplayBuffer(
            storage=LazyTensorStorage(4),
            sampler=SliceSampler(slice_len=length, draw="sequential"),
            transform=StackFrames(["t"], 2),
        )
        rb.extend(rows([7] * 5)[:written])
        can = rb.can_sample(length)
        windows = []
        for first in range(max(written - 4, 0), written - length + 1):
            begin = first // 7 * 7
            known = begin >= written - 4 or first > written - 4
            whole = first % 7 + length <= 7
            windows += [first] if (first - begin) % length == 0 and known and whole else []
        assert can == bool(windows)
        if can:
            assert rb.sample(length)["t"][0, -1] == windows[0]
            continue
        without += 1
        with pytest.raises(RuntimeError, match=f"(multiple of {length} rows|no window)"):
            rb.sample(length)
    assert without
