"""Repair of the metadata of LeRobot's data sets, where it follows from the frames."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from replaykit.datasets.families.lerobot_checks import EpisodeMoments
from replaykit.datasets.families.lerobot_files import (
    INFO,
    V3,
    Feature,
    arrow,
    features_of,
    file_errors,
    file_name,
    json_lines,
    values_of,
)
from replaykit.errors import CorpusError
from replaykit.filesystem import exchange, private_path, remove_tree, sync_directory, sync_tree

_EPISODES: Final = "meta/episodes.jsonl"
_STATS: Final = "meta/episodes_stats.jsonl"
_TOTAL_STATS: Final = "meta/stats.json"

Array = npt.NDArray[Any]


class Repair:
    """The corrected metadata of a data set, in memory until it is published.

    Attributes:
        changes: one text for each corrected entry.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.changes: list[str] = []
        self._files: dict[str, Any] = {}
        with file_errors(folder / INFO):
            self._info = json.loads((folder / INFO).read_text("utf-8"))
            self._is_v3 = self._info["codebase_version"] == V3
            features, _ = features_of(self._info["features"])
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
        path = self._folder / _EPISODES
        with file_errors(path):
            entries = json_lines(path)
            for entry in entries:
                number = entry["episode_index"]
                chunk = number // self._info["chunks_size"]
                place = {"episode_chunk": chunk, "episode_index": number}
                run = self._frames.run(file_name(self._info, "data_path", **place), number)
                self._set(_EPISODES, entry, "length", run[1] - run[0], f"episode {number}: ")
        self._put_lines(_EPISODES, entries)
        path = self._folder / _STATS
        if path.is_file():
            with file_errors(path):
                said = json_lines(path)
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
        for path in sorted((self._folder / "meta/episodes").rglob("*.parquet")):
            name = path.relative_to(self._folder).as_posix()
            with file_errors(path):
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
        path = self._folder / _TOTAL_STATS
        if path.is_file():
            with file_errors(path):
                said = json.loads(path.read_text("utf-8"))
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

    def publish(self, meta: Path) -> None:
        """Exchange the folder ``meta`` of the data set for the corrected one, in one step."""
        old = self._folder / "meta"
        if not exchange(meta, old):
            retired = private_path(old, "old")
            os.rename(old, retired)
            os.rename(meta, old)
            meta = retired
        sync_directory(self._folder)
        remove_tree(meta)


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
            numbers = values["episode_index"]
            cuts = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(numbers)]
            own = self._runs[name] = {}
            for first, stop in pairwise(cuts):
                if first < stop:
                    self._take(name, int(numbers[first]), first, stop, values, own)
        if number not in self._runs[name]:
            raise CorpusError(f"{self._folder / name}: has no frames of episode {number} [V71]")
        return self._runs[name][number]

    def _take(
        self,
        name: str,
        number: int,
        first: int,
        stop: int,
        values: Mapping[str, Array],
        own: dict[int, tuple[int, int]],
    ) -> None:
        if number in self.firsts:
            raise CorpusError(f"{self._folder / name}: frames of episode {number} lie apart [V71]")
        own[number] = (first, stop)
        self._places[number] = name
        self.firsts[number] = int(values["index"][first])
        start, length = np.array([first]), np.array([stop - first])
        self.moments[number] = {
            feature.name: EpisodeMoments.of(values[feature.name], start, length)
            for feature in self._features
            if values[feature.name].dtype.kind in "fiu"
        }

    def joined(self) -> dict[str, EpisodeMoments]:
        """Return the statistics of all episodes together, by feature."""
        names = [feature.name for feature in self._features]
        each = list(self.moments.values())
        return {
            name: EpisodeMoments.together([one[name] for one in each])
            for name in names
            if each and name in each[0]
        }

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
