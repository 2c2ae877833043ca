"""V-D4RL: shards of flat arrays, of pixels and of the actions that led to them.

Record ``t`` holds an observation, the action that led to it, and what came of that action; the
first record of an episode was led to by none, and its action is a filler. Shards may be cut
anywhere, so that an episode may go on in the next one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from replaykit.datasets.engine.fields import ARRIVALS, Alignment, Field
from replaykit.datasets.engine.finding import EpisodeRefs, Finder, FoundEpisodes, Segments
from replaykit.datasets.engine.h5 import H5File
from replaykit.datasets.engine.layout import Layout
from replaykit.datasets.engine.places import Place

__all__ = ["VD4RL", "VD4RLLayout"]

_FIRST, _MIDDLE, _LAST = 0, 1, 2
_KIND: Final = "step_type"
_DISCOUNT: Final = "discount"
_ARRAYS: Final = ("observation", "action", "reward", _DISCOUNT, _KIND)
_DISCOUNT_KEY: Final = ("next", "discount")


@dataclass(frozen=True)
class Steps(Segments):
    """Episodes in flat arrays, from a record of type 0 to one of type 2. They end terminated where
    the discount is zero."""

    def find(self, file: H5File, layout: Layout, place: Place, block_bytes: int) -> FoundEpisodes:
        """Returns the episodes of a file, or of several that are read as one; see `Finder`."""
        found = FoundEpisodes()
        kinds = np.rint(_column(file, _KIND, place, block_bytes))
        if not kinds.size:
            found.strangers.append((layout.clock, "its arrays have no rows"))
            return found
        _check(kinds, place)
        bases = np.flatnonzero(kinds == _FIRST)
        stops = np.append(bases[1:], kinds.size)
        for stop in stops[kinds[stops - 1] != _LAST].tolist():
            text = "an episode has no last record; it ends truncated where it breaks off"
            found.odd.append(("V39", text, place.at(key=_KIND, record=stop - 1)))
        zero = _column(file, _DISCOUNT, place, block_bytes) == 0
        early = np.flatnonzero(zero & (kinds == _MIDDLE))
        # Where an episode breaks off, the discount still says whether it was over.
        early = early[~np.isin(early, stops - 1)]
        if early.size:
            at = place.at(key=_DISCOUNT, record=int(early[0]))
            raise at.error("the discount is zero before the last record of the episode", "V31")
        starts = [part.start for part in file.parts] or [0]
        parts = np.searchsorted(starts, bases, "right") - 1
        numbers = np.arange(len(bases)) - np.searchsorted(bases, np.take(starts, parts))
        found.episodes = EpisodeRefs(
            numbers, None, bases, stops - bases, zero[stops - 1], parts.astype(np.int64)
        )
        return found


@dataclass(frozen=True, kw_only=True)
class VD4RLLayout(Layout):
    """Shards of V-D4RL with images of 84 pixels: R records of an episode make R - 1 rows.

    Row ``t`` starts from observation ``t``, and takes action, reward and discount of the record
    after it. Episodes end terminated where the discount is zero, else truncated. Shards come in
    the order of the numbers in their names.

    Example:
        >>> from replaykit.datasets.families import VD4RL
        >>> VD4RL.alignment.action, VD4RL.lost, VD4RL.joined
        (1, 1, True)
    """

    name: str = "vd4rl"
    version: int = 1
    episodes: Finder = Steps()
    alignment: Alignment = ARRIVALS
    clock: str = _KIND
    fields: tuple[Field, ...] = (
        Field("observation", "observation", ("observation",), ("next", "observation")),
        Field("action", "action", before=("action",)),
        Field("reward", "reward", after=("next", "reward"), column=True),
        Field(_DISCOUNT, "info", after=_DISCOUNT_KEY, moment="outcome", column=True),
        Field(_KIND, "info"),
    )
    natural_files: bool = True
    joined: bool = True

    def resolve(self, file: H5File, place: Place) -> Layout:
        """Checks that the arrays are there and of one length, in every shard by itself."""
        leaves = {leaf.path: leaf for leaf in file.leaves("")}
        missing = [name for name in _ARRAYS if name not in leaves]
        if missing:
            keys = ", ".join(map(repr, list(leaves)[:20])) or "nothing"
            raise place.error(
                f"no arrays {', '.join(map(repr, missing))} of the layout {self.name!r}; the file "
                f"holds {keys}; is this a file of another corpus?",
                "V04",
            )
        clock = leaves[_KIND]
        if not clock.shape:
            raise place.at(key=_KIND).error("has no length", "V11")
        for name in _ARRAYS:
            if leaves[name].problem is not None:
                text = f"cannot be a column: {leaves[name].problem}"
                raise place.at(key=name).error(text, "V10")
            if leaves[name].shape[:1] != clock.shape[:1]:
                shape = list(leaves[name].shape)
                text = f"has shape {shape}, but {_KIND!r} has {clock.shape[0]} records"
                raise place.at(key=name).error(text, "V11")
        return self

    def goes_on(self, file: H5File, place: Place) -> bool:
        """Whether the first record of a shard begins no episode; one without records goes on."""
        first = file.read(_KIND, 0, min(1, file.shape(_KIND)[0])).reshape(-1)
        return not (first.size and np.rint(first.astype(np.float64)[0]) == _FIRST)


VD4RL: Final = VD4RLLayout()


def _column(file: H5File, name: str, place: Place, block_bytes: int) -> npt.NDArray[np.float32]:
    """Reads numbers of one a record, in blocks."""
    at = place.at(key=name)
    shape = file.shape(name)
    if shape[0] and int(np.prod(shape[1:])) != 1:
        raise at.error(f"has shape {list(shape)}, expected one number per record", "V10")
    values = np.empty(shape[0], np.float32)
    step = max(1, block_bytes // 8)
    for start in range(0, shape[0], step):
        stop = min(start + step, shape[0])
        block = file.read(name, start, stop)
        if block.dtype.kind not in "biuf":
            raise at.error(f"holds values of type {block.dtype}, expected numbers", "V10")
        values[start:stop] = block.reshape(-1)
        if not np.isfinite(values[start:stop]).all():
            record = start + int(np.argmin(np.isfinite(values[start:stop])))
            raise place.at(key=name, record=record).error("holds NaN or infinity", "V30")
    return values


def _check(kinds: npt.NDArray[np.float32], place: Place) -> None:
    """Checks that every record is of a known type, and belongs to an episode (rules V30, V32)."""
    strange = np.flatnonzero(~np.isin(kinds, (_FIRST, _MIDDLE, _LAST)))
    if strange.size:
        record = int(strange[0])
        at = place.at(key=_KIND, record=record)
        raise at.error(f"is {kinds[record]:g}, expected 0, 1 or 2", "V30")
    lost = np.flatnonzero((kinds[1:] != _FIRST) & (kinds[:-1] == _LAST)) + 1
    if kinds[0] != _FIRST or lost.size:
        record = 0 if kinds[0] != _FIRST else int(lost[0])
        raise place.at(key=_KIND, record=record).error(
            "begins no episode, and none goes on here: a shard before this one is missing, or "
            "records are",
            "V32",
        )
