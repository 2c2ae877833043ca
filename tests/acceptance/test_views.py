"""What transforms make of rows: goals, stacks of frames, previous steps, sums, images."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    Compose,
    HindsightGoal,
    NStep,
    PreviousStep,
    ReplayBuffer,
    RewardScale,
    SamplerWithoutReplacement,
    Sequence,
    SliceSampler,
    StackFrames,
    StepCount,
)


def with_goals(rows: Any) -> Any:
    """What is achieved with row t of a lane of episode e is ``(t + 1) / 4``: all distinct."""
    for part in (rows, rows["next"]):
        part["achieved_goal"] = part["observation"] / 4
        part["desired_goal"] = torch.full_like(part["observation"], 99.0)
    return rows


def reward_of(achieved: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
    return -(achieved - goal).abs()


SHAPES = [
    ((), 0, (3,)),
    ((7,), 0, (21,)),
    ((5, 6), 0, (15, 6)),
    ((5, 6), -1, (5, 18)),
    ((2, 3, 4), 0, (6, 3, 4)),
    ((2, 3, 4), -1, (2, 3, 12)),
]


def two_lanes(shape: tuple[int, ...], steps: int) -> Any:
    """Episodes of 17 rows in lane 0, of 22 in lane 1; observations are positions."""
    t = torch.arange(steps)
    done = torch.stack([t % 17 == 16, t % 22 == 21]).unsqueeze(-1)
    x = t.float().view(1, steps, *[1] * len(shape)).expand(2, steps, *shape).clone()
    rows = {"x": x, "t": t.expand(2, steps).clone(), "next": {"x": x + 1, "truncated": done}}
    rows["next"]["done"] = done.clone()
    return TensorDict(rows, [2, steps])


@pytest.mark.acceptance("S15")
@pytest.mark.parametrize(("shape", "dim", "stacked"), SHAPES)
@pytest.mark.parametrize("pad", ["repeat", "zero"])
def test_stacks_read_are_those_of_the_live_stream(
    pad: str, shape: tuple[int, ...], dim: int, stacked: tuple[int, ...], buffer: Any
) -> None:
    how = StackFrames(["x"], 3, dim=dim, pad=pad)
    assert how.tiled(torch.zeros(shape)).shape == stacked
    rows = two_lanes(shape, 60)
    sampler = SamplerWithoutReplacement(shuffle=False)
    rb = buffer(60, sampler, lanes=2, transform=how)
    live, stream = [], how.stream()
    for t in range(60):
        rb.extend(rows[:, t : t + 1])
        reset = torch.tensor([t % 17 == 0, t % 22 == 0])
        live.append(stream(rows[:, t], reset))
    read = rb.sample(120)
    assert read["x"].shape == (120, *stacked)
    assert len(read["index"].unique(dim=0)) == 120
    for row in read:
        t, lane = row["index"].tolist()
        assert torch.equal(row["x"], live[t]["x"][lane])
        assert torch.equal(row["next", "x"], live[t]["next", "x"][lane])


@pytest.mark.acceptance("S15", "F15")
def test_stacks_of_windows_that_cross_the_start_of_an_episode(buffer: Any) -> None:
    """Rows after the start have frames of the new episode alone, rows before it keep theirs."""
    unit = Sequence(length=4, episode_boundary="include_reset")
    rb = buffer(60, lanes=2, sample_unit=unit, transform=StackFrames(["x"], 3))
    rb.extend(two_lanes((), 60))
    batch = rb.sample(400)
    crossed = 0
    real = batch[batch["validity_mask"]]
    assert len(real) > 380
    for lane, t, frames in zip(
        real["index"][:, 1].tolist(), real["t"].tolist(), real["x"].tolist(), strict=True
    ):
        begin = t - t % (17, 22)[lane]
        assert frames == [max(t - 2, begin), max(t - 1, begin), t]
        crossed += t - begin < 2 < t
    starts = batch["t"].reshape(-1, 4)
    assert crossed
    assert int(((starts[:, -1] - starts[:, 0]) == 3).sum()) > 200


@pytest.mark.acceptance("S20", "F39")
@pytest.mark.parametrize("length", [1, 3])
def test_previous_steps_also_after_a_relabel(
    length: int, ted: Any, codes_of: Any, buffer: Any
) -> None:
    codes = codes_of([5, 9, 6], 2)
    transform = Compose(
        HindsightGoal(1.0, "final", reward_fn=reward_of), PreviousStep(["t"]), StepCount()
    )
    previous = Compose(
        HindsightGoal(1.0, "final", reward_fn=reward_of),
        PreviousStep(["t", ("next", "reward")], concat=True, num_actions=20),
    )
    rows = with_goals(ted(codes))
    begin = {t: min(b for b in range(t + 1) if not any(codes[b:t])) for t in range(20)}
    end = {t: max(e for e in range(t, 20) if not any(codes[t:e])) for t in range(20)}
    for how in (transform, previous):
        rb = buffer(40, SliceSampler(slice_len=length), transform=how)
        rb.extend(rows)
        for row in rb.sample(60 * length):
            t = int(row["t"])
            first = t == begin[t]
            if how is transform:
                assert row["previous_t"].item() == (0 if first else t - 1)
                assert row["step_count"].item() == t - begin[t]
                continue
            # The reward of row t - 1 for the goal that this row has now: (end - (t - 1)) / 4 away.
            reward = 0.0 if first else -(end[t] - (t - 1)) / 4
            one_hot = [float(not first and column == t - 1) for column in range(20)]
            assert row["previous_step"].tolist() == [reward, *one_hot]


@pytest.mark.acceptance("S26")
@pytest.mark.parametrize("code", [1, 2])
def test_one_further_observation_to_bootstrap_from(code: int, ted: Any, buffer: Any) -> None:
    sampler = SliceSampler(slice_len=3, draw="without_replacement", flat=False)
    rb = buffer(10, sampler, transform=NStep(None, 0.9, per_step=True))
    rb.extend(ted([0, 0, 0, code]))
    batch = rb.sample(6)
    for window in batch:
        t = window["t"].tolist()
        assert window["observation"].squeeze(-1).tolist() == t
        assert window["boot", "observation"].unique().tolist() == [t[-1] + 1]
        assert window["bootstrap"].all().item() == (not (code == 1 and t[-1] == 3))
        assert window["bootstrap"].any().item() == window["bootstrap"].all().item()


@pytest.mark.acceptance("S16")
def test_transforms_of_values_come_after_those_of_history() -> None:
    with pytest.raises(ValueError, match="RewardScale"):
        ReplayBuffer(transform=Compose(RewardScale(2.0), NStep(3, 0.9)))
