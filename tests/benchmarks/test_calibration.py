"""Constants hold on the machine that they were measured on, and limits follow from them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import calibrate as calibrating
from benchmarks.calibration import Calibration, OtherHost, load, save
from benchmarks.disk import measure_disk
from benchmarks.limits import copy_limit, disk_limit, gather_limit, tree_limit
from benchmarks.machine import Neighbours, fingerprint
from tests.support.refusals import refuses

KNOWN = Calibration(
    host=fingerprint(),
    copy={1: 20.0, 2: 25.0},
    read={1: 40.0, 2: 40.0},
    lines={1: {1 << 20: 1.0, 1 << 30: 8.0}, 2: {1 << 20: 0.5, 1 << 30: 4.0}},
    rows={"index_select": {64: 10.0}},
    disk={"sequential_gbs": 1.0, "reads_per_s_1": 20_000.0, "reads_per_s_16": 80_000.0},
    notes={"disk": "a file"},
)


def test_saved_constants_load_unchanged(tmp_path: Path) -> None:
    save(KNOWN, tmp_path / "here.json")
    assert load(tmp_path / "here.json") == KNOWN


@pytest.mark.parametrize("key", ["processor", "memory_gib", "torch"])
def test_constants_of_another_host_are_refused(tmp_path: Path, key: str) -> None:
    save(replace(KNOWN, host={**KNOWN.host, key: "another"}), tmp_path / "there.json")
    refuses(OtherHost, rf"{key} is .*, there another", load, tmp_path / "there.json")


@pytest.mark.parametrize(
    ("limit", "name", "us"),
    [
        # A small row waits for a line, and a large one for its bytes.
        (gather_limit(KNOWN, 256, 170, 2, 1 << 30), "copy", 256 * 170 / 25e3),
        (gather_limit(KNOWN, 256, 64, 1, 1 << 30), "latency", 256 * 8e-3),
        (gather_limit(KNOWN, 256, 64, 1, 1 << 22), "copy", 256 * 64 / 20e3),
        (copy_limit(KNOWN, rows=8, row_bytes=170), "copy", 8 * 170 / 20e3),
        # 10**9 leaves of 4 bytes and 10**9 bytes of sums above them; 9 more levels fit into 2**20.
        (tree_limit(KNOWN, queries=1000, leaves=1 << 30), "tree", 8.0 + 8.0 + 8 * 1.3),
        # Requests at the best depth.
        (disk_limit(KNOWN, rows=256, row_bytes=1), "disk requests", 256 / 80_000 * 1e6),
    ],
)
def test_limits_follow_from_the_constants(limit: Any, name: str, us: float) -> None:
    assert (limit.name, limit.us) == (name, pytest.approx(us))


def test_wide_rows_are_many_requests_and_an_unmeasured_disk_has_no_limit() -> None:
    wide = disk_limit(KNOWN, rows=256, row_bytes=1 << 20)
    assert wide is not None
    assert (wide.name, wide.us) == ("disk requests", pytest.approx(257 * 3200, rel=1e-4))
    assert disk_limit(replace(KNOWN, disk=None), rows=256, row_bytes=1) is None


def test_measured_constants_are_positive_and_of_this_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(calibrating, "LOADS", 2000)
    monkeypatch.setattr(calibrating, "memory_bytes", lambda: 8 << 22)
    found = calibrating.calibrate(tmp_path, threads=2, quick=True)
    assert found.host == fingerprint()
    assert set(found.copy) == set(found.read) == set(found.lines) == {1, 2}
    assert min(found.copy.values()) > 0
    assert all(ns > 0 for sizes in found.lines.values() for ns in sizes.values())
    assert found.rows["index_select"][64] > 0
    assert not list(tmp_path.iterdir()), "the file that the disk is measured with is gone"
    calibrating.print_calibration(found)
    assert "copy" in capsys.readouterr().out


def test_a_disk_that_cannot_be_measured_is_a_remark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("os.O_DIRECT", raising=False)
    found, reason = measure_disk(tmp_path, 1 << 20)
    assert found is None
    assert "page cache" in reason


def test_share_of_other_processes_excludes_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([(100.0, 10.0, 5.0), (120.0, 22.0, 13.0)])
    monkeypatch.setattr(Neighbours, "_ticks", lambda self: next(seconds))
    assert Neighbours().share() == pytest.approx((12 - 8) / 20)
    monkeypatch.setattr(Neighbours, "_ticks", lambda self: None)
    assert Neighbours().share() is None
