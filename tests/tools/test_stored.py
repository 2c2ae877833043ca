"""Facts of data sets, checkpoints and buffers on disk against the rows that were put there."""

from __future__ import annotations

import contextlib
import json
import zlib

import h5py
import numpy as np
import pytest
import torch

from replaykit import (
    EpisodeWriter,
    LaneWriter,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
)
from replaykit.adapters import to_robomimic
from replaykit.errors import CheckpointError
from replaykit.inspection import kind_of, opened
from replaykit.tools.stored_facts import opened_buffer
from tests.support.refusals import refuses


def assert_statistics(facts, rows):
    """Those of every key, against NumPy."""
    found = {key.key: key for key in facts.keys}
    leaves = {"/".join((k,) if isinstance(k, str) else k): v
              for k, v in rows.items(True, True)}  # fmt: skip
    assert found.keys() == leaves.keys()
    for name, tensor in leaves.items():
        values, said = tensor.numpy(), found[name].statistics
        assert found[name].looked_at == found[name].rows == len(values)
        assert found[name].shape == values.shape[1:]
        assert found[name].dtype == values.dtype.name
        assert said["min"] == values.min()
        assert said["max"] == values.max()
        assert said["mean"] == pytest.approx(values.mean(dtype=np.float64), abs=1e-7)
        assert said["std"] == pytest.approx(values.std(dtype=np.float64), abs=1e-7)


@contextlib.contextmanager
def saved(rb, folder):
    """The facts and the table of a checkpoint of a buffer."""
    rb.dumps(folder / "saved")
    with opened(folder / "saved") as found:
        yield found


def prioritized(storage):
    return TensorDictPrioritizedReplayBuffer(alpha=0.6, beta=0.4, storage=storage, batch_size=4)


def test_facts_of_a_corpus_equal_its_source(corpus, tmp_path):
    with opened(str(corpus)) as (facts, table), h5py.File(tmp_path / "source.hdf5") as file:
        demos = [file[f"data/demo_{i}"] for i in range(3)]
        assert (facts.kind, facts.rows) == ("corpus", 12)
        action = np.concatenate([demo["actions"][...] for demo in demos])
        key = next(key for key in facts.keys if key.key == "action")
        assert (key.shape, key.dtype, key.source) == ((3,), "float64", "actions[t]")
        assert key.statistics["min"] == action.min()
        assert key.statistics["mean"] == pytest.approx(action.mean())
        np.testing.assert_array_equal(table.columns["action"].read(2, 7), action[2:7])
        np.testing.assert_array_equal(table.columns["action"].episode(2, 50), action[8:])
        assert len(table.columns["action"].episode(0, 2)) == 2
        assert facts.episodes.lengths.tolist() == [5, 3, 4]
        assert facts.episodes.ends == ("terminated", "truncated", "terminated")
        np.testing.assert_allclose(
            facts.episodes.returns, [demo["rewards"][...].sum() for demo in demos]
        )
        assert facts.nbytes == sum(
            each.stat().st_size for each in corpus.rglob("*") if each.is_file()
            and each.name not in ("manifest.json", "meta.json")
        )  # fmt: skip


@pytest.mark.parametrize("kind", [LazyTensorStorage, LazyMemmapStorage])
def test_facts_of_a_wrapped_ring_equal_the_newest_rows(tmp_path, transitions, kind):
    rb = ReplayBuffer(storage=kind(30))
    rows = transitions(44)
    rb.extend(rows)
    with saved(rb, tmp_path) as (facts, table):
        assert (facts.kind, facts.rows) == ("checkpoint", 30)
        assert facts.about["capacity"] == 30
        assert facts.about["written"] == 44
        assert_statistics(facts, rows[14:])
        assert facts.episodes.lengths.tolist() == rb.episodes.lengths.tolist() == [6, 10, 10, 4]
        assert facts.episodes.ends == ("terminated", "terminated", "terminated", "open")
        reward = rows["next", "reward"][14:, 0].double().numpy()
        parts = np.split(reward, [6, 16, 26])
        np.testing.assert_allclose(facts.episodes.returns, [part.sum() for part in parts])
        for number, (start, stop) in enumerate(((14, 20), (20, 30), (30, 40), (40, 44))):
            np.testing.assert_array_equal(
                table.columns["action"].episode(number, 99), rows["action"][start:stop]
            )
        assert table.priorities is None


def test_facts_contain_priorities_of_a_checkpoint(tmp_path, transitions):
    rb = prioritized(LazyTensorStorage(50))
    rb.extend(transitions(20))
    rb.update_priority(torch.arange(20), torch.linspace(0.1, 2, 20))
    with saved(rb, tmp_path) as (facts, table):
        np.testing.assert_allclose(table.priorities, np.linspace(0.1, 2, 20), rtol=1e-6)
        assert facts.about["priorities"] == "alpha 0.6, beta 0.4, eps 1e-08"


def test_facts_of_lanes_equal_the_rows(tmp_path, transitions):
    rb = ReplayBuffer(storage=LazyTensorStorage(40, ndim=2))
    lanes = [transitions(10, end=5, seed=seed) for seed in range(2)]
    rows = torch.stack(lanes)
    rb.extend(rows)
    with saved(rb, tmp_path) as (facts, table):
        assert facts.rows == 20
        assert facts.about["lanes"] == [2]
        assert facts.episodes.lengths.tolist() == [5, 5, 5, 5]
        action = table.columns["action"]
        assert (action.rows, action.shape) == (20, (2,))
        whole = rows["action"].transpose(0, 1).reshape(-1, 2).numpy()
        np.testing.assert_array_equal(action.read(3, 8), whole[3:8])
        np.testing.assert_array_equal(action.episode(3, 9), lanes[1]["action"][5:])


STREAMS = {
    "ring": ({}, None),
    "stored once": ({"dedup_next": True}, None),
    "rings": ({}, lambda: LaneWriter(12)),
    "whole episodes": ({}, lambda: EpisodeWriter()),
}


def without_lane_key(folder):
    """Change a checkpoint to one of an earlier release, which did not save the lane_key."""
    file = folder / "manifest.json"
    text, key = file.read_text()[: file.read_text().rindex(', "crc32"')], '"lane_key": ["env"], '
    assert key in text
    text = text.replace(key, "")
    checksum = zlib.crc32((text + "}").encode())
    file.write_text(f'{text}, "crc32": {checksum}}}')


@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize("kind", STREAMS)
def test_episodes_of_streams_in_a_checkpoint_are_those_of_the_buffer(
    kind, is_old, tmp_path, transitions
):
    """Rows of several streams are interleaved, or lie in slots of their stream."""
    options, writer = STREAMS[kind]
    storage = LazyTensorStorage(36, lane_key="env", **options)
    rb = ReplayBuffer(storage=storage, writer=writer and writer())
    streams = [transitions(24, end=3 + n, seed=n) for n in range(3)]
    for number, rows in enumerate(streams):
        rows["next", "observation"][:-1] = rows["observation"][1:]
        rows["env"] = torch.full((24,), number)
    if kind == "whole episodes":
        parts = [part for number, rows in enumerate(streams) for part in rows.split(3 + number)]
        for number, rows in enumerate(parts):
            rb.extend(rows.set("env", torch.full((len(rows),), number)))
    else:
        for step in range(24):
            rb.extend(torch.stack([rows[step] for rows in streams]))
    wanted = [(len(each), each.rows()["action"]) for each in rb.episodes]
    rb.dumps(tmp_path / "saved")
    if is_old:
        without_lane_key(tmp_path / "saved")
    if is_old and writer is None:  # nothing in the checkpoint tells the streams apart
        with opened(tmp_path / "saved") as (facts, _):
            assert (facts.rows, facts.episodes) == (36, None)
            assert "without the name of their lane_key" in facts.warnings[0]
        refuses(ValueError, "lane_key", exported, tmp_path / "saved", tmp_path / "a.hdf5")
        return
    with opened(tmp_path / "saved") as (facts, table):
        assert facts.episodes.lengths.tolist() == [length for length, _ in wanted]
        np.testing.assert_allclose(facts.episodes.returns, rb.episodes.returns.flatten(), 1e-6)
        for number, (length, action) in enumerate(wanted):
            found = table.columns["action"].episode(number, length)
            np.testing.assert_array_equal(found, action)
    with h5py.File(exported(tmp_path / "saved", tmp_path / "a.hdf5")) as file:
        for number, (_, action) in enumerate(wanted):
            np.testing.assert_array_equal(file[f"data/demo_{number}/actions"], action)


def exported(folder, target):
    with opened_buffer(folder, kind_of(folder)) as rb:
        return to_robomimic(rb, target)


def test_facts_of_observations_stored_once_equal_the_rows(tmp_path, transitions):
    rows = transitions(20)
    rows["next", "observation"][:-1] = rows["observation"][1:]
    rb = ReplayBuffer(storage=LazyTensorStorage(30, dedup_next=True))
    rb.extend(rows)
    with saved(rb, tmp_path) as (facts, _):
        assert_statistics(facts, rows)


def test_facts_of_a_list_warn_of_several_layouts(tmp_path):
    rb = ReplayBuffer(storage=ListStorage(10))
    rb.extend([torch.ones(2), torch.ones(3), torch.ones(2)])
    with saved(rb, tmp_path) as (facts, _):
        assert (facts.rows, facts.keys) == (3, ())
        assert any("2 layouts" in text for text in facts.warnings)


def test_facts_of_a_key_without_elements_have_no_numbers(tmp_path, transitions):
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    rb.extend(transitions(4, nothing=torch.zeros(4, 3, 0)))
    with saved(rb, tmp_path) as (facts, table):
        (key,) = [key for key in facts.keys if key.key == "nothing"]
        assert (key.shape, key.rows, key.statistics["min"]) == ((3, 0), 4, None)
        assert table.columns["nothing"].episode(0, 9).shape == (4, 3, 0)


def test_facts_of_an_empty_buffer_have_no_rows(tmp_path):
    with saved(ReplayBuffer(storage=LazyTensorStorage(10)), tmp_path) as (facts, _):
        assert (facts.rows, facts.keys, facts.episodes) == (0, (), None)


@pytest.mark.parametrize("once", [False, True])
def test_facts_of_a_recoverable_buffer_equal_the_rows(tmp_path, transitions, once):
    def made():
        options = {"dedup_next": once, "on_mismatch": "dense"}
        return prioritized(
            LazyMemmapStorage(100, scratch_dir=tmp_path / "b", recover=True, **options)
        )

    rows = transitions(25)
    rb = made()
    rb.extend(rows)
    rb.update_priority(torch.arange(25), torch.linspace(0.1, 2, 25))
    with pytest.raises(RuntimeError, match="in use by another"), opened(tmp_path / "b"):
        pass
    del rb
    for _ in range(2):  # it is as it was before
        with opened(tmp_path / "b") as (facts, table):
            assert (facts.kind, facts.rows) == ("buffer", 25)
            assert_statistics(facts, rows)
            assert facts.episodes.lengths.tolist() == [10, 10, 5]
            np.testing.assert_allclose(table.priorities, np.linspace(0.1, 2, 25), rtol=1e-6)
        del facts, table
    again = made()
    assert (again[:]["action"] == rows["action"]).all()


def test_scratch_directory_without_records_suggests_recover(tmp_path, transitions):
    rb = ReplayBuffer(storage=LazyMemmapStorage(100, scratch_dir=tmp_path / "b"))
    rb.extend(transitions(25))
    with opened(tmp_path / "b") as (facts, _):
        assert (facts.kind, facts.rows, facts.keys) == ("buffer", None, ())
        assert facts.nbytes == sum(f.stat().st_size for f in (tmp_path / "b").iterdir())
        assert "recover=True" in facts.warnings[0]


def test_a_folder_of_buffers_is_no_buffer(tmp_path, transitions):
    rb = ReplayBuffer(storage=LazyMemmapStorage(30, scratch_dir=tmp_path / "b", recover=True))
    rb.extend(transitions(5))
    with pytest.raises(ValueError, match="holds none of them"):
        kind_of(tmp_path)


def test_a_damaged_manifest_names_its_file(tmp_path, transitions):
    rb = ReplayBuffer(storage=LazyTensorStorage(30))
    rb.extend(transitions(5))
    rb.dumps(tmp_path / "saved")
    manifest = tmp_path / "saved" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"len": 5', '"len": 6'))
    assert kind_of(tmp_path / "saved") == "checkpoint"
    with pytest.raises(CheckpointError, match=r"manifest\.json"), opened(tmp_path / "saved"):
        pass


def test_facts_as_json_have_no_nan_and_no_more_episodes_than_asked(corpus):
    with opened(corpus) as (facts, _):
        found = facts.to_json(episodes=2)
    json.dumps(found, allow_nan=False)
    assert found["episodes"]["count"] == 3
    assert [each["length"] for each in found["episodes"]["first"]] == [5, 3]
    assert found["episodes"]["lengths"] == {
        "min": 3.0, "median": 4.0, "mean": 4.0, "max": 5.0, "total": 12.0,
    }  # fmt: skip
