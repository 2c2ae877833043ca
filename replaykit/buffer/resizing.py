"""Change the capacity of a buffer that is in use."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

from replaykit.buffer.draw import drop_draws, random_state, rewind, set_random_state
from replaykit.buffer.events import Event
from replaykit.keywords import whole_number

if TYPE_CHECKING:
    from replaykit.buffer.replay_buffer import ReplayBuffer


def resize_rows(buffer: ReplayBuffer, rows: int) -> int:
    """Change the capacity; return the number of rows that were evicted.

    Other buffers over the storage follow, as their samplers would follow a load of the same rows.
    """
    rows = whole_number("n", rows, 1)
    if buffer.writer.kind == "immutable":
        buffer.writer.write(None)  # raises
    with buffer._locked() as storage:
        buffers: list[Any] = [ref() for ref in storage._listeners]
        buffers = [one for one in buffers if getattr(one, "_sampler", None) is not None]
        cells = storage.lanes.numel()
        slots = -(-rows // cells)
        for one in buffers:
            one._sampler.check_capacity(storage, slots * cells)
            if one._rate_limiter is not None:
                one._rate_limiter.check_capacity(slots * cells)
        if rows == storage.max_size:
            return 0
        storage.check_resizable()
        random = random_state(buffer._generator)
        try:
            buffer._writer.kept_rows(slots)  # refuses before draws are undone
        finally:  # an evictor may have drawn
            set_random_state(buffer._generator, random)
        length = storage.ledger.length
        states = []
        for one in buffers:
            rewind(one)
            drop_draws(one)
            for transform in one._listening:
                transform.written(storage)
            states.append(copy.deepcopy(one._sampler.state_dict()))
        try:
            with buffer._writer.resized(rows) as kept:
                for one, state in zip(buffers, states, strict=True):
                    _follow(one, storage, state, kept)
        except BaseException:
            for one, state in zip(buffers, states, strict=True):
                one._sampler.load_state_dict(state)
            raise
        evicted = (length - storage.ledger.length) * cells
    for one in buffers:
        if evicted and one._observers is not None:
            one._observers._call(Event("evict", evicted))
    return evicted


def _follow(buffer: Any, storage: Any, state: dict[str, Any], kept: torch.Tensor | None) -> None:
    """Let the parts of a buffer follow the rows."""
    buffer._sampler.load_state_dict(state)
    if kept is not None:
        buffer._sampler.moved(kept, storage)
    for transform in buffer._listening:
        if hasattr(transform, "resized"):
            transform.resized(storage)
    if buffer._observers is not None:
        buffer._observers.look(storage)
