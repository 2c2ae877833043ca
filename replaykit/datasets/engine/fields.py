"""Declarations of source datasets and their columns, and decoders of images and text."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final, Literal, Protocol, get_args

import numpy as np
import numpy.typing as npt

from replaykit.datasets.encoded_frames import decode_image
from replaykit.datasets.engine.h5 import H5File, H5Leaf
from replaykit.errors import CorpusError
from replaykit.ted import Key


class Decoder(Protocol):
    """The protocol of decoders, which convert the values of a dataset to numbers."""

    def declare(self, leaf: H5Leaf) -> H5Leaf:
        """Return the leaf with shape and dtype after decoding, and without ``problem``."""

    def read(self, file: H5File, dataset: str, start: int, stop: int) -> npt.NDArray[Any]:
        """Return decoded entries ``start .. stop - 1``.

        Raises:
            CorpusError: an entry cannot be decoded. The message names file, dataset and entry.
        """


@dataclass(frozen=True)
class Images:
    """A decoder of encoded images of one size, such as JPEG, to ``uint8 [H, W, C]``.

    An entry is a byte string of varying length, or an array of bytes padded with zeros.

    Args:
        shape: height, width and channels of every image.
    """

    shape: tuple[int, ...]

    def declare(self, leaf: H5Leaf) -> H5Leaf:
        return replace(leaf, shape=(*leaf.shape[:1], *self.shape), dtype=np.uint8, problem=None)

    def read(self, file: H5File, dataset: str, start: int, stop: int) -> npt.NDArray[Any]:
        found = np.empty((stop - start, *self.shape), np.uint8)
        for at, entry in enumerate(file.entries(dataset, start, stop)):
            decode_image(entry, found[at], f"{file.path}: {dataset}, record {start + at}")
        return found


@dataclass(frozen=True)
class Text:
    """A decoder of text to UTF-8 bytes ``uint8 [width]``, padded with zeros.

    Args:
        width: the length of the longest text, in bytes.
    """

    width: int

    def declare(self, leaf: H5Leaf) -> H5Leaf:
        return replace(leaf, shape=(*leaf.shape[:1], self.width), dtype=np.uint8, problem=None)

    def read(self, file: H5File, dataset: str, start: int, stop: int) -> npt.NDArray[Any]:
        found = np.zeros((stop - start, self.width), np.uint8)
        for at, entry in enumerate(file.entries(dataset, start, stop)):
            text = entry.encode() if isinstance(entry, str) else bytes(entry)
            if len(text) > self.width:
                raise CorpusError(
                    f"{file.path}: {dataset}, record {start + at}: is a text of {len(text)} bytes, "
                    f"expected at most {self.width} [V10]"
                )
            found[at, : len(text)] = np.frombuffer(text, np.uint8)
        return found


@dataclass(frozen=True)
class Preceded:
    """A decoder of numbers whose first record is in a separate dataset.

    Args:
        part: a component in the path of the dataset that contains all other records.
        first: the component that replaces ``part`` in the path of the dataset that contains the
            first record.
    """

    part: str
    first: str

    def declare(self, leaf: H5Leaf) -> H5Leaf:
        return replace(leaf, shape=(leaf.shape[0] + 1, *leaf.shape[1:])) if leaf.shape else leaf

    def read(self, file: H5File, dataset: str, start: int, stop: int) -> npt.NDArray[Any]:
        if start:
            return file.read(dataset, start - 1, stop - 1)
        first = f"/{dataset}".replace(f"/{self.part}/", f"/{self.first}/")[1:]
        rest = file.read(dataset, 0, max(0, stop - 1))
        before = file.read(first, 0, 1)
        if before.shape[1:] != rest.shape[1:] or before.dtype != rest.dtype:
            raise CorpusError(
                f"{file.path}: {first}: has records of shape {list(before.shape[1:])} and dtype "
                f"{before.dtype}, but {dataset} has {list(rest.shape[1:])} and {rest.dtype} [V10]"
            )
        return np.concatenate([before, rest])[:stop]


Role = Literal["observation", "action", "reward", "terminated", "truncated", "time", "info"]
"""The meaning of a field, which determines how its values are checked.

- ``observation``, ``reward``: must be finite (V21).
- ``action``: stored actions must be finite (V20).
- ``terminated``, ``truncated``: a number. A value other than zero marks the end of the episode.
  `Layout.flags` converts the values to flags.
- ``time``: should increase strictly (V27).
- ``info``: stored without checks.
"""

Moment = Literal["state", "action", "outcome", "successor"]
"""The moment that a field describes.

It determines the record of the field that a row takes; see `Alignment`.
"""

_MOMENTS: Final[dict[Role, Moment]] = {
    "observation": "state",
    "time": "state",
    "info": "state",
    "action": "action",
    "reward": "outcome",
    "terminated": "outcome",
    "truncated": "outcome",
}


@dataclass(frozen=True)
class Alignment:
    """The records that row ``t`` takes. `ALIGNMENTS` has the known alignments.

    Row ``t`` is the step from state ``t`` to state ``t + 1``.

    Attributes:
        name: the name in the manifest.
        extra: count of states minus count of records of the clock. It is 1 if the state after the
            last action is stored with the other states, else 0.
        action: row ``t`` takes action ``t + action``.
        outcome: row ``t`` takes outcome ``t + outcome``.

    Example:
        >>> from replaykit.datasets import STEPS, Alignment
        >>> Alignment("steps") == STEPS
        True
    """

    name: str
    extra: int = 0
    action: int = 0
    outcome: int = 0


STATE_RECORDS: Final = Alignment("state-records", outcome=1)
"""T records make T - 1 rows.

A record has a state, its reward and flags, and the action that was chosen in this state.
"""
FINAL_STATE: Final = Alignment("final-state", extra=1)
"""T actions, T outcomes and T + 1 states make T rows."""
STEPS: Final = Alignment("steps")
"""A record is a step, with a state, its action and its outcome.

If the state after each step is recorded, T records make T rows. Otherwise, the state after the last
step is unknown, so the last row is dropped or marked; see `Policies`.
"""
ARRIVALS: Final = Alignment("arrivals", action=1, outcome=1)
"""T records make T - 1 rows.

A record has a state, the action that led to this state, and the outcome of that action.
"""

ALIGNMENTS: Final = {rule.name: rule for rule in (STATE_RECORDS, FINAL_STATE, STEPS, ARRIVALS)}
"""The known alignments, by name."""


@dataclass(frozen=True)
class Target:
    """A column of a leaf: row ``t`` of an episode takes record ``t + offset``.

    ``is_after`` is True if the column holds the state after the step of the row.
    """

    key: Key
    offset: int
    is_after: bool = False


@dataclass(frozen=True)
class Field:
    """One line of a layout: a dataset of an episode, and the columns that it fills.

    Args:
        source: path of the dataset in its episode. A path with a closing ``/`` takes all datasets
            below that group, and appends their paths to the keys. ``"/"`` takes all datasets that
            no earlier field takes. The values of several paths are joined to one vector per record.
        role: see `Role`.
        before: the key of the column for the state before a step, or for the action. ``None`` for
            no column.
        after: the key of the column for the state after a step, or for the outcome. ``None`` for no
            column.
        column: True to store a scalar per record as ``[N, 1]`` instead of ``[N]``. Rewards and the
            flags of the engine are always ``[N, 1]``.
        required: True if every episode must have the dataset, with one shape and dtype. If the
            field is optional, a leaf that some episode lacks or declares differently is left out.
        nested: True if the source may also be a group. The field then takes all datasets below it.
        moment: the moment that the values describe, if the role does not determine it; see
            `Moment`.
        shift: count of records to add to the record that the alignment assigns to a row.
        held: for fields of ends, True if the end may also be set before the last row. At those
            rows, the set end is ignored.
        dtype: NumPy name of the stored dtype, if it differs from the dtype of the source.
            ``"bool"`` stores whether a value is not zero.
        more: number of records of its datasets minus number of records of the clock, if it differs
            from the ``extra`` of the alignment.

    Raises:
        ValueError: the role or moment is unknown. Or a successor has no ``after``, or has
            ``before``. Or the key of the reward is in a field with another role.

    Example:
        >>> from replaykit.datasets import Field
        >>> Field("obs/", "observation", before=("observation",),
        ...       after=("next", "observation")).covers("obs/camera/rgb")
        True
    """

    source: str | tuple[str, ...]
    role: Role
    before: Key | None = None
    after: Key | None = None
    column: bool = False
    required: bool = True
    nested: bool = False
    moment: Moment | None = None
    shift: int = 0
    held: bool = False
    dtype: str | None = None
    more: int | None = None

    def __post_init__(self) -> None:
        for what, given, known in (
            ("role", self.role, get_args(Role)),
            ("moment", self.describes, get_args(Moment)),
        ):
            if given not in known:
                text = f"{self.source!r}: expected {what} as one of {known}, got {given!r}"
                raise ValueError(text)
        if self.after == ("next", "reward") and self.role != "reward":
            text = f"{self.source!r}: ('next', 'reward') takes the role 'reward', got {self.role!r}"
            raise ValueError(text)
        if self.describes == "successor" and (self.after is None or self.before is not None):
            raise ValueError(f"{self.source!r}: a successor has the key `after` and no other")

    @property
    def describes(self) -> Moment:
        """The moment that the values describe."""
        return self.moment or _MOMENTS.get(self.role, "state")

    @property
    def sources(self) -> tuple[str, ...]:
        """The paths that must exist: one path, or all paths whose values are joined."""
        return (self.source,) if isinstance(self.source, str) else self.source

    @property
    def name(self) -> str:
        """The name of the source in messages and manifests."""
        return "+".join(self.sources)

    @property
    def is_group(self) -> bool:
        """True if the field takes or may take datasets below a group."""
        return self.nested or (isinstance(self.source, str) and self.source.endswith("/"))

    @property
    def is_end(self) -> bool:
        """True if the field marks the ends of episodes."""
        return self.role in ("terminated", "truncated")

    def covers(self, path: str) -> bool:
        """Return whether a dataset of an episode belongs to this field."""
        if not isinstance(self.source, str):
            return path in self.source
        if self.source.endswith("/"):
            return self.source == "/" or path.startswith(self.source)
        return path == self.source or (self.nested and path.startswith(f"{self.source}/"))

    def shadows(self, later: Field) -> bool:
        """Return whether this field takes all datasets that a later field could take."""
        if not isinstance(self.source, str) or not isinstance(later.source, str):
            return False
        if not self.source.endswith("/") or not later.source.endswith("/"):
            return False
        return self.source != later.source and (
            self.source == "/" or later.source.startswith(self.source)
        )

    def extra(self, alignment: Alignment) -> int:
        """Return the count of records of the datasets minus the count of the clock."""
        if self.more is not None:
            return self.more
        return alignment.extra if self.describes == "state" else 0

    def end_offset(self, alignment: Alignment) -> int:
        """Return ``k`` such that record ``t + k`` has the end flag of row ``t``.

        If the field describes states, record ``t + k`` is the state after the step of row ``t``.
        """
        return self._offset(alignment) + (self.describes == "state")

    def _offset(self, alignment: Alignment) -> int:
        first = {
            "state": 0,
            "action": alignment.action,
            "outcome": alignment.outcome,
            "successor": alignment.action,
        }
        return first[self.describes] + self.shift

    def targets(self, alignment: Alignment, path: str) -> tuple[Target, ...]:
        """Return the columns that one dataset of the field fills."""
        rest: Key = ()
        if isinstance(self.source, str) and path != self.source:
            above = len(self.source.rstrip("/"))
            rest = tuple(path[above + (above > 0) :].split("/"))
        kind, first = self.describes, self._offset(alignment)
        later = 1 if kind == "state" else 0
        found = []
        if self.before is not None:
            found.append(Target((*self.before, *rest), first))
        if self.after is not None:
            is_after = kind in ("state", "successor")
            found.append(Target((*self.after, *rest), first + later, is_after))
        return tuple(found)
