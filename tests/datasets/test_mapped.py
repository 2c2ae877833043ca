"""A published data set as a storage: mapped, private, cheap to hand over."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
from pathlib import Path

import pytest
import torch

from replaykit import ImmutableDatasetWriter, ReplayBuffer
from replaykit.datasets.engine.conversion import ensure_dataset
from replaykit.datasets.families.robohive import ROBOHIVE
from replaykit.datasets.mapped import MappedStorage
from replaykit.datasets.publish import open_published
from replaykit.datasets.sources import Sources
from replaykit.testing.robohive import RoboHiveWriter, make_trial


def publish(target: Path, records: int = 6, *, force: bool = False) -> MappedStorage:
    source = target.with_name(f"{target.name}-{records}.h5")
    with RoboHiveWriter(source) as writer:
        writer.add_trial(**make_trial(records, seed=records))
    return MappedStorage(
        ensure_dataset(
            target, get_sources=lambda: Sources.local([source]), layout=ROBOHIVE, force=force
        )
    )


def test_rows_are_those_of_the_columns_without_a_copy(tmp_path):
    storage = publish(tmp_path / "data")
    assert len(storage) == storage.max_size == 5
    published = storage.published.columns
    for key, column in published.items():
        assert storage.column(key).data_ptr() == column.data_ptr()
        assert storage[:].get(key).equal(column)
    assert storage.require().advise  # pages that a batch will touch are asked for


def test_a_pickle_holds_the_path_and_not_the_rows(tmp_path):
    storage = publish(tmp_path / "data", 500)
    blob = pickle.dumps(storage)
    assert len(blob) < 2000
    assert (pickle.loads(blob)[:] == storage[:]).all()


@pytest.mark.parametrize("how", ["set_at_", "setitem", "storage"])
def test_edits_travel_with_a_copy(tmp_path, how):
    storage = publish(tmp_path / "data")
    buffer = ReplayBuffer(storage=storage, writer=ImmutableDatasetWriter(), batch_size=2)
    row = buffer[0].clone()
    row["action"].fill_(9.0)
    if how == "set_at_":
        buffer.set_at_("action", row["action"], 0)
    elif how == "setitem":
        buffer[0] = row
    else:
        storage[0] = row
    for other in (pickle.loads(pickle.dumps(buffer)), copy.deepcopy(buffer)):
        assert (other["action"][0] == 9.0).all()
        assert (other[:] == buffer[:]).all()
    assert not (open_published(tmp_path / "data").columns[("action",)] == 9.0).any()


def test_a_copy_has_edits_of_its_own(tmp_path):
    storage = publish(tmp_path / "data")
    other = pickle.loads(pickle.dumps(storage))
    other.edit_columns({("action",): torch.zeros(5, 2, dtype=torch.float64)})
    assert not (storage[:]["action"] == 0).any()


def test_a_pickle_of_a_version_that_was_replaced_is_refused(tmp_path):
    blob = pickle.dumps(publish(tmp_path / "data", 6))
    publish(tmp_path / "data", 7, force=True)
    with pytest.raises(RuntimeError, match="another version"):
        pickle.loads(blob)


def _sum(buffer: ReplayBuffer, results: object) -> None:
    results.put((len(buffer), float(buffer["time"].sum()), buffer.sample().batch_size))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_read_only_buffer_can_be_handed_to_another_process(tmp_path, method):
    storage = publish(tmp_path / "data")
    buffer = ReplayBuffer(storage=storage, writer=ImmutableDatasetWriter(), batch_size=2)
    context = multiprocessing.get_context(method)
    results = context.SimpleQueue()
    process = context.Process(target=_sum, args=(buffer, results))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert results.get() == (5, float(buffer["time"].sum()), torch.Size([2]))
