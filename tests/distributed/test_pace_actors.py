"""A rate limiter over actors of a real Ray: clients in other processes, some of which die."""

from __future__ import annotations

import os
import pickle
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from replaykit import LazyTensorStorage, RateLimiter, ShardedReplayBuffer
from replaykit.errors import RateLimiterTimeout
from replaykit.pace import INSERT, SAMPLE
from replaykit.sharding import ShardLossWarning
from tests.ray_cluster import RAY_MARKS

pytestmark = RAY_MARKS


def write(client: Any, batches: int) -> int:
    for _ in range(batches):
        client.extend(torch.zeros(3), timeout=100)
    return 3 * batches


def die(client: Any, side: int, count: int) -> None:
    """With a right that is not used, or while there is none."""
    client._tickets.keeper.admit(side, count, 100)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def rb(ray_cluster: Any) -> Iterator[ShardedReplayBuffer]:
    with ShardedReplayBuffer(
        num_shards=2,
        storage=lambda: LazyTensorStorage(400),
        rate_limiter=RateLimiter(2, 6, 12),
        batch_size=4,
        remote_config={"num_cpus": 0},
        on_loss=lambda loss: None,
    ) as made:
        yield made


@pytest.mark.programs
def test_clients_in_other_processes_keep_each_others_pace(
    rb: ShardedReplayBuffer, ray_cluster: Any
) -> None:
    """Of one pair of actors, since each takes seconds to start."""

    def counts() -> tuple[int, int]:
        stats = rb.stats()
        return stats["inserts"], stats["samples"]

    task = ray_cluster.remote(num_cpus=0, max_retries=0)
    client = pickle.loads(pickle.dumps(rb.client()))
    with pytest.raises(RateLimiterTimeout, match="a sample of 4 rows waited"):
        rb.sample(timeout=0.1)
    writes = [task(write).remote(client, 12) for _ in range(2)]
    for _ in range(33):  # 144 - 132 is 12, below which no further sample of 4 would go on
        rb.sample(timeout=100)
        inserts, samples = counts()
        assert inserts <= 6 or inserts * 2 - samples <= 24
        assert inserts * 2 - samples >= 0
    assert ray_cluster.get(writes) == [36, 36]
    assert counts() == (len(rb), 132) == (72, 132)

    # diff is 12, with room for six rows: what the dead held does not stay theirs.
    dead = [task(die).remote(client, INSERT, 6), task(die).remote(client, SAMPLE, 12)]
    ray_cluster.wait(dead, num_returns=2, timeout=100)
    waits = task(die).remote(client, SAMPLE, 24)
    rb.extend(torch.zeros(6), timeout=100)
    assert counts() == (78, 132)
    rb.sample(12, timeout=100)
    with pytest.raises(RateLimiterTimeout):
        client.extend(torch.zeros(7), timeout=0)
    with pytest.raises(ValueError, match="at most 24 rows at once, got 30"):
        client.sample(30)
    assert client.add_async(torch.zeros(())).result(100) is not None
    assert counts() == (79, 144)
    ray_cluster.cancel(waits, force=True)

    state = rb.state_dict()
    assert state["pace"] == {"inserts": 79, "samples": 144}
    rb.empty(empty_write_count=False)
    assert (counts(), rb.can_sample()) == ((79, 144), False)
    rb.load_state_dict(state)
    assert counts() == (79, 144)
    until = time.monotonic() + 60
    while not rb.can_sample():  # once the rights of the dead have ended
        assert time.monotonic() < until
        time.sleep(0.05)

    ray_cluster.kill(rb._members.shards[0].actor, no_restart=True)  # type: ignore[attr-defined]
    with pytest.warns(ShardLossWarning, match="shard 0"):
        client.extend(torch.zeros(3), timeout=100)
    assert rb.stats()["restarts"] == 1
    assert counts()[0] == 82

    held = rb.client()
    held.extend(torch.zeros(2), timeout=100)
    with pytest.raises(RateLimiterTimeout):
        held.extend(torch.zeros(3), timeout=0)
    held.extend_async(torch.zeros(3))
    rb.close()
    with pytest.raises(RuntimeError, match="the shards have ended"):
        held.flush()
