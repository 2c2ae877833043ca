"""Describe windows over episodes, and mark their ends and padding in batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from replaykit import native
from replaykit._compat import TensorDict, fields_of, is_tensordict, lookup
from replaykit.episodes import CountLaw, EpisodeIndex, Found
from replaykit.schema import Schema
from replaykit.storages.memory import carried
from replaykit.structure import Path
from replaykit.ted import DEFAULT_DONE_KEYS, FLAG_KEYS, format_key, unravel

SEQUENCE_ID = "sequence_id"
MASK = ("collector", "mask")

_NEXT = tuple(("next", name) for name in DEFAULT_DONE_KEYS)
_END, _TRUNCATED, _TERMINATED = range(3)

# Read only if no other flag is stored; see `_flags`.
_AT_ROOT = [("done", _END, -1), ("truncated", _TRUNCATED, -1), ("terminated", _TERMINATED, -1)]

_CPU = torch.device("cpu")


class Markers:
    """Marks the ends of windows in separate flags, bool ``[B, 1]``.

    ``done`` is set at the last real row of a window. ``truncated`` is also set there, unless the
    episode ends at that row. ``init_key`` is set at the first row of a window, if it is stored.

    Args:
        truncated_key: key of ``truncated``; ``done`` and ``terminated`` are its siblings. None:
            batches get no flags.
        init_key: the flag of first rows. None: the stored flag stays unchanged.
        flags: other keys that end episodes.
        pad_value: values of padded rows by key, with ``()`` for all other keys. None: padded rows
            stay copies of the nearest real row.

    Raises:
        TypeError: ``truncated_key`` or ``init_key`` is not a key.
    """

    def __init__(
        self,
        truncated_key: Any,
        init_key: Any,
        flags: tuple[Path, ...] | None = None,
        pad_value: dict[Path, Any] | None = None,
    ) -> None:
        self.pad_value = pad_value
        self.truncated_key, self.init_key = truncated_key, init_key
        self._init: Path | None = None if init_key is None else unravel(init_key)
        self._checked: Schema | None = None
        self._sources: list[tuple[Path, list[tuple[str, int, int]]]] = []
        self._keys: tuple[Any, Any, Any] | None = None
        self._model: torch.Tensor | None = None
        if truncated_key is None:
            return
        truncated = unravel(truncated_key)
        paths = [(*truncated[:-1], "done"), truncated, (*truncated[:-1], "terminated")]
        if len(set(paths)) < 3:
            raise ValueError(
                "expected truncated_key to differ from its siblings done and terminated, got "
                f"{format_key(truncated)}"
            )
        done, cut, terminated = (path if len(path) > 1 else path[0] for path in paths)
        self._keys = done, cut, terminated
        # The flags to read from the rows, by container. Any of them ends an episode.
        named: dict[Path, int] = {
            ("next", "truncated"): _TRUNCATED,
            ("next", "terminated"): _TERMINATED,
        }
        if len(truncated) > 1:
            named |= {paths[1]: _TRUNCATED, paths[2]: _TERMINATED}
            flags = (*(flags or ()), paths[0])
        # Each has the number of the flag of ``_keys`` with the same path, or -1.
        read: dict[Path, list[tuple[str, int, int]]] = {}
        for path in dict.fromkeys((*_NEXT, *named, *(flags or ()))):
            meaning = named.get(path, _END)
            own = paths.index(path) if path in paths else -1
            read.setdefault(path[:-1], []).append((path[-1], meaning, own))
        self._sources = [*read.items(), ((), _AT_ROOT)]

    @property
    def keys(self) -> tuple[Any, ...]:
        """The keys of the flags that batches get; empty without flags."""
        return self._keys or ()

    def check(self, schema: Schema) -> None:
        """Raise KeyError or ValueError if a padding value does not fit a stored key."""
        if self.pad_value is None or schema is self._checked:
            return
        for path, value in self.pad_value.items():
            if path == ():
                continue
            leaf = schema.leaves.get(path)
            if leaf is None:
                raise KeyError(f"pad_value names {format_key(path)}, which is not stored")
            if (
                not leaf.dtype.is_floating_point
                and not leaf.dtype.is_complex
                and value != int(value.real)
            ):
                raise ValueError(
                    f"key {format_key(path)}: expected pad_value as {leaf.dtype}, got {value!r}"
                )
        self._checked = schema

    def complete(self, rows: Any, info: dict[Any, Any], *, fresh: bool = False) -> Any:
        """Add the flags of rows ``[B]`` to ``info`` and fill padding; return the rows.

        If no other code uses the rows (``fresh``), their flags may change in place, and ``info``
        then refers to them.
        """
        window = info[SEQUENCE_ID]
        plain = type(rows) is TensorDict or is_tensordict(rows)
        if not plain or rows.batch_size != window.shape or not window.numel():
            return rows
        mask = info.get(MASK)
        # On the CPU the flags are NumPy arrays. With few rows, the cost is the number of calls.
        if mask is None and window.is_cpu and self._by_core(rows, window, info, fresh=fresh):
            self._mark_first(rows, info, window, None)
            return rows
        number = _array(window)
        real = None if mask is None else _array(mask.unsqueeze(-1))
        if self._keys is not None:
            end, truncated, terminated = self._flags(rows)
            last = _edge(number, real, last=True)
            end = last & ~last if end is None else end
            done, cut = last | end, last > end
            truncated = cut if truncated is None else cut | truncated
            # Create a separate flag that does not share the rows' memory.
            terminated = end & ~end if terminated is None else terminated | terminated
            if real is not None:
                done, truncated, terminated = done & real, truncated & real, terminated & real
            done_key, truncated_key, terminated_key = self._keys
            info[done_key] = _tensor(done)
            info[truncated_key] = _tensor(truncated)
            info[terminated_key] = _tensor(terminated)
        self._mark_first(rows, info, window, real)
        if self.pad_value is not None and mask is not None:
            self._blank(rows, ~mask)
        return rows

    def _mark_first(
        self, rows: Any, info: dict[Any, Any], window: torch.Tensor, real: Any | None
    ) -> None:
        """Add the flag of first rows, if it is stored."""
        stored = None if self._init is None else lookup(rows, self._init)
        if isinstance(stored, torch.Tensor):
            init, first = _flag(stored), _edge(_array(window), real, last=False)
            info[self.init_key] = _tensor(first | (init if real is None else init & real))

    def _by_core(
        self, rows: Any, window: torch.Tensor, info: dict[Any, Any], *, fresh: bool
    ) -> bool:
        """Add the flags of rows by one call of the core.

        Return False if the core cannot read them.
        """
        if self._keys is None or not window.is_contiguous():
            return self._keys is None
        count = window.shape[0]
        flags: list[int] = []
        marks: list[torch.Tensor | None] = [None, None, None]
        for container, names in self._sources:
            if names is _AT_ROOT and flags:
                break
            inner = lookup(rows, container) if container else rows
            if type(inner) is not TensorDict:
                if inner is None:
                    continue
                return False
            leaves = fields_of(inner)
            for name, meaning, own in names:
                leaf = leaves.get(name)
                if leaf is None:
                    continue
                if type(leaf) is not torch.Tensor or leaf.dtype is not torch.bool:
                    return False
                if leaf.numel() != count or not leaf.is_cpu:
                    return False
                flags += (leaf.data_ptr(), leaf.stride(0), meaning)
                if fresh and own >= 0 and leaf.dim() == 2:
                    marks[own] = leaf
        if marks[0] is None or marks[1] is None or marks[2] is None:
            model = self._model
            if model is None or model.shape[0] != 3 * count:
                model = self._model = torch.empty((3 * count, 1), dtype=torch.bool, device=_CPU)
            # These share memory, like the leaves of a batch, but have separate autograd versions.
            made = torch.unsafe_split(torch.empty_like(model), count)
            marks = [new if old is None else old for old, new in zip(marks, made, strict=True)]
        places: list[int] = []
        for key, mark in zip(self._keys, marks, strict=True):
            assert mark is not None
            info[key] = mark
            places += (mark.data_ptr(), mark.stride(0))
        native.core.mark_windows(flags, window.data_ptr(), count, places)
        return True

    def _flags(self, rows: Any) -> tuple[Any, Any, Any]:
        """Return masks of ends, truncated and terminated rows, bool ``[B, 1]``.

        A mask is None if no such flag is stored.
        """
        end = truncated = terminated = None
        for container, names in self._sources:
            if names is _AT_ROOT and end is not None:
                break
            inner = lookup(rows, container) if container else rows
            if type(inner) is TensorDict:
                leaves = fields_of(inner)
            elif is_tensordict(inner):
                leaves = dict(inner.items())
            else:
                continue
            for name, meaning, _ in names:
                leaf = leaves.get(name)
                if not isinstance(leaf, torch.Tensor):
                    continue
                flag = _flag(leaf)
                end = flag if end is None else end | flag
                if meaning == _TRUNCATED:
                    truncated = flag if truncated is None else truncated | flag
                elif meaning == _TERMINATED:
                    terminated = flag if terminated is None else terminated | flag
        return end, truncated, terminated

    def _blank(self, rows: Any, padding: torch.Tensor, above: Path = ()) -> None:
        """Write the padding values into rows where ``padding``, bool ``[B]``, is True."""
        assert self.pad_value is not None
        for name, leaf in rows.items():
            path = (*above, name)
            if is_tensordict(leaf):
                self._blank(leaf, padding, path)
                continue
            value = self.pad_value.get(path)
            if value is None:
                is_flag = path in FLAG_KEYS or leaf.dtype == torch.bool
                value = False if is_flag else self.pad_value[()]
            if not leaf.dtype.is_floating_point and not leaf.dtype.is_complex:
                value = int(value.real)
            shape = [-1, *[1] * (leaf.ndim - 1)]
            number = torch.tensor(value, dtype=leaf.dtype, device=leaf.device)
            carried(leaf).masked_fill_(padding.view(shape), carried(number))


def _edge(window: Any, real: Any | None, *, last: bool) -> Any:
    """Return a mask, bool ``[B, 1]``, of the first or the last real rows of windows."""
    changes = window[1:] != window[:-1]
    if isinstance(window, torch.Tensor):
        edge: Any = torch.ones((len(window), 1), dtype=torch.bool, device=window.device)
    else:
        edge = np.ones((len(window), 1), bool)
    inner = edge[:-1, 0] if last else edge[1:, 0]
    inner[:] = changes
    if real is not None:
        inner |= ~(real[1:, 0] if last else real[:-1, 0])
        edge &= real
    return edge


def _flag(leaf: torch.Tensor) -> Any:
    """Return a flag as bool ``[B, 1]``."""
    flag = _array(leaf if leaf.dtype is torch.bool else leaf != 0)
    if flag.ndim == 2 and flag.shape[1] == 1:
        return flag
    flag = flag.reshape(len(flag), -1).any(1)
    return flag[:, None]


def _array(tensor: torch.Tensor) -> Any:
    return tensor.numpy() if tensor.is_cpu else tensor


def _tensor(flag: Any) -> torch.Tensor:
    return flag if isinstance(flag, torch.Tensor) else torch.from_numpy(flag)


Array = np.ndarray[Any, Any]

PADS = ("none", "left", "right", "both")
SHORTS = ("exclude", "whole", "law")
ALIGNS = ("left", "right")


class Cut(NamedTuple):
    """The stored rows of windows: times ``first <= time < stop`` of ``lane``.

    Each attribute is int64 ``[K]``. ``stop`` may be None if all windows have their full length.
    """

    lane: Array
    first: Array
    stop: Array | None


WindowRows = tuple[Array, Array, Array | None]
"""The rows of windows, one window after another, as three arrays ``[B]``.

The first has the flat indices of the rows, int64; padding has the index of the nearest real row.
The second has the number of each row's window, int64. The third is True at real rows, or None if
windows are never padded.
"""


class Window:
    """Windows of ``length`` rows, strict, spanning or padded.

    In an episode of n rows, a window begins at a virtual start s. It is counted from the episode's
    first row, and ``-left <= s <= n - length + right``. The window has those rows from ``s`` to
    ``s + length - 1`` that exist in the episode. This rule applies if ``n >= least``. A shorter
    episode has ``below`` windows (0 or 1), which consist of the whole episode.

    Args:
        form: the form of the windows.
        length: number T of rows of a full window.
        followed: whether later rows of its episode must follow each window. So no window extends
            beyond the end.

    Raises:
        ValueError: the span would leave no row in a window.

    Example:
        >>> from replaykit.samplers.window_forms import Window, WindowForm
        >>> Window(WindowForm(span=(False, 3)), 4).law.add
        0
    """

    def __init__(self, form: WindowForm, length: int, *, followed: bool = False) -> None:
        self.length, self.filled, self.align = length, form.filled, form.align
        if form.pad is None:
            left, right = (_hang(span, length) for span in form.span)
            least, below = length, 0 if form.strict else 1
        else:
            ends = ("left", "right")
            left, right = (length - 1 if form.pad in (end, "both") else 0 for end in ends)
            # An episode of exactly the length is a whole window under both laws; "whole" counts it
            # once.
            least = {"exclude": length, "whole": length + 1, "law": 1}[form.short]
            if form.pad == "none" and form.short != "exclude":
                least = length
            below = 1 if form.short == "whole" else 0
        right = 0 if followed else right
        self.left, self.right, self.least = left, right, least
        self.plain = not (left or right or below)
        """True if every window has all its rows."""
        self.whole = self.plain and not self.filled
        """True if every window has all its rows, and there is no mask of padding."""
        self.law = CountLaw(least, 1 - length + left + right, below)
        """The law of the number of windows of an episode."""
        self._steps = np.arange(length, dtype=np.int64)
        self._numbers = self._one_lane = self._steps[:0]

    # -- from numbers to rows -------------------------------------------------------------------

    def cut(self, found: Found) -> Cut:
        """Return the rows of the windows ``found``."""
        if self.plain:
            return Cut(found.lane, found.base + found.rest, None)
        full = found.rows >= self.least
        start = found.base + np.where(full, found.rest - self.left, 0)
        stop = np.minimum(start + self.length, found.base + found.rows)
        return Cut(found.lane, np.maximum(start, found.base), stop)

    def lay_out(self, index: EpisodeIndex, cut: Cut) -> WindowRows:
        """Return the rows of windows one after another, each window in order of time."""
        if self.plain:
            mask = np.ones(len(cut.first) * self.length, bool) if self.filled else None
            return self._rows(index, cut, cut.first[:, None] + self._steps, mask)
        assert cut.stop is not None
        count = cut.stop - cut.first
        if self.filled:
            steps = self._steps
            if self.align == "left":
                time = np.minimum(cut.first[:, None] + steps, cut.stop[:, None] - 1)
                mask = steps < count[:, None]
            else:
                virtual = cut.stop[:, None] - self.length + steps
                time = np.maximum(virtual, cut.first[:, None])
                mask = virtual >= cut.first[:, None]
            return self._rows(index, cut, time, mask.reshape(-1))
        window = np.repeat(np.arange(len(count), dtype=np.int64), count)
        time = np.arange(len(window)) + np.repeat(cut.first - np.cumsum(count) + count, count)
        return index.element(time, np.repeat(cut.lane, count)), window, None

    def _rows(self, index: EpisodeIndex, cut: Cut, time: Array, mask: Array | None) -> WindowRows:
        numbers = self.numbers(len(time))
        lane = self._one_lane if index.lanes == 1 else np.repeat(cut.lane, self.length)
        return index.element(time.reshape(-1), lane), numbers, mask

    def numbers(self, count: int) -> Array:
        """Return the window number of each row of ``count`` consecutive full windows."""
        if len(self._numbers) != count * self.length:
            self._numbers = np.repeat(np.arange(count, dtype=np.int64), self.length)
            self._one_lane = np.zeros(count * self.length, np.int64)
        return self._numbers.copy()


@dataclass(frozen=True)
class WindowForm:
    """The requested form of windows, independent of their length.

    Attributes:
        span: numbers of rows by which windows may extend beyond the start and the end of an
            episode. Such windows are shorter. True: all rows but one.
        strict: if True, episodes shorter than a window have no window. If False, such an episode is
            one window.
        pad: the ends beyond which windows may extend, with padding: one of ``PADS``. None: no such
            padding.
        short: the treatment of shorter episodes if ``pad`` is given: one of ``SHORTS``.
        align: the side of the real rows in padded windows.
        repeat: True to pad short windows although ``pad`` is not given.
    """

    span: tuple[int | bool, int | bool] = (False, False)
    strict: bool = True
    pad: str | None = None
    short: str = "exclude"
    align: str = "left"
    repeat: bool = False

    @property
    def filled(self) -> bool:
        """True if windows always have all rows, with a mask of the real rows."""
        return self.pad is not None or self.repeat

    @property
    def skips_short(self) -> bool:
        """True if episodes shorter than a window have no window."""
        return self.strict if self.pad is None else self.short == "exclude"

    @property
    def full(self) -> bool:
        """True if all windows have the same number of rows."""
        return self.filled or (self.strict and not any(self.span))


def _hang(span: int | bool, length: int) -> int:
    if span is True:
        return length - 1
    if span >= length:
        raise ValueError(f"expected span below the {length} rows of a slice, got {span}")
    return int(span)
