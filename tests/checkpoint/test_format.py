"""What earlier versions of the package wrote is still read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from replaykit import LazyMemmapStorage, LazyTensorStorage, PrioritizedSampler, ReplayBuffer
from replaykit.checkpoint import FORMAT_VERSION, checkpoint_versions

FIXTURES = Path(__file__).parent / "fixtures"


def new(storage: Any) -> ReplayBuffer:
    sampler = PrioritizedSampler(alpha=0.7, beta=0.5)
    return ReplayBuffer(storage=storage, sampler=sampler, batch_size=4)


def check(buffer: ReplayBuffer, newest: int) -> None:
    slots = torch.arange(12)
    number = newest - (newest - slots) % 12  # slot and number of a row are equal modulo 12
    rows = buffer.storage.read(slots)
    assert torch.equal(rows["id"], number)
    assert torch.equal(rows["image"], number.to(torch.uint8)[:, None, None].expand(12, 4, 4))
    assert torch.equal(rows["next", "x"], number[:, None] + 0.5)
    assert torch.equal(rows["next", "done"], (number % 5 == 4)[:, None])


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
def test_format_version_1_is_read(storage: Any):
    """Two checkpoints of a ring of 12 rows, of which the newer names chunks of the older again."""
    folder = FIXTURES / "version-1"
    assert checkpoint_versions(folder) == [1, 2]
    files = [json.loads((folder / n).read_text()) for n in ("manifest-1.json", "manifest.json")]
    assert [manifest["format_version"] for manifest in files] == [1, 1]
    assert set(files[0]["files"]) & set(files[1]["files"])

    older = new(storage(12))
    older.loads(folder, version=1)
    check(older, 14)
    assert older.sampler.state_dict()["_priorities"].tolist() == [*range(1, 13)]

    newer = new(storage(12))
    newer.loads(folder)
    check(newer, 16)
    expected = [1, 2, 3, 12, 9, 6, 7, 0.25, 9, 10, 11, 12]
    assert newer.sampler.state_dict()["_priorities"].tolist() == expected
    assert (newer.write_count, len(newer)) == (17, 12)
    episodes = [episode.index.tolist() for episode in newer.episodes]
    assert episodes == [[5, 6, 7, 8, 9], [10, 11, 0, 1, 2], [3, 4]]
    assert newer.sample()["index"].tolist() == [11, 9, 6, 11]  # the generator's next draw


def test_there_is_a_fixture_of_every_version():
    assert {path.name for path in FIXTURES.glob("version-*")} == {
        f"version-{number}" for number in range(1, FORMAT_VERSION + 1)
    }
