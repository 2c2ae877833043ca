"""What torch needs in processes that fork off those that share a buffer."""

from __future__ import annotations

import functools
import os

import torch

__all__ = ["one_thread_in_children"]


@functools.cache
def one_thread_in_children() -> None:
    """Has processes that fork off from now on begin with one thread of torch.

    The other threads of OpenMP are not there after a fork, and the first operation that is large
    enough for them would wait for them without end: of the child's own, or of this package. Workers
    of torch's DataLoader begin in the same way. A child may say otherwise.
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_begin_alone)


def _begin_alone() -> None:
    torch.set_num_threads(1)
