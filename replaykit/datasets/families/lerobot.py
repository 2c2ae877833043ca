"""The LeRobot family: frames in Parquet files, and images in videos."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

import numpy as np
import numpy.typing as npt

from replaykit.buffer.components import SamplerT
from replaykit.datasets.dataset import BaseDatasetExperienceReplay
from replaykit.datasets.encoded_frames import (
    REFERENCE_WIDTH,
    FrameFiles,
    VideoIndex,
    check_image,
    decode_image,
    encode_jpeg,
    video_index,
)
from replaykit.datasets.engine.layout import ALWAYS
from replaykit.datasets.engine.locations import Location, RuleFindings
from replaykit.datasets.engine.policies import Judge, Policies
from replaykit.datasets.engine.table_sources import (
    Array,
    SourceColumn,
    TableEpisodes,
    TableLayout,
    TableSource,
    loaded_ahead,
)
from replaykit.datasets.families.lerobot_checks import (
    EpisodeMoments,
    LeRobotChecks,
    Repair,
    drift_limit,
)
from replaykit.datasets.families.lerobot_files import (
    INDEX,
    INFO,
    Feature,
    LeRobotSet,
    VideoFiles,
    arrow,
    file_errors,
    read_set,
    values_of,
)
from replaykit.datasets.publishing import replace_path
from replaykit.datasets.remote_sources import HubFiles
from replaykit.datasets.sources import SourceFile, Sources, files_below
from replaykit.errors import CorpusError
from replaykit.filesystem import private_path, remove_tree
from replaykit.keywords import one_of
from replaykit.ted import TERMINATED, TRUNCATED, Key

Video = Literal["lazy", "pixels", "jpeg"]


@dataclass(frozen=True, kw_only=True)
class LeRobotLayout(TableLayout):
    """The layout of LeRobot's data sets, versions 2.0, 2.1 and 3.0.

    Each frame becomes a row. A name such as ``observation.images.top`` becomes the key
    ``("observation", "images", "top")``. Frames have no next observation, because the one after
    the last frame was not recorded. ``next.reward`` has the key ``("next", "reward")``. An episode
    is terminated if ``next.done`` or ``next.terminated`` is set in its last frame, and otherwise
    truncated.

    Args:
        video: ``"lazy"`` keeps videos and images as they are, and decodes frames when rows are
            read. ``"pixels"`` stores all pixels. ``"jpeg"`` stores each frame as a JPEG, which
            loses details, and decodes it when rows are read.

    Example:
        >>> from replaykit.datasets.families import LeRobotLayout
        >>> LeRobotLayout(video="pixels").video
        'pixels'
        >>> LeRobotLayout(video="mp4")
        Traceback (most recent call last):
        ValueError: video: expected one of 'lazy', 'pixels', 'jpeg', got 'mp4'
    """

    name: str = "lerobot"
    version: int = 1
    suffixes: tuple[str, ...] = (".parquet", ".json", ".jsonl", ".mp4")
    video: Video = "lazy"

    def __post_init__(self) -> None:
        one_of("video", self.video, ("lazy", "pixels", "jpeg"))

    def open(self, sources: Sources, policies: Policies, judge: Judge) -> TableSource:
        return LeRobotFrames(read_set(sources), self.video, policies, judge)

    def recognizes(self, path: Path) -> bool:
        return (path / INFO).is_file()

    def repair(self, folder: Path) -> list[str]:
        repair = Repair(folder)
        if not repair.changes:
            _check_repaired(folder, folder / "meta")
            return []
        meta = private_path(folder / "meta", "tmp")
        try:
            repair.write(meta)
            _check_repaired(folder, meta)
            replace_path(meta, folder / "meta")
        finally:
            remove_tree(meta)  # the old metadata, or after an error the new
        return repair.changes


def _check_repaired(folder: Path, meta: Path) -> None:
    """Check that the data set breaks no rule with the corrected metadata."""
    paths = {
        path.relative_to(folder).as_posix(): path
        for path in files_below(folder, LEROBOT.suffixes)
        if folder / "meta" not in path.parents and meta not in path.parents
    }
    paths |= {f"meta/{path.relative_to(meta).as_posix()}": path for path in files_below(meta, ())}
    files = (SourceFile(path, name, path.stat().st_size, "") for name, path in paths.items())
    judge = Judge("error", RuleFindings())
    source = LEROBOT.open(Sources(tuple(files)), Policies(), judge)
    kept = np.ones(len(source.episodes.lengths), bool)
    for _ in source.blocks(kept, [column.key for column in source.columns], 1 << 24):
        pass
    for note in judge.notes:
        raise CorpusError(f"{folder}: {note.first}: {note.text} [{note.rule}]")


LEROBOT: Final = LeRobotLayout()
LEROBOT_PIXELS: Final = LeRobotLayout(name="lerobot-pixels", video="pixels")
LEROBOT_JPEG: Final = LeRobotLayout(name="lerobot-jpeg", video="jpeg")


class LeRobotFrames:
    """The frames of a data set, which are checked while they are read."""

    def __init__(self, of: LeRobotSet, video: Video, policies: Policies, judge: Judge) -> None:
        self._set, self._video, self._judge = of, video, judge
        self.left_out = list(of.left_out)
        self.episodes = TableEpisodes(
            of.lengths, of.numbers, [f"episode_{number}" for number in of.numbers.tolist()]
        )
        self.columns: list[SourceColumn] = []
        self._features: dict[Key, Feature] = {}
        for feature in of.features:
            if feature.name == "index":  # batches have the slot of a row under this key
                continue
            if feature.key in ALWAYS and feature.key not in (TERMINATED, TRUNCATED):
                why = "every data set has a column of this key"
                self.left_out.append({"key": feature.name, "why": why})
                continue
            self.columns.append(self._column(feature))
            self._features[feature.key] = feature
        self.slow = [k for k, f in self._features.items() if f.is_encoded and video != "lazy"]
        self.is_stored: Callable[[Key, int], bool] = lambda key, position: False
        videos = [each for each in of.features if each.dtype == "video"]
        self._videos = [each for each in videos if policies.keeps(each.key)]
        self.splits = self._find_splits()
        tasks = [of.task_names[number] for number in sorted(of.task_names)]
        numbers = sorted(of.task_names)
        self.facts = {
            "version": of.version,
            "fps": of.fps,
            "robot_type": of.info.get("robot_type"),
            "tasks": dict(zip(map(str, numbers), tasks, strict=True)),
        }
        self._report_totals()
        self.attached: dict[str, Path] = {}
        self._frames_in: dict[str, dict[str, int]] = {}
        self._find_videos()
        self._joined: dict[str, list[EpisodeMoments]] = {}

    def _column(self, feature: Feature) -> SourceColumn:
        if feature.is_encoded and self._video != "pixels":
            kind = "video" if feature.dtype == "video" and self._video == "lazy" else "image"
            frames = {"kind": kind, "shape": list(feature.shape)}
            dtype: np.dtype[Any] = np.dtype(np.int64 if kind == "video" else object)
            width = (REFERENCE_WIDTH,) if kind == "video" else ()
            return SourceColumn(feature.key, width, dtype, feature.name, frames)
        dtype = np.dtype(np.uint8 if feature.is_encoded else feature.dtype)
        shape = feature.shape if feature.key not in (TERMINATED, TRUNCATED) else (1,)
        return SourceColumn(feature.key, shape, dtype, feature.name)

    def _find_splits(self) -> dict[str, list[int]]:
        """Return the positions of the episodes of each split, such as ``"0:100"``."""
        found = {}
        for name, said in (self._set.info.get("splits") or {}).items():
            first, _, stop = str(said).partition(":")
            if not (first.isdecimal() and stop.isdecimal()):
                self._judge.notes.add("V15", f"the split {name} is {said!r:.40}", self._home)
                continue
            is_in = (self._set.numbers >= int(first)) & (self._set.numbers < int(stop))
            found[name] = np.flatnonzero(is_in).tolist()
        return found

    @property
    def _home(self) -> Location:
        return Location(self._set.path(INFO), INFO)

    def _report_totals(self) -> None:
        of = self._set
        for name, count in (
            ("total_episodes", len(of.numbers)),
            ("total_frames", int(of.lengths.sum())),
            ("total_tasks", len(of.task_names)),
        ):
            said = of.info.get(name, count)
            if said != count:
                what = f"{name} is {said!r:.20}, the metadata of the episodes gives {count}"
                self._judge.notes.add("V15", what, self._home, name=name)
        start = str(of.info.get("data_path")).partition("{")[0]
        for name in sorted(of.paths.keys() - set(of.data)):
            if name.endswith(".parquet") and name.startswith(start) and name[:5] != "meta/":
                where = Location(of.path(name), name)
                self._judge.notes.add("V71", "the metadata lists no episode of this file", where)

    def location(self, position: int) -> Location:
        """Return the location of an episode in its Parquet file."""
        name = self._set.data[position]
        return Location(self._set.path(name), name, self.episodes.names[position])

    # -- videos -----------------------------------------------------------------------------------

    def _find_videos(self) -> None:
        """Check that all files exist, and number the videos that the data set keeps."""
        of, paths = self._set, self._set.paths
        kept: set[str] = set()
        sizes = lru_cache(1)(lambda name: paths[name].stat().st_size)
        videos = (of.videos[each.name].files for each in self._videos)
        for position, names in enumerate(zip(of.data, *videos, strict=True)):
            missing = next((at for at, name in enumerate(names) if name not in paths), None)
            if missing is not None:
                what = f"{names[missing]} is missing, to which the metadata points"
                error = self.location(position).error(what, "V73" if missing else "V71")
                self._judge.condemn(position, error)
                continue
            kept.update(names[1:])
            if of.lengths[position] > sizes(names[0]):  # few files have more rows than bytes
                self._check_length(position, paths[names[0]])
        for feature in self._videos:
            self._check_parts(feature, of.videos[feature.name])
        self._files = {name: at for at, name in enumerate(sorted(kept), 1)}
        if self._video == "lazy":
            self.attached = {name: paths[name] for name in self._files}
        self._reader = FrameFiles([paths[name] for name in self._files], most_open=4)
        self._index = lru_cache(4)(video_index)

    def _check_length(self, position: int, path: Path) -> None:
        """Check a length before room for the rows is reserved (V70)."""
        length = int(self._set.lengths[position])
        try:
            with file_errors(path, "V10"), arrow().ParquetFile(path) as file:
                rows = file.metadata.num_rows
        except CorpusError as error:
            self._judge.condemn(position, error)
            return
        if rows < length:
            what = f"the metadata gives it {length} frames, its file has {rows}"
            self._judge.condemn(position, self.location(position).error(what, "V70"))

    def _check_parts(self, feature: Feature, files: VideoFiles) -> None:
        """Count the frames that each video has to have, and check that no frame is used twice."""
        of = self._set
        names, at = np.unique(files.files, return_inverse=True)
        frames = np.zeros(len(names), np.int64)
        np.add.at(frames, at, of.lengths)
        self._frames_in[feature.name] = dict(zip(names.tolist(), frames.tolist(), strict=True))
        if files.stops is None:
            return
        order = np.lexsort((files.starts, at))
        is_same = at[order[1:]] == at[order[:-1]]
        early = files.starts[order[1:]] < files.stops[order[:-1]] - 0.5 / of.fps
        for place in np.flatnonzero(is_same & early).tolist():
            pair = order[place : place + 2].tolist()
            for position in pair:
                name, (one, other) = files.files[position], of.numbers[pair].tolist()
                what = f"the episodes {one} and {other} overlap in {name}"
                where = Location(of.path(name), name, self.episodes.names[position])
                self._judge.condemn(position, where.error(what, "V73"))

    def _references(self, feature: Feature, position: int, timestamps: Array) -> Array:
        """Return the references to the frames of an episode, int64 ``[T, 3]`` (V73)."""
        of = self._set
        files = of.videos[feature.name]
        name, length = files.files[position], int(of.lengths[position])
        where = Location(of.path(name), name, self.episodes.names[position])
        found = self._index(of.path(name))
        if (found.height, found.width) != feature.shape[:2]:
            what = f"its frames are {found.height} x {found.width}, expected {feature.shape[:2]}"
            raise where.error(what, "V10")
        self._check_count(found, feature, position, where)
        seconds = files.starts[position] + timestamps.astype(np.float64)
        times, drift = found.nearest(seconds)
        wrong = ~(np.abs(drift) <= drift_limit(seconds))
        if wrong.any():
            at = int(np.argmax(wrong))
            what = (
                f"its frame nearest to {seconds[at]:.6f} s, the time of frame {at} of {length}, "
                f"is {drift[at]:+.6f} s off"
            )
            raise where.error(what, "V73")
        references = np.zeros((length, REFERENCE_WIDTH), np.int64)
        references[:, 0], references[:, 1] = self._files[name], times
        return references

    def _check_count(
        self, found: VideoIndex, feature: Feature, position: int, where: Location
    ) -> None:
        of = self._set
        files = of.videos[feature.name]
        expected = self._frames_in[feature.name][files.files[position]]
        if files.stops is not None:
            seconds = float(files.stops[position] - files.starts[position])
            drift = seconds - int(of.lengths[position]) / of.fps
            if abs(drift) > 0.5 / of.fps:
                what = (
                    f"from_timestamp and to_timestamp of {feature.name} are {seconds:.6f} s apart, "
                    f"{drift:+.6f} s from length / fps"
                )
                raise where.error(what, "V73")
        if len(found.times) != expected:
            what = f"it has {len(found.times)} frames, expected {expected}"
            raise where.error(what, "V73")

    # -- blocks -----------------------------------------------------------------------------------

    def blocks(
        self, kept: npt.NDArray[np.bool_], keys: Sequence[Key], block_bytes: int
    ) -> Iterator[Mapping[Key, Array]]:
        wanted = [self._features[key] for key in keys]
        self._joined = {}
        everywhere: dict[str, list[int]] = {}
        for position, name in enumerate(self._set.data):
            everywhere.setdefault(name, []).append(position)
        # Episodes of several files may alternate, so a file is loaded for each run of them.
        runs = [
            (name, list(positions))
            for name, positions in groupby(
                np.flatnonzero(kept).tolist(), self._set.data.__getitem__
            )
        ]
        # Findings have the order of the files, because loading has none.
        for (name, run), loaded in loaded_ahead(lambda each: self._load(wanted, each[0]), runs):
            yield from self._blocks(name, loaded, everywhere[name], run, wanted, block_bytes)
        if kept.all():
            self._check_totals()

    def _blocks(
        self,
        name: str,
        loaded: Future[tuple[Any, dict[str, Array]]],
        positions: Sequence[int],
        kept: Sequence[int],
        wanted: Sequence[Feature],
        block_bytes: int,
    ) -> Iterator[Mapping[Key, Array]]:
        """Yield the rows of the kept episodes of one Parquet file."""
        of = self._set
        try:
            table, values = loaded.result()
        except CorpusError as error:
            for position in kept:
                self._judge.condemn(position, error)
            count = int(of.lengths[list(kept)].sum())
            yield {
                each.key: _stored(np.zeros((count, *each.shape), each.dtype), each)
                for each in wanted
                if not each.is_encoded
            }
            return
        checks = LeRobotChecks(of, self._judge, self.location, name, positions, values)
        places = {position: at for at, position in enumerate(checks.positions)}
        sound = [position for position in kept if position in places]
        at = [places[position] for position in sound]
        starts, lengths = checks.starts[at], of.lengths[sound]
        self._check_stats(sound, values, starts, lengths)
        is_whole = len(at) and int(lengths.sum()) == len(table)
        order: Any = slice(None)
        if not is_whole or not np.array_equal(starts, lengths.cumsum() - lengths):
            runs = zip(starts, lengths, strict=True)
            order = np.concatenate(
                [np.arange(0), *(np.arange(first, first + count) for first, count in runs)]
            )
        found = {
            each.key: _stored(values[each.name][order], each)
            for each in wanted
            if not each.is_encoded
        }
        if len(sound) < len(kept):  # zeros keep the places of the other rows
            is_sound = np.repeat(np.isin(kept, sound), of.lengths[list(kept)])
            found = {key: _spread(rows, is_sound) for key, rows in found.items()}
        yield found
        for feature in wanted:
            if feature.is_encoded:
                for position, first in zip(sound, starts.tolist(), strict=True):
                    rows = slice(first, first + int(of.lengths[position]))
                    times = values["timestamp"][rows]
                    column = None if feature.dtype == "video" else table[feature.name]
                    try:
                        yield from self._frames(feature, position, times, column, rows, block_bytes)
                    except CorpusError as error:
                        self._judge.condemn(position, error)

    def _load(self, wanted: Sequence[Feature], name: str) -> tuple[Any, dict[str, Array]]:
        """Return the table of a Parquet file, and its columns of numbers by name."""
        path = self._set.path(name)
        columns = [each for each in self._set.features if each.dtype != "video" and
                   (each in wanted or each.name in INDEX)]  # fmt: skip
        # A table of one file needs no data set of Arrow, which takes longer to make.
        with file_errors(path, "V10"), arrow().ParquetFile(path) as file:
            table = file.read([each.name for each in columns])
            missing = {each.name for each in columns} - set(table.column_names)
            if missing:
                raise CorpusError(f"{path}: lacks the columns {sorted(missing)} [V12]")
            values = {
                each.name: values_of(table[each.name], each)
                for each in columns
                if not each.is_encoded
            }
        return table, values

    def _frames(
        self,
        feature: Feature,
        position: int,
        times: Array,
        column: Any,
        rows: slice,
        block_bytes: int,
    ) -> Iterator[Mapping[Key, Array]]:
        """Yield the images of an episode: references, encoded images, or pixels."""
        step = max(1, block_bytes // max(1, int(np.prod(feature.shape))))
        is_video = column is None
        if is_video:
            references = self._references(feature, position, times)
            if self._video == "lazy":
                yield {feature.key: references}
                return
        if self.is_stored(feature.key, position):
            return
        where = self.location(position)

        def load(start: int) -> Array:
            count = min(step, len(times) - start)
            pixels = np.empty((count, *feature.shape), np.uint8)
            if is_video:
                self._reader.read_videos(references[start : start + count], pixels)
                return pixels
            part = column.slice(rows.start + start, count).to_pylist()
            encoded = [_image_bytes(each, where, feature) for each in part]
            for at, each in enumerate(encoded):
                text = f"{where}/{feature.name}, record {start + at}"
                if self._video == "lazy":
                    check_image(each, feature.shape, text)
                else:
                    decode_image(each, pixels[at], text)
            return _objects(encoded) if self._video == "lazy" else pixels

        # A thread decodes while images are encoded and written.
        for _, loaded in loaded_ahead(load, range(0, len(times), step)):
            images = loaded.result()
            if self._video == "jpeg":
                images = _objects([encode_jpeg(each) for each in images])
            yield {feature.key: images}

    # -- statistics -------------------------------------------------------------------------------

    def _check_stats(
        self, positions: list[int], values: Mapping[str, Array], starts: Array, lengths: Array
    ) -> None:
        """Report statistics that are not those of the frames (V74)."""
        of = self._set
        if not (of.stats or of.total_stats) or not len(lengths) or not lengths.all():
            return
        for feature in of.features:
            found = values.get(feature.name)
            if found is None or found.dtype.kind not in "fiu":
                continue
            moments = EpisodeMoments.of(found, starts, lengths)
            self._joined.setdefault(feature.name, []).append(moments)
            said: dict[str, Any] = {
                name: values[positions]
                if isinstance(values, np.ndarray)
                else [values[position] for position in positions]
                for name, values in of.stats.get(feature.name, {}).items()
            }
            for at, what in moments.differing(said, feature).items():
                where = self.location(positions[at])
                self._judge.notes.add("V74", what, where, name=feature.name)

    def _check_totals(self) -> None:
        """Compare the statistics of the whole data set with its frames (V74)."""
        of = self._set
        for feature in of.features:
            parts = self._joined.get(feature.name, [])
            said = (of.total_stats or {}).get(feature.name)
            if isinstance(said, Mapping) and parts:
                whole = EpisodeMoments.together(parts)
                if int(whole.counts[0]) == of.lengths.sum():
                    where = Location(of.path("meta/stats.json"), "meta/stats.json")
                    for what in whole.differing(
                        {name: [value] for name, value in said.items()}, feature
                    ).values():
                        self._judge.notes.add("V74", what, where, name=feature.name)


def _stored(values: Array, feature: Feature) -> Array:
    is_end = feature.key in (TERMINATED, TRUNCATED)
    return values.reshape(len(values), 1) if is_end else values


def _spread(rows: Array, places: npt.NDArray[np.bool_]) -> Array:
    found = np.zeros((len(places), *rows.shape[1:]), rows.dtype)
    found[places] = rows
    return found


def _objects(values: Sequence[bytes]) -> Array:
    found = np.empty(len(values), object)
    found[:] = values
    return found


def _image_bytes(entry: Any, where: Location, feature: Feature) -> bytes:
    """Return the bytes of an image, which a Parquet file holds with its former path."""
    found = entry.get("bytes") if isinstance(entry, Mapping) else entry
    if not isinstance(found, bytes):
        raise where.at(key=feature.name).error("the Parquet file holds no bytes of an image", "V03")
    return found


class LeRobotExperienceReplay(BaseDatasetExperienceReplay[SamplerT]):
    """Frames of LeRobot's data sets.

    Ids are those of Hub repositories, such as ``lerobot/pusht``. For local data sets, ``source`` is
    the folder. See `LeRobotLayout` for keys, ends of episodes and videos.

    See BaseDatasetExperienceReplay for arguments, errors and methods. Source:
    https://huggingface.co/lerobot; each data set has a separate licence.

    Example:
        >>> from replaykit.datasets import LeRobotExperienceReplay
        >>> LeRobotExperienceReplay("lerobot/pusht", 32, download=False, root="no-such-folder")
        Traceback (most recent call last):
        FileNotFoundError: the data set 'lerobot/pusht' is not in ...
    """

    any_id = True
    corpus = "lerobot"
    layout = LEROBOT
    owner: ClassVar[str] = "lerobot"

    @property
    def tasks(self) -> list[str]:
        """The texts of the tasks, by ``task_index``; empty for numbers without a task."""
        said = self.published.manifest.report["about"]["tasks"]
        most = max(map(int, said), default=-1)
        return [said.get(str(number), "") for number in range(most + 1)]

    @classmethod
    def remote(cls, dataset_id: str) -> HubFiles:
        """Return the location of a data set's files."""
        return HubFiles.of_id(dataset_id, cls.layout.suffixes)
