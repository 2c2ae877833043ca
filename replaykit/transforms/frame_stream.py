"""Stacks of frames: how they lie, and how they are made while an episode runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from replaykit import native
from replaykit._compat import is_tensordict
from replaykit.structure import Path
from replaykit.ted import format_key
from replaykit.transforms.batches import over_features
from replaykit.transforms.history import require

if TYPE_CHECKING:
    from replaykit.transforms.stack_frames import StackFrames

__all__ = ["FrameStream", "arranged", "next_stack"]


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
