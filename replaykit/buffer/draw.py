"""Draw batches, read their rows, and undo draws that are not delivered."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from replaykit._compat import as_tensor, new_tensordict
from replaykit.buffer.prefetch import AheadBatch, Draw, DrawnBatch, Mark, Outdated, Prefetcher
from replaykit.buffer.row_context import fetch_all
from replaykit.declared import Positive, read_value
from replaykit.samplers import Sampler, Sequence, Transition
from replaykit.samplers.window_measures import index_for
from replaykit.storages import Storage
from replaykit.storages.column_reads import read_pinned
from replaykit.storages.column_storage import ColumnStorage
from replaykit.storages.indexing import ravel

if TYPE_CHECKING:
    from replaykit.buffer.replay_buffer import ReplayBuffer


_TRIES = 3
"""Number of tries to draw while other processes write, before a draw locks them out."""


def size_of(buffer: ReplayBuffer, batch_size: int | None) -> int:
    """Return the number of rows of a batch.

    Raises:
        RuntimeError: no batch size is given, or the buffer was shut down.
        ValueError: the batch size is not an int of at least 1.
    """
    if not buffer._initialized:
        buffer._ready()
    if buffer._closed:
        raise RuntimeError("this buffer was shut down")
    if batch_size is None and buffer._batch_size is not None:  # saves two calls in every sample
        return buffer._batch_size
    return size_or_default(batch_size, lambda: None)


def size_or_default(batch_size: Any, default: Callable[[], int | None]) -> int:
    """Return a checked batch size, or the result of ``default`` for None.

    Raises:
        RuntimeError: both are None.
        ValueError: the batch size is not an int of at least 1.
    """
    if batch_size is not None:
        return checked_batch_size(batch_size)
    size = default()
    if size is None:
        raise RuntimeError("batch_size not specified: give it to the constructor or to sample()")
    return size


def check_iterable(batch_size: int | None) -> None:
    """Raise RuntimeError if a buffer without a batch size is to yield batches."""
    if batch_size is None:
        raise RuntimeError(
            "Cannot iterate over the replay buffer. Batch_size was not specified during "
            "construction; give the buffer a batch_size"
        )


def checked_batch_size(batch_size: object) -> int:
    """Return a batch size; ValueError if it is not an int of at least 1."""
    number = int(batch_size) if isinstance(batch_size, np.integer) else batch_size
    return cast(int, read_value(Positive, number, "batch_size"))


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


def show(sampler: Sampler, ran_out: bool) -> None:
    """Set the visible ``ran_out``, unless a custom sampler computes it."""
    with contextlib.suppress(AttributeError):
        sampler.ran_out = ran_out


# -- drawing and reading ---------------------------------------------------------------------------


def draw_apart(
    buffer: ReplayBuffer,
    size: int,
    generator: torch.Generator | None,
    collate: Callable[[Any], Any] | None = None,
    *,
    numbered: bool = False,
    sampler: Sampler | None = None,
) -> DrawnBatch:
    """Draw and read a batch for a mixture, a shard or a loader.

    The draw does not affect prefetched draws, and its info has generations.

    Args:
        generator: source of randomness; None for the buffer's generator.
        collate: replaces the buffer's ``collate_fn``; None to use the ``collate_fn``.
        numbered: put ``index`` into the rows for transforms, as in the buffer's own draws.
        sampler: a loader's sampler, whose draws are never undone; None for the buffer's.
    """
    given = False, generator, collate, numbered, sampler
    unlocked = buffer._shared and sampler is None
    return (draw_shared if unlocked else draw_locked)(buffer, size, *given)


def draw_shared(buffer: ReplayBuffer, size: int, *given: Any) -> DrawnBatch:
    """Draw and read, without the lock if no other process disturbs the read."""
    tries = 0 if buffer._sampler.reads_rows else _TRIES
    while tries:
        batch, again = draw_unlocked(buffer, size, *given)
        if batch is not None:
            return batch
        tries = tries - 1 if again else 0
    return draw_locked(buffer, size, *given)


def draw_unlocked(buffer: ReplayBuffer, size: int, *given: Any) -> tuple[DrawnBatch | None, bool]:
    """Draw while other processes write, then check the rows that were read.

    If another process has overwritten these rows, the draw is undone.

    Returns:
        The batch and True; or None, and whether another try may succeed. If it cannot, the caller
        takes the lock, which excludes other processes.
    """
    storage, sampler = buffer._storage, buffer._sampler
    sharing, lock = storage.recovery.sharing, storage.lock
    if not lock.enter_apart():
        return None, False
    try:
        seen = sharing.glance()
        if seen is None:
            return None, False
        try:
            batch = _draw_and_read(buffer, storage, size, *given)
        except Exception:
            if sharing.intact(seen, None):
                raise
            return None, True  # overwritten rows may have caused the error
        slots, draw = None, batch.draw
        if not buffer._draw_chain.readers:
            slots = draw.index[:, 0] if storage.ndim > 1 else draw.index
        if not sharing.intact(seen, slots):
            show(sampler, draw.was_out)
            undo_draws(buffer, [draw], storage)
            return None, True
        return batch, True
    finally:
        lock.leave_apart()


def draw_locked(buffer: ReplayBuffer, size: int, *given: Any) -> DrawnBatch:
    """Draw and read with the lock held."""
    while True:
        storage = buffer._storage
        with storage.lock:
            if storage is not buffer._storage:  # replaced before the lock was taken
                continue
            return _draw_and_read(buffer, storage, size, *given)


def _draw_and_read(
    buffer: ReplayBuffer,
    storage: Storage,
    size: int,
    own: bool = True,
    generator: torch.Generator | None = None,
    collate: Callable[[Any], Any] | None = None,
    numbered: bool = True,
    loading: Sampler | None = None,
) -> DrawnBatch:
    """Draw, or take a failed draw, and read its rows; if reading fails, undo the draw.

    Args:
        own: the batch is the buffer's own, not that of ``draw_apart``.
        loading: a loader's sampler.
    """
    draw = choose_rows(buffer, storage, size, own, generator, sampler=loading)
    if loading is not None and not (draw.index is draw.anchors and "index_generation" in draw.info):
        _add_generations(draw.info, draw.index, storage)
    mark, source = draw.mark, buffer._generator if generator is None else generator
    try:
        batch = _read_rows(buffer, draw, storage, source, collate, numbered)
    except BaseException:
        if mark is not None:
            mark.after = random_state(buffer._generator)
        if loading is None:
            _take_back(buffer, draw, storage)
        raise
    if mark is not None and mark.random is not None:
        mark.after = random_state(buffer._generator)
    return batch


def choose_rows(
    buffer: ReplayBuffer,
    storage: Storage,
    size: int,
    own: bool = True,
    generator: torch.Generator | None = None,
    *,
    ahead: bool = False,
    sampler: Sampler | None = None,
) -> Draw:
    """Draw, or take a failed draw, without reading its rows. The caller holds the lock.

    Args:
        ahead: draw for a later delivery.
        sampler: a loader's sampler, whose draws are never undone; None for the buffer's.
    """
    counted = sampler is None
    if sampler is None:
        sampler = buffer._sampler
    kept = own and size == buffer._batch_size
    source = buffer._generator if generator is None else generator
    tracked = buffer._writer.tracks_generations or sampler.prioritized or (counted and not own)
    if kept and buffer._retry and not ahead:
        failed = _next_failed(buffer, storage)
        if failed is not None:
            if tracked:  # those of the present rows
                _add_generations(failed.info, failed.index, storage)
            return failed
    plain, mark = type(sampler).ran_out is Sampler.ran_out, None  # or a custom sampler computes it
    was_out = sampler._ran_out if plain else sampler.ran_out
    if counted and (ahead or not kept):
        before = None
        if generator is None:  # else its owner resets it
            before = torch.get_rng_state() if source is None else source.get_state()
        mark = Mark(sampler.mark(storage) if sampler.marks_draws else None, before)
    # Set before each draw, because a sampler may serve several buffers.
    sampler.generator = source
    sampler.needs = buffer._needs
    anchors, info = sampler.sample(storage, size)
    if type(anchors) is not torch.Tensor or anchors.dtype is not torch.int64:
        anchors = _as_index(anchors, storage.ndim)
    index, info, unit = anchors, dict(info), buffer._sample_unit
    if type(unit) is not Transition:
        try:
            index, info = unit.expand(anchors, info, storage)
        except BaseException:
            sampler.put_back([anchors], storage)
            show(sampler, was_out)
            raise
    # A sample unit may have expanded the anchors, which have the generations.
    if tracked and not (index is anchors and "index_generation" in info):
        _add_generations(info, index, storage)
    if counted:
        buffer._draws_made += 1
    if mark is not None and mark.token is not None and type(sampler).mark is Sampler.mark:
        mark.token = sampler.drawn(mark.token)
    return Draw(
        index,
        info,
        anchors,
        sampler._ran_out if plain else sampler.ran_out,
        size,
        storage.ledger.next_position,
        storage,
        sampler,
        was_out,
        buffer._draws_made if counted else 0,
        mark,
        kept,
        storage.ledger.log.removed,
    )


def _as_index(drawn: Any, ndim: int) -> torch.Tensor:
    """Return a sampler's draw as int64 ``[B]`` or ``[B, ndim]``.

    Args:
        drawn: an index, or a tuple of coordinates.
    """
    if isinstance(drawn, tuple):
        drawn = drawn[0] if ndim == 1 and len(drawn) == 1 else torch.stack(drawn, -1)
    return as_tensor(drawn, dtype=torch.int64)


def _add_generations(info: dict[Any, Any], index: torch.Tensor, storage: Storage) -> None:
    info["index_generation"] = _generations(storage, index)
    if "anchor_index" in info:
        info["anchor_generation"] = _generations(storage, info["anchor_index"])


def _generations(storage: Storage, index: torch.Tensor) -> torch.Tensor:
    return storage.ledger.generations(index[:, 0] if storage.ndim > 1 else index)


def _read_rows(
    buffer: ReplayBuffer,
    draw: Draw,
    storage: Storage,
    generator: torch.Generator | None,
    collate: Callable[[Any], Any] | None = None,
    numbered: bool = True,
    *,
    begin: bool = False,
) -> DrawnBatch:
    """Read the rows of a draw, and the rows around them that transforms need.

    Args:
        begin: let the read continue in the background.
    """
    if collate is None:
        collate = buffer._collate_fn
    chain, sampler, held, begun, fetched = buffer._draw_chain, buffer._sampler, False, None, None
    pinned: Collection[int] = ()
    bare = buffer._windows is not None
    if bare:
        rows: Any = new_tensordict({}, draw.index.shape[:1], torch.device(storage.device))
        held = collate is None
    # If a storage overrides `read`, every read calls it.
    elif type(storage).read is ColumnStorage.read:
        columns: Any = storage
        # Transforms would use rows of an unfinished read, which is not allowed.
        if begin and not chain.entries:
            rows, begun = columns.begin_held(draw.index, buffer._contiguous)
        # The results of transforms are new tensors, so they have to be copied in any case.
        elif (buffer._pin_memory or buffer._target) and not chain.entries and _to_pinned(buffer):
            rows, pinned = read_pinned(columns, draw.index, buffer._contiguous)
        else:
            rows = columns.read_held(draw.index, buffer._contiguous)
        held = collate is None and type(storage).collate is Storage.collate
    else:
        rows = storage.read(draw.index, own=collate is not None)
    fresh = held and not chain.entries
    if chain.readers:
        known = buffer._sample_unit.episodes(storage) or sampler.episodes(storage)
        # No code may use or replace the rows before the first transform.
        held = held and type(sampler).complete is Sampler.complete
        if draw.info and held:
            held = not any(k in chain.changes or (k,) in chain.changes for k in draw.info)
        given = draw.index, draw.info, generator, known, rows if held else None
        fetched = chain, fetch_all(chain, storage, *given, bare=bare)
    # The sampler describes its own windows, not the windows of a sample unit.
    describes = not _describes_nothing(type(sampler)) and not (
        sampler.draws_windows and (bare or isinstance(buffer._sample_unit, Sequence))
    )
    return DrawnBatch(
        draw,
        rows,
        # Rows of columns are collated already.
        collate if collate is not None or held else storage.collate,
        0 if collate is not None else storage.stack_dim,
        fresh,
        numbered and buffer._reads_index,
        sampler if describes else None,
        fetched,
        begun,
        pinned,
    )


def _to_pinned(buffer: ReplayBuffer) -> bool:
    """Return whether batches are in pinned memory, at least on their way to a device."""
    if buffer._target is not None:
        return buffer._target.type == "cuda"
    return buffer._pin_memory and torch.cuda.is_available()


@functools.cache
def _describes_nothing(kind: type[Sampler]) -> bool:
    """Return whether samplers of a class leave the rows and the shape of batches as they are."""
    names = ("complete", "complete_fresh", "shape_of")
    return all(getattr(kind, name) is getattr(Sampler, name) for name in names)


def read_earlier(
    buffer: ReplayBuffer,
    draw: Draw,
    storage: Storage,
    generator: torch.Generator,
    collate: Callable[[Any], Any] | None = None,
    *,
    numbered: bool = True,
) -> DrawnBatch:
    """Read the rows of a loader's draw, with ``collate`` and ``numbered`` as for ``draw_apart``.

    If its rows were overwritten since, the loader's sampler draws again. The caller holds the lock.
    """
    if is_outdated(buffer, draw, storage):
        draw = choose_rows(buffer, storage, draw.size, False, generator, sampler=draw.sampler)
    elif "index_generation" in draw.info:
        _add_generations(draw.info, draw.index, storage)
    return _read_rows(buffer, draw, storage, generator, collate, numbered)


@dataclass
class UnreadBatch:
    """A loader's draw, whose rows are read only if the batch is needed."""

    buffer: ReplayBuffer
    draw: Draw
    generator: torch.Generator
    collate: Callable[[Any], Any] | None

    @classmethod
    def drawn(
        cls,
        buffer: ReplayBuffer,
        size: int,
        generator: torch.Generator,
        collate: Callable[[Any], Any] | None,
        sampler: Sampler,
    ) -> UnreadBatch:
        """Draw with a loader's sampler, as ``draw_apart`` does."""
        with buffer._locked() as storage:
            draw = choose_rows(buffer, storage, size, False, generator, sampler=sampler)
        if buffer._chain.uses_random:
            # The numbers that they draw must not depend on earlier reads.
            seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
            generator = torch.Generator().manual_seed(seed)
        return cls(buffer, draw, generator, collate)

    def read(self) -> DrawnBatch:
        """Read the rows."""
        given = self.generator, self.collate
        with self.buffer._locked() as storage:
            return read_earlier(self.buffer, self.draw, storage, *given, numbered=False)


# -- draws ahead -----------------------------------------------------------------------------------


def queue_of(buffer: ReplayBuffer) -> Prefetcher | None:
    """Return the prefetcher.

    A forked process gets a new one with new threads, and undoes the undelivered draws.
    """
    queue = buffer._prefetcher
    if queue is not None and queue.process != os.getpid():
        with buffer._locked(settled=False) as storage:
            if buffer._prefetcher is queue:
                buffer._prefetcher = Prefetcher(queue.depth, cast(Any, buffer))
                undo_draws(buffer, queue.pending(), storage)
            return buffer._prefetcher
    return queue


def draw_queue(buffer: ReplayBuffer, queue: Prefetcher, *, take: bool) -> AheadBatch | None:
    """Draw until the queue is full; with ``take``, remove and return its next batch.

    Raises:
        RuntimeError: the buffer was shut down.
    """
    with buffer._locked(settled=False) as storage:
        shown, batch = buffer._sampler.ran_out, None
        fresh: list[AheadBatch] = []
        failed = _next_failed(buffer, storage) if take and buffer._retry else None
        if failed is not None:
            batch = AheadBatch(failed, late=buffer._chain.ordered)
        else:
            fresh = queue.top_up(queue.depth + take, lambda: draw_ahead(buffer, storage))
            batch = queue.pop() if take else None
        if batch is not None and batch.error is None:
            batch.read(cast(Any, buffer))  # now, because later writes do not know of it
        # Users see the sampler as of the batch that is delivered.
        if batch is not None and batch.draw is not None:
            shown = batch.draw.ran_out
        show(buffer._sampler, shown)
    queue.submit([one for one in fresh if one is not batch])
    return batch


def draw_ahead(buffer: ReplayBuffer, storage: Storage) -> AheadBatch:
    """Draw a batch for a later delivery. The caller holds the lock."""
    written = storage.ledger.next_position
    try:
        draw = choose_rows(buffer, storage, size_of(buffer, None), ahead=True)
    except Exception as error:
        return AheadBatch(None, written, error=error)
    at_once = reads_now(buffer)
    home, stream = torch.device(storage.device), None
    if home.type == "cuda":
        stream = torch.cuda.current_stream(home)
    ahead = AheadBatch(draw, late=at_once or buffer._chain.ordered, stream=stream)
    if at_once or buffer._chain.uses_random:
        try:
            ahead.batch = _read_rows(buffer, draw, storage, buffer._generator, begin=at_once)
        except Exception as error:
            ahead.error = error
        ahead.is_read = True
    if draw.mark is not None:
        draw.mark.after = random_state(buffer._generator)
    return ahead


def reads_now(buffer: ReplayBuffer) -> bool:
    """Return whether a batch takes little longer than waking a thread."""
    storage = buffer._storage
    if not isinstance(storage, ColumnStorage) or type(storage).read is not ColumnStorage.read:
        return False
    if buffer._draw_chain.entries or buffer._collate_fn is not None or buffer._target is not None:
        return False
    if buffer._pin_memory or type(buffer._sample_unit) is not Transition:
        return False
    return storage.reads_at_once(buffer._batch_size or 0)


def read_ahead(buffer: ReplayBuffer, draw: Draw) -> DrawnBatch:
    """Read the rows of a draw that was made ahead. The caller holds the lock.

    Raises:
        Outdated: another buffer has overwritten or removed rows since the draw.
    """
    storage = buffer._storage
    if draw.storage is not storage:
        raise Outdated
    ledger = storage.ledger
    if ledger.next_position != draw.written or ledger.log.removed != draw.removed:
        if is_outdated(buffer, draw, storage):
            raise Outdated
        if "index_generation" in draw.info:
            _add_generations(draw.info, draw.index, storage)
    return _read_rows(buffer, draw, storage, buffer._generator)


def is_outdated(buffer: ReplayBuffer, draw: Draw, storage: Storage) -> bool:
    """Return whether the sampler could no longer make a draw."""
    if storage.ledger.log.removed != draw.removed:  # other rows may be in the slots
        return True
    if not as_tensor(storage.contains(draw.index)).all():
        return True
    windows = buffer._sampler.draws_windows or not isinstance(buffer._sample_unit, Transition)
    if windows and _written_since(storage, draw):
        return True
    anchors = draw.anchors
    if not buffer._needs or not as_tensor(storage.contains(anchors)).all():
        return False
    index = buffer._sampler.episodes(storage) or index_for(storage)
    flat = ravel(anchors, storage.lanes) if storage.ndim > 1 else anchors
    place = index.time_and_lane(flat.cpu().numpy())
    return not index.eligible_starts(buffer._needs.single, *place).all()


def _written_since(storage: Storage, draw: Draw) -> bool:
    """Return whether a row of a draw was written after the draw."""
    if storage.ledger.next_position == draw.written:
        return False
    slots = draw.index[:, 0] if storage.ndim > 1 else draw.index
    return bool((storage.ledger.positions(slots.cpu()) >= draw.written).any())


# -- undoing draws ---------------------------------------------------------------------------------


def give_back(buffer: ReplayBuffer, draw: Draw) -> None:
    """Keep a draw whose batch failed, so that it comes next, or undo it."""
    with buffer._locked(settled=False) as storage:
        if draw.storage is storage and draw.sampler is buffer._sampler:
            _take_back(buffer, draw, storage)


def _take_back(buffer: ReplayBuffer, draw: Draw, storage: Storage) -> None:
    """Do the same as ``give_back`` does. The caller holds the lock."""
    show(buffer._sampler, draw.was_out)
    if draw.kept and not buffer._sampler.consumes:
        buffer._retry.append(draw)
        buffer._retry.sort(key=lambda one: one.number)
    else:
        undo_draws(buffer, [draw], storage)


def _next_failed(buffer: ReplayBuffer, storage: Storage) -> Draw | None:
    """Return the next failed draw. If it is outdated, undo all draws and return None."""
    if is_outdated(buffer, buffer._retry[0], storage):
        rewind(buffer)
        return None
    draw = buffer._retry.pop(0)
    show(buffer._sampler, draw.ran_out)
    return draw


def rewind(buffer: ReplayBuffer) -> None:
    """Undo all draws that were not delivered. The caller holds the lock."""
    undo_draws(buffer, withdraw(buffer), buffer._storage)


def withdraw(buffer: ReplayBuffer) -> list[Draw]:
    """Drop all batches that were not delivered; return their draws in order.

    The caller holds the lock.
    """
    draws, queue, buffer._retry = buffer._retry, queue_of(buffer), []
    return draws if queue is None else [*draws, *queue.clear()]


def drop_draws(buffer: ReplayBuffer) -> None:
    """Drop all draws that were not delivered, because the sampler starts over.

    The caller holds the lock.
    """
    withdraw(buffer)
    buffer._draws_made += 1  # a batch that fails later is not the last draw


def undo_draws(buffer: ReplayBuffer, draws: list[Draw], storage: Storage) -> None:
    """Undo draws that will not be delivered, given in the order of drawing.

    The sampler and the generator return to their states before the draws. If a later draw was
    delivered, only the rows return to the pass. The caller holds the lock.
    """
    sampler, generator, shown = buffer._sampler, buffer._generator, buffer._sampler.ran_out
    returned: list[torch.Tensor] = []  # newest first
    newest = buffer._draws_made
    for draw in reversed(draws):
        mark, known = draw.mark, False
        if draw.number == newest and mark is not None and not sampler.consumes:
            newest -= 1
            known = mark.token is not None and sampler.rollback(mark.token, storage) is not False
            unused = mark.after is not None and torch.equal(random_state(generator), mark.after)
            if mark.random is not None and unused:
                set_random_state(generator, mark.random)
        if sampler.consumes:  # a write may reuse the slots before the next draw
            unwritten = storage.ledger.positions(draw.anchors.cpu()) < draw.written
            returned.append(draw.anchors[unwritten.to(draw.anchors.device)])
        elif not known and draw.removed == storage.ledger.log.removed:
            returned.append(draw.anchors)  # after a removal, other rows are in the slots
    if newest + len(draws) > buffer._draws_made:
        newest += 1  # no token of a draw under way knows of the returned rows
    buffer._draws_made = newest
    if returned:
        sampler.put_back(returned[::-1], storage)
    show(sampler, shown)
