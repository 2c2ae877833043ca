"""Four writers, an owner and two readers of one folder, each of them killed again and again."""

from __future__ import annotations

import random
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest

from replaykit import TrajectoryChunks, TrajectoryFolder
from replaykit.feeds.chunk_files import read_chunk
from tests.feeds.trajectories import buffer_of, files_in, steps_in
from tests.prepared import python

ROOT = Path(__file__).parents[2]
LIMIT = 40

WRITER = """
import os, random, sys, time
from replaykit import TrajectoryWriter
from tests.feeds.trajectories import rows_of
root, log, token = sys.argv[1], sys.argv[2], int(sys.argv[3])
draw, step = random.Random(token), 0
writer = TrajectoryWriter(root, max_len=draw.choice([None, 7]))
with open(log, "a") as file:
    while True:
        count = draw.randint(1, 20)
        writer.extend(rows_of(token, step, count, [step + count - 1]))
        step += count
        file.write(f"{token} {step}\\n")
        file.flush()
        time.sleep(0.01)
"""

READER = """
import sys, time
from pathlib import Path
from replaykit import SliceSampler, TrajectoryFolder
from tests.feeds.trajectories import buffer_of
root, saved, limit = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
rb = buffer_of(200_000, sampler=SliceSampler(slice_len=2))
owner = {"owner": True, "max_files": limit} if limit else {}
folder = TrajectoryFolder(root, rb, **owner)
if (saved / "manifest.json").exists():
    folder.loads(saved)
while True:
    for _ in range(10):
        folder.refresh()
        if len(rb):
            batch = rb.sample().reshape(-1, 2)
            same = batch["stream"].diff(dim=1) == 0
            assert bool(same.all()) and bool((batch["step"].diff(dim=1) == 1).all())
    folder.dumps(saved)
    time.sleep(0.02)
"""


@pytest.mark.acceptance("S23", "C47")
@pytest.mark.parametrize("kills", [8, pytest.param(300, marks=pytest.mark.long)])
def test_nothing_is_torn_and_only_evicted_chunks_are_lost(tmp_path: Path, kills: int) -> None:
    draw, root, tokens = random.Random(kills), tmp_path / "root", iter(range(10**6))
    roles = {f"writer{n}": WRITER for n in range(4)} | {f"reader{n}": READER for n in range(3)}
    running: dict[str, subprocess.Popen[bytes]] = {}

    def start(role: str) -> None:
        last = next(tokens) if "writer" in role else LIMIT * (role == "reader0")
        arguments = ["-c", roles[role], str(root), str(tmp_path / role), str(last)]
        running[role] = subprocess.Popen([*python(), *arguments], cwd=ROOT, stderr=subprocess.PIPE)

    def wait_for(events: Callable[[], bool]) -> None:
        while not events():
            for process in running.values():
                assert process.poll() is None, process.communicate()[1]
            time.sleep(0.01)

    seen = set[str]()

    def evicted() -> bool:
        seen.update(files := files_in(root))
        return len(files) >= LIMIT and not seen.issubset(files)

    try:
        for role in roles:
            start(role)
        wait_for(evicted)
        for role in draw.choices(list(roles), k=kills):
            seen.update(files_in(root))
            size = len(seen) + draw.randint(1, 40)
            wait_for(lambda size=size: seen.update(files_in(root)) or len(seen) >= size)
            running[role].kill()
            running[role].communicate()
            start(role)
        assert all(process.poll() is None for process in running.values())
    finally:
        for process in running.values():
            process.kill()
            process.communicate()

    # A new owner takes over, and no file is torn.
    owner = TrajectoryFolder(root, buffer_of(200_000), owner=True, max_files=10**6)
    owner.refresh()
    assert owner.stats()["damaged"] == 0
    chunks = TrajectoryChunks(root)
    assert len(files_in(root)) == len(chunks) >= LIMIT
    steps = defaultdict[int, list[int]](list)
    for name in files_in(root):
        read_chunk(str(root / "fifo" / name))
    for number in range(len(chunks)):
        for token, step in steps_in(chunks.load(number)):
            steps[token].append(step)
    for found in steps.values():
        assert sorted(found) == list(range(min(found), max(found) + 1)), "a hole, or a row twice"
    published = dict[int, int]()
    for n in range(4):
        for line in (tmp_path / f"writer{n}").read_text().splitlines():
            published[int(line.split()[0])] = int(line.split()[1])
    for token, count in published.items():
        assert token not in steps or max(steps[token]) >= count - 1, "a published chunk is lost"
    assert sum(published.values()) > sum(map(len, steps.values())), "nothing was evicted"

    # Every reader continues after its last save, and has each row of the folder once.
    here = {(token, step) for token, found in steps.items() for step in found}
    for n in range(3):
        rb = buffer_of(200_000)
        folder = TrajectoryFolder(root, rb)
        if (tmp_path / f"reader{n}" / "manifest.json").exists():
            with pytest.warns(UserWarning, match="'slice' sampler"):
                folder.loads(tmp_path / f"reader{n}")
        folder.refresh()
        read = steps_in(rb[:])
        assert len(set(read)) == len(read), "a chunk was read twice"
        assert here <= set(read)
        assert folder.stats()["damaged"] == 0
        assert folder.stats()["rows"] == len(read)
