"""What one buffer can do: one over shards can do it too, or says why not."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import PrioritizedSampler, ReplayBuffer, ShardedReplayBuffer
from replaykit.sharding.refused import REFUSED


def test_every_name_of_a_buffer_is_there_or_is_refused_with_a_reason(sharded: Any) -> None:
    rb = sharded(2)
    names = {name for name in dir(ReplayBuffer) if not name.startswith("_")}
    assert names - set(dir(ShardedReplayBuffer)) == set(REFUSED)
    for handle in (rb, rb.client()):
        for name, reason in REFUSED.items():
            with pytest.raises(
                AttributeError, match=f"Sharded[A-Za-z]* has no '{name}': "
            ) as found:
                getattr(handle, name)
            assert reason in str(found.value)
            assert not hasattr(handle, name)
        with pytest.raises(AttributeError, match="object has no attribute 'nothing'"):
            print(handle.nothing)
        with pytest.raises(TypeError, match="update_if_present"):
            handle[0] = torch.zeros(())
    assert rb.initialized
    with pytest.raises(TypeError, match="client"):
        copy.deepcopy(rb)
    client = copy.copy(rb.client())
    assert client.num_shards == 2
    with pytest.raises(TypeError, match="client"):
        pickle.dumps(rb)


def test_rows_get_the_default_priority_of_one_big_buffer(sharded: Any, single: Any) -> None:
    def sampler() -> PrioritizedSampler:
        return PrioritizedSampler(alpha=0.7, beta=1.0)

    one, rb = single(sampler()), sharded(3, sampler=sampler)
    rows = TensorDict({"x": torch.arange(12)}, [12])
    for buffer in (one, rb):
        index = buffer.extend(rows)
        buffer.update_priority(index, torch.linspace(0.5, 3.0, 12))
        buffer.update_priority(index[10:], 0.1)  # the largest ever is not the largest there is
    other = rb.client()
    for buffer in (one, other):
        buffer.mark_update(torch.tensor([0, 5, -1]))
        buffer.mark_update(7)
        with pytest.raises(IndexError):
            buffer.mark_update(torch.tensor([1, 12]))

    def weights(buffer: Any) -> dict[int, float]:
        batch = buffer.sample(3000)
        found = zip(batch["x"].tolist(), batch["priority_weight"].tolist(), strict=True)
        return {x: round(weight, 5) for x, weight in found}

    assert weights(other) == weights(one)
    assert len(weights(one)) == 12
    plain = sharded(2)
    plain.extend(rows)
    plain.mark_update(3)
    assert torch.equal(plain.read_all_in_order(5)["x"], rows["x"][:5])
