"""Combine the storages and writers of an ensemble."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import numpy as np
import torch

from replaykit._compat import Uncompiled
from replaykit.buffer.source import BufferHandle
from replaykit.storages import Storage
from replaykit.transforms import Compose
from replaykit.writers import Writer


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


def check_parts(kind: type, parts: Sequence[Any], *also: type) -> None:
    """Raise TypeError or ValueError unless there are parts, all of these classes."""
    if not parts:
        raise ValueError(f"expected at least one {kind.__name__.lower()}, got none")
    for number, part in enumerate(parts):
        if not isinstance(part, (kind, *also)):
            raise TypeError(
                f"expected member {number} as a {kind.__name__}, got {type(part).__name__}"
            )


class MemberParts(Uncompiled):
    """Parts of several buffers, by member number. The part of a remote member is its handle."""

    def __init__(self, kind: type, parts: Sequence[Any]) -> None:
        check_parts(kind, parts, type(self), BufferHandle)
        self._parts = tuple(parts)

    def __len__(self) -> int:
        """Return the number of members."""
        return len(self._parts)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._parts)

    def __getitem__(self, index: Any) -> Any:
        """Return a member by number, or the parts of several members.

        If the index is a tuple, its rest indexes that member, or each of the members. For several
        members the result is then a list.
        """
        first, *rest = index if isinstance(index, tuple) else (index,)
        numbers = chosen(first, len(self), "an ensemble")
        inner = rest[0] if len(rest) == 1 else tuple(rest)
        if isinstance(numbers, int):
            return self._parts[numbers][inner] if rest else self._parts[numbers]
        if rest:
            return [self._parts[number][inner] for number in numbers]
        return self._some(numbers)

    def _some(self, numbers: list[int]) -> Any:
        return type(self)(*(self._parts[number] for number in numbers))

    def __repr__(self) -> str:
        return f"{type(self).__name__}{self._parts}"


class StorageEnsemble(MemberParts):
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

    def __init__(self, *storages: Any, transforms: Sequence[Any] | None = None) -> None:
        super().__init__(Storage, storages)
        given = [None] * len(storages) if transforms is None else list(transforms)
        if len(given) != len(storages):
            raise TypeError(f"expected {len(storages)} transforms, one a storage, got {len(given)}")
        self.transforms: list[Compose] = [
            one if type(one) is Compose else Compose() if one is None else Compose(one)
            for one in given
        ]

    @property
    def storages(self) -> tuple[Any, ...]:
        """The storages of the members."""
        return self._parts

    @property
    def max_size(self) -> int:
        """Capacity of all members together, in rows."""
        return sum(
            one.stats()["capacity"] if isinstance(one, BufferHandle) else one.max_size  # type: ignore[attr-defined]
            for one in self._parts
        )

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
        found = []
        for number, rows in zip(members.tolist(), index["index"], strict=True):
            member = chosen(number, len(self), "an ensemble")
            assert isinstance(member, int)
            storage, chain = self._parts[member], self.transforms[member]
            data = storage[rows] if isinstance(storage, BufferHandle) else storage.read(rows)  # type: ignore[index]
            found.append((member, chain.forward(data) if len(chain) else data))
        return found

    def _some(self, numbers: list[int]) -> StorageEnsemble:
        transforms = [self.transforms[number] for number in numbers]
        return StorageEnsemble(*(self._parts[n] for n in numbers), transforms=transforms)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        """Always raises RuntimeError; write to a member."""
        raise RuntimeError(
            "a StorageEnsemble stores no rows itself that it could change; use one of its members, "
            "ensemble[i]"
        )

    set = __setitem__ = clear = attach = _refuse


def check_members(state: Any, count: int) -> None:
    """Raise ValueError if a state does not have ``count`` members, by number."""
    wanted = [str(number) for number in range(count)]
    found = sorted(state, key=str) if isinstance(state, dict) else state
    if not isinstance(state, dict) or set(wanted) - set(state):
        raise ValueError(f"expected the states of members {wanted}, got {found}")


def refused(path: str) -> Any:
    """Return a method that always raises NotImplementedError, because only members do this.

    Args:
        path: the name of its class, a dot, and its name.
    """
    name = path.partition(".")[2]

    def method(self: Any, *arguments: Any, **keywords: Any) -> NoReturn:
        raise NotImplementedError(
            f"ReplayBufferEnsemble writes are disabled: {name} is for one of its members, as "
            f"ensemble[i].{name}"
        )

    method.__name__, method.__qualname__ = name, path
    method.__doc__ = "Always raises NotImplementedError."
    return method


class WriterEnsemble(MemberParts):
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

    def __init__(self, *writers: Any) -> None:
        super().__init__(Writer, writers)

    @property
    def writers(self) -> tuple[Any, ...]:
        """The writers of the members."""
        return self._parts

    @property
    def write_count(self) -> int:
        """Number of rows that all members have written so far."""
        return sum(writer.write_count for writer in self._parts)

    add = refused("WriterEnsemble.add")
    extend = refused("WriterEnsemble.extend")
    empty = refused("WriterEnsemble.empty")
