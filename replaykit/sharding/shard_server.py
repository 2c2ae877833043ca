"""Serve one shard: its buffer, its saves, and the barrier that makes saves consistent."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch

from replaykit._compat import arange
from replaykit.buffer import ReplayBuffer
from replaykit.buffer.drawing import Lent
from replaykit.buffer.row_updates import Patch, patched
from replaykit.checkpoint import Base, Checkpoint, Snapshot, save_snapshot
from replaykit.checkpoint.checkpoint_format import MANIFEST
from replaykit.errors import CheckpointError
from replaykit.sharding.protocol import BarrierBusy, ShardFacts, ShardPart, Terms
from replaykit.sharding.routing import check_sampler, load_share
from replaykit.sharding.shard_config import DrawLaw, ShardRecipe, checked_own, law_of
from replaykit.storages import Storage, TensorStorage
from replaykit.structure import Node, build

__all__ = ["Barrier", "KnownWrites", "SavedShard", "ShardHolder", "Stamp", "missing_parts"]

_REFUSED: Any = object()
"""The answer to a part that was not written."""


class Stamp(NamedTuple):
    """Which write this is part of.

    Attributes:
        client, number: name the write. ``shards``: bit s is set where shard s has a part of it.
        done: all writes of this client with lower numbers have been acknowledged to it.
    """

    client: str
    number: int
    shards: int
    done: int


class KnownWrites(NamedTuple):
    """What has come to a shard.

    Attributes:
        came: writes, and in which shards they have parts. Those that are long done, or whose
            clients have long been silent, are left out.
        done: by client the number below which all writes were acknowledged to it.
    """

    came: dict[tuple[str, int], int]
    done: dict[str, int]


def missing_parts(found: dict[int, KnownWrites]) -> dict[int, set[tuple[str, int]]]:
    """Which parts of writes that were begun have not come, by shard.

    Example:
        >>> from replaykit.sharding.shard_server import KnownWrites, missing_parts
        >>> ahead = KnownWrites({("a", 7): 0b11}, {"a": 7})
        >>> missing_parts({0: ahead, 1: KnownWrites({}, {"a": 5})})
        {1: {('a', 7)}}
    """
    done: dict[str, int] = {}
    for known in found.values():
        for client, number in known.done.items():
            done[client] = max(number, done.get(client, 0))
    missing: dict[int, set[tuple[str, int]]] = {}
    for known in found.values():
        for name, bits in known.came.items():
            if name[1] < done.get(name[0], 0):
                continue
            for shard, other in found.items():
                if bits >> shard & 1 and name not in other.came:
                    missing.setdefault(shard, set()).add(name)
    return missing


class Barrier:
    """Knows which writes have come, and lets none begin while all shards are saved.

    A batch has parts in several shards. One that was begun anywhere when the shards were frozen is
    let through everywhere; one that was not waits everywhere. So when all that were begun have
    come, what the shards hold is what one big buffer held between two writes.

    A part that comes again, since the answer to it was lost with a connection or a shard, is known
    and gets the same answer, also after a restart from a checkpoint.

    Args:
        within: seconds within which a client is done with a write, or gives it up.

    Not thread-safe: whoever holds the shard guards it. Memory: the writes under way of each client
    that has written in the last ``4 * within + 60`` seconds; nobody asks for older ones again.
    """

    def __init__(self, within: float = 60.0) -> None:
        self._answers: dict[str, dict[int, tuple[int, Any]]] = {}
        self._done: dict[str, int] = {}
        # When each client wrote last, from who has been silent longest. What a save asks others
        # for is younger than what is forgotten, so that no shard misses what another forgot.
        self._heard: dict[str, float] = {}
        self._young_s, self._forgotten_s = 2 * within + 30, 4 * within + 60
        self._token: str | None = None
        self._until = 0.0
        self._through: set[tuple[str, int]] = set()

    # -- writes -------------------------------------------------------------------------------

    def admits(self, stamp: Stamp) -> bool:
        """Whether a part may be written now, or has been."""
        if not self.frozen:
            return True
        name = (stamp.client, stamp.number)
        return name in self._through or self.answer(stamp) is not None

    def answer(self, stamp: Stamp) -> tuple[Any] | None:
        """What was answered to a part that has been written; None where it has not."""
        found = self._answers.get(stamp.client, {}).get(stamp.number)
        return None if found is None or found[1] is _REFUSED else (found[1],)

    def came(self, stamp: Stamp, answer: Any) -> None:
        """Notes a part that was written, and what is answered: a plain value or a tensor."""
        known = self._answers.setdefault(stamp.client, {})
        done = self._done[stamp.client] = max(stamp.done, self._done.get(stamp.client, 0))
        for number in [number for number in known if number < done]:
            del known[number]
        known[stamp.number] = (stamp.shards, answer)
        now = time.monotonic()
        self._heard.pop(stamp.client, None)
        self._heard[stamp.client] = now
        for client, heard in list(itertools.islice(self._heard.items(), 2)):
            if now - heard > self._forgotten_s:
                for table in (self._heard, self._answers, self._done):
                    table.pop(client, None)

    def refused(self, stamp: Stamp) -> None:
        """Notes a part that was not written and will not be: no save waits for it."""
        self.came(stamp, _REFUSED)

    # -- saves --------------------------------------------------------------------------------

    @property
    def frozen(self) -> bool:
        """Whether writes wait. They do not wait longer than was promised."""
        return self._token is not None and time.monotonic() < self._until

    def freeze(self, token: str, seconds: float) -> KnownWrites:
        """Keeps writes out; returns those that have come.

        Raises:
            BarrierBusy: somebody else does.
        """
        if self.frozen and self._token != token:
            raise BarrierBusy("somebody else saves or loads all shards at this moment")
        now = time.monotonic()
        self._token, self._until, self._through = token, now + seconds, set()
        came = {
            (client, number): shards
            for client, known in self._answers.items()
            if now - self._heard[client] < self._young_s
            for number, (shards, _) in known.items()
        }
        return KnownWrites(came, dict(self._done))

    def let_through(self, token: str, writes: set[tuple[str, int]]) -> None:
        """Lets parts in of writes that were begun elsewhere."""
        self.check(token)
        self._through |= writes

    def has_all(self, writes: set[tuple[str, int]]) -> bool:
        """Whether the parts of these writes have come."""
        return all(
            number in self._answers.get(client, {}) or number < self._done.get(client, 0)
            for client, number in writes
        )

    def forget(self, writes: set[tuple[str, int]]) -> None:
        """No longer waits for the other parts of these writes: they will not come."""
        for client, number in writes:
            self._answers.get(client, {}).pop(number, None)

    def check(self, token: str) -> None:
        """Raises RuntimeError where writes have not been kept out since ``freeze``."""
        if not self.frozen or self._token != token:
            raise RuntimeError("the shards were held back for too long, and are written to again")

    def thaw(self, token: str) -> None:
        """Lets writes in, if it was this token that kept them out."""
        if self._token == token:
            self._token, self._through = None, set()

    # -- state --------------------------------------------------------------------------------

    def state(self) -> list[list[Any]]:
        """The writes under way, as plain values."""
        return [
            [client, number, shards, answer.tolist() if hasattr(answer, "tolist") else answer]
            for client, known in self._answers.items()
            for number, (shards, answer) in known.items()
            if answer is not _REFUSED
        ]

    def load(self, state: list[list[Any]]) -> None:
        """Takes the place of what was known."""
        self._answers, self._done, self._heard = {}, {}, {}
        now = time.monotonic()
        for client, number, shards, answer in state:
            self._answers.setdefault(client, {})[number] = (shards, answer)
            self._heard[client] = now


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

    def freeze(self, token: str, seconds: float) -> KnownWrites:
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
    ) -> ShardPart:
        """Draws ``count`` times; none where there is nothing to draw from, unless ``anyway``.

        ``generations``: tells those of the rows in any case.
        """
        with self.buffer._locked() as storage:
            facts = self.facts(terms)
            if not anyway and (not count or not facts.mass):
                return ShardPart(None, {}, None, facts)
            lent = Lent(generator=self._generator.manual_seed(seed))
            drawn = self.law.draw(self.buffer, count, terms, lent)
            values = self.law.values(self.buffer, drawn)
            buffer = self.buffer
            tracked = buffer._writer.tracks_generations or buffer._sampler.prioritized
            if not (tracked or generations):
                drawn.info.pop("index_generation", None)
        del storage
        data, info = self.buffer._finish(drawn)
        return ShardPart(data, info, values, facts)

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
