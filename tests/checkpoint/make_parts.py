"""Makes the fixture of parts of the format version that is written now: ``make_parts.py FOLDER``.

One checkpoint of an ensemble, with a member for every kind of part that has something to save.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from tensordict import TensorDict

from replaykit import (
    ConsumingSampler,
    LaneWriter,
    LazyTensorStorage,
    ListStorage,
    NStep,
    PrioritizedSliceSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    StalenessAwareSampler,
    TensorDictMaxValueWriter,
)

SLOTS = 12


def _rows(first: int, count: int) -> TensorDict:
    number = torch.arange(first, first + count)
    x = number[:, None].float()
    # Of two streams; now and then one does not lead to where it goes on.
    following = {"x": x + 2 + (number % 7 == 3)[:, None], "done": (number % 8 > 5)[:, None]}
    following["reward"] = x / 4
    leaves = {"number": number, "env": number % 2, "age": -number // 5, "x": x, "next": following}
    return TensorDict(leaves, [count])


def empty() -> ReplayBufferEnsemble:
    """The ensemble before anything is written to it."""

    def member(sampler: Any, **options: Any) -> ReplayBuffer:
        storage = options.pop("storage", None)
        if storage is None:
            storage = LazyTensorStorage(SLOTS, **options.pop("stored", {}))
        return ReplayBuffer(storage=storage, sampler=sampler, batch_size=4, **options)

    streams = {"lane_key": "env", "dedup_next": True, "on_mismatch": "dense"}
    slices = PrioritizedSliceSampler(alpha=0.7, beta=0.5, slice_len=2)
    inner = ReplayBufferEnsemble(
        member(SliceSampler(slice_len=2, draw="sequential"), stored=streams),
        member(StalenessAwareSampler(version_key="age"), writer=TensorDictMaxValueWriter("x")),
    )
    return ReplayBufferEnsemble(
        member(ConsumingSampler(3), storage=ListStorage(SLOTS)),
        member(slices, stored={"lane_key": "env"}, writer=LaneWriter(length=5)),
        member(SliceSamplerWithoutReplacement(slice_len=2), stored={"ndim": 2}),
        member(SamplerWithoutReplacement(), transform=NStep(3, 0.5, when="write")),
        inner,
        p=[1, 2, 3, 4, 5],
        generator=torch.Generator().manual_seed(0),
    )


def buffers(ensemble: ReplayBufferEnsemble) -> list[Any]:
    """All members, and in place of one that is an ensemble its own."""
    return [*ensemble.members[:-1], *ensemble.members[-1].members]


def filled() -> ReplayBufferEnsemble:
    """The ensemble that was saved: rings have wrapped, passes have begun."""
    ensemble = empty()
    for buffer in buffers(ensemble):
        for first in range(0, 20, 4):
            rows = _rows(first, 4)
            lanes = buffer.storage.ndim == 2
            buffer.extend(rows.reshape(2, 2) if lanes else rows)
        buffer.set_rng(torch.Generator().manual_seed(1))
        buffer.sample()
    buffers(ensemble)[1].update_priority(torch.arange(8), torch.arange(1.0, 9.0))
    return ensemble


if __name__ == "__main__":
    filled().dumps(sys.argv[1])
