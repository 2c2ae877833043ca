"""Sums over several steps against plain recursions over lists of rows."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from replaykit import (
    Bootstrap,
    Compose,
    LazyTensorStorage,
    ListStorage,
    NStep,
    PreviousStep,
    ReplayBuffer,
    SliceSampler,
    StackFrames,
    StepCount,
    Transform,
)
from replaykit.samplers import Sampler
from tests.support.refusals import refuses
from tests.transforms.streams import Streams, histories, play

TERMINATED, TRUNCATED = 1, 2


def check(streams: Any, found: dict[Any, Any], n: int, gamma: float) -> None:
    """Compares every row with what a scan of the lists gives."""
    for (lane, number), row in found.items():
        own = streams.rows[lane]
        last = min(streams.last(lane, number), number + n - 1)
        total = 0.0
        for step in reversed(range(number, last + 1)):
            total = own[step].reward + gamma * total
        steps = last - number + 1
        assert row["steps_used"].tolist() == [steps]
        assert row["next", "reward"].tolist() == pytest.approx([total], abs=1e-5)
        assert row["next", "reward_1"].tolist() == [own[number].reward]
        assert row["discount"].tolist() == pytest.approx([gamma**steps], abs=1e-6)
        assert row["bootstrap"].tolist() == [own[last].end != TERMINATED]
        assert row["next", "observation"].tolist() == [lane * 2 + 1, last * 2 + 1]
        assert row["next", "done"].tolist() == [own[last].end > 0]
        assert row["next", "terminated"].tolist() == [own[last].end == TERMINATED]
        assert row["next", "truncated"].tolist() == [own[last].end == TRUNCATED]
        assert row["action"].tolist() == number * 10


@settings(max_examples=80, deadline=None)
@given(
    data=st.data(),
    n=st.integers(1, 6),
    gamma=st.sampled_from([0.0, 0.5, 0.99, 1.0]),
    on_open=st.sampled_from(["shorten", "exclude"]),
)
def test_sums_on_read_match_a_scan(data: Any, n: int, gamma: float, on_open: Any) -> None:
    """With ``exclude`` the newest rows of open episodes are not drawn."""
    streams = play(NStep(n, gamma, on_open=on_open), data.draw(histories()))
    drawable = {
        (lane, number)
        for lane, number in streams.stored()
        if on_open == "shorten"
        or not streams.is_open(lane, number)
        or streams.last(lane, number) - number >= n - 1
    }
    if not drawable:
        refuses(RuntimeError, f"{n - 1} rows after it", streams.buffer.sample)
        return
    found = streams.drawn()
    assert set(found) == drawable
    check(streams, found, n, gamma)


def test_a_transform_before_sees_rows_as_they_are_stored() -> None:
    """The core overwrites only rows that no other code has seen."""
    seen: list[Any] = []

    def look(batch: Any) -> Any:
        seen.append(batch["next", "observation"])
        return batch

    own = Streams(NStep(3, 0.9))
    own.extend([[0], [0], [1], [0], [2]] * 8)
    chain = Compose(look, NStep(3, 0.9))
    batch = ReplayBuffer(storage=own.buffer.storage, transform=chain, batch_size=64).sample()
    expected = own.buffer[batch.pop("index")]
    assert (batch == expected).all()
    assert seen[0].equal(expected["observation"] * 2 + 1)


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [(torch.float16, (1,)), (torch.bfloat16, ()), (torch.float64, (2, 3)), (torch.int64, (1,))],
)
def test_rewards_of_any_kind(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    rewards = torch.arange(6 * int(np.prod(shape))).reshape(6, *shape).to(dtype)
    done = torch.tensor([False] * 5 + [True])
    buffer = ReplayBuffer(storage=LazyTensorStorage(6), transform=NStep(3, 0.5))
    buffer.extend(TensorDict({"next": {"reward": rewards, "done": done}}, [6]))
    found = buffer[:]
    sums = found["next", "reward"]
    assert sums.dtype is (dtype if dtype.is_floating_point else torch.float32)
    assert found["discount"].dtype is sums.dtype
    assert found["next", "reward_1"].equal(buffer.storage[:]["next", "reward"])
    exact = rewards.double().numpy()
    expected = np.stack(
        [sum(0.5**k * exact[t + k] for k in range(min(3, 6 - t))) for t in range(6)]
    )
    assert torch.allclose(sums.double(), torch.from_numpy(expected), rtol=1e-2)
    # Without `terminated` the index tells it: `done` alone is a termination.
    assert found["bootstrap"].squeeze(-1).tolist() == [True] * 3 + [False] * 3


def test_infinite_rewards_stay_in_their_sums() -> None:
    inf = float("inf")
    rewards = torch.tensor([1.0, inf, 1.0, 1.0, -inf])
    done = torch.tensor([False, True, False, False, True])
    buffer = ReplayBuffer(storage=LazyTensorStorage(5), transform=NStep(3, 0.5))
    buffer.extend(TensorDict({"next": {"reward": rewards, "done": done}}, [5]))
    assert buffer[:]["next", "reward"].flatten().tolist() == [inf, inf, -inf, -inf, -inf]


def test_other_rewards_and_data_without_next() -> None:
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(5), transform=NStep(2, 0.5, reward_key=("info", "cost"))
    )
    rows = {"info": {"cost": torch.tensor([4.0, 2.0, 1.0])}, "episode": torch.tensor([0, 0, 1])}
    buffer.extend(TensorDict(rows, [3]))
    found = buffer[:]
    assert found["info", "cost"].flatten().tolist() == [5.0, 2.0, 1.0]
    assert found["info", "cost_1"].flatten().tolist() == [4.0, 2.0, 1.0]
    assert found["bootstrap"].all()


class Windows(Sampler):
    """Draws given windows: lists of slots, -1 for padding, which repeats the nearest real row."""

    def __init__(self, windows: list[list[int]]) -> None:
        super().__init__()
        self.windows = windows

    def sample(self, storage: Any, batch_size: int) -> Any:
        index, ids = [], []
        for number, window in enumerate(self.windows):
            real = [slot for slot in window if slot >= 0]
            for place, slot in enumerate(window):
                before = [one for one in window[:place] if one >= 0]
                index.append(slot if slot >= 0 else before[-1] if before else real[0])
                ids.append(number)
        mask = torch.tensor([slot >= 0 for window in self.windows for slot in window])
        info: dict[Any, Any] = {"sequence_id": torch.tensor(ids)}
        if not mask.all():
            info["collector", "mask"] = mask
        return torch.tensor(index), info


def drawn_windows(buffer: ReplayBuffer, transform: Any, windows: list[list[int]]) -> Any:
    own = ReplayBuffer(storage=buffer.storage, sampler=Windows(windows), transform=transform)
    return own.sample(sum(map(len, windows)))


@pytest.mark.acceptance("S37")
@pytest.mark.covering(2)
@pytest.mark.parametrize("gamma", [0.5, 0.99, 1.0, 0.0])
@pytest.mark.parametrize("end", [TERMINATED, TRUNCATED, 0])
@pytest.mark.parametrize("window", [[0, 1, 2, 3], [4], [2, 3, 4], [0], [-1, 3, 4], [3, 4, -1, -1]])
def test_per_step_is_the_backward_recursion(window: list[int], end: int, gamma: float) -> None:
    """S37: ``G[i] = r[i] + gamma * G[i+1]``, begun with ``mask * V`` at the window's end."""
    own = Streams(None)
    own.extend([[0], [0], [0], [0], [end]])
    batch = drawn_windows(own.buffer, NStep(gamma=gamma, per_step=True), [window])
    real = [slot for slot in window if slot >= 0]
    mask = 0.0 if real[-1] == 4 and end == TERMINATED else 1.0
    value, expected = mask * 7.0, {}
    for slot in reversed(real):
        value = expected[slot] = own.rows[0][slot].reward + gamma * value
    target = batch["next", "reward"] + batch["discount"] * batch["bootstrap"] * 7.0
    for place, slot in enumerate(window):
        assert batch["boot", "observation"][place].tolist() == [1, 2 * real[-1] + 1]
        if slot < 0:
            assert batch["steps_used"][place].item() == 0
            continue
        assert target[place].item() == pytest.approx(expected[slot], abs=1e-5)
        assert batch["bootstrap"][place].item() == bool(mask)
        assert batch["steps_used"][place].item() == real[-1] - slot + 1
        assert batch["next", "reward_1"][place].item() == own.rows[0][slot].reward
        assert batch["next", "observation"][place].tolist() == [1, 2 * slot + 1]


@settings(max_examples=40, deadline=None)
@given(
    ends=st.lists(st.sampled_from([0, 0, 0, 1, 2]), min_size=2, max_size=20),
    n=st.integers(1, 8) | st.none(),
    gamma=st.sampled_from([0.0, 0.5, 1.0]),
    data=st.data(),
)
def test_per_step_with_a_limit(ends: list[int], n: int | None, gamma: float, data: Any) -> None:
    own = Streams(None)
    cut = data.draw(st.integers(1, len(ends)))
    own.extend([[end] for end in ends[:cut]])
    own.cut()
    own.extend([[end] for end in ends[cut:]] or [[0]])
    length = data.draw(st.integers(1, len(ends)))
    starts = data.draw(st.lists(st.integers(0, len(ends) - length), min_size=1, max_size=4))
    windows = [list(range(start, start + length)) for start in starts]
    batch = drawn_windows(own.buffer, NStep(n, gamma, per_step=True), windows)
    place = 0
    for window in windows:
        for slot in window:
            stop = min(own.last(0, slot), window[-1], slot + (n or 99) - 1)
            rewards = [own.rows[0][k].reward for k in range(slot, stop + 1)]
            total = sum(gamma**k * reward for k, reward in enumerate(rewards))
            assert batch["next", "reward"][place].item() == pytest.approx(total, abs=1e-5)
            assert batch["bootstrap"][place].item() == (ends[stop] != 1)
            assert batch["boot", "observation"][place, 1].item() == 2 * stop + 1
            place += 1


def test_per_step_wants_rows_that_follow_each_other() -> None:
    own = Streams(None)
    own.extend([[0]] * 6)
    with pytest.raises(ValueError, match="gaps between rows"):
        drawn_windows(own.buffer, NStep(gamma=0.9, per_step=True), [[0, 2, 4]])


@pytest.mark.parametrize(("lanes", "pad"), [(1, "none"), (2, "none"), (1, "right")])
def test_rows_of_slices_sum_beyond_them_but_not_into_padding(lanes: int, pad: Any) -> None:
    own = Streams(None, lanes, 30)
    own.extend([[0] * lanes, [0] * lanes, [1] * lanes, [0] * lanes, [2] * lanes] * 8)
    buffer = ReplayBuffer(
        storage=own.buffer.storage, sampler=SliceSampler(slice_len=2, pad=pad),
        transform=NStep(3, 0.5), batch_size=64, generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    batch = buffer.sample()
    assert batch["sequence_id"].tolist() == [number // 2 for number in range(64)]
    if pad != "none":
        real = batch["collector", "mask"]
        assert not real.all()
        for key in ("discount", "steps_used", "bootstrap", ("next", "reward"), ("next", "done")):
            assert not batch[key][~real].any()
        batch = batch[real]
    for row in batch:
        check(own, {tuple(row["observation"].tolist()): row}, 3, 0.5)


@pytest.mark.parametrize("lanes", [1, 2])
def test_observations_that_are_stored_once(lanes: int) -> None:
    """The same batch, bit for bit, as from a storage that has them twice."""
    own = Streams(None, lanes)
    rows = own.make([[0] * lanes, [0] * lanes, [1] * lanes, [0] * lanes, [2] * lanes] * 8)
    rows["next", "observation"] = rows["observation"] + torch.tensor([0, 1])
    batches = []
    for once in (False, True):
        buffer = ReplayBuffer(
            storage=LazyTensorStorage(30 * lanes, ndim=1 if lanes == 1 else 2, dedup_next=once),
            transform=Compose(NStep(3, 0.5), StackFrames(["observation"], 2), PreviousStep()),
            batch_size=64, generator=torch.Generator().manual_seed(0),
        )  # fmt: skip
        buffer.extend(rows)
        batches.append(buffer.sample())
    assert (batches[0] == batches[1]).all()


def test_bootstrap_of_padded_windows_and_other_signals() -> None:
    own = Streams(None)
    own.extend([[0], [0], [1], [0], [0]])
    windows = [[1, 2, -1], [-1, 0, 1], [-1, -1, 2]]
    batch = drawn_windows(own.buffer, Bootstrap(per_window=True), windows)
    assert batch["bootstrap"].view(3, 3).tolist() == [[False] * 3, [True] * 3, [False] * 3]
    for number, wanted in ((2, False), (3, True)):
        single = drawn_windows(own.buffer, Bootstrap(per_window=True), [[number]])
        assert single["bootstrap"].tolist() == [[wanted]]
    batch = drawn_windows(own.buffer, Bootstrap(), windows)
    assert batch["bootstrap"].flatten().tolist() == [
        True, False, False, False, True, True, False, False, False,
    ]  # fmt: skip
    batch = drawn_windows(own.buffer, Bootstrap(("next", "done")), [[0, 1, 2, 3]])
    assert batch["bootstrap"].flatten().tolist() == [True, True, False, True]
    with pytest.raises(KeyError, match="life_lost"):
        drawn_windows(own.buffer, Bootstrap(("next", "life_lost")), [[0]])


def test_invalid_chains_and_keys_are_refused_on_read() -> None:
    own = Streams(Compose(StackFrames(["observation"], 2), NStep(2, 0.9)))
    own.extend([[0]] * 3)
    refuses(ValueError, "before StackFrames", own.buffer.sample)
    own = Streams(Compose(NStep(2, 0.9), NStep(3, 0.9)))
    own.extend([[0]] * 3)
    refuses(ValueError, "one NStep in a chain", own.buffer.sample)
    own = Streams(NStep(2, 0.9, reward_key="reward"))
    own.extend([[0]] * 3)
    refuses(KeyError, "reward", own.buffer.sample)
    refuses(RuntimeError, "ReplayBuffer", NStep(2, 0.9), own.make([[0]]))


@settings(max_examples=60, deadline=None)
@given(data=st.data(), n=st.integers(1, 5), lanes=st.sampled_from([1, 2]))
def test_sums_on_write_equal_sums_on_read(data: Any, n: int, lanes: int) -> None:
    """However the stream is split into calls and cut, and rows in are rows out."""
    end = st.sampled_from([0, 0, 0, 1, 2])
    step = st.lists(end, min_size=lanes, max_size=lanes)
    ends = data.draw(st.lists(step, min_size=1, max_size=25))
    pieces, left = [], len(ends)
    while left:
        pieces.append(data.draw(st.integers(1, left)))
        left -= pieces[-1]
    cuts = data.draw(st.sets(st.integers(0, len(pieces) - 1)))
    own, parts, done = Streams(NStep(n, 0.9), lanes), [], 0
    for number, piece in enumerate(pieces):
        parts.append(own.make(ends[done : done + piece]))
        own.buffer.extend(parts[-1])
        done += piece
        if number in cuts:
            own.cut()
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(10**4, ndim=lanes), transform=NStep(n, 0.9, when="write")
    )
    for number, part in enumerate(parts):
        buffer.add(part[0]) if part.shape == (1,) else buffer.extend(part)
        if number in cuts:
            buffer.cut()
    buffer.flush()
    found = {tuple(row["observation"].tolist()): row for row in buffer.storage[:].reshape(-1)}
    check(own, found, n, 0.9)
    expected = own.drawn()
    assert set(found) == set(expected)
    for place, row in expected.items():
        for key in ("discount", ("next", "reward")):
            assert torch.allclose(found[place][key], row[key], atol=1e-6)
            assert found[place][key].dtype is row[key].dtype


def test_rows_are_held_back_until_their_sums_are_complete() -> None:
    own = Streams(None)
    rows = own.make([[0], [0], [0], [0], [1], [0], [0]])
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(20), transform=NStep(3, 0.5, when="write"), batch_size=2
    )
    counts = []
    for step in range(7):
        buffer.extend(rows[step : step + 1])
        counts.append(buffer.write_count)
    assert counts == [0, 0, 1, 2, 5, 5, 5]
    assert buffer.flush().tolist() == [5, 6]
    assert buffer.flush().tolist() == []
    assert buffer["observation"][:, 1].tolist() == list(range(7))
    assert "fetch" not in dir(buffer.transform[0])
    assert buffer.transform[0].stage is None
    batch = buffer.sample()  # reading changes nothing
    assert batch["next", "reward"].equal(buffer.storage[:]["next", "reward"][batch["index"]])


def open_rows(numbers: range) -> TensorDict:
    """Rows of one episode that goes on, with their number as reward."""
    reward = torch.tensor(numbers, dtype=torch.float)
    done = torch.zeros(len(reward), 1, dtype=torch.bool)
    return TensorDict({"next": {"reward": reward, "done": done}}, [len(reward)])


def test_sums_on_the_way_in_are_refused_for_interleaved_streams() -> None:
    storage, nstep = LazyTensorStorage(20, lane_key="env"), NStep(3, when="write")
    with pytest.raises(ValueError, match="storage without lane_key, got 'env'; when='read'"):
        ReplayBuffer(storage=storage, transform=nstep)
    rb = ReplayBuffer(storage=LazyTensorStorage(20, lane_key="env"))
    refuses(ValueError, "without lane_key", rb.append_transform, nstep)
    assert not len(rb.transform)


def test_empty_forgets_held_back_rows() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(20), transform=NStep(3, 1.0, when="write"))
    buffer.extend(open_rows(range(5)))
    buffer.empty()
    buffer.extend(open_rows(range(100, 103)))
    assert buffer["next", "reward"].flatten().tolist() == [303]


def test_ids_end_episodes_on_the_way_in() -> None:
    rows = TensorDict(
        {
            "collector": {"traj_ids": torch.tensor([3, 3, 3, 8, 8])},
            "next": {"reward": torch.tensor([8.0, 4.0, 2.0, 1.0, 1.0])},
        },
        [5],
    )
    found = []
    for when in ("read", "write"):
        buffer = ReplayBuffer(storage=LazyTensorStorage(9), transform=NStep(3, 0.5, when=when))
        for step in range(5):
            buffer.extend(rows[step : step + 1])
        buffer.flush()
        found.append(buffer[:])
    assert (found[0] == found[1]).all()
    assert found[0]["steps_used"].flatten().tolist() == [3, 2, 1, 2, 1]


def through_files(buffer: ReplayBuffer, folder: Path, make: Callable[[], Any]) -> Any:
    buffer.dumps(folder)
    fresh = make()
    fresh.loads(folder)
    return fresh


def through_state(buffer: ReplayBuffer, folder: Path, make: Callable[[], Any]) -> Any:
    state, fresh = buffer.state_dict(), make()
    buffer.flush()  # the state does not follow what is stored later
    fresh.load_state_dict(state)
    return fresh


each_way_on = pytest.mark.parametrize(
    "onward",
    [
        through_files,
        through_state,
        lambda buffer, *_: pickle.loads(pickle.dumps(buffer)),
        lambda buffer, *_: copy.deepcopy(buffer),
    ],
    ids=["dumps", "state_dict", "pickle", "deepcopy"],
)


@pytest.mark.pitfall("WR18")
@each_way_on
def test_rows_held_back_are_saved(onward: Any, tmp_path: Path) -> None:
    """A pickle goes on where the buffer was; what files say ends with a restart."""

    def make(when: str) -> ReplayBuffer:
        return ReplayBuffer(storage=LazyTensorStorage(99), transform=NStep(4, 0.5, when=when))

    rows = Streams(None).make([[0], [0], [0], [2], [0], [0], [1], [0], [0], [0], [0], [0], [0]])
    buffer, reading = make("write"), make("read")
    for turn, step in enumerate(range(0, 13, 3)):
        for each in (buffer, reading):
            each.extend(rows[step : step + 3])
        buffer = onward(buffer, tmp_path / f"{turn}w", lambda: make("write"))
        reading[:]  # also a transform that was used can be pickled
        reading = onward(reading, tmp_path / f"{turn}r", lambda: make("read"))
    buffer.flush()
    expected = reading[:]
    for key in ("steps_used", "bootstrap", ("next", "reward"), ("next", "observation")):
        assert buffer.storage[:][key].equal(expected[key])


class Later(Transform):
    """A transform of a user: rows are stored with the next write."""

    held: torch.Tensor | None = None

    def inv(self, data: Any) -> Any:
        stored, self.held = self.held, data
        return stored

    def state_dict(self) -> dict[str, Any]:
        return {"held": self.held}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.held = state["held"]


@pytest.mark.pitfall("WR18")
@each_way_on
def test_rows_that_any_transform_holds_back_are_saved(onward: Any, tmp_path: Path) -> None:
    def make() -> ReplayBuffer:
        return ReplayBuffer(storage=LazyTensorStorage(99), transform=Later())

    buffer = make()
    for turn in range(4):
        index = buffer.extend(torch.arange(3 * turn, 3 * turn + 3))
        assert (len(index), len(buffer)) == (3 if turn else 0, 3 * turn)
        buffer = onward(buffer, tmp_path / str(turn), make)
    assert buffer[:].tolist() == list(range(9))
    assert buffer.transform[0].held.tolist() == [9, 10, 11]


def test_refused_write_changes_nothing() -> None:
    own = Streams(None)
    rows = own.make([[0]] * 4)
    buffer = ReplayBuffer(storage=LazyTensorStorage(9), transform=NStep(3, 0.5, when="write"))
    buffer.extend(rows[:2])
    other = rows[2:].clone()
    other["action"] = other["action"].float()
    refuses(ValueError, "'action'", buffer.extend, other)
    refuses(TypeError, "TensorDict", buffer.transform[0].inv, torch.zeros(3))
    buffer.extend(rows[2:])
    buffer.flush()
    assert buffer["observation"][:, 1].tolist() == [0, 1, 2, 3]
    fresh = NStep(3, 0.5, when="write")
    refuses(KeyError, "reward", fresh.inv, TensorDict({"x": torch.zeros(2)}, [2]))
    refuses(ValueError, "time_dim", NStep(3, 0.5, when="write", time_dim=1).inv, rows)
    refuses(ValueError, "held", fresh.load_state_dict, {"other": 1})


def test_earlier_transforms_see_flushed_rows() -> None:
    """``inv`` goes from the last to the first; so do the rows that were held back."""

    class Seen(Transform):
        rows = 0

        def inv(self, data: Any) -> Any:
            self.rows += len(data)
            return data

    before, after = Seen(), Seen()
    costs = NStep(2, 0.5, when="write", reward_key=("next", "cost"))
    chain = Compose(before, NStep(3, 0.5, when="write"), costs, after)
    own = Streams(None)
    rows = own.make([[0]] * 5)
    rows["next", "cost"] = rows["next", "reward"].clone()
    buffer = ReplayBuffer(storage=LazyTensorStorage(9), transform=chain)
    buffer.extend(rows)
    assert (before.rows, after.rows, len(buffer)) == (2, 5, 2)
    buffer.flush()
    assert (before.rows, after.rows, len(buffer)) == (5, 5, 5)


@pytest.mark.parametrize(
    ("how", "by", "slots"),
    [
        ("files", "extend", 20),
        ("state", "extend", 5),
        ("state", "add", 20),
        ("files", "add", 5),
        ("files", "flush", 20),
        ("state", "cut", 20),
    ],
)
def test_no_sum_on_the_way_in_goes_over_a_restart(
    how: str, by: str, slots: int, tmp_path: Path
) -> None:
    """S17: what was held back belongs to what was saved; no row is lost, and none is drawn that
    the saved buffer would not draw, before the next write."""

    def make() -> ReplayBuffer:
        return ReplayBuffer(
            storage=LazyTensorStorage(slots), transform=NStep(3, 1.0, when="write"), batch_size=4
        )

    saved = make()
    saved.extend(open_rows(range(5)))
    buffer = make()
    for _ in range(2):  # once more, nothing having been written between
        if how == "files":
            saved.dumps(tmp_path / "saved")
            buffer.loads(tmp_path / "saved")
        else:
            buffer.load_state_dict(saved.state_dict())
        saved, buffer = buffer, make()
    buffer = saved
    assert buffer["next", "reward"].flatten().tolist() == [3, 6, 9]
    assert [one.reason.name for one in buffer.episodes] == ["CUT"]
    if by == "extend":
        index = buffer.extend(open_rows(range(100, 103)))
        assert index.tolist() == [3, 4, 5 % slots]
    elif by == "add":
        assert torch.as_tensor(buffer.add(open_rows(range(100, 101))[0])).tolist() == [3, 4]
        buffer.extend(open_rows(range(101, 103)))
    else:
        buffer.flush() if by == "flush" else buffer.cut()
        assert buffer["next", "reward"].flatten().tolist() == [3, 6, 9, 7, 4]
        buffer.extend(open_rows(range(100, 103)))
    by_time = buffer.storage.ledger.write_order()
    rows = buffer[:][by_time]
    assert rows["next", "reward"].flatten().tolist() == [3, 6, 9, 7, 4, 303][-slots:]
    assert rows["steps_used"].flatten().tolist() == [3, 3, 3, 2, 1, 3][-slots:]
    assert buffer.episodes.lengths.tolist() == [5 if slots > 5 else 4, 1]
    assert [one.reason.name for one in buffer.episodes] == ["CUT", "OPEN"]
    steps = StepCount()
    buffer.append_transform(steps)
    assert buffer[:][by_time]["step_count"].flatten().tolist() == [0, 1, 2, 3, 4, 0][-slots:]


def test_list_storage_stores_held_back_rows_at_a_restart(tmp_path: Path) -> None:
    def make() -> ReplayBuffer:
        return ReplayBuffer(storage=ListStorage(9), transform=NStep(3, 1.0, when="write"))

    saved, buffer = make(), make()
    saved.extend(open_rows(range(5)))
    saved.dumps(tmp_path)
    buffer.loads(tmp_path)
    buffer.extend(open_rows(range(100, 103)))
    rewards = [row["next", "reward"].item() for row in buffer.storage[:]]
    assert rewards == [3, 6, 9, 7, 4, 303]


def test_rows_held_back_at_a_restart_stay_in_their_lane(tmp_path: Path) -> None:
    """Of two lanes one has ended with the newest stored row, the other goes on."""

    def make() -> ReplayBuffer:
        storage = LazyTensorStorage(40, ndim=2)
        return ReplayBuffer(storage=storage, transform=NStep(3, 1.0, when="write"))

    def rows(first: int, count: int) -> TensorDict:
        reward = torch.arange(first, first + count, dtype=torch.float).repeat(2, 1)
        reward[1] += 100
        done = torch.zeros(2, count, 1, dtype=torch.bool)
        done[0] = reward[0][:, None] == 2
        return TensorDict({"next": {"reward": reward, "done": done}}, [2, count])

    saved, buffer = make(), make()
    saved.extend(rows(0, 5))
    saved.dumps(tmp_path)
    buffer.loads(tmp_path)
    buffer.extend(rows(5, 4))
    buffer.flush()
    found = buffer[:]["next", "reward"]
    assert found[0].flatten().tolist() == [3, 3, 2, 7, 4, 18, 21, 15, 8]
    assert found[1].flatten().tolist() == [303, 306, 309, 207, 104, 318, 321, 215, 108]
    # Rows carry the flags of the last one in their sum.
    assert buffer.episodes.lengths.tolist() == [1, 1, 1, 2, 4, 5, 4]
