"""Shared buffers: what is refused, what a copy is, saves while others write, folders that go."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import os
import pickle
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    ImmutableDatasetWriter,
    LaneWriter,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    TensorDictMaxValueWriter,
    TensorStorage,
)
from replaykit.storages import shared_storage
from tests.buffer.building import eventually
from tests.storages.sharing import another, shown
from tests.support.refusals import refuses

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def rows(first: int, count: int) -> TensorDict:
    number = torch.arange(first, first + count)
    return TensorDict({"number": number, "next": {"done": number % 4 == 3}}, [count])


def made(slots: int = 10, *, shared: bool = True) -> ReplayBuffer:
    sampler = PrioritizedSampler(alpha=1.0, beta=1.0)
    return ReplayBuffer(storage=LazyTensorStorage(slots), sampler=sampler, shared=shared)


def folder_of(buffer: ReplayBuffer) -> Path:
    found: Path = buffer.storage.recovery.home.folder.parent
    return found


def written() -> LazyTensorStorage:
    storage = LazyTensorStorage(10)
    ReplayBuffer(storage=storage).extend(torch.arange(3))
    return storage


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"storage": lambda: ListStorage(10)}, "ListStorage"),
        ({"storage": lambda: LazyStackStorage(10)}, "LazyStackStorage"),
        ({"storage": lambda: TensorStorage(torch.zeros(3))}, "TensorStorage"),
        ({"storage": None}, "ListStorage"),
        ({"writer": TensorDictMaxValueWriter}, "TensorDictMaxValueWriter"),
        ({"writer": ImmutableDatasetWriter}, "ImmutableDatasetWriter"),
        ({"writer": lambda: LaneWriter(2)}, "lane_key="),
        ({"prefetch": 2, "batch_size": 4}, "prefetch"),
        ({"storage": lambda: LazyTensorStorage(10, device="cuda")}, "cuda"),
        ({"storage": lambda: LazyTensorStorage(10, device="auto")}, "auto"),
        ({"storage": written}, "3 rows"),
    ],
)
def test_buffers_that_cannot_be_shared_are_refused(options: dict[str, Any], message: str) -> None:
    options = {"storage": lambda: LazyTensorStorage(10), **options}
    made = options["storage"]() if options["storage"] else None
    refuses(ValueError, message, ReplayBuffer, **{**options, "storage": made}, shared=True)
    assert getattr(made, "recovery", None) is None


def test_parts_cannot_be_exchanged() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(10), shared=True)
    parts = (buffer.storage, buffer.sampler, buffer.writer)
    for name, part in (
        ("storage", LazyTensorStorage(10)),
        ("sampler", RandomSampler()),
        ("writer", RoundRobinWriter()),
    ):
        refuses(RuntimeError, name, getattr(buffer, f"set_{name}"), part)
    assert parts == (buffer.storage, buffer.sampler, buffer.writer)


def test_shared_storage_accepts_one_buffer_only() -> None:
    buffer = made()
    refuses(ValueError, "no other buffer shares", ReplayBuffer, storage=buffer.storage, shared=True)
    refuses(RuntimeError, "one buffer", ReplayBuffer, storage=buffer.storage)
    buffer.extend(rows(0, 3))
    assert another(buffer)["number"].tolist() == [0, 1, 2]


def test_folder_in_use_is_refused_and_a_free_one_is_accepted(tmp_path: Path) -> None:
    def mapped(**options: Any) -> ReplayBuffer:
        storage = LazyMemmapStorage(10, scratch_dir=tmp_path, **options)
        return ReplayBuffer(storage=storage, shared=True)

    buffer = mapped()
    buffer.extend(rows(0, 3))
    refuses(RuntimeError, "in use", mapped, existsok=True)
    assert buffer["number"].tolist() == [0, 1, 2]
    del buffer
    gc.collect()
    again = mapped()
    refuses(RuntimeError, r"\.memmap", again.extend, rows(5, 1))
    del again
    gc.collect()
    last = mapped(existsok=True)
    last.extend(rows(5, 1))
    assert last["number"].tolist() == [5]
    del last
    gc.collect()
    assert (tmp_path / "records.memmap").exists()


# -- what others see ------------------------------------------------------------------------------


def test_a_priority_is_no_column_where_another_process_wrote_first() -> None:
    buffer = made()
    other = another(buffer)
    buffer.extend(rows(0, 2))
    more = rows(2, 2)
    more["td_error"] = torch.tensor([3.0, 5.0])
    other.extend(more)
    sampler: Any = buffer.sampler
    assert len(buffer) == 4
    assert sampler.state_dict()["_priorities"].tolist() == [1, 1, 3, 5]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda rb: pickle.loads(pickle.dumps(rb))])
def test_copies_of_a_shared_buffer_are_separate(copied: Any) -> None:
    buffer = made()
    buffer.extend(rows(0, 3))
    before, own = shown(buffer), copied(buffer)
    own.extend(rows(3, 4))
    own.update_priority(torch.tensor([0]), torch.tensor([9.0]))
    assert (own.shared, own.storage.recovery, shown(buffer)) == (False, None, before)
    buffer.extend(rows(50, 1))
    assert own["number"].tolist() == list(range(7))


LARGE = """
import multiprocessing, sys, torch
from tensordict import TensorDict
from replaykit import LazyTensorStorage, PrioritizedReplayBuffer

def rows(count):
    return TensorDict({"x": torch.ones(count, 8)}, [count])

def work(buffer):
    buffer.extend(rows(100_000))
    buffer.update_priority(torch.arange(200_000), torch.full((200_000,), 2.0))
    buffer.sample(5000)
    buffer[torch.arange(100_000)], buffer["x"]

torch.set_num_threads(2)
torch.rand(3_000_000).add_(1)  # has the threads that a child will not have
buffer = PrioritizedReplayBuffer(
    alpha=0.6, beta=0.4, storage=LazyTensorStorage(300_000), batch_size=8, shared=True
)
buffer.extend(rows(200_000))
buffer.sample()
child = multiprocessing.get_context("fork").Process(target=work, args=(buffer,), daemon=True)
child.start()
child.join(30)
assert child.exitcode == 0, child.exitcode
assert len(buffer) == 300_000 and torch.get_num_threads() == 2
"""


@needs_fork
def test_forked_process_runs_large_operations(run_python: Any) -> None:
    """Where torch has used threads before the fork, which the child has not."""
    run_python(LARGE)


# -- saving and loading ---------------------------------------------------------------------------


def _writes(buffer: ReplayBuffer, stop: Any) -> None:
    torch.set_num_threads(1)
    first = buffer.write_count
    while not stop.is_set():
        index = buffer.extend(rows(first, 7))
        buffer.update_priority(index, torch.full((7,), 1.0 + first % 5))
        first += 7


@needs_fork
def test_a_save_while_another_process_writes_is_of_one_instant(tmp_path: Path) -> None:
    buffer = made(70)
    buffer.extend(rows(0, 7))
    context = multiprocessing.get_context("fork")
    stop = context.Event()
    writer = context.Process(target=_writes, args=(buffer, stop))
    writer.start()
    try:
        counts = set()
        for _ in range(8):
            buffer.dumps(tmp_path / "saved")
            found = made(70, shared=False)
            found.loads(tmp_path / "saved")
            counts.add(found.write_count)
            order = found.storage.ledger.write_order()
            numbers = found[order]["number"]
            # Whole extends, in order, the newest last.
            assert len(found) == min(found.write_count, 70)
            assert found.write_count % 7 == 0
            last = found.write_count
            assert numbers.tolist() == list(range(last - len(found), last))
    finally:
        stop.set()
        writer.join(60)
    assert writer.exitcode == 0
    assert len(counts) > 1


# -- folders that go ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [LazyTensorStorage, LazyMemmapStorage])
def test_the_last_one_removes_a_private_folder(kind: Any) -> None:
    buffer = ReplayBuffer(storage=kind(10), shared=True)
    other = another(buffer)
    folder = folder_of(buffer)
    buffer.extend(rows(0, 3))
    del buffer
    gc.collect()
    assert folder.exists()
    assert other["number"].tolist() == [0, 1, 2]
    del other
    gc.collect()
    assert not folder.exists()


_HEAD = """
import multiprocessing, os, sys, time
import torch
from replaykit import LazyTensorStorage, ReplayBuffer

def work(buffer):
    time.sleep(0.5)
    buffer.extend(torch.arange(3))
    assert len(buffer) == 5, len(buffer)
    print("wrote", flush=True)

buffer = ReplayBuffer(storage=LazyTensorStorage(10), shared=True)
print(buffer.storage.recovery.home.folder.parent, flush=True)
buffer.extend(torch.arange(2))
"""

_JOINED = """
multiprocessing.get_context("fork").Process(target=work, args=(buffer,)).start()
"""

_LEFT = """
receiver, sender = os.pipe()
if not os.fork():
    os.close(sender)
    os.read(receiver, 1)  # the parent is gone
    work(buffer)
    sys.exit()
"""


@needs_fork
@pytest.mark.parametrize("script", [_JOINED, _LEFT], ids=["joined", "left"])
def test_folder_stays_until_children_end_after_the_parent(script: str, run_python: Any) -> None:
    """The end of a script joins its processes, but not a child that it has forked itself."""
    folder, said = run_python(_HEAD + script).stdout.split()
    assert said == "wrote"
    assert eventually(lambda: not Path(folder).exists())


def test_next_buffer_removes_folders_of_killed_processes(
    monkeypatch: pytest.MonkeyPatch, run_python: Any
) -> None:
    done = run_python(_HEAD + "os.kill(os.getpid(), 9)", check=False)
    folder = Path(done.stdout.strip())
    assert folder.exists()
    used = ReplayBuffer(storage=LazyTensorStorage(10), shared=True)
    assert folder.exists(), "one may be in the making"
    long_ago = time.time() - 2 * shared_storage._YOUNG
    for one in (folder, folder_of(used)):
        os.utime(one, (long_ago, long_ago))
    ReplayBuffer(storage=LazyTensorStorage(10), shared=True)
    assert not folder.exists()
    assert folder_of(used).exists(), "somebody uses it"


@pytest.mark.parametrize("removes", [False, True])
def test_a_pass_goes_on_unless_others_remove_rows(removes: bool) -> None:
    storage = LazyTensorStorage(8, lane_key="lane")
    sampler = SamplerWithoutReplacement(shuffle=False)
    writer = LaneWriter(8) if removes else RoundRobinWriter()
    mine = ReplayBuffer(storage=storage, sampler=sampler, writer=writer, shared=True, batch_size=2)
    given = rows(0, 8).set("lane", torch.zeros(8, dtype=torch.int64))
    mine.extend(given)
    theirs = another(mine)
    assert mine.sample()["index"].tolist() == [0, 1]
    for _ in range(20):  # more changes than a log of 8 rows keeps
        if removes:
            theirs.remove_oldest(1)
            theirs.extend(given[:1])
        else:
            theirs.storage.set([5, 4], given[:2])
    assert mine.sample()["index"].tolist() == ([0, 1] if removes else [2, 3])
