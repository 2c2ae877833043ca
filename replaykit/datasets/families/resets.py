"""Where the environment was reset in flat files whose flags do not tell it.

A flag is not always an end: AntMaze sets ``terminals`` at every step at which the goal is held, and
``timeouts`` some steps before the reset. But where a file has the state that a step arrived at,
the environment was reset exactly where the next record starts from another one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from replaykit.datasets.engine.finding import Found, Segments
from replaykit.datasets.engine.h5 import H5File, Leaf
from replaykit.datasets.engine.layout import Layout
from replaykit.datasets.engine.places import Place

__all__ = ["Resets"]

Marks = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Resets(Segments):
    """Flat steps, cut where the environment was reset, as far as the file tells that.

    A flag without a reset is no end, and is reported (rule V39). A reset in an episode without any
    flag is not taken for an end: rows may be mixed, which rule V22 refuses. Cost: beside the
    flags, observations and the states arrived at are read, where flags are not beyond doubt.

    Attributes:
        arrived: the arrays that make up the state a step arrived at, side by side; none where it
            was not recorded.
        flags_early: flags may come some steps before the reset. Otherwise a reset is an end only
            where it is flagged.
        trusted: where nothing tells of resets, take flags as they are.

    Example:
        >>> from replaykit.datasets.families.resets import Resets
        >>> Resets(arrived=("next_observations",)).flags_early
        False
    """

    arrived: tuple[str, ...] = ()
    flags_early: bool = False
    trusted: bool = False

    def cuts(
        self,
        file: H5File,
        layout: Layout,
        place: Place,
        flags: tuple[Marks, Marks],
        block_bytes: int,
        found: Found,
    ) -> Marks:
        """Returns after which records an episode ends; see `Segments.cuts`."""
        flagged, terminated = flags
        held = flagged[:-1] & flagged[1:]
        if not self.arrived:
            self._require_single(terminated, place)
            return flagged
        # Flags that are beyond doubt are not compared: reading all twice is most of the cost.
        if not flagged.any() or not (self.flags_early or held.any()):
            return flagged
        goes_on = self._goes_on(file, len(flagged), flagged, block_bytes)
        if goes_on is None:
            return flagged
        before = np.flatnonzero(flagged[:-1] & goes_on)
        if self.flags_early:
            resets = np.flatnonzero(~goes_on)
            seen = np.searchsorted(np.flatnonzero(flagged), resets, "right")
            resets = resets[np.diff(seen, prepend=0) > 0]
        else:
            resets = np.flatnonzero(flagged[:-1] & ~goes_on)
        if before.size:
            key = "terminals" if terminated[before[0]] else "timeouts"
            text = (
                f"{before.size} of {int(flagged.sum())} ends are flagged where the environment was "
                "not reset; episodes end where it was"
            )
            found.odd.append(("V39", text, place.at(key=key, record=int(before[0]))))
        cut = np.zeros(len(flagged), np.bool_)
        cut[resets] = True
        return cut

    def _require_single(self, terminated: Marks, place: Place) -> None:
        held = np.flatnonzero(terminated[:-1] & terminated[1:])
        if held.size and not self.trusted:
            at = place.at(key="terminals", record=int(held[0]))
            raise at.error(
                f"is set at {held.size + 1} records or more in a row, as where a goal is held, and "
                "nothing in the file tells where the environment was reset; use a release with "
                "next_observations, or cut after each with D4RLLayout(unreliable_ends=True)",
                "V39",
            )

    def _goes_on(
        self, file: H5File, records: int, flagged: Marks, block_bytes: int
    ) -> Marks | None:
        """Returns which steps arrived where the next one starts, ``[records - 1]``.

        Only blocks with a flag are looked at, but where flags may be early. ``None`` where the
        arrays cannot be compared, of which the schema tells why.
        """
        leaves = {leaf.path: leaf for leaf in file.leaves("", without=self.beside)}
        paths = ("observations", *self.arrived)
        known = [leaves[path] for path in paths if path in leaves]
        if len(known) < len(paths) or not all(_is_plain(leaf, records) for leaf in known):
            return None
        if _width(known[0]) != sum(map(_width, known[1:])):
            return None
        sizes = [np.dtype(leaf.dtype).itemsize * _width(leaf) for leaf in known]
        step = max(1, block_bytes // max(1, 3 * sum(sizes)))
        goes_on = np.zeros(records - 1, np.bool_)
        for start in range(0, records - 1, step):
            stop = min(start + step, records - 1)
            if not (self.flags_early or flagged[start:stop].any()):
                continue
            after = file.read("observations", start + 1, stop + 1).reshape(stop - start, -1)
            parts = [file.read(path, start, stop).reshape(stop - start, -1) for path in paths[1:]]
            arrived = np.concatenate(parts, axis=1).astype(after.dtype)
            same = _bytes(arrived) == _bytes(after)
            goes_on[start:stop] = same.all(axis=1)
        return goes_on


def _is_plain(leaf: Leaf, records: int) -> bool:
    return leaf.problem is None and leaf.shape[:1] == (records,)


def _width(leaf: Leaf) -> int:
    return int(np.prod(leaf.shape[1:]))


def _bytes(array: npt.NDArray[np.generic]) -> npt.NDArray[np.uint8]:
    """Returns the bytes of each row: as they are stored, so that NaN is equal to itself."""
    return np.ascontiguousarray(array).view(np.uint8).reshape(len(array), -1)
