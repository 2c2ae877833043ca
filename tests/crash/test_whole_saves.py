"""Kills and full disks while buffers are saved: what is left is one of the states that were."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.crash.forking import FORKED

# A process of its own plays every scene with forks of itself: importing torch once is enough.
STAGE = (
    FORKED
    + """
import signal, sys, tempfile
from replaykit import LazyTensorStorage, ReplayBuffer, RoundRobinWriter, SamplerWithoutReplacement
from replaykit.checkpoint import chunks
chunks._CHUNK_BYTES = 3000

def empty():
    return ReplayBuffer(
        storage=LazyTensorStorage(40),
        sampler=SamplerWithoutReplacement(),
        writer=RoundRobinWriter(track_generations=True),
        generator=torch.Generator(),
        batch_size=3,
    )

def state(number):
    '''State number n: 40 rows that all hold n, n + 1 extends, a pass that has begun.'''
    buffer = empty()
    buffer.set_rng(torch.Generator().manual_seed(number))
    value = torch.full((40, 50), number)
    for _ in range(number % 5 + 1):
        buffer.extend(TensorDict({"a": value, "next": {"b": value.double()}}, [40]))
    buffer.sample()
    return buffer

def loaded(path):
    '''Loads what is there; returns its number after comparing it, bit for bit, with that state.'''
    buffer = empty()
    buffer.loads(path)
    number = int(buffer["a"][0, 0])
    found, wanted = flat(buffer.state_dict()), flat(state(number).state_dict())
    # A restart ends the episode that was being written, at its newest row; that is all.
    newest = wanted["_writer"]["_ledger"]["next_position"] - 1
    assert wanted["_writer"]["_episodes"]["marks"] == []
    wanted["_writer"]["_episodes"] |= {"marks": [newest], "codes": [5]}
    assert found == wanted, number
    return number

def litter(path):
    import json
    named = {"manifest.json", ".lock", *json.load(open(path + "/manifest.json"))["files"]}
    return sorted(set(os.listdir(path)) - named)

path = sys.argv[1]
"""
)

EVERY_KILL = """
def counted(kill_at, done):
    '''Kills the process at the given call into the file system; returns after `done` calls.'''
    def wrap(module, name):
        original = getattr(module, name)
        def wrapper(*args, **keywords):
            if done[0] == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            done[0] += 1
            return original(*args, **keywords)
        setattr(module, name, wrapper)
    for name in ("fsync", "replace", "unlink", "mkdir", "open", "scandir"):
        wrap(os, name)
    import builtins
    wrap(builtins, "open")

done = [0]
pid = forked(lambda: (counted(-1, done), state(1).dumps(path + "/count"),
                      open(path + "/calls", "w").write(str(done[0]))))
assert os.waitpid(pid, 0)[1] == 0
calls = int(open(path + "/calls").read())
outcomes = []
for kill_at in range(calls):
    for first in (False, True):
        target = f"{path}/{kill_at}-{first}"
        if not first:
            state(1).dumps(target)
        pid = forked(lambda: (counted(kill_at, [0]), state(2).dumps(target)))
        status = os.waitpid(pid, 0)[1]
        assert first or os.WIFSIGNALED(status)
        try:
            found = loaded(target)
        except FileNotFoundError:
            assert first
            found = 0
        assert found in ((0, 2) if first else (1, 2))
        outcomes.append(found)
        state(3).dumps(target)
        assert loaded(target) == 3
        assert not litter(target), litter(target)
assert {0, 1, 2} <= set(outcomes)
print(calls)
"""

CALLED_KILL = """
def save(target, kill_at, done):
    buffer = state(2)
    def count(frame, event, argument):
        if "replaykit" in frame.f_code.co_filename:
            done.append(frame.f_code.co_name)
            if len(done) == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.setprofile(count)
    buffer.dumps(target)
    sys.setprofile(None)

state(1).dumps(path)
save(path, 0, [])  # the first save calls more: it fills caches
state(1).dumps(path)
done = []
save(path, 0, done)
outcomes = []
# Some of all of them, and every second one of those that put the manifest in its place.
published = [at for at, name in enumerate(done, 1) if name in ("_write", "replace_file")]
assert len(published) > 10
for kill_at in [*range(1, len(done), len(done) // 8), *published[::2]]:
    state(1).dumps(path)
    pid = forked(lambda: save(path, kill_at, []))
    assert os.WIFSIGNALED(os.waitpid(pid, 0)[1])
    found = loaded(path)
    assert found in (1, 2), found
    outcomes.append(found)
state(3).dumps(path)
assert loaded(path) == 3 and not litter(path), litter(path)
assert {1, 2} == set(outcomes)
print(len(outcomes))
"""

MANY_PROCESSES = """
state(1).dumps(path)
def save(number):
    for turn in range(8):
        state(number + turn).dumps(path)
pids = [forked(lambda n=n: save(n)) for n in (10, 20, 30)]
seen = set()
def finished(pid):
    return os.waitpid(pid, os.WNOHANG)
left = set(pids)
while left:
    seen.add(loaded(path))
    for pid in list(left):
        found, status = finished(pid)
        if found:
            assert status == 0
            left.remove(pid)
assert loaded(path) in (17, 27, 37)
assert not litter(path), litter(path)
print(len(seen))
"""

NO_SPACE = """
import resource
state(1).dumps(path)
buffer = state(2)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

def refused(limits, there, **options):
    '''No file may be longer than that: the save says so, and leaves what is there.'''
    before = sorted(os.listdir(path))
    for limit in limits:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        try:
            buffer.dumps(path, **options)
        except OSError as error:
            assert path in str(error), error
        else:
            raise AssertionError(limit)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        assert loaded(path) == there
        assert sorted(os.listdir(path)) == before, os.listdir(path)

refused((0, 1, 100, 2000, 2999), 1)
buffer.dumps(path)
assert loaded(path) == 2
# The same, where only what has changed is to be written, and older ones are kept.
buffer["a"] = torch.full((40, 50), 7)
refused((0, 1, 100, 1500), 2, keep=3)
buffer.dumps(path, keep=3)
other = empty()
other.loads(path)
assert int(other["a"][3, 3]) == 7 and int(other["next", "b"][3, 3]) == 2
other.loads(path, version=2)
assert int(other["a"][3, 3]) == 2
print("fine")
"""

FULL_DISK = """
state(1).dumps(path)
filler = path + "-filler"
refused = 0
for kib in range(0, 200, 8):
    # That much room is left on the whole disk.
    with open(filler, "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1024))
        except OSError:
            pass
        file.truncate(max(0, file.tell() - 1024 * kib))
    before = sorted(os.listdir(path))
    try:
        state(2).dumps(path)
    except OSError as error:
        assert path in str(error), error
        assert loaded(path) == 1
        assert sorted(os.listdir(path)) == before
        refused += 1
    else:
        assert loaded(path) == 2
        os.unlink(filler)
        state(1).dumps(path)
os.path.exists(filler) and os.unlink(filler)
state(2).dumps(path)
assert loaded(path) == 2
assert not litter(path)
print(refused)
"""

READ_ONLY = """
folder = tempfile.mkdtemp()
os.chmod(folder, 0o755)
path = folder + "/saved"
state(1).dumps(path)
before = sorted(os.listdir(path))
for name in (path, folder):
    os.chmod(name, 0o555)
root = os.geteuid() == 0
if root:
    os.seteuid(65534)
refused = []
for target in (path, folder + "/other"):
    try:
        state(2).dumps(target)
    except OSError as error:
        refused.append(type(error).__name__)
if root:
    os.seteuid(0)
assert refused == ["PermissionError"] * 2, refused
assert loaded(path) == 1
assert sorted(os.listdir(path)) == before
assert os.listdir(folder) == ["saved"]
print("fine")
"""

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork and SIGKILL")


@pytest.mark.pitfall("CK1")
@pytest.mark.pitfall("CK3")
def test_a_save_can_be_killed_between_any_two_steps(run_python: Any, tmp_path: Path):
    """CK1, CK3: before every single call into the file system; over an old state and over none."""
    done = run_python(STAGE + EVERY_KILL, tmp_path)
    assert int(done.stdout) > 15


@pytest.mark.pitfall("CK1")
def test_a_save_can_be_killed_at_any_call(run_python: Any, tmp_path: Path):
    """CK1: of the package's functions and of what they call, as while a file is half written."""
    assert int(run_python(STAGE + CALLED_KILL, tmp_path / "saved").stdout) > 12


@pytest.mark.pitfall("CK1")
def test_processes_that_save_and_load_at_once_see_whole_states(run_python: Any, tmp_path: Path):
    """CK1, C12: of three savers to one path the last one wins, and never a mixture."""
    done = run_python(STAGE + MANY_PROCESSES, tmp_path / "saved")
    assert int(done.stdout) >= 2


@pytest.mark.skipif(sys.platform != "linux", reason="needs RLIMIT_FSIZE as Linux has it")
def test_a_save_that_does_not_fit_leaves_the_old_one_and_no_litter(run_python: Any, tmp_path: Path):
    """C1: whatever the number of bytes after which the disk is full."""
    assert run_python(STAGE + NO_SPACE, tmp_path / "saved").stdout == "fine\n"


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux, to mount a tmpfs")
def test_a_save_on_a_full_disk_leaves_the_old_one_and_no_litter(run_python: Any, tmp_path: Path):
    """C1: with every amount of room that is too little, and with those that suffice."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a disk")
    try:
        assert 3 <= int(run_python(STAGE + FULL_DISK, disk / "saved").stdout) < 25
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_save_into_a_directory_that_is_read_only_changes_nothing(run_python: Any, tmp_path: Path):
    """C1: nor is anything left beside it."""
    assert run_python(STAGE + READ_ONLY, tmp_path / "saved").stdout == "fine\n"
