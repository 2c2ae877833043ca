"""Conversion of H5 files, against plain h5py reading the same arrays and against TorchRL.

Plain h5py opens every dataset whose values are in the result, and reads it whole: decompression is
in both. A conversion is `replaykit.datasets.convert` with all that it does: checksums of the files,
scan, checks, statistics, columns, sync to disk, publication. Files are in the page cache. What
writing takes alone stands beside it: as many bytes as the columns have, from memory into one file,
with fsync.
"""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from benchmarks.contender import Unavailable, expect
from benchmarks.corpus_files import (
    write_demonstrations,
    write_flat,
    write_images,
    write_trials,
)
from benchmarks.harness import Times
from benchmarks.report import SUBJECT, Line, Target, lines_of_turns, missing_lines
from benchmarks.setting import Setting
from replaykit.datasets import convert
from replaykit.datasets.families import D4RL, ROBOHIVE, ROBOMIMIC
from replaykit.datasets.publishing import remove_published

__all__ = ["asked", "run"]

PLAIN, WRITE, TORCHRL = "plain h5py", "bytes as one file", "TorchRL"
ALONE, BOTH = SUBJECT, "replaykit, 2 workers"
AT_MOST = {PLAIN: 2.0, ALONE: 1 / 1.6, TORCHRL: 1 / 15}
MEMORY_MB = 256.0
MOST_ROUNDS = 5

_TORCHRL_TRIALS = 10
_BLOCK = 8 << 20

_CHILD = """
import sys, warnings
import h5py, tqdm, torch, tensordict
from replaykit.datasets import convert, families
def peak():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
warnings.simplefilter("ignore")
before = peak()
convert(sys.argv[1], getattr(families, sys.argv[2]), sys.argv[3])
print(peak() - before)
"""


@dataclass(frozen=True)
class Corpus:
    """A corpus of two files; ``write`` makes one of so many units, ``size`` is how many."""

    title: str
    layout: str
    size: int
    write: Callable[[Path, int, int], None]


CORPORA = (
    Corpus("RoboSet trials, gzip", "ROBOHIVE", 100, write_trials),
    Corpus("flat steps, gzip", "D4RL", 300_000, write_flat),
    Corpus("flat steps, plain", "D4RL", 300_000, partial(write_flat, compressed=False)),
    Corpus("flat steps, 10 an episode, gzip", "D4RL", 300_000, partial(write_flat, length=10)),
    Corpus("demonstrations, images, gzip", "ROBOMIMIC", 40, write_images),
    Corpus("demonstrations of 10 steps, plain", "ROBOMIMIC", 500, write_demonstrations),
)
LARGE = (
    Corpus("images, 340 MB", "ROBOMIMIC", 160, partial(write_images, compressed=False)),
    Corpus("10 steps an episode, 300 MB", "D4RL", 1_250_000, partial(write_flat, length=10)),
)
LAYOUTS: Mapping[str, Any] = {"ROBOHIVE": ROBOHIVE, "D4RL": D4RL, "ROBOMIMIC": ROBOMIMIC}


def asked(setting: Setting) -> dict[str, tuple[Target, ...]]:
    """Returns what is asked, by the title of a work."""
    found: dict[str, tuple[Target, ...]] = {}
    for corpus in CORPORA:
        found[corpus.title] = (Target(PLAIN, AT_MOST[PLAIN]),)
        found[f"{corpus.title}: 2 at once"] = (Target(ALONE, AT_MOST[ALONE], BOTH),)
    found[_versus(setting)] = (Target(TORCHRL, AT_MOST[TORCHRL]),)
    for corpus in LARGE:
        found[f"peak memory, {corpus.title}"] = (Target(SUBJECT, MEMORY_MB),)
    return found


def _trials(setting: Setting) -> int:
    return max(2, _TORCHRL_TRIALS * setting.rows // 1_000_000)


def _versus(setting: Setting) -> str:
    return f"one RoboSet file of {_trials(setting)} trials"


def run(setting: Setting) -> list[Line]:
    """Measures."""
    with warnings.catch_warnings(), _forking(), _silent_torchrl():
        # What is left out of a file is no matter here.
        warnings.simplefilter("ignore", UserWarning)
        lines: list[Line] = []
        for corpus in CORPORA:
            lines += _told(_compare(corpus, setting))
        lines += _told(_against_torchrl(setting))
        for corpus in LARGE:
            lines += _told([_peak(corpus, setting)])
    return lines


@contextlib.contextmanager
def _forking() -> Iterator[None]:
    """Workers are forked, as they are where nobody says otherwise; importing torchrl does."""
    before = multiprocessing.get_start_method(allow_none=True)
    if "fork" in multiprocessing.get_all_start_methods():
        multiprocessing.set_start_method("fork", force=True)
    try:
        yield
    finally:
        multiprocessing.set_start_method(before, force=True)


@contextlib.contextmanager
def _silent_torchrl() -> Iterator[None]:
    """It lists every file that it writes."""
    logger = logging.getLogger("torchrl")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _told(lines: list[Line]) -> list[Line]:
    """Says at once what was found: all of it takes minutes."""
    for line in lines:
        if line.at_most is not None:
            found = line.value if line.ratio is None else line.ratio
            said = line.missing if found is None else f"{found:.2f}, asked {line.at_most:.2f}"
            print(f"  {line.work}, {line.name}: {said}", file=sys.stderr, flush=True)
    return lines


def _units(corpus: Corpus, setting: Setting) -> int:
    return max(2, corpus.size * setting.rows // 1_000_000)


def _rounds(setting: Setting) -> int:
    return min(MOST_ROUNDS, setting.rounds)


def _compare(corpus: Corpus, setting: Setting) -> list[Line]:
    work = setting.scratch / "corpus"
    work.mkdir()
    files = [work / f"{number}.h5" for number in range(2)]
    for number, file in enumerate(files):
        corpus.write(file, _units(corpus, setting), number)
    layout = LAYOUTS[corpus.layout]
    target = work / "converted"
    data = convert(files, layout, target)
    leaves = _check(files, data)
    nbytes = sum(array.nbytes for array in data.published.manifest.arrays)
    held = np.resize(np.arange(256, dtype=np.uint8), nbytes)
    works: list[tuple[str, Callable[[], object]]] = [
        (PLAIN, partial(_read, files, leaves)),
        (ALONE, partial(convert, files, layout, target)),
        (BOTH, partial(convert, files, layout, target, workers=2)),
        (WRITE, partial(_write, work / "one-file", held)),
    ]
    times = _turns(works, _rounds(setting), partial(_clear, work, target, nbytes))
    shutil.rmtree(work)
    both = {name: times[name] for name in (BOTH, ALONE, PLAIN)}
    title = corpus.title
    wanted = asked(setting)
    alone = {name: times[name] for name in (ALONE, PLAIN, WRITE)}
    again = f"{title}: 2 at once"
    return [
        *lines_of_turns(title, alone, {}, wanted[title]),
        *lines_of_turns(again, both, {}, wanted[again], subject=BOTH),
    ]


def _turns(
    works: Sequence[tuple[str, Callable[[], object]]], rounds: int, clear: Callable[[], None]
) -> dict[str, Times]:
    """Times works in turn, every other round backwards; the first round is not counted."""
    spent: dict[str, list[float]] = {name: [] for name, _ in works}
    for number in range(rounds + 1):
        for name, work in list(works)[:: -1 if number % 2 else 1]:
            clear()
            start = time.perf_counter()
            kept = work()
            us = (time.perf_counter() - start) * 1e6
            del kept
            if number:
                spent[name].append(us)
    return {name: Times(found, found) for name, found in spent.items()}


def _clear(work: Path, target: Path, nbytes: int) -> None:
    """Takes away what the last turn wrote, all of which is on the disk by now."""
    # A data set that is garbage keeps its files, and the next turn would free their memory.
    gc.collect()
    if target.exists():
        remove_published(target)
    (work / "one-file").unlink(missing_ok=True)
    # The memory of a page cache: a virtual machine has to be given it anew after it was free.
    np.ones(nbytes + nbytes // 4, np.uint8)


def _read(files: Sequence[Path], leaves: Mapping[str, Sequence[str]]) -> int:
    """Reads the leaves of every episode, as anyone would with h5py."""
    nbytes = 0
    for path in files:
        with h5py.File(path) as file:
            for group, names in leaves.items():
                node = file[group]
                for episode in _episodes(node):
                    for name in names:
                        nbytes += episode[name][...].nbytes
    return nbytes


def _episodes(node: Any) -> list[Any]:
    return [node] if "actions" in node else [node[name] for name in node]


def _write(path: Path, held: np.ndarray[Any, Any]) -> None:
    with open(path, "wb", buffering=0) as file:
        for start in range(0, len(held), _BLOCK):
            file.write(held[start : start + _BLOCK].data)
        os.fsync(file.fileno())


def _check(files: Sequence[Path], data: Any) -> dict[str, list[str]]:
    """Compares every stored source value with its file; returns what h5py has to read, by group."""
    manifest = data.published.manifest
    stored = [array for array in manifest.arrays if "source" in array.facts]
    table = data.episode_table
    lines = zip(
        data.published.groups(), *(table[key].tolist() for key in ("seed", "start", "length")),
        strict=True,
    )  # fmt: skip
    fields = manifest.report["rules"]["fields"]
    ends = {f["source"] for f in fields if f["role"] in ("terminated", "truncated")}
    columns = {array.key: data.published.columns[array.key].numpy() for array in stored}
    found: dict[str, set[str]] = {}
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(h5py.File(file)) for file in files]
        read: dict[str, Any] = {}
        last: tuple[int, str] | None = None
        for name, seed, start, length in lines:
            group, _, records = name.partition("[")
            base = int(records.partition(":")[0]) if records else 0
            node = opened[seed][group or "/"]
            above = group.rpartition("/")[0] or "/"
            if last != (seed, group):
                # A flat file is read once, however many episodes it has.
                read = {array.facts["source"]: None for array in stored}
                read = {source: node[source][...] for source in read}
                last = (seed, group)
                found.setdefault(above, set()).update(
                    read, (source for source in ends if source in node)
                )
            for array in stored:
                shift = base + array.facts["shift"]
                column = columns[array.key][start : start + length]
                values = read[array.facts["source"]][shift : shift + length]
                values = values.reshape(-1, *column.shape[1:])
                # The last next observation of some episodes is not recorded.
                same = np.array_equal(values, column[: len(values)])
                expect(same and len(values) >= length - 1, f"{array.key} differs from {name}")
    return {group: sorted(names) for group, names in found.items()}


def _against_torchrl(setting: Setting) -> list[Line]:
    """Both are handed the file where it lies: nothing is fetched."""
    work, title = setting.scratch / "corpus", _versus(setting)
    try:
        from torchrl.data.datasets import RobosetExperienceReplay
    except ImportError as error:
        return missing_lines(title, asked(setting)[title], str(error))
    work.mkdir()
    file, target = work / "0.h5", work / "converted"
    write_trials(file, _trials(setting), 0)

    class Local(RobosetExperienceReplay):
        def _download_from_huggingface(self, tempdir: str) -> list[Path]:
            return [file]

    def theirs() -> Any:
        # It reports its progress without being asked.
        with contextlib.redirect_stderr(io.StringIO()):
            return Local(Local.available_datasets[0], 32, root=work / "torchrl", download="force")

    def ours() -> Any:
        return convert(file, ROBOHIVE, target)

    _check_torchrl(ours(), theirs())
    clear = partial(_clear, work, target, 1 << 20)
    times = _turns([(SUBJECT, ours), (TORCHRL, theirs)], min(3, _rounds(setting)), clear)
    shutil.rmtree(work)
    return lines_of_turns(title, times, {}, asked(setting)[title])


def _check_torchrl(ours: Any, theirs: Any) -> None:
    """Observations and actions are the same rows; TorchRL has one row more for each trial, in
    which nothing was done, and rewards and ends of the record before."""
    rows = theirs[:]
    keep = ~rows["action"].isnan().all(dim=1)
    for key in ("observation", "action", ("next", "observation")):
        same = (rows[keep][key] == ours[:][key]).all()
        expect(bool(same), f"{key} of TorchRL's class is another one")


def _peak(corpus: Corpus, setting: Setting) -> Line:
    """The largest resident set of a process that converts, over what it was after its imports."""
    title = f"peak memory, {corpus.title}"
    if not Path("/proc/self/status").exists():
        raise Unavailable("this system does not tell the largest resident set")
    work = setting.scratch / "corpus"
    work.mkdir()
    corpus.write(work / "0.h5", _units(corpus, setting), 0)
    arguments = [str(work / "0.h5"), corpus.layout, str(work / "converted")]
    command = [sys.executable, "-c", _CHILD, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    shutil.rmtree(work)
    return Line(title, SUBJECT, int(done.stdout) * 1024 / 1e6, "MB", at_most=MEMORY_MB)
