"""Write small data sets in LeRobot's versions 2.1 and 3.0, for tests and examples."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

_SIZE: Final = (32, 48)
_INDEX: Final = "__index_level_0__"
_TASKS: Final = ("push the block", "pull the block")

Array = npt.NDArray[Any]


def make_lerobot(
    folder: Path,
    lengths: Sequence[int],
    *,
    version: str = "v3.0",
    fps: int = 10,
    cameras: Sequence[str] = ("top",),
    more: Mapping[str, Array] | None = None,
    per_file: int = 2,
    seed: int = 0,
    codec: str = "libx264",
) -> dict[str, Array]:
    """Write a data set of random frames, and return its columns by LeRobot's names.

    Args:
        folder: the folder of the data set, which must not exist.
        lengths: the count of frames of each episode.
        version: ``"v2.1"`` or ``"v3.0"``.
        cameras: names of cameras, each with a video of 32 x 48 pixels.
        more: further features by name, with one value for each frame.
        per_file: the count of episodes in a file of version 3.0.
        codec: the encoder of the videos.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from replaykit.testing import make_lerobot
        >>> found = make_lerobot(Path(tempfile.mkdtemp()) / "set", [3, 4], cameras=[])
        >>> found["observation.state"].shape, found["frame_index"].tolist()
        ((7, 3), [0, 1, 2, 0, 1, 2, 3])
    """
    random = np.random.default_rng(seed)
    total, is_v3 = sum(lengths), version == "v3.0"
    episode = np.repeat(np.arange(len(lengths)), lengths)
    frame = np.concatenate([np.arange(length) for length in lengths])
    columns: dict[str, Array] = {
        "observation.state": random.normal(size=(total, 3)).astype(np.float32),
        "action": random.normal(size=(total, 2)).astype(np.float32),
        **(more or {}),
        "timestamp": (frame / fps).astype(np.float32),
        "frame_index": frame,
        "episode_index": episode,
        "index": np.arange(total),
        "task_index": episode % len(_TASKS),
    }
    features: dict[str, Any] = {
        name: {"dtype": values.dtype.name, "shape": list(values.shape[1:]) or [1], "names": None}
        for name, values in columns.items()
    }
    for name in cameras:
        features[f"observation.images.{name}"] = {
            "dtype": "video",
            "shape": [*_SIZE, 3],
            "names": ["height", "width", "channels"],
        }
    chunk = "{chunk_index:03d}/file-{file_index:03d}"
    old = "chunk-{episode_chunk:03d}"
    info = {
        "codebase_version": version,
        "robot_type": "arm",
        "total_episodes": len(lengths),
        "total_frames": total,
        "total_tasks": len(_TASKS),
        "chunks_size": 1000,
        "fps": fps,
        "splits": {"train": f"0:{len(lengths)}"},
        "data_path": f"data/chunk-{chunk}.parquet"
        if is_v3
        else f"data/{old}/episode_{{episode_index:06d}}.parquet",
        "video_path": f"videos/{{video_key}}/chunk-{chunk}.mp4"
        if is_v3
        else f"videos/{old}/{{video_key}}/episode_{{episode_index:06d}}.mp4",
        "features": features,
    }
    stops = np.cumsum(lengths)
    stats = [
        {name: stats_of(values[stop - length : stop]) for name, values in columns.items()}
        for length, stop in zip(lengths, stops.tolist(), strict=True)
    ]
    (folder / "meta").mkdir(parents=True)
    (folder / "meta/info.json").write_text(json.dumps(info, indent=4))
    whole = {name: stats_of(values) for name, values in columns.items()}
    (folder / "meta/stats.json").write_text(json.dumps(whole))
    places = _write_files(folder, info, columns, cameras, lengths, per_file if is_v3 else 1, codec)
    episodes = [
        {"episode_index": number, "tasks": [_TASKS[number % len(_TASKS)]], "length": length}
        for number, length in enumerate(lengths)
    ]
    if is_v3:
        _write_tables(folder, episodes, places, stats)
    else:
        tasks = [{"task_index": at, "task": task} for at, task in enumerate(_TASKS)]
        _write_lines(folder / "meta/tasks.jsonl", tasks)
        _write_lines(folder / "meta/episodes.jsonl", episodes)
        entries = [{"episode_index": number, "stats": own} for number, own in enumerate(stats)]
        _write_lines(folder / "meta/episodes_stats.jsonl", entries)
    return columns


def stats_of(values: Array) -> dict[str, list[Any]]:
    """Return LeRobot's statistics of values ``[n, *shape]``."""
    flat = values.reshape(len(values), -1)
    found = {
        "min": flat.min(0),
        "max": flat.max(0),
        "mean": flat.mean(0, dtype=np.float64),
        "std": flat.std(0, dtype=np.float64),
        "count": np.array([len(flat)]),
    }
    return {name: value.tolist() for name, value in found.items()}


def _write_lines(path: Path, entries: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("".join(f"{json.dumps(entry)}\n" for entry in entries))


def _write_files(
    folder: Path,
    info: Mapping[str, Any],
    columns: Mapping[str, Array],
    cameras: Sequence[str],
    lengths: Sequence[int],
    per_file: int,
    codec: str,
) -> list[dict[str, Any]]:
    """Write tables and videos; return the place of each episode, in the words of version 3.0."""
    fps, places, first = info["fps"], [], 0
    for file, start in enumerate(range(0, len(lengths), per_file)):
        own = lengths[start : start + per_file]
        stop = first + sum(own)
        names = dict.fromkeys(("chunk_index", "episode_chunk"), 0)
        names |= dict.fromkeys(("file_index", "episode_index"), file)
        part = {name: values[first:stop] for name, values in columns.items()}
        _write_table(folder / info["data_path"].format(**names), part)
        for name in cameras:
            key = f"observation.images.{name}"
            path = folder / info["video_path"].format(video_key=key, **names)
            write_video(path, stop - first, fps, file, codec)
        at = first
        for length in own:
            place = {
                "data/chunk_index": 0,
                "data/file_index": file,
                "dataset_from_index": at,
                "dataset_to_index": at + length,
            }
            for name in cameras:
                key = f"videos/observation.images.{name}"
                place |= {f"{key}/chunk_index": 0, f"{key}/file_index": file}
                place[f"{key}/from_timestamp"] = (at - first) / fps
                place[f"{key}/to_timestamp"] = (at - first + length) / fps
            places.append(place)
            at += length
        first = stop
    return places


def _write_tables(
    folder: Path,
    episodes: Sequence[Mapping[str, Any]],
    places: Sequence[Mapping[str, Any]],
    stats: Sequence[Any],
) -> None:
    """Write the tasks and the episodes of version 3.0."""
    import pyarrow
    import pyarrow.parquet

    tasks = pyarrow.table({"task_index": range(len(_TASKS)), _INDEX: _TASKS})
    said: dict[str, list[Any]] = {"index_columns": [_INDEX], "column_indexes": [], "columns": []}
    said["columns"] = [
        {"name": None if name == _INDEX else name, "field_name": name, "pandas_type": kind,
         "numpy_type": numpy, "metadata": None}
        for name, kind, numpy in (("task_index", "int64", "int64"), (_INDEX, "unicode", "object"))
    ]  # fmt: skip
    # With this note, pandas and so LeRobot take the texts as the index of the table.
    tasks = tasks.replace_schema_metadata({"pandas": json.dumps(said)})
    pyarrow.parquet.write_table(tasks, folder / "meta/tasks.parquet")
    entries = []
    for episode, place, own in zip(episodes, places, stats, strict=True):
        found = {
            f"stats/{name}/{of}": value
            for name, statistics in own.items()
            for of, value in statistics.items()
        }
        entries.append({**episode, **place, **found})
    path = folder / "meta/episodes/chunk-000/file-000.parquet"
    path.parent.mkdir(parents=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(entries), path)


def _write_table(path: Path, columns: Mapping[str, Array]) -> None:
    import pyarrow
    import pyarrow.parquet

    arrays = {}
    for name, values in columns.items():
        array = pyarrow.array(values.reshape(-1))
        for width in reversed(values.shape[1:]):
            array = pyarrow.FixedSizeListArray.from_arrays(array, width)
        arrays[name] = array
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table(arrays), path)


def write_video(path: Path, count: int, fps: int, seed: int, codec: str = "libx264") -> None:
    """Write a video of smooth frames that all differ."""
    import av

    height, width = _SIZE
    path.parent.mkdir(parents=True, exist_ok=True)
    ramp = np.add.outer(np.arange(height), np.arange(width))
    with av.open(str(path), "w", format="mp4") as container:
        stream = container.add_stream(codec, rate=fps, options={"g": "4"})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.codec_context.thread_count = 1  # a forked process would wait for more threads
        for at in range(count):
            shade = 2 * ramp + 37 * at + 11 * seed
            pixels = np.stack([shade, shade + 60, shade * 2], -1) % 256
            frame = av.VideoFrame.from_ndarray(pixels.astype(np.uint8), format="rgb24")
            frame = frame.reformat(format="yuv420p", threads=1)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
