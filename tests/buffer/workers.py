"""What tests of processes that read for a buffer have in common."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Iterator

import pytest

__all__ = ["WORKER_MARKS", "no_process_is_left"]

WORKER_MARKS = [
    # Of newer Pythons, about processes that are forked beside threads that wait.
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
    pytest.mark.skipif(
        "fork" not in multiprocessing.get_all_start_methods(), reason="needs processes that fork"
    ),
    pytest.mark.usefixtures("no_process_is_left"),
]


@pytest.fixture
def no_process_is_left() -> Iterator[None]:
    """Whoever has started processes has ended them when the test is over."""
    yield
    gc.collect()  # an error knows the frames that it came through, and so its loader
    assert not multiprocessing.active_children()
