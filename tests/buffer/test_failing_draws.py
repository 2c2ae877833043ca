"""Draws, reads and transforms that fail: errors come in place of their batch, and lose no row."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    ConsumingSampler,
    LazyTensorStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    Sampler,
    SamplerWithoutReplacement,
    SampleUnit,
    SliceSamplerWithoutReplacement,
)
from tests.buffer.building import CountingSampler, Turning, buffer_of, rows, same
from tests.support.refusals import refuses

# -- transforms and draws --------------------------------------------------------------------------


def retried(draw: Callable[[], Any], error: type[Exception]) -> tuple[Any, int]:
    """Draw until a batch comes; return it and the number of errors before it."""
    for failures in range(20):
        try:
            return draw(), failures
        except error:
            continue
    raise AssertionError("20 errors in turn")


class FailsAt:
    """A transform that fails at a row, a given number of times."""

    def __init__(self, row: int, times: int) -> None:
        self.row, self.times = row, times

    def __call__(self, data: Any) -> Any:
        if self.row in data["id"].tolist() and self.times:
            self.times -= 1
            raise ArithmeticError(f"row {self.row}")
        return data


@pytest.mark.usefixtures("by_threads")
@pytest.mark.pitfall("TH9")
@pytest.mark.parametrize("row", [4, 9])
@pytest.mark.parametrize("prefetch", [None, 1, 2, 5])
def test_transform_error_is_raised_in_place_of_its_batch(prefetch: int | None, row: int):
    """No exception is lost, none comes early, and no row of the pass is lost by it."""
    for _ in range(5):
        buffer = buffer_of(
            filled=10,
            sampler="ordered",
            batch_size=2,
            prefetch=prefetch,
            transform=FailsAt(row, 2),
        )
        for turn in range(2):
            for start in (0, 2, 4, 6, 8):
                if not turn and start <= row < start + 2:
                    for _ in range(2):
                        refuses(ArithmeticError, f"row {row}", buffer.sample)
                        assert not buffer.sampler.ran_out
                assert buffer.sample()["id"].tolist() == [start, start + 1]
            assert buffer.sampler.ran_out


@pytest.mark.usefixtures("by_threads")
@pytest.mark.parametrize("prefetch", [None, 1, 3])
@pytest.mark.parametrize("sampler", ["random", "without", "prioritized"])
def test_failed_batch_is_delivered_unchanged_afterwards(sampler: str, prefetch: int | None):
    """A call that raises leaves the random state as it was; also with another batch size."""
    # Draws of another size take turns with those made ahead: in what order is chance.
    sizes = (3, 3, 5, 3, 5, 5, 2, 3) if prefetch is None else (3,) * 12
    make = {"filled": 30, "sampler": sampler, "batch_size": 3, "prefetch": prefetch, "seed": 4}
    seen: set[tuple[int, ...]] = set()

    def failing(data: Any) -> Any:
        ids = tuple(data["id"].tolist())
        if ids not in seen:
            seen.add(ids)
            raise ArithmeticError("the first time")
        return data

    one, other = buffer_of(**make, transform=failing), buffer_of(**make)
    total = 0
    for size in sizes:
        batch, failures = retried(lambda size=size: one.sample(size), ArithmeticError)
        assert batch["id"].tolist() == other.sample(size)["id"].tolist()
        total += failures
    assert total >= len(sizes) // (1 + (prefetch or 0))


@pytest.mark.usefixtures("by_threads")
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


@pytest.mark.usefixtures("by_threads")
@pytest.mark.parametrize("prefetch", [None, 1, 3])
def test_an_empty_buffer_works_as_soon_as_there_are_rows(prefetch: int | None):
    for _ in range(10):
        buffer = buffer_of(sampler="ordered", batch_size=2, prefetch=prefetch)
        for call in (buffer.sample, buffer.next):
            refuses(RuntimeError, "empty storage", call)
        buffer.extend(rows(3))
        assert [batch["id"].tolist() for batch in buffer] == [[0, 1], [2]]


@pytest.mark.usefixtures("by_threads")
def test_calls_between_leave_the_error_of_a_failed_draw() -> None:
    rb = buffer_of(filled=8, sampler=CountingSampler(2), batch_size=2, prefetch=2)
    assert len(rb.sample()) == 2
    assert rb[0]["id"] == 0  # reads what is drawn, as a write does
    refuses(ArithmeticError, "draw 2", rb.sample)
    assert len(rb.sample()) == 2
    rb.shutdown()


@pytest.mark.parametrize(("call", "error"), [(3, ValueError), (5, KeyboardInterrupt)])
def test_draw_that_the_caller_fails_to_make_comes_again(
    call: int, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error is raised where its batch would come, an interrupt by the call that draws ahead."""
    direct, ahead = (
        buffer_of(max_size=50, filled=50, batch_size=8, prefetch=depth, seed=2)
        for depth in (None, 2)
    )
    sample, calls = RandomSampler.sample, itertools.count()

    def fails(self: Any, storage: Any, size: int) -> Any:
        if next(calls) == call:
            raise error("not this time")
        return sample(self, storage, size)

    expected = [direct.sample() for _ in range(8)]
    monkeypatch.setattr(RandomSampler, "sample", fails)
    found = [ahead.sample() for _ in range(3)]
    with pytest.raises(error):
        ahead.sample()
    ahead.extend(rows(0))
    found += [ahead.sample() for _ in range(5)]
    for pair in zip(expected, found, strict=True):
        same(*pair)
    ahead.shutdown()


# -- reads -----------------------------------------------------------------------------------------


ROWS = 20


class Failing(LazyTensorStorage):
    """Fail to read a given number of times."""

    fails = 0

    def read(self, index: torch.Tensor, **options: Any) -> Any:
        if self.fails:
            self.fails -= 1
            raise OSError("the disk is gone")
        return super().read(index, **options)


def filled(sampler: Any, seed: int = 0, **options: Any) -> Any:
    generator = torch.Generator().manual_seed(seed)
    rb = ReplayBuffer(
        storage=Failing(ROWS), sampler=sampler, batch_size=4, generator=generator, **options
    )
    number = torch.arange(ROWS)
    rb.extend(TensorDict({"id": number, "episode": number // 5}, [ROWS]))
    return rb


@pytest.mark.parametrize("prefetch", [None, 1, 3])
@pytest.mark.parametrize(
    "sampler",
    [
        RandomSampler,
        SamplerWithoutReplacement,
        lambda: PrioritizedSampler(alpha=0.7, beta=0.5),
        lambda: SliceSamplerWithoutReplacement(slice_len=2, traj_key="episode"),
    ],
    ids=["random", "without", "prioritized", "slices"],
)
def test_unread_draw_is_delivered_next(sampler: Any, prefetch: int | None) -> None:
    """The batches are those of a buffer whose reads never failed."""
    failing, plain = filled(sampler(), prefetch=prefetch), filled(sampler())
    failed = 0
    for turn in range(16):
        failing.storage.fails += turn % 3
        batch, failures = retried(failing.sample, OSError)
        failed += failures
        same(plain.sample(), batch)
    failing.shutdown()
    # Of 15; errors of batches that are drawn ahead are raised later.
    assert failed + failing.storage.fails >= 15 - (prefetch or 0)
    assert failed >= 8


@pytest.mark.parametrize("sampler", ["random", "without"])
def test_failed_read_of_a_small_batch_loses_no_draw(
    sampler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Callers read such batches at once, when they draw ahead."""
    begin, calls = LazyTensorStorage.begin_held, itertools.count()

    def fails(storage: Any, *given: Any) -> Any:
        if next(calls) % 3 == 1:
            raise OSError("the disk is gone")
        return begin(storage, *given)

    monkeypatch.setattr(LazyTensorStorage, "begin_held", fails)
    failing, plain = (
        buffer_of(sampler=sampler, filled=10, batch_size=4, prefetch=depth, seed=3)
        for depth in (2, None)
    )
    failed = 0
    for _ in range(16):
        batch, failures = retried(failing.sample, OSError)
        failed += failures
        same(plain.sample(), batch)
    assert failed >= 4
    failing.shutdown()


@pytest.mark.parametrize("uses", [1, 2])
def test_records_that_were_not_read_are_not_used_up(uses: int) -> None:
    rb = filled(ConsumingSampler(uses))
    for _ in range(3):
        rb.storage.fails = 1
        refuses(OSError, "disk", rb.sample)
    assert len(rb) == ROWS
    found = torch.cat([batch["id"] for batch in rb])
    assert torch.bincount(found).tolist() == [uses] * ROWS


def test_other_batch_size_after_a_failed_read_repeats_the_draw() -> None:
    """With the same numbers; rows of a pass go back to it."""
    failing, plain = filled(RandomSampler()), filled(RandomSampler())
    failing.storage.fails = 1
    refuses(OSError, "disk", failing.sample, 7)
    assert failing.sample(7)["id"].equal(plain.sample(7)["id"])
    rb = filled(SamplerWithoutReplacement())
    rb.storage.fails = 1
    refuses(OSError, "disk", rb.sample, 7)
    found = torch.cat([batch["id"] for batch in rb])
    assert sorted(found.tolist()) == list(range(ROWS))


def test_members_of_an_ensemble_lose_no_rows() -> None:
    members = [filled(SamplerWithoutReplacement()), filled(ConsumingSampler())]
    ensemble = ReplayBufferEnsemble(*members, sample_from_all=True, batch_size=8)
    found: list[list[int]] = [[], []]
    for turn in range(5):
        for member in members:
            member.storage.fails = 1
            refuses(OSError, "disk", ensemble.sample)
        for mine, ids in zip(found, ensemble.sample()["id"].tolist(), strict=True):
            mine += ids
        assert len(members[1]) == ROWS - 4 * (turn + 1)
    assert [sorted(mine) for mine in found] == [list(range(ROWS))] * 2


# -- draws that are undone -------------------------------------------------------------------------


def _in_order(rows: int, **options: Any) -> ReplayBuffer:
    sampler = SamplerWithoutReplacement(shuffle=False)
    buffer = ReplayBuffer(storage=LazyTensorStorage(rows), sampler=sampler, **options)
    buffer.extend(torch.arange(rows))
    return buffer


def _rest_of_pass(buffer: ReplayBuffer, size: int) -> list[int]:
    found: list[int] = []
    while True:
        found += buffer.sample(size).tolist()
        if buffer.sampler.ran_out:
            return found


def test_failed_batch_of_an_ensemble_loses_no_row() -> None:
    def fail(rows: Any) -> Any:
        if broken and rows.numel() == 6:
            raise RuntimeError("boom")
        return rows

    members = [buffer_of(max_size=12, filled=12, sampler="ordered") for _ in range(2)]
    ensemble = ReplayBufferEnsemble(
        *members, sample_from_all=True, batch_size=4, prefetch=2, transform=fail
    )
    broken = True
    found = [ensemble.sample()["id"]]
    refuses(RuntimeError, "boom", ensemble.sample, 6)
    broken = False
    found += [ensemble.sample()["id"] for _ in range(5)]
    assert [sorted(ids) for ids in torch.cat(found, 1).tolist()] == [list(range(12))] * 2


@pytest.mark.parametrize("prefetch", [0, 1])
def test_batches_that_fail_in_two_threads_lose_no_row(prefetch: int) -> None:
    buffer = _in_order(12, batch_size=2, prefetch=prefetch)
    go = {3: threading.Event(), 4: threading.Event()}
    reached = {3: threading.Event(), 4: threading.Event()}

    def fail(rows: torch.Tensor) -> torch.Tensor:
        if len(rows) in go:
            reached[len(rows)].set()
            go[len(rows)].wait(20)
            raise RuntimeError("boom")
        return rows

    def draw(size: int) -> None:
        refuses(RuntimeError, "boom", buffer.sample, size)

    buffer.append_transform(fail)
    threads = [threading.Thread(target=draw, args=(size,)) for size in (3, 4)]
    for size, thread in zip((3, 4), threads, strict=True):
        thread.start()
        assert reached[size].wait(20)
    for size, thread in zip((3, 4), threads, strict=True):
        go[size].set()
        thread.join()
    buffer.state_dict()
    assert sorted(_rest_of_pass(buffer, 2)) == list(range(12))


class _Once:
    """Draws every row once. It has no ``state_dict``, so only ``put_back`` undoes its draws."""

    def __init__(self) -> None:
        super().__init__()
        self.left = list(range(12))

    def sample(self, storage: Any, batch_size: int) -> tuple[torch.Tensor, dict[Any, Any]]:
        taken, self.left = self.left[:batch_size], self.left[batch_size:]
        return torch.tensor(taken), {}

    def put_back(self, drawn: list[torch.Tensor], storage: Any) -> None:
        self.left = [row for part in drawn for row in part.tolist()] + self.left


class _OnceAlone(_Once, Sampler):
    pass


class _OnceDerived(_Once, RandomSampler):
    pass


@pytest.mark.parametrize("kind", [_OnceAlone, _OnceDerived])
def test_sampler_without_token_gets_its_rows_back(kind: Any) -> None:
    def fail(rows: torch.Tensor) -> torch.Tensor:
        if len(rows) == 4:
            raise RuntimeError("boom")
        return rows

    buffer = ReplayBuffer(
        storage=LazyTensorStorage(12), sampler=kind(), batch_size=2, prefetch=2, transform=fail
    )
    buffer.extend(torch.arange(12))
    refuses(RuntimeError, "boom", buffer.sample, 4)
    assert buffer.sampler.left == list(range(12))
    assert buffer.sample().tolist() == [0, 1]
    buffer.state_dict()
    assert buffer.sampler.left == list(range(2, 12))


class _Tempered(Turning):
    """Draws rows in turn, at a temperature that the user sets."""

    temperature = 1.0

    def state_dict(self) -> dict[str, Any]:
        own = {"temperature": self.temperature, "order": [torch.arange(12)]}
        return {**super().state_dict(), **own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.temperature = state_dict["temperature"]


def test_save_keeps_the_values_that_the_user_has_set(tmp_path: Path) -> None:
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(12), sampler=_Tempered(), batch_size=2, prefetch=2
    )
    buffer.extend(torch.arange(12))
    assert buffer.sample().tolist() == [0, 1]
    buffer.dumps(tmp_path / "undone")
    assert buffer.sampler.at == 2
    assert buffer.sample().tolist() == [2, 3]
    buffer.sampler.temperature = 0.5
    buffer.dumps(tmp_path / "kept")
    assert buffer.sampler.temperature == 0.5


def test_failed_batch_of_another_size_is_not_ready() -> None:
    def fail(rows: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("boom")

    buffer = ReplayBuffer(
        storage=LazyTensorStorage(12),
        sampler=SamplerWithoutReplacement(drop_last=True),
        batch_size=2,
        transform=fail,
    )
    buffer.extend(torch.arange(4))
    refuses(RuntimeError, "boom", buffer.sample)
    assert buffer.can_sample()
    assert not buffer.can_sample(10)


class _Refused(SampleUnit):
    def expand(self, index: Any, info: Any, storage: Any) -> Any:
        raise RuntimeError("no")


def test_refused_draw_does_not_end_the_pass() -> None:
    buffer = _in_order(4, sample_unit=_Refused())
    refuses(RuntimeError, "no", buffer.sample, 4)
    assert not buffer.sampler.ran_out
