"""Damage of every file of the checkpoint of every kind of buffer: named, and nothing changes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    ConsumingSampler,
    LaneWriter,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    NStep,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    SliceSamplerWithoutReplacement,
    StalenessAwareSampler,
    Storage,
    TensorDictMaxValueWriter,
    TensorStorage,
)
from replaykit.errors import CheckpointError
from tests.checkpoint.building import flipped
from tests.checkpoint.values import plain

SLOTS = 24


def rows(first: int, count: int) -> TensorDict:
    number = torch.arange(first, first + count)
    x = number[:, None].float()
    following = {"x": x + 1, "done": (number % 5 == 4)[:, None], "reward": x / 3}
    leaves = {"number": number, "env": number % 3, "age": -number, "x": x, "next": following}
    return TensorDict(leaves, [count])


def buffer(storage: Storage, **options: Any) -> ReplayBuffer:
    generator = torch.Generator().manual_seed(0)
    return ReplayBuffer(storage=storage, batch_size=4, generator=generator, **options)


def stored(**options: Any) -> LazyTensorStorage:
    return LazyTensorStorage(SLOTS, **options)


def members() -> ReplayBufferEnsemble:
    one = buffer(stored(), sampler=PrioritizedSampler(alpha=0.7, beta=0.5))
    inner = ReplayBufferEnsemble(buffer(ListStorage(SLOTS)))
    return ReplayBufferEnsemble(one, inner, batch_size=4, generator=torch.Generator())


KINDS: dict[str, Callable[[], Any]] = {
    "list": lambda: buffer(ListStorage(SLOTS)),
    "lazy stack": lambda: buffer(LazyStackStorage(SLOTS)),
    "wrapped": lambda: buffer(TensorStorage(rows(900, SLOTS))),
    "in files": lambda: buffer(LazyMemmapStorage(SLOTS), sampler=SamplerWithoutReplacement()),
    "streams": lambda: buffer(stored(lane_key="env")),
    "rings": lambda: buffer(stored(lane_key="env"), writer=LaneWriter(length=8)),
    "stored once": lambda: buffer(stored(dedup_next=True, on_mismatch="dense")),
    "best": lambda: buffer(stored(), writer=TensorDictMaxValueWriter(rank_key="x")),
    "prioritized slices": lambda: buffer(
        stored(), sampler=PrioritizedSliceSampler(alpha=0.7, beta=0.5, slice_len=2)
    ),
    "episodes": lambda: buffer(stored(), sampler=SliceSamplerWithoutReplacement(slice_len=2)),
    "consuming": lambda: buffer(stored(), sampler=ConsumingSampler(3)),
    "staleness": lambda: buffer(stored(), sampler=StalenessAwareSampler(version_key="age")),
    "held back": lambda: buffer(stored(), transform=NStep(3, 0.5, when="write")),
    "made ahead": lambda: buffer(stored(), prefetch=2),
    "shared": lambda: buffer(
        stored(), sampler=PrioritizedSampler(alpha=0.7, beta=0.5), shared=True
    ),
    "ensemble": members,
}


def fill(found: Any, first: int, count: int) -> None:
    if isinstance(found, ReplayBufferEnsemble):
        for member in found.members:
            fill(member, first, count)
        return
    for start in range(first, first + count, 9):
        found.extend(rows(start, min(9, first + count - start)))


@pytest.mark.pitfall("CK2")
@pytest.mark.parametrize("kind", KINDS)
def test_load_names_the_damaged_file_of_every_kind_of_buffer(kind: str, tmp_path: Path) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    source, live = KINDS[kind](), KINDS[kind]()
    fill(source, 0, 31)
    source.sample()
    source.dumps(good)
    fill(live, 400, 7)
    before = plain(live.state_dict())
    files = {file.name: file.read_bytes() for file in good.iterdir() if file.name != ".lock"}
    assert len(files) >= 2
    for name, content in files.items():
        damages: list[bytes | None] = [None, b"", content[: len(content) // 2], content[:-1]]
        damages += [content + b"\0", *flipped(content, max(1, len(content) // 12))]
        for damage in damages:
            shutil.rmtree(bad, ignore_errors=True)
            shutil.copytree(good, bad)
            (bad / name).unlink()
            if damage is not None:
                (bad / name).write_bytes(damage)
            gone = damage is None and name == "manifest.json"
            error, match = (FileNotFoundError, "bad") if gone else (CheckpointError, name)
            with pytest.raises(error, match=match):
                live.loads(bad)
        assert plain(live.state_dict()) == before
    live.loads(good)
    assert plain(live.sample().to_dict()) == plain(source.sample().to_dict())
    for one in (source, live):
        one.shutdown()
