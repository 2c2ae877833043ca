"""The V-D4RL family: flat arrays of images and preceding actions, in several files.

Record ``t`` holds an observation, the action that led to it, and the outcome of that action. No
action led to the first record of an episode, so its action is a filler. An episode may continue in
the next file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np
import numpy.typing as npt

from replaykit.buffer.components import SamplerT
from replaykit.datasets.dataset import BaseDatasetExperienceReplay
from replaykit.datasets.engine.episode_finders import EpisodeRefs, Finder, FoundEpisodes, Segments
from replaykit.datasets.engine.fields import ARRIVALS, Alignment, Field
from replaykit.datasets.engine.h5 import H5File
from replaykit.datasets.engine.layout import Layout
from replaykit.datasets.engine.locations import Location
from replaykit.datasets.remote_sources import HubFiles
from replaykit.keywords import Replaced

_FIRST, _MIDDLE, _LAST = 0, 1, 2
_KIND: Final = "step_type"
_DISCOUNT: Final = "discount"
_ARRAYS: Final = ("observation", "action", "reward", _DISCOUNT, _KIND)
_DISCOUNT_KEY: Final = ("next", "discount")


@dataclass(frozen=True)
class Steps(Segments):
    """A finder of episodes in flat arrays, from a record of type 0 to a record of type 2.

    An episode is terminated if its last discount is zero.
    """

    def find(
        self, file: H5File, layout: Layout, location: Location, block_bytes: int
    ) -> FoundEpisodes:
        """Return the episodes of one file, or of several files read as one; see `Finder`."""
        found = FoundEpisodes()
        kinds = np.rint(_column(file, _KIND, location, block_bytes))
        if not kinds.size:
            found.strangers.append((layout.clock, "its arrays have no rows"))
            return found
        _check(kinds, location)
        bases = np.flatnonzero(kinds == _FIRST)
        stops = np.append(bases[1:], kinds.size)
        for stop in stops[kinds[stops - 1] != _LAST].tolist():
            text = "an episode has no last record; it ends truncated where it breaks off"
            found.odd.append(("V39", text, location.at(key=_KIND, record=stop - 1)))
        zero = _column(file, _DISCOUNT, location, block_bytes) == 0
        early = np.flatnonzero(zero & (kinds == _MIDDLE))
        # The discount is also valid at the last record of an episode that breaks off.
        early = early[~np.isin(early, stops - 1)]
        if early.size:
            at = location.at(key=_DISCOUNT, record=int(early[0]))
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
    """Layout of V-D4RL with 84-pixel images, in which R records make R - 1 rows.

    Row ``t`` has observation ``t``, and action, reward and discount of the next record. An episode
    is terminated if its last discount is zero, and otherwise truncated. The files are ordered by
    the numbers in their names.

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

    def resolve(self, file: H5File, location: Location) -> Layout:
        """Check that all arrays of a file exist and have the same length."""
        leaves = {leaf.path: leaf for leaf in file.leaves("")}
        missing = [name for name in _ARRAYS if name not in leaves]
        if missing:
            keys = ", ".join(map(repr, list(leaves)[:20])) or "nothing"
            raise location.error(
                f"no arrays {', '.join(map(repr, missing))} of the layout {self.name!r}; the file "
                f"holds {keys}; is this a file of another corpus?",
                "V04",
            )
        clock = leaves[_KIND]
        if not clock.shape:
            raise location.at(key=_KIND).error("has no length", "V11")
        for name in _ARRAYS:
            if leaves[name].problem is not None:
                text = f"cannot be a column: {leaves[name].problem}"
                raise location.at(key=name).error(text, "V10")
            if leaves[name].shape[:1] != clock.shape[:1]:
                shape = list(leaves[name].shape)
                text = f"has shape {shape}, but {_KIND!r} has {clock.shape[0]} records"
                raise location.at(key=name).error(text, "V11")
        return self

    def goes_on(self, file: H5File, location: Location) -> bool:
        """Return whether a file continues the episode of the file before it.

        The result is False only if the first record of the file begins an episode.
        """
        first = file.read(_KIND, 0, min(1, file.shape(_KIND)[0])).reshape(-1)
        return not (first.size and np.rint(first.astype(np.float64)[0]) == _FIRST)


VD4RL: Final = VD4RLLayout()


def _column(
    file: H5File, name: str, location: Location, block_bytes: int
) -> npt.NDArray[np.float32]:
    """Read a dataset of one number per record, in blocks."""
    at = location.at(key=name)
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
            raise location.at(key=name, record=record).error("holds NaN or infinity", "V30")
    return values


def _check(kinds: npt.NDArray[np.float32], location: Location) -> None:
    """Check that each record has a known type and an episode (rules V30, V32)."""
    strange = np.flatnonzero(~np.isin(kinds, (_FIRST, _MIDDLE, _LAST)))
    if strange.size:
        record = int(strange[0])
        at = location.at(key=_KIND, record=record)
        raise at.error(f"is {kinds[record]:g}, expected 0, 1 or 2", "V30")
    lost = np.flatnonzero((kinds[1:] != _FIRST) & (kinds[:-1] == _LAST)) + 1
    if kinds[0] != _FIRST or lost.size:
        record = 0 if kinds[0] != _FIRST else int(lost[0])
        raise location.at(key=_KIND, record=record).error(
            "begins no episode, and continues none: the file before this one, or records, are "
            "missing",
            "V32",
        )


class VD4RLExperienceReplay(BaseDatasetExperienceReplay[SamplerT]):
    """Transitions of V-D4RL, with images of 84 by 84 pixels. Episodes may cross files.

    Ids are folders of the repository. The main tasks are listed; other ids, such as
    ``distracting/...``, are also accepted. Folders with the name ``64px`` hold no H5 files, and are
    refused. See `VD4RLLayout`. See BaseDatasetExperienceReplay for arguments, errors and methods.
    Source: Lu et al., "Challenges and Opportunities in Offline Reinforcement Learning from Visual
    Observations", 2022; MIT.

    Example:
        >>> from replaykit.datasets import VD4RLExperienceReplay
        >>> VD4RLExperienceReplay.available_datasets[0]
        'main/walker_walk/random/84px'
        >>> VD4RLExperienceReplay("main/walker_walk/random/64px", 32)
        Traceback (most recent call last):
        ValueError: expected a folder of H5 files, got 'main/walker_walk/random/64px', ...
    """

    available_datasets: ClassVar[list[str]] = [
        f"main/{task}/{quality}/84px"
        for task in ("walker_walk", "cheetah_run", "humanoid_walk")
        for quality in ("random", "medium_replay", "medium", "medium_expert", "expert")
    ]
    any_id = True
    corpus = "vd4rl"
    license = "mit"
    layout = VD4RL
    _replaced: ClassVar[dict[str, Replaced]] = {
        "totensor": Replaced(
            (False,), "transform=ImageScale(0.0, 1.0) reads images as floats from 0 to 1"
        ),
        "image_size": Replaced(
            (None,),
            "images are stored in the size of the files; transform= takes a function that resizes "
            "those of a batch",
        ),
        "num_workers": Replaced((0,), "workers= says how many processes convert at once"),
    }
    repository: ClassVar[str] = "conglu/vd4rl"

    @classmethod
    def _check_id(cls, dataset_id: str, *, is_own: bool = False) -> None:
        super()._check_id(dataset_id, is_own=is_own)
        if dataset_id.split("/")[-1] == "64px":
            raise ValueError(
                f"expected a folder of H5 files, got {dataset_id!r}, which holds one npz file an "
                f"episode; the same episodes are in {dataset_id.removesuffix('64px') + '84px'!r}"
            )

    @classmethod
    def remote(cls, dataset_id: str) -> HubFiles:
        """Return the location of a data set's files."""
        # The files are ordered by their numbers, so 2.hdf5 comes before 10.hdf5.
        return HubFiles(cls.repository, dataset_id, ".hdf5", natural=True)
