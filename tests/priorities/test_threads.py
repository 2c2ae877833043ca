"""Trees shared by threads, and threads that treat small numbers as zero."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from replaykit import SumSegmentTree
from tests import effort

F64 = torch.float64


def run_all(workers: list[Callable[[], None]]) -> None:
    """Runs them side by side; what one raises is raised here."""
    raised: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if raised:
        raise raised[0]


def test_threads_see_whole_batches_of_updates(
    kernel: str, require_rebuilt: Callable[[Any], None]
) -> None:
    """All even slots weigh 1 or all weigh 2, and odd ones nothing; nobody ever sees a mix."""
    capacity = 6000
    even = torch.arange(0, capacity, 2)
    tree = SumSegmentTree(capacity)
    tree.update(even, 1.0)
    until = time.monotonic() + effort.seconds(1.5)

    def write() -> None:
        while time.monotonic() < until:
            tree.update(even, 2.0)
            tree.update_range(0, torch.tensor([1.0, 0.0]).repeat(capacity // 2))

    def read(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        while time.monotonic() < until:
            index, weight = tree.draw(500, generator=generator, stratified=bool(seed % 2))
            assert not bool((index % 2).any())
            assert weight.unique().tolist() in ([1], [2])
            assert tree.total in (capacity // 2, capacity)
            assert tree.leaves.unique().tolist() in ([0, 1], [0, 2])
            assert len(tree[even].unique()) == 1
            sums = tree.reduce(torch.tensor([0, 0]), torch.tensor([capacity, 100]))
            assert sums.tolist() in ([3000, 50], [6000, 100])

    run_all([write, write, lambda: read(3), lambda: read(4)])
    require_rebuilt(tree)


def test_other_threads_run_during_a_rebuild(kernel: str) -> None:
    """The interpreter's lock is not held: another thread runs five times in one rebuild."""
    tree = SumSegmentTree(4_000_000)
    tree.fill(1.0)
    ticks: Counter[int] = Counter()
    number, until = 0, time.monotonic() + 60

    def rebuild() -> None:
        nonlocal number
        while max(ticks.values(), default=0) < 5 and time.monotonic() < until:
            number += 1
            tree.rebuild()
        number = 0

    number = 1
    thread = threading.Thread(target=rebuild)
    thread.start()
    while number:
        ticks[number] += 1
        time.sleep(0)
    thread.join()
    assert max(ticks.values()) >= 5
    assert tree.total == 4_000_000


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draws_do_not_depend_on_flushing_of_denormals(kernel: str, dtype: torch.dtype) -> None:
    """Weights around the smallest normal number, and with a sign, set and drawn in both modes."""
    tiny = torch.finfo(dtype).tiny
    # Made in the usual mode; the other could not write them down.
    negatives = [
        torch.tensor([1.0, -torch.finfo(source).tiny / 2], dtype=source)
        for source in (torch.float32, torch.float64)
    ]
    weights = torch.tensor([tiny, tiny / 2, 3 * tiny, tiny * 0.999, 1e-30 * tiny, 0], dtype=dtype)

    def results() -> Any:
        tree = SumSegmentTree(60, dtype=dtype)
        tree.load(weights.repeat(10))
        refused = 0
        for negative in negatives:
            try:
                tree.update([0, 1], negative)
            except ValueError:
                refused += 1
        index, weight = tree.draw(2000, generator=torch.Generator().manual_seed(5))
        return refused, tree.leaves.tolist(), tree.total, index.tolist(), weight.tolist()

    usual = results()
    flushed = []

    def flush() -> None:
        assert torch.set_flush_denormal(True)
        try:
            flushed.append(results())
        finally:
            torch.set_flush_denormal(False)

    run_all([flush])
    assert flushed == [usual]
    assert usual[0] == 2
    assert sum(weight > 0 for weight in usual[1]) == 20
