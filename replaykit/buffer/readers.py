"""What worker processes get of a buffer, to read its rows where they lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from replaykit.buffer.elsewhere import Elsewhere
from replaykit.buffer.sampling import Sampling
from replaykit.samplers import Sampler
from replaykit.writers import ImmutableDatasetWriter

__all__ = ["Reader", "check_workers", "for_readers"]


@dataclass(frozen=True)
class Reader:
    """What a spawned process makes a buffer of that reads the same rows and writes none."""

    rows: Any
    sampler: Sampler
    generations: bool
    options: dict[str, Any]

    def made(self) -> Sampling:
        writer = ImmutableDatasetWriter()
        writer.tracks_generations = self.generations
        return Sampling(
            storage=self.rows.opened(), sampler=self.sampler, writer=writer, **self.options
        )


def for_readers(buffer: Sampling | Elsewhere) -> Any:
    """What a spawned process gets in the place of a buffer; what is not the buffer is ``made``."""
    if isinstance(buffer, Elsewhere):
        return buffer._carried()
    rows = buffer.storage.for_readers()
    if rows is buffer.storage:
        return buffer
    return Reader(
        rows,
        buffer._sampler,
        buffer._writer.tracks_generations,
        {
            "sample_unit": buffer._sample_unit,
            "collate_fn": buffer._collate_fn,
            "transform": buffer._chain,
            "batch_size": buffer._batch_size,
            "contiguous": buffer._contiguous,
        },
    )


def check_workers(buffer: Any, method: str | None = None) -> None:
    """Checks that worker processes can read the rows of a buffer.

    Args:
        method: how they are started, where that is known.

    Raises:
        ValueError: names what keeps them from it. RuntimeError: the rows would have to be copied.
    """
    if isinstance(buffer, Elsewhere):
        buffer._check_workers(method)
        return
    if buffer._target is not None:
        raise ValueError(
            f"expected a buffer without device for workers, got device={str(buffer._target)!r}: "
            "they make batches on the CPU; move these with to_device, or use prefetch="
        )
    if str(buffer.storage.device).partition(":")[0] not in ("cpu", "auto"):
        raise ValueError(
            f"expected rows on the CPU for workers, got a {type(buffer.storage).__name__} on "
            f"{buffer.storage.device}; use prefetch="
        )
    if method not in (None, "fork"):
        buffer.storage.for_readers()
