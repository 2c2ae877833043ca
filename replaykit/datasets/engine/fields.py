"""Declare how source datasets become columns, and decode images and text."""

from __future__ import annotations

import io
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, Protocol, get_args

import numpy as np
import numpy.typing as npt

from replaykit.datasets.engine.h5 import H5File, H5Leaf
from replaykit.errors import CorpusError
from replaykit.ted import Key

__all__ = [
    "ALIGNMENTS",
    "ARRIVALS",
    "FINAL_STATE",
    "STATE_RECORDS",
    "STEPS",
    "Alignment",
    "Decoder",
    "Field",
    "Images",
    "Moment",
    "Preceded",
    "Role",
    "Target",
    "Text",
    "image_module",
]


class Decoder(Protocol):
    """Makes numbers of what a dataset stores."""

    def declare(self, leaf: H5Leaf) -> H5Leaf:
        """Returns the leaf as it is after decoding: shape, dtype, and no problem."""

    def read(self, file: H5File, dataset: str, start: int, stop: int) -> npt.NDArray[Any]:
        """Returns decoded entries ``start .. stop - 1``.

        Raises:
            CorpusError: an entry cannot be decoded; names file, dataset and entry.
        """


def image_module() -> Any:
    """Returns ``PIL.Image``.

    Raises:
        ImportError: Pillow is not installed; says how to.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError(
            "reading encoded images needs Pillow, which is not installed: "
            "`pip install 'replaykit[images]'`"
        ) from error
    return Image


@dataclass(frozen=True)
class Images:
    """Encoded images of one size, such as JPEG bytes, as pixels ``uint8 [H, W, C]``.

    An entry is a string of bytes of varying length, or a row of bytes padded with zeros.

    Args:
        shape: height, width and channels of every image.
    """

    shape: tuple[int, ...]

    def declare(self, leaf: H5Leaf) -> H5Leaf:
        return replace(leaf, shape=(*leaf.shape[:1], *self.shape), dtype=np.uint8, problem=None)

    def read(self, file: H5File, dataset: str, start: int, stop: int) -> npt.NDArray[Any]:
        Image = image_module()
        found = np.empty((stop - start, *self.shape), np.uint8)
        for at, entry in enumerate(file.entries(dataset, start, stop)):
            try:
                with Image.open(io.BytesIO(np.asarray(entry, np.uint8).tobytes())) as image:
                    pixels = np.asarray(image)
            except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
                raise CorpusError(
                    f"{file.path}: {dataset}, record {start + at}: is not an image that can be "
                    f"decoded ({error}) [V03]"
                ) from error
            if pixels.ndim == 2 and self.shape[2:] == (1,):
                pixels = pixels[:, :, None]
            if pixels.shape != self.shape or pixels.dtype != np.uint8:
                raise CorpusError(
                    f"{file.path}: {dataset}, record {start + at}: is an image of shape "
                    f"{list(pixels.shape)}, expected {list(self.shape)} [V10]"
                )
            found[at] = pixels
        return found


@dataclass(frozen=True)
class Text:
    """Text as its UTF-8 bytes ``uint8 [width]``, padded with zeros.

    Args:
        width: the longest text in bytes.
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
    """Numbers whose first record is stored apart from the others.

    Args:
        part: the part of the path that the others are below.
        first: what it is where the first record is; a dataset of one record.
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
"""What a field means, and so what is checked.

``observation``, ``reward``: finite (V21). ``action``: finite where it is stored (V20).
``terminated``, ``truncated``: any number, non-zero where the episode has ended; `Layout.flags`
makes the flags of it. ``time``: should increase strictly (V27). ``info``: carried, nothing is
required of it.
"""

Moment = Literal["state", "action", "outcome", "successor"]
"""What a field describes, and so which record a row takes; see the module's text."""

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
    """Which records row ``t`` takes; see `ALIGNMENTS` for the known ones.

    It starts from state ``t`` and arrives at state ``t + 1``.

    Attributes:
        name: is kept in the manifest.
        extra: how many more states than records of the clock an episode has: 1 where the state
            after the last action is stored with the others, else 0.
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
"""A record is a state, with its reward and flags and the action chosen in it: T - 1 rows."""
FINAL_STATE: Final = Alignment("final-state", extra=1)
"""T actions and outcomes, T + 1 states: T rows."""
STEPS: Final = Alignment("steps")
"""A record is a step: a state, its action, its outcome. With a successor T rows; without one the
state after the last step is unknown, and that row is dropped or marked, see `Policies`."""
ARRIVALS: Final = Alignment("arrivals", action=1, outcome=1)
"""A record is a state and the action that led to it, with its outcome: T - 1 rows."""

ALIGNMENTS: Final = {rule.name: rule for rule in (STATE_RECORDS, FINAL_STATE, STEPS, ARRIVALS)}
"""The known alignments by name."""


@dataclass(frozen=True)
class Target:
    """A column that a leaf fills: row ``t`` of an episode takes its record ``t + offset``.

    ``is_after``: it is the state that the row arrives at.
    """

    key: Key
    offset: int
    is_after: bool = False


@dataclass(frozen=True)
class Field:
    """One line of a layout: from a dataset of an episode to columns of the table.

    Args:
        source: path of the dataset in its episode. With a closing ``/``: all datasets below that
            group, whose paths are appended to the keys; ``"/"`` stands for all datasets that no
            field before it takes. Several paths: their values side by side, one dimension a
            record.
        role: see `Role`.
        before: key that takes the state a row starts from, or the action, if any.
        after: key that takes the state a row arrives at, or the outcome, if any.
        column: whether a scalar per record is stored as ``[N, 1]`` and not as ``[N]``. Rewards
            and the flags of the engine are ``[N, 1]`` in any case.
        required: whether every episode must have it, with one shape and dtype. A leaf of a field
            that is not required is left out when some episode lacks it or has it differently.
        nested: the source may also be a group, which then stands for all datasets below it.
        moment: what it describes, where that does not follow from the role; see `Moment`.
        shift: how many records later than the alignment says.
        held: for ends: may also be set before the last row, where it means nothing.
        dtype: NumPy name of the dtype to store, where that is not the source's; ``"bool"`` stands
            for "is not zero".
        more: how many more records than the clock its datasets have, where that is not what the
            alignment says of states.

    Raises:
        ValueError: a role or moment that is none; a successor without ``after``; the key of the
            reward for something else.

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
        """What the values describe."""
        return self.moment or _MOMENTS.get(self.role, "state")

    @property
    def sources(self) -> tuple[str, ...]:
        """The paths that must be there: one, or those whose values stand side by side."""
        return (self.source,) if isinstance(self.source, str) else self.source

    @property
    def name(self) -> str:
        """The source as messages and manifests have it."""
        return "+".join(self.sources)

    @property
    def is_group(self) -> bool:
        """Whether the field stands for datasets below a group, or may do so."""
        return self.nested or (isinstance(self.source, str) and self.source.endswith("/"))

    @property
    def is_end(self) -> bool:
        """Whether it says where episodes end."""
        return self.role in ("terminated", "truncated")

    def covers(self, path: str) -> bool:
        """Whether a dataset of an episode belongs to this field."""
        if not isinstance(self.source, str):
            return path in self.source
        if self.source.endswith("/"):
            return self.source == "/" or path.startswith(self.source)
        return path == self.source or (self.nested and path.startswith(f"{self.source}/"))

    def shadows(self, later: Field) -> bool:
        """Whether a field after this one gets nothing: what is below its group is this one's."""
        if not isinstance(self.source, str) or not isinstance(later.source, str):
            return False
        if not self.source.endswith("/") or not later.source.endswith("/"):
            return False
        return self.source != later.source and (
            self.source == "/" or later.source.startswith(self.source)
        )

    def extra(self, alignment: Alignment) -> int:
        """How many more records than the clock the datasets of the field have."""
        if self.more is not None:
            return self.more
        return alignment.extra if self.describes == "state" else 0

    def end_offset(self, alignment: Alignment) -> int:
        """Returns ``k`` where row ``t`` takes record ``t + k`` to tell whether it is an end.

        Of states that is the one that the row arrives at.
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
        """Returns the columns that one dataset of the field fills."""
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
