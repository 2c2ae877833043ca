"""Rows that tell which they are, and how often each was drawn, against exact laws."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from replaykit import PrioritizedSampler

Array = np.ndarray[Any, Any]

FAR = 4.0
"""Standard deviations of chi-square that one law is never away from itself with these seeds."""


def chi_square(found: Array, expected: Array) -> float:
    """How far counts are from what is expected, in standard deviations of chi-square."""
    assert found.sum() == pytest.approx(expected.sum())
    assert not found[expected == 0].any()
    there = expected > 0
    value = ((found[there] - expected[there]) ** 2 / expected[there]).sum()
    freedom = there.sum() - 1
    return float((value - freedom) / np.sqrt(2 * freedom))


@contextlib.contextmanager
def running(*works: Callable[[], Any]) -> Iterator[list[BaseException]]:
    """Run functions in threads; at the end wait for all of them, and expect no error of any."""
    failed: list[BaseException] = []

    def guarded(work: Callable[[], Any]) -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    try:
        yield failed
    finally:
        for thread in threads:
            thread.join()
    assert failed == []


def wait_until(true: Callable[[], Any]) -> None:
    """Returns once something is true; fails after a minute."""
    until = time.monotonic() + 60
    while not true():
        assert time.monotonic() < until
        time.sleep(0.001)


def prioritized() -> PrioritizedSampler:
    """Make a sampler that draws rows in proportion to their priorities."""
    return PrioritizedSampler(alpha=1.0, beta=1.0, eps=0.0)


def numbered(first: int, count: int) -> TensorDict:
    """Rows that are numbered by ``x``."""
    return TensorDict({"x": torch.arange(first, first + count)}, [count])


def episodes(lengths: list[int], first: int = 0) -> TensorDict:
    """Rows of whole episodes, one after another; ``x`` numbers them all."""
    ids = torch.repeat_interleave(torch.arange(len(lengths)) + first, torch.tensor(lengths))
    step = torch.cat([torch.arange(length) for length in lengths])
    last = torch.cat([torch.arange(length) == length - 1 for length in lengths])
    rows = {
        "episode": ids,
        "step": step,
        "x": torch.arange(len(ids)) + 1000 * first,
        "next": {"done": last[:, None]},
    }
    return TensorDict(rows, [len(ids)])


def steps(keys: list[int], x: list[int]) -> TensorDict:
    """A row for each key, of episodes that do not end."""
    done = torch.zeros(len(keys), 1, dtype=torch.bool)
    return TensorDict(
        {"k": torch.tensor(keys), "x": torch.tensor(x), "next": {"done": done}}, [len(keys)]
    )


def windows(rb: Any) -> set[tuple[int, ...]]:
    """All windows of two rows, by as many draws as never miss one of 30."""
    return {tuple(pair) for pair in rb.sample(2000)["x"].reshape(-1, 2).tolist()}


def check_law(buffer: Any, draws: int, batch: int, weights: Array) -> None:
    """Assert that rows are drawn, or windows begin, as often as their weights say."""
    found = counts(buffer, draws, batch, len(weights))
    assert abs(chi_square(found, found.sum() * weights / weights.sum())) < FAR


def counts(buffer: Any, draws: int, batch: int, rows: int, key: str = "x") -> Array:
    """How often each row came first in a window of a sample, or was drawn."""
    found = np.zeros(rows, np.int64)
    for _ in range(draws // batch):
        sample = buffer.sample(batch)
        if "sequence_id" in sample:
            window = sample["sequence_id"]
            first = torch.ones_like(window, dtype=torch.bool)
            first[1:] = window[1:] != window[:-1]
            sample = sample[first]
        found += np.bincount(sample[key].numpy(), minlength=rows)
    return found
