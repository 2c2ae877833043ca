"""Shards that die: what goes on, what comes back, what is counted."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import PrioritizedSampler, ShardLoss
from replaykit.distributed.protocol import Losses, ShardFacts
from replaykit.distributed.shard_server import ShardHolder
from replaykit.sharding import ShardLossWarning


def numbered(first: int, count: int) -> TensorDict:
    return TensorDict({"x": torch.arange(first, first + count)}, [count])


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
        sampler=lambda: PrioritizedSampler(alpha=1.0, beta=1.0, eps=0.0),
        checkpoint_dir=tmp_path,
        checkpoint_interval=0,
        on_loss=losses.append,
    )
    index = rb.extend(numbered(0, 8))  # every write is saved
    rb.update_priority(index, torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 8]))
    holder = rb._members.shards[1].holder
    holder._next_save = float("inf")
    rb.extend(numbered(8, 4))
    kill(rb, 1)
    batch = rb.sample(400)
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
    rb = sharded(
        2, sampler=lambda: PrioritizedSampler(alpha=1.0, beta=1.0), on_loss=lambda loss: None
    )
    index = rb.extend(numbered(0, 4))
    _, info = rb.sample(40, return_info=True)
    kill(rb, 0)
    rb.sample(2)
    rb._members.wait_for([0], float("inf"))
    assert rb.extend(numbered(4, 4)).tolist() == [0, 5, 2, 7]
    old = info["index"] % 2 == 0
    rb.update_priority(info["index"], 3.0, generation=info["index_generation"])
    assert rb.dropped_updates == int(old.sum())
    weights = {int(i): float(w) for i, w in _weights(rb)}
    assert weights[0] == weights[2] > weights[int(index[1])]


def _weights(rb: Any) -> Any:
    info = rb.sample(400, return_info=True)[1]
    return zip(info["index"], info["priority_weight"], strict=True)


def test_a_write_finds_its_shard_again(sharded: Any, tmp_path: Any) -> None:
    """A part whose shard dies is written to its successor, under a key or not; and once, where
    the shard had saved it before it died."""
    rb = sharded(
        2, checkpoint_dir=tmp_path, checkpoint_interval=0, on_loss=lambda loss: None, timeout=60
    )
    rb.extend(numbered(0, 4))
    shard = rb._members.shards[1]
    send = shard.call

    def dies_after_writing(verb: str, *args: Any) -> Any:
        if verb == "extend":
            send(verb, *args)
            shard.kill()
        return send(verb, *args)

    shard.call = dies_after_writing
    index = rb.extend(numbered(4, 4))
    assert index.tolist() == [4, 5, 6, 7]
    assert sorted(rb[:]["x"].tolist()) == list(range(8))
    assert rb[index]["x"].tolist() == [4, 5, 6, 7]
    assert rb.stats()["rows_lost"] == 0


def test_calls_to_a_shard_that_does_not_return_time_out(sharded: Any) -> None:
    rb = sharded(2, timeout=0.1, shard_key="x")
    rb.extend(numbered(0, 40))
    hold(rb)
    kill(rb, 0)
    with pytest.raises(TimeoutError, match="shard 0 has not come back"):
        rb.extend(numbered(0, 40))
    assert set(rb.sample(10)["x"].tolist())
    kill(rb, 1)
    with pytest.raises(TimeoutError, match=r"none of shards \[0, 1\] has come back"):
        rb.sample(10)


def test_every_client_reports_its_rows_lost_with_a_dead_shard(sharded: Any) -> None:
    """The loss grows until all that wrote have told what was acknowledged to them."""
    rb = sharded(2, on_loss=lambda loss: None)
    other = rb.client(on_loss=lambda loss: None)
    rb.extend(numbered(0, 4))
    other.extend(numbered(4, 6))
    kill(rb, 0)
    rb.sample(4)
    rb._members.wait_for([0], float("inf"))
    assert rb.stats()["rows_lost"] == 2
    assert other.stats()["shards"] == [None, 5]
    assert rb.stats()["rows_lost"] == 5


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
    for shard in range(2):
        kill(rb, shard)
    rb.stats()
    rb._members.wait_for([0], float("inf"))
    rb._members.wait_for([1], float("inf"))
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
    kill(rb, 0)
    rb.stats()
    rb._members.wait_for([0], float("inf"))
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
    until = time.monotonic() + 30
    while not (tmp_path / "shard-00000" / "manifest.json").exists():
        assert time.monotonic() < until
        time.sleep(0.01)
    holder.close()
    assert len(tries) >= 3
    assert "odd rows" in caplog.text


def test_losses_count_rows_that_would_still_be_stored() -> None:
    losses = Losses()
    losses.died(0, 0, 100, 16)
    losses.died(0, 0, 90, 40)
    losses.came_back(0, 0, ShardFacts(8, 60, 16, None, 0, float("inf"), 1.0, 0))
    assert losses.all() == [ShardLoss(0, 0, 84, 100, 16, 8)]
    losses.came_back(1, 0, ShardFacts(8, 60, 16, None, 0, float("inf"), 1.0, 0))
    assert losses.newest(1).rows == 0


def test_emptied_and_replaced_rows_do_not_count_as_lost(sharded: Any, tmp_path: Any) -> None:
    """After ``empty`` and after a load a shard has few of the rows that it was ever written."""
    losses: list[ShardLoss] = []
    rb = sharded(2, on_loss=losses.append)
    rb.extend(numbered(0, 8))
    rb.dumps(tmp_path)
    rb.extend(numbered(8, 40))
    rb.loads(tmp_path)
    kill(rb, 0)
    rb.sample(9)
    rb.sample(9)
    rb.extend(numbered(0, 20))
    rb.empty()
    rb.extend(numbered(0, 2))
    kill(rb, 1)
    rb.sample(9)
    rb.sample(9)
    assert [(loss.shard, loss.rows) for loss in losses] == [(0, 4), (1, 1)]


def test_a_folder_of_another_buffer_is_not_taken_over(sharded: Any, tmp_path: Any) -> None:
    rb = sharded(2, checkpoint_dir=tmp_path, checkpoint_interval=0)
    rb.extend(numbered(0, 4))
    with pytest.raises(FileExistsError, match="another buffer"):
        sharded(2, checkpoint_dir=tmp_path)


def test_threads_write_and_sample_while_shards_die(sharded: Any) -> None:
    """No row is twice there, none is gone but those of lost shards."""
    rb = sharded(3, 10_000, on_loss=lambda loss: None)
    rb.extend(numbered(0, 30))
    failed: list[BaseException] = []

    def work(which: int) -> None:
        client = rb.client(torch.Generator().manual_seed(which), on_loss=lambda loss: None)
        try:
            for step in range(40):
                if which < 3:
                    client.extend(numbered(1000 * (which + 1) + 10 * step, 10))
                else:
                    client.sample(32)
            client.stats()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(which,)) for which in range(5)]
    for thread in threads:
        thread.start()
    for shard in (0, 2):
        kill(rb, shard)
        rb.sample(8)
    for thread in threads:
        thread.join()
    assert failed == []
    rb.stats()
    kept = rb[:]["x"].tolist()
    assert len(set(kept)) == len(kept)
    assert len(kept) + rb.stats()["rows_lost"] == 30 + 3 * 400
