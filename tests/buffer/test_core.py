"""What a buffer is made of: arguments, defaults, components, description."""

from __future__ import annotations

import inspect
import json
import threading
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    Compose,
    ImmutableDatasetWriter,
    LazyTensorStorage,
    ListStorage,
    RandomSampler,
    ReplayBuffer,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    TensorStorage,
    Transition,
)
from tests.buffer.building import buffer_of, rows, same
from tests.support.refusals import refuses


@pytest.mark.pitfall("IF6")
@pytest.mark.pitfall("RD13")
def test_every_argument_is_visible_and_documented():
    """The snapshot of the public interface has the names and defaults."""
    parameters = dict(inspect.signature(ReplayBuffer).parameters)
    parameters.pop("_ray_trace_ctx", None)  # Ray adds it to the methods of its actors' classes
    assert {p.kind for p in parameters.values()} == {inspect.Parameter.KEYWORD_ONLY}
    for name in parameters:
        assert f"        {name}: " in (ReplayBuffer.__doc__ or ""), name
    for name, method in inspect.getmembers(ReplayBuffer, inspect.isfunction):
        assert name.startswith("_") or inspect.getdoc(method), name


def test_buffer_without_arguments_has_the_default_components():
    buffer = ReplayBuffer()
    assert (type(buffer.storage), buffer.storage.max_size) == (ListStorage, 1000)
    assert type(buffer.sampler) is RandomSampler
    assert type(buffer.writer) is RoundRobinWriter
    assert (type(buffer.transform), len(buffer.transform)) == (Compose, 0)
    assert buffer.batch_size is None
    assert buffer.initialized
    assert (len(buffer), buffer.write_count, buffer.dim_extend) == (0, 0, 0)
    assert ReplayBuffer(storage=LazyTensorStorage(10, ndim=3)).dim_extend == 2


@pytest.mark.parametrize("name", ["storage", "sampler", "writer"])
def test_a_component_of_the_wrong_kind_is_named(name: str):
    kind = name.capitalize()
    refuses(TypeError, f"{name} must be either a {kind} .*got int", ReplayBuffer, **{name: 5})
    refuses(TypeError, f"callable that returns a {kind}", ReplayBuffer, **{name: lambda: 5})


@pytest.mark.parametrize(
    ("keywords", "error", "match"),
    [
        ({"sample_unit": 3}, TypeError, "SampleUnit instance, got int"),
        ({"collate_fn": 3}, TypeError, "collate_fn"),
        ({"generator": 3}, TypeError, "torch.Generator, got int"),
        ({"transform": 3}, RuntimeError, "transform"),
        ({"transform_factory": 3}, TypeError, "transform_factory"),
        ({"transform": abs, "transform_factory": lambda: abs}, TypeError, "both"),
        ({"batch_size": 0}, ValueError, "at least 1, got 0"),
        ({"batch_size": True}, ValueError, "batch_size"),
        ({"batch_size": 2.0}, ValueError, "batch_size"),
        ({"prefetch": -1, "batch_size": 2}, ValueError, "prefetch"),
        ({"prefetch": True, "batch_size": 2}, ValueError, "prefetch"),
        ({"prefetch": 2}, ValueError, "batch_size"),
        ({"dim_extend": -1}, ValueError, "dim_extend"),
        ({"dim_extend": 1.0}, ValueError, "dim_extend"),
        ({"priority_key": 5}, TypeError, "key"),
        ({"storage": LazyTensorStorage(4, ndim=2), "dim_extend": 2}, ValueError, "dim_extend"),
        ({"sampler": SamplerWithoutReplacement(drop_last=True)}, ValueError, "drop_last"),
        (
            {"storage": LazyTensorStorage(4, ndim=2), "writer": TensorDictMaxValueWriter()},
            ValueError,
            "ndim",
        ),
        ({"storrage": 3}, TypeError, "storrage"),
        ({"checkpointer": object()}, ValueError, "checkpointer"),
    ],
)
def test_a_bad_argument_is_refused_by_name(keywords: dict[str, Any], error: type, match: str):
    refuses(error, match, ReplayBuffer, **keywords)
    refuses(error, match, TensorDictReplayBuffer, **keywords)


@pytest.mark.pitfall("IF10")
@pytest.mark.parametrize("prefetch", [None, 0])
def test_disabled_prefetch_needs_no_batch_size_and_no_thread(prefetch: int | None):
    running = threading.active_count()
    buffer = ReplayBuffer(prefetch=prefetch)
    buffer.extend(torch.arange(3))
    buffer.sample(2)
    assert threading.active_count() == running
    assert buffer.stats()["prefetch_queue_size"] == 0


def test_dim_extend_cannot_be_changed_later():
    buffer = ReplayBuffer(storage=LazyTensorStorage(4, ndim=2))
    buffer.dim_extend = 1
    with pytest.raises(RuntimeError, match="dim_extend is 1"):
        buffer.dim_extend = 0
    assert buffer.dim_extend == 1


@pytest.mark.pitfall("IF5")
@pytest.mark.pitfall("WR7")
def test_a_list_is_rows_and_a_tuple_is_a_pytree():
    """IF5: lists mean many rows, tuples one record of several tensors."""
    listed = ReplayBuffer(storage=LazyTensorStorage(10))
    assert listed.extend([torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])]).tolist() == [0, 1]
    assert listed[:].tolist() == [[1.0, 2.0], [3.0, 4.0]]
    pytree = ReplayBuffer(storage=LazyTensorStorage(10))
    assert pytree.extend((torch.arange(3), torch.zeros(3, 2))).tolist() == [0, 1, 2]
    first, second = pytree[:]
    assert (first.tolist(), second.shape) == ([0, 1, 2], (3, 2))
    objects = ReplayBuffer(storage=ListStorage(10), collate_fn=list)
    objects.add((1, "a"))
    assert objects.extend([(2, "b"), (3, "c")]).tolist() == [1, 2]
    assert objects[:] == [(1, "a"), (2, "b"), (3, "c")]
    refuses(TypeError, r"list, tuple.*add", objects.extend, 7)


@pytest.mark.pitfall("IF10")
def test_arguments_without_effect_are_accepted():
    """IF10: with ``compilable`` or without it, a call may stand in a compiled function."""
    writer = ImmutableDatasetWriter(compilable=True)
    buffer = ReplayBuffer(
        storage=TensorStorage(torch.arange(3), compilable=True), writer=writer, compilable=True
    )
    assert sorted(buffer.sample(50).unique().tolist()) == [0, 1, 2]
    assert isinstance(ReplayBuffer(sample_unit=Transition()), ReplayBuffer)


# -- description ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["list", "tensor"])
def test_stats_are_plain_numbers(kind: str):
    buffer = buffer_of(kind, 8, delayed_init=kind == "tensor")
    expected = {
        "size": 0,
        "write_count": 0,
        "prefetch_queue_size": 0,
        "initialized": kind != "tensor",
        "capacity": 8,
        "utilization": 0.0,
    }
    assert buffer.stats() == expected
    for count, size, total in ((6, 6, 6), (5, 8, 11)):
        buffer.extend(rows(count))
        changed = {"size": size, "write_count": total, "utilization": size / 8, "initialized": True}
        assert buffer.stats() == expected | changed
    assert json.loads(json.dumps(buffer.stats())) == buffer.stats()
    buffer.shutdown()
    assert buffer.stats()["size"] == 8


def test_stats_count_elements_where_there_are_lanes():
    buffer = ReplayBuffer(storage=LazyTensorStorage(100, ndim=2))
    buffer.extend(TensorDict({"x": torch.zeros(3, 4)}, [3, 4]))
    stats = buffer.stats()
    assert (stats["size"], stats["write_count"], stats["capacity"]) == (12, 12, 102)


def test_repr_names_every_component():
    buffer = buffer_of(filled=3, batch_size=2, sampler="without", transform=torch.neg)
    text = repr(buffer)
    for part in ("LazyTensorStorage", "len=3", "SamplerWithoutReplacement", "RoundRobinWriter"):
        assert part in text
    assert "batch_size=2" in text
    assert "Compose(" in text
    assert repr(TensorDictReplayBuffer()).startswith("TensorDictReplayBuffer(")


def test_the_tensordict_buffer_is_the_same_under_another_name():
    plain, named = (
        cls(
            storage=LazyTensorStorage(10),
            batch_size=4,
            priority_key="p",
            generator=torch.Generator().manual_seed(3),
        )
        for cls in (ReplayBuffer, TensorDictReplayBuffer)
    )
    for buffer in (plain, named):
        buffer.extend(rows(7))
    for _ in range(5):
        same(plain.sample(), named.sample())
    assert isinstance(named, ReplayBuffer)
