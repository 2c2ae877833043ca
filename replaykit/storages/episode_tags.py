"""Keep values of stored episodes: tags, and how often windows of an episode were drawn."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch

from replaykit._compat import dtype_name
from replaykit.declared import vector
from replaykit.episodes import EndReason
from replaykit.errors import SchemaError

if TYPE_CHECKING:
    from replaykit.episodes import EpisodeIndex

Array = np.ndarray[Any, Any]

DRAWS = "draws"
"""Name of the column that counts draws. Only samplers write it."""


@dataclass(frozen=True)
class TagState:
    """The values of episodes, which are named by the element of their last stored row."""

    element: Annotated[Any, vector(torch.int64)]
    columns: dict[str, Any]

    def __post_init__(self) -> None:
        for name, column in self.columns.items():
            if not isinstance(column, torch.Tensor) or len(column) != len(self.element):
                raise ValueError(f"expected {len(self.element)} values of {name}, got {column!r}")


class EpisodeTags:
    """Columns of values of episodes, by episode id.

    An episode without a value has zeros. Values of lost episodes are dropped from time to time, and
    their ids are never used again.

    Attributes:
        number: grows with each change of a tag. Counts of draws do not change it.
        edited: whether a tag was set since the values were loaded or copied.
        drawn: grows with each change of the counts.
        layout: grows when episodes get other places in the columns.

    Cost: O(K log J) for K of J episodes; new ids cost O(J).
    """

    def __init__(self) -> None:
        self.number = self.drawn = self.layout = 0
        self.edited = False
        self._ids = np.zeros(0, np.int64)
        self._columns: dict[str, torch.Tensor] = {}
        self._pruned = 0  # number of ids after lost episodes were dropped last
        self._packed = 0, np.zeros(0, np.int64)  # the result of ``packed`` and its ``number``

    @property
    def names(self) -> list[str]:
        """The names of the tags."""
        return [name for name in self._columns if name != DRAWS]

    def get(self, name: str, ids: Array) -> torch.Tensor:
        """Return the values of episodes ``[K, *F]``. Raises KeyError for an unknown tag."""
        if name not in self._columns:
            raise KeyError(f"expected one of the tags {self.names}, got {name!r}")
        column = self._columns[name]
        at = np.searchsorted(self._ids, ids)
        if len(self._ids):
            at = np.minimum(at, len(self._ids) - 1)
            known = self._ids[at] == ids
            if known.all():
                return column[torch.from_numpy(at)]
        else:
            known = np.zeros(len(ids), bool)
        found = column.new_zeros(len(ids), *column.shape[1:])
        found[torch.from_numpy(known)] = column[torch.from_numpy(at[known])]
        return found

    def set(self, ids: Array, values: Mapping[str, Any], index: EpisodeIndex) -> None:
        """Set values of episodes. If an id occurs several times, the last value counts.

        Args:
            values: a value for all episodes, or a tensor ``[K, *F]``, by tag.

        Raises:
            ValueError: a name is reserved.
            SchemaError: shape or dtype of a value differ from the first values of the tag.
        """
        given = self.checked(values, len(ids))
        at = self.places(ids, index)
        for name, tensor in given.items():
            self._column(name, tensor).numpy()[at] = tensor.numpy()
        self.number += 1
        self.edited = True

    def checked(self, values: Mapping[str, Any], count: int) -> dict[str, torch.Tensor]:
        """Return a tensor ``[count, *F]`` for each tag; raise as ``set`` does."""
        given = {}
        for name, value in values.items():
            if not isinstance(name, str) or name == DRAWS:
                raise ValueError(f"expected another name of a tag than {name!r}")
            tensor = torch.as_tensor(value, device="cpu").detach()
            if not isinstance(value, torch.Tensor) or not tensor.ndim:
                tensor = tensor.expand(count, *tensor.shape)
            column = self._columns.get(name)
            shape = [count, *(tensor.shape[1:] if column is None else column.shape[1:])]
            dtype = tensor.dtype if column is None else column.dtype
            if list(tensor.shape) != shape or tensor.dtype != dtype:
                raise SchemaError(
                    f"tag {name!r}: expected {dtype_name(dtype)} {shape}, got "
                    f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"
                )
            given[name] = tensor
        return given

    def places(self, ids: Array, index: EpisodeIndex) -> Array:
        """Return the places of episodes in the columns, int64 ``[K]``; add missing ones.

        The places are valid while ``layout`` stays the same.
        """
        at = self._ids.searchsorted(ids)
        known = np.zeros(len(ids), bool)
        if len(self._ids):
            known = self._ids[np.minimum(at, len(self._ids) - 1)] == ids
        if known.all():
            return at
        new = np.unique(ids[~known])
        if len(self._ids) + len(new) > 2 * self._pruned + 1024:
            table = index.table()
            kept = np.isin(self._ids, index.ids(table.first, table.lane))
            self._ids = self._ids[kept]
            self._columns = {
                n: column[torch.from_numpy(kept)] for n, column in self._columns.items()
            }
            self._pruned = len(self._ids) + len(new)
        where = self._ids.searchsorted(new)
        self._ids = np.insert(self._ids, where, new)
        fresh = np.zeros(len(self._ids), bool)
        fresh[where + np.arange(len(new))] = True
        for name, column in self._columns.items():
            wider = column.new_zeros(len(fresh), *column.shape[1:])
            wider[torch.from_numpy(~fresh)] = column
            self._columns[name] = wider
        self.layout += 1
        return self._ids.searchsorted(ids)

    def count_draws(self, at: Array, by: int) -> None:
        """Add a number to the draws at ``places``, for each time that a place occurs."""
        np.add.at(self.draws_by_place(), at, by)
        self.drawn += 1

    def draws_by_place(self) -> Array:
        """Return the draws of all episodes by place; a change also increases ``drawn``."""
        if DRAWS not in self._columns:
            self._columns[DRAWS] = torch.zeros(len(self._ids), dtype=torch.int64, device="cpu")
        return np.asarray(self._columns[DRAWS].numpy())

    def draws(self, ids: Array) -> Array:
        """Return how many windows of episodes were drawn, int64 ``[K]``."""
        if DRAWS not in self._columns:
            return np.zeros(len(ids), np.int64)
        return self.get(DRAWS, ids).numpy()

    def _column(self, name: str, like: torch.Tensor) -> torch.Tensor:
        if name not in self._columns:
            shape = (len(self._ids), *like.shape[1:])
            self._columns[name] = torch.zeros(shape, dtype=like.dtype, device="cpu")
        return self._columns[name]

    # -- state ----------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "edited": False}

    def state(self, index: EpisodeIndex) -> dict[str, Any] | None:
        """Return the values of the stored episodes for a ``TagState``; None without values."""
        if not self._columns:
            return None
        table = index.table()
        ids = index.ids(table.first, table.lane)
        known = np.isin(ids, self._ids)
        element = index.element(table.last[known], table.lane[known])
        columns = {name: self.get(name, ids[known]) for name in self._columns}
        return {"element": torch.from_numpy(element), "columns": columns}

    def load(self, element: Array, columns: Mapping[str, Any], index: EpisodeIndex) -> None:
        """Replace all values by saved ones; see ``TagState``."""
        ids = index.ids(*index.time_and_lane(element))
        order = np.argsort(ids)
        self._ids = ids[order]
        at = torch.from_numpy(order)
        self._columns = {name: column[at].clone() for name, column in columns.items()}
        self.number += 1
        self.layout += 1
        self.edited = False

    def packed(self) -> Array:
        """Return the tags with the ids of the episodes as int64 numbers, for a commit.

        The result is empty without tags. Counts of draws are not part of it.
        """
        if self._packed[0] == self.number:
            return self._packed[1]
        columns = {name: self._columns[name] for name in self.names}
        kinds = [[name, dtype_name(c.dtype), list(c.shape[1:])] for name, c in columns.items()]
        header = json.dumps([len(self._ids), kinds]).encode()
        parts = [np.frombuffer(header, np.uint8), self._ids.view(np.uint8)]
        parts += [c.contiguous().view(-1).view(torch.uint8).numpy() for c in columns.values()]
        lengths = np.array([len(part) for part in parts], np.int64)
        data = np.concatenate([np.pad(part, (0, -len(part) % 8)) for part in parts])
        found = np.concatenate([[len(parts)], lengths, data.view(np.int64)]) if kinds else data[:0]
        self._packed = self.number, found.astype(np.int64, copy=False)
        return self._packed[1]

    def unpack(self, numbers: Array) -> None:
        """Replace all tags by those of ``packed``, which may come from another process.

        Raises:
            ValueError: the numbers are not those of tags.
        """
        if not len(numbers):
            ids, kinds, parts = self._ids[:0], [], []
        else:
            count = int(numbers[0])
            lengths, data = numbers[1 : 1 + count], numbers[1 + count :].copy().view(np.uint8)
            starts = np.cumsum(lengths + -lengths % 8) - (lengths + -lengths % 8)
            header, ids, *parts = (
                data[first : first + length]
                for first, length in zip(starts.tolist(), lengths.tolist(), strict=True)
            )
            rows, kinds = json.loads(bytes(header))
            ids = ids.view(np.int64)
            if len(ids) != rows or len(kinds) != len(parts):
                raise ValueError(f"expected tags {kinds} of {rows} episodes, got {len(ids)}")
        every = np.union1d(self._ids, ids)
        at, draws = np.searchsorted(every, ids), torch.from_numpy(self.draws(every))
        columns = {DRAWS: draws} if DRAWS in self._columns else {}
        for (name, dtype, shape), part in zip(kinds, parts, strict=True):
            values = torch.from_numpy(part).view(getattr(torch, dtype)).view(len(ids), *shape)
            columns[name] = values.new_zeros(len(every), *shape)
            columns[name][torch.from_numpy(at)] = values
        self._ids, self._columns = every, columns
        self.number += 1
        self.layout += 1
        self.edited = True
        self._packed = self.number, numbers.copy()


class EpisodeData:
    """The stored episodes as columns, for evictors and for predicates of samplers.

    Every column has one value for each of the J stored episodes, in order of time, stream after
    stream. It is computed at its first use. ``data["name"]`` is the column of a tag, ``[J, *F]``;
    an episode without a value has zeros.

    Attributes:
        lane: number of the lane or stream.
        length: number of stored rows.
        head: the ``Head`` of the episode.

    Raises:
        KeyError: there is no such tag.

    Cost: O(J) for each column.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from replaykit import LazyTensorStorage, ReplayBuffer, SliceSampler
        >>> sampler = SliceSampler(slice_len=2, where=lambda episodes: episodes.length > 2)
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(9), sampler=sampler, batch_size=64)
        >>> done = torch.tensor([0, 1, 0, 0, 1, 0], dtype=torch.bool)
        >>> _ = rb.extend(TensorDict({"t": torch.arange(6), "next": {"done": done}}, [6]))
        >>> rb.sample()["t"].unique().tolist()
        [2, 3, 4]
    """

    def __init__(
        self, index: EpisodeIndex, tags: EpisodeTags, priorities: Callable[[], Array] | None = None
    ) -> None:
        self._index, self._tags, table = index, tags, index.table()
        self._priorities = priorities
        self.lane, self.first, self.last = table.lane, table.first, table.last
        self.head = table.head
        self.length = table.last + 1 - table.first
        self.code = table.code

    def __len__(self) -> int:
        return len(self.lane)

    @cached_property
    def id(self) -> Array:
        """The ids of the episodes. An id is never used again; older episodes have lower ids."""
        return self._index.ids(self.first, self.lane)

    @cached_property
    def reason(self) -> Array:
        """The ``EndReason`` of the episodes."""
        return np.minimum(self.code, int(EndReason.CUT))

    @cached_property
    def draws(self) -> Array:
        """The number of windows that samplers with ``Coverage`` have drawn from the episodes."""
        return self._tags.draws(self.id)

    @cached_property
    def priority(self) -> Array:
        """The largest priority of the rows of each episode. Cost: O(stored rows).

        Raises ValueError if the sampler has no priorities.
        """
        if self._priorities is None:
            raise ValueError("expected a sampler with priorities, got one without")
        of_row = np.repeat(np.arange(len(self)), self.length)
        starts = np.cumsum(self.length) - self.length
        time = np.arange(len(of_row)) - (starts - self.first)[of_row]
        element = self._index.element(time, self.lane[of_row])
        return np.maximum.reduceat(self._priorities()[element], starts)

    def __getitem__(self, tag: str) -> Array:
        return self._tags.get(tag, self.id).numpy()
