"""Columns that whole-buffer writes add to stored rows, as PPO writes advantages back."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict, tensorclass

from replaykit import (
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    ReplayBuffer,
    SliceSampler,
    TensorStorage,
)
from replaykit.errors import SchemaError
from tests.support.refusals import refuses

CAPACITY = 12

STORAGES: dict[str, Callable[[Path], Any]] = {
    "list": lambda folder: ListStorage(CAPACITY),
    "lazy_stack": lambda folder: LazyStackStorage(CAPACITY),
    "tensor": lambda folder: LazyTensorStorage(CAPACITY),
    "memmap": lambda folder: LazyMemmapStorage(CAPACITY),
    "folder": lambda folder: LazyMemmapStorage(CAPACITY, scratch_dir=folder / "rows"),
}
COLUMNS = ["tensor", "memmap", "folder"]

WAYS: dict[str, Callable[[ReplayBuffer, TensorDict], None]] = {
    "write_all": lambda rb, rows: rb.write_all(rows),
    "slice": lambda rb, rows: rb.__setitem__(slice(None), rows),
    "bounds": lambda rb, rows: rb.__setitem__(slice(0, len(rb)), rows),
    "key": lambda rb, rows: rb.__setitem__("advantage", rows["advantage"]),
    "range": lambda rb, rows: rb.__setitem__(range(len(rb)), rows),
    "positions": lambda rb, rows: rb.__setitem__(torch.arange(len(rb)), rows),
    "array": lambda rb, rows: rb.__setitem__(np.arange(len(rb)), rows),
    "mask": lambda rb, rows: rb.__setitem__(torch.ones(len(rb), dtype=torch.bool), rows),
    "negative": lambda rb, rows: rb.__setitem__(list(range(-len(rb), 0)), rows),
    "order": lambda rb, rows: rb.__setitem__(_shuffled(rb), rows[_shuffled(rb)]),
    "ellipsis": lambda rb, rows: rb.__setitem__(..., rows),
    "of the storage": lambda rb, rows: rb.storage.__setitem__(range(len(rb)), rows),
    "set": lambda rb, rows: rb.storage.set(range(len(rb)), rows),
    "set a slice": lambda rb, rows: rb.storage.set(slice(None), rows),
    "set in order": lambda rb, rows: rb.storage.set(_shuffled(rb), rows[_shuffled(rb)]),
    "set in place": lambda rb, rows: rb.storage.set(range(len(rb)), rows, set_cursor=False),
}
"""All stored rows, named in every way."""


def _rows(first: int, count: int, *lanes: int) -> TensorDict:
    """Rows whose values follow from their number; small leaves and a wide one."""
    number = torch.arange(first, first + count).expand(*lanes, count)
    column = number[..., None]
    return TensorDict(
        {
            "id": number.clone(),
            "observation": column * torch.ones(3),
            "wide": column * torch.ones(200, dtype=torch.float64),
            "next": {
                "observation": (column + 1) * torch.ones(3),
                "reward": column.float() / 2,
                "done": column % 5 == 4,
            },
        },
        [*lanes, count],
    )


def _shuffled(rb: ReplayBuffer) -> torch.Tensor:
    return torch.arange(len(rb)).roll(3).flip(0)


def _buffer(storage: Any, **options: Any) -> ReplayBuffer:
    generator = torch.Generator().manual_seed(3)
    return ReplayBuffer(storage=storage, batch_size=4, generator=generator, **options)


def _is_consistent(batch: TensorDict) -> bool:
    """Whether a batch has the advantage of its rows, ten times their number and a half."""
    number = batch["id"][..., None]
    same = torch.equal(batch["advantage"], number * 10 + 0.5)
    return same and torch.equal(batch["wide"], number * torch.ones(200, dtype=torch.float64))


def _advantage(rows: TensorDict) -> torch.Tensor:
    return rows["id"][..., None] * 10 + 0.5


@pytest.mark.covering(2)
@pytest.mark.parametrize("count", [5, CAPACITY, 17])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", STORAGES)
def test_a_whole_write_adds_a_column(kind: str, way: str, count: int, tmp_path: Path):
    buffer = _buffer(STORAGES[kind](tmp_path))
    buffer.extend(_rows(0, count))
    before = buffer[:].clone()
    rows = before.clone().contiguous()
    rows["advantage"] = _advantage(rows)
    WAYS[way](buffer, rows)
    assert torch.equal(buffer["advantage"], rows["advantage"])
    assert _is_consistent(buffer[:])
    assert all(_is_consistent(buffer.sample()) for _ in range(5))
    assert _is_consistent(buffer[torch.tensor([2, 0])])
    assert buffer[1]["advantage"].shape == (1,)
    for key in ("observation", ("next", "reward"), ("next", "done")):
        assert torch.equal(buffer[key], before[key])


@pytest.mark.parametrize(
    "index",
    [
        (slice(None), range(4)),
        torch.tensor([1, 0]),
        torch.ones(2, 4, dtype=torch.bool),
    ],
    ids=["time", "lane", "mask"],
)
def test_every_form_of_a_whole_write_of_lanes_adds_columns(index: Any):
    buffer = _buffer(LazyTensorStorage(CAPACITY, ndim=2))
    buffer.extend(_rows(0, 4, 2))
    rows = buffer[:].clone()
    rows["id"][1] += 50
    rows["wide"][1] += 50
    rows["advantage"] = _advantage(rows)
    buffer[index] = rows[index]
    assert _is_consistent(buffer[:])
    assert torch.equal(buffer["id"], rows["id"])


@pytest.mark.parametrize(
    "index", [[0, 1, 2, 3, 3, 5], range(5), torch.arange(6) < 5, torch.zeros(6, dtype=torch.int64)]
)
@pytest.mark.parametrize("kind", COLUMNS)
def test_an_index_of_some_rows_adds_nothing(kind: str, index: Any, tmp_path: Path):
    buffer = _buffer(STORAGES[kind](tmp_path))
    buffer.extend(_rows(0, 6))
    rows = buffer[index].clone()
    rows["advantage"] = torch.zeros(len(rows), 1)
    calls = [lambda: buffer.__setitem__(index, rows)]
    if not (isinstance(index, torch.Tensor) and index.dtype is torch.bool):
        calls.append(lambda: buffer.storage.set(index, rows))
    for call in calls:
        _unchanged(buffer, SchemaError, "'advantage'.*no such key", call)


@pytest.mark.parametrize("kind", COLUMNS)
def test_rows_prepared_before_the_added_column_hold_zeros(kind: str, tmp_path: Path):
    """Another thread may add one between the check of rows and their write."""
    buffer = _buffer(STORAGES[kind](tmp_path))
    buffer.extend(_rows(0, 4))
    prepared = [buffer.writer.prepare(_rows(4, 2)), buffer.writer.prepare([_rows(6, 1)[0]])]
    buffer["advantage"] = torch.ones(4, 1)
    for rows in prepared:
        with buffer.storage.lock:
            buffer.writer.write(rows)
    assert buffer["id"].tolist() == list(range(7))
    assert buffer["advantage"].flatten().tolist() == [1, 1, 1, 1, 0, 0, 0]


ONCE: dict[str, Callable[[], Any]] = {
    "ring": lambda: LazyTensorStorage(CAPACITY, dedup_next=True, on_mismatch="dense"),
    "files": lambda: LazyMemmapStorage(CAPACITY, dedup_next=True, on_mismatch="dense"),
    "streams": lambda: LazyTensorStorage(
        CAPACITY, dedup_next=["observation"], on_mismatch="dense", lane_key="stream"
    ),
}


def _change(buffer: ReplayBuffer, kind: str, number: int, size: int) -> None:
    """Change a buffer in a way that the arguments alone decide."""
    key = [("advantage", str(size)), ("next", f"value{size}"), f"value{size}"][number // 20 % 3]
    if kind == "extend":
        rows = _rows(number, size if number % 60 else CAPACITY + 2)
        rows["stream"] = rows["id"] % 2
        buffer.extend(rows)
    elif not len(buffer):
        return
    elif kind == "edit":
        place = number % len(buffer)
        buffer[place] = buffer[place].clone()
    elif kind == "column":
        buffer[key] = torch.arange(len(buffer) * size).view(-1, size) + float(number)
    elif kind == "all":
        rows = buffer[:].clone()
        rows.set(key, torch.ones(len(buffer), size) * number)
        rows["observation"] = rows["observation"] + 1
        buffer.write_all(rows)
    elif kind == "cut":
        buffer.cut()
    else:
        buffer.empty()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", ONCE)
def test_added_columns_of_deduplicated_rows_equal_dense_rows(kind: str, seed: int, tmp_path: Path):
    chance = random.Random(f"{kind}{seed}")
    key = "stream" if kind == "streams" else None
    once, dense = _buffer(ONCE[kind]()), _buffer(LazyTensorStorage(CAPACITY, lane_key=key))
    for turn in range(60):
        change = chance.choice(["extend", "extend", "edit", "column", "all", "cut", "empty"])
        size = chance.choice([1, 3])
        for buffer in (once, dense):
            _change(buffer, change, 20 * turn, size)
        if not len(dense):
            continue
        assert bool((once[:] == dense[:]).all())
        assert bool((once.sample() == dense.sample()).all())
        if turn % 20 == 19:
            once.dumps(tmp_path / "saved")
            # Rows that are mapped lie in the checkpoint's files.
            for mmap in (False,) if kind == "files" else (False, True):
                loaded = _buffer(ONCE[kind]())
                loaded.loads(tmp_path / "saved", mmap=mmap)
                assert bool((loaded[:] == dense[:]).all())


WRITES: dict[str, Callable[[ReplayBuffer, TensorDict], Any]] = {
    "extend": lambda rb, rows: rb.extend(rows),
    "add": lambda rb, rows: [rb.add(row) for row in rows.unbind(0)],
    "list": lambda rb, rows: rb.extend(list(rows.unbind(0))),
}


def _restored(buffer: ReplayBuffer, how: str, folder: Path) -> ReplayBuffer:
    if how == "copy":
        return copy.deepcopy(buffer)
    loaded = _buffer(LazyTensorStorage(CAPACITY))
    if how == "state_dict":
        loaded.load_state_dict(buffer.state_dict())
    else:
        buffer.dumps(folder)
        loaded.loads(folder, mmap=how == "mmap")
    return loaded


@pytest.mark.parametrize("kind", COLUMNS)
def test_random_edits_and_saves_equal_a_numpy_model(kind: str, tmp_path: Path):
    """Ring, edits, columns, saves in turn; numpy holds what there should be.

    Rows without an added column hold zeros there, and an edit keeps what it is not given.
    """
    chance = random.Random(kind)
    buffer = _buffer(STORAGES[kind](tmp_path))
    model: dict[Any, np.ndarray] = {}
    added = {"a": 1, "b": 130, ("c", "d"): 2}
    cursor = length = number = 0
    for turn in range(200):
        move = chance.choice(["extend", "extend", "column", "edit", "rows", "load", "empty"])
        if move == "extend":
            rows = _rows(number, count := chance.choice([1, 4, 9]))
            number += count
            for key in added.keys() & model.keys():
                if chance.random() < 0.5:
                    rows[key] = torch.full((count, added[key]), float(turn))
                wrong = rows.clone().set(key, torch.zeros(count, added[key] + 1))
                refuses(SchemaError, "got float32", buffer.extend, wrong)
            WRITES[chance.choice(list(WRITES))](buffer, rows)
            given = {key: rows[key].numpy() for key in rows.keys(True, True)}
            for key, values in given.items():
                model.setdefault(key, np.zeros((CAPACITY, *values.shape[1:]), values.dtype))
            for row in range(count):
                for key, column in model.items():
                    column[cursor] = given[key][row] if key in given else 0
                cursor, length = (cursor + 1) % CAPACITY, min(length + 1, CAPACITY)
        elif length and move == "column":
            key = chance.choice(list(added))
            values = np.random.default_rng(turn).random((length, added[key])).astype(np.float32)
            buffer[key] = torch.from_numpy(values)
            column = model.setdefault(key, np.zeros((CAPACITY, added[key]), np.float32))
            column[:length] = values
        elif length and move == "edit":
            slots = sorted(chance.sample(range(length), min(3, length)))
            key = chance.choice(list(model))
            values = np.roll(model[key][slots], 1, 0)
            buffer.set_at_(key, torch.from_numpy(values), slots)
            model[key][slots] = values
        elif length and move == "rows":
            slots = chance.sample(range(length), min(2, length))
            rows = _rows(1000 + turn, len(slots))
            buffer[slots] = rows
            for key in rows.keys(True, True):
                model[key][slots] = rows[key].numpy()
        elif length and move == "load":
            how = chance.choice(["dumps", "mmap", "state_dict", "copy"])
            buffer = _restored(buffer, how, tmp_path / "saved")
        elif move == "empty" and chance.random() < 0.3:
            buffer.empty()
            cursor = length = 0
        if length:
            found = buffer[:]
            assert set(found.keys(True, True)) == set(model)
            for key, column in model.items():
                assert np.array_equal(found[key].numpy(), column[:length]), (turn, move, key)
            batch = buffer.sample()
            for key, column in model.items():
                assert np.array_equal(batch[key].numpy(), column[batch["index"].numpy()])


# -- saving ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", COLUMNS)
def test_loading_a_checkpoint_without_the_column_zeroes_it(kind: str, tmp_path: Path):
    buffer = _buffer(STORAGES[kind](tmp_path))
    buffer.extend(_rows(0, 7))
    buffer.dumps(tmp_path / "saved")
    state = buffer.state_dict()
    buffer["advantage"] = torch.ones(7, 1)
    for load in (lambda: buffer.loads(tmp_path / "saved"), lambda: buffer.load_state_dict(state)):
        buffer["advantage"] = torch.ones(7, 1)
        load()
        assert buffer["id"].tolist() == list(range(7))
        assert not buffer["advantage"].any()


def test_save_after_adding_a_column_writes_only_that_column(tmp_path: Path):
    count = 50_000
    buffer, loaded = _buffer(LazyTensorStorage(count)), _buffer(LazyTensorStorage(count))
    buffer.extend(TensorDict({"x": torch.rand(count, 8), "y": torch.rand(count, 200)}, [count]))
    buffer.dumps(tmp_path)

    def written() -> int:
        before = {file.name for file in tmp_path.iterdir()} - {"manifest.json"}
        buffer.dumps(tmp_path)
        return sum(file.stat().st_size for file in tmp_path.iterdir() if file.name not in before)

    buffer["advantage"] = torch.rand(count, 1)
    assert 4 * count <= written() < 4 * count + 40_000
    assert written() < 40_000
    buffer.set_at_("advantage", torch.ones(2, 1), [0, 1])
    assert written() < 60_000
    loaded.loads(tmp_path)
    assert bool((loaded[:] == buffer[:]).all())


# -- batches made ahead, other processes -----------------------------------------------------------


@pytest.mark.parametrize("threads", [False, True])
def test_prefetched_batches_have_the_added_column(
    threads: bool, request: pytest.FixtureRequest, tmp_path: Path
):
    if threads:
        request.getfixturevalue("by_threads")
    ahead, plain = (_buffer(LazyTensorStorage(CAPACITY), prefetch=n) for n in (3, 0))
    for buffer in (ahead, plain):
        buffer.extend(_rows(0, CAPACITY))
    for turn in range(4):
        assert torch.equal(ahead.sample()["index"], plain.sample()["index"])
        for buffer in (ahead, plain):
            buffer[f"key{turn}"] = buffer["id"] * (turn + 1)
        for _ in range(2):
            batch = ahead.sample()
            assert torch.equal(batch[f"key{turn}"], batch["id"] * (turn + 1))
            assert torch.equal(batch["index"], plain.sample()["index"])


def test_worker_processes_read_the_added_column(tmp_path: Path):
    buffer = _buffer(LazyMemmapStorage(CAPACITY, scratch_dir=tmp_path / "rows"))
    buffer.extend(_rows(0, CAPACITY))
    buffer["advantage"] = _advantage(buffer[:])
    loader = buffer.dataloader(4, workers=1, steps=3, multiprocessing_context="spawn")
    assert [_is_consistent(batch) for batch in loader] == [True] * 3


def test_added_column_leaves_sampler_state_unchanged(tmp_path: Path):
    """Priorities, windows and episodes are those of before."""
    for sampler in (PrioritizedSampler(alpha=1.0, beta=1.0), SliceSampler(slice_len=2)):
        mine, other = (
            _buffer(LazyTensorStorage(CAPACITY), sampler=copy.deepcopy(sampler)) for _ in range(2)
        )
        for buffer in (mine, other):
            buffer.extend(_rows(0, CAPACITY))
            if sampler.prioritized:
                buffer.update_priority(torch.arange(CAPACITY), torch.arange(CAPACITY) + 1.0)
        mine.sample()
        other.sample()
        mine["advantage"] = _advantage(mine[:])
        for _ in range(5):
            batch = mine.sample()
            assert _is_consistent(batch)
            assert torch.equal(batch["index"], other.sample()["index"])
        assert [len(e) for e in mine.episodes] == [len(e) for e in other.episodes]


# -- refusals --------------------------------------------------------------------------------------


@tensorclass
class Step:
    observation: torch.Tensor
    value: torch.Tensor | None = None


def _unchanged(buffer: ReplayBuffer, error: Any, match: str, call: Callable[[], None]) -> None:
    before = buffer[:].clone()
    keys = set(before.keys(True, True))
    refuses(error, match, call)
    assert set(buffer[:].keys(True, True)) == keys
    assert bool((buffer[:] == before).all())


@pytest.mark.parametrize("kind", COLUMNS)
def test_columns_that_cannot_be_added_are_named(kind: str, tmp_path: Path):
    buffer = _buffer(STORAGES[kind](tmp_path))
    buffer.extend(_rows(0, 6))
    wrong: list[tuple[Any, str, Any, Any]] = [
        (SchemaError, "'advantage'.*no such key", slice(0, 3), _rows(0, 3)),
        (SchemaError, "'advantage'.*no such key", [0, 1], _rows(0, 2)),
        (SchemaError, "'wide'.*got nothing", slice(None), _rows(0, 6).exclude("wide")),
    ]
    for error, match, index, rows in wrong:
        rows["advantage"] = torch.zeros(len(rows), 1)
        _unchanged(buffer, error, match, lambda i=index, r=rows: buffer.__setitem__(i, r))
    single: list[tuple[Any, str, Any, Any]] = [
        (SchemaError, r"'advantage'.*\[6, ...\].*got \[5\]", "advantage", torch.zeros(5)),
        (SchemaError, "where episodes end", ("next", "truncated"), torch.zeros(6, 1).bool()),
        (SchemaError, "where episodes end", "episode", torch.zeros(6, dtype=torch.int64)),
        (SchemaError, "'index'.*samples", "index", torch.zeros(6)),
        (SchemaError, "'wide'.*got a TensorDict", ("wide", "inner"), torch.zeros(6)),
        (KeyError, "no column 'next'", "next", torch.zeros(6)),
        (TypeError, "expected a TensorDict, tensor", "advantage", "seven"),
    ]
    for error, match, key, value in single:
        _unchanged(buffer, error, match, lambda k=key, v=value: buffer.__setitem__(k, v))
    for call in (
        lambda: buffer.set_("advantage", torch.zeros(6, 1)),
        lambda: buffer.update_({"advantage": torch.zeros(6, 1)}),
        lambda: buffer.set_at_("advantage", torch.zeros(2, 1), [0, 1]),
    ):
        _unchanged(buffer, KeyError, "no column 'advantage'", call)


def test_shared_and_recoverable_buffers_refuse_new_columns(tmp_path: Path):
    shared = _buffer(LazyTensorStorage(CAPACITY), shared=True)
    recovered = _buffer(LazyMemmapStorage(CAPACITY, scratch_dir=tmp_path / "r", recover=True))
    for buffer, how in ((shared, "shared=True"), (recovered, "recover=True")):
        buffer.extend(_rows(0, 6))
        rows = buffer[:].clone()
        rows["advantage"] = torch.zeros(6, 1)
        for call in (
            lambda b=buffer, r=rows: b.write_all(r),
            lambda b=buffer: b.__setitem__("advantage", torch.zeros(6, 1)),
        ):
            _unchanged(buffer, RuntimeError, f"'advantage'.*{how}.*first rows", call)
    taken = tmp_path / "taken"
    buffer = _buffer(LazyMemmapStorage(CAPACITY, scratch_dir=taken))
    buffer.extend(_rows(0, 6))
    (taken / "advantage.memmap").write_bytes(b"of others")
    _unchanged(
        buffer,
        RuntimeError,
        "advantage.memmap exists",
        lambda: buffer.__setitem__("advantage", torch.zeros(6, 1)),
    )
    assert (taken / "advantage.memmap").read_bytes() == b"of others"


def test_records_of_fixed_fields_refuse_new_columns(tmp_path: Path):
    steps = _buffer(LazyTensorStorage(4))
    steps.extend(Step(torch.zeros(3, 2), batch_size=[3]))
    with pytest.raises(SchemaError, match=r"'value'.*fields of a Step"):
        steps[:] = Step(torch.ones(3, 2), torch.ones(3), batch_size=[3])
    assert not steps[:].observation.any()
    tensors = _buffer(LazyTensorStorage(4))
    tensors.extend(torch.zeros(3))
    with pytest.raises(SchemaError):
        tensors["advantage"] = torch.zeros(3)
    objects = _buffer(ListStorage(4), collate_fn=list)
    objects.extend([torch.zeros(1), torch.zeros(1)])
    with pytest.raises(RuntimeError, match=r"'advantage'.*got a Tensor"):
        objects["advantage"] = torch.zeros(2)


def test_wrapped_tensors_and_mappings_accept_new_columns():
    data = _rows(0, 6)
    wrapped = _buffer(TensorStorage(data))
    wrapped["advantage"] = _advantage(data)
    assert _is_consistent(wrapped[:])
    assert data.get("advantage", None) is None
    mappings = _buffer(LazyTensorStorage(4))
    mappings.extend({"x": torch.arange(3), "in": {"y": torch.arange(3)}})
    mappings["in", "z"] = torch.arange(3) * 2
    assert mappings[:]["in"]["z"].tolist() == [0, 2, 4]
    mappings.extend({"x": torch.arange(1), "in": {"y": torch.arange(1)}})
    assert mappings[:]["in"]["z"].tolist() == [0, 2, 4, 0]
    lists = _buffer(ListStorage(4), collate_fn=list)
    lists.extend([{"x": torch.tensor(1)}, {"x": torch.tensor(2)}])
    lists["in", "z"] = torch.tensor([5, 6])
    assert [row["in"]["z"].item() for row in lists[:]] == [5, 6]


def test_nested_containers_keep_their_shape():
    """A TensorDict of agents has a batch dimension of its own."""
    agents = TensorDict({"x": torch.zeros(5, 2, 3)}, [5, 2])
    buffer = _buffer(LazyTensorStorage(8))
    buffer.extend(TensorDict({"agents": agents}, [5]))
    buffer["agents", "value"] = torch.arange(10).view(5, 2)
    assert buffer.sample()["agents"].batch_size == (4, 2)
    assert buffer["agents", "value"].tolist() == torch.arange(10).view(5, 2).tolist()
    with pytest.raises(SchemaError, match=r"'agents', 'other'.*begins with \[2\]"):
        buffer["agents", "other"] = torch.zeros(5, 3)
    whole = TensorDict({"mean": torch.ones(5, 2), "std": torch.ones(5)}, [5])
    buffer["critic"] = whole
    assert set(buffer[:]["critic"].keys()) == {"mean", "std"}
