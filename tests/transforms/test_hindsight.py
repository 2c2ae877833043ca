"""Hindsight goals against a model that scans, and against laws."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from replaykit import (
    Compose,
    HindsightGoal,
    LazyTensorStorage,
    NStep,
    ReplayBuffer,
    RewardScale,
    SampleUnit,
    SliceSampler,
    StackFrames,
    Transform,
    Transition,
)
from replaykit.transforms import hindsight
from tests.samplers.chi_square import chi_square_p
from tests.support.refusals import refuses
from tests.transforms.streams import stored_bits

SMALLEST_P = 1e-4


def rows_of(ends: list[bool], start: int = 0) -> TensorDict:
    """Row i achieves (i, 1) and its next one (i + 0.5, 1); it wants (-1, -1)."""
    count = len(ends)
    number = torch.arange(start, start + count, dtype=torch.float32)
    achieved = torch.stack([number, torch.ones(count)], 1)
    wanted = torch.full((count, 2), -1.0)
    end = torch.tensor(ends, dtype=torch.bool).reshape(count, 1)
    return TensorDict(
        {
            "row": torch.arange(start, start + count),
            "achieved_goal": achieved,
            "desired_goal": wanted,
            "next": {
                "achieved_goal": achieved + torch.tensor([0.5, 0.0]),
                "desired_goal": wanted.clone(),
                "reward": torch.full((count, 1), -7.0),
                "terminated": end,
                "truncated": torch.zeros_like(end),
                "done": end.clone(),
            },
        },
        [count],
    )


def ends_every(length: int, count: int) -> list[bool]:
    return [row % length == length - 1 for row in range(count)]


def goal_rows(batch: TensorDict) -> torch.Tensor:
    """The rows whose achieved goal became the goal; -1 where that was not changed."""
    goal = batch["desired_goal"][:, 0]
    return torch.where(goal < 0, -1.0, goal - 0.5).to(torch.int64)


def buffer_of(transform: Any, ends: list[bool], capacity: int = 100, **others: Any) -> ReplayBuffer:
    others.setdefault("generator", torch.Generator().manual_seed(0))
    rb = ReplayBuffer(
        storage=LazyTensorStorage(capacity), transform=transform, batch_size=64, **others
    )
    rb.extend(rows_of(ends))
    return rb


class Windows(SampleUnit):
    """Windows of so many rows, across episodes too, the first ``pad`` rows of each padded."""

    def __init__(self, length: int, pad: int = 0) -> None:
        self.length, self.pad = length, pad

    def expand(
        self, index: torch.Tensor, info: dict[Any, Any], storage: Any
    ) -> tuple[torch.Tensor, dict[Any, Any]]:
        start = index.clamp(max=len(storage) - self.length)
        steps = torch.arange(self.length)
        window = torch.arange(len(index)).repeat_interleave(self.length)
        mask = (steps >= self.pad).repeat(len(index))
        rows = (start[:, None] + steps.clamp(min=self.pad)).reshape(-1)
        return rows, {"sequence_id": window, ("collector", "mask"): mask}


def episode_of(ends: list[bool], row: int) -> tuple[int, int]:
    first = row
    while first > 0 and not ends[first - 1]:
        first -= 1
    last = row
    while last < len(ends) - 1 and not ends[last]:
        last += 1
    return first, last


@pytest.mark.acceptance("S14", "F16")
@pytest.mark.parametrize("strategy", ["future", "final", "episode", "random"])
@pytest.mark.parametrize("scope", ["window", "step"])
@given(
    ends=st.lists(st.booleans(), min_size=6, max_size=30),
    length=st.integers(1, 5),
    pad=st.integers(0, 2),
    p=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 99),
)
@settings(max_examples=25, deadline=None)
def test_goals_are_chosen_by_the_strategy(
    strategy: str, scope: str, ends: list[bool], length: int, pad: int, p: float, seed: int
) -> None:
    pad = min(pad, length - 1)
    rb = buffer_of(
        HindsightGoal(p, strategy, scope=scope),
        ends,
        sample_unit=Windows(length, pad) if length > 1 else Transition(),
        generator=torch.Generator().manual_seed(seed),
    )
    before = stored_bits(rb)
    batch = rb.sample(8)
    after = stored_bits(rb)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    stored = rows_of(ends)[batch["row"]]
    goal_row, row = goal_rows(batch).reshape(8, length), batch["row"].reshape(8, length)
    real = torch.arange(length) >= pad
    for window in range(8):
        first, last = episode_of(ends, int(row[window, pad]))
        inside = real & (row[window] >= first) & (row[window] <= last)
        changed = goal_row[window] >= 0
        assert not changed[~inside].any()
        assert bool(changed[inside].all()) or not changed[inside].any()
        if p in (0.0, 1.0):
            assert (changed[inside] == bool(p)).all()
        if not changed.any():
            continue
        goals = goal_row[window][inside]
        latest = row[window][inside] if scope == "step" else row[window][inside].max()
        if strategy == "future":
            assert ((goals >= latest) & (goals <= last)).all()
        elif strategy == "final":
            assert (goals == last).all()
        elif strategy == "episode":
            assert ((goals >= first) & (goals <= last)).all()
        else:
            assert ((goals >= 0) & (goals < len(ends))).all()
        if scope == "window":
            assert len(goals.unique()) == 1
    flat = goal_row.reshape(-1) >= 0
    for key in batch.keys(True, True):
        if key not in stored.keys(True, True):
            continue
        # Bit for bit where nothing was relabelled, and in what is no goal or reward.
        own = ~flat if key in GOALS or key == ("next", "reward") else slice(None)
        assert torch.equal(batch[key][own], stored[key][own]), key
    assert torch.equal(batch["desired_goal"], batch["next", "desired_goal"])
    apart = (batch["next", "achieved_goal"] - batch["desired_goal"]).norm(dim=-1)
    expected = torch.where(apart < 0.05, 0.0, -1.0)
    assert torch.equal(batch["next", "reward"][flat, 0], expected[flat])


GOALS = ("desired_goal", ("next", "desired_goal"))


def test_chosen_rows_are_spread_over_the_batch() -> None:
    """Not the first int(B * p) rows of it."""
    rb = buffer_of(HindsightGoal(0.25), ends_every(5, 100))
    size, draws = 20, 2000
    counts = np.zeros(size)
    for _ in range(draws):
        counts += (goal_rows(rb.sample(size)) >= 0).numpy()
    expected = np.full(size, draws * 0.25)
    statistic = ((counts - expected) ** 2 / (expected * 0.75)).sum()
    z = ((statistic / size) ** (1 / 3) - (1 - 2 / (9 * size))) / math.sqrt(2 / (9 * size))
    assert 0.5 * math.erfc(z / math.sqrt(2)) > SMALLEST_P


@pytest.mark.parametrize(
    ("strategy", "low", "high"), [("future", 3, 7), ("episode", 0, 7), ("random", 0, 15)]
)
@pytest.mark.parametrize("length", [1, 3])
def test_goals_are_uniform(strategy: str, low: int, high: int, length: int) -> None:
    rb = buffer_of(
        HindsightGoal(1.0, strategy),
        ends_every(8, 16),
        sample_unit=Windows(length) if length > 1 else Transition(),
    )
    counts = np.zeros(16)
    for _ in range(40):
        batch = rb.sample(512)
        last = batch["row"].reshape(-1, length)[:, -1]
        first = batch["row"].reshape(-1, length)[:, 0]
        at = (last == 3) & (first < 8)
        counts += np.bincount(goal_rows(batch).reshape(-1, length)[at, 0].numpy(), minlength=16)
    assert counts[:low].sum() == counts[high + 1 :].sum() == 0
    assert counts.sum() > 800
    assert chi_square_p(counts[low : high + 1].tolist()) > SMALLEST_P


def test_the_reward_function_decides() -> None:
    def closeness(achieved: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
        return -(achieved - goal).abs().sum(-1, keepdim=True)

    rb = buffer_of(HindsightGoal(1.0, "final", reward_fn=closeness), ends_every(10, 30))
    batch = rb.sample()
    last = (batch["row"] // 10 * 10 + 9).float()
    assert torch.equal(batch["next", "reward"][:, 0], -(last - batch["row"]))


def changed_rows(**leaves: torch.Tensor) -> ReplayBuffer:
    """Return a buffer of rows with other values. The goal of a row is that of the last row."""
    rows = rows_of(ends_every(5, 20))
    for name, leaf in leaves.items():
        rows["next", name] = leaf
        if name != "reward":
            rows[name] = leaf
    rb = ReplayBuffer(
        storage=LazyTensorStorage(20), transform=HindsightGoal(1.0, "final"), batch_size=64
    )
    rb.extend(rows)
    return rb


@pytest.mark.parametrize(
    "leaves",
    [
        {"reward": torch.zeros(20)},
        {"reward": torch.zeros(20, 1, dtype=torch.int64)},
        {"desired_goal": torch.full((20, 2), -1.0, dtype=torch.float64)},
        {
            name: torch.arange(40).reshape(20, 2).half() - 41 * (name == "desired_goal")
            for name in ("achieved_goal", "desired_goal")
        },
        {
            name: torch.arange(80).reshape(20, 2, 2) - 81 * (name == "desired_goal")
            for name in ("achieved_goal", "desired_goal")
        },
    ],
    ids=["flat rewards", "integers", "float64", "half", "of two dimensions"],
)
def test_goals_and_rewards_of_other_kinds(leaves: dict[str, torch.Tensor]) -> None:
    """Also those that the core leaves to torch."""
    rb = changed_rows(**leaves)
    stored, batch = rb.storage.get(slice(None)), rb.sample()
    last = batch["row"] // 5 * 5 + 4
    for key in (*GOALS, ("next", "reward")):
        assert batch[key].dtype is stored[key].dtype
        assert batch[key].shape[1:] == stored[key].shape[1:]
    wanted = stored["next", "achieved_goal"][last].to(batch["desired_goal"].dtype)
    assert torch.equal(batch["desired_goal"], wanted)
    assert torch.equal(batch["next", "desired_goal"], wanted)
    reward = torch.where(batch["row"] == last, 0, -1).to(batch["next", "reward"].dtype)
    assert torch.equal(batch["next", "reward"].reshape(64), reward)


def test_goals_and_rewards_of_other_shapes_are_refused() -> None:
    one = changed_rows(desired_goal=torch.full((20, 1), -1.0))
    refuses(ValueError, r"shape of 'desired_goal', \[1\] a row, got \[2\]", one.sample)
    vectors = changed_rows(reward=torch.zeros(20, 2))
    refuses(ValueError, "one reward per row", vectors.sample)


@pytest.mark.parametrize("truncated", [True, False])
def test_termination_may_be_rewritten(truncated: bool) -> None:
    def near(achieved: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
        return ((achieved - goal).norm(dim=-1, keepdim=True) < 1.2) & (goal >= 0).all(-1, True)

    ends = ends_every(5, 20)
    rows = rows_of(ends)
    if truncated:
        rows["next", "terminated"] = torch.zeros(20, 1, dtype=torch.bool)
        rows["next", "truncated"] = torch.tensor(ends).unsqueeze(-1)
    rb = ReplayBuffer(
        storage=LazyTensorStorage(20),
        transform=HindsightGoal(0.5, "final", terminated_fn=near),
        batch_size=200,
    )
    rb.extend(rows)
    batch = rb.sample()
    chosen, step = goal_rows(batch) >= 0, batch["row"] % 5
    ended, cut = batch["next", "terminated"][:, 0], batch["next", "truncated"][:, 0]
    assert torch.equal(ended[chosen], step[chosen] >= 3)
    assert torch.equal(ended[~chosen], (step[~chosen] == 4) & (not truncated))
    assert torch.equal(batch["next", "done"][:, 0], ended | cut)
    assert torch.equal(cut, (step == 4) & truncated)


def test_rows_are_read_by_index_too() -> None:
    rb = buffer_of(HindsightGoal(1.0, "final"), ends_every(4, 10))
    assert goal_rows(rb[:]).tolist() == [3] * 4 + [7] * 4 + [9] * 2
    assert rb[2]["desired_goal"].tolist() == [3.5, 1.0]


def test_check_compares_rewards_with_stored_ones() -> None:
    ends = ends_every(5, 20)
    honest = rows_of(ends)
    honest["next", "reward"] = torch.full((20, 1), -1.0)
    for check in ("warn", "error"):
        rb = ReplayBuffer(
            storage=LazyTensorStorage(20),
            transform=HindsightGoal(0.5, check=check),
            batch_size=64,
            generator=torch.Generator().manual_seed(0),
        )
        rb.extend(honest)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            rb.sample()
    warning = buffer_of(HindsightGoal(0.5, check="warn"), ends)
    with pytest.warns(UserWarning, match=r"reward_fn: .* in \d+ of \d+ rows .* \[-7\.0\] stored"):
        warning.sample()
    refusing = buffer_of(HindsightGoal(0.0, check="error"), ends)
    refuses(ValueError, r"reward_fn: .* in 64 of 64 rows", refusing.sample)
    # All rows are relabelled: none is left to be compared.
    buffer_of(HindsightGoal(1.0, check="error"), ends).sample()


@pytest.mark.acceptance("F17")
@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"goal": "target"}, KeyError, "target"),
        ({"achieved": "reached"}, KeyError, "reached"),
        ({"reward_fn": lambda a, g: a[:, 0]}, ValueError, r"reward_fn: .*\[64, 1\].*got \[64\]"),
        ({"reward_fn": lambda a, g: 0.0}, TypeError, "reward_fn: expected a tensor, got float"),
        ({"terminated_fn": lambda a, g: a > 0}, ValueError, r"terminated_fn: .*got \[64, 2\]"),
    ],
)
def test_invalid_reads_are_refused(
    arguments: dict[str, Any], error: type[Exception], text: str
) -> None:
    rb = buffer_of(HindsightGoal(1.0, **arguments), ends_every(5, 20))
    refuses(error, text, rb.sample)


def reached(achieved: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
    return (achieved - goal).norm(dim=-1, keepdim=True) < 0.05


def test_slices_may_end_where_the_new_goal_is_reached() -> None:
    """A slice that is cut is marked, also where ends are rewritten."""
    rb = buffer_of(
        HindsightGoal(1.0, terminated_fn=reached),
        ends_every(10, 100),
        sampler=SliceSampler(slice_len=4),
    )
    batch = rb.sample(400)
    ended = batch["next", "terminated"][:, 0]
    assert torch.equal(ended, goal_rows(batch) == batch["row"])
    last = (torch.arange(400) % 4 == 3) & (batch["row"] % 10 != 9)
    assert torch.equal(batch["next", "truncated"][:, 0], last)
    assert torch.equal(batch["next", "done"][:, 0], last | ended)


@pytest.mark.parametrize("terminates", [False, True])
@pytest.mark.parametrize("length", [1, 4])
def test_steps_that_are_summed_have_the_new_goal(length: int, terminates: bool) -> None:
    """Sums over n steps by hand over relabelled rewards, up to where the new goal is reached."""
    n, gamma = 3, 0.5
    goals = HindsightGoal(0.6, terminated_fn=reached if terminates else None)
    rb = buffer_of(
        Compose(goals, NStep(n, gamma)),
        ends_every(6, 60),
        sample_unit=Windows(length) if length > 1 else Transition(),
    )
    batch = rb.sample(300)
    for row, goal, total, steps in zip(
        batch["row"].tolist(),
        goal_rows(batch).tolist(),
        batch["next", "reward"].flatten().tolist(),
        batch["steps_used"].flatten().tolist(),
        strict=True,
    ):
        others = [other for other in range(row, row + n) if other // 6 == row // 6]
        if goal >= 0 and terminates:
            others = [other for other in others if other <= goal]
        rewards = [-7.0 if goal < 0 else 0.0 if other == goal else -1.0 for other in others]
        assert steps == len(others)
        assert total == sum(gamma**k * reward for k, reward in enumerate(rewards))


@pytest.mark.parametrize("strategy", ["future", "final", "episode"])
@pytest.mark.parametrize("layout", [{"ndim": 2}, {"lane_key": "env"}], ids=["lanes", "streams"])
def test_goals_come_from_the_same_stream_and_episode(layout: Any, strategy: str) -> None:
    """Wherever its rows lie, and also if the first rows of an episode are gone."""
    rows = torch.stack([rows_of(ends_every(8, 20), 1000 * lane) for lane in range(3)])
    rows["env"] = (rows["row"] // 1000).clone()
    rb = ReplayBuffer(
        storage=LazyTensorStorage(3 * 16, **layout),
        transform=HindsightGoal(1.0, strategy),
        batch_size=2000,
        generator=torch.Generator().manual_seed(0),
    )
    rb.extend(rows if "ndim" in layout else rows.transpose(0, 1).reshape(60))
    batch = rb.sample()
    goal_row, row = goal_rows(batch), batch["row"]
    assert torch.equal(goal_row // 1000, row // 1000)
    goal_row, row = goal_row % 1000, row % 1000
    assert torch.equal(goal_row // 8, row // 8)
    assert (goal_row >= 4).all()  # what is stored of the first episode
    if strategy == "future":
        assert (goal_row >= row).all()
    if strategy == "final":
        assert torch.equal(goal_row, (row // 8 * 8 + 7).clamp(max=19))
    else:
        assert set(goal_row.tolist()) == set(range(4, 20))


@pytest.mark.parametrize("strategy", ["future", "final", "episode", "random"])
@pytest.mark.parametrize("way", ["written over", "set", "set without a batch of one's own"])
def test_the_core_and_torch_make_the_same_batches(
    strategy: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = ends_every(7, 150)  # more than the ring holds

    def buffer() -> ReplayBuffer:
        transform: Any = HindsightGoal(0.6, strategy)
        others: dict[str, Any] = {}
        if way == "set":
            others["collate_fn"] = lambda rows: rows
        if way == "set without a batch of one's own":
            keep = lambda rows: rows.set("wanted", rows["desired_goal"])  # noqa: E731
            transform = Compose(keep, transform, NStep(3, 0.9))
        return buffer_of(transform, ends, **others)

    done, fetch = [], HindsightGoal.fetch

    def watched(self: HindsightGoal, around: Any) -> Any:
        found = fetch(self, around)
        done.append(found is not None and found.done)
        return found

    monkeypatch.setattr(HindsightGoal, "fetch", watched)
    rb = buffer()
    stored = stored_bits(rb)
    fast = [rb.sample() for _ in range(5)]
    over = way == "written over" and strategy != "random"
    assert done == [over] * 5
    assert all(torch.equal(a, b) for a, b in zip(stored, stored_bits(rb), strict=True))
    for name in ("_memory", "_addresses"):  # the core then supports no tensor
        monkeypatch.setattr(hindsight, name, lambda *arguments: None)
    slow = buffer()
    for batch in fast:
        expected = slow.sample()
        assert set(batch.keys(True, True)) == set(expected.keys(True, True))
        for key in expected.keys(True, True):
            assert torch.equal(batch[key], expected[key]), key
        if "wanted" in batch:
            assert (batch["wanted"] == -1).all()
    assert any((batch["desired_goal"] >= 0).any() for batch in fast)


@pytest.mark.parametrize("other", [NStep(3, gamma=1.0), StackFrames(["x"], 2), RewardScale(2.0)])
def test_goals_are_replaced_before_rows_are_summed_stacked_or_scaled(other: Transform) -> None:
    refuses(
        ValueError, "HindsightGoal.*before|before.*HindsightGoal", Compose, other, HindsightGoal()
    )
    chain = Compose(other, HindsightGoal(), order="auto")
    assert [type(each) for each in chain] == [HindsightGoal, type(other)]
    refuses(RuntimeError, "pass it to a ReplayBuffer", HindsightGoal(), rows_of([True]))


@pytest.mark.parametrize("scope", ["window", "step"])
def test_padding_of_slices_is_not_relabelled(scope: str) -> None:
    rb = buffer_of(
        HindsightGoal(0.5, scope=scope),
        ends_every(6, 60),
        sampler=SliceSampler(slice_len=8, strict_length=False, pad_output=True),
    )
    batch = rb.sample(640)
    goal_row, row, real = (
        each.reshape(80, 8) for each in (goal_rows(batch), batch["row"], batch["collector", "mask"])
    )
    chosen = goal_row >= 0
    assert not real.all()
    assert torch.equal(chosen, real & chosen[:, :1])
    assert 0.3 < chosen[:, 0].float().mean() < 0.7
    latest = row if scope == "step" else torch.where(real, row, 0).amax(1, keepdim=True)
    assert (goal_row >= latest)[chosen].all()
    assert torch.equal(goal_row[chosen] // 6, row[chosen] // 6)
