"""Send priorities, patches and cuts to the shards of their rows."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch

from replaykit._compat import as_tensor, is_tensordict
from replaykit.buffer.components import DataT
from replaykit.buffer.conditional_updates import (
    ConditionalUpdateResult,
    check_tracked,
    checked_handles,
    checked_patch,
)
from replaykit.buffer.priorities import update_from_sample, without_priorities
from replaykit.distributed.client_writes import Routed
from replaykit.distributed.routing import check_stored
from replaykit.samplers import Transition
from replaykit.schema import Schema
from replaykit.ted import format_key, unravel

if TYPE_CHECKING:
    from replaykit.distributed.sharded_buffer import ShardedClient

__all__ = ["Patched", "Streamed", "Updates"]


class Updates:
    """The updates of priorities that a client sends to shards.

    Attributes:
        dropped: number of skipped entries, whose rows were overwritten or lost.
    """

    def __init__(self, client: ShardedClient) -> None:
        self._client = client
        self.dropped = 0

    def priority(self, index: Any, priority: Any, generation: Any = None) -> None:
        """Set priorities; see ``ShardedClient.update_priority``."""
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
        # `check_stored` is valid for these incarnations only, since a successor has other rows.
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
        """Set priorities from a sample."""
        if self._client._law.prioritized:
            update_from_sample(cast(Any, _Face(self)), data)


class _Target:
    """The sampler of a `_Face`, which sends updates of priorities to shards."""

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


class _Face:
    """The part of a buffer that ``update_from_sample`` needs to turn samples into updates."""

    def __init__(self, updates: Updates) -> None:
        self._sampler: Any = _Target(updates)
        self._sample_unit = Transition()
        self._priority_key = updates._client._priority_key
        self._collate_fn = None

    def _ready(self) -> None:
        """Do nothing, because the buffer exists."""

    def _locked(self, *, settled: bool) -> Any:
        return contextlib.nullcontext(SimpleNamespace(stack_dim=0, ndim=1))


class Patched(Routed[DataT]):
    """The method ``update_if_present`` of a client."""

    def update_if_present(
        self,
        *,
        index: torch.Tensor,
        generation: torch.Tensor,
        patch: Any,
        version_key: Any = None,
        version: Any = None,
        require_newer: bool = False,
    ) -> ConditionalUpdateResult:
        """Write values into the rows that were not overwritten since the draw.

        Args:
            index: the ``index`` of the rows in a sample, int64 ``[K]``.
            generation: the ``index_generation`` of the rows, int64 ``[K]``. Rows with -1 are never
                updated, nor are rows that were drawn before a restart of their shard.
            patch, version_key, version, require_newer: as for ``ReplayBuffer.update_if_present``.

        Returns:
            The outcome for each row, in the order of ``index``.

        Raises:
            ValueError: the patch has the ``shard_key``, but rows cannot move to other shards.
            TimeoutError: a shard has not answered. The values of its rows may have been written.
            The errors of ``ReplayBuffer.update_if_present`` are raised before any row has changed.

        A reader sees all updates of a shard or none, but the shards may be updated at different
        times. Cost: one message to each shard with rows in ``index``, and one more for the first
        patch.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> from replaykit import LazyTensorStorage, RoundRobinWriter, ShardedReplayBuffer
            >>> with ShardedReplayBuffer(
            ...     num_shards=2, storage=lambda: LazyTensorStorage(2), backend="local",
            ...     writer=lambda: RoundRobinWriter(track_generations=True),
            ... ) as rb:
            ...     _ = rb.extend(TensorDict({"x": torch.zeros(4)}, [4]))
            ...     _ = rb.add(TensorDict({"x": torch.ones(())}, []))  # displaces the row at 0
            ...     result = rb.update_if_present(
            ...         index=torch.tensor([0, 1]), generation=torch.tensor([0, 0]),
            ...         patch={"x": torch.tensor([5.0, 5.0])})
            ...     result.updated.tolist(), rb[:]["x"].tolist()
            ([False, True], [1.0, 5.0, 0.0, 0.0])
        """
        self._before_a_write()
        names, members = self._names, self._members
        check_tracked(self._settings.tracked)
        handles, given = checked_handles(1, index, generation)
        where = handles[:, 0]
        layout = self._stored_layout()
        checked = checked_patch(layout.leaf, len(where), patch, version_key, version, require_newer)
        touched = {*checked.values, checked.version_key}
        key = self._settings.shard_key
        if key is not None and unravel(key) in touched:
            raise ValueError(
                f"expected a patch without the shard_key {format_key(unravel(key))}: rows cannot "
                "move to other shards"
            )
        meant = members.incarnations()
        shards, slots = names.shards(where), names.slots(where)
        chosen = {shard: mine for shard in meant if len(mine := (shards == shard).nonzero()[:, 0])}

        def send(shard: int, stamp: Any) -> Any:
            mine = chosen[shard]
            seen = names.unstamped(given[mine], meant[shard])
            values = {
                path: value.detach().cpu().index_select(0, mine)
                for path, value in checked.values.items()
            }
            versions = None if checked.versions is None else checked.versions[mine]
            part = checked._replace(values=values, versions=versions)
            return members.send(shard, "patch", stamp, slots[mine], seen, part, only=meant[shard])

        answers = self._writes(sorted(chosen), send, again=False)
        found = torch.zeros(1 if checked.versions is None else 2, len(where), dtype=torch.bool)
        for shard, answer in answers.items():
            found[:, chosen[shard]] = torch.as_tensor(answer[0], dtype=torch.bool)
        rejected = None if checked.versions is None else found[1]
        return ConditionalUpdateResult(found[0], rejected, batch_size=[len(where)])

    def _stored_layout(self) -> Schema:
        """Return the schema of the stored rows, after the inverse transforms.

        Raises:
            RuntimeError: nothing is stored.
        """
        members = self._members
        members.present()
        if not any(self._rows_of(shard) for shard in members.table.there()):
            members.refresh(None, 0.0)
        if not any(self._rows_of(shard) for shard in members.table.there()):
            raise RuntimeError("nothing is stored")
        if self._stored is None:
            roots = members.ask_all("layout").values()
            self._stored = next((Schema(root) for root in roots if root is not None), None)
        if self._stored is None:
            raise RuntimeError("nothing is stored")
        return self._stored


class Streamed(Patched[DataT]):
    """The methods ``flush`` and ``cut`` of a client."""

    def flush(self) -> torch.Tensor:
        """Store the rows that the shards' transforms hold back.

        Transforms treat the rows that they hold back as complete; see ``ReplayBuffer.flush``.

        Returns:
            The index of each row, int64 ``[K]``, ordered by shard.

        Raises:
            TimeoutError: a shard has died and was not restarted, or does not answer.

        A rate limiter counts these rows, but does not delay them. The call waits for all earlier
        writes of this handle, even for writes that the rate limiter delays. Cost: one message to
        each shard.

        Example:
            >>> import torch
            >>> from replaykit import LazyTensorStorage, ShardedReplayBuffer
            >>> with ShardedReplayBuffer(num_shards=2, storage=lambda: LazyTensorStorage(10),
            ...                          backend="local") as rb:
            ...     rb.flush()
            tensor([], dtype=torch.int64)
        """
        self._check_open()
        self._write_queue.flush()
        members, names = self._members, self._names

        def send(shard: int, stamp: Any) -> Any:
            return members.send(shard, "flush", stamp)

        answers = self._writes(list(range(names.num_shards)), send)
        self._tickets.count_unticketed()
        return torch.cat([names.join(shard, answers[shard][0]) for shard in sorted(answers)])

    def cut(self, lane: int | Sequence[int] | torch.Tensor | None = None) -> None:
        """End all open episodes without a flag.

        Rows that are written later belong to other episodes. These episodes count as if their
        oldest steps were missing. See ``ReplayBuffer.cut``.

        Args:
            lane: values of the column ``lane_key``. These values name the streams to cut, which may
                be in any shards. None cuts all streams.

        Raises:
            IndexError: a stream has no stored rows. After this error, no stream was cut.
            TimeoutError: a shard has died and was not restarted, or does not answer.

        Like ``flush``, the call first stores the rows that transforms hold back. Cost: one message
        to each shard, or two messages with ``lane``.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> from replaykit import LazyTensorStorage, ShardedReplayBuffer, SliceSampler
            >>> with ShardedReplayBuffer(
            ...     num_shards=2, storage=lambda: LazyTensorStorage(100), shard_key="env",
            ...     sampler=lambda: SliceSampler(slice_len=2), backend="local",
            ... ) as rb:
            ...     for first in (0, 2):
            ...         _ = rb.extend(TensorDict({
            ...             "env": torch.zeros(2).long(), "t": torch.arange(first, first + 2),
            ...             "next": {"done": torch.zeros(2, dtype=bool)}}, [2]))
            ...         rb.cut()
            ...     starts = rb.sample(200)["t"][::2]
            >>> starts.unique()
            tensor([0, 2])
        """
        self._check_open()
        self._write_queue.flush()
        members = self._members
        where: dict[int, torch.Tensor | None] = dict.fromkeys(range(self._names.num_shards))
        if lane is not None:
            where = self._shards_of(as_tensor(lane).cpu())

        def send(shard: int, stamp: Any) -> Any:
            return members.send(shard, "cut", stamp, where[shard])

        self._writes(list(where), send)
        self._tickets.count_unticketed()

    def _shards_of(self, lanes: torch.Tensor) -> dict[int, torch.Tensor | None]:
        """Return the keys of the given streams by shard, for shards with rows of them.

        Raises:
            IndexError: no shard has rows of some stream.
        """
        members = self._members
        until = time.monotonic() + members.timeout
        members.present()
        for shard in range(self._names.num_shards):
            members.wait_for([shard], until)
        answers = members.ask_all("streams", lanes)
        found = {shard: answer for shard, answer in answers.items() if answer is not None}
        if not found:
            return {}  # nothing to cut, as in one buffer without rows
        known = torch.stack([has for _, has in found.values()]).any(0)
        if not bool(known.all()):
            missing = next(iter(found.values()))[0][~known].tolist()
            raise IndexError(f"expected streams with stored rows, got {missing}")
        return {shard: cells[has] for shard, (cells, has) in found.items() if bool(has.any())}
