"""Converting a corpus is killed at any instant: what is there is a whole data set, or none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from replaykit.testing.robohive_files import RoboHiveWriter, make_trial
from tests.prepared import python

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork and SIGKILL")

# Runs in a process of its own that forks one child for each try: a fork starts in a moment, a
# new interpreter in seconds. Dying at the k-th system call is dying at every instant that counts;
# killing after a random time finds the instants that nobody counted.
CRASH = """
import os, random, signal, sys, time, warnings
from pathlib import Path
import torch
from tensordict import TensorDict
from replaykit.datasets import publishing
from replaykit.datasets.engine.conversion import ensure_dataset
from replaykit.datasets.publishing import open_published, verify_published
from replaykit.datasets.families.robohive import ROBOHIVE
from replaykit.datasets.sources import Sources
warnings.simplefilter("ignore")
torch.set_num_threads(1)
old, new, target = map(Path, sys.argv[1:4])
dense, random_kills = int(sys.argv[4]), int(sys.argv[5])
exchange = publishing.exchange

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
    publishing.remove_tree(target)

def restore_old():
    assert wait(run(lambda: convert(old, True))) == 0

sweep(remove, False)
assert wait(run(lambda: convert(new))) == 0
clean()
for publishing.exchange in (exchange, lambda *_: False):
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


def written(path: Path, records: int = 5, seed: int = 0) -> Path:
    """A file of two trials; of the second one 3 records."""
    with RoboHiveWriter(path) as writer:
        writer.add_trial(**make_trial(records, seed=seed))
        writer.add_trial(**make_trial(3, seed=seed + 50, terminated=True))
    return path


@pytest.mark.pitfall("DS3")
@pytest.mark.parametrize(
    ("dense", "random_kills"),
    [(2, 6), pytest.param(40, 200, marks=[pytest.mark.long, pytest.mark.timeout(1200)])],
)
def test_killed_conversion_is_repeated_and_never_used_as_complete(
    tmp_path: Path, dense: int, random_kills: int
) -> None:
    old, new = written(tmp_path / "old.h5"), written(tmp_path / "new.h5", 21, seed=3)
    (tmp_path / "root").mkdir()
    arguments = [str(old), str(new), str(tmp_path / "root" / "data"), str(dense), str(random_kills)]
    done = subprocess.run([*python(), "-c", CRASH, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    died, finished = map(int, done.stdout.split())
    assert died >= 30
    assert finished >= 3
