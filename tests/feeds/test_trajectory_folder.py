"""Folders: each chunk is read once, and no episodes are joined, whatever others do."""

from __future__ import annotations

import errno
import os
import random
import shutil
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from replaykit import (
    BufferDataset,
    LazyTensorStorage,
    ListStorage,
    RateLimiter,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SliceSampler,
    StackFrames,
    TrajectoryFolder,
    TrajectoryWriter,
)
from replaykit.episodes import EndReason, Head
from replaykit.errors import CheckpointError, RateLimiterTimeout, SchemaError
from replaykit.feeds import trajectory_folder
from tests.feeds.trajectories import buffer_of, files_in, rows_of, steps_in
from tests.support.refusals import refuses


def write(root: Path, *lengths: int, stream: int = 0, start: int = 0, **more: Any) -> int:
    """Write one terminated trajectory of each length; return the next step."""
    with TrajectoryWriter(root, **more) as writer:
        for length in lengths:
            writer.extend(rows_of(stream, start, length, [start + length - 1]))
            start += length
    return start


@pytest.mark.acceptance("C5", "C47")
@pytest.mark.parametrize("lane_key", [None, "lane", "stream"])
@pytest.mark.parametrize("seed", range(3))
def test_streams_of_many_writers_are_fed_once_and_never_joined(
    tmp_path: Path, lane_key: str | None, seed: int
) -> None:
    draw = random.Random(seed)
    rb = buffer_of(lane_key=lane_key)
    folder = TrajectoryFolder(tmp_path, rb)
    writers = [TrajectoryWriter(tmp_path, max_len=draw.choice([3, 4, None])) for _ in range(4)]
    steps, reasons = [0] * 4, dict[tuple[int, int], EndReason]()
    for _ in range(60):
        stream, count = draw.randrange(4), draw.randint(1, 6)
        first = steps[stream]
        last, kind = first + count - 1, draw.choice(["terminated", "truncated", "open", "cut"])
        ends = {"terminated": ([last], ()), "truncated": ((), [last])}.get(kind, ((), ()))
        writers[stream].extend(rows_of(stream, first, count, ends[0], truncated=ends[1]))
        if kind != "open":
            reasons[stream, last] = EndReason[kind.upper()]
        if kind == "cut":
            writers[stream].cut()
        steps[stream] += count
        if draw.random() < 0.3:
            folder.refresh()
    for writer in writers:
        writer.close()
    folder.refresh()
    rows = rb[:]
    assert Counter(steps_in(rows)) == Counter((s, t) for s in range(4) for t in range(steps[s]))
    whole = 0
    for episode in rb.episodes:
        found = steps_in(episode.rows())
        stream, first = found[0]
        last = found[-1][1]
        assert found == [(stream, step) for step in range(first, last + 1)]
        assert not any((stream, step) in reasons for step in range(first, last))
        if (stream, last) in reasons:
            assert episode.reason is reasons[stream, last] or episode.reason is EndReason.OPEN
        if lane_key is not None:
            # Chunks of one stream always continue each other.
            assert (stream, last) in reasons or last == steps[stream] - 1
            assert first == 0 or (stream, first - 1) in reasons
        whole += first == 0 or (stream, first - 1) in reasons
    assert whole == sum(1 + sum(s == stream for s, _ in reasons) for stream in range(4)) - sum(
        (stream, steps[stream] - 1) in reasons for stream in range(4)
    )


def test_heads_show_whether_chunks_begin_with_a_reset(tmp_path: Path) -> None:
    rb = buffer_of(transform=StackFrames(["observation"], 3))
    folder = TrajectoryFolder(tmp_path, rb)
    one, two = TrajectoryWriter(tmp_path, max_len=4), TrajectoryWriter(tmp_path, max_len=4)
    for start in (0, 4, 8):
        one.extend(rows_of(1, start, 4))
        two.extend(rows_of(2, start, 4))
        folder.refresh()
    heads, begins = rb.episodes.heads.tolist(), [int(e.rows()["step"][0]) for e in rb.episodes]
    assert [Head(head) for head in heads] == [Head.CUT if begin else Head.RESET for begin in begins]
    # A frame of a chunk that begins in the middle has no history, and is not drawn.
    drawn = {
        (int(o[0, -1]), int(o[0, -2])) for o in (rb.sample(1)["observation"] for _ in range(300))
    }
    steps = {(s, t) for s, t in drawn}
    assert steps == {
        (s, t)
        for e in rb.episodes
        for s, t in steps_in(e.rows())[0 if e.head is Head.RESET else 2 :]
    }


@pytest.mark.acceptance("S22", "C23", "F26", "F27", "F28", "F29", "F35")
def test_the_owner_keeps_the_youngest_files_and_all_protected_ones(tmp_path: Path) -> None:
    write(tmp_path, *[3] * 6)
    write(tmp_path, 5, stream=9, partition="protected")
    demo = tmp_path / "protected" / "my demonstration.safetensors"
    (tmp_path / "protected" / files_in(tmp_path, "protected")[0]).rename(demo)
    names = files_in(tmp_path)
    for junk in ("junk.txt", "junk.npz", "junk.safetensors"):
        (tmp_path / "fifo" / junk).write_bytes(b"PK junk")
        os.utime(tmp_path / "fifo" / junk, (0, 0))
    (tmp_path / "fifo" / "folder.npz").mkdir()
    other = TrajectoryFolder(tmp_path, buffer_of(), max_files=3, min_files=6)
    with pytest.warns(
        UserWarning, match=r"2 damaged chunks were skipped, the first is .*junk\.npz"
    ):
        assert other.refresh() == 18
    assert len(files_in(tmp_path)) == 10, "it is not the owner"
    assert other.ready
    assert not TrajectoryFolder(tmp_path, buffer_of(), min_files=1).ready
    refuses(RuntimeError, "only the owner", other.delete)
    owner = TrajectoryFolder(tmp_path, buffer_of(), max_files=3, owner=True)
    with pytest.warns(UserWarning, match="2 damaged"):
        assert owner.refresh() == 18
    assert files_in(tmp_path) == [*names[3:], "folder.npz", "junk.txt"]
    assert owner.stats() == {
        "files": 6,
        "rows": 18,
        "damaged": 2,
        "vanished": 0,
        "foreign": 2,
        "evicted": 5,
    }
    protected = TrajectoryFolder(tmp_path, buffer_of(), partition="protected", owner=True)
    assert [protected.refresh(), protected.refresh()] == [5, 0]
    assert demo.exists()
    assert owner.delete() == 3
    assert [owner.refresh(), other.refresh()] == [0, 0]
    write(tmp_path, 2)
    assert [owner.refresh(), other.refresh()] == [2, 2]
    shutil.rmtree(tmp_path / "fifo")
    assert other.refresh() == 0


@pytest.mark.parametrize(
    ("limit", "left"), [({"max_rows": 9}, 2), ({"max_rows": 8}, 1), ({"max_bytes": 2}, 0)]
)
def test_limits_in_rows_and_bytes(tmp_path: Path, limit: dict[str, int], left: int) -> None:
    write(tmp_path, 3, 4, 5)
    size = max(path.stat().st_size for path in (tmp_path / "fifo").iterdir())
    if "max_bytes" in limit:
        limit, left = {"max_bytes": 2 * size}, 2
    rb = buffer_of()
    owner = TrajectoryFolder(tmp_path, rb, owner=True, **limit)
    assert owner.refresh() == 12
    assert len(files_in(tmp_path)) == left
    owner.close()
    # A new owner counts files that it does not read again.
    again = TrajectoryFolder(tmp_path, rb, owner=True, max_files=1)
    again.load_state_dict(owner.state_dict())
    assert again.refresh() == 0
    assert len(files_in(tmp_path)) == 1


def test_a_folder_has_one_owner_at_a_time(tmp_path: Path) -> None:
    rb = buffer_of()
    owner = TrajectoryFolder(tmp_path, rb, owner=True)
    with pytest.raises(RuntimeError, match="has an owner; close that one first"):
        TrajectoryFolder(tmp_path, rb, owner=True)
    TrajectoryFolder(tmp_path, rb, owner=True, partition="protected")
    child = os.fork()
    if not child:
        os._exit(owner.owner)  # a child is no owner
    assert os.waitpid(child, 0)[1] == 0
    owner.close()
    assert TrajectoryFolder(tmp_path, rb, owner=True).owner
    assert not owner.owner


def test_unfinished_files_of_dead_writers_are_removed(tmp_path: Path) -> None:
    write(tmp_path, 3)
    name = f".{files_in(tmp_path)[0]}.writing-{'0' * 32}"
    for age, path in ((0, tmp_path / "fifo" / name), (3_600, tmp_path / "fifo" / f"{name}1")):
        path.write_bytes(b"part")
        os.utime(path, (time.time() - age,) * 2)
    TrajectoryFolder(tmp_path, buffer_of(), owner=True).refresh()
    assert {path.name for path in (tmp_path / "fifo").iterdir()} == {
        *files_in(tmp_path),
        name,
        ".owner",
    }


@pytest.mark.parametrize("format", ["safetensors", "npz", "npz-compressed"])
def test_a_damaged_chunk_is_never_read(tmp_path: Path, format: Any) -> None:
    write(tmp_path, 6, format=format)
    (path,) = (tmp_path / "fifo").iterdir()
    whole = path.read_bytes()
    draw = random.Random(0)
    damaged = [whole[: draw.randrange(len(whole))] for _ in range(40)] + [b""]
    for _ in range(200):
        at = draw.randrange(len(whole))
        damaged.append(whole[:at] + bytes([whole[at] ^ 1 << draw.randrange(8)]) + whole[at + 1 :])
    if format != "safetensors":
        directory, end = whole.find(b"PK\1\2"), whole.rfind(b"PK\5\6")
        places = [(directory + 10, method) for method in (12, 14, 99)]  # of compression
        places += [(at, 255) for at in range(end + 12, end + 20)]  # size and position
        damaged += [whole[:at] + bytes([value]) + whole[at + 1 :] for at, value in places]
    refused = 0
    for data in damaged:
        path.write_bytes(data)
        rb = buffer_of()
        folder = TrajectoryFolder(tmp_path, rb, owner=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            stored = folder.refresh()
        folder.close()
        assert stored in (0, 6)
        if stored:  # a bit of the table or padding, which no reader uses
            assert steps_in(rb[:]) == [(0, step) for step in range(6)]
        refused += not stored
    assert refused > 150


def test_a_hundred_damaged_chunks_in_a_row_are_an_error(tmp_path: Path) -> None:
    write(tmp_path, 3)
    name = files_in(tmp_path)[0]
    for number in range(1, 101):
        (tmp_path / "fifo" / name.replace("00000000", f"{number:08d}")).write_bytes(b"junk")
    folder = TrajectoryFolder(tmp_path, buffer_of())
    with pytest.raises(
        CheckpointError, match=r"100 chunks in a row are damaged, the last is .*100\.s"
    ):
        folder.refresh()
    assert folder.stats()["rows"] == 3
    assert folder.refresh() == 0


def test_files_that_vanish_or_are_listed_late_do_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, *[2] * 6)
    names = files_in(tmp_path)
    full, read, calls = os.scandir, trajectory_folder.read_chunk, list[Any]()

    @contextmanager
    def listed(folder: Path) -> Iterator[Any]:
        missed = [{1, 4, 5}, {4}, set()][min(2, len(calls))]
        with full(folder) as entries:
            calls.append([e for e in entries if e.name not in {names[n] for n in missed}])
        if len(calls) == 2:
            (tmp_path / "fifo" / names[2]).unlink()  # after the listing
        yield calls[-1]

    def stale(path: str, *memory: Any) -> Any:
        if path.endswith(names[3]) and len(calls) == 2:
            raise OSError(errno.ESTALE, "removed by another machine")
        return read(path, *memory)

    monkeypatch.setattr(os, "scandir", listed)
    monkeypatch.setattr(trajectory_folder, "read_chunk", stale)
    rb = buffer_of()
    folder = TrajectoryFolder(tmp_path, rb)
    assert [folder.refresh(), folder.refresh()] == [4, 6]
    assert folder.stats()["vanished"] == 2
    assert steps_in(rb[:]) == [(0, step) for step in (*range(4), *range(6, 12))]


def test_a_chunk_that_does_not_fit_is_named_and_the_ones_before_are_stored(tmp_path: Path) -> None:
    rb = buffer_of()
    folder = TrajectoryFolder(tmp_path, rb)
    with TrajectoryWriter(tmp_path) as writer:
        writer._name = "0" * 16
        writer.extend(rows_of(0, 0, 3, [2]))
    with TrajectoryWriter(tmp_path) as writer:
        writer._name = "f" * 16
        writer.extend(rows_of(1, 0, 3, [2]).exclude("half"))
    for _ in range(2):
        refuses(SchemaError, r"f{16}-0-00000000\.safetensors: key 'half'", folder.refresh)
        assert steps_in(rb[:]) == [(0, step) for step in range(3)]
    owner = TrajectoryFolder(tmp_path, rb, owner=True, max_files=1)
    owner.load_state_dict(folder.state_dict())
    write(tmp_path, 1)
    with pytest.raises(SchemaError):
        owner.refresh()
    assert len(files_in(tmp_path)) == 1, "errors must not stop evictions"
    assert folder.refresh() == 1


def test_buffers_that_cannot_take_chunks_say_so(tmp_path: Path) -> None:
    write(tmp_path, 9)
    rb = buffer_of(rate_limiter=RateLimiter(1.0, 4, 2.0))
    with pytest.raises(ValueError, match=r"0\.safetensors: expected writes of at most"):
        TrajectoryFolder(tmp_path, rb).refresh()


@pytest.mark.parametrize("case", ["other rows", "other folder", "loaded progress", "mixed chunks"])
def test_streams_are_cut_where_chunks_are_missing(tmp_path: Path, case: str) -> None:
    rb = buffer_of(lane_key="lane")
    folder, writer = TrajectoryFolder(tmp_path, rb), TrajectoryWriter(tmp_path, max_len=4)
    for start in (0, 2, 4, 6):
        rows = torch.stack([rows_of(stream, start, 2) for stream in range(2)], 1).reshape(-1)
        if case == "mixed chunks":
            rows["lane"] = rows["stream"]
        else:
            rows = rows_of(0, 2 * start, 4)
        writer.extend(rows)
        if start == 4:
            (tmp_path / "fifo" / files_in(tmp_path)[2]).unlink()
            if case == "loaded progress":
                state = folder.state_dict()
                folder = TrajectoryFolder(tmp_path, rb)
                folder.load_state_dict(state)
        folder.refresh()
        if case == "other rows":
            other = rows_of(9, start, 2, [start + 1])
            rb.extend(other.set("lane", torch.full((2,), 9)))
        if case == "other folder":
            write(tmp_path, 2, stream=9, start=start, partition="protected")
            TrajectoryFolder(tmp_path, rb, partition="protected").refresh()
    found = [steps_in(episode.rows()) for episode in rb.episodes]
    own = sorted((rows[0][0], len(rows)) for rows in found if rows[0][0] != 9)
    assert own == ([(0, 2), (0, 4), (1, 2), (1, 4)] if case == "mixed chunks" else [(0, 4), (0, 8)])
    for rows in found:
        assert rows == [(rows[0][0], rows[0][1] + n) for n in range(len(rows))]


def test_a_save_during_a_load_does_not_mix_two_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, saved, rb = tmp_path / "root", tmp_path / "saved", buffer_of()
    start, folder, loads = write(root, 3), TrajectoryFolder(root, rb), ReplayBuffer.loads
    folder.refresh()
    folder.dumps(saved)

    def save_first(*arguments: Any, **more: Any) -> None:
        write(root, 3, start=start)
        folder.refresh()
        folder.dumps(saved, keep=2)
        loads(*arguments, **more)

    monkeypatch.setattr(ReplayBuffer, "loads", save_first)
    again = TrajectoryFolder(root, buffer_of())
    again.loads(saved)
    assert [again.refresh(), again.stats()["rows"]] == [3, 6]
    assert steps_in(again._buffer[:]) == [(0, step) for step in range(6)]


def test_refresh_does_not_wait_for_a_rate_limiter(tmp_path: Path) -> None:
    limiter = RateLimiter(samples_per_insert=1.0, min_size_to_sample=4, error_buffer=4.0)
    rb = buffer_of(rate_limiter=limiter)
    folder = TrajectoryFolder(tmp_path, rb)
    write(tmp_path, *[2] * 10)
    stored = [folder.refresh(), folder.refresh()]
    assert 4 <= stored[0] < 20
    assert stored[1] == 0
    with pytest.raises(RateLimiterTimeout):
        rb.extend(rows_of(5, 0, 2), timeout=0)
    while len(rb) < 20:
        rb.sample()
        folder.refresh()
    assert steps_in(rb[:]) == [(0, step) for step in range(20)]


@pytest.mark.acceptance("S32")
def test_a_restarted_learner_reads_only_new_chunks(tmp_path: Path) -> None:
    root, saved = tmp_path / "root", tmp_path / "saved"
    writer = TrajectoryWriter(root, max_len=5)
    rb = buffer_of(generator=torch.Generator().manual_seed(0), sampler=SliceSampler(slice_len=2))
    folder = TrajectoryFolder(root, rb, min_files=2)
    folder.dumps(saved)
    for start in range(0, 600, 3):
        writer.extend(rows_of(0, start, 3, [start + 2] if start % 2 else []))
    folder.refresh()
    nothing = buffer_of(sampler=SliceSampler(slice_len=2))
    TrajectoryFolder(root, nothing).loads(saved)  # of a folder that had read nothing
    assert len(nothing) == 0
    folder.dumps(saved)
    assert (saved / "manifest.json").stat().st_size > 0
    writer.extend(rows_of(0, 600, 4, [603]))
    batch = rb.sample()
    used = buffer_of(generator=torch.Generator(), sampler=SliceSampler(slice_len=2))
    again = TrajectoryFolder(root, used)
    again.refresh()
    smaller, another = buffer_of(100), buffer_of()
    for other in (used, smaller, another):
        again = TrajectoryFolder(root, other)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of rows that do not fit, and of the other sampler
            again.loads(saved)
        assert again.ready
        if other is used:
            assert other.sample()["step"].equal(batch["step"])
        assert [again.refresh(), again.refresh()] == [4, 0]
        newest = sorted(steps_in(other[:]))
        assert newest == [(0, step) for step in range(604 - len(newest), 604)]
        assert 599 in {int(e.rows()["step"][-1]) for e in other.episodes}, "a restart is a cut"
    rb.loads(saved)
    assert len(rb) == 600
    rb.dumps(saved)
    refuses(CheckpointError, "has no progress of a folder", folder.loads, saved)
    state = folder.state_dict()
    with pytest.raises(ValueError, match="partition 'protected', got 'fifo'"):
        TrajectoryFolder(root, rb, partition="protected").load_state_dict(state)
    refuses(ValueError, "expected files as an int", folder.load_state_dict, {**state, "files": "3"})
    assert folder.state_dict() == state


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"max_files": 0}, ValueError, "max_files as an int of at least 1 or None, got 0"),
        ({"max_rows": 1.5}, ValueError, "max_rows as an int of at least 1"),
        ({"max_bytes": -1}, ValueError, "max_bytes as an int of at least 1"),
        ({"min_files": -1}, ValueError, "min_files as an int of at least 0"),
        ({"partition": "lifo"}, ValueError, r"partition as one of \('fifo', 'protected'\)"),
        ({"partition": "protected", "max_files": 1}, ValueError, "chunks are not evicted"),
        ({"buffer": None}, TypeError, "expected a ReplayBuffer, got NoneType"),
        (
            {"buffer": ReplayBuffer(storage=LazyTensorStorage(8, ndim=2))},
            ValueError,
            "a buffer without lanes, got ndim=2",
        ),
    ],
)
def test_wrong_arguments_make_no_folder(
    tmp_path: Path, arguments: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        TrajectoryFolder(tmp_path / "root", **{"buffer": buffer_of(), "owner": True, **arguments})
    assert not (tmp_path / "root").exists()


@pytest.mark.acceptance("S24")
def test_mixtures_loaders_and_lists_take_fed_buffers(tmp_path: Path) -> None:
    write(tmp_path, 20, 20, stream=1)
    write(tmp_path, 10, stream=2, partition="protected")
    fresh, demos = buffer_of(sampler=SliceSampler(slice_len=2)), buffer_of()
    demos.set_sampler(SliceSampler(slice_len=2))
    for rb, partition in ((fresh, "fifo"), (demos, "protected")):
        TrajectoryFolder(tmp_path, rb, partition=partition).refresh()  # type: ignore[arg-type]
    mixture = ReplayBufferEnsemble(fresh, demos, p=[0.5, 0.5], batch_size=8)
    streams = torch.cat([mixture.sample()["stream"].flatten() for _ in range(20)])
    assert set(streams.tolist()) == {1, 2}
    ranks = [BufferDataset(fresh, 8, steps=5, rank=rank, world_size=2) for rank in range(2)]
    assert sum(len(batch) for dataset in ranks for batch in dataset) == 5 * 8 * 2
    refuses(RuntimeError, "batch", BufferDataset, ReplayBuffer(storage=LazyTensorStorage(3)))
    rows = ReplayBuffer(storage=ListStorage(100), collate_fn=torch.stack)
    assert TrajectoryFolder(tmp_path, rows).refresh() == 40
    assert steps_in(rows[:]) == [(1, step) for step in range(40)]


def test_a_late_reader_keeps_the_youngest_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trajectory_folder, "ROWS_BYTES", 1)
    for stream, name in enumerate("fc0"):  # older writers have later names
        with TrajectoryWriter(tmp_path) as writer:
            writer._name = name * 16
            writer.extend(rows_of(stream, 0, 4, [1, 3]))
    rb = buffer_of(4)
    assert TrajectoryFolder(tmp_path, rb).refresh() == 12
    assert steps_in(rb[:]) == [(2, step) for step in range(4)]
