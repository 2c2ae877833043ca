"""Frames of LeRobot's data sets, read by pyarrow, PyAV and NumPy alone, and mutations of files."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow
import pyarrow.parquet as parquet

EPISODES = "meta/episodes/chunk-000/file-000.parquet"


def frames_of(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return the times in seconds and the pixels of a video."""
    with av.open(str(path)) as container:
        container.streams.video[0].codec_context.thread_count = 1  # processes may be forked later
        found = list(container.decode(video=0))
    times = np.array([float(frame.pts * frame.time_base) for frame in found])
    return times, np.stack([frame.to_ndarray(format="rgb24", threads=1) for frame in found])


def items_of(folder: Path, episodes: Any = None) -> dict[str, np.ndarray]:
    """Return the items of a data set in order, as LeRobot defines them."""
    info = json.loads((folder / "meta/info.json").read_text())
    is_v3 = info["codebase_version"] == "v3.0"
    if is_v3:
        entries = parquet.read_table(folder / EPISODES).to_pylist()
    else:
        text = (folder / "meta/episodes.jsonl").read_text()
        entries = [json.loads(line) for line in text.splitlines()]
    if episodes is not None:
        entries = [entry for entry in entries if entry["episode_index"] in episodes]
    videos = [name for name, facts in info["features"].items() if facts["dtype"] == "video"]
    found: dict[str, list[Any]] = {}
    decoded: dict[Path, Any] = {}
    for entry in entries:
        number = entry["episode_index"]
        place = {"episode_chunk": number // info["chunks_size"], "episode_index": number}
        if is_v3:
            place = {part: entry[f"data/{part}"] for part in ("chunk_index", "file_index")}
        table = parquet.read_table(folder / info["data_path"].format(**place))
        rows = table.filter(pyarrow.compute.equal(table["episode_index"], number))
        for name in rows.column_names:
            found.setdefault(name, []).extend(rows[name].to_pylist())
        times = np.array(rows["timestamp"].to_pylist())
        for name in videos:
            if is_v3:
                place = {
                    part: entry[f"videos/{name}/{part}"] for part in ("chunk_index", "file_index")
                }
            start = entry[f"videos/{name}/from_timestamp"] if is_v3 else 0
            path = folder / info["video_path"].format(video_key=name, **place)
            seconds, pixels = decoded.setdefault(path, None) or frames_of(path)
            decoded[path] = seconds, pixels
            nearest = np.abs(seconds[:, None] - times - start).argmin(0)
            found.setdefault(name, []).extend(pixels[nearest])
    return {name: np.stack(list(map(np.asarray, values))) for name, values in found.items()}


def edit_json(path: Path, change: Callable[[Any], None]) -> None:
    """Change the object of a JSON file, or those of a file of lines."""
    is_lines = path.suffix == ".jsonl"
    text = path.read_text()
    content = [json.loads(line) for line in text.splitlines()] if is_lines else json.loads(text)
    change(content)
    path.write_text("\n".join(map(json.dumps, content)) if is_lines else json.dumps(content))


def edit_table(path: Path, change: Callable[[list[dict[str, Any]]], None]) -> None:
    """Change the rows of a Parquet file, whose schema stays."""
    table = parquet.read_table(path)
    rows = table.to_pylist()
    change(rows)
    parquet.write_table(pyarrow.Table.from_pylist(rows, schema=table.schema), path)


def mutate(folder: Path, seed: int) -> str:
    """Change something in one file of a data set; return what."""
    rng = random.Random(seed)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    path = rng.choice(files)
    kinds = ["cut", "flip", "remove", "swap"]
    kinds += ["edit"] * 8 if path.suffix != ".mp4" else ["again"] * 4
    kind = rng.choice(kinds)
    content = path.read_bytes()
    if kind == "cut":
        path.write_bytes(content[: rng.randrange(len(content))])
    elif kind == "flip":
        changed = bytearray(content)
        for _ in range(rng.choice((1, 8))):
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
        path.write_bytes(bytes(changed))
    elif kind == "remove":
        path.unlink()
    elif kind == "swap":
        other = rng.choice([each for each in files if each.suffix == path.suffix])
        path.write_bytes(other.read_bytes())
        other.write_bytes(content)
    elif kind == "again":
        from replaykit.testing.lerobot_sets import write_video

        write_video(path, rng.randrange(1, 12), rng.choice((10, 10, 30)), 5)
    elif path.suffix == ".parquet":
        edit_table(path, lambda rows: _edit(rng, rng.choice(rows)))
    else:
        edit_json(path, lambda content: _edit(rng, content))
    return f"{kind} {path.relative_to(folder)}"


def _edit(rng: random.Random, content: Any) -> None:
    """Change one number or text, or remove an entry, somewhere in nested containers."""
    while True:
        keys = list(content) if isinstance(content, dict) else range(len(content))
        if not keys:
            return
        key = rng.choice(list(keys))
        value = content[key]
        if isinstance(value, (dict, list)) and value:
            content = value
            continue
        if isinstance(value, bool):
            content[key] = not value
        elif isinstance(value, (int, float)):
            content[key] = type(value)(value + rng.choice((1, -1, 5, 1000)))
        elif isinstance(content, dict) and rng.random() < 0.5:
            content[key] = None
        else:
            content[key] = f"{value}x"
        return
