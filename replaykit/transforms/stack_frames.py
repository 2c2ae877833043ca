"""The last frames of an episode side by side."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np
import torch

from replaykit._compat import lookup
from replaykit.episodes import Needs
from replaykit.structure import Path
from replaykit.ted import format_key, unravel
from replaykit.transforms.batches import over_features, real_of, set_all
from replaykit.transforms.frame_stream import FrameStream, arranged, followed, next_stack
from replaykit.transforms.history import (
    Around,
    HistoryTransform,
    Surroundings,
    as_tensor_like,
    require,
)

__all__ = ["StackFrames"]

Array = np.ndarray[Any, Any]


class _Fetched(NamedTuple):
    """The frames of each row ``[B, k]``; those before ``next`` where that is of a later row."""

    frames: Around
    before_next: Around | None
    next_keys: set[Path]


class _Stacks(NamedTuple):
    """The same, as one leaf each and with zeros in place."""

    stacks: dict[Path, tuple[torch.Tensor, torch.Size]]
    before_next: dict[Path, tuple[torch.Tensor, torch.Size]] | None
    next_keys: set[Path]


class StackFrames(HistoryTransform):
    """Puts the last ``k`` frames side by side, oldest first, as they were at roll-out time.

    A row has the frames of the ``k - 1`` rows before it and its own. Before the beginning of its
    episode there are none: there, for each row of a window by itself, the first frame is repeated,
    or zeros are taken. ``("next", key)``, where there is one, becomes the last ``k - 1`` frames of
    the row and its next one, and so never has a frame of the episode that follows; behind ``NStep``
    it goes by the row that ``next`` comes from.

    Rows of which history is missing, since it was overwritten or never stored, are not drawn; in
    ``rb[...]`` they are treated as if their episode began where its stored part does.

    Args:
        keys: a list of keys, outside of ``next``.
        k: number of frames; 1 changes nothing but for ``new_dim``.
        dim: feature dimension along which they lie: ``[*F]`` with ``F[dim]`` times ``k``. A single
            number becomes ``[k]``.
        pad: "repeat" or "zero".
        new_dim: put them along a new dimension of size ``k`` at ``dim`` instead.

    Padding of windows has its own frame ``k`` times.

    Raises:
        ValueError: ``k`` below 1, an unknown ``pad``, a key under ``next`` or given twice, no key;
            on read, ``dim`` out of range. TypeError: no key, no int. KeyError: on read, where a
            key is absent.

    Cost: ``k`` frames a row read, of these keys alone, and ``k`` more copied for ``next``.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from replaykit import LazyTensorStorage, ReplayBuffer, StackFrames
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(9), transform=StackFrames(["pixels"], 3))
        >>> frames, ends = torch.arange(5), torch.tensor([False, False, True, False, False])
        >>> _ = rb.extend(TensorDict({"pixels": frames, "next": {"done": ends}}, [5]))
        >>> rb[:]["pixels"].tolist()
        [[0, 0, 0], [0, 0, 1], [0, 1, 2], [3, 3, 3], [3, 3, 4]]
    """

    def __init__(
        self, keys: Any, k: int, dim: int = 0, pad: str = "repeat", new_dim: bool = False
    ) -> None:
        if isinstance(keys, str):
            keys = [keys]
        if not isinstance(keys, (list, tuple)):
            raise TypeError(f"keys: expected a list of keys, got {keys!r}")
        self.keys = [unravel(key) for key in keys]
        if not self.keys:
            raise ValueError("keys: expected at least one key, got none")
        for key in self.keys:
            if key[0] == "next":
                raise ValueError(
                    f"keys: expected keys outside of 'next', whose stacks follow from them; got "
                    f"{format_key(key)}"
                )
            if self.keys.count(key) > 1:
                raise ValueError(f"keys: expected each key once, got {format_key(key)} twice")
        if type(k) is not int or k < 1:
            raise ValueError(f"k: expected an int of at least 1, got {k!r}")
        if type(dim) is not int:
            raise TypeError(f"dim: expected an int, got {dim!r}")
        if pad not in ("repeat", "zero"):
            raise ValueError(f"pad: expected 'repeat' or 'zero', got {pad!r}")
        self.k, self.dim, self.pad, self.new_dim = k, dim, pad, bool(new_dim)
        self.needs = Needs(past=k - 1)
        self.changes = frozenset({*self.keys, *(("next", *key) for key in self.keys)})
        self._next_of: dict[Path, Path] = {key: ("next", *key) for key in self.keys}
        self._known: tuple[Collection[Path], set[Path]] | None = None
        self._ages = np.arange(k - 1, -1, -1)
        self.flat = not dim and not new_dim

    # -- under the lock -----------------------------------------------------------------------

    def fetch(self, around: Surroundings) -> _Fetched | _Stacks | None:
        """Reads the frames of each row, and of the row that ``next`` is of."""
        if self.k == 1 and not self.new_dim:
            return None
        next_keys = self._with_next(around.keys)
        if next_keys:
            around.next_made.append(self)
        later = bool(next_keys) and around.next_time is not None and self.k > 1
        before = [key for key in self.keys if key in next_keys] if later else []
        return self._stacks(around, before, next_keys) or self._frames(around, before, next_keys)

    def _with_next(self, stored: Collection[Path]) -> set[Path]:
        """Keys that have a twin under ``next``; worked out once for what is stored."""
        known = self._known
        if known is None or known[0] is not stored:
            found = {key for key, following in self._next_of.items() if following in stored}
            known = self._known = stored, found
        return known[1]

    def _stacks(
        self, around: Surroundings, before: list[Path], next_keys: set[Path]
    ) -> _Stacks | None:
        """In one step, where the surroundings can and nothing is padding."""
        if self.k == 1 or around.mask is not None:
            return None
        zero, ahead = self.pad == "zero", None
        stacks = around.stacks(self.keys, self.k, zero=zero, flat=self.flat)
        if stacks is None:
            return None
        if before:
            ahead = around.stacks_before_next(before, self.k - 1, zero=zero, flat=self.flat)
            if ahead is None:
                return None
        return _Stacks(stacks, ahead, next_keys)

    def _frames(self, around: Surroundings, before: list[Path], next_keys: set[Path]) -> _Fetched:
        first = around.first[:, None]
        frames = around.fetch(self.keys, np.maximum(around.time[:, None] - self._ages, first))
        before_next = None
        if before:
            assert around.next_time is not None
            time = np.maximum(around.next_time[:, None] - self._ages[1:], first)
            before_next = around.fetch(before, time)
        return _Fetched(frames, before_next, next_keys)

    # -- without it ---------------------------------------------------------------------------

    def apply(self, data: Any, fetched: _Fetched | _Stacks | None, around: Surroundings) -> Any:
        """Replaces the frames by stacks of them."""
        if fetched is None:
            return data
        if isinstance(fetched, _Stacks):
            set_all(data, self._placed(data, fetched))
            return data
        own = require(data, self.keys, self)
        leaves = around.seen(fetched.frames)
        ahead = None if fetched.before_next is None else around.seen(fetched.before_next)
        real = real_of(around.mask, data)
        values: dict[Path, torch.Tensor] = {}
        for key in self.keys:
            frames = self._cleared(leaves[key], around.time, self._ages, around)
            before = frames[:, 1:]
            if ahead is not None and key in fetched.next_keys:
                assert around.next_time is not None
                before = self._cleared(ahead[key], around.next_time, self._ages[1:], around)
            under_next = self._next_of[key]
            following = lookup(data, under_next) if key in fetched.next_keys else None
            if following is not None:
                if real is not None:
                    before = _or_own(before, following, real)
                values[under_next] = next_stack(before, following, self)
            if real is not None:
                frames = _or_own(frames, own[key], real)
            values[key] = arranged(frames, self)
        set_all(data, values)
        return data

    def _placed(self, data: Any, fetched: _Stacks) -> dict[Path, torch.Tensor]:
        """Stacks by where they go."""
        values: dict[Path, torch.Tensor] = {}
        for key, (stack, features) in fetched.stacks.items():
            if lookup(data, key) is None:
                require(data, [key], self)
            under_next = self._next_of[key]
            following = lookup(data, under_next) if key in fetched.next_keys else None
            if following is not None:
                frames, skip = stack, 1
                if fetched.before_next is not None:
                    frames, skip = fetched.before_next[key][0], 0
                values[under_next] = followed(frames, features, skip, following, stack, self)
            values[key] = stack if self.flat else arranged(stack, self)
        return values

    def _cleared(
        self, frames: torch.Tensor, time: Array, ages: Array, around: Surroundings
    ) -> torch.Tensor:
        """Frames ``[B, k, *F]`` with zeros in the place of those before the episode's beginning."""
        if self.pad == "repeat":
            return frames
        before = time[:, None] - ages < around.first[:, None]
        if not before.any():
            return frames
        return frames.masked_fill(over_features(as_tensor_like(before, frames), frames), 0)

    # -- elsewhere ----------------------------------------------------------------------------

    def stream(self) -> FrameStream:
        """Returns what stacks the frames of a roll-out, step by step, as this does at read time."""
        return FrameStream(self)

    def tiled(self, bound: torch.Tensor) -> torch.Tensor:
        """Returns a bound ``[*F]`` of a frame as that of a stack.

        Raises:
            ValueError: ``dim`` out of range.

        Example:
            >>> import torch
            >>> from replaykit import StackFrames
            >>> StackFrames(["pixels"], 2).tiled(torch.tensor([255, 1]))
            tensor([255,   1, 255,   1])
        """
        if self.k == 1 and not self.new_dim:
            return bound.clone()
        frames = bound.expand(1, self.k, *bound.shape)
        return arranged(frames, self)[0].clone()

    def __repr__(self) -> str:
        parts = [f"[{', '.join(map(format_key, self.keys))}]", str(self.k)]
        parts += [f"dim={self.dim}"] if self.dim else []
        parts += ["pad='zero'"] if self.pad == "zero" else []
        parts += ["new_dim=True"] if self.new_dim else []
        return f"StackFrames({', '.join(parts)})"


def _or_own(frames: torch.Tensor, own: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """Frames of real rows, and of padding its own one repeated."""
    return torch.where(over_features(real, frames), frames, own.unsqueeze(1))
