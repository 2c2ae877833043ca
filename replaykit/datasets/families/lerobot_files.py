"""The metadata and the Parquet files of LeRobot's data sets, versions 2.0, 2.1 and 3.0."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from replaykit.datasets.column_files import torch_dtype
from replaykit.datasets.sources import Sources
from replaykit.errors import CorpusError, import_extra
from replaykit.ted import TERMINATED, TRUNCATED, Key

INFO: Final = "meta/info.json"
INDEX: Final = ("timestamp", "frame_index", "episode_index", "index", "task_index")
"""The columns that LeRobot adds to the features of the user."""
_V2: Final = ("v2.0", "v2.1")
V3: Final = "v3.0"
_ENCODED: Final = ("video", "image")
_WIDTH: Final = re.compile("0?[0-9]?d?")
_ENDS: Final = {
    "next.done": TERMINATED,
    "next.terminated": TERMINATED,
    "next.truncated": TRUNCATED,
}

Array = npt.NDArray[Any]


def arrow() -> Any:
    """Return ``pyarrow.parquet``.

    Raises:
        ImportError: pyarrow is not installed.
    """
    return import_extra("pyarrow.parquet", "reading Parquet files needs pyarrow", "lerobot")


@contextmanager
def file_errors(path: Path | str, rule: str = "V04") -> Iterator[None]:
    """Turn errors of the content of a file into one that names the file and a rule."""
    try:
        yield
    except CorpusError:
        raise
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        # pyarrow's errors are ValueErrors, KeyErrors, or OSErrors without a number.
        what = f"lacks {error}" if isinstance(error, KeyError) else f"cannot be read ({error})"
        raise CorpusError(f"{path}: {what} [{rule}]") from error
    except (OSError, NotImplementedError, RecursionError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise CorpusError(f"{path}: cannot be read ({error}) [V03]") from error


@dataclass(frozen=True)
class Feature:
    """A feature of the frames.

    Attributes:
        name: its name in LeRobot's files.
        key: the key of its column.
        dtype: the dtype that the metadata states, such as ``"float32"`` or ``"video"``.
        shape: the shape of one value. Images are ``(H, W, C)``.
    """

    name: str
    key: Key
    dtype: str
    shape: tuple[int, ...]

    @property
    def is_encoded(self) -> bool:
        """True for images and videos."""
        return self.dtype in _ENCODED


@dataclass
class VideoFiles:
    """The part of a video file that belongs to each episode, ``[E]``.

    Attributes:
        files: the names of the files.
        starts, stops: the first and the last time in seconds. Version 2 has no ``stops``.
    """

    files: list[str]
    starts: npt.NDArray[np.float64]
    stops: npt.NDArray[np.float64] | None = None


@dataclass
class LeRobotSet:
    """The statements of a data set's metadata, one entry for each of E episodes.

    Attributes:
        paths: the paths of all files by their names in the data set.
        info: the content of ``meta/info.json``.
        numbers, lengths: number and count of frames, int64 ``[E]``.
        data: the name of the Parquet file.
        firsts: the ``index`` of the first frame, int64 ``[E]``.
        tasks: the texts of the tasks, or None if the metadata does not list them.
        videos: the video files by feature.
        stats: for each feature and statistic, the value of each episode, or None.
        total_stats: statistics of all frames by feature, or None.
        task_names: the texts of all tasks by number.
        origins: the metadata file that describes the episode.
    """

    paths: Mapping[str, Path]
    info: Mapping[str, Any]
    features: Sequence[Feature]
    numbers: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    data: list[str]
    firsts: npt.NDArray[np.int64]
    tasks: list[list[str] | None]
    videos: dict[str, VideoFiles]
    stats: Mapping[str, Mapping[str, Any]]
    task_names: dict[int, str]
    origins: list[str]
    total_stats: Mapping[str, Any] | None = None
    left_out: list[dict[str, str]] = field(default_factory=list)

    @property
    def version(self) -> str:
        return str(self.info["codebase_version"])

    @property
    def fps(self) -> float:
        return float(self.info["fps"])

    def path(self, name: str) -> Path:
        """Return the path of a file, which may be missing."""
        return self.paths.get(name, self.paths[INFO].parent.parent / name)


def read_set(sources: Sources) -> LeRobotSet:
    """Read the metadata of a data set.

    Raises:
        CorpusError: a metadata file is missing or malformed. The message names file and rule.
        ImportError: pyarrow is not installed.
    """
    found = {file.name: file.path for file in sources.files}
    home = next((name for name in found if name == INFO or name.endswith(f"/{INFO}")), None)
    if home is None:
        first = sources.files[0].path if sources.files else "no file"
        raise CorpusError(f"{first}: no {INFO} describes a LeRobot data set [V04]")
    # A folder above the data set is accepted if it holds nothing else.
    base = home.removesuffix(INFO)
    paths = {name.removeprefix(base): path for name, path in found.items()}
    info, features, left_out = read_info(paths)
    read = _read_v3 if info["codebase_version"] == V3 else _read_v2
    made = read(paths, info, features)
    made.left_out.extend(left_out)
    _check_numbers(made)
    return made


def read_info(
    paths: Mapping[str, Path],
) -> tuple[dict[str, Any], list[Feature], list[dict[str, str]]]:
    """Return ``meta/info.json``, the features that become columns, and those that do not.

    Raises:
        CorpusError: the file is missing or malformed.
    """
    info = json_object(paths, INFO)
    with file_errors(paths[INFO]):
        version, fps = info["codebase_version"], float(info["fps"])
        if version not in (*_V2, V3):
            raise ValueError(f"version {version!r}, expected one of {[*_V2, V3]}")
        if not 0 < fps < float("inf"):
            raise ValueError(f"{fps} frames per second")
        if not isinstance(info.get("splits") or {}, dict):
            raise ValueError(f"splits is {info['splits']!r:.40}, expected an object")
        if version != V3 and _whole(info["chunks_size"]) < 1:
            raise ValueError(f"chunks_size is {info['chunks_size']}, expected at least 1")
        return (info, *_features_of(info["features"]))


def _check_numbers(made: LeRobotSet) -> None:
    names, counts = np.unique(made.numbers, return_counts=True)
    if (counts > 1).any():
        raise CorpusError(
            f"{made.path(made.origins[0])}: two episodes have the number "
            f"{int(names[counts > 1][0])} [V33]"
        )
    if len(made.lengths) and (made.lengths.min() < 0 or made.numbers.min() < 0):
        raise CorpusError(f"{made.path(made.origins[0])}: a length or number is negative [V15]")


def json_object(paths: Mapping[str, Path], name: str) -> dict[str, Any]:
    """Return the object in a JSON file of the metadata.

    Raises:
        CorpusError: the file is missing or holds something else.
    """
    with file_errors(_there(paths, name)):
        found = json.loads(paths[name].read_text("utf-8"))
        if not isinstance(found, dict):
            raise ValueError(f"{type(found).__name__}, expected an object")
    return found


def json_lines(paths: Mapping[str, Path], name: str) -> list[dict[str, Any]]:
    """Return the objects of a file of the metadata that has one in each line.

    Raises:
        CorpusError: the file is missing, or a line is not an object.
    """
    with file_errors(_there(paths, name)):
        # splitlines() would also split texts at the other line ends of Unicode.
        lines = paths[name].read_text("utf-8").split("\n")
        found = [json.loads(line) for line in lines if line.strip()]
        if not all(isinstance(each, dict) for each in found):
            raise ValueError("a line is not an object")
    return found


def _there(paths: Mapping[str, Path], name: str) -> Path:
    if name not in paths:
        path = paths[INFO].parent.parent / name
        raise CorpusError(f"{path}: is missing, expected with this {INFO} [V05]")
    return paths[name]


def episode_files(paths: Mapping[str, Path]) -> list[str]:
    """Return the names of the files that describe the episodes of version 3, in order.

    Raises:
        CorpusError: there is no such file.
    """
    names = sorted(name for name in paths if name.startswith("meta/episodes/"))
    if not names:
        raise CorpusError(f"{paths[INFO].parent / 'episodes'}: holds no Parquet file [V05]")
    return names


def file_name(info: Mapping[str, Any], pattern: str, **place: Any) -> str:
    """Return the name of a file from a pattern of ``meta/info.json``.

    Raises:
        ValueError: the pattern is no text, or has other fields than ``place``.
    """
    said = info.get(pattern)
    # A field such as {file_index:999999999} would fill the memory.
    if not isinstance(said, str) or any(
        name not in place or not _WIDTH.fullmatch(width or "") or conversion
        for _, name, width, conversion in string.Formatter().parse(said)
        if name is not None
    ):
        raise ValueError(f"{pattern} of {INFO} is {said!r:.80}, expected the fields {[*place]}")
    return said.format(**place)


def _whole(value: Any) -> int:
    """Return a whole number; JSON's true and 1.5 are none."""
    if isinstance(value, bool) or int(value) != value:
        raise ValueError(f"{value!r}, expected a whole number")
    return int(value)


def _features_of(said: Mapping[str, Any]) -> tuple[list[Feature], list[dict[str, str]]]:
    found, left_out = [], []
    missing = [name for name in INDEX if name not in said]
    if missing:
        raise ValueError(f"features without {missing}")
    for name, facts in said.items():
        dtype, shape = str(facts["dtype"]), tuple(_whole(size) for size in facts["shape"])
        if dtype in _ENCODED:
            names = facts.get("names") or ()
            if len(shape) != 3:
                raise ValueError(f"the feature {name!r} has the shape {shape}, expected (H, W, C)")
            if names and str(names[0]).startswith("c"):
                shape = (*shape[1:], shape[0])
            if dtype == "video" and shape[2] not in (1, 3):
                raise ValueError(f"the video {name!r} has {shape[2]} channels, expected 1 or 3")
        elif dtype in ("string", "language"):
            left_out.append({"key": name, "why": f"values of the dtype {dtype} are not stored"})
            continue
        else:
            torch_dtype(np.dtype(dtype))
        if any(size < 0 for size in shape):
            raise ValueError(f"the feature {name!r} has the shape {shape}")
        shape = () if name in INDEX and shape == (1,) else shape
        found.append(Feature(name, _key_of(name, said), dtype, shape))
    return found, left_out


def _key_of(name: str, names: Mapping[str, Any]) -> Key:
    if name in _ENDS and not (name == "next.done" and "next.terminated" in names):
        return _ENDS[name]
    parts = name.split(".")
    above = (".".join(parts[:size]) for size in range(1, len(parts)))
    if any(each in names for each in above) or not all(parts) or name == "next.done":
        return (name,)
    return tuple(parts)


def _read_v2(
    paths: Mapping[str, Path], info: Mapping[str, Any], features: Sequence[Feature]
) -> LeRobotSet:
    name = "meta/episodes.jsonl"
    entries = json_lines(paths, name)
    with file_errors(paths[name]):
        entries.sort(key=lambda entry: _whole(entry["episode_index"]))
        numbers = np.array([_whole(entry["episode_index"]) for entry in entries], np.int64)
        lengths = np.array([_whole(entry["length"]) for entry in entries], np.int64)
        tasks = [None if entry.get("tasks") is None else list(map(str, entry["tasks"]))
                 for entry in entries]  # fmt: skip
    with file_errors(paths[INFO]):
        chunks = numbers // _whole(info["chunks_size"])
        places = [{"episode_chunk": int(chunk), "episode_index": int(number)}
                  for chunk, number in zip(chunks, numbers, strict=True)]  # fmt: skip
        data = [file_name(info, "data_path", **place) for place in places]
        videos = {
            feature.name: VideoFiles(
                [file_name(info, "video_path", video_key=feature.name, **each) for each in places],
                np.zeros(len(entries)),
            )
            for feature in features
            if feature.dtype == "video"
        }
    stats: dict[str, dict[str, list[Any]]] = {}
    name = "meta/episodes_stats.jsonl"
    if name in paths:
        said = json_lines(paths, name)
        with file_errors(paths[name]):
            known = {_whole(entry["episode_index"]): entry["stats"] for entry in said}
            for at, number in enumerate(numbers.tolist()):
                for feature, values in known.get(number, {}).items():
                    own = stats.setdefault(feature, {})
                    for of, value in values.items():
                        own.setdefault(of, [None] * len(entries))[at] = value
    return LeRobotSet(
        paths, info, features, numbers, lengths, data, lengths.cumsum() - lengths, tasks, videos,
        stats, _task_names(json_lines(paths, "meta/tasks.jsonl"), paths["meta/tasks.jsonl"]),
        ["meta/episodes.jsonl"] * len(entries), _totals(paths),
    )  # fmt: skip


def _totals(paths: Mapping[str, Path]) -> Mapping[str, Any] | None:
    return json_object(paths, "meta/stats.json") if "meta/stats.json" in paths else None


def _task_names(entries: Sequence[Mapping[str, Any]], path: Path) -> dict[int, str]:
    with file_errors(path):
        found = {_whole(entry["task_index"]): str(entry["task"]) for entry in entries}
    if len(found) < len(entries):
        raise CorpusError(f"{path}: two tasks have the same number [V75]")
    return found


def _read_v3(
    paths: Mapping[str, Path], info: Mapping[str, Any], features: Sequence[Feature]
) -> LeRobotSet:
    path = _there(paths, "meta/tasks.parquet")
    with file_errors(path):
        # read_table() would import pandas, if installed, which takes longer than most conversions.
        table = arrow().ParquetFile(path).read()
        text = next(name for name in table.column_names if name != "task_index")
        entries = [
            {"task_index": number, "task": task}
            for number, task in zip(
                table["task_index"].to_pylist(), table[text].to_pylist(), strict=True
            )
        ]
    task_names = _task_names(entries, path)
    parts = [_EpisodeFile(name, paths[name], info, features) for name in episode_files(paths)]
    made = LeRobotSet(
        paths, info, features,
        np.concatenate([part.numbers for part in parts]),
        np.concatenate([part.lengths for part in parts]),
        [name for part in parts for name in part.data],
        np.concatenate([part.firsts for part in parts]),
        [each for part in parts for each in part.tasks],
        {}, _together([part.stats for part in parts], [len(part.data) for part in parts]),
        task_names,
        [part.name for part in parts for _ in part.data], _totals(paths),
    )  # fmt: skip
    for feature in features:
        if feature.dtype == "video":
            each = [part.videos[feature.name] for part in parts]
            made.videos[feature.name] = VideoFiles(
                [name for one in each for name in one.files],
                np.concatenate([one.starts for one in each]),
                np.concatenate([one.stops for one in each if one.stops is not None]),
            )
    for part in parts:
        at = part.stops != part.firsts + part.lengths
        if at.any():
            bad = int(np.argmax(at))
            raise CorpusError(
                f"{part.path}: episode {int(part.numbers[bad])} has the length "
                f"{int(part.lengths[bad])}, but dataset_from_index {int(part.firsts[bad])} and "
                f"dataset_to_index {int(part.stops[bad])} [V70]"
            )
    return made


class _EpisodeFile:
    """The episodes that one file of ``meta/episodes`` describes."""

    def __init__(
        self, name: str, path: Path, info: Mapping[str, Any], features: Sequence[Feature]
    ) -> None:
        self.name, self.path = name, path
        with file_errors(path):
            table = arrow().ParquetFile(path).read()
            self._table = table

            self.numbers, self.lengths = self._whole("episode_index"), self._whole("length")
            self.firsts = self._whole("dataset_from_index")
            self.stops = self._whole("dataset_to_index")
            self.tasks = table["tasks"].to_pylist()
            self.data = self._names(info, "data")
            self.videos = {
                feature.name: VideoFiles(
                    self._names(info, f"videos/{feature.name}", feature.name),
                    self._seconds(f"videos/{feature.name}/from_timestamp"),
                    self._seconds(f"videos/{feature.name}/to_timestamp"),
                )
                for feature in features
                if feature.dtype == "video"
            }
            self.stats = self._stats()

    def _whole(self, name: str) -> npt.NDArray[np.int64]:
        column = self._table[name].combine_chunks()
        if column.null_count or not str(column.type).startswith(("int", "uint")):
            raise ValueError(f"{name!r} is {column.type} with {column.null_count} nulls")
        return column.to_numpy(zero_copy_only=False).astype(np.int64)

    def _seconds(self, name: str) -> npt.NDArray[np.float64]:
        found = self._table[name].to_numpy().astype(np.float64)
        if not np.isfinite(found).all():
            raise ValueError(f"{name!r} is not finite")
        return found

    def _names(self, info: Mapping[str, Any], prefix: str, video_key: str = "") -> list[str]:
        chunks, files = (self._whole(f"{prefix}/{part}_index") for part in ("chunk", "file"))
        pattern = "video_path" if video_key else "data_path"
        made = lru_cache(1)(partial(file_name, info, pattern, video_key=video_key))
        return [
            made(chunk_index=chunk, file_index=file)
            for chunk, file in zip(chunks.tolist(), files.tolist(), strict=True)
        ]

    def _stats(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for name in self._table.column_names:
            kind, _, rest = name.partition("/")
            feature, _, of = rest.rpartition("/")
            if kind == "stats":
                found.setdefault(feature, {})[of] = _rows_of(self._table[name].combine_chunks())
        return found


def _rows_of(column: Any) -> Any:
    """Return a column of lists as ``[n, width]``, or as lists of several lengths."""
    is_list = str(column.type).startswith("list<")
    if is_list and str(column.type.value_type) in ("double", "int64") and len(column):
        widths = np.diff(column.offsets.to_numpy())
        if not column.null_count and (widths == widths[0]).all():
            return column.flatten().to_numpy(zero_copy_only=False).reshape(len(column), -1)
    return column.to_pylist()


def _together(
    parts: Sequence[Mapping[str, Mapping[str, Any]]], counts: Sequence[int]
) -> Mapping[str, Mapping[str, Any]]:
    """Return the statistics of several files, which may lack some, as those of one."""
    if len(parts) == 1:
        return parts[0]
    found: dict[str, dict[str, Any]] = {}
    for feature, of in {(name, of) for part in parts for name in part for of in part[name]}:
        values: list[Any] = []
        for part, count in zip(parts, counts, strict=True):
            own = part.get(feature, {}).get(of)
            values.extend([None] * count if own is None else own)
        found.setdefault(feature, {})[of] = values
    return found


def values_of(column: Any, feature: Feature) -> Array:
    """Return a column of a table as ``[n, *shape]`` in the dtype that the metadata states.

    Raises:
        ValueError: the column has nulls, another dtype, or values of other shapes.
    """
    chunks = getattr(column, "chunks", [column])
    if len(chunks) > 1:
        import pyarrow

        chunks = [pyarrow.concat_arrays(chunks)]
    if not chunks:
        return np.empty((0, *feature.shape), feature.dtype)
    array = chunks[0]  # combining a single chunk would copy it
    count = len(array)
    array = getattr(array, "storage", array)
    sizes = [count]
    while True:
        if array.null_count:
            raise ValueError(f"{feature.name!r} has {array.null_count} nulls")
        kind = str(array.type)
        if not kind.startswith(("list", "large_list", "fixed_size_list")):
            break
        flat = array.flatten()
        if kind.startswith("fixed_size_list"):
            width = array.type.list_size
        else:
            lengths = np.unique(np.diff(array.offsets.to_numpy()))
            width = int(lengths[0]) if len(lengths) else 0
            if len(lengths) > 1:
                raise ValueError(f"{feature.name!r} has values of {lengths[:3].tolist()} numbers")
        sizes.append(width)
        array = flat
    values = array.to_numpy(zero_copy_only=False)
    if values.dtype != np.dtype(feature.dtype):
        raise ValueError(f"{feature.name!r} is {values.dtype}, expected {feature.dtype}")
    shape = tuple(sizes[1:])
    if shape != feature.shape and not (feature.shape in ((), (1,)) and shape in ((), (1,))):
        raise ValueError(f"{feature.name!r} has the shape {shape}, expected {feature.shape}")
    return np.asarray(values).reshape(count, *feature.shape)
