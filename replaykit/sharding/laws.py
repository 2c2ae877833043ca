"""What a shard's share of the draws is: the part of a sampler's law that all shards need to know.

A draw of one big buffer takes row i with probability ``w_i / sum w``. Over shards that is a shard
with ``mass / sum of masses``, where a mass is the sum of ``w`` over the shard's rows, and then the
row by the shard's own sampler. So a law has to say one number of a shard, and to draw from it.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Final, NamedTuple

import torch

from replaykit.buffer import ReplayBuffer
from replaykit.buffer.drawing import Drawn, Lent
from replaykit.episodes import EPISODES, ROWS, WINDOWS
from replaykit.registry import entry_of, of_kind
from replaykit.samplers import Sampler
from replaykit.samplers.eligible import index_for
from replaykit.samplers.markers import MASK, SEQUENCE_ID
from replaykit.samplers.measures import PerLane
from replaykit.samplers.slice_arguments import SliceSize
from replaykit.sharding.facts import Terms
from replaykit.storages import Storage

__all__ = ["LAWS", "DrawLaw", "Measured", "law_of"]


class Measured(NamedTuple):
    """The mass of a shard, and the smallest positive ``v`` of its rows (infinite without any)."""

    mass: float
    smallest: float


_NOTHING = Measured(0, float("inf"))
_COUNTED = {"window": WINDOWS, "trajectory": EPISODES, "transition": ROWS}


class DrawLaw(ABC):
    """How draws of one kind of sampler divide among shards.

    Methods that take a buffer are called with its lock held.
    """

    prioritized = False
    options: ClassVar[Mapping[str, Any]] = {}
    """Options of the sampler and the values with which its draws are independent."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def check(self) -> None:
        """Raise ValueError if the sampler has options with which its draws do not divide."""
        for name, expected in self.options.items():
            found = getattr(self.sampler, name)
            if found != expected:
                raise ValueError(
                    f"expected {name}={expected!r} of a {type(self.sampler).__name__} for shards, "
                    f"which know of one another only how likely they are, got {found!r}"
                )

    def terms(self, batch_size: int | None) -> Terms | None:
        """What masses for batches of that size depend on; None where a size is needed to tell."""
        return Terms()

    def draws(self, batch_size: int) -> int:
        """Number of independent draws in a batch; RuntimeError where they do not fill it."""
        return batch_size

    @abstractmethod
    def measure(self, buffer: ReplayBuffer, storage: Storage, terms: Terms) -> Measured:
        """The mass of what a buffer has."""

    def draw(self, buffer: ReplayBuffer, count: int, terms: Terms, lent: Lent) -> Drawn:
        """Draws ``count`` times as the buffer's sampler does."""
        return buffer._draw(count, lent)

    def values(self, buffer: ReplayBuffer, drawn: Drawn) -> torch.Tensor | None:
        """``v`` of each draw, float64 on the CPU; None without priorities."""
        return None


class Uniform(DrawLaw):
    """Every row that the transforms allow is as likely: the mass is their number."""

    def measure(self, buffer: ReplayBuffer, storage: Storage, terms: Terms) -> Measured:
        needs = buffer._needs
        if not needs or not len(storage):
            return Measured(len(storage), float("inf"))
        return Measured(int(index_for(storage).total(needs.single, WINDOWS)), float("inf"))


class Windows(DrawLaw):
    """Windows inside episodes: the mass is their number, or what else the measure counts."""

    options: ClassVar = {"draw": "iid", "recent": None, "strict_lanes": False}

    def check(self) -> None:
        super().check()
        _refuse_static(self.sampler)

    def terms(self, batch_size: int | None) -> Terms | None:
        size = self.sampler._slicing.size
        if size.slice_len:
            return Terms(size.slice_len)
        return None if batch_size is None else Terms(size.of(batch_size)[1])

    def draws(self, batch_size: int) -> int:
        return int(self.sampler._slicing.size.of(batch_size)[0])

    def measure(self, buffer: ReplayBuffer, storage: Storage, terms: Terms) -> Measured:
        if not len(storage):
            return _NOTHING
        sampler: Any = buffer._sampler
        with _windows_of(sampler, terms.length):
            request = sampler._slicing.request(storage, terms.length, buffer._needs)
        if sampler.measure == "lane":
            lanes = len(PerLane(request.episodes, request.law).lanes)
            return Measured(lanes, float("inf"))
        counted = request.episodes.totals(request.law, _COUNTED[sampler.measure])
        return Measured(int(counted.sum()), float("inf"))

    def draw(self, buffer: ReplayBuffer, count: int, terms: Terms, lent: Lent) -> Drawn:
        with _windows_of(buffer._sampler, terms.length):
            return buffer._draw(count * terms.length, lent)


class Proportional(DrawLaw):
    """By priority: the mass is the sum of ``v``."""

    prioritized = True
    options: ClassVar = {"stratified": False, "max_priority_within_buffer": False}

    def terms(self, batch_size: int | None) -> Terms | None:
        return Terms(0, self.sampler.alpha)

    def measure(self, buffer: ReplayBuffer, storage: Storage, terms: Terms) -> Measured:
        if not len(storage):
            return _NOTHING
        sampler: Any = buffer._sampler
        if terms.alpha is not None:
            sampler.alpha = terms.alpha
        table = sampler._following(storage)
        return Measured(self._mass(sampler, buffer, storage, terms), _smallest(table))

    def _mass(self, sampler: Any, buffer: ReplayBuffer, storage: Storage, terms: Terms) -> float:
        table = sampler._following(storage)
        if not buffer._needs:
            return float(table._sums.total)
        law = buffer._needs.single
        return float(sampler._eligible(storage, index_for(storage), law)[1].total)

    def values(self, buffer: ReplayBuffer, drawn: Drawn) -> torch.Tensor:
        sampler: Any = buffer._sampler
        table, start = sampler._table, drawn.index
        window = drawn.info.get(SEQUENCE_ID)
        if window is not None:
            mask = drawn.info.get(MASK)
            if mask is not None:  # a window that is padded before its first row
                start, window = start[mask], window[mask]
            first = torch.ones_like(window, dtype=torch.bool)
            first[1:] = window[1:] != window[:-1]
            start = start[first]
        return torch.as_tensor(table.values(start.to(table.device)), device="cpu").to(torch.float64)


class ProportionalWindows(Proportional):
    """By priority of the row with which a window starts: the sum of ``v`` over such rows."""

    options: ClassVar = {"draw": "iid", "stratified": False, "recent": None} | Proportional.options

    def check(self) -> None:
        super().check()
        _refuse_static(self.sampler)

    def terms(self, batch_size: int | None) -> Terms | None:
        found = Windows.terms(self, batch_size)  # type: ignore[arg-type]
        return None if found is None else Terms(found.length, self.sampler.alpha)

    def draws(self, batch_size: int) -> int:
        return int(self.sampler._slicing.size.of(batch_size)[0])

    def _mass(self, sampler: Any, buffer: ReplayBuffer, storage: Storage, terms: Terms) -> float:
        with _windows_of(sampler, terms.length):
            request = sampler._slicing.request(storage, terms.length, buffer._needs)
        return float(sampler._eligible(storage, request.episodes, request.law)[1].total)

    def draw(self, buffer: ReplayBuffer, count: int, terms: Terms, lent: Lent) -> Drawn:
        with _windows_of(buffer._sampler, terms.length):
            return buffer._draw(count * terms.length, lent)


@contextlib.contextmanager
def _windows_of(sampler: Any, length: int) -> Iterator[None]:
    """While a shard draws its share of a batch, the slices have the length that those of the
    whole batch have."""
    slicing = sampler._slicing
    before, slicing.size = slicing.size, SliceSize(None, length)
    try:
        yield
    finally:
        slicing.size = before


def _smallest(table: Any) -> float:
    if table._least is None:
        return float("inf")
    return float(table.smallest())


LAWS: Final[dict[str, type[DrawLaw]]] = {
    "rows": Uniform,
    "windows": Windows,
    "prioritized rows": Proportional,
    "prioritized windows": ProportionalWindows,
}
"""The laws by the names that the registry has for them."""


def law_of(sampler: Sampler) -> DrawLaw:
    """Returns the law of a sampler.

    Raises:
        ValueError: what it draws does not divide among shards: draws that are not independent, or
            a class whose law is not known here.
    """
    entry = entry_of(type(sampler))
    if entry is None or entry.law is None:
        *others, last = (each.name for each in of_kind("sampler") if each.law is not None)
        raise ValueError(
            f"expected a {', '.join(others)} or {last} for shards, whose draws are independent, "
            f"got a {type(sampler).__name__}"
        )
    law = LAWS[entry.law](sampler)
    law.check()
    return law


def _refuse_static(sampler: Any) -> None:
    if sampler._slicing.boundaries._ends is not None:
        raise ValueError(
            "expected keys of columns to tell episodes by in a sampler for shards, got ends= or "
            "trajectories=, which are of the rows of one storage"
        )
