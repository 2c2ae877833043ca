"""Shards and a supervisor that live and do not answer."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from replaykit import RateLimiter
from replaykit.pace import INSERT
from replaykit.sharding import ShardSilent


class Silent:
    """An answer that does not come, for so many times that it is asked for."""

    def __init__(self, times: float, answer: Any) -> None:
        self.times, self.answer, self.within = times, answer, -1.0

    known = False

    def get(self, timeout: float | None = None) -> Any:
        assert timeout is not None
        assert timeout < float("inf"), "waits without end"
        self.within, self.times = timeout, self.times - 1
        if self.times >= 0:
            raise TimeoutError
        return self.answer.get(timeout)


def silence(rb: Any, verbs: set[str], times: float = float("inf")) -> list[str]:
    """Has shard 1 be silent about some verbs; returns what it is asked, as it grows."""
    shard, asked = rb._members.shards[1], []
    send = shard.call

    def call(verb: str, *args: Any) -> Any:
        asked.append(verb)
        return Silent(times, send(verb, *args)) if verb in verbs else send(verb, *args)

    shard.call = call
    return asked


EVERYTHING = {"draw", "facts", "stats", "extend", "read", "freeze", "begin_save", "finish_save"}


def test_calls_to_a_silent_shard_time_out(sharded: Any) -> None:
    """It is not replaced: its rows may all be there. Every call that needs it says so."""
    rb = sharded(2, shard_key="k", batch_size=4, timeout=0.2)
    keys = torch.arange(20)
    rb.extend({"k": keys, "x": keys})
    silence(rb, EVERYTHING)
    for call in (rb.sample, rb.__len__, rb.stats, lambda: rb.extend({"k": keys, "x": keys})):
        with pytest.raises(TimeoutError, match="shard 1 has not answered"):
            call()
    assert rb._members.there() == [0, 1]
    mine = keys[torch.tensor(rb._router.route({("k",): keys}, 20, []) == 0)]
    assert len(rb.extend({"k": mine, "x": mine})) == len(mine) > 0


@pytest.mark.parametrize("verb", ["begin_save", "finish_save"])
def test_a_save_waits_for_files_and_not_for_a_shard_that_hangs(
    sharded: Any, tmp_path: Path, verb: str
) -> None:
    rb = sharded(2, timeout=0.2)
    rb.extend(torch.arange(6))
    rb.dumps(tmp_path)
    rb.extend(torch.arange(2))
    asked = silence(rb, {verb}, times=3)  # its disk is slow
    rb.dumps(tmp_path)
    assert asked.count("stats") == 3
    other = sharded(2)
    other.loads(tmp_path)
    assert len(other) == 8
    rb.extend(torch.arange(2))
    silence(rb, {verb, "stats"})
    with pytest.raises(ShardSilent, match="shard 1 has not answered"):
        rb.dumps(tmp_path)
    other.loads(tmp_path)
    assert len(other) == 8  # that of before


def test_a_silent_supervisor_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = types.ModuleType("ray")
    exceptions = types.ModuleType("ray.exceptions")
    exceptions.GetTimeoutError = type("GetTimeoutError", (TimeoutError,), {})  # type: ignore[attr-defined]
    for name in ("RayTaskError", "RayActorError", "ObjectLostError"):
        setattr(exceptions, name, type(name, (Exception,), {}))
    waited = []

    def get(ref: Any, timeout: float | None = None) -> Any:
        waited.append(timeout)
        raise exceptions.GetTimeoutError

    ray.get, ray.exceptions = get, exceptions  # type: ignore[attr-defined]
    ray.is_initialized = lambda: True  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.exceptions", exceptions)
    from replaykit.distributed.shards import RaySupervisor

    class Actor:
        def __getattr__(self, name: str) -> Any:
            return types.SimpleNamespace(remote=lambda *args: sent.append((name, *args)))

    sent: list[Any] = []
    supervisor = RaySupervisor(Actor(), [], 2.0, RateLimiter.queue(3))
    for ask in (supervisor.losses, lambda: supervisor.restored(0, 0, 1.0)):
        with pytest.raises(TimeoutError, match="the supervisor of the shards has not answered"):
            ask()
    assert waited == [2.0, 3.0]
    assert supervisor.pace is not None
    with pytest.raises(TimeoutError, match="the supervisor of the shards has not answered"):
        supervisor.pace.admit(INSERT, 2, None)  # longer than the limiter waits there at a time
    asked, back = sent[-2:]
    assert (asked[:2], back[:2]) == (("pace", "admit"), ("pace", "end"))
    assert asked[2][:2] == back[2][0]  # it may still be given
    assert waited[-1] == 7.0
