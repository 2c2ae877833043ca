"""Batches drawn and made ahead, in threads, in the order in which they are asked for."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

__all__ = ["Drawn", "Prefetcher"]


@dataclass
class Drawn:
    """A draw: the index, what is known of it, whether it ended a pass, and the rows read."""

    index: torch.Tensor
    info: dict[str, Any]
    ran_out: bool
    rows: Any = None


@dataclass
class _Entry:
    """A batch under way. ``drawn`` is set with the storage's lock held."""

    era: int
    claimed: bool = False
    void: bool = False
    drawn: Drawn | None = None
    future: Future[Any] = field(default_factory=Future)


class _Source(Protocol):
    def _draw_ahead(self, entry: Any) -> Drawn | None: ...

    def _finish(self, drawn: Drawn) -> Any: ...


class Prefetcher:
    """Keeps ``depth`` batches in the making.

    Draws take place one after the other in the order of submission, so that they are the draws
    that a buffer without prefetch would make; what comes after a draw runs in parallel. After a
    draw that ends a pass, or fails, none follows before it has been delivered.

    The threads hold no reference to the buffer and end with it.
    """

    def __init__(self, depth: int, source: _Source) -> None:
        self.depth = depth
        self._source = weakref.ref(source)
        self._changed = threading.Condition()
        self._entries: deque[_Entry] = deque()
        self._era = 0
        self._tickets = 0
        self._turn = 0
        self._halted = False
        self._closed = False
        self._pool = ThreadPoolExecutor(depth, thread_name_prefix="replaykit-prefetch")

    def __len__(self) -> int:
        with self._changed:
            return len(self._entries)

    def next(self) -> tuple[Drawn, Any]:
        """Returns the oldest batch, with its draw, and tops up.

        Raises:
            Exception: whatever making that batch has raised.
        """
        while True:
            with self._changed:
                self._top_up(1)
                entry = self._entries.popleft()
                entry.claimed = True
                self._top_up(self.depth)
            try:
                result = entry.future.result()
            except BaseException:
                self._release(entry.drawn is None or entry.drawn.ran_out)
                raise
            if not entry.void:
                assert entry.drawn is not None
                self._release(entry.drawn.ran_out)
                return entry.drawn, result
            with self._changed:
                # Another thread is about to deliver the batch that ended the pass.
                self._changed.wait_for(lambda: not self._halted or self._closed)

    def _release(self, ended: bool) -> None:
        if ended:
            with self._changed:
                self._halted = False
                while self._entries and self._entries[0].void:
                    self._entries.popleft()
                self._changed.notify_all()

    def _top_up(self, depth: int) -> None:
        if self._closed:
            raise RuntimeError("this buffer was shut down")
        while len(self._entries) < depth:
            entry = _Entry(self._era)
            self._entries.append(entry)
            self._pool.submit(_run, weakref.ref(self), entry, self._tickets)
            self._tickets += 1

    def _draw(self, entry: _Entry, ticket: int) -> Drawn | None:
        with self._changed:
            self._changed.wait_for(lambda: self._turn == ticket)
            entry.void = self._halted
        try:
            source = self._source()
            if entry.void or source is None:
                entry.void = True
                return None
            drawn = source._draw_ahead(entry)
            entry.void = drawn is None
            ended = drawn is not None and drawn.ran_out
        except BaseException:
            ended = True
            raise
        finally:
            with self._changed:
                if not entry.void:
                    self._halted = self._halted or ended
                self._turn += 1
                self._changed.notify_all()
        return drawn

    def wanted(self, entry: _Entry) -> bool:
        """Whether a batch is still waited for. The storage's lock is held."""
        return entry.claimed or entry.era == self._era

    def pending(self) -> list[Drawn]:
        """Returns the draws made and not delivered, in order. The storage's lock is held."""
        with self._changed:
            return [entry.drawn for entry in self._entries if entry.drawn is not None]

    def clear(self) -> list[Drawn]:
        """Gives up all batches; returns their draws. The storage's lock is held.

        Batches that a thread is already waiting for are delivered.
        """
        with self._changed:
            undelivered = [entry.drawn for entry in self._entries if entry.drawn is not None]
            self._entries.clear()
            self._era += 1
            self._halted = False
            self._changed.notify_all()
        return undelivered

    def shutdown(self) -> None:
        """Joins the threads; ``next`` raises RuntimeError from now on."""
        with self._changed:
            self._closed = True
            self._entries.clear()
            self._era += 1
            self._changed.notify_all()
        self._pool.shutdown(wait=True)


def _run(reference: weakref.ref[Prefetcher], entry: _Entry, ticket: int) -> None:
    prefetcher = reference()
    if prefetcher is None:
        return
    try:
        drawn = prefetcher._draw(entry, ticket)
        source = prefetcher._source()
        del prefetcher
        result = None if drawn is None or source is None else source._finish(drawn)
        del source
    except BaseException as error:
        entry.future.set_exception(error)
    else:
        entry.future.set_result(result)
