"""H5 files as the corpora have them, of any size; values are random, layouts are not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from replaykit.testing.robohive_files import RoboHiveWriter, make_trial

__all__ = ["SAMPLE", "write_demonstrations", "write_flat", "write_images", "write_trials"]

SAMPLE = Path(__file__).parents[1] / "../shared/data/robohive/fk1_random_policy_trace.h5"

_SIDE = 84
"""Pixels of a side of robomimic's images."""

Array = npt.NDArray[Any]


def write_trials(path: Path, trials: int, seed: int) -> None:
    """Writes trials of RoboSet's simulation: those of the sample file again and again, scaled a
    little, or where there is no sample trials of its lengths and widths."""
    draw = np.random.default_rng(seed)
    if not SAMPLE.exists():
        with RoboHiveWriter(path) as writer:
            for number in range(trials):
                writer.add_trial(**make_trial(51, seed=seed * trials + number, widths=(63, 9)))
        return
    with h5py.File(SAMPLE) as file, RoboHiveWriter(path, float_dtype=None) as writer:
        known = [_tree(file[name]) for name in file]
        for number in range(trials):
            # One factor for all: what repeats a part of the observation still does.
            trial = _scaled(known[number % len(known)], 1 + draw.uniform() / 16)
            fields = ("observations", "actions", "rewards", "done", "time", "env_infos")
            writer.add_trial(**{name: trial[name] for name in fields}, tail=False)


def write_flat(
    path: Path, records: int, seed: int, *, length: int = 1000, compressed: bool = True
) -> None:
    """Writes steps as D4RL's gym_mujoco v2 has them: 17 floats of observation, 6 of action."""
    draw = np.random.default_rng(seed)
    how = {"compression": "gzip"} if compressed else {}
    ends = np.arange(1, records + 1) % length == 0
    observations = draw.normal(size=(records + 1, 17)).astype(np.float32)
    following = observations[1:].copy()
    following[ends] += 1
    arrays = {
        "observations": observations[:-1],
        "next_observations": following,
        "actions": draw.uniform(-1, 1, (records, 6)).astype(np.float32),
        "rewards": draw.normal(size=records).astype(np.float32),
        "terminals": ends & (draw.uniform(size=records) < 0.5),
        "infos/qpos": draw.normal(size=(records, 9)).astype(np.float32),
        "infos/qvel": draw.normal(size=(records, 9)).astype(np.float32),
    }
    arrays["timeouts"] = ends & ~arrays["terminals"]
    with h5py.File(path, "w") as file:
        for name, values in arrays.items():
            file.create_dataset(name, data=values, **how)


def write_demonstrations(path: Path, demos: int, seed: int, *, length: int = 10) -> None:
    """Writes short demonstrations without images as robomimic has them, 16 arrays each."""
    draw = np.random.default_rng(seed)
    widths = {"eef_pos": 3, "eef_quat": 4, "gripper_qpos": 2, "joint_pos": 7, "object": 10}

    def states() -> dict[str, Array]:
        return {name: draw.normal(size=(length + 1, width)) for name, width in widths.items()}

    def arrays() -> Iterator[tuple[str, Array]]:
        for name, values in states().items():
            yield f"obs/{name}", values[:-1]
            yield f"next_obs/{name}", values[1:]
        yield from _steps(draw, length)
        yield "states", draw.normal(size=(length, 32))

    _write_demos(path, demos, arrays, {})


def write_images(
    path: Path, demos: int, seed: int, *, length: int = 100, compressed: bool = True
) -> None:
    """Writes demonstrations with a camera as robomimic has them, next observations left out."""
    draw = np.random.default_rng(seed)

    def arrays() -> Iterator[tuple[str, Array]]:
        # A picture that changes little from frame to frame compresses like that of a camera.
        picture = draw.integers(0, 240, (_SIDE, _SIDE, 3), np.uint8)
        noise = draw.integers(0, 8, (length, _SIDE, _SIDE, 3), np.uint8)
        yield "obs/agentview_image", picture + noise
        yield "obs/eef_pos", draw.normal(size=(length, 3))
        yield from _steps(draw, length)

    how = {"compression": "gzip", "chunks": (1, _SIDE, _SIDE, 3)} if compressed else {}
    _write_demos(path, demos, arrays, how)


def _steps(draw: np.random.Generator, length: int) -> Iterator[tuple[str, Array]]:
    yield "actions", draw.uniform(-1, 1, (length, 7))
    yield "rewards", np.zeros(length)
    yield "dones", (np.arange(length) == length - 1).astype(np.int64)


def _write_demos(
    path: Path,
    demos: int,
    arrays: Callable[[], Iterator[tuple[str, Array]]],
    how: Mapping[str, Any],
) -> None:
    with h5py.File(path, "w") as file:
        for number in range(demos):
            group = file.create_group(f"data/demo_{number}")
            for name, values in arrays():
                group.create_dataset(name, data=values, **(how if values.ndim == 4 else {}))
            group.attrs["num_samples"] = len(group["actions"])


def _tree(group: h5py.Group) -> dict[str, Any]:
    return {
        name: _tree(entry) if isinstance(entry, h5py.Group) else entry[...]
        for name, entry in group.items()
    }


def _scaled(tree: Mapping[str, Any], factor: float) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            found[name] = _scaled(value, factor)
        else:
            is_real = value.dtype.kind == "f"
            found[name] = (value * factor).astype(value.dtype) if is_real else value
    return found
