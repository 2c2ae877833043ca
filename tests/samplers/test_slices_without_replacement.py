"""One slice of every episode, before any gives another."""

from __future__ import annotations

import contextlib
import copy
import itertools
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ReplayBuffer,
    SliceSamplerWithoutReplacement,
)
from tests.samplers.building import follows, rows
from tests.support.refusals import refuses


def _buffer(
    data: Any, batch_size: int, capacity: int | None = None, prefetch: int = 0, **options: Any
) -> ReplayBuffer:
    rb = ReplayBuffer(
        storage=LazyTensorStorage(capacity or len(data)),
        sampler=SliceSamplerWithoutReplacement(**options),
        batch_size=batch_size,
        prefetch=prefetch,
        generator=torch.Generator().manual_seed(0),
    )
    if data is not None:
        rb.extend(data)
    return rb


def _episodes(batch: Any, length: int) -> list[int]:
    return batch["e"].reshape(-1, length)[:, 0].tolist()


def test_a_pass_has_one_slice_of_every_episode() -> None:
    rb = _buffer(rows([5] * 4), 6, slice_len=2)
    for _ in range(20):
        batches = list(rb)
        assert [len(batch) for batch in batches] == [6, 2]
        drawn = [e for batch in batches for e in _episodes(batch, 2)]
        assert sorted(drawn) == [0, 1, 2, 3]
    assert rb.sampler.ran_out


def test_orders_and_starts_are_uniform() -> None:
    rb = _buffer(rows([3, 5, 2]), 6, slice_len=2)
    firsts, starts = [], []
    for _ in range(3000):
        batch = rb.sample()
        firsts.append(_episodes(batch, 2)[0])
        t, e = batch["t"].reshape(-1, 2)[:, 0], batch["e"].reshape(-1, 2)[:, 0]
        starts.append(int(t[e == 1]) - 3)
    assert follows(torch.tensor(firsts), torch.full((3,), 1 / 3, dtype=torch.float64))
    assert follows(torch.tensor(starts), torch.full((4,), 1 / 4, dtype=torch.float64))


def test_written_order_on_request() -> None:
    rb = _buffer(rows([5, 2, 3, 4, 5]), 6, slice_len=3, shuffle=False)
    assert [_episodes(batch, 3) for batch in rb] == [[0, 2], [3, 4]]
    assert [_episodes(batch, 3) for batch in rb] == [[0, 2], [3, 4]]


def test_more_slices_than_episodes() -> None:
    rb = _buffer(rows([5, 2, 3]), 30, num_slices=10)
    assert _episodes(rb.sample(), 3) in ([0, 2], [2, 0])
    assert rb.sampler.ran_out
    rb = _buffer(rows([5, 2, 3]), 30, num_slices=10, strict_length=False)
    assert sorted(rb.sample()["sequence_id"].bincount().tolist()) == [2, 3, 3]


def test_a_short_tail_can_be_left_out() -> None:
    rb = _buffer(rows([5] * 5), 4, slice_len=2, drop_last=True)
    for _ in range(10):
        batches = list(rb)
        assert [len(batch) for batch in batches] == [4, 4]
        assert len({e for batch in batches for e in _episodes(batch, 2)}) == 4
    refuses(ValueError, "at most 5 slices with drop_last", rb.sample, 12)
    assert not rb.can_sample(12)
    assert rb.can_sample(10)
    with pytest.raises(ValueError, match="batch_size"):
        ReplayBuffer(sampler=SliceSamplerWithoutReplacement(slice_len=2, drop_last=True))


def test_a_write_begins_a_pass() -> None:
    rb = _buffer(rows([2] * 4), 4, 8, slice_len=2, shuffle=False)
    assert rb.sample()["t"].tolist() == [0, 1, 2, 3]
    rb.extend(rows([2], start=8))
    assert rb.sample()["t"].tolist() == [2, 3, 4, 5]
    rb.set_at_(("next", "done"), torch.tensor([[False]]), torch.tensor([3]))
    rb.set_at_(("next", "terminated"), torch.tensor([[False]]), torch.tensor([3]))
    assert sum(len(rb.sample()) for _ in range(2)) == 6


@pytest.mark.parametrize("prefetch", [0, 3])
def test_saved_pass_continues_in_a_larger_buffer(prefetch: int) -> None:
    """No episode is lost or comes twice."""
    rb = _buffer(rows([3] * 9), 4, 27, prefetch, slice_len=2)
    seen = _episodes(rb.sample(), 2)
    other = _buffer(None, 4, 40, prefetch, slice_len=2)
    other.load_state_dict(rb.state_dict())
    for buffer in (rb, other):
        rest = [_episodes(buffer.sample(), 2) for _ in range(4)]
        assert [len(part) for part in rest] == [2, 2, 2, 1]
        assert sorted([*seen, *itertools.chain(*rest)]) == list(range(9))
        assert buffer.sampler.ran_out
        buffer.shutdown()


def test_a_smaller_buffer_begins_a_pass() -> None:
    rb = _buffer(rows([3] * 4), 4, slice_len=2, shuffle=False)
    rb.sample()
    other = _buffer(None, 4, 7, slice_len=2, shuffle=False)
    with pytest.warns(UserWarning, match="rows"):
        other.load_state_dict(rb.state_dict())
    assert [_episodes(batch, 2) for batch in other] == [[2, 3]]


def test_returned_draws_are_drawn_again() -> None:
    rb = _buffer(rows([3, 1, 4, 2, 5, 2]), 4, slice_len=2)
    sampler, storage = rb.sampler, rb.storage
    drawn = [sampler.sample(storage, 4)[0] for _ in range(3)]
    assert sampler.ran_out
    sampler.put_back(drawn[1:], storage)
    episode = rb["e"]
    again = [sampler.sample(storage, 4)[0] for _ in range(2)]
    for one, other in zip(drawn[1:], again, strict=True):
        assert episode[one].tolist() == episode[other].tolist()
    assert sampler.ran_out


def _undone(lengths: list[int], seed: int) -> tuple[list[int], list[int]]:
    """Return the episodes of two passes of 3 episodes, and those of two draws that were undone.

    One of the two ends the first pass, the other begins the second, and a later one is delivered.
    """
    rb = _buffer(rows(lengths), 2, slice_len=2, strict_length=False)
    rb.set_rng(torch.Generator().manual_seed(seed))
    seen, failed = [int(rb.sample()["e"][0]) for _ in range(2)], []

    def fail(batch: TensorDict) -> TensorDict:
        if len(failed) < 2:
            failed.append(int(batch["e"][0]))
            with contextlib.suppress(OSError):
                seen.append(int(rb.sample()["e"][0]))
            raise OSError
        return batch

    rb.append_transform(fail)
    with pytest.raises(OSError):
        rb.sample()
    rb.state_dict()  # undoes the draws that failed
    return seen + [int(rb.sample()["e"][0]) for _ in range(3)], failed


@pytest.mark.parametrize("lengths", [[4, 4, 4], [1, 3, 5]])
def test_an_episode_with_two_undone_draws_comes_again_twice(lengths: list[int]) -> None:
    runs = [_undone(lengths, seed) for seed in range(20)]
    assert any(failed[0] == failed[1] for _, failed in runs)
    assert all(sorted(seen) == [0, 0, 1, 1, 2, 2] for seen, _ in runs)


def test_lanes_are_drawn_in_written_order() -> None:
    rb = ReplayBuffer(
        storage=LazyTensorStorage(20, ndim=2),
        sampler=SliceSamplerWithoutReplacement(slice_len=2, shuffle=False),
        batch_size=8,
    )
    rb.extend(torch.stack([rows([4, 6]), rows([5, 1, 4], start=100)], 0))
    batch = rb.sample()
    assert _episodes(batch, 2) == [0, 1, 0, 2]
    assert batch["index"][:, 1].tolist() == [0] * 4 + [1] * 4


@pytest.mark.parametrize(
    "change",
    [
        {"_remaining": torch.tensor([9])},
        {"_remaining": [0]},
        {"_returned": torch.tensor([0.5])},
        {"_episodes": -1},
        {"_length": "2"},
        {"_ran_out": None},
    ],
)
def test_invalid_state_is_refused(change: dict[str, Any]) -> None:
    rb = _buffer(rows([3] * 4), 4, slice_len=2)
    rb.sample()
    state = {**rb.sampler.state_dict(), **change}
    before = rb.sampler.state_dict()
    refuses(ValueError, "expected", rb.sampler.load_state_dict, state)
    assert torch.equal(rb.sampler.state_dict()["_remaining"], before["_remaining"])


@pytest.mark.skipif(sys.platform == "win32", reason="processes share rows under a lock of fcntl")
@pytest.mark.parametrize("how", ["copy", "pickle", "save"])
def test_write_of_another_process_ends_the_pass_of_a_copy(how: str, tmp_path: Path) -> None:
    """The other handle stands for another process: this one learns of its rows from the files."""

    def rows(first: int, count: int) -> TensorDict:
        number = torch.arange(first, first + count)
        return TensorDict({"x": number, "episode": number // 2}, [count])

    def sampler() -> SliceSamplerWithoutReplacement:
        return SliceSamplerWithoutReplacement(slice_len=2, traj_key="episode", shuffle=False)

    storage = LazyMemmapStorage(40, scratch_dir=tmp_path / "rows")
    buffer = ReplayBuffer(storage=storage, sampler=sampler(), batch_size=4, shared=True)
    buffer.extend(rows(0, 16))
    assert buffer.sample()["x"].tolist() == [0, 1, 2, 3]
    other = ReplayBuffer.join(tmp_path / "rows")
    other.extend(rows(16, 1))  # as many episodes have a window as before
    if how == "copy":
        found = copy.deepcopy(buffer)
    elif how == "pickle":
        found = pickle.loads(pickle.dumps(buffer))
    else:
        buffer.dumps(tmp_path / "saved")
        found = ReplayBuffer(storage=LazyTensorStorage(40), sampler=sampler(), batch_size=4)
        found.loads(tmp_path / "saved")
    assert found.sample()["x"].tolist() == [0, 1, 2, 3]  # the first batch of a pass
