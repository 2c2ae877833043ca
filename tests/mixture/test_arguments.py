"""What ensembles are made with, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from replaykit import (
    ImmutableDatasetWriter,
    LazyTensorStorage,
    Ramp,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    RoundRobinWriter,
    SamplerEnsemble,
    StorageEnsemble,
    TensorStorage,
    WriterEnsemble,
)
from tests.mixture.members import make_ensemble, make_member, rows_of
from tests.support.refusals import refuses


def parts(count: int = 2) -> dict[str, Any]:
    return {
        "storages": StorageEnsemble(*(TensorStorage(rows_of(i, 4)) for i in range(count))),
        "samplers": SamplerEnsemble(*(RandomSampler() for _ in range(count))),
        "writers": WriterEnsemble(*(RoundRobinWriter() for _ in range(count))),
    }


def test_constructor_takes_either_buffers_or_parts() -> None:
    refuses(RuntimeError, "buffers or storages", ReplayBufferEnsemble, make_member(0), **parts())
    refuses(TypeError, "none of them", ReplayBufferEnsemble)
    some = parts()
    del some["writers"]
    refuses(TypeError, "'storages', 'samplers'", ReplayBufferEnsemble, **some)
    some = {**parts(), "writers": WriterEnsemble(RoundRobinWriter())}
    refuses(ValueError, "as many", ReplayBufferEnsemble, **some)
    refuses(TypeError, "of the SamplerEnsemble", ReplayBufferEnsemble, **parts(), p=[1, 1])
    with pytest.raises(TypeError, match="member 1 as a ReplayBuffer, got int"):
        ReplayBufferEnsemble(make_member(0), 3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="storages as a StorageEnsemble"):
        ReplayBufferEnsemble(**{**parts(), "storages": TensorStorage(rows_of(0, 4))})


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"p": [1, 1], "sample_from_all": True}, RuntimeError, "both"),
        ({"counts": "exact", "sample_from_all": True}, RuntimeError, "both"),
        ({"unready": "skip", "sample_from_all": True}, RuntimeError, "both"),
        ({"num_buffer_sampled": 3, "sample_from_all": True}, ValueError, "num_buffer_sampled=2"),
        ({"num_buffer_sampled": 0}, ValueError, "at least 1"),
        ({"num_buffer_sampled": 2.0}, ValueError, "at least 1"),
        ({"p": [1]}, ValueError, "2 weights"),
        ({"counts": "some"}, ValueError, "counts"),
        ({"unready": "wait"}, ValueError, "unready"),
        ({"keys": "id"}, TypeError, "list of keys"),
        ({"keys": []}, TypeError, "list of keys"),
        ({"collate_fns": [None]}, TypeError, "2 functions"),
        ({"collate_fns": [1, 2]}, TypeError, "2 functions"),
        ({"batch_size": 0}, ValueError, "batch_size"),
        ({"generator": 3}, TypeError, "Generator"),
        ({"prefetch": 2}, ValueError, "batch_size"),
        ({"shared": True}, ValueError, "member 0 is neither"),
        ({"storage": None}, TypeError, "storage"),
        ({"ready": [1]}, ValueError, "2 minimums"),
        ({"ready": [1, 0]}, ValueError, "member 1"),
        ({"ready": [1, (1, "steps")]}, ValueError, "'episodes'"),
        ({"ready": [1, 1], "sample_from_all": True}, RuntimeError, "ready="),
        ({"ramp": 5}, TypeError, "a Ramp"),
        ({"ramp": Ramp(2, [0.0])}, ValueError, "2 start weights"),
        ({"ramp": Ramp(2), "p": [0.9, 0.2]}, ValueError, "sum 1"),
        ({"ramp": Ramp(2), "p": [1.0]}, ValueError, "2 weights"),
    ],
)
def test_invalid_arguments_are_refused(
    arguments: dict[str, Any], error: type[Exception], words: str
) -> None:
    refuses(error, words, make_ensemble, [3, 3], seed=None, **arguments)


def test_parts_refuse_invalid_members_and_direct_writes() -> None:
    storages, _, writers = parts().values()
    for kind in (StorageEnsemble, SamplerEnsemble, WriterEnsemble):
        refuses(ValueError, "at least one", kind)
        refuses(TypeError, "member 0", kind, 3)
    with pytest.raises(TypeError, match="Storage"):
        ReplayBuffer(storage=storages)  # type: ignore[call-overload]
    refuses(TypeError, "2 transforms", StorageEnsemble, *storages.storages, transforms=[None])
    for call in (
        lambda: storages.set(0, rows_of(0, 1)),
        lambda: storages.__setitem__(0, rows_of(0, 1)),
        storages.clear,
    ):
        refuses(RuntimeError, r"ensemble|Ensemble", call)
    for target in (writers, make_ensemble([3, 3])):
        for name in ("add", "extend", "empty"):  # a NotImplementedError is a RuntimeError
            words = rf"ensemble\[i\]\.{name}"
            refuses(NotImplementedError, words, getattr(target, name), rows_of(0, 1))


def test_columns_episodes_and_components_are_those_of_a_member() -> None:
    ensemble: Any = make_ensemble([3, 3])
    with pytest.raises(TypeError):
        ensemble[0:1] = rows_of(0, 1)
    for name in ("episodes", "dim_extend", "flush", "cut", "set_sampler", "register_save_hook"):
        assert not hasattr(ensemble, name)
        refuses(AttributeError, rf"ensemble\[i\]\.{name}", getattr, ensemble, name)
    refuses(AttributeError, "'sampel'", lambda: ensemble.sampel(3))
    refuses(TypeError, "columns are those of a member", lambda: ensemble["id"])


def test_repr_and_stats_describe_the_ensemble() -> None:
    ensemble = make_ensemble([3, 5], p=[1, 3], batch_size=4)
    text = repr(ensemble)
    assert text.startswith("ReplayBufferEnsemble(")
    assert "p=tensor([0.2500, 0.7500]" in text
    assert ensemble.stats() == {
        "size": 8,
        "write_count": 8,
        "prefetch_queue_size": 0,
        "initialized": True,
        "capacity": 100,
        "utilization": 0.08,
        "num_buffers": 2,
    }
    assert (len(ensemble), ensemble.write_count, ensemble.batch_size) == (8, 8, 4)
    assert ensemble.num_members == 2
    for part in (ensemble.storage, ensemble.sampler, ensemble.writer):
        assert len(part) == 2
        assert type(part).__name__ in repr(part)


def test_transform_factory_delays_the_ensemble() -> None:
    made = []

    def factory() -> Any:
        made.append(1)
        return lambda batch: batch.set("twice", batch["id"] * 2)

    ensemble = make_ensemble([3, 3], transform_factory=factory, sample_from_all=True)
    assert (ensemble.initialized, made) == (False, [])
    assert "not initialized" in repr(ensemble)
    assert ensemble.stats()["initialized"] is False
    batch = ensemble.sample(4)
    assert ensemble.initialized
    assert torch.equal(batch["twice"], batch["id"] * 2)


def test_constructor_initializes_delayed_members() -> None:
    late = ReplayBuffer(storage=lambda: LazyTensorStorage(9), delayed_init=True)
    ensemble = ReplayBufferEnsemble(late, make_member(1))
    assert late.initialized
    late.extend(rows_of(0, 4))
    assert ensemble.can_sample(4)


def test_a_shared_ensemble_has_shared_members_or_data_sets() -> None:
    shared = make_member(0, 5, shared=True)
    fixed = ReplayBuffer(storage=TensorStorage(rows_of(1, 5)), writer=ImmutableDatasetWriter())
    ensemble = ReplayBufferEnsemble(shared, fixed, shared=True)
    assert ensemble.shared
    assert ensemble.sample(4).shape == (2, 2)
