"""Ten minutes of writers, samplers and deaths. ``REPLAYKIT_SOAK_MINUTES`` says how many else."""

from __future__ import annotations

import contextlib
import os
import resource
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import LazyTensorStorage, PrioritizedSampler, ShardedReplayBuffer, ShardLoss

MINUTES = float(os.environ.get("REPLAYKIT_SOAK_MINUTES", "10"))
ROWS, WRITERS, SAMPLERS, SHARDS = 20, 4, 2, 3
CAPACITY = int(60_000 + 40_000 * MINUTES)

pytestmark = [
    pytest.mark.long,
    pytest.mark.xdist_group("ray"),
    pytest.mark.timeout(60 * MINUTES + 300),
]


def ignore(loss: ShardLoss) -> None:
    """The buffer counts it too."""


def write(client: Any, writer: int, until: float) -> list[int]:
    """Writes numbered rows; returns the numbers of those that were acknowledged."""
    done, number = [], writer
    while time.time() < until:
        numbers = torch.arange(ROWS) * WRITERS + number
        client.extend(TensorDict({"x": numbers, "wide": torch.zeros(ROWS, 50)}, [ROWS]))
        done += numbers.tolist()
        number += ROWS * WRITERS
        time.sleep(0.02)
    client.stats()
    return done


def sample(client: Any, until: float) -> tuple[int, float]:
    """Samples and updates; returns how often, and the longest time that a sample took."""
    count, longest = 0, 0.0
    while time.time() < until:
        start = time.perf_counter()
        batch = client.sample(128)
        longest = max(longest, time.perf_counter() - start)
        assert (batch["wide"] == 0).all()
        batch["td_error"] = torch.rand(128)
        client.update_tensordict_priority(batch)
        count += 1
        time.sleep(0.01)
    client.stats()
    return count, longest


def memory_of(process: str) -> int:
    """Bytes of a process that are its own."""
    _, resident, shared, *_ = Path(f"/proc/{process}/statm").read_text().split()
    return (int(resident) - int(shared)) * resource.getpagesize()


def shards_memory() -> list[int]:
    """Bytes of every process that holds a shard."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            if b"ray::Host" in (folder / "cmdline").read_bytes():
                found.append(memory_of(folder.name))
    return found


def test_only_reported_rows_are_lost(ray_cluster: Any, tmp_path: Path) -> None:
    ray, losses = ray_cluster, []

    def told(loss: ShardLoss) -> None:
        losses.append(loss)

    rb = ShardedReplayBuffer(
        num_shards=SHARDS,
        storage=lambda: LazyTensorStorage(CAPACITY),
        sampler=lambda: PrioritizedSampler(alpha=0.6, beta=0.4),
        checkpoint_dir=tmp_path,
        checkpoint_interval=min(5.0, 6 * MINUTES),
        on_loss=told,
        remote_config={"num_cpus": 0},
        timeout=240,
    )
    try:
        # All memory is touched once, so that what grows afterwards is no storage.
        for _ in range(10):
            count = SHARDS * CAPACITY // 10
            rb.extend(
                TensorDict(
                    {"x": torch.zeros(count).long(), "wide": torch.zeros(count, 50)}, [count]
                )
            )
        rb.empty()
        rb.extend(TensorDict({"x": torch.tensor([-1]), "wide": torch.zeros(1, 50)}, [1]))
        rb.update_priority(torch.tensor([0]), 1.0)
        before = memory_of("self")
        at_most = max(shards_memory())
        until = time.time() + 60 * MINUTES
        writers = [
            ray.remote(num_cpus=0)(write).remote(rb.client(on_loss=ignore), number, until)
            for number in range(WRITERS)
        ]
        samplers = [
            ray.remote(num_cpus=0)(sample).remote(rb.client(on_loss=ignore), until)
            for _ in range(SAMPLERS)
        ]
        kills, pause = 0, min(60.0, max(20.0, 10 * MINUTES))
        largest = 0
        while time.time() < until - pause:
            time.sleep(pause)
            shard = kills % SHARDS
            rb._members.wait_for([shard], time.monotonic() + 240)
            rb.sample(16)
            ray.kill(rb._members.shards[shard].actor)
            kills += 1
            largest = max([largest, *shards_memory()])
        # Before a million numbers are compared here, which take more than all else.
        grown = memory_of("self") - before
        committed = {number for done in ray.get(writers) for number in done}
        sampled = ray.get(samplers)
        while rb.stats()["shards"].count(None):
            time.sleep(0.1)
        stored = rb[:]["x"].tolist()
        kept = set(stored) - {-1}
        assert len(kept) == len(stored) - stored.count(-1)  # no row twice
        assert kept <= committed
        stats = rb.stats()
        lost = len(committed - kept) + (-1 not in stored)
        # A part that was under way when its shard died is counted, and written again.
        assert lost <= stats["rows_lost"] <= lost + kills * WRITERS * ROWS
        assert stats["restarts"] == kills == len(losses)
        assert kills >= (8 if MINUTES >= 10 else 2)
        assert all(count > 10 * MINUTES for count, _ in sampled)
        assert all(longest < 60 for _, longest in sampled)
        assert grown < 100 * 2**20
        assert largest < 1.25 * at_most + 100 * 2**20
    finally:
        rb.close()
