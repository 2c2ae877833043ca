"""Buffers whose rows tell which member they are of, and where in it they lie."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict

from replaykit import LazyTensorStorage, PrioritizedSampler, ReplayBuffer, ReplayBufferEnsemble

STRIDE = 1000
"""Row r of member m has the id ``STRIDE * m + r``, as long as its member has not wrapped."""


def rows_of(member: int, count: int, start: int = 0, episode: int = 5) -> TensorDict:
    """Rows of a member, in episodes of some rows."""
    number = torch.arange(start, start + count)
    return TensorDict(
        {
            "id": STRIDE * member + number,
            "observation": number[:, None] * 1.0 + torch.arange(3),
            "next": {"reward": number[:, None] / 2, "done": (number[:, None] + 1) % episode == 0},
        },
        [count],
    )


def by_priority() -> PrioritizedSampler:
    """Make a sampler that draws rows in proportion to their priorities."""
    return PrioritizedSampler(alpha=1.0, beta=1.0, eps=0.0)


def holding(rows: Any, storage: Any = None, **arguments: Any) -> ReplayBuffer:
    """A buffer of these rows, with room for more if no storage is given."""
    storage = LazyTensorStorage(60) if storage is None else storage
    buffer = ReplayBuffer(storage=storage, **arguments)
    buffer.extend(rows)
    return buffer


def make_member(number: int, rows: int = 20, capacity: int = 50, **arguments: Any) -> ReplayBuffer:
    buffer = ReplayBuffer(storage=LazyTensorStorage(capacity), **arguments)
    if rows:
        buffer.extend(rows_of(number, rows))
    return buffer


def make_ensemble(
    sizes: list[int],
    samplers: list[Callable[[], Any]] | None = None,
    *,
    seed: int | None = 0,
    member: dict[str, Any] | None = None,
    **arguments: Any,
) -> ReplayBufferEnsemble:
    """An ensemble of buffers with that many rows."""
    members = [
        make_member(
            number,
            size,
            **({} if samplers is None else {"sampler": samplers[number]()}),
            **(member or {}),
        )
        for number, size in enumerate(sizes)
    ]
    if seed is not None:
        arguments["generator"] = torch.Generator().manual_seed(seed)
    return ReplayBufferEnsemble(*members, **arguments)


def check_rows(batch: TensorDict) -> None:
    """What ``index`` says of each row is where it lies."""
    ids = STRIDE * batch["index", "buffer_ids"] + batch["index", "index"]
    assert (batch["id"] == ids).all()


def same(one: Any, other: Any, *, generations: bool = True) -> bool:
    """Whether two batches are equal, key by key and bit by bit."""
    if not generations:
        late = ("index_generation", "anchor_generation")
        one, other = one.exclude(*late), other.exclude(*late)
    if set(one.keys(True, True)) != set(other.keys(True, True)):
        return False
    return all(torch.equal(one[key], other[key]) for key in one.keys(True, True))
