"""Rows of which parts are moved one by one, without the interpreter lock: still one row each."""

from __future__ import annotations

import random
import time

import pytest
import torch
from tensordict import TensorDict

from replaykit import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer
from tests import effort
from tests.buffer.building import in_threads

STORAGES = {"tensor": LazyTensorStorage, "memmap": LazyMemmapStorage}
SLOTS = 37


@pytest.mark.pitfall("TH2")
@pytest.mark.parametrize("kind", ["tensor", "memmap"])
@pytest.mark.parametrize("contiguous", [True, False])
def test_concurrent_reads_never_mix_leaves_of_two_rows(kind: str, contiguous: bool):
    """Two threads write round the end of the ring, three read, with threads of the core's own.

    Small leaves go with their record and wide ones alone, from the caller's memory, and without
    the interpreter lock: only the storage's own lock keeps them together.
    """
    buffer = ReplayBuffer(storage=STORAGES[kind](SLOTS), batch_size=90, contiguous=contiguous)
    dtypes = {"a": torch.int64, "b": torch.float64, "c": torch.int32, "d": torch.float16}

    def rows(count: int, number: int) -> TensorDict:
        small = {key: torch.full((count, 3), number, dtype=t) for key, t in dtypes.items()}
        wide = torch.full((count, 6000), number, dtype=torch.int32)
        pixels = torch.full((count, 9, 60), number % 128, dtype=torch.uint8)
        return TensorDict({**small, "wide": wide, "next": {"p": pixels, "r": wide[:, :1]}}, [count])

    def whole(data: TensorDict) -> None:
        number = data["a"][:, :1]
        for key, leaf in data.items(True, True):
            if key == ("next", "p"):
                assert (leaf.flatten(1) == number % 128).all()
            elif key != "index":
                assert (leaf == number).all(), key

    buffer.extend(rows(SLOTS, 0))
    end = time.monotonic() + effort.seconds(1.5)
    written, read_ = [0, 0], [0, 0, 0]

    def write(which: int) -> None:
        chance = random.Random(which)
        while time.monotonic() < end or written[which] <= 5:
            number = 2 * chance.randrange(500) + which
            if chance.random() < 0.3:
                buffer.add(rows(1, number)[0])
            else:
                data = rows(chance.randrange(1, 60), number)
                if chance.random() < 0.3:  # not in one piece: taken apart, and brought into it
                    data["a"] = torch.stack([data["a"]] * 2, -1)[..., 0]
                buffer.extend(data)
            written[which] += 1

    def read(which: int) -> None:
        while time.monotonic() < end or read_[which] <= 3:
            whole(buffer.sample())
            whole(buffer.storage.get(torch.arange(SLOTS).flip(0)))
            read_[which] += 1

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        in_threads(
            *[lambda w=w: write(w) for w in (0, 1)], *[lambda w=w: read(w) for w in range(3)]
        )
    finally:
        torch.set_num_threads(before)
    whole(buffer[:])
