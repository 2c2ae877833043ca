"""A writer of the RoboHive H5 layout, the layout of RoboSet's files.

There is one group per trial, and every array of a trial has one entry per record. Record ``t``
contains observation, reward, done and infos of the state *before* action ``t``. The action of the
last record is a row of NaN, because the final state has no action. Arrays are chunked and
compressed with gzip at level 4. There are no attributes.

The writer checks nothing, so tests can also write files that break the rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np


def make_trial(
    records: int,
    *,
    seed: int = 0,
    widths: tuple[int, int] = (5, 2),
    terminated: bool = False,
    infos: bool = True,
) -> dict[str, Any]:
    """Return arguments of `RoboHiveWriter.add_trial` for a trial without faults.

    The first columns of the observation change by exactly the action: ``observation[t + 1, :A] ==
    observation[t, :A] + action[t]``. So tests can detect a wrong alignment. The reward of record
    ``t`` is ``100 * seed + t``.

    Args:
        records: number of records, one more than steps.
        seed: the seed of the random numbers, which makes trials differ.
        widths: number of columns of observation and action.
        terminated: True to set ``done`` at the last record.
        infos: True to include ``env_infos``, with copies of parts of the observation and of the
            reward as RoboHive writes them.

    Example:
        >>> from replaykit.testing import make_trial
        >>> trial = make_trial(4, seed=1, terminated=True)
        >>> trial["actions"].shape, trial["rewards"].tolist(), trial["done"].tolist()
        ((3, 2), [100.0, 101.0, 102.0, 103.0], [False, False, False, True])
    """
    draw = np.random.default_rng(seed)
    observation, action = widths
    actions = draw.uniform(-1, 1, (max(records - 1, 0), action))
    observations = draw.normal(size=(records, observation))
    for t in range(records - 1):
        observations[t + 1, :action] = observations[t, :action] + actions[t]
    rewards = 100.0 * seed + np.arange(records, dtype=np.float64)
    done = np.zeros(records, np.bool_)
    done[-1:] = terminated
    time = np.arange(records) * 0.08
    trial: dict[str, Any] = {
        "observations": observations,
        "actions": actions,
        "rewards": rewards,
        "done": done,
        "time": time,
    }
    if infos:
        trial["env_infos"] = {
            "time": time,
            "rwd_dense": rewards,
            "rwd_sparse": (rewards > 101).astype(np.float64),
            "done": done,
            "solved": done,
            "obs_dict": {
                "time": time,
                "position": observations[:, :action],
                "rest": observations[:, action:],
            },
            "state": {"qpos": draw.normal(size=(records, 3, 2))},
        }
    return trial


class RoboHiveWriter:
    """A writer of trials to one H5 file, in the format of RoboHive's rollout script.

    Args:
        path: the file to create. An existing file is replaced.
        float_dtype: the stored dtype of floating-point arrays. The rollout script uses float64.
            ``None`` keeps the dtypes of the arrays. Other arrays always keep their dtypes.

    Raises:
        ImportError: h5py is not installed.

    Example:
        >>> import h5py, tempfile, numpy as np
        >>> from pathlib import Path
        >>> from replaykit.testing import RoboHiveWriter
        >>> path = Path(tempfile.mkdtemp()) / "demo_trace.h5"
        >>> with RoboHiveWriter(path) as writer:
        ...     writer.add_trial(
        ...         observations=np.zeros((4, 3)),  # 4 states
        ...         actions=np.zeros((3, 2)),  # 3 actions lead from one to the next
        ...         rewards=np.zeros(4),
        ...         done=np.zeros(4, bool),
        ...         time=np.arange(4) * 0.08,
        ...         env_infos={"state": {"qpos": np.zeros((4, 5)), "act": None}},
        ...     )
        'Trial0'
        >>> with h5py.File(path) as file:
        ...     file["Trial0/actions"].shape, bool(np.isnan(file["Trial0/actions"][-1]).all())
        ((4, 2), True)
    """

    def __init__(self, path: str | Path, *, float_dtype: Any = np.float64) -> None:
        import h5py

        self.path = Path(path)
        self._float_dtype = None if float_dtype is None else np.dtype(float_dtype)
        self._file = h5py.File(self.path, "w")
        self._trials = 0

    def __enter__(self) -> RoboHiveWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file. Further calls have no effect."""
        self._file.close()

    def add_trial(
        self,
        observations: Any,
        actions: Any,
        rewards: Any,
        done: Any,
        time: Any,
        env_infos: Mapping[str, Any] | None = None,
        *,
        name: str | None = None,
        tail: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """Write one trial, and return the name of its group.

        Args:
            observations: ``[T, O]``, one per state.
            actions: ``[T-1, A]`` with ``tail``, and ``[T, A]`` without ``tail``, as in early
                traces.
            rewards, done, time: ``[T]``, one value per state.
            env_infos: nested mapping of arrays ``[T, ...]``. A leaf is ``None`` if the environment
                does not have the value. ``None`` is stored as float16 NaN, as in RoboHive.
            name: name of the group; by default ``Trial<k>`` for the ``k``-th trial of the file.
            tail: True to append a row of NaN to ``actions``.
            extra: nested mapping of further arrays of the trial, stored next to ``actions``.

        An array among the first five arguments that is ``None`` is not written. Lengths and
        contents are not checked.
        """
        group = self._file.create_group(f"Trial{self._trials}" if name is None else name)
        self._trials += 1
        length = next((len(x) for x in (observations, rewards, done, time) if x is not None), 0)
        if actions is not None and tail:
            actions = np.asarray(actions)
            row = np.full((1, *actions.shape[1:]), np.nan, dtype=actions.dtype)
            actions = np.concatenate([actions, row])
        arrays = {
            "observations": observations,
            "actions": actions,
            "rewards": rewards,
            "done": done,
            "time": time,
        }
        for key, value in arrays.items():
            if value is not None:
                self._write(group, key, value)
        if env_infos is not None:
            self._write_tree(group.create_group("env_infos"), env_infos, length)
        if extra is not None:
            self._write_tree(group, extra, length)
        return str(group.name).lstrip("/")

    def add_member(self, name: str, value: Any) -> None:
        """Write an array next to the trials, or a group of arrays for a mapping."""
        if isinstance(value, Mapping):
            self._write_tree(self._file.create_group(name), value, 0)
        else:
            self._write(self._file, name, value)

    def _write_tree(self, group: Any, tree: Mapping[str, Any], length: int) -> None:
        for key, value in tree.items():
            if isinstance(value, Mapping):
                self._write_tree(group.create_group(key), value, length)
            elif value is None:
                self._write(group, key, np.full(length, np.nan, np.float16), keep=True)
            else:
                self._write(group, key, value)

    def _write(self, group: Any, name: str, value: Any, *, keep: bool = False) -> None:
        array = np.asarray(value)
        if not keep and self._float_dtype is not None and array.dtype.kind == "f":
            array = array.astype(self._float_dtype, copy=False)
        if array.ndim == 0:
            # HDF5 cannot compress scalars. RoboHive stores them as arrays of one entry.
            array = array.reshape(1)
        if array.size:
            group.create_dataset(name, data=array, compression="gzip", compression_opts=4)
        else:
            group.create_dataset(name, data=array)
