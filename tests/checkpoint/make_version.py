"""Makes the fixture of the format version that is written now: ``make_version.py FOLDER``."""

from __future__ import annotations

import sys
from unittest.mock import patch

import torch
from tensordict import TensorDict

from replaykit import LazyTensorStorage, PrioritizedSampler, ReplayBuffer
from replaykit.checkpoint import dirty_chunks


def rows(start: int, count: int) -> TensorDict:
    number = torch.arange(start, start + count)
    small = number.to(torch.uint8)
    done = (number % 5 == 4)[:, None]
    following = {"x": number[:, None] + 0.5, "done": done, "terminated": done.clone()}
    return TensorDict(
        {
            "id": number,
            "image": small[:, None, None].expand(count, 4, 4),
            "wide": small[:, None].expand(count, 600),
            "next": following,
        },
        [count],
    )


def make(folder: str) -> None:
    # Chunks of few rows, so that the second save names some of the first again.
    with patch.object(dirty_chunks, "_LEAST_BYTES", 1):
        buffer = ReplayBuffer(
            storage=LazyTensorStorage(12),
            sampler=PrioritizedSampler(alpha=0.7, beta=0.5),
            batch_size=4,
            generator=torch.Generator().manual_seed(0),
        )
        buffer.extend(rows(0, 15))
        buffer.update_priority(torch.arange(12), torch.arange(1.0, 13.0))
        buffer.dumps(folder, keep=2)
        buffer.extend(rows(15, 2))
        buffer.update_priority(torch.tensor([4, 7]), torch.tensor([9.0, 0.25]))
        buffer.dumps(folder, keep=2)


if __name__ == "__main__":
    make(sys.argv[1])
