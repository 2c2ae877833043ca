"""Stack the last frames of an episode."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np
import torch

from replaykit import native
from replaykit._compat import is_tensordict, lookup
from replaykit.episodes import Needs
from replaykit.structure import Path
from replaykit.ted import format_key, unravel
from replaykit.transforms.batch_values import over_features, real_of, set_all
from replaykit.transforms.history import (
    Around,
    HistoryTransform,
    Surroundings,
    as_tensor_like,
    require,
)

__all__ = ["FrameStream", "StackFrames", "arranged", "next_stack"]


def arranged(frames: torch.Tensor, how: StackFrames) -> torch.Tensor:
    """Frames ``[B, k, *F]`` as they lie in a stack.

    Raises:
        ValueError: ``dim`` out of range.
    """
    features = frames.ndim - 2
    if not features:
        if how.dim not in (0, -1):
            raise ValueError(f"dim: expected 0 or -1 for single numbers, got {how.dim}")
        return frames
    places = features + how.new_dim
    if not -places <= how.dim < places:
        raise ValueError(
            f"dim: expected one in [{-places}, {places}) for frames {list(frames.shape[2:])}, got "
            f"{how.dim}"
        )
    dim = how.dim % places
    if how.new_dim:
        return frames.movedim(1, 1 + dim)
    if not dim:
        return frames.flatten(1, 2)
    return frames.movedim(1, 1 + dim).flatten(1 + dim, 2 + dim)


def next_stack(before: torch.Tensor, following: torch.Tensor, how: StackFrames) -> torch.Tensor:
    """The stack of ``k - 1`` frames ``[B, k - 1, *F]`` and the one ``[B, *F]`` that follows."""
    return arranged(torch.cat([before, following.unsqueeze(1)], 1), how)


_WIDE_BYTES = 2**20
"""From this size on a copy is torch's, which has several threads for it."""


def followed(
    frames: torch.Tensor,
    features: torch.Size,
    skip: int,
    following: torch.Tensor,
    like: torch.Tensor,
    how: StackFrames,
) -> torch.Tensor:
    """``next_stack`` of frames in one piece, without the first ``skip`` of them.

    Args:
        frames: ``k - 1 + skip`` of them, as ``Surroundings.stacks`` gives them.
        features: ``F``.
        like: a stack in one piece that lies as the frames do.
    """
    count = how.k - 1 + skip
    # What follows may come from other transforms: in another dtype or shape, from another place.
    if (
        native.join_rows is None
        or type(following) is not torch.Tensor
        or following.dtype is not frames.dtype
        or not following.is_cpu
        or following.requires_grad
        or following.shape[0] != frames.shape[0]
        or following.shape[1:] != features
        or not _lies_alike(following, frames, len(features))
        or like.nbytes >= _WIDE_BYTES
    ):
        return next_stack(frames.view(-1, count, *features)[:, skip:], following, how)
    one = features.numel() * frames.dtype.itemsize
    stack = torch.empty_like(like)
    native.join_rows(
        frames.data_ptr() + skip * one,
        count * one,
        (count - skip) * one,
        following.data_ptr(),
        following.stride(0) * frames.dtype.itemsize,
        one,
        frames.shape[0],
        stack.data_ptr(),
    )
    return stack if how.flat else arranged(stack, how)


def _lies_alike(following: torch.Tensor, frames: torch.Tensor, features: int) -> bool:
    """Whether the values of one row lie next to each other as those of frames do."""
    if features == 1:
        return following.stride(1) == 1
    return following.stride()[1:] == frames.stride()[frames.ndim - features :]


class FrameStream:
    """Stacks the frames of a running roll-out: those of ``StackFrames``, one step at a time.

    Keeps ``k`` frames a lane. Made by ``StackFrames.stream()``.

    Cost: a copy of ``k`` frames a step.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from replaykit import StackFrames
        >>> stream = StackFrames(["x"], 3).stream()
        >>> for step in range(3):
        ...     found = stream(TensorDict({"x": torch.tensor([step, 10 * step])}, [2]),
        ...                    torch.tensor([step == 0, step != 1]))
        >>> found["x"].tolist()
        [[0, 1, 2], [20, 20, 20]]
    """

    def __init__(self, how: StackFrames) -> None:
        self._how = how
        self._frames: dict[Path, torch.Tensor] = {}

    @torch.no_grad()
    def __call__(self, data: Any, reset: torch.Tensor | None = None) -> Any:
        """Takes the next step of all lanes.

        Args:
            data: a TensorDict ``[lanes]`` with the keys; ``("next", key)`` is stacked too where it
                is there.
            reset: bool ``[lanes]`` (or ``[lanes, 1]``): where an episode begins with this step. At
                the first one it does everywhere.

        Returns:
            A copy with stacks in the place of the frames.

        Raises:
            TypeError: no TensorDict. KeyError: a key is absent. ValueError: other shapes or dtypes
                than before, or a ``reset`` that is not one bool a lane. Nothing has changed then.
        """
        if not is_tensordict(data):
            raise TypeError(f"expected a TensorDict [lanes], got {type(data).__name__}")
        if data.batch_dims != 1:
            raise ValueError(f"expected a TensorDict [lanes], got {list(data.batch_size)}")
        how, lanes = self._how, data.batch_size[0]
        begins = _one_a_lane(reset, lanes)
        frames = {}
        for key, frame in require(data, how.keys, how).items():
            frames[key] = self._taken(key, frame, begins)
        made = data.copy()
        if how.k > 1 or how.new_dim:
            for key, stack in frames.items():
                following = data.get(("next", *key), None)
                made.set(key, arranged(stack, how).clone())
                if following is not None:
                    made.set(("next", *key), next_stack(stack[:, 1:], following, how))
        self._frames = frames
        return made

    def reset(self) -> None:
        """Forgets all frames: episodes begin with the next step."""
        self._frames = {}

    def _taken(self, key: Path, frame: torch.Tensor, begins: torch.Tensor | None) -> torch.Tensor:
        """The frames ``[lanes, k, *F]`` of a key after one more."""
        how, old = self._how, self._frames.get(key)
        first = torch.zeros_like(frame) if how.pad == "zero" else frame
        fresh = torch.stack([first] * (how.k - 1) + [frame], 1)
        if old is None:
            return fresh
        if old.shape != fresh.shape or old.dtype != frame.dtype:
            raise ValueError(
                f"key {format_key(key)}: expected {old.dtype} {[len(old), *old.shape[2:]]} as in "
                f"the steps before, got {frame.dtype} {list(frame.shape)}"
            )
        on = torch.cat([old[:, 1:], frame.unsqueeze(1)], 1)
        if begins is None:
            return on
        return torch.where(over_features(begins.to(frame.device), on), fresh, on)


def _one_a_lane(reset: Any, lanes: int) -> torch.Tensor | None:
    if reset is None:
        return None
    if not isinstance(reset, torch.Tensor) or reset.dtype is not torch.bool:
        raise ValueError(f"reset: expected a bool tensor [{lanes}], got {reset!r}")
    if reset.shape not in ((lanes,), (lanes, 1)):
        raise ValueError(f"reset: expected shape [{lanes}], got {list(reset.shape)}")
    return reset.reshape(lanes)


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
