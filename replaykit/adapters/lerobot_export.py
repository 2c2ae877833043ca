"""Write episodes as a LeRobotDataset of version 3: Parquet files, statistics, PNG or MP4."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from replaykit.adapters.export_files import Draft, export_to
from replaykit.adapters.exported_episodes import (
    OBSERVATION,
    Array,
    ExportedRows,
    ExportSource,
)
from replaykit.buffer import ReplayBuffer
from replaykit.datasets.encoded_frames import image_module, video_module
from replaykit.datasets.families.lerobot_files import INFO, Feature, arrow, values_of
from replaykit.declared import Positive, read_value
from replaykit.errors import SchemaError
from replaykit.ted import Key, format_key

_DATA: Final = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
_VIDEO: Final = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
_EPISODES: Final = "meta/episodes/chunk-000/file-000.parquet"
_FILES: Final = 1000
"""Files in a folder."""
_MB: Final = 100
"""Size of a data file in MiB, after which the next episode begins another one."""
_QUANTILES: Final = (1, 10, 50, 90, 99)


def to_lerobot(
    data: ReplayBuffer[Any, Any, Any, Any],
    path: str | os.PathLike[str],
    *,
    fps: int,
    task: str | Sequence[str] | None = None,
    robot_type: str | None = None,
    video: bool = False,
    overwrite: bool = False,
) -> Path:
    """Write the episodes of a buffer as a LeRobotDataset of version 3.

    The folder appears at ``path`` completely or not at all. An episode of T rows becomes T frames.
    The parts of a key are joined by dots, as in ``observation.images.wrist``. An observation that
    is a single array has the name ``observation.state``, or ``observation.image``. The other
    columns are ``next.terminated``, ``next.truncated``, ``next.done``, and, if the rows have them,
    ``action``, ``next.reward`` and ``next.success``. LeRobot stores no next observations, so the
    last one of an episode is lost. Other keys are left out. Frame ``i`` of an episode has the time
    ``i / fps``.

    uint8 columns ``[H, W, 3]`` or ``[3, H, W]`` are images. They are stored as PNG in the Parquet
    files, so no value changes. Statistics are exact: over all rows, and over all pixels of images.

    Args:
        data: a buffer or data set.
        path: the folder. Missing parents are made.
        fps: frames per second.
        task: the task in words, for all episodes or for each episode. The default is the task of a
            data set that was converted from LeRobot, and otherwise no text.
        robot_type: the type of robot, which is stored.
        video: True to store images as MP4 (H.264). This is lossy: the pixels change.
        overwrite: whether to replace an existing LeRobotDataset, in one step at the end.

    Returns:
        The path.

    Raises:
        KeyError: the data lacks a key. The message names it.
        ValueError: the data has no episode, ``fps`` is not positive, or ``task`` has another count.
            Also if a next observation differs from the observation of the following row in an
            episode. The message names key and episode.
        SchemaError: two columns get the same name, a name contains a slash, or a column has complex
            numbers or no values. With ``video``, the sides of an image are odd.
        FileExistsError: the path exists, and ``overwrite`` is False, or it is no LeRobotDataset.
        OSError: the disk has too little room.
        ImportError: pyarrow is not installed, or pillow for images, or av for videos.

    Cost: two passes, because the files are read back and compared. Memory: one episode, and one
    column in float64 for its quantiles.

    Example:
        >>> import json, tempfile
        >>> from pathlib import Path
        >>> import torch
        >>> from replaykit import LazyTensorStorage, ReplayBuffer, transition
        >>> from replaykit.adapters import to_lerobot
        >>> joints, ends = torch.randn(9, 2), torch.arange(8) == 7
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100))
        >>> never = torch.zeros(8, dtype=torch.bool)
        >>> _ = rb.extend(transition(joints[:-1], joints[:-1], torch.ones(8), joints[1:],
        ...                          ends, never, batch_size=8))
        >>> folder = to_lerobot(rb, Path(tempfile.mkdtemp()) / "set", fps=10, task="reach")
        >>> info = json.loads((folder / "meta/info.json").read_text())
        >>> info["total_frames"], info["features"]["observation.state"]["shape"]
        (8, [2])
    """
    arrow()
    read_value(Positive, fps, "fps")
    source = ExportSource(data, "LeRobot", whole=False)
    task = _tasks_of(data) if task is None else task
    tasks = [task] * len(source) if isinstance(task, str) else list(task)
    if len(tasks) != len(source) or not all(isinstance(each, str) for each in tasks):
        raise ValueError(
            f"expected task as one text, or as one text for each of {len(source)} episodes, "
            f"got {task!r:.80}"
        )
    target = Path(path).expanduser()
    with export_to(source, target, INFO, overwrite=overwrite) as draft:
        _Writer(draft, source, fps, tasks, video).write(robot_type)
    return target


def _tasks_of(data: ReplayBuffer[Any, Any, Any, Any]) -> str | list[str]:
    """Return the task of each episode of a data set that was converted from LeRobot."""
    published = getattr(data.storage, "published", None)
    if published is None or ("task_index",) not in published.columns:
        return ""
    column = published.columns["task_index",]
    texts = published.manifest.report["about"]["tasks"]
    table: Any = data
    numbers = column[table.episode_table["start"]].reshape(-1)
    return [texts.get(str(number), "") for number in numbers.tolist()]


class _Writer:
    """The files of a data set, written episode by episode."""

    def __init__(
        self, draft: Draft, source: ExportSource, fps: int, tasks: list[str], video: bool
    ) -> None:
        self._draft, self._source, self._fps, self._video = draft, source, fps, video
        self._folder = draft.path
        self._tasks = tasks
        self._known = list(dict.fromkeys(tasks))
        self._names, self._images = source.table_names(_name)
        for key in self._names:
            leaf = source.leaves[key]
            if leaf.dtype.is_complex or not leaf.shape.numel():
                raise SchemaError(
                    f"key {format_key(key)}: expected real numbers and at least one value in a "
                    f"row, which LeRobot can store, got {leaf.dtype} {list(leaf.shape)}"
                )
        self._features: dict[str, dict[str, Any]] = {}
        self._histograms = {name: np.zeros((3, 256), np.int64) for name in self._images}
        self._episodes: list[dict[str, Any]] = []
        self._places: list[tuple[Path, int]] = []  # file and row group of each episode
        self._rows = 0

    def write(self, robot_type: str | None) -> None:
        self._write_rows()
        self._draft.check(self._read)
        write_table(self._folder / _EPISODES, self._episodes)
        count = len(self._episodes)
        info = {
            "codebase_version": "v3.0",
            "robot_type": robot_type,
            "total_episodes": count,
            "total_frames": self._rows,
            "total_tasks": len(self._known),
            "chunks_size": _FILES,
            "data_files_size_in_mb": _MB,
            "video_files_size_in_mb": 200,
            "fps": self._fps,
            "splits": {"train": f"0:{count}"},
            "data_path": _DATA,
            "video_path": _VIDEO if self._video and self._images else None,
            "features": self._features,
        }
        for name, content in (("info", info), ("stats", dict(self._statistics()))):
            text = json.dumps(content, indent=4, ensure_ascii=False)
            (self._folder / f"meta/{name}.json").write_text(text, "utf-8")
        self._write_tasks()

    # -- rows -------------------------------------------------------------------------------------

    def _write_rows(self) -> None:
        import pyarrow as pa

        pq = arrow()
        file, group, writer, path = 0, 0, None, self._folder
        try:
            for number, rows in self._source.episodes():
                values = self._values(number, rows)
                self._describe(values)
                columns = {
                    name: value.reshape(rows.count, *self._features[name]["shape"])
                    for name, value in values.items()
                    if self._features[name]["dtype"] != "video"
                }
                table = pa.table({key: self._column(key, each) for key, each in columns.items()})
                if writer is not None and path.stat().st_size >= _MB << 20:
                    writer.close()
                    file, group, writer = file + 1, 0, None
                if writer is None:
                    path = self._folder / _DATA.format(**_place(file))
                    path.parent.mkdir(parents=True, exist_ok=True)
                    writer = pq.ParquetWriter(path, table.schema)
                writer.write_table(table, row_group_size=rows.count)
                self._places.append((path, group))
                self._draft.wrote(columns)
                self._note(number, values, file)
                group += 1
                self._rows += rows.count
        finally:
            if writer is not None:
                writer.close()

    def _values(self, number: int, rows: ExportedRows) -> dict[str, Array]:
        """Return the columns of an episode by their names."""
        found = rows.table(self._names, self._images)
        flags = [found.pop(name) for name in ("terminated", "truncated")]
        ends = {"next.terminated": flags[0], "next.truncated": flags[1]}
        found |= ends | {"next.done": flags[0] | flags[1]}
        steps = np.arange(rows.count)
        task = self._known.index(self._tasks[number])
        found["timestamp"] = (steps / self._fps).astype(np.float32)
        found["frame_index"] = steps
        found["episode_index"] = np.full_like(steps, number)
        found["index"] = steps + self._rows
        found["task_index"] = np.full_like(steps, task)
        return found

    def _describe(self, values: Mapping[str, Array]) -> None:
        if self._features:
            return
        for name, value in values.items():
            shape, dtype, names = list(value.shape[1:]) or [1], value.dtype.name, None
            if name in self._images:
                dtype = "video" if self._video else "image"
                names = ["height", "width", "channels"]
                if self._video and (shape[0] % 2 or shape[1] % 2):
                    raise SchemaError(
                        f"{name}: expected images with even sides for a video, got {shape}; pass "
                        "video=False, or crop the images"
                    )
            self._features[name] = {"dtype": dtype, "shape": shape, "names": names}
            if dtype == "video":
                self._features[name]["info"] = {
                    "video.height": shape[0],
                    "video.width": shape[1],
                    "video.codec": "h264",
                    "video.pix_fmt": "yuv420p",
                    "video.is_depth_map": False,
                    "video.fps": self._fps,
                    "video.channels": 3,
                    "has_audio": False,
                }

    def _column(self, name: str, values: Array) -> Any:
        """Return a column of Arrow: numbers, lists of one size, nested lists, or images."""
        import pyarrow as pa

        if name in self._images:
            kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
            return pa.array([{"bytes": each, "path": None} for each in _encoded(values)], kind)
        shape = values.shape[1:]
        found = pa.array(np.ascontiguousarray(values).reshape(-1))
        if len(shape) == 1 and shape != (1,):
            return pa.FixedSizeListArray.from_arrays(found, shape[0])
        for size in reversed(shape if shape != (1,) else ()):
            count = len(found) // size
            offsets = pa.array(np.arange(count + 1, dtype=np.int32) * np.int32(size))
            found = pa.ListArray.from_arrays(offsets, found)
        return found

    def _note(self, number: int, values: Mapping[str, Array], file: int) -> None:
        """Add an episode to the table of episodes, and its images to videos and histograms."""
        stop = self._rows + len(values["index"])
        place = {f"data/{name}": value for name, value in _place(file).items()}
        found: dict[str, Any] = {
            "episode_index": number,
            "tasks": [self._tasks[number]],
            "length": stop - self._rows,
            **place,
            "dataset_from_index": self._rows,
            "dataset_to_index": stop,
        }
        statistics = {}
        for name, value in values.items():
            if name not in self._images:
                statistics[name] = statistics_of(value)
                continue
            planes = value.reshape(-1, 3).T
            counts = np.stack([np.bincount(plane, minlength=256) for plane in planes])
            self._histograms[name] += counts
            statistics[name] = _image_statistics(counts, len(value))
            if self._video:
                path = self._folder / _VIDEO.format(video_key=name, **_place(number))
                _encode(path, value, self._fps)
                for key, index in _place(number).items():
                    found[f"videos/{name}/{key}"] = index
                found[f"videos/{name}/from_timestamp"] = 0.0
                found[f"videos/{name}/to_timestamp"] = len(value) / self._fps
        for name, each in statistics.items():
            found |= {f"stats/{name}/{key}": value for key, value in each.items()}
        self._episodes.append(
            found | {"meta/episodes/chunk_index": 0, "meta/episodes/file_index": 0}
        )

    def _read(self, number: int) -> dict[str, Array]:
        """Read the columns of an episode from its file."""
        pq = arrow()
        path, group = self._places[number]
        with pq.ParquetFile(path) as file:
            table = file.read_row_group(group)
        found = {}
        for name in table.column_names:
            feature, column = self._features[name], table[name].combine_chunks()
            if feature["dtype"] == "image":
                images = column.field("bytes").to_pylist()
                found[name] = np.stack([_decoded(each) for each in images])
            else:
                found[name] = values_of(column, self._feature(name))
        return found

    # -- descriptions -----------------------------------------------------------------------------

    def _statistics(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the statistics of each column over all rows."""
        pq = arrow()
        files = list(dict.fromkeys(path for path, _ in self._places))
        for name in self._features:
            if name in self._images:
                yield name, _image_statistics(self._histograms[name], self._rows)
                continue
            of = self._feature(name)
            parts = [values_of(pq.read_table(each, columns=[name])[name], of) for each in files]
            yield name, statistics_of(np.concatenate(parts))

    def _feature(self, name: str) -> Feature:
        said = self._features[name]
        return Feature(name, (name,), said["dtype"], tuple(said["shape"]))

    def _write_tasks(self) -> None:
        """Write the tasks as pandas writes them, with the text as index."""
        import pyarrow as pa

        pq = arrow()
        index = "__index_level_0__"
        table = pa.table({"task_index": np.arange(len(self._known)), index: self._known})
        columns = [
            {"name": name, "field_name": field, "pandas_type": kind, "numpy_type": numpy_type}
            for name, field, kind, numpy_type in (
                ("task_index", "task_index", "int64", "int64"),
                (None, index, "unicode", "object"),
            )
        ]
        about = {
            "index_columns": [index],
            "column_indexes": [],
            "columns": [{**each, "metadata": None} for each in columns],
            "pandas_version": "2.2.3",
        }
        table = table.replace_schema_metadata({"pandas": json.dumps(about)})
        pq.write_table(table, self._folder / "meta/tasks.parquet")


def _name(key: Key, image: bool) -> str:
    if key == OBSERVATION:
        return "observation.image" if image else "observation.state"
    return ".".join(key)


def _place(number: int) -> dict[str, int]:
    return {"chunk_index": number // _FILES, "file_index": number % _FILES}


def write_table(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows of equal keys as a Parquet file."""
    import pyarrow as pa

    pq = arrow()
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(rows)), path)


# -- statistics -----------------------------------------------------------------------------------


def statistics_of(values: Array) -> dict[str, Any]:
    """Return exact statistics of each number of a row, as lists."""
    rows = values.astype(np.float64).reshape(len(values), *(values.shape[1:] or (1,)))
    found = {
        "min": rows.min(0),
        "max": rows.max(0),
        "mean": rows.mean(0),
        "std": rows.std(0),
        **dict(zip(map(_quantile, _QUANTILES), np.percentile(rows, _QUANTILES, 0), strict=True)),
    }
    return {**{name: each.tolist() for name, each in found.items()}, "count": [len(values)]}


def _image_statistics(counts: npt.NDArray[np.int64], frames: int) -> dict[str, Any]:
    """Return exact statistics of the channels, from counts ``[3, 256]`` of pixels, in 0 to 1."""
    levels, pixels = np.arange(256) / 255, int(counts[0].sum())
    below = counts.cumsum(1)
    ranks = np.array([0, 1, *(q / 100 for q in _QUANTILES)]) * (pixels - 1)
    low = np.floor(ranks).astype(np.int64)

    def at(rank: npt.NDArray[np.int64]) -> Array:
        return np.stack([levels[np.searchsorted(each, rank, "right")] for each in below])

    between = at(low) + (at(np.minimum(low + 1, pixels - 1)) - at(low)) * (ranks - low)
    mean = counts @ levels / pixels
    std = np.sqrt((counts * (levels - mean[:, None]) ** 2).sum(1) / pixels)
    names = ("min", "max", *map(_quantile, _QUANTILES), "mean", "std")
    found = dict(zip(names, [*between.T, mean, std], strict=True))
    return {
        **{name: each.reshape(3, 1, 1).tolist() for name, each in found.items()},
        "count": [frames],
    }


def _quantile(percent: int) -> str:
    return f"q{percent:02d}"


# -- images ---------------------------------------------------------------------------------------


def _encoded(images: Array) -> Iterator[bytes]:
    image = image_module()
    for each in images:
        file = io.BytesIO()
        image.fromarray(each).save(file, "PNG", compress_level=1)
        yield file.getvalue()


def _decoded(content: bytes) -> Array:
    return np.asarray(image_module().open(io.BytesIO(content)))


def _encode(path: Path, frames: Array, fps: int) -> None:
    """Write the images of an episode as an MP4 file, where frame ``i`` has the time ``i / fps``."""
    av = video_module()
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as file:
        # Every second frame is a key frame, as in LeRobot's own videos, so random reads are fast.
        stream = file.add_stream("libx264", rate=fps, options={"g": "2", "crf": "23"})
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        for frame in (*frames, None):
            image = None if frame is None else av.VideoFrame.from_ndarray(frame, "rgb24")
            file.mux(stream.encode(image))
    with av.open(str(path)) as file:
        count = sum(1 for packet in file.demux(video=0) if packet.size)
    if count != len(frames):
        raise RuntimeError(f"{path.name} was not made: it has {count} of {len(frames)} frames")
