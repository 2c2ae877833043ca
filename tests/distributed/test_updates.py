"""Priority updates that meet a shard which has been restarted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import PrioritizedSampler


@pytest.mark.parametrize("stamped", [True, False])
def test_an_update_never_reaches_the_successor_of_the_shard_it_is_for(
    sharded: Any, stamped: bool
) -> None:
    """The shard dies, comes back and is written to by others between the check and the message:
    the slots are those of other rows."""
    rb = sharded(2, sampler=lambda: PrioritizedSampler(alpha=1.0, beta=1.0, eps=0.0), on_loss=print)
    other = rb.client(on_loss=print)
    rb.extend(TensorDict({"x": torch.arange(4)}, [4]))
    _, info = rb.sample(40, return_info=True)
    index, generation = info["index"], info["index_generation"] if stamped else None
    writes, members = rb._writes, rb._members

    def comes_late(*args: Any, **keywords: Any) -> Any:
        members.shards[0].kill()
        for client in (rb, other):
            client._members.died(0, 0)
            client._members.wait_for([0], float("inf"))
        assert other.extend(TensorDict({"x": torch.arange(4) + 10}, [4])).tolist() == [0, 5, 2, 7]
        return writes(*args, **keywords)

    rb._writes = comes_late
    rb.update_priority(index, 9.0, generation=generation)
    assert rb.dropped_updates == int((index % 2 == 0).sum()) > 0
    held = members.shards[0].holder.buffer
    assert held.sampler._table.follow(held.storage).raw[:2].tolist() == [1.0, 1.0]
