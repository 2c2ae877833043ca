"""``rb.episodes`` and ``rb.cut`` against lists of rows that are scanned."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    Episode,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
)
from replaykit.episodes import EndReason, Head
from replaykit.errors import StaleAddress
from tests.support.refusals import refuses


def check(buffer: ReplayBuffer, lanes: int) -> None:
    """Compare the facts about episodes with their rows, reasons and heads.

    `tests/acceptance/test_histories.py` compares these with a scan of all rows.
    """
    found, rows = buffer.episodes, buffer.episodes.rows()
    number, at = rows["number"], torch.arange(len(found)).repeat_interleave(found.lengths)
    position, lane = number // lanes, number % lanes
    assert found.lanes[at].equal(lane)
    assert found.ids.equal(found.begins * lanes + found.lanes)
    assert buffer.storage.get(found.index)["number"].equal(number)
    first = found.lengths.cumsum(0) - found.lengths
    assert buffer.storage.get(found.starts)["number"].equal(number[first])
    assert found.returns.dtype == torch.float64
    totals = torch.zeros(len(found), dtype=torch.float64)
    totals.index_add_(0, at, rows["next", "reward"][:, 0].double())
    assert found.returns.equal(totals)  # eighths: sums of them are exact
    last = position[first + found.lengths - 1]
    for ask, expected in (
        ("position", position),
        ("id", found.ids[at]),
        ("begin", found.begins[at]),
        ("end", last[at]),
        ("step", position - found.begins[at]),
        ("steps_to_end", last[at] - position),
        ("reason", found.reasons[at]),
        ("head", found.heads[at]),
    ):
        assert getattr(found, ask)(found.index).equal(expected), ask
    every = found.of(found.index)
    assert every.ids.equal(found.ids[at])
    assert every.lengths.equal(found.lengths[at])
    for i, one in enumerate(found):
        assert one.rows()["number"].equal(number[at == i])
        assert (one.begin, one.end, one.lane) == (found.begins[i], last[i], found.lanes[i])
        assert one.id == found.ids[i]
        assert one.length == len(one) == found.lengths[i]
        assert one.evicted == position[first[i]] - one.begin
        assert (one.reason, one.head) == (found.reasons[i], found.heads[i])
        assert one.total_reward == totals[i]
        assert one.complete == (one.reason in (1, 2) and one.head == Head.RESET)


@pytest.mark.parametrize("lanes", [1, 3])
def test_all_facts_about_episodes_agree_with_their_rows(lanes: int) -> None:
    chance = random.Random(lanes)
    seen: set[tuple[int, int]] = set()
    for slots in range(1, 10):
        storage = LazyTensorStorage(slots * lanes, ndim=1 + (lanes > 1))
        buffer, written = ReplayBuffer(storage=storage), 0
        for _ in range(8):
            change = chance.choice(["extend", "extend", "extend", "cut", "empty"])
            if change == "empty":
                buffer.empty()
            elif change == "cut" and written:
                buffer.cut(chance.choice([None, *range(lanes)]))
            else:
                shape = (chance.randint(1, 2 * slots), lanes)
                number = torch.arange(shape[0] * lanes).view(shape) + written * lanes
                code = torch.tensor(chance.choices([0, 1, 2], [3, 1, 1], k=number.numel()))
                code = code.view(shape)
                ends = {"terminated": code == 1, "truncated": code == 2, "done": code > 0}
                reward = (number[..., None] * 7 % 41 - 20) / 8
                data = TensorDict({"number": number, "next": {"reward": reward, **ends}}, shape)
                buffer.extend(data[:, 0] if lanes == 1 else data.transpose(0, 1))
                written += shape[0]
            if len(buffer):
                check(buffer, lanes)
                found = buffer.episodes
                seen |= set(zip(found.reasons.tolist(), found.heads.tolist(), strict=True))
    assert len(seen) > 10  # pairs of a reason and a head


def flags(*done: int, **others: Any) -> TensorDict:
    rows = len(done)
    next_ = {"reward": torch.arange(rows)[:, None] * 1.0, "done": torch.tensor(done) > 0}
    return TensorDict({"id": torch.arange(rows), "next": next_, **others}, [rows])


def test_snapshot_reads_its_rows_or_reports_them_overwritten() -> None:
    """sequences.md 1.5: never a neighbour's row, whatever was written since."""
    buffer = ReplayBuffer(storage=LazyTensorStorage(6))
    buffer.extend(flags(0, 0, 1, 0, 1, 0))
    old = buffer.episodes
    first, second, third = old
    buffer.extend(flags(0))  # takes the place of row 0
    for read in (
        first.rows,
        lambda: first.index,
        lambda: first.total_reward,
        lambda: old.returns,
        old.rows,
    ):
        refuses(StaleAddress, "overwritten", read)
    assert (first.length, first.reason) == (3, EndReason.TERMINATED)
    assert old.lengths.tolist() == [3, 2, 1]
    assert second.rows()["id"].tolist() == [3, 4]
    assert third.rows()["id"].tolist() == [5]  # it has grown since: these were its rows
    assert old[1:].returns.tolist() == [7.0, 5.0]
    assert buffer.episodes.lengths.tolist() == [2, 2, 2]
    assert issubclass(StaleAddress, LookupError)


@pytest.mark.parametrize("lost", ["empty", "around", "load", "placed"])
def test_old_snapshot_never_returns_newer_rows(lost: str, tmp_path: Any):
    buffer = ReplayBuffer(storage=LazyTensorStorage(6))
    buffer.extend(flags(0, 0, 1, 0, 1, 0))
    if lost == "load":
        buffer.dumps(tmp_path / "saved")
    old = list(buffer.episodes)
    if lost == "load":
        buffer.loads(tmp_path / "saved")
    elif lost == "empty":
        buffer.empty()
        buffer.extend(flags(0, 0, 1, 0, 1, 0))
    elif lost == "placed":
        buffer.writer.write_at(torch.tensor([1, 4, 5]), flags(0, 0, 0))
    else:
        buffer.extend(flags(0, 0, 1, 0, 1, 0))
    for episode in old:
        with pytest.raises(StaleAddress):
            episode.rows()


def test_snapshot_reads_edited_rows() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(8))
    buffer.extend(flags(0, 0, 1, 0, 1))
    before = buffer.episodes[0]
    buffer[("next", "reward")] = torch.full((5, 1), 2.0)
    assert before.total_reward == 6.0
    buffer[("next", "done")] = torch.tensor([[False]] * 4 + [[True]])
    assert before.rows()["id"].tolist() == [0, 1, 2]
    assert buffer.episodes.lengths.tolist() == [5]


def test_episodes_support_indices_masks_and_filters() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(20))
    buffer.extend(flags(0, 0, 1, 0, 1, 1, 0, 0))
    episodes = buffer.episodes
    assert [one.length for one in episodes] == [3, 2, 1, 2]
    assert episodes[-1].reason is EndReason.OPEN
    assert isinstance(episodes[1], Episode)
    assert episodes[1:3].lengths.tolist() == [2, 1]
    assert episodes[::-1].lengths.tolist() == [2, 1, 2, 3]
    assert episodes[[0, 2]].lengths.tolist() == [3, 1]
    assert episodes[torch.tensor([2, -1])].lengths.tolist() == [1, 2]
    assert episodes[episodes.lengths == 2].ids.tolist() == [3, 6]
    kept = episodes.filter(lambda one: one.complete and one.length > 1)
    assert kept.rows()["id"].tolist() == [0, 1, 2, 3, 4]
    assert kept.filter(lambda one: False).index.tolist() == []
    assert len(kept.filter(lambda one: False).rows()) == 0
    assert "2 episodes, 5 rows" in repr(kept)
    for wrong in (4, -5, [0, 4]):
        with pytest.raises(IndexError, match=r"\[.*4\)"):
            _ = episodes[wrong]
    refuses(TypeError, "callable", episodes.filter, 3)
    changed = episodes.lengths
    changed.zero_()
    assert episodes.lengths.tolist() == [3, 2, 1, 2]


@pytest.mark.parametrize("wrong", [[3], [-1], [0, 7]])
def test_rows_that_are_not_stored_are_refused(wrong: list[int]) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(8))
    buffer.extend(flags(0, 0, 1))
    for ask in ("id", "begin", "end", "step", "steps_to_end", "reason", "head", "position", "of"):
        refuses(IndexError, r"\[0, 3\)", getattr(buffer.episodes, ask), torch.tensor(wrong))
        refuses(TypeError, "integers", getattr(buffer.episodes, ask), torch.tensor([0.0]))
        refuses(IndexError, "shape", getattr(buffer.episodes, ask), torch.tensor([[0, 1]]))


def test_sums_are_of_float64_and_stay_with_their_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not differences of one long sum, which an inf or a huge number would spoil; in blocks."""
    monkeypatch.setattr("replaykit.buffer.episodes._BLOCK", 3)
    data = flags(*([0, 0, 0, 0, 1] * 4))
    reward = torch.full((20, 1), 0.1)
    reward[2], reward[7], reward[12] = math.inf, math.nan, 3e38
    data["next", "reward"] = reward
    buffer, several = (ReplayBuffer(storage=LazyTensorStorage(32)) for _ in range(2))
    buffer.extend(data)
    found = buffer.episodes.returns.tolist()
    assert found[0] == math.inf
    assert math.isnan(found[1])
    assert found[2] == pytest.approx(3e38)
    assert found[3] == pytest.approx(math.fsum([reward[15].item()] * 5), abs=1e-15)
    data = flags(0, 0, 1, 0)
    data["next", "reward"] = torch.arange(8.0).view(4, 2)
    several.extend(data)  # rewards of several numbers are summed each
    assert several.episodes.returns.tolist() == [[6.0, 9.0], [6.0, 7.0]]
    assert several.episodes[0].total_reward.tolist() == [6.0, 9.0]


def test_buffers_without_rewards_rows_or_flags() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(8))
    assert (len(buffer.episodes), list(buffer.episodes)) == (0, [])
    assert buffer.episodes.returns.tolist() == []
    assert buffer.episodes.index.tolist() == []
    with pytest.raises(IndexError):
        buffer.episodes.begin(torch.tensor([0]))
    buffer.extend(flags(0, 1).exclude(("next", "reward")))
    with pytest.raises(KeyError, match="reward"):
        _ = buffer.episodes.returns
    with pytest.raises(KeyError, match="reward"):
        _ = buffer.episodes[0].total_reward
    with pytest.raises(RuntimeError, match="ListStorage does not know"):
        _ = ReplayBuffer(storage=ListStorage(8)).episodes
    refuses(RuntimeError, "ListStorage does not know", ReplayBuffer(storage=ListStorage(8)).cut)
    buffer = ReplayBuffer(storage=LazyTensorStorage(8))
    buffer.extend(torch.zeros(3))
    with pytest.raises(RuntimeError, match="tensors"):
        _ = buffer.episodes
    refuses(IndexError, "lanes", buffer.cut, 1)


def test_episodes_read_stored_rows_without_transforms(tmp_path: Any) -> None:
    """Transforms are for samples: an episode is what was written."""
    buffer = ReplayBuffer(
        storage=LazyMemmapStorage(8, scratch_dir=tmp_path),
        transform=lambda rows: rows.exclude("id"),
    )
    buffer.extend(flags(0, 0, 1, 0))
    rows = buffer.episodes[0].rows()
    assert rows["id"].tolist() == [0, 1, 2]
    rows["id"].zero_()
    assert buffer.episodes[0].rows()["id"].tolist() == [0, 1, 2]


def test_a_million_episodes_need_no_object_each() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(2_000_000))
    done = torch.arange(2_000_000) % 2 == 1
    reward = torch.arange(2_000_000, dtype=torch.float32) % 7
    buffer.extend(TensorDict({"next": {"done": done, "reward": reward}}, [2_000_000]))
    episodes = buffer.episodes
    assert len(episodes) == 1_000_000
    assert torch.equal(episodes.returns, reward.double().view(-1, 2).sum(1))
    assert torch.equal(episodes[episodes.ids % 4 == 0].ids, torch.arange(0, 2_000_000, 4))
    assert episodes[-1].index.tolist() == [1_999_998, 1_999_999]
