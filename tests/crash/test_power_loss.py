"""The power is cut at any point: what is found is the last durable state, or the next one."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from replaykit.adapters import recording_folder
from replaykit.checkpoint import chunks
from replaykit.datasets import publishing
from tests import effort
from tests.crash.power import choose, search
from tests.crash.power_workloads import (
    GROWING,
    commits,
    publications,
    recordings,
    recovery,
    saves,
)
from tests.crash.recovering import KINDS, ONCE, SHARED


@pytest.fixture(autouse=True)
def small_and_fast(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No sync waits for the real disk, and few bytes need several files."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(chunks, "_CHUNK_BYTES", 1 << 13)
    monkeypatch.setattr(recording_folder, "_FIRST_BYTES", 3000)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


WORKLOADS: dict[str, Callable[..., Any]] = {
    **{
        kind: lambda folder, kind=kind, **o: commits(kind, folder, **o)
        for kind in (*KINDS, *ONCE, *SHARED, *GROWING)
    },
    "saves": lambda folder, **o: saves(folder, 1, **o),
    "kept saves": lambda folder, **o: saves(folder, 2, **o),
    "data sets": publications,
    "recordings": recordings,
}
COMMITS = (*KINDS, *ONCE, *SHARED, *GROWING)


def _survives(workload: str, folder: Path, most: int, *, seed: int = 0) -> None:
    recorder, check = WORKLOADS[workload](folder / "disk")
    faults = [*search(recorder, folder / "cuts", check, most=most, seed=seed)]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("kind", COMMITS)
def test_durable_commits_survive_a_cut_anywhere(kind: str, tmp_path: Path) -> None:
    _survives(kind, tmp_path, effort.cases(50))


@pytest.mark.parametrize("workload", ["saves", "kept saves"])
def test_saves_survive_a_cut_anywhere(workload: str, tmp_path: Path) -> None:
    _survives(workload, tmp_path, effort.cases(60))


@pytest.mark.parametrize("swap", ["exchange", "two renames"])
def test_published_data_sets_survive_a_cut_anywhere(
    swap: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if swap == "two renames":
        monkeypatch.setattr(publishing, "exchange", lambda *_: False)
    _survives("data sets", tmp_path, effort.cases(20))


def test_recordings_survive_a_cut_anywhere(tmp_path: Path) -> None:
    _survives("recordings", tmp_path, effort.cases(50))


@pytest.mark.parametrize(
    ("kind", "most"),
    [
        ("ring", 8),
        ("once streams", 8),
        *(pytest.param(kind, 25, marks=pytest.mark.long) for kind in COMMITS),
    ],
)
def test_cut_during_recovery_changes_nothing(kind: str, most: int, tmp_path: Path) -> None:
    recorder, check = WORKLOADS[kind](tmp_path / "disk")
    cuts = [cut for cut in choose(recorder, 10 * most, seed=1) if len(cut.steps) > 1][:most]
    assert cuts
    for number, cut in enumerate(cuts):
        again = recovery(kind, cut, tmp_path / f"disk {number}", check)
        faults = [*search(again, tmp_path / f"cuts {number}", check, most=most)]
        assert not faults, "\n".join([cut.where, *faults])


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("workload", WORKLOADS)
def test_thousands_of_cuts_leave_durable_states(workload: str, seed: int, tmp_path: Path) -> None:
    _survives(workload, tmp_path, 150 if workload == "data sets" else 500, seed=100 + seed)


LOST = [
    ("ring", r"journal\.bin"),
    ("ring", r"records\.memmap"),
    ("ring", r"pixels\.memmap"),
    ("ring", r"state-\d\.bin"),
    ("ring", r"rows/%recovery"),
    ("ring", r"rows"),
    ("shared ring", r"state-\d\.bin"),
    ("shared ring", r"journal\.bin"),
    ("growing ring", r"table-\d+-8\.bin"),
    ("growing once", r"%beside/.*"),
    ("saves", r"data-.*"),
    ("saves", r"\.manifest\.json.*"),
    ("saves", r"a/saved"),
    ("data sets", r".*\.memmap"),
    ("data sets", r"root"),
    ("recordings", r"\.committed\.json"),
    ("recordings", r"a/run"),
    ("recordings", r"records\.memmap"),
]


@pytest.mark.parametrize(("workload", "lost"), LOST)
def test_model_finds_the_loss_of_any_sync(workload: str, lost: str, tmp_path: Path) -> None:
    """If syncs of some files or directories did not reach the disk, a state would be lost."""
    pattern = re.compile(rf"(.*/)?{lost}")
    recorder, check = WORKLOADS[workload](tmp_path / "disk", lost=pattern.fullmatch)
    assert any(search(recorder, tmp_path / "cuts", check, most=40))
