"""Numbers of a sampler that change step by step."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from replaykit import (
    LambdaScheduler,
    LazyTensorStorage,
    LinearScheduler,
    ParameterScheduler,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    SchedulerList,
    StepScheduler,
)
from tests.support.refusals import refuses


@pytest.fixture
def sampler() -> PrioritizedSampler:
    return PrioritizedSampler(alpha=0.5, beta=0.4)


def betas(scheduler: Any, steps: int) -> list[float]:
    values = []
    for _ in range(steps):
        scheduler.step()
        values.append(scheduler.sampler.beta)
    return values


def test_lambda_scheduler_multiplies_first_value_by_function_of_step(sampler: Any) -> None:
    seen: list[int] = []

    def factor(step: int) -> float:
        seen.append(step)
        return step / 2

    assert betas(LambdaScheduler(sampler, "beta", factor), 3) == pytest.approx([0.2, 0.4, 0.6])
    assert seen == [1, 2, 3]


def test_a_line_that_ends_exactly(sampler: Any) -> None:
    values = betas(LinearScheduler(sampler, "beta", 1.0, 3), 5)
    assert values == pytest.approx([0.6, 0.8, 1.0, 1.0, 1.0])
    assert values[2:] == [1.0, 1.0, 1.0]
    sampler.beta = 0.7
    assert betas(LinearScheduler(sampler, "beta", 0, 1), 2) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.36, 0.324, 0.2916, 0.26244]),
        ({"gamma": 2.0, "n_steps": 2}, [0.4, 0.8, 0.8, 1.6]),
        ({"gamma": 0.1, "mode": "additive"}, [0.5, 0.6, 0.7, 0.8]),
        ({"gamma": -0.3, "n_steps": 3, "mode": "additive"}, [0.4, 0.4, 0.1, 0.1]),
        ({"gamma": 2.0, "max_value": 1.0}, [0.8, 1.0, 1.0, 1.0]),
        ({"gamma": 0.5, "min_value": 0.15}, [0.2, 0.15, 0.15, 0.15]),
    ],
)
def test_step_scheduler_follows_its_options(
    options: Any, expected: list[float], sampler: Any
) -> None:
    assert betas(StepScheduler(sampler, "beta", **options), 4) == pytest.approx(expected)


def test_zero_works_as_a_bound(sampler: Any) -> None:
    """E19: it was ignored, and beta went below it."""
    down = StepScheduler(sampler, "beta", gamma=-0.3, mode="additive", min_value=0)
    assert betas(down, 3) == pytest.approx([0.1, 0.0, 0.0], abs=1e-15)
    assert sampler.beta == 0.0
    up = LambdaScheduler(sampler, "alpha", lambda step: step, max_value=0)
    up.step()
    assert sampler.alpha == 0.0


def test_a_value_that_the_attribute_refuses_changes_nothing(sampler: Any) -> None:
    scheduler = StepScheduler(sampler, "beta", gamma=-0.3, mode="additive")
    scheduler.step()
    for _ in range(2):
        refuses(ValueError, "beta", scheduler.step)
    assert (scheduler.steps, sampler.beta) == (1, pytest.approx(0.1))


def test_a_buffer_is_asked_for_its_sampler_at_each_step() -> None:
    buffer = PrioritizedReplayBuffer(alpha=0.5, beta=0.4, storage=LazyTensorStorage(3))
    scheduler = LinearScheduler(buffer, "beta", 1.0, 2)
    scheduler.step()
    old = buffer.set_sampler(PrioritizedSampler(alpha=0.5, beta=0.0))
    scheduler.step()
    assert (old.beta, buffer.sampler.beta) == (0.7, 1.0)


def test_annealing_alpha_changes_sampling_weights() -> None:
    buffer = PrioritizedReplayBuffer(alpha=1.0, beta=0.4, eps=0.0, storage=LazyTensorStorage(2))
    buffer.update_priority(buffer.extend(torch.arange(2)), torch.tensor([1.0, 4.0]))
    LinearScheduler(buffer, "alpha", 0.5, 1).step()
    assert buffer.sampler._table._sums.leaves.tolist() == [1.0, 2.0]


@pytest.mark.pitfall("SL9")
def test_annealing_beta_touches_no_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    """SL9: a step of beta costs the same at any size; one of alpha is a pass over all rows."""
    buffer = PrioritizedReplayBuffer(alpha=1.0, beta=0.4, storage=LazyTensorStorage(10))
    buffer.extend(torch.arange(10))
    buffer.sample(1)  # gives the rows their priorities
    passes = []
    table = buffer.sampler._table
    monkeypatch.setattr(type(table), "_set_range", lambda self, start, raw: passes.append(len(raw)))
    LinearScheduler(buffer, "beta", 1.0, 2).step()
    assert passes == []
    LinearScheduler(buffer, "alpha", 0.0, 2).step()
    assert passes == [10]


def test_scheduler_list_steps_all_schedulers(sampler: Any) -> None:
    both = SchedulerList([LinearScheduler(sampler, "beta", 1.0, 1)])
    both.append(SchedulerList([StepScheduler(sampler, "alpha", gamma=0.5)]))
    both.step()
    assert (sampler.alpha, sampler.beta, len(both)) == (0.25, 1.0, 2)
    refuses(TypeError, "expected a scheduler, got int", both.append, 3)
    refuses(TypeError, "expected a scheduler", SchedulerList, [sampler])


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda s: LinearScheduler(object(), "beta", 1, 1), TypeError, "sampler or a buffer"),
        (lambda s: LinearScheduler(s, "gamma", 1, 1), ValueError, "'gamma'"),
        (lambda s: LinearScheduler(s, "eps", 1, 2), ValueError, "that can be set, got 'eps'"),
        (lambda s: LinearScheduler(s, "reduction", 1, 1), ValueError, "to be a number"),
        (lambda s: LinearScheduler(RandomSampler(), "beta", 1, 1), ValueError, "RandomSampler"),
        (lambda s: LinearScheduler(s, "beta", 1, 0), ValueError, "num_steps"),
        (lambda s: LinearScheduler(s, "beta", 1, 1.5), ValueError, "num_steps"),
        (lambda s: StepScheduler(s, "beta", n_steps=0), ValueError, "n_steps"),
        (lambda s: StepScheduler(s, "beta", mode="geometric"), ValueError, "'geometric'"),
        (lambda s: StepScheduler(s, "beta", min_value=1, max_value=0), ValueError, "min_value"),
        (lambda s: LambdaScheduler(s, "beta", 0.5), TypeError, "lambda_fn"),
    ],
)
def test_arguments_are_checked(
    make: Callable[[Any], Any], error: Any, match: str, sampler: Any
) -> None:
    refuses(error, match, make, sampler)


MAKERS: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda s: LambdaScheduler(s, "beta", lambda step: 1 / step, max_value=0.9),
    "linear": lambda s: LinearScheduler(s, "beta", 1.0, 7),
    "step": lambda s: StepScheduler(s, "beta", gamma=1.3, n_steps=2, max_value=0.8),
    "list": lambda s: SchedulerList([StepScheduler(s, "beta", gamma=1.1, n_steps=3)]),
}


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("before", [0, 1, 3, 8])
def test_loaded_schedule_continues_at_its_step(kind: str, before: int) -> None:
    """Also where the new scheduler begins at a sampler that has been restored already."""

    def run(scheduler: Any, sampler: Any, steps: int) -> list[float]:
        values = []
        for _ in range(steps):
            scheduler.step()
            values.append(sampler.beta)
        return values

    whole = PrioritizedSampler(alpha=0.5, beta=0.4)
    expected = run(MAKERS[kind](whole), whole, before + 6)
    first = PrioritizedSampler(alpha=0.5, beta=0.4)
    scheduler = MAKERS[kind](first)
    run(scheduler, first, before)
    saved = json.loads(json.dumps(scheduler.state_dict()))
    second = PrioritizedSampler(alpha=0.5, beta=first.beta)
    restored = MAKERS[kind](second)
    restored.load_state_dict(saved)
    assert run(restored, second, 6) == expected[before:]


WRONG: dict[str, dict[str, Any]] = {
    "linear": {"initial": "abc", "num_steps": 0, "final_value": None, "min_value": "0"},
    "step": {"mode": 3},
}


@pytest.mark.parametrize("kind", MAKERS)
def test_states_of_other_schedulers_are_refused(kind: str, sampler: Any) -> None:
    """And states that no scheduler gave."""
    scheduler = MAKERS[kind](sampler)
    scheduler.step()
    before = scheduler.state_dict()
    inner = before["schedulers"][0] if kind == "list" else before
    wrong = [{**inner, "steps": -1}, {**inner, "param_name": "alpha"}, {}, None]
    states = [{"schedulers": [state]} if kind == "list" else state for state in wrong]
    states += [make(sampler).state_dict() for other, make in MAKERS.items() if other != kind]
    for state in states:
        refuses(ValueError, "expected", scheduler.load_state_dict, state)
    for name, value in WRONG.get(kind, {}).items():
        state = {**before, name: value}
        refuses(ValueError, f"expected {name} as", scheduler.load_state_dict, state)
    assert scheduler.state_dict() == before


def test_custom_scheduler_computes_values_and_saves_state(sampler: Any) -> None:
    class Sawtooth(ParameterScheduler):
        configuration = ("teeth",)

        def __init__(self, obj: Any, teeth: int) -> None:
            super().__init__(obj, "beta", max_value=1.0)
            self.teeth = teeth

        def value(self, step: int, current: float) -> float:
            return self.initial * (step % self.teeth)

    scheduler = Sawtooth(sampler, 3)
    assert betas(scheduler, 4) == pytest.approx([0.4, 0.8, 0.0, 0.4])
    assert scheduler.state_dict()["teeth"] == 3
    assert repr(scheduler) == "Sawtooth('beta', steps=4)"


def test_custom_scheduler_may_return_any_value_that_the_attribute_accepts() -> None:
    class Given(ParameterScheduler):
        def value(self, step: int, current: Any) -> Any:
            return given[step - 1]

    class Weighted(RandomSampler):
        weights: Any = 1.0

    given: list[Any] = [[0.25, 0.75], np.array([0.5, 0.5]), torch.tensor([3, 2**40 + 1]), None]
    sampler = Weighted()
    scheduler = Given(sampler, "weights")
    for value in given:
        sampler.weights = 1.0
        scheduler.step()
        assert sampler.weights is value
    sampler.weights, given = 1.0, [torch.tensor([3, 7])]
    Given(sampler, "weights", max_value=5).step()
    assert sampler.weights.dtype is torch.int64
    assert sampler.weights.tolist() == [3, 5]


def test_the_state_names_neither_sampler_nor_function() -> None:
    buffer = ReplayBuffer(sampler=PrioritizedSampler(alpha=0.5, beta=0.4))
    state = LambdaScheduler(buffer, "beta", lambda step: step).state_dict()
    assert all(isinstance(value, (str, int, float, type(None))) for value in state.values())
