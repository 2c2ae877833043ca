"""The writers of an ensemble."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from replaykit.ensembles.choosing import chosen
from replaykit.ensembles.storage import StorageEnsemble, check_members
from replaykit.storages import Storage
from replaykit.writers import Writer

__all__ = ["WriterEnsemble", "refuse_writing"]


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
