"""How fast trials become a published data set, against plain h5py reading the same arrays.

    python -m benchmarks.conversion [--file F] [--rounds N] [--json OUT]

Both read the same arrays from the page cache, in one process and in turn. What is compared is a
full conversion (scan, checks, columns, checksums, sync to disk, publication) with
``dataset[...]`` over all leaves that the conversion keeps. Values are compared first. Peak memory
is that of a child process that converts, less that of one that only imports.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from replaykit.datasets.engine.conversion import ensure_dataset
from replaykit.datasets.families.robohive import ROBOHIVE
from replaykit.datasets.opened import Published
from replaykit.datasets.publish import remove_published
from replaykit.datasets.sources import Sources
from replaykit.testing.robohive import RoboHiveWriter, make_trial

__all__ = ["main"]

SAMPLE = Path(__file__).parents[1] / "../shared/data/robohive/fk1_random_policy_trace.h5"

_CHILD = """
import resource, sys, warnings
from pathlib import Path
from replaykit.datasets.engine.conversion import ensure_dataset
from replaykit.datasets.families.robohive import ROBOHIVE
from replaykit.datasets.sources import Sources
import h5py, tqdm, filelock
warnings.simplefilter("ignore")
if len(sys.argv) > 1:
    source, target = map(Path, sys.argv[1:3])
    ensure_dataset(target, get_sources=lambda: Sources.local([source]), layout=ROBOHIVE)
try:
    # ru_maxrss counts the parent that this process was forked from; the kernel's own does not.
    lines = Path("/proc/self/status").read_text().splitlines()
    print(next(line.split()[1] for line in lines if line.startswith("VmHWM")))
except OSError:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def write_synthetic(path: Path, *, trials: int, records: int) -> None:
    """Writes trials of FK1's widths with a small camera: about 11 kB for each record."""
    draw = np.random.default_rng(0)
    with RoboHiveWriter(path) as writer:
        for seed in range(trials):
            trial = make_trial(records, seed=seed, widths=(75, 9))
            # Slowly changing pixels compress like those of a camera.
            frame = draw.integers(0, 256, (40, 64, 3), np.uint8)
            noise = draw.integers(0, 8, (records, 40, 64, 3), np.uint8)
            trial["env_infos"]["visual_dict"] = {"rgb:left_cam:40x64:2d": frame + noise}
            trial["env_infos"]["state"]["body_pos"] = draw.normal(size=(records, 22, 3))
            writer.add_trial(**trial)


def write_uncompressed(path: Path, *, trials: int, records: int) -> None:
    """Writes trials of FK1's widths with large frames and without compression.

    Reading such a file plainly is little more than a copy in memory, which is as fast as it gets;
    a conversion writes every value twice and waits for the disk.
    """
    draw = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        for seed in range(trials):
            trial = make_trial(records, seed=seed, widths=(75, 9))
            trial["actions"] = np.vstack([trial["actions"], np.full((1, 9), np.nan)])
            frames = draw.integers(0, 256, (records, 120, 212, 3), np.uint8)
            trial["env_infos"]["visual_dict"] = {"rgb:left_cam:120x212:2d": frames}
            _write_tree(file.create_group(f"Trial{seed}"), trial)


def _write_tree(group: h5py.Group, tree: Mapping[str, Any]) -> None:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            _write_tree(group.create_group(name), value)
        else:
            group[name] = value


def read_plainly(path: Path, leaves: Sequence[str]) -> list[np.ndarray]:
    """Reads all of the leaves of every trial, as anyone would with h5py."""
    with h5py.File(path, "r") as file:
        return [trial[leaf][...] for trial in file.values() for leaf in leaves]


def check(path: Path, data: Published) -> list[str]:
    """Compares every stored source value with the file; returns the leaves that are stored."""
    leaves = {array.facts["source"] for array in data.manifest.arrays if "source" in array.facts}
    with h5py.File(path, "r") as file:
        groups = [file[group] for group in data.groups()]
        for array in data.manifest.arrays:
            if "source" not in array.facts:
                continue
            shift = array.facts["shift"]
            column = data.columns[array.key].numpy()
            start = 0
            for group in groups:
                values = group[array.facts["source"]][...]
                rows = len(values) - 1
                expected = values[shift : shift + rows].reshape(rows, *column.shape[1:])
                if not np.array_equal(column[start : start + rows], expected):
                    raise SystemExit(f"{array.key} differs from {group.name}: not timed")
                start += rows
    return sorted({*leaves, "done"})


def timed(action: Callable[[], object]) -> float:
    """Returns the seconds of one call."""
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def peak_kib(*arguments: Path) -> int:
    """Returns the largest resident set of a child process that converts, or only imports."""
    command = [sys.executable, "-c", _CHILD, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(done.stdout)


def measure(path: Path, rounds: int, work: Path) -> dict[str, Any]:
    """Measures one file."""
    sources = Sources.local([path])
    target = work / path.stem

    def convert() -> Published:
        return ensure_dataset(target, get_sources=lambda: sources, layout=ROBOHIVE)

    data = convert()
    leaves = check(path, data)
    nbytes = sum(array.nbytes for array in read_plainly(path, leaves))
    rows = data.rows
    plain, converted = [], []
    for _ in range(rounds):
        remove_published(target)
        plain.append(timed(lambda: read_plainly(path, leaves)))
        converted.append(timed(convert))
    ratios = [read / made for read, made in zip(plain, converted, strict=True)]
    remove_published(target)
    bare = peak_kib()
    return {
        "file": path.name,
        "rows": rows,
        "episodes": len(data.episodes),
        "source_mb": nbytes / 1e6,
        "rounds": rounds,
        "h5py_rows_per_s": rows / statistics.median(plain),
        "convert_rows_per_s": rows / statistics.median(converted),
        "speed_of_h5py": statistics.median(ratios),
        "speed_of_h5py_range": [min(ratios), max(ratios)],
        "bare_peak_mib": bare / 1024,
        "convert_peak_over_bare_mib": (peak_kib(path, target) - bare) / 1024,
    }


def show(result: dict[str, Any]) -> None:
    """Prints one result."""
    low, high = result["speed_of_h5py_range"]
    print(
        f"{result['file']}: {result['rows']:,} rows in {result['episodes']} episodes, "
        f"{result['source_mb']:,.1f} MB uncompressed\n"
        f"  plain h5py          {result['h5py_rows_per_s']:>12,.0f} rows/s\n"
        f"  conversion          {result['convert_rows_per_s']:>12,.0f} rows/s\n"
        f"  conversion / h5py   {result['speed_of_h5py']:>12.2f}   "
        f"(median of {result['rounds']} rounds, {low:.2f} to {high:.2f}; 0.25 is asked of "
        "compressed files)\n"
        f"  peak memory         {result['convert_peak_over_bare_mib']:>12.1f} MiB over the "
        f"{result['bare_peak_mib']:.0f} MiB of a process that only imports"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark and prints the results."""
    parser = argparse.ArgumentParser(prog="benchmarks.conversion", description=__doc__)
    parser.add_argument("--file", type=Path, help="an H5 file of trials instead of our own")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--trials", type=int, default=24, help="of the synthetic file")
    parser.add_argument("--records", type=int, default=600, help="of each synthetic trial")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args(arguments)
    results = []
    with tempfile.TemporaryDirectory(prefix="replaykit-bench-") as name, warnings.catch_warnings():
        # What is left out of a file is no matter here.
        warnings.simplefilter("ignore", UserWarning)
        work = Path(name)
        files = [options.file] if options.file is not None else [SAMPLE]
        if options.file is None:
            files.append(work / "synthetic.h5")
            write_synthetic(files[-1], trials=options.trials, records=options.records)
            files.append(work / "uncompressed.h5")
            records = max(2, options.records // 8)
            write_uncompressed(files[-1], trials=options.trials, records=records)
        for path in files:
            if not path.exists():
                print(f"{path} is not present: left out")
                continue
            results.append(measure(path, options.rounds, work))
            show(results[-1])
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
