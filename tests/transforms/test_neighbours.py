"""Values of other rows and tags of episodes; windows that span ends of episodes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    Compose,
    ExpandTag,
    HindsightGoal,
    LazyTensorStorage,
    NStep,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    ReplayBuffer,
    Shift,
    SliceSampler,
    StackFrames,
    Tag,
    TrajectoryTransform,
    WindowLast,
)
from replaykit.errors import NotEnoughData
from tests.samplers.chi_square import chi_square_p
from tests.support.refusals import refuses

LENGTHS = (5, 2, 7, 3)
"""Lengths of the episodes; the last one is open."""
EPISODE = torch.tensor([e for e, n in enumerate(LENGTHS) for _ in range(n)])
LEFT = torch.tensor([n - 1 - i for n in LENGTHS for i in range(n)])
STEP = torch.tensor([i for n in LENGTHS for i in range(n)])


def make(transform: Any = None, sampler: Any = None, batch: int | None = None) -> ReplayBuffer:
    done = (LEFT == 0) & (EPISODE < 3)
    t = torch.arange(17)
    following = {"t": t + 1, "reward": torch.ones(17, 1), "done": done, "terminated": done}
    rb = ReplayBuffer(
        storage=LazyTensorStorage(17), transform=transform, sampler=sampler, batch_size=batch,
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    rb.extend(TensorDict({"t": t, "goal": t, "next": {**following, "goal": t}}, [17]))
    return rb


@pytest.mark.acceptance("C7")
@pytest.mark.parametrize("n", [1, 2, 4, -1, -3])
def test_values_of_other_rows_keep_to_the_episode(n: int) -> None:
    there = (n <= LEFT) if n > 0 else (-n <= STEP)
    wanted = torch.arange(17) + n
    masked = make(Shift("t", n, "mask", out="x"))[:]
    assert masked["x"].equal(torch.where(there, wanted, 0))
    assert masked["x_valid"].equal(there[:, None])
    nearest = torch.arange(17) + torch.tensor(n).clamp(-STEP, LEFT)
    assert make(Shift("t", n, "clip"))[:][f"t{n:+d}"].equal(nearest)


@pytest.mark.acceptance("S29", "F63")
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("slices", [0, 2])
@pytest.mark.parametrize("prioritized", [False, True])
def test_rows_without_the_other_row_are_not_drawn(n: int, slices: int, prioritized: bool) -> None:
    sampler: Any = PrioritizedSampler(alpha=1.0, beta=0.5) if prioritized else None
    if slices:
        kind: Any = PrioritizedSliceSampler if prioritized else SliceSampler
        more = {"max_capacity": 17, "alpha": 1.0, "beta": 0.5} if prioritized else {}
        sampler = kind(slice_len=slices, **more)
    rb, counts = make(Shift("t", n), sampler, 8), torch.zeros(17)
    for _ in range(300):
        batch = rb.sample()
        assert batch[f"t+{n}"].equal(batch["t"] + n)
        counts[batch["t"][:: max(slices, 1)]] += 1
    eligible = n + max(slices, 1) - 1 <= LEFT
    assert (counts > 0).equal(eligible)
    assert chi_square_p(counts[eligible].tolist()) > 1e-3
    refuses(ValueError, "more rows in their episode", lambda: rb[:])


@pytest.mark.parametrize(
    ("pad", "draw"),
    [("right", "iid"), ("both", "iid"), ("none", "sequential"), ("right", "sequential")],
)
def test_windows_that_rows_must_follow_end_before_the_episode(pad: str, draw: str) -> None:
    rb = make(Shift("t", 2), SliceSampler(slice_len=2, pad=pad, draw=draw), 8)
    for _ in range(40):
        batch = rb.sample()
        real = batch[batch["collector", "mask"]]
        assert real["t+2"].equal(real["t"] + 2)


def test_a_window_has_the_value_of_the_row_after_it() -> None:
    rb = make(WindowLast("t"), SliceSampler(slice_len=3), 9)
    for _ in range(100):
        batch = rb.sample().reshape(3, 3)
        assert batch["t_last"].equal((batch["t"][:, -1:] + 1).expand(3, 3))
        assert (EPISODE[batch["t_last"]] == EPISODE[batch["t"]]).all()
    refuses(NotEnoughData, "future=1", make(WindowLast("t"), SliceSampler(slice_len=7), 7).sample)


def test_windows_span_ends_while_transforms_keep_to_episodes() -> None:
    goals = HindsightGoal(
        1.0, "final", achieved="t", goal="goal", reward_fn=lambda a, g: (a == g).float()[:, None]
    )
    rb = make(
        Compose(NStep(3, 1.0), StackFrames(["t"], 2)), SliceSampler(slice_len=4, cross=True), 8
    )
    counts = torch.zeros(17)
    for _ in range(500):
        batch = rb.sample()
        at = batch["index"]
        assert (at.reshape(-1, 4).diff() == 1).all()
        counts[at[::4]] += 1
        assert batch["next", "reward"].flatten().equal((LEFT[at] + 1).clamp(max=3).float())
        assert batch["t"].equal(torch.stack([at - (STEP[at] > 0).long(), at], 1))
        assert (EPISODE[batch["t"]] == EPISODE[at][:, None]).all()
    assert chi_square_p(counts[:14].tolist()) > 1e-3
    assert not counts[14:].any()
    rb = make(goals, SliceSampler(slice_len=6, cross=True), 6)
    for _ in range(50):
        batch = rb.sample()
        at = batch["index"]
        own = EPISODE[at] == EPISODE[at[0]]
        last = torch.tensor(LENGTHS).cumsum(0)[EPISODE[at]]  # ``next`` of the last row
        assert batch["goal"].equal(torch.where(own, last, at))
    rb.cut()
    rb.extend(rb.storage.get(torch.arange(3)))  # rows 0 to 2 again, which follow a cut
    for _ in range(100):
        at = rb.sample()["index"]
        assert len({16, 0} & set(at.tolist())) < 2


def test_parts_that_need_whole_episodes_are_refused_across_ends() -> None:
    sampler = SliceSampler(slice_len=2, cross=True)
    for transform in (Shift("t", 1), TrajectoryTransform(lambda episode: episode)):
        with pytest.raises(ValueError, match="cross=True"):
            make(transform, SliceSampler(slice_len=2, cross=True), 2).sample()
    with pytest.raises(ValueError, match="cross=True"):
        SliceSampler(slice_len=2, cross=True, where=lambda data: data.length > 0)
    with pytest.raises(ValueError, match="ends or trajectories"):
        SliceSampler(slice_len=2, cross=True, ends=torch.zeros(3))
    assert make(None, sampler, 2).sample().shape == (2,)


def test_tags_come_with_rows_and_windows() -> None:
    rb = make(
        Compose(Tag("task"), ExpandTag("task", out=("own", "task"))),
        SliceSampler(slice_len=4, cross=True), 8,
    )  # fmt: skip
    first = torch.tensor([0, 5, 7, 14])
    rb.tag(first, {"task": torch.tensor([[1.0], [2.0], [3.0], [4.0]])})
    for _ in range(50):
        batch = rb.sample()
        own = EPISODE[batch["index"]].float()[:, None] + 1
        assert batch["own", "task"].equal(own)
        assert batch["task"].equal(own[::4].repeat_interleave(4, 0))
    refuses(KeyError, "other", lambda: make(Tag("other"))[:])
