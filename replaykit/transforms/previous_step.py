"""What was done and what came of it in the step before; how many steps there were."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from replaykit.episodes import Needs
from replaykit.structure import Path
from replaykit.ted import format_key, unravel
from replaykit.transforms.batch_values import as_number, over_features, real_of, set_all, set_real
from replaykit.transforms.history import (
    Around,
    HistoryTransform,
    Surroundings,
    as_tensor_like,
)

__all__ = ["PreviousStep", "StepCount"]

_ALL: Path = ("previous_step",)


class PreviousStep(HistoryTransform):
    """Gives every row what the row before it in its episode has, such as action and reward.

    The value of ``"action"`` comes under ``"previous_action"``, that of ``("next", "reward")``
    under ``"previous_reward"``, and so on: ``next`` is left out, and the last part of the key gets
    the prefix. At the first row of an episode it is ``init``. Under ``("next", "previous_...")``
    are the row's own values, which are the previous ones of the state that follows; behind
    ``NStep`` those of the row that ``next`` comes from. All of it is read from the storage, so that
    the first row of a window in the middle of an episode has real values, and behind
    ``HindsightGoal`` relabelled ones.

    Args:
        keys: a list of keys.
        init: a number.
        concat: emit one floating tensor ``[B, A]`` under ``"previous_step"`` instead, in torch's
            default dtype: first the values of keys under ``next``, which is where rewards are, then
            the others, each flattened, in the order given.
        num_actions: with ``concat``, of how many columns one an action is that is stored as one
            integer.

    A row whose previous one was overwritten is not drawn; in ``rb[...]`` it gets ``init``. Padding
    has zeros.

    Raises:
        ValueError: no key, two that would come under one name, ``init`` that is not finite,
            ``num_actions`` without ``concat`` or below 1; on read, an action outside of
            ``[0, num_actions)``, one integer without it, or an ``init`` that the dtype does not
            have. TypeError: no key, no number. KeyError: on read, where a key is not stored.

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

    needs = Needs(past=1)

    def __init__(
        self,
        keys: Any = ("action", ("next", "reward")),
        init: float = 0,
        concat: bool = False,
        num_actions: int | None = None,
    ) -> None:
        if not isinstance(keys, (list, tuple)):
            raise TypeError(f"keys: expected a list of keys, got {keys!r}")
        self.keys = [unravel(key) for key in keys]
        if not self.keys:
            raise ValueError("keys: expected at least one key, got none")
        self.names = {key: _previous(key) for key in self.keys}
        if len(set(self.names.values())) < len(keys):
            raise ValueError(
                "keys: expected keys that differ in more than 'next', got "
                f"{', '.join(map(format_key, self.keys))}"
            )
        self.init = as_number("init", init, finite=True)
        if num_actions is not None:
            if not concat:
                raise ValueError("num_actions: only with concat=True are actions made columns")
            if type(num_actions) is not int or num_actions < 1:
                raise ValueError(f"num_actions: expected an int of at least 1, got {num_actions!r}")
        self.concat, self.num_actions = bool(concat), num_actions
        made = [_ALL] if concat else list(self.names.values())
        self.changes = frozenset({*made, *(("next", *key) for key in made)})

    def fetch(self, around: Surroundings) -> Around | list[list[torch.Tensor]]:
        """Reads the row before, and the one that comes before the state that follows."""
        around.next_made.append(self)
        keys = self._in_order() if self.concat else self.keys
        pairs = around.pairs(keys, joined=self.concat)
        if pairs is not None:
            return pairs
        own = around.time if around.next_time is None else around.next_time
        time = np.empty((len(own), 2), np.int64)
        np.maximum(around.time - 1, around.first, out=time[:, 0])
        time[:, 1] = own
        return around.fetch(self.keys, time)

    def apply(
        self, data: Any, fetched: Around | list[list[torch.Tensor]], around: Surroundings
    ) -> Any:
        """Adds the values of the step before."""
        blank = isinstance(fetched, list) and not self.init  # zeros are in their place
        found = self._pairs(fetched, around)
        begins = None
        values: dict[Path, torch.Tensor] = {}
        has_next = any(key[0] == "next" for key in around.keys)
        for name, (previous, own) in found.items():
            if not blank:
                if begins is None:
                    begins = as_tensor_like(around.time == around.first, previous)
                previous = self._started(name, previous, begins)
            values[name] = previous
            if has_next:
                under_next: Path = ("next", *name)
                values[under_next] = own
        set_real(data, values, around.mask)
        return data

    def _pairs(
        self, fetched: Around | list[list[torch.Tensor]], around: Surroundings
    ) -> dict[Path, Sequence[torch.Tensor]]:
        """By name the values of the row before, and those that come before the state after it."""
        if isinstance(fetched, list):
            return dict(zip([_ALL] if self.concat else self.names.values(), fetched, strict=True))
        leaves = around.seen(fetched)
        if self.concat:
            made = torch.cat([self._columns(key, leaves[key]) for key in self._in_order()], -1)
            return {_ALL: (made[:, 0], made[:, 1])}
        return {name: (leaves[key][:, 0], leaves[key][:, 1]) for key, name in self.names.items()}

    def _started(self, name: Path, values: torch.Tensor, begins: torch.Tensor) -> torch.Tensor:
        """Values of the step before ``[B, *F]``, with ``init`` where there was none."""
        init, dtype = self.init, values.dtype
        if not dtype.is_floating_point and not dtype.is_complex:
            low, high = (0, 1) if dtype is torch.bool else _limits(dtype)
            if not init.is_integer() or not low <= init <= high:
                raise ValueError(
                    f"init: expected a number that {dtype} has, for {format_key(name)}, got "
                    f"{init:g}"
                )
            return values.masked_fill(over_features(begins, values), int(init))
        return values.masked_fill(over_features(begins, values), init)

    def _in_order(self) -> list[Path]:
        return sorted(self.keys, key=lambda key: key[0] != "next")

    def _columns(self, key: Path, values: torch.Tensor) -> torch.Tensor:
        """Values ``[B, 2, *F]`` as columns ``[B, 2, A]``."""
        flat = values.reshape(*values.shape[:2], math.prod(values.shape[2:]))
        dtype = torch.get_default_dtype()
        number = flat.dtype.is_floating_point or flat.dtype is torch.bool or key[0] == "next"
        if number or flat.shape[-1] != 1:
            return flat.to(dtype)
        if self.num_actions is None:
            raise ValueError(
                f"key {format_key(key)}: one integer has to become columns; say of how many "
                "actions it is, num_actions="
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
        parts += ["concat=True"] if self.concat else []
        parts += [f"num_actions={self.num_actions}"] if self.num_actions else []
        return f"PreviousStep({', '.join(parts)})"


class StepCount(HistoryTransform):
    """Tells how many steps of its episode lie before a row, int64 ``[B, 1]``.

    Counted from where the episode began, also where its first rows were overwritten; where a stream
    was joined in the middle, from there. Padding has 0.

    Args:
        key: where it goes.

    Raises:
        TypeError: no key.

    Cost: O(B); reads nothing.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from replaykit import LazyTensorStorage, ReplayBuffer, StepCount
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(2), transform=StepCount())
        >>> _ = rb.extend(TensorDict({"next": {"done": torch.zeros(5, dtype=torch.bool)}}, [5]))
        >>> rb[:]["step_count"].squeeze(-1)  # the newest row, then the one before it
        tensor([4, 3])
    """

    def __init__(self, key: Any = "step_count") -> None:
        self.key = unravel(key)
        self.changes = frozenset({self.key})

    def apply(self, data: Any, fetched: None, around: Surroundings) -> Any:
        """Adds the count."""
        steps = around.time - around.begin
        leaf = next(iter(data.values(True, True)))
        real = real_of(around.mask, data)
        count = as_tensor_like(steps[:, None], leaf)
        if real is not None:
            count = count.masked_fill(~real[:, None], 0)
        set_all(data, {self.key: count})
        return data

    def __repr__(self) -> str:
        return f"StepCount({format_key(self.key)})"


def _previous(key: Path) -> Path:
    path = key[1:] if key[0] == "next" and len(key) > 1 else key
    return (*path[:-1], f"previous_{path[-1]}")


def _limits(dtype: torch.dtype) -> tuple[int, int]:
    limits = torch.iinfo(dtype)
    return limits.min, limits.max
