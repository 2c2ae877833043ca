"""Describe windows over episodes, and mark their ends and padding in batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from replaykit import native
from replaykit._compat import TensorDict, fields_of, is_tensordict, lookup
from replaykit.episodes import CountLaw, EpisodeIndex, Windows
from replaykit.schema import Schema
from replaykit.structure import Path
from replaykit.ted import DEFAULT_DONE_KEYS, FLAG_KEYS, format_key, unravel

__all__ = [
    "ALIGNS",
    "MASK",
    "PADS",
    "SEQUENCE_ID",
    "SHORTS",
    "Cut",
    "Markers",
    "Window",
    "WindowForm",
    "WindowLayout",
]

SEQUENCE_ID = "sequence_id"
MASK = ("collector", "mask")

_NEXT = tuple(("next", name) for name in DEFAULT_DONE_KEYS)
_END, _TRUNCATED, _TERMINATED = range(3)

# Where no other flag is there; see `end_flags`.
_AT_ROOT = [("done", _END), ("truncated", _TRUNCATED), ("terminated", _TERMINATED)]

_CPU = torch.device("cpu")


class Markers:
    """Marks the ends of windows in flags of their own, bool ``[B, 1]``.

    Of a window's last real row: ``done`` is set, and ``truncated`` unless its episode ends there.
    ``init_key``, where it is stored, is set at its first row.

    Args:
        truncated_key: where ``truncated`` goes; ``done`` and ``terminated`` are its siblings. None:
            no flags are made.
        init_key: the flag of first rows. None: it stays as it is stored.
        flags: other keys that end episodes.
        pad_value: values by key of padded rows, ``()`` for all others; None: they stay copies of
            the nearest real row.

    Raises:
        TypeError: ``truncated_key`` or ``init_key`` is no key.
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
        self._sources: list[tuple[Path, list[tuple[str, int]]]] = []
        self._keys: tuple[Any, Any, Any] | None = None
        self._model: torch.Tensor | None = None
        # Where the flags lie side by side, and no others end episodes.
        self._siblings: tuple[str, tuple[str, ...]] | None = None
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
        # What is read of the rows, by container: any of them ends an episode.
        named: dict[Path, int] = {
            ("next", "truncated"): _TRUNCATED,
            ("next", "terminated"): _TERMINATED,
        }
        if len(truncated) > 1:
            named |= {paths[1]: _TRUNCATED, paths[2]: _TERMINATED}
            flags = (*(flags or ()), paths[0])
        read: dict[Path, list[tuple[str, int]]] = {}
        for path in dict.fromkeys((*_NEXT, *named, *(flags or ()))):
            meaning = named.get(path, _END)
            read.setdefault(path[:-1], []).append((path[-1], meaning))
        self._sources = [*read.items(), ((), _AT_ROOT)]
        if list(read) == [truncated[:-1]] and len(truncated) == 2:
            names = tuple(path[-1] for path in paths)
            if {name for name, _ in read[truncated[:-1]]} == set(names):
                self._siblings = truncated[0], names

    def check(self, schema: Schema) -> None:
        """Raises KeyError, ValueError where values of padding are not for stored keys."""
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

    def complete(self, rows: Any, info: dict[Any, Any]) -> Any:
        """Adds the flags of rows ``[B]`` to ``info``, and blanks padding; returns the rows."""
        window = info[SEQUENCE_ID]
        plain = type(rows) is TensorDict or is_tensordict(rows)
        if not plain or rows.batch_size != window.shape or not window.numel():
            return rows
        mask = info.get(MASK)
        # On the CPU the flags are NumPy's: with few rows the calls are what costs.
        core = None if mask is not None or not window.is_cpu else native.core()
        if core is not None and self._by_core(core, rows, window, info):
            self._mark_first(rows, info, _array(window), None)
            return rows
        number = _array(window)
        real = None if mask is None else _array(mask.unsqueeze(-1))
        if self._keys is not None:
            end, truncated, terminated = self._flags(rows)
            last = _edge(number, real, last=True)
            end = last & ~last if end is None else end
            done, cut = last | end, last > end
            truncated = cut if truncated is None else cut | truncated
            # A flag of its own, not memory of the rows.
            terminated = end & ~end if terminated is None else terminated | terminated
            if real is not None:
                done, truncated, terminated = done & real, truncated & real, terminated & real
            done_key, truncated_key, terminated_key = self._keys
            info[done_key] = _tensor(done)
            info[truncated_key] = _tensor(truncated)
            info[terminated_key] = _tensor(terminated)
        self._mark_first(rows, info, number, real)
        if self.pad_value is not None and mask is not None:
            self._blank(rows, ~mask)
        return rows

    def _mark_first(self, rows: Any, info: dict[Any, Any], number: Any, real: Any | None) -> None:
        """Adds the flag of first rows, where it is stored."""
        stored = None if self._init is None else lookup(rows, self._init)
        if isinstance(stored, torch.Tensor):
            init, first = _flag(stored), _edge(number, real, last=False)
            info[self.init_key] = _tensor(first | (init if real is None else init & real))

    def complete_fresh(self, rows: Any, info: dict[Any, Any]) -> Any:
        """``complete`` of rows that nobody else has: where the flags are among them they are marked
        where they are, and ``info`` names them."""
        window = info[SEQUENCE_ID]
        core = None if MASK in info or not window.is_cpu else native.core()
        if core is not None and type(rows) is TensorDict and rows.batch_size == window.shape:
            leaves = fields_of(rows)
            unmarked = self._init is None or lookup(rows, self._init) is None
            if unmarked and self._in_place(core, leaves, window, info):
                return rows
        return self.complete(rows, info)

    def _in_place(
        self, core: Any, leaves: dict[str, Any], window: torch.Tensor, info: dict[Any, Any]
    ) -> bool:
        if self._siblings is None:
            return False
        container, names = self._siblings
        inner = leaves.get(container)
        if type(inner) is not TensorDict or not window.is_contiguous():
            return False
        known, count = fields_of(inner), window.shape[0]
        done, cut, ended = names
        below = done in known or cut in known or ended in known
        if not below and not leaves.keys().isdisjoint(names):
            return False  # those at the root tell where episodes end
        places: list[int] = []
        flags: list[torch.Tensor] = []
        for name in names:
            leaf = known.get(name)
            if leaf is None:
                leaf = torch.empty((count, 1), dtype=torch.bool, device=_CPU)
                places += (leaf.data_ptr(), 1, 0)
            elif (
                type(leaf) is not torch.Tensor
                or leaf.dtype is not torch.bool
                or leaf.numel() != count
                or leaf.ndim != 2
                or not leaf.is_cpu
            ):
                return False
            else:
                places += (leaf.data_ptr(), leaf.stride(0), 1)
            flags.append(leaf)
        core.mark_own(places, (), window.data_ptr(), count)
        info |= zip(self._keys, flags, strict=True)  # type: ignore[arg-type]
        return True

    def _by_core(self, core: Any, rows: Any, window: torch.Tensor, info: dict[Any, Any]) -> bool:
        """Adds the flags of rows by one call of the core; False where that cannot read them."""
        if self._keys is None or not window.is_contiguous():
            return self._keys is None
        count = window.shape[0]
        flags: list[int] = []
        for container, names in self._sources:
            if names is _AT_ROOT and flags:
                break
            inner = lookup(rows, container) if container else rows
            if type(inner) is not TensorDict:
                if inner is None:
                    continue
                return False
            leaves = fields_of(inner)
            for name, meaning in names:
                leaf = leaves.get(name)
                if leaf is None:
                    continue
                if type(leaf) is not torch.Tensor or leaf.dtype is not torch.bool:
                    return False
                if leaf.numel() != count or not leaf.is_cpu:
                    return False
                flags += (leaf.data_ptr(), leaf.stride(0), meaning)
        model = self._model
        if model is None or model.shape[0] != 3 * count:
            model = self._model = torch.empty((3 * count, 1), dtype=torch.bool, device=_CPU)
        made = torch.empty_like(model)
        core.mark_windows(flags, window.data_ptr(), count, made.data_ptr())
        # Memory is shared, as among the leaves of a batch, versions for autograd are not.
        info |= zip(self._keys, torch.unsafe_split(made, count), strict=True)
        return True

    def _flags(self, rows: Any) -> tuple[Any, Any, Any]:
        """Where episodes end, and which rows are truncated and terminated, bool ``[B, 1]``; None
        where no such flag is stored."""
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
            for name, meaning in names:
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
        """Puts values where ``padding``, bool ``[B]``, is True."""
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
            leaf.masked_fill_(padding.view(-1, *[1] * (leaf.ndim - 1)), value)


def _edge(window: Any, real: Any | None, *, last: bool) -> Any:
    """Bool ``[B, 1]``: the first or the last real rows of windows."""
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
    """A flag as bool ``[B, 1]``."""
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
    """The stored rows of windows: times ``first <= time < stop`` of ``lane``, int64 ``[K]``.

    ``stop`` may be None of windows that all have their full length.
    """

    lane: Array
    first: Array
    stop: Array | None


class WindowLayout(NamedTuple):
    """Rows of windows one after another.

    Attributes:
        element: int64 ``[B]``; at padding that of the nearest real row.
        window: int64 ``[B]``, the number of the window that a row belongs to.
        mask: bool ``[B]``, True at real rows; None where windows are never padded.
    """

    element: Array
    window: Array
    mask: Array | None


class Window:
    """Windows of ``length`` rows; the law of C25 of the sequences reference, and that of spans.

    In an episode with n rows a window begins at a virtual start s, counted from the episode's
    first row, with ``-left <= s <= n - length + right``; its rows are those of ``s .. s + length -
    1`` that the episode has. That holds for ``n >= least``; shorter episodes have ``below`` windows
    (0 or 1), which are the whole episode.

    Args:
        length: rows T of a full window.
        left, right: how far windows may hang over either end.
        least, below: see above.
        filled: windows always have T rows, padded where the episode has none.
        align: where the real rows of padded windows are: ``"left"`` or ``"right"``.

    Example:
        >>> from replaykit.samplers.window_forms import Window
        >>> Window(4, right=3).law.count(10)
        10
    """

    def __init__(
        self,
        length: int,
        *,
        left: int = 0,
        right: int = 0,
        least: int | None = None,
        below: int = 0,
        filled: bool = False,
        align: str = "left",
    ) -> None:
        self.length, self.left, self.right = length, left, right
        self.least = length if least is None else least
        self.below = below
        self.filled, self.align = filled, align
        self.plain = not (left or right or below)
        """Whether every window has all its rows."""
        self.whole = self.plain and not filled
        """Whether besides nothing is said of padding."""
        self.law = CountLaw(self.least, 1 - length + left + right, below)
        """How many windows an episode has."""
        self._steps = np.arange(length, dtype=np.int64)
        self._numbers = self._one_lane = self._steps[:0]

    # -- from numbers to rows -------------------------------------------------------------------

    def cut(self, found: Windows) -> Cut:
        """The rows of windows that were looked up by their numbers, or in their episodes."""
        if self.plain:
            return Cut(found.lane, found.base + found.rest, None)
        full = found.rows >= self.least
        start = found.base + np.where(full, found.rest - self.left, 0)
        stop = np.minimum(start + self.length, found.base + found.rows)
        return Cut(found.lane, np.maximum(start, found.base), stop)

    def cut_from(self, first: Array, last: Array, lane: Array) -> Cut:
        """The rows of windows that begin with rows ``first`` of episodes that end with ``last``."""
        return Cut(lane, first, np.minimum(first + self.length, last + 1))

    def lay_out(self, index: EpisodeIndex, cut: Cut) -> WindowLayout:
        """Rows of windows one after another, in order of time inside."""
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
        return WindowLayout(index.element(time, np.repeat(cut.lane, count)), window, None)

    def _rows(self, index: EpisodeIndex, cut: Cut, time: Array, mask: Array | None) -> WindowLayout:
        numbers = self.numbers(len(time))
        lane = self._one_lane if index.lanes == 1 else np.repeat(cut.lane, self.length)
        return WindowLayout(index.element(time.reshape(-1), lane), numbers, mask)

    def numbers(self, count: int) -> Array:
        """Of ``count`` full windows one after another which window each row belongs to."""
        if len(self._numbers) != count * self.length:
            self._numbers = np.repeat(np.arange(count, dtype=np.int64), self.length)
            self._one_lane = np.zeros(count * self.length, np.int64)
        return self._numbers.copy()


@dataclass(frozen=True)
class WindowForm:
    """What windows are asked for, whatever their length.

    Attributes:
        span: how far windows may hang over the start and the end of an episode, and are then
            shorter: True: all but one row; a number of rows.
        strict: only episodes of at least the length; else shorter ones are one window.
        pad: one of ``PADS``: over which ends windows may hang and are padded; None: no such
            padding.
        short: one of ``SHORTS``: what becomes of episodes that are shorter, where ``pad`` is given.
        align: where the real rows of padded windows are.
        repeat: pad short windows without ``pad``.
    """

    span: tuple[int | bool, int | bool] = (False, False)
    strict: bool = True
    pad: str | None = None
    short: str = "exclude"
    align: str = "left"
    repeat: bool = False

    @property
    def filled(self) -> bool:
        """Whether windows always have all rows, with a mask that says which are real."""
        return self.pad is not None or self.repeat

    @property
    def skips_short(self) -> bool:
        """Whether episodes that are shorter than a window have none."""
        return self.strict if self.pad is None else self.short == "exclude"

    @property
    def full(self) -> bool:
        """Whether all windows have the same number of rows."""
        return self.filled or (self.strict and not any(self.span))

    def of(self, length: int) -> Window:
        """Windows of that length.

        Raises:
            ValueError: a span that would leave no row.
        """
        if self.pad is None:
            left, right = (_hang(span, length) for span in self.span)
            return Window(
                length,
                left=left,
                right=right,
                below=0 if self.strict else 1,
                filled=self.repeat,
                align=self.align,
            )
        # An episode of exactly the length is whole by either law; the `whole` one has it once.
        least = {"exclude": length, "whole": length + 1, "law": 1}[self.short]
        if self.pad == "none" and self.short != "exclude":
            least = length
        return Window(
            length,
            left=length - 1 if self.pad in ("left", "both") else 0,
            right=length - 1 if self.pad in ("right", "both") else 0,
            least=least,
            below=1 if self.short == "whole" else 0,
            filled=True,
            align=self.align,
        )


def _hang(span: int | bool, length: int) -> int:
    if span is True:
        return length - 1
    if span >= length:
        raise ValueError(f"expected span below the {length} rows of a slice, got {span}")
    return int(span)
