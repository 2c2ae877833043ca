"""Children that are killed while they work on a buffer that lives on disk."""

from __future__ import annotations

import gc
import multiprocessing
import random
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from replaykit import ReplayBuffer
from tests import effort
from tests.crash.recovering import (
    KINDS,
    ONCE,
    SHARED,
    SLOTS,
    Child,
    apply,
    child,
    differences,
    kill_at,
    loading,
    new_buffer,
    restart,
    rows_of,
    shown,
)

STEPS = 14

# A server that has imported everything and nothing else forks the children.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.crash.recovering"])


def _forked(kind: str, folder: Path, steps: range, die_at: int, after: float | None) -> int:
    """Has a child work on a folder; returns the last step that it said was done, -1 for none."""
    working = Child(CONTEXT, child, kind, folder, steps, die_at=die_at)
    working.wait()
    if after is not None:
        time.sleep(after)
        working.process.kill()
    return working.last_said()


def _played(kind: str, stops: list[int]) -> dict[str, Any]:
    """The same buffer in memory, which is never killed, after a restart at each of these steps."""
    buffer, begin = new_buffer(kind, None), 0
    for stop in stops:
        for step in range(begin, stop):
            apply(buffer, kind, step)
        begin = max(begin, stop)
        restart(buffer)
    return shown(buffer)


def _check(kind: str, folder: Path, done: int, history: list[int]) -> int:
    """Opens what a killed child left: it is what was done, or one step more. Returns the next."""
    wanted = [_played(kind, [*history, steps]) for steps in (done + 1, done + 2)]
    found = shown(new_buffer(kind, folder))
    gc.collect()  # the next one to open it is another process
    off = [differences(found, one) for one in wanted]
    assert [] in off, (done, history, off)
    return done + 1 + off.index([])


@pytest.mark.parametrize(
    ("kind", "kills", "seed"),
    [
        *((kind, effort.cases(7), 0) for kind in [*KINDS, *SHARED]),
        *((kind, effort.cases(7), 2) for kind in ONCE),
        *(
            pytest.param(kind, 8, seed, marks=pytest.mark.long)
            for kind in [*KINDS, *ONCE, *SHARED]
            for seed in range(10, 20)
        ),
    ],
)
def test_recovered_buffer_has_exactly_the_committed_rows(
    kind: str, kills: int, seed: int, tmp_path: Path
) -> None:
    folder = tmp_path / "rows"
    draw = random.Random(seed)
    history: list[int] = []
    step = 0
    for _ in range(kills):
        steps = range(step, step + STEPS)
        if draw.random() < 0.3:
            done = _forked(kind, folder, steps, 0, draw.random() * 0.06)
        else:
            done = _forked(kind, folder, steps, draw.randrange(1, 9000), None)
        step = _check(kind, folder, max(done, step - 1), history)
        # A child that was killed before it had opened the folder has restarted nothing; but the
        # check has.
        history.append(step)


def _ends_an_episode(kind: str, folder: Path, die_at: int) -> None:
    buffer, rows = new_buffer(kind, folder), rows_of(random.Random(0), kind, 0, 4)
    rows["next", "done"] = torch.arange(4) == 3
    buffer.extend(rows[:3])
    kill_at(die_at, since="_sums")
    buffer.extend(rows[3:])
    sys.setprofile(None)


@pytest.mark.parametrize("kind", ["returns", "shared returns"])
def test_kill_while_returns_are_stored_takes_them_back_with_the_row(
    kind: str, tmp_path: Path
) -> None:
    found = []
    for die_at in range(200, 1200, 60):
        folder = tmp_path / str(die_at)
        process = CONTEXT.Process(target=_ends_an_episode, args=(kind, folder, die_at))
        process.start()
        process.join(60)
        found.append(new_buffer(kind, folder)[:]["return_valid"].flatten().tolist())
        gc.collect()
        if not process.exitcode:
            break
    assert all(valid in ([False] * 3, [True] * 4) for valid in found), found
    assert found[0] != found[-1]


@pytest.mark.parametrize(
    ("kind", "kills", "seed"),
    [
        *((kind, 6, 3) for kind in ("ring", "lanes", "best", "once streams", "shared ring")),
        *(pytest.param(kind, 20, 4, marks=pytest.mark.long) for kind in [*KINDS, *ONCE, *SHARED]),
    ],
)
def test_kill_during_load_keeps_the_old_or_the_new_state(
    kind: str, kills: int, seed: int, tmp_path: Path
) -> None:
    """The rows are those from before the load, or all of the checkpoint."""
    draw = random.Random(seed)
    source = new_buffer(kind, None)
    for step in range(500, 508):
        apply(source, kind, step)
    source.extend(rows_of(draw, kind, 10**6, 5))
    source.dumps(tmp_path / "saved")
    last = rows_of(draw, kind, 10**5, SLOTS + 2)

    def filled(place: Path | None) -> ReplayBuffer:
        buffer = new_buffer(kind, place)
        for step in range(4):
            apply(buffer, kind, step)
        buffer.extend(last)
        return buffer

    filled(tmp_path / "before")
    gc.collect()
    wanted: list[Any] = []
    for loaded in (False, True):
        model = filled(None)
        restart(model)
        if loaded:
            model.loads(tmp_path / "saved")
        restart(model)
        wanted.append(shown(model))
    assert differences(*wanted)
    seen = set()
    for number in range(kills):
        rows = tmp_path / str(number)
        shutil.copytree(tmp_path / "before", rows)
        die_at = draw.randrange(1, 5500) if number else 0
        done = Child(CONTEXT, loading, kind, rows, tmp_path / "saved", die_at=die_at).last_said()
        found = shown(new_buffer(kind, rows))
        gc.collect()
        off = [differences(found, one) for one in wanted]
        assert [] in off[max(done, 0) :], (done, off)
        seen.add(off.index([]))
    assert seen == {0, 1}
