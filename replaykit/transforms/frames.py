"""Stack past frames, add values of the previous step, and count steps."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np
import torch

from replaykit import native
from replaykit._compat import is_tensordict, lookup
from replaykit.declared import Positive, read_value
from replaykit.episodes import Needs
from replaykit.keywords import as_number, one_of, whole_number
from replaykit.structure import Path
from replaykit.ted import format_key, unravel
from replaykit.transfer import BatchMemory
from replaykit.transforms.batch_values import as_keys, real_of, set_all, set_real
from replaykit.transforms.history import (
    HistoryTransform,
    Stacks,
    Surroundings,
    as_tensor_like,
    filled,
    over_features,
    require_all,
)


def arranged(frames: torch.Tensor, how: StackFrames) -> torch.Tensor:
    """Return frames ``[B, k, *F]`` in the layout of a stack.

    Raises:
        ValueError: ``dim`` is out of range.
    """
    features = frames.ndim - 2
    if features and not how.dim and not how.new_dim:
        return frames.flatten(1, 2)
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
    return frames.movedim(1, 1 + dim).flatten(1 + dim, 2 + dim)


def next_stack(
    frames: torch.Tensor, skip: int, following: torch.Tensor, like: torch.Tensor, how: StackFrames
) -> torch.Tensor:
    """Return the stack of frames and the next frame ``[B, *F]``.

    Args:
        frames: ``[B, skip + k - 1, *F]``, of which the first ``skip`` are left out.
        like: any frames ``[B, k, *F]``.
    """
    # Another transform may have replaced the next frame by one of other dtype, shape or device.
    if (
        type(following) is not torch.Tensor
        or following.dtype is not frames.dtype
        or not (following.is_cpu and frames.is_cpu and like.is_contiguous())
        or following.requires_grad
        or following.shape[0] != frames.shape[0]
        or following.shape[1:] != like.shape[2:]
        or following.stride()[1:] != (strides := like.stride())[2:]
        or frames.stride()[1:] != strides[1:]
    ):
        return arranged(torch.cat([frames[:, skip:], following.unsqueeze(1)], 1), how)
    item, one = like.itemsize, strides[1] * like.itemsize
    stack = how.memory.new(like.shape, like.dtype)
    native.core.join_rows(
        frames.data_ptr() + skip * one,
        frames.stride(0) * item,
        (how.k - 1) * one,
        following.data_ptr(),
        following.stride(0) * item,
        one,
        frames.shape[0],
        stack.data_ptr(),
    )
    return arranged(stack, how)


class FrameStream:
    """The stacks of ``StackFrames`` during a roll-out, step by step.

    The stream keeps ``k`` frames per lane. ``StackFrames.stream()`` creates it.

    Cost: a copy of ``k`` frames per step.

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
        """Process the next step of all lanes.

        Args:
            data: a TensorDict ``[lanes]`` with the keys. If it has ``("next", key)``, that frame is
                stacked too.
            reset: bool ``[lanes]`` (or ``[lanes, 1]``), True in lanes where an episode begins with
                this step. At the first step an episode begins in every lane.

        Returns:
            A copy of the data with stacks in place of the frames.

        Raises:
            TypeError: the data is not a TensorDict.
            KeyError: a key is absent.
            ValueError: shapes or dtypes differ from the earlier steps, or ``reset`` does not have
                one bool per lane.

        After an error the stream is unchanged.
        """
        if not is_tensordict(data):
            raise TypeError(f"expected a TensorDict [lanes], got {type(data).__name__}")
        if data.batch_dims != 1:
            raise ValueError(f"expected a TensorDict [lanes], got {list(data.batch_size)}")
        how, lanes = self._how, data.batch_size[0]
        begins = _one_a_lane(reset, lanes)
        frames = {}
        for key, frame in require_all(data, how.keys, how).items():
            frames[key] = self._taken(key, frame, begins)
        made = data.copy()
        if how.k > 1 or how.new_dim:
            for key, stack in frames.items():
                following = data.get(("next", *key), None)
                made.set(key, arranged(stack, how).clone())
                if following is not None:
                    made.set(("next", *key), next_stack(stack, 1, following, stack, how))
        self._frames = frames
        return made

    def reset(self) -> None:
        """Forget all frames, so that the next step begins an episode in every lane."""
        self._frames = {}

    def _taken(self, key: Path, frame: torch.Tensor, begins: torch.Tensor | None) -> torch.Tensor:
        """Return the last frames ``[lanes, k, *F]`` of a key, including a new frame."""
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


class _Stacked(NamedTuple):
    """The frames of each row, and those before a ``next`` of a later row."""

    frames: Stacks
    before_next: Stacks | None
    next_keys: set[Path]


class StackFrames(HistoryTransform):
    """A transform that stacks the last ``k`` frames, oldest first.

    Stacks are the same as during a roll-out. The stack of a row has the frames of the ``k - 1``
    rows before it, and its own frame. At the beginning of an episode earlier frames do not exist.
    There the transform repeats the first frame, or uses zeros. Each row of a window gets a separate
    stack.

    If ``("next", key)`` is stored, it becomes a stack of the last ``k - 1`` frames of the row and
    its next frame. So this stack never has a frame of the following episode. After ``NStep``, it is
    the next stack of the row that ``next`` comes from.

    A row is not drawn if part of its history was overwritten or never stored. ``rb[...]`` still
    returns such a row. It treats the first stored row as the beginning of the episode.

    Args:
        keys: a list of keys, outside of ``next``.
        k: number of frames; 1 changes nothing except with ``new_dim``.
        dim: feature dimension along which frames are joined. Its size is multiplied by ``k``. A
            frame that is a single number becomes ``[k]``.
        pad: treatment of frames before the episode: "repeat" the first frame, or "zero".
        new_dim: if True, stack frames along a new dimension of size ``k`` at ``dim`` instead.

    The stack of a padding row is its own frame, repeated ``k`` times.

    Raises:
        ValueError: ``k`` is below 1, ``pad`` is unknown, ``keys`` is empty, or a key is under
            ``next`` or is given twice; on read, ``dim`` is out of range.
        TypeError: ``keys`` is not a list of keys, or ``k`` or ``dim`` not an int.
        KeyError: on read, a key is absent.

    Cost: for each row, a read of ``k`` frames of these keys, and a copy of ``k`` more frames for
    ``next``.

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

    uses_random = False

    def __init__(
        self, keys: Any, k: int, dim: int = 0, pad: str = "repeat", new_dim: bool = False
    ) -> None:
        self.keys = as_keys([keys] if isinstance(keys, str) else keys)
        for key in self.keys:
            if key[0] == "next":
                raise ValueError(
                    f"keys: expected keys outside of 'next', got {format_key(key)}; "
                    "StackFrames makes the stacks under 'next' from them"
                )
            if self.keys.count(key) > 1:
                raise ValueError(f"keys: expected each key once, got {format_key(key)} twice")
        read_value(Positive, k, "k")
        whole_number("dim", dim)
        one_of("pad", pad, ("repeat", "zero"))
        self.k, self.dim, self.pad, self.new_dim = k, dim, pad, bool(new_dim)
        self.needs = Needs(past=k - 1)
        self.changes = frozenset({*self.keys, *(("next", *key) for key in self.keys)})
        self._next_of: dict[Path, Path] = {key: ("next", *key) for key in self.keys}
        self._known: tuple[Collection[Path], set[Path]] | None = None
        self.memory = BatchMemory()  # of the stacks under "next"

    # -- under the lock -----------------------------------------------------------------------

    def fetch(self, around: Surroundings) -> _Stacked | None:
        """Read the frames of each row, and of the row that ``next`` comes from."""
        if self.k == 1 and not self.new_dim:
            return None
        next_keys, zero, ahead = self._with_next(around.keys), self.pad == "zero", None
        if next_keys:
            around.next_made.append(self)
            if around.next_time is not None and self.k > 1:
                before = [key for key in self.keys if key in next_keys]
                ahead = around.stacks(before, self.k - 1, zero=zero, at_next=True)
        return _Stacked(around.stacks(self.keys, self.k, zero=zero), ahead, next_keys)

    def _with_next(self, stored: Collection[Path]) -> set[Path]:
        """Return the keys that are also stored under ``next``; computed once per schema."""
        known = self._known
        if known is None or known[0] is not stored:
            found = {key for key, following in self._next_of.items() if following in stored}
            known = self._known = stored, found
        return known[1]

    # -- without the lock ---------------------------------------------------------------------

    def apply(self, data: Any, fetched: _Stacked | None, around: Surroundings) -> Any:
        """Replace the frames by stacks."""
        if fetched is None:
            return data
        own = require_all(data, self.keys, self)
        leaves = around.frames(fetched.frames)
        ahead = None if fetched.before_next is None else around.frames(fetched.before_next)
        real = real_of(around.mask, data)
        values: dict[Path, torch.Tensor] = {}
        for key in self.keys:
            frames, under_next = leaves[key], self._next_of[key]
            following = lookup(data, under_next) if key in fetched.next_keys else None
            if following is not None:
                before, skip = (frames, 1) if ahead is None else (ahead[key], 0)
                if real is not None:
                    before = _or_own(before, following, real)
                values[under_next] = next_stack(before, skip, following, frames, self)
            if real is not None:
                frames = _or_own(frames, own[key], real)
            values[key] = arranged(frames, self)
        set_all(data, values)
        return data

    # -- outside of batches -------------------------------------------------------------------

    def stream(self) -> FrameStream:
        """Return a ``FrameStream`` that makes the same stacks during a roll-out."""
        return FrameStream(self)

    def tiled(self, bound: torch.Tensor) -> torch.Tensor:
        """Return the bound of a stack, given the bound ``[*F]`` of a frame.

        Raises:
            ValueError: ``dim`` is out of range.

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
    """Return the frames of real rows, and for each padding row its own frame repeated."""
    return torch.where(over_features(real, frames), frames, own.unsqueeze(1))


Array = np.ndarray[Any, Any]

_ALL: Path = ("previous_step",)

PREVIOUS = "previous"
"""Key of stored values of the row before."""
VALID: Path = (PREVIOUS, "valid")
"""Key of the flag that the row before is of the same episode."""
STEPS: Path = (PREVIOUS, "steps")
"""Key of the number of earlier rows of the episode."""


class PreviousStep(HistoryTransform):
    """A transform that adds values of the previous row, such as its action and reward.

    Values come from the same episode. The new key is the old key without ``next``, and with the
    prefix ``previous_`` in its last part. So ``"action"`` becomes ``"previous_action"``, and
    ``("next", "reward")`` becomes ``"previous_reward"``. At the first row of an episode the value
    is ``init``.

    ``("next", "previous_...")`` has the row's own values, because they precede the next state.
    After ``NStep``, this key has the values of the row that ``next`` comes from. All values are
    read from the storage. So even the first row of a window in the middle of an episode has real
    values. After ``HindsightGoal``, the values have the new goals and rewards.

    Args:
        keys: a list of keys.
        init: the number to use at the first row of an episode.
        concat: if True, write one floating tensor ``[B, A]`` to ``"previous_step"`` instead, in
            torch's default dtype. It has first the values of keys under ``next``, such as rewards,
            and then the other values. Each value is flattened. The given order is kept in both
            groups.
        num_actions: with ``concat``, the number of one-hot columns of an action that is stored as
            one integer.
        stored: use columns under ``"previous"``, as a TrajectoryWriter with ``previous=`` writes
            them, for rows whose row before is not in the storage. All rows are then drawn.

    A row is not drawn if the row before it was overwritten. ``rb[...]`` returns such a row with
    ``init``. Padding rows have zeros.

    Raises:
        ValueError: ``keys`` is empty or two keys get the same name, ``init`` is not finite, or
            ``num_actions`` is below 1 or given without ``concat``; on read, an action is outside of
            ``[0, num_actions)``, ``num_actions`` is missing, or the dtype of a value cannot hold
            ``init``.
        TypeError: an argument is not a list of keys or a number.
        KeyError: on read, a key is not stored.

    Cost: one read of the keys for two rows.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from replaykit import LazyTensorStorage, PreviousStep, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(9), transform=PreviousStep(["action"]))
        >>> ends = torch.tensor([False, True, False])
        >>> _ = rb.extend(TensorDict({"action": torch.tensor([5, 6, 7]), "next": {"done": ends}},
        ...                          [3]))
        >>> rb[:]["previous_action"], rb[:]["next", "previous_action"]
        (tensor([0, 5, 0]), tensor([5, 6, 7]))
    """

    uses_random = False
    needs = Needs(past=1)

    def __init__(
        self,
        keys: Any = ("action", ("next", "reward")),
        init: float = 0,
        concat: bool = False,
        num_actions: int | None = None,
        stored: bool = False,
    ) -> None:
        self.keys, self.stored = as_keys(keys), bool(stored)
        if stored:
            self.needs = Needs()
        self.names = {key: _previous(key) for key in self.keys}
        if len(set(self.names.values())) < len(keys):
            raise ValueError(
                "keys: expected keys that differ in more than 'next', got "
                f"{', '.join(map(format_key, self.keys))}"
            )
        self.init = as_number("init", init, finite=True)
        if num_actions is not None:
            if not concat:
                raise ValueError("num_actions: expected concat=True, got concat=False")
            read_value(Positive, num_actions, "num_actions")
        self.concat, self.num_actions = bool(concat), num_actions
        made = [_ALL] if concat else list(self.names.values())
        self.changes = frozenset({*made, *(("next", *key) for key in made)})

    def fetch(self, around: Surroundings) -> tuple[Stacks, Stacks | None]:
        """Read the row before each row, and the row that ``next`` comes from."""
        around.next_made.append(self)
        pairs = around.stacks(self.keys, 2, zero=True)
        if around.next_time is None:
            return pairs, None
        return pairs, around.stacks(self.keys, 1, at_next=True)

    def apply(self, data: Any, fetched: tuple[Stacks, Stacks | None], around: Surroundings) -> Any:
        """Add the values of the previous step."""
        pairs, ahead = fetched
        leaves = around.frames(pairs)
        if ahead is not None:
            for key, own in around.frames(ahead).items():
                leaves[key][:, 1:] = own
        begins = None
        # Zeros of actions become columns that are not zero.
        if self.init or self.num_actions is not None or self.stored:
            begins = around.time == around.first
            if self.stored:
                begins &= ~self._restore(data, leaves, begins)
        values: dict[Path, torch.Tensor] = {}
        has_next = any(key[0] == "next" for key in around.keys)
        for name, pair in self._pairs(leaves).items():
            previous = pair[:, 0]
            if begins is not None:
                previous = self._started(name, previous, as_tensor_like(begins, previous))
            values[name] = previous
            if has_next:
                under_next: Path = ("next", *name)
                values[under_next] = pair[:, 1]
        set_real(data, values, around.mask)
        return data

    def _restore(self, data: Any, leaves: dict[Path, torch.Tensor], begins: Array) -> Array:
        """Set values before the first stored rows of episodes; return these rows, bool ``[B]``."""
        columns = {key: lookup(data, (PREVIOUS, *key)) for key in self.keys}
        columns[VALID] = lookup(data, VALID)
        for key, column in columns.items():
            if column is None:
                raise KeyError(
                    f"stored=True expected the column of {format_key(key)} under 'previous'"
                )
        held = begins & columns[VALID].flatten().cpu().numpy()
        at = torch.from_numpy(held.nonzero()[0]).to(columns[VALID].device)
        for key in self.keys:
            pair = leaves[key]
            pair[at, 0] = columns[key][at].reshape(pair[at, 0].shape)
        return held

    def _pairs(self, leaves: dict[Path, torch.Tensor]) -> dict[Path, torch.Tensor]:
        """Return, by name, the values of the previous row and of the row of ``next``."""
        if self.concat:
            ordered = sorted(self.keys, key=lambda key: key[0] != "next")
            return {_ALL: torch.cat([self._columns(key, leaves[key]) for key in ordered], -1)}
        return {name: leaves[key] for key, name in self.names.items()}

    def _started(self, name: Path, values: torch.Tensor, begins: torch.Tensor) -> torch.Tensor:
        """Return values ``[B, *F]`` with ``init`` at the first rows of episodes."""
        init, dtype = self.init, values.dtype
        if not dtype.is_floating_point and not dtype.is_complex:
            low, high = 0, 1
            if dtype is not torch.bool:
                low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
            if not init.is_integer() or not low <= init <= high:
                raise ValueError(
                    f"init: expected a number that {dtype} can hold, for {format_key(name)}, got "
                    f"{init:g}"
                )
            init = int(init)
        return filled(values, begins, init)

    def _columns(self, key: Path, values: torch.Tensor) -> torch.Tensor:
        """Return values ``[B, 2, *F]`` as columns ``[B, 2, A]``."""
        flat, dtype = values, torch.get_default_dtype()
        if values.ndim != 3:
            flat = values.reshape(*values.shape[:2], math.prod(values.shape[2:]))
        number = flat.dtype.is_floating_point or flat.dtype is torch.bool or key[0] == "next"
        if number or flat.shape[-1] != 1:
            return flat if flat.dtype is dtype else flat.to(dtype)
        if self.num_actions is None:
            raise ValueError(
                f"key {format_key(key)}: expected num_actions= for an action of one integer, got "
                "None; pass the number of actions"
            )
        if flat.device.type == "cpu" and not bool(((flat >= 0) & (flat < self.num_actions)).all()):
            raise ValueError(
                f"key {format_key(key)}: expected actions in [0, {self.num_actions}), got "
                f"{int(flat.min())} to {int(flat.max())}"
            )
        return (flat == torch.arange(self.num_actions, device=flat.device)).to(dtype)

    def __repr__(self) -> str:
        parts = [f"[{', '.join(map(format_key, self.keys))}]"]
        parts += [f"init={self.init:g}"] if self.init else []
        parts += ["stored=True"] if self.stored else []
        parts += ["concat=True"] if self.concat else []
        parts += [f"num_actions={self.num_actions}"] if self.num_actions else []
        return f"PreviousStep({', '.join(parts)})"


class StepCount(HistoryTransform):
    """A transform that adds the count of earlier steps of the episode.

    The count is int64 ``[B, 1]``. It includes the first rows of the episode even if these rows were
    overwritten. If the buffer received only the later part of an episode, or if other streams have
    overwritten all rows of the episode, the count begins with the next part. Padding rows have 0.

    Args:
        key: key of the count.
        stored: use the counts that a TrajectoryWriter with ``previous=`` writes. They include rows
            of the episode that the buffer never received.

    Raises:
        TypeError: ``key`` is not a key.
        KeyError: on read, with ``stored``, the rows have no counts.

    Cost: O(B), without reading rows.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from replaykit import LazyTensorStorage, ReplayBuffer, StepCount
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(2), transform=StepCount())
        >>> _ = rb.extend(TensorDict({"next": {"done": torch.zeros(5, dtype=torch.bool)}}, [5]))
        >>> rb[:]["step_count"].squeeze(-1)  # the newest row, then the one before it
        tensor([4, 3])
    """

    uses_random = False

    def __init__(self, key: Any = "step_count", stored: bool = False) -> None:
        self.key, self.stored = unravel(key), bool(stored)
        self.changes = frozenset({self.key})

    def apply(self, data: Any, fetched: None, around: Surroundings) -> Any:
        """Add the count."""
        leaf = next(iter(data.values(True, True)))
        real = real_of(around.mask, data)
        count = as_tensor_like((around.time - around.begin)[:, None], leaf)
        if self.stored:
            if (found := lookup(data, STEPS)) is None:
                raise KeyError(f"stored=True expected the column {format_key(STEPS)}")
            count = found.reshape(count.shape)
        if real is not None:
            count = count.masked_fill(~real[:, None], 0)
        set_all(data, {self.key: count})
        return data

    def __repr__(self) -> str:
        return f"StepCount({format_key(self.key)})"


def _previous(key: Path) -> Path:
    path = key[1:] if key[0] == "next" and len(key) > 1 else key
    return (*path[:-1], f"previous_{path[-1]}")
