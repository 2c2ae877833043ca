"""Batches made ahead that fail: each error is raised where its batch would come."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from replaykit import LazyTensorStorage, RandomSampler, ReplayBuffer
from tests.buffer.building import CountingSampler, buffer_of, rows

pytestmark = pytest.mark.usefixtures("by_threads")


class FailsAt:
    """A transform that fails at a row, as often as it is told to."""

    def __init__(self, row: int, times: int) -> None:
        self.row, self.times = row, times

    def __call__(self, data: Any) -> Any:
        if self.row in data["id"].tolist() and self.times:
            self.times -= 1
            raise ArithmeticError(f"row {self.row}")
        return data


@pytest.mark.pitfall("TH9")
@pytest.mark.parametrize("prefetch", [None, 1, 2, 5])
def test_transform_error_is_raised_in_place_of_its_batch(prefetch: int | None):
    """TH9, G1: no exception is lost, none comes early, and no row of the pass is lost by it."""
    for _ in range(5):
        failing = FailsAt(4, 2)
        buffer = buffer_of(
            filled=10, sampler="ordered", batch_size=2, prefetch=prefetch, transform=failing
        )
        for turn in range(2):
            assert buffer.sample()["id"].tolist() == [0, 1]
            assert buffer.sample()["id"].tolist() == [2, 3]
            for _ in range(2 * (1 - turn)):
                with pytest.raises(ArithmeticError, match="row 4"):
                    buffer.sample()
                assert not buffer.sampler.ran_out
            for start in (4, 6, 8):
                assert buffer.sample()["id"].tolist() == [start, start + 1]
            assert buffer.sampler.ran_out


@pytest.mark.parametrize("prefetch", [None, 1, 3])
@pytest.mark.parametrize("sampler", ["random", "without", "prioritized"])
def test_failed_batch_is_delivered_unchanged_afterwards(sampler: str, prefetch: int | None):
    """G1: a call that raises leaves the random state as it was; also with another batch size."""
    # Draws of another size take turns with those made ahead: in what order is chance.
    sizes = (3, 3, 5, 3, 5, 5, 2, 3) if prefetch is None else (3,) * 12
    make = {"filled": 30, "sampler": sampler, "batch_size": 3, "prefetch": prefetch}
    other = buffer_of(**make, seed=4)
    expected = [other.sample(size)["id"].tolist() for size in sizes]
    seen: set[tuple[int, ...]] = set()
    failures = 0

    def failing(data: Any) -> Any:
        ids = tuple(data["id"].tolist())
        if ids not in seen:
            seen.add(ids)
            raise ArithmeticError("the first time")
        return data

    one = buffer_of(**make, seed=4, transform=failing)
    for size, ids in zip(sizes, expected, strict=True):
        while True:
            try:
                batch = one.sample(size)
            except ArithmeticError:
                failures += 1
                continue
            break
        assert batch["id"].tolist() == ids
    assert failures >= len(sizes) // (1 + (prefetch or 0))


def test_refused_transform_output_loses_no_row():
    buffer = buffer_of(
        filled=6, sampler="ordered", batch_size=2, transform=lambda data: data[:1].clone()
    )
    with pytest.raises(RuntimeError, match="return_info=True"):
        buffer.sample()
    data, info = buffer.sample(return_info=True)
    assert info["index"].tolist() == [0, 1]
    assert data["id"].tolist() == [0]


@pytest.mark.pitfall("TH9")
@pytest.mark.parametrize("prefetch", [1, 2, 5])
def test_draw_error_is_raised_in_place_of_its_batch(prefetch: int):
    """TH9: as without prefetch, the draw after it is the next one."""
    buffer = buffer_of(filled=10, sampler=CountingSampler(3, 4), batch_size=2, prefetch=prefetch)
    ids: list[Any] = []
    for _ in range(7):
        try:
            ids.append(buffer.sample()["id"].tolist())
        except ArithmeticError as error:
            ids.append(str(error))
    assert ids == [[0, 1], [2, 3], "draw 3", "draw 4", [4, 5], [6, 7], [8, 9]]


@pytest.mark.parametrize("prefetch", [1, 3])
def test_an_empty_buffer_works_as_soon_as_there_are_rows(prefetch: int):
    for _ in range(30):
        buffer = buffer_of(sampler="ordered", batch_size=2, prefetch=prefetch)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="empty storage"):
                buffer.sample()
        buffer.extend(rows(3))
        assert [batch["id"].tolist() for batch in buffer] == [[0, 1], [2]]


def test_an_error_at_the_end_of_a_pass_does_not_stop_the_next():
    attempts = 0

    def failing(data: Any) -> Any:
        """Fails twice of three times; the next pass may be prepared before this one is over."""
        nonlocal attempts
        if 9 in data["id"].tolist():
            attempts += 1
            if attempts % 3:
                raise ArithmeticError("row 9")
        return data

    buffer = buffer_of(filled=10, sampler="ordered", batch_size=4, prefetch=4, transform=failing)
    for _ in range(5):
        assert buffer.sample()["id"].tolist() == [0, 1, 2, 3]
        assert buffer.sample()["id"].tolist() == [4, 5, 6, 7]
        for _ in range(2):
            with pytest.raises(ArithmeticError, match="row 9"):
                buffer.sample()
        assert buffer.sample()["id"].tolist() == [8, 9]


def test_calls_between_leave_the_error_of_a_failed_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    rb = ReplayBuffer(
        storage=LazyTensorStorage(8), batch_size=2, prefetch=2, transform=lambda rows: rows
    )
    rb.extend(torch.arange(8))
    sample, calls = RandomSampler.sample, itertools.count()

    def fails(self: Any, storage: Any, size: int) -> Any:
        if next(calls) == 1:
            raise ValueError("not this time")
        return sample(self, storage, size)

    monkeypatch.setattr(RandomSampler, "sample", fails)
    assert len(rb.sample()) == 2
    assert rb[0] == 0  # reads what is drawn, as a write does
    with pytest.raises(ValueError, match="not this time"):
        rb.sample()
    assert len(rb.sample()) == 2
    rb.shutdown()
