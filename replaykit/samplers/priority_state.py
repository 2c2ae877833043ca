"""What of a prioritized sampler is saved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from replaykit.checkpoint import MappedRows
from replaykit.errors import CheckpointError
from replaykit.samplers.priority_arguments import bounds
from replaykit.samplers.priority_law import PriorityLaw, checked_number

__all__ = ["SavedPriorities"]

_VERSION = 1


@dataclass(frozen=True)
class SavedPriorities:
    """Exponents, counters, and the raw priorities of the stored elements.

    Attributes:
        alpha, beta, eps: of the sampler.
        max_priority: the largest raw priority ever set, at least 1.
        dropped_updates: entries of updates that came too late.
        priorities: raw, float ``[N]``, in physical order.
        unread: the files in which they lie yet, unchecked; empty where they are in memory.
    """

    alpha: float
    beta: float
    eps: float
    max_priority: float
    dropped_updates: int
    priorities: torch.Tensor
    unread: str = ""

    def to_state(self) -> dict[str, Any]:
        """Returns it as the entries of a state dict."""
        return {
            "_schema_version": _VERSION,
            "_alpha": self.alpha,
            "_beta": self.beta,
            "_eps": self.eps,
            "_max_priority": self.max_priority,
            "_dropped_updates": self.dropped_updates,
            "_priorities": self.priorities,
        }

    @classmethod
    def from_state(cls, state: dict[str, Any], dtype: torch.dtype) -> SavedPriorities:
        """Reads it from a state dict, with the priorities in ``dtype``; MappedRows are not read.

        Raises:
            ValueError: an entry is missing or impossible. CheckpointError: of a newer version.
        """
        version = state.get("_schema_version")
        if type(version) is not int or version < 1:
            raise ValueError(f"expected a schema version in the sampler's state, got {version!r}")
        if version > _VERSION:
            raise CheckpointError(
                f"expected a sampler's state of version {_VERSION} or older, got {version}"
            )
        alpha, beta, eps, most = (
            _number(state, name) for name in ("_alpha", "_beta", "_eps", "_max_priority")
        )
        # As it would be stored, and compared with what is.
        rounded = torch.full((), most, dtype=torch.float64, device="cpu").to(dtype).item()
        if not 1 <= rounded < float("inf"):
            raise ValueError(
                f"expected '_max_priority' of at least 1 and finite in {dtype}, got {most}"
            )
        dropped = state.get("_dropped_updates")
        # Storages in files keep it as an int64, to which more are added.
        if type(dropped) is not int or not 0 <= dropped <= 2**62:
            raise ValueError(f"expected '_dropped_updates' as a count, got {dropped!r}")
        raw = state.get("_priorities")
        where = ""
        if isinstance(raw, MappedRows):
            where, raw = raw.where, raw.spanned()
        if not isinstance(raw, torch.Tensor) or raw.ndim != 1 or not raw.is_floating_point():
            raise ValueError(f"expected '_priorities' as a vector of floats, got {raw!r}")
        return cls(
            alpha,
            beta,
            eps,
            rounded,
            dropped,
            raw.detach().to(dtype),
            where if raw.dtype == dtype else "",
        )

    def law(self) -> PriorityLaw:
        """The sampler's law; ValueError where it does not allow the priorities, as far as they are
        read."""
        law = PriorityLaw(self.alpha, self.eps, self.priorities.dtype)
        law.check(0.0, self.max_priority)
        if len(self.priorities) and not self.unread:
            law.check(*bounds(self.priorities))
        return law


def _number(state: dict[str, Any], name: str) -> float:
    try:
        return checked_number(name, state.get(name))
    except TypeError as error:
        raise ValueError(str(error)) from None
