"""Read windows of rows around each row, with different offsets for each key."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import torch

from replaykit.declared import Count, read_value
from replaykit.episodes import Needs
from replaykit.keywords import one_of
from replaykit.structure import Path
from replaykit.ted import format_key, unravel
from replaykit.transforms.batch_values import as_number, set_all
from replaykit.transforms.history import Around, HistoryTransform, Surroundings, as_tensor_like

Array = np.ndarray[Any, Any]

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
    expected = "one key of that name" if found else "a stored key"
    raise KeyError(f"key {key!r}: expected {expected}, got {said}; pass a tuple of names")


def _mask_of(key: Path) -> Path:
    return (*key[:-1], f"{key[-1]}_is_pad")
