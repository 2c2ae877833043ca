"""Handles that do not wait: asynchronous calls, writes together, batches asked for ahead."""

from __future__ import annotations

import asyncio
import gc
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from replaykit import (
    LazyMemmapStorage,
    LazyTensorStorage,
    RayReplayBuffer,
    RayReplayBufferClient,
    ReplayBuffer,
    SamplerWithoutReplacement,
)
from replaykit.distributed.write_queue import MOST_UNDER_WAY
from replaykit.errors import ActorLost
from tests.conftest import make_rows
from tests.ray_cluster import RAY_MARKS

pytestmark = RAY_MARKS


def messages(handle: RayReplayBufferClient, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The counts of every message of gathered writes that the handle sends from now on."""
    sent: list[list[int]] = []
    write = handle._write_queue._write

    def noted(counts: list[int], rows: Any) -> Any:
        sent.append(counts)
        return write(counts, rows)

    monkeypatch.setattr(handle._write_queue, "_write", noted)
    return sent


def test_asynchronous_calls_keep_their_order(rb: RayReplayBuffer, ray_cluster: Any) -> None:
    first = rb.extend_async(make_rows(0, 5))
    second = rb.add_async(make_rows(5, 1)[0])
    batch = rb.sample_async(30)
    info = rb.sample_async(3, return_info=True)
    assert len(rb) == 6  # it came after them
    assert set(batch.result()["id"].tolist()) == set(range(6))
    assert first.result(timeout=60).tolist() == [0, 1, 2, 3, 4]
    assert first.done()
    assert second.result() == 5
    assert info.result()[1]["index"].shape == (3,)
    assert ray_cluster.wait([rb.sample_async().ref], timeout=60)[0]


def test_results_are_awaited(rb: RayReplayBuffer) -> None:
    async def both() -> tuple[Any, Any, Any]:
        rows, batch = rb.extend_async(make_rows(0, 5)), rb.sample_async()
        bad = rb.extend_async(make_rows(0, 5).exclude("id"))
        with pytest.raises(ValueError, match="id"):
            await bad
        return await rows, await batch, await rb.client(write_rows=8).add(make_rows(9, 1)[0])

    rows, batch, place = asyncio.run(both())
    assert rows.tolist() == [0, 1, 2, 3, 4]
    assert batch.shape == (4,)
    assert place == 5
    rb.flush()  # the error has been told


def test_unread_error_is_raised_by_a_later_call(rb: RayReplayBuffer) -> None:
    rb.extend(make_rows(0, 2))
    rb.extend_async(make_rows(0, 5).exclude("id"))
    rb.extend_async(make_rows(2, 2))
    with pytest.raises(ValueError, match="id"):
        rb.flush()
    rb.flush()
    assert rb["id"].tolist() == [0, 1, 2, 3]
    for _ in range(MOST_UNDER_WAY + 3):
        rb.extend_async(make_rows(0, 1))
    assert len(rb) == 4 + MOST_UNDER_WAY + 3


def test_small_writes_go_together(rb: RayReplayBuffer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounded by rows; in order; flushed by whatever looks at the buffer."""
    handle = rb.client(write_rows=8, write_seconds=60)
    sent = messages(handle, monkeypatch)
    row = make_rows(0, 1)[0]
    results = []
    for _ in range(10):
        results.append(handle.add(row))
        row["id"] += 1  # the row was copied
        row["observation"] += 10.0
    results.append(handle.extend(make_rows(10, 3)))
    assert sent == [[0] * 8]
    assert len(handle) == 13
    assert sent == [[0] * 8, [0, 0, 3]]
    assert [result.result() for result in results[:10]] == list(range(10))
    assert results[10].result().tolist() == [10, 11, 12]
    large = handle.extend(make_rows(13, 20))
    handle.add(make_rows(33, 1)[0])
    assert handle.sample(100).shape == (100,)
    assert large.result().tolist() == list(range(13, 33))
    rows = rb[:]
    assert rows["id"].tolist() == list(range(34))
    assert torch.equal(rows["observation"][:, 0], rows["id"] * 10.0)


def test_small_writes_are_sent_after_a_short_wait(
    rb: RayReplayBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = rb.client(write_rows=1000, write_seconds=0.05)
    sent = messages(handle, monkeypatch)
    began = time.monotonic()
    handle.add(make_rows(0, 1)[0])
    assert not sent or time.monotonic() - began >= 0.05
    until = time.monotonic() + 60
    while not len(rb):  # another handle, that sends nothing of this one
        assert time.monotonic() < until
        time.sleep(0.01)
    assert sent == [[0]]
    result = handle.add(make_rows(1, 1)[0])
    assert result.result() == 1  # asking for it sends it


def test_one_bad_write_among_others_is_refused_alone(rb: RayReplayBuffer) -> None:
    rb.run(_prioritize)
    handle = rb.client(write_rows=8, write_seconds=60)
    results = [handle.add(make_rows(n, 1, td_error=torch.full((1,), e))[0]) for n, e in BAD]
    with pytest.raises(ValueError, match=r"priorit"):
        results[1].result()
    handle.flush()
    assert [results[0].result(), results[2].result()] == [0, 1]
    handle.add(make_rows(7, 1, td_error=torch.full((1,), -1.0))[0])
    with pytest.raises(ValueError, match=r"priorit"):
        handle.flush()
    assert rb["id"].tolist() == [0, 2]
    other = handle.add(make_rows(8, 1)[0])  # of another layout
    assert handle.add(make_rows(9, 1, td_error=torch.ones(1))[0]).result() == 2
    with pytest.raises(ValueError, match="td_error"):
        other.result()


BAD = [(0, 1.0), (1, -1.0), (2, 2.0)]


def _prioritize(buffer: Any) -> None:
    from replaykit import PrioritizedSampler

    buffer.set_sampler(PrioritizedSampler(alpha=1.0, beta=1.0))


def test_writes_changed_by_transforms_are_sent_singly(rb: RayReplayBuffer) -> None:
    rb.append_transform(lambda td: td.set("id", td["id"] + len(td)), invert=True)
    handle = rb.client(write_rows=8, write_seconds=60)
    handle.add(make_rows(0, 1)[0])
    handle.extend(make_rows(0, 3))
    handle.flush()
    assert rb.run(lambda buffer: buffer.storage[:]["id"].tolist()) == [1, 3, 4, 5]


@pytest.mark.pitfall("TH12")
def test_close_loses_nothing_and_leaves_ray_running(
    make: Any, tmp_path: Path, ray_cluster: Any
) -> None:
    """What this process has written is stored; whoever still has a handle is told."""

    def storage() -> LazyMemmapStorage:
        return LazyMemmapStorage(100, scratch_dir=tmp_path / "rows", recover=True)

    buffer = make(storage=storage)
    handle, other = buffer.client(write_rows=50, write_seconds=60), buffer.client(prefetch=2)
    for number in range(5):
        handle.add(make_rows(number, 1)[0])
    buffer.extend_async(make_rows(5, 5))
    assert buffer.is_alive
    buffer.close()
    buffer.shutdown()
    assert not buffer.is_alive
    assert ray_cluster.is_initialized()
    for call in (len, lambda b: b.sample(), lambda b: b.client(), lambda b: b.batch_size):
        with pytest.raises(RuntimeError, match="closed"):
            call(buffer)
    with pytest.raises(ActorLost):
        len(handle)
    with pytest.raises(RuntimeError, match="actor"):
        other.sample()
    until = time.monotonic() + 60
    while True:
        try:
            found = ReplayBuffer(storage=storage())
            break
        except RuntimeError as error:  # its process takes a moment to end
            if "in use by another process" not in str(error) or time.monotonic() > until:
                raise
            time.sleep(0.05)
    assert sorted(found["id"].tolist()) == list(range(10))


def test_batches_asked_for_ahead_are_those_that_would_have_come(rb: RayReplayBuffer) -> None:
    rb.extend(make_rows(0, 50))

    def drawn(handle: RayReplayBufferClient) -> list[int]:
        rb.set_rng(torch.Generator().manual_seed(5))
        return [number for _ in range(9) for number in handle.sample()["id"].tolist()]

    assert drawn(rb.client(prefetch=4)) == drawn(rb.client())
    assert rb.client(prefetch=4).sample(7).shape == (7,)


def test_prefetched_batches_are_drawn_in_advance(rb: RayReplayBuffer) -> None:
    rb.set_sampler(SamplerWithoutReplacement())
    rb.extend(make_rows(0, 40))
    handle = rb.client(prefetch=4)
    drawn = set(handle.sample()["id"].tolist())
    rb.flush()
    # Five of them are drawn, of which one was handed out.
    left = rb.run(lambda buffer: buffer.sample(20)["id"].tolist())
    for _ in range(4):
        drawn |= set(handle.sample()["id"].tolist())
    assert drawn.isdisjoint(left)
    assert len(drawn) == 20


def test_request_to_an_empty_buffer_is_sent_again(rb: RayReplayBuffer) -> None:
    handle = rb.client(prefetch=2)
    with pytest.raises(RuntimeError, match="empty"):
        handle.sample()
    rb.extend(make_rows(0, 10))
    assert handle.sample().shape == (4,)
    ahead = handle.sample_async()
    assert ahead.result().shape == (4,)
    handle.empty()
    rb.extend(make_rows(30, 3))
    assert int(handle.sample()["id"].min()) >= 30


def test_close_reports_errors_of_all_handles_even_deleted_ones(make: Any) -> None:
    buffer = make(storage=lambda: LazyTensorStorage(50))
    buffer.extend(make_rows(0, 2))
    handle = buffer.client(write_rows=8, write_seconds=60)
    handle.add(make_rows(2, 1)[0])
    handle.extend_async(make_rows(3, 2).exclude("id"))
    buffer.client().extend_async(make_rows(3, 2).exclude("observation"))
    gc.collect()
    buffer.extend_async(make_rows(3, 2).exclude("id"))
    with pytest.raises(ValueError, match=r"'id'.*2 more writes have failed.*'observation'"):
        buffer.close()
    assert not buffer.is_alive
    buffer.close()
