"""A shard: one buffer, and what is asked of it."""

from __future__ import annotations

import logging
from typing import Any

import torch

from replaykit._compat import arange
from replaykit.buffer.conditional import Patch, patched
from replaykit.buffer.drawing import Lent
from replaykit.sharding.barrier import Stamp
from replaykit.sharding.facts import Part, ShardFacts, Terms
from replaykit.sharding.saved_shard import SavedShard
from replaykit.storages import Storage, TensorStorage
from replaykit.structure import Node, build

__all__ = ["ShardHolder"]

_LOG = logging.getLogger(__name__)


class ShardHolder(SavedShard):
    """Holds one buffer of many; every method is one message, and answers with the newest facts.

    Thread-safe: the lock of the buffer's storage guards all of it. Whether a write may come now is
    asked of ``admits``; who waits, and how, is the business of those who bring messages.
    """

    def stats(self) -> dict[str, Any]:
        """What ``ReplayBuffer.stats`` says of the shard's buffer."""
        return self.buffer.stats()

    # -- writing ------------------------------------------------------------------------------

    def admits(self, stamp: Stamp) -> bool:
        """Whether a write with this stamp need not wait."""
        with self.buffer._locked():
            return self.barrier.admits(stamp)

    def extend(
        self,
        stamp: Stamp,
        root: Node,
        leaves: dict[Any, torch.Tensor],
        priorities: torch.Tensor | None,
        most: float,
    ) -> tuple[torch.Tensor, ShardFacts]:
        """Writes rows; returns their slots.

        Args:
            priorities: raw ones, ``[K]``; None: the default, which is at least ``most``.
        """
        count = next(iter(leaves.values())).shape[0]
        data = build(root, leaves, torch.Size([count]), torch.device("cpu"))
        with self.buffer._locked() as storage:
            known = self.barrier.answer(stamp)
            if known is not None:
                return torch.as_tensor(known[0], dtype=torch.int64, device="cpu"), self.facts()
            sampler: Any = self.buffer._sampler
            if sampler.prioritized:
                sampler._stored.most = max(sampler._stored.most, most)
            try:
                slots = self.buffer.extend(data, update_priority=False)
            except Exception:
                self.barrier.refused(stamp)
                raise
            if priorities is not None:
                sampler.update_priority(slots, priorities, storage=storage)
            self._version += 1
            self.barrier.came(stamp, slots)
            return slots, self.facts()

    def update(
        self,
        stamp: Stamp,
        slots: torch.Tensor,
        priorities: torch.Tensor,
        generation: torch.Tensor | None,
    ) -> tuple[int, ShardFacts]:
        """Sets priorities; returns how many came too late."""
        with self.buffer._locked() as storage:
            known = self.barrier.answer(stamp)
            if known is None:
                sampler: Any = self.buffer._sampler
                before = sampler.dropped_updates
                sampler.update_priority(slots, priorities, storage=storage, generation=generation)
                known = (sampler.dropped_updates - before,)
                self._version += 1
                self.barrier.came(stamp, known[0])
            return known[0], self.facts()

    def patch(
        self, stamp: Stamp, slots: torch.Tensor, generation: torch.Tensor, patch: Patch
    ) -> tuple[torch.Tensor, ShardFacts]:
        """Writes values into the rows that are live; returns which, and with versions which were
        refused: bool ``[1 or 2, K]``."""
        with self.buffer._locked() as storage:
            known = self.barrier.answer(stamp)
            if known is None:
                rows = 1 if patch.versions is None else 2
                found = torch.zeros(rows, len(slots), dtype=torch.bool, device="cpu")
                if len(storage):
                    assert isinstance(storage, TensorStorage)
                    live, refused = patched(storage, slots[:, None], generation, patch)
                    found[0] = live
                    if refused is not None:
                        found[1] = refused
                self._version += 1
                self.barrier.came(stamp, found)
                known = (found,)
            return torch.as_tensor(known[0], dtype=torch.bool, device="cpu"), self.facts()

    def layout(self) -> Node | None:
        """What stored rows look like; None: none is."""
        with self.buffer._locked() as storage:
            assert isinstance(storage, TensorStorage)  # see ShardRecipe.make
            return storage.require().schema.root if len(storage) else None

    def empty(self, stamp: Stamp, empty_write_count: bool) -> tuple[None, ShardFacts]:
        """Forgets all rows; they are soon out of the shard's own checkpoint, too."""
        with self.buffer._locked():
            if self.barrier.answer(stamp) is None:
                self.buffer.empty(empty_write_count)
                self._version += 1
                self.barrier.came(stamp, None)
                self._emptied = True
            return None, self.facts()

    # -- reading ------------------------------------------------------------------------------

    def draw(
        self, count: int, terms: Terms, seed: int, anyway: bool = False, generations: bool = False
    ) -> Part:
        """Draws ``count`` times; none where there is nothing to draw from, unless ``anyway``.

        ``generations``: tells those of the rows in any case.
        """
        with self.buffer._locked() as storage:
            facts = self.facts(terms)
            if not anyway and (not count or not facts.mass):
                return Part(None, {}, None, facts)
            lent = Lent(generator=self._generator.manual_seed(seed))
            drawn = self.law.draw(self.buffer, count, terms, lent)
            values = self.law.values(self.buffer, drawn)
            buffer = self.buffer
            tracked = buffer._writer.tracks_generations or buffer._sampler.prioritized
            if not (tracked or generations):
                drawn.info.pop("index_generation", None)
        del storage
        data, info = self.buffer._finish(drawn)
        return Part(data, info, values, facts)

    def read(self, slots: torch.Tensor) -> tuple[Any, ShardFacts]:
        """Rows of slots ``[K]``, transformed; IndexError where one is not stored."""
        with self.buffer._locked():
            return self.buffer[slots], self.facts()

    def stored_slots(self) -> torch.Tensor:
        """Slots of all rows, from the oldest to the newest: int64 ``[rows]``."""
        with self.buffer._locked() as storage:
            return storage.ledger.write_order() if len(storage) else arange(0)

    # -- streams ------------------------------------------------------------------------------

    def flush(self, stamp: Stamp) -> tuple[torch.Tensor, ShardFacts]:
        """Stores what transforms hold back; returns the slots."""
        with self.buffer._locked():
            known = self.barrier.answer(stamp)
            if known is None:
                known = (self.buffer.flush(),)
                self._version += 1
                self.barrier.came(stamp, known[0])
            return torch.as_tensor(known[0], dtype=torch.int64, device="cpu"), self.facts()

    def streams(self, lanes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Keys of streams one by one ``[K, *F]``, and which have rows here, bool ``[K]``; None
        where nothing is stored.

        Raises:
            IndexError: storages have no streams, and not so many lanes.
        """
        with self.buffer._locked() as storage:
            assert isinstance(storage, TensorStorage)  # see ShardRecipe.make
            if storage.lane_key is None:
                storage.lanes_named(lanes)
                return lanes.reshape(-1), torch.ones(lanes.numel(), dtype=torch.bool)
            if not len(storage):
                return None
            cells = lanes.reshape(-1, *storage.leaf(storage.lane_key).shape)
            return cells, torch.tensor([_has(storage, cell) for cell in cells], dtype=torch.bool)

    def cut(self, stamp: Stamp, lanes: torch.Tensor | None) -> tuple[None, ShardFacts]:
        """Ends the episodes that are being written of some streams, those that there are, or of
        all."""
        with self.buffer._locked() as storage:
            if self.barrier.answer(stamp) is None:
                if lanes is not None:
                    lanes = lanes[[_has(storage, cell) for cell in lanes]]
                if lanes is None or len(lanes):
                    self.buffer.cut(lanes)
                self._version += 1
                self.barrier.came(stamp, None)
            return None, self.facts()


def _has(storage: Storage, stream: torch.Tensor) -> bool:
    try:
        storage.lanes_named(stream)
    except IndexError:
        return False
    return True
