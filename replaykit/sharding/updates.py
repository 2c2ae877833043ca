"""A client's priority updates: checked as a whole, sent to the shards that they are for."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from replaykit._compat import as_tensor, is_tensordict
from replaykit.buffer.priorities import Priorities, without_priorities
from replaykit.samplers import Transition
from replaykit.sharding.reading import check_stored

if TYPE_CHECKING:
    from replaykit.sharding.client import ShardedClient

__all__ = ["Updates"]


class Updates:
    """Sets priorities of rows by index.

    Attributes:
        dropped: entries left out, since their rows were written anew, or lost.
    """

    def __init__(self, client: ShardedClient) -> None:
        self._client = client
        self.dropped = 0

    def priority(self, index: Any, priority: Any, generation: Any = None) -> None:
        """Sets priorities; see ``ShardedClient.update_priority``."""
        client = self._client
        if without_priorities(client.sampler, above=2):
            return
        if priority is None and is_tensordict(index):
            self.tensordict(index)
            return
        slots = as_tensor(index).cpu().reshape(-1)
        if slots.is_floating_point() or slots.dtype is torch.bool:
            raise TypeError(f"expected an index of integers, got {slots.dtype}")
        values = as_tensor(priority).detach().cpu().to(torch.float64)
        values = values.expand(len(slots)).contiguous() if not values.ndim else values.reshape(-1)
        given = None if generation is None else as_tensor(generation).cpu().reshape(-1)
        for name, found in (("priorities", values), ("generations", given)):
            if found is not None and len(found) != len(slots):
                raise ValueError(f"expected {len(slots)} {name}, got {len(found)}")
        client._sampler.check_priorities(values)
        self._send(slots.to(torch.int64), values, given)

    def _send(self, index: torch.Tensor, values: torch.Tensor, given: torch.Tensor | None) -> None:
        client = self._client
        names, members = client._names, client._members
        members.present()
        # Of whom is said below that the rows are stored; the rows of a successor are others.
        meant = members.incarnations()
        shards, slots = names.shards(index), names.slots(index)
        check_stored(client, index)
        chosen = {
            int(shard): (shards == shard).nonzero()[:, 0]
            for shard in shards.unique()
            if int(shard) >= 0
        }
        gone = [shard for shard in chosen if shard not in meant]
        self.dropped += sum(len(chosen.pop(shard)) for shard in gone)

        def send(shard: int, stamp: Any) -> Any:
            mine = chosen[shard]
            generation = None
            if given is not None:
                generation = names.unstamped(given[mine], meant[shard])
            what = (stamp, slots[mine], values[mine], generation)
            return members.send(shard, "update", *what, only=meant[shard])

        answers = client._writes(sorted(chosen), send, again=False)
        self.dropped += sum(answer[0] for answer in answers.values())
        self.dropped += sum(len(chosen[shard]) for shard in chosen.keys() - answers.keys())

    def tensordict(self, data: Any) -> None:
        """Sets priorities from a sample."""
        if self._client._law.prioritized:
            _Face(self).update_tensordict_priority(data)


class _Target:
    """The sampler of a buffer, as its updates see it: what they bring is sent to shards."""

    prioritized = True

    def __init__(self, updates: Updates) -> None:
        self._updates = updates
        self._like: Any = updates._client.sampler

    def __getattr__(self, name: str) -> Any:
        return getattr(self._like, name)

    def check_priorities(self, priority: torch.Tensor) -> None:
        self._like.check_priorities(priority)

    def update_priority(
        self, index: Any, priority: Any, *, storage: Any = None, generation: Any = None
    ) -> None:
        self._updates.priority(index, priority, generation)


class _Face(Priorities):
    """How samples become updates is the buffer's to say; this is as much of one as it needs."""

    def __init__(self, updates: Updates) -> None:
        self._initialized = True
        self._sampler: Any = _Target(updates)
        self._sample_unit = Transition()
        self._priority_key = updates._client._priority_key
        self._collate_fn = None

    def _locked(self, *, patient: bool = False, settled: bool = True) -> Any:
        return contextlib.nullcontext(SimpleNamespace(stack_dim=0, ndim=1))
