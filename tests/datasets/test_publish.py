"""A data set on disk is complete or absent, whatever happens while it is made."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import filesystem
from replaykit.datasets import publish
from replaykit.datasets.convert import ensure_dataset
from replaykit.datasets.locking import target_lock
from replaykit.datasets.manifest import Manifest
from replaykit.datasets.opened import Published
from replaykit.datasets.publish import open_published, remove_published, verify_published
from replaykit.datasets.robohive import ROBOHIVE
from replaykit.datasets.sources import Sources
from replaykit.errors import CorpusError
from replaykit.filesystem import private_path, reserve, siblings
from replaykit.testing.robohive import RoboHiveWriter, make_trial


def write(path: Path, records: int = 5, seed: int = 0) -> Path:
    with RoboHiveWriter(path) as writer:
        writer.add_trial(**make_trial(records, seed=seed))
        writer.add_trial(**make_trial(3, seed=seed + 50, terminated=True))
    return path


def convert(target: Path, path: Path, **options: Any) -> Published:
    return ensure_dataset(
        target, get_sources=lambda: Sources.local([path]), layout=ROBOHIVE, **options
    )


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write(tmp_path / "a.h5")


@pytest.fixture
def target(tmp_path: Path, source: Path) -> Path:
    """A published data set of six rows, alone in its directory."""
    convert(tmp_path / "root" / "data", source)
    return tmp_path / "root" / "data"


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def never() -> Sources:
    raise AssertionError("the sources were asked for")


# -- opening -------------------------------------------------------------------------------------


def test_nothing_at_the_path_is_file_not_found(tmp_path):
    for call in (open_published, verify_published, remove_published):
        with pytest.raises(FileNotFoundError, match="absent"):
            call(tmp_path / "absent")
    assert names(tmp_path) == []


@pytest.mark.pitfall("DS3")
def test_directory_without_a_manifest_is_no_data_set(tmp_path, source):
    """N7, N33: that a directory exists says nothing; its columns alone do not load either."""
    target = tmp_path / "data"
    target.mkdir()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"no manifest.json.*download=\"force\"") as caught:
            convert(target, source)
        assert str(target) in str(caught.value)
        with pytest.raises(RuntimeError, match="not a complete data set"):
            open_published(target)
        (target / "observation.memmap").write_bytes(b"mine")
    assert (target / "observation.memmap").read_bytes() == b"mine"
    assert convert(target, source, force=True).rows == 6
    assert names(target.parent) == [".data.lock", "a.h5", "data"]


def test_file_in_the_place_of_the_data_set_is_named(tmp_path, source):
    (tmp_path / "data").write_text("mine")
    with pytest.raises(RuntimeError, match=r"data is not a complete data set: .*not a directory"):
        convert(tmp_path / "data", source)
    assert (tmp_path / "data").read_text() == "mine"
    assert convert(tmp_path / "data", source, force=True).rows == 6


def edit(target: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = target / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no manifest": (lambda t: (t / "manifest.json").unlink(), "no manifest.json"),
    "empty manifest": (lambda t: (t / "manifest.json").write_bytes(b""), "not JSON"),
    "cut manifest": (
        lambda t: (t / "manifest.json").write_bytes((t / "manifest.json").read_bytes()[:-9]),
        "not JSON",
    ),
    "manifest of zeros": (lambda t: (t / "manifest.json").write_bytes(bytes(900)), "not JSON"),
    "other JSON": (lambda t: (t / "manifest.json").write_text("[1]"), "not one of a replaykit"),
    "newer version": (lambda t: edit(t, lambda m: m.update(format_version=2)), "version 2"),
    "other rows": (lambda t: edit(t, lambda m: m.update(rows=5)), "is damaged"),
    "other batch": (lambda t: edit(t, lambda m: m.update(rows=5, batch=[5])), "has not the batch"),
    "other episodes": (lambda t: edit(t, lambda m: m.update(episodes=1)), "has not 1 entries"),
    "no arrays": (lambda t: edit(t, lambda m: m.pop("arrays")), "is damaged"),
    "array of another size": (
        lambda t: edit(t, lambda m: m["arrays"][0].update(nbytes=1)),
        "is damaged",
    ),
    "unknown dtype": (
        lambda t: edit(t, lambda m: m["arrays"][0].update(dtype="Tensor")),
        "has no dtype",
    ),
    "file outside": (
        lambda t: edit(t, lambda m: m["arrays"][0].update(file="../../a.h5")),
        "no file of the data set",
    ),
    "absolute file": (
        lambda t: edit(t, lambda m: m["group_file"].update(file="/etc/passwd")),
        "group_file",
    ),
    "missing column": (lambda t: (t / "action.memmap").unlink(), "action.memmap is missing"),
    "missing directory": (lambda t: shutil.rmtree(t / "next"), "is missing"),
    "short column": (
        lambda t: os.truncate(t / "next" / "reward.memmap", 40),
        "has 40 bytes, expected 48",
    ),
    "long column": (lambda t: os.truncate(t / "seed.memmap", 99), "has 99 bytes, expected 48"),
    "missing episode table": (lambda t: shutil.rmtree(t / "episodes"), "is missing"),
    "short group names": (lambda t: os.truncate(t / "episodes" / "groups.txt", 3), "has 3 bytes"),
}


@pytest.mark.pitfall("DS3")
@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_data_set_is_refused_and_replaced_only_by_force(target, source, kind):
    """P4: never opened, never overwritten silently."""
    damage, said = DAMAGE[kind]
    damage(target)
    before = {path: path.stat().st_mtime_ns for path in target.rglob("*")}
    for call in (
        lambda: open_published(target),
        lambda: ensure_dataset(target, get_sources=never, layout=ROBOHIVE),
    ):
        with pytest.raises(RuntimeError, match="is not a complete data set") as caught:
            call()
        assert str(target) in str(caught.value)
        assert said in str(caught.value)
    assert {path: path.stat().st_mtime_ns for path in target.rglob("*")} == before
    assert convert(target, source, force=True).rows == 6
    verify_published(target)


def test_changed_bytes_are_found_by_verification(target):
    """P4, P61: opening checks sizes; every checksum is compared on request."""
    verify_published(target)
    for name, nbytes, _ in list(open_published(target).manifest.files()):
        path = target / name
        content = path.read_bytes()
        assert len(content) == nbytes
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(RuntimeError, match=f"the content of {name} is not what was written"):
            verify_published(target)
        path.write_bytes(content)
    verify_published(target)


def test_data_set_of_another_identity_is_reported(target, source):
    """P8: neither served nor overwritten."""
    with pytest.raises(RuntimeError, match=r"whose dataset_id is None, but 'x' was asked for"):
        convert(target, source, identity={"dataset_id": "x"})
    convert(target, source, identity={"dataset_id": "x", "commit": "c1"}, force=True)
    assert convert(target, source, identity={"dataset_id": "x"}).rows == 6
    with pytest.raises(RuntimeError, match=r"whose commit is 'c1', but 'c2' was asked for"):
        convert(target, source, identity={"commit": "c2"})
    edit(target, lambda m: m["identity"].update(layout_version=0))
    with pytest.raises(RuntimeError, match=r"layout_version is 0, but 1"):
        convert(target, source)


def test_link_to_a_data_set_is_followed(tmp_path, target, source):
    link = tmp_path / "link"
    link.symlink_to(target)
    assert open_published(link).rows == 6
    write(source, 9)
    assert convert(link, source, force=True).rows == 10
    assert link.is_symlink()
    assert open_published(target).rows == 10


@pytest.mark.pitfall("DS17")
def test_edits_are_private_to_the_process(target):
    """P9, N/E15: visible here, never on disk, not in another opening."""
    first, second = open_published(target), open_published(target)
    wanted = {key: column.clone() for key, column in first.columns.items()}
    data = first.tensordict()
    data.set_("action", torch.full_like(data["action"], 7.0))
    for column in first.columns.values():
        column.zero_()
    assert float(first.columns["action",].abs().sum()) == 0
    assert data["action"].data_ptr() == first.columns["action",].data_ptr()
    loaded = TensorDict.load_memmap(target)
    for key, column in wanted.items():
        assert torch.equal(second.columns[key], column)
        assert torch.equal(loaded[key], column)
    verify_published(target)


def test_column_larger_than_the_memory_can_be_mapped(target):
    """Mapping must not reserve memory for copies that are never made."""
    rows = 1 << 33  # 64 GiB of int64, one block of it on disk
    total = sum(array.nbytes for array in open_published(target).manifest.arrays)
    assert total < 1 << 20

    def enlarge(manifest: dict[str, Any]) -> None:
        manifest.update(rows=rows, batch=[rows])
        manifest["arrays"] = [a for a in manifest["arrays"] if a["key"] == ["seed"]]
        manifest["arrays"][0].update(shape=[rows], nbytes=rows * 8)

    edit(target, enlarge)
    os.truncate(target / "seed.memmap", rows * 8)
    column = open_published(target).columns["seed",]
    assert column.shape == (rows,)
    assert int(column[-1]) == 0
    column[-1] = 3
    assert int(column[-1]) == 3


def test_columns_are_of_the_data_set_that_the_manifest_is_of(target, source, monkeypatch):
    """A new version that is swapped in between manifest and columns is not mixed in."""
    write(source, 5, seed=1)
    real = Manifest.parse
    swapped = []

    def parse(text: bytes) -> Manifest:
        if not swapped:
            swapped.append(True)
            monkeypatch.setattr(publish, "remove_tree", lambda path: None)
            convert(target, source, force=True)
        return real(text)

    monkeypatch.setattr(Manifest, "parse", parse)
    found = open_published(target)
    assert found.columns["next", "reward"][0] == 1.0
    monkeypatch.undo()
    assert open_published(target).columns["next", "reward"][0] == 101.0


def test_opening_is_repeated_when_the_old_version_vanishes_meanwhile(target, source, monkeypatch):
    write(source, 5, seed=1)
    real = Manifest.parse
    swapped = []

    def parse(text: bytes) -> Manifest:
        if not swapped:
            swapped.append(True)
            convert(target, source, force=True)
        return real(text)

    monkeypatch.setattr(Manifest, "parse", parse)
    assert open_published(target).columns["next", "reward"][0] == 101.0


# -- force -----------------------------------------------------------------------------------------


@pytest.fixture(params=["exchange", "two renames"])
def swap(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "two renames":
        monkeypatch.setattr(publish, "exchange", lambda *_: False)
    return request.param


def test_force_replaces_and_readers_keep_what_they_mapped(target, source, swap):
    """P6."""
    old = open_published(target)
    write(source, 9, seed=2)
    new = convert(target, source, force=True)
    assert new.rows == 10
    assert old.columns["next", "reward"].flatten().tolist() == [1.0, 2, 3, 4, 5001, 5002]
    assert names(target.parent) == [".data.lock", "data"]


@pytest.mark.pitfall("DS4")
@pytest.mark.parametrize(
    "fault", [CorpusError("bad file"), OSError(errno.EIO, "network"), KeyboardInterrupt()]
)
@pytest.mark.parametrize("when", ["sources", "finish", "put"])
def test_force_that_fails_keeps_the_old_version(target, source, swap, monkeypatch, fault, when):
    def fail(*_: Any) -> Any:
        raise fault

    if when == "finish":
        monkeypatch.setattr("replaykit.datasets.write.RowWriter.finish", fail)
    elif when == "put":
        monkeypatch.setattr(publish, "_put", fail)
    with pytest.raises(type(fault)):
        ensure_dataset(
            target,
            get_sources=fail if when == "sources" else lambda: Sources.local([source]),
            layout=ROBOHIVE,
            force=True,
        )
    assert open_published(target).rows == 6
    verify_published(target)
    assert names(target.parent) == [".data.lock", "data"]


def test_second_rename_that_fails_is_taken_back(target, source, monkeypatch):
    monkeypatch.setattr(publish, "exchange", lambda *_: False)
    real = os.rename

    def rename(old: Any, new: Any) -> None:
        if Path(new) == target and ".data.tmp-" in str(old):
            raise OSError(errno.EIO, "broken")
        real(old, new)

    monkeypatch.setattr("os.rename", rename)
    with pytest.raises(OSError, match="broken"):
        convert(target, source, force=True)
    assert names(target.parent) == [".data.lock", "data"]
    assert open_published(target).rows == 6
    assert names(target.parent) == [".data.lock", "data"]


def test_version_that_was_being_replaced_is_restored_on_opening(target, source):
    """What dying between the two renames leaves."""
    retired = private_path(target, "old")
    target.rename(retired)
    (private_path(target, "tmp")).mkdir()
    assert open_published(target).rows == 6
    assert names(target.parent) == [".data.lock", "data"]
    target.rename(private_path(target, "old"))
    assert ensure_dataset(target, get_sources=never, layout=ROBOHIVE).rows == 6


def test_exchange_swaps_in_one_step_or_says_that_it_cannot(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").write_text("file")
    if not filesystem.exchange(tmp_path / "a", tmp_path / "b"):
        pytest.skip("this system cannot exchange two paths")
    assert (tmp_path / "a").read_text() == "file"
    assert (tmp_path / "b").is_dir()
    with pytest.raises(FileNotFoundError):
        filesystem.exchange(tmp_path / "a", tmp_path / "absent")


# -- failing and being killed -------------------------------------------------------------------


@pytest.mark.pitfall("DS3")
def test_interrupt_at_any_write_leaves_nothing_that_loads(tmp_path, source, monkeypatch):
    """N7: the interrupt comes with the k-th write, for every k."""
    real = os.pwrite
    state = {"count": 0, "stop": 0}

    def counting(*args: Any) -> int:
        state["count"] += 1
        if state["count"] == state["stop"]:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr("os.pwrite", counting)
    convert(tmp_path / "whole", source)
    writes = state["count"]
    assert writes > 50
    target = tmp_path / "root" / "data"
    for stop in [*range(1, writes, 7), writes]:
        state.update(count=0, stop=stop)
        with pytest.raises(KeyboardInterrupt):
            convert(target, source)
        assert names(target.parent) == [".data.lock"]
        with pytest.raises(FileNotFoundError):
            TensorDict.load_memmap(target)
    state.update(stop=0)
    assert convert(target, source).rows == 6
    verify_published(target)


def test_half_built_directory_does_not_load(tmp_path, source, monkeypatch):
    """Not even the private directory can be taken for a table."""
    seen = []

    def look(self: Any) -> None:
        (private,) = siblings(tmp_path / "data", "tmp")
        with pytest.raises(FileNotFoundError):
            TensorDict.load_memmap(private)
        with pytest.raises(RuntimeError, match="no manifest"):
            open_published(private)
        seen.append(private)

    monkeypatch.setattr("replaykit.datasets.write.RowWriter.finish", look)
    convert(tmp_path / "data", source)
    assert len(seen) == 1
    assert not seen[0].exists()


# Runs in a process of its own that forks one child for each try: a fork starts in a moment, a
# new interpreter in seconds. Dying at the k-th system call is dying at every instant that counts;
# killing after a random time finds the instants that nobody counted.
CRASH = """
import os, random, signal, sys, time, warnings
from pathlib import Path
import torch
from tensordict import TensorDict
from replaykit.datasets import publish
from replaykit.datasets.convert import ensure_dataset
from replaykit.datasets.publish import open_published, verify_published
from replaykit.datasets.robohive import ROBOHIVE
from replaykit.datasets.sources import Sources
warnings.simplefilter("ignore")
torch.set_num_threads(1)
old, new, target = map(Path, sys.argv[1:4])
dense, random_kills = int(sys.argv[4]), int(sys.argv[5])
exchange = publish.exchange

def convert(path, force=False):
    return ensure_dataset(
        target, get_sources=lambda: Sources.local([path]), layout=ROBOHIVE, force=force)

def die_at(stop):
    left = [stop]
    def wrap(name):
        real = getattr(os, name)
        def call(*args, **kwargs):
            left[0] -= 1
            if left[0] == 0:
                os._exit(9)
            return real(*args, **kwargs)
        setattr(os, name, call)
    for name in ("pwrite", "fsync", "rename", "posix_fallocate", "mkdir", "unlink", "rmdir"):
        wrap(name)

def run(action):
    child = os.fork()
    if child == 0:
        try:
            action()
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(1)
        os._exit(0)
    return child

def wait(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def check(forced):
    # Complete or absent; with force always there, old or new.
    try:
        found = open_published(target)
    except FileNotFoundError:
        assert not forced and not target.exists()
        return
    verify_published(target)
    assert found.rows in ([6, 22] if forced else [22]), found.rows

def clean():
    assert sorted(p.name for p in target.parent.iterdir()) == [".data.lock", "data"]

tally = {"died": 0, "finished": 0}
def attempt(action, forced, kill_after=None):
    child = run(action)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)
    code = wait(child)
    assert code in (0, 9, -9), code
    tally["died" if code else "finished"] += 1
    check(forced)
    return code

def sweep(first, forced):
    step = 1
    while True:
        first()
        def action():
            die_at(step)
            convert(new, forced)
        if attempt(action, forced) == 0:
            return
        step += 1 + step // dense

def remove():
    publish.remove_tree(target)

def restore_old():
    assert wait(run(lambda: convert(old, True))) == 0

sweep(remove, False)
assert wait(run(lambda: convert(new))) == 0
clean()
for publish.exchange in (exchange, lambda *_: False):
    sweep(restore_old, True)
    clean()

begin = time.perf_counter()
assert wait(run(lambda: convert(new, True))) == 0
length = time.perf_counter() - begin
draw = random.Random(7)
for _ in range(random_kills):
    remove()
    attempt(lambda: convert(new), False, draw.uniform(0, 1.1 * length))
    assert wait(run(lambda: convert(new))) == 0
    check(False)
    clean()
print(tally["died"], tally["finished"])
"""


@pytest.mark.pitfall("DS3")
@pytest.mark.parametrize(
    ("dense", "random_kills"), [(2, 6), pytest.param(40, 200, marks=pytest.mark.long)]
)
def test_killed_conversion_is_redone_never_taken_for_complete(tmp_path, dense, random_kills):
    old, new = write(tmp_path / "old.h5"), write(tmp_path / "new.h5", 21, seed=3)
    (tmp_path / "root").mkdir()
    arguments = [str(old), str(new), str(tmp_path / "root" / "data"), str(dense), str(random_kills)]
    done = subprocess.run([sys.executable, "-c", CRASH, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    died, finished = map(int, done.stdout.split())
    assert died >= 30
    assert finished >= 3


# -- several at once ---------------------------------------------------------------------------


@pytest.mark.pitfall("DS12")
def test_threads_that_ask_at_once_share_one_conversion(tmp_path, source, caplog):
    started, asked, found = threading.Event(), [], []

    def sources() -> Sources:
        asked.append(True)
        started.wait(20)
        return Sources.local([source])

    def ask() -> None:
        target = tmp_path / "root" / "data"
        found.append(ensure_dataset(target, get_sources=sources, layout=ROBOHIVE).rows)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    with caplog.at_level(logging.WARNING, "replaykit"):
        for thread in threads:
            thread.start()
        while len(caplog.records) < 3:
            threads[0].join(0.01)
        started.set()
        for thread in threads:
            thread.join(60)
    assert found == [6] * 4
    assert asked == [True]
    assert len(caplog.records) == 3
    assert all("waiting for it" in record.message for record in caplog.records)


SHARE = """
import os, sys, time
from pathlib import Path
from replaykit.datasets.convert import ensure_dataset
from replaykit.datasets.robohive import ROBOHIVE
from replaykit.datasets.sources import Sources
source, target, log = map(Path, sys.argv[1:4])

def sources():
    with log.open("a") as file:
        file.write("converted\\n")
    time.sleep(0.5)
    return Sources.local([source])

children = []
for _ in range(4):
    child = os.fork()
    if child == 0:
        try:
            rows = ensure_dataset(target, get_sources=sources, layout=ROBOHIVE).rows
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(1)
        os._exit(0 if rows == 6 else 2)
    children.append(child)
print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])
"""


@pytest.mark.pitfall("DS12")
def test_processes_that_ask_at_once_share_one_conversion(tmp_path, source):
    log = tmp_path / "log"
    paths = [str(path) for path in (source, tmp_path / "root" / "data", log)]
    done = subprocess.run([sys.executable, "-c", SHARE, *paths], capture_output=True, text=True)
    assert done.stdout.strip() == "[0, 0, 0, 0]", done.stderr
    assert log.read_text() == "converted\n"
    # Without a handler of the user's, logging shows the lines of those who wait.
    assert done.stderr.count("is being prepared by another process; waiting for it") == 3


def test_waiting_for_the_lock_can_be_interrupted_and_its_failure_passes_on(tmp_path, source):
    """When the holder fails, the next in line converts."""
    target = tmp_path / "root" / "data"
    entered, leave = threading.Event(), threading.Event()

    def failing() -> Sources:
        entered.set()
        leave.wait(20)
        raise OSError("the network is gone")

    errors = []

    def first() -> None:
        try:
            ensure_dataset(target, get_sources=failing, layout=ROBOHIVE)
        except OSError as error:
            errors.append(str(error))

    thread = threading.Thread(target=first)
    thread.start()
    entered.wait(20)
    timer = threading.Timer(0.2, leave.set)
    timer.start()
    assert convert(target, source).rows == 6
    thread.join(20)
    timer.join(20)
    assert errors == ["the network is gone"]


def test_stale_directories_are_removed_and_others_left_alone(tmp_path, source):
    """P7: only what was made for this very target."""
    root = tmp_path / "root"
    target = root / "data"
    root.mkdir()
    stale = private_path(target, "tmp")
    other = private_path(root / "data.tmp-x", "tmp")
    alike = root / ".data.tmp-mine"
    for path in (stale, other, alike):
        path.mkdir()
        (path / "x").write_text("y")
    convert(target, source)
    assert not stale.exists()
    assert (other / "x").exists()
    assert (alike / "x").exists()
    assert siblings(target, "tmp") == []


KILLED = """
import os, sys
from pathlib import Path
from replaykit.datasets.convert import ensure_dataset
from replaykit.datasets.robohive import ROBOHIVE
from replaykit.datasets.sources import Sources
from replaykit.datasets.write import RowWriter
RowWriter.finish = lambda self: os._exit(9)
source, target = map(Path, sys.argv[1:3])
ensure_dataset(target, get_sources=lambda: Sources.local([source]), layout=ROBOHIVE, force=True)
"""


@pytest.mark.parametrize("opening", ["open", "ensure"])
def test_what_a_killed_replacement_left_goes_with_the_next_opening(
    target, source, run_python, opening
):
    """P7: there may never be another replacement that would clear it away."""
    done = run_python(KILLED, source, target, check=False)
    assert done.returncode == 9
    assert len(siblings(target, "tmp")) == 1
    retired = private_path(target, "old")
    shutil.copytree(target, retired)
    if opening == "open":
        found = open_published(target)
    else:
        found = ensure_dataset(target, get_sources=never, layout=ROBOHIVE)
    assert found.rows == 6
    assert names(target.parent) == [".data.lock", "data"]
    assert found.columns["next", "reward"][0] == 1.0


def test_what_somebody_alive_is_building_is_left_alone(target):
    with target_lock(target):
        private = private_path(target, "tmp")
        private.mkdir()
        begin = time.monotonic()
        assert open_published(target).rows == 6
        assert time.monotonic() - begin < 5  # it does not wait for the lock
        assert private.exists()


def test_leftovers_on_a_disk_that_may_only_be_read_are_no_hindrance(target, monkeypatch):
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    private_path(target, "tmp").mkdir()
    monkeypatch.setattr("filelock.FileLock.acquire", refuse)
    assert open_published(target).rows == 6


def test_lock_excludes_and_names_its_target(tmp_path):
    with target_lock(tmp_path / "new" / "data"):
        assert names(tmp_path / "new") == [".data.lock"]


# -- removal and room ------------------------------------------------------------------------------


def test_removal_takes_only_the_data_set(target, source):
    found = open_published(target)
    (target.parent / "data_split").mkdir()
    remove_published(target)
    assert names(target.parent) == [".data.lock", "data_split"]
    assert found.columns["next", "reward"][0] == 1.0
    with pytest.raises(FileNotFoundError):
        remove_published(target)


def test_reserved_file_has_its_size_and_no_room_is_named(tmp_path, monkeypatch):
    path = tmp_path / "x"
    path.touch()
    reserve(path, 100_000)
    assert path.stat().st_size == 100_000
    assert path.stat().st_blocks * 512 >= 100_000

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(OSError, match=r"200,000 bytes are needed for .*x, .* are free there"):
        reserve(path, 200_000)

    def unsupported(*_: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, "not here")

    monkeypatch.setattr("os.posix_fallocate", unsupported)
    reserve(path, 300_000)
    assert path.stat().st_size == 300_000


def test_quota_met_while_writing_is_the_same_sentence(tmp_path, source, monkeypatch):
    def full(*_: Any) -> int:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr("os.pwrite", full)
    with pytest.raises(OSError, match=r"bytes are needed for .*memmap") as caught:
        convert(tmp_path / "root" / "data", source)
    assert caught.value.errno == errno.EDQUOT
    assert names(tmp_path / "root") == [".data.lock"]
