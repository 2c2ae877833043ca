"""Trials of RoboHive's layout, their conversion, and what every table of transitions must be."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch

from replaykit.datasets import FINAL_STATE, Field, Groups, Layout, RobosetExperienceReplay
from replaykit.datasets.engine.conversion import ensure_dataset
from replaykit.datasets.families.robohive import ROBOHIVE
from replaykit.datasets.publishing import Published
from replaykit.datasets.sources import Sources
from replaykit.testing.robohive_files import RoboHiveWriter, make_trial

ROBOSET_REPO = "jdvakil/RoboSet_Sim"
ROBOSET_ID = "FK1-v4(expert)/FK1_MicroOpenRandom_v2d-v4"


def write(path: Path, *trials: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with RoboHiveWriter(path, float_dtype=None) as writer:
        for trial in trials:
            writer.add_trial(**trial)
    return path


def write_file(path: Path, *lengths: int, seed: int = 0, **options: Any) -> Path:
    """Write trials of so many records."""
    with RoboHiveWriter(path) as writer:
        for number, records in enumerate(lengths):
            writer.add_trial(**make_trial(records, seed=seed + number, **options))
    return path


def write_source(path: Path, records: int = 5, seed: int = 0) -> Path:
    """Write two trials, of which the second terminates after three records."""
    with RoboHiveWriter(path) as writer:
        writer.add_trial(**make_trial(records, seed=seed))
        writer.add_trial(**make_trial(3, seed=seed + 50, terminated=True))
    return path


def write_steps(path: Path, rows: int = 4, **more: Any) -> Path:
    """Write an episode of D4RL that terminates; ``more`` has other arrays, or None for none."""
    values = {
        "observations": np.arange(2.0 * rows).reshape(rows, 2),
        "actions": np.zeros((rows, 1)),
        "rewards": np.ones(rows),
        "terminals": np.arange(rows) == rows - 1,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        for name, value in {**values, **more}.items():
            if value is not None:
                file[name] = value
    return path


def with_repeated_infos(trial: dict[str, Any]) -> dict[str, Any]:
    """Make all infos of observations those of the last record, as a log by reference has them."""
    infos = trial["env_infos"]["obs_dict"]
    for name, values in infos.items():
        infos[name] = np.broadcast_to(values[-1:], values.shape)
    return trial


def with_nan_action(trial: dict[str, Any]) -> dict[str, Any]:
    trial["actions"][2] = np.nan
    return trial


def convert(target: Path, *files: Path, **options: Any) -> Published:
    given = {"get_sources": lambda: Sources.local(files), "layout": ROBOHIVE, **options}
    return ensure_dataset(target, **given)


def quietly(target: Path, *files: Path, **options: Any) -> Published:
    """Convert files of which something is known to be left out."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return convert(target, *files, **options)


def never() -> Sources:
    raise AssertionError("the sources were asked for")


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def construct(root: Path, **options: Any) -> RobosetExperienceReplay:
    return RobosetExperienceReplay(ROBOSET_ID, **{"batch_size": 4, "root": root, **options})


def served(*files: Path) -> dict[str, Path]:
    """Name files as the Hub has those of a RoboSet data set."""
    return {f"{ROBOSET_ID}/seed{i}/x_trace.h5": path for i, path in enumerate(files)}


def assert_ted(found: Published) -> None:
    """Check the invariants of a table of transitions, but for rows marked as unrecorded."""
    data = found.tensordict()
    done, terminated, truncated = (
        data["next", name].squeeze(-1) for name in ("done", "terminated", "truncated")
    )
    assert torch.equal(done, terminated | truncated)
    for name in ("done", "terminated", "truncated"):
        assert data[name].shape == (found.rows, 1)
        assert not data[name].any()
    assert ("reward",) not in found.columns
    starts, lengths = found.episodes["start"], found.episodes["length"]
    assert starts.tolist() == [0, *np.cumsum(lengths.numpy())[:-1]]
    assert int(lengths.sum()) == found.rows
    assert done.nonzero().flatten().tolist() == (starts + lengths - 1).tolist()
    rows, table = (
        torch.stack([each["seed"], each["episode"]], 1) for each in (data, found.episodes)
    )
    assert torch.equal(rows, table.repeat_interleave(lengths, 0))
    assert len(table.unique(dim=0)) == len(starts)
    inside = ~done[:-1]
    following, after = data["next", "observation"][:-1][inside], data["observation"][1:][inside]
    is_equal = following == after
    assert is_equal.all()
    assert data["next"].batch_size == data.batch_size
    for key in ("info", ("next", "info")):
        assert key not in data.keys(True) or data[key].batch_size == data.batch_size


def arm_layout(name: str, *more: Field) -> Layout:
    """Runs of joints, one more than there are torques, with scores; and whatever else there is."""
    return Layout(
        name=name,
        version=1,
        episodes=Groups("run", having=("torque",)),
        alignment=FINAL_STATE,
        clock="torque",
        fields=(
            Field("joints", "observation", ("observation",), ("next", "observation")),
            Field("torque", "action", before=("action",)),
            Field("score", "reward", after=("next", "reward"), column=True),
            *more,
        ),
    )
