"""Memory of large batches: used again when nothing owns it, and never before."""

from __future__ import annotations

import copy
import io
import os
import pickle
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from replaykit import (
    Cast,
    ImageScale,
    LazyMemmapStorage,
    LazyTensorStorage,
    ReplayBuffer,
    StackFrames,
    transfer,
)
from replaykit.transfer import BatchMemory

MIB = 2**20
ROWS, WIDTH = 24, 3 * 2**16
"""Eight rows are 1.5 MiB."""


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def _rows() -> TensorDict:
    ids = torch.arange(ROWS)
    wide = ids[:, None].to(torch.uint8).expand(ROWS, WIDTH)
    after = {"image": wide + 1, "done": torch.zeros(ROWS, 1, dtype=torch.bool)}
    rows = {"image": wide, "id": ids, "halves": wide[:, ::2].bfloat16()}
    return TensorDict({**rows, "next": {**after, "reward": ids.float()[:, None]}}, [ROWS])


def _buffer(storage: Any = None, **arguments: Any) -> ReplayBuffer:
    storage = LazyTensorStorage(ROWS) if storage is None else storage
    rb = ReplayBuffer(storage=storage, batch_size=8, **arguments)
    rb.extend(_rows())
    return rb


def _check(batch: Any) -> None:
    ids = batch["id"]
    assert (batch["image"] == ids[:, None]).all()
    assert (batch["halves"] == ids[:, None]).all()
    assert (batch["next", "image"] == ids[:, None] + 1).all()
    assert (batch["next", "reward"].flatten() == ids).all()


def _count(rb: ReplayBuffer) -> int:
    columns: Any = rb.storage.require()
    return int(getattr(columns, "rows", columns).batch_memory.allocations)


# -- batches --------------------------------------------------------------------------------------


TRANSFORMS: dict[str, Callable[[], Any]] = {
    "scaled": lambda: ImageScale(keys=["image", ("next", "image")]),
    "cast": lambda: Cast(torch.float32, ["image", "halves"], with_next=False),
    "stacked": lambda: StackFrames(["image"], 2),
}


@pytest.mark.parametrize("kind", TRANSFORMS)
def test_transforms_reuse_memory_of_earlier_batches(kind: str) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(ROWS), batch_size=8, transform=TRANSFORMS[kind]())
    rb.extend(_rows())
    rb = copy.deepcopy(rb)
    known, fresh, batch = set[int](), 0, None
    for turn in range(20):
        batch = rb.sample()
        for key in ("image", ("next", "image")):
            address = batch[key].untyped_storage().data_ptr()
            fresh += turn >= 10 and address not in known
            known.add(address)
    assert not fresh
    assert len(known) <= 6


WAYS: dict[str, tuple[dict[str, Any], Callable[[ReplayBuffer], Any]]] = {
    "sample": ({}, lambda rb: rb.sample()),
    "contiguous": ({"contiguous": True}, lambda rb: rb.sample()),
    "prefetch": ({"prefetch": 2}, lambda rb: rb.sample()),
    "index": ({}, lambda rb: rb[torch.randint(ROWS, (8,))]),
}
STORAGES: dict[str, Callable[[Path], Any]] = {
    "in memory": lambda _: LazyTensorStorage(ROWS),
    "stored once": lambda _: LazyTensorStorage(ROWS, dedup_next=True),
    "in files": lambda folder: LazyMemmapStorage(ROWS, scratch_dir=str(folder)),
}


@pytest.mark.parametrize("threads", [1], indirect=True)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", STORAGES.values(), ids=STORAGES)
def test_steady_loop_allocates_no_batch(
    way: str, make: Callable[[Path], Any], threads: None, tmp_path: Path
) -> None:
    arguments, read = WAYS[way]
    rb = _buffer(make(tmp_path), **arguments)
    batch = None
    for _ in range(8):
        batch = read(rb)
    before = _count(rb)
    assert before > 0
    for _ in range(10):
        batch = read(rb)
        _check(batch)
    late = 6 if way == "prefetch" else 0  # more batches may be made at the same time than before
    assert _count(rb) <= before + late
    rb.shutdown()


def test_some_leaves_are_read_into_memory_used_before() -> None:
    columns: Any = _buffer().storage.require()
    for _ in range(6):
        index = torch.randint(ROWS, (8,))
        found = columns.gather_keys([("image",), ("next", "image")], index)
        assert (found["image",] == index[:, None]).all()
        assert (found["next", "image"] == index[:, None] + 1).all()
    assert columns.batch_memory.allocations < 6


def test_records_of_a_large_batch_are_in_memory_used_before() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=40_000)
    ids = torch.arange(100)
    rb.extend(TensorDict({"id": ids, "x": ids[:, None].expand(100, 5).float()}, [100]))
    for _ in range(6):
        batch = rb.sample()
        assert (batch["x"] == batch["id"][:, None]).all()
    assert 0 < _count(rb) < 6


def test_steady_loop_touches_no_new_pages(run_python: Any) -> None:
    """With these settings, the C library returns all large memory to the system at once."""
    program = f"""
import resource, torch
from tensordict import TensorDict
from replaykit import LazyTensorStorage, ReplayBuffer
torch.set_num_threads(1)
rb = ReplayBuffer(storage=LazyTensorStorage({ROWS}), batch_size=8)
rb.extend(TensorDict({{"image": torch.zeros({ROWS}, {WIDTH}, dtype=torch.uint8),
                       "after": torch.ones({ROWS}, {WIDTH}, dtype=torch.uint8)}}, [{ROWS}]))
for _ in range(8):
    batch = rb.sample()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    batch = rb.sample()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    small = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = run_python(program, fresh=True, timeout=60, env={**os.environ, **small})
    assert int(done.stdout) < 20 * 2 * 8 * WIDTH // 4096 // 10


def test_kept_batches_keep_their_values(threads: None) -> None:
    rb = _buffer()
    kept, views = [], []
    for turn in range(30):
        batch = rb.sample()
        if turn % 3 == 0:
            kept.append(batch)
        elif turn % 3 == 1:
            views.append((batch["id"].clone(), batch["next", "image"][:, 7:9]))
    assert _count(rb) < 30 * 3 - 20  # a batch has three large leaves
    for batch in kept:
        _check(batch)
    for ids, view in views:
        assert (view == ids[:, None] + 1).all()


@pytest.mark.parametrize("threads", [2], indirect=True)
def test_batches_stay_whole_in_several_threads(threads: None) -> None:
    rb = _buffer(prefetch=2)
    passed: queue.Queue[Any] = queue.Queue(4)
    wrong: list[BaseException] = []

    def read() -> None:
        try:
            for turn in range(15):
                batch = rb.sample()
                if turn % 2:
                    passed.put(batch, timeout=60)
                else:
                    _check(batch)
        except BaseException as error:
            wrong.append(error)
        passed.put(None, timeout=60)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    left, held = len(readers), []
    while left:
        batch = passed.get(timeout=60)
        left -= batch is None
        held = [one for one in (*held, batch) if one is not None][-5:]
        for one in held:
            _check(one)
    for reader in readers:
        reader.join(60)
    rb.shutdown()
    assert not wrong


def test_forked_processes_keep_their_batches(run_python: Any) -> None:
    """The threads that gather do not exist in a child, whatever state they were forked in."""
    program = f"""
import os, threading, torch
from tensordict import TensorDict
from replaykit import LazyTensorStorage, ReplayBuffer
torch.set_num_threads(2)
rb = ReplayBuffer(storage=LazyTensorStorage({ROWS}), batch_size=8)
ids = torch.arange({ROWS})
rb.extend(TensorDict({{"id": ids, "image": ids[:, None].to(torch.uint8).expand(-1, {WIDTH})}},
                     [{ROWS}]))
kept = [rb.sample() for _ in range(4)]
stop = threading.Event()
def read():
    while not stop.is_set():
        rb.sample()
reader = threading.Thread(target=read)
reader.start()
def whole(batch):
    return bool((batch["image"].numpy() == batch["id"].numpy()[:, None]).all())
for _ in range(6):
    child = os.fork()
    if not child:
        index = torch.arange({ROWS} - 8, {ROWS})
        columns = rb.storage.require()
        for _ in range(8):
            found = columns.gather(index)
        fine = (found["image",].numpy() == index.numpy()[:, None]).all() and all(map(whole, kept))
        os._exit(0 if fine else 1)
    assert os.waitpid(child, 0)[1] == 0
    kept = kept[1:] + [rb.sample()]
    assert all(map(whole, kept))
stop.set()
reader.join()
print("done")
"""
    done = run_python(f"import warnings; warnings.simplefilter('ignore')\n{program}", timeout=60)
    assert done.stdout == "done\n"


def test_batch_outlives_its_buffer_and_takes_no_more_than_its_memory(run_python: Any) -> None:
    program = """
import gc, torch
from tensordict import TensorDict
from replaykit import LazyTensorStorage, ReplayBuffer
torch.set_num_threads(1)
def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
rb = ReplayBuffer(storage=LazyTensorStorage(4), batch_size=100)
rb.extend(TensorDict({"id": torch.arange(4), "image": torch.ones(4, 65536)}, [4]))
before = resident()
batches = [rb.sample() for _ in range(4)]  # of 25 MiB
batch = batches[0]
del rb, batches
gc.collect()
print((resident() - before) >> 20, bool((batch["image"] == 1).all()))
"""
    done = run_python(program, timeout=60)
    megabytes, whole = done.stdout.split()
    assert int(megabytes) < 45
    assert whole == "True"


@pytest.mark.parametrize("dedup", [False, True])
def test_empty_frees_idle_memory(dedup: bool) -> None:
    rb = _buffer(LazyTensorStorage(ROWS, dedup_next=dedup))
    for _ in range(3):
        batch = rb.sample()
    before = _count(rb)
    rb.empty()
    _check(batch)
    rb.extend(_rows())
    del batch
    rb.sample()
    assert _count(rb) > before


# -- blocks ---------------------------------------------------------------------------------------


def _steady(memory: BatchMemory, nbytes: int = MIB) -> int:
    """Return the address of an idle block of this size."""
    for _ in range(2):
        tensor = memory.new((nbytes,), torch.uint8)
    address = tensor.data_ptr()
    del tensor
    assert memory.new((nbytes,), torch.uint8).data_ptr() == address
    return address


HOLDERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "view": lambda tensor: tensor[3:5],
    "other dtype": lambda tensor: tensor.view(torch.int32),
    "detached": lambda tensor: tensor.detach(),
    "storage": lambda tensor: tensor.untyped_storage(),
    "array": lambda tensor: tensor.numpy(),
    "part of an array": lambda tensor: memoryview(tensor.numpy())[5:6],
    "capsule": lambda tensor: tensor.__dlpack__(),
    "graph": lambda tensor: torch.ones(len(tensor), requires_grad=True) * tensor,
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_block_is_in_use_as_long_as_anything_has_it(holder: str) -> None:
    memory = BatchMemory()
    address = _steady(memory)
    tensor = memory.new((MIB,), torch.uint8)
    assert tensor.data_ptr() == address
    held = HOLDERS[holder](tensor)
    del tensor
    assert memory.new((MIB,), torch.uint8).data_ptr() != address
    del held
    if "array" not in holder:
        addresses = {tensor.data_ptr() for tensor in [memory.new((MIB,), torch.uint8)] * 2}
        addresses |= {t.data_ptr() for t in [memory.new((MIB,), torch.uint8) for _ in range(2)]}
        assert address in addresses


def test_tensors_are_like_others() -> None:
    memory, shape = BatchMemory(), (3, 1, 2**19)
    for dtype in (torch.float32, torch.bool, torch.bfloat16, torch.float8_e4m3fn, torch.uint64):
        for _ in range(3):
            tensor = memory.new(shape, dtype)
            plain = torch.empty(shape, dtype=dtype)
            assert (tensor.shape, tensor.dtype) == (plain.shape, plain.dtype)
            assert tensor.stride() == plain.stride()
            assert not tensor._is_view()
            assert tensor.is_leaf
            assert not tensor.requires_grad
            assert tensor.data_ptr() % 64 == 0
            assert tensor.untyped_storage().nbytes() == plain.untyped_storage().nbytes()
    numbers = memory.new((MIB,), torch.float32).copy_(torch.arange(MIB))
    for copied in (copy.deepcopy(numbers), pickle.loads(pickle.dumps(numbers))):
        assert torch.equal(copied, numbers)
        assert copied.data_ptr() != numbers.data_ptr()
    file = io.BytesIO()
    torch.save(numbers, file)
    assert len(file.getvalue()) < 4 * MIB + 10_000
    numbers.requires_grad_()
    (numbers * numbers).sum().backward()
    assert numbers.grad is not None
    assert numbers.grad[5] == 10


@pytest.mark.parametrize("inference", [False, True])
def test_tensors_take_on_the_mode_in_which_they_are_made(inference: bool) -> None:
    memory = BatchMemory()
    with torch.inference_mode(not inference):
        _steady(memory)
    with torch.inference_mode(inference):
        assert memory.new((MIB,), torch.uint8).is_inference() is inference


CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "shared": lambda tensor: tensor.share_memory_(),
    "resized": lambda tensor: tensor.untyped_storage().resize_(2 * MIB),
    "emptied": lambda tensor: tensor.untyped_storage().resize_(0),
    "fixed": lambda tensor: tensor.numpy(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_block_is_not_used_again(change: str) -> None:
    memory = BatchMemory()
    _steady(memory)
    tensor = memory.new((MIB,), torch.uint8)
    CHANGES[change](tensor)
    address, allocations = tensor.data_ptr(), memory.allocations
    del tensor
    fresh = memory.new((MIB,), torch.uint8)
    assert memory.allocations == allocations + 1
    assert fresh.data_ptr() != address or change in ("emptied", "resized", "fixed")
    storage = fresh.untyped_storage()
    assert storage.resizable()
    assert not storage.is_shared()
    assert storage.nbytes() == MIB


def test_only_sizes_that_recur_take_memory() -> None:
    memory = BatchMemory()
    for size in range(100):
        memory.new((MIB + size,), torch.uint8)
    assert not memory._blocks
    memory.new((transfer._REUSED_TO + 1,), torch.uint8)
    memory.new((transfer._REUSED_TO + 1,), torch.uint8)
    assert not memory._blocks
    assert memory.allocations == 102
    memory.new((MIB - 1,), torch.uint8)
    assert memory.allocations == 102


def test_block_that_is_not_needed_is_freed() -> None:
    memory = BatchMemory()
    held = [memory.new((MIB,), torch.uint8) for _ in range(9)]
    freed = weakref.ref(memory._blocks[1])
    del held
    for _ in range(transfer._LATELY - 7):
        assert freed() is not None
        memory.new((MIB,), torch.uint8)
    assert freed() is None
    assert len(memory._blocks) < 9


def test_allocation_frees_idle_blocks() -> None:
    """Until they take at most as many bytes as the blocks in use, with the new one."""
    memory = BatchMemory()
    held = [memory.new((MIB,), torch.uint8) for _ in range(9)]
    del held[2:]
    memory.new((3 * MIB // 2,), torch.uint8)
    tensor = memory.new((3 * MIB // 2,), torch.uint8)
    sizes = sorted(block.nbytes for block in memory._blocks.values())
    assert sizes == [MIB] * 3 + [3 * MIB // 2]  # one is in use, and two are idle
    assert tensor.data_ptr() not in {one.data_ptr() for one in held}


def test_other_versions_of_torch_allocate_every_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    changes: dict[str, Any] = {"_call": lambda _: 1, "_use_count": None}
    for name, change in changes.items():
        monkeypatch.setattr(transfer, name, change)
        transfer._counts_owners.cache_clear()
        memory = BatchMemory()
        tensors = [memory.new((MIB,), torch.uint8) for _ in range(3)]
        assert len({tensor.data_ptr() for tensor in tensors}) == 3
        assert not memory._blocks
    transfer._counts_owners.cache_clear()


def test_threads_never_get_the_same_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although other threads run between the search for a block and its use."""
    memory, wrong, start = BatchMemory(), [], threading.Barrier(4)
    is_idle = transfer._Block.is_idle

    def slow(block: transfer._Block) -> bool:
        found = is_idle(block)
        time.sleep(1e-5)
        return found

    def use(value: int) -> None:
        start.wait(60)
        for _ in range(200):
            tensor = memory.new((MIB,), torch.uint8)
            tensor[:8] = value
            time.sleep(1e-5)
            if tensor[:8].tolist() != [value] * 8:
                wrong.append(value)
            del tensor

    monkeypatch.setattr(transfer._Block, "is_idle", slow)
    threads = [threading.Thread(target=use, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert memory.allocations < 400


SIZES = [MIB, MIB + 64, 3 * MIB // 2]
ACTIONS = ["new", "new", "drop", "view", "storage", "share", "clear"]


@settings(max_examples=150, deadline=None)
@given(
    actions=st.lists(
        st.tuples(st.sampled_from(ACTIONS), st.integers(0, 9), st.sampled_from(SIZES)),
        max_size=60,
    )
)
def test_no_block_is_used_twice_at_once(actions: list[tuple[str, int, int]]) -> None:
    memory = BatchMemory()
    held: list[tuple[Any, int, int]] = []  # what holds a block, its address, its value
    in_use = 0
    for step, (action, place, size) in enumerate(actions):
        if action == "new":
            known = set(memory._blocks.values())
            tensor = memory.new((size,), torch.uint8).fill_(step)
            address = tensor.data_ptr()
            assert address not in {at for _, at, _ in held}
            held.append((tensor, address, step))
            del tensor
            if set(memory._blocks.values()) - known:
                in_use = sum(_whole(one) for one, _, _ in held)
        elif action == "clear":
            memory.clear()
        elif held:
            one, address, value = held.pop(place % len(held))
            if action == "view":
                held.append((_bytes(one)[-MIB // 2 :], address, value))
            elif action == "storage":
                held.append((_bytes(one).untyped_storage(), address, value))
            elif action == "share":
                shared = _bytes(one).share_memory_()
                held.append((shared, shared.data_ptr(), value))
                del shared
            del one
        _check_values(held)
        assert sum(block.nbytes for block in memory._blocks.values()) <= 2 * in_use


def _check_values(held: list[tuple[Any, int, int]]) -> None:
    """Check what is held in a call of its own, so that no variable keeps a block in use."""
    for one, _, value in held:
        values = _bytes(one)
        assert (values[:: 2**14] == value).all()
        assert values[-1] == value


def _bytes(held: Any) -> torch.Tensor:
    return held if isinstance(held, torch.Tensor) else torch.empty(0, dtype=torch.uint8).set_(held)


def _whole(held: Any) -> int:
    return int(_bytes(held).untyped_storage().nbytes())
