"""Save after some batches, kill, load elsewhere, go on: the batches that come are those of a run
that was not interrupted, bit for bit."""

from __future__ import annotations

import multiprocessing
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    ConsumingSampler,
    HindsightGoal,
    LambdaScheduler,
    LazyMemmapStorage,
    LazyTensorStorage,
    LinearScheduler,
    NStep,
    ParameterScheduler,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    ReturnToGo,
    RunningNorm,
    Sampler,
    SamplerEnsemble,
    SamplerWithoutReplacement,
    SchedulerList,
    Sequence,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    StackFrames,
    StalenessAwareSampler,
    StepScheduler,
    Transform,
    samplers,
    transforms,
)
from tests.buffer.building import same

SLOTS, BATCH, BEFORE, AFTER = 60, 12, 7, 9
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.buffer.test_resume"])


class Counting(Transform):
    """A transform whose output depends on how often it was called."""

    def __init__(self) -> None:
        self.calls = 0

    def forward(self, data: Any) -> Any:
        self.calls += 1
        return data.set("call", torch.full(data.batch_size, self.calls))

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]


def _prioritized(**options: Any) -> PrioritizedSampler:
    return PrioritizedSampler(alpha=0.6, beta=0.4, **options)


def _prioritized_slices(**options: Any) -> PrioritizedSliceSampler:
    return PrioritizedSliceSampler(alpha=0.6, beta=0.4, slice_len=4, **options)


def _of_version(staleness: torch.Tensor) -> torch.Tensor:
    return 1 / (1 - staleness)  # versions are above that of the learner, 0


SAMPLERS: dict[str, Callable[[], Any]] = {
    "random": RandomSampler,
    "without replacement": SamplerWithoutReplacement,
    "without, rest dropped": lambda: SamplerWithoutReplacement(drop_last=True),
    "without, in order": lambda: SamplerWithoutReplacement(shuffle=False),
    "prioritized": _prioritized,
    "stratified": lambda: _prioritized(stratified=True),
    "largest stored": lambda: _prioritized(max_priority_within_buffer=True),
    "slices": lambda: SliceSampler(slice_len=4),
    "slices by trajectory": lambda: SliceSampler(slice_len=4, measure="trajectory"),
    "stratified slices": lambda: SliceSampler(slice_len=4, draw="stratified"),
    "distinct slices": lambda: SliceSampler(slice_len=4, draw="without_replacement"),
    "slices in order": lambda: SliceSampler(slice_len=4, draw="sequential"),
    "padded slices": lambda: SliceSampler(slice_len=4, pad="both"),
    "recent slices": lambda: SliceSampler(slice_len=4, recent=(0.5, 9)),
    "slices of any length": lambda: SliceSampler(slice_len=4, span=True, strict_length=False),
    "slices without replacement": lambda: SliceSamplerWithoutReplacement(slice_len=4),
    "episodes in order, rest dropped": lambda: SliceSamplerWithoutReplacement(
        slice_len=4, shuffle=False, drop_last=True
    ),
    "prioritized slices": lambda: _prioritized_slices(),
    "stratified prioritized slices": lambda: _prioritized_slices(draw="stratified"),
    "distinct prioritized slices": lambda: _prioritized_slices(draw="without_replacement"),
    "prioritized slices by their starts": lambda: _prioritized_slices(unit="slice"),
    "recent prioritized slices": lambda: _prioritized_slices(recent=(0.5, 9)),
    "prioritized slices, largest stored": lambda: _prioritized_slices(
        max_priority_within_buffer=True
    ),
    "by staleness": lambda: StalenessAwareSampler(
        staleness_weight_fn=_of_version, version_key="number"
    ),
    "by staleness, oldest left out": lambda: StalenessAwareSampler(
        max_staleness=30, staleness_weight_fn=torch.ones_like, version_key="number"
    ),
    "consuming": lambda: ConsumingSampler(2),
}
ELSEWHERE = {"Sampler", "SamplerEnsemble"}
"""Samplers without a buffer here: the base class, and that of ensembles (tests/mixture)."""

TRANSFORMS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "one with state": Counting,
    "n-step": lambda: NStep(3, 0.9),
    "n-step on writing": lambda: NStep(3, 0.9, when="write"),
    "returns": lambda: ReturnToGo(0.9),
    "norm of writes": lambda: RunningNorm(["observation"], "window", size=20),
    "norm of samples": lambda: RunningNorm(["observation"], "ema", update_on="sample"),
    "frames": lambda: StackFrames(["observation"], 3),
    "hindsight": lambda: HindsightGoal(0.8, "future", achieved="place", goal="goal"),
}


def rows(first: int, count: int) -> TensorDict:
    number = torch.arange(first, first + count)
    x = number[:, None].float()
    done = (number % 13 == 12)[:, None]
    following = {"observation": x + 1, "place": x + 1, "goal": -x, "reward": x / 7, "done": done}
    leaves = {"number": number, "observation": x, "place": x, "goal": -x, "next": following}
    return TensorDict(leaves, [count])


def made(sampler: str, transform: str = "none", **options: Any) -> ReplayBuffer:
    storage = options.pop("storage", None) or LazyTensorStorage(SLOTS)
    return ReplayBuffer(
        storage=storage,
        sampler=SAMPLERS[sampler](),
        transform=TRANSFORMS[transform](),
        batch_size=BATCH,
        generator=torch.Generator().manual_seed(5),
        **options,
    )


def schedulers(rb: ReplayBuffer) -> SchedulerList:
    if not isinstance(rb.sampler, (PrioritizedSampler, PrioritizedSliceSampler)):
        return SchedulerList([])
    alpha: ParameterScheduler = StepScheduler(rb, "alpha", gamma=0.9, n_steps=3)
    if isinstance(rb.sampler, PrioritizedSliceSampler):
        alpha = LambdaScheduler(rb, "alpha", lambda step: 1 / (1 + step / 10))
    return SchedulerList([LinearScheduler(rb, "beta", final_value=1.0, num_steps=20), alpha])


def train(
    rb: ReplayBuffer, plan: SchedulerList, first: int, count: int, *, alone: bool
) -> Iterator[TensorDict]:
    """Batches, each followed by what a learner does: priorities of the rows, and new ones."""
    for step in range(first, first + count):
        batch = rb.sample()
        yield batch
        plan.step()
        if alone:
            continue
        if isinstance(rb.sampler, StalenessAwareSampler) and rb.sampler.max_staleness > 0:
            rb.sampler.consumer_version = 52 + 26 * step
        if batch.get("priority_weight", None) is not None:
            batch["td_error"] = (batch["number"] % 7).float() / 3
            rb.update_tensordict_priority(batch)
        # Whole episodes, so that none is open where the run may be interrupted.
        rb.extend(rows(52 + 26 * step, 26))


def begin(rb: ReplayBuffer) -> None:
    rb.extend(rows(0, 52))


def save_and_die(cases: list[dict[str, Any]], folder: Path, said: Any) -> None:
    """Train and save the buffers of all cases in a child, which is killed at once."""
    alive, states = [], []
    for number, case in enumerate(cases):
        arguments = {**case}
        alone = arguments.pop("alone")
        rb = made(**arguments)
        begin(rb)
        plan = schedulers(rb)
        for _ in train(rb, plan, 0, BEFORE, alone=alone):
            pass
        rb.dumps(folder / str(number))
        alive.append(rb)
        states.append(plan.state_dict())
    said.send(states)
    signal.raise_signal(signal.SIGKILL)


def check(folder: Path, *cases: dict[str, Any], storage: Any = None) -> None:
    """Compare runs that go on from what a killed child has saved with runs in one process."""
    reading, said = CONTEXT.Pipe(duplex=False)
    child = CONTEXT.Process(target=save_and_die, args=(list(cases), folder, said))
    child.start()
    said.close()
    states = reading.recv()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    for number, (case, state) in enumerate(zip(cases, states, strict=True)):
        arguments = {**case}
        alone = arguments.pop("alone")
        whole = made(**arguments)
        begin(whole)
        plan = schedulers(whole)
        wanted = [batch.clone() for batch in train(whole, plan, 0, BEFORE, alone=alone)]
        whole.dumps(folder / "another")  # which undoes the draws made ahead
        wanted += [batch.clone() for batch in train(whole, plan, BEFORE, AFTER, alone=alone)]

        rb = made(**arguments, storage=storage)
        rb.loads(folder / str(number))
        again = schedulers(rb)
        again.load_state_dict(state)
        found = [batch.clone() for batch in train(rb, again, BEFORE, AFTER, alone=alone)]
        for pair in zip(found, wanted[BEFORE:], strict=True):
            same(*pair, str(case))
        for one in (whole, rb):
            one.shutdown()


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def test_no_sampler_is_left_out() -> None:
    exported = {getattr(samplers, name) for name in samplers.__all__}
    classes = {one for one in exported if isinstance(one, type) and issubclass(one, Sampler)}
    classes |= {SamplerEnsemble}
    here = {type(make()) for make in SAMPLERS.values()}
    assert {one.__name__ for one in classes - here} == ELSEWHERE


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_resumed_learner_gets_the_same_batches(sampler: str, tmp_path: Path) -> None:
    """What is learned and written after a batch counts for those made ahead neither before the
    save nor after it, but for all that come then."""
    depths = [None] if sampler == "consuming" else [None, 3]  # which needs new rows
    cases = [{"sampler": sampler, "prefetch": depth, "alone": False} for depth in depths]
    if sampler != "consuming":
        cases.append({"sampler": sampler, "prefetch": 3, "alone": True})
    check(tmp_path, *cases)


def test_no_transform_with_state_is_left_out() -> None:
    exported = [getattr(transforms, name) for name in transforms.__all__]
    with_state = {one for one in exported if hasattr(one, "state_dict")} - {transforms.Compose}
    with_state -= {transforms.Normalize, transforms.Unnormalize}  # batches do not change it
    assert with_state == {type(TRANSFORMS["n-step on writing"]()), RunningNorm}


@pytest.mark.parametrize("transform", [name for name in TRANSFORMS if name != "none"])
def test_resumed_transforms_give_the_same_batches(transform: str, tmp_path: Path) -> None:
    samplers = ["random", "prioritized", "without replacement"]
    check(tmp_path, *({"sampler": s, "transform": transform, "alone": False} for s in samplers))


@pytest.mark.parametrize("sampler", ["prioritized", "slices without replacement"])
def test_a_state_counts_the_batches_that_were_delivered(sampler: str, tmp_path: Path) -> None:
    """Those made ahead have not passed the transform yet."""
    arguments: dict[str, Any] = {"sampler": sampler, "transform": "one with state", "prefetch": 3}
    rb = made(**arguments)
    begin(rb)
    assert [rb.sample()["call"].unique().tolist() for _ in range(4)] == [[1], [2], [3], [4]]
    rb.shutdown()
    check(tmp_path, {**arguments, "alone": True})


@pytest.mark.parametrize(
    "sampler", ["random", "prioritized", "slices", "slices without replacement"]
)
def test_resume_into_another_storage_gives_the_same_batches(sampler: str, tmp_path: Path) -> None:
    storage = LazyMemmapStorage(SLOTS, scratch_dir=tmp_path / "rows")
    check(tmp_path / "saved", {"sampler": sampler, "alone": False}, storage=storage)


@pytest.mark.parametrize(
    ("sampler", "transform"),
    [
        ("slices", "n-step"),
        ("prioritized slices", "n-step"),
        ("random", "n-step"),
        ("random", "n-step on writing"),
        ("prioritized", "n-step on writing"),
        ("random", "returns"),
    ],
)
def test_an_open_episode_ends_at_the_save(sampler: str, transform: str, tmp_path: Path) -> None:
    """A restart cuts what was open: the run that goes on without one is one that cuts there."""
    runs = []
    for interrupted in (False, True):
        rb = made(sampler, transform)
        rb.extend(rows(0, 45))
        for _ in range(3):
            rb.sample()
        if interrupted:
            rb.dumps(tmp_path / "saved")
            rb = made(sampler, transform)
            rb.loads(tmp_path / "saved")
        else:
            rb.cut()
        rb.extend(rows(45, 9))
        runs.append([rb.sample().clone() for _ in range(6)])
    for pair in zip(*runs, strict=True):
        same(*pair)


def test_resumed_sequences_give_the_same_batches(tmp_path: Path) -> None:
    check(tmp_path, {"sampler": "prioritized", "sample_unit": Sequence(3), "alone": False})
