"""What transforms make of rows: goals, stacks of frames, previous steps, sums, images."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    Bootstrap,
    Cast,
    Compose,
    HindsightGoal,
    ImageScale,
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


@pytest.mark.acceptance("S14", "F16")
@pytest.mark.parametrize("length", [1, 2, 5])
@pytest.mark.parametrize("scope", ["window", "step"])
@pytest.mark.parametrize("strategy", ["future", "final", "episode"])
def test_goals_of_the_same_episode(
    length: int, scope: str, strategy: str, ted: Any, codes_of: Any, buffer: Any
) -> None:
    transform = HindsightGoal(
        0.5,
        strategy,
        reward_fn=reward_of,
        terminated_fn=lambda achieved, goal: achieved == goal,
        scope=scope,
    )
    codes = codes_of([5, 9, 6], 2) + [0] * 5
    stored = with_goals(ted(codes))
    stored["next", "reward"] = reward_of(
        stored["next", "achieved_goal"], stored["next", "desired_goal"]
    )
    # Without marks of where slices were cut, so that all other keys are as they are stored.
    sampler = SliceSampler(slice_len=length, flat=False, truncated_key=None)
    rb = buffer(40, sampler, transform=transform)
    rb.extend(stored)
    table = rb.episodes.ids.tolist()
    ends = {t: max(e for e in range(t, 25) if not any(codes[t:e])) for t in range(25)}
    begins = {t: min(b for b in range(t + 1) if not any(codes[b:t])) for t in range(25)}
    batch = rb.sample(200 * length)
    assert batch.batch_size == (200, length)
    chosen = (batch["desired_goal"] != 99.0).squeeze(-1)
    assert torch.equal(batch["desired_goal"], batch["next", "desired_goal"])
    if scope == "window":
        assert torch.equal(chosen.any(1), chosen.all(1))
        assert 60 < int(chosen.all(1).sum()) < 140
    else:
        assert 0.3 < chosen.float().mean() < 0.7 or length == 1
    for window, relabelled in zip(batch, chosen.tolist(), strict=True):
        for row, changed in zip(window, relabelled, strict=True):
            t = int(row["t"])
            plain = stored[t]
            if not changed:
                for key in plain.keys(True, True):
                    assert torch.equal(row[key], plain[key]), key
                continue
            at = int(row["desired_goal"].item() * 4) - 1
            if strategy == "final":
                assert at == ends[t]
            elif strategy == "episode":
                assert begins[t] <= at <= ends[t]
            else:
                assert t <= at <= ends[t]
            achieved = row["next", "achieved_goal"]
            assert torch.equal(row["next", "reward"], reward_of(achieved, row["desired_goal"]))
            assert row["next", "terminated"].item() == (at == t)
            assert torch.equal(row["observation"], plain["observation"])
    assert rb.episodes.ids.tolist() == table
    assert (rb.episodes.rows() == stored).all()


@pytest.mark.acceptance("S14")
def test_goals_without_chance_change_nothing(ted: Any, codes_of: Any, buffer: Any) -> None:
    rows = with_goals(ted(codes_of([5, 9])))
    plain, other = (
        buffer(20, SliceSampler(slice_len=2), transform=t) for t in (None, HindsightGoal(0.0))
    )
    plain.extend(rows)
    other.extend(rows)
    assert (plain[:] == other[:]).all()
    for wrong in (-0.1, 1.1):
        with pytest.raises(ValueError):
            HindsightGoal(wrong)
    for name in ({"strategy": "past"}, {"scope": "batch"}, {"check": "loudly"}):
        with pytest.raises(ValueError):
            HindsightGoal(**name)


@pytest.mark.acceptance("F17")
@pytest.mark.parametrize("wrong", [lambda a, g: (a - g)[..., 0], lambda a, g: (a - g)[None]])
def test_rewards_of_another_shape_are_refused(wrong: Any, ted: Any, buffer: Any) -> None:
    rb = buffer(20, transform=HindsightGoal(1.0, reward_fn=wrong))
    rb.extend(with_goals(ted([0, 0, 1])))
    with pytest.raises(ValueError, match="shape"):
        rb.sample(4)


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
def test_stacks_of_windows(buffer: Any) -> None:
    rows = two_lanes((), 60)
    how = StackFrames(["x"], 3)
    live, stream = {}, how.stream()
    for t in range(60):
        found = stream(rows[:, t], torch.tensor([t % 17 == 0, t % 22 == 0]))
        for lane in (0, 1):
            live[lane, t] = found["x"][lane].tolist()
    assert [live[0, t] for t in range(3)] == [[0, 0, 0], [0, 0, 1], [0, 1, 2]]
    assert (live[0, 17], live[1, 17]) == ([17] * 3, [15, 16, 17])
    assert (live[0, 22], live[1, 22]) == ([20, 21, 22], [22] * 3)
    sampler = SliceSampler(slice_len=2, draw="without_replacement", flat=False)
    rb = buffer(60, sampler, lanes=2, transform=how)
    rb.extend(rows)
    count = 2 * 59 - 3 - 2
    batch = rb.sample(2 * count)
    found = {}
    for window in batch:
        at = (int(window["index"][0, 1]), int(window["t"][0]))
        found[at] = window["x"].tolist()
    assert len(found) == count
    assert found[0, 0] == [[0, 0, 0], [0, 0, 1]]
    assert found[1, 1] == [[0, 0, 1], [0, 1, 2]]
    assert found[0, 18] == [[17, 17, 18], [17, 18, 19]]
    assert found[1, 22] == [[22, 22, 22], [22, 22, 23]]
    for (lane, t), frames in found.items():
        assert frames == [live[lane, t], live[lane, t + 1]]


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


@pytest.mark.acceptance("S16")
def test_images_come_back_and_other_things_are_refused() -> None:
    image = torch.arange(256, dtype=torch.uint8).view(4, 64)
    for low, high in ((-1.0, 1.0), (0.0, 1.0), (-3.0, 5.0)):
        scale = ImageScale(low, high, keys=["pixels"])
        data = scale(TensorDict({"pixels": image.clone()}, [4]))
        assert data["pixels"].dtype == torch.float32
        back = (data["pixels"] - low) / (high - low) * 255
        assert (back - image.float()).abs().max() < 1e-4 * 255
        assert torch.equal(scale.inv(data)["pixels"], image)
    with pytest.raises(TypeError):
        ImageScale(keys=["pixels"])(TensorDict({"pixels": torch.zeros(4, 2)}, [4]))
    with pytest.raises(ValueError):
        ImageScale()(TensorDict({"observation": {"pixels": image}}, [4]))


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
def test_the_window_over_a_whole_episode(ted: Any, buffer: Any) -> None:
    sampler = SliceSampler(slice_len=4, flat=False)
    rb = buffer(10, sampler, transform=Bootstrap())
    rb.extend(ted([0, 0, 0, 1]))
    (window,) = rb.sample(4)
    assert window["observation"].squeeze(-1).tolist() == [0, 1, 2, 3]
    assert window["next", "observation"].squeeze(-1).tolist() == [1, 2, 3, 4]
    assert window["next", "done"].squeeze(-1).tolist() == [False, False, False, True]
    assert window["bootstrap"].squeeze(-1).tolist() == [True, True, True, False]


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


@pytest.mark.acceptance("S37")
@pytest.mark.parametrize("code", [1, 2])
@pytest.mark.parametrize("length", [1, 2, 5])
def test_sums_of_windows_follow_the_backward_recursion(
    code: int, length: int, ted: Any, buffer: Any
) -> None:
    gamma, value = 0.75, 3.0
    generator = torch.Generator().manual_seed(0)
    rewards = torch.randint(-8, 9, (5, 1), generator=generator) / 8
    sampler = SliceSampler(slice_len=length, draw="without_replacement", flat=False)
    rb = buffer(10, sampler, transform=NStep(None, gamma, per_step=True))
    rb.extend(ted([0] * 4 + [code], **{"next.reward": rewards}))
    for window in rb.sample((6 - length) * length):
        t = window["t"].tolist()
        boot = value * window["bootstrap"][-1].item()
        total = boot
        wanted = []
        for row in reversed(t):
            total = rewards[row].item() + gamma * total
            wanted.insert(0, total)
        found = window["next", "reward"] + window["discount"] * window["bootstrap"] * value
        assert found.squeeze(-1).tolist() == pytest.approx(wanted)
        assert window["bootstrap"].unique().tolist() == [not (code == 1 and t[-1] == 4)]


@pytest.mark.acceptance("F46")
def test_cast_changes_dtype_of_observations(ted: Any, buffer: Any) -> None:
    rb = buffer(10, transform=Cast(torch.float64, ["observation"], with_next=True))
    rb.extend(ted([0, 1]))
    batch = rb.sample(4)
    assert batch["observation"].dtype == batch["next", "observation"].dtype == torch.float64
    assert rb.episodes.rows()["observation"].dtype == torch.float32


@pytest.mark.acceptance("S16")
def test_transforms_of_values_come_after_those_of_history() -> None:
    with pytest.raises(ValueError, match="RewardScale"):
        ReplayBuffer(transform=Compose(RewardScale(2.0), NStep(3, 0.9)))
