"""Arguments of transforms: what is refused at construction, and how objects show themselves."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    Cast,
    CatTensors,
    Compose,
    ExcludeTransform,
    HindsightGoal,
    ImageScale,
    KeepRaw,
    LazyTensorStorage,
    NStep,
    PreviousStep,
    RenameTransform,
    ReplayBuffer,
    ReturnToGo,
    RewardClip,
    RewardMap,
    RewardScale,
    RewardShift,
    SelectTransform,
    Shift,
    StackFrames,
    StepCount,
    Windows,
)
from tests.support.refusals import refuses


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: NStep(n=0, gamma=0.9), ValueError, "expected n as an int of at least 1, got 0"),
        (lambda: NStep(gamma=0.9), ValueError, "got None"),
        (lambda: NStep(n=2, gamma=1.01), ValueError, "in \\[0, 1\\], got 1.01"),
        (lambda: NStep(n=2, gamma=float("nan")), ValueError, "gamma"),
        (lambda: NStep(n=2, gamma="x"), TypeError, "gamma"),
        (lambda: NStep(n=2, gamma=0.9, on_open="cut"), ValueError, "'exclude', got 'cut'"),
        (lambda: NStep(n=2, gamma=0.9, when="later"), ValueError, "got 'later'"),
        (lambda: NStep(n=2, gamma=0.9, reward_key=3), TypeError, "expected a key"),
        (lambda: NStep(gamma=0.9, per_step=True, on_open="exclude"), ValueError, "per_step"),
        (lambda: NStep(n=2, gamma=0.9, when="write", time_dim="x"), TypeError, "time_dim"),
        (lambda: HindsightGoal(p=1.5), ValueError, r"p: expected a number in \[0, 1\], got 1.5"),
        (lambda: HindsightGoal(p=float("nan")), ValueError, "p: "),
        (lambda: HindsightGoal(p="half"), TypeError, "p: "),
        (
            lambda: HindsightGoal(strategy="past"),
            ValueError,
            "strategy: expected one of 'future'.*'past'",
        ),
        (lambda: HindsightGoal(scope="batch"), ValueError, "scope: "),
        (lambda: HindsightGoal(check="always"), ValueError, "check: "),
        (lambda: HindsightGoal(reward_fn=3), TypeError, "reward_fn: "),
        (lambda: HindsightGoal(terminated_fn=3), TypeError, "terminated_fn: "),
        (lambda: HindsightGoal(goal=("next", "goal")), ValueError, "goal: .*outside of 'next'"),
        (lambda: HindsightGoal(achieved=3), TypeError, "expected a key"),
        (lambda: HindsightGoal(achieved="desired_goal"), ValueError, "different keys"),
        (
            lambda: ReturnToGo(gamma=1.1),
            ValueError,
            r"gamma: expected a number in \[0, 1\], got 1.1",
        ),
        (lambda: ReturnToGo(gamma=float("nan")), ValueError, "gamma: "),
        (lambda: ReturnToGo(gamma="all"), TypeError, "gamma: "),
        (
            lambda: ReturnToGo(gamma=0.9, reward_clip=(1, -1)),
            ValueError,
            "reward_clip: .*got 1.0 and -1.0",
        ),
        (lambda: ReturnToGo(gamma=0.9, reward_clip=1), TypeError, "reward_clip: "),
        (lambda: ReturnToGo(gamma=0.9, default=None), TypeError, "default: "),
        (
            lambda: ReturnToGo(gamma=0.9, on_truncated="never"),
            ValueError,
            "on_truncated: .*'never'",
        ),
        (
            lambda: ReturnToGo(gamma=0.9, on_truncated="bootstrap"),
            ValueError,
            "expected value with",
        ),
        (lambda: ReturnToGo(gamma=0.9, value="v"), ValueError, "expected value with"),
        (lambda: ReturnToGo(gamma=0.9, key=("next", "reward")), ValueError, "key: "),
        (lambda: ReturnToGo(gamma=0.9, key="return_valid"), ValueError, "key: "),
        (lambda: PreviousStep(keys="action"), TypeError, "a list of keys"),
        (lambda: PreviousStep(keys=[3]), TypeError, "expected a key"),
        (lambda: PreviousStep(keys=[]), ValueError, "at least one"),
        (
            lambda: PreviousStep(keys=["reward", ("next", "reward")]),
            ValueError,
            "differ in more than 'next'",
        ),
        (lambda: PreviousStep(init="x"), TypeError, "init"),
        (lambda: PreviousStep(init=float("inf")), ValueError, "init"),
        (lambda: PreviousStep(num_actions=4), ValueError, "concat"),
        (lambda: PreviousStep(concat=True, num_actions=0), ValueError, "num_actions"),
        (lambda: StackFrames(["x"], 0), ValueError, "expected k as an int of at least 1, got 0"),
        (lambda: StackFrames([], 2), ValueError, "at least one key"),
        (lambda: StackFrames(5, 2), TypeError, "a list of keys, got 5"),
        (lambda: StackFrames([5], 2), TypeError, "expected a key"),
        (lambda: StackFrames([("next", "x")], 2), ValueError, "outside of 'next'"),
        (lambda: StackFrames(["x", "x"], 2), ValueError, "'x' twice"),
        (lambda: StackFrames(["x"], 2, "0"), TypeError, "dim"),
        (lambda: StackFrames(["x"], 2, 0, pad="ones"), ValueError, "got 'ones'"),
        (lambda: Windows([("a", [0])]), TypeError, "a mapping of keys"),
        (lambda: Windows({}), ValueError, "at least one key"),
        (lambda: Windows({"a": []}), ValueError, "at least one offset"),
        (lambda: Windows({"a": 3}), TypeError, "a list of offsets"),
        (lambda: Windows({"a": [0.5]}), ValueError, "expected whole offsets, got 0.5"),
        (lambda: Windows({"a": [1 << 63]}), ValueError, "at most 4611686018427387904 steps"),
        (lambda: Windows({"a": [0]}, unit="frames"), ValueError, "seconds"),
        (lambda: Windows({"a": [0]}, unit="steps", fps=5), ValueError, "expected unit='seconds'"),
        (lambda: Windows({"a": [0]}, unit="seconds", fps=0), ValueError, "positive"),
        (
            lambda: Windows({"a": [0, 0.05]}, unit="seconds", fps=30),
            ValueError,
            "1/30 s, got 0.05 s, which is 1.5 steps",
        ),
        (
            lambda: Windows({"a": [0]}, unit="steps", fps=None, pad_after=-1),
            ValueError,
            "pad_after",
        ),
        (
            lambda: RenameTransform(["a", "b"], ["c"]),
            (ValueError, TypeError),
            "expected 2 new names, got 1",
        ),
        (lambda: CatTensors([], "out"), (ValueError, TypeError), "at least one key to join"),
        (lambda: ExcludeTransform(3), (ValueError, TypeError), "expected a key"),
        (lambda: SelectTransform(["a"]), (ValueError, TypeError), "expected a key"),
        (lambda: RenameTransform([None], ["a"]), (ValueError, TypeError), "expected a key"),
        (lambda: CatTensors(["a"], 3), (ValueError, TypeError), "expected a key"),
        (lambda: KeepRaw([]), (ValueError, TypeError), "list"),
        (lambda: KeepRaw("reward"), (ValueError, TypeError), "list"),
        (lambda: Compose(order="any"), (ValueError, TypeError), "order"),
        (lambda: ImageScale(1, -1), ValueError, "min below max, got min 1.0 and max -1.0"),
        (lambda: ImageScale(0, float("inf")), ValueError, "max: expected a finite number"),
        (lambda: ImageScale("a", 1), TypeError, "min: expected a number"),
        (lambda: ImageScale(keys="pixels"), TypeError, "expected a list of keys, got 'pixels'"),
        (lambda: ImageScale(keys=[]), ValueError, "at least one key"),
        (lambda: ImageScale(keys=[2]), TypeError, "expected a key"),
        (lambda: Cast("float32", ["a"]), TypeError, "dtype: expected a torch dtype, got 'float32'"),
        (lambda: Cast(torch.bool, ["a"]), ValueError, "expected numbers, got torch.bool"),
        (lambda: Cast(torch.int64, []), ValueError, "at least one key"),
        (lambda: Cast(torch.int64, "action"), TypeError, "expected a list of keys, got 'action'"),
        (lambda: Cast(torch.int64, [3]), TypeError, "expected a key"),
        (lambda: Cast(torch.int64, ["done"]), ValueError, "'done' is a flag"),
        (lambda: Cast(torch.int64, [("next", "truncated")]), ValueError, "is a flag"),
        (lambda: RewardClip(1, 1), ValueError, "min below max, got min 1.0 and max 1.0"),
        (lambda: RewardClip(float("nan"), 1), ValueError, "min below max"),
        (lambda: RewardClip(None, 1), TypeError, "min: expected a number, got None"),
        (lambda: RewardClip(-1, "x"), TypeError, "max: expected a number, got 'x'"),
        (lambda: RewardClip(False, True), TypeError, "min: expected a number, got False"),
        (lambda: RewardClip(-1, 1, key=3), TypeError, "expected a key"),
        (lambda: RewardScale(0), ValueError, "scale: expected a positive number, got 0.0"),
        (lambda: RewardScale(float("nan")), ValueError, "scale: expected a finite number, got nan"),
        (lambda: RewardScale(1, float("inf")), ValueError, "shift: expected a finite"),
        (lambda: RewardShift("1"), TypeError, "shift: expected a number"),
        (lambda: RewardShift(float("inf")), ValueError, "shift: expected a finite"),
        (lambda: RewardMap(3), TypeError, "fn: expected a function of rewards, got 3"),
        (lambda: StepCount(3), TypeError, "expected a key"),
        (lambda: Shift("t", 0), ValueError, r"expected|on_short"),
        (lambda: Shift("t", 1.5), ValueError, r"expected|on_short"),
        (lambda: Shift("t", 1, "drop"), ValueError, r"expected|on_short"),
        (lambda: Shift("t", -1), ValueError, r"expected|on_short"),
    ],
)
def test_invalid_arguments_are_refused_at_construction(
    make: Callable[[], Any], error: Any, text: str
) -> None:
    refuses(error, text, make)


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (NStep(3, 0.5), "NStep(3, gamma=0.5)"),
        (NStep(gamma=1, per_step=True), "NStep(gamma=1, per_step=True)"),
        (NStep(3, 0.5, when="write"), "NStep(3, gamma=0.5, when='write')"),
        (StackFrames("x", 4), "StackFrames(['x'], 4)"),
        (
            StackFrames(["x", ("a", "b")], 2, -1, "zero", True),
            "StackFrames(['x', ('a', 'b')], 2, dim=-1, pad='zero', new_dim=True)",
        ),
        (PreviousStep(), "PreviousStep(['action', ('next', 'reward')])"),
        (
            PreviousStep(["action"], 2, True, 3),
            "PreviousStep(['action'], init=2, concat=True, num_actions=3)",
        ),
        (StepCount(), "StepCount('step_count')"),
        (ExcludeTransform("a", ("b", "c")), "ExcludeTransform('a', ('b', 'c'))"),
        (SelectTransform("a"), "SelectTransform('a')"),
        (RenameTransform(["a"], ["b"]), "RenameTransform([('a',)], [('b',)])"),
        (CatTensors(["a"], "b"), "CatTensors([('a',)], 'b', dim=-1)"),
        (ImageScale(), "ImageScale(-1, 1)"),
        (ImageScale(0, 1, [("a", "b")]), "ImageScale(0, 1, [('a', 'b')])"),
        (
            Cast(torch.float32, ["a", ("b", "c")], with_next=True),
            "Cast(float32, ['a', ('b', 'c')], with_next=True)",
        ),
        (RewardClip(-1, 2.5), "RewardClip(-1, 2.5)"),
        (RewardScale(2), "RewardScale(2)"),
        (RewardScale(2, 1, key="r"), "RewardScale(2, shift=1, key='r')"),
        (RewardShift(-1, ("a", "r")), "RewardShift(-1, key=('a', 'r'))"),
        (RewardMap(torch.sign), "RewardMap(sign)"),
    ],
)
def test_repr_shows_arguments_also_of_copies(made: Any, text: str) -> None:
    for one in (made, copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert repr(one) == text
        assert type(one) is type(made)


def test_transforms_of_values_have_their_stage() -> None:
    for made in (RewardClip(-1, 1), RewardMap(abs), ImageScale(), Cast(torch.float32, ["a"])):
        assert made.stage == "value"
    assert Compose().stage is None


@pytest.mark.parametrize(
    "transform",
    [NStep(2), NStep(1), NStep(per_step=True), NStep(2, when="write"), ReturnToGo(0.9)],
)
def test_sums_of_complex_rewards_are_refused(transform: Any) -> None:
    """A conversion to real numbers would drop a part of them."""
    rb = ReplayBuffer(storage=LazyTensorStorage(9), transform=transform)
    reward = torch.ones(4, 1, dtype=torch.complex64)
    data = TensorDict({"next": {"reward": reward, "done": torch.arange(4)[:, None] == 3}}, [4])
    refuses(TypeError, "expected real rewards", lambda: (rb.extend(data), rb[:]))
