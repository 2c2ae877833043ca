"""What copies from host memory to an accelerator on its own, while the processor goes on."""

from __future__ import annotations

from typing import Any, Protocol

import torch

__all__ = ["CudaEngine", "Engine", "engine_for"]


class Engine(Protocol):
    """Copies blocks to a device, one after the other, in a stream of its own.

    An *event* is what the engine gives out for a copy: it has happened when the copy is over.
    """

    device: torch.device

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Returns host memory, uint8 ``[nbytes]``, that the engine can copy from by itself."""

    def copy(self, host: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Asks for a copy of pinned bytes and returns at once.

        Returns:
            Memory of the device that nobody else has, and the event. Neither may be looked at, nor
            ``host`` written, before the event.
        """

    def wait(self, event: Any) -> None:
        """Has the calling thread sleep until the event has happened."""

    def order(self, event: Any, there: torch.Tensor) -> None:
        """Has what the caller asks of the device from now on come after the event.

        ``there``: the copy, whose memory is then kept until that is over, even if it is let go
        before. The calling thread does not wait.
        """


class CudaEngine:
    """Copies in a CUDA stream beside those in which the learner works."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)

    def pinned(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def copy(self, host: torch.Tensor) -> tuple[torch.Tensor, Any]:
        with torch.cuda.stream(self._stream):
            # Taken from the memory of that stream: what is there already was used in it last.
            there = host.to(self.device, non_blocking=True)
            event = torch.cuda.Event(blocking=True)  # who waits sleeps, and leaves the processor
            event.record(self._stream)
        return there, event

    def wait(self, event: Any) -> None:
        event.synchronize()

    def order(self, event: Any, there: torch.Tensor) -> None:
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(event)
        there.record_stream(stream)


def engine_for(device: torch.device) -> Engine | None:
    """Returns what copies to a device; None where copies are made by who asks for them."""
    return CudaEngine(device) if device.type == "cuda" else None
