"""Episodes edited before windows are cut: by hand, by counting, and by what later ones see."""

from __future__ import annotations

import math
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
    HistoryTransform,
    LazyTensorStorage,
    NStep,
    PreviousStep,
    ReplayBuffer,
    ReturnToGo,
    RewardScale,
    SampleUnit,
    SliceSampler,
    StackFrames,
    StepCount,
    TrajectoryTransform,
)
from replaykit.episodes import EndReason, Needs
from replaykit.transforms.history import Around, Surroundings
from tests.samplers.chi_square import chi_square_p
from tests.support.refusals import refuses
from tests.transforms.streams import stored_bits

MASK = ("collector", "mask")


def rows_of(lengths: list[int], last_open: bool = False) -> TensorDict:
    """Episodes of so many rows; row i of episode e has `row` 100 * e + i."""
    rows = [100 * episode + row for episode, n in enumerate(lengths) for row in range(n)]
    ends = [row == n - 1 for n in lengths for row in range(n)]
    if last_open:
        ends[-1] = False
    end = torch.tensor(ends).unsqueeze(-1)
    number = torch.tensor(rows)
    count = len(rows)
    at = number.float().unsqueeze(-1)
    return TensorDict(
        {
            "row": number,
            "achieved_goal": at,
            "desired_goal": torch.full((count, 1), -1.0),
            "next": {
                "row": number + 1,
                "achieved_goal": at + 0.5,
                "desired_goal": torch.full((count, 1), -1.0),
                "reward": torch.ones(count, 1),
                "terminated": end,
                "truncated": torch.zeros_like(end),
                "done": end.clone(),
            },
        },
        [count],
    )


def buffer_of(
    transform: Any,
    lengths: list[int],
    capacity: int = 100,
    *,
    last_open: bool = False,
    **others: Any,
) -> ReplayBuffer:
    others.setdefault("generator", torch.Generator().manual_seed(0))
    others.setdefault("batch_size", 64)
    rb = ReplayBuffer(storage=LazyTensorStorage(capacity), transform=transform, **others)
    rb.extend(rows_of(lengths, last_open))
    return rb


def shortened(to: int) -> Any:
    """Keeps the first rows of an episode and ends it there."""

    def edit(episode: TensorDict) -> TensorDict:
        episode = episode[:to].clone()
        for key in ("terminated", "done"):
            episode["next", key][-1] = True
        return episode

    return edit


def repeated(times: int) -> Any:
    """An episode as often, one after the other; it ends once. Row i becomes i * times + k."""

    def edit(episode: TensorDict) -> TensorDict:
        n = len(episode)
        found = episode[torch.arange(n).repeat_interleave(times)]
        first = episode["row"][0] // 100 * 100
        found["row"] = first + torch.arange(n * times)
        for key in ("terminated", "done"):
            found["next", key][:-1] = False
        return found

    return edit


class Windows(SampleUnit):
    """Windows ``[s, s + length)`` of stored rows; with ``pad``, the last ones are padding."""

    def __init__(self, length: int, pad: int = 0, every: int = 1) -> None:
        self.length, self.pad, self.every = length, pad, every

    def expand(
        self, index: torch.Tensor, info: dict[Any, Any], storage: Any
    ) -> tuple[torch.Tensor, dict[Any, Any]]:
        reach = (self.length - 1) * self.every
        start = index.clamp(max=len(storage) - 1 - reach)
        steps = torch.arange(self.length)
        window = torch.arange(len(index)).repeat_interleave(self.length)
        mask = (steps < self.length - self.pad).repeat(len(index))
        steps = steps.clamp(max=self.length - self.pad - 1) * self.every
        rows = (start[:, None] + steps).reshape(-1)
        return rows, {"sequence_id": window, "validity_mask": mask}


@pytest.mark.parametrize("length", [1, 3])
def test_episodes_left_as_they_are(length: int) -> None:
    lengths = [5, 1, 8, 4]
    rb = buffer_of(
        TrajectoryTransform(lambda episode: episode), lengths, sample_unit=Windows(length)
    )
    plain = buffer_of(None, lengths, sample_unit=Windows(length))
    before = stored_bits(rb)
    batch, expected = rb.sample(), plain.sample()
    assert all(torch.equal(a, b) for a, b in zip(before, stored_bits(rb), strict=True))
    for key in expected.keys(True, True):
        assert torch.equal(batch[key], expected[key]), key
    assert batch[MASK].shape == (64 * length,)
    assert batch[MASK].dtype == torch.bool
    assert batch[MASK].all()


def test_each_distinct_episode_is_given_once_and_whole() -> None:
    given = []

    def edit(episode: TensorDict) -> TensorDict:
        given.append(episode["row"].tolist())
        assert episode["next", "done"].flatten().tolist() == [False] * (len(episode) - 1) + [True]
        episode["row"].zero_()
        episode["next", "reward"].fill_(-3.0)
        return episode

    rb = buffer_of(TrajectoryTransform(edit), [5, 3, 4])
    before = stored_bits(rb)
    batch = rb.sample(200)
    assert sorted(given) == [
        list(range(5)),
        list(range(100, 103)),
        list(range(200, 204)),
    ]
    assert (batch["row"] == 0).all()
    assert (batch["next", "reward"] == -3).all()
    assert all(torch.equal(a, b) for a, b in zip(before, stored_bits(rb), strict=True))


@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    left=st.integers(1, 24),
    length=st.integers(1, 6),
    pad=st.integers(0, 2),
    every=st.integers(1, 3),
    seed=st.integers(0, 50),
)
@settings(max_examples=150, deadline=None)
def test_windows_are_cut_from_edited_episodes(
    lengths: list[int], left: int, length: int, pad: int, every: int, seed: int
) -> None:
    """Rows follow each other as far as there are any; the last one is repeated and masked."""
    lengths = [*lengths, 18]
    pad = min(pad, length - 1)

    def edit(episode: TensorDict) -> TensorDict:
        n = max(1, min(left, 3 * len(episode)))
        found = episode[torch.arange(n) % len(episode)].clone()
        found["row"] = episode["row"][0] + torch.arange(n)
        for key in ("terminated", "done"):
            found["next", key] = (torch.arange(n) == n - 1).unsqueeze(-1)
        return found

    unit = Windows(length, pad, every)
    seeded: dict[str, Any] = {"sample_unit": unit, "batch_size": 6}
    rb = buffer_of(
        TrajectoryTransform(edit), lengths, generator=torch.Generator().manual_seed(seed), **seeded
    )
    plain = buffer_of(None, lengths, generator=torch.Generator().manual_seed(seed), **seeded)
    batch, drawn = rb.sample(), plain.sample()
    assert torch.equal(batch["index"], drawn["index"])
    shape = (6, length)
    for window in range(6):
        rows = drawn["row"].reshape(shape)[window].tolist()
        found = batch["row"].reshape(shape)[window].tolist()
        real = batch[MASK].reshape(shape)[window].tolist()
        done = batch["next", "done"].reshape(shape)[window].tolist()
        assert batch["validity_mask"].reshape(shape)[window].tolist() == real
        for episode in sorted({row // 100 for row in rows}):
            at = [step for step in range(length) if rows[step] // 100 == episode]
            n = lengths[episode]
            kept = max(1, min(left, 3 * n))
            span = rows[at[-1]] - rows[at[0]] + 1
            steps = [rows[step] - rows[at[0]] for step in at]
            start = found[at[0]] - 100 * episode
            offset = rows[at[0]] - 100 * episode
            possible, now = n - span + 1, kept - min(span, kept) + 1
            assert math.floor(offset / possible * now) <= start
            assert start <= math.ceil((offset + 1) / possible * now) - 1
            if kept == n:
                assert start == offset
            latest = max(step for step in steps if step < min(span, kept))
            for step, place in zip(steps, at, strict=True):
                there = step < min(span, kept)
                assert found[place] == 100 * episode + start + (step if there else latest)
                assert real[place] == (there and place < length - pad)
                ends = real[place] and start + step == kept - 1
                assert done[place] == ends


@pytest.mark.parametrize(("n", "edit", "left"), [(7, shortened(4), 4), (5, repeated(3), 15)])
@pytest.mark.parametrize("length", [1, 3])
def test_uniform_windows_stay_uniform(n: int, edit: Any, left: int, length: int) -> None:
    rb = buffer_of(TrajectoryTransform(edit), [n], sample_unit=Windows(length))
    # Starts beyond the last window are moved to it: of those, one in `length` is counted.
    counts = np.zeros(left - length + 1)
    for _ in range(20):
        batch = rb.sample(400)
        first = batch["row"].reshape(-1, length)[:, 0].numpy()
        index = batch["index"].reshape(-1, length)[:, 0].numpy()
        last = n - length
        kept = (index < last) | (np.arange(len(index)) % length == 0)
        counts += np.bincount(first[kept], minlength=len(counts))
    assert chi_square_p(counts.tolist()) > 1e-4


class Look(HistoryTransform):
    """Everything that a later transform gets of a row, and the rows before and after it."""

    changes = frozenset({("before",), ("after",), ("reward_after",)})

    def __init__(self, needs: Needs | None = None) -> None:
        self.needs = needs or Needs()

    def fetch(self, around: Surroundings) -> tuple[Around, Around]:
        keys = [("row",), ("next", "reward")]
        return (
            around.fetch(keys, np.maximum(around.time - 1, around.first)),
            around.fetch(keys, np.minimum(around.time + 1, around.last)[:, None]),
        )

    def apply(self, data: Any, fetched: tuple[Around, Around], around: Surroundings) -> Any:
        before, after = (around.seen(one) for one in fetched)
        data["before"] = before[("row",)]
        data["after"] = after[("row",)][:, 0]
        data["reward_after"] = after[("next", "reward")][:, 0]
        data["step"] = torch.from_numpy(around.time - around.begin)
        data["count"] = torch.from_numpy(around.last - around.begin + 1)
        data["reason"] = torch.from_numpy(np.asarray(around.reason))
        return data


@pytest.mark.parametrize("strategy", ["future", "final", "random"])
def test_goals_of_edited_episodes(strategy: str) -> None:
    def moved(episode: TensorDict) -> TensorDict:
        episode = shortened(3)(episode)
        episode["next", "achieved_goal"] += 1000
        return episode

    rb = buffer_of(
        Compose(TrajectoryTransform(moved), HindsightGoal(1.0, strategy), Look(), RewardScale(2.0)),
        [6, 5],
    )
    batch = rb.sample(200)
    goal_row = (batch["desired_goal"].flatten() - 1000.5).long()
    assert (goal_row % 100 < 3).all()
    if strategy != "random":
        assert (goal_row // 100 == batch["row"] // 100).all()
        assert (goal_row >= batch["row"]).all()
    else:
        assert set(goal_row.tolist()) == {0, 1, 2, 100, 101, 102}
    # Rows that were fetched are relabelled as the row that asked for them.
    assert torch.equal(batch["reward_after"].flatten() == 0, batch["after"] == goal_row)


def test_returns_are_those_of_edited_episodes() -> None:
    def doubled(episode: TensorDict) -> TensorDict:
        episode = shortened(2)(episode)
        episode["next", "reward"] *= 2
        return episode

    chain = Compose(TrajectoryTransform(doubled), ReturnToGo(0.5, default=-9.0))
    rb = buffer_of(chain, [4, 1])
    assert rb.storage.get(slice(None))["episode_return"].flatten().tolist() == [
        *[1.875, 1.75, 1.5, 1.0],
        1.0,
    ]
    batch = rb.sample(100)
    step, alone = batch["row"] % 100, batch["row"] >= 100
    expected = torch.where((step == 0) & ~alone, 3.0, 2.0)
    assert torch.equal(batch["episode_return"].flatten(), expected)
    assert batch["return_valid"].all()

    def stopped(episode: TensorDict) -> TensorDict:
        for key in ("terminated", "done"):
            episode["next", key].zero_()
        episode["next", "truncated"][-1] = True
        episode["next", "done"][-1] = True
        return episode

    rb = buffer_of(Compose(TrajectoryTransform(stopped), ReturnToGo(0.5, default=-9.0)), [4, 1])
    batch = rb.sample(20)
    assert (batch["episode_return"] == -9).all()
    assert not batch["return_valid"].any()


def test_allow_options_decide_drawable_rows() -> None:
    lengths = [6, 4, 3]
    for allow_open in (False, True):
        for allow_headless in (False, True):
            # Room for 10 of 13 rows: the first episode lacks its first 3.
            rb = buffer_of(
                TrajectoryTransform(lambda episode: episode, allow_open, allow_headless),
                lengths,
                10,
                last_open=True,
            )
            expected = set(range(100, 104))
            expected |= set(range(200, 203)) if allow_open else set()
            expected |= set(range(3, 6)) if allow_headless else set()
            assert set(rb.sample(500)["row"].tolist()) == expected


def test_open_and_headless_episodes_are_edited_as_they_are() -> None:
    rb = buffer_of(
        Compose(TrajectoryTransform(lambda episode: episode, True, True), Look()),
        [6, 3],
        7,
        last_open=True,
    )
    batch = rb.sample(200)
    is_open = batch["row"] >= 100
    assert torch.equal(batch["reason"] == int(EndReason.OPEN), is_open)
    assert torch.equal(batch["step"], batch["row"] % 100)


def test_an_episode_without_an_end_is_cut() -> None:
    def without_end(episode: TensorDict) -> TensorDict:
        return episode[:-1]

    rb = buffer_of(Compose(TrajectoryTransform(without_end), Look()), [6])
    batch = rb.sample(50)
    assert (batch["reason"] == int(EndReason.CUT)).all()
    assert not batch["next", "done"].any()


def test_edit_may_add_and_remove_keys() -> None:
    def edit(episode: TensorDict) -> TensorDict:
        episode["left"] = len(episode) - torch.arange(len(episode))
        episode["next", "left"] = episode["left"] - 1
        del episode["next", "achieved_goal"]
        return episode

    batch = buffer_of(TrajectoryTransform(edit), [6, 4]).sample()
    n = torch.where(batch["row"] < 100, 6, 4)
    assert torch.equal(batch["left"], n - batch["row"] % 100)
    assert torch.equal(batch["next", "left"], batch["left"] - 1)
    assert ("next", "achieved_goal") not in batch.keys(True)


def test_two_trajectory_transforms_apply_in_order_and_before_others() -> None:
    edits = TrajectoryTransform(shortened(3)), TrajectoryTransform(repeated(2))
    batch = buffer_of(Compose(*edits, Look(Needs(past=2))), [6, 5]).sample(300)
    assert set(batch["row"].tolist()) == {*range(6), *range(100, 106)}
    step = batch["row"] % 100
    assert torch.equal(batch["before"] % 100, (step - 1).clamp(min=0))
    assert torch.equal(batch["after"] % 100, (step + 1).clamp(max=5))
    assert torch.equal(batch["step"], step)
    assert (batch["count"] == 6).all()
    assert (batch["reason"] == int(EndReason.TERMINATED)).all()


@pytest.mark.parametrize("layout", [{"ndim": 2}, {"lane_key": "env"}])
def test_episodes_of_lanes_and_interleaved_streams_are_edited(layout: dict[str, Any]) -> None:
    rows = torch.stack([rows_of([3, 5, 4]), rows_of([6, 2, 4])])
    rows["env"] = torch.arange(2)[:, None].repeat(1, 12)
    rb = ReplayBuffer(
        storage=LazyTensorStorage(24, **layout),
        transform=Compose(TrajectoryTransform(repeated(2)), Look()),
        batch_size=300,
    )
    rb.extend(rows if "ndim" in layout else rows.transpose(0, 1).reshape(24))
    batch = rb.sample()
    n = torch.tensor([[6, 10, 8], [12, 4, 8]])[batch["env"], batch["row"] // 100]
    assert torch.equal(batch["count"], n)
    assert torch.equal(batch["after"] % 100, torch.minimum(batch["row"] % 100 + 1, n - 1))


def test_rows_are_read_by_index_too() -> None:
    """Those of episodes that cannot be drawn as they are stored."""
    rb = buffer_of(TrajectoryTransform(shortened(1)), [3, 2], last_open=True)
    assert rb[:]["row"].tolist() == [0, 0, 0, 100, 101]
    assert rb[2]["row"].item() == 0


@pytest.mark.parametrize(
    ("edit", "error", "text"),
    [
        (lambda e: e[:0], ValueError, "at least one row of an episode, got none"),
        (lambda e: e[0], ValueError, r"batch size \[n\], got \[\]"),
        (lambda e: None, TypeError, "expected a TensorDict for an episode, got NoneType"),
        (lambda e: e.to_dict(), TypeError, "expected a TensorDict for an episode, got dict"),
        (
            lambda e: e.set(("next", "done"), torch.ones(len(e), 1, dtype=torch.bool)),
            ValueError,
            r"flags in the last row of an episode alone, got others in row 0 of 4",
        ),
        (
            lambda e: e.set(("next", "terminated"), torch.zeros(len(e), 1, dtype=torch.bool)),
            ValueError,
            r"\('next', 'done'\) as terminated \| truncated, got others in row 3 of 4",
        ),
        (
            lambda e: e.set(("next", "done"), e["next", "done"].float()),
            TypeError,
            r"key \('next', 'done'\): expected bool flags, got torch.float32",
        ),
        (
            lambda e: e.set("x" if e["row"][0] else "y", e["row"]),
            ValueError,
            "as in the other episodes, got .* in edited episode 1",
        ),
        (
            lambda e: e.set("row", e["row"] if e["row"][0] else e["row"].float()),
            ValueError,
            r"key 'row': expected float32 \[\] as in the other episodes, got int64 \[\]",
        ),
    ],
)
def test_invalid_function_results_are_refused(edit: Any, error: type[Exception], text: str) -> None:
    rb = buffer_of(TrajectoryTransform(edit), [4, 4])
    refuses(error, text, rb.sample, 64)


def test_invalid_arguments_and_orders_are_refused() -> None:
    refuses(TypeError, "fn: ", TrajectoryTransform, 3)
    edit = TrajectoryTransform(shortened(2))
    with pytest.raises(ValueError, match=r"TrajectoryTransform\(edit\) .* before HindsightGoal"):
        Compose(HindsightGoal(), edit)
    refuses(ValueError, "TrajectoryTransform", Compose, RewardScale(2.0), edit)
    assert [
        type(one) for one in Compose(RewardScale(2.0), HindsightGoal(), edit, order="auto")
    ] == [
        TrajectoryTransform,
        HindsightGoal,
        RewardScale,
    ]
    refuses(RuntimeError, "pass it to a ReplayBuffer", edit, rows_of([3]))


@pytest.mark.parametrize("pad_output", [False, True])
def test_slices_are_cut_from_edited_episodes(pad_output: bool) -> None:
    """Markers lie where windows end now; what is missing is padding."""
    sampler = SliceSampler(slice_len=6, strict_length=not pad_output, pad_output=pad_output)
    rb = buffer_of(
        TrajectoryTransform(shortened(4)), [9, 12, 7, *[5] * pad_output], sampler=sampler
    )
    batch = rb.sample(600)
    row = batch["row"].reshape(-1, 6) % 100
    assert (row == torch.tensor([0, 1, 2, 3, 3, 3])).all()
    assert (batch[MASK].reshape(-1, 6) == torch.tensor([1, 1, 1, 1, 0, 0])).all()
    last = torch.tensor([0, 0, 0, 1, 0, 0]).bool()
    assert (batch["next", "done"].reshape(-1, 6) == last).all()
    assert (batch["next", "terminated"].reshape(-1, 6) == last).all()
    assert not batch["next", "truncated"].any()

    rb = buffer_of(TrajectoryTransform(repeated(2)), [9, 12, 7], sampler=SliceSampler(slice_len=6))
    batch = rb.sample(600)
    row = batch["row"].reshape(-1, 6)
    assert (row.diff(dim=1) == 1).all()
    assert batch[MASK].all()
    end = (row[:, -1] % 100 + 1) == torch.tensor([18, 24, 14])[row[:, -1] // 100]
    assert 0 < end.float().mean() < 1
    for key, expected in (
        ("terminated", end),
        ("truncated", ~end),
        ("done", torch.ones_like(end)),
    ):
        flag = batch["next", key].reshape(-1, 6)
        assert torch.equal(flag[:, -1], expected)
        assert not flag[:, :-1].any()


def test_later_transforms_follow_edited_episodes() -> None:
    chain = Compose(
        TrajectoryTransform(repeated(2)),
        NStep(3, 1.0),
        StackFrames(["achieved_goal"], 2),
        PreviousStep([("next", "row")], init=-5),
        StepCount(),
    )
    rb = buffer_of(chain, [5, 3], sampler=SliceSampler(slice_len=3))
    batch = rb.sample(300)
    row, first = batch["row"], batch["row"] // 100 * 100
    step, n = row - first, torch.where(row < 100, 10, 6)
    assert torch.equal(batch["steps_used"].flatten(), (n - step).clamp(max=3))
    assert torch.equal(batch["next", "reward"].flatten(), (n - step).clamp(max=3).float())
    assert torch.equal(batch["step_count"].flatten(), step)
    # Row k of the edited episode is a copy of row k // 2, and so is what it achieved.
    stack = torch.stack([(step - 1).clamp(min=0) // 2, step // 2], 1) + first[:, None]
    assert torch.equal(batch["achieved_goal"], stack.float())
    before = torch.where(step == 0, -5, first + (step - 1) // 2 + 1)
    assert torch.equal(batch["previous_row"].flatten(), before)


def test_observations_that_are_stored_once() -> None:
    """The function is given both: what is rebuilt looks as if it had been stored."""
    batches = []
    for kept_once in (False, ["row"]):
        rb = ReplayBuffer(
            storage=LazyTensorStorage(11, dedup_next=kept_once),
            transform=Compose(TrajectoryTransform(shortened(3)), Look()),
            batch_size=60,
            generator=torch.Generator().manual_seed(1),
        )
        rb.extend(rows_of([5, 4, 6]))
        batches.append(rb.sample())
    one, other = batches
    assert torch.equal(one["next", "row"], one["row"] + 1)
    for key in one.keys(True, True):
        assert torch.equal(one[key], other[key]), key
