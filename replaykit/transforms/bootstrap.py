"""Which rows a target may bootstrap from."""

from __future__ import annotations

from typing import Any

from replaykit._compat import lookup
from replaykit.episodes import EndReason
from replaykit.ted import format_key, unravel
from replaykit.transforms.batches import set_all, set_real
from replaykit.transforms.discounting import TERMINATED, is_set
from replaykit.transforms.history import HistoryTransform, Surroundings, as_tensor_like
from replaykit.transforms.windows import last_real

__all__ = ["Bootstrap"]


class Bootstrap(HistoryTransform):
    """Adds ``"bootstrap"``, bool ``[B, 1]``: whether the value of the next state counts in a
    target.

    False where the row is marked by ``boundary``: it terminated. True at time limits, cuts and the
    newest row of an episode, whatever ``done`` says. The same key as that of ``NStep``, for losses
    of one step. Without ``("next", "terminated")`` the episode index tells what terminated.

    Args:
        boundary: the flag that ends bootstrapping, such as a lost life under a key of its own.
        per_window: give all rows of a window the value at its last real row: False only if the
            window reaches the end of an episode that terminated.

    Raises:
        TypeError: no key. KeyError: on read, where a ``boundary`` of one's own is absent.

    Cost: one pass over the flag.

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

    def __init__(self, boundary: Any = TERMINATED, per_window: bool = False) -> None:
        self.boundary = unravel(boundary)
        self.per_window = bool(per_window)
        self.changes = frozenset({("bootstrap",)})

    def apply(self, data: Any, fetched: None, around: Surroundings) -> Any:
        """Adds the mask."""
        flag = lookup(data, self.boundary)
        if flag is not None:
            bootstrap = ~is_set(flag, 1).unsqueeze(-1)
        elif self.boundary == TERMINATED:
            time = around.time if around.next_time is None else around.next_time
            ended = (time == around.last) & (around.reason == int(EndReason.TERMINATED))
            bootstrap = as_tensor_like(~ended[:, None], next(iter(data.values(True, True))))
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
