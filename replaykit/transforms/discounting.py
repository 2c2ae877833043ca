"""Sum discounted rewards, and mark the rows from which a target may bootstrap."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from replaykit._compat import lookup
from replaykit.declared import Positive, read_value
from replaykit.episodes import EndReason
from replaykit.structure import Path
from replaykit.ted import TERMINATED, format_key, unravel
from replaykit.transforms.batch_values import as_share, last_real, set_all, set_real
from replaykit.transforms.history import (
    HistoryTransform,
    Surroundings,
    as_tensor_like,
    over_features,
)

Array = np.ndarray[Any, Any]


def steps_and_gamma(n: Any, gamma: Any) -> tuple[int, float]:
    """Return both arguments as numbers.

    Raises:
        TypeError: ``gamma`` is not a number.
        ValueError: ``n`` is not an int of at least 1, or ``gamma`` is outside ``[0, 1]``.
    """
    read_value(Positive, n, "n")
    return n, as_share("gamma", gamma)


def one_step_key(reward_key: Path) -> Path:
    """Return the key of the one-step reward: the given key with the suffix ``_1``."""
    return (*reward_key[:-1], f"{reward_key[-1]}_1")


def summable(reward: torch.Tensor) -> torch.Tensor:
    """Return rewards in the dtype of their discounted sum.

    Floating rewards keep their dtype. Other rewards are converted to torch's default dtype.
    """
    return reward if reward.dtype.is_floating_point else reward.to(torch.get_default_dtype())


def is_set(flag: torch.Tensor, rows: int) -> torch.Tensor:
    """Return a bool mask of the rows in which a flag is set.

    The mask has the first ``rows`` dimensions of the flag. A flag of several numbers is set if any
    of these numbers is not zero.
    """
    found = flag if flag.dtype is torch.bool else flag != 0
    if found.ndim == rows:
        return found
    found = found.flatten(rows)
    return found[..., 0] if found.shape[-1] == 1 else found.any(-1)


def powers(gamma: float, steps: Array, like: torch.Tensor) -> torch.Tensor:
    """Return ``gamma ** steps``, ``[..., 1]``, with the dtype and device of a leaf."""
    values = np.power(gamma, steps, dtype=np.float64)[..., None]
    if like.dtype is torch.float32:
        values = values.astype(np.float32)
    return torch.from_numpy(values).to(like.device, like.dtype)


def discounted_sums(
    reward: torch.Tensor, ahead: torch.Tensor, gamma: float, n: int | None
) -> torch.Tensor:
    """Return the discounted sum of up to ``n`` rewards that begins at each row.

    The sum of row t adds ``gamma ** k * reward[t + k]`` for k = 0, 1, ...

    Args:
        reward: floating, ``[T, *lanes, *F]``, in the order of time.
        ahead: int64 ``[T, *lanes]``, the largest number of later rows that each sum includes.
        n: the largest number of rewards in a sum; None: no limit except ``ahead``.

    Cost: ``log2(n)`` passes over the rewards. Each pass doubles the length of the sums: 1, 2, 4,
    ... rows.
    """
    longest = int(ahead.max()) + 1 if ahead.numel() else 1
    left = longest if n is None else min(n, longest)
    if not gamma or left <= 1:
        return reward.clone()
    block = reward.float() if reward.dtype.itemsize < 4 else reward
    reach = over_features(ahead, reward)
    sums: torch.Tensor | None = None
    size = 1
    while True:
        if left & 1:
            sums = block if sums is None else _joined(block, sums, size, reach, gamma)
        left >>= 1
        if not left:
            assert sums is not None
            return sums.to(reward.dtype)
        block = _joined(block, block, size, reach, gamma)
        size *= 2


def _joined(
    first: torch.Tensor, then: torch.Tensor, size: int, reach: torch.Tensor, gamma: float
) -> torch.Tensor:
    """Add to each sum over ``size`` rows the sum that begins ``size`` rows later."""
    later = torch.zeros_like(then)
    later[:-size] = then[size:]
    # Select values instead of multiplying by 0, because rewards of other episodes may be infinite.
    return first + gamma**size * torch.where(reach >= size, later, torch.zeros_like(later))


def discounted_returns(values: Array, stops: Array, gamma: float) -> Array:
    """Add to each row the discounted values of later rows, up to the next stop.

    Args:
        values: float64 ``[n, *F]``; changed in place and returned.
        stops: bool ``[n]``, True at the last row of a sum. ``stops`` must be True at the very last
            row.

    Cost: O(n log m) with m rows between two stops. Every pass doubles the number of rows in a sum.

    Example:
        >>> import numpy as np
        >>> from replaykit.transforms.discounting import discounted_returns
        >>> discounted_returns(np.array([1.0, 2.0, 4.0]), np.array([False, False, True]), 0.5)
        array([3., 4., 4.])
    """
    at = np.nonzero(stops)[0]
    rest = at[np.cumsum(stops) - stops] - np.arange(len(stops))  # later rows in the same sum
    reach = 1
    longest = int(rest.max(initial=0))
    while reach <= longest and gamma > 0:
        on = np.nonzero(rest >= reach)[0]
        values[on] += gamma**reach * values[on + reach]
        reach *= 2
    return values


def open_by_reason(around: Surroundings, last: Array, like: torch.Tensor) -> torch.Tensor:
    """Return a mask of the rows ``last`` that did not terminate, bool ``[B, 1]``.

    The mask follows from the episode index.
    """
    ended = (last == around.last) & (around.reason == int(EndReason.TERMINATED))
    return as_tensor_like(~ended[:, None], like)


class Bootstrap(HistoryTransform):
    """A transform that adds ``"bootstrap"``, the mask for the value of the next state.

    The mask is bool ``[B, 1]``. It is False at rows where ``boundary`` is set, because the episode
    terminated there. It is True at time limits, at cuts and at the newest row of an episode, even
    if ``done`` is set. ``NStep`` also writes ``"bootstrap"``, so use this transform for one-step
    losses only. If ``("next", "terminated")`` is not stored, the mask is False at the rows that
    terminated according to the episode index.

    Args:
        boundary: the flag that ends bootstrapping, for example a separate flag for a lost life.
        per_window: give all rows of a window the value at its last real row. This value is False
            only if the window reaches the end of an episode that terminated.

    Raises:
        TypeError: ``boundary`` is not a key.
        KeyError: on read, a custom ``boundary`` is absent.

    Cost: one pass over the column ``boundary``.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from replaykit import Bootstrap, LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(9), transform=Bootstrap())
        >>> flags = torch.tensor([[False], [True]])
        >>> _ = rb.extend(TensorDict({"next": {"terminated": flags, "done": flags}}, [2]))
        >>> rb[:]["bootstrap"].squeeze(-1)
        tensor([ True, False])
    """

    uses_random = False

    def __init__(self, boundary: Any = TERMINATED, per_window: bool = False) -> None:
        self.boundary = unravel(boundary)
        self.per_window = bool(per_window)
        self.changes = frozenset({("bootstrap",)})

    def apply(self, data: Any, fetched: None, around: Surroundings) -> Any:
        """Add the mask."""
        flag = lookup(data, self.boundary)
        if flag is not None:
            bootstrap = ~is_set(flag, 1).unsqueeze(-1)
        elif self.boundary == TERMINATED:
            time = around.time if around.next_time is None else around.next_time
            bootstrap = open_by_reason(around, time, next(iter(data.values(True, True))))
        else:
            raise KeyError(f"{self!r}: expected the key {format_key(self.boundary)} in the batch")
        if self.per_window:
            set_all(data, {("bootstrap",): bootstrap[as_tensor_like(last_real(around), bootstrap)]})
        else:
            set_real(data, {("bootstrap",): bootstrap}, around.mask)
        return data

    def __repr__(self) -> str:
        parts = [] if self.boundary == TERMINATED else [format_key(self.boundary)]
        parts += ["per_window=True"] if self.per_window else []
        return f"Bootstrap({', '.join(parts)})"
