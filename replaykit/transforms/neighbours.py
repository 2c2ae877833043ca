"""Read values of other rows: windows, single neighbours, and tags of episodes."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import torch

from replaykit.declared import Count, read_value
from replaykit.episodes import Needs
from replaykit.keywords import as_number, one_of
from replaykit.structure import Path
from replaykit.ted import format_key, unravel
from replaykit.transforms.batch_values import last_real, nearest_real, set_all
from replaykit.transforms.history import (
    Around,
    HistoryTransform,
    Surroundings,
    as_tensor_like,
    filled,
)

Array = np.ndarray[Any, Any]


class Shift(HistoryTransform):
    """A transform that adds the value of a key n rows later, or earlier, in the same episode.

    The values are computed on read, and stored nowhere. Padding rows have the value of the nearest
    real row.

    Args:
        key: a stored key.
        n: number of rows, not 0. Negative numbers name earlier rows.
        on_short: treatment of rows without such a row in their episode. ``"error"``: samplers do
            not draw them, nor windows with them; other reads raise ValueError. ``"mask"``: the
            value is zero, and the bool key ``<out>_valid``, ``[B, 1]``, is False. ``"clip"``: the
            value of the last row, or the first stored row, of the episode.
        out: the new key. Default: the key with the number, as in ``"observation+2"``.

    Raises:
        ValueError: ``n`` is 0, ``on_short`` is unknown, or it is ``"error"`` with a negative n.
        KeyError: on read, the key is not stored.

    Cost: one more read of the key for each row.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from replaykit import LazyTensorStorage, ReplayBuffer, Shift
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(9), transform=Shift("x", 2, "mask"))
        >>> done = torch.tensor([0, 0, 1, 0, 0, 0], dtype=torch.bool)
        >>> _ = rb.extend(TensorDict({"x": torch.arange(6), "next": {"done": done}}, [6]))
        >>> rb[:]["x+2"], rb[:]["x+2_valid"].flatten().int()
        (tensor([2, 0, 0, 5, 0, 0]), tensor([1, 0, 0, 1, 0, 0], dtype=torch.int32))
    """

    uses_random = False

    def __init__(self, key: Any, n: int, on_short: str = "error", out: Any = None) -> None:
        self.key = unravel(key)
        if type(n) is not int or n == 0:
            raise ValueError(f"expected n as an int other than 0, got {n!r}")
        self.n, self.on_short = n, one_of("on_short", on_short, ("error", "mask", "clip"))
        if n < 0 and on_short == "error":
            raise ValueError("expected on_short='mask' or 'clip' for earlier rows, got 'error'")
        self.out: Path = (
            unravel(out) if out is not None else (*self.key[:-1], f"{self.key[-1]}{n:+d}")
        )
        self.valid: Path = (*self.out[:-1], f"{self.out[-1]}_valid")
        self.changes = frozenset({self.out, self.valid} if on_short == "mask" else {self.out})
        self.needs = Needs(future=n) if on_short == "error" else Needs()

    def fetch(self, around: Surroundings) -> tuple[Around, Array]:
        """Read the other rows."""
        time = around.time + self.n
        near = time.clip(around.first, around.last)
        valid = time == near
        if self.on_short == "error":
            real = True if around.mask is None else around.mask
            if (~valid & real).any():
                raise ValueError(
                    f"key {format_key(self.key)}: expected rows with {self.n} more rows in their "
                    f"episode, got {int((~valid & real).sum())} others; on_short='mask' or 'clip' "
                    "reads them, too"
                )
        return around.fetch([self.key], near), valid

    def apply(self, data: Any, fetched: tuple[Around, Array], around: Surroundings) -> Any:
        """Add the values."""
        rows, valid = fetched
        value = around.seen(rows)[self.key]
        if around.mask is not None:
            near = nearest_real(around)
            value = value[torch.from_numpy(near).to(value.device)]
            valid = valid[near]
        found = {self.out: value}
        if self.on_short == "mask":
            known = as_tensor_like(valid[:, None], value)
            found[self.out] = filled(value, ~known[:, 0], 0)
            found[self.valid] = known
        set_all(data, found)
        return data

    def __repr__(self) -> str:
        return f"Shift({format_key(self.key)}, {self.n}, {self.on_short!r})"


class WindowLast(HistoryTransform):
    """A transform that adds the value of the row after the window.

    It is the value of the row that follows the last real row of the window in its episode, such as
    an observation to bootstrap from. All rows of the window have the same value. Without windows,
    each row is a window. Samplers only draw windows that such a row follows.

    Args:
        key: a stored key.
        out: the new key. Default: ``<key>_last``.

    Raises:
        KeyError: on read, the key is not stored.
        ValueError: on another read than a draw, if the episode ends with the window.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from replaykit import LazyTensorStorage, ReplayBuffer, SliceSampler, WindowLast
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(9), sampler=SliceSampler(slice_len=2),
        ...                   transform=WindowLast("x"), batch_size=2)
        >>> done = torch.tensor([0, 0, 1, 0, 0], dtype=torch.bool)
        >>> _ = rb.extend(TensorDict({"x": torch.arange(5), "next": {"done": done}}, [5]))
        >>> rb.sample()["x_last"]
        tensor([2, 2])
    """

    uses_random = False
    needs = Needs(future=1)

    def __init__(self, key: Any, out: Any = None) -> None:
        self.key = unravel(key)
        self.out: Path = (*self.key[:-1], f"{self.key[-1]}_last") if out is None else unravel(out)
        self.changes = frozenset({self.out})

    def fetch(self, around: Surroundings) -> Around:
        """Read the rows after the windows."""
        at = last_real(around)
        time = around.time[at] + 1
        if (time > around.last[at]).any():
            raise ValueError(
                f"key {format_key(self.key)}: expected windows that a row of their episode "
                f"follows, got {int((time > around.last[at]).sum())} rows of others"
            )
        return around.fetch([self.key], time, around.lane[at])

    def apply(self, data: Any, fetched: Around, around: Surroundings) -> Any:
        """Add the values."""
        set_all(data, {self.out: around.seen(fetched)[self.key]})
        return data

    def __repr__(self) -> str:
        return f"WindowLast({format_key(self.key)})"


class Tag(HistoryTransform):
    """A transform that adds a tag of the episode of each window.

    The value of a window is repeated for its rows, as all values of windows are. ``rb.tag`` sets
    tags.

    Args:
        tag: name of the tag.
        out: the new key. Default: the name.

    Raises:
        KeyError: on read, no episode was given the tag.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from replaykit import LazyTensorStorage, ReplayBuffer, Tag
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(9), transform=Tag("task"))
        >>> done = torch.tensor([0, 1, 0, 0], dtype=torch.bool)
        >>> index = rb.extend(TensorDict({"x": torch.arange(4), "next": {"done": done}}, [4]))
        >>> _ = rb.tag(index[[0, 2]], {"task": torch.tensor([3, 5])})
        >>> rb[:]["task"]
        tensor([3, 3, 5, 5])
    """

    uses_random = False
    by_window = True
    """True if all rows of a window have the tag of its first episode."""

    def __init__(self, tag: str, out: Any = None) -> None:
        self.tag, self.out = tag, unravel(tag if out is None else out)
        self.changes = frozenset({self.out})

    def fetch(self, around: Surroundings) -> torch.Tensor:
        """Read the tags."""
        at = np.arange(len(around))
        if self.by_window and not around.alone and len(at):
            at = np.maximum.accumulate(np.where(np.diff(around.window, prepend=-1) != 0, at, 0))
        return around.tags(self.tag, around.time[at], around.lane[at])

    def apply(self, data: Any, fetched: torch.Tensor, around: Surroundings) -> Any:
        """Add the tags."""
        leaf = next(iter(data.values(True, True)))
        set_all(data, {self.out: fetched.to(leaf.device)})
        return data

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.tag!r})"


class ExpandTag(Tag):
    """A transform that adds the tag of its episode to each row.

    It differs from ``Tag`` only in windows that span the ends of episodes. The arguments are the
    same.

    Example:
        >>> from replaykit import ExpandTag
        >>> ExpandTag("task", out=("info", "task"))
        ExpandTag('task')
    """

    by_window = False

    def __init__(self, tag: str, out: Any = None) -> None:  # so that errors name this class
        super().__init__(tag, out)


_TOLERANCE = 1e-4
"""Seconds by which an offset may differ from a whole number of steps, as in LeRobot."""

_FARTHEST = 1 << 62
"""Steps whose sum with a time does not overflow int64."""


class _Group(NamedTuple):
    """The stored keys that have the same offsets, int64 ``[T]``."""

    offsets: Array
    keys: list[Path]


class Windows(HistoryTransform):
    """A transform that reads, for each key, the rows at some offsets from a row.

    A key with T offsets becomes a window ``[B, T, *F]``, in the order of the offsets. Windows stay
    in the episode of their row: an offset before its first or after its last row reads that row
    instead. A mask, bool ``[B, T]``, is True there. Its key is the key with the suffix ``_is_pad``.
    An open episode ends with its newest row.

    As ``transform=``, the other keys of the row stay as they are. As ``sample_unit=``, only the
    keys of ``offsets`` are read, and ``rb[...]`` returns rows without windows. Any sampler of
    single rows then draws the rows around which the windows lie.

    A row is not drawn if part of its history was overwritten or never stored. Windows of padding
    rows have the values of the nearest real row, and their masks are True.

    Args:
        offsets: for each key, numbers of rows or seconds from the row on. Negative ones are
            earlier. A string with dots, such as ``"observation.state"``, also names the nested
            key ``("observation", "state")``.
        unit: ``"steps"`` or ``"seconds"``.
        fps: rows per second, for ``"seconds"``. None: the ``fps`` of the data set.
        pad_after: rows whose windows have more padded rows than this after the end of the episode
            are not drawn. None: no limit.

    Raises:
        TypeError: ``offsets`` is not a mapping of keys to numbers.
        ValueError: a key has no offsets, or an option has an invalid value. An offset in seconds
            differs by more than 0.1 ms from a whole number of steps. A data set has another
            ``fps``, or there is none. A buffer also raises it if the sampler itself draws windows
            and the windows are its ``sample_unit``.
        KeyError: on read, a key is not stored, or a name with dots fits several stored keys. Or
            two names are those of one key.

    The windows equal those of LeRobot's ``delta_timestamps``. With the offsets ``range(-p, T - p)``
    and ``pad_after=q``, they are those of diffusion policy's ``SequenceSampler`` with
    ``sequence_length=T``, ``pad_before=p`` and ``pad_after=q``, for ``p + q < T``.

    Cost: one read of B * T rows for each key. Keys with the same offsets are read together.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from replaykit import LazyTensorStorage, ReplayBuffer, Windows
        >>> windows = Windows({"observation": [-1, 0], "action": range(3)})
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(9), transform=windows)
        >>> done = torch.tensor([0, 0, 0, 1], dtype=torch.bool)
        >>> step = torch.arange(4)
        >>> _ = rb.extend(TensorDict({"observation": step, "action": 10 * step,
        ...                           "next": {"done": done}}, [4]))
        >>> rb[:]["observation"].tolist()
        [[0, 0], [0, 1], [1, 2], [2, 3]]
        >>> rb[:]["action"][2].tolist(), rb[:]["action_is_pad"][2].tolist()
        ([20, 30, 30], [False, False, True])
    """

    uses_random = False

    def __init__(
        self,
        offsets: Mapping[Any, Sequence[float]],
        unit: str = "steps",
        *,
        fps: float | None = None,
        pad_after: int | None = None,
    ) -> None:
        if not isinstance(offsets, Mapping):
            raise TypeError(f"offsets: expected a mapping of keys to offsets, got {offsets!r}")
        if not offsets:
            raise ValueError("offsets: expected at least one key, got none")
        self.unit, self.fps = one_of("unit", unit, ("steps", "seconds")), None
        self.offsets = {key: _numbers(key, given) for key, given in offsets.items()}
        self.pad_after = None if pad_after is None else read_value(Count, pad_after, "pad_after")
        names = [path for key in self.offsets for path in _spellings(key)]
        self.changes = frozenset({*names, *map(_mask_of, names)})
        self._steps: dict[Any, Array] = {}
        self._known: tuple[Collection[Path], list[_Group]] | None = None
        if unit == "steps":
            if fps is not None:
                raise ValueError(f"fps: expected unit='seconds' with it, got {unit!r}")
            self._set_steps(1.0)
        elif fps is not None:
            self.fps = as_number("fps", fps, finite=True)
            self._set_steps(self.fps)

    def bind(self, fps: float | None) -> None:
        """Use the ``fps`` of a data set for offsets in seconds.

        Raises:
            ValueError: there is none, another one is known, or an offset is between two steps.
        """
        if self.unit == "steps" or (fps is None and self.fps is not None):
            return
        if fps is None:
            raise ValueError(
                "fps: expected a data set that states its fps, for offsets in seconds; pass "
                "Windows(..., fps=)"
            )
        if self.fps is None:
            self._set_steps(float(fps))
            self.fps = float(fps)
        elif not math.isclose(fps, self.fps, rel_tol=1e-9):
            raise ValueError(f"fps: expected {fps:g} as in the data set, got {self.fps:g}")

    def _set_steps(self, fps: float) -> None:
        if not fps > 0:
            raise ValueError(f"fps: expected a positive number, got {fps:g}")
        found = {}
        for key, numbers in self.offsets.items():
            for number in numbers:
                steps = number * fps
                if self.unit == "steps" and steps != round(steps):
                    raise ValueError(f"key {key!r}: expected whole offsets, got {number:g}")
                if abs(steps - round(steps)) > _TOLERANCE * fps:
                    raise ValueError(
                        f"key {key!r}: expected offsets that are multiples of 1/{fps:g} s, got "
                        f"{number:g} s, which is {steps:.6g} steps"
                    )
                if abs(steps) > _FARTHEST:
                    raise ValueError(
                        f"key {key!r}: expected offsets of at most {_FARTHEST} steps, got "
                        f"{number:g}"
                    )
            found[key] = np.array([round(number * fps) for number in numbers], np.int64)
        everything = np.concatenate(list(found.values()))
        ahead = 0 if self.pad_after is None else int(everything.max()) - self.pad_after
        self.needs = Needs(past=max(0, -int(everything.min())), future=max(0, ahead))
        self._steps = found

    # -- under the lock -------------------------------------------------------------------------

    def fetch(self, around: Surroundings) -> list[tuple[Array, Around | list[Path]]]:
        """Read the windows, and find the padding in them."""
        made: list[tuple[Array, Around | list[Path]]] = []
        first, last = around.first[:, None], around.last[:, None]
        for offsets, keys in self._groups(around.keys):
            time = around.time[:, None] + offsets
            near = np.minimum(np.maximum(time, first), last)
            padded = near != time
            if around.mask is not None:
                padded |= ~around.mask[:, None]
            # The batch has these values already.
            own = len(offsets) == 1 and not offsets[0] and not around.bare and around.mask is None
            made.append((padded, keys if own else around.fetch(keys, near)))
        return made

    def _groups(self, stored: Collection[Path]) -> list[_Group]:
        """Return the stored keys by their offsets; computed once per schema."""
        known = self._known
        if known is None or known[0] is not stored:
            groups: dict[bytes, _Group] = {}
            seen: dict[Path, Any] = {}
            for key, steps in self._steps.items():
                path = _resolved(key, stored)
                if seen.setdefault(path, key) != key:
                    raise KeyError(f"key {key!r}: expected another key than {seen[path]!r}")
                group = groups.setdefault(steps.tobytes(), _Group(steps, []))
                group.keys.append(path)
            known = self._known = stored, list(groups.values())
        return known[1]

    # -- without the lock -----------------------------------------------------------------------

    def apply(
        self,
        data: Any,
        fetched: list[tuple[Array, Around | list[Path]]],
        around: Surroundings,
    ) -> Any:
        """Replace values by windows, and add the masks."""
        values: dict[Path, torch.Tensor] = {}
        for (padded, rows), group in zip(fetched, self._groups(around.keys), strict=True):
            if isinstance(rows, Around):
                leaves = around.seen(rows)
            else:
                leaves = {key: data.get(key).unsqueeze(1) for key in rows}
            for key in group.keys:
                values[key] = leaves[key]
                values[_mask_of(key)] = as_tensor_like(padded, leaves[key])
        set_all(data, values)
        return data

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_known": None}

    def __repr__(self) -> str:
        keys = ", ".join(f"{key!r}: {list(numbers)}" for key, numbers in self.offsets.items())
        more = "" if self.unit == "steps" else ", 'seconds'"
        more += "" if self.fps is None else f", fps={self.fps:g}"
        more += "" if self.pad_after is None else f", pad_after={self.pad_after}"
        return f"Windows({{{keys}}}{more})"


def _numbers(key: Any, given: Any) -> list[float]:
    """Return the offsets of a key."""
    unravel(key)
    try:
        numbers = [as_number(f"key {key!r}", one, finite=True) for one in given]
    except TypeError as error:
        raise TypeError(f"key {key!r}: expected a list of offsets, got {given!r}") from error
    if not numbers:
        raise ValueError(f"key {key!r}: expected at least one offset, got none")
    return [int(number) if number.is_integer() else number for number in numbers]


def _spellings(key: Any) -> list[Path]:
    """Return the paths that a key may name: a string may be nested at each of its dots."""
    path = unravel(key)
    parts = path[0].split(".")
    if not isinstance(key, str) or not all(parts):
        return [path]
    inner = range(1, len(parts))
    return [
        tuple(".".join(parts[a:b]) for a, b in zip((0, *cuts), (*cuts, len(parts)), strict=True))
        for count in range(len(parts))
        for cuts in combinations(inner, count)
    ]


def _resolved(key: Any, stored: Collection[Path]) -> Path:
    """Return the stored path that a key names. Raises KeyError unless there is exactly one."""
    found = [path for path in _spellings(key) if path in stored]
    if len(found) == 1:
        return found[0]
    said = ", ".join(map(format_key, found or stored))
    if found:
        raise KeyError(f"key {key!r}: expected one key of that name, got {said}; pass a tuple")
    raise KeyError(
        f"key {key!r}: expected a key of the stored rows, got {said}; transforms that rename keys "
        "come after Windows"
    )


def _mask_of(key: Path) -> Path:
    return (*key[:-1], f"{key[-1]}_is_pad")
