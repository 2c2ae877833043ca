"""Several processes on one buffer: nothing is lost, rows are whole, a killed one stops nobody."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import random
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from replaykit import ReplayBuffer
from replaykit.recovery.recovery_folder import RecoveryFolder
from replaykit.storages import recoverable, shared_storage
from replaykit.storages.row_files import RowFiles
from tests.crash import recovering
from tests.crash.recovering import Child, apply, differences, kill_at, shown
from tests.crash.sharing import (
    assert_returns,
    assert_whole,
    extends,
    joined,
    new_buffer,
    rows,
    samples,
    size_of,
)
from tests.storages.sharing import another

# Its processes get all they have pickled, as spawned ones do, and need no second to import torch.
multiprocessing.get_context("forkserver").set_forkserver_preload(["tests.crash.sharing"])

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

SECOND = 1.0
"""Within which others go on after a kill, as promised."""


def in_child(work: Callable[[], Any]) -> int:
    """Runs it in a forked process, which does not come back; returns its number."""
    child = os.fork()
    if not child:
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return child


def ended(child: int) -> int:
    """Waits for a child, which a test would otherwise wait for without end; its exit code."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError("it did not come to its end")


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def pause() -> float:
    """How long this machine may keep a process that could run from running, as it is just now."""
    longest = 0.0
    for _ in range(50):
        begun = time.monotonic()
        time.sleep(0.001)
        longest = max(longest, time.monotonic() - begun)
    return longest


@contextlib.contextmanager
def at_once() -> Iterator[None]:
    """What happens meanwhile takes no longer than promised, on a machine that may be busy."""
    before, begun = pause(), time.monotonic()
    yield
    took = time.monotonic() - begun
    assert took < SECOND + 20 * max(before, pause()), took


def numbers_by_writer(buffer: ReplayBuffer) -> dict[int, list[int]]:
    """The rows of every writer, in the order in which they were written."""
    with buffer.storage.lock:  # who takes it learns what the others have done
        found = buffer[buffer.storage.ledger.write_order()]
    assert_whole(found)
    return {
        writer: found["number"][found["writer"] == writer].tolist()
        for writer in found["writer"].unique().tolist()
    }


def batches_of(buffer: ReplayBuffer, writer: int) -> int:
    """How many extends of a writer are there, from its first on: each whole, in order."""
    wanted, batch = numbers_by_writer(buffer).get(writer, []), 0
    while sum(size_of(writer, one) for one in range(batch)) < len(wanted):
        batch += 1
    assert wanted == list(range(sum(size_of(writer, one) for one in range(batch))))
    return batch


def test_concurrent_writers_lose_no_row_and_rows_are_whole(context: Any, tmp_path: Path) -> None:
    slots, batches = 45, 60
    for folder, dedup in ((None, False), (tmp_path / "rows", False), (None, True)):
        prioritized = folder is not None
        buffer = new_buffer(slots, folder, prioritized=prioritized, dedup=dedup)
        stop = context.Event()
        reader = Child(context, samples, buffer, stop)
        writers = [
            context.Process(target=extends, args=(buffer, writer, range(batches)))
            for writer in range(3)
        ]
        for process in writers:
            process.start()
        for process in writers:
            process.join(120)
            assert process.exitcode == 0
        stop.set()
        assert isinstance(reader.last_said(), int)
        total = {w: sum(size_of(w, batch) for batch in range(batches)) for w in range(3)}
        assert buffer.write_count == sum(total.values())
        assert len(buffer) == min(slots, buffer.write_count)
        for writer, numbers in numbers_by_writer(buffer).items():
            assert numbers == list(range(total[writer] - len(numbers), total[writer]))
        assert sum(map(len, numbers_by_writer(buffer).values())) == len(buffer)


def killed(
    buffer: ReplayBuffer | Path, context: Any, writer: int, batches: range, draw: random.Random
) -> int:
    """Has a process extend until it is killed; returns the last batch that it said was there."""
    by_call = draw.random() < 0.6
    die_at = draw.randrange(1, 4000) if by_call else 0
    child = Child(context, extends, buffer, writer, batches, die_at=die_at)
    child.wait()
    if not by_call:
        time.sleep(draw.random() * 0.05)
        child.process.kill()
    return child.last_said(batches.start - 1)


def check_priorities(buffer: ReplayBuffer, unsure: set[int]) -> None:
    """They are those that were set, of the first row of every third batch."""
    found = buffer[:]
    sampler: Any = buffer.sampler
    raw = sampler.state_dict()["_priorities"]
    first = torch.cat([torch.ones(1, dtype=torch.bool), found["batch"].diff() != 0])
    first |= torch.cat([torch.ones(1, dtype=torch.bool), found["writer"].diff() != 0])
    own = (found["writer"] == 1) & first & (found["batch"] % 3 == 1)
    sure = own & ~torch.isin(found["batch"], torch.tensor(sorted(unsure), dtype=torch.int64))
    assert raw[sure].tolist() == (1.0 + found["batch"][sure] % 4).tolist()
    assert (raw[~own] >= 1).all()
    assert len(raw) == len(buffer)


@pytest.mark.parametrize(
    ("place", "method", "dedup", "kills", "seed"),
    [
        ("memory", "fork", False, 10, 0),
        ("memory", "fork", True, 10, 0),
        ("memory", "forkserver", False, 3, 0),
        ("disk", "fork", False, 10, 1),
        ("disk", "fork", True, 10, 1),
        ("joined", "fork", False, 10, 5),
        ("joined, recovered", "forkserver", False, 3, 5),
        ("joined, recovered", "fork", True, 10, 5),
        *(
            pytest.param(place, "fork", dedup, 15, seed, marks=pytest.mark.long)
            for place in ("memory", "disk")
            for dedup in (False, True)
            for seed in (10, 11, 12)
        ),
    ],
)
def test_killed_writer_does_not_block_others(
    place: str, method: str, dedup: bool, kills: int, seed: int, tmp_path: Path
) -> None:
    """Writers are killed one after another, while this process goes on writing itself."""
    path = None if place == "memory" else tmp_path / "rows"
    buffer = new_buffer(800 * kills, path, recover="recovered" in place, dedup=dedup)
    context = multiprocessing.get_context(method)
    joins = path if "joined" in place else None
    draw = random.Random(seed)
    batch = 0
    unsure: set[int] = set()
    for own in range(kills):
        done = killed(joins or buffer, context, 1, range(batch, batch + 60), draw)
        # Somebody else can go on at once.
        with at_once():
            buffer.extend(rows(7, own, own, 1))
        # Every extend is there as a whole or not at all, and there where its call had returned.
        there = batches_of(buffer, 1)
        assert there in (done + 1, done + 2), (there, done)
        batch = there
        written = sum(size_of(1, one) for one in range(batch))
        assert buffer.write_count == written + own + 1 == len(buffer)
        if there == done + 2:
            unsure.add(done + 1)  # it came to its extend, perhaps not to the update after it
        check_priorities(buffer, unsure)
        assert len(buffer.episodes.index) == len(buffer)


@pytest.mark.parametrize(
    ("rounds", "seed", "dedup"),
    [
        (4, 1, False),
        (4, 1, True),
        *(pytest.param(10, seed, bool(seed % 2), marks=pytest.mark.long) for seed in range(10, 20)),
    ],
)
def test_rows_are_recovered_after_all_processes_were_killed(
    rounds: int, seed: int, dedup: bool, tmp_path: Path
) -> None:
    """Three writers at once, which are all processes that share the rows."""
    path = tmp_path / "rows"
    context, draw = multiprocessing.get_context("fork"), random.Random(seed)
    # Room for the rows of all rounds, however far the writers get before the kill.
    rows = sum(size_of(writer, batch) for writer in range(3) for batch in range(61 * rounds))
    new_buffer(rows, path, recover=True, dedup=dedup).shutdown()
    there = [0, 0, 0]
    for turn in range(rounds):
        children = [
            Child(context, extends, path, writer, range(batch, batch + 60))
            for writer, batch in enumerate(there)
        ]
        for child in children:
            child.wait()
        time.sleep(draw.random() * 0.08)
        for child in draw.sample(children, 3):
            child.process.kill()
        done = [child.last_said(batch - 1) for child, batch in zip(children, there, strict=True)]
        made = not turn % 2
        buffer = new_buffer(rows, path, recover=True, dedup=dedup) if made else joined(path)
        there = [batches_of(buffer, writer) for writer in range(3)] if len(buffer) else there
        for found, said in zip(there, done, strict=True):
            assert found in (said + 1, said + 2), (there, done)
        sizes = [sum(size_of(writer, one) for one in range(n)) for writer, n in enumerate(there)]
        assert buffer.write_count == len(buffer) == sum(sizes)
        if len(buffer):
            assert len(buffer.episodes.index) == len(buffer)
            assert_whole(buffer.sample())
        buffer.shutdown()
        del buffer
        gc.collect()


def assert_extends_are_whole(buffer: ReplayBuffer) -> None:
    """Each of those that follow each other in a ring, but for the first, which may be cut."""
    with buffer.storage.lock:
        order = buffer.storage.ledger.write_order()
        found, positions = buffer[order], buffer.storage.ledger.positions(order)
    assert_whole(found)
    assert (positions.diff() == 1).all()
    of = torch.stack([found["writer"], found["batch"]], -1)
    found_sizes = torch.unique_consecutive(of, dim=0, return_counts=True)[1]
    ends = found_sizes.cumsum(0) - 1
    assert found_sizes[1:].tolist() == found["size"][ends[1:]].tolist()


@pytest.mark.parametrize(("disk", "dedup"), [(False, False), (True, False), (False, True)])
def test_kill_during_overwrites_restores_the_old_rows(
    disk: bool, dedup: bool, tmp_path: Path
) -> None:
    """In a ring that is full, so that what a killed one had overwritten is to be put back."""
    buffer = new_buffer(45, tmp_path / "rows" if disk else None, dedup=dedup)
    context, draw = multiprocessing.get_context("fork"), random.Random(int(disk))
    buffer.extend(rows(7, 0, 0, 45))
    batch, written = 0, 45
    for own in range(1, 9):
        done = killed(buffer, context, 1, range(batch, batch + 30), draw)
        sizes = [size_of(1, one) for one in range(batch, done + 2)]
        found = buffer.write_count - written
        assert found in (sum(sizes), sum(sizes[:-1]))
        batch, written = done + 1 + (found == sum(sizes)), buffer.write_count + 1
        assert_extends_are_whole(buffer)
        buffer.extend(rows(7, own, own, 1))
        assert len(buffer) == 45
        assert len(buffer.episodes.index) == 45


@pytest.mark.parametrize(
    ("method", "joins", "rounds", "seed"),
    [
        ("fork", False, 6, 1),
        ("forkserver", True, 2, 1),
        *(pytest.param("fork", bool(n % 2), 12, n, marks=pytest.mark.long) for n in range(10, 20)),
    ],
)
def test_killed_writer_leaves_whole_streams_with_their_returns(
    method: str, joins: bool, rounds: int, seed: int, tmp_path: Path
) -> None:
    """Three processes write a stream each, having joined by path or inherited the buffer."""
    folder = tmp_path / "rows"
    context, draw, length = multiprocessing.get_context(method), random.Random(seed), 30
    buffer = new_buffer(3 * length, folder, recover=joins, length=length)
    there = [0, 0, 0]
    for _ in range(rounds):
        children, dies = [], draw.randrange(3)
        for writer, batch in enumerate(there):
            at = draw.randrange(1, 9000) if writer == dies else 0
            given = folder if joins else buffer, writer, range(batch, batch + 20)
            children.append(Child(context, extends, *given, die_at=at, length=length))
        for writer, child in enumerate(children):
            child.wait()
            done = child.last_said(there[writer] - 1)
            assert writer == dies or (child.process.exitcode, done) == (0, there[writer] + 19)
            there[writer] = done + 1
        with buffer.storage.lock:
            found = buffer[buffer.storage.ledger.write_order()]
        assert_whole(found)
        for writer, batch in enumerate(there):
            own = found[found["writer"] == writer]
            sizes = [sum(size_of(writer, one) for one in range(n)) for n in (batch, batch + 1)]
            written = int(own["number"][-1]) + 1 if len(own) else 0
            # A killed process may have committed one batch that it did not report.
            assert written in sizes[: 1 + (writer == dies)]
            there[writer] += written != sizes[0]
            assert own["number"].tolist() == list(range(max(0, written - length), written))
            if written:
                assert_returns(own)
        assert len(buffer.episodes.index) == len(buffer)
        assert buffer.write_count == sum(
            size_of(writer, one) for writer, batch in enumerate(there) for one in range(batch)
        )


def _applies(buffer: ReplayBuffer, kind: str, steps: range, said: Any, die_at: int) -> None:
    torch.set_num_threads(1)
    kill_at(die_at)
    for step in steps:
        apply(buffer, kind, step)
        said.send(step)
    os._exit(0)


@pytest.mark.parametrize(
    ("kind", "rounds", "seed"),
    [
        ("episodes", 5, 0),
        ("once episodes", 8, 1),
        *(
            pytest.param(kind, 20, seed, marks=pytest.mark.long)
            for kind in ("episodes", "once episodes")
            for seed in range(10, 20)
        ),
    ],
)
def test_killed_process_leaves_committed_episodes_and_removals(
    kind: str, rounds: int, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two other handles go on, and agree with a buffer of one process."""
    monkeypatch.setattr(recovering, "SLOTS", 120)
    kind, draw = f"shared {kind}", random.Random(seed)
    buffer, model = (recovering.new_buffer(kind, path) for path in (tmp_path / "rows", None))
    handles = buffer, another(buffer)
    for turn in range(rounds):
        first = 1000 * seed + 20 * turn
        steps, die_at = range(first, first + 12), draw.randrange(1, 9000)
        child = Child(
            multiprocessing.get_context("fork"), _applies, buffer, kind, steps, die_at=die_at
        )
        done = child.last_said(first - 1)
        for step in range(first, done + 1):
            apply(model, kind, step)
        if done + 1 in steps and differences(shown(buffer), shown(model)):
            apply(model, kind, done + 1)  # it was committed, but not reported
        for handle in handles:
            assert not differences(shown(handle), shown(model))
        for number in range(4):
            for other in (handles[number % 2], model):
                apply(other, kind, first + 12 + number)
            for handle in handles:
                assert not differences(shown(handle), shown(model))


@pytest.mark.parametrize(("slots", "dedup"), [(10, False), (10, True), (40, True)])
def test_next_process_rolls_back_half_written_rows(
    slots: int, dedup: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = new_buffer(slots, dedup=dedup)
    other = another(buffer)
    buffer.extend(rows(7, 0, 0, slots + 13))
    buffer.empty()  # the files still hold the references of these rows
    for batch in range(4):
        (buffer, other)[batch % 2].extend(rows(0, batch, 3 * batch, 3))
    before = buffer[:].clone()
    priorities = buffer.sampler.state_dict()["_priorities"].tolist()

    def work() -> None:
        monkeypatch.setattr(shared_storage.Sharing, "commit_state", die)
        buffer.extend(rows(1, 0, 0, 8))

    assert ended(in_child(work)) == -signal.SIGKILL
    assert buffer.write_count == 12
    assert (buffer[:] == before).all()
    assert buffer.sampler.state_dict()["_priorities"].tolist() == priorities
    for batch in range(4, 28):
        buffer.extend(rows(0, batch, 8 + batch, 1))
        assert numbers_by_writer(buffer) == {0: list(range(9 + batch))[-slots:]}
    assert numbers_by_writer(other) == numbers_by_writer(buffer)


@pytest.mark.parametrize(("disk", "dedup"), [(False, False), (True, False), (False, True)])
def test_kill_during_load_leaves_others_the_old_or_new_state(
    disk: bool, dedup: bool, tmp_path: Path
) -> None:
    """The others go on with what was there before, or with all of the checkpoint."""
    saved = new_buffer(45)
    for batch in range(20):
        saved.extend(
            rows(2, batch, sum(size_of(2, one) for one in range(batch)), size_of(2, batch))
        )
    saved.update_priority(torch.arange(4), torch.tensor([5.0, 6.0, 7.0, 8.0]))
    saved.dumps(tmp_path / "saved")

    def known(buffer: ReplayBuffer) -> tuple[Any, ...]:
        found = numbers_by_writer(buffer)
        sampler: Any = buffer.sampler
        priorities = sampler.state_dict()["_priorities"].tolist()
        return found, buffer.write_count, len(buffer.episodes.index), priorities

    wanted, draw, seen = known(saved), random.Random(int(disk)), set()
    for number in range(7):
        buffer = new_buffer(45, tmp_path / f"rows{number}" if disk else None, dedup=dedup)
        buffer.extend(rows(7, 0, 0, 60))
        buffer.update_priority(torch.arange(3), torch.tensor([2.0, 3.0, 4.0]))
        before = known(buffer)
        # Most kills are for when rows are being overwritten; before and after are long.
        die_at = draw.randrange(150, 1100) if number else 0

        def work(buffer: ReplayBuffer = buffer, die_at: int = die_at) -> None:
            kill_at(die_at, since="load_content")
            buffer.loads(tmp_path / "saved")

        died = ended(in_child(work)) == -signal.SIGKILL
        with at_once():
            assert len(buffer.sample()) == 16
        found = known(buffer)
        assert found in (before, wanted)
        assert died or found == wanted
        seen.add(found == wanted)
        buffer.extend(rows(7, 1, 60, 4))
        assert buffer.write_count == found[1] + 4
        assert numbers_by_writer(buffer)[7][-4:] == [60, 61, 62, 63]
    assert seen == {False, True}


def test_a_child_of_a_killed_process_does_not_hold_the_lock() -> None:
    buffer = new_buffer(10)
    buffer.extend(rows(0, 0, 0, 3))
    receiver, sender = os.pipe()
    waiting, leave = os.pipe()

    def work() -> None:
        os.close(leave)
        with buffer.storage.lock:
            if not os.fork():
                os.write(sender, b"there")
                os.read(waiting, 1)  # until the test has ended
                os._exit(0)
            os.read(receiver, 5)
            die()

    assert ended(in_child(work)) == -signal.SIGKILL
    with at_once():
        buffer.extend(rows(0, 1, 3, 3))
    assert numbers_by_writer(buffer) == {0: list(range(6))}
    os.close(leave)


def test_children_are_forked_while_a_thread_extends() -> None:
    buffer, stop = new_buffer(4000), threading.Event()
    count = 0

    def write() -> None:
        nonlocal count
        while not stop.is_set():
            buffer.extend(rows(0, 0, count, 3))
            count += 3

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for writer in range(1, 13):
            time.sleep(0.002 * writer)
            child = in_child(lambda writer=writer: extends(buffer, writer, range(3)))
            assert ended(child) == 0
    finally:
        stop.set()
        thread.join()
    total = sum(size_of(w, batch) for w in range(1, 13) for batch in range(3))
    assert buffer.write_count == total + count
    for writer, numbers in numbers_by_writer(buffer).items():
        if len(buffer) < 4000:
            assert numbers == list(range(len(numbers)))
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers))), writer


@pytest.mark.parametrize("dedup", [False, True])
@pytest.mark.parametrize("place", ["files", "begin", "published", "opened"])
def test_child_forked_during_the_first_write_can_write(
    place: str, dedup: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = new_buffer(50, dedup=dedup)
    children: list[int] = []

    def forking(call: Any) -> Any:
        def called(*args: Any, **options: Any) -> Any:
            if not children:
                children.append(0)  # the child forks none
                children[0] = in_child(lambda: extends(buffer, 1, range(3)))
            return call(*args, **options)

        return called

    module, name = {
        "files": (RowFiles, "created"),
        "begin": (recoverable.Recovery, "open_rows"),
        "published": (RecoveryFolder, "publish"),
        "opened": (shared_storage.Sharing, "open_tables"),
    }[place]
    monkeypatch.setattr(module, name, forking(getattr(module, name)))
    buffer.extend(rows(0, 0, 0, 3))
    assert ended(children[0]) == 0
    assert numbers_by_writer(buffer)[0] == [0, 1, 2]
    assert batches_of(buffer, 1) == 3


def test_stopped_process_without_the_lock_does_not_block_others() -> None:
    buffer = new_buffer(100)
    receiver, sender = os.pipe()

    def work() -> None:
        buffer.extend(rows(1, 0, 0, 2))
        os.write(sender, b"there")
        time.sleep(60)

    child = in_child(work)
    os.read(receiver, 5)
    os.kill(child, signal.SIGSTOP)
    try:
        buffer.extend(rows(0, 0, 0, 3))
        assert numbers_by_writer(buffer) == {0: [0, 1, 2], 1: [0, 1]}
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
