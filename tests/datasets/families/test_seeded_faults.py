"""Faults at random places of LeRobot's sets: validate and a conversion find 99 %, and no others."""

from __future__ import annotations

import json
import random
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as parquet
import pytest

from replaykit.datasets import Policies, convert
from replaykit.datasets.families import LEROBOT
from replaykit.errors import CorpusError
from replaykit.inspection import repair, validate
from replaykit.testing import make_lerobot
from replaykit.testing.lerobot_sets import write_video
from tests.datasets.families.conftest import SHARED
from tests.datasets.families.lerobot_reader import EPISODES, edit_json, edit_table, frames_of

REAL = SHARED / "lerobot_v21_unitree_g1"
DATA, VIDEOS = "data/**/*.parquet", "videos/**/*.mp4"
Change = Callable[[random.Random, Path], object]


def made(folder: Path, seed: int) -> None:
    """Write a set of random lengths, cameras, rates and files."""
    rng = random.Random(seed)
    lengths = [rng.randint(4, 9) + 7 * number for number in range(rng.randint(3, 5))]
    total = sum(lengths)
    ends = np.isin(np.arange(total), np.cumsum(lengths)[::2] - 1)
    more = {"next.reward": np.linspace(-1, 1, total, dtype=np.float32), "next.done": ends}
    if seed % 3:
        more["observation.force.left"] = np.random.default_rng(seed).random((total, 2, 3))
    make_lerobot(
        folder, lengths, version=("v2.1", "v3.0")[seed % 2], fps=rng.choice((10, 15, 30)),
        cameras=["top", "wrist"][: 1 + seed % 2], more=more, per_file=rng.randint(1, 3), seed=seed,
    )  # fmt: skip


def real(folder: Path) -> None:
    """Copy the two whole episodes of the real set as episodes 0 and 1."""
    for name in ("meta", "data/chunk-000", "videos/chunk-000/observation.images.cam_high"):
        (folder / name).mkdir(parents=True)
    first, info = 0, json.loads((REAL / "meta/info.json").read_text())
    for number in (1, 2):
        name = f"{{}}/chunk-000/{{}}episode_{number:06d}.{{}}"
        table = parquet.read_table(REAL / name.format("data", "", "parquet"))
        frames = np.arange(len(table))
        for column, values in (
            ("episode_index", 0 * frames + number - 1),
            ("index", first + frames),
        ):
            at = table.column_names.index(column)
            table = table.set_column(at, column, [values])
        first += len(table)
        new = f"{{}}/chunk-000/{{}}episode_{number - 1:06d}.{{}}"
        parquet.write_table(table, folder / new.format("data", "", "parquet"))
        video = ("videos", "observation.images.cam_high/", "mp4")
        shutil.copyfile(REAL / name.format(*video), folder / new.format(*video))
    for name in ("episodes", "episodes_stats"):
        lines = (REAL / f"meta/{name}.jsonl").read_text().splitlines()[1:3]
        entries = [{**json.loads(line), "episode_index": at} for at, line in enumerate(lines)]
        (folder / f"meta/{name}.jsonl").write_text("\n".join(map(json.dumps, entries)))
    shutil.copyfile(REAL / "meta/tasks.jsonl", folder / "meta/tasks.jsonl")
    info.update(total_videos=2, splits={"train": "0:2"})
    (folder / "meta/info.json").write_text(json.dumps(info))
    repair(folder)


def of_file(pattern: str, change: Change) -> Change:
    return lambda rng, folder: change(rng, rng.choice(sorted(folder.glob(pattern))))


def of_rows(change: Callable[[random.Random, list[dict[str, Any]]], object]) -> Change:
    """Return a fault in the rows of a random file of frames."""
    return of_file(DATA, lambda rng, path: edit_table(path, lambda rows: change(rng, rows)))


def of_value(name: str, change: Callable[[random.Random, Any], Any]) -> Change:
    """Return a fault in a value of a random frame, or in one of its numbers."""

    def edit(rng: random.Random, rows: list[dict[str, Any]]) -> None:
        row = rng.choice(rows)
        if isinstance(row[name], list):
            row[name] = list(row[name])
            at = rng.randrange(len(row[name]))
            row[name][at] = change(rng, row[name][at])
        else:
            row[name] = change(rng, row[name])

    return of_rows(edit)


def of_info(change: Callable[[random.Random, dict[str, Any]], object]) -> Change:
    return lambda rng, folder: edit_json(folder / "meta/info.json", lambda info: change(rng, info))


def of_episode(change: Callable[[random.Random, dict[str, Any]], object]) -> Change:

    def edit(rng: random.Random, folder: Path) -> None:
        is_v3 = (folder / EPISODES).exists()
        path = folder / EPISODES if is_v3 else folder / "meta/episodes.jsonl"
        (edit_table if is_v3 else edit_json)(path, lambda rows: change(rng, rng.choice(rows)))

    return edit


def cut(rng: random.Random, path: Path) -> None:
    # The last bytes of a video only name the program that wrote it.
    path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size * 3 // 4)])


def swap_rows(rng: random.Random, rows: list[Any]) -> None:
    one, other = rng.sample(range(len(rows)), 2)
    rows[one], rows[other] = rows[other], rows[one]


def early_end(rng: random.Random, rows: list[Any]) -> None:
    rng.choice([row for row in rows if not row["frame_index"]])["next.done"] |= True


def drop_column(rng: random.Random, path: Path) -> None:
    table = parquet.read_table(path)
    parquet.write_table(table.drop([rng.choice(table.column_names)]), path)


def other_video(rng: random.Random, path: Path) -> None:
    """Write a video of more or fewer frames, or of another rate."""
    times, pixels = frames_of(path)
    step = float(np.diff(times).mean())
    count, rate = rng.choice([(1, 1), (-1, 1), (0, 0.9)])
    write_video(path, len(pixels) + count, max(1, round(rate / step)), 3)


def other_statistic(rng: random.Random, folder: Path) -> None:
    """Change a statistic of a random episode, or of the whole set."""
    of, name = (
        rng.choice(("min", "max", "mean", "std")),
        rng.choice(("action", "observation.state")),
    )

    def change(said: dict[str, Any], key: str) -> None:
        at = rng.randrange(len(said[key]))
        said[key] = [*said[key]]
        said[key][at] += abs(said[key][at]) + 1

    meta = folder / "meta"
    if (meta / "stats.json").exists() and rng.random() < 0.3:
        edit_json(meta / "stats.json", lambda said: change(said[name], of))
    elif (folder / EPISODES).exists():
        edit_table(folder / EPISODES, lambda rows: change(rng.choice(rows), f"stats/{name}/{of}"))
    else:
        path = meta / "episodes_stats.jsonl"
        edit_json(path, lambda entries: change(rng.choice(entries)["stats"][name], of))


def other_place(key: str, change: Callable[[random.Random, Any], Any]) -> Change:
    """Return a fault in an entry of version 3 whose name ends in a key."""

    def edit(rng: random.Random, row: dict[str, Any]) -> None:
        name = rng.choice([each for each in row if each.endswith(key)])
        row[name] = change(rng, row[name])

    return of_episode(edit)


def offset(rng: random.Random, value: Any) -> Any:
    return value + rng.choice((-1, 1)) * rng.randint(1, 5)


def shift(rng: random.Random, value: float) -> float:
    return value + rng.choice((-1, 1)) * rng.uniform(0.001, 2)


KINDS: dict[str, tuple[str, Change]] = {
    "frame_index": ("V71", of_value("frame_index", offset)),
    "index": ("V71", of_value("index", offset)),
    "timestamp": ("V72", of_value("timestamp", shift)),
    "unknown task": ("V75", of_value("task_index", lambda rng, old: 7 + rng.randrange(9))),
    "episode_index": ("V70 V71", of_value("episode_index", offset)),
    "frame twice": ("V70 V71", of_rows(lambda rng, rows: rows.append(rng.choice(rows)))),
    "lost frame": ("V70", of_rows(lambda rng, rows: rows.pop(rng.randrange(len(rows))))),
    "swapped frames": ("V71", of_rows(swap_rows)),
    "NaN action": ("V20", of_value("action", lambda rng, old: float("nan"))),
    "infinite state": ("V21", of_value("observation.state", lambda rng, old: -float("inf"))),
    "outlier": ("V74", of_value("action", lambda rng, old: old + 1000)),
    "null": ("V10", of_value("observation.state", lambda rng, old: None)),
    "early end": ("V31", of_rows(early_end)),
    "lost column": ("V10 V12", of_file(DATA, drop_column)),
    "cut data": ("V03 V10", of_file(DATA, cut)),
    "lost data": ("V71", of_file(DATA, lambda rng, path: path.unlink())),
    "length": ("V70", of_episode(lambda rng, each: each.update(length=each["length"] + 2))),
    "tasks": ("V75", of_episode(lambda rng, each: each.update(tasks=["dance"]))),
    "lost video": ("V73", of_file(VIDEOS, lambda rng, path: path.unlink())),
    "cut video": ("V03 V73", of_file(VIDEOS, cut)),
    "other video": ("V10 V73", of_file(VIDEOS, other_video)),
    "statistic": ("V74", other_statistic),
    "totals": ("V15", of_info(lambda rng, info: info.update(
        {rng.choice(("total_frames", "total_episodes", "total_tasks")): 999}))),
    "fps": ("V72", of_info(lambda rng, info: info.update(fps=info["fps"] + rng.randint(1, 9)))),
    "dtype": ("V10", of_info(lambda rng, info: info["features"]["action"].update(dtype="int32"))),
    "shape": ("V10", of_info(lambda rng, info: info["features"]["action"].update(
        shape=[rng.randint(3, 9) * 10]))),
    "video shape": ("V10", of_info(lambda rng, info: rng.choice(
        [each for each in info["features"].values() if each["dtype"] == "video"]
    ).update(shape=[rng.randint(90, 99), 48, 3]))),
    "dataset_from_index": ("V70 V71", other_place("_from_index", offset)),
    "data file": ("V71", other_place("data/file_index", offset)),
    "video file": ("V73", other_place("top/file_index", offset)),
    "from_timestamp": ("V73", other_place("/from_timestamp", shift)),
    "to_timestamp": ("V73", other_place("/to_timestamp", shift)),
}  # fmt: skip
"""The rules that a fault breaks, any of which may be named, and how it is made."""


def findings(folder: Path, target: Path) -> tuple[str, str]:
    """Return the texts of validate and of a strict conversion about faults."""
    said = " ".join(each.text for each in validate(folder) if not each.ok)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            convert(folder, LEROBOT, target, policies=Policies(strict=True))
    except CorpusError as error:
        return said, str(error)
    finally:
        shutil.rmtree(target, ignore_errors=True)
    return said, ""


PLACES = [0, *(pytest.param(place, marks=pytest.mark.long) for place in range(1, 9))]


@pytest.mark.parametrize("place", PLACES)
def test_seeded_faults_are_found_and_sound_sets_raise_no_alarm(place: int, tmp_path: Path) -> None:
    sets = [tmp_path / f"set{number}" for number in range(5)]
    for number, folder in enumerate(sets):
        made(folder, 9 * place + number)
    if REAL.is_dir():
        sets.append(tmp_path / "real")
        real(sets[-1])
    alarms = {folder.name: findings(folder, tmp_path / "data") for folder in sets}
    assert not any(map(any, alarms.values())), alarms
    seeded, missed = 0, []
    for number, (kind, (rules, change)) in enumerate(KINDS.items()):
        for folder in sets[2:] if place else sets[number % 2 :][:2]:
            rng, copy = random.Random(f"{kind} {place}"), tmp_path / "copy"
            shutil.copytree(folder, copy)
            try:
                change(rng, copy)
            except (LookupError, FileNotFoundError):  # a set without such an entry
                continue
            else:
                seeded += 1
                texts = findings(copy, tmp_path / "data")
                if not all(any(f"[{rule}]" in text for rule in rules.split()) for text in texts):
                    missed.append((kind, folder.name, *texts))
            finally:
                shutil.rmtree(copy)
    print(f"{seeded} faults in {len(sets)} sound sets, {len(missed)} missed: {missed}")
    assert seeded > 50
    assert len(missed) <= seeded / 100, (seeded, missed)
