"""The storages of an ensemble."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from replaykit.ensembles.choosing import chosen
from replaykit.storages import Storage
from replaykit.transforms import Compose

__all__ = ["StorageEnsemble"]


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
