"""Batches to an accelerator through a ring of pinned buffers that are used again and again.

Pinning takes longer than copying, so that it is done once. A batch is packed into one buffer and
goes in one copy; the buffer is written again when that copy is over, which its event tells.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from replaykit.leafwise import map_tensors
from replaykit.transfer.engines import Engine
from replaykit.transfer.packing import Packing, is_plain

__all__ = ["Arrival", "Staging"]

_LEAST_BYTES = 2**16


@dataclass(frozen=True, slots=True)
class Arrival:
    """A batch that is on its way to a device."""

    engine: Engine
    event: Any
    there: torch.Tensor

    def order(self) -> None:
        """Has what the calling thread asks of the device from now on find the batch there."""
        self.engine.order(self.event, self.there)


@dataclass(slots=True)
class _Slot:
    """A pinned buffer; ``event``: of the copy that may still read it."""

    host: torch.Tensor | None = None
    event: Any = None


class Staging:
    """A ring of pinned buffers in front of a device.

    Any number of threads may move batches at the same time; those for which there is no buffer wait
    until another thread has filled one. No lock is held while anything is packed, copied or waited
    for.

    Args:
        engine: what copies.
        slots: number of buffers. Memory: that of as many of the largest batches, up to twice.
    """

    def __init__(self, engine: Engine, slots: int) -> None:
        self.engine = engine
        self.process = os.getpid()
        self._free: deque[_Slot] = deque(_Slot() for _ in range(slots))
        self._changed = threading.Condition()

    def move(self, data: Any) -> tuple[Any, Arrival | None]:
        """Asks for a batch to be copied to the device.

        Args:
            data: as for ``to_device``.

        Returns:
            The same container with the same values, shapes, dtypes and strides on the device, in
            memory of its own, and what has to be told ``order()`` by the thread that uses it; None
            where nothing went through the ring.

        Cost: the bytes of the batch written once into pinned memory, and one copy to the device.
        What is more than its bytes (sparse tensors, those with gradients) or lies on another device
        moves by itself, and is waited for.
        """
        target = self.engine.device
        tensors: list[torch.Tensor] = []

        def note(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.device.type == "cpu" and is_plain(tensor):
                tensors.append(tensor)
            return tensor

        map_tensors(data, note)
        arrival, found = None, {}
        if tensors:
            packing = Packing(tensors)
            arrival = self._send(packing)
            for number, view in packing.views.items():
                found[id(tensors[number])] = view.of(arrival.there)

        def place(tensor: torch.Tensor) -> torch.Tensor:
            there = found.get(id(tensor))
            return tensor.to(target) if there is None else there

        return map_tensors(data, place, device=target), arrival

    def _send(self, packing: Packing) -> Arrival:
        slot = self._take()
        try:
            if slot.event is not None:
                self.engine.wait(slot.event)
                slot.event = None
            if slot.host is None or len(slot.host) < packing.nbytes:
                slot.host = None  # both at once would be more than the ring may have
                slot.host = self.engine.pinned(_room(packing.nbytes))
            block = slot.host[: packing.nbytes]
            packing.fill(block)
            there, slot.event = self.engine.copy(block)
            return Arrival(self.engine, slot.event, there)
        finally:
            with self._changed:
                self._free.append(slot)
                self._changed.notify()

    def _take(self) -> _Slot:
        """The buffer whose copy was asked for first."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._free))
            return self._free.popleft()


def _room(nbytes: int) -> int:
    """A size that batches a little larger fit into as well."""
    return max(_LEAST_BYTES, 1 << (nbytes - 1).bit_length())
