"""Commits of a few rows by the compiled core: the same bytes as without it; the log of changes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from replaykit import native
from replaykit.recovery.journal import States
from replaykit.recovery.locks import ElementLog
from replaykit.recovery.recovery_folder import RecoveryFolder
from tests.support.refusals import refuses

Array = np.ndarray[Any, Any]
ROWS, WIDTHS = 40, (5, 24)


class Opened:
    """A home over rows in memory, with the core or without it."""

    def __init__(self, folder: Path, *, compiled: bool, **how: Any) -> None:
        folder.mkdir(exist_ok=True)
        self.rows = {
            1000 + at: np.arange(ROWS * width, dtype=np.uint8).reshape(ROWS, width)
            for at, width in enumerate(WIDTHS)
        }
        self.folder, self.compiled, self.how = folder, compiled, how
        self.open(fresh=True)

    def open(self, *, fresh: bool = False) -> None:
        self.home = RecoveryFolder(self.folder, **self.how)
        if not self.compiled:
            self.home._pass_addresses = lambda: None  # type: ignore[method-assign]
        self.home.open(self.rows, fresh=fresh)

    def write(self, first: int, until: int, value: int) -> tuple[int, int]:
        noted = self.home.journal_file_rows(first, until)
        for cells in self.rows.values():
            cells[first:until] = value
        return noted

    def put(self, at: Array, values: Array) -> None:
        column = self.home.column(8) if 8 in self.home._tables else None
        if column is None or not column.set(at, values):
            self.home.set(8, values, at)

    def commit(self, numbers: Array, more: list[int]) -> int:
        return self.home.commit(numbers, more)

    def files(self) -> dict[str, bytes]:
        folder = self.home.folder
        return {
            name: (folder / name).read_bytes()
            for name in ("journal.bin", "state-0.bin", "state-1.bin", "table-8-8.bin")
            if (folder / name).exists()
        }


def both(folder: Path, **how: Any) -> Iterator[Opened]:
    for compiled in (True, False):
        yield Opened(folder / str(compiled), compiled=compiled, **how)


write = st.tuples(st.just("write"), st.integers(0, ROWS - 1), st.integers(1, ROWS))
numbers = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=6)
change = st.one_of(
    write,
    st.tuples(st.just("commit"), numbers, numbers),
    st.tuples(st.just("large"), st.integers(300, 700)),
    st.tuples(st.just("back")),
    st.tuples(st.just("put"), st.lists(st.integers(0, 700), max_size=9), st.floats()),
    st.tuples(st.just("many"), st.integers(200, 3000), st.floats()),
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(changes=st.lists(change, max_size=25))
@example(changes=[("write", 0, ROWS)] * 70)  # the journal grows beyond 64 KiB
def test_core_commits_write_the_same_bytes_as_python(
    changes: list[tuple[Any, ...]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    homes = list(both(tmp_path_factory.mktemp("homes"), shared=True))
    for number, (kind, *arguments) in enumerate(changes):
        answers: list[Any] = []
        for opened in homes:
            if kind == "write":
                first, count = arguments
                until = min(ROWS, first + count)
                answers.append(opened.write(first, until, number))
            elif kind == "commit":
                own, more = arguments
                answers.append(opened.commit(np.array(own, np.int64), more))
            elif kind == "put":
                at = np.array(arguments[0], np.int64)
                opened.put(at, np.full(len(at), arguments[1]) + np.arange(len(at)))
                answers.append(None)
            elif kind == "many":
                at = np.arange(0, arguments[0], 2)
                opened.put(at, np.full(len(at), arguments[1]))
                answers.append(None)
            elif kind == "large":
                answers.append(opened.commit(np.arange(arguments[0]), [number]))
            else:
                opened.home.roll_back()
                answers.append(opened.home.journaled())
        assert answers[0] == answers[1]
        assert homes[0].home.journaled() == homes[1].home.journaled()
        for one, other in zip(homes[0].rows.values(), homes[1].rows.values(), strict=True):
            assert np.array_equal(one, other)
    assert homes[0].files() == homes[1].files()
    for opened in homes:  # what was not committed is taken back
        opened.open()
    assert homes[0].home.states.latest().tolist() == homes[1].home.states.latest().tolist()
    for one, other in zip(homes[0].rows.values(), homes[1].rows.values(), strict=True):
        assert np.array_equal(one, other)


def test_column_of_the_core_uses_a_grown_journal(tmp_path: Path) -> None:
    home, at = Opened(tmp_path / "home", compiled=True).home, np.arange(10_000)
    home.set(8, at / 2, at)
    column = home.column(8)
    home.commit(np.array([1]))
    assert column.set(at, at / 3)


def test_commit_sees_a_state_grown_by_another_process(tmp_path: Path) -> None:
    one = Opened(tmp_path / "home", compiled=True, shared=True)
    other = Opened.__new__(Opened)
    vars(other).update(rows=one.rows, folder=one.folder, compiled=True, how={"shared": True})
    other.open()
    assert one.commit(np.arange(5000), []) == 1  # longer than the page that `other` has mapped
    assert other.home.journaled() == (2, 0)
    assert other.commit(np.arange(6000), [7]) == 2
    assert other.commit(np.arange(5500), [7]) == 3
    assert one.home.states.latest().tolist() == [*range(5500), 7]
    assert States(one.home.folder).sequence == 3


def test_absent_rows_and_elements_are_refused(tmp_path: Path) -> None:
    opened = Opened(tmp_path / "home", compiled=True, shared=True)
    before = opened.files()
    for first, until in ((-1, 2), (3, 3), (5, 4), (0, ROWS + 1), (ROWS, ROWS + 1)):
        refuses(IndexError, "rows of the storage", opened.home._commits.journal, first, until)
    core, place = native.core, np.zeros(64, np.uint8)
    refuses(ValueError, "journal", core.Commits, place[:56], place, place, [])
    refuses(ValueError, "state", core.Commits, place, place[:24], place, [])
    with pytest.raises(ValueError, match="multiple of 8"):
        core.Commits(np.zeros(128, np.uint8)[1:], place, place, [])
    with pytest.raises(TypeError, match="rows"):
        core.Commits(place, place, place, [(1, np.zeros((4, 4), np.float32))])
    refuses(TypeError, "numbers", opened.home._commits.commit, np.zeros(3, np.float64), [])
    refuses(ValueError, "contiguous", opened.home._commits.commit, np.zeros(6, np.int64)[::2], [])
    assert opened.files() == before


def test_core_does_not_note_into_a_damaged_journal(tmp_path: Path) -> None:
    opened = Opened(tmp_path / "home", compiled=True, shared=True)
    opened.write(0, 2, 1)
    head = opened.home.journal.memory[:24].view(np.int64)
    for used in (-8, len(opened.home.journal.memory)):
        head[1] = used
        assert not opened.home._commits.journal(0, 1)


@given(st.integers(0, 50), st.lists(st.integers(0, 2**40), max_size=16))
def test_element_log_wraps_around_the_ring(first: int, at: list[int]) -> None:
    ring, expected = np.full(16, -1), np.full(16, -1)
    log = native.core.ElementLog(ring)
    log.count = first
    log.append(9, np.array(at, np.int64))
    assert log.count == first + len(at)
    for place, one in enumerate(at, first):
        expected[place % 16] = one | 9 << 48
    assert ring.tolist() == expected.tolist()
    for count, more in ((0, 17), (-1, 1)):
        log.count = count
        refuses(ValueError, "at most", log.append, 0, np.zeros(more, np.int64))


@pytest.mark.parametrize("wide", [False, True])
def test_logged_column_sets_logs_and_marks(tmp_path: Path, wide: bool) -> None:
    opened = Opened(tmp_path / "home", compiled=True, shared=True)
    opened.put(np.arange(40), np.arange(40.0))
    opened.commit(np.array([1]), [])
    marks, clock = np.zeros(10, np.int64), np.array([7, 0])
    log = native.core.ElementLog(np.zeros(8, np.int64))
    column = opened.home.column(8, log, marks, 2, clock)
    at = np.array([39, 2, 39])
    values = np.array([0.1, 0.2, 0.3], np.float64 if wide else np.float32)
    assert column.set(at, values)
    cells = opened.home.table(8, 40)
    assert [cells[2], cells[39], cells[3]] == [float(values[1]), float(values[2]), 3.0]
    assert log.count == 3
    assert np.flatnonzero(marks).tolist() == [0, 9]
    before = cells.copy()
    assert not column.set(at, values)  # it would overwrite what others may still read
    log.committed = log.count
    assert not column.set(np.array([40]), values[:1])  # it has no mark
    refuses(ValueError, "values", column.set, at, values[:2])
    assert cells.tolist() == before.tolist()
    opened.home.roll_back()
    assert cells[:40].tolist() == list(range(40))
    for bits, other in ((-1, clock), (33, clock), (2, clock[:0])):
        refuses(ValueError, "few bits", opened.home.column, 8, log, marks, bits, other)
    refuses(IndexError, "elements of a table", column.set, np.array([1, -1]), values[:2])
    refuses(TypeError, "at", column.set, np.array([1.0]), values[:1])
    with pytest.raises(ValueError, match="cells"):
        native.core.Column(opened.home._commits, 8, cells.view(np.uint8).reshape(-1, 4))


logged_commits = st.lists(
    st.tuples(
        st.sampled_from([0, 1, 8, 9]),
        st.one_of(st.none(), st.lists(st.integers(0, 2**48 - 2), max_size=6)),
    ),
    max_size=3,
)


@given(st.sampled_from([2, 4, 16, 64]), st.lists(logged_commits, max_size=12))
def test_change_log_omits_no_change(
    length: int, commits: list[list[tuple[int, list[int] | None]]]
) -> None:
    numbers = np.zeros(length, np.int64)
    writing, reading = ElementLog(numbers), ElementLog(numbers)
    counts, said = [0], []
    for commit in commits:
        noted = [(t, None if at is None else np.array(at, np.int64)) for t, at in commit]
        writing.append(noted)
        writing.core.committed = writing.core.count
        counts.append(writing.core.count)
        said.append(commit)
        for since, count in enumerate(counts):
            wanted: dict[int, set[int] | None] = {}
            for table, at in (one for commit in said[since:] for one in commit):
                if at is None or wanted.get(table, set()) is None:
                    wanted[table] = None
                elif at:
                    wanted[table] = (wanted.get(table) or set()) | set(at)
            found = reading.since(count, counts[-1])
            if found is None:  # all of every table
                assert counts[-1] - count > length // 2
                continue
            for table, elements in wanted.items():
                there = found[table]
                if elements is None:
                    assert there is None
                elif there is not None:  # None: more of them at a time than the log takes
                    assert set(there.tolist()) == elements
            assert found.keys() <= wanted.keys()


@given(st.integers(0, 40), st.lists(st.integers(0, 99), max_size=8))
def test_change_log_is_exact_for_few_changes(before: int, at: list[int]) -> None:
    log = ElementLog(np.zeros(16, np.int64))
    log.core.count = log.core.committed = before
    log.append([(9, np.array(at, np.int64))])
    now = log.core.count
    found = log.since(before, now)
    assert found is not None
    logged = found.get(9, np.zeros(0, np.int64))
    assert logged is not None
    assert logged.tolist() == sorted(set(at))
    assert now == before + len(at)


def test_uncounted_note_of_a_dead_process_is_ignored() -> None:
    log = ElementLog(np.zeros(16, np.int64))
    log.append([(3, np.arange(8))])
    count = log.core.committed = log.core.count
    log.append([(4, np.arange(8))])  # never counted
    log.append([(4, np.arange(8))])  # they would overwrite what others may still read
    assert log.core.count == count + 1
    found = log.since(0, count)
    assert found is not None
    assert list(found) == [3]
    assert found[3] is not None
    assert found[3].tolist() == list(range(8))
    log.core.count = count
    log.append([(5, np.array([1]))])
    again = log.since(count, log.core.count)
    assert again is not None
    assert list(again) == [5]
