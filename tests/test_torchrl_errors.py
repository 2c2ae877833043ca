"""Errors have the phrases that programs and tests written for TorchRL look for."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import replaykit
from replaykit.errors import NoEpisodeColumns
from tests.support.refusals import refuses
from tests.torchrl_programs.plain_trees import PlainMin, PlainSum

MODULES = (
    "torchrl.data",
    "torchrl.data.replay_buffers",
    "torchrl.data.replay_buffers.samplers",
    "torchrl.data.replay_buffers.writers",
    "torchrl.data.replay_buffers.scheduler",
)


@pytest.fixture(autouse=True)
def plain_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    """TorchRL's trees may not load with this torch."""
    prioritized = pytest.importorskip("torchrl.data.replay_buffers.samplers.prioritized")
    for size in (32, 64):
        monkeypatch.setattr(prioritized, f"SumSegmentTreeFp{size}", PlainSum, raising=False)
        monkeypatch.setattr(prioritized, f"MinSegmentTreeFp{size}", PlainMin, raising=False)


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


def _sliced_list(m: Any) -> Any:
    buffer = made(m, storage=m.ListStorage(20), sampler=m.SliceSampler(slice_len=2))
    buffer.extend(rows(10))
    return buffer.sample()


def _without_ends(m: Any) -> Any:
    buffer = made(m, sampler=m.SliceSampler(slice_len=2))
    buffer.extend(rows(10).exclude("next"))
    return buffer


def _on_cuda(m: Any) -> Any:
    if m is not replaykit and not torch.cuda.is_available():
        raise ValueError("Memory map device other than CPU isn't supported")  # asks for its number
    return m.LazyMemmapStorage(10, device="cuda")


def _with_priorities(m: Any) -> Any:
    buffer = m.TensorDictPrioritizedReplayBuffer(
        alpha=0.7, beta=0.5, storage=m.LazyTensorStorage(20)
    )
    buffer.extend(rows(20))
    return buffer


PATCH = {
    "index": torch.tensor([0]),
    "generation": torch.tensor([0]),
    "patch": {"x": torch.tensor([7])},
}
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
    r"must be not None, and not both\. Got num_slices=None and slice_len=None\.": (
        lambda m: m.SliceSampler()
    ),
    r"must be not None, and not both\. Got num_slices=2 and slice_len=3\.": (
        lambda m: m.SliceSampler(num_slices=2, slice_len=3)
    ),
    r"Could not get a tensordict out of the storage, which is required for SliceSampler to "
    r"compute the trajectories.": lambda m: _sliced_list(m),
    r"Cannot share prefetched replay buffers.*prefetch=0.*shared=False": (
        lambda m: made(m, prefetch=1, shared=True)
    ),
    r"are not supported by": lambda m: m.TensorStorage({"a": torch.zeros(3)}).state_dict(),
    r"Memory map device other than CPU": lambda m: _on_cuda(m),
    r"priority should be a number or an iterable of the same length as index": (
        lambda m: _with_priorities(m).update_priority(torch.arange(4), torch.ones(3))
    ),
    r"None of the end_keys .* could be found in the storage": (
        lambda m: filled(m, sampler=m.SliceSampler(slice_len=2, end_keys=["q", "r"])).sample()
    ),
    r"ReplayBuffer only accepts TensorDictBase subclasses": lambda m: made(m).extend(3),
    r"TensorDictPrioritizedReplayBuffer only accepts TensorDictBase subclasses": (
        lambda m: _with_priorities(m).extend(None)
    ),
    r"Conditional updates are not supported by ListStorage with RoundRobinWriter": (
        lambda m: m.ReplayBuffer(
            storage=m.ListStorage(5), writer=m.RoundRobinWriter(track_generations=True)
        ).update_if_present(**PATCH)
    ),
    r"Conditional updates are not supported by LazyTensorStorage with": (
        lambda m: filled(m, writer=m.RoundRobinWriter()).update_if_present(**PATCH)
    ),
    r"Conditional updates require an initialized storage": (
        lambda m: made(m, writer=m.RoundRobinWriter(track_generations=True)).update_if_present(
            **PATCH
        )
    ),
    r"transform must be either a Transform instance or a callable": (
        lambda m: made(m, transform=3)
    ),
    r"does not have an attribute nothing": lambda m: m.LinearScheduler(made(m), "nothing", 1.0, 9),
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


@pytest.mark.parametrize("given", [{}, {"end_keys": ["q"]}, {"traj_key": "q", "end_key": "r"}])
def test_columns_without_ends_are_an_error_of_either_kind(given: dict[str, Any]) -> None:
    """TorchRL has a RuntimeError or a KeyError, by how ends are told."""
    rb = made(replaykit, sampler=replaykit.SliceSampler(slice_len=2, **given))
    rb.extend(rows(10).exclude("next"))
    for kind in (KeyError, RuntimeError, NoEpisodeColumns):
        with pytest.raises(kind, match=r"got (the columns )?'x'") as caught:
            rb.sample()
    assert str(caught.value)[0] not in "\"'"
    with pytest.raises(RuntimeError, match="Could not get a tensordict out of the storage"):
        _without_ends(Peer()).sample()


def test_first_batch_passed_to_add_warns_in_the_words_of_torchrl() -> None:
    words = r"Using `add\(\)` with a TensorDict that has batch_size"
    for module in (Peer(), replaykit):
        for storage in (module.ListStorage(10), module.LazyTensorStorage(10)):
            rb = module.ReplayBuffer(storage=storage, batch_size=3)
            with pytest.warns(UserWarning, match=words):
                rb.add(rows(3))
            assert len(rb) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rb.add(rows(3))  # said once
        replaykit.ReplayBuffer(storage=replaykit.LazyStackStorage(10)).add(rows(3))
        lanes = replaykit.ReplayBuffer(storage=replaykit.LazyTensorStorage(10, ndim=2))
        lanes.add(rows(2))
        replaykit.ReplayBuffer(storage=replaykit.LazyTensorStorage(10)).add(rows(3)[0])


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


def test_only_torchrl_wraps_a_storage_of_zero_rows() -> None:
    none = TensorDict({"x": torch.zeros(0)}, [0])
    assert len(Peer().TensorStorage(none)) == 0
    refuses(ValueError, "at least one row", replaykit.TensorStorage, none)
    rb = replaykit.ReplayBuffer(storage=replaykit.LazyTensorStorage(10))
    rb.extend(rows(3))
    assert rb.extend(rows(3)[:0]).tolist() == []
    with pytest.raises(RuntimeError, match="at least one element"):
        Peer().ReplayBuffer(storage=Peer().LazyTensorStorage(10)).extend(rows(3)[:0])


@pytest.mark.parametrize(("module", "kept"), [(Peer(), 1), (replaykit, 0)])
def test_list_storage_copies_rows_and_torchrl_keeps_objects(module: Any, kept: int) -> None:
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
