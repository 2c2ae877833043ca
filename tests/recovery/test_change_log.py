"""The log gives the elements changed since any count, or says that it may be all of them."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from replaykit.recovery.locks import ElementLog

changes = st.lists(
    st.tuples(
        st.sampled_from([0, 1, 8, 9]),
        st.one_of(st.none(), st.lists(st.integers(0, 2**48 - 2), max_size=6)),
    ),
    max_size=3,
)


@given(st.sampled_from([2, 4, 16, 64]), st.lists(changes, max_size=12))
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
