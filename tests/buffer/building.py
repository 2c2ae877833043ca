"""Rows that say who they are, buffers of every kind, and comparisons down to the bit."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, is_tensorclass

from replaykit import (
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    Sampler,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    Storage,
)


def rows(count: int, start: int = 0) -> TensorDict:
    """Make rows whose every value follows from their ``id``."""
    ids = torch.arange(start, start + count)
    column = ids[:, None]
    return TensorDict(
        {
            "id": ids,
            "observation": column + torch.tensor([0.0, 0.25, 0.5]),
            "pixels": (column % 251).to(torch.uint8).repeat(1, 4).view(count, 2, 2),
            "next": {
                "observation": column + torch.tensor([1.0, 1.25, 1.5]),
                "reward": column * 0.5,
                "done": column % 5 == 4,
            },
        },
        [count],
    )


def check_whole(data: Any) -> list[int]:
    """Assert that no row mixes two ids, as made by `rows`; return the ids."""
    expected = torch.cat([rows(1, int(i)) for i in data["id"]]) if len(data) else rows(0)
    for key, value in expected.items(True, True):
        assert torch.equal(data[key], value), f"{key} does not belong to its id"
    return data["id"].tolist()


STORAGES: dict[str, Callable[..., Storage]] = {
    "list": ListStorage,
    "lazy_stack": LazyStackStorage,
    "tensor": LazyTensorStorage,
    "memmap": LazyMemmapStorage,
}
KINDS = list(STORAGES)


_SAMPLERS: dict[str, Callable[[], Sampler]] = {
    "random": RandomSampler,
    "without": SamplerWithoutReplacement,
    "ordered": lambda: SamplerWithoutReplacement(shuffle=False),
    "drop_last": lambda: SamplerWithoutReplacement(drop_last=True),
    "prioritized": lambda: PrioritizedSampler(alpha=0.7, beta=0.9),
    "stratified": lambda: PrioritizedSampler(alpha=0.7, beta=0.9, stratified=True),
    "slices": lambda: SliceSampler(slice_len=2),
    "slices by trajectory": lambda: SliceSampler(slice_len=2, measure="trajectory"),
    "stratified slices": lambda: SliceSampler(slice_len=2, draw="stratified"),
    "distinct slices": lambda: SliceSampler(slice_len=2, draw="without_replacement"),
    "slice pass": lambda: SliceSamplerWithoutReplacement(slice_len=2),
    "prioritized slices": lambda: PrioritizedSliceSampler(alpha=0.7, beta=0.9, slice_len=2),
}


def storage_of(kind: str, max_size: int = 10, **options: Any) -> Storage:
    return STORAGES[kind](max_size, **options)


def sampler_of(kind: str) -> Sampler:
    return _SAMPLERS[kind]()


def buffer_of(
    kind: str = "tensor",
    max_size: int = 10,
    *,
    sampler: str | Sampler = "random",
    filled: int = 0,
    seed: int | None = None,
    ndim: int = 1,
    **keywords: Any,
) -> ReplayBuffer:
    """Make a buffer over a storage of a kind, with ``filled`` rows."""
    options = {} if ndim == 1 else {"ndim": ndim}
    if seed is not None:
        keywords["generator"] = torch.Generator().manual_seed(seed)
    if "storage" not in keywords:
        keywords["storage"] = storage_of(kind, max_size, **options)
    sampler = sampler_of(sampler) if isinstance(sampler, str) else sampler
    buffer = ReplayBuffer(sampler=sampler, **keywords)
    if filled:
        buffer.extend(rows(filled))
    return buffer


IDS = [7, 8, 9, 3, 4, 5, 6]


def wrapped(kind: str, **options: Any) -> ReplayBuffer:
    """Make a ring of seven rows, of the `IDS`."""
    buffer = buffer_of(kind, 7, **options)
    buffer.extend(rows(10))
    return buffer


class CountingSampler(SamplerWithoutReplacement):
    """Counts its draws, and fails at some of them."""

    def __init__(self, *failing: int) -> None:
        super().__init__(shuffle=False)
        self.draws = 0
        self.failing = failing

    def sample(self, storage: Storage, batch_size: int) -> Any:
        self.draws += 1
        if self.draws in self.failing:
            raise ArithmeticError(f"draw {self.draws}")
        return super().sample(storage, batch_size)


class Turning(Sampler):
    """Draws rows in turn, and knows where it is; it may refuse to take a state."""

    def __init__(self, failing: bool = False) -> None:
        super().__init__()
        self.at, self.failing = 0, failing

    def sample(self, storage: Storage, batch_size: int) -> Any:
        found = torch.arange(self.at, self.at + batch_size) % len(storage)
        self.at += batch_size
        return found, {}

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "at": self.at}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.at = state_dict["at"]
        if self.failing:
            raise ConnectionError("sampler")


def same(a: Any, b: Any, where: str = "value") -> None:
    """Assert equality to the bit: of types, keys, dtypes, shapes and bytes."""
    if isinstance(a, torch.Tensor):
        assert isinstance(b, torch.Tensor), where
        assert (a.dtype, a.shape) == (b.dtype, b.shape), where
        raw = [t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
        assert torch.equal(*raw), where
    elif isinstance(a, TensorDictBase) or is_tensorclass(a):
        assert a.batch_size == b.batch_size, where
        same(a.to_dict(), b.to_dict(), where)
    elif isinstance(a, Mapping):
        assert set(a) == set(b), where
        for key in a:
            same(a[key], b[key], f"{where}[{key!r}]")
    elif isinstance(a, (list, tuple)):
        assert type(a) is type(b), where
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            same(x, y, f"{where}[{i}]")
    else:
        assert type(a) is type(b), where
        assert a == b, where


def snapshot(buffer: ReplayBuffer) -> dict[str, Any]:
    """Copy everything that a call that raises must leave as it was (G1)."""
    storage = buffer.storage
    state = {
        "rows": [storage[row] for row in range(len(storage))] if storage.ndim == 1 else None,
        "cells": buffer[:] if storage.ndim > 1 and len(storage) else None,
        "ledger": storage.ledger.state(),
        "max_size": storage.max_size,
        "sampler": buffer.sampler.state_dict(),
        "ran_out": buffer.sampler.ran_out,
        "writer": buffer.writer.state_dict(),
        "transforms": buffer.transform.state_dict(),
        "stats": buffer.stats(),
        "generator": buffer.state_dict()["_rng"],
    }
    return copy.deepcopy(state)


def unchanged(buffer: ReplayBuffer, error: Any, call: Callable[[], Any], match: str = ".") -> None:
    """Assert that a call raises and changes nothing (G1)."""
    before = snapshot(buffer)
    with pytest.raises(error, match=match):
        call()
    same(before, snapshot(buffer))


def in_threads(*functions: Callable[[], Any], timeout: float = 60.0) -> None:
    """Run functions at once, and raise what one of them raises; all must end in time."""
    errors: list[BaseException] = []
    gate = threading.Barrier(len(functions))

    def guarded(function: Callable[[], Any]) -> None:
        try:
            gate.wait()
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(f,), daemon=True) for f in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout)
    stuck = sum(thread.is_alive() for thread in threads)
    assert not stuck, f"{stuck} of {len(threads)} threads did not end within {timeout} s"
    if errors:
        raise errors[0]


def eventually(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    """Wait for a condition; return whether it came true."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.002)
    return True
