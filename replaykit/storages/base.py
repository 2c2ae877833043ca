"""What every storage offers, and what a storage of one's own has to bring."""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from typing import Any, Protocol

import torch

from replaykit.schema import Schema
from replaykit.storages.content import Content
from replaykit.storages.ledger import Ledger
from replaykit.structure import Path

__all__ = ["Hook", "Listener", "Storage"]

Hook = Callable[..., Any]


class Listener(Protocol):
    """Who wants to know that rows were written."""

    def mark_update(self, index: torch.Tensor) -> None: ...


class Storage(ABC):
    """Where records live.

    A storage of one's own brings ``set``, ``get``, ``__len__``, ``contains``, ``state_dict`` and
    ``load_state_dict`` and takes the rest from here, as long as ``ndim == 1``.

    Attributes:
        max_size: capacity in rows (elements, for ``ndim > 1``).
        ndim: number of leading dimensions that count as rows: dimension 0 is time, the others
            are lanes.
        ledger: which record lies in which slot; shared by every buffer over this storage.
        lock: one re-entrant lock, held by whoever writes, draws or reads.

    Example:
        >>> import torch
        >>> from replaykit import LazyTensorStorage, ReplayBuffer
        >>> storage = LazyTensorStorage(100)
        >>> _ = ReplayBuffer(storage=storage).extend(torch.arange(5.0))
        >>> len(storage), storage.max_size, storage[2].item()
        (5, 100, 2.0)
    """

    def __init__(self, max_size: int, *, ndim: int = 1) -> None:
        if type(max_size) is not int or max_size < 1:
            raise ValueError(f"expected max_size as an int of at least 1, got {max_size!r}")
        if type(ndim) is not int or ndim < 1:
            raise ValueError(f"expected ndim as an int of at least 1, got {ndim!r}")
        self.max_size = max_size
        self.ndim = ndim
        self.ledger = Ledger(max_size)
        self.lock = threading.RLock()
        self._listeners: list[weakref.ref[Listener]] = []
        self._save_hooks: list[Hook] = []
        self._load_hooks: list[Hook] = []

    # -- what a storage brings ----------------------------------------------------------------

    @abstractmethod
    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Writes rows at an int, slice, range, sequence or LongTensor of positions."""

    @abstractmethod
    def get(self, index: Any) -> Any:
        """Reads a row (int) or a batch (anything else that indexes)."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def contains(self, item: Any) -> bool | torch.Tensor:
        """Whether rows are stored."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Copies of what is stored."""

    @abstractmethod
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over copies of what another storage held."""

    # -- what it may bring --------------------------------------------------------------------

    @property
    def shape(self) -> torch.Size | None:
        """Shape of the stored rows: ``[N]``, or ``[T, *lanes]``; None before the first write."""
        return torch.Size([len(self)])

    @property
    def device(self) -> torch.device | str:
        """Device of the rows."""
        return torch.device("cpu")

    @property
    def schema(self) -> Schema | None:
        """Fixed layout of the records; None for storages without one, or before the first write."""
        return None

    @property
    def lanes(self) -> torch.Size:
        """Sizes of the dimensions beside time; empty for ``ndim == 1``."""
        return torch.Size()

    def prepare(
        self,
        data: Any,
        *,
        single: bool = False,
        time_dim: int = 0,
        optional: Collection[Path] = (),
    ) -> Any:
        """Returns the rows of ``data`` checked and ready to be written, as a sized object.

        Writers call this before they reserve slots, so that bad data changes nothing.
        """
        return [data] if single else data

    def write(self, slots: torch.Tensor, rows: Any, kept: torch.Tensor | slice) -> None:
        """Writes ``rows[kept]``, as ``prepare`` gave them, at distinct ``slots``.

        The ledger is not touched: the writer commits afterwards.
        """
        if isinstance(kept, slice):
            kept = torch.arange(len(rows))[kept]
        for slot, row in zip(slots.tolist(), kept.tolist(), strict=True):
            self.set(slot, rows[row])

    def read(self, index: torch.Tensor, *, own: bool = True) -> Any:
        """Reads rows at an int64 ``[B]`` (or ``[B, ndim]``) into fresh memory.

        ``own=False`` says that the rows are only looked at, so that a storage of objects may hand
        out the objects themselves.
        """
        return self.get(index)

    def collate(self, rows: Any) -> Any:
        """What a buffer over this storage does with rows by default: nothing."""
        return rows

    def content(self) -> Content:
        """Returns what is stored, as columns or row by row; the caller holds the lock."""
        return Content(len(self), order=torch.full((len(self),), -1), plain=tuple(self))

    def check_content(self, content: Content) -> Any:
        """Checks that rows of another storage fit; changes nothing visible.

        Returns what ``load_content`` needs to bring them in.
        """
        return content.items()

    def load_content(self, content: Content, target: Any, rows: torch.Tensor | None) -> None:
        """Takes rows over: all of them to their own slots, or ``rows`` to slots ``0, 1, ...``."""
        picked = target if rows is None else [target[row] for row in rows.tolist()]
        for slot, item in enumerate(picked):
            self.set(slot, item)

    # -- listeners ----------------------------------------------------------------------------

    def attach(self, buffer: Listener) -> None:
        """Registers a listener, weakly and once: it is told of every write by anyone else."""
        if all(reference() is not buffer for reference in self._listeners):
            self._listeners.append(weakref.ref(buffer))

    def detach(self, buffer: Listener) -> None:
        """Takes a listener off; unknown ones are ignored."""
        self._listeners = [r for r in self._listeners if r() not in (None, buffer)]

    def notify(self, index: torch.Tensor, source: object = None) -> None:
        """Tells every listener but ``source`` that the rows at ``index`` were written."""
        for reference in self._listeners:
            listener = reference()
            if listener is not None and listener is not source:
                listener.mark_update(index)

    # -- hooks and files ----------------------------------------------------------------------

    def register_save_hook(self, hook: Hook) -> None:
        """Adds a function that maps the content before ``dumps`` writes it."""
        self._save_hooks.append(_checked_hook(hook))

    def register_load_hook(self, hook: Hook) -> None:
        """Adds a function that maps the content after ``loads`` has read it."""
        self._load_hooks.append(_checked_hook(hook))

    # -- indexing -----------------------------------------------------------------------------

    def __getitem__(self, index: Any) -> Any:
        return self.get(index)

    def __setitem__(self, index: Any, value: Any) -> None:
        self.set(index, value, set_cursor=False)

    def __iter__(self) -> Iterator[Any]:
        for row in range(len(self)):
            yield self.get(row)

    def __contains__(self, item: Any) -> Any:
        return self.contains(item)

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        del state["lock"]
        state["_listeners"] = []
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.lock = threading.RLock()


def _checked_hook(hook: Hook) -> Hook:
    if not callable(hook):
        raise TypeError(f"expected a callable hook, got {type(hook).__name__}")
    return hook
