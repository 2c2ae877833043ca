"""Rules of validation that a converter keeps whatever the file: each is broken, and named."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from replaykit.datasets import Field, Groups, Layout, Policies, publishing
from replaykit.datasets.column_files import ColumnOutput
from replaykit.datasets.converting import local_sources
from replaykit.datasets.dataset_manifest import Manifest
from replaykit.datasets.engine import row_writer
from replaykit.datasets.engine.conversion import ConvertOptions, ensure_dataset
from replaykit.datasets.engine.episode_finders import EpisodeRefs, FoundEpisodes
from replaykit.datasets.engine.fields import Target
from replaykit.datasets.engine.locations import NameTable
from replaykit.datasets.engine.plan import SourceEpisode
from replaykit.datasets.engine.row_batches import EpisodeRows, Runs, StretchReader
from replaykit.datasets.engine.scan import _Scan
from replaykit.datasets.families import D4RL
from replaykit.datasets.publishing import Published
from replaykit.errors import CorpusError
from replaykit.ted import Key
from tests.datasets.trials import arm_layout

ARM = arm_layout(
    "arm",
    Field("fallen", "terminated"),
)


def write(path: Path, *lengths: int, names: tuple[str, ...] = (), **change: Any) -> Path:
    """Runs of some lengths, all of whose numbers are other ones, and none zero."""
    with h5py.File(path, "w") as file:
        for k, steps in enumerate(lengths):
            base = 1000 * (k + 1)
            values = {
                "joints": base + np.arange(2.0 * (steps + 1)).reshape(steps + 1, 2),
                "torque": base + np.arange(1.0 * steps)[:, None],
                "score": base + np.arange(1.0 * steps),
                "fallen": np.zeros(steps, bool),
            }
            for name, value in {**values, **change}.items():
                file[f"{names[k] if names else f'run{k}'}/{name}"] = value
    return path


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., Published]:
    def run(path: Path, layout: Layout = ARM, *, force: bool = False, **options: Any) -> Published:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            return ensure_dataset(
                tmp_path / "data",
                get_sources=lambda: local_sources([path]),
                layout=layout,
                force=force,
                options=ConvertOptions(**options),
            )

    return run


class Wrong(Runs):
    """Takes another value for one row."""

    row = 0

    def within(self, start: int, stop: int) -> Runs:
        found = super().within(start, stop)
        return Wrong(found.rows, found.records, found.counts)

    def records_in(self, block: np.ndarray, start: int) -> np.ndarray:
        found, at = super().records_in(block, start), self.row - int(self.rows[0])
        if 0 <= at < len(found):
            found = found.copy()
            found[at] += 1
        return found


@pytest.fixture
def spoil(monkeypatch: pytest.MonkeyPatch) -> Callable[[Key, int], None]:
    """Has the engine store another value in one row of a column."""

    def run(key: Key, row: int) -> None:
        real = Runs.of

        def of(episodes: EpisodeRows, target: Target, extra: int = 0) -> Runs:
            found = real(episodes, target, extra)
            if target.key != key:
                return found
            return Wrong(found.rows, found.records, found.counts)

        monkeypatch.setattr(Wrong, "row", row)
        monkeypatch.setattr(Runs, "of", of)

    return run


REWARD, ARRIVED = ("next", "reward"), ("next", "observation")


@pytest.mark.parametrize("block_bytes", [16, 1 << 24])
@pytest.mark.parametrize(
    ("key", "row", "said"),
    [
        (REWARD, 0, r"run0/score, record 0: .*the reward .*row 0 .*\[V24\]"),
        (REWARD, 2, r"run0/score, record 2: .*the reward .*row 2 .*\[V24\]"),
        (REWARD, 7, r"run1/score, record 3: .*the reward .*row 7 .*\[V24\]"),
        (REWARD, 9, r"run1/score, record 5: .*the reward .*row 9 .*\[V24\]"),
        (ARRIVED, 3, r"run0/joints, record 4: .*the final state .*row 3 .*\[V23\]"),
        (ARRIVED, 9, r"run1/joints, record 6: .*the final state .*row 9 .*\[V23\]"),
    ],
)
def test_reward_or_final_state_of_another_record_is_found(
    tmp_path, made, spoil, block_bytes, key, row, said
):
    """First, middle and last row of every episode have the records that table (d) names."""
    path = write(tmp_path / "a.h5", 4, 6)
    spoil(key, row)
    with pytest.raises(RuntimeError, match=rf"a\.h5: {said}"):
        made(path, block_bytes=block_bytes)
    assert not (tmp_path / "data").exists()


def test_end_that_is_the_beginning_of_the_next_episode_is_found(tmp_path, made, monkeypatch):
    """V23, N19: flat arrays, of which the engine takes the record after the last one."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name, width in (("observations", 3), ("actions", 2)):
            file[name] = np.random.default_rng(0).normal(size=(8, width))
        file["rewards"] = np.arange(8.0)
        file["terminals"], file["timeouts"] = np.zeros(8, bool), np.arange(8) == 3
    assert made(tmp_path / "a.h5", D4RL).episodes["length"].tolist() == [3, 3]
    monkeypatch.setattr(Layout, "_lost", lambda self, *, is_after: 0)
    with pytest.raises(RuntimeError, match=r"a\.h5: observations, record 4: .*row 3 .*\[V23\]"):
        made(tmp_path / "a.h5", D4RL, force=True)
    assert made(tmp_path / "a.h5", D4RL).rows == 6  # what was there stays


@pytest.mark.parametrize("block_bytes", [16, 1 << 24])
@pytest.mark.parametrize(
    ("row", "at"), [(2, "run0/torque, record 2"), (5, "run1/torque, record 1")]
)
def test_row_of_which_nothing_was_stored_is_found(
    tmp_path, made, monkeypatch, block_bytes, row, at
):
    """V28, N7: rows that read as zero in every column, where the source does not."""
    path, real = write(tmp_path / "a.h5", 4, 6), ColumnOutput.write

    def lose(self: ColumnOutput, position: int, entries: np.ndarray, **options: Any) -> None:
        if position <= row < position + len(entries):
            entries = entries.copy()
            entries[row - position] = 0
        real(self, position, entries, **options)

    monkeypatch.setattr(ColumnOutput, "write", lose)
    monkeypatch.setattr(row_writer, "check_alignment", lambda *args: None)
    with pytest.raises(RuntimeError, match=rf"a\.h5: {at}: .*not stored: row {row} .*\[V28\]"):
        made(path, block_bytes=block_bytes)
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("block_bytes", [16, 1 << 24])
def test_rows_that_are_zero_in_the_source_are_kept(tmp_path, made, block_bytes):
    """V28: of one file as of several that are read together, with a value for a whole episode."""
    zero = {name: np.zeros((4, 2)) if name == "joints" else np.zeros((3, 1)) for name in
            ("joints", "torque", "score")}  # fmt: skip
    zero["once"] = np.zeros(1)
    path = write(tmp_path / "a.h5", 3, 3, 3, **zero)
    with h5py.File(path, "a") as file:
        file["run1/joints"][1] = 7
    layout = replace(ARM, fields=(*ARM.fields, Field("once", "info", ("once",), required=False)))
    found = made(path, layout, block_bytes=block_bytes)
    assert found.rows == 9
    assert found.columns["observation",].sum() == 14
    assert not found.columns["action",].any()


def test_rows_that_the_layout_does_not_give_are_found(tmp_path, made, monkeypatch):
    """V34: the rows of an episode follow from its records by the formula of its family."""
    path, real = write(tmp_path / "a.h5", 4, 6), _Scan._episode

    def fewer(self: _Scan, *args: Any) -> SourceEpisode:
        episode = real(self, *args)
        return episode._replace(rows=episode.rows - (episode.group == "run1"))

    monkeypatch.setattr(_Scan, "_episode", fewer)
    said = r"a\.h5: run1: 6 records are rows 4 to 8 of 9, .* makes 6 rows .*\[V34\]"
    with pytest.raises(RuntimeError, match=said):
        made(path)


def test_rows_that_were_not_all_written_are_found(tmp_path, made, monkeypatch):
    """V34: a part of a column that was passed over."""
    path, real = write(tmp_path / "a.h5", 4), StretchReader.blocks

    def fewer(self: StretchReader, leaf: Any, loaded: Any) -> Iterator[tuple[int, Any]]:
        blocks = list(real(self, leaf, loaded))
        yield from blocks[:-1] if leaf.path == "score" else blocks

    monkeypatch.setattr(StretchReader, "blocks", fewer)
    with pytest.raises(RuntimeError, match=r"next.*reward.* were not all written \[V34\]"):
        made(path, block_bytes=16)


@dataclass(frozen=True)
class ByBytes(Groups):
    """Finds groups as h5py lists them."""

    def find(self, *args: Any) -> FoundEpisodes:
        found = super().find(*args)
        names = list(found.episodes.names or ())
        order = sorted(range(len(names)), key=lambda at: names[at])
        found.episodes = EpisodeRefs(
            found.episodes.numbers[order], NameTable(names[at] for at in order)
        )
        return found


@pytest.mark.pitfall("DS9")
@pytest.mark.parametrize("prefix", ["run", "run-0", "run1_"])
def test_order_of_groups_is_natural(tmp_path, made, prefix):
    """V35: the eleventh episode is the one of the number 10, whatever finds them."""
    names = tuple(f"{prefix}{k}" for k in range(11))
    path = write(tmp_path / "a.h5", *[3] * 11, names=names)
    assert made(path).groups() == list(names)
    layout = replace(ARM, episodes=ByBytes("run", having=("torque",)))
    said = rf"a\.h5: {prefix}2: comes after {prefix}10, but .* natural order .*\[V35\]"
    with pytest.raises(CorpusError, match=said):
        made(path, layout, force=True)


def test_interleaved_rows_are_counted_where_they_are_kept(tmp_path, made):
    """V40: next observations that are not the observations that follow, where no flag is set."""
    draw = np.random.default_rng(0)
    states = draw.normal(size=(2, 5, 3))  # of two environments, in turn
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["observations"] = states[:, :-1].swapaxes(0, 1).reshape(8, 3)
        file["next_observations"] = states[:, 1:].swapaxes(0, 1).reshape(8, 3)
        file["actions"], file["rewards"] = draw.normal(size=(8, 2)), np.arange(8.0)
        file["terminals"], file["timeouts"] = np.zeros(8, bool), np.arange(8) == 7
    with pytest.raises(CorpusError, match=r"a\.h5: next\.observation, record 0: .*\[V22\]"):
        made(tmp_path / "a.h5", D4RL)
    found = made(tmp_path / "a.h5", D4RL, policies=Policies(on_invalid="keep"))
    notes = [(n["rule"], n["count"], n["first"]) for n in found.manifest.report["warnings"]]
    assert ("V40", 7, "a.h5: next.observation, record 0") in notes
    assert ("V22", 1, "a.h5: next.observation, record 0") in notes


@pytest.mark.parametrize("kind", ["short file", "other count"])
def test_result_that_contradicts_its_manifest_is_not_published(tmp_path, made, monkeypatch, kind):
    """V61: sizes, shapes and counts, on the files that are about to be published."""
    path, real = write(tmp_path / "a.h5", 4), publishing.sync_tree

    def cut(directory: Path) -> None:
        real(directory)
        os.truncate(directory / "action.memmap", 8)

    if kind == "short file":
        monkeypatch.setattr(publishing, "sync_tree", cut)
    else:
        real_rows = Manifest._json
        monkeypatch.setattr(Manifest, "_json", lambda self: {**real_rows(self), "episodes": 2})
    said = r"data was not made: .* do not match its manifest \[V61\]"
    with pytest.raises(RuntimeError, match=said):
        made(path)
    assert not (tmp_path / "data").exists()


def test_every_rule_that_is_named_is_listed():
    """The list of docs/corpora.md has the rules that messages name, and one that none can."""
    root = Path(__file__).parents[2]
    named = {
        rule
        for path in (root / "replaykit").rglob("*.py")
        for rule in re.findall(r"\bV[0-9]{2}\b", path.read_text())
    }
    lines = (root / "docs/corpora.md").read_text().splitlines()
    cells = [line.split("|")[1] for line in lines if line.startswith("| V")]
    listed = re.findall(r"\bV[0-9]{2}\b", " ".join(cells))
    assert len(listed) == len(set(listed))
    assert set(listed) == named | {"V62"}
