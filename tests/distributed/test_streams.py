"""``flush`` and ``cut`` over shards: as of one big buffer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from replaykit import LazyTensorStorage, NStep, ReplayBuffer, SliceSampler
from tests.distributed.laws import episodes
from tests.distributed.test_shard_saves import steps, windows


def held_back() -> Any:
    return NStep(3, gamma=1.0, when="write")


def stored(buffer: Any, index: Any) -> list[tuple[int, float]]:
    rows = buffer[index]
    pairs = zip(rows["x"].tolist(), rows["next", "reward"][:, 0].tolist(), strict=True)
    return sorted(pairs)


def test_flush_stores_held_back_rows_as_in_one_buffer(sharded: Any, single: Any) -> None:
    rb = sharded(3, transform_factory=held_back, shard_key="episode")
    one = single(None, transform=held_back())
    rows = episodes([4, 6, 5, 7])
    rows["next", "reward"] = rows["x"][:, None].float()
    rows["next", "done"][:] = False
    for buffer in (rb, one):
        for first in (0, 11):  # episodes that go on with the next batch
            buffer.extend(rows[first : first + 11])
    before = {x for x, _ in stored(rb, slice(None))}
    index = rb.flush()
    one.flush()
    assert stored(rb, slice(None)) == stored(one, slice(None))
    assert {x for x, _ in stored(rb, index)} == set(range(22)) - before > {20, 21}
    assert rb.flush().tolist() == []
    assert rb.stats()["write_count"] == 22


def lanes(storage_rows: int = 400) -> LazyTensorStorage:
    return LazyTensorStorage(storage_rows, lane_key="k")


def pair(sharded: Any, count: int) -> tuple[Any, Any]:
    """Shards and one buffer with the same streams, three steps each."""
    rb = sharded(count, storage=lanes, sampler=lambda: SliceSampler(slice_len=2), shard_key="k")
    one = ReplayBuffer(
        storage=lanes(), sampler=SliceSampler(slice_len=2), generator=torch.Generator()
    )
    return rb, one


def write(buffers: Any, first: int) -> None:
    for step in range(first, first + 3):
        for buffer in buffers:
            buffer.extend(steps(list(range(5)), [100 * stream + step for stream in range(5)]))


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("lane", [None, 3, [0, 2], torch.tensor([4])])
def test_streams_are_cut_as_in_one_buffer(sharded: Any, shards: int, lane: Any) -> None:
    both = pair(sharded, shards)
    for buffer in both:
        buffer.cut(lane)  # nothing is stored: nothing happens
    write(both, 0)
    for buffer in both:
        buffer.cut(lane)
    write(both, 3)
    severed = range(5) if lane is None else torch.as_tensor(lane).reshape(-1).tolist()
    expected = {(100 * s + t, 100 * s + t + 1) for s in range(5) for t in range(5)}
    expected -= {(100 * stream + 2, 100 * stream + 3) for stream in severed}
    assert windows(both[0]) == windows(both[1]) == expected


def test_an_unknown_stream_is_refused_before_any_is_cut(sharded: Any) -> None:
    rb, one = pair(sharded, 3)
    write((rb, one), 0)
    for buffer in (rb, one):
        with pytest.raises(IndexError, match="stored rows, got"):
            buffer.cut([1, 77])
    write((rb,), 3)
    assert (102, 103) in windows(rb)
    plain = sharded(2)
    plain.extend(torch.arange(4))
    with pytest.raises(IndexError, match=r"lanes in \[0, 1\)"):
        plain.cut(1)
    plain.cut(0)


def test_a_cut_waits_for_a_shard_that_has_died(sharded: Any, tmp_path: Path) -> None:
    """Its streams are in its checkpoint: they are not unknown."""
    rb = sharded(
        2,
        storage=lanes,
        sampler=lambda: SliceSampler(slice_len=2),
        shard_key="k",
        checkpoint_dir=tmp_path,
        checkpoint_interval=0,
        on_loss=print,
    )
    write((rb,), 0)
    for shard in (0, 1):
        rb._members.shards[shard].kill()
        rb._members.died(shard, 0)
        rb.cut(list(range(5)))
    write((rb,), 3)
    assert not {(100 * stream + 2, 100 * stream + 3) for stream in range(5)} & windows(rb)
    assert len(windows(rb)) == 20
