"""Why episodes ended: what the layout says of each, for all episodes of a stretch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from replaykit.datasets.engine.checks import StretchChecks
from replaykit.datasets.engine.layout import Flags, Layout
from replaykit.datasets.engine.places import Notes
from replaykit.datasets.engine.stretch import Stretch
from replaykit.errors import CorpusError
from replaykit.ted import DEFAULT_DONE_KEYS

__all__ = ["EndFlags"]

Marks = npt.NDArray[np.bool_]


class EndFlags:
    """Asks a layout for the flags of episodes.

    Args:
        layout: the one that the files resolved to.
        notes: takes what the layout finds odd.

    Attributes:
        outcomes: by the position of a field of ends, ``k`` where row ``t`` takes its record
            ``t + k``.
    """

    def __init__(self, layout: Layout, notes: Notes) -> None:
        self._layout = layout
        self._notes = notes
        self._names = layout.end_names
        self.outcomes = {
            at: layout.fields[at].end_offset(layout.alignment) for at in layout.end_names
        }
        # What a layout says of its own is asked of it one episode after another.
        self.is_own = type(layout).flags is not Layout.flags

    def of(
        self,
        stretch: Stretch,
        checks: StretchChecks,
        last: Mapping[str, npt.NDArray[Any]],
        condemn: Callable[[int, CorpusError], None],
    ) -> dict[str, Marks]:
        """Returns ``terminated``, ``truncated`` and ``done`` of the last row of each episode.

        Args:
            stretch: the episodes.
            checks: what was seen of them.
            last: the last record ``[E, ...]`` of each required field, where each span is one
                episode.
            condemn: told of an episode, counted from the first of the stretch, that breaks a rule.

        ``done`` is False where an episode was condemned.
        """
        count = len(stretch.at)
        found = {name: np.zeros(count, np.bool_) for name in DEFAULT_DONE_KEYS}
        asked = range(count) if self.is_own else self._by_rule(stretch, checks, found)
        for i in asked:
            mine = {path: records[i : i + 1] for path, records in last.items()}
            try:
                flags = self._ask(stretch, checks, i, mine)
            except CorpusError as error:
                condemn(i, error)
                continue
            found["terminated"][i], found["truncated"][i] = flags.terminated, flags.truncated
            found["done"][i] = True
        return found

    def _ask(
        self, stretch: Stretch, checks: StretchChecks, i: int, last: Mapping[str, npt.NDArray[Any]]
    ) -> Flags:
        episode, place = stretch.episode(i), stretch.place_of_episode(i)
        facts = episode.facts
        if self._layout.is_open and not episode.is_open:
            # The step at which it terminated is not a row.
            facts = replace(facts, terminated=None)
        ends = {self._names[at]: found for at, found in checks.ends_of(i).items()}
        flags = self._layout.flags(ends, last, facts, place, self._notes)
        if not (flags.terminated or flags.truncated):
            raise place.error("the episode does not end at its last row", "V31")
        return flags

    def _by_rule(
        self, stretch: Stretch, checks: StretchChecks, found: dict[str, Marks]
    ) -> Sequence[int]:
        """Fills in what `Layout.flags` says; returns the episodes that it refuses."""
        at, layout = stretch.at, self._layout
        said = {
            # What is known of them besides their arrays.
            "terminated": (stretch.column("terminated") == 1)
            & (at.is_open if layout.is_open else True),
            "truncated": np.zeros(len(at.bases), np.bool_),
        }
        refused = np.zeros(len(at.bases), np.bool_)
        for field, (first, last) in checks.ends.items():
            entry = layout.fields[field]
            if not entry.held:
                refused |= first < checks.finals(field)
            said[entry.role] |= last
        found["terminated"][:] = said["terminated"] & ~refused
        found["truncated"][:] = (said["truncated"] | ~said["terminated"]) & ~refused
        found["done"][:] = ~refused
        return [int(i) for i in np.flatnonzero(refused)]
