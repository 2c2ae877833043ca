"""Exports that are killed, interrupted or out of space, and targets that are refused."""

from __future__ import annotations

import gc
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from gymnasium import spaces
from h5py import h5f

from replaykit import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer, transition
from replaykit.adapters import (
    export_files,
    exported_episodes,
    to_lerobot,
    to_minari,
    to_rlds,
    to_robomimic,
    to_zarr,
)
from replaykit.datasets import convert
from replaykit.datasets.families import MINARI
from replaykit.recovery import locks
from tests.effort import cases
from tests.limits import limited
from tests.prepared import python
from tests.support.refusals import refuses

pytest.importorskip("zarr", reason="zarr 3 needs Python 3.11")
linux = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")

BOX = spaces.Box(-np.inf, np.inf, (2, 2, 3))
FORMS = {
    "lerobot": ("x/set", lambda data, path, **k: to_lerobot(data, path, fps=10, **k)),
    "zarr": ("x/a.zarr", to_zarr),
    "zip": ("x/a.zarr.zip", to_zarr),
    "rlds": ("x/set", to_rlds),
    "robomimic": ("x/a.hdf5", to_robomimic),
    "minari": (
        "x/a-v0",
        lambda data, path, **k: to_minari(
            data, "x/a-v0", observation_space=BOX, action_space=BOX, **k
        ),
    ),
}


def rows(episodes: int, length: int = 4, storage: Any = None) -> ReplayBuffer[Any, Any, Any, Any]:
    rb = ReplayBuffer(storage=LazyTensorStorage(10_000) if storage is None else storage)
    for number in range(episodes):
        x = torch.rand(length + 1, 2, 2, 3, generator=torch.Generator().manual_seed(number))
        last = torch.arange(length) == length - 1
        rb.extend(
            transition(x[:-1], x[1:], x[1:, 0, 0, 0], x[1:], last, ~last & last, batch_size=length)
        )
    return rb


@pytest.fixture(params=FORMS)
def form(request: Any, tmp_path: Path, monkeypatch: Any) -> tuple[Path, Any]:
    """A target, and the function that exports data to it."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    name, call = FORMS[request.param]
    target = tmp_path / name
    return target, lambda data, path=target, **options: call(data, path, **options)


FAULTS = """
import contextlib, json, os, signal, sys, zipfile
from pathlib import Path
from replaykit.adapters import export_files
from replaykit.datasets import publishing
from tests.adapters.test_export_faults import FORMS, rows

form, folder, points = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
name, call = FORMS[form]
target, parent = folder / name, (folder / name).parent
one, three, swap = rows(1), rows(3), publishing.exchange

def content():
    if target.is_file() and target.suffix == ".zip":
        archive = zipfile.ZipFile(target)
        return {each: archive.read(each) for each in archive.namelist()}
    files = [each for each in (target, *target.rglob("*")) if each.is_file()]
    return {str(each): each.read_bytes() for each in files}

def export(data, overwrite):
    call(data, target, overwrite=overwrite)

count, at, fault = 0, -1, None
def on_event(event, arguments):
    global count
    if at < 0 or not (event == "episode" or event.startswith(("open", "os.", "shutil."))):
        return
    if event != "episode" and str(folder) not in str(arguments[:2]):
        return
    count += 1
    if count == at:
        fault()
def wrote(self, values, inner=export_files.Draft.wrote):
    sys.audit("episode")
    return inner(self, values)
export_files.Draft.wrote = wrote
sys.addaudithook(on_event)

def kill(): os.kill(os.getpid(), signal.SIGKILL)
def interrupt(): os.kill(os.getpid(), signal.SIGINT)
def full(): raise OSError(28, "No space left on device")

export(three, True)
new = content()
at = 10**9
export(one, True)
old, total, at = content(), count, -1
assert old != new and total > 10
seen = []
for number in range(points):
    point = 1 + total * number // (points - 1)
    for turn, fault in enumerate((kill, interrupt, full)):
        # With an old export, also without a swap of paths, and without an old export.
        has_old, swaps = ((True, True), (True, False), (False, True))[(number + turn) % 3]
        if has_old:
            export(one, True)
        else:
            publishing.remove_tree(target)
        publishing.exchange = swap if swaps else lambda *_: False
        pid = os.fork()
        if not pid:
            count, at = 0, point
            with contextlib.suppress(KeyboardInterrupt, OSError):
                export(three, True)
            os._exit(0)
        status, at = os.waitpid(pid, 0)[1], -1
        publishing.exchange = swap
        where = (point, fault.__name__, has_old, swaps, status)
        assert status in (0, 9 * (fault is kill)), where
        before = content()
        # A replacement in two steps needs the next export after a kill.
        assert before in ([old, new] if has_old else [{}, new]) or (not swaps and status), where
        with contextlib.suppress(FileExistsError):
            export(one, False)
        assert content() in (old, new), where
        assert not list(parent.glob(".*")), where
        seen.append(content() == new)
print(json.dumps([len(seen), sum(seen)]))
"""


@linux
@pytest.mark.parametrize("form", FORMS)
def test_faults_at_any_event_leave_the_old_or_the_new_export(form, tmp_path):
    """Kill, Ctrl-C and a full disk, at file operations and episodes from first to last."""
    command = [*python(), "-c", FAULTS, form, str(tmp_path), str(cases(12) + 1)]
    done = subprocess.run(
        command,
        env={**os.environ, "MINARI_DATASETS_PATH": str(tmp_path)},
        capture_output=True,
        timeout=100,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    count, new = json.loads(done.stdout)
    assert 0 < new < count


@linux
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_write_that_fails_is_an_error_with_the_target(form, overwrite, tmp_path, monkeypatch):
    """HDF5 would end the process after such a write, or not find what it had written."""

    class SmallCache(h5py.File):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            config = self.id.get_mdc_config()
            config.set_initial_size, config.initial_size = True, 1024
            config.min_size = config.max_size = 1024
            self.id.set_mdc_config(config)

    target, export = form
    if overwrite:
        export(rows(1))
    before = sorted(tmp_path.rglob("*"))
    large = rows(3, length=3_000)
    gc.collect()
    opened = h5f.get_obj_count(h5f.OBJ_ALL, h5f.OBJ_ALL)
    monkeypatch.setattr(h5py, "File", SmallCache)
    for limit in (0, 100, 5_000, 60_000):
        with (
            limited(resource.RLIMIT_FSIZE, limit),
            pytest.raises(OSError, match=rf"too large.*{target.name}"),
        ):
            export(large, overwrite=overwrite)
        found = sorted(tmp_path.rglob("*"))
        assert found == before or (not overwrite and found == [tmp_path / "x"])
    gc.collect()  # HDF5 has closed each file, so none of them is used later
    assert h5f.get_obj_count(h5f.OBJ_ALL, h5f.OBJ_ALL) == opened


TWICE = """
import signal, sys, time
from pathlib import Path
from replaykit.adapters.export_files import new_h5_file

def on_call(frame, event, _):
    if event == "call" and frame.f_code.co_name == "write":
        signal.raise_signal(signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    with new_h5_file(Path(sys.argv[1])) as (file, check_writes):
        signal.raise_signal(signal.SIGINT)
        time.sleep(1.1)  # from then on, a repeated signal is handled at once elsewhere
        sys.setprofile(on_call)
        for name in "abc":
            file.create_dataset(name, (100_000,), "f8", chunks=(1000,))[:] = 1.0
        check_writes()
except KeyboardInterrupt:
    sys.exit(7)
"""


def test_a_repeated_interrupt_waits_for_the_end_of_a_write(tmp_path):
    """HDF5 would end the process after an error in a write."""
    command = [*python(), "-c", TWICE, str(tmp_path / "a.h5")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (7, "")


@pytest.mark.parametrize("path", ["/sys/x", "/dev/null/x"])
@linux
def test_a_folder_that_cannot_be_written_is_named(path, form, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", path)
    refuses(OSError, f"'{path[:9]}", form[1], rows(1), Path(path))


def test_links_stay_and_their_targets_are_replaced(form, tmp_path):
    target, export = form
    export(rows(3))
    real = target.rename(tmp_path / f"real{target.suffix}")
    target.symlink_to(real)
    refuses(FileExistsError, str(real), export, rows(1))
    old = real.stat().st_ino
    export(rows(1), overwrite=True)
    assert target.readlink() == real
    assert real.stat().st_ino != old
    assert sorted(os.listdir(tmp_path))[-2:] == [real.name, "x"]


def test_targets_that_hold_other_files_or_the_data_are_refused(form, tmp_path):
    target, export = form
    target.mkdir(parents=True)
    (target / "thesis.tex").write_text("mine")
    refuses(FileExistsError, "not a former export", export, rows(1), overwrite=True)
    assert os.listdir(target.parent) == [target.name]
    to_minari(rows(1), "b-v0", observation_space=BOX, action_space=BOX)
    data = convert(tmp_path / "b-v0", MINARI, target / "data")
    folder = target / "memory"
    buffer = rows(1, storage=LazyMemmapStorage(9, scratch_dir=folder, recover=True))
    for each in (data, buffer):
        refuses(ValueError, "outside of the folder", export, each, overwrite=True)
    if target.name != "a-v0":  # an id of Minari is no path
        refuses(ValueError, "outside of the folder", export, buffer, folder / "a")


def test_drafts_of_running_exports_are_left_alone(tmp_path):
    target = tmp_path / "a.hdf5"
    source = exported_episodes.ExportSource(rows(1), "robomimic")
    (tmp_path / f".a.hdf5.export-{'0' * 32}").mkdir()  # of an export that was killed at once
    running = export_files.export_to(source, target, "", overwrite=False)
    draft = running.__enter__()
    to_robomimic(rows(1), target)
    assert draft.path.parent.is_dir()
    with pytest.raises(FileExistsError):
        running.__exit__(None, None, None)
    assert os.listdir(tmp_path) == ["a.hdf5"]


@linux
@pytest.mark.parametrize("ends", [True, False])
def test_a_draft_may_be_removed_between_its_creation_and_its_lock(ends, tmp_path, monkeypatch):
    """Another export has removed the draft, or is still removing it and has the lock."""
    target = tmp_path / "a.hdf5"
    other: list[Any] = []

    def late(fd: int, inner: Any = locks._taken) -> bool:
        if not other:
            other.append(None)
            (draft,) = tmp_path.glob(".*")
            other[0] = to_robomimic(rows(3), target) if ends else locks.Exclusive(draft / "lock")
        return bool(inner(fd))

    monkeypatch.setattr(locks, "_taken", late)
    to_robomimic(rows(1), target, overwrite=True)
    other[0] = None
    to_robomimic(rows(1), target, overwrite=True)
    assert os.listdir(tmp_path) == ["a.hdf5"]


def test_values_that_read_back_wrong_are_never_visible(form, monkeypatch):
    target, export = form
    wrote = export_files.Draft.wrote

    def other(self: Any, values: Any) -> None:
        wrote(self, {name: value + (name[:6] == "action") for name, value in values.items()})

    monkeypatch.setattr(export_files.Draft, "wrote", other)
    refuses(RuntimeError, r"was not made: 'actions?' of episode 0 differs", export, rows(1))
    assert not list(target.parent.iterdir())
