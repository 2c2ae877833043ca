"""The table of priorities that goes with a storage: made, brought up to date, exchanged."""

from __future__ import annotations

from typing import Any

import torch

from replaykit.errors import CheckpointError
from replaykit.samplers.priority_arguments import bounds
from replaykit.samplers.priority_law import PriorityLaw
from replaykit.samplers.priority_table import PriorityTable
from replaykit.storages import Storage

__all__ = ["StoredPriorities"]


class StoredPriorities:
    """Law, table, and the largest priority ever set: what new records get follows from these.

    A table is made when it is first needed, and forgets records that are gone when it is next asked
    for. The storage's lock guards it.

    Attributes:
        law: what the table draws by, and the next one will.
        most: the largest raw priority ever set, at least 1.

    Args:
        device: where tables lie; None: with the storage.
        smallest: whether the smallest positive ``v`` will be asked for.
        within_buffer: whether the default is the largest priority stored, not the largest ever set.

    Raises:
        ValueError: the law does not allow the default.
    """

    def __init__(
        self,
        law: PriorityLaw,
        device: torch.device | None,
        *,
        smallest: bool,
        within_buffer: bool,
    ) -> None:
        law.check(0.0, 1.0)
        self.law, self.most = law, 1.0
        self._device, self._smallest, self._within_buffer = device, smallest, within_buffer
        self._table: PriorityTable | None = None
        self._unread: torch.Tensor | None = None
        self._where = ""

    @property
    def table(self) -> PriorityTable | None:
        """The table; None where there is none yet. Saved priorities that stayed in their file are
        read now: O(N), once.

        Raises:
            CheckpointError: they are none.
        """
        if self._unread is not None and self._table is not None:
            try:
                self.law.check(*bounds(self._unread))
            except ValueError as error:
                raise CheckpointError(
                    f"the priorities of the checkpoint, in {self._where}: {error}"
                ) from None
            self._table.load(self._unread)
            self._unread = None
        return self._table

    @table.setter
    def table(self, table: PriorityTable | None) -> None:
        self._table, self._unread = table, None

    @property
    def default(self) -> float:
        """Raw priority of new records: the largest ever set, or stored; 1 before any was set."""
        table = self.table
        if not self._within_buffer:
            return self.most
        return 1.0 if table is None else table.largest()

    def new_table(self, storage: Storage | None, law: PriorityLaw) -> PriorityTable:
        """Returns an empty table for a storage, which does not take the place of the other."""
        device: Any = self._device
        if device is None:
            device = "cpu" if storage is None else storage.device
        return PriorityTable(
            law, torch.device(device), smallest=self._smallest, largest=self._within_buffer
        )

    def known(self, storage: Storage | None) -> PriorityTable:
        """The table, made where there is none, without records that are gone."""
        table = self.table
        if table is None:
            table = self._table = self.new_table(storage, self.law)
        table.renew_after_fork()
        if storage is not None:
            table.limit = storage.max_size
            if len(storage) < table.length:
                table.truncate(len(storage))  # another buffer over the storage has emptied it
        return table

    def set_law(self, law: PriorityLaw) -> None:
        """Draws by another law from now on; ValueError, and no change, where it does not allow a
        priority."""
        law.check(0.0, self.most)  # new records get it when they are stored already
        table = self.table
        if table is not None:
            table.set_law(law)
        self.law = law

    def take(
        self,
        law: PriorityLaw,
        table: PriorityTable,
        most: float,
        unread: torch.Tensor | None = None,
        where: str = "",
    ) -> None:
        """Takes the place of all that was there.

        Args:
            unread: priorities in files yet, that nobody has checked, for a table without any.
            where: those files, for the error of who reads them.
        """
        self.law, self._table, self.most, self._unread = law, table, most, unread
        self._where = where

    def forget(self) -> None:
        """Forgets all priorities, those unread too, and the largest one that was ever set."""
        self.most, self._unread = 1.0, None
        table = self._table
        if table is not None:
            table.truncate(0)
