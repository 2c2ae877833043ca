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

from replaykit import LazyTensorStorage, ReplayBuffer
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


def test_a_write_that_wraps_around_during_a_save_is_in_the_next_save(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    slots = 3000  # five chunks of 512 rows and one of 440, for rows of eight bytes
    rb = ReplayBuffer(storage=LazyTensorStorage(slots))
    rb.extend(torch.arange(slots - 10).double())
    append, written = chunks.ChunkWriter._append, []

    def late(writer: Any, data: Any) -> None:
        if not written:
            written.append(rb.extend(torch.arange(slots - 10, slots + 10).double()))
        append(writer, data)

    monkeypatch.setattr(chunks.ChunkWriter, "_append", late)
    monkeypatch.setattr("replaykit.checkpoint.checkpoint_writer._BLOCK_BYTES", 300)
    for expected in (torch.arange(slots - 10).double(), rb.storage):
        rb.dumps(tmp_path)
        assert written
        loaded = ReplayBuffer(storage=LazyTensorStorage(slots))
        loaded.loads(tmp_path)
        assert torch.equal(loaded[:], expected[:])
