"""A program as users write it, for type checkers."""

from __future__ import annotations

from functools import partial

import torch
from tensordict import TensorDict
from typing_extensions import assert_type

import replaykit
from replaykit import (
    BaseDatasetExperienceReplay,
    CorpusExperienceReplay,
    LaneWriter,
    LazyMemmapStorage,
    LazyTensorStorage,
    NStep,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    RayReplayBuffer,
    ReplayBuffer,
    ReplayBufferEnsemble,
    RoundRobinWriter,
    Sampler,
    SamplerEnsemble,
    ShardedReplayBuffer,
    SliceSampler,
    Storage,
    TensorDictReplayBuffer,
    VectorSteps,
    Writer,
    datasets,
    transition,
)


def learn(batch: TensorDict) -> torch.Tensor:
    return batch["next", "reward"].mean()


def train(rb: ReplayBuffer | ReplayBufferEnsemble, steps: int) -> float:
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

    for batch in rb.dataloader(16, workers=2):
        assert_type(batch, TensorDict)
    for tensor in tensors.dataloader(16):
        assert_type(tensor, torch.Tensor)


def data_sets() -> None:
    """Data sets know the class of the sampler that they were given."""
    corpus = replaykit.D4RLExperienceReplay("hopper-medium-v2", 32)
    assert_type(corpus, replaykit.D4RLExperienceReplay[Sampler])
    assert_type(corpus.sample(), TensorDict)
    assert_type(corpus.sampler, Sampler)
    train(corpus, 1)

    sliced = replaykit.D4RLExperienceReplay("x", 3, sampler=SliceSampler(slice_len=4))
    assert_type(sliced.sampler, SliceSampler)
    assert_type(sliced.sample(), TensorDict)
    assert_type(sliced.episode_table, TensorDict)
    print(sliced.sampler.slice_len)
    train(sliced, 1)

    scenes = replaykit.RobosetExperienceReplay("x", 3, sampler=lambda: SliceSampler(slice_len=4))
    assert_type(scenes.sampler, SliceSampler)
    opened = datasets.open("folder", 3, sampler=PrioritizedSampler(10, 0.7, 0.5))
    assert_type(opened.sampler, PrioritizedSampler)
    loaded = datasets.load_dataset("d4rl:x", 3, sampler=SliceSampler(slice_len=4))
    assert_type(loaded.sampler, SliceSampler)
    pulled = datasets.pull("me/rows", sampler=SliceSampler(slice_len=4))
    assert_type(pulled.sampler, SliceSampler)
    plain = datasets.open("folder", 3)
    assert_type(plain.sampler, Sampler)
    assert_type(plain[:10], TensorDict)


class Own(BaseDatasetExperienceReplay):
    """A corpus of a user's, without a word on samplers."""

    corpus = "own"


def mixture(one: ReplayBuffer, other: CorpusExperienceReplay) -> None:
    """An ensemble gives what its members give."""
    ensemble = ReplayBufferEnsemble(one, other, batch_size=32)
    assert_type(ensemble, ReplayBufferEnsemble[TensorDict])
    assert_type(ensemble.sample(), TensorDict)
    batch, info = ensemble.sample(return_info=True)
    assert_type(batch, TensorDict)
    assert_type(info, TensorDict)
    batch, info = ensemble.sample(8, True)
    assert_type(batch, TensorDict)
    for batch in ensemble:
        assert_type(batch, TensorDict)
    for batch in ensemble.dataloader(8):
        assert_type(batch, TensorDict)
    assert_type(ensemble[0], ReplayBuffer[TensorDict])
    assert_type(ensemble[1:], ReplayBufferEnsemble[TensorDict])
    assert_type(ensemble[[0, 1]], ReplayBufferEnsemble[TensorDict])
    assert_type(ensemble[...], ReplayBufferEnsemble[TensorDict])
    assert_type(ensemble[:, 0], TensorDict)
    assert_type(ensemble[1, :8], TensorDict)
    ensemble.sampler.p = torch.tensor([0.25, 0.75])
    assert_type(ensemble.sampler, SamplerEnsemble)
    train(ensemble, 1)


def of_tensors(one: ReplayBuffer[torch.Tensor]) -> None:
    ensemble = ReplayBufferEnsemble(one, one)
    assert_type(ensemble.sample(8), torch.Tensor)
    assert_type(ensemble[0], ReplayBuffer[torch.Tensor])
    shards: ShardedReplayBuffer[torch.Tensor] = ShardedReplayBuffer(
        num_shards=2, storage=lambda: LazyTensorStorage(10)
    )
    assert_type(shards.sample(8), torch.Tensor)
    assert_type(shards.client().sample(8), torch.Tensor)


def elsewhere() -> None:
    """Buffers in other processes, and their handles."""
    with ShardedReplayBuffer(num_shards=2, storage=lambda: LazyTensorStorage(10)) as shards:
        assert_type(shards, ShardedReplayBuffer[TensorDict])
        assert_type(shards.sample(), TensorDict)
        batch, info = shards.sample(return_info=True)
        assert_type(batch, TensorDict)
        batch, info = shards.sample(8, True, timeout=1.0)
        assert_type(batch, TensorDict)
        print(info["index"])
        assert_type(shards.next(), TensorDict)
        assert_type(shards[0], TensorDict)
        assert_type(shards[...], TensorDict)
        print(shards["next", "reward"].shape)
        for batch in shards:
            assert_type(batch, TensorDict)
        for batch in shards.client().dataloader(8, workers=2):
            assert_type(batch, TensorDict)

    with RayReplayBuffer(storage=lambda: LazyTensorStorage(10), batch_size=8) as actor:
        assert_type(actor, RayReplayBuffer[TensorDict])
        assert_type(actor.sample(), TensorDict)
        batch, info = actor.sample(return_info=True)
        assert_type(batch, TensorDict)
        batch, info = actor.sample(8, True, timeout=1.0)
        assert_type(batch, TensorDict)
        assert_type(actor.next(), "TensorDict | None")
        assert_type(actor[:], TensorDict)
        print(actor["next", "reward"].shape)
        handle = actor.client(prefetch=2)
        assert_type(handle.sample(), TensorDict)
        for batch in handle:
            assert_type(batch, TensorDict)
        for batch in handle.dataloader(8):
            assert_type(batch, TensorDict)
        mixed = ReplayBufferEnsemble(handle, ReplayBuffer(batch_size=8))
        assert_type(mixed.sample(), TensorDict)
