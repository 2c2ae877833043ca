"""Kills, power cuts, full disks: what is left is one of the states that were saved."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from replaykit.checkpoint import chunks

# A process of its own plays every scene with forks of itself: importing torch once is enough.
STAGE = """
import os, random, signal, sys, tempfile, time
import torch
torch.set_num_threads(1)
from tensordict import TensorDict
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

def flat(value):
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), value.shape, value.reshape(-1).view(torch.uint8).tolist())
    if isinstance(value, TensorDict):
        return flat(value.to_dict())
    if isinstance(value, dict):
        return {key: flat(item) for key, item in value.items()}
    return [flat(item) for item in value] if isinstance(value, list) else value

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

def forked(function):
    pid = os.fork()
    if pid == 0:
        code = 9
        try:
            function()
            code = 0
        finally:
            os._exit(code)
    return pid

path = sys.argv[1]
"""

RANDOM_KILLS = """
rounds, chance = int(sys.argv[2]), random.Random(int(sys.argv[3]))

def save_for_ever(number):
    while True:
        number += 1
        state(number).dumps(path)

state(0).dumps(path)
number, seen = 0, set()
for _ in range(rounds):
    pid = forked(lambda: save_for_ever(number))
    time.sleep(chance.uniform(0, 0.06))
    os.kill(pid, signal.SIGKILL)
    assert os.WIFSIGNALED(os.waitpid(pid, 0)[1])
    found = loaded(path)
    assert found >= number
    number = found
    seen.add(found)
state(number + 1).dumps(path)
assert loaded(path) == number + 1
assert not litter(path), litter(path)
print(len(seen))
"""

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
before = sorted(os.listdir(path))
buffer = state(2)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
for limit in (0, 1, 100, 2000, 2999):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        buffer.dumps(path)
    except OSError:
        pass
    else:
        raise AssertionError(limit)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    assert loaded(path) == 1
    assert sorted(os.listdir(path)) == before, os.listdir(path)
buffer.dumps(path)
assert loaded(path) == 2
print("fine")
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

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="kills and forks")


@pytest.mark.pitfall("CK1")
@pytest.mark.pitfall("CK3")
def test_a_killed_save_leaves_one_of_the_states_that_were_saved(run_python: Any, tmp_path: Path):
    """CK1, CK3: kill -9 at 25 random instants of repeated saves over one path."""
    done = run_python(STAGE + RANDOM_KILLS, tmp_path / "saved", 25, 7)
    assert int(done.stdout) >= 3, "the kills came before anything was saved"


@pytest.mark.pitfall("CK1")
@pytest.mark.pitfall("CK3")
@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(2))
def test_hundreds_of_killed_saves_leave_states_that_were_saved(
    seed: int, run_python: Any, tmp_path: Path
):
    """CK1, CK3: the same, 300 times."""
    done = run_python(STAGE + RANDOM_KILLS, tmp_path / "saved", 300, seed, timeout=800)
    assert int(done.stdout) >= 30


@pytest.mark.pitfall("CK1")
@pytest.mark.pitfall("CK3")
def test_a_save_can_be_killed_between_any_two_steps(run_python: Any, tmp_path: Path):
    """CK1, CK3: before every single call into the file system; over an old state and over none."""
    tmp_path.mkdir(exist_ok=True)
    done = run_python(STAGE + EVERY_KILL, tmp_path)
    assert int(done.stdout) > 15


@pytest.mark.pitfall("CK1")
def test_processes_that_save_and_load_at_once_see_whole_states(run_python: Any, tmp_path: Path):
    """CK1, C12: of three savers to one path the last one wins, and never a mixture."""
    done = run_python(STAGE + MANY_PROCESSES, tmp_path / "saved")
    assert int(done.stdout) >= 2


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_FSIZE as Linux has it")
def test_a_save_that_does_not_fit_leaves_the_old_one_and_no_litter(run_python: Any, tmp_path: Path):
    """C1: whatever the number of bytes after which the disk is full."""
    assert run_python(STAGE + NO_SPACE, tmp_path / "saved").stdout == "fine\n"


def test_a_save_into_a_directory_that_is_read_only_changes_nothing(run_python: Any, tmp_path: Path):
    """C1: nor is anything left beside it."""
    assert run_python(STAGE + READ_ONLY, tmp_path / "saved").stdout == "fine\n"


# -- what the disk is told ------------------------------------------------------------------------


class Trace:
    """Notes the calls into the file system; fails at one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fail_at: int = -1) -> None:
        self.calls: list[tuple[str, str]] = []
        self.fail_at = fail_at
        for name in ("fsync", "replace", "mkdir", "unlink"):
            self._wrap(monkeypatch, name)

    def _wrap(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        original = getattr(os, name)

        def wrapper(target: Any, *rest: Any, **keywords: Any) -> Any:
            if name == "fsync":
                path = os.readlink(f"/proc/self/fd/{target}")
            else:
                path = os.fspath(rest[0] if name == "replace" else target)
            if name in ("fsync", "replace") and self.fail_at >= 0:
                self.fail_at -= 1
                if self.fail_at < 0:
                    raise OSError(28, "No space left on device", path)
            self.calls.append((name, path))
            return original(target, *rest, **keywords)

        monkeypatch.setattr(os, name, wrapper)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.pitfall("CK4")
def test_files_are_synced_before_they_are_published(make: Any, monkeypatch: Any, tmp_path: Path):
    """CK4: data, then the manifest, then the directory; old files go when all that is done."""
    monkeypatch.setattr(chunks, "_CHUNK_BYTES", 64)
    path = tmp_path / "a" / "b" / "saved"
    with monkeypatch.context() as patch:
        first = Trace(patch)
        make(5).dumps(path)
    made = [name for call, name in first.calls if call == "mkdir"][:3]
    assert made == [str(tmp_path / "a"), str(tmp_path / "a" / "b"), str(path)]
    for folder in made:  # the name of a new directory lies in its parent
        at = first.calls.index(("mkdir", folder))
        assert ("fsync", str(Path(folder).parent)) in first.calls[at:]
    old = set(json.loads((path / "manifest.json").read_text())["files"])

    with monkeypatch.context() as patch:
        trace = Trace(patch)
        make(8, start=50).dumps(path)
    new = set(json.loads((path / "manifest.json").read_text())["files"])
    assert len(new) > 2
    assert not old & new
    steps = [(call, os.path.basename(name)) for call, name in trace.calls]
    published = steps.index(("replace", "manifest.json"))
    before, after = steps[:published], steps[published + 1 :]
    drafts = [n for call, n in before if call == "fsync" and n.startswith(".manifest.json.")]
    assert len(drafts) == 1
    draft = before.index(("fsync", drafts[0]))
    assert {n for call, n in before[:draft] if call == "fsync"} >= new
    assert ("fsync", "saved") in before[draft:]  # the names of the new files
    assert after[0] == ("fsync", "saved")  # the new name of the manifest
    assert not [n for call, n in before if call == "unlink"]
    assert {n for call, n in after if call == "unlink"} >= old


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_save_that_fails_anywhere_leaves_a_whole_state_and_no_litter(
    make: Any, state_of: Any, restarted: Any, monkeypatch: Any, tmp_path: Path
):
    """C1, G1: an error of the disk at every single step."""
    monkeypatch.setattr(chunks, "_CHUNK_BYTES", 64)
    make(5).dumps(tmp_path / "count")
    with monkeypatch.context() as patch:
        trace = Trace(patch)
        make(8).dumps(tmp_path / "count")
        total = sum(call in ("fsync", "replace") for call, _ in trace.calls)
    assert total > 5
    states = [state_of(make(5)), state_of(make(8, start=50))]
    outcomes = []
    for fail_at in range(total):
        path = tmp_path / str(fail_at)
        make(5).dumps(path)
        buffer = make(8, start=50)
        with monkeypatch.context() as patch:
            Trace(patch, fail_at)
            with pytest.raises(OSError, match="No space left"):
                buffer.dumps(path)
        assert state_of(buffer) == states[1]
        loaded = make()
        loaded.loads(path)
        outcomes.append(list(map(restarted, states)).index(state_of(loaded)))
        if not outcomes[-1]:
            manifest = json.loads((path / "manifest.json").read_text())
            assert set(os.listdir(path)) == {"manifest.json", ".lock", *manifest["files"]}
        buffer.dumps(path)
        loaded.loads(path)
        assert torch.equal(loaded["id"], buffer["id"])
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {0, 1}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_full_disk_found_when_a_file_is_closed_leaves_no_litter(
    make: Any, monkeypatch: Any, tmp_path: Path
):
    """What is still in a buffer may fail a second time while the files are removed."""
    make(5).dumps(tmp_path)
    before = set(os.listdir(tmp_path))
    original = open
    failed: list[str] = []

    class Full:
        def __init__(self, file: Any) -> None:
            self.file = file

        def write(self, data: Any) -> int:
            return self.file.write(data)

        def flush(self) -> None:
            failed.append("flush")
            raise OSError(28, "No space left on device")

        def close(self) -> None:
            self.file.close()
            failed.append("close")
            raise OSError(28, "No space left on device")

        def fileno(self) -> int:
            return self.file.fileno()

    def opened(file: Any, mode: str = "r", **keywords: Any) -> Any:
        found = original(file, mode, **keywords)
        return Full(found) if mode == "xb" else found

    monkeypatch.setattr(chunks, "open", opened, raising=False)
    with pytest.raises(OSError, match="No space left"):
        make(8).dumps(tmp_path)
    assert failed == ["flush", "close"]
    assert set(os.listdir(tmp_path)) == before
