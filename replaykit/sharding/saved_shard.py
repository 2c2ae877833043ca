"""What a shard is between messages: one buffer, its state, and how it is saved and restored."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from replaykit.buffer import ReplayBuffer
from replaykit.checkpoint import Base, Checkpoint, Snapshot, save_snapshot
from replaykit.checkpoint.manifests import MANIFEST
from replaykit.errors import CheckpointError
from replaykit.sharding.barrier import Barrier, Known
from replaykit.sharding.facts import ShardFacts, Terms
from replaykit.sharding.heads import checked_own
from replaykit.sharding.laws import DrawLaw, law_of
from replaykit.sharding.recipe import ShardRecipe
from replaykit.sharding.resharding import check_sampler, load_share

__all__ = ["SavedShard"]

_LOG = logging.getLogger(__name__)


class SavedShard:
    """One buffer of many, its state, and its part in checkpoints: its own, and those of all shards.

    Thread-safe: the lock of the buffer's storage guards all of it.
    """

    def __init__(self, recipe: ShardRecipe, shard: int, incarnation: int = 0) -> None:
        self.recipe, self.shard = recipe, shard
        folder = recipe.folder(shard)
        there = folder is not None and (folder / "manifest.json").exists()
        if there and not incarnation:
            raise FileExistsError(
                f"expected a checkpoint_dir without shards, got {folder}, which another buffer has "
                "saved; give a new directory, or load() a checkpoint of all shards"
            )
        self._install(recipe.make())
        self.barrier = Barrier(recipe.timeout)
        self._version = self._loads = 0
        self._terms = recipe.terms
        self._before = 0  # rows written before the positions of the ledger began
        self._loaded: tuple[str, ReplayBuffer] | None = None
        self._saving: dict[str, tuple[threading.Thread, list[BaseException]]] = {}
        self._next_save = time.monotonic() + recipe.checkpoint_interval
        self._emptied = False
        if folder is not None and there:
            self._restore(folder)

    def _install(self, buffer: ReplayBuffer) -> None:
        self.buffer = buffer
        self.law: DrawLaw = law_of(buffer.sampler)
        self._generator = torch.Generator("cpu")

    # -- being described ----------------------------------------------------------------------

    def facts(self, terms: Terms | None = None) -> ShardFacts:
        """The state of the shard now, with its mass in the terms given, or those asked for last."""
        with self.buffer._locked() as storage:
            terms = self._terms if terms is None else terms
            mass: float = 0
            smallest = float("inf")
            if terms is not None:
                # What cannot be drawn from has no mass; a draw says why.
                with contextlib.suppress(KeyError, RuntimeError):
                    mass, smallest = self.law.measure(self.buffer, storage, terms)
                self._terms = terms  # not those that the sampler has refused
            sampler: Any = self.buffer._sampler
            most = sampler._stored.most if sampler.prioritized else 1.0
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
            )

    # -- its own checkpoint -------------------------------------------------------------------

    def _snapshot(self, path: str | os.PathLike[str], base: Base) -> Snapshot:
        with self.buffer._locked():
            snapshot = self.buffer._snapshot(path, base)
            snapshot.head["sharding"] = {
                "shard": self.shard,
                "before": self._before,
                "writes": self.barrier.state(),
            }
            return snapshot

    def save_own(self) -> None:
        """Saves the shard where it will be looked for if it dies."""
        folder = self.recipe.folder(self.shard)
        if folder is not None:
            self._emptied = False  # of what is emptied meanwhile the next save knows
            save_snapshot(folder, lambda base: self._snapshot(folder, base))
        self._next_save = time.monotonic() + self.recipe.checkpoint_interval

    def save_if_due(self) -> None:
        """Saves the shard if the interval has passed since the last time, or if it was emptied:
        rows that were let go would come back.

        What goes wrong, as on a full disk, is logged: the save before stays, and the next one is
        tried after another interval. The shard goes on.
        """
        if self.recipe.checkpoint_dir is None:
            return
        if not self._emptied and time.monotonic() < self._next_save:
            return
        try:
            self.save_own()
        except Exception:
            self._next_save = time.monotonic() + self.recipe.checkpoint_interval
            _LOG.exception("shard %d could not save itself, and will try again", self.shard)

    def _restore(self, folder: Path) -> None:
        try:
            with Checkpoint(folder) as saved:
                before, writes = self._own(saved)
            self.buffer.loads(folder)
            self._before = before
            self.barrier.load(writes)
        except CheckpointError as error:  # better an empty shard than none; its loss says so
            warnings.warn(f"shard {self.shard} starts empty: {error}", UserWarning, stacklevel=2)

    @staticmethod
    def _own(saved: Checkpoint) -> tuple[int, list[Any]]:
        try:
            return checked_own(saved.manifest.get("sharding"))
        except ValueError as error:
            raise CheckpointError(f"{saved.folder / MANIFEST} cannot be read: {error}") from None

    # -- the checkpoint of all ----------------------------------------------------------------

    def freeze(self, token: str, seconds: float) -> Known:
        """Keeps writes out; see ``Barrier``."""
        with self.buffer._locked():
            return self.barrier.freeze(token, seconds)

    def let_through(self, token: str, writes: set[tuple[str, int]]) -> None:
        """Lets in what was begun elsewhere."""
        with self.buffer._locked():
            self.barrier.let_through(token, writes)

    def has_all(self, writes: set[tuple[str, int]]) -> bool:
        """Whether what was let through has come."""
        with self.buffer._locked():
            return self.barrier.has_all(writes)

    def forget(self, writes: set[tuple[str, int]]) -> None:
        """Told that other parts of these writes are lost."""
        with self.buffer._locked():
            self.barrier.forget(writes)

    def thaw(self, token: str) -> None:
        """Lets writes in again."""
        with self.buffer._locked():
            self.barrier.thaw(token)

    def begin_save(self, token: str, path: str) -> ShardFacts:
        """Takes what the shard is at this instant, and writes it into files after it returns."""
        taken, failed = threading.Event(), []

        def take(base: Base) -> Snapshot:
            with self.buffer._locked():
                self.barrier.check(token)
                snapshot = self._snapshot(path, base)
                found.append(self.facts())
            taken.set()
            return snapshot

        def save() -> None:
            try:
                save_snapshot(path, take)
            except BaseException as error:
                failed.append(error)
            finally:
                taken.set()

        found: list[ShardFacts] = []
        thread = threading.Thread(target=save, name=f"replaykit-save-{self.shard}")
        thread.start()
        taken.wait()
        self._saving[token] = thread, failed
        if not found:
            self.finish_save(token)
        return found[0]

    def finish_save(self, token: str) -> None:
        """Waits until the files of this save are there; raises what went wrong.

        Raises:
            RuntimeError: it was begun by an incarnation that has died, or not at all.
        """
        if token not in self._saving:
            raise RuntimeError(
                f"shard {self.shard} has been restarted while all were saved; nothing has been "
                "published"
            )
        thread, failed = self._saving[token]
        thread.join()
        self._saving.pop(token, None)
        if failed:
            raise failed[0]

    def prepare_load(self, token: str, sources: list[str], as_they_lie: bool) -> tuple[int, int]:
        """Reads this shard's rows out of a checkpoint of all shards, beside those that it has.

        Args:
            sources: the checkpoints of the shards that were saved.
            as_they_lie: this shard's is the one with its number.

        Returns:
            How many rows it has read, and how many of them did not fit.
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
        """Copies of all that the shard holds, while all are frozen."""
        with self.buffer._locked():
            self.barrier.check(token)
            return self.buffer.state_dict()

    def prepare_state(self, token: str, state: dict[str, Any]) -> None:
        """Takes copies of what a shard has held, beside what this one holds.

        Raises:
            ValueError: it does not fit.
        """
        buffer = self.recipe.make()
        buffer.load_state_dict(state)
        self._loaded = token, buffer

    def commit_load(self, token: str) -> ShardFacts:
        """Lets go of the rows that the shard has for those that were read."""
        if self._loaded is None or self._loaded[0] != token:
            raise RuntimeError("expected a load that was prepared, got none")
        _, buffer = self._loaded
        old = self.buffer
        with old._locked() as storage:
            written = self._before + storage.ledger.next_position
            self._install(buffer)
            self._before = written - buffer.storage.ledger.next_position + len(buffer)
            self._loaded = None
            self._version += 1
            self._loads += 1
            self.barrier.load([])
        old.shutdown()
        self.save_own()
        return self.facts()

    def drop_load(self) -> None:
        """Forgets what was read."""
        self._loaded = None

    def close(self) -> None:
        """Ends what the shard does besides answering."""
        for thread, _ in list(self._saving.values()):
            thread.join()
        self.buffer.shutdown()
