"""Larger batches are gathered by threads of the core: rows are those of the moment of the draw."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    LazyTensorStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    Sampler,
    SamplerWithoutReplacement,
    native,
)
from replaykit.buffer.draw import reads_now
from tests.buffer.building import same

ROWS, WIDE, BATCH = 120, 3000, 64


def rows(first: int, count: int = ROWS, shape: tuple[int, ...] = ()) -> TensorDict:
    """Rows of which every value says which they are."""
    number = (
        torch.arange(first, first + count).view(count, *(1 for _ in shape)).expand(count, *shape)
    )
    batch = [count, *shape]
    wide = number[..., None].expand(*batch, WIDE).to(torch.float32)
    return TensorDict({"id": number.clone(), "wide": wide.clone()}, batch)


def made(
    sampler: Callable[[], Sampler] = RandomSampler, prefetch: int | None = 2, **options: Any
) -> ReplayBuffer:
    ndim = options.pop("ndim", 1)
    rb = ReplayBuffer(
        storage=LazyTensorStorage(ROWS * (1 if ndim == 1 else 2), ndim=ndim),
        sampler=sampler(),
        batch_size=BATCH,
        prefetch=prefetch,
        generator=torch.Generator().manual_seed(2),
        **options,
    )
    rb.extend(rows(0, shape=() if ndim == 1 else (2,)))
    if prefetch:
        assert reads_now(rb)
    return rb


def whole(batch: Any) -> bool:
    """Whether each row is one that was written."""
    return bool((batch["wide"] == batch["id"][..., None]).all())


@pytest.mark.parametrize(
    ("sampler", "options"),
    [
        (RandomSampler, {}),
        (RandomSampler, {"contiguous": True}),
        (RandomSampler, {"ndim": 2}),
        (SamplerWithoutReplacement, {}),
        (lambda: PrioritizedSampler(ROWS, 0.7, 0.5), {}),
    ],
)
def test_prefetch_does_not_change_the_batches(
    sampler: Callable[[], Sampler], options: dict[str, Any]
) -> None:
    direct, ahead = (made(sampler, n, **options) for n in (None, 2))
    for _ in range(12):
        batch = ahead.sample()
        same(direct.sample(), batch)
        assert whole(batch)
    ahead.shutdown()


def overwritten(rb: ReplayBuffer, step: int) -> None:
    rb.extend(rows(ROWS * (step + 1)))


def assigned(rb: ReplayBuffer, step: int) -> None:
    rb[torch.arange(ROWS)] = rows(ROWS * (step + 1))


def written_through_a_view(rb: ReplayBuffer, step: int) -> None:
    view = rb[:]
    view["id"].add_(ROWS)
    view["wide"].add_(ROWS)


def put(rb: ReplayBuffer, step: int) -> None:
    for key, value in rows(ROWS * (step + 1)).items():
        rb.set_(key, value)


def emptied(rb: ReplayBuffer, step: int) -> None:
    rb.empty()
    rb.extend(rows(ROWS * (step + 1)))


@pytest.mark.parametrize("change", [overwritten, assigned, written_through_a_view, put, emptied])
def test_changes_wait_until_pending_reads_end(
    change: Callable[[ReplayBuffer, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batches are those of draws that threads have made, of the rows before the change."""
    runs: list[list[Any]] = []
    for threads in (False, True):
        with monkeypatch.context() as patch:
            if threads:
                patch.setattr("replaykit.buffer.draw.reads_now", lambda buffer: False)
            rb, found = made() if not threads else _by_threads(), []
            for step in range(8):
                found.append(rb.sample())
                change(rb, step)
                assert whole(found[-1])
            rb.shutdown()
        runs.append(found)
    for pair in zip(*runs, strict=True):
        same(*pair)


def _by_threads() -> ReplayBuffer:
    rb = ReplayBuffer(
        storage=LazyTensorStorage(ROWS),
        batch_size=BATCH,
        prefetch=2,
        generator=torch.Generator().manual_seed(2),
    )
    rb.extend(rows(0))
    return rb


def test_concurrent_writes_leave_sampled_rows_whole() -> None:
    rb, stop = made(prefetch=3), threading.Event()

    def write() -> None:
        turn = 0
        while not stop.is_set():
            rb.extend(rows(ROWS * turn, 40))
            turn += 1

    writers = [threading.Thread(target=write) for _ in range(2)]
    for writer in writers:
        writer.start()
    try:
        for _ in range(60):
            assert whole(rb.sample())
    finally:
        stop.set()
        for writer in writers:
            writer.join(20)
    rb.shutdown()


def test_copies_and_saves_while_rows_are_read(tmp_path: Path) -> None:
    rb = made()
    rb.sample()
    other = made(prefetch=2)
    others = [pickle.loads(pickle.dumps(rb)), copy.deepcopy(rb), other]
    rb.dumps(tmp_path / "saved")
    other.loads(tmp_path / "saved")
    for _ in range(4):
        batch = rb.sample()
        for one in others:
            same(batch, one.sample())
    for one in (rb, *others):
        one.shutdown()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_forked_process_reads_the_prefetched_draws() -> None:
    direct, ahead = (made(prefetch=n) for n in (None, 3))
    for rb in (direct, ahead):
        rb.sample()

    def agree() -> bool:
        for _ in range(6):
            batch = ahead.sample()
            if not whole(batch) or not bool((direct.sample()["index"] == batch["index"]).all()):
                return False
        ahead.extend(rows(ROWS))  # nobody reads any more, or they are read here
        return whole(ahead.sample())

    if not (child := os.fork()):
        try:
            torch.set_num_threads(1)  # the others are not here
            os._exit(0 if agree() else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert agree()
    ahead.shutdown()


def test_batches_that_are_dropped_take_their_memory_with_them() -> None:
    for _ in range(5):
        rb = made(prefetch=3)
        rb.sample()
        queue, storage = weakref.ref(rb), weakref.ref(rb.storage)
        del rb
        gc.collect()
        assert queue() is None
        assert storage() is None


# -- the core's own arguments ---------------------------------------------------------------------


def _begun(reads: Any, at: list[int], to: torch.Tensor, kept: Any = None, **other: Any) -> Any:
    column = other.pop("column", COLUMN)
    table = native.Table([column.data_ptr()], [8], [8], len(column))
    index = torch.tensor(at, dtype=torch.int64)
    addresses = [to.data_ptr()] * other.pop("sides", 1)
    limit = other.pop("limit", len(column))
    return reads.begin(
        table, index.data_ptr(), len(index), limit, addresses, [8] * len(addresses), 1, kept
    )


COLUMN = torch.arange(10)


class Kept:
    """Something that can be watched."""


def test_wait_ends_a_gather_and_releases_its_memory() -> None:
    reads, to, kept = native.core.Reads(), torch.zeros(4, dtype=torch.int64), Kept()
    watched = weakref.ref(kept)
    begun = _begun(reads, [9, 0, 3, 3], to, kept)
    del kept
    assert watched() is not None
    reads.wait()
    begun.wait()
    begun.wait()
    assert begun.over
    assert watched() is None
    assert to.tolist() == [9, 0, 3, 3]
    empty = _begun(reads, [], to)
    assert empty.over
    empty.wait()
    reads.wait()


@pytest.mark.parametrize(
    ("at", "options", "error", "said"),
    [
        ([10], {}, IndexError, r"expected rows in \[0, 10\), got 10"),
        ([-1], {}, IndexError, r"got -1"),
        ([5], {"limit": 5}, IndexError, r"expected rows in \[0, 5\), got 5"),
        ([5], {"limit": 11}, ValueError, "expected at most 10 rows, got 11"),
        ([5], {"sides": 2}, ValueError, "an address and a stride for each of 1 fields"),
    ],
)
def test_invalid_gathers_are_refused_before_they_begin(
    at: list[int], options: dict[str, Any], error: type[Exception], said: str
) -> None:
    reads, to = native.core.Reads(), torch.full((4,), -1)
    with pytest.raises(error, match=said):
        _begun(reads, at, to, **options)
    reads.wait()
    assert to.tolist() == [-1] * 4
