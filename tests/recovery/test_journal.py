"""Rows are put back as they were before an operation, whatever it did and however it was noted."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from replaykit.recovery.journal import Journal, MappedFile
from tests.support.refusals import refuses


def new(folder: Path, *, durable: bool = False) -> Journal:
    return Journal(MappedFile(folder / "journal", 64), durable=durable)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.data(), st.integers(1, 9), st.integers(1, 20), st.booleans())
def test_undo_restores_all_saved_rows(
    tmp_path: Path, data: st.DataObject, width: int, rows: int, durable: bool
) -> None:
    (tmp_path / "journal").unlink(missing_ok=True)
    journal = new(tmp_path, durable=durable)
    arrays = {n: np.arange(rows * width, dtype=np.uint8).reshape(rows, width) + n for n in range(2)}
    for sequence in range(1, data.draw(st.integers(2, 4))):
        before = {n: array.copy() for n, array in arrays.items()}
        for _ in range(data.draw(st.integers(0, 4))):
            target = data.draw(st.integers(0, 1))
            if data.draw(st.booleans()):
                first = data.draw(st.integers(0, rows))
                at = range(first, data.draw(st.integers(first, rows)))
                journal.save(sequence, target, arrays[target], at)
                arrays[target][at.start : at.stop] = data.draw(st.integers(0, 255))
            else:
                some = data.draw(st.lists(st.integers(0, rows - 1), max_size=rows, unique=True))
                journal.save(sequence, target, arrays[target], np.array(some, np.int64))
                arrays[target][some] = data.draw(st.integers(0, 255))
        if data.draw(st.booleans()):  # committed: its entries mean nothing to the next operation
            assert not journal.undo(sequence + 1, arrays)
            continue
        again = new(tmp_path, durable=data.draw(st.booleans()))
        again.undo(sequence, arrays)
        again.undo(sequence, arrays)  # an undo that was cut off is done again
        for n, array in arrays.items():
            assert array.tolist() == before[n].tolist()
        again.forget(sequence)
        assert not again.used(sequence)
        journal = again


def test_an_entry_that_a_loss_of_power_cut_off_is_left_out(tmp_path: Path) -> None:
    rows = np.arange(4, dtype=np.uint8).reshape(2, 2)
    journal = new(tmp_path, durable=True)
    journal.save(1, 0, rows, range(1))
    whole = (tmp_path / "journal").stat().st_size
    used = int(journal._head[1])
    journal.save(1, 0, rows, range(1, 2))
    rows[0] = 9  # noted and on the disk; the second row has not been touched
    file = MappedFile(tmp_path / "journal", whole)
    file.bytes[64 + used + 48] ^= 1
    again = Journal(file, durable=True)
    assert again.undo(1, {0: rows})
    assert rows.tolist() == [[0, 1], [2, 3]]


def test_a_journal_of_other_files_is_refused_before_anything_changes(tmp_path: Path) -> None:
    rows = np.zeros((2, 8), np.uint8)
    journal = new(tmp_path)
    journal.save(1, 0, rows, range(2))
    rows[:] = 1
    journal.save(1, 7, rows, np.array([1]))
    other = np.ones((2, 4), np.uint8)
    for targets in ({0: rows}, {0: other, 7: rows}, {0: rows[:1], 7: rows}):
        refuses(ValueError, "journal", journal.undo, 1, targets)
    assert rows.all()


def test_a_full_disk_is_said_before_anything_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = np.zeros((2, 1 << 20), np.uint8)
    journal = new(tmp_path)
    journal.save(1, 0, rows[:, :8], range(1))
    size = (tmp_path / "journal").stat().st_size

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("replaykit.recovery.journal.reserve_blocks", full)
    refuses(OSError, "journal", journal.save, 1, 0, rows, range(2))
    assert (tmp_path / "journal").stat().st_size == size
    monkeypatch.undo()
    assert journal.undo(1, {0: rows[:, :8]})


def test_undo_ignores_stale_entries_of_an_earlier_operation(tmp_path: Path) -> None:
    rows = np.zeros((4, 2000), np.uint8)
    journal = new(tmp_path, durable=True)
    for sequence in (1, 2):
        rows[:] = sequence
        journal.save(sequence, 0, rows, range(2))
        rows[:2] = 10 * sequence
        if sequence == 1:
            journal.save(1, 0, rows, range(2, 4))
            stale = journal._bytes.copy()
    first = journal.used(2)
    rows[2:] = 7
    # The head reached the disk with a second entry of which only the place did.
    journal.save(2, 0, rows, range(2, 4))
    journal._bytes[64 + first :] = stale[64 + first : len(journal._bytes)]
    again = new(tmp_path, durable=True)
    assert again.undo(2, {0: rows})
    assert rows[:, 0].tolist() == [2, 2, 7, 7]


def test_undo_can_revert_a_part_of_an_operation(tmp_path: Path) -> None:
    rows = np.arange(4, dtype=np.uint8).reshape(4, 1)
    journal = new(tmp_path)
    journal.save(1, 0, rows, range(2))
    rows[:2] = 8
    since = journal.used(1)
    journal.save(1, 0, rows, np.array([1, 3]))
    rows[[1, 3]] = 9
    assert journal.undo(1, {0: rows}, since)
    journal.forget(1, since)
    assert rows[:, 0].tolist() == [8, 8, 2, 3]
    assert not journal.undo(1, {0: rows}, since)
    assert journal.undo(1, {0: rows})
    assert rows[:, 0].tolist() == [0, 1, 2, 3]
