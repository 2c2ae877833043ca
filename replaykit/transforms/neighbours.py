"""Add values of other rows, and tags of episodes, to the rows of a batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from replaykit.episodes import Needs
from replaykit.keywords import one_of
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
