"""D4RL: flat arrays of steps, cut into episodes by two flags or by the resets.

Row ``t`` of the arrays is a step: observation, action, its reward, and whether the episode
terminated or timed out there. Releases differ in what tells the state after the last step of an
episode: ``next_observations`` (gym_mujoco v1 and v2), the simulator state of AntMaze v0, which
was logged one step late, or nothing (gym_mujoco v0, Adroit).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from replaykit.datasets.engine.fields import STEPS, Alignment, Field
from replaykit.datasets.engine.finding import Finder
from replaykit.datasets.engine.h5 import H5File
from replaykit.datasets.engine.layout import DropLeaves, Layout, Window
from replaykit.datasets.engine.places import Place
from replaykit.datasets.families.resets import Resets

__all__ = ["D4RL", "D4RLLayout"]

_FLAT: Final = Resets(beside=("metadata", "virtual"))
_STATE: Final = ("infos/qpos", "infos/qvel")
_LOOKED_AT: Final = 4096
"""Records at the beginning of a file by which its release is told."""
_SMOOTH: Final = 3.0
"""A step of the joints across a reset is many times the usual one; across a mere flag it is not."""


@dataclass(frozen=True, kw_only=True)
class D4RLLayout(Layout):
    """Flat D4RL files of any release.

    Where a release tells the state that a step arrived at, episodes end where the environment was
    reset, and flags that stand elsewhere are reported: a goal may be held for many steps. Where it
    does not, ``terminals`` of several steps in a row are refused. Very large files hold the arrays
    in parts, ``virtual/0`` and so on, which are read one after the other.

    Attributes:
        unreliable_ends: accept files whose flags do not stand where the environment was reset,
            as those of Adroit ``human-v0`` and ``cloned-v0``, and cut them as they are flagged.

    Example:
        >>> from replaykit.datasets.families import D4RL, D4RLLayout
        >>> D4RL.is_open, D4RLLayout(unreliable_ends=True) == D4RL
        (True, False)
    """

    name: str = "d4rl"
    version: int = 2
    episodes: Finder = _FLAT
    alignment: Alignment = STEPS
    clock: str = "actions"
    chunks: str = "virtual"
    fields: tuple[Field, ...] = (
        Field("observations", "observation", ("observation",), ("next", "observation")),
        Field("actions", "action", before=("action",)),
        Field("rewards", "reward", after=("next", "reward"), column=True),
        Field("terminals", "terminated"),
        Field("timeouts", "truncated", required=False),
        Field("infos/", "info", before=("info",), required=False),
    )
    unreliable_ends: bool = False

    def resolve(self, file: H5File, place: Place) -> Layout:
        """Takes the next observations from where this release has them, if it has them."""
        leaves = {leaf.path: leaf for leaf in file.leaves("", without=_FLAT.beside)}
        needed = ("observations", "actions", "rewards", "terminals")
        missing = [name for name in needed if name not in leaves]
        if missing:
            keys = ", ".join(map(repr, list(leaves)[:20])) or "nothing"
            raise place.error(
                f"no arrays {', '.join(map(repr, missing))} of the layout {self.name!r}; the file "
                f"holds {keys}; is this a file of another corpus?",
                "V04",
            )
        successor: str | tuple[str, ...] | None = None
        if "next_observations" in leaves:
            successor = "next_observations"
        elif all(path in leaves for path in _STATE) and self._is_late(file, leaves):
            successor = _STATE
        if successor is None:
            return replace(self, episodes=replace(_FLAT, trusted=self.unreliable_ends))
        arrived = (successor,) if isinstance(successor, str) else successor
        resets = replace(_FLAT, arrived=arrived, flags_early=arrived == _STATE)
        first = Field("observations", "observation", before=("observation",))
        after = Field(successor, "observation", after=("next", "observation"), moment="successor")
        rest = (replace(entry, held=True) if entry.is_end else entry for entry in self.fields[1:])
        return replace(self, episodes=resets, fields=(first, after, *rest))

    def _is_late(self, file: H5File, leaves: Collection[str]) -> bool:
        """Whether the simulator state of a record is the observation of the one after it."""
        observations, ends, state = self._begin(file, leaves)
        if len(observations) < 2 or state.shape != observations.shape:
            return False
        inside = ~ends[:-1]
        late = (state[:-1] == observations[1:]).all(axis=1)[inside]
        same = (state[:-1] == observations[:-1]).all(axis=1)[inside]
        return bool(late.size) and late.mean() > 0.5 and not same.all()

    def _begin(
        self, file: H5File, leaves: Collection[str]
    ) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_], npt.NDArray[Any]]:
        records = file.shape("observations")[0]
        stop = min(records, _LOOKED_AT)
        arrays = {
            path: file.read(path, 0, stop)
            for path in ("observations", "terminals", "timeouts", *_STATE)
            if path in leaves and file.shape(path)[:1] == (records,)
        }
        observations = arrays["observations"].reshape(stop, -1)
        ends = np.zeros(stop, np.bool_)
        for name in ("terminals", "timeouts"):
            if name in arrays and arrays[name].size == stop:
                ends |= arrays[name].reshape(stop) != 0
        parts = [arrays[path].reshape(stop, -1) for path in _STATE if path in arrays]
        state = np.concatenate(parts, axis=1) if parts else np.empty((stop, 0))
        return observations, ends, state.astype(observations.dtype)

    def witnesses(self, leaves: Collection[str]) -> tuple[str, ...]:
        if not any(path in leaves for path in _STATE):
            return ()
        wanted = ("observations", "terminals", "timeouts", *_STATE)
        return tuple(path for path in wanted if path in leaves)

    def examine(self, window: Window) -> None:
        """Drops a simulator state that never moves; refuses flags without a reset (rule V39).

        Where the state that a step arrived at is known, `Resets` has seen to the flags.
        """
        arrays = {path: array.reshape(len(array), -1) for path, array in window.arrays.items()}
        count = len(arrays["observations"])
        ends = np.zeros(count, np.bool_)
        for name in ("terminals", "timeouts"):
            if name in arrays:
                ends |= arrays[name][:, 0] != 0
        inside = np.flatnonzero(~ends[:-1])
        moves = _moves(arrays["observations"], inside)
        for path in _STATE:
            if path in arrays and moves and not _moves(arrays[path], inside):
                raise DropLeaves(
                    path,
                    f"in {window.place.brief} it stays the same throughout episodes in which the "
                    "observation changes: it was not recorded",
                )
        has_next = any(entry.describes == "successor" for entry in self.fields)
        if "infos/qpos" not in arrays or has_next or self.unreliable_ends:
            return
        steps = _steps(arrays["infos/qpos"])
        flagged = np.flatnonzero(ends[:-1])
        usual = float(np.median(steps[inside])) if inside.size else 0.0
        if not flagged.size or not usual:
            return
        smooth = flagged[steps[flagged] < _SMOOTH * usual]
        if 2 * len(smooth) > len(flagged):
            at = window.place.at(key="timeouts", record=int(smooth[0]))
            raise at.error(
                f"{len(smooth)} of {len(flagged)} ends are flagged where the joints move on as "
                "usual, so that the flags do not stand where the environment was reset; use a "
                "later release, or accept them with D4RLLayout(unreliable_ends=True)",
                "V39",
            )


D4RL: Final = D4RLLayout()


def _moves(array: npt.NDArray[Any], inside: npt.NDArray[np.int64]) -> bool:
    """Whether some of these records is another one than the next. Looks no further than it must."""
    for first in range(0, len(inside), _LOOKED_AT):
        at = inside[first : first + _LOOKED_AT]
        if np.nan_to_num(array[at + 1].astype(np.float64) - array[at]).any():
            return True
    return False


def _steps(array: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Returns how far each record is from the next one, ``[n - 1]``."""
    moved = array[1:].astype(np.float64) - array[:-1]
    return np.asarray(np.linalg.norm(np.nan_to_num(moved), axis=1))
