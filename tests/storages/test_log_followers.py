"""Parts that follow the log of a storage: each takes its data from what came since its number."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    ConsumingSampler,
    LazyTensorStorage,
    PrioritizedSampler,
    ReplayBuffer,
    ReturnToGo,
    RoundRobinWriter,
    StalenessAwareSampler,
    TensorDictMaxValueWriter,
)
from tests.storages.sharing import another

SLOTS = 8
Follower = tuple[ReplayBuffer, Callable[[], None], Callable[[], Any]]
"""A buffer, a change that the part is not told of, and what the part says then."""


def rows(*values: float) -> TensorDict:
    x = torch.tensor(values, dtype=torch.float32)
    done = torch.zeros(len(values), 1, dtype=torch.bool)
    after = {"done": done, "reward": x[:, None]}
    return TensorDict({"policy_version": x.long(), "next": after}, [len(values)])


def buffer(**parts: Any) -> ReplayBuffer:
    return ReplayBuffer(storage=LazyTensorStorage(SLOTS), batch_size=SLOTS, **parts)


def silently(rb: ReplayBuffer, *values: float) -> None:
    """Write at the cursor with another writer, without a notification."""
    writer = RoundRobinWriter()
    writer.register_storage(rb.storage)
    writer.write(writer.prepare(rows(*values)))


def versions() -> Follower:
    rb = buffer(sampler=StalenessAwareSampler(max_staleness=-1))
    rb.extend(rows(0, 0, 0, 0))
    rb.sample()
    held: Any = rb.sampler

    def change() -> None:
        rb["policy_version"] = torch.full((4,), 7)
        silently(rb, 9)

    def read() -> Any:
        return sorted(held._versions.follow(rb.storage).versions.tolist())

    return rb, change, read


def priorities() -> Follower:
    rb = buffer(sampler=PrioritizedSampler(alpha=1.0, beta=1.0))
    rb.extend(rows(*range(SLOTS)))
    rb.update_priority(torch.arange(SLOTS), torch.full((SLOTS,), 0.25))
    held: Any = rb.sampler

    def change() -> None:
        silently(rb, 1, 1)

    def read() -> Any:
        return held._table.follow(rb.storage).priorities.tolist()

    return rb, change, read


def live() -> Follower:
    rb = buffer(sampler=ConsumingSampler(max_sample_count=1))
    rb.extend(rows(*range(SLOTS)))
    rb.sample(SLOTS - 1)
    held: Any = rb.sampler

    def change() -> None:
        silently(rb, *range(SLOTS))

    return rb, change, lambda: held.left(rb.storage)


def episodes() -> Follower:
    rb = buffer()
    rb.extend(rows(*range(6)))
    assert len(rb.episodes) == 1

    def change() -> None:
        flags = torch.zeros(6, 1, dtype=torch.bool)
        flags[2] = True
        rb["next", "done"] = flags

    return rb, change, lambda: len(rb.episodes)


def ranks() -> Follower:
    rb = buffer(writer=TensorDictMaxValueWriter())
    rb.extend(rows(*range(1, SLOTS + 1)))

    def change() -> None:
        rb["next", "reward"] = torch.full((SLOTS, 1), 100.0)

    return rb, change, lambda: rb.extend(rows(50.0)).tolist()


FOLLOWERS: list[Any] = [versions, priorities, live, episodes, ranks]
WANTED = {
    versions: [7, 9],
    priorities: [1.0, 1.0, *[0.25] * 6],
    live: SLOTS,
    episodes: 2,
    ranks: [-1],
}


@pytest.mark.parametrize("overtaken", [False, True])
@pytest.mark.parametrize("follower", FOLLOWERS, ids=lambda one: one.__name__)
def test_a_follower_finds_what_has_changed(follower: Any, overtaken: bool) -> None:
    """From the log, or without it where the log has dropped the changes."""
    rb, change, read = follower()
    log = rb.storage.ledger.log
    change()
    if overtaken:
        log._runs.clear()
        log._last, log._named, log._oldest = None, 0, log.number
    assert read() == WANTED[follower]


def _ranked() -> ReplayBuffer:
    sampler = PrioritizedSampler(alpha=1.0, beta=1.0)
    return ReplayBuffer(storage=LazyTensorStorage(8), sampler=sampler, batch_size=4)


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("how", ["edits", "copy", "pickle"])
def test_loaded_priorities_outlive_the_log(how: str, mmap: bool, tmp_path: Path) -> None:
    """A copy of a buffer has no entries in its log, and many edits drop the oldest ones."""
    saved = _ranked()
    saved.extend(TensorDict({"x": torch.arange(8.0)}, [8]))
    saved.update_priority(torch.arange(8), torch.arange(1.0, 9.0))
    saved.dumps(tmp_path / "saved")
    loaded = _ranked()
    loaded.loads(tmp_path / "saved", mmap=mmap)
    if how == "copy":
        loaded = copy.deepcopy(loaded)
    elif how == "pickle":
        loaded = pickle.loads(pickle.dumps(loaded))
    for turn in range(80 if how == "edits" else 0):
        loaded.set_at_("x", torch.tensor(float(turn)), turn % 8)
    loaded.extend(TensorDict({"x": torch.zeros(1)}, [1]))
    expected = [8.0, *range(2, 9)]
    assert loaded.state_dict()["_sampler"]["_priorities"].tolist() == expected


def test_rows_set_in_place_end_episodes_at_once() -> None:
    def steps(*done: bool) -> TensorDict:
        following = TensorDict({"done": torch.tensor(done)}, [len(done)])
        return TensorDict({"x": torch.arange(len(done)), "next": following}, [len(done)])

    buffer = ReplayBuffer(storage=LazyTensorStorage(8))
    buffer.extend(steps(False, False, False, False, False, True))
    assert buffer.episodes.lengths.tolist() == [6]
    buffer.storage.set(torch.tensor([2]), steps(True), set_cursor=False)
    assert buffer.episodes.lengths.tolist() == [3, 3]
    buffer.storage.set(torch.tensor([3]), steps(True), set_cursor=False)
    assert buffer.episodes.lengths.tolist() == [3, 1, 2]
    buffer.extend(steps(False))
    assert buffer.episodes.lengths.tolist() == [3, 1, 2, 1]


def _observed(first: int, count: int) -> TensorDict:
    seen = torch.arange(first, first + count + 1, dtype=torch.float32)[:, None].expand(-1, 8)
    return TensorDict({"observation": seen[:-1], "next": {"observation": seen[1:]}}, [count])


def test_references_are_derived_again_after_a_follow_that_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    storage = LazyTensorStorage(100, dedup_next=True)
    rb = ReplayBuffer(storage=storage, shared=True)
    rb.extend(_observed(0, 60))
    other = another(rb)
    other.extend(_observed(60, 10))
    rb.extend(_observed(70, 5))
    table = other.storage._columns.table  # type: ignore[attr-defined]

    def fail(*_: Any) -> None:
        table.core.clear()
        raise ValueError("no")

    with monkeypatch.context() as patch:
        patch.setattr(table, "follow", fail)
        with pytest.raises(ValueError, match="no"):
            other.extend(_observed(75, 5))
    other.extend(_observed(75, 5))
    other[torch.arange(40, 0, -4)] = _observed(500, 10)  # which takes entries that are free
    seen = torch.arange(81)
    first, after = seen[:-1].clone(), seen[1:].clone()
    first[torch.arange(40, 0, -4)] = torch.arange(500, 510)
    after[torch.arange(40, 0, -4)] = torch.arange(501, 511)
    assert torch.equal(other[:]["observation"][:, 0], first.float())
    assert torch.equal(other[:]["next", "observation"][:, 0], after.float())


def test_references_follow_edits_slot_by_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(100, dedup_next=True), shared=True)
    rb.extend(_observed(0, 60))
    other = another(rb)
    other.extend(_observed(60, 10))
    rb[torch.tensor([3])] = _observed(200, 1)
    table = other.storage._columns.table  # type: ignore[attr-defined]
    monkeypatch.setattr(table, "reread", lambda _: pytest.fail("all references were read"))
    other.extend(_observed(80, 2))
    assert other[:]["observation"][:, 0].tolist()[:5] == [0, 1, 2, 200, 4]
    assert other[:]["next", "observation"][:, 0].tolist()[:5] == [1, 2, 3, 201, 5]


def test_returns_are_kept_if_others_empty_the_buffer_or_set_many_priorities(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rb = ReplayBuffer(
        storage=LazyTensorStorage(1000),
        sampler=PrioritizedSampler(alpha=0.6, beta=0.4),
        transform=ReturnToGo(0.5),
        shared=True,
        batch_size=4,
    )
    rb.extend(_ending(1.0, 2.0, 4.0))
    other = another(rb)
    other.extend(_ending(8.0))
    monkeypatch.setattr(
        ReturnToGo, "_replace_all", lambda *_: pytest.fail("all returns were computed again")
    )
    for _ in range(3):
        rb.empty()
        rb.extend(_ending(1.0, 2.0, 4.0))
        other.extend(_ending(8.0, 8.0))
        assert other[:]["episode_return"].flatten().tolist() == [3.0, 4.0, 4.0, 12.0, 8.0]
    index = torch.arange(5)
    for turn in range(70_000 // 5):
        rb.update_priority(index, torch.full((5,), 1.0 + turn))
    other.extend(_ending(2.0))
    assert other[:]["episode_return"].flatten().tolist() == [3.0, 4.0, 4.0, 12.0, 8.0, 2.0]
    assert other.sampler.state_dict()["_priorities"].tolist() == [14_000.0] * 6
    assert rb.storage.ledger.generations(index).tolist() == [6, 6, 6, 6, 4]


def _ending(*rewards: float) -> TensorDict:
    reward = torch.tensor(rewards)[:, None]
    done = torch.zeros(len(rewards), 1, dtype=torch.bool)
    done[-1] = True
    after = {"reward": reward, "done": done, "terminated": done.clone()}
    return TensorDict({"x": reward.clone(), "next": after}, [len(rewards)])
