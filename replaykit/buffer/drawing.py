"""Draw batches, read their rows, and roll back failed draws."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Listed
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch

from replaykit._compat import as_tensor
from replaykit.buffer.core import BufferCore, DataT, SamplerT, StorageT, WriterT, checked_batch_size
from replaykit.buffer.prefetch import AheadBatch, Drawn, Mark, Outdated, Prefetcher
from replaykit.buffer.row_context import fetch_all
from replaykit.samplers import Sampler, Sequence, Transition
from replaykit.samplers.window_measures import index_for
from replaykit.storages import Storage
from replaykit.storages.column_storage import ColumnStorage
from replaykit.storages.indexing import ravel

__all__ = [
    "Drawing",
    "Lent",
    "Undelivered",
    "put_back",
    "random_state",
    "rollback",
    "set_random_state",
    "show",
]


class Undelivered(Protocol):
    """A draw that was not delivered: the rows that the sampler drew, and whether a pass ended."""

    @property
    def anchors(self) -> torch.Tensor: ...

    @property
    def ran_out(self) -> bool: ...


def random_state(generator: torch.Generator | None) -> torch.Tensor:
    """Return the state of a generator; None means torch's global generator."""
    return torch.get_rng_state() if generator is None else generator.get_state()


def set_random_state(generator: torch.Generator | None, state: torch.Tensor | None) -> None:
    """Set the state of a generator; None means torch's global generator."""
    if state is None:
        return
    if generator is None:
        torch.set_rng_state(state)
    else:
        generator.set_state(state)


_TRIES = 3
"""Number of tries to draw while other processes write, before a draw locks them out."""


@dataclass(frozen=True, slots=True)
class Lent:
    """The options of a draw for a batch of an ensemble or loader.

    Such a draw does not affect the kept and prefetched draws of the buffer.

    Attributes:
        generator: source of randomness; None for the buffer's generator.
        collate: replaces the buffer's ``collate_fn``; None to use the ``collate_fn``.
        generations: always put generations into the info. False treats them as in the buffer's own
            draws.
        numbered: put ``index`` into the rows for transforms, as in the buffer's own draws.
    """

    generator: torch.Generator | None = None
    collate: Callable[[Any], Any] | None = None
    generations: bool = True
    numbered: bool = False


class Drawing(BufferCore[DataT, StorageT, SamplerT, WriterT]):
    """The draws of a buffer, including prefetched, shared and repeated draws."""

    def _size_of(self, batch_size: int | None) -> int:
        if not self._initialized:
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

    def _draw_apart(self, size: int, lent: Lent | None = None) -> tuple[Drawn | None, bool]:
        """Draw while other processes write, then check the rows that were read.

        If another process has overwritten these rows, the draw is discarded.

        Returns:
            The draw and True; or None, and whether another try may succeed. If it cannot, the
            caller takes the lock, which excludes other processes.
        """
        storage, sampler = self._storage, self._sampler
        sharing, lock = storage.recovery, storage.lock
        if not lock.enter_apart():
            return None, False
        try:
            seen = sharing.glance()
            if seen is None:
                return None, False
            try:
                drawn = self._drawn(storage, size, lent)
            except Exception:
                if sharing.intact(seen, None):
                    raise
                return None, True  # overwritten rows may have caused the error
            slots = None
            if not self._chain.readers:
                slots = drawn.index[:, 0] if storage.ndim > 1 else drawn.index
            if not sharing.intact(seen, slots):
                show(sampler, drawn.was_out)
                self._undo([drawn], storage)
                return None, True
            return drawn, True
        finally:
            lock.leave_apart()

    def _draw(self, size: int, lent: Lent | None = None) -> Drawn:
        """Draw and read, without the lock if rows are shared and no process disturbs it."""
        tries = _TRIES if self._shared and not self._sampler.reads_rows else 0
        while tries:
            drawn, again = self._draw_apart(size, lent)
            if drawn is not None:
                return drawn
            tries = tries - 1 if again else 0
        return self._draw_held(size, lent)

    def _draw_held(self, size: int, lent: Lent | None = None) -> Drawn:
        while True:
            storage = self._storage
            with storage.lock:
                if storage is not self._storage:  # replaced before the lock was taken
                    continue
                return self._drawn(storage, size, lent)

    def _give_back(self, drawn: Drawn) -> None:
        """Keep a draw whose batch failed, so that it comes next, or undo it."""
        with self._locked(settled=False) as storage:
            if drawn.home is storage and drawn.drawer is self._sampler:
                self._fail(drawn, storage)

    def _refuse(self, drawn: Drawn) -> None:
        """Undo a draw whose rows were overwritten."""
        with self._locked(settled=False) as storage:
            if drawn.home is storage and drawn.drawer is self._sampler:
                self._undo([drawn], storage)

    def _fail(self, drawn: Drawn, storage: Storage) -> None:
        """Do what ``_give_back`` does. The caller holds the lock."""
        show(self._sampler, drawn.was_out)
        if drawn.kept and not self._sampler.consumes:
            self._retry.append(drawn.without_rows())
            self._retry.sort(key=lambda one: one.number)
        else:
            self._undo([drawn], storage)

    def _undo(self, draws: list[Drawn], storage: Storage) -> None:
        """Undo draws that will not be delivered, given in order. The caller holds the lock."""
        self._draws_made = rollback(
            draws, self._sampler, storage, self._generator, self._draws_made
        )

    def _rewind(self) -> None:
        """Undo all draws that were not delivered. The caller holds the lock."""
        self._undo(self._withdraw(), self._storage)

    def _withdraw(self) -> list[Drawn]:
        """Drop all batches that were not delivered; return their draws in order.

        The caller holds the lock.
        """
        draws, queue, self._retry = self._retry, self._queue(), []
        return draws if queue is None else [*draws, *queue.clear()]

    def _drop_draws(self) -> None:
        """Drop all draws that were not delivered, because the sampler starts over.

        The caller holds the lock.
        """
        self._withdraw()
        self._draws_made += 1  # a batch that fails later is not the last draw

    # -- prefetched draws -----------------------------------------------------------------------

    def _queue(self) -> Prefetcher | None:
        """Return the prefetcher.

        A forked process gets a new one with new threads, and undoes the undelivered draws.
        """
        queue = self._prefetcher
        if queue is not None and queue.process != os.getpid():
            with self._locked(settled=False):
                if self._prefetcher is queue:
                    self._prefetcher = Prefetcher(queue.depth, cast(Any, self))
                    self._undo(queue.pending(), self._storage)
                return self._prefetcher
        return queue

    def _draw_queue(self, queue: Prefetcher, *, take: bool) -> AheadBatch | None:
        """Draw until the queue is full; with ``take``, remove and return its next batch.

        Raises:
            RuntimeError: the buffer was shut down.
        """
        before = self._before_draws()
        with self._locked(settled=False) as storage:
            shown = self._sampler.ran_out
            batch = self._next_retry(storage) if take and self._retry else None
            fresh: list[AheadBatch] = []
            if batch is None:
                fresh = queue.top_up(queue.depth + take, lambda: self._draw_ahead(storage, before))
                batch = queue.pop() if take else None
            if batch is not None and batch.error is None:
                batch.read(cast(Any, self))  # now, because later writes do not know of it
            # Users see the sampler as of the batch that is delivered.
            if batch is not None and batch.drawn is not None:
                shown = batch.drawn.ran_out
            show(self._sampler, shown)
        queue.submit([one for one in fresh if one is not batch])
        return batch

    def _before_draws(self) -> Any:
        """Return information that the next draws need, found without the lock."""
        return None

    def _draw_ahead(self, storage: Storage, before: Any) -> AheadBatch:
        """Draw a batch for a later delivery. The caller holds the lock."""
        written = storage.ledger.next_position
        try:
            drawn = self._chosen(storage, self._size_of(None), None, ahead=True)
        except Exception as error:
            return AheadBatch(None, written, error=error)
        batch, at_once = self._ahead_of(drawn), self._reads_at_once()
        if at_once or self._chain.uses_random:
            batch.is_read, batch.late = True, at_once or self._chain.ordered
            try:
                self._read(drawn, storage, None, self._generator, at_once)
            except Exception as error:
                batch.error = error
        if drawn.mark is not None:
            drawn.mark.after = random_state(self._generator)
        return batch

    def _next_retry(self, storage: Storage) -> AheadBatch | None:
        """Return the next batch that failed before; None if its rows are no longer stored."""
        drawn = self._next_failed(storage)
        return None if drawn is None else self._ahead_of(drawn)

    def _ahead_of(self, drawn: Drawn) -> AheadBatch:
        return AheadBatch(drawn, late=self._chain.ordered)

    def _read_ahead(self, drawn: Drawn) -> None:
        """Read the rows of a draw. The caller holds the lock.

        Raises:
            Outdated: another buffer has overwritten rows since the draw.
        """
        storage = self._storage
        if drawn.home is not storage:
            raise Outdated
        if storage.ledger.next_position != drawn.written:
            stored = as_tensor(storage.contains(drawn.index)).all()
            if not stored or self._outdated(drawn, storage):
                raise Outdated
            if "index_generation" in drawn.info:
                self._add_generations(drawn, storage)
        self._read(drawn, storage, None, self._generator, begin=False)

    def _reads_at_once(self) -> bool:
        """Return whether a batch takes little longer than waking a thread."""
        storage = self._storage
        if not isinstance(storage, ColumnStorage) or type(storage).read is not ColumnStorage.read:
            return False
        if self._chain.entries or self._collate_fn is not None or self._target is not None:
            return False
        if self._pin_memory or type(self._sample_unit) is not Transition:
            return False
        return storage.reads_at_once(self._batch_size or 0)

    # -- one draw -------------------------------------------------------------------------------

    def _drawn(self, storage: Storage, size: int, lent: Lent | None = None) -> Drawn:
        """Draw, or take a failed draw, and read its rows; if reading fails, undo the draw."""
        drawn, generator = self._chosen(storage, size, lent), self._generator
        if lent is not None and lent.generator is not None:
            generator = lent.generator
        try:
            self._read(drawn, storage, lent, generator, begin=False)
        except BaseException:
            if drawn.mark is not None:
                drawn.mark.after = random_state(self._generator)
            self._fail(drawn, storage)
            raise
        if drawn.mark is not None and drawn.mark.random is not None:
            drawn.mark.after = random_state(self._generator)
        return drawn

    def _chosen(
        self, storage: Storage, size: int, lent: Lent | None, *, ahead: bool = False
    ) -> Drawn:
        """Draw, or take a failed draw, without reading its rows.

        Args:
            ahead: draw for a later delivery.
        """
        drawn, generator, sampler = None, self._generator, self._sampler
        kept = lent is None and size == self._batch_size
        if kept and self._retry and not ahead:
            drawn = self._next_failed(storage)
        if drawn is None:
            was_out, mark = sampler._ran_out, None
            if type(sampler).ran_out is not Sampler.ran_out:  # a custom sampler computes it
                was_out = sampler.ran_out
            if ahead or not kept:
                own = lent is None or lent.generator is None
                mark = Mark(sampler.mark(storage), random_state(generator) if own else None)
                if lent is not None and lent.generator is not None:
                    generator = lent.generator
            drawn = self._sampled(storage, sampler, size, generator)
            # A sample unit may have expanded the anchors, which have the generations.
            fresh = drawn.index is drawn.anchors and "index_generation" in drawn.info
            self._draws_made += 1
            drawn.number, drawn.mark, drawn.was_out = self._draws_made, mark, was_out
            drawn.home, drawn.drawer, drawn.kept = storage, sampler, kept
        else:
            fresh = False  # a failed draw gets the current generations of its slots
        track = self._writer.tracks_generations or sampler.prioritized
        if (track or (lent is not None and lent.generations)) and not fresh:
            self._add_generations(drawn, storage)
        return drawn

    def _read_apart(self, drawn: Drawn, storage: Storage, sampler: Sampler, lent: Lent) -> Drawn:
        """Read the rows of a draw of ``_sampled``. The caller holds the lock.

        If its rows were overwritten since, the sampler draws again.
        """
        stored = as_tensor(storage.contains(drawn.index)).all()
        if not stored or self._outdated(drawn, storage):
            drawn = self._sampled(storage, sampler, drawn.size, lent.generator)
        if self._writer.tracks_generations or sampler.prioritized or lent.generations:
            self._add_generations(drawn, storage)
        self._read(drawn, storage, lent, lent.generator, begin=False)
        return drawn

    def _add_generations(self, drawn: Drawn, storage: Storage) -> None:
        drawn.info["index_generation"] = _generations(storage, drawn.index)
        if "anchor_index" in drawn.info:
            drawn.info["anchor_generation"] = _generations(storage, drawn.info["anchor_index"])

    def _read(
        self,
        drawn: Drawn,
        storage: Storage,
        lent: Lent | None,
        generator: torch.Generator | None,
        begin: bool,
    ) -> None:
        """Read the rows of a draw, and the rows around them that transforms need.

        Args:
            begin: let the read continue in the background.
        """
        collate = self._collate_fn if lent is None or lent.collate is None else lent.collate
        own = collate is not None
        held = False
        # If a storage overrides `read`, every read calls it.
        if type(storage).read is ColumnStorage.read:
            columns: Any = storage
            # Transforms would use rows of an unfinished read, which is not allowed.
            if begin and not self._chain.entries:
                drawn.rows, drawn.begun = columns.begin_held(drawn.index, self._contiguous)
            else:
                drawn.rows = columns.read_held(drawn.index, self._contiguous)
            held = not own and type(storage).collate is Storage.collate
        else:
            drawn.rows = storage.read(drawn.index, own=own)
        # The sampler describes its own windows, not the windows of a sample unit.
        sampler = self._sampler
        if not _describes_nothing(type(sampler)) and not (
            sampler.draws_windows and isinstance(self._sample_unit, Sequence)
        ):
            drawn.sampler = sampler
        chain = self._chain
        drawn.fresh = held and not chain.entries
        drawn.numbered = self._reads_index and (lent is None or lent.numbered)
        if chain.readers:
            known = self._sample_unit.episodes(storage) or self._sampler.episodes(storage)
            # No code may use or replace the rows before the first transform.
            held = held and type(self._sampler).complete is Sampler.complete
            if drawn.info and held:
                held = not any(k in chain.changes or (k,) in chain.changes for k in drawn.info)
            rows = drawn.rows if held else None
            given = chain, storage, drawn.index, drawn.info, generator, known, rows
            records_random = lent is None and self._prefetcher is not None and chain.uses_random
            if generator is None or (drawn.random is None and not records_random):
                drawn.fetched = chain, fetch_all(*given)
            else:
                with self._random_of(drawn, generator):
                    drawn.fetched = chain, fetch_all(*given)
        # Rows of columns are collated already.
        drawn.collate = collate if own or held else storage.collate
        drawn.stack_dim = 0 if own else storage.stack_dim

    def _sampled(
        self, storage: Storage, sampler: Sampler, size: int, generator: torch.Generator | None
    ) -> Drawn:
        """Draw without reading rows. The caller holds the lock."""
        # Set before each draw, because a sampler may serve several buffers.
        sampler.generator, sampler.needs = generator, self._needs
        anchors, info = sampler.sample(storage, size)
        if type(anchors) is not torch.Tensor or anchors.dtype is not torch.int64:
            anchors = _as_index(anchors, storage.ndim)
        index, info, unit = anchors, dict(info), self._sample_unit
        if type(unit) is not Transition:
            try:
                index, info = unit.expand(anchors, info, storage)
            except BaseException:
                sampler.put_back([anchors], storage)
                raise
        # The sampler's own mark, unless a custom sampler computes ``ran_out``.
        plain = type(sampler).ran_out is Sampler.ran_out
        drawn = Drawn(index, info, sampler._ran_out if plain else sampler.ran_out, anchors)
        drawn.size, drawn.written = size, storage.ledger.next_position
        return drawn

    def _next_failed(self, storage: Storage) -> Drawn | None:
        """Return the next failed draw whose rows are still stored, or None.

        If a row of a window was overwritten, the draw is undone. The same happens if a row has lost
        neighbours that transforms need.
        """
        while self._retry:
            drawn = self._retry.pop(0)
            if self._outdated(drawn, storage):
                self._undo([drawn, *self._retry], storage)
                self._retry = []
            elif as_tensor(storage.contains(drawn.index)).all():
                show(self._sampler, drawn.ran_out)
                return drawn
        return None

    def _outdated(self, drawn: Drawn, storage: Storage) -> bool:
        """Return whether the sampler could no longer make a kept draw of stored rows."""
        if self._windows_drawn() and _written_since(storage, drawn):
            return True
        anchors = drawn.anchors
        if not self._needs or not as_tensor(storage.contains(anchors)).all():
            return False
        index = self._sampler.episodes(storage) or index_for(storage)
        flat = ravel(anchors, storage.lanes) if storage.ndim > 1 else anchors
        place = index.time_and_lane(flat.cpu().numpy())
        return not index.eligible_starts(self._needs.single, *place).all()

    def _windows_drawn(self) -> bool:
        return self._sampler.draws_windows or not isinstance(self._sample_unit, Transition)

    @contextlib.contextmanager
    def _random_of(self, drawn: Drawn, generator: torch.Generator) -> Iterator[None]:
        """Set the generator for the reads of transforms.

        A kept draw repeats the random numbers of its first read. Other draws record the generator's
        state, because they may be kept later.
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


@functools.cache
def _describes_nothing(kind: type[Sampler]) -> bool:
    """Return whether samplers of a class leave the rows and the shape of batches as they are."""
    names = ("complete", "complete_fresh", "shape_of")
    return all(getattr(kind, name) is getattr(Sampler, name) for name in names)


def rollback(
    draws: list[Drawn],
    sampler: Sampler,
    storage: Storage,
    generator: torch.Generator | None,
    made: int,
) -> int:
    """Undo draws that will not be delivered, given in the order of drawing.

    The sampler and the generator return to their states before the draws. If a later draw was
    delivered, only the rows return to the pass.

    Args:
        made: the number of the last draw that was made.

    Returns:
        The number of the last draw that stays.
    """
    draws, shown = list(draws), sampler.ran_out
    while draws and draws[-1].number == made and draws[-1].mark is not None:
        if sampler.consumes:
            break
        mark, made = draws.pop().mark, made - 1
        assert mark is not None
        sampler.rollback(mark.token, storage)
        unused = mark.after is not None and torch.equal(random_state(generator), mark.after)
        if mark.random is not None and unused:
            set_random_state(generator, mark.random)
    if sampler.consumes:  # a write may reuse the slots before the next draw
        for drawn in draws:
            positions = storage.ledger.positions(drawn.anchors.cpu())
            unwritten = drawn.anchors[(positions < drawn.written).to(drawn.anchors.device)]
            sampler.put_back([unwritten], storage)
    elif draws:
        put_back(draws, sampler, storage)
    show(sampler, shown)
    return made


def put_back(draws: Listed[Undelivered], sampler: Sampler, storage: Storage) -> None:
    """Return the rows of undelivered draws, in the order of drawing, to their pass.

    Draws after the end of a pass are dropped, because their pass has not begun.
    """
    last = next((number for number, drawn in enumerate(draws, 1) if drawn.ran_out), None)
    if last is not None and sampler.passes:
        draws = draws[:last]
        sampler.drop_pass()
    sampler.put_back([drawn.anchors for drawn in draws], storage)


def show(sampler: Sampler, ran_out: bool) -> None:
    """Set the visible ``ran_out``, unless a custom sampler computes it."""
    with contextlib.suppress(AttributeError):
        sampler.ran_out = ran_out


def _generations(storage: Storage, index: torch.Tensor) -> torch.Tensor:
    return storage.ledger.generations(index[:, 0] if storage.ndim > 1 else index)


def _written_since(storage: Storage, drawn: Drawn) -> bool:
    """Return whether a row of a draw was written after the draw."""
    if storage.ledger.next_position == drawn.written:
        return False
    slots = drawn.index[:, 0] if storage.ndim > 1 else drawn.index
    return bool((storage.ledger.positions(slots.cpu()) >= drawn.written).any())


def _as_index(drawn: Any, ndim: int) -> torch.Tensor:
    """Return a sampler's draw as int64 ``[B]`` or ``[B, ndim]``.

    Args:
        drawn: an index, or a tuple of coordinates.
    """
    if isinstance(drawn, tuple):
        drawn = drawn[0] if ndim == 1 and len(drawn) == 1 else torch.stack(drawn, -1)
    return as_tensor(drawn, dtype=torch.int64)
