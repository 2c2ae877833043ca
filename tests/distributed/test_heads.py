"""What a checkpoint of shards says of itself, crafted, with a checksum that is right."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit.distributed.shard_config import ShardRecipe
from replaykit.distributed.shard_server import SavedShard
from replaykit.errors import CheckpointError


def numbered(first: int, count: int) -> TensorDict:
    return TensorDict({"x": torch.arange(first, first + count)}, [count])


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        ("save", "../../elsewhere"),
        ("num_shards", 3),
        ("rows", [4]),
        ("dealt", -1),
        ("generator", 3),
        ("layout", 3),
        ("layout", {"kind": "no such class", "children": []}),
        ("pace", {"inserted": -1}),
    ],
)
def test_a_crafted_head_is_refused_by_name_and_changes_nothing(
    entry: str, value: Any, sharded: Any, forge: Any, tmp_path: Path
):
    rb = sharded(2)
    rb.extend(numbered(0, 8))
    rb.dumps(tmp_path)

    def change(manifest: dict[str, Any]) -> None:
        assert entry in {*manifest["parts"]["sharded"], "pace"}
        manifest["parts"]["sharded"][entry] = value

    forge(tmp_path, change)
    other = sharded(2)
    other.extend(numbered(100, 6))
    before = other.generator.get_state()
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        other.loads(tmp_path)
    assert sorted(other[:]["x"].tolist()) == list(range(100, 106))
    assert torch.equal(other.generator.get_state(), before)
    other.extend(numbered(106, 2))


def test_shards_outside_of_the_directory_are_not_read(sharded: Any, forge: Any, tmp_path: Path):
    rb = sharded(2)
    rb.extend(numbered(0, 8))
    rb.dumps(tmp_path / "saved")
    (own,) = (tmp_path / "saved" / "shards").iterdir()
    own.rename(tmp_path / "outside")

    def change(manifest: dict[str, Any]) -> None:
        manifest["parts"]["sharded"]["save"] = "../../outside"

    forge(tmp_path / "saved", change)
    other = sharded(2)
    with pytest.raises(CheckpointError, match=r"save as .*, got '\.\./\.\./outside'"):
        other.loads(tmp_path / "saved")
    os.rename(tmp_path / "outside", own)


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        ("dealt", -1),
        ("dealt", 1.0),
        ("generator", torch.zeros(3, dtype=torch.uint8)),
        ("generator", 3),
        ("layout", {"kind": "no such class", "children": []}),
        ("shards", 5),
    ],
)
def test_invalid_state_is_refused_before_any_change(entry: str, value: Any, sharded: Any):
    rb = sharded(2)
    rb.extend(numbered(0, 8))
    other = sharded(2)
    other.extend(numbered(100, 6))
    with pytest.raises(ValueError, match=r"expected|loaded|class"):
        other.load_state_dict({**rb.state_dict(), entry: value})
    assert sorted(other[:]["x"].tolist()) == list(range(100, 106))


@pytest.mark.parametrize(
    "said",
    [
        None,
        {"before": 1.5, "writes": []},
        {"before": 0, "writes": [["client", 1, 1]]},
        {"before": 2**63, "writes": []},
        {"before": 0, "writes": [[1, 1, 1, None]]},
        {"before": 0},
    ],
)
def test_shard_with_invalid_checkpoint_starts_empty_and_reports_it(
    said: Any, forge: Any, recipe: Callable[..., ShardRecipe]
):
    shard = SavedShard(recipe(), 0)
    shard.buffer.extend(numbered(0, 3))
    shard.save_own()
    again = SavedShard(recipe(), 0, 1)
    assert again.buffer[:]["x"].tolist() == [0, 1, 2]

    def change(manifest: dict[str, Any]) -> None:
        if said is None:
            del manifest["sharding"]
        else:
            manifest["sharding"] = said

    forge(recipe().folder(0), change)
    with pytest.warns(UserWarning, match=r"shard 0 starts empty: .*manifest\.json"):
        empty = SavedShard(recipe(), 0, 1)
    assert len(empty.buffer) == 0
    for one in (shard, again, empty):
        one.close()
