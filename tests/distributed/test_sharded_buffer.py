"""Shards as actors of a real Ray that runs here, with clients in other processes."""

from __future__ import annotations

import json
import os
import pickle
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    LazyTensorStorage,
    RateLimiter,
    RoundRobinWriter,
    ShardedReplayBuffer,
    ShardLoss,
    SliceSampler,
)
from replaykit.errors import RateLimiterTimeout, SchemaError
from replaykit.pace import INSERT, SAMPLE
from replaykit.sharding import ShardLossWarning
from tests.distributed.laws import check_law, episodes, prioritized, wait_until
from tests.ray_cluster import RAY_MARKS
from tests.support.refusals import refuses

pytestmark = RAY_MARKS


@pytest.fixture
def make_shards(ray_cluster: Any) -> Iterator[Callable[..., ShardedReplayBuffer]]:
    made: list[ShardedReplayBuffer] = []

    def sharded(**arguments: Any) -> ShardedReplayBuffer:
        arguments.setdefault("generator", torch.Generator().manual_seed(0))
        made.append(ShardedReplayBuffer(remote_config={"num_cpus": 0}, **arguments))
        return made[-1]

    yield sharded
    for one in made:
        one.close()


@pytest.mark.programs
def test_two_actors_are_one_buffer(
    make_shards: Any, sharded: Any, ray_cluster: Any, tmp_path: Path
) -> None:
    """Laws, weights, updates, refusals, reading, clients elsewhere, a death, a checkpoint: of one
    pair of actors, since each takes seconds to start."""
    losses: list[ShardLoss] = []

    rb = make_shards(
        num_shards=2,
        storage=lambda: LazyTensorStorage(400),
        sampler=prioritized,
        writer=lambda: RoundRobinWriter(track_generations=True),
        batch_size=100,
        checkpoint_dir=tmp_path / "own",
        checkpoint_interval=0.05,
        on_loss=losses.append,
    )
    rows = TensorDict({"x": torch.arange(20), "wide": torch.rand(20, 300)}, [20])
    index = rb.extend(rows)
    assert index.tolist() == list(range(20))
    p = torch.rand(20, generator=torch.Generator().manual_seed(1)) + 0.1
    rb.update_priority(index, p)
    v = p.double().numpy()
    check_law(rb, 20_000, 2000, v)
    batch = rb.sample()
    np.testing.assert_allclose(batch["priority_weight"], v.min() / v[batch["x"]], rtol=1e-5)
    assert torch.equal(batch["wide"], rows["wide"][batch["x"]])
    batch["x"] += 1  # its memory is the learner's
    ahead, later = rb.client(prefetch=2), rb.sample_async(7)
    assert ahead.sample().shape == ahead.sample_async().result().shape == (100,)
    wait_until(later.done)
    assert later.result().shape == (7,)
    assert rb.flush().tolist() == []
    rb.cut(0)
    with pytest.raises(SchemaError, match="key 'wide': expected float32"):
        rb.extend(TensorDict({"x": torch.arange(3)}, [3]))
    refuses(IndexError, "got 99 at 0", rb.update_priority, torch.tensor([99]), 1.0)
    assert torch.equal(rb[torch.tensor([7, 2])]["x"], torch.tensor([7, 2]))
    seen = {"index": torch.tensor([7, 2, 3]), "generation": torch.tensor([0, 0, 1])}
    patch = {"wide": torch.full((3, 300), 0.5)}
    assert rb.update_if_present(patch=patch, **seen).updated.tolist() == [True, True, False]
    rows["wide"][[2, 7]] = 0.5
    assert torch.equal(rb[:]["wide"], rows["wide"])

    @ray_cluster.remote(num_cpus=0)
    def elsewhere(client: Any) -> int:
        client.extend(TensorDict({"x": torch.arange(20, 30), "wide": torch.rand(10, 300)}, [10]))
        return int(client.sample(64)["x"].max())

    assert ray_cluster.get(elsewhere.remote(rb.client())) < 30
    assert len(rb) == 30
    refuses(TypeError, r"send buffer\.client\(\)", pickle.dumps, rb)

    rb.dumps(tmp_path / "all")
    wait_until(lambda: _saved(tmp_path / "own") == 30)  # by themselves, the newest rows too
    victim = rb._members.shards[1]
    ray_cluster.kill(victim.actor)
    rounds = 0
    while not losses:
        drawn = rb.sample(200)["x"] % 2
        if not rb._members.is_there(1):  # sampling goes on while the shard is away
            assert not drawn.any()
            rounds += 1
    assert rounds > 1
    assert losses == [ShardLoss(1, 0, 15, 15, 0, 15)]
    assert len(rb) == 30
    assert rb.stats()["rows_lost"] == 0
    drawn = rb.sample(2000)["x"]
    assert len((drawn % 2).unique()) == 2
    rb.loads(tmp_path / "all")
    assert sorted(rb[:]["x"].tolist()) == list(range(30))

    three, five = (sharded(count, sampler=prioritized) for count in (3, 5))
    three.extend(rows)
    three.dumps(tmp_path / "three")
    rb.loads(tmp_path / "three")
    assert torch.equal(rb[:]["wide"], rows["wide"])
    rb.dumps(tmp_path / "all")
    five.loads(tmp_path / "all")
    assert torch.equal(five[:]["wide"], rows["wide"])
    with pytest.raises(FileExistsError, match="another buffer") as refused:
        make_shards(
            num_shards=1, storage=lambda: LazyTensorStorage(4), checkpoint_dir=tmp_path / "own"
        )
    assert type(refused.value) is FileExistsError
    client = rb.client(on_loss=losses.append)
    rb.close()
    refuses(RuntimeError, "shut down", rb.sample)
    refuses(RuntimeError, "the shards have ended", client.sample)


def _saved(folder: Path) -> int:
    """Rows in the checkpoints of all shards."""
    return sum(json.loads(file.read_text())["len"] for file in folder.glob("*/manifest.json"))


@pytest.mark.long
def test_dead_actor_without_a_checkpoint_restarts_empty(make_shards: Any, ray_cluster: Any) -> None:
    losses: list[ShardLoss] = []
    rb = make_shards(
        num_shards=2,
        storage=lambda: LazyTensorStorage(100),
        sampler=lambda: SliceSampler(slice_len=2),
        shard_key="episode",
        on_loss=losses.append,
    )
    rb.extend(episodes([4] * 10))
    sizes = rb.stats()["shards"]
    assert sum(sizes) == 40
    assert rb.sample(20)["x"].reshape(10, 2).diff(dim=1).eq(1).all()
    ray_cluster.kill(rb._members.shards[0].actor)
    # Rows of keys whose shard is away wait for it.
    rb.extend(episodes([4] * 10, first=10))
    wait_until(lambda: bool(rb.sample(20).shape) and bool(losses))
    assert losses == [ShardLoss(0, 0, 0, sizes[0], sizes[0], 0)]
    assert rb.stats()["rows_lost"] == sizes[0]
    assert len(rb) == 80 - sizes[0]


def write(client: Any, batches: int) -> int:
    for _ in range(batches):
        client.extend(torch.zeros(3), timeout=100)
    return 3 * batches


def die(client: Any, side: int, count: int) -> None:
    """With a right that is not used, or while there is none."""
    client._tickets.keeper.admit(side, count, 100)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.programs
def test_clients_in_other_processes_keep_each_others_pace(
    make_shards: Any, ray_cluster: Any
) -> None:
    """Of one pair of actors, since each takes seconds to start."""
    paced = make_shards(
        num_shards=2,
        storage=lambda: LazyTensorStorage(400),
        rate_limiter=RateLimiter(2, 6, 12),
        batch_size=4,
        on_loss=lambda loss: None,
    )

    def counts() -> tuple[int, int]:
        stats = paced.stats()
        return stats["inserts"], stats["samples"]

    task = ray_cluster.remote(num_cpus=0, max_retries=0)
    client = pickle.loads(pickle.dumps(paced.client()))
    refuses(RateLimiterTimeout, "a sample of 4 rows waited", paced.sample, timeout=0.1)
    writes = [task(write).remote(client, 12) for _ in range(2)]
    for _ in range(33):  # 144 - 132 is 12, below which no further sample of 4 would go on
        paced.sample(timeout=100)
        inserts, samples = counts()
        assert inserts <= 6 or inserts * 2 - samples <= 24
        assert inserts * 2 - samples >= 0
    assert ray_cluster.get(writes) == [36, 36]
    assert counts() == (len(paced), 132) == (72, 132)

    # diff is 12, with room for six rows: what the dead held does not stay theirs.
    dead = [task(die).remote(client, INSERT, 6), task(die).remote(client, SAMPLE, 12)]
    ray_cluster.wait(dead, num_returns=2, timeout=100)
    waits = task(die).remote(client, SAMPLE, 24)
    paced.extend(torch.zeros(6), timeout=100)
    assert counts() == (78, 132)
    paced.sample(12, timeout=100)
    with pytest.raises(RateLimiterTimeout):
        client.extend(torch.zeros(7), timeout=0)
    refuses(ValueError, "at most 24 rows at once, got 30", client.sample, 30)
    assert client.add_async(torch.zeros(())).result(100) is not None
    assert counts() == (79, 144)
    ray_cluster.cancel(waits, force=True)

    state = paced.state_dict()
    assert state["pace"] == {"inserts": 79, "samples": 144}
    paced.empty(empty_write_count=False)
    assert (counts(), paced.can_sample()) == ((79, 144), False)
    paced.load_state_dict(state)
    assert counts() == (79, 144)
    wait_until(paced.can_sample)  # once the rights of the dead have ended

    ray_cluster.kill(paced._members.shards[0].actor, no_restart=True)
    with pytest.warns(ShardLossWarning, match="shard 0"):
        client.extend(torch.zeros(3), timeout=100)
    assert paced.stats()["restarts"] == 1
    assert counts()[0] == 82

    held = paced.client()
    held.extend(torch.zeros(2), timeout=100)
    with pytest.raises(RateLimiterTimeout):
        held.extend(torch.zeros(3), timeout=0)
    held.extend_async(torch.zeros(3))
    paced.close()
    refuses(RuntimeError, "the shards have ended", held.flush)
