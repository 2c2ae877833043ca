"""Where streams were severed in saved shards, in another number of shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import LaneWriter, LazyTensorStorage, SliceSampler
from replaykit.distributed.routing import ByKey


def steps(keys: list[int], x: list[int]) -> TensorDict:
    """A row for each key, of episodes that do not end."""
    done = torch.zeros(len(keys), 1, dtype=torch.bool)
    return TensorDict(
        {"k": torch.tensor(keys), "x": torch.tensor(x), "next": {"done": done}}, [len(keys)]
    )


def windows(rb: Any) -> set[tuple[int, ...]]:
    """All windows of two rows, by as many draws as never miss one of 30."""
    return {tuple(pair) for pair in rb.sample(2000)["x"].reshape(-1, 2).tolist()}


def sever(rb: Any, stream: int | None = None) -> None:
    """Severs a stream, or all, in the shards that have rows of it."""
    for shard in rb._members.shards:
        buffer = shard.holder.buffer
        if stream is None or stream in buffer[:]["k"].tolist():
            buffer.cut(stream)


def test_cut_remains_after_its_row_moves_to_another_shard(sharded: Any, tmp_path: Path) -> None:
    """What was severed with it stays severed, although its neighbour is gone."""

    def make(count: int) -> Any:
        return sharded(count, sampler=lambda: SliceSampler(slice_len=2, traj_key=()), shard_key="k")

    home = ByKey(2, "k").route({("k",): torch.arange(50)}, 50, []).tolist()
    here, elsewhere = home.index(0), home.index(1)
    rb = make(1)
    rb.extend(steps([here, here, elsewhere], [0, 1, 100]))
    sever(rb)
    rb.extend(steps([here, here], [2, 3]))
    rb.dumps(tmp_path)
    other = make(2)
    other.loads(tmp_path)
    assert windows(other) == {(0, 1), (2, 3)}


@pytest.mark.parametrize("shards", [1, 3])
def test_a_stream_is_severed_alone(sharded: Any, tmp_path: Path, shards: int) -> None:
    """Those that it came interleaved with go on: all windows are there, and no others."""

    def make(count: int) -> Any:
        return sharded(
            count,
            storage=lambda: LazyTensorStorage(400, lane_key="k"),
            writer=lambda: LaneWriter(40),
            sampler=lambda: SliceSampler(slice_len=2),
            shard_key="k",
        )

    rb, streams = make(2), list(range(6))
    for step in range(6):
        if step == 3:
            sever(rb, 2)
        rb.extend(steps(streams, [100 * stream + step for stream in streams]))
    rb.dumps(tmp_path)
    other = make(shards)
    other.loads(tmp_path)
    expected = {(100 * s + t, 100 * s + t + 1) for s in streams for t in range(5)} - {(202, 203)}
    assert windows(rb) == windows(other) == expected
