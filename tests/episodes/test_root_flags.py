"""Flags at the root, without any under ``next``: every reader of episodes goes by one law."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    HindsightGoal,
    LaneWriter,
    LazyMemmapStorage,
    LazyTensorStorage,
    NStep,
    PrioritizedSliceSampler,
    ReplayBuffer,
    ReturnToGo,
    Sequence,
    SliceSampler,
    StackFrames,
    StepCount,
    TrajectoryTransform,
    split_trajectories,
)
from replaykit.ted import end_flags, unused_flags
from tests.support.refusals import refuses

KINDS = (("done",), ("terminated", "truncated"), ("done", "terminated", "truncated"))


def _flags(t: torch.Tensor, kind: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Every fifth row ends an episode; every second of these ends is a truncation."""
    done = t % 5 == 4
    truncated = t % 10 == 9 if "truncated" in kind else torch.zeros_like(done)
    found = {"done": done, "terminated": done & ~truncated, "truncated": truncated}
    return {name: found[name][..., None] for name in kind}


def _rows(start: int, stop: int, kind: tuple[str, ...], *, root: bool) -> TensorDict:
    """Rows ``start`` to ``stop`` with flags at the root, or as TorchRL lays them out."""
    t = torch.arange(start, stop)
    value = t.float()[:, None]
    flags = _flags(t, kind)
    after: dict[str, Any] = {"obs": value + 1, "reward": value, "achieved": value + 1}
    after["goal"] = 100 - value
    here: dict[str, Any] = {"t": t, "obs": value, "action": -value, "goal": 100 - value}
    rows = {**here, "next": after}
    (rows if root else after).update(flags)
    return TensorDict(rows, [len(t)])


def _both(make: Callable[[], ReplayBuffer], kind: tuple[str, ...], upto: int = 37) -> list[Any]:
    """The same rows in two buffers that differ in where their flags lie."""
    made = []
    for root in (True, False):
        rb = make()
        for start in range(0, upto, 3):
            rb.extend(_rows(start, min(start + 3, upto), kind, root=root))
        made.append(rb)
    return made


def _seeded(**options: Any) -> ReplayBuffer:
    options = {"storage": LazyTensorStorage(23), **options}
    return ReplayBuffer(generator=torch.Generator().manual_seed(0), **options)


def _assert_same(at_root: Any, below: Any) -> None:
    """All values but those of flags are the same bits."""
    one, two = dict(at_root.items(True, True)), dict(below.items(True, True))
    flags = {"done", "terminated", "truncated"}

    def name(key: Any) -> str:
        return key[-1] if isinstance(key, tuple) else key

    kept = [key for key in one if name(key) not in flags]
    assert kept == [key for key in two if name(key) not in flags]
    for key in kept:
        assert torch.equal(one[key], two[key]), key


def test_end_flags_prefer_next_flags_over_root_flags() -> None:
    below = {("next", "done"), ("done",), ("terminated",)}
    assert end_flags(below) == (("next", "done"),)
    assert end_flags({("done",), ("obs",), ("next", "obs")}) == (("done",),)
    assert end_flags({("truncated",), ("terminated",)}) == (("truncated",), ("terminated",))
    assert end_flags({("obs",)}) == ()


UNUSED = {
    "a root flag without its twin": ("done", ("next", "truncated")),
    "another root flag without its twin": ("terminated", ("next", "done")),
    "a name of another library": ("dones",),
    "a nested flag": (("agents", "done"),),
    "a nested flag under next": (("next", "agents", "done"),),
}


@pytest.mark.parametrize("keys", UNUSED.values(), ids=UNUSED)
def test_flags_that_end_nothing_are_named_once_to_readers_of_episodes(
    keys: tuple[Any, ...],
) -> None:
    rb = _seeded()
    rows = TensorDict({"obs": torch.arange(12.0)}, [12])
    for key in keys:
        rows[key] = (torch.arange(12) % 4 == 3)[:, None]
    rb.extend(rows)
    rb.sample(4)  # draws of single rows need no episodes
    with pytest.warns(UserWarning, match="no episode ends with this flag") as found:
        lengths = rb.episodes.lengths
    assert len(lengths) == (3 if len(keys) > 1 else 1)
    rb.extend(rows)
    assert len(rb.episodes.lengths)  # without another warning
    assert len(found) == 1
    assert repr(keys[0]) in str(found[0].message)


@pytest.mark.parametrize(
    "options",
    [lambda: {"sample_unit": Sequence(4)}, lambda: {"transform": StackFrames(["obs"], 2)}],
    ids=["sequences", "frames"],
)
def test_readers_of_windows_name_flags_that_end_nothing(options: Any) -> None:
    rb = _seeded(**options())
    rb.extend(TensorDict({"obs": torch.zeros(12, 1), "dones": torch.zeros(12, 1)}, [12]))
    with pytest.warns(UserWarning, match="'dones': no episode ends with this flag"):
        rb.sample(4)


def test_data_with_its_flags_in_place_is_read_without_a_word() -> None:
    below = {("next", "done"), ("next", "terminated"), ("done",), ("terminated",)}
    assert unused_flags(below | {("agents", "done")}) == ()
    assert unused_flags({("done",), ("dones",)}) == ()
    assert unused_flags({("episode",), ("timeouts",)}) == ()
    assert unused_flags({("obs",)}) == ()


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_an_episode_ends_with_the_row_whose_flag_is_set(kind: tuple[str, ...]) -> None:
    """The layout of SB3, CleanRL and d3rlpy, in plain numbers: no ``next`` at all."""
    rb = _seeded(storage=LazyTensorStorage(100))
    t = torch.arange(12)
    rb.extend(TensorDict({"obs": t.float(), **_flags(t, kind)}, [12]))
    assert rb.episodes.lengths.tolist() == [5, 5, 2]
    last = "TRUNCATED" if "truncated" in kind else "TERMINATED"
    assert [episode.reason.name for episode in rb.episodes] == ["TERMINATED", last, "OPEN"]
    assert rb.episodes.steps_to_end(torch.tensor([0, 4, 5, 11])).tolist() == [4, 0, 4, 0]


def test_with_flags_under_next_those_at_the_root_end_nothing() -> None:
    """TorchRL's layout: at the root they tell of the observation."""
    rb = _seeded(storage=LazyTensorStorage(100))
    t = torch.arange(12)
    ends, other = (t % 4 == 3)[:, None], (t % 3 == 0)[:, None]
    rb.extend(TensorDict({"t": t, "done": other, "next": {"done": ends}}, [12]))
    assert rb.episodes.lengths.tolist() == [4, 4, 4]
    assert len(split_trajectories(rb[:], as_list=True)) == 3


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_root_flags_end_episodes_of_lanes_and_streams(kind: tuple[str, ...]) -> None:
    found = []
    for root in (True, False):
        lanes = _seeded(storage=LazyTensorStorage(40, ndim=2))
        rows = torch.stack([_rows(first, first + 14, kind, root=root) for first in (0, 3)], 1)
        lanes.extend(rows.transpose(0, 1))
        mixed = _seeded(storage=LazyTensorStorage(30, lane_key="env"))
        ringed = _seeded(storage=LazyTensorStorage(40, lane_key="env"), writer=LaneWriter(10))
        flat = rows.reshape(-1).set("env", torch.arange(28) % 2)
        for rb in (mixed, ringed):
            rb.extend(flat)
        found.append([rb.episodes.lengths.tolist() for rb in (lanes, mixed, ringed)])
    assert found[0] == found[1]
    assert found[0][0] == [5, 5, 4, 2, 5, 5, 2]


_READERS: dict[str, Callable[[], dict[str, Any]]] = {
    "stack": lambda: {"transform": StackFrames(["obs"], 3)},
    "n-step": lambda: {"transform": NStep(3, gamma=0.5)},
    "n-step when written": lambda: {"transform": NStep(3, gamma=0.5, when="write")},
    "returns": lambda: {"transform": ReturnToGo(0.5)},
    "trajectories": lambda: {"transform": TrajectoryTransform(lambda episode: episode[1:])},
    "hindsight": lambda: {"transform": HindsightGoal(0.5, achieved="achieved", goal="goal")},
    "observations stored once": lambda: {
        "storage": LazyTensorStorage(23, dedup_next=["obs"]),
        "transform": StepCount(),
    },
    "slices": lambda: {"sampler": SliceSampler(slice_len=3)},
    "padded slices": lambda: {"sampler": SliceSampler(slice_len=4, pad="both")},
    "other markers": lambda: {
        "sampler": SliceSampler(slice_len=3, truncated_key=("mark", "truncated"))
    },
    "priorities": lambda: {
        "sampler": PrioritizedSliceSampler(slice_len=3, alpha=0.7, beta=0.9),
    },
    **{
        f"sequences, {boundary}": lambda boundary=boundary: {  # type: ignore[misc]
            "sample_unit": Sequence(length=3, burn_in=2, bootstrap=1, episode_boundary=boundary)
        }
        for boundary in ("pad", "stop", "include_reset")
    },
}


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("reader", _READERS)
def test_readers_of_neighbours_follow_root_flags(reader: str, kind: tuple[str, ...]) -> None:
    """The same rows; marks of windows say which end with their episode, and which were cut."""
    at_root, below = _both(lambda: _seeded(**_READERS[reader]()), kind)
    for name in ("lengths", "reasons", "ids"):
        same = torch.equal(getattr(at_root.episodes, name), getattr(below.episodes, name))
        assert same or reader == "n-step when written", name  # which writes other flags
    _assert_same(at_root[:], below[:])
    above = "mark" if reader == "other markers" else "next"
    for _ in range(6):
        one, two = at_root.sample(12), below.sample(12)
        _assert_same(one, two)
        for name in ("done", "truncated", "terminated") if "sequence_id" in one else ():
            padded = reader == "padded slices" and name == "terminated" and name not in kind
            if not padded and "sequences" not in reader:
                assert torch.equal(one[above, name], two[above, name]), name


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_split_trajectories_follows_root_flags(kind: tuple[str, ...]) -> None:
    split = split_trajectories(_rows(0, 12, kind, root=True))
    assert split["mask"].sum(1).tolist() == [5, 5, 2]
    _assert_same(split, split_trajectories(_rows(0, 12, kind, root=False)))


def test_observations_that_do_not_go_on_are_refused_inside_an_episode_alone() -> None:
    rows = _rows(0, 10, ("done",), root=True)
    rows["obs"][5:] += 100  # another episode
    rows["next", "obs"][5:] += 100
    rb = _seeded(storage=LazyTensorStorage(20, dedup_next=["obs"]))
    rb.extend(rows)
    assert torch.equal(rb[:]["next", "obs"], rows["next", "obs"])
    rows["done"][:] = False
    rb = _seeded(storage=LazyTensorStorage(20, dedup_next=["obs"]))
    refuses(ValueError, "row 5: expected the value that row 4 has", rb.extend, rows)


def _saved_before(state: dict[str, Any]) -> dict[str, Any]:
    """A state as it was saved when flags at the root ended nothing."""
    episodes = dict(state["_writer"]["_episodes"])
    del episodes["root_flags"]
    episodes["heads"] = {**episodes["heads"], "begin": [0], "head": [1]}
    return {**state, "_writer": {**state["_writer"], "_episodes": episodes}}


@pytest.mark.parametrize("capacity", [23, 40, 11])
def test_state_saved_under_the_old_law_is_indexed_by_the_new_one(capacity: int) -> None:
    """It said that the oldest row is in the midst of one episode that began with row 0: how that
    row's episode began is not known, so no history is made up for it."""
    rb = _both(_seeded, ("done",))[0]
    for state, known in ((rb.state_dict(), True), (_saved_before(rb.state_dict()), False)):
        twin = _seeded(
            storage=LazyTensorStorage(capacity), transform=StackFrames(["obs"], 3), batch_size=64
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # rows that do not fit
            twin.load_state_dict(state)
        stored = twin[:]["t"].sort().values
        oldest = int(stored[0])
        spans = [
            len(one)
            for one in split_trajectories(_rows(oldest, 37, ("done",), root=True), as_list=True)
        ]
        assert twin.episodes.lengths.tolist() == spans
        drawn = sorted(set(twin.sample(400)["t"].tolist()))
        whole = oldest % 5 == 0 and known
        first_end = oldest - oldest % 5 + 4
        # Without two rows of history stored, a row is drawn only of a begin that is known.
        out = [] if whole else [t for t in (oldest, oldest + 1) if t <= first_end]
        assert drawn == [t for t in stored.tolist() if t not in out], (known, oldest)


def test_saved_root_flags_are_loaded_unchanged(tmp_path: Any) -> None:
    rb = _both(_seeded, ("terminated", "truncated"))[0]
    rb.dumps(tmp_path / "saved")
    twin = _seeded()
    twin.loads(tmp_path / "saved")
    index = torch.arange(23)
    assert torch.equal(twin.episodes.begin(index), rb.episodes.begin(index))
    state = rb.state_dict()
    state["_writer"]["_episodes"]["root_flags"] = 1
    refuses(ValueError, "root_flags as True, got 1", twin.load_state_dict, state)


def test_a_recovered_buffer_knows_its_episodes(tmp_path: Any) -> None:
    def made() -> ReplayBuffer:
        return _seeded(storage=LazyMemmapStorage(23, scratch_dir=tmp_path / "rows", recover=True))

    rb = made()
    for start in range(0, 36, 3):
        rb.extend(_rows(start, start + 3, ("done",), root=True))
    index = torch.arange(23)
    lengths, begin = rb.episodes.lengths.tolist(), rb.episodes.begin(index)
    del rb
    twin = made()
    assert twin.episodes.lengths.tolist() == lengths
    assert torch.equal(twin.episodes.begin(index), begin)
