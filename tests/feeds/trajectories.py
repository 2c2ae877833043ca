"""Rows whose values show which stream and step they belong to, for tests of feeds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from replaykit import LazyTensorStorage, ReplayBuffer

__all__ = ["buffer_of", "files_in", "rows_of", "steps_in"]


def rows_of(
    stream: int, start: int, count: int, ends: Any = (), *, truncated: Any = ()
) -> TensorDict:
    """Return rows of steps from ``start`` on; ``ends`` and ``truncated`` are steps with flags."""
    step = torch.arange(start, start + count)
    terminated, cut = (
        torch.tensor([s in steps for s in step.tolist()])[:, None]
        for steps in (set(ends), set(truncated))
    )
    observation = torch.stack([step, step * 0 + stream], 1).float()
    after = observation + torch.tensor([1.0, 0.0])
    flags = {"terminated": terminated, "truncated": cut, "done": terminated | cut}
    reward = (step * 3 + stream).float()[:, None]
    return TensorDict(
        {
            "observation": observation,
            "half": step.to(torch.bfloat16),
            "step": step,
            "stream": torch.full_like(step, stream),
            "next": {"observation": after, "reward": reward, **flags},
        },
        [count],
    )


def buffer_of(size: int = 10_000, **more: Any) -> ReplayBuffer[Any, Any, Any, Any]:
    lane_key = more.pop("lane_key", None)
    return ReplayBuffer(storage=LazyTensorStorage(size, lane_key=lane_key), batch_size=4, **more)


def steps_in(rows: Any) -> list[tuple[int, int]]:
    """Return stream and step of each row, after a check of all its values."""
    step, stream = rows["step"], rows["stream"]
    assert rows["observation"].equal(torch.stack([step, stream], 1).float())
    assert rows["next", "reward"].flatten().equal((step * 3 + stream).float())
    assert rows["half"].equal(step.to(torch.bfloat16))
    return list(zip(stream.tolist(), step.tolist(), strict=True))


def files_in(root: Path, partition: str = "fifo") -> list[str]:
    return sorted(path.name for path in (root / partition).glob("[!.]*"))
