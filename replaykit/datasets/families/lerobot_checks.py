"""The rules of LeRobot's data sets, and repairs of their metadata from frames."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from replaykit.datasets.engine.locations import Location
from replaykit.datasets.engine.policies import Judge
from replaykit.datasets.families.lerobot_files import (
    INFO,
    V3,
    Feature,
    LeRobotSet,
    arrow,
    episode_files,
    file_errors,
    file_name,
    json_lines,
    json_object,
    read_info,
    values_of,
)
from replaykit.datasets.sources import files_below
from replaykit.errors import CorpusError
from replaykit.filesystem import sync_tree

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


def _runs_of(numbers: Array) -> Iterator[tuple[int, int, int]]:
    """Yield the number, the first row and the end of each run of equal numbers."""
    cuts = (np.flatnonzero(np.diff(numbers)) + 1).tolist()
    for first, stop in pairwise([0, *cuts, len(numbers)]):
        if first < stop:
            yield int(numbers[first]), first, stop


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
        self._rows: Any = slice(self.starts[0], self.starts[0] + ends[-1])  # needs no copies
        if not np.array_equal(self.starts - self.starts[0], ends - lengths):
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
        runs: dict[int, tuple[int, int]] = {}
        apart = set()
        for number, first, stop in _runs_of(numbers):
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


_EPISODES: Final = "meta/episodes.jsonl"
_STATS: Final = "meta/episodes_stats.jsonl"
_TOTAL_STATS: Final = "meta/stats.json"


class Repair:
    """The corrected metadata of a data set, in memory until it is published.

    Attributes:
        changes: one text for each corrected entry.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.changes: list[str] = []
        self._files: dict[str, Any] = {}
        self._paths = {
            path.relative_to(folder).as_posix(): path for path in files_below(folder / "meta", ())
        }
        self._info, features, _ = read_info(self._paths)
        self._is_v3 = self._info["codebase_version"] == V3
        self._fps = float(self._info["fps"])
        self._features = [each for each in features if not each.is_encoded]
        self._videos = [each.name for each in features if each.dtype == "video"]
        self._frames = _Frames(folder, self._features)
        (self._repair_v3 if self._is_v3 else self._repair_v2)()
        self._repair_totals()

    def _set(self, file: str, entry: dict[str, Any], name: str, value: Any, of: str = "") -> None:
        if entry.get(name) != value:
            self.changes.append(f"{file}: {of}{name} is {value}, not {entry.get(name)}")
            entry[name] = value

    # -- episodes ---------------------------------------------------------------------------------

    def _repair_v2(self) -> None:
        entries = json_lines(self._paths, _EPISODES)
        with file_errors(self._paths[_EPISODES]):
            for entry in entries:
                number = entry["episode_index"]
                chunk = number // self._info["chunks_size"]
                place = {"episode_chunk": chunk, "episode_index": number}
                run = self._frames.run(file_name(self._info, "data_path", **place), number)
                self._set(_EPISODES, entry, "length", run[1] - run[0], f"episode {number}: ")
        self._put_lines(_EPISODES, entries)
        if _STATS in self._paths:
            said = json_lines(self._paths, _STATS)
            with file_errors(self._paths[_STATS]):
                for entry in said:
                    number = entry["episode_index"]
                    real = self._frames.moments.get(number, {})
                    self._repair_stats(_STATS, entry["stats"], real, number)
            self._put_lines(_STATS, said)
        self._count, self._total = len(entries), sum(entry["length"] for entry in entries)

    def _repair_v3(self) -> None:
        import pyarrow

        self._count = self._total = 0
        at: dict[tuple[str, int, int], int] = {}
        for name in episode_files(self._paths):
            with file_errors(path := self._paths[name]):
                with arrow().ParquetFile(path) as file:
                    table = file.read()
                entries = table.to_pylist()
                before = len(self.changes)
                for entry in entries:
                    self._repair_episode(name, entry, at)
                    self._count += 1
                    self._total += entry["length"]
            if len(self.changes) > before:
                self._files[name] = pyarrow.Table.from_pylist(entries, schema=table.schema)

    def _repair_episode(
        self, name: str, entry: dict[str, Any], at: dict[tuple[str, int, int], int]
    ) -> None:
        number = entry["episode_index"]
        place = {part: entry[f"data/{part}"] for part in ("chunk_index", "file_index")}
        first, stop = self._frames.run(file_name(self._info, "data_path", **place), number)
        length, index = stop - first, self._frames.firsts[number]
        of = f"episode {number}: "
        self._set(name, entry, "length", length, of)
        self._set(name, entry, "dataset_from_index", index, of)
        self._set(name, entry, "dataset_to_index", index + length, of)
        for video in self._videos:
            key = f"videos/{video}"
            file = (video, entry[f"{key}/chunk_index"], entry[f"{key}/file_index"])
            begin = at.get(file, 0)
            at[file] = begin + length
            for part, frames in (("from", begin), ("to", begin + length)):
                seconds = frames / self._fps
                if abs(entry[f"{key}/{part}_timestamp"] - seconds) > 0.5 / self._fps:
                    self._set(name, entry, f"{key}/{part}_timestamp", seconds, of)
        stats: dict[str, dict[str, Any]] = {}
        for column, value in entry.items():
            kind, _, rest = column.partition("/")
            if kind == "stats":
                feature, _, part = rest.rpartition("/")
                stats.setdefault(feature, {})[part] = value
        self._repair_stats(name, stats, self._frames.moments[number], number)
        for feature, parts in stats.items():
            entry |= {f"stats/{feature}/{part}": value for part, value in parts.items()}

    # -- statistics and totals --------------------------------------------------------------------

    def _repair_stats(
        self,
        file: str,
        said: Mapping[str, Any],
        real: Mapping[str, EpisodeMoments],
        number: int | None = None,
    ) -> None:
        for feature in self._features:
            entry, moments = said.get(feature.name), real.get(feature.name)
            if not isinstance(entry, dict) or moments is None:
                continue
            if not moments.differing({name: [value] for name, value in entry.items()}, feature):
                continue
            of = f"episode {number}: " if number is not None else ""
            self.changes.append(f"{file}: {of}statistics of {feature.name} are those of its frames")
            values = self._frames.values(feature.name, number)
            for name in entry:
                entry[name] = _statistic(name, values, moments, entry[name])

    def _repair_totals(self) -> None:
        if not self._total:
            raise CorpusError(f"{self._folder / 'meta'}: no episode with frames is listed [V38]")
        info = self._info
        was = info.get("total_episodes")
        for name, value in (("total_episodes", self._count), ("total_frames", self._total)):
            if name in info:
                self._set(INFO, info, name, value)
        splits = info.get("splits") or {}
        for name, said in splits.items():
            if said == f"0:{was}":
                self._set(INFO, splits, name, f"0:{self._count}")
        self._files[INFO] = json.dumps(info, indent=4, ensure_ascii=False)
        if _TOTAL_STATS in self._paths:
            said = json_object(self._paths, _TOTAL_STATS)
            self._repair_stats(_TOTAL_STATS, said, self._frames.joined())
            self._files[_TOTAL_STATS] = json.dumps(said, indent=4)

    def _put_lines(self, name: str, entries: Sequence[Mapping[str, Any]]) -> None:
        lines = (json.dumps(entry, ensure_ascii=False) for entry in entries)
        self._files[name] = "".join(f"{line}\n" for line in lines)

    # -- writing ----------------------------------------------------------------------------------

    def write(self, meta: Path) -> None:
        """Write a copy of the folder ``meta`` with the corrected files."""
        shutil.copytree(self._folder / "meta", meta)
        for name, content in self._files.items():
            path = meta / name.removeprefix("meta/")
            if isinstance(content, str):
                path.write_text(content, "utf-8")
            else:
                arrow().write_table(content, path)
        sync_tree(meta)


class _Frames:
    """The runs of frames in Parquet files, and their statistics by episode and feature.

    Attributes:
        firsts: the ``index`` of the first frame, by number of the episode.
        moments: the statistics, by number of the episode.
    """

    def __init__(self, folder: Path, features: Sequence[Feature]) -> None:
        self._folder, self._features = folder, features
        self._runs: dict[str, dict[int, tuple[int, int]]] = {}
        self._places: dict[int, str] = {}
        self.firsts: dict[int, int] = {}
        self.moments: dict[int, dict[str, EpisodeMoments]] = {}

    def _read(self, name: str, features: Sequence[Feature]) -> dict[str, Array]:
        path = self._folder / name
        if not path.is_file():
            raise CorpusError(f"{path}: is missing, to which the metadata points [V71]")
        with file_errors(path, "V10"), arrow().ParquetFile(path) as file:
            table = file.read([feature.name for feature in features])
            return {feature.name: values_of(table[feature.name], feature) for feature in features}

    def run(self, name: str, number: int) -> tuple[int, int]:
        """Return the first frame of an episode in a file, and the one after its last."""
        if name not in self._runs:
            values = self._read(name, self._features)
            own = self._runs[name] = {}
            for each, first, stop in _runs_of(values["episode_index"]):
                if each in self.firsts:
                    what = f"frames of episode {each} lie apart"
                    raise CorpusError(f"{self._folder / name}: {what} [V71]")
                own[each] = (first, stop)
                self._places[each] = name
                self.firsts[each] = int(values["index"][first])
                start, length = np.array([first]), np.array([stop - first])
                self.moments[each] = {
                    feature.name: EpisodeMoments.of(values[feature.name], start, length)
                    for feature in self._features
                    if values[feature.name].dtype.kind in "fiu"
                }
        if number not in self._runs[name]:
            raise CorpusError(f"{self._folder / name}: has no frames of episode {number} [V71]")
        return self._runs[name][number]

    def joined(self) -> dict[str, EpisodeMoments]:
        """Return the statistics of all episodes together, by feature."""
        parts: dict[str, list[EpisodeMoments]] = {}
        for own in self.moments.values():
            for name, moments in own.items():
                parts.setdefault(name, []).append(moments)
        return {name: EpisodeMoments.together(each) for name, each in parts.items()}

    def values(self, feature: str, number: int | None) -> Array:
        """Return the values of a feature in one episode, or in all of them."""
        wanted = [each for each in self._features if each.name == feature]
        numbers = sorted(self._places) if number is None else [number]
        found = []
        for each in numbers:
            first, stop = self._runs[self._places[each]][each]
            found.append(self._read(self._places[each], wanted)[feature][first:stop])
        return np.concatenate(found)


def _statistic(name: str, values: Array, moments: EpisodeMoments, said: Any) -> Any:
    """Return a statistic in the form of the stated one, such as ``mean`` or ``q01``."""
    known = {
        "min": moments.least,
        "max": moments.largest,
        "mean": moments.mean,
        "std": moments.std,
        "count": moments.counts,
    }
    if name in known:
        found = known[name][0]
    elif name[:1] == "q" and name[1:].isdecimal():
        found = np.quantile(values, int(name[1:]) / 100, axis=0)
    else:
        return said
    return np.asarray(found).reshape(-1).tolist()
