"""Passes: whether a batch can be sampled, and how iteration goes on and ends."""

from __future__ import annotations

import pytest

from replaykit import SamplerWithoutReplacement
from tests.buffer.building import KINDS, buffer_of, rows
from tests.support.refusals import refuses


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prefetch", [None, 2])
def test_can_sample_predicts_success_of_sample(kind: str, prefetch: int | None):
    for sampler, enough in (("random", 1), ("without", 1), ("drop_last", 3)):
        buffer = buffer_of(kind, sampler=sampler, batch_size=3, prefetch=prefetch)
        for stored in range(5):
            assert buffer.can_sample() is buffer.can_sample(3) is (stored >= enough)
            if stored >= enough:
                buffer.sample()
            else:
                refuses((RuntimeError, ValueError), "stor", buffer.sample)
            buffer.extend(rows(1, stored))


@pytest.mark.parametrize("prefetch", [None, 1, 3])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("count", [8, 10])
def test_iteration_is_one_pass(prefetch: int | None, drop_last: bool, count: int):
    """RD13: the last batch is shorter, not topped up with other rows; or left out."""
    sampler = SamplerWithoutReplacement(drop_last=drop_last)
    buffer = buffer_of(filled=count, sampler=sampler, batch_size=4, prefetch=prefetch)
    for _ in range(3):
        sizes, ids = [], []
        for batch in buffer:
            sizes.append(len(batch))
            ids += batch["id"].tolist()
            assert buffer.sampler.ran_out is (len(ids) + (count % 4 if drop_last else 0) == count)
        assert sizes == [4, 4] + ([count - 8] if count > 8 and not drop_last else [])
        assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("prefetch", [None, 1, 3])
def test_iteration_after_a_break_continues_the_pass(prefetch: int | None):
    buffer = buffer_of(filled=10, sampler="without", batch_size=3, prefetch=prefetch)
    seen = []
    for batch in buffer:
        seen += batch["id"].tolist()
        break
    seen += buffer.sample()["id"].tolist()
    seen += buffer.next()["id"].tolist()
    for batch in buffer:
        seen += batch["id"].tolist()
    assert sorted(seen) == list(range(10))


@pytest.mark.parametrize("prefetch", [None, 1, 3])
def test_next_gives_none_at_the_end_and_starts_over(prefetch: int | None):
    buffer = buffer_of(filled=5, sampler="ordered", batch_size=2, prefetch=prefetch)
    for _ in range(3):
        ids = [buffer.next()["id"].tolist() for _ in range(3)]
        assert ids == [[0, 1], [2, 3], [4]]
        assert buffer.next() is None


def test_iteration_with_replacement_does_not_end_and_needs_a_batch_size():
    buffer = buffer_of(filled=2, batch_size=2)
    for count, _ in enumerate(buffer):
        if count == 20:
            break
    assert all(buffer.next() is not None for _ in range(20))
    buffer = buffer_of(filled=2)
    for call in (lambda: iter(buffer), buffer.next):
        refuses(RuntimeError, "batch_size", call)
