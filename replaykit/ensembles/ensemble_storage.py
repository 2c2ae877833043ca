"""Combine the storages and writers of an ensemble."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import torch

from replaykit.storages import Storage
from replaykit.transforms import Compose
from replaykit.writers import Writer

__all__ = ["StorageEnsemble", "WriterEnsemble", "chosen", "refuse_writing"]


def chosen(index: Any, count: int, what: str) -> int | list[int]:
    """Returns the number of the member that an index names, or of those that it names, in order.

    Args:
        index: int, slice, ``...``, range, list, NumPy array or tensor ``[K]`` of integers, or of
            bools, one a member. Negative ones count from the end.
        count: number of members.
        what: what is indexed, for errors.

    Raises:
        TypeError: numbers with fractions, or no index at all. RuntimeError: more than one
            dimension. IndexError: no such member.
    """
    if index is Ellipsis:
        return list(range(count))
    if isinstance(index, slice):
        return list(range(count))[index]
    if isinstance(index, (bool, np.bool_)) or not isinstance(
        index, (int, np.integer, list, tuple, range, np.ndarray, torch.Tensor)
    ):
        raise TypeError(
            f"expected an int, slice, list or tensor of ints as the index of {what}, got {index!r}"
        )
    if isinstance(index, (int, np.integer)):
        return _member(int(index), count, what)
    numbers = index.cpu() if isinstance(index, torch.Tensor) else index
    array = np.asarray(numbers)
    if array.ndim > 1:
        raise RuntimeError(
            f"expected an index of {what} of at most one dimension, got {array.ndim}"
        )
    if array.dtype == bool:
        if array.shape != (count,):
            raise IndexError(f"expected {count} bools as the index of {what}, got {len(array)}")
        return [int(number) for number in np.nonzero(array)[0]]
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"expected integers as the index of {what}, got {array.dtype}")
    if not array.ndim:
        return _member(int(array), count, what)
    return [_member(int(number), count, what) for number in array]


def _member(number: int, count: int, what: str) -> int:
    if not -count <= number < count:
        raise IndexError(f"expected a member of {what} in [{-count}, {count}), got {number}")
    return number % count


class StorageEnsemble(Storage):
    """The storages of several buffers, each with the transforms of its buffer.

    It is made for `ReplayBufferEnsemble`, and holds no rows itself.

    Args:
        storages: the members.
        transforms: one a member: a transform, several in a Compose, or None.

    Raises:
        TypeError: a member that is no Storage, or not one transform a member. ValueError: no
            member.

    Example:
        >>> import torch
        >>> from replaykit import StorageEnsemble, TensorStorage
        >>> both = StorageEnsemble(
        ...     TensorStorage(torch.arange(3)), TensorStorage(torch.arange(5)),
        ...     transforms=[None, lambda x: x * 10])
        >>> len(both), len(both[1]), both.max_size
        (2, 5, 8)
    """

    # None of what a storage keeps of its own rows is here: no ledger, no hooks, no listeners.
    def __init__(self, *storages: Storage, transforms: Sequence[Any] | None = None) -> None:
        if not storages:
            raise ValueError("expected at least one storage, got none")
        for number, storage in enumerate(storages):
            if not isinstance(storage, Storage):
                raise TypeError(
                    f"expected member {number} as a Storage, got {type(storage).__name__}"
                )
        given = [None] * len(storages) if transforms is None else list(transforms)
        if len(given) != len(storages):
            raise TypeError(f"expected {len(storages)} transforms, one a storage, got {len(given)}")
        self._storages = storages
        self._chains = [_chain(transform) for transform in given]
        self._buffers: tuple[Any, ...] | None = None
        self._locks: dict[int, Any] = {}
        self.ndim = 1
        self.recovery = None

    def follow(self, buffers: Sequence[Any]) -> None:
        """Has the members be what these buffers work with at any time."""
        self._buffers = tuple(buffers)

    @property
    def storages(self) -> tuple[Storage, ...]:
        """The members."""
        if self._buffers is None:
            return self._storages
        return tuple(buffer.storage for buffer in self._buffers)

    @property
    def transforms(self) -> list[Compose]:
        """The chain of each member, possibly empty."""
        if self._buffers is None:
            return list(self._chains)
        return [buffer.transform for buffer in self._buffers]

    @property
    def max_size(self) -> int:  # type: ignore[override]
        """Rows that fit into all members together."""
        return sum(storage.max_size for storage in self.storages)

    def get(self, index: Any) -> list[tuple[int, Any]]:
        """Reads rows of members, and has the members' transforms change them.

        Args:
            index: TensorDict or mapping with ``buffer_ids``, int64 ``[K]``, and ``index``
                ``[K, B]`` (``[K, B, ndim]``): of which member and which rows each of K batches is.

        Returns:
            For each of them the number of the member and its rows.
        """
        members = torch.as_tensor(index["buffer_ids"])
        if members.ndim > 1:
            members = members.flatten(1)[:, 0]
        storages, chains = self.storages, self.transforms
        found = []
        for number, rows in zip(members.tolist(), index["index"], strict=True):
            member = chosen(number, len(storages), "an ensemble")
            assert isinstance(member, int)
            data = storages[member].read(rows)
            found.append((member, chains[member].forward(data) if len(chains[member]) else data))
        return found

    def __getitem__(self, index: Any) -> Any:
        """The member of that number, or a StorageEnsemble of several.

        With a tuple, what the rest of it indexes in that member, or a list of that in each.
        """
        if isinstance(index, tuple):
            first, rest = index[0], index[1:]
            picked = self[first]
            if not rest:
                return picked
            inner = rest[0] if len(rest) == 1 else rest
            if isinstance(picked, StorageEnsemble) and not isinstance(first, int):
                return [storage[inner] for storage in picked.storages]
            return picked[inner]
        numbers = chosen(index, len(self), "an ensemble")
        storages = self.storages
        if isinstance(numbers, int):
            return storages[numbers]
        chains = self.transforms
        return StorageEnsemble(
            *(storages[number] for number in numbers),
            transforms=[chains[number] for number in numbers],
        )

    def __len__(self) -> int:
        """Number of members."""
        return len(self._storages if self._buffers is None else self._buffers)

    def __iter__(self) -> Any:
        return iter(self.storages)

    def contains(self, item: Any) -> bool:
        """Whether there is a member of that number."""
        return isinstance(item, int) and -len(self) <= item < len(self)

    def rows(self) -> int:
        """Rows that all members hold together."""
        return sum(rows_in(storage) for storage in self.storages)

    # -- what belongs to the members ------------------------------------------------------------

    def _refuse(self, what: str) -> NoReturn:
        raise RuntimeError(
            f"a StorageEnsemble has no rows of its own to {what}; use one of its members, "
            "ensemble[i]"
        )

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> NoReturn:
        """Always raises RuntimeError: write to a member."""
        self._refuse("write")

    def __setitem__(self, index: Any, value: Any) -> NoReturn:
        self._refuse("write")

    def clear(self) -> NoReturn:
        """Always raises RuntimeError: empty a member."""
        self._refuse("clear")

    def attach(self, buffer: Any) -> NoReturn:
        """Always raises RuntimeError: what reads an ensemble is a ReplayBufferEnsemble."""
        raise RuntimeError(
            "a StorageEnsemble cannot be the storage of a buffer; make a ReplayBufferEnsemble"
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns copies of what each member holds, by its number."""
        return {str(i): storage.state_dict() for i, storage in enumerate(self.storages)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over what each member held, after all were checked.

        Raises:
            ValueError: not the state of as many members, or not one of such a storage; nothing has
                changed.
        """
        check_members(state_dict, len(self))
        for number, storage in enumerate(self.storages):
            content = storage.content_of(dict(state_dict[str(number)]))
            if content is not None:
                storage.check_content(content)
        for number, storage in enumerate(self.storages):
            storage.load_state_dict(state_dict[str(number)])

    def dumps(self, path: Any, *, keep: int = 1) -> NoReturn:
        """Always raises RuntimeError: what saves all members is a ReplayBufferEnsemble."""
        self._refuse("save")

    def loads(self, path: Any) -> NoReturn:
        """Always raises RuntimeError: what loads all members is a ReplayBufferEnsemble."""
        self._refuse("load")

    dump = save = dumps
    load = loads

    def __repr__(self) -> str:
        return f"StorageEnsemble(storages={self.storages}, transforms={self.transforms})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_locks": {}}


def check_members(state: Any, count: int) -> None:
    """Raises ValueError where a state is not one of that many members, by their numbers."""
    wanted = [str(number) for number in range(count)]
    found = sorted(state, key=str) if isinstance(state, dict) else state
    if not isinstance(state, dict) or set(wanted) - set(state):
        raise ValueError(f"expected the states of members {wanted}, got {found}")


def rows_in(storage: Storage) -> int:
    """How many rows a storage holds, elements where it has lanes."""
    return storage.rows() if isinstance(storage, StorageEnsemble) else len(storage)


def _chain(transform: Any) -> Compose:
    if transform is None:
        return Compose()
    return transform if type(transform) is Compose else Compose(transform)


def refuse_writing(what: str) -> NoReturn:
    """Raises NotImplementedError: the members of an ensemble are written to, not the ensemble."""
    raise NotImplementedError(
        f"ReplayBufferEnsemble writes are disabled: {what} is for one of its members, as "
        f"ensemble[i].{what}"
    )


class WriterEnsemble(Writer):
    """The writers of several buffers; writes nothing itself.

    Args:
        writers: the members.

    Raises:
        TypeError: a member that is no Writer. ValueError: no member.

    Example:
        >>> from replaykit import ImmutableDatasetWriter, RoundRobinWriter, WriterEnsemble
        >>> both = WriterEnsemble(ImmutableDatasetWriter(), RoundRobinWriter())
        >>> len(both), both[1]
        (2, RoundRobinWriter(write_count=0))
        >>> both.add(1)
        Traceback (most recent call last):
        NotImplementedError: ReplayBufferEnsemble writes are disabled: add is for one of...
    """

    kind = "ensemble"

    def __init__(self, *writers: Writer) -> None:
        if not writers:
            raise ValueError("expected at least one writer, got none")
        for number, writer in enumerate(writers):
            if not isinstance(writer, Writer):
                raise TypeError(
                    f"expected member {number} as a Writer, got {type(writer).__name__}"
                )
        super().__init__()
        self._writers = writers
        self._buffers: tuple[Any, ...] | None = None

    def follow(self, buffers: Sequence[Any]) -> None:
        """Has the members be what these buffers work with at any time."""
        self._buffers = tuple(buffers)

    @property
    def writers(self) -> tuple[Writer, ...]:
        """The members."""
        if self._buffers is None:
            return self._writers
        return tuple(buffer.writer for buffer in self._buffers)

    @property
    def write_count(self) -> int:
        """Rows that all members have written so far."""
        return sum(writer.write_count for writer in self.writers)

    @property
    def tracks_generations(self) -> bool:  # type: ignore[override]
        """Whether all members do."""
        return all(writer.tracks_generations for writer in self.writers)

    def register_storage(self, storage: Storage) -> None:
        """Gives each member its storage of a StorageEnsemble.

        Raises:
            TypeError: another storage. ValueError: of another number of members.
        """
        if not isinstance(storage, StorageEnsemble):
            raise TypeError(f"expected a StorageEnsemble, got {type(storage).__name__}")
        if len(storage) != len(self):
            raise ValueError(
                f"expected a storage for each of {len(self)} writers, got {len(storage)}"
            )
        for writer, member in zip(self.writers, storage.storages, strict=True):
            writer.register_storage(member)

    def generations_of(self, index: Any) -> torch.Tensor:
        """How often slots of members were written, int64 of the shape of ``index``'s entries.

        Args:
            index: TensorDict or mapping with ``index``, int64 ``[*B]`` (``[*B, ndim]`` where
                members have lanes), and ``buffer_ids`` ``[*B]``.
        """
        members, slots = torch.as_tensor(index["buffer_ids"]), torch.as_tensor(index["index"])
        if slots.ndim > members.ndim + 1 or slots.shape[: members.ndim] != members.shape:
            shapes = f"{list(slots.shape)} and {list(members.shape)}"
            raise ValueError(f"expected index and buffer_ids of one shape, got {shapes}")
        found = torch.full_like(members, -1)
        for number in members.unique().tolist():
            here = members == number
            member = chosen(number, len(self), "an ensemble")
            assert isinstance(member, int)
            rows = slots[here]
            writer = self.writers[member]
            if rows.ndim > 1 and writer.storage.ndim == 1:
                rows = rows[..., 0]
            found[here] = writer.generations_of(rows).to(found.device)
        return found

    def __getitem__(self, index: Any) -> Any:
        """The member of that number, or a WriterEnsemble of several."""
        numbers = chosen(index, len(self), "an ensemble")
        writers = self.writers
        if isinstance(numbers, int):
            return writers[numbers]
        return WriterEnsemble(*(writers[number] for number in numbers))

    def __len__(self) -> int:
        """Number of members."""
        return len(self._writers if self._buffers is None else self._buffers)

    def write(self, rows: Any) -> NoReturn:
        """Always raises NotImplementedError."""
        refuse_writing("write")

    def add(self, data: Any) -> NoReturn:
        """Always raises NotImplementedError."""
        refuse_writing("add")

    def extend(self, data: Any) -> NoReturn:
        """Always raises NotImplementedError."""
        refuse_writing("extend")

    def write_at(self, index: Any, data: Any) -> NoReturn:
        """Always raises NotImplementedError."""
        refuse_writing("write_at")

    def cut(self, lane: Any = None) -> NoReturn:
        """Always raises NotImplementedError."""
        refuse_writing("cut")

    def empty(self, empty_write_count: bool = True) -> NoReturn:
        """Always raises NotImplementedError."""
        refuse_writing("empty")

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of each member, by its number."""
        return {str(i): writer.state_dict() for i, writer in enumerate(self.writers)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over the state of each member, after all were checked.

        Raises:
            ValueError: not the state of as many members of these kinds; nothing has changed.
        """
        check_members(state_dict, len(self))
        for number, writer in enumerate(self.writers):
            writer.check_state(state_dict[str(number)])
        for number, writer in enumerate(self.writers):
            writer.load_state_dict(state_dict[str(number)])

    def __repr__(self) -> str:
        return f"WriterEnsemble(writers={self.writers})"
