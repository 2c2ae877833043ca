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
    """Return the number of the member that an index names, or a list of numbers.

    Args:
        index: int, slice, ``...``, range, list, NumPy array or tensor. Its elements are integers
            ``[K]``, or bools, one per member. Negative integers count from the end.
        count: number of members.
        ``what``: the name of the indexed object, for errors.

    Raises:
        TypeError: the index has numbers with fractions, or is not an index.
        RuntimeError: the index has more than one dimension.
        IndexError: a member does not exist.
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

    It is a part of a `ReplayBufferEnsemble`, and stores no rows itself.

    Args:
        storages: the members.
        transforms: one entry per member, which is a transform, a Compose, or None.

    Raises:
        TypeError: a member is not a Storage, or there is not one transform per member.
        ValueError: there is no member.

    Example:
        >>> import torch
        >>> from replaykit import StorageEnsemble, TensorStorage
        >>> both = StorageEnsemble(
        ...     TensorStorage(torch.arange(3)), TensorStorage(torch.arange(5)),
        ...     transforms=[None, lambda x: x * 10])
        >>> len(both), len(both[1]), both.max_size
        (2, 5, 8)
    """

    # It stores no rows, so it has no ledger, no hooks and no listeners.
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

    def attach_members(self, buffers: Sequence[Any]) -> None:
        """Use the current storages and transforms of these buffers as the members."""
        self._buffers = tuple(buffers)

    @property
    def storages(self) -> tuple[Storage, ...]:
        """The storages of the members."""
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
        """Capacity of all members together, in rows."""
        return sum(storage.max_size for storage in self.storages)

    def get(self, index: Any) -> list[tuple[int, Any]]:
        """Read rows of members, through the members' transforms.

        Args:
            index: a TensorDict or mapping with the members and rows of K batches. ``buffer_ids`` is
                int64 ``[K]``, and ``index`` is ``[K, B]`` (``[K, B, ndim]``).

        Returns:
            For each batch, the number of the member and the rows.
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
        """Return a member by number, or a StorageEnsemble of several members.

        If the index is a tuple, its rest indexes that member, or each of the members. For several
        members the result is a list.
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
        """Return the number of members."""
        return len(self._storages if self._buffers is None else self._buffers)

    def __iter__(self) -> Any:
        return iter(self.storages)

    def contains(self, item: Any) -> bool:
        """Return whether there is a member with this number."""
        return isinstance(item, int) and -len(self) <= item < len(self)

    def rows(self) -> int:
        """Return the number of rows of all members together."""
        return sum(rows_in(storage) for storage in self.storages)

    # -- for the members ------------------------------------------------------------------------

    def _refuse(self, what: str) -> NoReturn:
        raise RuntimeError(
            f"a StorageEnsemble stores no rows itself that it could {what}; use one of its "
            "members, ensemble[i]"
        )

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> NoReturn:
        """Always raises RuntimeError; write to a member."""
        self._refuse("write")

    def __setitem__(self, index: Any, value: Any) -> NoReturn:
        self._refuse("write")

    def clear(self) -> NoReturn:
        """Always raises RuntimeError; empty a member."""
        self._refuse("clear")

    def attach(self, buffer: Any) -> NoReturn:
        """Always raises RuntimeError; only a ReplayBufferEnsemble can read an ensemble."""
        raise RuntimeError(
            "a StorageEnsemble cannot be the storage of a buffer; make a ReplayBufferEnsemble"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the rows of each member, by member number."""
        return {str(i): storage.state_dict() for i, storage in enumerate(self.storages)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of ``state_dict``, after a check of all members.

        Raises:
            ValueError: the state has another number of members, or does not fit their storages;
                nothing has changed.
        """
        check_members(state_dict, len(self))
        for number, storage in enumerate(self.storages):
            content = storage.content_of(dict(state_dict[str(number)]))
            if content is not None:
                storage.check_content(content)
        for number, storage in enumerate(self.storages):
            storage.load_state_dict(state_dict[str(number)])

    def dumps(self, path: Any, *, keep: int = 1) -> NoReturn:
        """Always raises RuntimeError; a ReplayBufferEnsemble saves all members."""
        self._refuse("save")

    def loads(self, path: Any) -> NoReturn:
        """Always raises RuntimeError; a ReplayBufferEnsemble loads all members."""
        self._refuse("load")

    dump = save = dumps
    load = loads

    def __repr__(self) -> str:
        return f"StorageEnsemble(storages={self.storages}, transforms={self.transforms})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_locks": {}}


def check_members(state: Any, count: int) -> None:
    """Raise ValueError if a state does not have ``count`` members, by number."""
    wanted = [str(number) for number in range(count)]
    found = sorted(state, key=str) if isinstance(state, dict) else state
    if not isinstance(state, dict) or set(wanted) - set(state):
        raise ValueError(f"expected the states of members {wanted}, got {found}")


def rows_in(storage: Storage) -> int:
    """Return the number of rows of a storage, or of all members of an ensemble."""
    return storage.rows() if isinstance(storage, StorageEnsemble) else len(storage)


def _chain(transform: Any) -> Compose:
    if transform is None:
        return Compose()
    return transform if type(transform) is Compose else Compose(transform)


def refuse_writing(what: str) -> NoReturn:
    """Raise NotImplementedError; only members of an ensemble can be written to."""
    raise NotImplementedError(
        f"ReplayBufferEnsemble writes are disabled: {what} is for one of its members, as "
        f"ensemble[i].{what}"
    )


class WriterEnsemble(Writer):
    """The writers of several buffers. A WriterEnsemble writes nothing itself.

    Args:
        writers: the members.

    Raises:
        TypeError: a member is not a Writer.
        ValueError: there is no member.

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

    def attach_members(self, buffers: Sequence[Any]) -> None:
        """Use the current writers of these buffers as the members."""
        self._buffers = tuple(buffers)

    @property
    def writers(self) -> tuple[Writer, ...]:
        """The writers of the members."""
        if self._buffers is None:
            return self._writers
        return tuple(buffer.writer for buffer in self._buffers)

    @property
    def write_count(self) -> int:
        """Number of rows that all members have written so far."""
        return sum(writer.write_count for writer in self.writers)

    @property
    def tracks_generations(self) -> bool:  # type: ignore[override]
        """True if all members track generations."""
        return all(writer.tracks_generations for writer in self.writers)

    def register_storage(self, storage: Storage) -> None:
        """Give each member its storage from a StorageEnsemble.

        Raises:
            TypeError: ``storage`` is not a StorageEnsemble.
            ValueError: ``storage`` has another number of members.
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
        """Return the generations of members' slots, int64 in the shape of ``buffer_ids``.

        Args:
            index: a TensorDict or mapping with ``index``, int64 ``[*B]``, and ``buffer_ids``
                ``[*B]``. If members have lanes, ``index`` is ``[*B, ndim]``.
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
        """Return a member by number, or a WriterEnsemble of several members."""
        numbers = chosen(index, len(self), "an ensemble")
        writers = self.writers
        if isinstance(numbers, int):
            return writers[numbers]
        return WriterEnsemble(*(writers[number] for number in numbers))

    def __len__(self) -> int:
        """Return the number of members."""
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
        """Return the state of each member, by member number."""
        return {str(i): writer.state_dict() for i, writer in enumerate(self.writers)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of ``state_dict``, after a check of all members.

        Raises:
            ValueError: the state has another number of members, or members of other kinds; nothing
                has changed.
        """
        check_members(state_dict, len(self))
        for number, writer in enumerate(self.writers):
            writer.check_state(state_dict[str(number)])
        for number, writer in enumerate(self.writers):
            writer.load_state_dict(state_dict[str(number)])

    def __repr__(self) -> str:
        return f"WriterEnsemble(writers={self.writers})"
