"""Kills while a buffer is saved again and again, and loaded: what is there is what was committed.

A prioritized buffer with episodes goes on step by step; every step is saved over the one before,
with older ones kept. Step n leaves the same buffer in every process that plays it.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest

from tests.crash.forking import FORKED

STAGE = (
    FORKED
    + """
import copy, json, random, signal, sys, time
from replaykit import LazyTensorStorage, PrioritizedSampler, ReplayBuffer, RoundRobinWriter
from replaykit.checkpoint import checkpoint_versions, chunks, dirty_chunks
dirty_chunks._LEAST_BYTES = 200
chunks._CHUNK_BYTES = 3000
ROWS, CAPACITY, KEEP = 7, 90, 3

def empty():
    return ReplayBuffer(
        storage=LazyTensorStorage(CAPACITY),
        sampler=PrioritizedSampler(alpha=0.7, beta=0.5),
        writer=RoundRobinWriter(track_generations=True),
        generator=torch.Generator().manual_seed(0),
        batch_size=3,
    )

def play(buffer, number):
    '''Brings a buffer from step number - 1 to step number.'''
    chance = random.Random(number)
    ids = torch.arange(ROWS * number, ROWS * (number + 1))
    done = torch.tensor([[chance.random() < 0.2] for _ in range(ROWS)])
    buffer.extend(TensorDict(
        {"id": ids, "wide": ids[:, None].double().repeat(1, 30),
         "next": {"reward": ids[:, None].float(), "done": done}}, [ROWS]))
    slots = torch.tensor([chance.randrange(len(buffer)) for _ in range(4)])
    buffer.update_priority(slots, torch.tensor([chance.random() + 0.1 for _ in range(4)]))
    if number % 3 == 0:
        rows = buffer.storage.read(slots[:1])
        rows["next", "reward"] = torch.full((1, 1), -float(number))
        buffer[slots[:1]] = rows
    if number % 5 == 0:
        buffer.cut()
    buffer.sample()

def state(buffer):
    '''All of it: rows, counters, generations, priorities, the generator, and the episodes.'''
    episodes = [episode.index.tolist() for episode in buffer.episodes]
    ends = [str(episode.reason) for episode in buffer.episodes][:-1]  # a restart ends the last one
    whole = buffer.state_dict()
    del whole["_writer"]["_episodes"]
    return flat(whole), episodes, ends

def loaded(path, version=None):
    buffer = empty()
    buffer.loads(path, version=version)
    return buffer, buffer.write_count // ROWS - 1

path, rounds, chance = sys.argv[1], int(sys.argv[2]), random.Random(int(sys.argv[3]))

def save_for_ever(live, number, says, whole):
    if whole:  # of a copy, nothing has been saved yet
        live = copy.deepcopy(live)
    while True:
        live.dumps(path, keep=KEEP)
        os.write(says, b".")
        number += 1
        play(live, number)

def load_for_ever():
    while True:
        loaded(path)

live, number = empty(), 0
play(live, 0)
started = time.perf_counter()
for _ in range(3):
    live.dumps(path, keep=KEEP)
pause = (time.perf_counter() - started) / 3
states = {0: state(live)}
seen, kept = set(), 0
for turn in range(rounds):
    hears, says = os.pipe()
    pids = [forked(lambda: save_for_ever(live, number, says, turn % 2))]
    os.close(says)
    if turn % 3 == 0:
        pids.append(forked(load_for_ever))
    for _ in range(chance.randrange(4)):
        assert os.read(hears, 1), "it died before it was killed"
    time.sleep(chance.uniform(0, 3 * pause))
    chance.shuffle(pids)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(pid, 0)[1]), "it died before it was killed"
    os.close(hears)
    buffer, found = loaded(path)
    assert found >= number, (found, number)
    while number < found:
        number += 1
        play(live, number)
        states[number] = state(live)
    assert state(buffer) == states[number], number
    seen.add(found)
    for version in checkpoint_versions(path)[:-1]:
        older, which = loaded(path, version)
        assert which <= number
        assert state(older) == states[which], (version, which)
        kept += 1
live.dumps(path, keep=1)
with open(path + "/manifest.json") as file:
    named = {"manifest.json", ".lock", *json.load(file)["files"]}
assert set(os.listdir(path)) == named, os.listdir(path)
assert state(loaded(path)[0]) == state(live)
print(len(seen), kept)
"""
)

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork and SIGKILL")


@pytest.mark.pitfall("CK1")
@pytest.mark.pitfall("CK3")
@pytest.mark.parametrize(
    ("kills", "seed", "least"),
    [
        (25, 1, (5, 20)),
        pytest.param(250, 2, (50, 20), marks=[pytest.mark.long, pytest.mark.timeout(1200)]),
    ],
)
def test_kills_during_repeated_saves_leave_committed_states(
    kills: int, seed: int, least: tuple[int, int], run_python: Any, tmp_path: Any
) -> None:
    """Every second saver starts with all rows. The readers of every third saver are killed too."""
    done = run_python(STAGE, tmp_path / "saved", kills, seed, timeout=1100)
    seen, kept = map(int, done.stdout.split())
    assert seen >= least[0], "the kills came before anything was saved"
    assert kept >= least[1]
