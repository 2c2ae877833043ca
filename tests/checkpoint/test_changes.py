"""Which chunks of a ring have changed, beside a model that counts row by row."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tensordict import TensorDict

from replaykit import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer
from replaykit.checkpoint import chunks
from replaykit.checkpoint.dirty_chunks import Changes, SharedChanges, TrackedTensor

KEYS = ("a", "b")


def tables(rows: int, row_bytes: int) -> list[Changes]:
    like = Changes(rows, row_bytes)
    cells = np.zeros(SharedChanges.length(like, KEYS), np.int64)
    return [like, SharedChanges(cells, like, KEYS)]


@st.composite
def rings(draw: st.DrawFn) -> tuple[int, int, list[tuple[str, int, int, Any]]]:
    """A ring whose last chunk is most often a part of one, and writes that come near its end."""
    row_bytes = draw(st.sampled_from([8, 100, 2048]))
    rows = draw(st.integers(1, 3000))
    near_end = st.integers(max(rows - 40, 0), rows - 1)
    write = st.tuples(
        st.sampled_from(["wrote", "wrote", "wrote_at", "save"]),
        st.one_of(near_end, st.integers(0, rows - 1)),
        st.one_of(st.integers(1, 80), st.integers(1, 2 * rows)),
        st.sampled_from([None, None, ("a",), KEYS]),
    )
    return rows, row_bytes, draw(st.lists(write, min_size=1, max_size=12))


@given(ring=rings())
@example(ring=(3000, 8, [("wrote", 2990, 20, None)]))
def test_the_chunks_of_all_rows_written_have_changed_and_no_others(
    ring: tuple[int, int, list[tuple[str, int, int, Any]]],
):
    rows, row_bytes, writes = ring
    for changes in tables(rows, row_bytes):
        model = {key: np.zeros(rows, np.int64) for key in KEYS}
        for how, first, count, keys in writes:
            touched = np.arange(first, first + min(count, rows)) % rows
            if how == "save":
                tensor = torch.zeros(rows)
                tracked = TrackedTensor(tensor, changes, "a")
                with changes.freeze({"a": tracked}, threading.Lock()):
                    pass
                continue
            now = changes.now
            if how == "wrote":
                changes.wrote(first, count, keys)
            else:
                changes.wrote_at(torch.from_numpy(touched), keys)
            for key in keys or KEYS:
                model[key][touched] = now
        for key in KEYS:
            starts = np.arange(0, rows, changes.chunk)
            expected = np.maximum.reduceat(model[key], starts)
            assert changes.versions(key).tolist() == expected.tolist()


def ring_of(kind: str, slots: int, folder: Path) -> ReplayBuffer:
    if kind == "memmap":
        return ReplayBuffer(storage=LazyMemmapStorage(slots, scratch_dir=folder), batch_size=4)
    once = {"dedup_next": ["x"]} if kind == "once" else {}
    storage = LazyTensorStorage(slots, **once)
    return ReplayBuffer(storage=storage, batch_size=4, shared=kind == "shared")


def steps(first: int, count: int) -> TensorDict:
    at = torch.arange(first, first + count)[:, None].double()
    done = torch.zeros(count, 1, dtype=torch.bool)
    after = {"x": at + 1, "reward": at, "done": done}
    return TensorDict({"x": at, "next": after}, [count])


@pytest.mark.parametrize("kind", ["tensor", "memmap", "once", "shared"])
@pytest.mark.parametrize("count", [20, 71, 72, 73, 300])
def test_save_contains_a_wrapped_write_over_a_short_last_chunk(
    kind: str, count: int, tmp_path: Path
):
    """The rows at the beginning lie as near behind those at the end as if the chunk were whole."""
    slots = 3000  # five chunks of 512 rows and one of 440, for rows of eight bytes
    rb = ring_of(kind, slots, tmp_path / "rows")
    rb.extend(steps(0, slots - 10))
    rb.dumps(tmp_path / "saved")
    rb.extend(steps(slots - 10, count))
    rb.dumps(tmp_path / "saved")
    loaded = ReplayBuffer(storage=LazyTensorStorage(slots))
    loaded.loads(tmp_path / "saved")
    last = slots - 10 + count
    slot_of = torch.arange(last - slots, last)
    expected = torch.empty(slots, 1).double()
    expected[slot_of % slots, 0] = slot_of.double()
    assert torch.equal(loaded[:]["x"], expected)
    assert torch.equal(loaded[:]["next", "x"], expected + 1)


def test_save_excludes_rows_that_wrap_around_during_the_save(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    slots = 3000
    rb = ring_of("tensor", slots, tmp_path)
    rb.extend(steps(0, slots - 10))
    append, written = chunks.ChunkWriter._append, []

    def late(writer: Any, data: Any) -> None:
        if not written:
            written.append(rb.extend(steps(slots - 10, 20)))
        append(writer, data)

    monkeypatch.setattr(chunks.ChunkWriter, "_append", late)
    monkeypatch.setattr("replaykit.checkpoint.checkpoint_writer._BLOCK_BYTES", 300)
    rb.dumps(tmp_path / "saved")
    assert written
    loaded = ReplayBuffer(storage=LazyTensorStorage(slots))
    loaded.loads(tmp_path / "saved")
    assert torch.equal(loaded[:]["x"][:, 0], torch.arange(slots - 10).double())
