"""The split form of a data set: one padded row per episode, the same transitions."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from replaykit.datasets import dataset_passes as split_module
from replaykit.datasets.dataset_passes import ensure_split
from replaykit.datasets.engine.conversion import ConvertOptions
from replaykit.datasets.publishing import Published, open_published, verify_published
from replaykit.testing.robohive_files import make_trial
from tests.datasets.converted import growth, needs_proc
from tests.datasets.trials import convert, names, write


def flat(path: Path, *lengths: int, seed: int = 0, **options: Any) -> Published:
    """A published data set of episodes of so many rows; odd ones end terminated."""
    trials = []
    for k, length in enumerate(lengths):
        trials.append(make_trial(length + 1, seed=seed + k, terminated=k % 2 == 1))
        trials[-1]["env_infos"]["pixels"] = np.full((length + 1, 2, 3), k + 1, np.uint8)
        trials[-1]["env_infos"]["nothing"] = np.zeros((length + 1, 0))
    return convert(path, write(path.with_name(f"{path.name}.h5"), *trials), **options)


def assert_same_transitions(split: Published, table: Published) -> None:
    """Every entry: of its episode where the mask is set, zero elsewhere."""
    lengths = table.episodes["length"].tolist()
    episodes, width = len(lengths), max(lengths)
    assert split.batch_size == (episodes, width)
    assert split.columns.keys() == {*table.columns, ("mask",), ("traj_ids",)}
    mask, ids = split.columns["mask",], split.columns["traj_ids",]
    assert (mask.shape, mask.dtype) == ((episodes, width), torch.bool)
    assert (ids.shape, ids.dtype) == ((episodes, width), torch.int64)
    start = 0
    for e, length in enumerate(lengths):
        assert mask[e].tolist() == [True] * length + [False] * (width - length)
        assert ids[e].tolist() == [e] * length + [0] * (width - length)
        for key, column in table.columns.items():
            ours = split.columns[key]
            assert (ours.dtype, ours.shape[2:]) == (column.dtype, column.shape[1:])
            assert torch.equal(ours[e, :length], column[start : start + length]), key
            assert not ours[e, length:].any(), key
        start += length


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 600))
def test_any_lengths_in_any_blocks(tmp_path, lengths, block_bytes):
    table = flat(tmp_path / "data", *lengths, force=True)
    options = ConvertOptions(block_bytes=block_bytes)
    split = ensure_split(tmp_path / "data", tmp_path / "split", options=options)
    assert_same_transitions(split, table)
    verify_published(tmp_path / "data")
    verify_published(tmp_path / "split")


def test_result_is_readable_by_tensordict_with_its_batch_size(tmp_path):
    flat(tmp_path / "data", 4, 2)
    split = ensure_split(tmp_path / "data", tmp_path / "split")
    loaded = TensorDict.load_memmap(tmp_path / "split")
    data = split.tensordict()
    assert loaded.batch_size == data.batch_size == (2, 4)
    assert data["info"].batch_size == data["next", "info"].batch_size == (2, 4)
    assert (loaded == data).all()
    assert split.groups() == ["Trial0", "Trial1"]
    assert split.episodes["length"].tolist() == [4, 2]
    assert split.manifest.identity["form"] == "split trajectories"


@pytest.mark.pitfall("DS6")
def test_split_of_an_older_version_is_made_again_and_a_current_one_kept(tmp_path):
    flat(tmp_path / "data", 4, 2)
    first = ensure_split(tmp_path / "data", tmp_path / "split")
    made = first.manifest.made
    # The same files again: another conversion, the same content, nothing to do.
    flat(tmp_path / "data", 4, 2, force=True)
    inode = (tmp_path / "split").stat().st_ino
    assert ensure_split(tmp_path / "data", tmp_path / "split").manifest.made == made
    assert (tmp_path / "split").stat().st_ino == inode
    table = flat(tmp_path / "data", 4, 2, seed=5, force=True)
    again = ensure_split(tmp_path / "data", tmp_path / "split")
    assert_same_transitions(again, table)
    # Who had mapped the stale one keeps it.
    assert float(first.columns["next", "reward"][0, 0]) == 1.0
    assert names(tmp_path) == [".data.lock", ".split.lock", "data", "data.h5", "split"]


def test_other_directories_are_not_overwritten(tmp_path):
    flat(tmp_path / "data", 4)
    flat(tmp_path / "other", 3)
    (tmp_path / "mine").mkdir()
    with pytest.raises(RuntimeError, match="whose form is None, but 'split trajectories'"):
        ensure_split(tmp_path / "data", tmp_path / "other")
    with pytest.raises(RuntimeError, match="mine is not a complete data set"):
        ensure_split(tmp_path / "data", tmp_path / "mine")
    with pytest.raises(FileNotFoundError, match="absent"):
        ensure_split(tmp_path / "absent", tmp_path / "split")
    ensure_split(tmp_path / "data", tmp_path / "split")
    with pytest.raises(ValueError, match="split already"):
        ensure_split(tmp_path / "split", tmp_path / "twice")
    assert not (tmp_path / "twice").exists()
    assert open_published(tmp_path / "other").rows == 3


def test_key_of_the_same_name_is_refused(tmp_path):
    table = flat(tmp_path / "data", 4)
    path = tmp_path / "data" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["arrays"].append({**manifest["arrays"][0], "key": ["mask"]})
    path.write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="already has a key 'mask'"):
        ensure_split(table.path, tmp_path / "split")
    assert not (tmp_path / "split").exists()


def test_failed_split_leaves_no_files(tmp_path, monkeypatch):
    flat(tmp_path / "data", 4, 3)

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.pwrite", full)
        with pytest.raises(OSError, match=r"bytes are needed for .*split"):
            ensure_split(tmp_path / "data", tmp_path / "split")
    assert names(tmp_path) == [".data.lock", ".split.lock", "data", "data.h5"]
    assert ensure_split(tmp_path / "data", tmp_path / "split").rows == 2


def test_edits_of_the_opened_flat_form_do_not_reach_the_split(tmp_path):
    table = flat(tmp_path / "data", 4, 3)
    table.columns["action",].zero_()
    split = ensure_split(tmp_path / "data", tmp_path / "split")
    assert_same_transitions(split, open_published(tmp_path / "data"))


def test_flat_form_that_is_replaced_meanwhile_is_split_as_it_is_then(tmp_path, monkeypatch):
    flat(tmp_path / "data", 4, 3)
    real = split_module.target_lock

    def replaced_before(path: Path) -> Any:
        flat(tmp_path / "data", 2, 2, 6, seed=9, force=True)
        return real(path)

    monkeypatch.setattr(split_module, "target_lock", replaced_before)
    split = ensure_split(tmp_path / "data", tmp_path / "split")
    assert_same_transitions(split, open_published(tmp_path / "data"))


def growth_of_splits(tmp_path: Path) -> int:
    """Bytes that the split of ``large.h5`` takes beyond that of a small file."""
    flat(tmp_path / "small", 3)
    convert(tmp_path / "large", tmp_path / "large.h5")
    return growth(tmp_path / "small", tmp_path / "large", tmp_path, "split", 1 << 20)


@needs_proc
def test_peak_memory_does_not_grow_with_the_length_of_an_episode(tmp_path):
    """The mask and the numbers of two episodes of up to a million rows: 9 and 18 MB."""
    rows = 1_000_000
    with h5py.File(tmp_path / "large.h5", "w") as file:
        for k, records in enumerate([rows + 1, 11]):
            for name in ("observations", "actions"):
                file[f"Trial{k}/{name}"] = np.zeros((records, 1), np.float32)
            for name in ("rewards", "time"):
                file[f"Trial{k}/{name}"] = np.arange(records, dtype=np.float32)
            file[f"Trial{k}/done"] = np.zeros(records, np.bool_)
    assert growth_of_splits(tmp_path) < 6 << 20
    split = open_published(tmp_path / "large_split")
    assert split.columns["mask",].sum(1).tolist() == [rows, 10]
    assert split.columns["traj_ids",].sum(1).tolist() == [0, 10]
    verify_published(tmp_path / "large_split")


@needs_proc
def test_peak_memory_does_not_grow_with_the_data(tmp_path):
    """64 MB of columns, one episode alone 24 MB; 8 MB of slack over blocks of 1 MiB."""
    trials = [make_trial(records, seed=k, infos=False) for k, records in enumerate([121, 20, 3])]
    for k, trial in enumerate(trials):
        trial["env_infos"] = {"image": np.full((len(trial["time"]), 200_000), k, np.uint8)}
    write(tmp_path / "large.h5", *trials)
    assert growth_of_splits(tmp_path) < 8 << 20
    images = open_published(tmp_path / "large_split").columns["info", "image"]
    assert images.shape == (3, 120, 200_000)
    assert images[:, 1, 5].tolist() == [0, 1, 2]
    assert images[2, 2:].sum() == 0
