"""Ensembles that others use at the same time: threads, and processes that share the rows."""

from __future__ import annotations

import functools
import multiprocessing
import threading
from typing import Any

import pytest
import torch

from replaykit import (
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
)
from tests.distributed.laws import running
from tests.mixture.members import check_rows, make_ensemble, make_member, rows_of, same
from tests.support.refusals import refuses


def test_one_thread_writes_others_sample_and_save(tmp_path: Any) -> None:
    ensemble = make_ensemble([20, 20], p=[1, 1], num_buffer_sampled=4, batch_size=8, prefetch=2)
    inner = ReplayBufferEnsemble(ensemble, make_member(0), sample_from_all=True)

    def work(step: Any) -> None:
        for number in range(40):
            step(number)

    def write(number: int) -> None:
        member = number % 2
        ensemble[member].extend(rows_of(member, 10, start=10 * (number % 5)))

    def sample(_: int) -> None:
        batch = ensemble.sample()
        ids = batch["index", "buffer_ids"]
        assert (batch["id"] // 1000 == ids).all()
        assert (batch["observation"][..., 0] == batch["id"] % 1000).all()  # no row half written
        ensemble.update_tensordict_priority(batch)

    def save(number: int) -> None:
        if number % 10 == 0:
            ensemble.dumps(tmp_path)
            ensemble.state_dict()
            inner.sample(16)

    with running(*(functools.partial(work, step) for step in (write, sample, sample, save))):
        pass
    ensemble.shutdown()


def test_threads_share_one_pass() -> None:
    ensemble = make_ensemble([40, 40], [SamplerWithoutReplacement] * 2, sample_from_all=True)
    found: list[torch.Tensor] = []

    def draw() -> None:
        found.extend(ensemble.sample(8)["id"] for _ in range(5))

    with running(draw, draw):
        pass
    ids = torch.cat(found, 1).sort(1).values
    assert ids.tolist() == [list(range(40)), list(range(1000, 1040))]


def test_ensembles_over_the_same_ones_are_saved_at_the_same_time() -> None:
    """In whatever order they name them: locks are taken in one order."""
    below = [make_ensemble([5, 5], seed=None, sample_from_all=True) for _ in range(3)]
    above = [
        ReplayBufferEnsemble(*below, sample_from_all=True),
        ReplayBufferEnsemble(*reversed(below), sample_from_all=True),
    ]

    def work(ensemble: ReplayBufferEnsemble) -> None:
        for _ in range(30):
            ensemble.state_dict()
            ensemble.sample(12)

    threads = [threading.Thread(target=work, args=(one,), daemon=True) for one in (*above, *below)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)


def _write_there(ensemble: ReplayBufferEnsemble, answers: Any) -> None:
    ensemble[0].extend(rows_of(0, 10, start=10))
    batch = ensemble.sample(8)
    check_rows(batch)
    answers.put(int(ensemble[0].stats()["size"]))


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_processes_write_and_sample_the_same_rows(method: str) -> None:
    members = [make_member(number, 10, shared=True) for number in range(2)]
    ensemble = ReplayBufferEnsemble(*members, shared=True, sample_from_all=True)
    context: Any = multiprocessing.get_context(method)
    answers = context.Queue()
    process = context.Process(target=_write_there, args=(ensemble, answers))
    process.start()
    assert answers.get(timeout=120) == 20
    process.join(60)
    assert process.exitcode == 0
    assert len(ensemble[0]) == 20
    assert ensemble[0][10:20]["id"].tolist() == list(range(10, 20))
    check_rows(ensemble.sample(8))


def test_members_that_are_not_shared_are_not_handed_over() -> None:
    ensemble = make_ensemble([5, 5])
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_write_there, args=(ensemble, None))
    refuses(RuntimeError, "spawned process", process.start)


def test_forked_process_prepares_separate_batches() -> None:
    ensemble = make_ensemble([9, 9], batch_size=4, prefetch=2)
    first = ensemble.sample()
    context: Any = multiprocessing.get_context("fork")
    answers = context.Queue()

    def child() -> None:
        answers.put(int(ensemble.sample()["id"].sum()))
        ensemble.shutdown()

    process = context.Process(target=child)
    process.start()
    there = answers.get(timeout=60)
    process.join(60)
    assert there == int(ensemble.sample()["id"].sum())
    assert not same(first, ensemble.sample())
    ensemble.shutdown()
