"""Trajectories of other libraries as a table source."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from replaykit.datasets.engine.layout import ALWAYS
from replaykit.datasets.engine.locations import Location
from replaykit.datasets.engine.policies import Judge, Policies
from replaykit.datasets.engine.table_sources import (
    Array,
    SourceColumn,
    TableEpisodes,
    TableLayout,
    TableSource,
)
from replaykit.datasets.sources import Sources
from replaykit.feeds.trajectory_sources import TrajectorySource
from replaykit.ted import TERMINATED, TRUNCATED, Key

_MADE: Final = frozenset(ALWAYS) - {TERMINATED, TRUNCATED}
"""Keys that the writer makes, so those of the trajectories are left out."""


def _columns_of(rows: Any) -> dict[Key, Array]:
    """Return the columns of a trajectory, as NumPy arrays ``[n, ...]``."""
    found = {}
    for key in rows.keys(True, True):
        path = (key,) if isinstance(key, str) else tuple(key)
        if path not in _MADE:
            found[path] = rows[key].numpy()
    return dict(sorted(found.items()))


def content_of(source: TrajectorySource) -> str:
    """Return the SHA-256 of all rows of a source. Cost: every row is read once."""
    digest = hashlib.sha256()
    for number in range(len(source)):
        for key, values in _columns_of(source.load(number)).items():
            digest.update(f"{key}{values.dtype}{values.shape}".encode())
            digest.update(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


@dataclass(frozen=True, kw_only=True)
class TrajectoryLayout(TableLayout):
    """The layout of a `TrajectorySource`, which a conversion reads instead of files."""

    name: str = "trajectories"
    version: int = 1
    has_files: ClassVar[bool] = False
    source: TrajectorySource

    def open(self, sources: Sources, policies: Policies, judge: Judge) -> TableSource:
        return _TrajectoryTable(self.source, judge)


class _TrajectoryTable:
    """The trajectories of a source, whose first one declares the columns."""

    left_out: Sequence[Mapping[str, str]] = ()
    attached: Mapping[str, Path] = {}
    splits: Mapping[str, Sequence[int]] = {}

    def __init__(self, source: TrajectorySource, judge: Judge) -> None:
        self._source = source
        count = len(source)
        self._name = type(source).__name__
        self.facts = {"source": self._name}
        lengths = np.array([source.length(number) for number in range(count)], np.int64)
        names = [f"trajectory_{number}" for number in range(count)]
        self.episodes = TableEpisodes(lengths, np.arange(count), names)
        first = next((each for each in range(count) if lengths[each]), None)
        rows = {} if first is None else _columns_of(source.load(first, stop=1))
        self.columns = [
            SourceColumn(key, values.shape[1:], values.dtype, "/".join(key))
            for key, values in rows.items()
        ]

    def location(self, position: int) -> Location:
        return Location(Path(self._name), self._name, self.episodes.names[position])

    def blocks(
        self, kept: npt.NDArray[np.bool_], keys: Sequence[Key], block_bytes: int
    ) -> Iterator[Mapping[Key, Array]]:
        for number in np.flatnonzero(kept).tolist():
            found = _columns_of(self._source.load(number))
            if found.keys() != {column.key for column in self.columns}:
                names = ["/".join(key) for key in found]
                raise self.location(number).error(f"has the other columns {names}", "V12")
            yield {key: found[key] for key in keys}
