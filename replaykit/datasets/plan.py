"""The scan of a corpus: its episodes, the schema they share, and where every row will lie.

Nothing is written before all files have been scanned, so that a key that is missing from the last
trial of the last file is known when the first row is laid out. The scan reads declarations only,
and of optional float leaves as many values as show that they are not NaN throughout.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from replaykit.datasets.columns import unstorable
from replaykit.datasets.h5 import H5File, Leaf, open_h5
from replaykit.datasets.layout import EpisodeRef, Field, Layout, Notes, Place, Role
from replaykit.datasets.sources import Sources
from replaykit.errors import CorpusError
from replaykit.ted import Key

__all__ = ["Episode", "LeftOut", "Plan", "PlannedLeaf", "Skipped", "Target", "scan"]

_NARROW: Final = ("float16", "int8")
"""Dtypes that loggers choose by default, at the price of digits or of wrapping (rule V14)."""
_SMALL_BYTES: Final = 1 << 18


@dataclass(frozen=True, slots=True)
class Episode:
    """An episode that gives rows ``start .. start + records - 2``."""

    file: int
    group: str
    number: int
    records: int
    start: int

    @property
    def rows(self) -> int:
        """How many rows the episode gives."""
        return self.records - 1


@dataclass(frozen=True)
class Target:
    """A column that a leaf fills; ``shift`` is 0 for the state before a step, 1 for the next."""

    key: Key
    shift: int


@dataclass(frozen=True)
class PlannedLeaf:
    """A dataset of every episode, with the columns it fills. ``shape`` is of one record.

    ``is_once``: it has one value for all records of an episode.
    """

    path: str
    role: Role
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    targets: tuple[Target, ...]
    is_once: bool = False

    @property
    def record_bytes(self) -> int:
        """Bytes of one record."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class LeftOut:
    """A leaf that is not in the table, and why."""

    path: str
    why: str


@dataclass(frozen=True)
class Skipped:
    """An episode without a row, or a root member that is no episode, and why."""

    file: int
    name: str
    why: str


@dataclass
class Plan:
    """What will be written. Memory: a few hundred bytes for each episode of the corpus."""

    leaves: list[PlannedLeaf]
    episodes: list[Episode]
    left_out: list[LeftOut]
    skipped: list[Skipped]
    numbering: list[tuple[int, str]]

    @property
    def rows(self) -> int:
        """How many rows the table has."""
        return self.episodes[-1].start + self.episodes[-1].rows if self.episodes else 0

    @property
    def source_bytes(self) -> int:
        """How many bytes the episodes hold, uncompressed."""
        width = sum(leaf.record_bytes for leaf in self.leaves)
        return width * (self.rows + len(self.episodes))


@dataclass(frozen=True)
class _Spec:
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    problem: str | None
    is_once: bool

    def __str__(self) -> str:
        if self.problem is not None:
            return self.problem
        length = "one value, of" if self.is_once else ""
        shape = ", ".join(["T"][self.is_once :] + [str(size) for size in self.shape])
        return f"{length} shape [{shape}] and dtype {self.dtype}".lstrip()


@dataclass
class _Signature:
    """The leaves of some episodes that all declare the same ones."""

    specs: dict[str, _Spec]
    first: Place
    count: int = 0


@dataclass
class _Scan:
    layout: Layout
    without: Mapping[str, str]
    block_bytes: int
    notes: Notes
    fields: dict[str, Field | None] = field(default_factory=dict)
    signatures: dict[tuple[Any, ...], _Signature] = field(default_factory=dict)
    with_values: set[str] = field(default_factory=set)
    episodes: list[Episode] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    numbering: list[tuple[int, str]] = field(default_factory=list)
    foreign: dict[str, Place] = field(default_factory=dict)
    rows: int = 0

    def file(self, index: int, file: H5File, place: Place) -> None:
        found = self.layout.find(file.members(), place)
        for name, why in found.strangers:
            self.skipped.append(Skipped(index, name, why))
        if found.numbering is not None:
            self.numbering.append((index, found.numbering))
        numbers = [episode.number for episode in found.episodes]
        if len(set(numbers)) < len(numbers):
            raise place.error(f"two episodes have one number: {sorted(numbers)}", "V33")
        for episode in found.episodes:
            self.episode(index, file, episode, place.at(group=episode.group))

    def episode(self, index: int, file: H5File, ref: EpisodeRef, place: Place) -> None:
        group = ref.group
        leaves = {leaf.path: leaf for leaf in file.leaves(group)}
        records = self._records(leaves, place)
        if records < 2:
            why = f"it has {records} record{'s' * (records != 1)}, so it gives no row"
            self.skipped.append(Skipped(index, group, why))
            return
        specs = {}
        for path, leaf in leaves.items():
            entry = self._field_of(path)
            if entry is None:
                self.foreign.setdefault(path, place)
            else:
                specs[path] = _spec(leaf, entry, records)
        known = tuple(specs.items())
        signature = self.signatures.get(known)
        if signature is None:
            signature = self.signatures[known] = _Signature(specs, place)
            self._compare(signature)
        signature.count += 1
        for path, spec in specs.items():
            count = 1 if spec.is_once else records
            if path not in self.with_values and self._has_values(file, group, path, spec, count):
                self.with_values.add(path)
        self.episodes.append(Episode(index, group, ref.number, records, self.rows))
        self.rows += records - 1

    def _records(self, leaves: dict[str, Leaf], place: Place) -> int:
        """Returns the length of the episode; every leaf of a field must have it.

        One that is not required may also be a single value, which then holds for all records.
        """
        for entry in self.layout.fields:
            if entry.required and entry.source not in leaves:
                below = any(path.startswith(f"{entry.source}/") for path in leaves)
                what = "is a group, expected an array" if below else "is missing"
                at = place.at(key=entry.source)
                raise at.error(f"the required key {what}", "V12")
        clock = leaves[self.layout.clock]
        for path, leaf in leaves.items():
            known = self._field_of(path)
            is_unusable = leaf.problem is not None and not leaf.shape
            if known is None or (is_unusable and not known.required):
                continue
            if is_unusable:
                raise place.at(key=path).error(f"cannot be a column: {leaf.problem}", "V10")
            if clock.shape and not known.required and leaf.shape[:1] in ((), (1,)):
                continue
            if not leaf.shape or not clock.shape or leaf.shape[0] != clock.shape[0]:
                text = f"has {_length(leaf)}, but {self.layout.clock!r} has {_length(clock)}"
                hint = self.layout.hint(path, leaf.shape)
                raise place.at(key=path).error(text if hint is None else f"{text}; {hint}", "V11")
        return clock.shape[0]

    def _field_of(self, path: str) -> Field | None:
        # Remembered: asked several times for every leaf of every episode.
        if path not in self.fields:
            self.fields[path] = next(
                (entry for entry in self.layout.fields if _covers(entry.source, path)), None
            )
            if any(_covers(source, path) for source in self.without):
                self.fields[path] = None
        return self.fields[path]

    def _compare(self, signature: _Signature) -> None:
        """Checks the required leaves against those of the first episode."""
        first = next(iter(self.signatures.values()))
        for entry in self.layout.fields:
            if not entry.required:
                continue
            spec, expected = signature.specs[entry.source], first.specs[entry.source]
            at = signature.first.at(key=entry.source)
            if spec.problem is not None:
                raise at.error(f"cannot be a column: {spec.problem}", "V10")
            if entry.role in ("reward", "end") and math.prod(spec.shape) != 1:
                raise at.error(f"has {spec}, expected one number per record", "V10")
            same_dtype = spec.dtype == expected.dtype or entry.role == "end"
            if spec.shape != expected.shape or not same_dtype:
                raise at.error(f"has {spec}, but {first.first} has {expected}", "V10")

    def _has_values(self, file: H5File, group: str, path: str, spec: _Spec, records: int) -> bool:
        """Whether a leaf is other than NaN throughout this episode."""
        entry = self._field_of(path)
        if spec.problem is not None or (entry is not None and entry.required):
            return False
        if spec.dtype.kind not in "fc" or 0 in spec.shape:
            return True
        record_bytes = math.prod(spec.shape) * spec.dtype.itemsize
        # One record settles it for nearly every leaf; a small one is read in one go.
        start, step = 0, records if records * record_bytes <= _SMALL_BYTES else 1
        while start < records:
            stop = min(start + step, records)
            if not np.isnan(file.read(f"{group}/{path}", start, stop)).all():
                return True
            start, step = stop, max(1, self.block_bytes // max(1, record_bytes))
        return False

    def plan(self) -> Plan:
        left_out = [
            LeftOut(path, self._why_foreign(path, place))
            for path, place in sorted(self.foreign.items())
        ]
        leaves = []
        for path in sorted({path for known in self.signatures.values() for path in known.specs}):
            entry = self._field_of(path)
            if entry is None:
                continue
            spec = next(k.specs[path] for k in self.signatures.values() if path in k.specs)
            why = None if entry.required else self._why_left_out(path, spec, entry)
            if why is not None:
                left_out.append(LeftOut(path, why))
                continue
            if spec.dtype.name in _NARROW and entry.role != "end":
                first = next(iter(self.signatures.values())).first
                text = f"{path} is stored as {spec.dtype}, the loggers' default, and kept so"
                self.notes.add("V14", text, first)
            leaves.append(
                PlannedLeaf(
                    path,
                    entry.role,
                    spec.shape,
                    spec.dtype,
                    _targets(entry, path),
                    spec.is_once,
                )
            )
        return Plan(leaves, self.episodes, left_out, self.skipped, self.numbering)

    def _why_foreign(self, path: str, place: Place) -> str:
        for source, why in self.without.items():
            if _covers(source, path):
                return why
        return f"it is no part of the layout {self.layout.name!r} (in {place.brief})"

    def _why_left_out(self, path: str, spec: _Spec, entry: Field) -> str | None:
        """Says why an optional leaf is not shared by all episodes in a form that can be kept."""
        lacking = [known for known in self.signatures.values() if path not in known.specs]
        if lacking:
            specs, where = lacking[0].specs, lacking[0].first.brief
            below = any(other.startswith(f"{path}/") for other in specs)
            above = any(path.startswith(f"{other}/") for other in specs)
            if below or above:
                return f"it is an array in some episodes and a group in others ({where})"
            count = sum(known.count for known in lacking)
            return f"missing from {count} of {len(self.episodes)} episodes, first {where}"
        if spec.problem is not None:
            return spec.problem
        for known in self.signatures.values():
            other = known.specs[path]
            if other != spec:
                return f"it has {spec} in one episode and {other} in {known.first.brief}"
        if path not in self.with_values:
            return "it is NaN throughout"
        return unstorable(tuple(path.split("/")))


def scan(
    sources: Sources,
    layout: Layout,
    *,
    without: Mapping[str, str],
    block_bytes: int,
    notes: Notes,
) -> Plan:
    """Reads the declarations of every file and returns what is to be written.

    Args:
        sources: the files, in order.
        layout: what the corpus declares.
        without: sources of fields that are to be left out, and why.
        block_bytes: how many bytes may be read in one piece.
        notes: takes findings that stop nothing.

    Raises:
        CorpusError: a file breaks a rule of the layout; names file, episode and key.
        OSError: a file cannot be opened.
    """
    state = _Scan(layout, without, block_bytes, notes)
    for index, source in enumerate(sources.files):
        with open_h5(source.path, is_verified=source.is_verified) as file:
            state.file(index, file, Place(source.path, source.name))
    if not state.episodes:
        names = ", ".join(str(source.path) for source in sources.files[:5])
        raise CorpusError(
            f"{names}: no episode gives a row ({len(state.skipped)} skipped); the source is empty "
            "[V38]"
        )
    return state.plan()


def _covers(source: str, path: str) -> bool:
    return path.startswith(source) if source.endswith("/") else path == source


def _spec(leaf: Leaf, entry: Field, records: int) -> _Spec:
    is_once = leaf.problem is None and leaf.shape[:1] != (records,)
    shape = leaf.shape[1:]
    if shape == () and entry.column:
        shape = (1,)
    elif entry.role == "end" and math.prod(shape) == 1:
        shape = ()
    return _Spec(shape, np.dtype(leaf.dtype), leaf.problem, is_once)


def _targets(entry: Field, path: str) -> tuple[Target, ...]:
    rest: Key = tuple(path.removeprefix(entry.source).split("/")) if entry.is_group else ()
    keys = ((entry.before, 0), (entry.after, 1))
    return tuple(Target((*key, *rest), shift) for key, shift in keys if key is not None)


def _length(leaf: Leaf) -> str:
    if not leaf.shape:
        return "no length"
    return f"{leaf.shape[0]} record{'s' * (leaf.shape[0] != 1)}"
