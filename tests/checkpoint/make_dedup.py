"""Makes fixtures of rows that are stored once, in the present format: ``make_dedup.py FOLDER``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from replaykit import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer

SLOTS = 20
KINDS: dict[str, dict[str, Any]] = {
    "ring": {},
    "lanes": {"ndim": 2},
    "streams": {"lane_key": "env"},
}


def rows(kind: str, first: int, count: int) -> TensorDict:
    """Transitions that continue those of the call before; every fifth step ends an episode."""
    lanes = [2] if kind == "lanes" else []
    number = torch.arange(first, first + count).reshape([count] + [1] * len(lanes))
    number = number.expand([count, *lanes])
    time = number // 3 if kind == "streams" else number
    done = (time % 5 == 4).unsqueeze(-1)

    def observed(at: torch.Tensor) -> dict[str, torch.Tensor]:
        pixels = (at.unsqueeze(-1) + torch.arange(600)).to(torch.uint8)
        return {"pixels": pixels, "state": at.unsqueeze(-1).float().contiguous()}

    after = torch.where(done.squeeze(-1), time + 100, time + 1)
    following = {**observed(after), "done": done, "reward": done.float()}
    env = (number % 3).contiguous()
    found = TensorDict({**observed(time), "env": env, "next": following}, [count, *lanes])
    return found.transpose(0, 1).contiguous() if lanes else found


def fill(buffer: ReplayBuffer, kind: str) -> ReplayBuffer:
    """Write more rows than there are slots, and edit some."""
    for first in range(0, 28, 7):
        buffer.extend(rows(kind, first, 7))
    if kind != "lanes":
        values = rows(kind, 500, 2)["pixels"]
        buffer.storage.edit_columns({("pixels",): values}, torch.tensor([3, 11]))
    return buffer


def dense(kind: str) -> ReplayBuffer:
    """The same rows, each stored in full."""
    size = SLOTS * (2 if kind == "lanes" else 1)
    return fill(ReplayBuffer(storage=LazyTensorStorage(size, **KINDS[kind])), kind)


def make(folder: Path) -> None:
    for kind, options in KINDS.items():
        size = SLOTS * (2 if kind == "lanes" else 1)
        storage = LazyTensorStorage(size, dedup_next=True, **options)
        fill(ReplayBuffer(storage=storage), kind).dumps(folder / kind)
        where = folder / f"recovered-{kind}"
        mapped = LazyMemmapStorage(
            size, scratch_dir=where, dedup_next=True, recover=True, **options
        )
        fill(ReplayBuffer(storage=mapped), kind)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
