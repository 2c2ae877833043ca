"""Writes of a client: numbered, routed, and brought to their shards even if these die meanwhile."""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

from replaykit.interrupts import deferred, shielded
from replaykit.sharding.barrier import Stamp
from replaykit.sharding.errors import ShardDied
from replaykit.sharding.membership import Members
from replaykit.sharding.shards import Reply

__all__ = ["Writes"]


class Writes:
    """Numbers the writes of one client, and sends their parts. Thread-safe.

    A part whose shard dies before it has answered is sent once more to its successor, under the
    same number: what the successor has restored, it does not write twice.
    """

    def __init__(self, members: Members) -> None:
        self._members = members
        self._client = uuid.uuid4().hex
        self._lock = threading.Lock()
        self._next = 0
        self._under_way: set[int] = set()

    def __call__(
        self,
        shards: list[int],
        send: Callable[[int, Stamp], tuple[int, Reply]],
        *,
        again: bool = True,
    ) -> dict[int, Any]:
        """Sends a part to each shard, all in flight at once; returns their answers.

        Args:
            send: sends the part of a shard, with this stamp. ShardDied: it is not for who is there
                now.
            again: whether parts of shards that have died are for their successors. If not, there
                is no answer of these.

        Raises:
            TimeoutError: a shard has not answered, or not come back; of its part nobody knows
                whether it is written. What a shard raised, after all have answered.
        """
        with deferred:
            number, done = self._begin()
            try:
                bits = sum(1 << shard for shard in shards)
                stamp = Stamp(self._client, number, bits, done)
                return self._send(shards, lambda shard: send(shard, stamp), again)
            finally:
                with self._lock:
                    self._under_way.discard(number)

    def _begin(self) -> tuple[int, int]:
        with self._lock:
            number, self._next = self._next, self._next + 1
            self._under_way.add(number)
            return number, min(self._under_way)

    def _send(
        self, shards: list[int], send: Callable[[int], tuple[int, Reply]], again: bool
    ) -> dict[int, Any]:
        members, answers, refused = self._members, {}, None
        until = time.monotonic() + members.timeout
        left = list(shards)
        while left:
            sent = {}
            with shielded:  # a write goes to all of its shards; Ctrl-C waits for their answers
                for shard in left:
                    if members.table.is_there(shard):
                        with contextlib.suppress(ShardDied):
                            sent[shard] = send(shard)
                for shard, reply in sent.items():
                    try:
                        within = max(0.0, until - time.monotonic())
                        answers[shard] = members.take(shard, reply, within)
                    except ShardDied:
                        continue
                    except Exception as error:
                        answers[shard], refused = None, error
            left = [shard for shard in left if shard not in answers]
            if left and not again:
                break
            for shard in left:
                members.wait_for([shard], until)
            if left and time.monotonic() >= until:  # shards may have forgotten it by now
                raise TimeoutError(f"shards {left} have died again and again, and not answered")
        if refused is not None:
            raise refused
        return answers
