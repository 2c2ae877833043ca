"""Rows about to be written, by stream, compared with those that they follow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from replaykit.episodes.stream_keys import stream_keys
from replaykit.storages.links import Chains
from replaykit.storages.native_once import Batch

__all__ = ["ComparedStreams", "keys_of"]


@dataclass
class ComparedStreams:
    """Rows about to be written, by stream.

    Attributes:
        chains: which of them follow each other.
        differs: which of those that are followed do not lead to what follows; None: none is
            followed, or the core knows.
        batch: what the core has compared, last of all; None: torch did.
        goes_on: whether every row that goes on an episode begins where the one before led to.
    """

    chains: Chains
    differs: torch.Tensor | None
    batch: Batch | None = None
    goes_on: bool = True


def keys_of(values: torch.Tensor, dtype: torch.dtype) -> np.ndarray[Any, Any]:
    """Keys of cells that may come in a dtype that carries their own."""
    return stream_keys(values.view(dtype))
