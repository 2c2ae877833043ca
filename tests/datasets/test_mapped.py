"""A published data set as a storage: mapped, private, cheap to hand over."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from replaykit import (
    ImmutableDatasetWriter,
    LazyTensorStorage,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorStorage,
)
from replaykit.datasets import CorpusExperienceReplay
from replaykit.datasets.published_buffer import MappedStorage
from replaykit.datasets.publishing import open_directory, open_published
from replaykit.testing.robohive_files import make_trial
from tests.datasets.converted import needs_proc
from tests.datasets.trials import convert, write, write_file
from tests.prepared import python


def publish(target: Path, records: int = 6, *, force: bool = False) -> MappedStorage:
    source = write_file(target.with_name(f"{target.name}-{records}.h5"), records, seed=records)
    return MappedStorage(convert(target, source, force=force))


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
    buffer = CorpusExperienceReplay(publish(tmp_path / "data").published, 2)
    storage = buffer.storage
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
        for each in (other, copy.deepcopy(other)):
            assert each.published.manifest == buffer.published.manifest
            assert (each.episode_table == buffer.episode_table).all()
        other.storage.edit_columns({("action",): torch.zeros(5, 2, dtype=torch.float64)})
        assert not (storage[:]["action"] == 0).any()
    assert not (open_published(tmp_path / "data").columns[("action",)] == 9.0).any()


def test_a_pickle_of_a_version_that_was_replaced_is_refused(tmp_path):
    blob = pickle.dumps(publish(tmp_path / "data", 6))
    publish(tmp_path / "data", 7, force=True)
    with pytest.raises(RuntimeError, match="another version"):
        pickle.loads(blob)


ANON = """
import sys, torch
from replaykit.datasets import open as open_dataset
def held():
    return next(int(x.split()[1]) for x in open("/proc/self/status") if x.startswith("RssAnon"))
open_dataset(sys.argv[1], batch_size=4, split="0:2").sample()
before = held()
data = open_dataset(sys.argv[1], batch_size=16, split="0%:50%")
for _ in range(20):
    batch = data.sample()
print(held() - before, len(data), float(batch["observation"].std()))
"""


@needs_proc
def test_scattered_episodes_are_read_where_they_lie(tmp_path):
    """S4: half of 64 MiB of rows, in a random order of episodes, takes a few batches of memory."""
    trials = [make_trial(17, seed=seed, infos=False) for seed in range(32)]
    for seed, trial in enumerate(trials):
        trial["observations"] = np.full((17, 1 << 14), float(seed))
    convert(tmp_path / "data", write(tmp_path / "a.h5", *trials))
    command = [*python(), "-c", ANON, str(tmp_path / "data")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    held, rows, spread = done.stdout.split()
    assert int(rows) == 256
    assert float(spread) > 1
    assert int(held) < 16 * 1024  # the chosen rows are 64 MiB, with those after them


def scattered(tmp_path: Path) -> tuple[MappedStorage, MappedStorage]:
    """The episodes 0, 2 and 5 of six, and those rows in memory."""
    published = convert(tmp_path / "some", write_file(tmp_path / "some.h5", *range(3, 9)))
    return MappedStorage(published, torch.tensor([0, 2, 5])), MappedStorage(published)


def test_scattered_episodes_serve_as_rows_in_memory_do(tmp_path):
    some, everything = scattered(tmp_path)
    rows = torch.cat([torch.arange(0, 2), torch.arange(5, 9), torch.arange(20, 27)])
    wanted = everything[:][rows]
    plain = ReplayBuffer(
        storage=TensorStorage(wanted.clone()), sampler=SliceSampler(slice_len=2), batch_size=6,
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    data = ReplayBuffer(
        storage=some, sampler=SliceSampler(slice_len=2), batch_size=6,
        writer=ImmutableDatasetWriter(), generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    assert [len(episode) for episode in data.episodes] == [2, 4, 7]
    for _ in range(5):
        assert (data.sample() == plain.sample()).all()
    assert (data[:] == wanted).all()
    assert (data[3:9] == wanted[3:9]).all()
    assert (data["action"] == wanted["action"]).all()
    assert (some.published.columns["action",] == everything[:]["action"]).all()


def test_edits_of_scattered_episodes_are_seen_and_saved(tmp_path):
    some, _ = scattered(tmp_path)
    data = ReplayBuffer(storage=some, writer=ImmutableDatasetWriter(), batch_size=4)
    before = data[:]
    data.set_at_("action", torch.full((2, 2), 9.0, dtype=torch.float64), torch.tensor([4, 12]))
    row = data[0]
    row["next", "reward"].fill_(7.0)
    data[0] = row
    for other in (data, pickle.loads(pickle.dumps(data)), copy.deepcopy(data)):
        assert (other["action"][[4, 12]] == 9.0).all()
        assert (other["next", "reward"] == 7.0).flatten().nonzero().flatten().tolist() == [0]
        rest = [k for k in range(13) if k not in (0, 4, 12)]
        assert (other[:][rest] == before[rest]).all()
    data.dumps(tmp_path / "saved")
    again = ReplayBuffer(storage=LazyTensorStorage(13), writer=ImmutableDatasetWriter())
    again.loads(tmp_path / "saved")
    assert (again[:] == data[:]).all()
    assert not (open_published(tmp_path / "some").columns[("action",)] == 9.0).any()


pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
def test_workers_read_a_data_set_where_it_lies(method: str, target: Path, fingerprint: Any) -> None:
    if method not in multiprocessing.get_all_start_methods():
        pytest.skip(f"needs {method}")
    storage = MappedStorage(open_directory(target))
    rb = ReplayBuffer(
        storage=storage,
        writer=ImmutableDatasetWriter(),
        sampler=SamplerWithoutReplacement(),
        batch_size=2,
    )
    here = list(rb.dataloader(seed=4))
    loader = rb.dataloader(workers=1, multiprocessing_context=method, seed=4)
    there = list(loader)
    for left, right in zip(here, there, strict=True):
        assert fingerprint(left) == fingerprint(right)
    assert sorted(torch.cat([batch["index"] for batch in there]).tolist()) == list(range(len(rb)))
    rb.set_at_("action", rb["action"][:1] + 1, torch.tensor([0]))
    with pytest.raises(RuntimeError, match="a MappedStorage would be copied"):
        rb.dataloader(workers=1, multiprocessing_context="spawn")
    assert not multiprocessing.active_children()
