"""Sums of rewards over several steps, on the way in."""

from __future__ import annotations

from typing import Any

import torch

from replaykit._compat import is_tensordict, lookup
from replaykit.structure import Path
from replaykit.ted import EPISODE_KEYS, end_flags, format_key, unravel
from replaykit.transforms.base import Transform
from replaykit.transforms.discounting import (
    discounted_sums,
    is_set,
    one_step_key,
    steps_and_gamma,
    summable,
)

__all__ = ["NStepWriting"]


class NStepWriting(Transform):
    """Sums rewards over up to ``n`` steps before rows are stored: ``NStep(..., when="write")``.

    What is stored of a row is what ``NStep`` makes of it at read time, under the same keys. So a
    row can only be stored when the ``n - 1`` rows after it, or the end of its episode, are known:
    until then it is held back here, at most ``n - 1`` rows a lane, and is part of a checkpoint. How
    a stream is split into calls has no effect. With several lanes a time step is held back until
    all of them are known. ``ReplayBuffer.flush()`` has the rows that are left stored, cut short
    as at the newest row of an episode, and so ends the stream. ``ReplayBuffer.cut()`` does so, and
    the first write after ``loads`` or ``load_state_dict``: no sum goes over a restart.
    ``ReplayBuffer.empty()`` forgets them.

    An episode ends where ``done``, ``terminated`` or ``truncated`` under ``next`` is set, and
    between rows with different trajectory ids (``("collector", "traj_ids")``, ``episode``,
    ``seed``). Several of the rows that are stored carry the flags of its last one; to sample
    slices, sum at read time instead. ``rb[i] = rows`` goes this way too; do not replace rows so.

    Args:
        n: most steps.
        gamma: discount of one step, in ``[0, 1]``.
        reward_key: what is summed.
        time_dim: which batch dimension of what is written is time; the others are lanes.

    Raises:
        ValueError: ``n`` below 1, or ``gamma`` outside ``[0, 1]``; on writing, rows that do not fit
            those that are held back, or no such dimension. TypeError: no key, no number; on
            writing, something that is no TensorDict. KeyError: on writing, where there is no
            reward. Nothing has changed then.

    Cost: ``log2(n)`` passes over the rewards, and one over what is under ``next``.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from replaykit import LazyTensorStorage, NStep, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(9),
        ...                   transform=NStep(2, 0.5, when="write"))
        >>> row = TensorDict({"next": {"reward": torch.ones(1, 1),
        ...     "done": torch.zeros(1, 1, dtype=torch.bool)}}, [1])
        >>> rb.extend(row), rb.extend(row)
        (tensor([], dtype=torch.int64), tensor([0]))
        >>> rb.flush(), rb["next", "reward"].squeeze(-1)
        (tensor([1]), tensor([1.5000, 1.0000]))
    """

    ordered = False  # what it holds back is of writes

    def __init__(
        self,
        n: int,
        gamma: float = 0.99,
        *,
        reward_key: Any = ("next", "reward"),
        time_dim: int = -1,
    ) -> None:
        self.n, self.gamma = steps_and_gamma(n, gamma)
        if type(time_dim) is not int:
            raise TypeError(f"time_dim: expected an int, got {time_dim!r}")
        self.reward_key = unravel(reward_key)
        self.one_step_key = one_step_key(self.reward_key)
        self.time_dim = time_dim
        self._held: Any = None

    def forward(self, data: Any) -> Any:
        """Returns a batch as it is: what is stored is summed already."""
        return data

    @torch.no_grad()
    def inv(self, data: Any) -> Any:
        """Returns the rows that are complete now, in the order of time; None: there are none."""
        if not is_tensordict(data):
            raise TypeError(f"expected a TensorDict to sum rewards of, got {type(data).__name__}")
        dim = self._time_of(data)
        rows = data if self._held is None else self._with_held(data, dim)
        if not isinstance(lookup(rows, self.reward_key), torch.Tensor):
            raise KeyError(f"{self!r} expected the key {format_key(self.reward_key)}")
        found, ready = self._summed(rows, dim, closing=False)
        length = rows.batch_size[dim]
        held = rows.narrow(dim, ready, length - ready).clone() if ready < length else None
        made = found if ready else None
        self._held = held  # last: nothing has changed where something raised
        return made

    @torch.no_grad()
    def flush(self) -> Any:
        """Returns the rows that are held back, cut short where nothing is known; None: there are
        none. They are no longer held. ``ReplayBuffer.flush()`` also stores them."""
        rows = self._held
        if rows is None:
            return None
        found, _ = self._summed(rows, self._time_of(rows), closing=True)
        self._held = None
        return found

    def empty(self) -> None:
        """Forgets the rows that are held back; a buffer that is emptied does so."""
        self._held = None

    def _time_of(self, data: Any) -> int:
        dims = data.batch_dims
        if not -dims <= self.time_dim < dims:
            raise ValueError(
                f"time_dim: expected a batch dimension of rows {list(data.batch_size)}, got "
                f"{self.time_dim}"
            )
        return self.time_dim % dims

    def _with_held(self, data: Any, dim: int) -> Any:
        """Rows held back and those that follow; ValueError where they do not fit."""
        held = self._held
        old, new = _layout(held, dim), _layout(data, dim)
        if old != new:
            names = [format_key(key) for key in {**old, **new} if old.get(key) != new.get(key)]
            raise ValueError(
                f"expected rows like the {held.batch_size[dim]} held back by {self!r}, got others "
                f"under {', '.join(names)}"
            )
        return torch.cat([held, data.to(held.device) if held.device else data], dim)

    def _summed(self, rows: Any, dim: int, *, closing: bool) -> tuple[Any, int]:
        """The first rows, as far as they are known in all lanes, summed; and how many."""
        batch_dims = rows.batch_dims
        leaves = {
            key if isinstance(key, tuple) else (key,): leaf.movedim(dim, 0)
            for key, leaf in rows.items(True, True)
        }
        length = rows.batch_size[dim]
        ended = _ended(leaves, batch_dims)
        time = torch.arange(length, device=ended.device)
        time = time.view(-1, *[1] * (ended.ndim - 1))
        stop = torch.where(ended, time, length - 1)
        stop = stop.flip(0).cummin(0).values.flip(0)
        ahead = stop - time
        known = (ahead >= self.n - 1) | ended.gather(0, stop)
        ready = length
        if not closing:
            known = known.reshape(length, -1).all(1)
            ready = int(known.long().cumprod(0).sum())
        reward = leaves[self.reward_key]
        sums = discounted_sums(summable(reward), ahead, self.gamma, self.n)[:ready]
        steps = ahead.clamp(max=self.n - 1)[:ready]
        last = time[:ready] + steps
        made = rows.narrow(dim, 0, ready).copy()
        values: dict[Path, torch.Tensor] = {
            key: _rows_at(leaf, last)
            for key, leaf in leaves.items()
            if key[0] == "next" and key != self.reward_key
        }
        terminated = _terminated(leaves, ended)
        values |= {
            self.reward_key: sums,
            self.one_step_key: reward[:ready],
            ("discount",): (self.gamma ** (steps + 1).double()).to(sums.dtype).unsqueeze(-1),
            ("steps_used",): (steps + 1).unsqueeze(-1),
            ("bootstrap",): ~is_set(_rows_at(terminated, last), batch_dims).unsqueeze(-1),
        }
        for key, value in values.items():
            made.set(key, value.movedim(0, dim))
        return made, ready

    def state_dict(self) -> dict[str, Any]:
        """Returns a copy of the rows held back."""
        return {"held": None if self._held is None else self._held.clone()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over rows held back; ValueError where the state is none of this transform."""
        if not isinstance(state_dict, dict) or "held" not in state_dict:
            raise ValueError(f"expected a state with the key 'held', got {state_dict!r}")
        held = state_dict["held"]
        self._held = None if held is None else held.clone()

    def __repr__(self) -> str:
        key = self.reward_key
        shown = "" if key == ("next", "reward") else f", reward_key={format_key(key)}"
        return f"NStep({self.n}, gamma={self.gamma:g}{shown}, when='write')"


def _ended(leaves: dict[Path, torch.Tensor], batch_dims: int) -> torch.Tensor:
    """Bool ``[T, *lanes]``: rows after which another episode begins."""
    shape = next(iter(leaves.values())).shape[:batch_dims]
    device = next(iter(leaves.values())).device
    ended = torch.zeros(shape, dtype=torch.bool, device=device)
    for key in end_flags(leaves):
        ended |= is_set(leaves[key], batch_dims)
    for key in EPISODE_KEYS:
        ids = leaves.get(key)
        if ids is not None:
            ended[:-1] |= is_set(ids[1:] != ids[:-1], batch_dims)
    return ended


def _terminated(leaves: dict[Path, torch.Tensor], ended: torch.Tensor) -> torch.Tensor:
    """What terminated: what `terminated` says, or else what is done and not truncated."""
    flags = {key[-1]: is_set(leaves[key], ended.ndim) for key in end_flags(leaves)}
    if "terminated" in flags:
        return flags["terminated"]
    terminated = flags.get("done", torch.zeros_like(ended))
    return terminated & ~flags["truncated"] if "truncated" in flags else terminated


def _rows_at(leaf: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
    """Values of ``[T, *lanes, *F]`` at times ``[t, *lanes]``, each of its lane."""
    if time.ndim == 1:
        return leaf[time]
    at = time.reshape(*time.shape, *[1] * (leaf.ndim - time.ndim))
    return leaf.gather(0, at.expand(*time.shape, *leaf.shape[time.ndim :]))


def _layout(rows: Any, dim: int) -> dict[Path, Any]:
    """Dtype and shape of the leaves, time apart."""
    batch = list(rows.batch_size)
    del batch[dim]
    return {
        key if isinstance(key, tuple) else (key,): (
            leaf.dtype,
            tuple(batch),
            tuple(leaf.shape[rows.batch_dims :]),
        )
        for key, leaf in rows.items(True, True)
    }
