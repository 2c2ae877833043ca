"""Batches that go together, behind a real Ray."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import pytest
import torch

from replaykit import LazyTensorStorage, RayReplayBuffer, SamplerWithoutReplacement
from tests.conftest import make_rows
from tests.ray_cluster import RAY_MARKS

pytestmark = RAY_MARKS


@pytest.mark.parametrize("prefetch", [4, 8])
def test_batches_sent_together_match_batches_sent_alone(rb: RayReplayBuffer, prefetch: int) -> None:
    """The same batches, in order; each one's reference is its own, to be waited for with others."""
    rb.extend(make_rows(0, 50))

    def drawn(handle: Any) -> list[int]:
        rb.set_rng(torch.Generator().manual_seed(5))
        return [number for _ in range(23) for number in handle.sample()["id"].tolist()]

    handle = rb.client(prefetch=prefetch)
    assert drawn(handle) == drawn(rb.client())
    assert f"sample_{prefetch // 2}" in {name for name, _ in handle._methods}
    results = [handle.sample_async() for _ in range(2 * prefetch)]
    refs = [result.ref for result in results]
    assert len(set(refs)) == 2 * prefetch
    assert wait_for(refs) == 2 * prefetch
    assert all(result.done() for result in results)


def wait_for(refs: list[Any]) -> int:
    import ray

    return len(ray.wait(refs, num_returns=len(refs), timeout=60)[0])


def test_cancelled_wait_loses_no_other_batch(rb: RayReplayBuffer) -> None:
    """All that is drawn can be had, each row once: an awaited one too that was given up."""
    rb.set_sampler(SamplerWithoutReplacement())
    rb.extend(make_rows(0, 48))
    handle = rb.client(prefetch=4)
    seen = [handle.sample()["id"] for _ in range(3)]

    async def some() -> list[torch.Tensor]:
        given_up, other = handle.sample_async(), handle.sample_async()

        async def awaited(result: Any) -> torch.Tensor:
            return (await result)["id"]

        task = asyncio.ensure_future(awaited(given_up))
        await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        return [await awaited(other), given_up.result()["id"]]

    seen += asyncio.run(some())
    seen += [handle.sample()["id"] for _ in range(7)]
    assert sorted(torch.cat(seen).tolist()) == list(range(48))


@pytest.mark.long
def test_restarted_actor_continues_to_answer(make: Any, ray_cluster: Any) -> None:
    """What it had drawn is handed out or lost, the handle is of use again, in pairs too."""
    buffer = make(
        storage=lambda: LazyTensorStorage(50),
        batch_size=4,
        remote_config={"num_cpus": 0, "max_restarts": 1},
    )
    buffer.extend(make_rows(0, 50))
    handle = buffer.client(prefetch=4)
    for _ in range(8):
        handle.sample()
    ray_cluster.kill(buffer._actor, no_restart=False)
    until = time.monotonic() + 120
    while True:
        try:
            buffer.extend(make_rows(100, 50))
            break
        except RuntimeError:
            assert time.monotonic() < until
            time.sleep(0.1)
    batches = []
    for _ in range(20):
        with contextlib.suppress(RuntimeError):  # asked for of the one that has gone
            batches.append(handle.sample())
    assert len(batches) >= 16
    assert all(batch.shape == (4,) for batch in batches)
    assert int(torch.cat([batch["id"] for batch in batches[5:]]).min()) >= 100
