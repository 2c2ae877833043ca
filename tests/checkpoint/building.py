"""Making, changing and comparing checkpoints."""

from __future__ import annotations

import copy
import json
import math
import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from replaykit import LazyTensorStorage, ReplayBuffer, RoundRobinWriter, SamplerWithoutReplacement
from replaykit.episodes.boundaries import RESTORED
from tests.checkpoint.values import plain


def make(filled: int = 0, *, capacity: int = 8, seed: int = 0, start: int = 0) -> ReplayBuffer:
    """Make a buffer with everything that has state."""
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(capacity),
        sampler=SamplerWithoutReplacement(),
        writer=RoundRobinWriter(track_generations=True),
        generator=torch.Generator().manual_seed(seed),
        batch_size=2,
    )
    if filled:
        ids = torch.arange(start, start + filled)
        buffer.extend(TensorDict({"id": ids, "next": {"x": ids[:, None].float()}}, [filled]))
    return buffer


def save(folder: Path) -> None:
    """Save a buffer that has wrapped and been drawn from."""
    buffer = make(11)
    buffer.sample()
    buffer.dumps(folder)


def overwrite(folder: Path, *entry: str, value: bytes, at: int = 0) -> None:
    """Write into a tensor of a part of a checkpoint, and leave its checksum as it was."""
    manifest = json.loads((folder / "manifest.json").read_text())
    found = manifest["parts"]
    for key in entry:
        found = found[key]
    file, offset, _ = manifest["tensors"][found["name"]]["pieces"][0]
    with open(folder / file, "r+b") as opened:
        opened.seek(offset + at)
        opened.write(value)


def flipped(content: bytes, every: int) -> list[bytes]:
    """Return copies with a bit changed, one for every so many bytes."""
    found = []
    for at in range(0, len(content), every):
        copy_ = bytearray(content)
        copy_[at] ^= 1 << (at % 8)
        found.append(bytes(copy_))
    return found


def state_of(buffer: ReplayBuffer) -> Any:
    """Return everything that can be seen of a buffer of `make`, as plain values that compare."""
    return copy.deepcopy(plain({**buffer.state_dict(), "capacity": buffer.storage.max_size}))


def restarted(state: Any) -> Any:
    """Return a state after a restart: the open episode ends at its newest row, no more."""
    state = copy.deepcopy(state)
    newest = state["_writer"]["_ledger"]["next_position"] - 1
    assert state["_writer"]["_episodes"]["marks"] == []
    state["_writer"]["_episodes"] |= {"marks": [newest], "codes": [RESTORED]}
    return state


def equal(a: TensorDict, b: TensorDict) -> bool:
    """Return whether two TensorDicts have the same keys and values."""
    keys = set(a.keys(True, True))
    return keys == set(b.keys(True, True)) and all(torch.equal(a[key], b[key]) for key in keys)


def opened_both_ways(
    make: Callable[[], ReplayBuffer], folder: Path
) -> tuple[ReplayBuffer, ReplayBuffer]:
    """Return a buffer that has a checkpoint opened in place, and one with a copy of it."""
    mapped, plain = make(), make()
    mapped.loads(folder, mmap=True)
    plain.loads(folder)
    return mapped, plain


def grown(
    folder: Path, lengths: Collection[int], capacity: int, piece: int
) -> Callable[[dict[str, Any]], None]:
    """Return a change for `forge` that gives all tables of these lengths ``capacity`` rows.

    The rows are zero, in files of holes of ``piece`` rows each, but for priorities, which are one.
    """

    def change(manifest: dict[str, Any]) -> None:
        parts = manifest["parts"]
        priorities = parts["sampler"].get("_priorities", {"name": None})["name"]
        for name, record in manifest["tensors"].items():
            if not record["shape"] or record["shape"][0] not in lengths:
                continue
            record["shape"][0] = capacity
            width = np.dtype(record["dtype"]).itemsize * math.prod(record["shape"][1:])
            record["pieces"] = []
            for first in range(0, capacity, piece):
                count = min(piece, capacity - first)
                file = f"data-{manifest['save']}-{len(manifest['files']):05d}.bin"
                with open(folder / file, "wb") as opened:
                    os.truncate(opened.fileno(), count * width)
                    if name == priorities:
                        opened.write(np.ones(count, record["dtype"]).tobytes())
                manifest["files"][file] = {"size": count * width, "crc32": 0}
                record["pieces"].append([file, 0, count])
        parts["writer"]["_ledger"] |= {
            "slots": capacity, "length": capacity, "next_position": capacity, "cursor": 0,
        }  # fmt: skip
        parts["writer"]["_cursor"] = 0
        parts["storage"]["rows"] = capacity

    return change
