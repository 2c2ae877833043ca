"""Mutated files, converted in forked children: a crash or a hang of one is seen, and named."""

from __future__ import annotations

import json
import os
import random
import resource
import select
import shutil
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import h5py
import numpy as np
import torch

from replaykit.datasets.converting import local_sources
from replaykit.datasets.engine import h5, h5_values
from replaykit.datasets.engine.conversion import ensure_dataset
from replaykit.datasets.publishing import Published
from tests.datasets.mutated.corpora import CORPORA, Corpus, Key, Rows, numbers_of
from tests.datasets.mutated.mutating import mutate

TIMEOUT_S = 20.0
MEMORY_BYTES = 2 << 30


class Fault(Exception):
    """What must not be, in a sentence."""


def attempt(name: str, good: Path, work: Path, seed: int) -> str:
    """Converts one mutated file; returns ``"converted"`` or ``"refused"``.

    Raises:
        Fault: it is converted wrongly, refused without its name, or something is left.
    """
    corpus, folder = CORPORA[name], work / f"{name}{seed}"
    folder.mkdir()
    try:
        path, _ = mutate(good, folder, seed)
        target = work / f"out-{name}{seed}"
        # Small as they are, compressed arrays of half of the files do not go through HDF5.
        least = 1 if seed % 2 else 1 << 15
        vars(h5)["LEAST_BYTES"] = vars(h5_values)["_LEAST_CHUNK_BYTES"] = least
        try:
            # What `convert` does, but for the buffer over the result.
            published = ensure_dataset(
                target, get_sources=lambda: local_sources(path), layout=corpus.layout
            )
        except (ValueError, OSError) as error:
            if str(path) not in str(error):
                raise Fault(f"{error!r} does not name the file") from error
            left = [p.name for p in work.iterdir() if target.name in p.name]
            if left not in ([], [f".{target.name}.lock"]):
                raise Fault(f"{left} is left after {error!r}") from error
            return "refused"
        check(corpus, path, published)
        return "converted"
    finally:
        for made in work.iterdir():
            if f"{name}{seed}" in made.name:
                shutil.rmtree(made) if made.is_dir() else made.unlink()


def check(corpus: Corpus, paths: Path | Sequence[Path], published: Published) -> None:
    """Compares a data set with what h5py reads of its files, all of it, bit for bit."""
    report, table, stop = published.manifest.report, published.episodes, 0
    for seed, path in enumerate([paths] if isinstance(paths, Path) else paths):
        mine = (table["seed"] == seed).tolist()
        names = [name for name, is_mine in zip(published.groups(), mine, strict=True) if is_mine]
        numbers, starts = (table[key][mine].tolist() for key in ("episode", "start"))
        with h5py.File(path) as file:
            rows = corpus.rows(file, names)
            start, stop = stop, stop + rows.count
            if not names[0].startswith(("[", "/")):
                told = {*names, *(entry["name"] for entry in report["skipped"])}
                root = file["data"] if names[0].startswith("data/") else file
                lost = {f"{root.name}/{member}".strip("/") for member in root} - told
                if lost:
                    raise Fault(f"{lost} is neither converted nor reported")
                if numbers != numbers_of(names):
                    raise Fault(f"episodes {names} are numbered {numbers}")
            if starts != [start + at for at in rows.starts]:
                raise Fault(f"episodes of {path} start at rows {starts}")
            columns = {key: column[start:stop] for key, column in published.columns.items()}
            _compare(columns, rows, seed, {entry["key"] for entry in report["left_out"]})
    if published.rows != stop:
        raise Fault(f"{published.rows} rows, expected {stop}")
    check_statistics(published)


def check_statistics(published: Published) -> None:
    """Compare the statistics in the manifest with those of NumPy over the columns."""
    for array in published.manifest.arrays:
        values, said = published.columns[array.key].numpy(), array.facts["statistics"]
        if values.dtype.kind == "c" or not values.size:
            continue
        known = values.astype(np.float64)
        known = known[~np.isnan(known)]
        if said["nan"] != values.size - known.size:
            raise Fault(f"{array.key} has {values.size - known.size} NaN, not {said['nan']}")
        for name in ("min", "max", "mean", "std") if known.size else ():
            with np.errstate(all="ignore"):
                wanted = getattr(known, name)()
            exact = name in ("min", "max")
            if not np.isfinite(wanted):
                is_right = said[name] is None
            else:
                is_right = np.allclose(said[name], wanted, *((0, 0) if exact else (1e-9, 1e-12)))
            if not is_right:
                raise Fault(f"{name} of {array.key} is {said[name]}, expected {wanted}")


def _compare(columns: dict[Key, torch.Tensor], rows: Rows, seed: int, left_out: set[str]) -> None:
    for flag in ("done", "terminated", "truncated"):
        if columns.pop((flag,)).any():
            raise Fault(f"{flag} is set at the root")
    if (columns.pop(("seed",)) != seed).any() or len(columns.pop(("episode",))) != rows.count:
        raise Fault(f"rows are not the {rows.count} of file {seed}")
    for key, source in rows.source.items():
        if key not in columns and source not in left_out:
            raise Fault(f"{key} is neither converted nor reported")
    for key, column in columns.items():
        ours = column.numpy()
        if key not in rows.pieces:
            raise Fault(f"{key} is no column of the file")
        theirs = rows.column(key)
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            said = f"{ours.shape} {ours.dtype}, expected {theirs.shape} {theirs.dtype}"
            raise Fault(f"{key} is {said}")
        if ours.tobytes() != np.ascontiguousarray(theirs).tobytes():
            raise Fault(f"{key} differs")


def survey(
    jobs: list[tuple[str, int]], work: Callable[[str, int], str], timeout_s: float
) -> dict[str, str]:
    """Does jobs in children; returns for each its outcome, or what became of the child.

    A child goes on to the next job until one kills it; the others are done by another child.
    """
    outcomes: dict[str, str] = {}
    while jobs:
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            _serve(jobs, work, writing)
        os.close(writing)
        done = 0
        with os.fdopen(reading, "rb", 0) as lines:
            while select.select([lines], [], [], timeout_s)[0]:
                line = lines.readline()
                if not line:
                    break
                outcomes.update(json.loads(line))
                done += 1
            else:
                os.kill(pid, signal.SIGKILL)
                outcomes[str(jobs[done])] = f"hangs for {timeout_s} s"
        status = os.waitpid(pid, 0)[1]
        if status and done < len(jobs):
            code = os.waitstatus_to_exitcode(status)
            outcomes.setdefault(str(jobs[done]), f"kills the process ({code})")
        jobs = jobs[done + (done < len(jobs)) :]
    return outcomes


def _serve(jobs: list[tuple[str, int]], work: Callable[[str, int], str], pipe: int) -> None:
    code = 1
    try:
        for job in jobs:
            try:
                outcome = work(*job)
            except BaseException as error:
                outcome = f"{type(error).__name__}: {error}"[:500]
            os.write(pipe, json.dumps({str(job): outcome}).encode() + b"\n")
        code = 0
    finally:
        os._exit(code)


def main(folder: Path, count: int, first: int, only: str | None = None) -> None:
    """Prints the outcomes of ``count`` mutated files as JSON, those that are faults by name.

    Args:
        folder: where they are made.
        count: how many.
        first: the seed of the first; each has the next.
        only: the family of all of them, to look at one again.
    """
    warnings.simplefilter("ignore")
    os.fsync = lambda descriptor: None  # type: ignore[assignment]  # the slowest part of it
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES,) * 2)
    good = {}
    for name, corpus in CORPORA.items():
        (folder / "good" / name).mkdir(parents=True, exist_ok=True)
        good[name] = corpus.write(folder / "good" / name)
    names = list(CORPORA)
    jobs = [(only or names[k % len(names)], k) for k in range(first, first + count)]
    random.Random(0).shuffle(jobs)
    work = folder / "work"
    work.mkdir(exist_ok=True)
    outcomes = survey(jobs, lambda name, seed: attempt(name, good[name], work, seed), TIMEOUT_S)
    plain = {"converted": 0, "refused": 0}
    faults = {}
    for job, outcome in outcomes.items():
        if outcome in plain:
            plain[outcome] += 1
        else:
            faults[job] = outcome
    print(json.dumps({**plain, "faults": faults, "left": sorted(os.listdir(work))}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
