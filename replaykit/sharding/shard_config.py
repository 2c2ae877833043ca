"""Configure shards, and say how the law of a sampler divides among them."""

from __future__ import annotations

import contextlib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple

import torch

from replaykit.buffer import ReplayBuffer
from replaykit.buffer.drawing import Drawn, Lent
from replaykit.episodes import EPISODES, ROWS, WINDOWS
from replaykit.pace import Pace
from replaykit.registry import entry_of, of_kind
from replaykit.samplers import RandomSampler, Sampler
from replaykit.samplers.slice_arguments import SliceSize
from replaykit.samplers.window_forms import MASK, SEQUENCE_ID
from replaykit.samplers.window_measures import PerLane, index_for
from replaykit.sharding.protocol import Terms
from replaykit.storages import Storage
from replaykit.storages.column_storage import ColumnStorage
from replaykit.structure import from_json

__all__ = [
    "LAWS",
    "DrawLaw",
    "Measured",
    "ShardRecipe",
    "check_common",
    "check_head",
    "checked_own",
    "law_of",
]


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


@dataclass(frozen=True)
class ShardRecipe:
    """What every shard is made of: factories, since each has parts of its own.

    Attributes:
        terms: what masses are measured in when nobody says; None: not without being asked.
        timeout: seconds within which clients are done with a call, or give it up.
    """

    storage: Callable[[], Any]
    sampler: Callable[[], Any] | None
    writer: Callable[[], Any] | None
    transform_factory: Callable[[], Any] | None
    priority_key: Any
    checkpoint_dir: str | None
    checkpoint_interval: float
    num_shards: int
    shard_key: Any
    terms: Terms | None = None
    timeout: float = 60.0

    def make(self) -> ReplayBuffer:
        """Returns a new buffer.

        Raises:
            ValueError: parts that do not divide among shards; says which and why.
        """
        buffer = ReplayBuffer(
            storage=self.storage,
            sampler=RandomSampler if self.sampler is None else self.sampler,
            writer=self.writer,
            transform_factory=self.transform_factory,
            priority_key=self.priority_key,
            delayed_init=False,
        )
        storage, writer = buffer.storage, buffer.writer
        if not isinstance(storage, ColumnStorage) or storage.ndim > 1:
            raise ValueError(
                "expected a tensor or memmap storage with ndim=1 for shards, got "
                f"{storage!r}; lanes are told apart by shard_key= and lane_key="
            )
        mismatch = getattr(storage, "on_mismatch", None)
        if getattr(storage, "dedup_next", False) and mismatch == "error":
            raise ValueError(
                "expected on_mismatch='dense' with dedup_next for shards, got 'error': others have "
                "stored their parts of a batch when one refuses its own"
            )
        if not writer.keeps_order:
            raise ValueError(
                f"expected a writer that keeps the order for shards, got a {type(writer).__name__}"
            )
        law_of(buffer.sampler)
        if self.shard_key is None and (
            buffer.sampler.needs_write_order or buffer._chain.spans_rows
        ):
            raise ValueError(
                "expected shard_key= with slices, and with transforms that read the rows around, "
                "hold rows back or follow what is written: without it the rows of an episode go to "
                "different shards"
            )
        return buffer

    def folder(self, shard: int) -> Path | None:
        """Where a shard keeps its own checkpoint."""
        if self.checkpoint_dir is None:
            return None
        return Path(self.checkpoint_dir).expanduser() / f"shard-{shard:05d}"


_MOST = 2**62
"""Counts are sums of what is less, in 64 bits."""
_MOST_SHARDS = 2**20


def check_head(head: object) -> None:
    """Looks at the part of a manifest that names the checkpoints of the shards.

    Raises:
        ValueError: it is nothing that a save can have written, or the rows are of a class that
            this program has not loaded; says which entry.
    """
    said = head if isinstance(head, Mapping) else {}
    save, shards, rows = said.get("save"), said.get("num_shards"), said.get("rows")
    # The name of a folder: of our own making, so that nothing is opened outside of the directory.
    if not (isinstance(save, str) and re.fullmatch("[0-9a-f]{32}", save)):
        raise ValueError(f"expected the name of a save, got {save!r}")
    if type(shards) is not int or not 1 <= shards <= _MOST_SHARDS:
        raise ValueError(f"expected a number of shards, got {shards!r}")
    if not (isinstance(rows, list) and len(rows) == shards and all(map(_is_count, rows))):
        raise ValueError(f"expected the rows of {shards} shards, got {rows!r}")
    key = said.get("shard_key")
    if not isinstance(key, str | None):
        raise ValueError(f"expected a shard_key, got {key!r}")
    check_common(said)


def check_common(said: Mapping[str, Any]) -> None:
    """Looks at what a checkpoint and a ``state_dict`` say alike of the client.

    Raises:
        ValueError: as of ``check_head``.
    """
    dealt, generator, layout = (said.get(name) for name in ("dealt", "generator", "layout"))
    if not _is_count(dealt):
        raise ValueError(f"expected how many rows were dealt out, got {dealt!r}")
    if generator is not None:
        try:
            torch.Generator().set_state(generator.clone())
        except (RuntimeError, TypeError, AttributeError) as error:
            raise ValueError(f"expected the state of a generator, got {error}") from None
    if layout is not None:
        from_json(layout)
    Pace.check_state(said.get("pace"))


def checked_own(said: object) -> tuple[int, list[Any]]:
    """Returns how many rows a shard had been written before its ledger began, and the writes that
    were under way, of its own checkpoint.

    Raises:
        ValueError: it says something else.
    """
    known = said if isinstance(said, Mapping) else {}
    before, writes = known.get("before"), known.get("writes")
    # Less than nothing where a load has left out rows: what was written goes on from there.
    if type(before) is not int or not -_MOST < before < _MOST:
        raise ValueError(f"expected the number of rows before, got {before!r}")
    if not (isinstance(writes, list) and all(map(_is_write, writes))):
        raise ValueError(f"expected the writes under way, got {writes!r}")
    return before, writes


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < _MOST


def _is_write(value: object) -> bool:
    if not (isinstance(value, list) and len(value) == 4):
        return False
    client, number, shards, _ = value
    return isinstance(client, str) and type(number) is int and type(shards) is int
