"""The families D4RL and V-D4RL: flat arrays of steps, cut into episodes.

D4RL cuts at flags or resets. A record of V-D4RL holds an image, the action that led to it, and the
outcome of that action. The first record of an episode has a filler as its action. An episode may
continue in the next file.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import resources
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from replaykit.buffer.components import SamplerT
from replaykit.datasets.dataset import BaseDatasetExperienceReplay, LocalFilesReplay
from replaykit.datasets.engine.episode_finders import (
    EpisodeRefs,
    Finder,
    FoundEpisodes,
    Segments,
    number_blocks,
)
from replaykit.datasets.engine.fields import ARRIVALS, STEPS, Alignment, Field
from replaykit.datasets.engine.h5 import H5File, H5Leaf
from replaykit.datasets.engine.layout import DropLeaves, Layout, SourceWindow
from replaykit.datasets.engine.locations import Location
from replaykit.datasets.http_files import WebFile
from replaykit.datasets.remote_sources import HubFiles, WebFiles
from replaykit.keywords import Replaced

Marks = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Resets(Segments):
    """A finder that cuts flat steps at the visible resets of the environment.

    A flag without a reset is not an end, and is reported (rule V39). A reset without any flag in
    the episode is also not an end. In such a file, the rows may be in a wrong order, which rule V22
    refuses.
    Cost: if the flags are in doubt, observations and next states are read as well.

    Attributes:
        arrived: the arrays that hold the state after a step, concatenated in this order. Empty if
            the state after a step was not recorded.
        flags_early: True if flags may precede the reset by some steps. If False, a reset is an end
            only if a flag is set at the same step.
        trusted: True to use the flags unchanged if the file does not show resets.

    Example:
        >>> from replaykit.datasets.families.d4rl import Resets
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
        location: Location,
        flags: tuple[Marks, Marks],
        block_bytes: int,
        found: FoundEpisodes,
    ) -> Marks:
        """Return a mask of the records that end an episode; see `Segments.cuts`."""
        flagged, terminated = flags
        held = flagged[:-1] & flagged[1:]
        if not self.arrived:
            self._require_single(terminated, location)
            return flagged
        # Flags that are not in doubt are not compared, because a second reading would be most of
        # the cost.
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
            found.odd.append(("V39", text, location.at(key=key, record=int(before[0]))))
        cut = np.zeros(len(flagged), np.bool_)
        cut[resets] = True
        return cut

    def _require_single(self, terminated: Marks, location: Location) -> None:
        held = np.flatnonzero(terminated[:-1] & terminated[1:])
        if held.size and not self.trusted:
            at = location.at(key="terminals", record=int(held[0]))
            raise at.error(
                f"is set at {held.size + 1} records or more in a row, as if a goal is held, and "
                "the file does not show where the environment was reset; use a release with "
                "next_observations, or cut after each with D4RLLayout(unreliable_ends=True)",
                "V39",
            )

    def _goes_on(
        self, file: H5File, records: int, flagged: Marks, block_bytes: int
    ) -> Marks | None:
        """Return a mask of the steps that end where the next step starts.

        The mask has the shape ``[records - 1]``. Unless flags may be early, only blocks with a flag
        are read. The result is ``None`` if the arrays cannot be compared. The schema reports the
        reason.
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


def _require(
    leaves: Collection[str], needed: Sequence[str], layout: str, location: Location
) -> None:
    """Refuse a file that lacks some arrays (rule V04)."""
    missing = [name for name in needed if name not in leaves]
    if missing:
        keys = ", ".join(map(repr, list(leaves)[:20])) or "nothing"
        raise location.error(
            f"no arrays {', '.join(map(repr, missing))} of the layout {layout!r}; the file holds "
            f"{keys}; is this a file of another corpus?",
            "V04",
        )


def _is_plain(leaf: H5Leaf, records: int) -> bool:
    return leaf.problem is None and leaf.shape[:1] == (records,)


def _width(leaf: H5Leaf) -> int:
    return int(np.prod(leaf.shape[1:]))


def _bytes(array: npt.NDArray[np.generic]) -> npt.NDArray[np.uint8]:
    """Return the stored bytes of each row, so that NaN compares equal to itself."""
    return np.ascontiguousarray(array).view(np.uint8).reshape(len(array), -1)


_BASE: Final = "http://rail.eecs.berkeley.edu/datasets/offline_rl"
_TABLE: Final = "d4rl_files.tsv"
_UNKNOWN: Final = "-"


def d4rl_base() -> str:
    """Return the base URL: REPLAYKIT_D4RL_URL, or by default the authors' server."""
    return (os.environ.get("REPLAYKIT_D4RL_URL") or _BASE).rstrip("/")


def d4rl_file(dataset_id: str) -> WebFile | None:
    """Return the file of a hosted id, with known size and SHA-256, or None.

    Example:
        >>> from replaykit.datasets.families.d4rl import d4rl_file
        >>> file = d4rl_file("hopper-medium-v2")
        >>> file.name, file.size
        ('hopper_medium-v2.hdf5', 152756557)
    """
    found = _table().get(dataset_id)
    if found is None:
        return None
    path, size, sha256 = found
    return WebFile(f"{d4rl_base()}/{path}", size, sha256)


@lru_cache(maxsize=1)
def _table() -> dict[str, tuple[str, int | None, str | None]]:
    text = resources.files(__package__).joinpath(_TABLE).read_text(encoding="utf-8")
    return {
        row["id"]: (
            row["path"],
            None if row["bytes"] == _UNKNOWN else int(row["bytes"]),
            None if row["sha256"] == _UNKNOWN else row["sha256"],
        )
        for row in csv.DictReader(text.splitlines(), delimiter="\t")
    }


_FLAT: Final = Resets(beside=("metadata", "virtual"))
_STATE: Final = ("infos/qpos", "infos/qvel")
_CHECKED: Final = 4096
"""Number of first records that identify the release of a file."""
_SMOOTH: Final = 3.0
"""Multiple of the usual joint step below which a step is no reset.

Steps at a reset are many times longer.
"""


@dataclass(frozen=True, kw_only=True)
class D4RLLayout(Layout):
    """Layout of flat D4RL files of any release.

    If a release holds the state after each step, episodes end at the resets of the environment.
    Flags at other steps are reported, because a goal may be held for many steps. If a release does
    not hold this state, ``terminals`` of several consecutive steps are refused. Very large files
    hold the arrays in parts, such as ``virtual/0``, which are read in order.

    Attributes:
        unreliable_ends: accept files whose flags do not match the resets of the environment, and
            cut them at the flags. Examples are Adroit ``human-v0`` and ``cloned-v0``.

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

    def resolve(self, file: H5File, location: Location) -> Layout:
        """Return the layout with this release's source of next observations, if it has one."""
        leaves = {leaf.path: leaf for leaf in file.leaves("", without=_FLAT.beside)}
        _require(leaves, ("observations", "actions", "rewards", "terminals"), self.name, location)
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
        """Return whether a record holds the simulator state of the next record."""
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
        stop = min(records, _CHECKED)
        arrays = {
            path: file.read(path, 0, stop)
            for path in ("observations", "terminals", "timeouts", *_STATE)
            if path in leaves and file.shape(path)[:1] == (records,)
        }
        observations = arrays["observations"].reshape(stop, -1)
        ends = _ends_of(arrays, stop)
        parts = [arrays[path].reshape(stop, -1) for path in _STATE if path in arrays]
        state = np.concatenate(parts, axis=1) if parts else np.empty((stop, 0))
        return observations, ends, state.astype(observations.dtype)

    def witnesses(self, leaves: Collection[str]) -> tuple[str, ...]:
        if not any(path in leaves for path in _STATE):
            return ()
        wanted = ("observations", "terminals", "timeouts", *_STATE)
        return tuple(path for path in wanted if path in leaves)

    def examine(self, window: SourceWindow) -> None:
        """Drop a constant simulator state; refuse flags without a reset (rule V39).

        If the state after a step is known, `Resets` has already checked the flags.
        """
        arrays = {path: array.reshape(len(array), -1) for path, array in window.arrays.items()}
        ends = _ends_of(arrays, len(arrays["observations"]))
        inside = np.flatnonzero(~ends[:-1])
        moves = _moves(arrays["observations"], inside)
        for path in _STATE:
            if path in arrays and moves and not _moves(arrays[path], inside):
                raise DropLeaves(
                    path,
                    f"in {window.location.brief} it stays the same throughout episodes in which "
                    "the observation changes: it was not recorded",
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
            at = window.location.at(key="timeouts", record=int(smooth[0]))
            raise at.error(
                f"{len(smooth)} of {len(flagged)} ends are flagged where the joints move on as "
                "usual, so the flags do not match the resets of the environment; use a "
                "later release, or accept them with D4RLLayout(unreliable_ends=True)",
                "V39",
            )


D4RL: Final = D4RLLayout()


def _ends_of(arrays: Mapping[str, npt.NDArray[Any]], records: int) -> Marks:
    """Return a mask of the records at which one of the flags is set."""
    ends = np.zeros(records, np.bool_)
    for name in ("terminals", "timeouts"):
        if name in arrays and arrays[name].size == records:
            ends |= arrays[name].reshape(records) != 0
    return ends


def _moves(array: npt.NDArray[Any], inside: npt.NDArray[np.int64]) -> bool:
    """Return whether any of these records differs from the record after it.

    Reading ends at the first block with a difference.
    """
    for first in range(0, len(inside), _CHECKED):
        at = inside[first : first + _CHECKED]
        if np.nan_to_num(array[at + 1].astype(np.float64) - array[at]).any():
            return True
    return False


def _steps(array: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return the distance of each record from the next record, ``[n - 1]``."""
    moved = array[1:].astype(np.float64) - array[:-1]
    return np.asarray(np.linalg.norm(np.nan_to_num(moved), axis=1))


class _D4RLIds:
    """The hosted ids, which are read from the table at the first access."""

    def __get__(self, instance: object, owner: type) -> list[str]:
        return list(_table())


class D4RLExperienceReplay(LocalFilesReplay[SamplerT]):
    """Transitions of D4RL files of any release.

    Files are fetched over plain HTTP from their authors, or from the URL in the environment
    variable ``REPLAYKIT_D4RL_URL``. A file is verified if its SHA-256 is known. Local files can be
    given with ``source``, under any id.

    Next observations come from ``next_observations`` if the release has this array. They come from
    the simulator's state if it was logged one step late (AntMaze v0). If next observations come
    from either source, episodes end at the resets of the environment, independently of the flags.
    In all other files, episodes end at the flags. If an episode that ends at a flag terminated, its
    last step is kept, with ``("next", "observed")`` False. Otherwise its last step is dropped. Rows
    have ``observation``, ``action``, ``info``, ids and flags; all other keys are under ``next``.
    See `D4RLLayout`.

    Arguments, errors and methods: see BaseDatasetExperienceReplay. Source: Fu et al., "D4RL:
    Datasets for Deep Data-Driven Reinforcement Learning", 2020; data CC BY 4.0.

    Example:
        >>> from replaykit.datasets import D4RLExperienceReplay
        >>> "hopper-medium-v2" in D4RLExperienceReplay.available_datasets
        True
        >>> D4RLExperienceReplay("hopper-medium-v2", 32, source="no-such-file.hdf5")
        Traceback (most recent call last):
        FileNotFoundError: ...
    """

    available_datasets: ClassVar[list[str]] = _D4RLIds()  # type: ignore[assignment]
    corpus = "d4rl"
    license = "cc-by-4.0"
    layout = D4RL
    _replaced: ClassVar[dict[str, Replaced]] = {
        "direct_download": Replaced(
            (True, None), "files are always read without the d4rl package; leave it out"
        ),
        "from_env": Replaced(
            (False,),
            "rows always have the values of env.get_dataset(), every step and the infos; leave "
            "it out",
        ),
        "use_truncated_as_done": Replaced(
            (True,),
            "('next', 'done') is terminated or truncated; read ('next', 'terminated') in its place",
        ),
        "terminate_on_end": Replaced(
            (False, None),
            "policies=Policies(unrecorded='keep') keeps the last step of every episode, with "
            "('next', 'done') set",
        ),
    }

    @classmethod
    def remote(cls, dataset_id: str) -> WebFiles | None:
        """Return the location of a data set's file; None for an id that is not hosted."""
        file = d4rl_file(dataset_id)
        return None if file is None else WebFiles((file,))


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
        _require(leaves, _ARRAYS, self.name, location)
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
    values = np.empty(file.shape(name)[0], np.float32)
    for start, block in number_blocks(file, name, at, block_bytes // 8):
        if block.dtype.kind not in "biuf":
            raise at.error(f"holds values of type {block.dtype}, expected numbers", "V10")
        values[start : start + len(block)] = block
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
