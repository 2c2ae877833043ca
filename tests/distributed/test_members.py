"""Shards that die or do not answer: what goes on, what comes back, what is counted."""

from __future__ import annotations

import functools
import sys
import time
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    RateLimiter,
    ShardLoss,
)
from replaykit.distributed.host import Host
from replaykit.distributed.protocol import pack
from replaykit.distributed.shard_server import ShardHolder
from replaykit.distributed.shards import RaySupervisor
from replaykit.pace import INSERT
from replaykit.sharding import ShardLossWarning, ShardSilent
from tests.distributed.laws import numbered, prioritized, running, wait_until
from tests.distributed.stand_in import Ray
from tests.support.refusals import refuses


class Held:
    """A supervisor that restarts nothing until it is told to."""

    def __init__(self, supervisor: Any) -> None:
        self._supervisor, self.holding = supervisor, True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._supervisor, name)

    def restored(self, shard: int, incarnation: int, timeout: float) -> Any:
        return None if self.holding else self._supervisor.restored(shard, incarnation, timeout)


def hold(rb: Any) -> Held:
    held = rb._members.supervisor = Held(rb._members.supervisor)
    return held


def kill(rb: Any, shard: int) -> None:
    rb._members.shards[shard].kill()


def restart(rb: Any, *shards: int) -> None:
    """Kill shards, and return once they have come back."""
    for shard in shards:
        kill(rb, shard)
    rb.stats()
    for shard in shards:
        rb._members.wait_for([shard], float("inf"))


def test_sampling_continues_from_the_other_shards(sharded: Any) -> None:
    losses: list[ShardLoss] = []
    rb = sharded(3, on_loss=losses.append, batch_size=60)
    rb.extend(numbered(0, 30))
    held = hold(rb)
    kill(rb, 1)
    for _ in range(5):
        assert set((rb.sample()["x"] % 3).tolist()) == {0, 2}
    assert rb.stats()["shards"] == [10, None, 10]
    assert losses == []
    held.holding = False
    rb._members.wait_for([1], float("inf"))
    assert losses == [ShardLoss(1, 0, 0, 10, 10, 0)]
    assert str(losses[0]) == "shard 1 died and came back with 0 rows; its 10 rows 0..9 are lost"
    assert rb.stats()["shards"] == [10, 0, 10]
    assert (rb.stats()["rows_lost"], rb.stats()["restarts"]) == (10, 1)
    assert set((rb.sample()["x"] % 3).tolist()) == {0, 2}
    rb.extend(numbered(30, 3))
    assert rb.stats()["shards"] == [11, 1, 11]


def test_restarted_shard_restores_saved_rows(sharded: Any, tmp_path: Any) -> None:
    """Rows and priorities as they were saved; rows after that are lost, and counted."""
    losses: list[ShardLoss] = []
    rb = sharded(
        2,
        sampler=prioritized,
        checkpoint_dir=tmp_path,
        checkpoint_interval=0,
        on_loss=losses.append,
    )
    index = rb.extend(numbered(0, 8))  # every write is saved
    rb.update_priority(index, torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 8]))
    holder = rb._members.shards[1].holder
    holder._next_save = float("inf")
    rb.extend(numbered(8, 4))
    restart(rb, 1)
    batch = rb.sample(400)
    assert losses == [ShardLoss(1, 0, 4, 6, 2, 4)]
    assert set(batch["x"][batch["x"] % 2 == 1].tolist()) == {1, 3, 5, 7}
    least = torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 8, 8, 9, 8, 9])
    torch.testing.assert_close(batch["priority_weight"], 1 / least[batch["x"]])


def test_shard_loss_without_on_loss_warns(sharded: Any) -> None:
    rb = sharded(2)
    rb.extend(numbered(0, 4))
    kill(rb, 0)
    rb.sample(4)
    with pytest.warns(ShardLossWarning, match=r"shard 0 died .* its 2 rows 0\.\.1 are lost"):
        rb.sample(4)


def test_a_handle_of_a_lost_row_names_no_new_one(sharded: Any) -> None:
    """The slots of lost rows are written again under the same generations."""
    rb = sharded(2, sampler=prioritized, on_loss=lambda loss: None)
    index = rb.extend(numbered(0, 4))
    _, info = rb.sample(40, return_info=True)
    restart(rb, 0)
    assert rb.extend(numbered(4, 4)).tolist() == [0, 5, 2, 7]
    old = info["index"] % 2 == 0
    rb.update_priority(info["index"], 3.0, generation=info["index_generation"])
    assert rb.dropped_updates == int(old.sum())
    weights = {int(i): float(w) for i, w in _weights(rb)}
    assert weights[0] == weights[2] > weights[int(index[1])]


def _weights(rb: Any) -> Any:
    info = rb.sample(400, return_info=True)[1]
    return zip(info["index"], info["priority_weight"], strict=True)


def test_calls_to_a_shard_that_does_not_return_time_out(sharded: Any) -> None:
    rb = sharded(2, timeout=0.1, shard_key="x")
    rb.extend(numbered(0, 40))
    hold(rb)
    kill(rb, 0)
    refuses(TimeoutError, "shard 0 has not come back", rb.extend, numbered(0, 40))
    assert set(rb.sample(10)["x"].tolist())
    kill(rb, 1)
    refuses(TimeoutError, r"none of shards \[0, 1\] has come back", rb.sample, 10)


def test_result_waits_no_longer_than_its_timeout_and_continues_later(sharded: Any) -> None:
    rb = sharded(2, timeout=20.0, batch_size=4, on_loss=lambda loss: None)
    rb.extend(numbered(0, 4))
    held = hold(rb)
    kill(rb, 0)
    kill(rb, 1)
    batch, begun = rb.sample_async(), time.monotonic()
    refuses(ShardSilent, r"none of shards \[0, 1\] has come back", batch.result, 0.1)
    assert time.monotonic() - begun < 10
    refuses(RuntimeError, "all shards have died and are being restarted", lambda: rb[:])
    held.holding = False
    rb.extend(numbered(4, 4))
    assert set(batch.result()["x"].tolist()) <= {4, 5, 6, 7}


def test_write_is_complete_before_an_error_of_on_loss_is_raised(sharded: Any) -> None:
    def fails(loss: ShardLoss) -> None:
        raise ZeroDivisionError("an error of on_loss")

    rb = sharded(2, shard_key="x", on_loss=fails)
    rb.extend(numbered(0, 20))
    kept = set(
        rb._members.receive(1, rb._members.send(1, "read", torch.arange(4)))[0]["x"].tolist()
    )
    kill(rb, 0)
    refuses(ZeroDivisionError, "an error of on_loss", rb.extend, numbered(0, 20))
    found = rb[:]["x"].tolist()
    assert set(found) == set(range(20))
    assert all(found.count(x) == 2 for x in kept)


def test_every_client_reports_its_rows_lost_with_a_dead_shard(sharded: Any) -> None:
    """The loss grows until each client that wrote has noticed the death, or has ended."""
    rb = sharded(2, on_loss=lambda loss: None)
    rb.extend(numbered(0, 4))
    clients = [rb.client(on_loss=lambda loss: None) for _ in range(4)]
    for first, client in enumerate(clients, 1):
        client.extend(numbered(4 * first, 4))
    clients.pop(0)
    restart(rb, 0)
    assert rb.stats()["rows_lost"] == 4
    assert clients.pop(0).stats()["shards"] == [None, 10]
    assert rb.stats()["rows_lost"] == 6
    other = clients.pop()
    del client, other
    assert rb.stats()["rows_lost"] == 10


@pytest.mark.parametrize("back", [False, True])
def test_acknowledged_rows_are_reported_after_shard_death(sharded: Any, back: bool) -> None:
    """Of two threads with one handle one notices the death before the other takes its answer."""
    rb = sharded(2, on_loss=lambda loss: None)
    rb.extend(numbered(0, 4))
    shard = rb._members.shards[0]
    send = shard.call

    def noticed_elsewhere(verb: str, *args: Any) -> Any:
        reply = send(verb, *args)
        if verb == "extend":
            shard.kill()
            rb._members.died(0, 0)
            if back:
                rb._members.wait_for([0], float("inf"))
        return reply

    shard.call = noticed_elsewhere
    assert rb.extend(numbered(4, 6)).tolist() == [4, 5, 6, 7, 8, 9]
    rb._members.wait_for([0], float("inf"))
    assert rb.stats()["shards"] == [0, 5]
    assert rb.losses == [ShardLoss(0, 0, 0, 5, 5, 0)]


def test_emptied_rows_are_not_restored(sharded: Any, tmp_path: Any) -> None:
    rb = sharded(2, checkpoint_dir=tmp_path, checkpoint_interval=1000, on_loss=lambda loss: None)
    rb.extend(numbered(0, 8))
    for shard in rb._members.shards:
        shard.holder.save_own()
    rb.empty()
    rb.extend(numbered(8, 4))  # within the interval: not saved
    restart(rb, 0, 1)
    assert rb.stats()["shards"] == [0, 0]


@pytest.mark.parametrize("error", [OSError("no room"), ValueError("odd rows")])
def test_a_save_that_fails_is_logged_and_tried_again(
    sharded: Any, tmp_path: Any, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    """The write that it came with has been done."""
    rb = sharded(1, checkpoint_dir=tmp_path, checkpoint_interval=0, on_loss=lambda loss: None)
    holder = rb._members.shards[0].holder

    def fails(path: Any, base: Any) -> Any:
        raise error

    holder._snapshot, snapshot = fails, holder._snapshot
    assert rb.extend(numbered(0, 3)).tolist() == [0, 1, 2]
    assert "shard 0 could not save itself" in caplog.text
    assert str(error) in caplog.text
    holder._snapshot = snapshot
    rb.extend(numbered(3, 3))
    restart(rb, 0)
    assert rb[:]["x"].tolist() == list(range(6))


def test_saver_of_an_actor_survives_errors(
    recipe: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries: list[int] = []
    save = ShardHolder.save_own

    def fails_twice(holder: ShardHolder) -> None:
        tries.append(1)
        if len(tries) <= 2:
            raise ValueError("odd rows")
        save(holder)

    monkeypatch.setattr(ShardHolder, "save_own", fails_twice)
    holder = ShardHolder(recipe(0.0), 0, saves=True)
    wait_until((tmp_path / "shard-00000" / "manifest.json").exists)
    holder.close()
    assert len(tries) >= 3
    assert "odd rows" in caplog.text


def test_emptied_and_replaced_rows_do_not_count_as_lost(sharded: Any, tmp_path: Any) -> None:
    """After ``empty`` and after a load a shard has few of the rows that it was ever written."""
    losses: list[ShardLoss] = []
    rb = sharded(2, on_loss=losses.append)
    rb.extend(numbered(0, 8))
    rb.dumps(tmp_path)
    rb.extend(numbered(8, 40))
    rb.loads(tmp_path)
    restart(rb, 0)
    rb.extend(numbered(0, 20))
    rb.empty()
    rb.extend(numbered(0, 2))
    restart(rb, 1)
    assert [(loss.shard, loss.rows) for loss in losses] == [(0, 4), (1, 1)]


def test_threads_write_and_sample_while_shards_die(sharded: Any) -> None:
    """No row is twice there, none is gone but those of lost shards."""
    rb = sharded(3, 10_000, on_loss=lambda loss: None)
    rb.extend(numbered(0, 30))

    def work(which: int) -> None:
        client = rb.client(torch.Generator().manual_seed(which), on_loss=lambda loss: None)
        for step in range(40):
            if which < 3:
                client.extend(numbered(1000 * (which + 1) + 10 * step, 10))
            else:
                client.sample(32)
        client.stats()

    with running(*(functools.partial(work, which) for which in range(5))):
        for shard in (0, 2):
            kill(rb, shard)
            rb.sample(8)
    rb.stats()
    kept = rb[:]["x"].tolist()
    assert len(set(kept)) == len(kept)
    assert len(kept) + rb.stats()["rows_lost"] == 30 + 3 * 400


class Silent:
    """An answer that does not come, for so many times that it is asked for."""

    def __init__(self, times: float, answer: Any) -> None:
        self.times, self.answer, self.within = times, answer, -1.0

    known = False

    def is_ready(self) -> bool:
        return self.times <= 0

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
        refuses(TimeoutError, "shard 1 has not answered", call)
    assert rb._members.there() == [0, 1]
    mine = keys[torch.tensor(rb._router.route({("k",): keys}, 20, []) == 0)]
    assert len(rb.extend({"k": mine, "x": mine})) == len(mine) > 0


def test_done_does_not_wait_after_a_death(sharded: Any) -> None:
    """The draws of the dead shard are requested again from a shard that has not answered yet."""
    rb = sharded(2, batch_size=40, prefetch=1, timeout=30.0)
    rb.extend(numbered(0, 8))
    rb.sample()
    hold(rb)
    kill(rb, 0)
    rb.sample()
    silence(rb, {"draw"}, times=1)
    batch = rb.sample_async()
    refuses(ValueError, "timeout of at least 0", batch.result, -1)
    assert not batch.done()
    with pytest.raises(ShardSilent):
        batch.result(0)
    assert batch.done()
    assert set((batch.result(0)["x"] % 2).tolist()) == {1}


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
    refuses(ShardSilent, "shard 1 has not answered", rb.dumps, tmp_path)
    other.loads(tmp_path)
    assert len(other) == 8  # that of before


@pytest.mark.parametrize("stamped", [True, False])
def test_an_update_never_reaches_the_successor_of_the_shard_it_is_for(
    sharded: Any, stamped: bool
) -> None:
    """The shard dies, comes back and is written to by others between the check and the message:
    the slots are those of other rows."""
    rb = sharded(2, sampler=prioritized, on_loss=print)
    other = rb.client(on_loss=print)
    rb.extend(TensorDict({"x": torch.arange(4)}, [4]))
    _, info = rb.sample(40, return_info=True)
    index, generation = info["index"], info["index_generation"] if stamped else None
    writes, members = rb._writes, rb._members

    def comes_late(*args: Any, **keywords: Any) -> Any:
        members.shards[0].kill()
        for client in (rb, other):
            client._members.died(0, 0)
            client._members.wait_for([0], float("inf"))
        assert other.extend(TensorDict({"x": torch.arange(4) + 10}, [4])).tolist() == [0, 5, 2, 7]
        return writes(*args, **keywords)

    rb._writes = comes_late
    rb.update_priority(index, 9.0, generation=generation)
    assert rb.dropped_updates == int((index % 2 == 0).sum()) > 0
    held = members.shards[0].holder.buffer
    assert held.sampler._table.follow(held.storage).raw[:2].tolist() == [1.0, 1.0]


class ShardlessRay(Ray):
    """As much of ray as a supervisor needs, with no process behind it.

    Every attribute is an actor, its class or one of its methods, which notes its arguments.
    """

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.running, self.killed = error, False, 0
        self.within: list[float | None] = []
        self.sent: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.sent.append(args)
        return self

    def init(self) -> None:
        self.running = True

    def is_initialized(self) -> bool:
        return self.running

    def get(self, ref: Any, timeout: float | None = None) -> Any:
        self.within.append(timeout)
        if self.error is not None:
            raise self.error
        return []

    def kill(self, actor: Any, *, no_restart: bool) -> None:
        self.killed += 1


@pytest.fixture
def shardless(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``shardless(error)``: a Ray in the place of the real one, which answers with an error."""

    def make(error: Exception | None = None) -> ShardlessRay:
        ray = ShardlessRay(error)
        monkeypatch.setitem(sys.modules, "ray", ray)
        return ray

    return make


def test_a_silent_supervisor_is_not_waited_for_without_end(shardless: Any) -> None:
    ray = shardless(Ray.exceptions.GetTimeoutError())
    ray.running = True
    supervisor = RaySupervisor(ray, [], 2.0, RateLimiter.queue(3))
    asks = (
        supervisor.losses,
        lambda: supervisor.restored(0, 0, 1.0),
        lambda: supervisor.pace.admit(INSERT, 2, None),  # longer than the limiter waits at a time
    )
    for ask in asks:
        refuses(TimeoutError, "the supervisor of the shards has not answered", ask)
    assert ray.within == [2.0, 3.0, 7.0]
    asked, back = ray.sent[-2:]
    assert (asked[0], back[0]) == ("admit", "end")
    assert asked[1][:2] == back[1][0]  # it may still be given


@pytest.mark.parametrize("error", [None, RuntimeError("no shards today")])
def test_ray_keeps_running(shardless: Any, error: Exception | None) -> None:
    """Others may have come to use it since it was started for the shards."""
    ray, recipe = shardless(error), cast(Any, None)
    if error is not None:
        refuses(RuntimeError, "no shards today", RaySupervisor.start, recipe, None, None, 1.0)
    else:
        RaySupervisor.start(recipe, None, None, 1.0).close()
    assert ray.running
    assert ray.killed == 1


def test_shards_have_their_time_to_start(shardless: Any, recipe: Any) -> None:
    """A short time for answers does not shorten the start. A failed start names the resource."""
    ray = shardless(Ray.exceptions.GetTimeoutError())
    for timeout, within in ((0.0, 180), (1.0, 180), (200.0, 200)):
        text = rf"1 shards have not started within {within} s; each needs .*'num_cpus': 7"
        refuses(TimeoutError, text, RaySupervisor.start, recipe(), {"num_cpus": 7}, None, timeout)
    assert ray.within == [180, 180, 200]
    assert ray.killed == 3


def test_actor_answers_with_the_error_of_its_creation(recipe: Any) -> None:
    """Its own type and text, not those of an actor that has died."""
    holder = ShardHolder(recipe(), 0)
    holder.save_own()
    holder.close()
    host = Host(ShardHolder, {"recipe": recipe(), "shard": 0})
    refuses(FileExistsError, "another buffer", host.ask, "facts", pack(()))
