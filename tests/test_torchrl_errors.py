"""Errors have the phrases that programs and tests written for TorchRL look for."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import replaykit

MODULES = (
    "torchrl.data",
    "torchrl.data.replay_buffers",
    "torchrl.data.replay_buffers.samplers",
    "torchrl.data.replay_buffers.writers",
)


class Peer:
    """The classes of TorchRL, wherever they are."""

    def __getattr__(self, name: str) -> Any:
        modules = [pytest.importorskip(module) for module in MODULES]
        return next(getattr(module, name) for module in modules if hasattr(module, name))


def rows(count: int) -> TensorDict:
    number = torch.arange(count)
    done = (number % 5 == 4).unsqueeze(-1)
    return TensorDict({"x": number, "next": TensorDict({"done": done}, [count])}, [count])


def made(m: Any, **keywords: Any) -> Any:
    given = {"storage": m.LazyTensorStorage(20), "batch_size": 6, **keywords}
    return m.TensorDictReplayBuffer(**given)


def filled(m: Any, **keywords: Any) -> Any:
    buffer = made(m, **keywords)
    buffer.extend(rows(20))
    return buffer


ENDS = torch.ones(3, dtype=torch.bool)
STATIC = {"slice_len": 1, "cache_values": True}

CASES: dict[str, Callable[[Any], Any]] = {
    r"Cannot sample from an empty storage\.": lambda m: made(m).sample(),
    r"batch_size not specified": lambda m: filled(m, batch_size=None).sample(),
    r"Cannot iterate over the replay buffer\. Batch_size was not specified": (
        lambda m: next(iter(filled(m, batch_size=None)))
    ),
    r"Samplers with drop_last=True must work with a predictable batch-size": (
        lambda m: made(m, batch_size=None, sampler=m.SamplerWithoutReplacement(drop_last=True))
    ),
    r"Dynamic batch-size specification is incompatible with multithreaded sampling": (
        lambda m: made(m, batch_size=None, prefetch=2)
    ),
    r"transform and transform_factory are mutually exclusive": (
        lambda m: made(m, transform=lambda x: x, transform_factory=lambda: lambda x: x)
    ),
    r"Either num_slices or slice_len must be not None, and not both": lambda m: m.SliceSampler(),
    r"The batch-size must be divisible by the slice length, got batch_size=6 and slice_len=4": (
        lambda m: filled(m, sampler=m.SliceSampler(slice_len=4)).sample()
    ),
    r"must be divisible by the number of slices, got batch_size=6 and num_slices=4": (
        lambda m: filled(m, sampler=m.SliceSampler(num_slices=4)).sample()
    ),
    r"Did not find a single trajectory with sufficient length": (
        lambda m: filled(m, sampler=m.SliceSampler(slice_len=6)).sample()
    ),
    r"`end_key` and `end_keys` are exclusive arguments": (
        lambda m: m.SliceSampler(slice_len=1, end_key="a", end_keys=["b"])
    ),
    r"trajectories and ends are exclusive arguments": (
        lambda m: m.SliceSampler(**STATIC, ends=ENDS, trajectories=ENDS)
    ),
    r"`ends` and `end_key`, `end_keys` or `traj_key` are exclusive arguments": (
        lambda m: m.SliceSampler(**STATIC, ends=ENDS, end_key="x")
    ),
    r"`trajectories` and `end_key`, `end_keys` or `traj_key` are exclusive arguments": (
        lambda m: m.SliceSampler(**STATIC, trajectories=ENDS, traj_key="x")
    ),
    r"pad_output=True is incompatible with strict_length=True": (
        lambda m: m.SliceSampler(slice_len=1, pad_output=True)
    ),
    r"The batch size \(6\) is greater than the storage capacity": (
        lambda m: (
            (buffer := made(m, sampler=m.SamplerWithoutReplacement(drop_last=True))).extend(
                rows(3)
            ),
            buffer.sample(),
        )
    ),
    r"This dataset doesn't allow writing\.": (
        lambda m: made(m, writer=m.ImmutableDatasetWriter()).extend(rows(2))
    ),
    r"The max-size and the storage shape mismatch: got max_size=3": (
        lambda m: m.TensorStorage(rows(5), max_size=3)
    ),
    r"Expected storage to be non-null": lambda m: m.TensorStorage(None),
    r"Cannot get elements out of a non-initialized storage": lambda m: made(m)[0],
    r"beta must be greater or equal to 0.*got beta=-1": lambda m: _prioritized(m, 0.5, -1),
    r"alpha must be greater or equal than 0.*got alpha=-0\.5": lambda m: _prioritized(m, -0.5, 1),
    r"dim_extend must be a positive value": lambda m: made(m, dim_extend=-1),
    r"sample_unit must be a SampleUnit instance, got int": lambda m: made(m, sample_unit=3),
    r"expects data to be a tensor collection": lambda m: m.ReplayBuffer(
        storage=m.LazyTensorStorage(5), writer=m.TensorDictMaxValueWriter(rank_key="x")
    ).extend({"x": torch.zeros(3)}),
    r"ReplayBufferEnsemble writes are disabled": (
        lambda m: m.ReplayBufferEnsemble(made(m), made(m), batch_size=4).extend(rows(2))
    ),
    r"The batch size must be divisible by num_buffer_sampled.": (
        lambda m: m.ReplayBufferEnsemble(filled(m), filled(m), batch_size=5).sample()
    ),
    r"has no without-replacement variant": lambda m: m.StalenessAwareSampler(replacement=False),
    r"storage must be either a Storage or a callable returning a storage instance": (
        lambda m: m.ReplayBuffer(storage=3)
    ),
    r"A direct ReplayBuffer only supports transport='auto' or 'direct'": (
        lambda m: m.ReplayBuffer(transport="ray")
    ),
    r"transport_options are only valid for a remote ReplayBuffer\b": (
        lambda m: m.ReplayBuffer(transport_options={"backend": "gloo"})
    ),
}


def _prioritized(m: Any, alpha: float, beta: float) -> Any:
    return m.PrioritizedSampler(10, alpha, beta)


@pytest.mark.parametrize("phrase", CASES)
@pytest.mark.parametrize("module", [Peer(), replaykit], ids=["torchrl", "replaykit"])
def test_an_error_has_the_phrase_of_torchrl(module: Any, phrase: str) -> None:
    with pytest.raises(Exception, match=phrase) as caught:
        CASES[phrase](module)
    if module is replaykit:
        with pytest.raises(Exception, match=phrase) as peer:
            CASES[phrase](Peer())
        assert isinstance(caught.value, type(peer.value))  # one `except` fits both


@pytest.mark.parametrize(
    ("records", "told"),
    [
        ({"x": torch.zeros(3)}, "got dict with keys 'x'"),
        ((torch.zeros(3), torch.zeros(3)), "got tuple of 2"),
        (torch.zeros(3), r"got float32 \[\]"),
    ],
)
def test_errors_show_records_as_their_users_made_them(records: Any, told: str) -> None:
    writer = replaykit.TensorDictMaxValueWriter(rank_key="x")
    rb = replaykit.ReplayBuffer(storage=replaykit.LazyTensorStorage(5), writer=writer)
    with pytest.raises(RuntimeError, match=told) as caught:
        rb.extend(records)
    assert not re.search(r"Branch|Leaf|torch\.Size", str(caught.value))


# -- what the README says differs -----------------------------------------------------------------


def test_a_storage_wraps_no_rows_in_torchrl_alone() -> None:
    none = TensorDict({"x": torch.zeros(0)}, [0])
    assert len(Peer().TensorStorage(none)) == 0
    with pytest.raises(ValueError, match="at least one row"):
        replaykit.TensorStorage(none)
    rb = replaykit.ReplayBuffer(storage=replaykit.LazyTensorStorage(10))
    rb.extend(rows(3))
    assert rb.extend(rows(3)[:0]).tolist() == []
    with pytest.raises(RuntimeError, match="at least one element"):
        Peer().ReplayBuffer(storage=Peer().LazyTensorStorage(10)).extend(rows(3)[:0])


@pytest.mark.parametrize(("module", "kept"), [(Peer(), 1), (replaykit, 0)])
def test_lists_keep_copies_here_and_the_objects_in_torchrl(module: Any, kept: int) -> None:
    def stored() -> int:
        return int(rb.storage[0]["x"])

    rb = module.ReplayBuffer(
        storage=module.ListStorage(10), batch_size=1, collate_fn=lambda found: found
    )
    record = TensorDict({"x": torch.zeros(1)}, [1])
    rb.extend([record])
    record["x"] += 1
    assert stored() == kept
    rb.sample()[0]["x"] += 1
    assert stored() == 2 * kept


def test_a_sampler_of_too_small_a_capacity_is_refused_and_one_without_follows() -> None:
    small = replaykit.PrioritizedSampler(5, 0.7, 0.5)
    with pytest.raises(ValueError, match="max_capacity"):
        replaykit.ReplayBuffer(storage=replaykit.LazyTensorStorage(10), sampler=small)
    follows = replaykit.PrioritizedSampler(alpha=0.7, beta=0.5)
    rb = replaykit.ReplayBuffer(storage=replaykit.LazyTensorStorage(10), sampler=follows)
    assert rb.extend(rows(10)).tolist() == list(range(10))
