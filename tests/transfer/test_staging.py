"""A ring of pinned buffers: none is written before its copy is over, and no batch before it came.

There is no accelerator here. In its place stands an engine that copies as late as it may: when
somebody waits for the event, or when the batch is looked at. A buffer that is written too early
then arrives with values of another batch.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import LazyTensorStorage, ReplayBuffer, ReplayBufferEnsemble, to_device
from replaykit.buffer import deliver
from replaykit.transfer import Arrival, CudaEngine, Staging, engine_for
from tests.support.refusals import refuses

_GARBAGE = 0xEE


class LateEngine:
    """A device of which copies take place in the order asked for, at the last moment allowed."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.pinnings: list[torch.Tensor] = []
        self.waiting: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        self.events = 0
        self.waits = 0
        self.orders: list[tuple[int, int]] = []

    def pinned(self, nbytes: int) -> torch.Tensor:
        self.pinnings.append(torch.full((nbytes,), _GARBAGE, dtype=torch.uint8))
        return self.pinnings[-1]

    def copy(self, host: torch.Tensor) -> tuple[torch.Tensor, int]:
        known = [block.untyped_storage().data_ptr() for block in self.pinnings]
        assert host.untyped_storage().data_ptr() in known, "not from pinned memory"
        with self.lock:
            self.events += 1
            there = torch.full((len(host),), _GARBAGE, dtype=torch.uint8)
            self.waiting.append((self.events, host, there))
            return there, self.events

    def happen(self, event: int) -> None:
        """All copies up to an event."""
        with self.lock:
            while self.waiting and self.waiting[0][0] <= event:
                _, host, there = self.waiting.pop(0)
                there.copy_(host)

    def wait(self, event: int) -> None:
        self.waits += 1
        self.happen(event)

    def order(self, event: int, there: torch.Tensor) -> None:
        self.orders.append((event, threading.get_ident()))

    def look(self, arrival: Arrival | None) -> None:
        """What the learner's stream does at last, after it was told to come behind the event."""
        assert arrival is not None
        assert arrival.event in [event for event, _ in self.orders], "not ordered"
        self.happen(arrival.event)


def batch(number: int, rows: int = 8) -> TensorDict:
    ids = torch.arange(rows) + 100 * number
    leaves = {"id": ids, "x": ids[:, None] * torch.ones(3), "next": {"done": ids[:, None] % 2 == 0}}
    return TensorDict(leaves, [rows])


def same(left: Any, right: Any) -> bool:
    keys = set(left.keys(True, True))
    return keys == set(right.keys(True, True)) and all(left[k].equal(right[k]) for k in keys)


def arrived(staging: Staging, engine: LateEngine, data: Any) -> Any:
    """Move data and look at it when it has arrived."""
    there, arrival = staging.move(data)
    assert arrival is not None
    arrival.order()
    engine.look(arrival)
    return there


def sent(staging: Staging, numbers: range) -> list[tuple[Any, Arrival | None]]:
    return [staging.move(batch(number)) for number in numbers]


@pytest.mark.parametrize("slots", [1, 2, 5])
def test_staging_buffer_is_reused_after_its_copy_ends(slots: int) -> None:
    engine = LateEngine()
    found = sent(Staging(engine, slots), range(20))
    assert len(engine.pinnings) == slots  # pinned once
    assert engine.waits == 20 - slots
    for number, (there, arrival) in enumerate(found):
        assert arrival is not None
        arrival.order()
        engine.look(arrival)
        assert same(there, batch(number))


def test_skipped_wait_for_event_corrupts_a_batch() -> None:
    """What the test above would see."""

    class Hasty(LateEngine):
        def wait(self, event: int) -> None:
            pass

    engine = Hasty()
    (first, _), *_ = sent(Staging(engine, 1), range(2))
    engine.happen(2)
    assert same(first, batch(1))
    assert not same(first, batch(0))


def test_a_batch_goes_in_one_copy_and_is_one_memory_there() -> None:
    engine = LateEngine()
    staging = Staging(engine, 2)
    large = {"image": torch.rand(64, 3, 64, 64), "small": torch.rand(64, 2), "flag": torch.ones(64)}
    there = arrived(staging, engine, (TensorDict(large, [64]), {"index": torch.arange(64)}))
    assert engine.events == 1
    leaves = [*there[0].values(), there[1]["index"]]
    assert len({leaf.untyped_storage().data_ptr() for leaf in leaves}) == 1
    assert all(there[0][name].equal(value) for name, value in large.items())
    assert there[1]["index"].equal(torch.arange(64))
    assert not any(leaf._is_view() for leaf in leaves)


def test_buffers_grow_with_the_batches_and_stay() -> None:
    engine = LateEngine()
    staging = Staging(engine, 1)
    for rows in (8, 20_000, 8, 20_000, 9_000):
        assert same(arrived(staging, engine, batch(1, rows)), batch(1, rows))
    assert len(engine.pinnings) == 2


def test_sparse_and_gradient_tensors_are_moved_separately() -> None:
    engine = LateEngine()
    staging = Staging(engine, 1)
    plain, sparse = torch.arange(4.0), torch.eye(3).to_sparse()
    grown = torch.ones(3, requires_grad=True) * 2
    given = {"a": plain, "b": sparse, "c": grown, "d": "text", "e": plain[:0]}
    moved = arrived(staging, engine, given)
    assert moved["a"].equal(plain)
    assert moved["b"].to_dense().equal(torch.eye(3))
    assert moved["c"].grad_fn is not None
    assert moved["d"] == "text"
    assert len(moved["e"]) == 0
    assert staging.move({"b": sparse})[1] is None


def test_a_copy_that_fails_gives_its_buffer_back() -> None:
    class Failing(LateEngine):
        fails = True

        def copy(self, host: torch.Tensor) -> tuple[torch.Tensor, int]:
            if self.fails:
                raise RuntimeError("out of memory")
            return super().copy(host)

    engine = Failing()
    staging = Staging(engine, 1)
    for _ in range(3):
        refuses(RuntimeError, "out of memory", staging.move, batch(0))
    engine.fails = False
    there, arrival = staging.move(batch(1))
    assert arrival is not None
    engine.happen(arrival.event)
    assert same(there, batch(1))


def test_threads_share_the_buffers_and_hold_no_lock_while_they_wait() -> None:
    class Watching(LateEngine):
        def wait(self, event: int) -> None:
            assert not staging._changed._is_owned()  # type: ignore[attr-defined]
            super().wait(event)

    engine = Watching()
    staging = Staging(engine, 2)
    wrong: list[Any] = []

    def work(first: int) -> None:
        try:
            for data in map(batch, range(first, first + 30)):
                assert same(arrived(staging, engine, data), data)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(100 * n,)) for n in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []
    assert len(engine.pinnings) <= 2


# -- in a buffer ----------------------------------------------------------------------------------


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> LateEngine:
    found = LateEngine()
    monkeypatch.setattr(deliver, "engine_for", lambda device: found)
    return found


def filled(**options: Any) -> ReplayBuffer:
    rb = ReplayBuffer(
        storage=LazyTensorStorage(50),
        batch_size=8,
        generator=torch.Generator().manual_seed(3),
        **options,
    )
    rb.extend(batch(0, 50))
    return rb


@pytest.mark.parametrize("prefetch", [None, 1, 3])
@pytest.mark.parametrize("way", ["sample", "iteration", "info"])
def test_staged_batches_equal_unstaged_batches(
    prefetch: int | None, way: str, engine: LateEngine
) -> None:
    """Each is ordered once, by the thread that gets it, and copied from at most n + 1 buffers."""
    there, here = filled(device="cpu", prefetch=prefetch), filled()
    iteration = iter(there)
    for number in range(1, 25):
        if way == "info":
            moved, info = there.sample(return_info=True)
        else:
            moved = there.sample() if way == "sample" else next(iteration)
        event, thread = engine.orders[-1]
        assert len(engine.orders) == number
        assert thread == threading.get_ident()
        engine.happen(event)
        assert same(moved, here.sample())
        leaves = [moved["x"], moved["id"]] + ([info["index"]] if way == "info" else [])
        assert len({leaf.untyped_storage().data_ptr() for leaf in leaves}) == 1
    there.shutdown()
    assert len(engine.pinnings) <= 1 + (prefetch or 0)


def test_member_batches_arrive_before_an_ensemble_joins_them(
    engine: LateEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def order(event: int, there: torch.Tensor) -> None:
        engine.happen(event)

    monkeypatch.setattr(engine, "order", order)
    rb = ReplayBufferEnsemble(filled(device="cpu"), filled(device="cpu"), batch_size=8)
    for _ in range(3):
        found = rb.sample()
        assert found["id"].equal(found["index", "index"])
    assert engine.events


def test_copied_buffer_gets_a_separate_staging_ring(engine: LateEngine) -> None:
    import copy

    one = filled(device="cpu")
    one.sample()
    other = copy.deepcopy(one)
    other.sample()
    assert other._staging is not one._staging


# -- what there is here ---------------------------------------------------------------------------


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
def test_devices_without_cuda_use_no_staging_ring(prefetch: int | None) -> None:
    assert engine_for(torch.device("cpu")) is engine_for(torch.device("meta")) is None
    here, same_place = filled(), filled(device="cpu", prefetch=prefetch)
    for _ in range(4):
        assert same(here.sample(), same_place.sample())
    found = filled(device="meta", prefetch=prefetch).sample()
    assert {leaf.device.type for leaf in found.values(True, True)} == {"meta"}
    assert found["index"].shape == (8,)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_pinning_has_no_effect_without_a_cuda_device() -> None:
    here, pinned = filled(), filled(pin_memory=True, prefetch=2)
    for _ in range(3):
        found = pinned.sample()
        assert same(here.sample(), found)
        assert not found["x"].is_pinned()


def test_cuda_calls_are_made_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names and order of the calls, by stand-ins for CUDA's streams and events."""
    asked: list[str] = []

    class Stream:
        def __init__(self, device: Any = None, name: str = "own") -> None:
            self.name = name

        def wait_event(self, event: Any) -> None:
            asked.append(f"{self.name} waits for {event.name}")

    class Event:
        name = "event"

        def __init__(self, *, blocking: bool) -> None:
            assert blocking

        def record(self, stream: Stream) -> None:
            asked.append(f"recorded on {stream.name}")

        def synchronize(self) -> None:
            asked.append("thread waits")

    @contextlib.contextmanager
    def within(stream: Stream) -> Iterator[None]:
        asked.append(f"in {stream.name}")
        yield
        asked.append("out")

    class Block:
        def to(self, device: Any, *, non_blocking: bool) -> Block:
            asked.append(f"copied, {non_blocking=}")
            return self

        def record_stream(self, stream: Stream) -> None:
            asked.append(f"kept for {stream.name}")

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", within)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(name="learner's"))
    engine = engine_for(torch.device("cuda", 0))
    assert isinstance(engine, CudaEngine)
    block: Any = Block()
    there, event = engine.copy(block)
    assert asked == ["in own", "copied, non_blocking=True", "recorded on own", "out"]
    asked.clear()
    engine.order(event, there)
    engine.wait(event)
    assert asked == ["learner's waits for event", "kept for learner's", "thread waits"]


# -- with a CUDA device ---------------------------------------------------------------------------

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("prefetch", [None, 1, 4])
def test_batches_arrive_on_a_cuda_device_during_other_work(prefetch: int | None) -> None:
    rb, here = filled(device="cuda", prefetch=prefetch), filled()
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
    assert rb._staging is not None
    assert all(slot.host is None or slot.host.is_pinned() for slot in rb._staging._free)


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda, needs_cuda])]
)
def test_priorities_are_updated_from_a_batch_on_a_device(device: str) -> None:
    from replaykit import PrioritizedReplayBuffer

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
