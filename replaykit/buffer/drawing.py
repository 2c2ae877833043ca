"""Draw the index of a batch, read its rows, and restore the generator when a draw fails."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from replaykit._compat import as_tensor
from replaykit.buffer.core import BufferCore, DataT, SamplerT, StorageT, WriterT, checked_batch_size
from replaykit.buffer.prefetch import Drawn, Origin
from replaykit.buffer.row_context import fetch_all
from replaykit.samplers import Sampler, Sequence, Transition
from replaykit.samplers.window_measures import index_for
from replaykit.storages import Storage
from replaykit.storages.column_storage import ColumnStorage
from replaykit.storages.indexing import ravel

__all__ = [
    "Drawing",
    "Lent",
    "put_back",
    "random_state",
    "set_random_state",
    "show",
    "shows",
    "unchanged_since",
]


def random_state(generator: torch.Generator | None) -> torch.Tensor:
    """The state of a generator; None: of torch's global one."""
    return torch.get_rng_state() if generator is None else generator.get_state()


def unchanged_since(generator: torch.Generator | None, origin: Origin) -> bool:
    """Whether nobody has drawn from the generator after the draw."""
    after = origin.random_after
    return after is not None and torch.equal(random_state(generator), after)


def set_random_state(generator: torch.Generator | None, state: torch.Tensor | None) -> None:
    """Sets the state of a generator; None: of torch's global one."""
    if state is None:
        return
    if generator is None:
        torch.set_rng_state(state)
    else:
        generator.set_state(state)


_TRIES = 3
"""Draws of which others overwrite rows before one keeps them out."""


@dataclass(frozen=True, slots=True)
class Lent:
    """How a draw is made that is part of somebody else's batch.

    Draws that the buffer has kept, or makes ahead, are left alone.

    Attributes:
        generator: where its randomness comes from; None: as for the buffer's own.
        collate: takes the place of the buffer's ``collate_fn``; None: it does not.
        noted: whether it is noted how transforms draw, since the draw may be kept.
        kept: a draw made before, to be read if its rows are still there.
        generations: whether it knows them in any case, or as for the buffer's own.
        numbered: whether transforms see ``index`` in the rows, as in the buffer's own.
    """

    generator: torch.Generator | None = None
    collate: Callable[[Any], Any] | None = None
    noted: bool = False
    kept: Drawn | None = None
    generations: bool = True
    numbered: bool = False


_LENT = -1
"""The batch size of a draw that is not one of the buffer's own."""


class Drawing(BufferCore[DataT, StorageT, SamplerT, WriterT]):
    """Makes draws: under the lock, beside other processes, ahead of time, and once more."""

    def _size_of(self, batch_size: int | None) -> int:
        self._ready()
        if self._closed:
            raise RuntimeError("this buffer was shut down")
        if batch_size is not None:
            return checked_batch_size(batch_size)
        if self._batch_size is None:
            raise RuntimeError(
                "batch_size not specified: give it to the constructor or to sample()"
            )
        return self._batch_size

    def _draw(self, size: int, lent: Lent | None = None) -> Drawn:
        tries = _TRIES if self._shared and not self._sampler.reads_rows else 0
        while tries:
            drawn, again = self._draw_apart(size, lent)
            if drawn is not None:
                return drawn
            tries = tries - 1 if again else 0
        return self._draw_held(size, lent)

    def _draw_apart(self, size: int, lent: Lent | None = None) -> tuple[Drawn | None, bool]:
        """Draws while other processes write, and looks afterwards whether they have overwritten
        what was read: then there is no draw.

        Returns:
            The draw, or None and whether another try may do; else it takes the lock, which keeps
            others out.
        """
        storage, sampler = self._storage, self._sampler
        sharing, lock = storage.recovery, storage.lock
        if not lock.enter_apart():
            return None, False
        try:
            seen = sharing.glance()
            if seen is None:
                return None, False
            origin = Origin(storage, sampler, size if lent is None else _LENT, sampler.ran_out)
            if origin.size != self._batch_size:
                origin.random = random_state(self._generator)
            try:
                drawn = self._drawn(storage, size, lent, origin)
            except Exception:
                if sharing.intact(seen, None):
                    raise
                return None, True  # it may come of rows that were overwritten
            slots = None
            if not self._chain.reads_around:
                slots = drawn.index[:, 0] if storage.ndim > 1 else drawn.index
            if not sharing.intact(seen, slots):
                show(sampler, origin.ran_out)
                if type(sampler).put_back is not Sampler.put_back:
                    sampler.put_back([drawn.anchors], storage)
                return None, True
            if origin.size != self._batch_size:
                origin.random_after = random_state(self._generator)
            return drawn, True
        finally:
            lock.leave_apart()

    def _draw_held(self, size: int, lent: Lent | None = None) -> Drawn:
        if lent is None and self._prefetcher is not None:
            self._settle_draws()  # which were asked for before this one
        while True:
            storage = self._storage
            with storage.lock:
                if storage is not self._storage:  # it may be exchanged until the lock is held
                    continue
                origin = Origin(storage, self._sampler, size, self._sampler.ran_out)
                if lent is not None:
                    origin.size = _LENT
                    # Of a generator that is not this buffer's own, its owner takes care.
                    own = lent.generator is None
                    origin.random = random_state(self._generator) if own else None
                    drawn = self._drawn(storage, size, lent, origin)
                    origin.random_after = random_state(self._generator) if own else None
                elif size == self._batch_size:
                    drawn = self._drawn(storage, size, None, origin)
                else:
                    origin.random = random_state(self._generator)
                    drawn = self._drawn(storage, size, None, origin)
                    origin.random_after = random_state(self._generator)
                return drawn

    def _abandon(self, entry: Any, *, settled: bool = True) -> None:
        """Takes back what was drawn for a prefetched batch that will not be delivered.

        ``settled``: draws that were asked for take place first. An interrupt does not wait for
        them, which threads may be kept from by the very batch that it came for.
        """
        with self._locked(settled=settled):
            if self._prefetcher is not None:
                self._prefetcher.forget(entry)
            if entry.drawn is not None:
                self._give_back(entry.drawn)

    def _give_back(self, drawn: Drawn, *, settled: bool = True) -> None:
        """Takes back a draw whose batch could not be made: it comes next, as if not yet drawn."""
        origin = drawn.origin
        with self._locked(settled=settled) as storage:
            if origin is None or origin.storage is not storage:
                return
            if origin.sampler is not self._sampler:
                return
            if self._untaken(drawn, origin, storage):
                self._pending.extend([drawn.kept(), *self._take_prepared()])

    def _untaken(self, drawn: Drawn, origin: Origin, storage: Storage) -> bool:
        """Has the sampler be as before a draw; returns whether it is to be kept instead.

        The lock is held.
        """
        show(self._sampler, origin.ran_out)
        if self._sampler.consumes:  # its slots may be written before it would come again
            positions = storage.ledger.positions(drawn.anchors.cpu())
            unwritten = drawn.anchors[(positions < drawn.written).to(drawn.anchors.device)]
            self._sampler.put_back([unwritten], storage)
        elif origin.size == self._batch_size:
            return True
        elif type(self._sampler).put_back is not Sampler.put_back:
            self._sampler.put_back([drawn.anchors], storage)
        elif unchanged_since(self._generator, origin):
            set_random_state(self._generator, origin.random)
        return False

    def _draw_ahead(self, entry: Any) -> Drawn | None:
        """Draws for a prefetched batch; None if nobody waits for it any more."""
        if self._prefetcher is not None:
            self._prefetcher.give_way(self._storage.lock)
        # What this thread has asked for before has been drawn: it is its turn.
        with self._locked(settled=False) as storage:
            prefetcher, sampler = self._prefetcher, self._sampler
            if prefetcher is None or not prefetcher.wanted(entry):
                return None
            entry.written = storage.ledger.next_position
            # What users see of the sampler belongs to the batch that they got last.
            delivered = sampler._shown = sampler.ran_out
            size = self._size_of(None)
            try:
                origin = Origin(storage, sampler, size, delivered)
                drawn = self._drawn(storage, size, None, origin, begin=entry.here)
                entry.drawn = drawn
                drawn.late = entry.here or self._chain.ordered
            finally:
                show(sampler, delivered)
                sampler._shown = None
            return entry.drawn

    def _drawn(
        self,
        storage: Storage,
        size: int,
        lent: Lent | None = None,
        origin: Origin | None = None,
        *,
        begin: bool = False,
    ) -> Drawn:
        """Draws, or takes what was kept, and reads; where reading fails, the draw is taken back.

        ``origin``: None: nothing is taken back. ``begin``: reading may go on by itself.
        """
        drawn, fresh, generator, theirs = None, False, self._generator, False
        if lent is not None:
            generator = generator if lent.generator is None else lent.generator
            if lent.kept is not None:
                drawn = self._still(lent.kept, storage)
                theirs = drawn is not None
        elif self._pending and size == self._batch_size:
            drawn = self._kept(storage)
        if drawn is None:
            drawn = self._sampled(storage, self._sampler, size, generator)
            fresh = drawn.index is drawn.anchors  # and not what a sample unit has made of them
        drawn.origin = origin
        try:
            self._read(drawn, storage, lent, generator, fresh, begin)
        except BaseException:
            if origin is not None and not theirs:
                if origin.random is not None:
                    origin.random_after = random_state(self._generator)
                if self._untaken(drawn, origin, storage):
                    self._pending.appendleft(drawn.kept())  # what is prepared comes before it
            raise
        return drawn

    def _read(
        self,
        drawn: Drawn,
        storage: Storage,
        lent: Lent | None,
        generator: torch.Generator | None,
        fresh: bool,
        begin: bool,
    ) -> None:
        """Reads the rows of a draw, and what transforms read around them."""
        # A draw that was kept meets what its slots hold now.
        told = fresh and "index_generation" in drawn.info
        track = self._writer.tracks_generations or self._sampler.prioritized
        track = track or (lent is not None and lent.generations)
        if track and not told:
            drawn.info["index_generation"] = _generations(storage, drawn.index)
            if "anchor_index" in drawn.info:
                anchors = drawn.info["anchor_index"]
                drawn.info["anchor_generation"] = _generations(storage, anchors)
        collate = self._collate_fn if lent is None or lent.collate is None else lent.collate
        own = collate is not None
        held = False
        # A storage that defines `read` anew means every read.
        if isinstance(storage, ColumnStorage) and type(storage).read is ColumnStorage.read:
            # Of what was begun nobody looks at the values before it is over: transforms might.
            if begin and not len(self._chain):
                drawn.rows, drawn.begun = storage.begin_held(drawn.index, self._contiguous)
            else:
                drawn.rows = storage.read_held(drawn.index, self._contiguous)
            held = not own and type(storage).collate is Storage.collate
        else:
            drawn.rows = storage.read(drawn.index, own=own)
        # What it says of windows does not hold of those that a sample unit has made.
        if not (self._sampler.draws_windows and isinstance(self._sample_unit, Sequence)):
            drawn.sampler = self._sampler
        chain = self._chain
        drawn.fresh = held and not len(chain)
        drawn.numbered = self._reads_index and (lent is None or lent.numbered)
        if chain.reads_around:
            known = self._sample_unit.episodes(storage) or self._sampler.episodes(storage)
            # Nobody looks at the rows before the first transform does.
            held = held and type(self._sampler).complete is Sampler.complete
            if drawn.info and held:  # nor is anything put over them
                held = not any(k in chain.changes or (k,) in chain.changes for k in drawn.info)
            rows = drawn.rows if held else None
            given = chain, storage, drawn.index, drawn.info, generator, known, rows
            noted = self._prefetcher is not None if lent is None else lent.noted
            if generator is None or (drawn.random is None and not noted):
                drawn.fetched = chain, fetch_all(*given)
            else:
                with self._random_of(drawn, generator):
                    drawn.fetched = chain, fetch_all(*given)
        drawn.collate = storage.collate if collate is None else collate
        drawn.stack_dim = 0 if own else storage.stack_dim

    def _sampled(
        self, storage: Storage, sampler: Sampler, size: int, generator: torch.Generator | None
    ) -> Drawn:
        """A draw of which nothing is read yet. The lock is held."""
        # It may serve other buffers too.
        sampler.generator, sampler.needs = generator, self._needs
        anchors, info = sampler.sample(storage, size)
        if type(anchors) is not torch.Tensor or anchors.dtype is not torch.int64:
            anchors = _as_index(anchors, storage.ndim)
        try:
            index, info = self._sample_unit.expand(anchors, dict(info), storage)
        except BaseException:
            sampler.put_back([anchors], storage)
            raise
        drawn = Drawn(index, info, _ended(sampler), anchors, size=size)
        drawn.written = storage.ledger.next_position
        return drawn

    def _kept(self, storage: Storage) -> Drawn | None:
        """A draw made earlier, if there is one whose rows are still stored.

        Windows of which a row was written anew are no windows any more: they go back, and so do
        draws with a row that has lost what the transforms need.
        """
        while self._pending:
            kept = self._pending.popleft()
            if self._outdated(kept, storage):
                put_back([kept, *self._pending], self._sampler, storage)
                self._pending.clear()
                return None
            if as_tensor(storage.contains(kept.index)).all():
                show(self._sampler, kept.ran_out)
                return kept
        return None

    def _readable(self, draws: list[Drawn]) -> int:
        storage = self._storage
        for number, drawn in enumerate(draws):
            if self._outdated(drawn, storage):
                put_back(draws[number:], self._sampler, storage)
                return number
        return len(draws)

    def _still(self, kept: Drawn, storage: Storage) -> Drawn | None:
        """A draw that somebody else has kept, if its rows are still stored, as for ``_kept``."""
        if self._outdated(kept, storage):
            self._sampler.put_back([kept.anchors], storage)
            return None
        return kept if as_tensor(storage.contains(kept.index)).all() else None

    def _outdated(self, drawn: Drawn, storage: Storage) -> bool:
        """Whether rows of a draw made earlier, all stored, could not be drawn so now."""
        if self._windows_drawn() and _written_since(storage, drawn):
            return True
        anchors = drawn.anchors
        if not self._needs or not as_tensor(storage.contains(anchors)).all():
            return False
        index = self._sampler.episodes(storage) or index_for(storage)
        flat = ravel(anchors, storage.lanes) if storage.ndim > 1 else anchors
        place = index.place(flat.cpu().numpy())
        return not index.eligible_starts(self._needs.single, *place).all()

    def _windows_drawn(self) -> bool:
        return self._sampler.draws_windows or not isinstance(self._sample_unit, Transition)

    @contextlib.contextmanager
    def _random_of(self, drawn: Drawn, generator: torch.Generator) -> Iterator[None]:
        """While transforms read for a draw: those of one that was kept draw what they drew then.

        What is drawn ahead notes how, since it may be kept.
        """
        before, now = drawn.random, generator.get_state()
        if before is None:
            drawn.random = now
            yield
            return
        generator.set_state(before)
        try:
            yield
        finally:
            generator.set_state(now)


def put_back(draws: list[Drawn], sampler: Sampler, storage: Storage) -> None:
    """Gives draws that will not be delivered back to their sampler, in the order they were made.

    Those after one that ended a pass go nowhere: the pass they are of has not begun.
    """
    last = next((number for number, drawn in enumerate(draws, 1) if drawn.ran_out), None)
    if last is not None and sampler.passes:
        draws = draws[:last]
        sampler.drop_pass()
    sampler.put_back([drawn.anchors for drawn in draws], storage)


def show(sampler: Sampler, ran_out: bool) -> None:
    """Sets what users see of a sampler; one's own may derive it from elsewhere."""
    with contextlib.suppress(AttributeError):
        sampler.ran_out = ran_out


def shows(sampler: Sampler, ran_out: bool) -> bool:
    """Whether users see that of a sampler already. Without the lock: what a draw that is under way
    does to it is not seen."""
    return type(sampler).ran_out is Sampler.ran_out and sampler.ran_out == ran_out


def _ended(sampler: Sampler) -> bool:
    """Whether the draw just made ended a pass, whatever ``ran_out`` shows meanwhile."""
    overridden = type(sampler).ran_out is not Sampler.ran_out
    return sampler.ran_out if overridden else sampler._ran_out


def _generations(storage: Storage, index: torch.Tensor) -> torch.Tensor:
    return storage.ledger.generations(index[:, 0] if storage.ndim > 1 else index)


def _written_since(storage: Storage, drawn: Drawn) -> bool:
    """Whether a row of a draw was written after it."""
    if storage.ledger.next_position == drawn.written:
        return False
    slots = drawn.index[:, 0] if storage.ndim > 1 else drawn.index
    return bool((storage.ledger.positions(slots.cpu()) >= drawn.written).any())


def _as_index(drawn: Any, ndim: int) -> torch.Tensor:
    """What a sampler drew as int64 ``[B]`` or ``[B, ndim]``; it may be a tuple of coordinates."""
    if isinstance(drawn, tuple):
        drawn = drawn[0] if ndim == 1 and len(drawn) == 1 else torch.stack(drawn, -1)
    return as_tensor(drawn, dtype=torch.int64)
