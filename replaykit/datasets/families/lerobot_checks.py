"""The rules of LeRobot's data sets, checked on the frames of one Parquet file at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from replaykit.datasets.engine.locations import Location
from replaykit.datasets.engine.policies import Judge
from replaykit.datasets.families.lerobot_files import Feature, LeRobotSet

TOLERANCE: Final = 1e-4
"""Seconds by which a timestamp may differ from its frame, as in LeRobot."""

_QUIET: Final = np.errstate(invalid="ignore", over="ignore")
"""Infinite numbers are compared as they are, because other rules refuse them."""

_GROUP: Final = 1 << 17
"""Numbers of episodes that are measured together, so that copies stay in the cache."""

Array = npt.NDArray[Any]


def drift_limit(seconds: Array) -> Array:
    """Return the allowed differences of float32 timestamps, in seconds."""
    return TOLERANCE + np.spacing(np.abs(seconds).astype(np.float32)).astype(np.float64)


class LeRobotChecks:
    """The frames of one file, and the episodes that the metadata places in it.

    Attributes:
        starts: the first frame of each episode in the file, int64 ``[e]``.
        positions: the positions of the episodes whose frames can be used.
    """

    def __init__(
        self,
        of: LeRobotSet,
        judge: Judge,
        locate: Callable[[int], Location],
        name: str,
        positions: Sequence[int],
        index: Mapping[str, Array],
    ) -> None:
        self._set, self._judge, self._locate, self._index = of, judge, locate, index
        self._path = of.path(name)
        self._find(name, list(positions))
        if not self.positions:
            return
        lengths = of.lengths[self.positions]
        ends = lengths.cumsum()
        self._rows = np.repeat(self.starts - (ends - lengths), lengths) + np.arange(ends[-1])
        self._at = np.repeat(np.arange(len(lengths)), lengths)
        self._frame = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
        self._check_counters()
        self._check_times()
        self._check_tasks()

    def _find(self, name: str, positions: list[int]) -> None:
        """Find the runs of frames of one episode, and compare them with the metadata."""
        of = self._set
        numbers = self._index["episode_index"]
        cuts = np.flatnonzero(np.diff(numbers)) + 1
        firsts = np.concatenate([[0], cuts]) if len(numbers) else cuts
        stops = np.append(cuts, len(numbers)) if len(numbers) else cuts
        runs: dict[int, tuple[int, int]] = {}
        apart = set()
        for number, first, stop in zip(
            numbers[firsts].tolist(), firsts.tolist(), stops.tolist(), strict=True
        ):
            if number in runs:
                apart.add(number)
            runs[number] = (first, stop)
        starts = []
        self.positions: list[int] = []
        for position in positions:
            number, length = int(of.numbers[position]), int(of.lengths[position])
            run = runs.pop(number, None)
            if number in apart:
                self._fail(position, f"its frames lie apart in {name}", "V71")
            elif run is None:
                found = np.unique(numbers)[:3].tolist()
                what = f"{name} has none of its frames, but frames of the episodes {found}"
                self._fail(position, what, "V71")
            elif run[1] - run[0] != length:
                what = f"the metadata gives it {length} frames, {name} has {run[1] - run[0]}"
                self._fail(position, what, "V70")
            else:
                self.positions.append(position)
                starts.append(run[0])
        if runs:
            number = next(iter(runs))
            what = (
                f"{name} holds frames of episode {number}, which the metadata does not place in it"
            )
            for position in self.positions or positions[:1]:
                self._fail(position, what, "V71")
            self.positions, starts = [], []
        self.starts = np.array(starts, np.int64)

    def _fail(self, position: int, what: str, rule: str, record: int | None = None) -> None:
        where = self._locate(position).at(record=record)
        self._judge.condemn(position, where.error(what, rule))

    def _fail_frames(
        self, wrong: npt.NDArray[np.bool_], what: Callable[[int], str], rule: str
    ) -> None:
        """Report the first wrong frame of each episode."""
        if not wrong.any():
            return
        at = np.flatnonzero(wrong)
        for episode, first in zip(*np.unique(self._at[at], return_index=True), strict=True):
            row = int(at[first])
            self._fail(self.positions[int(episode)], what(row), rule, int(self._frame[row]))

    def _check_counters(self) -> None:
        firsts = self._set.firsts[self.positions]
        for name, expected in (
            ("frame_index", self._frame),
            ("index", firsts[self._at] + self._frame),
        ):
            found = self._index[name][self._rows]
            self._fail_frames(
                found != expected,
                lambda row, found=found, expected=expected, name=name: (  # type: ignore[misc]
                    f"{name} is {int(found[row])}, expected {int(expected[row])}"
                ),
                "V71",
            )

    def _check_times(self) -> None:
        expected = self._frame / self._set.fps
        found = self._index["timestamp"][self._rows].astype(np.float64)
        drift = found - expected
        wrong = ~(np.abs(drift) <= drift_limit(expected))
        self._fail_frames(
            wrong,
            lambda row: (
                f"the timestamp {found[row]:.6f} s is {drift[row]:+.6f} s from frame_index / fps, "
                f"{expected[row]:.6f} s"
            ),
            "V72",
        )

    def _check_tasks(self) -> None:
        of, tasks = self._set, self._index["task_index"][self._rows]
        known = np.array(sorted(of.task_names), np.int64)
        wrong = ~np.isin(tasks, known)
        self._fail_frames(
            wrong, lambda row: f"task_index is {int(tasks[row])}, which is not a known task", "V75"
        )
        # Most episodes have one task, so that few frames begin another pair.
        begins = np.ones(len(tasks), bool)
        begins[1:] = (self._at[1:] != self._at[:-1]) | (tasks[1:] != tasks[:-1])
        pairs = np.stack([self._at[begins], tasks[begins]], 1)
        own: dict[int, set[str]] = {}
        for episode, task in pairs.tolist():
            own.setdefault(episode, set()).add(of.task_names.get(task, ""))
        for episode, texts in own.items():
            position = self.positions[episode]
            said = of.tasks[position]
            if said is not None and set(said) != texts and "" not in texts:
                what = f"the metadata lists the tasks {said}, its frames have {sorted(texts)}"
                self._fail(position, what, "V75")


@dataclass
class EpisodeMoments:
    """Statistics of each episode in a file, ``[e, *shape]`` each, by name."""

    least: Array
    largest: Array
    mean: Array
    std: Array
    counts: Array

    @classmethod
    @_QUIET
    def of(cls, values: Array, starts: Array, lengths: Array) -> EpisodeMoments:
        """Return the statistics of runs of rows, of which none is empty.

        Cost: about seven passes over the values, of which all but the first are in the processor's
        cache if episodes are short. Memory: a few MiB, or three times the longest run.
        """
        groups = (lengths.cumsum() - 1) * (values[:1].size or 1) // _GROUP
        cuts = np.flatnonzero(np.diff(groups)) + 1
        each = zip(np.split(starts, cuts), np.split(lengths, cuts), strict=True)
        return cls._concatenated([cls._of_group(values, *runs) for runs in each])

    @classmethod
    def _of_group(cls, values: Array, starts: Array, lengths: Array) -> EpisodeMoments:
        stops, shape = starts + lengths, values.shape[1:]
        parts = [values[first:stop] for first, stop in zip(starts, stops, strict=True)]
        if np.array_equal(starts[1:], stops[:-1]):
            parts = [values[starts[0] : stops[-1]]]
        flat = parts[0] if len(parts) == 1 else np.concatenate(parts)
        # Sums along contiguous rows take a tenth of the time of sums along columns.
        wide = np.ascontiguousarray(flat.reshape(len(flat), -1).T)
        cuts, exact = lengths.cumsum() - lengths, wide.astype(np.float64)
        base = exact[:, :1].copy()
        exact -= base  # differences of squares lose the digits of a large common offset
        mean = np.add.reduceat(exact, cuts, 1) / lengths
        np.square(exact, out=exact)
        square = np.add.reduceat(exact, cuts, 1) / lengths
        found = (
            np.minimum.reduceat(wide, cuts, 1),
            np.maximum.reduceat(wide, cuts, 1),
            mean + base,
            np.sqrt(np.maximum(square - np.square(mean), 0)),
        )
        least, largest, mean, std = (each.T.reshape(len(lengths), *shape) for each in found)
        return cls(least, largest, mean, std, lengths)

    @classmethod
    def _concatenated(cls, parts: Sequence[EpisodeMoments]) -> EpisodeMoments:
        names = ("least", "largest", "mean", "std", "counts")
        return cls(*(np.concatenate([getattr(one, name) for one in parts]) for name in names))

    @classmethod
    def together(cls, parts: Sequence[EpisodeMoments]) -> EpisodeMoments:
        """Return the statistics of the episodes of several files, as those of one episode."""
        return cls._concatenated(parts).joined()

    @_QUIET
    def joined(self) -> EpisodeMoments:
        """Return the statistics of all episodes together, as those of one."""
        total = self.counts.sum()
        wide = self.counts.reshape(-1, *[1] * (self.mean.ndim - 1))
        mean = (self.mean * wide).sum(0) / total
        square = (np.square(self.std) * wide + np.square(self.mean - mean) * wide).sum(0) / total
        least, largest = self.least.min(0)[None], self.largest.max(0)[None]
        std = np.asarray(np.sqrt(square))[None]
        return EpisodeMoments(least, largest, np.asarray(mean)[None], std, total[None])

    @_QUIET
    def differing(self, said: Mapping[str, Any], feature: Feature) -> dict[int, str]:
        """Return how stated statistics of a feature differ from its frames, by episode.

        Args:
            said: for each statistic, the stated value of each episode, or None.
            feature: the feature.

        LeRobot computes means and deviations in float32, so they may differ in the last digits.
        """
        shape = (len(self.counts), -1)
        least, largest, mean, std = (
            values.reshape(shape).astype(np.float64)
            for values in (self.least, self.largest, self.mean, self.std)
        )
        scale, spread = np.maximum(np.abs(least), np.abs(largest)), largest - least
        found: dict[int, str] = {}
        for name, real, limit in (
            ("min", least, 1e-6 * scale),
            ("max", largest, 1e-6 * scale),
            ("mean", mean, 1e-4 * spread + 1e-5 * scale),
            ("std", std, 1e-3 * spread + 1e-3 * scale),
            ("count", self.counts.reshape(shape).astype(np.float64), np.zeros((1, 1))),
        ):
            if name not in said:
                continue
            wrong, stated = _apart(said[name], real, limit)
            for at in np.flatnonzero(wrong.any(1)).tolist():
                number = int(np.argmax(wrong[at]))
                value = "malformed" if stated is None else f"stated as {stated[at, number]:.6g}"
                found.setdefault(
                    at,
                    f"{name} of {feature.name} is {value}, its frames have {real[at, number]:.6g}",
                )
        return found


def _apart(said: Any, real: Array, limit: Array) -> tuple[npt.NDArray[np.bool_], Array | None]:
    """Return which stated numbers differ from the real ones, and the stated ones ``[e, n]``."""
    stated = real.copy()
    try:
        if isinstance(said, np.ndarray):
            stated[:] = said.reshape(len(said), -1)
        else:
            known = [at for at, value in enumerate(said) if value is not None]
            rows = np.array([said[at] for at in known], np.float64)
            stated[known] = rows.reshape(len(known), -1)
    except (TypeError, ValueError):
        if len(said) == 1:
            return np.ones_like(real, bool), None
        limits = np.broadcast_to(limit, real.shape)
        each = [_apart([one], real[[at]], limits[[at]]) for at, one in enumerate(said)]
        return np.concatenate([wrong for wrong, _ in each]), None
    return ~(np.abs(stated - real) <= limit + 1e-12), stated
