"""What a record becomes on its way in or out: any callable, in a chain."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["Compose", "Transform"]


class Transform:
    """A transform with both ways: ``forward`` on reading, ``inv`` on writing.

    Subclassing is not needed: any callable, and any object with ``forward`` or ``inv``, is taken.

    Attributes:
        stage: where in a chain the transform belongs: "raw" (copies of what was stored), then
            "episode" (what edits whole episodes), "history" (what needs other rows of the
            episode), then "value" (what maps values on their own); None: anywhere.
        ordered: whether batches have to pass it one after the other, as they are delivered. With
            ``prefetch`` they are transformed then, and not by threads ahead. None: if it has a
            ``state_dict``, unless it is a ``torch.nn.Module`` in evaluation mode, into which a
            buffer puts it.

    Example:
        >>> import torch
        >>> from replaykit import LazyTensorStorage, ReplayBuffer, Transform
        >>> class Halves(Transform):
        ...     def forward(self, data):
        ...         return data / 2
        ...     def inv(self, data):
        ...         return data * 2
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(3), transform=Halves())
        >>> _ = rb.extend(torch.tensor([1.0, 2.0]))
        >>> rb[:], rb.storage[:]
        (tensor([1., 2.]), tensor([2., 4.]))
    """

    stage: str | None = None
    ordered: bool | None = None

    def forward(self, data: Any) -> Any:
        """Maps a batch on its way out; may edit it in place."""
        return data

    def inv(self, data: Any) -> Any:
        """Maps data on its way in; None: nothing is written."""
        return data

    def __call__(self, data: Any) -> Any:
        return self.forward(data)


_STAGES = {"raw": 0, "episode": 1, "history": 2, "value": 3}


class _Entry:
    """A transform with the way it is used."""

    def __init__(self, transform: Any, invert: bool) -> None:
        self.transform = transform
        self.invert = invert
        # On read only: turned round it works on what is written, like any other.
        self.reads_around = not invert and callable(getattr(transform, "fetch", None))
        stage = None if invert else getattr(transform, "stage", None)
        self.rank = _STAGES.get(stage) if isinstance(stage, str) else None

    def apply(self, data: Any, *, reading: bool) -> Any:
        if reading != self.invert:
            return self.transform(data) if callable(self.transform) else self._forward(data)
        inverse = getattr(self.transform, "inv", None)
        return data if inverse is None else inverse(data)

    def _forward(self, data: Any) -> Any:
        forward = getattr(self.transform, "forward", None)
        return data if forward is None else forward(data)


class Compose(Transform):
    """Transforms one after the other: in order on reading, in reverse order on writing.

    Args:
        transforms: callables, or objects with ``forward`` or ``inv``.
        order: what to do where transforms with a ``stage`` come before one of an earlier stage,
            which reads rows as they are stored and would mix units: "strict": refuse; "auto": sort
            them, those of one stage staying in their order.

    Raises:
        RuntimeError: something that is neither. ValueError: stages out of order, or an unknown
            ``order``.

    Example:
        >>> from replaykit import Compose
        >>> chain = Compose(lambda x: x + 1, lambda x: x * 10)
        >>> chain(2), len(chain)
        (30, 2)
    """

    def __init__(self, *transforms: Any, order: str = "strict") -> None:
        if order not in ("strict", "auto"):
            raise ValueError(f"expected order as 'strict' or 'auto', got {order!r}")
        self._take([])
        self.order = order
        for transform in transforms:
            self.append(transform)

    def append(self, transform: Any, *, invert: bool = False) -> None:
        """Adds a transform at the end; ``invert`` uses ``inv`` on reading, ``forward`` on writing.

        Raises:
            RuntimeError: neither callable nor an object with ``forward`` or ``inv``.
        """
        self.insert(len(self), transform, invert=invert)

    def insert(self, index: int, transform: Any, *, invert: bool = False) -> None:
        """Adds a transform before position ``index``; negative counts from the end.

        Raises:
            RuntimeError: as ``append``. IndexError: no such position.
        """
        _check_transform(transform)
        if not -len(self) <= index <= len(self):
            raise IndexError(f"expected a position in [0, {len(self)}], got {index}")
        entries = self._entries.copy()
        entries.insert(index, _Entry(transform, invert))
        self._take(_in_order(entries, self.order))
        if callable(getattr(transform, "eval", None)):
            transform.eval()

    def forward(self, data: Any, history: Any = None) -> Any:
        """Applies all transforms, first to last.

        Args:
            history: called with position, transform and batch in the place of transforms that
                read the rows around; a buffer brings it.

        Raises:
            TypeError: one of them returned None.
        """
        for position, entry in enumerate(self._entries):
            given = data
            if history is not None and entry.reads_around:
                data = history(position, entry.transform, data)
            else:
                data = entry.apply(data, reading=True)
            if data is None and given is not None:
                raise TypeError(f"the transform {entry.transform!r} returned None; return the data")
        return data

    def _take(self, entries: list[_Entry]) -> None:
        """Has these entries from now on; notes what every batch asks of them."""
        self._entries = entries
        self._readers = [
            (position, entry.transform)
            for position, entry in enumerate(entries)
            if entry.reads_around
        ]
        changes = [getattr(one, "changes", ()) for _, one in self._readers]
        self._changes: frozenset[Any] = frozenset().union(*changes)

    @property
    def readers(self) -> list[tuple[int, Any]]:
        """Positions of the transforms that read the rows around, and these."""
        return self._readers

    @property
    def changes(self) -> frozenset[Any]:
        """Keys that transforms which read the rows around write: those of a draw give way."""
        return self._changes

    @property
    def told_of_writes(self) -> list[Any]:
        """Transforms with ``check_rows``, which a buffer calls before every write and which may
        refuse it, and ``written``, which it calls after it."""
        names = ("check_rows", "written")
        return [
            entry.transform
            for entry in self._entries
            if all(callable(getattr(entry.transform, name, None)) for name in names)
        ]

    @property
    def ordered(self) -> bool:  # type: ignore[override]
        """Whether batches have to pass any of them in the order in which they are delivered."""
        return any(_is_ordered(entry.transform) for entry in self._entries)

    @property
    def reads_around(self) -> bool:
        """Whether any of them reads other rows than those of the batch."""
        return bool(self._readers)

    @property
    def spans_rows(self) -> bool:
        """Whether what any of them makes of a row follows from others too, of a batch or of what
        is written before and after it."""
        holds_back = any(
            not entry.invert and callable(getattr(entry.transform, "flush", None))
            for entry in self._entries
        )
        return self.reads_around or holds_back or bool(self.told_of_writes)

    def inv(self, data: Any) -> Any:
        """Applies the ``inv`` of all transforms, last to first; None: nothing is written."""
        for entry in reversed(self._entries):
            if data is None:
                return None
            data = entry.apply(data, reading=False)
        return data

    def flush(self) -> Iterator[Any]:
        """Yields what transforms hold back of the rows written, as it is to be stored.

        Theirs is a method ``flush`` that gives it up; the ``inv`` of those before it follow.
        """
        for position in reversed(range(len(self._entries))):
            entry = self._entries[position]
            flush = None if entry.invert else getattr(entry.transform, "flush", None)
            if not callable(flush):
                continue
            data = flush()
            for before in reversed(self._entries[:position]):
                if data is not None:
                    data = before.apply(data, reading=False)
            if data is not None:
                yield data

    def empty(self) -> None:
        """Has transforms with a method ``empty`` forget the rows that they hold back."""
        for transform in self:
            if callable(getattr(transform, "empty", None)):
                transform.empty()

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, index: Any) -> Any:
        """Returns the transform at an int, a chain of those in a slice."""
        if not isinstance(index, slice):
            return self._entries[index].transform
        chain = Compose(order=self.order)
        chain._take(self._entries[index])
        return chain

    def __iter__(self) -> Iterator[Any]:
        return (entry.transform for entry in self._entries)

    def copy(self) -> Compose:
        """Returns a chain of the same transforms."""
        chain = Compose(order=self.order)
        chain._take(list(self._entries))
        return chain

    def state_dict(self) -> dict[str, Any]:
        """Returns the states of the transforms that have one, by their position."""
        states = {}
        for position, transform in enumerate(self):
            if callable(getattr(transform, "state_dict", None)):
                state = dict(transform.state_dict())
                if state:
                    states[str(position)] = state
        return states

    def check_state(self, state_dict: dict[str, Any]) -> None:
        """Raises ValueError where there is a state for a transform that is not there."""
        if not isinstance(state_dict, dict):
            raise ValueError(f"expected the states of transforms, got {state_dict!r}")
        for key in state_dict:
            target = self[int(key)] if str(key).isdigit() and int(key) < len(self) else None
            if not callable(getattr(target, "load_state_dict", None)):
                raise ValueError(
                    f"expected a transform with state at position {key}, got "
                    f"{'none' if target is None else type(target).__name__}"
                )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Gives every transform its state; ValueError as ``check_state``."""
        self.check_state(state_dict)
        for key, state in state_dict.items():
            self[int(key)].load_state_dict(state)

    def __repr__(self) -> str:
        inside = ", ".join(
            f"{entry.transform!r}{' (inverted)' if entry.invert else ''}" for entry in self._entries
        )
        return f"Compose({inside})"


def _is_ordered(transform: Any) -> bool:
    ordered = getattr(transform, "ordered", None)
    if isinstance(ordered, bool):
        return ordered
    # What a module keeps does not change where it only evaluates.
    evaluates = isinstance(transform, torch.nn.Module) and not transform.training
    return callable(getattr(transform, "state_dict", None)) and not evaluates


def _in_order(entries: list[_Entry], order: str) -> list[_Entry]:
    """The entries by their stages; ValueError where that is not the order they are in."""
    ranked = [entry for entry in entries if entry.rank is not None]
    for before, after in itertools.pairwise(ranked):
        if before.rank > after.rank:  # type: ignore[operator]
            break
    else:
        return entries
    if order == "strict":
        raise ValueError(
            f"expected {after.transform!r} (stage {after.transform.stage!r}) before "
            f"{before.transform!r} (stage {before.transform.stage!r}): it reads rows as they are "
            "stored; Compose(..., order='auto') sorts them"
        )
    placed = iter(sorted(ranked, key=lambda entry: entry.rank or 0))
    return [entry if entry.rank is None else next(placed) for entry in entries]


def _check_transform(transform: Any) -> None:
    if isinstance(transform, type) or not (
        callable(transform) or hasattr(transform, "forward") or hasattr(transform, "inv")
    ):
        raise RuntimeError(
            "transform must be either a Transform instance or a callable; expected a callable, or "
            f"an object with forward or inv, got {transform!r}"
        )
