"""What is checked and counted on the way through a span."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from replaykit.datasets.engine.layout import Ends
from replaykit.datasets.engine.places import Notes, Place
from replaykit.datasets.engine.plan import Episode, PlannedLeaf
from replaykit.datasets.engine.runs import Runs
from replaykit.errors import CorpusError

__all__ = ["Judge", "SpanChecks"]

_NEVER: Final = np.iinfo(np.int64).max


class Judge:
    """Decides what becomes of an episode that breaks a rule; see `Policies.on_invalid`.

    Attributes:
        bad: why each episode is to be left out, by position.
    """

    def __init__(self, on_invalid: str, notes: Notes) -> None:
        self.bad: dict[int, str] = {}
        self.notes = notes
        self._on_invalid = on_invalid

    @property
    def skips(self) -> bool:
        """Whether bad episodes are left out."""
        return self._on_invalid == "skip"

    def condemn(self, position: int, error: CorpusError) -> None:
        """Notes that an episode cannot be rows.

        Raises:
            CorpusError: the one given, unless bad episodes are left out.
        """
        if not self.skips:
            raise error
        self.bad.setdefault(position, str(error))

    def fail(self, position: int, place: Place, what: str, rule: str) -> None:
        """Notes that values of an episode break a rule.

        Raises:
            CorpusError: if that stops the conversion.
        """
        if self._on_invalid == "keep":
            self.notes.add(rule, f"{what}, and is kept", place)
        else:
            self.condemn(position, place.error(what, rule))


class SpanChecks:
    """What is seen of the episodes of one span, a block of one leaf at a time."""

    def __init__(
        self, episodes: Sequence[Episode], first: int, records: int, place: Place, judge: Judge
    ) -> None:
        self.reward = [0.0] * len(episodes)
        self._digests = [hashlib.sha256() for _ in episodes]
        self._episodes = episodes
        self._first = first
        self._records = records
        self._bases = np.array([episode.base for episode in episodes], np.int64)
        self._stops = np.array([e.base + e.records for e in episodes], np.int64)
        self._ends: dict[str, tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]] = {}
        self._place = place
        self._judge = judge
        self._clock: npt.NDArray[Any] | None = None

    def take(
        self, leaf: PlannedLeaf, start: int, block: npt.NDArray[Any], runs: Runs | None
    ) -> None:
        """Checks one block of one leaf by its role; ``runs`` are the records that are stored."""
        if leaf.role == "observation":
            self._require_finite(leaf, start, block, "V21", None)
            if not leaf.is_successor:
                self._digest(start, block, leaf.extra)
        elif leaf.role == "action":
            # What leads nowhere is not stored, and may be anything; so may what is left out.
            if runs is not None:
                self._require_finite(leaf, start, block, "V20", runs)
            self._digest(start, block, leaf.extra)
        elif leaf.role == "reward":
            self._require_finite(leaf, start, block, "V21", runs)
            if runs is not None:
                self._sum(start, block, runs)
        elif leaf.role in ("terminated", "truncated"):
            self._require_finite(leaf, start, block, "V30", None)
            self._note_ends(leaf, start, block)
        elif leaf.role == "time":
            self._require_progress(leaf, start, block)

    def ends(self, position: int, wanted: Mapping[str, int]) -> dict[str, Ends]:
        """Returns where fields of ends were set in an episode, after all of them were taken.

        Args:
            position: of the episode in the span.
            wanted: the offsets of the outcomes by field.
        """
        episode = self._episodes[position]
        found = {}
        for name, (first, last) in self._ends.items():
            # The record that the last row takes is the last one, unless that row was dropped.
            if episode.rows + wanted[name] != episode.records:
                continue
            at = int(first[position])
            first_set = None if at == _NEVER else at - episode.base
            found[name] = Ends(episode.records, first_set, bool(last[position]))
        return found

    def digest(self, position: int) -> bytes:
        """Returns the SHA-256 of the observations and actions of an episode."""
        return self._digests[position].digest()

    def _within(self, start: int, stop: int, extra: int) -> range:
        first = np.searchsorted(self._stops + extra, start, "right")
        last = np.searchsorted(self._bases, stop, "left")
        return range(int(first), int(last))

    def _digest(self, start: int, block: npt.NDArray[Any], extra: int) -> None:
        stop = start + len(block)
        for i in self._within(start, stop, extra):
            begin = max(start, int(self._bases[i]))
            end = min(stop, int(self._stops[i]) + extra)
            self._digests[i].update(_bytes(block[begin - start : end - start]))

    def _sum(self, start: int, block: npt.NDArray[Any], runs: Runs) -> None:
        flat = block.reshape(len(block))
        for row, record, count in runs.within(start, start + len(block)):
            # A run may go through several episodes, without a gap.
            while count:
                i = self._episode_of_row(row)
                episode = self._episodes[i]
                part = min(count, episode.start + episode.rows - row)
                values = flat[record - start : record - start + part]
                self.reward[i] += float(values.sum(dtype=np.float64))
                row, record, count = row + part, record + part, count - part

    def _episode_of_row(self, row: int) -> int:
        if len(self._episodes) == 1:
            return 0
        starts = self._starts
        return int(np.searchsorted(starts, row, "right")) - 1

    @property
    def _starts(self) -> npt.NDArray[np.int64]:
        if not hasattr(self, "_known_starts"):
            self._known_starts = np.array([e.start for e in self._episodes], np.int64)
        return self._known_starts

    def _episode_of_record(self, record: int) -> int:
        return min(int(np.searchsorted(self._stops, record, "right")), len(self._stops) - 1)

    def _require_finite(
        self, leaf: PlannedLeaf, start: int, block: npt.NDArray[Any], rule: str, runs: Runs | None
    ) -> None:
        if block.dtype.kind not in "fc" or not block.size or np.isfinite(block).all():
            return
        good = np.isfinite(block).reshape(len(block), -1).all(axis=1)
        if runs is not None:
            stored = np.zeros(len(block), np.bool_)
            for _, record, count in runs.within(start, start + len(block)):
                stored[record - start : record - start + count] = True
            good |= ~stored
        seen = -1
        for at in np.flatnonzero(~good).tolist():
            i = self._episode_of_record(start + at)
            # Records of episodes that were left out belong to none of these.
            inside = self._bases[i] <= start + at < self._stops[i] + leaf.extra
            if i == seen or not inside:
                continue
            seen = i
            place = self._place.at(key=leaf.path, record=start + at)
            self._judge.fail(self._first + i, place, f"the {leaf.role} holds NaN or infinity", rule)

    def _note_ends(self, leaf: PlannedLeaf, start: int, block: npt.NDArray[Any]) -> None:
        if leaf.path not in self._ends:
            count = len(self._episodes)
            self._ends[leaf.path] = (np.full(count, _NEVER), np.zeros(count, np.bool_))
        first, last = self._ends[leaf.path]
        records = start + np.flatnonzero(block.reshape(len(block)))
        episodes = np.searchsorted(self._stops, records, "right")
        # Records of episodes that were left out belong to none of these.
        known = episodes < len(self._stops)
        records, episodes = records[known], episodes[known]
        inside = records >= self._bases[episodes]
        records, episodes = records[inside], episodes[inside]
        np.minimum.at(first, episodes, records)
        last[episodes[records == self._stops[episodes] - 1]] = True

    def _require_progress(self, leaf: PlannedLeaf, start: int, block: npt.NDArray[Any]) -> None:
        if block.dtype.kind not in "iuf" or not block.size:
            return
        known = 0 if self._clock is None else 1
        times = block if self._clock is None else np.concatenate([self._clock, block])
        if len(times) > 1:
            grows = (times[1:] > times[:-1]).reshape(len(times) - 1, -1).all(axis=1)
            records = start - known + 1 + np.flatnonzero(~grows)
            # Time may begin anew where an episode does.
            for i in np.unique(np.searchsorted(self._stops, records, "right")).tolist():
                inside = records[np.searchsorted(self._stops, records, "right") == i]
                inside = inside[inside != self._bases[min(i, len(self._bases) - 1)]]
                if inside.size:
                    at = self._place.at(key=leaf.path, record=int(inside[0]))
                    text = f"{leaf.path} does not increase strictly"
                    self._judge.notes.add("V27", text, at)
        self._clock = block[-1:]


def _bytes(block: npt.NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(block).reshape(-1).view(np.uint8).data
