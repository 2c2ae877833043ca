"""Interleaved streams stored once: checkpoints, memory, and what is drawn and made of the rows."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    Compose,
    HindsightGoal,
    LaneWriter,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    NStep,
    PreviousStep,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    StackFrames,
)


def _dense(size: int, **options: Any) -> LazyTensorStorage:
    return LazyTensorStorage(size, lane_key="env", **options)


def _dedup_columns(size: int, **options: Any) -> LazyTensorStorage:
    return _dense(size, dedup_next=True, on_mismatch="dense", **options)


def _mapped(size: int, **options: Any) -> LazyMemmapStorage:
    return LazyMemmapStorage(
        size, lane_key="env", dedup_next=["pixels"], on_mismatch="dense", **options
    )


def _one_stream(size: int, **options: Any) -> LazyTensorStorage:
    """Takes all rows for one stream, of which each has its next observation beside."""
    return LazyTensorStorage(size, dedup_next=True, on_mismatch="dense", **options)


MAKERS = [_dense, _dedup_columns, _mapped]
WRITERS = pytest.mark.parametrize("length", [None, 5], ids=["ring", "by stream"])


class Envs:
    """Transitions of some environments, row by row as chance has it."""

    def __init__(self, transitions: Any, seed: int, count: int = 4, **options: Any) -> None:
        self.lanes = [transitions(seed * 100 + place, **options) for place in range(count)]
        self.random = np.random.default_rng(seed)

    def steps(self, count: int) -> TensorDict:
        which = self.random.integers(0, len(self.lanes), count)
        rows: dict[int, Any] = {
            lane: iter(self.lanes[lane].steps(int((which == lane).sum()))) for lane in set(which)
        }
        found = torch.stack([next(rows[lane]) for lane in which])
        return found.set("env", torch.from_numpy(which) * 7)


def _buffer(storage: Any, length: int | None = None, **options: Any) -> ReplayBuffer:
    writer = None if length is None else LaneWriter(length)
    return ReplayBuffer(storage=storage, writer=writer, batch_size=8, **options)


# -- saved and loaded -----------------------------------------------------------------------------


@pytest.mark.covering(2)
@WRITERS
@pytest.mark.parametrize("source", MAKERS)
@pytest.mark.parametrize("target", [*MAKERS, _one_stream])
@pytest.mark.parametrize("slots", [20, 13, 31])
def test_saved_and_loaded(
    source: Callable[..., Any],
    target: Callable[..., Any],
    slots: int,
    length: int | None,
    tmp_path: Path,
    transitions: Any,
    same_rows: Any,
) -> None:
    if target is _one_stream and length is not None:
        pytest.skip("a writer of streams needs a key")
    rb, envs = _buffer(source(20), length), Envs(transitions, 2)
    for size in (3, 11, 25):
        rb.extend(envs.steps(size))
    rb.dumps(tmp_path)
    new = None if length is None else min(length, slots // 4)
    other, reference = (_buffer(make(slots), new) for make in (target, _dense))
    rows = envs.steps(11)  # what they had before is gone
    for buffer in (other, reference):
        buffer.extend(rows)
        if slots < 20:
            with pytest.warns(UserWarning, match="do not fit"):
                buffer.loads(tmp_path)
        else:
            buffer.loads(tmp_path)
    assert same_rows(reference[:], other[:])
    if slots == 20:
        assert same_rows(rb[:], other[:])
    fresh = _buffer(target(slots), new)
    fresh.load_state_dict(other.state_dict())
    for _ in range(3):
        rows = envs.steps(9)
        for buffer in (reference, other, fresh):
            buffer.extend(rows)
            assert same_rows(reference[:], buffer[:])
    if target is _dedup_columns:
        # All of them have found out anew which rows follow which.
        assert other.storage.overflow_rows == fresh.storage.overflow_rows
        other.dumps(tmp_path / "again")
        reference.dumps(tmp_path / "dense")
        kept = []
        for name in ("again", "dense"):
            again = _buffer(target(slots), new)
            again.loads(tmp_path / name)
            kept.append(again.storage.overflow_rows)
        assert kept == [other.storage.overflow_rows] * 2


@WRITERS
@pytest.mark.parametrize("size", [3, 20, 33])
def test_a_checkpoint_has_each_observation_once(
    size: int, length: int | None, tmp_path: Path, transitions: Any, same_rows: Any
) -> None:
    rows = Envs(transitions, 0, wide=50_000).steps(size)
    buffers = {
        n: _buffer(make(20), length) for n, make in (("dense", _dense), ("once", _dedup_columns))
    }
    for name, rb in buffers.items():
        rb.extend(rows)
        for _ in range(2):  # saved again into the same folder
            rb.dumps(tmp_path / name)
    sizes = {
        name: sum(file.stat().st_size for file in (tmp_path / name).rglob("*") if file.is_file())
        for name in buffers
    }
    kept, stored = buffers["once"].storage.overflow_rows, len(buffers["once"])
    assert kept < stored or size == 3
    assert sizes["once"] < sizes["dense"] * (stored + kept + 0.7) / (2 * stored)
    again = _buffer(_dense(20), length)
    again.loads(tmp_path / "once")
    assert same_rows(again[:], buffers["dense"][:])


def test_saved_again_and_again(tmp_path: Path, transitions: Any, same_rows: Any) -> None:
    envs = Envs(transitions, 3)
    buffers = [_buffer(make(300)) for make in MAKERS]
    for turn in range(6):
        rows = envs.steps(90)
        for place, rb in enumerate(buffers):
            rb.extend(rows)
            if turn == 3:
                rb.set_at_("pixels", rows["pixels"][:5], [1, 9, 4, 7, 200])
            rb.dumps(tmp_path / str(place))
            other = _buffer(MAKERS[(place + turn) % 3](300))
            other.loads(tmp_path / str(place))
            assert same_rows(other[:], buffers[0][:])


def test_a_storage_alone_is_saved_and_loaded(
    tmp_path: Path, transitions: Any, same_rows: Any
) -> None:
    storage = _dedup_columns(10)
    rb = _buffer(storage)
    rb.extend(Envs(transitions, 0).steps(14))
    storage.dumps(tmp_path)
    for make in MAKERS:
        other = make(10)
        other.loads(tmp_path)
        assert same_rows(storage[:], other[:])
        other = make(10)
        other.load_state_dict(storage.state_dict())
        assert same_rows(storage[:], other[:])
    listed = ListStorage(10)
    listed.loads(tmp_path)
    assert same_rows(torch.stack(list(listed)), rb[:])


def test_hooks_see_dense_rows(tmp_path: Path, transitions: Any, same_rows: Any) -> None:
    rb = _buffer(_dedup_columns(10))
    rb.extend(Envs(transitions, 0).steps(17))
    seen = []
    rb.register_save_hook(lambda rows: seen.append(rows.clone()) or rows)
    rb.dumps(tmp_path)
    assert same_rows(seen[0], rb[:])
    other = _buffer(_dedup_columns(10))
    other.register_load_hook(lambda rows: seen.append(rows.clone()) or rows)
    other.loads(tmp_path)
    assert same_rows(seen[1], rb[:])
    assert same_rows(other[:], rb[:])
    assert other.storage.overflow_rows == rb.storage.overflow_rows


# -- memory ---------------------------------------------------------------------------------------


@WRITERS
@pytest.mark.parametrize("make", [LazyTensorStorage, LazyMemmapStorage])
def test_deduplicated_streams_need_half_the_memory_even_after_load(
    make: Any, length: int | None, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    count, steps = 5, 400
    x = torch.randint(0, 200, (steps + 1, count, 84, 84), dtype=torch.uint8)
    done = torch.zeros(steps, count, 1, dtype=torch.bool)
    done[99::100] = True
    env = torch.arange(count).expand(steps, count)
    rows = TensorDict(
        {"env": env, "observation": x[:-1], "next": {"observation": x[1:], "done": done}},
        [steps, count],
    ).reshape(-1)
    length = None if length is None else 300
    dense, once = (_buffer(make(1500, lane_key="env", dedup_next=d), length) for d in (False, True))
    for part in rows.split(97):
        for rb in (dense, once):
            rb.extend(part)
    sizes = [rb.storage.require().nbytes() for rb in (dense, once)]
    assert sizes[1] < 0.55 * sizes[0]
    for name, rb in (("dense", dense), ("once", once)):
        rb.dumps(tmp_path / name)
        other = _buffer(make(1500, lane_key="env", dedup_next=True), length)
        other.loads(tmp_path / name)
        assert other.storage.require().nbytes() < 0.55 * sizes[0]
        index = torch.randint(0, 1500, (64,))
        assert bool((other.storage.read(index) == dense.storage.read(index)).all())


# -- together with the rest -----------------------------------------------------------------------

SAMPLERS: dict[str, Callable[[], Any]] = {
    "without": lambda: SamplerWithoutReplacement(),
    "priorities": lambda: PrioritizedSampler(60, 0.7, 0.5),
    "slices": lambda: SliceSampler(slice_len=3, strict_length=False),
    "padded": lambda: SliceSampler(slice_len=4, pad="right"),
    "prioritized slices": lambda: PrioritizedSliceSampler(60, 0.7, 0.5, slice_len=2),
}
TRANSFORMS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "sums and stacks": lambda: Compose(
        NStep(3, 0.5), StackFrames(["observation", "pixels"], 3), PreviousStep(["action"])
    ),
    "stacks": lambda: StackFrames(["pixels"], 2),
}


@WRITERS
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_batches_equal_those_of_dense_rows(
    sampler: str, transform: str, length: int | None, transitions: Any, same_rows: Any
) -> None:
    buffers = [
        ReplayBuffer(
            storage=make(60),
            sampler=SAMPLERS[sampler](),
            writer=None if length is None else LaneWriter(12),
            transform=TRANSFORMS[transform](),
            batch_size=12,
            generator=torch.Generator().manual_seed(3),
        )
        for make in MAKERS
    ]
    envs = Envs(transitions, 1)
    for turn in range(6):
        rows, priority, batches = envs.steps(25), torch.rand(25), []
        for rb in buffers:
            index = rb.extend(rows)
            if "prior" in sampler:
                rb.update_priority(index, priority)
            if turn == 4:
                rb.cut()
            batches.append(rb.sample())
        assert len(batches[0])
        assert same_rows(batches[0], batches[1])
        assert same_rows(batches[0], batches[2])
        assert same_rows(*(rb[3:9] for rb in buffers[:2]))


@WRITERS
@pytest.mark.parametrize("strategy", ["future", "final", "episode", "random"])
def test_deduplicated_goals_give_equal_batches(length: int | None, strategy: str) -> None:
    batches = []
    count = 120
    env = torch.arange(count) % 3
    number = torch.arange(count) // 3
    reached = torch.stack([number * 1.0, env * 1.0], 1)
    rows = TensorDict(
        {
            "env": env,
            "achieved_goal": reached,
            "desired_goal": torch.full((count, 2), -1.0),
            "next": {
                "achieved_goal": reached + torch.tensor([1.0, 0.0]),
                "desired_goal": torch.full((count, 2), -1.0),
                "reward": torch.zeros(count, 1),
                "done": (number % 7 == 6)[:, None],
            },
        },
        [count],
    )
    for kept_once in (False, ["achieved_goal", "desired_goal"]):
        rb = ReplayBuffer(
            storage=LazyTensorStorage(45, dedup_next=kept_once, lane_key="env"),
            writer=None if length is None else LaneWriter(15),
            transform=Compose(HindsightGoal(0.7, strategy), NStep(2, 0.5)),
            sampler=SliceSampler(slice_len=2),
            batch_size=60,
            generator=torch.Generator().manual_seed(1),
        )
        for part in rows.split(17):
            rb.extend(part)
        batches.append(rb.sample())
    one, other = batches
    assert (one["desired_goal"] >= 0).any()
    for key in one.keys(True, True):
        assert torch.equal(one[key], other[key]), key


@WRITERS
def test_concurrent_readers_see_whole_rows(length: int | None) -> None:
    # Of row t of a stream every value is t, and what follows it is t + 1.
    rb = _buffer(_dedup_columns(64), None if length is None else 12)
    wrong: list[Any] = []
    stop = threading.Event()
    random, at = np.random.default_rng(0), np.zeros(5, np.int64)

    def rows(count: int) -> TensorDict:
        env = random.integers(0, 5, count)
        t = np.empty(count, np.int64)
        for place, one in enumerate(env):
            t[place] = at[one]
            at[one] += 1
        x = torch.from_numpy(t)[:, None].expand(count, 40)
        return TensorDict({"env": torch.from_numpy(env), "x": x, "next": {"x": x + 1}}, [count])

    rb.extend(rows(10))

    def read() -> None:
        while not stop.is_set():
            batch = rb.sample()
            if not bool((batch["x"] + 1 == batch["next", "x"]).all()):
                wrong.append(batch)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for turn in range(200):
        rb.extend(rows(turn % 9 + 1))
    stop.set()
    for reader in readers:
        reader.join()
    assert not wrong


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@WRITERS
def test_deduplicated_streams_on_cuda_match_dense_storage(
    length: int | None, transitions: Any, same_rows: Any
) -> None:
    envs = Envs(transitions, 3)
    dense, once = _buffer(_dense(40), length), _buffer(_dedup_columns(40, device="cuda"), length)
    for turn in range(20):
        rows = envs.steps(turn * 5 % 31 + 1)
        for rb in (dense, once):
            rb.extend(rows)
            if turn % 4 == 3:
                rb.set_at_("pixels", rows["pixels"][:1].to(rb.storage.device), [turn % 3])
        assert same_rows(dense[:].cpu(), once[:].cpu())
        index = torch.arange(len(dense))
        assert same_rows(*(rb.storage.read(index).cpu() for rb in (dense, once)))
