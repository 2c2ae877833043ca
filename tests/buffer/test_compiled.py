"""Calls of buffers and their parts in functions that torch.compile compiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    LazyTensorStorage,
    LinearScheduler,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    RoundRobinWriter,
    Sampler,
    SamplerWithoutReplacement,
    SliceSampler,
    SumSegmentTree,
)
from tests.buffer.building import STORAGES

SAMPLERS: dict[str, Callable[[], Sampler]] = {
    "random": RandomSampler,
    "passes": SamplerWithoutReplacement,
    "prioritized": lambda: PrioritizedSampler(alpha=0.7, beta=0.5),
    "slices": lambda: SliceSampler(num_slices=2, end_key=("next", "done")),
}


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def _rows(count: int, first: int = 0) -> TensorDict:
    x = torch.arange(first, first + count, dtype=torch.float32)
    done = (x % 5 == 4)[:, None]
    return TensorDict({"x": x[:, None].repeat(1, 3), "y": x, "next": {"done": done}}, [count])


def _buffer(storage: str = "tensor", sampler: str = "random", **options: Any) -> ReplayBuffer:
    made = STORAGES[storage](32, compilable=True)
    writer = RoundRobinWriter(track_generations=True, compilable=True)
    buffer = ReplayBuffer(
        storage=made,
        sampler=SAMPLERS[sampler](),
        writer=writer,
        batch_size=4,
        generator=torch.Generator().manual_seed(0),
        compilable=True,
        **options,
    )
    buffer.extend(_rows(20))
    return buffer


# Each takes a buffer and gives a tensor that tells what happened.


def _sample(buffer: ReplayBuffer) -> torch.Tensor:
    return buffer.sample()["y"] * 2


def _sample_more(buffer: ReplayBuffer) -> torch.Tensor:
    data, info = buffer.sample(8, return_info=True)
    total = (data["y"] + info["index"]).sum() + buffer.next()["y"].sum()
    for place, batch in enumerate(buffer):
        total = total + batch["y"].sum()
        if place == 2:
            break
    return total


def _write(buffer: ReplayBuffer) -> torch.Tensor:
    slot = buffer.add(_rows(1, 50)[0])
    index = buffer.extend(_rows(15, 60))
    return (index + buffer.write_count).sum() + buffer[slot]["x"] * 2


def _read(buffer: ReplayBuffer) -> torch.Tensor:
    every, first, some, last = buffer[:], buffer[0], buffer[[1, 3]], buffer[-2:]
    facts = buffer.stats()
    total = every["y"].sum() + first["y"] + some["y"].sum() * last["y"].sum()
    return total + len(buffer) + facts["size"] + facts["capacity"]


def _read_storage(buffer: ReplayBuffer) -> torch.Tensor:
    storage = buffer.storage
    total = sum((row["y"] for row in storage), torch.zeros(()))
    rows = storage.get(range(3))
    some = sum(row["y"] for row in rows) if isinstance(rows, list) else rows["y"].sum()
    return total + some + len(storage) + storage.max_size


def _empty(buffer: ReplayBuffer) -> torch.Tensor:
    buffer.empty()
    left = torch.zeros(()) + len(buffer)
    buffer.extend(_rows(4))
    return left + buffer[:]["y"].sum()


def _write_back(buffer: ReplayBuffer) -> torch.Tensor:
    rows = buffer[:].clone()
    rows["y"] = rows["y"] * 3
    buffer.write_all(rows)
    buffer[0] = buffer[1]
    return buffer[:]["y"] + 1


def _set_columns(buffer: ReplayBuffer) -> torch.Tensor:
    buffer["y"] = torch.ones(len(buffer)) * 3
    buffer.set_at_("y", torch.tensor([5.0, 6.0]), [0, 1])
    buffer.update_({"x": torch.zeros(len(buffer), 3)})
    return buffer["y"] + buffer["x"].sum()


def _patch(buffer: ReplayBuffer) -> torch.Tensor:
    batch = buffer.sample()
    patch = {"y": batch["y"] + 100}
    result = buffer.update_if_present(
        index=batch["index"], generation=batch["index_generation"], patch=patch
    )
    return result.updated + buffer["y"].sum()


def _cut(buffer: ReplayBuffer) -> torch.Tensor:
    buffer.cut()
    return torch.zeros(()) + sum(len(episode) for episode in buffer.episodes)


def _learn(buffer: ReplayBuffer) -> torch.Tensor:
    batch = buffer.sample()
    batch["td_error"] = batch["y"] + 0.5
    buffer.update_tensordict_priority(batch)
    buffer.update_priority(torch.tensor([0, 1]), torch.tensor([3.0, 4.0]))
    LinearScheduler(buffer.sampler, "beta", 1.0, 10).step()
    return buffer.sample()["y"] + buffer.sampler.beta


def _save(buffer: ReplayBuffer) -> torch.Tensor:
    state = buffer.state_dict()
    buffer.empty()
    buffer.load_state_dict(state)
    return buffer[:]["y"] + 1


ANY = [_sample, _sample_more, _write, _read, _read_storage, _empty]

COLUMNS = [_write_back, _set_columns, _patch, _cut, _save]


def _compare(call: Callable[[ReplayBuffer], torch.Tensor], backend: str, **made: Any) -> None:
    plain, compiled = _buffer(**made), _buffer(**made)
    run = torch.compile(lambda buffer, shift: call(buffer) * 2 + shift, backend=backend)
    for turn in range(3):
        shift = torch.tensor(float(turn))
        expected = call(plain) * 2 + shift
        assert torch.equal(run(compiled, shift), expected)


@pytest.mark.covering(1)
@pytest.mark.parametrize("call", ANY, ids=lambda call: call.__name__[1:])
@pytest.mark.parametrize("storage", STORAGES)
def test_a_compiled_function_calls_a_buffer_as_a_plain_one_does(storage: str, call: Any):
    _compare(call, "eager", storage=storage)


@pytest.mark.parametrize("call", COLUMNS, ids=lambda call: call.__name__[1:])
def test_a_compiled_function_edits_and_saves_as_a_plain_one_does(call: Any):
    _compare(call, "eager")


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_function_samples_as_a_plain_one_does(sampler: str, backend: str):
    _compare(_sample, backend, sampler=sampler)
    _compare(_sample, backend, sampler=sampler, prefetch=2)
    if sampler == "prioritized":
        _compare(_learn, backend, sampler=sampler)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch.compile's own look at it
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_training_step_runs_around_a_buffer(backend: str):
    buffer = _buffer(sampler="prioritized")
    weight = torch.ones(3, requires_grad=True)

    def step() -> torch.Tensor:
        batch = buffer.sample()
        error = batch["x"] @ weight - batch["y"]
        loss = (error.square() * batch["priority_weight"]).mean()
        loss.backward()
        batch["td_error"] = error.detach().abs()
        buffer.update_tensordict_priority(batch)
        return loss.detach()

    losses = [float(torch.compile(step, backend=backend)()) for _ in range(3)]
    assert all(loss > 0 for loss in losses)
    assert weight.grad is not None


def test_compiled_function_creates_buffers_and_trees():
    def make(rows: TensorDict) -> torch.Tensor:
        buffer = ReplayBuffer(storage=LazyTensorStorage(8), batch_size=2)
        buffer.extend(rows)
        tree = SumSegmentTree(4)
        tree[1] = 2.5
        return buffer[:]["y"] * tree.reduce()

    rows = _rows(5)
    found = torch.compile(make, backend="eager")(rows)
    assert torch.equal(found, rows["y"] * 2.5)


def test_fullgraph_compilation_is_refused_with_the_reason():
    buffer = _buffer()
    with pytest.raises(RuntimeError, match="run outside of compiled graphs"):
        torch.compile(_sample, backend="eager", fullgraph=True)(buffer)


def test_functions_of_users_are_compiled_as_before():
    """What a decorator of torch returns has the code of all that it decorates."""
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    @torch.no_grad()
    def own(x: torch.Tensor) -> torch.Tensor:
        return x.sin() + 1

    @torch.inference_mode(False)
    def other(x: torch.Tensor) -> torch.Tensor:
        return x.cos() + 1

    class Halved(RandomSampler):
        def halved(self, x: torch.Tensor) -> torch.Tensor:
            return x / 2

    sampler = Halved()
    x = torch.ones(3)
    for function in (own, other, sampler.halved):
        graphs.clear()
        assert torch.equal(torch.compile(function, backend=backend)(x), function(x))
        assert len(graphs) == 1
