"""Queues and drains of streams, removal of rows, and even passes."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    ConsumingSampler,
    LaneWriter,
    LazyTensorStorage,
    ReplayBuffer,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    SliceSampler,
)
from replaykit.errors import NotEnoughData
from tests.support.refusals import refuses


def make(length: int = 4, lanes: Any = None, slots: int = 40) -> ReplayBuffer:
    storage = LazyTensorStorage(slots, lane_key="env")
    return ReplayBuffer(storage=storage, writer=LaneWriter(length, lanes))


def write(rb: ReplayBuffer, lanes: list[int], *times: int) -> None:
    for t in times:
        env = torch.tensor(lanes)
        rb.extend(TensorDict({"env": env, "t": torch.full_like(env, t)}, [len(lanes)]))


def test_rows_of_named_streams_leave_oldest_first() -> None:
    """In the order in which the streams are named; row ids are not used again."""
    rb, lanes = make(), [1, 2, 3, 5, 6]
    write(rb, lanes, *range(4, 10))
    assert rb.take(2)["t"].tolist() == [[6, 7]] * 5
    taken = rb.take(1, [5, 2, 1])
    assert (taken["env"].tolist(), taken["t"].tolist()) == ([[5], [2], [1]], [[8]] * 3)
    taken = rb.take(1)
    assert taken["env"].flatten().tolist() == lanes
    assert taken["t"].flatten().tolist() == [9, 9, 8, 9, 8]
    refuses(NotEnoughData, "rows, got 1", rb.take, 1, [3, 1])
    write(rb, lanes, 1, 2, 3)  # across the seam
    before = rb.storage.ledger.next_position
    assert rb.remove_oldest(2, lane=[6, 1]) == 4
    assert rb.remove_oldest(9, lane=5) == 3
    assert rb.storage.ledger.next_position == before
    stored = {int(e.rows()["env"][0]): e.rows()["t"].tolist() for e in rb.episodes}
    assert stored == {1: [3], 2: [1, 2, 3], 3: [9, 1, 2, 3], 6: [2, 3]}


def test_a_call_waits_for_rows_and_ends_when_the_buffer_closes() -> None:
    rb, found = make(), []
    thread = threading.Thread(target=lambda: found.append(rb.take(2, [3], timeout=20)))
    thread.start()
    time.sleep(0.04)
    write(rb, [3], 7, 8)
    thread.join(10)
    assert found[0]["t"].tolist() == [[7, 8]]
    refuses(TimeoutError, "within", rb.take, 1, [3], timeout=0.01)
    waiting = [threading.Thread(target=lambda: found.append(rb.take(1, timeout=None)))]
    waiting[0].start()
    time.sleep(0.04)
    rb.shutdown()
    waiting[0].join(10)
    assert found[1] is None is rb.take(1)
    rb.reopen()
    write(rb, [3], 9)
    assert rb.take(1)["t"].tolist() == [[9]]


@pytest.mark.acceptance("S2", "C18")
def test_all_rows_leave_at_once() -> None:
    rb = make(9, lanes=range(4))
    for first, last in ((1, 8), (9, 14)):
        for t in range(first, last + 1):
            write(rb, [0, 1, 2, 3], t)
        rows = rb.drain(skip=2)
        assert rows["t"].tolist() == [list(range(first + 2, last + 1))] * 4
        assert rows["position"][:, 0].tolist() == [4 * (first + 1) + lane for lane in range(4)]
        assert not len(rb)
    rb = make(4, lanes=range(8))
    write(rb, [0, 4, 7], 1)
    refuses(NotEnoughData, "0 to 1", rb.drain)
    write(rb, [1, 2, 3, 5, 6], 1)
    assert rb.drain().shape == (8, 1)
    write(rb, [0, 4, 7], *range(9))
    write(rb, [1, 2, 3, 5, 6], 0)
    refuses(NotEnoughData, "1 to 4", rb.drain)
    refuses(IndexError, r"got \[9\]", write, rb, [9], 0)
    write(rb, [1, 2, 3, 5, 6], *range(1, 9))
    write(rb, [0], 9)  # the lanes have equal numbers of rows, but lane 0 got one more
    refuses(NotEnoughData, r"aligned=True .*got 9 to 10", rb.drain, aligned=True)
    write(rb, [1, 2, 3, 4, 5, 6, 7], 9)
    assert rb.drain(aligned=True)["t"].tolist() == [[6, 7, 8, 9]] * 8
    grid = ReplayBuffer(storage=LazyTensorStorage(12, ndim=2))
    grid.extend(TensorDict({"t": torch.arange(10).reshape(2, 5)}, [2, 5]))
    grid.extend(TensorDict({"t": torch.arange(10, 18).reshape(2, 4)}, [2, 4]))
    rows = grid.drain()
    assert rows["t"].tolist() == [[3, 4, 10, 11, 12, 13], [8, 9, 14, 15, 16, 17]]
    assert rows["position"].tolist() == [list(range(3, 9))] * 2


@pytest.mark.acceptance("C18")
@pytest.mark.parametrize(
    ("rows", "size", "sizes"), [(264, 32, [33] * 8), (10, 4, [5, 5]), (11, 4, [6, 5]), (3, 4, [3])]
)
def test_even_passes_have_batches_of_nearly_equal_sizes(
    rows: int, size: int, sizes: list[int]
) -> None:
    rb = ReplayBuffer(
        storage=LazyTensorStorage(300), sampler=SamplerWithoutReplacement(even=True),
        batch_size=size,
    )  # fmt: skip
    rb.extend(torch.arange(rows))
    for _ in range(2):
        batches = [batch.tolist() for batch in rb]
        assert [len(batch) for batch in batches] == sizes
        assert sorted(row for batch in batches for row in batch) == list(range(rows))
    refuses(ValueError, "even=True", SamplerWithoutReplacement, even=True, drop_last=True)


def test_rows_are_used_up_oldest_first() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(4), sampler=ConsumingSampler(order="age"))
    rb.extend(torch.arange(4))
    assert rb.sample(2).tolist() == [0, 1]
    rb.extend(torch.arange(4, 6))  # in the slots of the first two
    state = rb.state_dict()
    for _ in range(2):
        assert [rb.sample(3).tolist(), rb.sample(1).tolist()] == [[2, 3, 4], [5]]
        rb.load_state_dict(state)
    refuses(ValueError, "order", ConsumingSampler, order="oldest")


def test_wrong_requests_are_refused() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(9, lane_key="env"), writer=RoundRobinWriter())
    write(rb, [1, 2], 1)
    for request in (lambda: rb.remove_oldest(1), lambda: rb.empty(lane=1)):
        refuses(ValueError, "LaneWriter", request)
    rb = make()
    write(rb, [1, 2], 1)
    for request, error in (
        (lambda: rb.remove_oldest(-1), ValueError), (lambda: rb.take(0), ValueError),
        (lambda: rb.take(5), ValueError), (lambda: rb.remove_oldest(1, lane=3), IndexError),
        (lambda: rb.take(1, [1, 1]), ValueError), (lambda: rb.drain(-1), ValueError),
        (lambda: rb.empty(lane=torch.tensor([True, False])), TypeError),
    ):  # fmt: skip
        with pytest.raises(error):
            request()
    assert len(rb) == 2
    refuses(ValueError, "distinct lanes", LaneWriter, 3, [1, 1])
    rb = make()
    rb.extend(TensorDict({"env": torch.arange(2, dtype=torch.uint8)}, [2]))
    refuses(IndexError, "uint8", rb.remove_oldest, 1, lane=256)  # as uint8 it would be 0


@pytest.mark.parametrize("writer", ["ring", "lanes", "edit"])
def test_loaded_tags_stay_with_their_episodes_in_the_first_change(
    writer: str, tmp_path: Path
) -> None:
    def made() -> ReplayBuffer:
        if writer == "lanes":
            return make(4, slots=12)
        return ReplayBuffer(storage=LazyTensorStorage(12))

    def episode(env: int, rows: int) -> TensorDict:
        done = torch.arange(rows) == rows - 1
        return TensorDict({"env": torch.full((rows,), env), "next": {"done": done}}, [rows])

    rb = made()
    for env in range(3):
        rb.tag(rb.extend(episode(env, 4)), {"mark": env + 1})
    rb.dumps(tmp_path)
    rb = made()
    rb.loads(tmp_path)
    if writer == "lanes":
        rb.empty(lane=0)
    elif writer == "edit":  # the first two rows become an episode, which keeps the tag
        rb.set_at_(("next", "done"), torch.tensor([True]), torch.tensor([1]))
        assert rb.storage.indexes.data()["mark"].tolist() == [1, 0, 2, 3]
        return
    else:
        rb.extend(torch.cat([episode(3, 2), episode(4, 3)]))
    marks = dict.fromkeys(range(5), 0) | {0: 1, 1: 2, 2: 3}
    data = rb.storage.indexes.data()
    assert data["mark"].tolist() == [marks[int(e.rows()["env"][0])] for e in rb.episodes]


@pytest.mark.parametrize("load", ["none", "buffer", "sampler", "later"])
def test_a_removal_begins_a_new_pass(load: str) -> None:
    rb = ReplayBuffer(
        storage=LazyTensorStorage(40, lane_key="env"), writer=LaneWriter(10), batch_size=4,
        sampler=lambda: SamplerWithoutReplacement(),
    )  # fmt: skip
    write(rb, [0, 1, 2, 3], 1, 2, 3)
    for step in range(20):
        rb.sample()
        if load == "buffer":
            rb.load_state_dict(rb.state_dict())
        elif load == "sampler":
            rb.sampler.load_state_dict(rb.sampler.state_dict())
        rb.take(1, [step % 4])
        write(rb, [step % 4], step + 4)  # as many rows as before
        if load == "later":
            rb.load_state_dict(rb.state_dict())
        drawn = torch.cat([rb.sample() for _ in range(3)])
        assert rb.sampler.ran_out
        assert len({*zip(drawn["env"].tolist(), drawn["t"].tolist(), strict=True)}) == 12


def test_draws_ahead_of_another_buffer_are_made_again_after_a_removal() -> None:
    rb = make(10)
    other = ReplayBuffer(
        storage=rb.storage, writer=LaneWriter(10),
        sampler=SliceSampler(slice_len=3, end_keys=(), traj_key=()),
        batch_size=6, prefetch=3, collate_fn=lambda rows: rows,
    )  # fmt: skip
    write(rb, [0, 1, 2, 3], *range(10))
    for step in range(40):
        batch = other.sample().reshape(-1, 3)
        assert (batch["t"].diff() == 1).all()
        assert (batch["env"].diff() == 0).all()
        rb.remove_oldest(3, lane=step % 4)
        for lane in (step % 4, (step - 1) % 4) if step % 2 else ():
            write(rb, [lane], *(10 + 3 * (step // 4) + i for i in range(3)))
