"""A conversion that was interrupted goes on with the files that it had not finished."""

from __future__ import annotations

import os
import subprocess
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from replaykit.datasets import Policies
from replaykit.datasets.converting import local_sources
from replaykit.datasets.engine.conversion import ConvertOptions, ensure_dataset
from replaykit.datasets.engine.row_writer import RowWriter
from replaykit.datasets.families.robohive import ROBOHIVE
from replaykit.datasets.publishing import UNFINISHED_NAME, open_published, remove_published
from replaykit.datasets.sources import Sources
from replaykit.errors import CorpusError, DownloadError
from replaykit.filesystem import siblings
from replaykit.testing.robohive_files import make_trial
from tests.datasets.converted import content, files_of
from tests.datasets.mutated.corpora import CORPORA
from tests.datasets.mutated.running import check
from tests.datasets.trials import (
    convert,
    names,
    quietly,
    with_nan_action,
    with_repeated_infos,
    write,
)
from tests.prepared import python

SKIP = ConvertOptions(policies=Policies(on_invalid="skip"))


@pytest.fixture
def files(tmp_path) -> list[Path]:
    """Five files; one has odd times, one a trial without a row, two have an episode in common."""
    trials = [[make_trial(9 + 3 * k, seed=10 * k + j) for j in range(1 + k % 3)] for k in range(5)]
    trials[0][0]["time"][3] = 0.0
    trials[1][1]["time"][5] = 0.0
    trials[2].append(make_trial(1))
    trials[4].append(trials[0][0])
    return [write(tmp_path / f"{k}.h5", *each) for k, each in enumerate(trials)]


@pytest.fixture
def target(tmp_path) -> Path:
    return tmp_path / "root" / "data"


class Stop(BaseException):
    """Ends a conversion as an interrupt does."""


@pytest.fixture
def written(monkeypatch) -> Callable[..., list[str]]:
    """Calls a function; returns which files were written, up to that which is not to be finished"""
    real = RowWriter.write

    def run(call: Callable[[], Any], until: str | None = None) -> list[str]:
        seen: list[str] = []

        def write(self: Any, file: Any, source: Any, *args: Any) -> None:
            if source.name == until:
                raise Stop
            real(self, file, source, *args)
            seen.append(source.name)

        monkeypatch.setattr(RowWriter, "write", write)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            if until is None:
                call()
            else:
                with pytest.raises(Stop):
                    call()
        monkeypatch.setattr(RowWriter, "write", real)
        return seen

    return run


@pytest.fixture
def unfinished(target, files, written) -> Path:
    """The directory of a conversion that was interrupted in the fourth of five files."""
    written(lambda: quietly(target, *files), until="3.h5")
    [found] = siblings(target, "tmp")
    return found


@pytest.fixture
def whole(tmp_path, files) -> dict[str, bytes]:
    quietly(tmp_path / "whole", *files)
    return content(tmp_path / "whole")


@pytest.mark.parametrize("until", [["1.h5"], ["4.h5"], ["1.h5", "2.h5", "3.h5", "4.h5"]])
def test_resumed_conversion_writes_only_unfinished_files(target, files, written, whole, until):
    wanted, before = [path.name for path in files], 0
    for name in until:
        stop = wanted.index(name)
        assert written(lambda: quietly(target, *files), name) == wanted[before:stop]
        assert not target.exists()
        before = stop
    assert written(lambda: quietly(target, *files)) == wanted[before:]
    assert content(target) == whole
    assert names(target.parent) == [".data.lock", "data"]


def _stop(*_: Any, **__: Any) -> None:
    raise Stop


def test_interrupted_in_the_first_or_only_file_nothing_is_kept(
    target, files, source, written, monkeypatch
):
    written(lambda: quietly(target, *files), until="0.h5")
    assert names(target.parent) == [".data.lock"]
    monkeypatch.setattr("replaykit.datasets.engine.conversion.make_report", _stop)
    with pytest.raises(Stop):
        quietly(target, source)
    assert names(target.parent) == [".data.lock"]


def test_interrupted_after_the_last_row_no_row_is_written_again(
    target, files, written, whole, monkeypatch
):
    """The episode table and the text of the first time are made anew."""
    with monkeypatch.context() as patch:
        patch.setattr("replaykit.datasets.publishing.sync_tree", _stop)
        with pytest.raises(Stop):
            quietly(target, *files)
    assert written(lambda: quietly(target, *files)) == []
    assert content(target) == whole


# -- another conversion, or damage ----------------------------------------------------------------


def _touched(files: list[Path]) -> None:
    os.utime(files[0], ns=(1, 1))


@pytest.mark.parametrize(
    ("change", "options"),
    [
        (None, {"options": ConvertOptions(policies=Policies(casts={"float64": "float32"}))}),
        (None, {"options": ConvertOptions(policies=Policies(exclude=["info"]))}),
        (None, {"options": ConvertOptions(block_bytes=1 << 12)}),
        (None, {"identity": {"dataset_id": "other"}}),
        (None, {"layout": replace(ROBOHIVE, version=ROBOHIVE.version + 1)}),
        (_touched, {}),
        (lambda files: files.pop(), {}),
    ],
)
def test_changed_conversion_restarts_and_removes_unfinished_files(
    target, files, written, unfinished, change, options
):
    if change is not None:
        change(files)
    options = {"layout": ROBOHIVE, **options}
    wanted = [path.name for path in files]

    def convert() -> None:
        ensure_dataset(target, get_sources=lambda: Sources.local(files), **options)

    assert written(convert) == wanted
    assert not unfinished.exists()
    stored = {name for name, *_ in open_published(target).manifest.files()}
    assert {name for name in files_of(target) if not name.endswith(".json")} == stored


def _flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "again"),
    [
        (lambda path: _flip(path / "action.memmap", 0), ["0.h5", "3.h5", "4.h5"]),
        (lambda path: (path / "time.memmap").unlink(), "all"),
        (lambda path: os.truncate(path / "time.memmap", 100), ["1.h5", "2.h5", "3.h5", "4.h5"]),
        (lambda path: _flip(path / UNFINISHED_NAME, -1), ["2.h5", "3.h5", "4.h5"]),
        (lambda path: _flip(path / UNFINISHED_NAME, 30), "all"),
        (lambda path: os.truncate(path / UNFINISHED_NAME, 10), "all"),
        (lambda path: (path / UNFINISHED_NAME).unlink(), "all"),
        (lambda path: (path / "meta.json.incomplete").write_text("{"), ["3.h5", "4.h5"]),
    ],
)
def test_damaged_unfinished_files_are_written_again(
    target, files, written, unfinished, whole, damage, again
):
    damage(unfinished)
    expected = [path.name for path in files] if again == "all" else again
    assert written(lambda: quietly(target, *files)) == expected
    assert content(target) == whole


@pytest.mark.parametrize("workers", [1, 2])
def test_rows_that_are_not_finished_may_hold_anything(target, files, unfinished, whole, workers):
    """Also where a column is left zero, as one of flags is; and workers go on with it, too."""
    for name in ("done", "truncated", "action"):
        path = unfinished / f"{name}.memmap"
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2] + b"\x01" * (len(data) - len(data) // 2))
    quietly(target, *files, options=ConvertOptions(workers=workers))
    assert content(target) == whole


# -- what is found out by writing -----------------------------------------------------------------


def test_episodes_that_broke_a_rule_stay_out(tmp_path, target, written):
    bad = with_nan_action(make_trial(6, seed=1))
    paths = [
        write(tmp_path / f"{k}.h5", make_trial(5, seed=k), bad, make_trial(4, seed=9 + k))
        for k in range(3)
    ]
    quietly(tmp_path / "whole", *paths, options=SKIP)
    written(lambda: quietly(target, *paths, options=SKIP), until="2.h5")
    assert written(lambda: quietly(target, *paths, options=SKIP)) == ["2.h5"]
    assert content(target) == content(tmp_path / "whole")


def test_field_that_was_found_unusable_is_not_looked_at_again(tmp_path, target, written):
    trials = [make_trial(4), with_repeated_infos(make_trial(5, seed=1)), make_trial(4, seed=2)]
    paths = [write(tmp_path / f"{k}.h5", trial) for k, trial in enumerate(trials)]
    quietly(tmp_path / "whole", *paths)
    assert written(lambda: quietly(target, *paths), until="2.h5") == ["0.h5", "0.h5", "1.h5"]
    assert written(lambda: quietly(target, *paths)) == ["2.h5"]
    assert content(target) == content(tmp_path / "whole")


# -- no leftover for ever -------------------------------------------------------------------------


def test_failed_conversion_removes_unfinished_files(tmp_path, target, files, unfinished):
    bad = write(tmp_path / "z.h5", with_nan_action(make_trial(6)))
    with pytest.raises(CorpusError, match="V20"):
        quietly(target, *files, bad)
    assert names(target.parent) == [".data.lock"]


def test_files_that_cannot_be_fetched_now_change_nothing(target, files, written, unfinished):
    def fail() -> Sources:
        raise DownloadError("no network")

    with pytest.raises(DownloadError):
        ensure_dataset(target, get_sources=fail, layout=ROBOHIVE)
    assert written(lambda: quietly(target, *files)) == ["3.h5", "4.h5"]


@pytest.mark.parametrize("is_opened", [True, False])
def test_opening_and_deletion_remove_interrupted_replacement(
    target, files, source, written, is_opened
):
    convert(target, source)
    written(lambda: quietly(target, *files, force=True), until="2.h5")
    assert len(siblings(target, "tmp")) == 1
    if is_opened:
        assert open_published(target).rows == 6
    else:
        remove_published(target)
    assert names(target.parent) == [".data.lock", "data"][: 1 + is_opened]


# Dies at the k-th system call of those that change something, for rising k, in one child after
# another; then goes on, dying again now and then, until the data set is there.
CRASH = """
import os, sys, warnings
from pathlib import Path
import torch
from replaykit.datasets.engine.conversion import ConvertOptions, ensure_dataset
from replaykit.datasets.families.robohive import ROBOHIVE
from replaykit.datasets.publishing import open_published, verify_published
from replaykit.datasets.sources import Sources
from replaykit.filesystem import remove_tree, siblings
from replaykit.datasets.engine import resuming
warnings.simplefilter("ignore")
torch.set_num_threads(1)
target, dense, *files = sys.argv[1:]
target, dense = Path(target), int(dense)
again = 3 if dense > 1 else 1  # how often it dies on the way
options = ConvertOptions(block_bytes=200)  # each trial by itself

def convert():
    return ensure_dataset(
        target, get_sources=lambda: Sources.local(files), layout=ROBOHIVE, options=options
    )

def die_at(stop, names):
    left = [stop]
    def wrap(owner, name):
        real = getattr(owner, name)
        def call(*args, **kwargs):
            left[0] -= 1
            if left[0] == 0:
                os._exit(9)
            return real(*args, **kwargs)
        setattr(owner, name, call)
    for name in names:
        wrap(os, name)
    wrap(resuming, "_append_line")
    whole = resuming._append_line
    def torn(path, said):
        if left[0] == 1:
            with path.open("ab") as file:
                file.write(b"\\n00000000 half of a line")
        whole(path, said)
    resuming._append_line = torn

def run(stop, names=()):
    child = os.fork()
    if child == 0:
        try:
            if stop:
                die_at(stop, names)
            convert()
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 9), code
    return code

assert run(0) == 0
wanted = open_published(target).manifest.content_id()
died = kept = 0
def sweep(dense, names):
    global died, kept
    step = 1
    while True:
        remove_tree(target)
        first, more = run(step, names), 0
        while first and not target.exists():
            kept += any((path / "unfinished").is_file() for path in siblings(target, "tmp"))
            more += 1
            run(step if more < again else 0, names)
        verify_published(target)
        assert open_published(target).manifest.content_id() == wanted
        assert sorted(path.name for path in target.parent.iterdir()) == [".data.lock", "data"]
        if first == 0:
            return
        died, step = died + 1, step + 1 + step // dense

sweep(1000, ())  # each time when a record is written
sweep(dense, ("pwrite", "fsync", "rename", "mkdir", "unlink", "rmdir"))
print(died, kept)
"""


@pytest.mark.parametrize(
    ("trials", "dense"),
    [
        ((2, 1, 1), 1),
        pytest.param((1, 1, 1), 40, marks=pytest.mark.long),
    ],
)
def test_conversion_killed_at_any_step_gives_the_same_data_set(tmp_path, target, dense, trials):
    """Several files, of which some may be finished."""
    paths = [
        write(tmp_path / f"{k}.h5", *[make_trial(4, seed=9 * k + j, infos=False) for j in range(n)])
        for k, n in enumerate(trials)
    ]
    target.parent.mkdir()
    command = [*python(), "-c", CRASH, str(target), str(dense), *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    died, kept = map(int, done.stdout.split())
    assert died >= 8
    assert kept >= 3


@pytest.mark.parametrize("family", ["d4rl-v2", "d4rl-v0", "vd4rl"])
def test_flat_arrays_in_parts_give_the_same_data_set(tmp_path, target, monkeypatch, family):
    """Cut after every episode; where one begins is compared with where the one before arrived."""
    (tmp_path / "files").mkdir()
    path = CORPORA[family].write(tmp_path / "files")

    def convert(folder: Path) -> None:
        ensure_dataset(
            folder, get_sources=lambda: local_sources([path]), layout=CORPORA[family].layout
        )

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        convert(tmp_path / "whole")
        monkeypatch.setattr("replaykit.datasets.engine.row_batches._PART_BYTES", 1)
        convert(target)
        check(CORPORA[family], path, open_published(target))
    assert content(target, in_blocks=True) == content(tmp_path / "whole", in_blocks=True)
