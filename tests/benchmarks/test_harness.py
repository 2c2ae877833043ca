"""Statistics on known numbers, and who is timed at all."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from benchmarks.contender import Contender, Mismatch, Unavailable
from benchmarks.harness import Times, compare, ready, take_turns
from benchmarks.laws import expect_frequencies, importance_weights
from tests.support.refusals import refuses


class Fake(Contender):
    """Notes down what happens to it."""

    def __init__(self, name: str, log: list[tuple[str, Any]], error: Exception | None = None):
        self.name = name
        self.log = log
        self.error = error

    def make(self) -> None:
        self.log.append((self.name, "made"))
        if isinstance(self.error, ImportError | Unavailable):
            raise self.error

    def check(self) -> None:
        self.log.append((self.name, "checked"))
        if isinstance(self.error, Mismatch):
            raise self.error

    def inputs(self, calls: int) -> Iterable[Any]:
        return [torch.rand(()).item() for _ in range(calls)]

    def timed(self) -> Callable[[Any], Any]:
        return lambda given: self.log.append((self.name, (given, gc.isenabled())))


def test_a_time_is_the_median_of_rounds_and_p99_is_of_single_calls() -> None:
    times = Times(rounds=[1.0, 9.0, 2.0], calls=[float(us) for us in range(1, 201)])
    assert times.median_us == 2.0
    assert times.p99_us == 198.0


def test_a_ratio_is_that_of_the_same_round() -> None:
    # The second round was slow for both: medians of times would say 2 / 4, rounds say 1 / 4.
    ours = Times([1.0, 100.0, 2.0], [])
    theirs = Times([4.0, 400.0, 1.0], [])
    ratio = compare(ours, theirs)
    assert (ratio.median, ratio.low, ratio.high) == (0.25, 0.25, 2.0)


def test_contenders_take_turns_in_alternating_order() -> None:
    log: list[tuple[str, Any]] = []
    contenders = {name: Fake(name, log) for name in "abc"}
    times = take_turns(contenders, rounds=4, calls=2)
    turns = "".join(name for name, _ in log[-24:])
    assert turns == "aabbccccbbaaaabbccccbbaa"
    assert len(log) == 24 + 3 * 15, "each is called 15 times before the first round"
    for spent in times.values():
        assert len(spent.rounds) == 4
        assert len(spent.calls) == 8
        assert spent.median_us > 0


def test_calls_get_fresh_inputs_and_run_without_garbage_collection() -> None:
    log: list[tuple[str, Any]] = []
    take_turns({"a": Fake("a", log)}, rounds=3, calls=5)
    given = [value for _, (value, _) in log]
    assert len(set(given)) == len(given) == 30
    assert not any(collecting for _, (_, collecting) in log[15:])
    assert gc.isenabled()
    assert not gc.get_freeze_count()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ImportError("no module named fast"), "no module named fast"),
        (Unavailable("needs a newer torch"), "needs a newer torch"),
        (Mismatch("x differs"), "refused, it is not the same work: x differs"),
    ],
)
def test_contender_that_cannot_be_timed_is_named(error: Exception, reason: str) -> None:
    log: list[tuple[str, Any]] = []
    found, absent = ready(Fake("ours", log), [Fake("gone", log, error), Fake("there", log)])
    assert list(found) == ["ours", "there"]
    assert absent == {"gone": reason}


def test_wrong_values_of_replaykit_end_the_measurement() -> None:
    log: list[tuple[str, Any]] = []
    with pytest.raises(Mismatch, match="x differs"):
        ready(Fake("ours", log, Mismatch("x differs")), [Fake("other", log)])
    assert ("other", "made") not in log


def test_frequency_check_rejects_a_wrong_law() -> None:
    draw = torch.Generator().manual_seed(0)
    shares = torch.tensor([1.0, 2.0, 3.0, 4.0])
    counts = torch.multinomial(shares, 50_000, True, generator=draw).bincount(minlength=4)
    expect_frequencies(counts, shares)
    refuses(Mismatch, "chi-square", expect_frequencies, counts, torch.tensor([1.1, 2.0, 3.0, 3.9]))


def test_importance_weights_are_those_computed_by_hand() -> None:
    priorities = torch.tensor([1.0, 2.0, 3.0, 4.0])
    weights = importance_weights(priorities, torch.arange(4), alpha=0.7, beta=0.9, eps=0.0)
    expected = torch.tensor([1.0, 0.646, 0.501, 0.418], dtype=torch.float64)
    torch.testing.assert_close(weights, expected, atol=1e-3, rtol=0)
