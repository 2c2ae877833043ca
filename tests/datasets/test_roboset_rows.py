"""The rows of RoboSet against what h5py reads, and what can be done with them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from tensordict import TensorDict

import replaykit
from replaykit import RandomSampler, ReplayBuffer, SamplerWithoutReplacement
from replaykit.datasets import RobosetExperienceReplay
from replaykit.transforms import ExcludeTransform

ID = "FK1-v4(expert)/FK1_MicroOpenRandom_v2d-v4"
FLAGS = ("done", "terminated", "truncated")


def leaves_of(group: h5py.Group, prefix: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    found: dict[tuple[str, ...], Any] = {}
    for name, item in group.items():
        if isinstance(item, h5py.Group):
            found.update(leaves_of(item, (*prefix, name)))
        else:
            found[(*prefix, name)] = item[...]
    return found


def rows_by_h5py(paths: list[Path]) -> dict[tuple[str, ...], np.ndarray]:
    """What the data set must hold, computed from the files record by record."""
    rows: dict[tuple[str, ...], list[Any]] = {}

    def put(key: tuple[str, ...], value: Any) -> None:
        rows.setdefault(key, []).append(value)

    for seed, path in enumerate(paths):
        with h5py.File(path) as file:
            for name in sorted(file, key=lambda trial: int(trial.removeprefix("Trial"))):
                trial = file[name]
                infos = leaves_of(trial["env_infos"])
                records = len(trial["actions"])
                for t in range(records - 1):
                    put(("observation",), trial["observations"][t])
                    put(("action",), trial["actions"][t])
                    put(("time",), trial["time"][t])
                    put(("episode",), int(name.removeprefix("Trial")))
                    put(("seed",), seed)
                    put(("next", "observation"), trial["observations"][t + 1])
                    put(("next", "reward"), [trial["rewards"][t + 1]])
                    terminated = bool(trial["done"][t + 1])
                    truncated = t == records - 2 and not terminated
                    put(("next", "terminated"), [terminated])
                    put(("next", "truncated"), [truncated])
                    put(("next", "done"), [terminated or truncated])
                    for flag in FLAGS:
                        put((flag,), [False])
                    for key, values in infos.items():
                        put(("info", *key), values[t])
                        put(("next", "info", *key), values[t + 1])
    return {key: np.asarray(values) for key, values in rows.items()}


def assert_equal_rows(data: ReplayBuffer, expected: dict[tuple[str, ...], np.ndarray]) -> None:
    stored = data[:]
    keys = {key if isinstance(key, tuple) else (key,) for key in stored.keys(True, True)}
    constant_nan = {k for k, v in expected.items() if v.dtype.kind == "f" and np.isnan(v).all()}
    assert keys == expected.keys() - constant_nan
    for key in keys:
        want, have = expected[key], stored[key].numpy()
        assert have.shape == want.shape, key
        assert have.dtype == want.dtype, key
        assert np.array_equal(have.view(np.uint8), np.ascontiguousarray(want).view(np.uint8)), key


@pytest.mark.pitfall("DS2")
@pytest.mark.parametrize("copies", [1, 2])
def test_every_value_of_the_real_file_is_that_of_h5py(serve, sample, root, copies, construct):
    serve(*[sample] * copies)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # leaves without values are left out; tested on their own
        data = construct(root)
    assert len(data) == 500 * copies
    assert_equal_rows(data, rows_by_h5py([sample] * copies))
    assert int(data["next", "done"].sum()) == 10 * copies
    total = float(data["next", "reward"].sum())
    assert total == pytest.approx(-416.28576943 * copies, abs=1e-6)


@pytest.mark.pitfall("DS2")
def test_every_value_of_written_files_is_that_of_h5py(serve, small, root, construct):
    serve(*small)
    data = construct(root)
    assert len(data) == (3 + 5 + 2) + (4 + 3)
    assert_equal_rows(data, rows_by_h5py(small))
    assert data["next", "terminated"].flatten().nonzero().flatten().tolist() == [9, 16]


@pytest.mark.pitfall("DS9")
def test_trials_are_in_the_order_of_their_numbers(serve, tmp_path, root, construct, write_file):
    serve(write_file(tmp_path / "a.h5", *[3] * 12))
    assert construct(root)["episode"].tolist() == [k for k in range(12) for _ in range(2)]


@pytest.mark.pitfall("BD2")
def test_trials_of_the_same_number_in_different_files_stay_apart(serve, small, root, construct):
    serve(*small)
    data = construct(root)
    ids = list(zip(data["seed"].tolist(), data["episode"].tolist(), strict=True))
    assert sorted(set(ids)) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    changes = [i for i in range(1, len(ids)) if ids[i] != ids[i - 1]]
    ends = data["next", "done"].flatten().nonzero().flatten().tolist()
    assert [change - 1 for change in changes] == ends[:-1]


@pytest.mark.pitfall("DS11")
def test_nested_tensordicts_have_the_batch_size_of_the_rows(serve, small, root, construct):
    serve(*small)
    data = construct(root)
    for rows in (data[:], data.sample(), data.storage[:]):
        nested = [rows["next"], rows["info"], rows["next", "info"], rows["info", "obs_dict"]]
        assert {part.batch_size for part in nested} == {rows.batch_size}


def test_documented_example_runs_with_only_the_imports_changed(serve, small, root):
    serve(*small)
    torch.manual_seed(0)
    d = RobosetExperienceReplay(
        ID, batch_size=32, root=root, transform=ExcludeTransform("info", ("next", "info"))
    )
    for batch in d:  # noqa: B007 - as users write it
        break
    shapes = {key: tuple(batch[key].shape) for key in batch.keys(True, True)}
    assert shapes == {
        "action": (32, 2),
        "done": (32, 1),
        "episode": (32,),
        "index": (32,),
        ("next", "done"): (32, 1),
        ("next", "observation"): (32, 5),
        ("next", "reward"): (32, 1),
        ("next", "terminated"): (32, 1),
        ("next", "truncated"): (32, 1),
        "observation": (32, 5),
        "seed": (32,),
        "terminated": (32, 1),
        "time": (32,),
        "truncated": (32, 1),
    }
    assert batch["action"].dtype == batch["observation"].dtype == torch.float64
    assert batch["index"].dtype == batch["seed"].dtype == batch["episode"].dtype == torch.int64


def test_a_cast_that_the_caller_asks_for_is_a_transform(serve, small, root, construct):
    serve(*small)
    data = construct(root, transform=lambda batch: batch.float())
    assert data.sample()["observation"].dtype == torch.float32
    assert data.storage["observation" and slice(None)]["observation"].dtype == torch.float64


def test_sampling_without_replacement_visits_every_row_once(serve, small, root, construct):
    serve(*small)
    data = construct(root, sampler=SamplerWithoutReplacement())
    seen = torch.cat([batch["index"] for batch in data])
    assert seen.sort().values.tolist() == list(range(17))


def test_buffer_is_immutable_and_its_rows_can_be_edited(serve, small, root, construct):
    serve(*small)
    data = construct(root)
    row = data[0]
    for write in (lambda: data.add(row), lambda: data.extend(row.unsqueeze(0)), data.empty):
        with pytest.raises(RuntimeError, match="This dataset doesn't allow writing"):
            write()
    assert data.write_count == 0
    data.set_at_("action", torch.zeros(2, dtype=torch.float64), 3)
    assert data["action"][3].tolist() == [0.0, 0.0]


@pytest.mark.pitfall("DS17")
def test_edits_never_reach_the_disk(serve, small, root, construct):
    serve(*small)
    first = construct(root)
    before = first["action"].clone()
    first.set_("action", torch.zeros_like(before))
    first[:2] = first[2:4].clone()
    first.update_({("next", "reward"): torch.ones(17, 1, dtype=torch.float64)})
    second = construct(root, download=False)
    assert second["action"].equal(before)
    assert not second["next", "reward"].equal(first["next", "reward"])


def test_a_buffer_over_a_data_set_can_be_saved_and_loaded(serve, small, root, tmp_path, construct):
    serve(*small)
    data = construct(root, generator=torch.Generator().manual_seed(1))
    data.dumps(tmp_path / "saved")
    other = ReplayBuffer(
        storage=replaykit.LazyMemmapStorage(17),
        sampler=RandomSampler(),
        writer=replaykit.ImmutableDatasetWriter(),
        batch_size=4,
    )
    other.loads(tmp_path / "saved")
    for _ in range(5):
        left, right = data.sample(), other.sample()
        assert all(left[key].equal(right[key]) for key in left.keys(True, True))


def test_columns_on_disk_are_readable_by_tensordict(serve, small, root, construct):
    serve(*small)
    data = construct(root)
    stored = TensorDict.load_memmap(data.data_path)
    assert (stored == data[:]).all()
