"""Draws that fail or are not delivered lose no row of a pass, and undo nothing else."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    LazyTensorStorage,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    Sampler,
    SamplerWithoutReplacement,
    SampleUnit,
)


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

    def member(first: int) -> ReplayBuffer:
        sampler = SamplerWithoutReplacement(shuffle=False)
        buffer = ReplayBuffer(storage=LazyTensorStorage(12), sampler=sampler)
        buffer.extend(TensorDict({"x": torch.arange(first, first + 12)}, [12]))
        return buffer

    ensemble = ReplayBufferEnsemble(
        member(0),
        member(100),
        sample_from_all=True,
        batch_size=4,
        prefetch=2,
        transform=fail,
    )
    broken = True
    found = ensemble.sample()["x"].flatten().tolist()
    with pytest.raises(RuntimeError, match="boom"):
        ensemble.sample(6)
    broken = False
    for _ in range(5):
        found += ensemble.sample()["x"].flatten().tolist()
    assert sorted(found) == [*range(12), *range(100, 112)]


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
        with pytest.raises(RuntimeError, match="boom"):
            buffer.sample(size)

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
    with pytest.raises(RuntimeError, match="boom"):
        buffer.sample(4)
    assert buffer.sampler.left == list(range(12))
    assert buffer.sample().tolist() == [0, 1]
    buffer.state_dict()
    assert buffer.sampler.left == list(range(2, 12))


class _InTurn(Sampler):
    """Draws rows in turn, at a temperature that the user sets."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature, self.at = 1.0, 0
        self.order = torch.arange(12)

    def sample(self, storage: Any, batch_size: int) -> tuple[torch.Tensor, dict[Any, Any]]:
        at = torch.arange(self.at, self.at + batch_size) % len(storage)
        self.at += batch_size
        return self.order[at], {}

    def state_dict(self) -> dict[str, Any]:
        own = {"temperature": self.temperature, "at": self.at, "order": [self.order.clone()]}
        return {**super().state_dict(), **own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.temperature, self.at = state_dict["temperature"], state_dict["at"]
        self.order = state_dict["order"][0]


def test_save_keeps_the_values_that_the_user_has_set(tmp_path: Path) -> None:
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(12), sampler=_InTurn(), batch_size=2, prefetch=2
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
    with pytest.raises(RuntimeError, match="boom"):
        buffer.sample()
    assert buffer.can_sample()
    assert not buffer.can_sample(10)


class _Refused(SampleUnit):
    def expand(self, index: Any, info: Any, storage: Any) -> Any:
        raise RuntimeError("no")


def test_refused_draw_does_not_end_the_pass() -> None:
    buffer = _in_order(4, sample_unit=_Refused())
    with pytest.raises(RuntimeError, match="no"):
        buffer.sample(4)
    assert not buffer.sampler.ran_out
