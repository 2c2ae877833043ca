"""What the caller has set for tensors of their own has no say in the buffer's.

Training scripts set a default device, and collect under inference mode; addresses of tensors that
were made there must not reach the core, and memory that was taken there has to stay writable.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    ConsumingSampler,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    MaxSegmentTree,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    Sequence,
    StalenessAwareSampler,
    SumSegmentTree,
    TensorDictMaxValueWriter,
    Transition,
)

STORAGES: dict[str, Callable[[], Any]] = {
    "list": lambda: ListStorage(12),
    "tensor": lambda: LazyTensorStorage(12),
    "memmap": lambda: LazyMemmapStorage(12),
}
SAMPLERS: dict[str, Callable[[], Any]] = {
    "random": RandomSampler,
    "pass": SamplerWithoutReplacement,
    "prioritized": lambda: PrioritizedSampler(alpha=0.7, beta=0.5),
    "consuming": ConsumingSampler,
    "staleness": lambda: StalenessAwareSampler(
        staleness_weight_fn=torch.ones_like, version_key="id"
    ),
    "batch": lambda: PrioritizedSampler(alpha=0.7, beta=0.5, weight_norm="batch", stratified=True),
}
WINDOWS: dict[str, Callable[[], Any]] = {
    "sequences": SAMPLERS["prioritized"],
    "slices": lambda: _slices(strict_length=False),
    "whole slices": lambda: _slices(unit="slice", pad="right"),
    "distinct slices": lambda: _slices(draw="without_replacement", allow_short=True),
}
KINDS = [(storage, sampler) for storage in STORAGES for sampler in SAMPLERS]
KINDS += [("tensor", sampler) for sampler in WINDOWS]
PLACES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "default device": lambda: torch.device("meta"),
    "inference": torch.inference_mode,
}
CPU = torch.device("cpu")


def _slices(**options: Any) -> PrioritizedSliceSampler:
    return PrioritizedSliceSampler(alpha=0.7, beta=0.5, slice_len=2, **options)


def _rows(start: int, count: int) -> TensorDict:
    ids = torch.arange(start, start + count, device="cpu")
    image = ids[:, None].expand(count, 600).to(torch.uint8)
    after = {"done": (ids % 5 == 4)[:, None]}
    return TensorDict({"id": ids, "x": ids[:, None] * 2.0, "image": image, "next": after}, [count])


def _use(buffer: ReplayBuffer) -> None:
    """Writes, draws, updates; what comes back is what was written."""
    for start, count in ((0, 5), (5, 9), (14, 1)):
        index = buffer.extend(_rows(start, count))
        assert index.device == CPU
    buffer.add(_rows(15, 1)[0])
    for size in (2, 4, 12):
        batch = buffer.sample(size)
        assert batch["id"].device == CPU
        assert torch.equal(batch["x"][:, 0], batch["id"] * 2.0)
        assert torch.equal(batch["image"][:, 7].long(), batch["id"])
        if buffer.sampler.prioritized:
            generation = batch.get("index_generation", None)
            buffer.update_priority(batch["index"], batch["x"][:, 0].abs(), generation=generation)
            batch["td_error"] = batch["x"]
            buffer.update_tensordict_priority(batch)
            buffer.update_priority([0, 1], [1.0, 2.0])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("storage", "sampler"), KINDS)
def test_default_device_does_not_affect_buffers(
    storage: str, sampler: str, place: str, tmp_path: Path
) -> None:
    make = (SAMPLERS | WINDOWS)[sampler]
    with PLACES[place]():
        unit = Sequence(2, burn_in=1) if sampler == "sequences" else Transition()
        buffer = ReplayBuffer(storage=STORAGES[storage](), sampler=make(), sample_unit=unit)
        _use(buffer)
        buffer.dumps(tmp_path / "saved")
    _use(buffer)
    buffer.empty()
    _use(buffer)
    with PLACES[place]():
        buffer.loads(tmp_path / "saved")
        _use(buffer)
        buffer.set_sampler(make())
        _use(buffer)
    if buffer.sampler.prioritized:
        buffer.sampler.alpha = 0.2
    _use(buffer)


@pytest.mark.parametrize("place", PLACES)
def test_default_device_does_not_affect_lanes_and_max_value_writers(place: str) -> None:
    with PLACES[place]():
        lanes = ReplayBuffer(
            storage=LazyTensorStorage(12, ndim=2), sampler=PrioritizedSampler(alpha=1, beta=1)
        )
        lanes.extend(_rows(0, 6).view(2, 3))
        batch = lanes.sample(8)
        assert batch["index"].shape == (8, 2)
        assert torch.equal(batch["x"][:, 0], batch["id"] * 2.0)
        largest = ReplayBuffer(
            storage=LazyTensorStorage(3), writer=TensorDictMaxValueWriter(rank_key="x")
        )
        largest.extend(_rows(0, 9))
        assert sorted(largest[:]["id"].tolist()) == [6, 7, 8]
    lanes.extend(_rows(6, 6).view(2, 3))
    assert lanes.sample(4)["id"].device == CPU


@pytest.mark.parametrize("place", PLACES)
def test_default_device_does_not_affect_segment_trees(place: str) -> None:
    with PLACES[place]():
        tree, most = SumSegmentTree(9), MaxSegmentTree(9)
    for where in (PLACES[place], lambda: torch.device("cpu")):
        with where():
            tree[[1, 2]] = [1.0, 3.0]
            tree[4] = 2.0
            most[torch.tensor([3, 5], device="cpu")] = torch.tensor([1.0, 7.0], device="cpu")
            assert (tree.total, most.reduce()) == (6.0, 7.0)
            assert tree.find_prefix(3.5) == 2
            index, weight = tree.draw(20)
            assert set(index.tolist()) <= {1, 2, 4}
            assert index.device == weight.device == CPU
            starts = torch.tensor([0, 2], device="cpu")
            assert tree.reduce(starts, starts + 2).tolist() == [1.0, 3.0]
            tree.load(tree.leaves)
