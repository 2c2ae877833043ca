"""Finders of the episodes in a file, by groups or by flags in flat arrays."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from replaykit.datasets.engine.h5 import H5File, H5Leaf, H5Member
from replaykit.datasets.engine.locations import Location, NameTable

if TYPE_CHECKING:
    from replaykit.datasets.engine.layout import Layout

_LISTED: Final = 20
"""Number of names of an unknown file that a message lists."""

Index = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class EpisodeRefs:
    """The episodes of a file, in order: one for each group, or ranges of flat arrays.

    Args:
        numbers: the numbers of the episodes.
        names: the groups of the episodes; ``None`` for the root.
        bases: for flat arrays, the first record of each episode; ``None`` if each episode has
            separate arrays. The next arguments are then ``None``, too.
        records: number of records of each episode.
        terminated: True if the episode terminated.
        parts: if several files are read as one, the position of the file in which each episode
            begins; ``None`` for one file.
    """

    numbers: Index
    names: NameTable | None = None
    bases: Index | None = None
    records: Index | None = None
    terminated: npt.NDArray[np.bool_] | None = None
    parts: Index | None = None

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def groups(self) -> Iterable[str]:
        """The groups that hold the episodes; ``""`` for the root."""
        return self.names if self.names is not None else [""][: len(self)]

    @property
    def has_twins(self) -> bool:
        """Return whether two episodes of one file have the same number."""
        if self.parts is None:
            return len(np.unique(self.numbers)) < len(self)
        return len(np.unique(np.stack([self.parts, self.numbers]), axis=1).T) < len(self)


@dataclass
class FoundEpisodes:
    """The result of a finder: episodes in order, and entries that are not episodes.

    ``strangers`` has the entries that are not episodes, each with the reason. ``odd`` has the rule,
    text and location of each finding that does not stop the conversion.
    """

    episodes: EpisodeRefs = field(default_factory=lambda: EpisodeRefs(np.zeros(0, np.int64)))
    strangers: list[tuple[str, str]] = field(default_factory=list)
    odd: list[tuple[str, str, Location]] = field(default_factory=list)
    numbering: str | None = None
    """A text about the numbering, or None if episodes have the numbers in their names."""


class Finder(Protocol):
    """The protocol of finders, which find the episodes of a file."""

    def find(
        self, file: H5File, layout: Layout, location: Location, block_bytes: int
    ) -> FoundEpisodes:
        """Return the episodes of a file, in their order.

        Raises:
            CorpusError: the file is of another layout (rule V04).
        """


@dataclass(frozen=True)
class Groups:
    """A finder for files with a group for each episode, in natural order of the names.

    The number of an episode is the number in the name of its group. If a name has no number, or two
    names have the same number, all episodes of the file are numbered in order. An empty group
    ``below`` is allowed. A file that has other entries but no episode belongs to another layout.

    Args:
        prefix: the text before the number in a name, such as ``"demo_"``.
        below: the group that holds the episodes; ``""`` for the root.
        having: the entries that a group must contain to be an episode.
        ``beside``: known entries that are not episodes, and are ignored.
        noun: the word for an episode in error messages.

    Example:
        >>> from replaykit.datasets import Groups
        >>> Groups("demo_", below="data", having=("actions",)).number("demo_12")
        12
    """

    prefix: str
    below: str = ""
    having: tuple[str, ...] = ("actions",)
    beside: tuple[str, ...] = ()
    noun: str = "episode"

    def find(
        self, file: H5File, layout: Layout, location: Location, block_bytes: int
    ) -> FoundEpisodes:
        """Return the episodes of a file; see `Finder`."""
        if self.below and not file.has_group(self.below):
            return self.select(file.members(), location, layout.name)
        return self.select(
            file.members(self.below), location, layout.name, is_inside=bool(self.below)
        )

    def select(
        self,
        members: Iterable[H5Member],
        location: Location,
        layout: str,
        *,
        is_inside: bool = False,
    ) -> FoundEpisodes:
        """Return the episodes among the entries of a group."""
        found = FoundEpisodes()
        groups = NameTable()
        seen: list[str] = []
        above = f"{self.below}/" if is_inside else ""
        for member in members:
            if len(seen) <= _LISTED:
                seen.append(member.name)
            lacking = [repr(name) for name in self.having if name not in member.children]
            name = f"{above}{member.name}"
            if member.is_link:
                why = "it is a link by name, and such links are not followed: copy its target"
                found.strangers.append((name, why))
            elif member.name in self.beside:
                continue
            elif not member.is_group:
                found.strangers.append((name, "it is not a group"))
            elif lacking or bool(self.below) != is_inside:
                found.strangers.append((name, f"it is a group without {', '.join(lacking)}"))
            else:
                groups.append(member.name)
        if not len(groups) and (seen or not is_inside):
            keys = ", ".join(map(repr, seen[:_LISTED])) or "nothing"
            where = f"a group below {self.below!r}" if self.below else "a root group"
            raise location.error(
                f"no {self.noun} of the layout {layout!r} ({where} with "
                f"{' and '.join(map(repr, self.having))}); {above.rstrip('/') or 'the root'} holds "
                f"{keys}{', ...' if len(seen) > _LISTED else ''}; "
                "is this a file of another corpus?",
                "V04",
            )
        numbers = np.fromiter(
            (-1 if (number := self.number(name)) is None else number for name in groups),
            np.int64, len(groups),
        )  # fmt: skip
        order = self._order(groups, numbers)
        if (numbers < 0).any() or len(np.unique(numbers)) < len(numbers):
            found.numbering = (
                "episodes are numbered by their order, since the group names do not give each "
                "a unique number"
            )
            numbers = np.arange(len(groups))
        else:
            numbers = numbers[order]
        names = NameTable(f"{above}{groups[at]}" for at in order.tolist())
        found.episodes = EpisodeRefs(numbers, names)
        return found

    def _order(self, groups: NameTable, numbers: Index) -> Index:
        """Return the natural order of names. ``numbers`` are the numbers in the names."""
        pairs = zip(groups, numbers.tolist(), strict=True)
        if all(name == f"{self.prefix}{number}" for name, number in pairs):
            return np.argsort(numbers, kind="stable")
        # Sort keys take about 500 bytes each, but are rarely needed.
        order = sorted(range(len(groups)), key=lambda at: natural_key(groups[at]))
        return np.array(order, np.int64)

    def number(self, name: str) -> int | None:
        """Return the number after the prefix of a name, or ``None``."""
        match = re.match(rf"{re.escape(self.prefix)}([0-9]{{1,18}})(?![0-9])", name)
        return int(match[1]) if match else None


@dataclass(frozen=True)
class WholeFile:
    """A finder for files with one episode each, in the arrays of the root.

    The number of the episode is the number in the name of its file.

    Args:
        having: the entries that the root must contain.

    Example:
        >>> from replaykit.datasets import WholeFile
        >>> WholeFile(having=("action",)).having
        ('action',)
    """

    having: tuple[str, ...]

    def find(
        self, file: H5File, layout: Layout, location: Location, block_bytes: int
    ) -> FoundEpisodes:
        """Return the episode of a file; see `Finder`."""
        names = [member.name for member in file.members()]
        lacking = [repr(name) for name in self.having if name not in names]
        if lacking:
            keys = ", ".join(map(repr, names[:_LISTED])) or "nothing"
            raise location.error(
                f"no episode of the layout {layout.name!r}: the root has no {', '.join(lacking)}, "
                f"but holds {keys}; is this a file of another corpus?",
                "V04",
            )
        match = re.search(r"([0-9]{1,18})[^0-9]*$", PurePosixPath(location.name).stem)
        return FoundEpisodes(EpisodeRefs(np.array([int(match[1]) if match else 0])))


@dataclass(frozen=True)
class Segments:
    """A finder that cuts flat arrays of the root after every record with an end.

    The ends are the fields of a layout with the roles ``terminated`` and ``truncated``. Records
    after the last end form one more episode. Cost: these fields are read once, in blocks.

    Args:
        ``beside``: known entries of the root that are not arrays of rows, and are ignored.

    Example:
        >>> from replaykit.datasets import Segments
        >>> Segments(beside=("metadata",)).beside
        ('metadata',)
    """

    beside: tuple[str, ...] = ()

    def find(
        self, file: H5File, layout: Layout, location: Location, block_bytes: int
    ) -> FoundEpisodes:
        """Return the episodes of a file; see `Finder`."""
        leaves = {leaf.path: leaf for leaf in file.leaves("", without=self.beside)}
        clock = leaves.get(layout.clock)
        if clock is None or not clock.shape:
            keys = ", ".join(map(repr, list(leaves)[:_LISTED])) or "nothing"
            raise location.error(
                f"no array {layout.clock!r} of the layout {layout.name!r}; the file holds {keys}; "
                "is this a file of another corpus?",
                "V04",
            )
        records = clock.shape[0]
        cut, terminated = np.zeros((2, records), np.bool_)
        for entry in layout.fields:
            if not entry.is_end or (entry.name not in leaves and not entry.required):
                continue
            if entry.name not in leaves:
                raise location.at(key=entry.name).error("the required key is missing", "V12")
            at = location.at(key=entry.name)
            for start, block in _flags(file, leaves[entry.name], clock, at, block_bytes):
                cut[start : start + len(block)] |= block
                if entry.role == "terminated":
                    terminated[start : start + len(block)] |= block
        found = FoundEpisodes()
        cut = self.cuts(file, layout, location, (cut, terminated), block_bytes, found)
        stops = np.flatnonzero(cut) + 1
        if records and (not stops.size or stops[-1] != records):
            stops = np.append(stops, records)
        if records:
            bases = np.append(0, stops[:-1])
            found.episodes = EpisodeRefs(
                np.arange(len(bases)),
                bases=bases,
                records=stops - bases,
                terminated=terminated[stops - 1],
            )
        if not records:
            found.strangers.append((layout.clock, "its arrays have no rows"))
        return found

    def cuts(
        self,
        file: H5File,
        layout: Layout,
        location: Location,
        flags: tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]],
        block_bytes: int,
        found: FoundEpisodes,
    ) -> npt.NDArray[np.bool_]:
        """Return a mask of the records that end an episode.

        Args:
            flags: two masks: the records at which any end is set, and the records at which an
                episode terminated.
            found: collects findings.
        """
        return flags[0]


def _flags(
    file: H5File, leaf: H5Leaf, clock: H5Leaf, at: Location, block_bytes: int
) -> Iterator[tuple[int, npt.NDArray[np.bool_]]]:
    """Yield blocks ``[n]`` of a flag as bool, each with the index of its first record."""
    if leaf.problem is not None:
        raise at.error(f"cannot be a column: {leaf.problem}", "V10")
    if leaf.shape[:1] != clock.shape[:1]:
        raise at.error(f"has shape {[*leaf.shape]}, but {clock.path!r} {[*clock.shape]}", "V11")
    step = block_bytes // np.dtype(leaf.dtype).itemsize
    for start, block in number_blocks(file, leaf.path, at, step):
        yield start, block != 0


def number_blocks(
    file: H5File, path: str, at: Location, records: int
) -> Iterator[tuple[int, npt.NDArray[Any]]]:
    """Yield blocks of a dataset of one finite number per record, each with its first record.

    Args:
        at: the location of the dataset.
        records: number of records of a block.

    Raises:
        CorpusError: a record has several numbers (V10), or one that is not finite (V30).
    """
    shape = file.shape(path)
    width = int(np.prod(shape[1:]))
    if shape[0] and width != 1:
        raise at.error(f"has {width} numbers per record, expected one", "V10")
    step = max(1, records)
    for start in range(0, shape[0], step):
        block = file.read(path, start, min(start + step, shape[0])).reshape(-1)
        if block.dtype.kind in "fc" and not np.isfinite(block).all():
            record = start + int(np.argmin(np.isfinite(block)))
            raise at.at(record=record).error("holds NaN or infinity", "V30")
        yield start, block


def natural_key(name: str) -> tuple[tuple[tuple[int, str, str], ...], str]:
    """Return a sort key that orders numbers in names by their value.

    Names with equal numbers, such as ``Trial1`` and ``Trial01``, are ordered as strings.

    Example:
        >>> from replaykit.datasets.engine.episode_finders import natural_key
        >>> sorted(["Trial10", "Trial2", "Trial0-1", "Trial0", "Trial0-0"], key=natural_key)
        ['Trial0', 'Trial0-0', 'Trial0-1', 'Trial2', 'Trial10']
    """
    # Text and digits alternate, so equal positions hold equal kinds. Numbers are compared by length
    # and digits, because Python refuses to parse very long integers.
    parts = re.split(r"([0-9]+)", name)
    keys = []
    for position, part in enumerate(parts):
        if position % 2:
            digits = part.lstrip("0")
            keys.append((len(digits), digits, ""))
        else:
            keys.append((0, "", part))
    return tuple(keys), name
