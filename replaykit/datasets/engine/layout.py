"""Define what a corpus declares, so that one engine converts them all."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal

import numpy.typing as npt

from replaykit.datasets.engine.fields import ALIGNMENTS, Alignment, Decoder, Field
from replaykit.datasets.engine.finding import Finder
from replaykit.datasets.engine.h5 import H5File
from replaykit.datasets.engine.places import Notes, Place
from replaykit.ted import DEFAULT_DONE_KEYS, Key

__all__ = [
    "ALWAYS",
    "Bounds",
    "Counters",
    "DropLeaves",
    "Ends",
    "Flags",
    "Layout",
    "SourceFacts",
    "SourceWindow",
    "key_problems",
    "rules_digest",
]

ALWAYS: Final[tuple[Key, ...]] = (
    *((name,) for name in DEFAULT_DONE_KEYS),
    *(("next", name) for name in DEFAULT_DONE_KEYS),
    ("episode",),
    ("seed",),
)
"""The keys that the engine fills in every data set."""


def key_problems(fields: Iterable[Field]) -> Iterator[str]:
    """Yields what is wrong with the keys of fields, if anything.

    What a group of datasets fills is known when there is a file; `column_specs` looks at it then.
    """
    seen: list[tuple[Key, Field]] = []
    for entry in fields:
        for key in (entry.before, entry.after):
            if key is None:
                continue
            for other in ALWAYS:
                if _meet(key, other, entry.is_group, False):
                    yield (
                        f"the field {entry.name!r} fills {key}, but every data set has the key "
                        f"{other} besides: give it another key"
                    )
            for other, before in seen:
                may_both_be = before is entry or entry.required or before.required
                if may_both_be and _meet(key, other, entry.is_group, before.is_group):
                    what = "the key" if key == other else f"{key} and"
                    yield (
                        f"the fields {before.name!r} and {entry.name!r} fill {what} {other}; "
                        "expected keys that are not equal and not below one another: give one of "
                        "them another key [V10]"
                    )
            seen.append((key, entry))


def _meet(key: Key, other: Key, is_group: bool, is_other_group: bool) -> bool:
    """Whether two fields fill one key, or one a key below that of the other, in every file."""
    if is_group and is_other_group:
        return False  # that depends on the names in the groups
    if is_group:
        return key[: len(other)] == other
    if is_other_group:
        return other[: len(key)] == key
    shorter = min(len(key), len(other))
    return key[:shorter] == other[:shorter]


Bounds = tuple[tuple[float, ...], tuple[float, ...]]
"""Smallest and largest value, each one number or one for each value of a record."""
Counters = tuple[tuple[str, Literal["episodes", "records"]], ...]
"""Attributes, and what they count."""


@dataclass(frozen=True)
class SourceFacts:
    """What is known of an episode besides its arrays.

    Attributes:
        source_seed: the seed that it was recorded with, or -1.
        success: 1 or 0 where the source says whether the task was solved, else -1.
        terminated: whether it ended as terminated, where the arrays do not say so.
    """

    source_seed: int = -1
    success: int = -1
    terminated: bool | None = None

    @staticmethod
    def seed_of(said: object) -> int:
        """Returns a seed that a source says, or -1 where it says none that can be one."""
        return said if isinstance(said, int) and 0 <= said < 1 << 63 else -1


@dataclass(frozen=True)
class SourceWindow:
    """The first records of an episode, of the leaves that `Layout.witnesses` named.

    Attributes:
        arrays: path to ``[w, ...]``, ``w <= records``; all of one length.
        records: how many records there are.
        place: the episode, for messages.
        notes: takes findings that stop nothing.
        memory: of the layout, kept from episode to episode of one file.
    """

    arrays: Mapping[str, npt.NDArray[Any]]
    records: int
    place: Place
    notes: Notes
    memory: dict[str, Any]


@dataclass(frozen=True)
class Ends:
    """What a field of ends says of an episode, in two words: it may have millions of records.

    Attributes:
        records: how many records the episode has, up to the one that its last row takes.
        first: the first record at which it is set, if any.
        last: whether it is set at the one that the last row takes.
    """

    records: int
    first: int | None
    last: bool


@dataclass(frozen=True)
class Flags:
    """Why an episode ended: the flags of its last row. Those of all other rows are False."""

    terminated: bool
    truncated: bool


class DropLeaves(Exception):
    """Raised by `Layout.examine`: all leaves of a field are unusable in the whole corpus.

    The engine starts over without them and says so. Not an error that users see.
    """

    def __init__(self, source: str, why: str) -> None:
        super().__init__(source, why)
        self.source = source
        self.why = why


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The declaration of one corpus family, or of a corpus of your own.

    What cannot be said by the attributes is said by a subclass that overrides a method. An
    instance holds no state: what is learnt of a file goes into `SourceWindow.memory`.

    Attributes:
        name: names the layout in messages and manifests.
        version: raised with every change of a rule, so that older conversions are told apart.
        episodes: where the episodes of a file are; `Groups` or `Segments`.
        alignment: which records a row takes; one of `ALIGNMENTS` or one's own.
        clock: the source path whose length is the number of records of an episode.
        fields: which dataset becomes which key; the engine adds flags, ``episode`` and ``seed``.
            A dataset may be named by several, and fills the keys of each; one with a closing
            ``/`` takes what no field before it covers.
        attributes: attributes of an episode's group that `facts` wants to see.
        count: the attribute that must be the length of the clock, if any (rule V15).
        about: a group and the attributes of it that describe the whole file; the manifest has
            those that are there.
        counters: attributes of that group that say how many ``"episodes"`` or ``"records"`` the
            file has, and are known to be left behind when episodes are removed: what they say is
            reported where it is not so, and nothing goes by it (rule V15).
        bounds: source paths of actions, and the smallest and largest value that they should have
            (rule V25).
        decoders: source paths whose values are not numbers, and what makes numbers of them;
            `Images`, `Text` or `Preceded`.
        natural_files: whether numbers in the names of files order them as numbers, so that
            ``episode_9`` comes before ``episode_10``.
        copies: what becomes of episodes with the observations and actions of an earlier one,
            where `Policies` leaves that to the layout.
        joined: whether an episode may go on in the next file, see `goes_on`; for flat arrays.
        chunks: the group that holds flat arrays in numbered groups, one after the other, in files
            whose root does not have them.

    Example:
        A corpus whose files hold a group for each episode, with one more frame than actions:

        >>> import tempfile, h5py, numpy as np
        >>> from pathlib import Path
        >>> from replaykit.datasets import FINAL_STATE, Field, Groups, Layout, convert
        >>> arm = Layout(
        ...     name="lab-arm",
        ...     version=1,
        ...     episodes=Groups("run", having=("torque", "joints")),
        ...     alignment=FINAL_STATE,
        ...     clock="torque",
        ...     fields=(
        ...         Field("joints", "observation", ("observation",), ("next", "observation")),
        ...         Field("torque", "action", before=("action",)),
        ...         Field("score", "reward", after=("next", "reward"), column=True),
        ...         Field("fallen", "terminated"),
        ...     ),
        ... )
        >>> root = Path(tempfile.mkdtemp())
        >>> with h5py.File(root / "monday.h5", "w") as file:
        ...     file["run7/joints"] = np.arange(8.0).reshape(4, 2)
        ...     file["run7/torque"] = np.ones((3, 1))
        ...     file["run7/score"] = np.arange(3.0)
        ...     file["run7/fallen"] = np.array([False, False, True])
        >>> data = convert([root / "monday.h5"], arm, root / "data")
        >>> data[:]["next", "observation"][:, 0]
        tensor([2., 4., 6.], dtype=torch.float64)
        >>> data.episode_table["length"], data.episode_table["terminated"]
        (tensor([3]), tensor([True]))
    """

    name: str
    version: int
    episodes: Finder
    alignment: Alignment
    clock: str
    fields: tuple[Field, ...]
    attributes: tuple[str, ...] = ()
    count: str | None = None
    about: tuple[str, tuple[str, ...]] | None = None
    counters: Counters = ()
    bounds: tuple[tuple[str, Bounds], ...] = ()
    decoders: tuple[tuple[str, Decoder], ...] = ()
    natural_files: bool = False
    copies: Literal["keep", "drop"] = "keep"
    joined: bool = False
    chunks: str = ""

    def __post_init__(self) -> None:
        """Checks that every field can take something, and has keys of its own.

        Two fields that are not required may have one key: not more than one of them is there then.

        Raises:
            ValueError: all that a field stands for is taken by one before it; two fields fill one
                key, or one a key below that of the other; a field fills a key that every data set
                has; or its first row takes a record before the first one.
        """
        for at, entry in enumerate(self.fields):
            for before in self.fields[:at]:
                if before.shadows(entry):
                    raise ValueError(
                        f"layout {self.name!r}: the field {entry.name!r} gets nothing, since "
                        f"{before.name!r} before it takes all datasets of that group; put "
                        f"{entry.name!r} first"
                    )
        for problem in (*key_problems(self.fields), *self._record_problems()):
            raise ValueError(f"layout {self.name!r}: {problem}")

    def _record_problems(self) -> Iterator[str]:
        for entry in self.fields:
            offsets = [each.offset for each in entry.targets(self.alignment, entry.sources[0])]
            offsets += [entry.end_offset(self.alignment)] if entry.is_end else []
            if offsets and min(offsets) < 0:
                yield (
                    f"row 0 would take record {min(offsets)} of the field {entry.name!r} by its "
                    f"shift of {entry.shift}; expected record 0 or a later one: give a larger shift"
                )

    # -- what follows from the declaration ------------------------------------------------------

    @cached_property
    def lost(self) -> int:
        """How many rows fewer than records of the clock an episode has."""
        return max(self._lost(is_after=True), self._lost(is_after=False))

    @cached_property
    def is_open(self) -> bool:
        """Whether the last step is recorded but for the state that it led to."""
        return self._lost(is_after=True) == self._lost(is_after=False) + 1

    @cached_property
    def end_names(self) -> dict[int, str]:
        """What `flags` calls the fields of ends, by their positions."""
        names: dict[int, str] = {}
        for at, entry in enumerate(self.fields):
            if entry.is_end:
                names[at] = f"{entry.name}#{at}" if entry.name in names.values() else entry.name
        return names

    def _lost(self, *, is_after: bool) -> int:
        found = [
            target.offset - entry.extra(self.alignment)
            for entry in self.fields
            for target in entry.targets(self.alignment, entry.sources[0])
            if (target.is_after and entry.describes == "state") == is_after
        ]
        if not is_after:
            # A row exists where it is known whether it is an end.
            found += [
                entry.end_offset(self.alignment) - entry.extra(self.alignment)
                for entry in self.fields
                if entry.is_end
            ]
        return max(found, default=0)

    def declaration(self) -> dict[str, Any]:
        """Returns the rules as JSON values, for the manifest."""
        return {
            "alignment": {
                "name": self.alignment.name,
                "known": ALIGNMENTS.get(self.alignment.name) == self.alignment,
                "extra": self.alignment.extra,
                "action": self.alignment.action,
                "outcome": self.alignment.outcome,
            },
            "fields": [
                {
                    "source": entry.name,
                    "role": entry.role,
                    "describes": entry.describes,
                    "before": entry.before and list(entry.before),
                    "after": entry.after and list(entry.after),
                    **({"shift": entry.shift} if entry.shift else {}),
                    **({"dtype": entry.dtype} if entry.dtype else {}),
                }
                for entry in self.fields
            ],
        }

    # -- what a family may say otherwise --------------------------------------------------------

    def resolve(self, file: H5File, place: Place) -> Layout:
        """Returns the layout of one file, where files of the corpus differ in what they hold.

        All files of a data set must resolve to the same layout.

        Raises:
            CorpusError: the file is of another layout (rule V04).
        """
        return self

    def goes_on(self, file: H5File, place: Place) -> bool:
        """Whether a file begins inside of the episode that the file before it ended in.

        Only asked where ``joined``.
        """
        return False

    @property
    def seen_attributes(self) -> set[str]:
        """The attributes of an episode's group that are looked at."""
        return {*self.attributes, *((self.count,) if self.count else ())}

    def facts(
        self, attributes: Mapping[str, Any], name: str, records: int, place: Place, notes: Notes
    ) -> SourceFacts:
        """Returns what is known of an episode besides its arrays.

        Args:
            attributes: those of `Layout.attributes` that its group has.
            name: the path of its file in the corpus.
            records: the length of its clock.
        """
        return SourceFacts(self.source_seed(name))

    def beside(self, place: Place) -> dict[str, Any]:
        """Returns what files beside a source file say of it, for the manifest; JSON values."""
        return {}

    def described_by(self, path: Path) -> tuple[Path, ...]:
        """Returns the files beside a source file that say what is in it, if they are there.

        A data set that was made with others of them is not served as one made with these.
        """
        return ()

    def totals(self, place: Place) -> dict[str, int]:
        """Returns how many ``episodes`` and ``records`` a file should hold, where that is said."""
        return {}

    def flags(
        self,
        ends: Mapping[str, Ends],
        last: Mapping[str, npt.NDArray[Any]],
        facts: SourceFacts,
        place: Place,
        notes: Notes,
    ) -> Flags:
        """Returns why an episode ended; one flag at least is set.

        Args:
            ends: where the fields of ends are set, by source. Where several take one source, the
                first has its name, and the one at position ``n`` of the fields ``"source#n"``.
            last: the last record ``[1, ...]`` of every required field.
            facts: of the episode.
            place: the episode, for messages.
            notes: takes findings that stop nothing.

        Raises:
            CorpusError: the records break a rule of the corpus.
        """
        set_here = {"terminated": bool(facts.terminated), "truncated": False}
        for position, name in self.end_names.items():
            entry, found = self.fields[position], ends.get(name)
            if found is None:
                continue
            final = found.records - 1
            if found.first is not None and found.first < final and not entry.held:
                at = place.at(key=entry.name, record=found.first)
                raise at.error(f"an end is set before the last of {found.records} records", "V31")
            set_here[entry.role] |= found.last
        terminated = set_here["terminated"]
        # An end whose reason the source does not tell is truncated: a wrong "terminated" would
        # teach a false zero value.
        return Flags(terminated, set_here["truncated"] or not terminated)

    def witnesses(self, leaves: Collection[str]) -> tuple[str, ...]:
        """Returns the paths that `examine` wants to see together; none by default."""
        return ()

    def examine(self, window: SourceWindow) -> None:
        """Checks leaves against each other, on the first records of an episode.

        Raises:
            CorpusError: the episode breaks a rule of the corpus.
            DropLeaves: a field must be left out of the whole corpus.
        """

    def file_facts(self, memory: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what was learnt of a file, for the manifest; JSON values."""
        return {}

    def splits(self, file: H5File, place: Place) -> dict[str, list[str]]:
        """Returns the named parts of a file: for each the groups of its episodes."""
        return {}

    def hint(self, path: str, shape: tuple[int, ...]) -> str | None:
        """Returns what to do about a leaf of the wrong length, where the corpus knows."""
        return None

    def source_seed(self, name: str) -> int:
        """Returns the seed that the name of a source file tells, or -1."""
        return -1


def rules_digest(layout: Layout) -> str:
    """Returns a digest of what a layout says by its attributes: not everybody who changes a layout
    raises its version."""
    # What says nothing of itself has an address, which is another one in every process.
    said = re.sub(r" at 0x[0-9a-fA-F]+", "", repr(layout))
    return hashlib.sha256(said.encode()).hexdigest()
