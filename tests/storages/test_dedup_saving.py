"""Observations stored once: memory, files, checkpoints, pickles, and what reads beside writers."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    ReplayBuffer,
    SliceSampler,
    TensorStorage,
)
from replaykit.errors import CheckpointError
from replaykit.storages.column_storage import ColumnStorage
from replaykit.storages.indexing import unravel_index


def _dense(size: int, **options: Any) -> LazyTensorStorage:
    return LazyTensorStorage(size, **options)


def _dedup_columns(size: int, **options: Any) -> LazyTensorStorage:
    return LazyTensorStorage(size, dedup_next=True, on_mismatch="dense", **options)


def _mapped(size: int, **options: Any) -> LazyMemmapStorage:
    return LazyMemmapStorage(size, dedup_next=["pixels"], on_mismatch="dense", **options)


MAKERS = [_dense, _dedup_columns, _mapped]


def _buffer(storage: Any) -> ReplayBuffer:
    return ReplayBuffer(storage=storage, batch_size=8)


# -- memory ---------------------------------------------------------------------------------------


def _episodes(count: int, steps: int, shape: tuple[int, ...], dtype: torch.dtype) -> TensorDict:
    x = torch.randint(0, 200, (count, steps + 1, *shape)).to(dtype)
    done = torch.zeros(count, steps, 1, dtype=torch.bool)
    done[:, -1] = True
    rows = TensorDict(
        {
            "observation": x[:, :-1],
            "action": torch.zeros(count, steps, dtype=torch.int64),
            "next": {"observation": x[:, 1:], "reward": done.float(), "done": done},
        },
        [count, steps],
    )
    return rows.reshape(-1)


@pytest.mark.parametrize("kind", [LazyTensorStorage, LazyMemmapStorage])
@pytest.mark.parametrize(
    ("shape", "dtype", "share"),
    [((84, 84), torch.uint8, 0.55), ((64,), torch.float32, 0.6), ((376,), torch.float64, 0.55)],
)
def test_deduplicated_storage_needs_half_the_memory(
    kind: Any, shape: tuple[int, ...], dtype: torch.dtype, share: float
) -> None:
    torch.manual_seed(0)
    rows = _episodes(15, 200, shape, dtype)
    dense, once = (_buffer(kind(2500, dedup_next=dedup)) for dedup in (False, True))
    for start in range(0, len(rows), 100):
        dense.extend(rows[start : start + 100])
        once.extend(rows[start : start + 100])
    assert once.storage.require().nbytes() <= share * dense.storage.require().nbytes()
    assert bool((dense[:] == once[:]).all())


def test_overflow_memory_is_reused() -> None:
    rb = _buffer(_dedup_columns(50))
    rows = _episodes(10, 5, (3,), torch.float32)
    rb.extend(rows)
    nbytes = rb.storage.require().nbytes()
    for _ in range(50):
        rb.extend(rows)
        rb.set_("observation", rb["observation"])
    assert rb.storage.require().nbytes() == nbytes


# -- files ----------------------------------------------------------------------------------------


def test_files_of_a_mapped_storage(tmp_path: Path, files_in: Any, transitions: Any) -> None:
    storage = LazyMemmapStorage(1000, scratch_dir=tmp_path, dedup_next=True)
    rb = _buffer(storage)
    rows = transitions(0).steps(600)
    rb.extend(rows)
    assert files_in(tmp_path) == [
        "%beside/next/observation.memmap",
        "%beside/next/pixels.memmap",
        "pixels.memmap",
        "records.memmap",
    ]
    # A storage in the same folder refuses the space, or takes it and sees nothing of it.
    for name in ("pixels.memmap", "records.memmap"):
        (tmp_path / name).unlink()
    with pytest.raises(RuntimeError, match=r"beside.*exists"):
        _buffer(LazyMemmapStorage(1000, scratch_dir=tmp_path, dedup_next=True)).extend(rows)
    assert not (tmp_path / "records.memmap").exists()
    again = _buffer(LazyMemmapStorage(9, scratch_dir=tmp_path, dedup_next=True, existsok=True))
    again.extend(rows)
    assert len(again) == 9


def test_files_are_removed_with_the_storage(temporary: Path, transitions: Any) -> None:
    rb = _buffer(LazyMemmapStorage(100, dedup_next=True))
    rb.extend(transitions(0).steps(40))
    assert list(temporary.iterdir())
    del rb
    gc.collect()
    assert not list(temporary.iterdir())


# -- saved and loaded -----------------------------------------------------------------------------


@pytest.mark.covering(2)
@pytest.mark.parametrize("source", MAKERS)
@pytest.mark.parametrize("target", MAKERS)
@pytest.mark.parametrize("slots", [20, 13, 31])
@pytest.mark.parametrize("lanes", [(), (2,)], ids=str)
def test_saved_and_loaded(
    source: Callable[..., ColumnStorage],
    target: Callable[..., ColumnStorage],
    slots: int,
    lanes: tuple[int, ...],
    tmp_path: Path,
    transitions: Any,
    same_rows: Any,
) -> None:
    cells, ndim = torch.Size(lanes).numel(), 1 + len(lanes)
    rb = _buffer(source(20 * cells, ndim=ndim))
    stream = transitions(2, lanes)
    for size in (3, 11, 15):
        rows = stream.steps(size)
        rb.extend(rows.transpose(0, 1) if lanes else rows)
    rb.dumps(tmp_path)
    other = _buffer(target(slots * cells, ndim=ndim))
    rows = stream.steps(30)  # what it had before is gone
    other.extend(rows.transpose(0, 1) if lanes else rows)
    if slots < 20:
        with pytest.warns(UserWarning, match="7 rows do not fit"):
            other.loads(tmp_path)
    else:
        other.loads(tmp_path)
    order = rb.storage.ledger.write_order()[-slots:]
    kept = order if slots != 20 else torch.arange(20)
    expected = (rb[:].transpose(0, 1) if lanes else rb[:])[kept]
    found = other[:].transpose(0, 1) if lanes else other[:]
    assert same_rows(expected, found)
    rows = stream.steps(9)
    for buffer in (rb, other):
        buffer.extend(rows.transpose(0, 1) if lanes else rows)
    newest = [b.storage.ledger.write_order()[-slots:][-13:] for b in (rb, other)]
    time = [
        (b[:].transpose(0, 1) if lanes else b[:])[n]
        for b, n in zip((rb, other), newest, strict=True)
    ]
    assert same_rows(*time)


@pytest.mark.parametrize("size", [3, 20, 33])
def test_a_checkpoint_has_each_observation_once(
    size: int, tmp_path: Path, transitions: Any, same_rows: Any
) -> None:
    stream = transitions(0, wide=50_000)
    stream.now = stream._state()
    buffers = {
        name: _buffer(make(20)) for name, make in (("dense", _dense), ("once", _dedup_columns))
    }
    rows = stream.steps(size)
    sizes = {}
    for name, rb in buffers.items():
        rb.extend(rows)
        rb.dumps(tmp_path / name)
        sizes[name] = sum(file.stat().st_size for file in (tmp_path / name).iterdir())
    kept = buffers["once"].storage.overflow_rows
    stored = len(buffers["once"])
    assert sizes["once"] < sizes["dense"] * (stored + kept + 0.5) / (2 * stored)
    listed = ReplayBuffer(storage=ListStorage(20))
    listed.loads(tmp_path / "once")
    assert same_rows(
        torch.stack(list(listed.storage)), rows[-20:] if size < 20 else buffers["dense"][:]
    )


def test_a_storage_alone_is_saved_and_loaded(
    tmp_path: Path, transitions: Any, same_rows: Any
) -> None:
    storage = _dedup_columns(10)
    _buffer(storage).extend(transitions(0).steps(14))
    storage.dumps(tmp_path)
    for make in MAKERS:
        other = make(10)
        other.loads(tmp_path)
        assert same_rows(storage[:], other[:])
        other = make(10)
        other.load_state_dict(storage.state_dict())
        assert same_rows(storage[:], other[:])


def test_hooks_see_dense_rows(tmp_path: Path, transitions: Any, same_rows: Any) -> None:
    rb = _buffer(_dedup_columns(10))
    rb.extend(transitions(0).steps(7))
    seen = []
    rb.register_save_hook(lambda rows: seen.append(rows.clone()) or rows)
    rb.dumps(tmp_path)
    assert same_rows(seen[0], rb[:])
    other = _buffer(_dedup_columns(10))
    other.register_load_hook(lambda rows: seen.append(rows.clone()) or rows)
    other.loads(tmp_path)
    assert same_rows(seen[1], rb[:])
    assert same_rows(other[:], rb[:])


@pytest.mark.parametrize("make", MAKERS)
def test_copies_are_independent(make: Any, transitions: Any, same_rows: Any) -> None:
    stream = transitions(0)
    rb = _buffer(make(10))
    rb.extend(stream.steps(14))
    before = rb[:].clone()
    copies = [pickle.loads(pickle.dumps(rb)), copy.deepcopy(rb)]
    for other in copies:
        assert same_rows(other[:], before)
    rb.extend(stream.steps(5))
    for other in copies:
        assert same_rows(other[:], before)
        assert other.storage.overflow_rows == copies[0].storage.overflow_rows


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("lanes", [(), (2,)], ids=str)
def test_undo_restores_rows_from_before_load(
    make: Any, lanes: tuple[int, ...], transitions: Any, same_rows: Any
) -> None:
    """An ensemble puts its members back so, where a later one cannot be loaded."""
    cells, stream = torch.Size(lanes).numel(), transitions(0, lanes)
    rb = _buffer(make(10 * cells, ndim=1 + len(lanes)))
    for count in (7, 6, 5):
        rows = stream.steps(count)
        rb.extend(rows.transpose(0, 1) if lanes else rows)
    before = rb[:].clone()
    back = rb.storage.undo_content()
    other = stream.steps(10)
    rb.storage.edit_columns(
        {("observation",): other["observation"], ("pixels",): other["pixels"]}, time_dim=0
    )
    assert not same_rows(rb[:], before)
    back()
    assert same_rows(rb[:], before)


def test_a_damaged_record_is_refused(tmp_path: Path, transitions: Any) -> None:
    from replaykit.storages.content import Content

    storage = _dedup_columns(10)
    _buffer(storage).extend(transitions(0).steps(7))
    state = storage.content().to_state()
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


# -- together with the rest -----------------------------------------------------------------------


def test_changes_to_read_rows_do_not_reach_deduplicated_columns(
    transitions: Any, same_rows: Any
) -> None:
    rb = _buffer(_dedup_columns(10))
    rb.extend(transitions(0).steps(7))
    before = rb[:].clone()
    for rows in (rb[:], rb[2], rb[1:4], rb.storage[2:5]):
        for key in ("observation", "pixels"):
            rows[key].zero_()
            rows["next", key].zero_()
        assert same_rows(rb[:], before)
    rb[1:3]["next", "reward"].fill_(5)
    assert rb["next", "reward"][1:3].tolist() == [[5], [5]]
    lanes = LazyTensorStorage(10, ndim=2, dedup_next=True)
    _buffer(lanes).extend(transitions(0, (2,)).steps(3).transpose(0, 1))
    with pytest.raises(RuntimeError, match="stored once"):
        lanes.flatten()
    assert not isinstance(lanes, ListStorage)
    assert isinstance(lanes, TensorStorage)


def test_some_keys_can_be_read_separately(transitions: Any, same_bits: Any) -> None:
    for lanes in ((), (3,)):
        cells = torch.Size(lanes).numel()
        storages = [make(20 * cells, ndim=1 + len(lanes)) for make in MAKERS]
        rows = transitions(4, lanes).steps(33)
        for storage in storages:
            _buffer(storage).extend(rows.transpose(0, 1) if lanes else rows)
        elements = torch.randint(0, 20 * cells, (50,))
        index = unravel_index(elements, torch.Size(lanes)) if lanes else elements
        whole = storages[0].require().gather(index)
        for paths in (
            [("next", "pixels")],
            [("next", "observation"), ("action",), ("observation",)],
            [("pixels",)],
            [("next", "done"), ("next", "pixels"), ("next", "observation")],
        ):
            for storage in storages:
                found = storage.require().gather_keys(paths, elements)
                assert list(found) == paths
                assert all(same_bits(found[path], whole[path]) for path in paths)


def test_batches_equal_those_of_dense_rows(transitions: Any, same_rows: Any) -> None:
    buffers = [
        ReplayBuffer(
            storage=make(60),
            sampler=PrioritizedSampler(60, 0.7, 0.5),
            batch_size=16,
            generator=torch.Generator().manual_seed(3),
        )
        for make in MAKERS
    ]
    stream = transitions(1)
    for _ in range(6):
        rows, priority = stream.steps(25), torch.rand(25)
        batches = []
        for rb in buffers:
            index = rb.extend(rows)
            rb.update_priority(index, priority)
            batches.append(rb.sample())
        assert same_rows(batches[0], batches[1])
        assert same_rows(batches[0], batches[2])


def test_slices_of_episodes(transitions: Any, same_rows: Any) -> None:
    buffers = [
        ReplayBuffer(
            storage=make(60),
            sampler=SliceSampler(slice_len=3, strict_length=False),
            batch_size=12,
            generator=torch.Generator().manual_seed(3),
        )
        for make in MAKERS
    ]
    stream = transitions(1)
    for _ in range(6):
        rows = stream.steps(25)
        for rb in buffers:
            rb.extend(rows)
        batches = [rb.sample() for rb in buffers]
        assert same_rows(batches[0], batches[1])
        assert same_rows(batches[0], batches[2])


@pytest.mark.parametrize("make", MAKERS)
def test_batches_drawn_ahead(make: Any, transitions: Any, same_rows: Any) -> None:
    rb = ReplayBuffer(storage=make(60), batch_size=16, prefetch=3)
    stream, written = transitions(1), []
    for _ in range(12):
        rows = stream.steps(25)
        written.append(rows)
        rb.extend(rows)
        batch = rb.sample().exclude("index")
        assert same_rows(batch, torch.cat(written)[batch["action"]])


def test_concurrent_readers_see_whole_rows() -> None:
    # Of row t every value is t, and what follows it is t + 1.
    rb = _buffer(_dedup_columns(64))
    wrong: list[Any] = []
    stop = threading.Event()

    def rows(start: int, count: int) -> TensorDict:
        x = torch.arange(start, start + count)[:, None].expand(count, 40)
        return TensorDict({"x": x, "next": {"x": x + 1}}, [count])

    rb.extend(rows(0, 10))

    def read() -> None:
        while not stop.is_set():
            batch = rb.sample()
            if not bool((batch["x"] + 1 == batch["next", "x"]).all()):
                wrong.append(batch)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    at = 10
    for turn in range(400):
        count = turn % 9 + 1
        rb.extend(rows(at, count))
        at += count
    stop.set()
    for reader in readers:
        reader.join()
    assert not wrong


@pytest.mark.parametrize("core", [True, False])
def test_an_interrupt_between_two_columns_leaves_whole_rows(
    core: bool, transitions: Any, same_rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = transitions(0)
    dense, once = _buffer(_dense(10)), _buffer(_dedup_columns(10))
    rows = stream.steps(14)
    for rb in (dense, once):
        rb.extend(rows)
    once_columns = once.storage.require()
    columns: Any = once_columns.table
    name = "write" if core else "_write_entries"
    if not core:
        once_columns.table.native = None
    calls: list[Any] = []

    def interrupted(original: Callable[..., Any]) -> Callable[..., Any]:
        def write(*args: Any) -> Any:
            result = original(*args)
            calls.append(args)
            if len(calls) == 1:
                raise KeyboardInterrupt
            return result

        return write

    monkeypatch.setattr(columns, name, interrupted(getattr(columns, name)))
    row = stream.steps(4)
    with pytest.raises(KeyboardInterrupt):
        once.extend(row)
    # The rows are there, and nobody was told: written again, they are as they should be.
    once.extend(row)
    dense.extend(row)
    assert same_rows(dense[:], once[:])
    # The entries in use are those that rows refer to.
    alone = once.storage.overflow_rows
    once_columns.table.core.derive(10)
    assert once.storage.overflow_rows == alone


@pytest.mark.parametrize(
    "dtype", [torch.uint16, torch.float8_e4m3fn, torch.bfloat16, torch.complex64, torch.complex128]
)
@pytest.mark.parametrize("shape", [(), (3,), (0,), (40, 30)])
def test_any_dtype_and_shape(
    dtype: torch.dtype, shape: tuple[int, ...], filled: Any, same_rows: Any
) -> None:
    x = filled((13, *shape), dtype, 0)
    rows = TensorDict({"x": x[:-1], "next": {"x": x[1:], "reward": torch.rand(12, 1)}}, [12])
    buffers = [_buffer(make(8)) for make in (_dense, _dedup_columns)]
    y = filled((2, *shape), dtype, 1)
    for rb in buffers:
        rb.extend(rows)
        rb.set_at_(("next", "x"), y, [1, 4])
        rb.set_at_("x", y, [1, 4])
    assert same_rows(*(rb[:] for rb in buffers))
    index = torch.tensor([3, 1, 4, 7, 0])
    assert same_rows(*(rb.storage.read(index) for rb in buffers))


def test_default_device_and_inference_mode_do_not_affect_rows(
    transitions: Any, same_rows: Any
) -> None:
    stream = transitions(0)
    dense, once = _buffer(_dense(10)), _buffer(_dedup_columns(10))
    rows = [stream.steps(4), stream.steps(9), stream.steps(3)]
    with torch.inference_mode():
        for rb in (dense, once):
            rb.extend(rows[0])
    with torch.device("meta"):
        for rb in (dense, once):
            rb.extend(rows[1])
    for rb in (dense, once):
        rb.extend(rows[2])
    assert same_rows(dense[:], once[:])


# -- loads that fail ------------------------------------------------------------------------------


def _chain(first: int, count: int, shift: float = 0.0) -> TensorDict:
    x = torch.arange(first, first + count).float()
    following = {"x": x + 1 + shift, "done": torch.zeros(count, 1, dtype=torch.bool)}
    return TensorDict({"x": x, "next": TensorDict(following, [count])}, [count])


def _chains() -> ReplayBuffer:
    return ReplayBuffer(
        storage=LazyTensorStorage(200, dedup_next=True, on_mismatch="dense"), batch_size=8
    )


def test_load_without_memory_changes_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, buffer = _chains(), _chains()
    saved.extend(_chain(1000, 150, shift=0.5))  # a row follows no other one, so all are stored
    saved.dumps(tmp_path / "saved")
    buffer.extend(_chain(0, 150))

    def refuse(*_: Any, **__: Any) -> Any:
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr("replaykit.storages.overflow_table.allocate", refuse)
        with pytest.raises(MemoryError, match="no room"):
            buffer.loads(tmp_path / "saved")
    buffer.extend(_chain(500, 3, shift=0.5))
    expected = torch.cat([_chain(0, 150), _chain(500, 3, shift=0.5)])
    assert torch.equal(buffer[:]["x"], expected["x"])
    assert torch.equal(buffer[:]["next", "x"], expected["next", "x"])


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("kind", ["missing", "twice"])
def test_references_that_lead_nowhere_are_refused(kind: str, mmap: bool, tmp_path: Path) -> None:
    saved, buffer = _chains(), _chains()
    saved.extend(_chain(0, 5))
    references = saved.storage.require().table._references  # a crafted file has such values
    if kind == "missing":
        references[4, 1] = 0  # the entry of a row that is not stored
    else:
        references[:5, 0] = 1
    saved.dumps(tmp_path / "saved")
    if not mmap:
        buffer.extend(_chain(100, 3))
    refused = pytest.raises(CheckpointError, match=r"references|an entry of two rows")
    if mmap:  # the references are read with the first rows
        buffer.loads(tmp_path / "saved", mmap=True)
        with refused:
            buffer[:]
    else:
        with refused:
            buffer.loads(tmp_path / "saved")
    if not mmap:
        buffer.extend(_chain(103, 2))
        assert torch.equal(buffer[:]["next", "x"], _chain(100, 5)["next", "x"])


def test_lanes_with_an_empty_observation_are_copied_and_loaded(tmp_path: Path) -> None:
    def grid() -> ReplayBuffer:
        storage = LazyTensorStorage(10, ndim=2, dedup_next=True, on_mismatch="dense")
        return ReplayBuffer(storage=storage)

    x = torch.rand(2, 5, 3)
    rows = TensorDict({"x": x[:, :-1], "empty": torch.zeros(2, 4, 0)}, [2, 4])
    rows["next"] = TensorDict({"x": x[:, 1:], "empty": torch.zeros(2, 4, 0)}, [2, 4])
    buffer = grid()
    buffer.extend(rows)
    buffer.dumps(tmp_path / "saved")
    loaded = grid()
    loaded.loads(tmp_path / "saved")
    for other in (loaded, copy.deepcopy(buffer)):
        assert torch.equal(other[:]["next", "x"], x[:, 1:])
