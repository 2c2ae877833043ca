"""Implement the server of one shard, with its saves."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch

from replaykit._compat import arange
from replaykit.buffer import ReplayBuffer
from replaykit.buffer.deliver import finished
from replaykit.buffer.edit import Patch, checked_patch, patched
from replaykit.buffer.state import snapshot_of
from replaykit.checkpoint import Base, Checkpoint, Snapshot, save_snapshot
from replaykit.checkpoint.checkpoint_format import MANIFEST
from replaykit.declared import decode_state
from replaykit.distributed.protocol import (
    BarrierBusy,
    SchemaReplaced,
    ShardFacts,
    ShardPart,
    Terms,
)
from replaykit.distributed.shard_config import DrawLaw, OwnState, ShardRecipe, law_of
from replaykit.distributed.shard_saves import check_sampler, load_share
from replaykit.distributed.write_queue import Barrier, KnownWrites, Stamp
from replaykit.errors import CheckpointError
from replaykit.storages import Storage, TensorStorage
from replaykit.structure import Node, build

_LOG = logging.getLogger(__name__)


class ShardHolder:
    """A shard whose methods answer messages. Thread-safe.

    Most answers contain the newest facts. The shard saves its own checkpoint, and its part of a
    checkpoint of all shards. The lock of the buffer's storage guards everything.

    Args:
        recipe: the factories of the shard's parts.
        shard, incarnation: numbers of the shard and its incarnation.
        saves: True to start a thread that saves the shard when a save is due.
    """

    def __init__(
        self, recipe: ShardRecipe, shard: int, incarnation: int = 0, *, saves: bool = False
    ) -> None:
        self.recipe, self.shard, self.incarnation = recipe, shard, incarnation
        folder = recipe.folder(shard)
        there = folder is not None and (folder / "manifest.json").exists()
        if there and not incarnation:
            raise FileExistsError(
                f"expected a checkpoint_dir without shards, got {folder}, which belongs to another "
                "buffer; give a new directory, or load() a checkpoint of all shards"
            )
        self._install(recipe.make())
        self.barrier = Barrier(recipe.timeout)
        self._version = self._loads = 0
        self._terms = recipe.terms
        self._before = 0  # rows written before row id 0 of the ledger
        self._loaded: tuple[str, ReplayBuffer] | None = None
        self._saving: dict[str, Future[Any]] = {}
        self._savers = ThreadPoolExecutor(thread_name_prefix=f"replaykit-save-{shard}")
        self._next_save = time.monotonic() + recipe.checkpoint_interval
        self._save_now = False
        if folder is not None and there:
            self._restore(folder)
        self._ended = threading.Event()
        if saves and folder is not None:
            threading.Thread(target=self._save_again_and_again, daemon=True).start()

    def _install(self, buffer: ReplayBuffer) -> None:
        self.buffer = buffer
        self.law: DrawLaw = law_of(buffer.sampler)
        self._generator = torch.Generator("cpu")

    # -- facts --------------------------------------------------------------------------------

    def facts(self, terms: Terms | None = None) -> ShardFacts:
        """Return the state of the shard; the mass is in the given terms or the last terms."""
        with self.buffer._locked() as storage:
            terms = self._terms if terms is None else terms
            mass: float = 0
            smallest = float("inf")
            if terms is not None:
                # If rows cannot be drawn, no mass is measured, and a draw raises the error.
                with contextlib.suppress(KeyError, RuntimeError):
                    mass, smallest = self.law.measure(self.buffer, storage, terms)
                self._terms = terms  # only if the sampler accepts them
            sampler: Any = self.buffer._sampler
            most = sampler._table.most if sampler.prioritized else 1.0
            return ShardFacts(
                len(storage),
                self._before + storage.ledger.next_position,
                storage.max_size,
                terms,
                mass,
                smallest,
                most,
                self._version,
                self._loads,
                self.shard,
                self.incarnation,
            )

    def restarted(self, loads: int) -> ShardFacts:
        """Continue to count loads of all shards after a restart; return the facts."""
        self._loads = loads
        return self.facts()

    # -- its own checkpoint -------------------------------------------------------------------

    def _snapshot(self, path: str | os.PathLike[str], base: Base) -> Snapshot:
        with self.buffer._locked():
            snapshot = snapshot_of(self.buffer, path, base)
            snapshot.head["sharding"] = {
                "shard": self.shard,
                "before": self._before,
                "writes": self.barrier.state(),
            }
            return snapshot

    def save_own(self) -> None:
        """Save the shard to the directory from which its successor loads."""
        folder = self.recipe.folder(self.shard)
        if folder is not None:
            self._save_now = False  # `empty` or a load during this save makes another save due
            save_snapshot(folder, lambda base: self._snapshot(folder, base))
        self._next_save = time.monotonic() + self.recipe.checkpoint_interval

    def save_if_due(self) -> None:
        """Save the shard if the interval has passed, or if it was emptied or loaded.

        Then it is saved since a restart would otherwise restore the removed rows. Errors such as a
        full disk are logged. After an error, the previous save stays valid. The next attempt
        follows after another interval.
        """
        if self.recipe.checkpoint_dir is None:
            return
        if not self._save_now and time.monotonic() < self._next_save:
            return
        try:
            self.save_own()
        except Exception:
            self._next_save = time.monotonic() + self.recipe.checkpoint_interval
            _LOG.exception("shard %d could not save itself, and will try again", self.shard)

    def _save_again_and_again(self) -> None:
        pause = max(0.01, min(1.0, self.recipe.checkpoint_interval / 4))
        while not self._ended.wait(pause):
            self.save_if_due()

    def _restore(self, folder: Path) -> None:
        try:
            with Checkpoint(folder) as saved:
                state, file = saved.manifest.get("sharding"), saved.folder / MANIFEST
            try:
                own = decode_state(OwnState, state, str(file))
            except ValueError as error:
                raise CheckpointError(str(error)) from None
            self.buffer.loads(folder)
            self._before = own.before
            self.barrier.load(own.writes)
        except CheckpointError as error:  # start empty; the loss is reported
            warnings.warn(f"shard {self.shard} starts empty: {error}", UserWarning, stacklevel=2)

    # -- the checkpoint of all ----------------------------------------------------------------

    def freeze(self, token: str, seconds: float) -> KnownWrites:
        """Start to delay new writes; see ``Barrier``."""
        with self.buffer._locked():
            return self.barrier.freeze(token, seconds)

    def let_through(self, token: str, writes: set[tuple[str, int]]) -> None:
        """Admit the parts of writes that were begun in other shards."""
        with self.buffer._locked():
            self.barrier.let_through(token, writes)

    def has_all(self, writes: set[tuple[str, int]]) -> bool:
        """Return whether the parts of these writes have been received."""
        with self.buffer._locked():
            return self.barrier.has_all(writes)

    def forget(self, writes: set[tuple[str, int]]) -> None:
        """Forget these writes, since their other parts are lost."""
        with self.buffer._locked():
            self.barrier.forget(writes)

    def thaw(self, token: str) -> None:
        """Admit new writes again."""
        with self.buffer._locked():
            self.barrier.thaw(token)

    def begin_save(self, token: str, path: str) -> ShardFacts:
        """Freeze the rows for a save.

        A thread writes the files after this call has returned.
        """

        def snapshot_of(base: Base) -> Snapshot:
            with self.buffer._locked():
                self.barrier.check(token)
                snapshot = self._snapshot(path, base)
                if not taken.done():
                    taken.set_result(self.facts())
            return snapshot

        taken: Future[Any] = Future()
        self._saving[token] = self._savers.submit(save_snapshot, path, snapshot_of)
        wait((taken, self._saving[token]), return_when=FIRST_COMPLETED)
        if not taken.done():
            self.finish_save(token)
        found: ShardFacts = taken.result()
        return found

    def finish_save(self, token: str) -> None:
        """Wait until the files of this save are written.

        Raises:
            RuntimeError: no save has this token, for example because an earlier incarnation began
                it.
            Errors of the save are raised as well.
        """
        if token not in self._saving:
            raise RuntimeError(
                f"shard {self.shard} has been restarted while all were saved; nothing was published"
            )
        try:
            self._saving[token].result()
        finally:
            self._saving.pop(token, None)

    def prepare_load(self, token: str, sources: list[str], as_they_lie: bool) -> tuple[int, int]:
        """Read this shard's rows from a checkpoint of all shards into a second buffer.

        Args:
            sources: the paths of the checkpoints of the saved shards.
            as_they_lie: True if this shard gets exactly the rows of the source with the same
                number.

        Returns:
            The count of rows read, and the count of these rows that did not fit.
        """
        buffer = self.recipe.make()
        if as_they_lie:
            check_sampler(buffer, sources[self.shard])
            buffer.loads(sources[self.shard])
            found = len(buffer), 0
        else:
            found = load_share(buffer, self.recipe, self.shard, sources)
        self._loaded = token, buffer
        return found

    def state(self, token: str) -> dict[str, Any]:
        """Return a copy of the whole state of the shard, while all shards are frozen."""
        with self.buffer._locked():
            self.barrier.check(token)
            return self.buffer.state_dict()

    def prepare_state(self, token: str, state: dict[str, Any]) -> None:
        """Load the state of a shard into a second buffer.

        Raises:
            ValueError: the state does not fit.
        """
        buffer = self.recipe.make()
        buffer.load_state_dict(state)
        self._loaded = token, buffer

    def has_load(self, token: str) -> None:
        """Raise RuntimeError if the shard was restarted, or another client has prepared a load."""
        if self._loaded is None or self._loaded[0] != token:
            raise RuntimeError("expected a prepared load, got none")

    def commit_load(self, token: str, loads: int) -> ShardFacts:
        """Replace the rows of the shard by the rows of the second buffer, in this load of all."""
        self.has_load(token)
        assert self._loaded is not None
        _, buffer = self._loaded
        old = self.buffer
        with old._locked() as storage:
            written = self._before + storage.ledger.next_position
            self._install(buffer)
            self._before = written - buffer.storage.ledger.next_position + len(buffer)
            self._loaded = None
            self._version += 1
            self._loads = loads
            self._save_now = True
            self.barrier.load([])
        old.shutdown()
        self.save_if_due()
        return self.facts()

    def drop_load(self, token: str) -> None:
        """Drop the second buffer of this load."""
        if self._loaded is not None and self._loaded[0] == token:
            self._loaded = None

    def close(self) -> None:
        """Wait for saves under way, and shut the buffer down."""
        self._ended.set()
        self._savers.shutdown()
        self.buffer.shutdown()

    def stats(self) -> dict[str, Any]:
        """Return ``ReplayBuffer.stats`` of the shard's buffer."""
        return self.buffer.stats()

    # -- writing ------------------------------------------------------------------------------

    def _once(self, stamp: Stamp, write: Callable[[Storage], Any]) -> tuple[Any, ShardFacts]:
        """Make a write unless it was made before; return its answer, and the facts.

        Raises:
            BarrierBusy: the write is not admitted now, and the client has to send it again.
        """
        with self.buffer._locked() as storage:
            known = self.barrier.answer(stamp)
            if known is None:
                if not self.barrier.admits(stamp):
                    raise BarrierBusy("all shards are being saved or loaded; send the write again")
                try:
                    known = (write(storage),)
                except SchemaReplaced:  # not recorded, since the client sends the part again
                    raise
                except Exception:
                    self.barrier.refused(stamp)
                    raise
                self._version += 1
                self.barrier.came(stamp, known[0])
            return known[0], self.facts()

    def extend(
        self,
        stamp: Stamp,
        loads: int,
        root: Node,
        leaves: dict[Any, torch.Tensor],
        priorities: torch.Tensor | None,
        most: float,
    ) -> tuple[torch.Tensor, ShardFacts]:
        """Write rows; return their slots.

        Args:
            loads: the number of loads before the agreement on the schema of the rows.
            priorities: raw priorities, ``[K]``. None sets the default, which is then at least
                ``most``.

        Raises:
            SchemaReplaced: the client does not know of a later load.
        """

        def write(storage: Storage) -> torch.Tensor:
            if loads < self._loads:
                raise SchemaReplaced("other rows were loaded since the schema was agreed upon")
            count = next(iter(leaves.values())).shape[0]
            data = build(root, leaves, torch.Size([count]), torch.device("cpu"))
            sampler: Any = self.buffer._sampler
            if sampler.prioritized:
                sampler._table.most = max(sampler._table.most, most)
            slots = self.buffer.extend(data, update_priority=False)
            if priorities is not None:
                sampler.update_priority(slots, priorities, storage=storage)
            return slots

        slots, facts = self._once(stamp, write)
        return torch.as_tensor(slots, dtype=torch.int64, device="cpu"), facts

    def update(
        self,
        stamp: Stamp,
        slots: torch.Tensor,
        generation: torch.Tensor | None,
        priorities: torch.Tensor,
    ) -> tuple[int, ShardFacts]:
        """Set priorities; return the number of updates whose rows were overwritten."""

        def write(storage: Storage) -> int:
            sampler: Any = self.buffer._sampler
            before = sampler.dropped_updates
            sampler.update_priority(slots, priorities, storage=storage, generation=generation)
            return int(sampler.dropped_updates - before)

        return self._once(stamp, write)

    def patch(
        self, stamp: Stamp, slots: torch.Tensor, generation: torch.Tensor, patch: Patch
    ) -> tuple[torch.Tensor, ShardFacts]:
        """Write values into the rows that are still stored.

        Returns:
            Masks of the updated rows and, with versions, of the rejected rows: bool ``[1 or 2,
            K]``.

        Raises:
            KeyError, ValueError: the patch does not fit the columns, since others were loaded.
        """

        def write(storage: Storage) -> torch.Tensor:
            rows = 1 if patch.versions is None else 2
            found = torch.zeros(rows, len(slots), dtype=torch.bool, device="cpu")
            if len(storage):
                assert isinstance(storage, TensorStorage)
                checked_patch(storage.leaf, len(slots), *patch)
                live, refused = patched(storage, slots[:, None], generation, patch)
                found[0] = live
                if refused is not None:
                    found[1] = refused
            return found

        found, facts = self._once(stamp, write)
        return torch.as_tensor(found, dtype=torch.bool, device="cpu"), facts

    def layout(self) -> Node | None:
        """Return the schema of the stored rows, or None if nothing is stored."""
        with self.buffer._locked() as storage:
            assert isinstance(storage, TensorStorage)  # see ShardRecipe.make
            return storage.require().schema.root if len(storage) else None

    def empty(self, stamp: Stamp, empty_write_count: bool) -> tuple[None, ShardFacts]:
        """Remove all rows, and soon afterwards save the empty shard."""

        def write(storage: Storage) -> None:
            self.buffer.empty(empty_write_count)
            self._save_now = True

        return self._once(stamp, write)

    # -- reading ------------------------------------------------------------------------------

    def draw(
        self, count: int, terms: Terms, seed: int, anyway: bool = False, generations: bool = False
    ) -> ShardPart:
        """Draw ``count`` times.

        If the mass is not positive, return no rows, unless ``anyway`` is True. With
        ``generations``, return generations even if neither the writer nor the sampler needs them.
        """
        with self.buffer._locked() as storage:
            facts = self.facts(terms)
            if not anyway and (not count or not facts.mass):
                return ShardPart(None, {}, None, facts)
            batch = self.law.draw(self.buffer, count, terms, self._generator.manual_seed(seed))
            values = self.law.values(self.buffer, batch.draw)
            buffer = self.buffer
            tracked = buffer._writer.tracks_generations or buffer._sampler.prioritized
            if not (tracked or generations):
                batch.draw.info.pop("index_generation", None)
        del storage
        data, info = finished(self.buffer, batch)
        return ShardPart(data, info, values, facts)

    def read(self, slots: torch.Tensor) -> tuple[Any, ShardFacts]:
        """Return the transformed rows of slots ``[K]``.

        Raises:
            IndexError: a slot has no stored row.
        """
        with self.buffer._locked():
            return self.buffer[slots], self.facts()

    def stored_slots(self) -> torch.Tensor:
        """Return the slots of all rows, oldest first, int64 ``[rows]``."""
        with self.buffer._locked() as storage:
            return storage.ledger.write_order() if len(storage) else arange(0)

    # -- streams ------------------------------------------------------------------------------

    def flush(self, stamp: Stamp) -> tuple[torch.Tensor, ShardFacts]:
        """Store the rows that transforms hold back; return their slots."""
        slots, facts = self._once(stamp, lambda storage: self.buffer.flush())
        return torch.as_tensor(slots, dtype=torch.int64, device="cpu"), facts

    def streams(self, lanes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the keys of streams, and whether they have rows in this shard.

        The keys are ``[K, *F]``, and the mask is bool ``[K]``. The result is None if nothing is
        stored.

        Raises:
            IndexError: the storage has no ``lane_key``, and a lane number is too large.
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
        """End the open episodes of all streams, or of ``lanes`` with rows in this shard."""

        def write(storage: Storage) -> None:
            named = lanes if lanes is None else lanes[[_has(storage, cell) for cell in lanes]]
            if named is None or len(named):
                self.buffer.cut(named)

        return self._once(stamp, write)


def _has(storage: Storage, stream: torch.Tensor) -> bool:
    try:
        storage.lanes_named(stream)
    except IndexError:
        return False
    return True
