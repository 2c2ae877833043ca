"""The declaration of a corpus, with which the engine converts its files."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

import numpy.typing as npt

from replaykit.datasets.engine.episode_finders import Finder
from replaykit.datasets.engine.fields import ALIGNMENTS, Alignment, Decoder, Field
from replaykit.datasets.engine.h5 import H5File
from replaykit.datasets.engine.locations import Location, RuleFindings
from replaykit.datasets.sources import SUFFIXES
from replaykit.ted import DEFAULT_DONE_KEYS, Key

ALWAYS: Final[tuple[Key, ...]] = (
    *((name,) for name in DEFAULT_DONE_KEYS),
    *(("next", name) for name in DEFAULT_DONE_KEYS),
    ("episode",),
    ("seed",),
)
"""The keys that the engine fills in every data set."""


def key_problems(fields: Iterable[Field]) -> Iterator[str]:
    """Yield the conflicts between the keys of fields.

    Keys of datasets below a group depend on the file. `column_specs` checks these keys.
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
                        f"{other} already: give the field another key"
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
    """Return whether two keys are equal, or one is below the other, in every file."""
    if is_group and is_other_group:
        return False  # it depends on the names in the groups
    if is_group:
        return key[: len(other)] == other
    if is_other_group:
        return other[: len(key)] == key
    shorter = min(len(key), len(other))
    return key[:shorter] == other[:shorter]


class Sidecar:
    """A JSON object, and the file that contains it.

    Attributes:
        path: the file.
        sha256: the SHA-256 of the file's content, for the manifest.
        content: the object.
    """

    def __init__(self, path: Path, text: bytes) -> None:
        self.path = path
        self.sha256 = hashlib.sha256(text).hexdigest()
        found = json.loads(text)
        if not isinstance(found, dict):
            raise ValueError(f"it holds {type(found).__name__}, expected an object")
        self.content: dict[str, Any] = found

    def facts(self, *names: str) -> dict[str, Any]:
        """Return name and hash of the file, and the values of the named entries."""
        known = {name: self.content.get(name) for name in names}
        return {
            "described_by": {"name": self.path.name, "sha256": self.sha256},
            **{k: v for k, v in known.items() if isinstance(v, (str, int, float, bool))},
        }


def read_sidecar(location: Location, name: str) -> Sidecar | None:
    """Read a JSON file in the folder of a source file; return ``None`` if it is absent.

    Raises:
        CorpusError: the file is not a JSON object (rule V04).
    """
    path = Path(location.file).with_name(name)
    try:
        status = path.stat()
        return _read(path, status.st_mtime_ns, status.st_size)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise location.error(
            f"{path}, which describes it, cannot be read ({error})", "V04"
        ) from error


@lru_cache(maxsize=8)
def _read(path: Path, mtime: int, size: int) -> Sidecar:
    # This is called for every episode. The cache key contains time and size, so a change is
    # noticed.
    return Sidecar(path, path.read_bytes())


Bounds = tuple[tuple[float, ...], tuple[float, ...]]
"""Smallest and largest value, each a number or one number for each value of a record."""
Counters = tuple[tuple[str, Literal["episodes", "records"]], ...]
"""Names of attributes, each with the quantity that the attribute counts."""


@dataclass(frozen=True)
class SourceFacts:
    """Information about an episode that does not come from its arrays.

    Attributes:
        source_seed: the seed with which the episode was recorded, or -1.
        success: 1 if the task was solved, 0 if not, and -1 if the source does not record it.
        terminated: True if the episode terminated. It is only set if the arrays do not contain this
            information.
    """

    source_seed: int = -1
    success: int = -1
    terminated: bool | None = None

    @staticmethod
    def seed_of(said: object) -> int:
        """Return a seed from a source, or -1 if it is not valid."""
        return said if isinstance(said, int) and 0 <= said < 1 << 63 else -1


@dataclass(frozen=True)
class SourceWindow:
    """The first records of an episode, for the leaves from `Layout.witnesses`.

    Attributes:
        arrays: the records by path, ``[w, ...]`` with ``w <= records``. All have the same length.
        records: number of records of the episode.
        location: the episode, for messages.
        notes: collects findings that do not stop the conversion.
        memory: a dict in which the layout may store information for the following episodes of the
            same file.
    """

    arrays: Mapping[str, npt.NDArray[Any]]
    records: int
    location: Location
    notes: RuleFindings
    memory: dict[str, Any]


@dataclass(frozen=True)
class Ends:
    """A summary of a field of ends in an episode, which may have millions of records.

    Attributes:
        records: number of records of the episode, up to the record that its last row takes.
        first: the first record at which the end is set, or ``None``.
        last: whether the end is set at the record that the last row takes.
    """

    records: int
    first: int | None
    last: bool


@dataclass(frozen=True)
class Flags:
    """The flags of the last row of an episode. The flags of all other rows are False."""

    terminated: bool
    truncated: bool


class DropLeaves(Exception):
    """A signal that a field is unusable in the whole corpus.

    `Layout.examine` raises this exception. The engine catches it, starts again without the leaves
    of the field, and reports them.
    """

    def __init__(self, source: str, why: str) -> None:
        super().__init__(source, why)
        self.source = source
        self.why = why


_OLD_NAME: Final = "beside"
"""The name of ``Layout.sidecar_facts`` in version 0.1."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The declaration of a known or custom corpus.

    A subclass overrides methods for rules that the attributes cannot express. An instance holds no
    state. Information about a file is kept in `SourceWindow.memory`.

    Attributes:
        name: the name of the layout in messages and manifests.
        version: the version of the rules. It increases with every change, so that the engine
            recognizes older conversions.
        episodes: the finder of the episodes in a file: `Groups`, `WholeFile` or `Segments`.
        alignment: the records that a row takes; one of `ALIGNMENTS` or a custom `Alignment`.
        clock: the source path whose length is the number of records of an episode.
        fields: the datasets and their keys. The engine adds flags, ``episode`` and ``seed``.
            Several fields may name the same dataset, which then fills the keys of each field. A
            field with a closing ``/`` takes the datasets that no earlier field covers.
        attributes: names of the attributes of an episode's group that `facts` receives.
        count: the attribute that must equal the length of the clock, or ``None`` (rule V15).
        about: a group, and names of its attributes that describe the whole file. The manifest
            contains the attributes that exist.
        counters: attributes of the group in ``about`` that count the ``"episodes"`` or
            ``"records"`` of the file. A count may be outdated if episodes were removed. The engine
            reports a wrong count, and does not use it (rule V15).
        bounds: smallest and largest allowed value of actions, by source path (rule V25).
        decoders: the decoders of datasets, by source path: `Images`, `Text` or `Preceded`.
        natural_files: True to order numbers in the names of files by their value, so that
            ``episode_9`` comes before ``episode_10``.
        copies: the treatment of episodes whose observations and actions equal those of an earlier
            episode. It applies if `Policies` leaves the choice to the layout.
        joined: True if an episode in flat arrays may continue in the next file; see `goes_on`.
        chunks: the group with numbered subgroups that each hold a part of the flat arrays. The
            group is used for files whose root does not have the arrays.

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
    suffixes: ClassVar[tuple[str, ...]] = SUFFIXES
    has_files: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Check that every field can take a dataset, and that no keys conflict.

        Two optional fields may fill the same key, because a file then has at most one of them.

        Raises:
            TypeError: the class defines ``beside``, the old name of ``sidecar_facts``.
            ValueError: an earlier field takes all datasets of a field. Or two fields fill the same
                key, or a key below the other key. Or a field fills a key that every data set has.
                Or the first row takes a record before record 0.
        """
        if hasattr(self, _OLD_NAME):  # it would not be called any more
            raise TypeError(f"{type(self).__name__}: expected sidecar_facts, got {_OLD_NAME}")
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

    # -- properties that follow from the declaration ---------------------------------------------

    @cached_property
    def lost(self) -> int:
        """The count of records of the clock minus the count of rows, for each episode."""
        return max(self._lost(is_after=True), self._lost(is_after=False))

    @cached_property
    def is_open(self) -> bool:
        """True if the last step is recorded without the state after it."""
        return self._lost(is_after=True) == self._lost(is_after=False) + 1

    @cached_property
    def end_names(self) -> dict[int, str]:
        """The names of the fields of ends in `flags`, by position."""
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
            # A row needs the record with its end flag.
            found += [
                entry.end_offset(self.alignment) - entry.extra(self.alignment)
                for entry in self.fields
                if entry.is_end
            ]
        return max(found, default=0)

    def declaration(self) -> dict[str, Any]:
        """Return the rules as JSON values, for the manifest."""
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

    # -- rules that a family may override -------------------------------------------------------

    def resolve(self, file: H5File, location: Location) -> Layout:
        """Return the layout of one file, for a corpus whose files differ in content.

        All files of a data set must resolve to the same layout.

        Raises:
            CorpusError: the file belongs to another layout (rule V04).
        """
        return self

    def goes_on(self, file: H5File, location: Location) -> bool:
        """Return whether a file begins inside the last episode of the file before it.

        The engine calls this method only if ``joined`` is True.
        """
        return False

    @property
    def seen_attributes(self) -> set[str]:
        """The attributes of an episode's group that the engine reads."""
        return {*self.attributes, *((self.count,) if self.count else ())}

    def facts(
        self,
        attributes: Mapping[str, Any],
        name: str,
        records: int,
        location: Location,
        notes: RuleFindings,
    ) -> SourceFacts:
        """Return information about an episode that does not come from its arrays.

        Args:
            attributes: the existing attributes of the group that `Layout.attributes` names.
            name: the path of the file in the corpus.
            records: the length of the clock.
        """
        return SourceFacts(self.source_seed(name))

    def sidecar_facts(self, location: Location) -> dict[str, Any]:
        """Return information from files next to a source file as JSON values."""
        return {}

    def described_by(self, path: Path) -> tuple[Path, ...]:
        """Return the existing files next to a source file that describe its content.

        A data set is not reused if the content of these files has changed.
        """
        return ()

    def totals(self, location: Location) -> dict[str, Any]:
        """Return the recorded counts of ``episodes`` and ``records`` of a file, unchecked."""
        return {}

    def flags(
        self,
        ends: Mapping[str, Ends],
        last: Mapping[str, npt.NDArray[Any]],
        facts: SourceFacts,
        location: Location,
        notes: RuleFindings,
    ) -> Flags:
        """Return the flags of an episode's last row, at least one of which is set.

        Args:
            ends: the summaries of the fields of ends, by source. If several fields take the same
                source, the first summary has the name of the source. The summary of field ``n`` has
                the name ``"source#n"``.
            last: the last record ``[1, ...]`` of every required field.
            facts: the result of `facts` for the episode.
            location: the episode, for messages.
            notes: collects findings that do not stop the conversion.

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
                at = location.at(key=entry.name, record=found.first)
                raise at.error(f"an end is set before the last of {found.records} records", "V31")
            set_here[entry.role] |= found.last
        terminated = set_here["terminated"]
        # An end without a recorded reason is truncated, because a wrong "terminated" would teach a
        # false value of zero.
        return Flags(terminated, set_here["truncated"] or not terminated)

    def witnesses(self, leaves: Collection[str]) -> tuple[str, ...]:
        """Return the paths of the leaves that `examine` compares; none by default."""
        return ()

    def examine(self, window: SourceWindow) -> None:
        """Compare leaves with each other in the first records of an episode.

        Raises:
            CorpusError: the episode breaks a rule of the corpus.
            DropLeaves: a field must be left out of the whole corpus.
        """

    def file_facts(self, memory: Mapping[str, Any]) -> dict[str, Any]:
        """Return the information found in a file, as JSON values for the manifest."""
        return {}

    def splits(self, file: H5File, location: Location) -> dict[str, list[str]]:
        """Return the named parts of a file: for each name, the groups of its episodes."""
        return {}

    def hint(self, path: str, shape: tuple[int, ...]) -> str | None:
        """Return advice about a leaf of the wrong length, or ``None``."""
        return None

    def source_seed(self, name: str) -> int:
        """Return the seed in the name of a source file, or -1."""
        return -1


def rules_digest(layout: object) -> str:
    """Return a digest of the attributes of a layout.

    The digest also changes if the attributes change without a new ``version``.
    """
    # The default repr of an object contains an address, which differs between processes.
    said = re.sub(r" at 0x[0-9a-fA-F]+", "", repr(layout))
    return hashlib.sha256(said.encode()).hexdigest()
