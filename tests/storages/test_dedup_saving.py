"""Check memory, files, checkpoints, copies and batches of rows that are stored once."""

from __future__ import annotations

import copy
import gc
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
    TensorStorage,
)
from replaykit.errors import CheckpointError
from replaykit.storages.content import Content
from replaykit.storages.observation_table import ObservationTable
from tests.storages.dedup import KINDS, STORED, Rows, all_stored, buffer, storage, write_all
from tests.support.refusals import refuses

ALL_KINDS = pytest.mark.parametrize("kind", list(KINDS))
ONE_LANE = pytest.mark.parametrize("kind", ["ring", "streams", "stream rings"])
MAKES = pytest.mark.parametrize("make", [LazyTensorStorage, LazyMemmapStorage])

# -- memory ---------------------------------------------------------------------------------------


def frames(count: int, steps: int, shape: tuple[int, ...], dtype: torch.dtype) -> TensorDict:
    """Return episodes of ``count`` environments, whose rows are written in turn."""
    torch.manual_seed(0)
    x = torch.randint(0, 200, (steps + 1, count, *shape)).to(dtype)
    done = torch.zeros(steps, count, 1, dtype=torch.bool)
    done[99::100] = True
    env = torch.arange(count).expand(steps, count)
    following = {"observation": x[1:], "reward": done.float(), "done": done}
    return TensorDict({"env": env, "observation": x[:-1], "next": following}, [steps, count])


@pytest.mark.covering(2)
@MAKES
@pytest.mark.parametrize("kind", ["ring", "stream rings", "streams"])
@pytest.mark.parametrize(
    ("shape", "dtype", "share"),
    [((84, 84), torch.uint8, 0.55), ((64,), torch.float32, 0.6), ((376,), torch.float64, 0.55)],
)
def test_deduplicated_storage_needs_half_the_memory_even_after_load(
    make: Any,
    kind: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    share: float,
    tmp_path: Path,
) -> None:
    count = 1 if kind == "ring" else 5
    rows = frames(count, 2000 // count, shape, dtype).reshape(-1)
    dense, once, loaded = (
        ReplayBuffer(
            storage=make(1500, **KINDS[kind], dedup_next=dedup),
            writer=LaneWriter(300) if kind == "stream rings" else None,
        )
        for dedup in (False, True, True)
    )
    for part in rows.split(97):
        write_all([dense, once], part)
    for name, rb in (("once", once), ("dense", dense)):
        assert once.storage.require().nbytes() <= share * dense.storage.require().nbytes()
        rb.dumps(tmp_path / name)
        loaded.loads(tmp_path / name)
        assert loaded.storage.require().nbytes() <= share * dense.storage.require().nbytes()
        assert bool((loaded[:] == dense[:]).all())


def test_overflow_memory_is_reused(transitions: Any) -> None:
    rb, rows = buffer("ring", slots=50), transitions(0).steps(50)
    rb.extend(rows)
    nbytes = rb.storage.require().nbytes()
    for _ in range(50):
        rb.extend(rows)
        rb.set_("observation", rb["observation"])
    assert rb.storage.require().nbytes() == nbytes


# -- files ----------------------------------------------------------------------------------------


def test_files_of_a_mapped_storage(
    tmp_path: Path, files_in: Any, transitions: Any, same_rows: Any
) -> None:
    def mapped(slots: int, **options: Any) -> ReplayBuffer:
        options = {"scratch_dir": tmp_path, "dedup_next": True, **options}
        return ReplayBuffer(storage=LazyMemmapStorage(slots, **options))

    rb, rows = mapped(1000), transitions(0).steps(600)
    for part in rows.split(100):
        rb.extend(part)
    assert rb.storage.overflow_rows > 64  # for which the file is made longer
    assert same_rows(rb[:], rows)
    assert files_in(tmp_path) == [
        "%beside/next/observation.memmap",
        "%beside/next/pixels.memmap",
        "pixels.memmap",
        "records.memmap",
    ]
    # Another storage in the same folder refuses the files, or replaces them.
    for name in ("pixels.memmap", "records.memmap"):
        (tmp_path / name).unlink()
    with pytest.raises(RuntimeError, match=r"beside.*exists"):
        mapped(1000).extend(rows)
    assert not (tmp_path / "records.memmap").exists()
    again = mapped(9, existsok=True)
    again.extend(rows)
    assert len(again) == 9


def test_files_are_removed_with_the_storage(temporary: Path, transitions: Any) -> None:
    rb = ReplayBuffer(storage=LazyMemmapStorage(100, dedup_next=True))
    rb.extend(transitions(0).steps(40))
    assert list(temporary.iterdir())
    del rb
    gc.collect()
    assert not list(temporary.iterdir())


# -- saved and loaded -----------------------------------------------------------------------------


@pytest.mark.covering(2)
@ALL_KINDS
@pytest.mark.parametrize("source", list(STORED))
@pytest.mark.parametrize("target", list(STORED))
@pytest.mark.parametrize("slots", [20, 13, 31])
def test_saved_and_loaded(
    source: str,
    target: str,
    slots: int,
    kind: str,
    tmp_path: Path,
    transitions: Any,
    same_rows: Any,
) -> None:
    rb, rows = buffer(kind, source), Rows(transitions, 2, kind)
    for size in (3, 11, 25):
        rb.extend(rows.steps(size))
    rb.dumps(tmp_path)
    other, reference = buffer(kind, target, slots), buffer(kind, "dense", slots)
    write_all([other, reference], rows.steps(30 if kind == "lanes" else 11))
    for one in (other, reference):  # earlier rows are replaced
        if slots < 20:
            with pytest.warns(UserWarning, match="do not fit"):
                one.loads(tmp_path)
        else:
            one.loads(tmp_path)
    assert same_rows(reference[:], other[:])
    if slots == 20:
        assert same_rows(rb[:], other[:])
    elif kind != "stream rings":
        order = rb.storage.ledger.write_order()[-slots:]
        kept = rb[:, order] if kind == "lanes" else rb[order]
        assert same_rows(kept, other[:])
    fresh = buffer(kind, target, slots)
    fresh.load_state_dict(other.state_dict())
    for _ in range(3):
        write_all([reference, other, fresh], rows.steps(9))
        assert same_rows(reference[:], other[:])
        assert same_rows(reference[:], fresh[:])
    if target == "once":
        counts = {other.storage.overflow_rows, fresh.storage.overflow_rows}
        for one in (other, reference):
            one.dumps(tmp_path / "again")
            again = buffer(kind, target, slots)
            again.loads(tmp_path / "again")
            counts.add(again.storage.overflow_rows)
        assert len(counts) == 1


@pytest.mark.parametrize("slots", [20, 31])
def test_streams_are_loaded_as_one_stream(
    slots: int, tmp_path: Path, transitions: Any, same_rows: Any
) -> None:
    """Nearly every row of the one stream then needs an entry for its next observation."""
    rb, rows = buffer("streams"), Rows(transitions, 2, "streams")
    rb.extend(rows.steps(39))
    rb.dumps(tmp_path)
    buffers = [buffer("ring", stored, slots) for stored in STORED]
    for other in buffers:
        other.loads(tmp_path)
    for _ in range(3):
        assert same_rows(buffers[0][:], buffers[1][:])
        assert same_rows(buffers[0][:], buffers[2][:])
        write_all(buffers, rows.steps(9))


@ONE_LANE
@pytest.mark.parametrize("size", [3, 20, 33])
def test_a_checkpoint_has_each_observation_once(
    size: int, kind: str, tmp_path: Path, transitions: Any, same_rows: Any
) -> None:
    rows, sizes = Rows(transitions, 0, kind, wide=50_000).steps(size), {}
    buffers = {stored: buffer(kind, stored) for stored in ("dense", "once")}
    for name, rb in buffers.items():
        rb.extend(rows)
        for _ in range(2):  # the second save replaces the first one
            rb.dumps(tmp_path / name)
        files = [file for file in (tmp_path / name).rglob("*") if file.is_file()]
        sizes[name] = sum(file.stat().st_size for file in files)
    kept, stored = buffers["once"].storage.overflow_rows, len(buffers["once"])
    assert kept < stored or size == 3
    assert sizes["once"] < sizes["dense"] * (stored + kept + 0.7) / (2 * stored)
    again = buffer(kind, "dense")
    again.loads(tmp_path / "once")
    assert same_rows(again[:], buffers["dense"][:])


@pytest.mark.parametrize("kind", ["ring", "streams"])
def test_saved_again_and_again(kind: str, tmp_path: Path, transitions: Any, same_rows: Any) -> None:
    rows, buffers = Rows(transitions, 3, kind), all_stored(kind, slots=300)
    for turn in range(6):
        batch = rows.steps(90)
        for place, rb in enumerate(buffers):
            rb.extend(batch)
            if turn == 3:
                rb.set_at_("pixels", batch["pixels"][:5], [1, 9, 4, 7, 200])
            rb.dumps(tmp_path / str(place))
            other = buffer(kind, list(STORED)[(place + turn) % 3], 300)
            other.loads(tmp_path / str(place))
            assert same_rows(other[:], buffers[0][:])


@pytest.mark.parametrize("kind", ["ring", "streams"])
def test_a_storage_alone_is_saved_and_loaded(
    kind: str, tmp_path: Path, transitions: Any, same_rows: Any
) -> None:
    rb = buffer(kind, slots=10)
    rb.extend(Rows(transitions, 0, kind).steps(14))
    rb.storage.dumps(tmp_path)
    for stored in STORED:
        by_file, by_state = storage(kind, stored, 10), storage(kind, stored, 10)
        by_file.loads(tmp_path)
        by_state.load_state_dict(rb.storage.state_dict())
        assert same_rows(rb.storage[:], by_file[:])
        assert same_rows(rb.storage[:], by_state[:])
    listed = ListStorage(10)
    listed.loads(tmp_path)
    assert same_rows(torch.stack(list(listed)), rb[:])


@pytest.mark.parametrize("kind", ["ring", "streams"])
def test_hooks_see_dense_rows(kind: str, tmp_path: Path, transitions: Any, same_rows: Any) -> None:
    rb, other, seen = buffer(kind, slots=10), buffer(kind, slots=10), []
    rb.extend(Rows(transitions, 0, kind).steps(17))
    rb.register_save_hook(lambda rows: seen.append(rows.clone()) or rows)
    rb.dumps(tmp_path)
    other.register_load_hook(lambda rows: seen.append(rows.clone()) or rows)
    other.loads(tmp_path)
    for rows in (*seen, other[:]):
        assert same_rows(rows, rb[:])
    assert other.storage.overflow_rows == rb.storage.overflow_rows


@pytest.mark.parametrize("stored", list(STORED))
@pytest.mark.parametrize("kind", ["ring", "lanes"])
def test_undo_restores_rows_from_before_load(
    stored: str, kind: str, transitions: Any, same_rows: Any
) -> None:
    """An ensemble so restores its members if one of them cannot be loaded."""
    rb, rows = buffer(kind, stored, 10), Rows(transitions, 0, kind)
    for count in (7, 6, 5):
        rb.extend(rows.steps(count))
    before = rb[:].clone()
    undo = rb.storage.undo_content()
    other = rows.sources[0].steps(10)
    rb.storage.edit_columns(
        {("observation",): other["observation"], ("pixels",): other["pixels"]}, time_dim=0
    )
    assert not same_rows(rb[:], before)
    undo()
    assert same_rows(rb[:], before)


def test_a_damaged_record_is_refused(transitions: Any) -> None:
    rb = buffer("ring", slots=10)
    rb.extend(transitions(0).steps(7))
    state = rb.storage.content().to_state()
    group = state["groups"][0]
    columns, references = group["columns"], group["references"]
    place = next(
        i for i, column in enumerate(columns) if isinstance(column, dict) and "follows" in column
    )
    good = columns[place]
    for change in (
        {"follows": 99},
        {"follows": place},
        {"entries": good["entries"][:-1]},
        {"entries": None},
        {"entries": references},
    ):
        columns[place] = {**good, **change}
        with pytest.raises(ValueError, match="expected"):
            Content.from_state(state)
    columns[place] = good
    for wrong in (
        references + 7,
        references - 9,
        references[1:],
        references[:, :1],
        references.float(),
        references.long(),
        None,
    ):
        group["references"] = wrong
        with pytest.raises(ValueError, match="expected"):
            Content.from_state(state)
    group["references"] = references
    assert Content.from_state(state).rows == 7


# -- reads ----------------------------------------------------------------------------------------


def test_changes_to_read_rows_do_not_reach_deduplicated_columns(
    transitions: Any, same_rows: Any
) -> None:
    rb = buffer("ring", slots=10)
    rb.extend(transitions(0).steps(7))
    before = rb[:].clone()
    for rows in (rb[:], rb[2], rb[1:4], rb.storage[2:5]):
        for key in ("observation", "pixels"):
            rows[key].zero_()
            rows["next", key].zero_()
        assert same_rows(rb[:], before)
    rb[1:3]["next", "reward"].fill_(5)
    assert rb["next", "reward"][1:3].tolist() == [[5], [5]]
    lanes = buffer("lanes", slots=5)
    lanes.extend(Rows(transitions, 0, "lanes").steps(3))
    with pytest.raises(RuntimeError, match="stored once"):
        lanes.storage.flatten()
    assert not isinstance(lanes.storage, ListStorage)
    assert isinstance(lanes.storage, TensorStorage)


SAMPLERS: dict[str, Callable[[], Any]] = {
    "without": SamplerWithoutReplacement,
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


@pytest.mark.covering(2)
@ONE_LANE
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_batches_equal_those_of_dense_rows(
    sampler: str, transform: str, kind: str, transitions: Any, same_rows: Any
) -> None:
    buffers = [
        buffer(
            kind,
            stored,
            60,
            length=12,
            sampler=SAMPLERS[sampler](),
            transform=TRANSFORMS[transform](),
            batch_size=12,
            generator=torch.Generator().manual_seed(3),
        )
        for stored in STORED
    ]
    rows = Rows(transitions, 1, kind)
    for turn in range(6):
        batch, priority, batches = rows.steps(25), torch.rand(25), []
        for rb in buffers:
            index = rb.extend(batch)
            if "prior" in sampler:
                rb.update_priority(index, priority)
            if turn == 4:
                rb.cut()
            batches.append(rb.sample())
        assert len(batches[0])
        assert same_rows(batches[0], batches[1])
        assert same_rows(batches[0], batches[2])
        assert same_rows(*(rb[3:9] for rb in buffers[:2]))


@ONE_LANE
@pytest.mark.parametrize("strategy", ["future", "final", "episode", "random"])
def test_deduplicated_goals_give_equal_batches(kind: str, strategy: str) -> None:
    env, number = torch.arange(120) % 3, torch.arange(120) // 3
    if kind == "ring":
        env, number = torch.zeros(120, dtype=torch.long), torch.arange(120)
    goal, reached = torch.full((120, 2), -1.0), torch.stack([number * 1.0, env * 1.0], 1)
    following = {
        "achieved_goal": reached + torch.tensor([1.0, 0.0]),
        "desired_goal": goal,
        "reward": torch.zeros(120, 1),
        "done": (number % 7 == 6)[:, None],
    }
    here = {"env": env, "achieved_goal": reached, "desired_goal": goal}
    rows, batches = TensorDict({**here, "next": following}, [120]), []
    for kept_once in (False, ["achieved_goal", "desired_goal"]):
        rb = ReplayBuffer(
            storage=LazyTensorStorage(45, dedup_next=kept_once, **KINDS[kind]),
            writer=LaneWriter(15) if kind == "stream rings" else None,
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


@ONE_LANE
def test_concurrent_readers_see_whole_rows(kind: str) -> None:
    """All values of row t of a stream are t, and those that follow are t + 1."""
    rb, wrong, stop = buffer(kind, slots=64, length=12), [], threading.Event()
    random, at = np.random.default_rng(0), np.zeros(5, np.int64)

    def rows(count: int) -> TensorDict:
        env = random.integers(0, 1 if kind == "ring" else 5, count)
        t = np.empty(count, np.int64)
        for place, one in enumerate(env):
            t[place] = at[one]
            at[one] += 1
        x = torch.from_numpy(t)[:, None].expand(count, 40)
        return TensorDict({"env": torch.from_numpy(env), "x": x, "next": {"x": x + 1}}, [count])

    def read() -> None:
        while not stop.is_set():
            batch = rb.sample()
            if not bool((batch["x"] + 1 == batch["next", "x"]).all()):
                wrong.append(batch)

    rb.extend(rows(10))
    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for turn in range(200):
        rb.extend(rows(turn % 9 + 1))
    stop.set()
    for reader in readers:
        reader.join()
    assert not wrong


def test_default_device_and_inference_mode_do_not_affect_rows(
    transitions: Any, same_rows: Any
) -> None:
    buffers, stream = all_stored("ring", slots=10)[:2], transitions(0)
    rows = [stream.steps(4), stream.steps(9), stream.steps(3)]
    with torch.inference_mode():
        write_all(buffers, rows[0])
    with torch.device("meta"):
        write_all(buffers, rows[1])
    write_all(buffers, rows[2])
    assert same_rows(*(rb[:] for rb in buffers))


# -- loads that fail ------------------------------------------------------------------------------


def chain(first: int, count: int, shift: float = 0.0) -> TensorDict:
    """Return rows that continue each other, or with a ``shift`` none that does."""
    x = torch.arange(first, first + count).float()
    following = {"x": x + 1 + shift, "done": torch.zeros(count, 1, dtype=torch.bool)}
    return TensorDict({"x": x, "next": TensorDict(following, [count])}, [count])


def test_load_without_memory_changes_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, rb = (buffer("ring", slots=200) for _ in range(2))
    saved.extend(chain(1000, 150, shift=0.5))  # all next observations are stored
    saved.dumps(tmp_path / "saved")
    rb.extend(chain(0, 150))

    def refuse(*_: Any, **__: Any) -> Any:
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr("replaykit.storages.columns.allocate", refuse)
        with pytest.raises(MemoryError, match="no room"):
            rb.loads(tmp_path / "saved")
    rb.extend(chain(500, 3, shift=0.5))
    expected = torch.cat([chain(0, 150), chain(500, 3, shift=0.5)])
    assert torch.equal(rb[:]["x"], expected["x"])
    assert torch.equal(rb[:]["next", "x"], expected["next", "x"])


@pytest.mark.parametrize("kind", ["missing", "twice"])
def test_references_that_lead_nowhere_are_refused(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, rb = (buffer("ring", slots=200) for _ in range(2))
    saved.extend(chain(0, 5))
    content = ObservationTable.content

    def crafted(table: ObservationTable, stop: int) -> Any:
        known, values = content(table, stop)
        if kind == "missing":
            known.tables[0][4, 1] = 0  # the entry of a row that is not stored
        else:
            known.tables[0][:, 0] = 1
        return known, values

    with monkeypatch.context() as patch:
        patch.setattr(ObservationTable, "content", crafted)
        saved.dumps(tmp_path / "saved")
    rb.extend(chain(100, 3))
    refuses(CheckpointError, r"references|an entry of two rows", rb.loads, tmp_path / "saved")
    rb.extend(chain(103, 2))
    assert torch.equal(rb[:]["next", "x"], chain(100, 5)["next", "x"])


def test_lanes_with_an_empty_observation_are_copied_and_loaded(tmp_path: Path) -> None:
    x, empty = torch.rand(2, 5, 3), torch.zeros(2, 4, 0)
    rows = TensorDict({"x": x[:, :-1], "empty": empty}, [2, 4])
    rows["next"] = TensorDict({"x": x[:, 1:], "empty": empty}, [2, 4])
    rb, loaded = (buffer("lanes", slots=5) for _ in range(2))
    rb.extend(rows)
    rb.dumps(tmp_path / "saved")
    loaded.loads(tmp_path / "saved")
    for other in (loaded, copy.deepcopy(rb)):
        assert torch.equal(other[:]["next", "x"], x[:, 1:])
