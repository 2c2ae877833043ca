"""Configure shards, and divide the draws of a sampler among them."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, NamedTuple

import torch

from replaykit.buffer import ReplayBuffer
from replaykit.buffer.draw import draw_apart
from replaykit.buffer.prefetch import Draw, DrawnBatch
from replaykit.declared import MOST, Count, matching, within
from replaykit.distributed.protocol import Terms
from replaykit.episodes import EPISODES, ROWS, WINDOWS
from replaykit.pace import LimiterQueue
from replaykit.registry import entry_of, of_kind
from replaykit.samplers import RandomSampler, Sampler
from replaykit.samplers.slice_arguments import SliceSize
from replaykit.samplers.window_forms import MASK, SEQUENCE_ID
from replaykit.samplers.window_measures import PerLane, index_for
from replaykit.storages import Storage
from replaykit.storages.column_storage import ColumnStorage
from replaykit.structure import from_json


class Measured(NamedTuple):
    """The mass of a shard, and its smallest positive ``v``.

    Without rows, the smallest ``v`` is infinite.
    """

    mass: float
    smallest: float


_NOTHING = Measured(0, float("inf"))
_COUNTED = {"window": WINDOWS, "trajectory": EPISODES, "transition": ROWS}


class DrawLaw(ABC):
    """The rule by which the draws of a sampler are divided among shards.

    Each subclass is for one kind of sampler. Callers of methods with a buffer hold its lock.
    """

    prioritized = False
    options: ClassVar[Mapping[str, Any]] = {}
    """The options of the sampler, with the values that make its draws independent."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def check(self) -> None:
        """Raise ValueError if options of the sampler prevent the division of its draws."""
        for name, expected in self.options.items():
            found = getattr(self.sampler, name)
            if found != expected:
                raise ValueError(
                    f"expected {name}={expected!r} of a {type(self.sampler).__name__} for shards, "
                    f"which know only the masses of one another, got {found!r}"
                )

    def terms(self, batch_size: int | None) -> Terms | None:
        """Return the terms of masses for this batch size.

        The result is None if the terms depend on a batch size and ``batch_size`` is None.
        """
        return Terms()

    def draws(self, batch_size: int) -> int:
        """Return the number of independent draws in a batch.

        Raises:
            RuntimeError: whole draws cannot fill a batch of that size.
        """
        return batch_size

    @abstractmethod
    def measure(self, buffer: ReplayBuffer, storage: Storage, terms: Terms) -> Measured:
        """Return the mass of the rows of a buffer."""

    def draw(
        self, buffer: ReplayBuffer, count: int, terms: Terms, generator: torch.Generator
    ) -> DrawnBatch:
        """Draw ``count`` times with the buffer's sampler."""
        return draw_apart(buffer, count, generator)

    def values(self, buffer: ReplayBuffer, draw: Draw) -> torch.Tensor | None:
        """Return ``v`` of each draw, float64 on the CPU, or None without priorities."""
        return None


class UniformRows(DrawLaw):
    """The rule for draws of equally likely rows.

    The mass is the number of eligible rows.
    """

    def measure(self, buffer: ReplayBuffer, storage: Storage, terms: Terms) -> Measured:
        needs = buffer._needs
        if not needs or not len(storage):
            return Measured(len(storage), float("inf"))
        return Measured(int(index_for(storage).total(needs.single, WINDOWS)), float("inf"))


class WindowDraws(DrawLaw):
    """The rule for draws of windows inside episodes.

    The mass is the number of windows or episodes, depending on the sampler's ``measure``.
    """

    options: ClassVar = {"draw": "iid", "recent": None, "strict_lanes": False, "where": None}

    def check(self) -> None:
        super().check()
        if not isinstance(self.sampler.measure, str):
            raise ValueError(
                f"expected the name of a measure for shards, got {self.sampler.measure!r}, whose "
                "counts each shard would have alone"
            )
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

    def draw(
        self, buffer: ReplayBuffer, count: int, terms: Terms, generator: torch.Generator
    ) -> DrawnBatch:
        with _windows_of(buffer._sampler, terms.length):
            return draw_apart(buffer, count * terms.length, generator)


class Proportional(DrawLaw):
    """The rule for draws by priority; the mass is the sum of ``v``."""

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
        table = sampler._table.follow(storage)
        return Measured(self._mass(sampler, buffer, storage, terms), _smallest(table))

    def _mass(self, sampler: Any, buffer: ReplayBuffer, storage: Storage, terms: Terms) -> float:
        table = sampler._table.follow(storage)
        if not buffer._needs:
            return float(table._sums.total)
        law = buffer._needs.single
        return float(sampler._eligible(storage, index_for(storage), law)[1].total)

    def values(self, buffer: ReplayBuffer, draw: Draw) -> torch.Tensor:
        sampler: Any = buffer._sampler
        table, start = sampler._table, draw.index
        window = draw.info.get(SEQUENCE_ID)
        if window is not None:
            mask = draw.info.get(MASK)
            if mask is not None:  # this window is padded before its first row
                start, window = start[mask], window[mask]
            first = torch.ones_like(window, dtype=torch.bool)
            first[1:] = window[1:] != window[:-1]
            start = start[first]
        return torch.as_tensor(table.values(start.to(table.device)), device="cpu").to(torch.float64)


class ProportionalWindows(Proportional):
    """The rule for draws of windows by the priorities of their first rows.

    The mass is the sum of ``v`` over all possible first rows.
    """

    options: ClassVar = {
        "draw": "iid",
        "stratified": False,
        "recent": None,
        "where": None,
    } | Proportional.options

    def check(self) -> None:
        super().check()
        if self.sampler.unit == "episode":
            raise ValueError("expected unit='step' or 'slice' for shards, got 'episode'")
        _refuse_static(self.sampler)

    def terms(self, batch_size: int | None) -> Terms | None:
        found = WindowDraws.terms(self, batch_size)  # type: ignore[arg-type]
        return None if found is None else Terms(found.length, self.sampler.alpha)

    draws = WindowDraws.draws
    draw = WindowDraws.draw

    def _mass(self, sampler: Any, buffer: ReplayBuffer, storage: Storage, terms: Terms) -> float:
        with _windows_of(sampler, terms.length):
            request = sampler._slicing.request(storage, terms.length, buffer._needs)
        return float(sampler._eligible(storage, request.episodes, request.law)[1].total)


@contextlib.contextmanager
def _windows_of(sampler: Any, length: int) -> Iterator[None]:
    """Set the slice length of the whole batch while a shard draws its share."""
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
    "rows": UniformRows,
    "windows": WindowDraws,
    "prioritized rows": Proportional,
    "prioritized windows": ProportionalWindows,
}
"""The rules by the registered names of the samplers."""


def law_of(sampler: Sampler) -> DrawLaw:
    """Return the draw rule of a sampler.

    Raises:
        ValueError: the draws of the sampler are not independent, or no rule exists for its class.
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
            "expected a sampler for shards that finds episodes by keys of columns, got ends= or "
            "trajectories=, which belong to the rows of one storage"
        )


@dataclass(frozen=True)
class ShardRecipe:
    """The factories from which each shard makes separate parts.

    Attributes:
        terms: the terms of masses until a client asks for other terms. With None, no mass is
            measured until a client asks for terms.
        timeout: seconds after which a client has finished a call or given up.
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
        """Return a new buffer.

        Raises:
            ValueError: a part cannot be used in shards; the error names the part and the reason.
        """
        buffer = self.assemble(self.storage)
        storage, writer = buffer.storage, buffer.writer
        if not isinstance(storage, ColumnStorage) or storage.ndim > 1:
            raise ValueError(
                "expected a tensor or memmap storage with ndim=1 for shards, got "
                f"{storage!r}; shard_key= and lane_key= distinguish streams"
            )
        mismatch = getattr(storage, "on_mismatch", None)
        if getattr(storage, "dedup_next", False) and mismatch == "error":
            raise ValueError(
                "expected on_mismatch='dense' with dedup_next for shards, got 'error': when one "
                "shard refuses its part of a batch, others have stored theirs"
            )
        if not writer.keeps_order:
            raise ValueError(
                "expected a writer for shards that keeps the order of rows, got a "
                f"{type(writer).__name__}"
            )
        law_of(buffer.sampler)
        if self.shard_key is None and (
            buffer.sampler.needs_write_order or buffer._chain.spans_rows
        ):
            raise ValueError(
                "expected shard_key= with slices, and with transforms that read neighbouring rows, "
                "hold rows back or follow writes: without it the rows of an episode go to "
                "different shards"
            )
        return buffer

    def assemble(self, storage: Any) -> ReplayBuffer:
        """Return a new buffer over a storage, without checks."""
        return ReplayBuffer(
            storage=storage,
            sampler=RandomSampler if self.sampler is None else self.sampler,
            writer=self.writer,
            transform_factory=self.transform_factory,
            priority_key=self.priority_key,
            delayed_init=False,
        )

    def folder(self, shard: int) -> Path | None:
        """Return the directory of a shard's own checkpoint, or None without checkpoints."""
        if self.checkpoint_dir is None:
            return None
        return Path(self.checkpoint_dir).expanduser() / f"shard-{shard:05d}"


@dataclass(frozen=True)
class ClientState:
    """The client's entries in a checkpoint and in a ``state_dict``.

    Raises:
        ValueError: no save can have written the entries, or the program has not loaded the class of
            the rows.
    """

    num_shards: Annotated[int, within(1, 2**20)]
    shard_key: str | None
    dealt: Count
    generator: Any
    layout: Any
    pace: Any = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        checks = {
            "generator": _check_generator,
            "layout": from_json,
            "pace": LimiterQueue.check_state,
        }
        for name, check in checks.items():
            try:
                if getattr(self, name) is not None:
                    check(getattr(self, name))
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None


def _check_generator(state: Any) -> None:
    try:
        torch.Generator().set_state(state.clone())
    except (RuntimeError, TypeError, AttributeError) as error:
        raise ValueError(f"expected the state of a generator, got {error}") from None


@dataclass(frozen=True)
class SavedHead(ClientState):
    """The part of a manifest that names the checkpoints of the shards."""

    # The entry is the name of a folder. The pattern prevents access to files outside the directory.
    save: Annotated[str, matching("[0-9a-f]{32}")]
    rows: list[Count]

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.rows) != self.num_shards:
            raise ValueError(f"expected the rows of {self.num_shards} shards, got {self.rows}")


@dataclass(frozen=True)
class ShardsState(ClientState):
    """The state of all shards as a dictionary."""

    shards: list[Any]

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.shards) != self.num_shards:
            raise ValueError(
                f"expected the states of {self.num_shards} shards, got {len(self.shards)}"
            )


@dataclass(frozen=True)
class OwnState:
    """The entries of a shard's own checkpoint.

    Attributes:
        before: the count of rows that were written before row id 0 of the shard's ledger. It is
            negative if a load has dropped rows. Row ids count such rows, but `ShardFacts.written`
            does not.
        writes: the writes under way.
    """

    before: Annotated[int, within(-MOST)]
    writes: list[tuple[str, int, int, Any]]
