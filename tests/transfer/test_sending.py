"""Batches on their way to a CUDA device: copied beside other work, and complete when used.

The device of most tests is a model in host memory. A copy that torch need not wait for takes place
as late as CUDA allows. A batch that is read too early, or whose memory changes too early, arrives
with other values.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    Compose,
    LazyTensorStorage,
    ListStorage,
    PrioritizedReplayBuffer,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    to_device,
)
from replaykit.mixture import joining
from replaykit.transfer import REUSED_FROM, _stream_for_copies, send
from tests.support.refusals import refuses

_GARBAGE = 0xEE
CUDA = torch.device("cuda", 0)


class LateDevice:
    """A device whose copies take place when a stream waits for them."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.copies: list[dict[str, Any]] = []
        self.pinned: list[torch.Tensor] = []
        self.lock = threading.RLock()
        self.streams = threading.local()
        move, empty = torch.Tensor.to, torch.empty

        def to(tensor: torch.Tensor, *target: Any, **options: Any) -> torch.Tensor:
            if CUDA not in target:
                return move(tensor, *target, **options)
            if lies_in(tensor, [copy["there"] for copy in self.late]):
                return tensor
            if not options.get("non_blocking"):
                self.copies.append({"late": False})
                return tensor * 1
            assert tensor.is_pinned(), "such a copy is not asynchronous"
            there = torch.full((len(tensor),), _GARBAGE, dtype=tensor.dtype)
            with self.lock:
                self.copies.append(
                    {
                        "late": True,
                        "nbytes": tensor.nbytes,
                        "host": tensor,
                        "there": there,
                        "stream": self.stream(),
                        "kept for": None,
                    }
                )
            return there

        def pinned_empty(*shape: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
            found = empty(*shape, **options)
            if pin_memory:
                self.pinned.append(found)
            return found

        def lies_in_pinned_memory(tensor: torch.Tensor) -> bool:
            return lies_in(tensor, self.pinned)

        device = self

        class Event:
            def record(self, stream: str) -> None:
                self.before = [copy for copy in device.late if copy["stream"] == stream]

        class Stream(str):
            def wait_event(self, event: Event) -> None:
                assert self == device.stream(), "another thread's stream waits"
                device.happen(event.before)

        def record_stream(tensor: torch.Tensor, stream: str) -> None:
            for copy in self.copies:
                if copy["late"] and copy["there"] is tensor:
                    copy["kept for"] = stream

        patch.setattr(torch.Tensor, "to", to)
        patch.setattr(torch.Tensor, "is_pinned", lies_in_pinned_memory)
        patch.setattr(torch.Tensor, "record_stream", record_stream)
        patch.setattr(torch, "empty", pinned_empty)
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "Stream", lambda device: Stream("beside"))
        patch.setattr(torch.cuda, "stream", self.within)
        patch.setattr(torch.cuda, "current_stream", lambda device: Stream(self.stream()))

    def stream(self) -> str:
        return getattr(self.streams, "current", "learner's")

    @contextlib.contextmanager
    def within(self, stream: str) -> Iterator[None]:
        self.streams.current = stream
        try:
            yield
        finally:
            del self.streams.current

    def happen(self, copies: list[dict[str, Any]]) -> None:
        with self.lock:
            for copy in copies:
                if copy["host"] is not None:
                    copy["there"].copy_(copy["host"])
                    copy["host"] = None

    def learn(self) -> None:
        """Run what the learner's stream was given. Copies it does not wait for may come later."""
        self.happen([copy for copy in self.late if copy["stream"] == "learner's"])

    @property
    def late(self) -> list[dict[str, Any]]:
        return [copy for copy in self.copies if copy["late"]]


def lies_in(tensor: torch.Tensor, blocks: list[torch.Tensor]) -> bool:
    """Return whether the tensor is a view of one of the blocks."""
    if tensor.is_sparse:
        return False
    at = tensor.untyped_storage().data_ptr()
    return any(block.untyped_storage().data_ptr() == at for block in blocks)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> LateDevice:
    monkeypatch.setattr("replaykit.transfer._stream_for_copies", _stream_for_copies.__wrapped__)
    return LateDevice(monkeypatch)


def batch(number: int, rows: int = 8) -> TensorDict:
    ids = torch.arange(rows) + 100 * number
    leaves = {"id": ids, "x": ids[:, None] * torch.ones(3), "next": {"done": ids[:, None] % 2 == 0}}
    return TensorDict(leaves, [rows])


def same(left: Any, right: Any) -> bool:
    keys = set(left.keys(True, True))
    return keys == set(right.keys(True, True)) and all(left[k].equal(right[k]) for k in keys)


def filled(target: torch.device | None = None, rows: Any = None, **options: Any) -> ReplayBuffer:
    options = {"storage": LazyTensorStorage(50), "batch_size": 8, **options}
    rb = ReplayBuffer(generator=torch.Generator().manual_seed(3), **options)
    rb.extend(batch(0, 50) if rows is None else rows)
    if target is not None:
        rb._target = target  # which this machine may not have
    return rb


# -- one batch ------------------------------------------------------------------------------------


@pytest.mark.parametrize("aside", [False, True])
def test_a_batch_of_small_tensors_is_one_copy_and_one_memory(
    device: LateDevice, aside: bool
) -> None:
    data = (batch(1), {"index": torch.arange(8)})
    there, arrival = send(data, CUDA, own=(), aside=aside)
    leaves = [*there[0].values(True, True), there[1]["index"]]
    assert len(device.copies) == 1
    assert len({leaf.untyped_storage().data_ptr() for leaf in leaves}) == 1
    assert not any(leaf._is_view() for leaf in leaves)
    assert (arrival is not None) == aside
    if arrival is not None:
        device.learn()
        assert not same(there[0], batch(1))  # it is not there before it has arrived
        arrival.order()
    device.learn()
    assert same(there[0], batch(1))
    assert there[1]["index"].equal(torch.arange(8))
    assert [copy["kept for"] for copy in device.late] == ["learner's" if aside else None]


@pytest.mark.parametrize("own", [False, True])
def test_memory_of_others_may_change_as_soon_as_the_call_returns(
    device: LateDevice, own: bool
) -> None:
    """Large pinned tensors are read later only if they belong to the batch alone."""
    scratch = torch.empty(REUSED_FROM, dtype=torch.uint8, pin_memory=True).fill_(7)
    large = torch.ones(REUSED_FROM, dtype=torch.uint8)
    data = {"scratch": scratch, "large": large, "small": torch.arange(9)}
    there, arrival = send(data, CUDA, own=[scratch.data_ptr()] if own else (), aside=False)
    assert arrival is not None  # large blocks do not wait for the learner's work
    sizes = sorted(copy["nbytes"] for copy in device.late)
    assert sizes == ([REUSED_FROM + 128, REUSED_FROM] if own else [2 * REUSED_FROM + 128])[::-1]
    if not own:
        scratch.fill_(0)
    large.fill_(0)
    data["small"].fill_(0)
    arrival.order()
    device.learn()
    assert bool((there["scratch"] == 7).all())
    assert bool((there["large"] == 1).all())
    assert there["small"].equal(torch.arange(9))


def test_sparse_and_gradient_tensors_are_moved_separately(device: LateDevice) -> None:
    plain, sparse = torch.arange(4.0), torch.eye(3).to_sparse()
    grown = torch.ones(3, requires_grad=True) * 2
    given = {"a": plain, "b": sparse, "c": grown, "d": "text", "e": plain[:0]}
    moved, arrival = send(given, CUDA, own=(), aside=True)
    assert arrival is not None
    arrival.order()
    assert moved["a"].equal(plain)
    assert moved["b"].to_dense().equal(torch.eye(3))
    assert moved["c"].grad_fn is not None
    assert moved["d"] == "text"
    assert len(moved["e"]) == 0
    assert send({"b": sparse}, CUDA, own=(), aside=True)[1] is None


@pytest.mark.parametrize("non_blocking", [False, True])
def test_to_device_waits_as_asked(
    device: LateDevice, monkeypatch: pytest.MonkeyPatch, non_blocking: bool
) -> None:
    monkeypatch.setattr("replaykit.transfer.device_named", lambda device: CUDA)
    large = torch.empty(REUSED_FROM, dtype=torch.uint8, pin_memory=True).fill_(7)
    data = {"large": large, "small": torch.arange(9)}
    to_device(data, "cuda", non_blocking=non_blocking)
    assert [copy["late"] for copy in device.copies] == 2 * [non_blocking]


# -- in a buffer ----------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [None, 1, 3])
@pytest.mark.parametrize("way", ["sample", "iteration", "info"])
def test_batches_arrive_complete_in_the_thread_that_uses_them(
    prefetch: int | None, way: str, device: LateDevice
) -> None:
    there, here = filled(CUDA, prefetch=prefetch), filled()
    iteration = iter(there)
    for _ in range(24):
        if way == "info":
            moved, info = there.sample(return_info=True)
        else:
            moved = there.sample() if way == "sample" else next(iteration)
        device.learn()
        assert same(moved, here.sample())
        leaves = [moved["x"], moved["id"]] + ([info["index"]] if way == "info" else [])
        assert len({leaf.untyped_storage().data_ptr() for leaf in leaves}) == 1
    there.shutdown()
    streams = {copy["stream"] for copy in device.late}
    assert streams <= ({"learner's"} if prefetch is None else {"learner's", "beside"})
    assert prefetch is None or "beside" in streams


def large_rows(rows: int = 20) -> TensorDict:
    image = torch.arange(rows, dtype=torch.uint8)[:, None].expand(rows, REUSED_FROM // 4).clone()
    return TensorDict({"image": image, "x": torch.arange(rows)}, [rows])


@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize("prefetch", [None, 2])
def test_large_rows_are_gathered_into_pinned_memory(
    prefetch: int | None, contiguous: bool, device: LateDevice
) -> None:
    options = {"rows": large_rows(), "prefetch": prefetch, "contiguous": contiguous}
    there, here = filled(CUDA, **options), filled(rows=large_rows())
    for _ in range(10):
        moved = there.sample()
        device.learn()
        assert same(moved, here.sample())
    there.shutdown()
    # Each batch is copied from where it was gathered, and its small tensors in one more copy.
    large = [copy["nbytes"] for copy in device.late if copy["nbytes"] >= REUSED_FROM]
    assert set(large) == {8 * (REUSED_FROM // 4)}
    assert len(device.pinned) == 2 * len(large) == len(device.copies)
    assert there.storage.require().batch_memory.pinned is None


def test_a_sampler_may_use_one_pinned_tensor_for_all_batches(device: LateDevice) -> None:
    scratch = torch.empty(8, REUSED_FROM // 8, dtype=torch.uint8, pin_memory=True)

    class Numbering(RandomSampler):
        number = 0

        def complete(self, rows: Any, info: dict[Any, Any]) -> Any:
            self.number += 1
            info["scratch"] = scratch.fill_(self.number)
            return rows

    rb = filled(CUDA, rows=large_rows(), sampler=Numbering())
    found = [rb.sample() for _ in range(3)]
    device.learn()
    for number, moved in enumerate(found, 1):
        assert bool((moved["scratch"] == number).all())


def test_a_process_that_is_forked_during_a_read_pins_nothing(device: LateDevice) -> None:
    rb = filled(CUDA, rows=large_rows())
    memory = rb.storage.require().batch_memory
    memory.pinned = os.getpid() + 1, []  # as a child sees it
    assert not memory.new((REUSED_FROM,), torch.uint8).is_pinned()
    memory.pinned = os.getpid(), []
    assert memory.new((REUSED_FROM,), torch.uint8).is_pinned()
    assert not memory.new((REUSED_FROM - 1,), torch.uint8).is_pinned()


def test_a_transform_may_use_one_pinned_tensor_for_all_batches(device: LateDevice) -> None:
    scratch = torch.empty(REUSED_FROM, dtype=torch.uint8, pin_memory=True)
    numbers = iter(range(1, 200))

    def numbered(data: Any) -> Any:
        number = next(numbers)
        data.set("scratch", scratch.fill_(number)[None].expand(8, -1))
        return data.set("number", torch.full((8,), number))

    rb = filled(CUDA, transform=Compose(numbered))
    found = [rb.sample() for _ in range(5)]
    device.learn()
    for moved in found:
        assert bool((moved["scratch"] == moved["number"][0]).all())


@pytest.mark.parametrize("prefetch", [None, 2])
def test_pinned_objects_of_a_list_may_change_after_a_sample(
    prefetch: int | None, device: LateDevice
) -> None:
    rows = [torch.empty(REUSED_FROM, dtype=torch.uint8, pin_memory=True) for _ in range(8)]
    objects = [row.fill_(number + 1) for number, row in enumerate(rows)]
    rb = filled(CUDA, rows=objects, storage=ListStorage(8), collate_fn=list, prefetch=prefetch)
    moved, info = rb.sample(return_info=True)
    rb.shutdown()
    for row in rows:
        row.fill_(0)
    device.learn()
    for part, slot in zip(moved, info["index"].tolist(), strict=True):
        assert bool((part == slot + 1).all())


def test_member_batches_arrive_before_an_ensemble_joins_them(device: LateDevice) -> None:
    rb = ReplayBufferEnsemble(filled(CUDA), filled(CUDA), batch_size=8)
    for _ in range(3):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("replaykit.mixture.joining.stacked", _after(device, "stacked"))
            patch.setattr("replaykit.mixture.joining.joined", _after(device, "joined"))
            found = rb.sample()
        assert found["id"].equal(found["index", "index"])
    assert {copy["kept for"] for copy in device.late} == {"learner's"}


def _after(device: LateDevice, name: str) -> Any:
    """Return a function of `joining` whose kernels come after the copies of the same stream."""
    join = getattr(joining, name)

    def function(*arguments: Any) -> Any:
        device.learn()
        return join(*arguments)

    return function


def test_missing_device_is_refused_by_name() -> None:
    if torch.cuda.is_available():
        missing = f"cuda:{torch.cuda.device_count()}"
    else:
        missing = "cuda"
    for call in (
        lambda: ReplayBuffer(device=missing),
        lambda: to_device(torch.zeros(2), missing),
        lambda: ReplayBufferEnsemble(filled(), device=missing),
        lambda: ReplayBuffer(device="nowhere"),
    ):
        refuses(ValueError, r"expected a device that torch can use here, got", call)


@pytest.mark.parametrize("prefetch", [None, 2])
def test_batches_move_to_devices_without_streams(prefetch: int | None) -> None:
    here, same_place = filled(), filled(device="cpu", prefetch=prefetch)
    for _ in range(4):
        assert same(here.sample(), same_place.sample())
    found = filled(device="meta", prefetch=prefetch).sample()
    assert {leaf.device.type for leaf in found.values(True, True)} == {"meta"}
    assert found["index"].shape == (8,)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_pinning_has_no_effect_without_a_cuda_device() -> None:
    for rows in (batch(0, 50), large_rows()):
        here, pinned = filled(rows=rows), filled(rows=rows, pin_memory=True, prefetch=2)
        for _ in range(3):
            found = pinned.sample()
            assert same(here.sample(), found)
            assert not found["x"].is_pinned()


# -- with a CUDA device ---------------------------------------------------------------------------

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("prefetch", [None, 1, 4])
def test_batches_arrive_on_a_cuda_device_during_other_work(
    prefetch: int | None, large: bool
) -> None:
    rows = large_rows() if large else None
    rb, here = filled(rows=rows, device="cuda", prefetch=prefetch), filled(rows=rows)
    stream = torch.cuda.Stream()
    weight = torch.rand(500, 500, device="cuda")
    found = []
    with torch.cuda.stream(stream):
        for _ in range(40):
            weight = weight @ weight / weight.norm()
            found.append({key: value.clone() for key, value in rb.sample().flatten_keys().items()})
    torch.cuda.synchronize()
    for batch_there in found:
        expected = here.sample().flatten_keys()
        assert all(batch_there[key].cpu().equal(value) for key, value in expected.items())


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("dedup", [False, True])
def test_pinned_batches_of_large_rows_are_pinned_when_they_are_gathered(dedup: bool) -> None:
    rows = large_rows().rename_key_("image", "observation")
    rows["next"] = TensorDict({"observation": rows["observation"].roll(-1, 0)}, [20])
    storage = LazyTensorStorage(20, dedup_next=dedup)
    rb, here = filled(rows=rows, storage=storage, pin_memory=True), filled(rows=rows)
    for _ in range(5):
        found, expected = rb.sample(), here.sample()
        assert same(found, expected)
        assert all(leaf.is_pinned() for leaf in found.values(True, True))


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda, needs_cuda])]
)
def test_priorities_are_updated_from_a_batch_on_a_device(device: str) -> None:
    rb = PrioritizedReplayBuffer(
        alpha=1.0, beta=1.0, storage=LazyTensorStorage(50), batch_size=8, device=device, prefetch=2
    )
    rb.extend(batch(0, 50))
    value = torch.ones(50)
    for _ in range(5):
        found = rb.sample()
        rb.update_tensordict_priority(found.set("td_error", found["index"] + 2.0))
        value[found["index"].cpu()] = found["index"].cpu() + 2.0
    drawn = rb.sample(40)  # not one of those made ahead
    assert drawn["priority_weight"].device.type == device
    expected = value.min() / value[drawn["index"].cpu()]
    torch.testing.assert_close(drawn["priority_weight"].cpu(), expected)
    rb.shutdown()
