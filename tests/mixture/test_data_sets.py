"""Data sets as members, beside online buffers."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from replaykit import (
    ImmutableDatasetWriter,
    LazyTensorStorage,
    PrioritizedSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SliceSampler,
)
from replaykit.datasets.engine.conversion import ensure_dataset
from replaykit.datasets.families.robohive import ROBOHIVE
from replaykit.datasets.published_buffer import MappedStorage
from replaykit.datasets.publishing import open_published
from replaykit.datasets.sources import Sources
from replaykit.testing.robohive_files import RoboHiveWriter, make_trial
from tests.mixture.members import same
from tests.support.refusals import refuses

KEYS = ["observation", "action", ("next", "observation"), ("next", "reward"), ("next", "done")]


def publish(target: Path, seed: int = 0) -> MappedStorage:
    source = target.with_name(f"{target.name}.h5")
    with RoboHiveWriter(source) as writer:
        for trial in range(4):
            writer.add_trial(**make_trial(30, seed=10 * seed + trial))
    return MappedStorage(
        ensure_dataset(target, get_sources=lambda: Sources.local([source]), layout=ROBOHIVE)
    )


def as_buffer(storage: MappedStorage, **arguments: Any) -> ReplayBuffer:
    return ReplayBuffer(storage=storage, writer=ImmutableDatasetWriter(), **arguments)


def online(rows: Any, **arguments: Any) -> ReplayBuffer:
    rb = ReplayBuffer(storage=LazyTensorStorage(200), **arguments)
    if rows is not None:
        rb.extend(rows.select(*KEYS, ("next", "terminated"), ("next", "truncated")))
    return rb


@pytest.mark.pitfall("RD7")
@pytest.mark.pitfall("DS18")
def test_data_sets_and_an_online_buffer_need_common_keys(tmp_path: Path) -> None:
    """The keys that only data sets have are named, or left out where the others are asked for."""
    sets = [as_buffer(publish(tmp_path / f"set{seed}", seed)) for seed in range(2)]
    both = ReplayBufferEnsemble(*sets, sample_from_all=True)
    batch = both.sample(12)
    for number, data in enumerate(sets):
        rows = data[batch["index", "index"][number]]
        assert all(torch.equal(batch[number][key], rows[key]) for key in rows.keys(True, True))
    live = online(sets[0][5:40], sampler=PrioritizedSampler(alpha=1.0, beta=1.0))
    with pytest.raises(ValueError, match="'episode'"):
        ReplayBufferEnsemble(*sets, live, sample_from_all=True).sample(12)
    mixed = ReplayBufferEnsemble(
        *sets, live, p=[1, 1, 2], keys=KEYS, num_buffer_sampled=4, counts="exact", batch_size=32
    )
    batch = mixed.sample()
    assert batch["index", "buffer_ids"][:, 0].tolist() == [0, 1, 2, 2]
    assert (batch["priority_weight"] == 1).all()
    batch["td_error"] = torch.full(batch.shape, 5.0)
    mixed.update_tensordict_priority(batch)
    live.extend(sets[1][:3].select(*KEYS, ("next", "terminated"), ("next", "truncated")))
    assert mixed.sample().shape == (4, 8)


def test_slices_of_data_sets_stay_in_one_episode(tmp_path: Path) -> None:
    sets = [
        as_buffer(publish(tmp_path / f"set{seed}", seed), sampler=SliceSampler(slice_len=5))
        for seed in range(2)
    ]
    batch = ReplayBufferEnsemble(*sets, sample_from_all=True).sample(20)
    index = batch["index", "index"].reshape(4, 5)
    assert (index.diff() == 1).all()
    episodes = batch["episode"].reshape(4, 5)
    assert (episodes == episodes[:, :1]).all()


def test_rows_of_a_data_set_are_not_saved(tmp_path: Path) -> None:
    def made(rows: Any, seed: int) -> ReplayBufferEnsemble:
        data = as_buffer(MappedStorage(open_published(tmp_path / "set")))
        return ReplayBufferEnsemble(
            data,
            online(rows),
            keys=KEYS,
            batch_size=8,
            generator=torch.Generator().manual_seed(seed),
        )

    rows = publish(tmp_path / "set")[:]
    ensemble = made(rows[:20], 0)
    ensemble.sample()
    ensemble.dumps(tmp_path / "saved")
    size = sum(file.stat().st_size for file in (tmp_path / "saved").glob("data-*"))
    assert size < sum(rows[key].nbytes for key in rows.keys(True, True)) / 2
    for other in (made(None, 5), made(rows[:3], 5)):
        other.loads(tmp_path / "saved")
        again = made(None, 6)
        again.load_state_dict(ensemble.state_dict())
        copied = pickle.loads(pickle.dumps(other))
        for one, batch in [(other, copy.deepcopy(ensemble).sample()), (again, None)]:
            expected = copy.deepcopy(ensemble).sample() if batch is None else batch
            assert same(one.sample(), expected, generations=False)
        assert same(copied.sample(), copy.deepcopy(ensemble).sample(), generations=False)
    opened = made(None, 7)
    opened.loads(tmp_path / "saved", mmap=True)
    assert same(opened.sample(), ensemble.sample(), generations=False)


def test_edited_rows_of_a_data_set_are_saved(tmp_path: Path) -> None:
    storage = publish(tmp_path / "set")
    data = as_buffer(storage)
    data.set_at_("action", storage[0]["action"] * 0 + 9, 0)
    ReplayBufferEnsemble(data).dumps(tmp_path / "saved")
    fresh = as_buffer(MappedStorage(open_published(tmp_path / "set")))
    with pytest.raises(ValueError, match=r"members/0: expected a new LazyTensorStorage .* mmap"):
        ReplayBufferEnsemble(fresh).loads(tmp_path / "saved", mmap=True)
    ReplayBufferEnsemble(fresh).loads(tmp_path / "saved")
    assert (fresh[0]["action"] == 9).all()
    assert torch.equal(fresh[1:]["action"], data[1:]["action"])


def test_another_data_set_is_refused(tmp_path: Path) -> None:
    first, second = (publish(tmp_path / f"set{seed}", seed) for seed in range(2))
    ensemble = ReplayBufferEnsemble(as_buffer(first), online(first[:5]), keys=KEYS)
    ensemble.dumps(tmp_path / "saved")
    edited = MappedStorage(open_published(tmp_path / "set0"))
    as_buffer(edited).set_at_("action", edited[0]["action"] * 0, 0)
    part = MappedStorage(open_published(tmp_path / "set0"), torch.tensor([0, 1]))
    for storage, words in (
        (second, "another data set"),
        (edited, "edited"),
        (part, "other episodes"),
    ):
        target = ReplayBufferEnsemble(as_buffer(storage), online(first[:2]), keys=KEYS)
        with pytest.raises(ValueError, match=rf"members/0: expected the data set.*{words}"):
            target.loads(tmp_path / "saved")
        assert len(target[1]) == 2
    plain = ReplayBufferEnsemble(online(first[:5]), online(first[:5]))
    refuses(ValueError, "no data set", plain.loads, tmp_path / "saved")
