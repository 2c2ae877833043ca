"""Configure shards, divide the draws of a sampler among them, and route rows to them."""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, NamedTuple

import numpy as np
import torch

from replaykit._compat import as_tensor, is_tensordict
from replaykit.buffer import ReplayBuffer
from replaykit.buffer.draw import draw_apart
from replaykit.buffer.edit import column_of, is_key
from replaykit.buffer.prefetch import Draw, DrawnBatch
from replaykit.declared import MOST, Count, matching, within
from replaykit.distributed.protocol import ShardDied, Terms
from replaykit.episodes import EPISODES, ROWS, WINDOWS
from replaykit.pace import LimiterQueue
from replaykit.registry import entry_of, of_kind
from replaykit.samplers import RandomSampler, Sampler
from replaykit.samplers.slice_arguments import SliceSize
from replaykit.samplers.window_forms import MASK, SEQUENCE_ID
from replaykit.samplers.window_measures import PerLane, index_for
from replaykit.schema import check_alike
from replaykit.storages import Storage
from replaykit.storages.column_storage import ColumnStorage
from replaykit.storages.indexing import as_index
from replaykit.structure import Path, build, flatten, from_json
from replaykit.ted import format_key, unravel

if TYPE_CHECKING:
    from replaykit.distributed.sharded_client import ShardedClient


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
        smallest = float("inf") if table._least is None else float(table.smallest())
        return Measured(self._mass(sampler, buffer, storage, terms), smallest)

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
class ClientSettings:
    """The settings that all clients of one sharded buffer share.

    Attributes:
        sampler: a sampler with the settings of the shards' samplers. Each client has a copy of this
            sampler, and draws with the ``alpha`` and ``beta`` of the copy.
        tracked: whether writers track generations.
    """

    sampler: Sampler
    batch_size: int | None
    shard_key: Any
    priority_key: Any
    max_age: float
    tracked: bool


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

    def folder(self, shard: int) -> FilePath | None:
        """Return the directory of a shard's own checkpoint, or None without checkpoints."""
        if self.checkpoint_dir is None:
            return None
        return FilePath(self.checkpoint_dir).expanduser() / f"shard-{shard:05d}"


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


Array = np.ndarray[Any, Any]


_STEP, _MIX, _LAST = (
    np.uint64(number) for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


def stable_hash(keys: Array) -> Array:
    """Return hashes of integers ``[K]``, uint64.

    The hashes are the same in all processes and on all machines. The function is the mixer of
    SplitMix64 (Steele, Lea, Flood 2014). It is a bijection, so different keys have different
    hashes.

    Example:
        >>> import numpy as np
        >>> from replaykit.distributed.shard_config import stable_hash
        >>> stable_hash(np.array([0, 1])) % np.uint64(10)
        array([5, 5], dtype=uint64)
    """
    mixed = keys.astype(np.int64).view(np.uint64) + _STEP
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _LAST
    return np.asarray(mixed ^ (mixed >> np.uint64(31)))


class InTurn:
    """A router that assigns rows to the live shards in turn. Thread-safe.

    If all shards are live, row k goes to shard ``k % num_shards``, counting from the first routed
    row.
    """

    def __init__(self, num_shards: int) -> None:
        self.num_shards = num_shards
        self._lock = threading.Lock()
        self.dealt = 0

    def check(self, leaves: Mapping[Path, torch.Tensor]) -> None:
        """Accept any rows."""

    def route(self, leaves: Mapping[Path, torch.Tensor], count: int, there: Sequence[int]) -> Array:
        """Return the shard of each row, int64 ``[count]``; ``there`` has the live shards."""
        with self._lock:
            first, self.dealt = self.dealt, self.dealt + count
        number = (first + np.arange(count)) % self.num_shards
        if len(there) in (0, self.num_shards):  # if none is live, rows wait for a restart
            return number
        chosen = np.asarray(there)
        gone = ~np.isin(number, chosen)
        number[gone] = chosen[(first + np.flatnonzero(gone)) % len(chosen)]
        return number


class ByKey:
    """A router that sends rows with the same value under a key to the same shard.

    The shard of a key stays the same when shards die.

    Args:
        key: key of an integer or bool column, ``[B]`` or ``[B, k]``.
    """

    dealt = 0

    def __init__(self, num_shards: int, key: Any) -> None:
        self.num_shards, self.key = num_shards, unravel(key)

    def check(self, leaves: Mapping[Path, torch.Tensor]) -> None:
        """Raise KeyError if the key is missing, or TypeError if it has no integers."""
        column = leaves.get(self.key)
        if column is None:
            raise KeyError(f"expected the shard_key {format_key(self.key)} in the rows; got none")
        if column.is_floating_point() or column.is_complex():
            raise TypeError(
                f"expected integers under the shard_key {format_key(self.key)}, got {column.dtype}"
            )

    def route(self, leaves: Mapping[Path, torch.Tensor], count: int, there: Sequence[int]) -> Array:
        """Return the shards of checked rows, int64 ``[count]``."""
        column = leaves[self.key]
        values = column.detach().cpu().reshape(count, -1).to(torch.int64).numpy()
        mixed = np.zeros(count, np.uint64)
        for number in range(values.shape[1]):
            mixed = stable_hash((mixed ^ stable_hash(values[:, number])).view(np.int64))
        return (mixed % np.uint64(self.num_shards)).astype(np.int64)


Router = InTurn | ByKey


def rows_of(pieces: list[Any], into: list[torch.Tensor]) -> Any:
    """Merge containers into one; row j of piece s becomes row ``into[s][j]``.

    Raises:
        SchemaError: the containers differ in keys, shapes or dtypes.
        RuntimeError: transforms have changed the number of rows.

    Cost: one copy of the bytes, and a few Python steps for each leaf and piece.
    """
    taken = [flatten(piece, 1) for piece in pieces]
    root, first = taken[0]
    count = sum(len(rows) for rows in into)
    for shard, (other, leaves) in enumerate(taken):
        if other != root:
            check_alike((0, root), (shard, other))
        if any(leaf.shape[0] != len(into[shard]) for leaf in leaves.values()):
            raise RuntimeError(
                f"expected transforms that keep the number of drawn rows, {len(into[shard])}; one "
                "of them changed it"
            )
    joined = {path: scattered([leaves[path] for _, leaves in taken], into, count) for path in first}
    said = {piece.device for piece in pieces if is_tensordict(piece)}
    return build(root, joined, torch.Size([count]), said.pop() if len(said) == 1 else None)


def scattered(values: list[torch.Tensor], into: list[torch.Tensor], rows: int) -> torch.Tensor:
    """Merge tensors into one of ``rows`` rows; row j of value s becomes row ``into[s][j]``."""
    first = values[0]
    out = first.new_empty((rows, *first.shape[1:]))
    for value, numbers in zip(values, into, strict=True):
        out.index_copy_(0, numbers, value)
    return out


def rows_by(client: ShardedClient, index: Any) -> Any:
    """Return the rows ``rb[index]``.

    Integers are indices of rows. Slices and masks select from all rows in live shards, in the order
    of their indices. A key selects a column of all these rows.
    """
    if is_key(index):
        return column_of(rows_by(client, slice(None)), index)
    by_position = isinstance(index, slice) or index is Ellipsis
    if not by_position:
        refused = isinstance(index, (bool, np.bool_))
        index = as_tensor(index)
        by_position = index.dtype is torch.bool
        if refused or index.ndim > 1 or (index.is_floating_point() and index.numel()):
            raise TypeError(
                f"expected an index as an int, slice, mask, key or int64 [K], got {index.dtype} "
                f"{list(index.shape)}"
            )
    if by_position:
        found = client._members.ask_all("stored_slots")
        rows = [client._names.join(shard, slots) for shard, slots in found.items()]
        stored = torch.cat([torch.empty(0, dtype=torch.int64), *rows]).sort().values
        return rows_at(client, stored[as_index(index, len(stored))])
    rows = rows_at(client, index.to(torch.int64).reshape(-1))
    return rows if index.ndim else rows[0]


def rows_at(client: ShardedClient, index: torch.Tensor) -> Any:
    """Return the rows of indices, int64 ``[K]``, in the order of the indices.

    Raises:
        IndexError: a row is not stored.
        RuntimeError: the shard of a row is being restarted, or nothing was ever written.
    """
    names, members = client._names, client._members
    there, slots = members.present(), names.slots(index)
    if bool((index < 0).any()):
        raise IndexError(f"expected indices of stored rows, got {int(index.min())}")
    check_stored(client, index)
    into = positions_of(client, index)
    if not into:  # return no rows, with the schema of the largest shard
        if not there:
            raise RuntimeError("all shards have died and are being restarted")
        into = {max(there, key=members.rows_of): index}
    replies = {shard: members.send(shard, "read", slots[mine]) for shard, mine in into.items()}
    pieces = []
    for shard, sent in replies.items():
        try:
            pieces.append(members.receive(shard, sent)[0])
        except ShardDied:
            raise RuntimeError(f"shard {shard} has died and is being restarted") from None
    return rows_of(pieces, list(into.values()))


def positions_of(client: ShardedClient, index: torch.Tensor) -> dict[int, torch.Tensor]:
    """Return the positions in an index of the rows of each shard; leave out entries -1."""
    shards = client._names.shards(index)
    found = [int(shard) for shard in shards.unique() if int(shard) >= 0]
    return {shard: (shards == shard).nonzero()[:, 0] for shard in found}


def check_stored(client: ShardedClient, index: torch.Tensor) -> None:
    """Raise IndexError unless each index ``[K]`` is -1 or names a stored row.

    The check may send messages to the shards. It accepts all indices of a shard that is being
    restarted.
    """
    names, members = client._names, client._members
    shards, slots = names.shards(index), names.slots(index)
    for again in (True, False):
        rows = torch.tensor(
            [
                members.rows_of(shard) if members.is_there(shard) else 2**62
                for shard in range(names.num_shards)
            ]
        )
        wrong = (index < -1) | ((index >= 0) & (slots >= rows[shards.clamp(min=0)]))
        if not wrong.any():
            return
        if again:
            members.refresh(None, 0.0)
    at = int(wrong.nonzero()[0])
    raise IndexError(f"expected indices of stored rows, got {int(index[at])} at {at}")
