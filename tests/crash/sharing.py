"""Processes that write and read one shared buffer, and are killed while they do."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from replaykit import (
    LaneWriter,
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    ReturnToGo,
)
from tests.crash.recovering import kill_at

WIDE = 3000
GAMMA = 0.5
_SALT = 2654435761


def new_buffer(
    slots: int,
    folder: Path | None = None,
    *,
    prioritized: bool = True,
    recover: bool = False,
    dedup: bool = False,
    length: int = 0,
) -> ReplayBuffer:
    """A shared buffer in memory or in a folder.

    Args:
        dedup: whether observations are stored once.
        length: rows of the stream of each writer, with returns; 0 for one ring without returns.
    """
    options: dict[str, Any] = {"lane_key": "writer" if length else None}
    if dedup:
        options |= {"dedup_next": ["seen"], "on_mismatch": "dense"}
    return ReplayBuffer(
        storage=LazyTensorStorage(slots, **options)
        if folder is None
        else LazyMemmapStorage(slots, scratch_dir=folder, recover=recover, **options),
        shared=True,
        **_parts(length, prioritized=prioritized),
    )


def _parts(length: int, *, prioritized: bool = True) -> dict[str, Any]:
    return {
        "sampler": PrioritizedSampler(alpha=0.7, beta=0.5) if prioritized else RandomSampler(),
        "writer": LaneWriter(length) if length else None,
        "transform": ReturnToGo(GAMMA) if length else None,
        "batch_size": 16,
    }


def joined(folder: Path, length: int = 0) -> ReplayBuffer:
    """Join a prioritized buffer of `new_buffer` by its path."""
    return ReplayBuffer.join(folder, **_parts(length))


def rows(writer: int, batch: int, first: int, count: int) -> TensorDict:
    """Rows ``first ..`` of a writer, of its extend number ``batch``; a column of each follows from
    all others."""
    number = torch.arange(first, first + count)
    noise = (number * 7919 + writer * 104729) % 251
    found = TensorDict(
        {
            "writer": torch.full((count,), writer),
            "batch": torch.full((count,), batch),
            "size": torch.full((count,), count),
            "number": number,
            "wide": noise[:, None].expand(count, WIDE).to(torch.uint8).contiguous(),
            "seen": seen(writer, number),
            "next": {
                "done": number % 5 == 4,
                "reward": (number % 7).float(),
                "seen": seen(writer, number + 1),
            },
        },
        [count],
    )
    found["check"] = check_of(found)
    return found


def seen(writer: int, number: torch.Tensor) -> torch.Tensor:
    """Observations, of which each is the next one of the row before."""
    return (number * 8 + writer)[:, None].expand(len(number), 20).contiguous()


def check_of(found: TensorDict) -> torch.Tensor:
    """What stands in the column that follows from the others."""
    mixed = found["writer"] * 31 + found["batch"] * 17 + found["size"] * 7 + found["number"]
    mixed = mixed + found["seen"].sum(-1) * 5 + found["next", "seen"].sum(-1) * 11
    mixed = (
        mixed + found["wide"].long().sum(-1) * 3 + found["next", "done"].long().reshape(mixed.shape)
    )
    return (mixed * _SALT) % (1 << 40)


def assert_whole(found: TensorDict) -> None:
    """No row is made of two."""
    wrong = (found["check"] != check_of(found)) | (found["wide"] != found["wide"][:, :1]).any(-1)
    assert not wrong.any(), [found[key][wrong].tolist() for key in ("writer", "batch", "number")]


def assert_returns(found: TensorDict) -> None:
    """The stored rows of a writer, in order: those of whole episodes have returns, no others."""
    last = int(found["number"][-1])
    wanted = []
    for number in found["number"].tolist():
        end = number - number % 5 + 4
        rewards = [step % 7 for step in range(number, end + 1)]
        total = sum(GAMMA**n * reward for n, reward in enumerate(rewards))
        wanted.append((total, True) if end <= last else (0.0, False))
    stored = [found[key].flatten().tolist() for key in ("episode_return", "return_valid")]
    assert [*zip(*stored, strict=True)] == wanted


def size_of(writer: int, batch: int) -> int:
    """Rows of an extend."""
    return 1 + (writer * 5 + batch * 3) % 9


def extends(
    buffer: ReplayBuffer | Path,
    writer: int,
    batches: range,
    said: Any = None,
    die_at: int = 0,
    length: int = 0,
) -> None:
    """Extends by as many batches, and says after each which one it was.

    Args:
        buffer: the buffer, or the folder by which to join it.
        die_at: the call of a function of the package at which it is killed; 0: none.
        length: as for `new_buffer`, to join a folder.
    """
    torch.set_num_threads(1)
    if isinstance(buffer, Path):
        buffer = joined(buffer, length)
    first = sum(size_of(writer, batch) for batch in range(batches.start))
    if said is not None:
        said.send("ready")
    kill_at(die_at)
    for batch in batches:
        size = size_of(writer, batch)
        index = buffer.extend(rows(writer, batch, first, size))
        first += size
        if batch % 3 == 1 and buffer.sampler.prioritized:
            buffer.update_priority(index[:1], torch.tensor([1.0 + batch % 4]))
        if said is not None:
            said.send(batch)
    sys.setprofile(None)


def samples(buffer: ReplayBuffer, until: Any, said: Any) -> None:
    """Samples until it is told to stop; says how often it did, or what it found wrong."""
    torch.set_num_threads(1)
    count = 0
    try:
        while not until.is_set():
            if len(buffer):
                assert_whole(buffer.sample())
                count += 1
            else:
                time.sleep(0.002)
    except BaseException as error:
        said.send(f"{type(error).__name__}: {error}")
        raise
    said.send(count)
