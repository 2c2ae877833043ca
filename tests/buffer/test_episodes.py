"""``rb.episodes`` and ``rb.cut`` against lists of rows that are scanned."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
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


@dataclass
class Row:
    number: int
    position: int
    lane: int
    reward: float
    code: int = 0


@dataclass
class Model:
    """What a ring of ``slots`` rows in each of ``lanes`` lanes should say of its episodes."""

    slots: int
    lanes: int = 1
    rows: list[list[Row]] = field(default_factory=list)
    joined: list[bool] = field(default_factory=list)
    written: int = 0
    since: int = 0

    def __post_init__(self) -> None:
        self.rows = [[] for _ in range(self.lanes)]
        self.joined = [False] * self.lanes

    def write(self, codes: list[list[int]], rewards: list[list[float]]) -> None:
        for step, (at, values) in enumerate(zip(codes, rewards, strict=True)):
            for lane in range(self.lanes):
                position = self.written + step
                number = position * self.lanes + lane
                self.rows[lane].append(Row(number, position, lane, values[lane], at[lane]))
        self.written += len(codes)

    def cut(self, lane: int | None) -> None:
        for one in range(self.lanes) if lane is None else [lane]:
            if self.rows[one] and not self.rows[one][-1].code:
                self.rows[one][-1].code = 4

    def empty(self) -> None:
        for lane in range(self.lanes):
            if self.rows[lane]:
                # Emptied twice in a row: what was open then is not known to have ended.
                self.joined[lane] = not self.rows[lane][-1].code
            self.rows[lane] = []

    def episodes(self) -> list[dict[str, Any]]:
        found = []
        for lane in range(self.lanes):
            rows, oldest = self.rows[lane], max(0, len(self.rows[lane]) - self.slots)
            start, head = 0, Head.CUT if self.joined[lane] else Head.RESET
            for at, row in enumerate(rows):
                if not row.code and at < len(rows) - 1:
                    continue
                stored = rows[max(start, oldest) : at + 1]
                if stored:
                    found.append(
                        {
                            "lane": lane,
                            "id": rows[start].number,
                            "begin": rows[start].position,
                            "evicted": max(0, oldest - start),
                            "head": Head.EVICTED if start < oldest else head,
                            "reason": EndReason(min(row.code, 3)),
                            "rows": stored,
                        }
                    )
                start, head = at + 1, Head.CUT if row.code == 4 else Head.RESET
        return found


def written(model: Model, codes: list[list[int]], rewards: list[list[float]]) -> TensorDict:
    """The rows that the model has just been told of, as they are written."""
    steps = len(codes)
    number = (model.written - steps) * model.lanes + torch.arange(steps * model.lanes)
    code = torch.tensor(codes).view(steps, model.lanes)
    data = TensorDict(
        {
            "number": number.view(steps, model.lanes),
            "next": {
                "reward": torch.tensor(rewards).view(steps, model.lanes, 1),
                "terminated": code == 1,
                "truncated": code == 2,
                "done": code > 0,
            },
        },
        [steps, model.lanes],
    )
    return data[:, 0] if model.lanes == 1 else data.transpose(0, 1)


def check(buffer: ReplayBuffer, model: Model) -> None:
    found, expected = buffer.episodes, model.episodes()
    assert len(found) == len(expected)
    lengths = [len(one["rows"]) for one in expected]
    assert found.lengths.tolist() == lengths
    assert found.ids.tolist() == [one["id"] for one in expected]
    assert found.begins.tolist() == [one["begin"] for one in expected]
    assert found.reasons.tolist() == [one["reason"] for one in expected]
    assert found.heads.tolist() == [one["head"] for one in expected]
    assert found.lanes.tolist() == [one["lane"] for one in expected]
    sums = [math.fsum(row.reward for row in one["rows"]) for one in expected]
    assert found.returns.dtype == torch.float64
    assert found.returns.tolist() == sums  # eighths: sums of them are exact
    numbers = [row.number for one in expected for row in one["rows"]]
    if expected:
        assert found.rows()["number"].tolist() == numbers
        assert buffer.storage.get(found.starts)["number"].tolist() == [
            one["rows"][0].number for one in expected
        ]
    for one, wanted in zip(found, expected, strict=True):
        rows = wanted["rows"]
        assert one.rows()["number"].tolist() == [row.number for row in rows]
        assert (one.begin, one.end) == (wanted["begin"], rows[-1].position)
        assert (one.id, one.length, len(one)) == (wanted["id"], len(rows), len(rows))
        assert (one.lane, one.evicted) == (wanted["lane"], wanted["evicted"])
        assert (one.reason, one.head) == (wanted["reason"], wanted["head"])
        assert one.total_reward == math.fsum(row.reward for row in rows)
        assert one.complete == (one.reason in (1, 2) and one.head == Head.RESET)
    check_rows(buffer, expected)


def check_rows(buffer: ReplayBuffer, expected: list[dict[str, Any]]) -> None:
    looks, index = buffer.episodes, buffer.episodes.index
    facts = [(one, at, row) for one in expected for at, row in enumerate(one["rows"])]
    assert looks.id(index).tolist() == [one["id"] for one, _, _ in facts]
    assert looks.position(index).tolist() == [row.position for _, _, row in facts]
    assert looks.begin(index).tolist() == [one["begin"] for one, _, _ in facts]
    assert looks.end(index).tolist() == [one["rows"][-1].position for one, _, _ in facts]
    assert looks.step(index).tolist() == [at + one["evicted"] for one, at, _ in facts]
    assert looks.steps_to_end(index).tolist() == [len(one["rows"]) - 1 - at for one, at, _ in facts]
    assert looks.reason(index).tolist() == [one["reason"] for one, _, _ in facts]
    assert looks.head(index).tolist() == [one["head"] for one, _, _ in facts]
    every = looks.of(index)
    assert every.ids.tolist() == [one["id"] for one, _, _ in facts]
    assert every.lengths.tolist() == [len(one["rows"]) for one, _, _ in facts]


CODES = st.sampled_from([0, 0, 0, 1, 2])
REWARDS = st.integers(-20, 20).map(lambda eighths: eighths / 8)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 9), st.sampled_from([1, 1, 2, 3]))
def test_episodes_equal_a_scan_of_the_rows(data: st.DataObject, slots: int, lanes: int) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(slots * lanes, ndim=1 + (lanes > 1)))
    model = Model(slots, lanes)
    for _ in range(data.draw(st.integers(1, 6))):
        kind = data.draw(st.sampled_from(["extend", "extend", "extend", "cut", "empty"]))
        if kind == "cut" and model.written:
            lane = data.draw(st.one_of(st.none(), st.integers(0, lanes - 1)))
            buffer.cut(lane)
            model.cut(lane)
        elif kind == "empty":
            buffer.empty()
            model.empty()
        else:
            steps = data.draw(st.integers(1, 2 * slots))
            row = st.lists(CODES, min_size=lanes, max_size=lanes)
            codes = data.draw(st.lists(row, min_size=steps, max_size=steps))
            row = st.lists(REWARDS, min_size=lanes, max_size=lanes)
            rewards = data.draw(st.lists(row, min_size=steps, max_size=steps))
            model.write(codes, rewards)
            buffer.extend(written(model, codes, rewards))
        check(buffer, model)


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


def test_rewards_of_several_numbers_are_summed_each() -> None:
    data = flags(0, 0, 1, 0)
    data["next", "reward"] = torch.arange(8.0).view(4, 2)
    buffer = ReplayBuffer(storage=LazyTensorStorage(8))
    buffer.extend(data)
    assert buffer.episodes.returns.tolist() == [[6.0, 9.0], [6.0, 7.0]]
    assert buffer.episodes[0].total_reward.tolist() == [6.0, 9.0]


def test_sums_are_of_float64_and_stay_with_their_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not differences of one long sum, which an inf or a huge number would spoil; in blocks."""
    monkeypatch.setattr("replaykit.buffer.episodes._BLOCK", 3)
    data = flags(*([0, 0, 0, 0, 1] * 4))
    reward = torch.full((20, 1), 0.1)
    reward[2], reward[7], reward[12] = math.inf, math.nan, 3e38
    data["next", "reward"] = reward
    buffer = ReplayBuffer(storage=LazyTensorStorage(32))
    buffer.extend(data)
    found = buffer.episodes.returns.tolist()
    assert found[0] == math.inf
    assert math.isnan(found[1])
    assert found[2] == pytest.approx(3e38)
    assert found[3] == pytest.approx(math.fsum([reward[15].item()] * 5), abs=1e-15)


def test_without_a_reward_there_is_no_return() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(8))
    buffer.extend(flags(0, 1).exclude(("next", "reward")))
    with pytest.raises(KeyError, match="reward"):
        _ = buffer.episodes.returns
    with pytest.raises(KeyError, match="reward"):
        _ = buffer.episodes[0].total_reward


def test_buffer_without_rows_has_no_episodes() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(8))
    assert (len(buffer.episodes), list(buffer.episodes)) == (0, [])
    assert buffer.episodes.returns.tolist() == []
    assert buffer.episodes.index.tolist() == []
    with pytest.raises(IndexError):
        buffer.episodes.begin(torch.tensor([0]))


def test_content_without_episodes_raises_an_error() -> None:
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
