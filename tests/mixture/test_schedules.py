"""Weights that change step by step."""

from __future__ import annotations

import pytest
import torch

from replaykit import LambdaScheduler, LinearScheduler, PrioritizedSampler, StepScheduler
from tests.mixture.members import make_ensemble, make_member
from tests.support.refusals import refuses


def test_weights_go_in_a_straight_line() -> None:
    ensemble = make_ensemble([5, 5], p=[1, 0], num_buffer_sampled=4, counts="exact")
    schedule = LinearScheduler(ensemble, "p", [0.5, 0.5], 2)
    found = [ensemble.sample(4)["index", "buffer_ids"][:, 0].tolist()]
    for _ in range(3):
        schedule.step()
        found.append(ensemble.sample(4)["index", "buffer_ids"][:, 0].tolist())
    assert found == [[0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 1, 1], [0, 0, 1, 1]]
    assert ensemble.sampler.p.tolist() == [0.5, 0.5]


def test_schedule_continues_from_its_saved_state() -> None:
    ensemble, other = (make_ensemble([5, 5], p=[1, 0]) for _ in range(2))
    schedule, again = (LinearScheduler(one, "p", [0, 1], 8) for one in (ensemble, other))
    for _ in range(3):
        schedule.step()
    other.load_state_dict(ensemble.state_dict())
    again.load_state_dict(schedule.state_dict())
    for _ in range(6):
        assert torch.equal(ensemble.sampler.p, other.sampler.p)
        schedule.step()
        again.step()
    assert ensemble.sampler.p.tolist() == [0, 1]


def test_schedulers_take_a_factor_for_each_weight() -> None:
    ensemble = make_ensemble([5, 5], p=[1, 1])
    step = StepScheduler(ensemble, "p", gamma=[0.5, 1.0])
    step.step()
    assert torch.allclose(ensemble.sampler.p, torch.tensor([1 / 3, 2 / 3]).double())
    by_function = LambdaScheduler(ensemble, "p", lambda k: torch.tensor([0.0, k]))
    by_function.step()
    assert ensemble.sampler.p.tolist() == [0, 1]
    floor = LambdaScheduler(
        make_ensemble([5, 5], p=[1, 1]), "p", lambda k: [0.0, 1.0], min_value=0.1
    )
    floor.step()
    assert torch.allclose(floor.sampler.p, torch.tensor([1 / 6, 5 / 6]).double())  # type: ignore[attr-defined]


def test_a_step_that_is_refused_changes_nothing() -> None:
    ensemble = make_ensemble([5, 5], p=[1, 3])
    schedule = LambdaScheduler(ensemble, "p", lambda k: [-1.0, 1.0])
    refuses(ValueError, "not negative", schedule.step)
    assert (schedule.steps, ensemble.sampler.p.tolist()) == (0, [0.25, 0.75])


def test_invalid_schedules_of_weights_are_refused() -> None:
    ensemble = make_ensemble([5, 5])
    with pytest.raises(ValueError, match="'p' of SamplerEnsemble to be a number"):
        LinearScheduler(ensemble, "p", [1, 0], 5)
    ensemble = make_ensemble([5, 5], p=[1, 1])
    with pytest.raises(ValueError, match="final_value as a number or 2"):
        LinearScheduler(ensemble, "p", [1, 0, 0], 5)
    member = make_member(0, sampler=PrioritizedSampler(alpha=1, beta=1))
    refuses(ValueError, "gamma as a number", StepScheduler, member, "beta", gamma=[1.0, 2.0])
    schedule = LinearScheduler(ensemble, "p", [1, 0], 5)
    state = schedule.state_dict()
    assert state["initial"] == [0.5, 0.5]
    for wrong in ([0.5], [0.5, "a"], [0.5, 0.5, 0.5]):
        refuses(ValueError, "initial", schedule.load_state_dict, {**state, "initial": wrong})


def test_members_can_be_scheduled_separately() -> None:
    ensemble = make_ensemble([5, 5], [lambda: PrioritizedSampler(alpha=1, beta=0.5)] * 2)
    LinearScheduler(ensemble[1], "beta", 1.0, 1).step()
    assert (ensemble[0].sampler.beta, ensemble[1].sampler.beta) == (0.5, 1.0)
