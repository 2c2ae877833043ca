"""Transform written rows and read batches by a chain of callables."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from replaykit.keywords import one_of


class Transform:
    """A transform for both directions: ``forward`` on read, ``inv`` on write.

    Subclassing is optional: buffers take any callable, and any object with ``forward`` or ``inv``.

    Attributes:
        stage: position of the transform in a chain. The order is "raw" (copies stored values),
            "episode" (edits whole episodes), "relabel" (replaces goals), "history" (reads other
            rows of the episode), "value" (maps values one by one). None: any position.
        ordered: whether batches must pass the transform in the order of delivery. With
            ``prefetch``, such a transform runs at delivery, not in prefetch threads. None: True if
            the transform has a ``state_dict``, unless it is a ``torch.nn.Module`` in evaluation
            mode. Buffers put modules in this mode.

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
        """Return the transformed batch after a read; may change ``data`` in place."""
        return data

    def inv(self, data: Any) -> Any:
        """Return the rows to write instead of ``data``; None to write nothing."""
        return data

    def __call__(self, data: Any) -> Any:
        return self.forward(data)


_STAGES = {"raw": 0, "episode": 1, "relabel": 2, "history": 3, "value": 4}


class _Entry:
    """A transform and its direction."""

    def __init__(self, transform: Any, invert: bool) -> None:
        self.transform = transform
        self.invert = invert
        # An inverted transform never reads other rows.
        self.reads_around = not invert and callable(getattr(transform, "fetch", None))
        stage = None if invert else getattr(transform, "stage", None)
        self.rank = _STAGES.get(stage) if isinstance(stage, str) else None

    @property
    def is_before_values(self) -> bool:
        """True if the transform reads stored values, or other rows."""
        return self.rank is not None and self.rank < _STAGES["value"]

    def apply(self, data: Any, *, reading: bool) -> Any:
        is_forward = reading != self.invert
        if is_forward and callable(self.transform):
            return self.transform(data)
        function = getattr(self.transform, "forward" if is_forward else "inv", None)
        return data if function is None else function(data)


class Compose(Transform):
    """A chain of transforms: in order on read, in reverse order on write.

    Args:
        transforms: callables, or objects with ``forward`` or ``inv``. A ``Compose`` stands for its
            transforms. An object of a subclass is one transform. Its transforms must not read other
            rows or follow writes.
        order: treatment of a transform that is placed before a transform of an earlier ``stage``.
            The later transform reads stored values, so it would mix stored values with transformed
            values. "strict": raise an error. "auto": sort transforms by stage, and keep the order
            within a stage.

    Raises:
        RuntimeError: a transform is not callable and has neither ``forward`` nor ``inv``.
        ValueError: stages are out of order, ``order`` is unknown, or a transform in an object of a
            subclass reads other rows or follows writes.

    Example:
        >>> from replaykit import Compose
        >>> chain = Compose(lambda x: x + 1, lambda x: x * 10)
        >>> chain(2), len(chain)
        (30, 2)
    """

    def __init__(self, *transforms: Any, order: str = "strict") -> None:
        one_of("order", order, ("strict", "auto"))
        self._set_entries([])
        self.order = order
        for transform in transforms:
            self.append(transform)

    def append(self, transform: Any, *, invert: bool = False) -> None:
        """Add a transform at the end.

        With ``invert`` the chain uses ``inv`` on read and ``forward`` on write.

        Raises:
            RuntimeError: the transform is not callable and has neither ``forward`` nor ``inv``.
        """
        self.insert(len(self), transform, invert=invert)

    def insert(self, index: int, transform: Any, *, invert: bool = False) -> None:
        """Add a transform before position ``index``; negative ones count from the end.

        Raises:
            RuntimeError, ValueError: as for the arguments of the constructor.
            IndexError: the position does not exist.
        """
        _check_transform(transform)
        if not -len(self) <= index <= len(self):
            raise IndexError(f"expected a position in [0, {len(self)}], got {index}")
        added = [_Entry(transform, invert)]
        if type(transform) is Compose:  # the chain knows only its direct entries as readers
            added = [_Entry(one.transform, one.invert != invert) for one in transform.entries]
        elif isinstance(transform, Compose) and (
            transform.reads_around or transform.checking_writes
        ):
            raise ValueError(
                f"expected transforms that read other rows or follow writes in a Compose, got "
                f"{transform!r} in a {type(transform).__name__}, which stays one transform"
            )
        entries = self.entries.copy()
        entries[index:index] = reversed(added) if invert else added
        self._set_entries(_in_order(entries, self.order))
        if callable(getattr(transform, "eval", None)):
            transform.eval()

    def forward(self, data: Any, history: Any = None) -> Any:
        """Apply all transforms, first to last.

        Args:
            history: a function of the buffer. For each transform that reads other rows, the chain
                calls this function instead, with position, transform and batch.

        Raises:
            TypeError: a transform returned None.
        """
        for position, entry in enumerate(self.entries):
            given = data
            if history is not None and entry.reads_around:
                data = history(position, entry.transform, data)
            else:
                data = entry.apply(data, reading=True)
            if data is None and given is not None:
                raise TypeError(f"the transform {entry.transform!r} returned None; return the data")
        return data

    def _set_entries(self, entries: list[_Entry]) -> None:
        """Replace the entries, and precompute the properties that every batch needs."""
        self.entries = entries
        # The transforms that read other rows, with their positions.
        self.readers: list[tuple[int, Any]] = [
            (position, entry.transform)
            for position, entry in enumerate(entries)
            if entry.reads_around
        ]
        changes = [getattr(one, "changes", ()) for _, one in self.readers]
        self._changes: frozenset[Any] = frozenset().union(*changes)

    @property
    def changes(self) -> frozenset[Any]:
        """Keys that ``readers`` write. They replace info keys of the same name."""
        return self._changes

    @property
    def checking_writes(self) -> list[Any]:
        """Transforms that check writes: those with ``check_rows`` and ``written``.

        A buffer calls ``check_rows``, which may raise, before every write and ``written`` after it.
        A transform whose ``listener`` takes the chain before it returns another object for this.
        """
        names, found = ("check_rows", "written"), []
        for position, entry in enumerate(self.entries):
            listener = getattr(entry.transform, "listener", None)
            one = listener(self[:position]) if callable(listener) else entry.transform
            if all(callable(getattr(one, name, None)) for name in names):
                found.append(one)
        return found

    @property
    def ordered(self) -> bool:  # type: ignore[override]
        """True if batches must pass any of the transforms in the order of delivery."""
        return any(_is_ordered(entry.transform) for entry in self.entries)

    @property
    def reads_around(self) -> bool:
        """True if any of the transforms reads rows outside of the batch."""
        return bool(self.readers)

    @property
    def uses_random(self) -> bool:
        """True if any of the transforms draws random numbers while it reads rows."""
        return any(transform.uses_random for _, transform in self.readers)

    @property
    def spans_rows(self) -> bool:
        """True if the result for a row may depend on other rows, on read or on write."""
        holds_back = any(
            not entry.invert and callable(getattr(entry.transform, "flush", None))
            for entry in self.entries
        )
        return self.reads_around or holds_back or bool(self.checking_writes)

    def inv(self, data: Any) -> Any:
        """Apply ``inv`` of all transforms, last to first; return None to write nothing."""
        for entry in reversed(self.entries):
            if data is None:
                return None
            data = entry.apply(data, reading=False)
        return data

    def flush(self) -> Iterator[Any]:
        """Yield the rows that transforms hold back, ready to be stored.

        The method ``flush`` of a transform returns the rows that it holds back. These rows then
        pass through ``inv`` of the transforms before it.
        """
        for position in reversed(range(len(self.entries))):
            entry = self.entries[position]
            flush = None if entry.invert else getattr(entry.transform, "flush", None)
            if not callable(flush):
                continue
            data = flush()
            for before in reversed(self.entries[:position]):
                if data is not None:
                    data = before.apply(data, reading=False)
            if data is not None:
                yield data

    def empty(self) -> None:
        """Drop rows that transforms hold back, by calling their ``empty`` if they have it."""
        for transform in self:
            if callable(getattr(transform, "empty", None)):
                transform.empty()

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: Any) -> Any:
        """Return the transform at an int, or a chain of the transforms in a slice."""
        if not isinstance(index, slice):
            return self.entries[index].transform
        chain = Compose(order=self.order)
        chain._set_entries(self.entries[index])
        return chain

    def __iter__(self) -> Iterator[Any]:
        return (entry.transform for entry in self.entries)

    def copy(self) -> Compose:
        """Return a chain of the same transforms."""
        chain: Compose = self[:]
        return chain

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all transforms with a state, by their positions."""
        states = {}
        for position, transform in enumerate(self):
            if callable(getattr(transform, "state_dict", None)):
                state = dict(transform.state_dict())
                if state:
                    states[str(position)] = state
        return states

    def check_state(self, state_dict: dict[str, Any]) -> None:
        """Raise ValueError if a state belongs to no transform of the chain."""
        if not isinstance(state_dict, dict):
            raise ValueError(f"expected a dict with the states of transforms, got {state_dict!r}")
        for key in self._by_position(state_dict):
            target = self[int(key)] if str(key).isdigit() and int(key) < len(self) else None
            if not callable(getattr(target, "load_state_dict", None)):
                raise ValueError(
                    f"expected a transform with state at position {key}, got "
                    f"{'none' if target is None else type(target).__name__}"
                )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of every transform. Raises ValueError as ``check_state`` does."""
        self.check_state(state_dict)
        for key, state in self._by_position(state_dict).items():
            self[int(key)].load_state_dict(state)

    def _by_position(self, states: dict[str, Any]) -> dict[str, Any]:
        """Return states by position, also those of 0.1.0, which did not flatten a Compose."""
        if not (_is_of_chain(states) and any(map(_is_of_chain, states.values()))):
            return states
        single, own = [*_single_states(states)], self.state_dict()
        # A subclass stays one transform with such a state. Inverted chains are flattened backwards,
        # and sorted ones may have lost their order.
        one_by_one = len(single) == len(own) and not any(map(_is_of_chain, own.values()))
        if not one_by_one or self.order != "strict" or any(entry.invert for entry in self.entries):
            return states
        if any(int(key) < least for key, (least, _) in zip(own, single, strict=True)):
            return states
        return {key: state for key, (_, state) in zip(own, single, strict=True)}

    def __repr__(self) -> str:
        inside = ", ".join(
            f"{entry.transform!r}{' (inverted)' if entry.invert else ''}" for entry in self.entries
        )
        return f"Compose({inside})"


def _is_of_chain(state: Any) -> bool:
    """Return whether a state is that of a chain: dicts by position."""
    known = isinstance(state, dict) and bool(state)
    return known and all(str(key).isdigit() and isinstance(state[key], dict) for key in state)


def _single_states(states: dict[str, Any], before: int = 0) -> Iterator[tuple[int, Any]]:
    """Yield the states of the transforms in a chain and in the chains inside it, in order.

    Each has the lowest position that it may have in a flat chain.
    """
    for key in sorted(states, key=int):
        state, least = states[key], before + int(key)
        yield from _single_states(state, least) if _is_of_chain(state) else [(least, state)]


def _is_ordered(transform: Any) -> bool:
    ordered = getattr(transform, "ordered", None)
    if isinstance(ordered, bool):
        return ordered
    # The state of a module does not change in evaluation mode.
    evaluates = isinstance(transform, torch.nn.Module) and not transform.training
    return callable(getattr(transform, "state_dict", None)) and not evaluates


def _in_order(entries: list[_Entry], order: str) -> list[_Entry]:
    """Return the entries sorted by stage. ValueError if "strict" and not sorted."""
    ranked = [entry for entry in entries if entry.rank is not None]
    for before, after in itertools.pairwise(ranked):
        if before.rank > after.rank:  # type: ignore[operator]
            break
    else:
        return entries
    if order == "strict":
        raise ValueError(
            f"expected {after.transform!r} (stage {after.transform.stage!r}) before "
            f"{before.transform!r} (stage {before.transform.stage!r}), as it reads rows as "
            "they are stored; use Compose(..., order='auto') to sort transforms"
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
