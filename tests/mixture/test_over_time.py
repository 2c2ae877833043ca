"""Mixtures whose members join by minimums, epochs and functions of the step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from replaykit import (
    JointBatch,
    LazyTensorStorage,
    Ramp,
    ReplayBuffer,
    ReplayBufferEnsemble,
    ScheduledChoice,
    ShardedReplayBuffer,
    SliceSampler,
)
from replaykit.errors import NotReady
from tests.buffer.workers import WORKER_MARKS, no_process_is_left
from tests.mixture.members import make_ensemble, make_member, rows_of
from tests.mixture.test_weights import CRITICAL
from tests.support.refusals import refuses

__all__ = ["no_process_is_left"]

pytestmark = WORKER_MARKS


def members_in(batches: Any) -> list[int]:
    return torch.cat([batch["index", "buffer_ids"].flatten() for batch in batches]).tolist()


def check_share(found: list[int], share: float) -> None:
    """Chi-square of two members."""
    count, ones = len(found), sum(found)
    statistic = (ones - share * count) ** 2 / (count * share * (1 - share))
    assert statistic < CRITICAL[1], (ones / count, share)


def ramped(**arguments: Any) -> ReplayBufferEnsemble:
    return make_ensemble(
        [20, 0], p=[0.8, 0.2], ramp=Ramp(5), num_buffer_sampled=50, batch_size=50, **arguments
    )


@pytest.mark.acceptance("S21", "C44", "F37")
@pytest.mark.parametrize("first", ["write", "epoch"])
def test_a_member_that_is_ready_later_ramps_up(first: str) -> None:
    mixture = ramped()
    shares = []
    for epoch in range(9):
        if epoch == 3 and first == "write":
            mixture[1].extend(rows_of(1, 20))
        mixture.set_epoch(epoch)
        if epoch == 3 and first == "epoch":
            mixture[1].extend(rows_of(1, 20))
        shares.append(round(mixture.sampler.shares()[1].item(), 3))
    assert shares == [0, 0, 0, 0.048, 0.091, 0.130, 0.167, 0.2, 0.2]


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        (None, [[0.5, 0.5]] * 3),
        (0.9, [[0.5, 0.5]] * 3),
        ([1.0, 0.0], [[0.75, 0.25], [0.5, 0.5], [0.5, 0.5]]),
    ],
)
def test_members_that_are_ready_from_the_start_ramp_only_from_a_given_weight(
    start: Any, expected: list[list[float]]
) -> None:
    mixture = make_ensemble([20, 20], p=[0.5, 0.5], ramp=Ramp(2, start))
    for epoch, shares in enumerate(expected):
        mixture.set_epoch(epoch)
        assert mixture.sampler.shares().tolist() == pytest.approx(shares)


@pytest.mark.acceptance("S21")
@pytest.mark.parametrize("workers", [0, 2])
def test_drawn_shares_follow_a_ramp(workers: int) -> None:
    mixture = ramped()
    mixture[1].extend(rows_of(1, 20))
    mixture.set_epoch(1)
    check_share(members_in(mixture.dataloader(workers=workers, steps=80)), 0.04 / 0.84)


@pytest.mark.parametrize("workers", [0, 2])
def test_drawn_shares_follow_a_function_of_the_step(workers: int) -> None:
    mixture = make_ensemble(
        [20, 20], p=lambda step: [1, 0] if step % 3 else [0.25, 0.75], num_buffer_sampled=50
    )
    batches = list(mixture.dataloader(50, workers=workers, steps=90, seed=1))
    check_share(members_in(batches[::3]), 0.75)
    assert sum(members_in(batches[1::3] + batches[2::3])) == 0
    loader = mixture.dataloader(50, workers=workers, steps=5, seed=1)
    loader.load_state_dict({**loader.state_dict(), "step": 1})
    assert [max(members_in([batch])) for batch in loader] == [0, 0, 1, 0]


@pytest.mark.parametrize(
    ("minimum", "rows_below"),
    [(7, 6), ((7, "rows"), 6), ((3, "episodes"), 10), ((8, "windows"), 19)],
)
def test_a_member_below_its_minimum_is_not_drawn(minimum: Any, rows_below: int) -> None:
    """Episodes of 5 rows have two windows of 4 rows."""
    mixture = make_ensemble(
        [20, rows_below],
        [lambda: SliceSampler(slice_len=4)] * 2,
        ready=[None, minimum],
        num_buffer_sampled=8,
        batch_size=32,
    )
    assert set(members_in([mixture.sample() for _ in range(9)])) == {0}
    mixture[1].extend(rows_of(1, 1, rows_below))
    assert set(members_in([mixture.sample() for _ in range(9)])) == {0, 1}


@pytest.mark.acceptance("C43", "C49", "F31")
def test_an_error_names_the_missing_counts() -> None:
    mixture = make_ensemble([4, 5], p=[1, 0], ready=[(3, "episodes"), None], batch_size=2)
    refuses(NotReady, "member 0 has 1 of 3 episodes, member 1 has 5 of 1 rows", mixture.sample)
    assert not mixture.can_sample()
    with pytest.raises(NotReady):
        make_ensemble([0], ready=[5], batch_size=2).sample()


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda one, two: Ramp(0), ValueError, "epochs"),
        (lambda one, two: Ramp(1.5), ValueError, "epochs"),  # type: ignore[arg-type]
        (lambda one, two: Ramp(1, -0.1), ValueError, "start"),
        (lambda one, two: ScheduledChoice(one, two), TypeError, "p"),
        (lambda one, two: ScheduledChoice(one, two, 0.5, every=2), TypeError, "every"),
        (lambda one, two: ScheduledChoice(one, two, 1.5), ValueError, "1.5"),
        (lambda one, two: ScheduledChoice(one, two, every=0), ValueError, "every"),
        (lambda one, two: JointBatch({}), ValueError, "different groups"),
        (lambda one, two: JointBatch([("a", one), ("a", two)]), ValueError, "'a'"),
        (lambda one, two: JointBatch({"batch_size": one}), ValueError, "batch_size"),
        (lambda one, two: JointBatch({"a": 3}), TypeError, "'a'"),
        (lambda one, two: JointBatch({"a": one}, every={"b": 2}), KeyError, "'b'"),
        (lambda one, two: JointBatch({"a": one}, every={"a": 0}), ValueError, "'a'"),
    ],
)
def test_invalid_arguments_are_refused(make: Any, error: type[Exception], words: str) -> None:
    refuses(error, words, make, make_member(0), make_member(1))


def test_a_function_is_checked_when_it_is_evaluated() -> None:
    choice = ScheduledChoice(make_member(0), make_member(1), lambda step: 1.0 + step, batch_size=2)
    choice.sample()
    refuses(ValueError, "for batch 1", choice.sample)
    mixture = make_ensemble([4, 4], p=lambda step: [1, 1] if step < 1 else [1], batch_size=2)
    mixture.sample()
    refuses(ValueError, "2 weights", mixture.sample)
    refuses(ValueError, "epoch", mixture.set_epoch, -1)


def test_a_remote_member_has_a_minimum_of_rows() -> None:
    with ShardedReplayBuffer(
        num_shards=1, storage=lambda: LazyTensorStorage(50), backend="local"
    ) as online:
        with pytest.raises(ValueError, match="member 1 in rows"):
            ReplayBufferEnsemble(make_member(0), online, ready=[None, (1, "episodes")])
        mixture = ReplayBufferEnsemble(
            make_member(0), online, ready=[None, 6], num_buffer_sampled=16, batch_size=16
        )
        online.extend(rows_of(1, 5))
        assert set(members_in([mixture.sample()])) == {0}
        online.extend(rows_of(1, 5))
        assert set(members_in([mixture.sample()])) == {0, 1}


@pytest.mark.parametrize("prefetch", [0, 3])
def test_a_saved_mixture_continues_at_its_step_and_epoch(tmp_path: Any, prefetch: int) -> None:
    def make(seed: int) -> ReplayBufferEnsemble:
        mixture = make_ensemble(
            [20, 20, 0],
            p=lambda step: [1 + step, 3, 2],
            ramp=Ramp(9),
            num_buffer_sampled=10,
            batch_size=10,
            prefetch=prefetch,
            seed=seed,
        )
        mixture[2].extend(rows_of(2, 9))
        return mixture

    mixture, other = make(0), make(1)
    mixture.set_epoch(4)
    for _ in range(5):
        mixture.sample()
    mixture.dumps(tmp_path)
    other.loads(tmp_path)
    assert other.sampler.shares().tolist() == mixture.sampler.shares().tolist()
    assert other.sampler.weights.step == 5
    following = [mixture.sample() for _ in range(3)]
    assert members_in(following) == members_in([other.sample() for _ in range(3)])
    third = make(2)
    third.load_state_dict(mixture.state_dict())
    assert third.sampler.weights.step == 8
    with pytest.raises(ValueError, match="that of a function"):
        make_ensemble([20, 20, 0], p=[1, 1, 1]).load_state_dict(mixture.state_dict())
    assert mixture[1:].sampler.p(0).tolist() == pytest.approx([1 / 2, 1 / 3])


def test_a_batch_that_failed_keeps_its_number() -> None:
    choice = ScheduledChoice(make_member(0), make_member(1, rows=0), every=2, batch_size=4)
    assert set(members_in([choice.sample()])) == {0}
    for _ in range(2):
        refuses(RuntimeError, "member 1", choice.sample)
    choice[1].extend(rows_of(1, 5))
    assert set(members_in([choice.sample()])) == {1}


def test_an_ensemble_of_some_members_keeps_the_step_and_the_epoch() -> None:
    """The weights of members 1 and 0 are those in the whole ensemble, divided by their sum."""
    by_step = make_ensemble([20] * 3, p=lambda step: [1.0, step, 0.0], batch_size=3)
    for _ in range(4):
        by_step.sample()
    by_epoch = make_ensemble([20, 0, 20], p=[0.5, 0.25, 0.25], ramp=Ramp(5), batch_size=3)
    by_epoch[1].extend(rows_of(1, 20))
    by_epoch.set_epoch(1)  # the first epoch with member 1
    for mixture, weights in ((by_step, [4, 1]), (by_epoch, [0.25 / 5, 0.5])):
        wanted = torch.tensor(weights, dtype=torch.float64) / sum(weights)
        torch.testing.assert_close(mixture[[1, 0]].sampler.shares(), wanted)
    sampler = by_step.sampler
    torch.testing.assert_close(sampler[:2].shares(), sampler.shares()[:2])


@pytest.mark.acceptance("C46")
def test_whole_batches_are_chosen_by_schedule() -> None:
    options = {"batch_size": 2, "generator": torch.Generator().manual_seed(0)}
    choice = ScheduledChoice(make_member(0), make_member(1), lambda step: step / 999, **options)
    found = members_in([choice.sample()[:, :1] for _ in range(1000)])
    ramp = torch.arange(1000) / 999
    error = (1 - torch.tensor(found).float()) - ramp
    assert error.sum().abs() < 3.3 * (ramp * (1 - ramp)).sum().sqrt()
    late = error[500:].sum().abs()
    assert late < 3.3 * (ramp * (1 - ramp))[500:].sum().sqrt()


def joint(**arguments: Any) -> JointBatch:
    members = {name: make_member(n, 20, batch_size=6 - 4 * n) for n, name in enumerate("ab")}
    return JointBatch(members, **arguments)


@pytest.mark.acceptance("S34", "C45", "F47")
def test_a_joint_batch_has_a_batch_of_each_group() -> None:
    batches = joint(every={"b": 3})
    for step, batch in zip(range(5), batches, strict=False):
        assert ("b" in batch) == (step % 3 == 0)
        assert batch["batch_size"] == (8 if step % 3 == 0 else 6)
        assert (batch["a", "id"] == batch["a", "index"]).all()
    other = joint(every={"b": 3})
    other.load_state_dict(batches.state_dict())
    assert "b" not in next(iter(other))
    assert "b" in next(iter(other))
    refuses(ValueError, "step", other.load_state_dict, {})
    assert joint(group="all").sample()["all", "b", "id"].shape == (2,)
    mixed = JointBatch(
        [("m", make_ensemble([9, 9], batch_size=8)), ("t", ReplayBuffer(batch_size=2))]
    )
    mixed.members["t"].extend(torch.arange(3))
    assert mixed.sample()["batch_size"] == 10


def test_a_joint_batch_without_enough_data_draws_nothing() -> None:
    batches = JointBatch({"a": make_member(0, batch_size=3), "b": make_member(1, 0, batch_size=2)})
    assert not batches.can_sample()
    before = batches.members["a"].state_dict()
    refuses(NotReady, "'b'", next, iter(batches))
    assert batches.step == 0
    assert str(before) == str(batches.members["a"].state_dict())
