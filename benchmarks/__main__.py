"""``python -m benchmarks``: what is asked of replaykit's speed, and what this machine shows."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.against import AT_MOST, BY_NAME, compare_works, started
from benchmarks.builds import BuildError, build, resolve
from benchmarks.calibrate import calibrate, print_calibration
from benchmarks.calibration import Calibration, OtherHost, load, save
from benchmarks.contender import Mismatch
from benchmarks.harness import seed_all
from benchmarks.machine import Neighbours, describe
from benchmarks.report import Line, print_lines
from benchmarks.setting import Setting
from benchmarks.works import WORKS, measure

__all__ = ["main"]

ASKED = (1_000_000, 20_000)
"""Rows and rows of images that the targets are for."""


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Contenders in one process and in turn, on equal work, checked before timed.",
    )
    parser.add_argument(
        "works", nargs="*", metavar="NAME", help=f"which works: of {', '.join(WORKS)}; all"
    )
    parser.add_argument("--rows", type=int, default=ASKED[0], help="transitions in a buffer")
    parser.add_argument("--images", type=int, default=ASKED[1], help="rows of two images")
    parser.add_argument("--rounds", type=int, default=200, help="turns that each contender takes")
    parser.add_argument("--threads", type=int, default=2, help="threads that torch may use")
    parser.add_argument(
        "--only", nargs="+", choices=[*WORKS], metavar="NAME", help=f"of {', '.join(WORKS)}"
    )
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument(
        "--calibration",
        type=Path,
        help="constants of this machine: read from this file, or measured and written to it",
    )
    parser.add_argument("--scratch", type=Path, help="a folder on disk for mapped files")
    parser.add_argument("--quick", action="store_true", help="a tenth of the rows, few rounds")
    parser.add_argument(
        "--against",
        metavar="REV",
        help="build that commit, and compare this tree with it, in turn; "
        f"{', '.join(BY_NAME)} only where they are named, and no other contenders",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="exit with 1 where a target is missed; "
        f"with --against, where the median ratio of a time or count exceeds {AT_MOST}",
    )
    options = parser.parse_args(arguments)
    if options.quick:
        options.rows, options.images = options.rows // 10, options.images // 10
        options.rounds = min(options.rounds, 20)
    unknown = [name for name in options.works if name not in WORKS]
    if unknown:
        parser.error(f"no work {', '.join(unknown)}; there are {', '.join(WORKS)}")
    options.only = [*options.works, *(options.only or [])]
    if min(options.rows, options.images, options.rounds, options.threads) < 1:
        parser.error("rows, images, rounds and threads are at least 1")
    return options


def _calibration(options: argparse.Namespace, scratch: Path) -> tuple[Calibration | None, str]:
    """The constants of this machine, or None and why no share of a limit can be told."""
    file: Path | None = options.calibration
    if file is not None and file.exists():
        try:
            return load(file), f"read from {file}"
        except OtherHost as error:
            return None, f"no share of a limit is told: {error}"
    found = calibrate(scratch, threads=options.threads, quick=options.quick)
    if file is not None:
        save(found, file)
    return found, "measured before the works"


def _run(options: argparse.Namespace, scratch: Path) -> tuple[list[Line], dict[str, Any]]:
    calibration, origin = _calibration(options, scratch)
    if calibration is not None:
        print_calibration(calibration)
    print(f"calibration: {origin}\n")
    setting = _setting(options, scratch, calibration)
    lines: list[Line] = []
    for name in options.only or WORKS:
        print(f"measuring {name}", file=sys.stderr, flush=True)
        seed_all()
        lines += measure(WORKS[name], setting)
    record = {
        **_record(options, lines),
        "calibration": None
        if calibration is None
        else {"copy_gbs": calibration.copy, "line_ns": calibration.lines, "disk": calibration.disk},
        "calibration_origin": origin,
    }
    return lines, record


def _against(
    options: argparse.Namespace, scratch: Path, commit: str
) -> tuple[list[Line], dict[str, Any]]:
    """Compare this tree with a commit: the table, and its record."""
    label = f"at {commit[:9]}"
    setting = _setting(options, scratch)
    names = options.only or [name for name in WORKS if name not in BY_NAME]
    with started(setting, label, build(commit)) as sides:
        for side in sides:
            print(f"{side.name}: {side.check_package()}")
        lines = list(compare_works(sides, names, options.rounds))
    against = {"revision": options.against, "commit": commit}
    return lines, {**_record(options, lines), "against": against}


def _setting(
    options: argparse.Namespace, scratch: Path, calibration: Calibration | None = None
) -> Setting:
    return Setting(
        rows=options.rows,
        images=options.images,
        rounds=options.rounds,
        threads=options.threads,
        scratch=scratch,
        calibration=calibration,
    )


def _record(options: argparse.Namespace, lines: Sequence[Line]) -> dict[str, Any]:
    return {
        "machine": describe(),
        "rows": options.rows,
        "images": options.images,
        "rounds": options.rounds,
        "lines": [line.to_json() for line in lines],
        "left_out": {f"{line.work}: {line.name}": line.missing for line in lines if line.missing},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints; returns 1 where ``--check`` finds a target missed, or values wrong."""
    options = _parse(arguments)
    torch.set_num_threads(options.threads)
    machine = ", ".join(f"{key} {value}" for key, value in describe().items())
    print(textwrap.fill(machine, 100, break_on_hyphens=False))
    neighbours = Neighbours()
    with tempfile.TemporaryDirectory(prefix="replaykit-bench-", dir=options.scratch) as scratch:
        try:
            if options.against is None:
                lines, record = _run(options, Path(scratch))
            else:
                lines, record = _against(options, Path(scratch), resolve(options.against))
        except (Mismatch, BuildError) as error:
            print(f"nothing more is timed: {error}", file=sys.stderr)
            return 1
    print()
    print_lines(lines)
    if options.against is None and (options.rows, options.images) != ASKED:
        print(f"what is asked, is asked of {ASKED[0]:,} rows and {ASKED[1]:,} of images")
    record["others"] = share = neighbours.share()
    if share is not None:
        print(
            f"others took {share:.0%} of the processors meanwhile" + ", too much" * (share > 0.05)
        )
    if options.json is not None:
        options.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return int(options.check and any(line.is_met is False for line in lines))


if __name__ == "__main__":
    raise SystemExit(main())
