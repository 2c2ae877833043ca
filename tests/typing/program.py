"""A program as users write it, for type checkers."""

from __future__ import annotations

from functools import partial

import torch
from tensordict import TensorDict
from typing_extensions import assert_type

import replaykit
from replaykit import (
    LaneWriter,
    LazyMemmapStorage,
    LazyTensorStorage,
    NStep,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    ReplayBuffer,
    RoundRobinWriter,
    Sampler,
    SliceSampler,
    Storage,
    TensorDictReplayBuffer,
    VectorSteps,
    Writer,
    transition,
)


def learn(batch: TensorDict) -> torch.Tensor:
    return batch["next", "reward"].mean()


def train(rb: ReplayBuffer, steps: int) -> float:
    """Any buffer of TensorDicts, whatever its components."""
    total = 0.0
    for _ in range(steps):
        total += float(learn(rb.sample()))
    return total


def collect(steps: VectorSteps) -> TensorDict:
    steps.reset(seed=0)
    return steps.step([0, 1])


def main() -> None:
    """Read by type checkers, never run."""
    rb = ReplayBuffer(
        storage=LazyTensorStorage(1000),
        sampler=PrioritizedSampler(1000, 0.7, 0.5),
        writer=RoundRobinWriter(),
        transform=NStep(3, 0.99),
        batch_size=32,
        prefetch=2,
    )
    assert_type(
        rb, ReplayBuffer[TensorDict, LazyTensorStorage, PrioritizedSampler, RoundRobinWriter]
    )
    assert_type(rb.sampler, PrioritizedSampler)
    assert_type(rb.storage, LazyTensorStorage)
    assert_type(rb.writer, RoundRobinWriter)
    rb.sampler.beta = 0.6
    rb.add(transition(torch.zeros(3), 0, 1.0, torch.zeros(3), False, False))

    assert_type(rb.sample(), TensorDict)
    assert_type(rb.sample(8), TensorDict)
    assert_type(rb.sample(timeout=1.0), TensorDict)
    batch, info = rb.sample(return_info=True)
    assert_type(batch, TensorDict)
    batch, info = rb.sample(8, True)
    assert_type(batch, TensorDict)
    print(info["index"])
    for batch in rb:
        assert_type(batch, TensorDict)
        learn(batch)
    assert_type(rb.next(), "TensorDict | None")
    assert_type(rb[:], TensorDict)
    assert_type(rb[0], TensorDict)
    assert_type(rb[torch.tensor([0])], TensorDict)
    assert_type(rb.read_all_in_order(), TensorDict)
    print(rb["next", "reward"].shape)
    for episode in rb.episodes:
        assert_type(episode.rows(), TensorDict)
    same = rb.append_transform(replaykit.RewardClip(-1, 1))
    assert_type(same.sampler, PrioritizedSampler)
    train(rb, 10)

    made = ReplayBuffer(
        storage=partial(LazyMemmapStorage, 100), sampler=lambda: SliceSampler(slice_len=4)
    )
    assert_type(made.storage, LazyMemmapStorage)
    assert_type(made.sampler, SliceSampler)
    train(made, 1)

    plain = ReplayBuffer(batch_size=4)
    assert_type(plain.sampler, Sampler)
    assert_type(plain.storage, Storage)
    assert_type(plain.writer, Writer)
    assert_type(plain.sample(), TensorDict)

    lanes = TensorDictReplayBuffer(
        storage=LazyTensorStorage(10, lane_key="env"), writer=LaneWriter(5)
    )
    assert_type(lanes.writer, LaneWriter)
    assert_type(lanes.sample(), TensorDict)
    train(lanes, 1)

    weighted = PrioritizedReplayBuffer(alpha=0.7, beta=0.5, storage=LazyTensorStorage(10))
    assert_type(weighted.sampler, PrioritizedSampler)
    assert_type(weighted.storage, LazyTensorStorage)
    train(weighted, 1)

    tensors: ReplayBuffer[torch.Tensor] = ReplayBuffer(storage=LazyTensorStorage(10))
    assert_type(tensors.sample(), torch.Tensor)

    corpus = replaykit.D4RLExperienceReplay("hopper-medium-v2", 32)
    assert_type(corpus.sample(), TensorDict)
    train(corpus, 1)
