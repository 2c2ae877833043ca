"""Workers that read rows where they lie, spawned and forked, and what becomes of them."""

from __future__ import annotations

import itertools
import multiprocessing
import pickle
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch.utils._pytree import tree_leaves

from replaykit import (
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    ReplayBuffer,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    SliceSampler,
)
from replaykit.buffer.buffer_dataset import Parcel
from tests.buffer.workers import WORKER_MARKS
from tests.support.containers import containers, described
from tests.support.refusals import refuses

pytestmark = WORKER_MARKS

ROWS = 30


def rows(count: int = ROWS, start: int = 0) -> TensorDict:
    number = torch.arange(start, start + count)
    leaves = {
        "id": number,
        "wide": number[:, None].repeat(1, 300),
        "next": {"done": number % 5 == 4},
    }
    return TensorDict(leaves, [count])


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_read_rows_from_files_without_copies(method: str, tmp_path: Path) -> None:
    """What is changed in the file behind everybody's back, the worker sees."""
    rb = ReplayBuffer(
        storage=LazyMemmapStorage(20, scratch_dir=tmp_path),
        sampler=SliceSampler(slice_len=2),
        batch_size=4,
        writer=RoundRobinWriter(track_generations=True),
    )
    rb.extend(rows())  # once round: an episode begins at row 25, and the ring at slot 10
    loader = iter(
        rb.dataloader(workers=1, multiprocessing_context=method, prefetch_factor=1, seed=2)
    )
    found = list(itertools.islice(loader, 6))
    for batch in found:
        assert (batch["wide"] == batch["id"][:, None]).all()
        assert (batch["index"] == batch["id"] % 20).all()
        assert (batch["index_generation"] == (batch["id"] >= 20)).all()
        first, second = batch["id"].view(2, 2).T
        assert (second == first + 1).all()
        assert (first % 5 != 4).all()
        assert (first >= 10).all()
    (wide,) = tmp_path.glob("wide.memmap")
    np.memmap(wide, dtype=np.int64, mode="r+")[:] = -7
    later = list(itertools.islice(loader, 8))
    assert (later[-1]["wide"] == -7).all()
    assert (later[-1]["id"] >= 10).all()


def test_workers_follow_a_shared_buffer() -> None:
    """New rows and new priorities come to processes that have long been drawing."""
    rb = ReplayBuffer(
        storage=LazyTensorStorage(ROWS),
        sampler=PrioritizedSampler(ROWS, 1.0, 1.0),
        batch_size=20,
        shared=True,
    )
    rb.extend(rows(10))
    loader = iter(rb.dataloader(workers=2, prefetch_factor=1))
    for batch in itertools.islice(loader, 4):
        assert (batch["id"] < 10).all()
    rb.extend(rows(20, 10))
    rb.update_priority(torch.arange(ROWS), (torch.arange(ROWS) == 23).float())
    last: Any = None
    for last in itertools.islice(loader, 8):
        assert (last["wide"] == last["id"][:, None]).all()
    assert (last["id"] == 23).all()


def test_pass_over_a_written_shared_buffer_is_refused() -> None:
    rb = ReplayBuffer(
        storage=LazyTensorStorage(ROWS),
        sampler=SamplerWithoutReplacement(),
        batch_size=2,
        shared=True,
    )
    rb.extend(rows(20))
    loader = iter(rb.dataloader(workers=1, prefetch_factor=1))
    next(loader)
    rb.extend(rows(1))
    refuses(RuntimeError, "got 1 rows written", list, loader)


def test_spawned_workers_refuse_priorities_of_one_process(tmp_path: Path) -> None:
    rb = ReplayBuffer(
        storage=LazyMemmapStorage(ROWS), sampler=PrioritizedSampler(ROWS, 1.0, 1.0), batch_size=4
    )
    rb.extend(rows())
    loader = rb.dataloader(workers=1, multiprocessing_context="spawn")
    refuses(RuntimeError, "PrioritizedSampler cannot be handed to a spawned", iter, loader)
    for child in multiprocessing.active_children():
        child.join(30)
    assert not multiprocessing.active_children()
    # A sampler that no buffer uses has no priorities to lose: handles of shards hold one.
    unused = PrioritizedSampler(alpha=1.0, beta=1.0)
    child = multiprocessing.get_context("spawn").Process(target=repr, args=(unused,))
    child.start()
    child.join()
    assert child.exitcode == 0


@pytest.mark.parametrize("kind", ["dedup", "empty"])
def test_spawned_workers_refuse_storages_not_fully_in_files(kind: str) -> None:
    storage = LazyMemmapStorage(ROWS, dedup_next=["id"] if kind == "dedup" else False)
    rb = ReplayBuffer(storage=storage, batch_size=4)
    if kind == "dedup":
        number = torch.arange(ROWS)
        rb.extend(TensorDict({"id": number, "next": {"id": number + 1}}, [ROWS]))
    with pytest.raises(RuntimeError, match="a LazyMemmapStorage would be copied"):
        rb.dataloader(workers=1, multiprocessing_context="spawn")


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
def test_shared_rows_are_handed_to_workers_without_their_lock(storage: Any) -> None:
    """Another process may hold it for long, for example during a load."""
    rb = ReplayBuffer(storage=storage(ROWS), batch_size=4, shared=True)
    rb.extend(rows())
    with ThreadPoolExecutor(1) as thread, rb.storage.lock:
        assert thread.submit(rb.storage.for_readers).result(timeout=10) is rb.storage


def test_workers_fork_safely_while_prefetch_threads_run() -> None:
    """Threads of the parent that hold locks, or draw, at the moment of the fork."""
    rb = ReplayBuffer(
        storage=LazyTensorStorage(ROWS),
        sampler=SamplerWithoutReplacement(),
        batch_size=4,
        prefetch=3,
    )
    rb.extend(rows())
    for _ in range(4):
        rb.sample()
        found = [batch["id"] for batch in rb.dataloader(workers=1)]
        assert sorted(torch.cat(found).tolist()) == list(range(ROWS))
    rb.shutdown()
    assert not multiprocessing.active_children()


def test_program_exits_silently_in_the_middle_of_an_iteration(run_python: Any) -> None:
    """In the middle of an iteration that has no end, without a word."""
    done = run_python(_LEFT, timeout=60)
    assert done.stdout.split() == ["4"]
    assert done.stderr == ""


_LEFT = """
import torch
from replaykit import LazyTensorStorage, ReplayBuffer
rb = ReplayBuffer(storage=LazyTensorStorage(9), batch_size=4, prefetch=2)
rb.extend(torch.arange(9))
rb.sample()
loader = iter(rb.dataloader(workers=1, multiprocessing_context="fork"))
print(len(next(loader)), flush=True)
"""


# -- the way of a batch ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", containers())
def test_workers_send_every_container_unchanged(name: str) -> None:
    batch = containers()[name]
    found = pickle.loads(ForkingPickler.dumps(Parcel(batch)))
    assert type(found) is type(batch)
    assert described(found) == described(batch)
    assert getattr(found, "is_locked", None) == getattr(batch, "is_locked", None)
    for one, other in zip(tree_leaves(found), tree_leaves(batch), strict=True):
        if isinstance(one, torch.Tensor):
            assert one.equal(other)


def test_workers_send_arrays_views_and_tensors_that_are_more_than_bytes() -> None:
    memory = torch.arange(20.0)
    views = TensorDict({"x": memory[:6].view(2, 3), "y": memory[4:8].view(2, 2)}, [2])
    batch = [torch.eye(3).to_sparse(), torch.ones(2, requires_grad=True), np.arange(3), views]
    sparse, grown, array, found = pickle.loads(ForkingPickler.dumps(Parcel(batch)))
    assert (found == views).all()
    assert sparse.to_dense().equal(torch.eye(3))
    assert grown.requires_grad
    assert (array == np.arange(3)).all()
