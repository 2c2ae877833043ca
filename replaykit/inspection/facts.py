"""What is known of a path, as plain values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["EpisodeFacts", "Facts", "KeyFacts", "LayoutGuess", "Spread", "to_json"]


@dataclass(frozen=True)
class Spread:
    """Five numbers that say how values are spread; all NaN where there is none.

    Example:
        >>> import numpy as np
        >>> from replaykit.inspection import Spread
        >>> Spread.of(np.array([1, 2, 6]))
        Spread(min=1.0, median=2.0, mean=3.0, max=6.0, total=9.0)
    """

    min: float
    median: float
    mean: float
    max: float
    total: float

    @classmethod
    def of(cls, values: npt.NDArray[Any]) -> Spread:
        """Takes numbers ``[E]``; O(E)."""
        if not values.size:
            return cls(math.nan, math.nan, math.nan, math.nan, 0.0)
        wide = values.astype(np.float64)
        return cls(
            float(wide.min()),
            float(np.median(wide)),
            float(wide.mean()),
            float(wide.max()),
            float(wide.sum()),
        )


@dataclass(frozen=True)
class KeyFacts:
    """A key: what one row of it is, and what its values are.

    Attributes:
        key: its parts with ``/`` between them; of an H5 file the path, with ``*`` for what differs
            between episodes.
        shape: of one row.
        dtype: NumPy's name of it, or what the values are where they are no numbers.
        rows: how many there are.
        statistics: ``min``, ``max``, ``mean``, ``std`` over all numbers that are not NaN, and the
            number of NaNs, ``nan``; ``None`` where there are no numbers.
        looked_at: of how many rows; ``rows`` where the statistics are those of all values.
        source: where it comes from, if from elsewhere.
        note: what is to be known of it.
    """

    key: str
    shape: tuple[int, ...]
    dtype: str
    rows: int
    statistics: Mapping[str, Any] | None = None
    looked_at: int = 0
    source: str | None = None
    note: str | None = None


@dataclass(frozen=True)
class EpisodeFacts:
    """The episodes.

    Attributes:
        lengths: rows of each, ``[E]``.
        ends: why each ended: ``terminated``, ``truncated``, or another word, ``[E]``.
        returns: sum of the rewards of each, float64 ``[E]``; ``None`` where there are none.
        names: where each lies, such as its group; ``None`` where that is not known.
    """

    lengths: npt.NDArray[np.int64]
    ends: tuple[str, ...]
    returns: npt.NDArray[np.float64] | None = None
    names: tuple[str, ...] | None = None

    def __len__(self) -> int:
        return len(self.lengths)

    def end_counts(self) -> dict[str, int]:
        """Returns how many episodes ended for each reason, the most frequent first."""
        found: dict[str, int] = {}
        for end in self.ends:
            found[end] = found.get(end, 0) + 1
        return dict(sorted(found.items(), key=lambda entry: (-entry[1], entry[0])))

    def summary(self) -> dict[str, Any]:
        """Returns counts and spreads, without the single episodes."""
        return {
            "count": len(self),
            "lengths": Spread.of(self.lengths),
            "returns": None if self.returns is None else Spread.of(self.returns),
            "ends": self.end_counts(),
        }

    def records(self, most: int) -> list[dict[str, Any]]:
        """Returns what is known of the first episodes, one entry each."""
        return [
            {
                "name": None if self.names is None else self.names[i],
                "length": int(self.lengths[i]),
                "return": None if self.returns is None else float(self.returns[i]),
                "end": self.ends[i],
            }
            for i in range(min(most, len(self)))
        ]


@dataclass(frozen=True)
class LayoutGuess:
    """Which layout files are of, and why.

    Attributes:
        layout: its name; ``None`` where none fits.
        reasons: why that one.
        refused: why not the others, by name.
        problem: what is wrong with the files though they are of that layout.
    """

    layout: str | None
    reasons: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    problem: str | None = None


@dataclass(frozen=True)
class Facts:
    """What is known of a path.

    Attributes:
        kind: ``corpus``, ``checkpoint``, ``buffer``, ``H5 file`` or ``H5 folder``.
        path: as it was given.
        rows: of the table; ``None`` where there is none.
        nbytes: that the files take.
        about: further facts, by name.
        keys: in the order of the table.
        episodes: ``None`` where nothing is known of them.
        warnings: what a user should know.
        guess: of an H5 file, its layout.
    """

    kind: str
    path: str
    rows: int | None
    nbytes: int
    about: Mapping[str, Any]
    keys: tuple[KeyFacts, ...]
    episodes: EpisodeFacts | None
    warnings: tuple[str, ...] = ()
    guess: LayoutGuess | None = None

    def to_json(self, *, episodes: int = 20) -> dict[str, Any]:
        """Returns JSON values, with no more single episodes than asked for; NaN is ``None``."""
        found = to_json(
            {
                name.name: getattr(self, name.name)
                for name in fields(self)
                if name.name != "episodes"
            }
        )
        assert isinstance(found, dict)
        found["episodes"] = None
        if self.episodes is not None:
            first = to_json(self.episodes.records(episodes))
            found["episodes"] = {**to_json(self.episodes.summary()), "first": first}
        return found


def to_json(value: Any) -> Any:
    """Returns a value as JSON has it: dataclasses as objects, what is not finite as ``None``.

    Example:
        >>> from replaykit.inspection.facts import to_json
        >>> to_json({"a": (1, float("nan"))})
        {'a': [1, None]}
    """
    if is_dataclass(value) and not isinstance(value, type):
        return {entry.name: to_json(getattr(value, entry.name)) for entry in fields(value)}
    if isinstance(value, Mapping):
        return {str(name): to_json(entry) for name, entry in value.items()}
    if isinstance(value, np.ndarray):
        return to_json(value.tolist())
    if isinstance(value, (list, tuple, set, frozenset)):
        return [to_json(entry) for entry in value]
    if isinstance(value, np.generic):
        return to_json(value.item())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return str(value)
