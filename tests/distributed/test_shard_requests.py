"""Batches asked for ahead: the same draws as without, later writes in later ones, errors told."""

from __future__ import annotations

import asyncio
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import PrioritizedSampler, RandomSampler, SliceSampler
from replaykit.sharding import ShardSilent
from tests.distributed.laws import episodes
from tests.distributed.test_silence import Silent


def prioritized() -> Any:
    return PrioritizedSampler(alpha=0.8, beta=0.5)


def make(sharded: Any, sampler: Any = prioritized, **arguments: Any) -> Any:
    arguments.setdefault("generator", torch.Generator().manual_seed(5))
    rb = sharded(3, sampler=sampler, shard_key="episode", batch_size=12, on_loss=print, **arguments)
    rb.extend(episodes([6, 4, 9, 5, 7, 3]))
    return rb


def alike(one: Any, two: Any) -> bool:
    keys = set(one.keys(True, True))
    return keys == set(two.keys(True, True)) and all(torch.equal(one[k], two[k]) for k in keys)


@pytest.mark.parametrize("sampler", [RandomSampler, prioritized, lambda: SliceSampler(slice_len=3)])
def test_prefetch_does_not_change_draws(sharded: Any, sampler: Any) -> None:
    """Of batches of the default size, whichever way they are asked for."""
    plain, ahead = make(sharded, sampler), make(sharded, sampler, prefetch=3)
    expected = [plain.sample() for _ in range(9)]
    assert alike(ahead.sample(), expected[0])
    assert ahead.stats()["prefetch_queue_size"] == 3
    late = [ahead.sample_async() for _ in range(2)]
    assert alike(ahead.next(), expected[3])
    assert alike(late[1].result(), expected[2])
    assert late[0].done()
    assert alike(late[0].result(), expected[1])
    assert late[0].result() is late[0].result()
    assert alike(ahead.sample(return_info=True)[0], expected[4])
    assert alike(next(iter(ahead)), expected[5])

    async def three() -> list[Any]:
        return [await ahead.sample_async() for _ in range(3)]

    assert all(alike(*pair) for pair in zip(asyncio.run(three()), expected[6:], strict=True))


def test_another_batch_size_is_served_at_once(sharded: Any) -> None:
    rb = make(sharded, prefetch=2)
    assert rb.sample().shape == (12,)
    assert rb.sample(5).shape == (5,)
    assert rb.sample_async(7).result().shape == (7,)
    assert rb.sample().shape == (12,)


def test_priority_update_affects_later_requests(sharded: Any) -> None:
    """Two batches are under way: they are of before, the third is of the new priorities."""
    rb = make(sharded, prefetch=2)
    rb.sample()
    index = rb._names.join(0, torch.arange(rb.stats()["shards"][0]))
    for shard in (1, 2):
        others = rb._names.join(shard, torch.arange(rb.stats()["shards"][shard]))
        rb.update_priority(others, 0.0)
    rb.update_priority(index, 1e6)
    seen = [int((rb.sample()["index"] % 3 == 0).sum()) for _ in range(4)]
    assert seen[2:] == [12, 12]
    assert min(seen[:2]) < 12


def test_dropped_batches_are_drawn_again(sharded: Any, tmp_path: Path) -> None:
    """The random numbers of batches that nobody gets go back, unless others were used since; and
    a checkpoint has the generator before them."""
    plain, ahead = make(sharded), make(sharded, prefetch=3)
    for rb in (plain, ahead):
        rb.sample()
        rb.empty()
        rb.extend(episodes([8, 8]))
    assert alike(ahead.sample(), plain.sample())
    ahead.dumps(tmp_path)
    other = pickle.loads(pickle.dumps(ahead._generator_state()))
    expected = [plain.sample() for _ in range(2)]
    assert alike(ahead.sample(), expected[0])
    ahead.loads(tmp_path)
    assert torch.equal(ahead.generator.get_state(), other)
    assert [alike(ahead.sample(), one) for one in expected] == [True, True]
    own = ahead.generator
    torch.rand(1, generator=own)
    state = own.get_state()
    ahead.set_rng(torch.Generator().manual_seed(9))
    assert torch.equal(own.get_state(), state)
    plain.set_rng(torch.Generator().manual_seed(9))
    assert alike(ahead.sample(), plain.sample())


def test_errors_are_raised_in_the_requesting_call(sharded: Any) -> None:
    """Also of a batch that was asked for too early; what comes after is drawn."""
    rb = sharded(2, batch_size=4, prefetch=2)
    with pytest.raises(RuntimeError, match="empty storage"):
        rb.sample()
    result = rb.sample_async()
    with pytest.raises(RuntimeError, match="empty storage"):
        result.result()
    rb.extend(TensorDict({"x": torch.arange(6)}, [6]))
    assert rb.sample().shape == (4,)
    with pytest.raises(RuntimeError, match="empty storage"):
        result.result()
    for holder in (shard.holder for shard in rb._members.shards):
        holder.draw = fails
    for _ in range(2):  # those under way are whole
        assert rb.sample().shape == (4,)
    with pytest.raises(OSError, match="a broken shard"):
        rb.sample()
    for holder in (shard.holder for shard in rb._members.shards):
        del holder.draw
    assert rb.sample().shape == (4,)
    with pytest.raises(ValueError, match="prefetch as an int of at least 0, got -1"):
        sharded(2, prefetch=-1)


def fails(*args: Any) -> Any:
    raise OSError("a broken shard")


def test_late_batch_is_returned_by_a_later_call(sharded: Any) -> None:
    plain, ahead = make(sharded), make(sharded, prefetch=2, timeout=0.1)
    assert alike(ahead.sample(), plain.sample())
    shard = ahead._members.shards[1]
    send = shard.call
    shard.call = lambda verb, *args: Silent(1 if verb == "draw" else 0, send(verb, *args))
    for _ in range(2):
        assert alike(ahead.sample(), plain.sample())
    expected = plain.sample()
    with pytest.raises(ShardSilent, match="shard 1"):
        ahead.sample()
    assert alike(ahead.sample(), expected)


def test_a_shard_that_dies_meanwhile_is_drawn_around(sharded: Any) -> None:
    rb = make(sharded, prefetch=3)
    rb.sample()
    waiting = rb.sample_async()
    rb._members.shards[0].kill()
    batches = [waiting.result(), *(rb.sample() for _ in range(8))]
    assert all(batch.shape == (12,) for batch in batches)
    assert not any((batch["index"] % 3 == 0).any() for batch in batches[-3:])


def test_handles_prefetch_separate_batches(sharded: Any) -> None:
    rb = make(sharded)
    client = rb.client(torch.Generator().manual_seed(5), prefetch=2)
    plain = rb.client(torch.Generator().manual_seed(5))
    first = client.sample()
    state = client.__getstate__()
    again = type(client).__new__(type(client))
    again.__setstate__(state)
    assert again._ahead.depth == 2
    assert len(again._ahead) == 0
    assert alike(first, plain.sample())
    assert alike(client.sample(), again.sample())
