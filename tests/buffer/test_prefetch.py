"""Batches drawn ahead: the same ones in the same order, by whichever threads they are read."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from replaykit import (
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    RoundRobinWriter,
    Sampler,
    SamplerWithoutReplacement,
    Sequence,
    SliceSampler,
    native,
)
from replaykit.buffer.draw import reads_now
from replaykit.storages.row_kernels import NativeRows
from tests.buffer.building import CountingSampler, buffer_of, eventually, rows, same, storage_of
from tests.support.refusals import refuses

ROWS = 120


@pytest.fixture(params=["caller", "core", "threads"])
def mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The reader of a batch: the caller, the core or threads of Python."""
    if request.param == "threads":
        monkeypatch.setattr("replaykit.buffer.draw.reads_now", lambda buffer: False)
    return request.param


def numbered(mode: str, first: int, count: int = ROWS, shape: tuple[int, ...] = ()) -> TensorDict:
    """Rows of which every value says which they are; those for the core are wide."""
    number = torch.arange(first, first + count).view(count, *(1 for _ in shape))
    number = number.expand(count, *shape)
    wide = number[..., None].expand(*number.shape, 3000 if mode == "core" else 2)
    done = (number % 10 == 9)[..., None]
    columns = {"id": number.clone(), "wide": wide.float(), "next": {"done": done}}
    return TensorDict(columns, number.shape)


def made(
    mode: str,
    sampler: Callable[[], Sampler] = RandomSampler,
    prefetch: int | None = 2,
    *,
    ndim: int = 1,
    **options: Any,
) -> ReplayBuffer:
    rb = ReplayBuffer(
        storage=LazyTensorStorage(ROWS * ndim, ndim=ndim),
        sampler=sampler(),
        batch_size=64 if mode == "core" else 8,
        prefetch=prefetch,
        generator=torch.Generator().manual_seed(2),
        **options,
    )
    rb.extend(numbered(mode, 0, shape=() if ndim == 1 else (2,)))
    return rb


def is_whole(batch: Any) -> bool:
    """Return whether each row is one that was written."""
    return bool((batch["wide"] == batch["id"][..., None]).all())


def prefetch_threads() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name.startswith("replaykit-prefetch")}


# -- the same batches -----------------------------------------------------------------------------


@pytest.mark.pitfall("RD2")
@given(
    prefetch=st.integers(1, 8),
    count=st.integers(1, 23),
    batch_size=st.integers(1, 9),
    sampler=st.sampled_from(["random", "without", "ordered", "drop_last", "prioritized"]),
    kind=st.sampled_from(["list", "tensor"]),
)
@settings(max_examples=60, deadline=None)
def test_prefetch_does_not_change_the_batches(
    prefetch: int, count: int, batch_size: int, sampler: str, kind: str
):
    """RD2, G5: draws are made in the order in which they are asked for."""
    batch_size = min(batch_size, count)
    ahead, direct = (
        buffer_of(
            kind,
            30,
            filled=count,
            sampler=sampler,
            batch_size=batch_size,
            seed=5,
            prefetch=depth,
        )
        for depth in (prefetch, None)
    )
    for number in range(3 * (count // batch_size + 2)):
        how = ("sample", "next")[number % 7 == 3]
        same(getattr(direct, how)(), getattr(ahead, how)())
        assert ahead.sampler.ran_out is direct.sampler.ran_out
    ahead.shutdown()


@pytest.mark.covering(2)
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize(
    ("sampler", "options"),
    [
        (RandomSampler, {}),
        (RandomSampler, {"contiguous": True}),
        (RandomSampler, {"ndim": 2}),
        (SamplerWithoutReplacement, {}),
        (lambda: SamplerWithoutReplacement(drop_last=True), {}),
        (lambda: PrioritizedSampler(ROWS, 0.7, 0.5), {}),
        (lambda: SliceSampler(slice_len=4), {}),
        (lambda: PrioritizedSliceSampler(alpha=0.7, beta=0.5, slice_len=4, flat=False), {}),
    ],
)
def test_batches_do_not_depend_on_their_reader(
    mode: str, depth: int, sampler: Callable[[], Sampler], options: dict[str, Any]
) -> None:
    direct, ahead = (made(mode, sampler, n, **options) for n in (None, depth))
    before = prefetch_threads()
    for _ in range(20):
        batch = ahead.sample()
        same(direct.sample(), batch)
        assert is_whole(batch)
        assert direct.sampler.ran_out == ahead.sampler.ran_out
    assert (prefetch_threads() <= before) is (mode != "threads")
    ahead.shutdown()


def overwrite(rb: ReplayBuffer, rows: TensorDict, batch: Any) -> None:
    rb.extend(rows)


def assign(rb: ReplayBuffer, rows: TensorDict, batch: Any) -> None:
    rb[torch.arange(ROWS)] = rows


def write_through_a_view(rb: ReplayBuffer, rows: TensorDict, batch: Any) -> None:
    view = rb[:]
    view["id"].add_(ROWS)
    view["wide"].add_(ROWS)


def put(rb: ReplayBuffer, rows: TensorDict, batch: Any) -> None:
    for key in ("id", "wide"):
        rb.set_(key, rows[key])


def empty(rb: ReplayBuffer, rows: TensorDict, batch: Any) -> None:
    rb.empty()
    rb.extend(rows)


def learn(rb: ReplayBuffer, rows: TensorDict, batch: Any) -> None:
    rb.update_tensordict_priority(batch.clone().set("td_error", batch["id"] * 7.0 % 11))
    rb.extend(rows[:4])
    rb[torch.arange(3)] = rows[4:7]


@pytest.mark.parametrize("change", [overwrite, assign, write_through_a_view, put, empty, learn])
@pytest.mark.parametrize("reader", ["caller", "core"])
def test_changes_wait_until_pending_reads_end(
    reader: str, change: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batches are those of draws that threads have made, of the rows before the change."""
    sampler = RandomSampler
    if change is learn:
        sampler = lambda: PrioritizedSampler(ROWS, 0.7, 0.5)  # noqa: E731
    runs: list[list[Any]] = []
    for threads in (False, True):
        with monkeypatch.context() as patch:
            if threads:
                patch.setattr("replaykit.buffer.draw.reads_now", lambda buffer: False)
            rb, found = made(reader, sampler), []
            assert threads or reads_now(rb)
            for step in range(8):
                found.append(rb.sample())
                change(rb, numbered(reader, ROWS * (step + 1)), found[-1])
                assert is_whole(found[-1])
            rb.shutdown()
        runs.append(found)
    for pair in zip(*runs, strict=True):
        same(*pair)


def test_concurrent_writes_leave_sampled_rows_whole(mode: str) -> None:
    rb, stop = made(mode, prefetch=3), threading.Event()

    def write() -> None:
        turn = 0
        while not stop.is_set():
            rb.extend(numbered(mode, ROWS * turn, 40))
            turn += 1

    writers = [threading.Thread(target=write) for _ in range(2)]
    for writer in writers:
        writer.start()
    try:
        for _ in range(60):
            assert is_whole(rb.sample())
    finally:
        stop.set()
        for writer in writers:
            writer.join(20)
    rb.shutdown()


def test_copies_and_saves_while_rows_are_read(mode: str, tmp_path: Path) -> None:
    rb, other = made(mode), made(mode)
    rb.sample()
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
@pytest.mark.parametrize("reader", ["caller", "core"])
def test_forked_process_continues_with_the_prefetched_draws(reader: str) -> None:
    direct, ahead = (made(reader, prefetch=n) for n in (None, 3))
    for rb in (direct, ahead):
        rb.sample()

    def agree() -> bool:
        for _ in range(6):
            batch = ahead.sample()
            if not is_whole(batch) or not bool((direct.sample()["index"] == batch["index"]).all()):
                return False
        ahead.extend(numbered(reader, ROWS))  # the reads have ended, or the caller reads
        return is_whole(ahead.sample())

    if not (child := os.fork()):
        try:
            torch.set_num_threads(1)  # the others are not here
            os._exit(0 if agree() else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert agree()
    ahead.shutdown()


@pytest.mark.pitfall("TH9")
def test_threads_and_memory_of_batches_end_with_the_buffer(mode: str) -> None:
    before = prefetch_threads()
    rb = made(mode, prefetch=3)
    rb.sample()
    own = prefetch_threads() - before
    assert bool(own) is (mode == "threads")
    gone = [weakref.ref(rb), weakref.ref(rb.storage)]
    del rb

    def ended() -> bool:
        gc.collect()  # a thread may just have made a batch
        left = [ref for ref in gone if ref() is not None]
        return not left and not any(thread.is_alive() for thread in own)

    assert eventually(ended)


@pytest.mark.parametrize(
    ("row", "options"),
    [
        (2, {"collate_fn": lambda rows: rows}),
        (2, {"transform": lambda rows: rows}),
        (2, {"sample_unit": Sequence(length=2)}),
        (40_000, {"storage": LazyMemmapStorage}),
        (40_000, {"gathered by torch": True}),
    ],
)
def test_slow_and_large_batches_are_left_to_threads(
    row: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"storage": LazyTensorStorage, **options}
    if options.pop("gathered by torch", False):
        monkeypatch.setattr(NativeRows, "over", classmethod(lambda cls, columns: None))
    storage = options.pop("storage")(4)
    rb = ReplayBuffer(storage=storage, batch_size=3, prefetch=1, **options)
    rb.extend(TensorDict({"x": torch.zeros(4, row), "next": {"done": torch.zeros(4, 1) > 0}}, [4]))
    assert not reads_now(rb)
    assert rb.sample()["x"].shape[-1] == row
    rb.shutdown()


@pytest.mark.pitfall("RD2")
@pytest.mark.parametrize("prefetch", [1, 4, 8])
def test_draws_fill_the_queue_but_never_reach_past_the_end_of_a_pass(prefetch: int):
    """10 rows in batches of 4 are three draws, however deep the queue is."""
    sampler = CountingSampler()
    buffer = buffer_of(filled=10, sampler=sampler, batch_size=4, prefetch=prefetch)
    for pass_ in range(3):
        for delivered in (1, 2, 3):
            assert len(buffer.sample()) == (4, 4, 2)[delivered - 1]
            ahead = min(prefetch, 3 - delivered or 3)
            assert eventually(lambda n=3 * pass_ + delivered + ahead: sampler.draws == n)
            time.sleep(0.005)
            assert sampler.draws == 3 * pass_ + delivered + ahead
            assert buffer.stats()["prefetch_queue_size"] == ahead
    buffer.shutdown()
    assert buffer.stats()["prefetch_queue_size"] == 0


# -- changes while batches are prepared -----------------------------------------------------------


@pytest.mark.parametrize("prefetch", [1, 4])
def test_a_transform_that_is_added_applies_to_the_next_batch(prefetch: int):
    """Batches that were prepared are made anew, from the same draws."""

    def in_place(data: Any) -> Any:
        data["id"] += 1000
        return data

    buffer = buffer_of(filled=10, sampler="ordered", batch_size=2, prefetch=prefetch)
    assert buffer.sample()["id"].tolist() == [0, 1]
    time.sleep(0.02)
    buffer.append_transform(in_place)
    assert buffer.sample()["id"].tolist() == [1002, 1003]
    buffer.insert_transform(0, in_place)
    assert buffer.sample()["id"].tolist() == [2004, 2005]
    assert [batch["id"].tolist() for batch in buffer] == [[2006, 2007], [2008, 2009]]
    assert buffer["id"].tolist() == [i + 2000 for i in range(10)]
    assert buffer.storage[:]["id"].tolist() == list(range(10))


def test_draw_that_is_made_again_has_the_current_generations():
    buffer = buffer_of(
        "tensor",
        4,
        filled=4,
        sampler="ordered",
        batch_size=2,
        prefetch=1,
        writer=RoundRobinWriter(track_generations=True),
    )
    buffer.sample()
    assert buffer.stats()["prefetch_queue_size"] == 1
    buffer.append_transform(lambda td: td)
    buffer.extend(rows(4, 4))
    batch = buffer.sample()
    assert batch["id"].tolist() == [6, 7]
    assert batch["index_generation"].tolist() == [1, 1]


def test_draws_are_dropped_with_their_rows():
    storage = storage_of("tensor", 8)
    one = ReplayBuffer(
        storage=storage, sampler=SamplerWithoutReplacement(), batch_size=2, prefetch=2
    )
    two = ReplayBuffer(storage=storage)
    two.extend(rows(8))
    one.sample()
    assert one.stats()["prefetch_queue_size"] == 2
    one.append_transform(lambda td: td)
    two.empty()
    two.extend(rows(1, 50))
    for _ in range(3):
        assert one.sample()["id"].tolist() == [50]


# -- the core's own arguments ---------------------------------------------------------------------


def _begun(
    at: list[int], to: torch.Tensor, kept: Any = None, limit: int = 10, sides: int = 1
) -> tuple[Any, Any]:
    """Begin to gather elements of `COLUMN`; return all reads and this one."""
    reads, index = native.core.Reads(), torch.tensor(at, dtype=torch.int64)
    table = native.Table([COLUMN.data_ptr()], [8], [8], len(COLUMN))
    addresses, strides = [to.data_ptr()] * sides, [8] * sides
    begun = reads.begin(table, index.data_ptr(), len(at), limit, addresses, strides, 1, kept)
    return reads, begun


COLUMN = torch.arange(10)


def test_wait_ends_a_gather_and_releases_its_memory() -> None:
    to, kept = torch.zeros(4, dtype=torch.int64), lambda: None
    watched = weakref.ref(kept)
    reads, begun = _begun([9, 0, 3, 3], to, kept)
    del kept
    assert watched() is not None
    reads.wait()
    begun.wait()
    begun.wait()
    assert begun.over
    assert watched() is None
    assert to.tolist() == [9, 0, 3, 3]
    reads, empty = _begun([], to)
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
    to = torch.full((4,), -1)
    refuses(error, said, _begun, at, to, **options)
    assert to.tolist() == [-1] * 4
