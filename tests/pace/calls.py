"""Calls of paced buffers, for tests of them here and over shards."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict


def numbers(first: int, count: int) -> TensorDict:
    return TensorDict({"number": torch.arange(first, first + count)}, [count])


def counts(rb: Any) -> tuple[int, int]:
    """Rows inserted and sampled so far."""
    stats = rb.stats()
    return stats["inserts"], stats["samples"]


def started(work: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread
