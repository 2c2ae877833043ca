"""Batches: what is in them, whose they are, and where they lie."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorClass, TensorDict

from replaykit import (
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorStorage,
)
from tests.buffer.building import KINDS, buffer_of, check_whole, rows, same
from tests.support.accelerator import no_wait
from tests.support.refusals import refuses


class Point(TensorClass):
    """Content that is no TensorDict."""

    x: torch.Tensor


# -- what is in a batch ---------------------------------------------------------------------------


@pytest.mark.pitfall("BD9")
@pytest.mark.pitfall("RD4")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sampler", ["random", "without", "ordered", "prioritized"])
@pytest.mark.parametrize("track", [False, True])
def test_a_batch_has_its_rows_their_index_and_no_more(kind: str, sampler: str, track: bool):
    """BD9, RD4, D1: ``index`` is ``[B]`` in data and info, and says where each row lies."""
    writer = RoundRobinWriter(track_generations=track)
    buffer = buffer_of(kind, 8, sampler=sampler, writer=writer)
    buffer.extend(rows(11))
    data, info = buffer.sample(5, return_info=True)
    extra = {"index", "index_generation"} if track else {"index"}
    if sampler == "prioritized":
        extra = {"index", "index_generation", "priority_weight"}
    assert set(data.keys()) == {"id", "observation", "pixels", "next"} | extra
    assert set(info) == extra
    assert data.batch_size == (5,)
    for key in extra:
        dtype = torch.float32 if key == "priority_weight" else torch.int64
        assert (info[key].shape, info[key].dtype) == ((5,), dtype)
        assert info[key] is data[key] or torch.equal(info[key], data[key])
    slots = {number % 8: number for number in range(11)}
    assert check_whole(data) == [slots[i] for i in data["index"].tolist()]
    if track:
        assert data["index_generation"].tolist() == [data["id"][i] // 8 for i in range(5)]
    assert not data.is_locked


@pytest.mark.pitfall("BD9")
@pytest.mark.parametrize("sampler", ["random", "without", "ordered", "prioritized"])
def test_an_index_has_a_coordinate_per_dimension_of_the_storage(sampler: str):
    """BD9: ``[B, ndim]``, never a tuple."""
    buffer = buffer_of("tensor", 24, ndim=3, sampler=sampler)
    data = torch.arange(24).view(2, 3, 4)
    buffer.extend(TensorDict({"x": data}, [2, 3, 4]))
    batch, info = buffer.sample(10, return_info=True)
    assert batch.batch_size == (10,)
    assert batch["index"].shape == info["index"].shape == (10, 3)
    time_major = data.transpose(0, 2)
    assert batch["x"].tolist() == [int(time_major[tuple(i)]) for i in batch["index"].tolist()]


def test_content_without_tensordict_is_sampled_without_info():
    for content in (
        torch.arange(4.0),
        Point(x=torch.arange(4.0), batch_size=[4]),
        {"a": torch.arange(4), "b": (torch.zeros(4, 2),)},
    ):
        buffer = ReplayBuffer(storage=TensorStorage(content))
        data, info = buffer.sample(3, return_info=True)
        assert type(data) is type(content)
        assert type(buffer.sample(3)) is type(content)
        assert info["index"].shape == (3,)
    assert torch.equal(data["a"], info["index"])
    numbers = ReplayBuffer(storage=ListStorage(5))
    numbers.extend([3, 4, 5])
    data, info = numbers.sample(6, return_info=True)
    assert torch.equal(data, info["index"] + 3)


@pytest.mark.pitfall("IF7")
def test_info_can_be_left_out_of_the_data():
    """IF7: ``include_info=False`` is deprecated; ``True`` is the default."""
    buffer = buffer_of(filled=4)
    with pytest.warns(DeprecationWarning, match="include_info"):
        data, info = buffer.sample(2, return_info=True, include_info=False)
    assert set(data.keys()) == {"id", "observation", "pixels", "next"}
    assert set(info) == {"index"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "index" in set(buffer.sample(2, include_info=True).keys())


@pytest.mark.pitfall("RD1")
@pytest.mark.parametrize("constructor", [None, 3])
def test_the_batch_size_of_the_call_wins(constructor: int | None):
    """E23: without a warning."""
    buffer = buffer_of(filled=10, batch_size=constructor)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(buffer.sample(7)) == len(buffer.sample(batch_size=7)) == 7
    if constructor is None:
        for call in (buffer.sample, buffer.can_sample):
            refuses(RuntimeError, "batch_size", call)
    else:
        assert len(buffer.sample()) == 3
    for bad in (0, -1, 2.0, True, "3", torch.tensor(3)):
        refuses(ValueError, "batch_size", buffer.sample, bad)


def test_rows_that_are_trajectories_repeat_their_index():
    data = TensorDict({"x": torch.arange(24).view(4, 3, 2)}, [4, 3, 2])
    for kind in ("list", "tensor"):
        buffer = buffer_of(kind, writer=RoundRobinWriter(track_generations=True))
        buffer.extend(data)
        batch, info = buffer.sample(5, return_info=True)
        assert batch.batch_size == (5, 3, 2)
        for key in ("index", "index_generation"):
            assert batch[key].shape == (5, 3, 2)
            assert info[key].shape == (5,)
            assert torch.equal(batch[key], info[key][:, None, None].expand(5, 3, 2))
        assert torch.equal(batch["x"], data["x"][info["index"]])
        batch["index"] += 1  # memory of its own
        assert int(info["index"].max()) < 4


@pytest.mark.parametrize("stack_dim", [0, 1, -1])
def test_lazy_stacks_carry_the_index_along_their_stack_dimension(stack_dim: int):
    buffer = ReplayBuffer(storage=LazyStackStorage(10, stack_dim=stack_dim))
    for number in range(4):
        buffer.add(TensorDict({"x": torch.full((3, number + 1), number)}, [3]))
    batch, info = buffer.sample(6, return_info=True)
    assert isinstance(batch, LazyStackedTensorDict)
    dim = stack_dim % 2
    assert batch.batch_size == ((6, 3) if dim == 0 else (3, 6))
    assert info["index"].shape == (6,)
    for number, row in zip(info["index"].tolist(), batch.unbind(dim), strict=True):
        assert row["x"].shape == (3, number + 1)
        assert (row["x"] == number).all()
        assert row["index"].tolist() == [number] * 3


def test_rows_of_different_keys_can_be_stacked_lazily():
    buffer = ReplayBuffer(storage=LazyStackStorage(10))
    buffer.add(TensorDict({"x": torch.zeros(()), "a": torch.ones(())}, []))
    buffer.add(TensorDict({"x": torch.zeros(()), "b": torch.ones(())}, []))
    batch = buffer.sample(20)
    assert set(batch.keys()) == {"x", "index"}
    assert {name for row in batch.unbind(0) for name in row.keys()} == {"x", "index", "a", "b"}  # noqa: SIM118


# -- whose it is ----------------------------------------------------------------------------------


def _scribble(data: Any) -> None:
    if isinstance(data, torch.Tensor):
        data.fill_(113)
    elif isinstance(data, dict):
        for value in data.values():
            _scribble(value)
    elif isinstance(data, (list, tuple)):
        for value in data:
            _scribble(value)
    else:
        for value in data.values(True, True):
            value.fill_(113)


@pytest.mark.parametrize(
    ("kind", "collate"),
    # A list's rows come as they are; those of other storages are stacked already.
    [*((kind, collate) for kind in KINDS for collate in (None, "list")), ("list", "stack")],
)
@pytest.mark.parametrize("prefetch", [None, 2])
def test_editing_a_batch_never_changes_the_buffer(
    kind: str, collate: str | None, prefetch: int | None
):
    """G3: whatever the storage, and where a ``collate_fn`` hands the rows out as they are."""
    collate_fn = {None: None, "list": lambda rows: list(rows), "stack": torch.stack}[collate]
    buffer = buffer_of(
        kind, filled=6, sampler="without", batch_size=3, collate_fn=collate_fn, prefetch=prefetch
    )
    before = buffer.state_dict()["_storage"]
    for _ in range(4):
        data, info = buffer.sample(return_info=True)
        _scribble(data)
        _scribble(info)
    same(before, buffer.state_dict()["_storage"])
    assert sorted(int(i) for _ in range(2) for i in buffer.sample(None, True)[1]["index"]) == list(
        range(6)
    )


def test_tensors_inside_other_objects_are_copied_for_a_collate_function():
    """G3: also rows that are mappings, lists or tuples of tensors."""
    buffer = ReplayBuffer(storage=ListStorage(3), collate_fn=list)
    buffer.extend([{"a": torch.zeros(2), "b": [torch.zeros(1), (torch.zeros(1), "text")]}])
    _scribble(buffer.sample(2)[0]["a"])
    _scribble(buffer.sample(2)[0]["b"][0])
    _scribble(buffer.sample(2)[0]["b"][1][0])
    row = buffer.sample(1)[0]
    assert row["a"].tolist() == [0.0, 0.0]
    assert (row["b"][0].item(), row["b"][1]) == (0.0, (torch.zeros(1), "text"))


# -- how rows are drawn, and where they lie -------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", ["tensor", "list", "tensorclass", "pytree"])
def test_a_batch_is_pinned_where_there_is_an_accelerator(kind: str):
    content = {
        "tensor": rows(4),
        "list": rows(4),
        "tensorclass": Point(x=torch.arange(4.0), batch_size=[4]),
        "pytree": (torch.zeros(4), {"a": torch.zeros(4)}),
    }[kind]
    storage = ListStorage(4) if kind == "list" else LazyTensorStorage(4)
    buffer = ReplayBuffer(storage=storage, pin_memory=True, transform=lambda data: data)
    buffer.extend(content)
    data, info = buffer.sample(3, return_info=True)
    assert info["index"].is_pinned()
    first = data[1]["a"] if kind == "pytree" else data.x if kind == "tensorclass" else data["id"]
    assert first.is_pinned()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("generator", [None, "cpu"])
@pytest.mark.parametrize("sampler", ["random", "slices", "prioritized"])
def test_samples_of_rows_on_a_device_do_not_wait_for_it(sampler: str, generator: Any):
    chosen = {
        "random": lambda: RandomSampler(),
        "slices": lambda: SliceSampler(slice_len=2),
        "prioritized": lambda: PrioritizedSampler(20, 0.6, 0.4),
    }[sampler]()
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(20, device="cuda"),
        sampler=chosen,
        generator=None if generator is None else torch.Generator(generator),
        batch_size=6,
    )
    done = torch.zeros(20, 1, dtype=torch.bool)
    buffer.extend(rows(20).set(("next", "done"), done))
    buffer.sample()  # makes what is kept for later samples
    with no_wait():
        batches = [buffer.sample() for _ in range(3)]
    assert all(torch.equal(batch["id"], batch["index"]) for batch in batches)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("sampler", ["random", "without"])
@pytest.mark.parametrize("prefetch", [None, 2])
@pytest.mark.parametrize("generator", ["cpu", "cuda"])
def test_a_batch_lives_on_the_device_of_the_storage(sampler: str, prefetch: Any, generator: str):
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(20, device="cuda"),
        sampler=SamplerWithoutReplacement() if sampler == "without" else None,
        writer=RoundRobinWriter(track_generations=True),
        generator=torch.Generator(generator),
        prefetch=prefetch,
        batch_size=5,
    )
    buffer.extend(rows(20))
    weight, batches = torch.rand(2000, 2000, device="cuda"), []
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(6):
            for _ in range(20):
                weight = weight @ weight / weight.norm()
            batches.append(buffer.sample().clone())
    torch.cuda.synchronize()
    for batch in batches:
        assert batch["id"].device.type == batch["index"].device.type == "cuda"
        assert torch.equal(batch["id"], batch["index"])
