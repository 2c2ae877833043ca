"""Slices whose starts are drawn by priority: the law, windows, updates, state."""

from __future__ import annotations

import contextlib
import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    Compose,
    EpisodeWriter,
    LaneWriter,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSliceSampler,
    ReplayBuffer,
    RoundRobinWriter,
    Sequence,
    SliceSampler,
)
from replaykit.buffer.components import set_chain
from replaykit.errors import NotEnoughData
from tests.samplers.building import follows
from tests.samplers.needing import Needing
from tests.support.refusals import refuses


def steps(done: Any, start: int = 0, **columns: Any) -> TensorDict:
    done = torch.as_tensor(done, dtype=torch.bool)
    count = len(done)
    return TensorDict(
        {"step": torch.arange(start, start + count), "next": {"done": done}, **columns},
        batch_size=[count],
    )


def slices(
    capacity: int, length: int | None = 3, *, storage: Any = None, seed: int = 0, **options: Any
) -> ReplayBuffer:
    options = {"alpha": 1.0, "beta": 1.0, "eps": 0.0, **options}
    if "num_slices" not in options:
        options["slice_len"] = length
    return ReplayBuffer(
        storage=LazyTensorStorage(capacity) if storage is None else storage,
        sampler=PrioritizedSliceSampler(**options),
        generator=torch.Generator().manual_seed(seed),
    )


def law_of(values: Any) -> torch.Tensor:
    found = torch.as_tensor(values, dtype=torch.float64)
    return found / found.sum()


def starts(rb: ReplayBuffer, count: int, length: int = 3) -> torch.Tensor:
    """Draws ``count`` full slices and returns their starts, having looked at their rows."""
    data = rb.sample(count * length)
    step = data["step"].reshape(count, length)
    assert (step.diff(dim=1) == 1).all()
    assert (data["next", "done"].reshape(count, length).sum(1) == 1).all()
    return data["index"].reshape(count, length)[:, 0]


TWO = [0, 0, 0, 1, 0, 0, 0, 0, 0, 1]
"""Episodes in rows 0..3 and 4..9."""


# -- the law --------------------------------------------------------------------------------------


def test_weights_are_those_of_the_starts() -> None:
    rb = slices(10, alpha=0.7, beta=0.9, eps=0.0, dtype=torch.float64)
    rb.extend(steps(TWO))
    p = torch.tensor([3.0, 1, 50, 0.5, 2, 4, 3, 5, 50, 50])
    rb.update_priority(torch.arange(10), p)
    data, info = rb.sample(300, return_info=True)
    start = data["index"].reshape(100, 3)[:, :1].expand(100, 3).reshape(-1)
    v = p.double() ** 0.7
    torch.testing.assert_close(data["priority_weight"], (v[start] / v.min()) ** -0.9)
    assert torch.equal(info["priority_weight"], data["priority_weight"])
    rb = slices(10, alpha=0.7, beta=0.9, eps=0.0, dtype=torch.float64, weight_norm="batch")
    rb.extend(steps(TWO))
    rb.update_priority(torch.arange(10), p)
    data = rb.sample(6)
    start = data["index"].reshape(2, 3)[:, :1].expand(2, 3).reshape(-1)
    torch.testing.assert_close(data["priority_weight"], (v[start] / v[start].min()) ** -0.9)


def test_the_law_after_writes_updates_and_edits() -> None:
    """A ring that wraps several times; after each step chi-square against a scan."""
    capacity, length = 23, 3
    rb = slices(capacity, length)
    drawn = np.random.default_rng(0)
    done: list[bool] = []
    for step in range(14):
        count = int(drawn.integers(1, 12))
        fresh = drawn.random(count) < 0.2
        rb.extend(steps(fresh, start=len(done)))
        done += fresh.tolist()
        stored = range(max(0, len(done) - capacity), len(done))
        if step % 3 == 1:
            row = int(drawn.choice(list(stored)))
            done[row] = not done[row]
            rb.set_at_(
                ("next", "done"), torch.tensor([[done[row]]]), torch.tensor([row % capacity])
            )
        at = drawn.integers(len(rb), size=4)
        rb.update_priority(torch.from_numpy(at), torch.from_numpy(drawn.random(4) * 5))
        raw = rb.sampler.state_dict()["_priorities"].double()
        expected = torch.zeros(len(rb), dtype=torch.float64)
        for row in stored:
            if row + length <= len(done) and not any(done[row : row + length - 1]):
                expected[row % capacity] = raw[row % capacity]
        if not expected.any():
            assert not rb.can_sample(length)
            continue
        assert rb.can_sample(length)
        assert follows(starts(rb, 4000, length), law_of(expected))


def test_given_ends_bound_slices() -> None:
    ends = torch.tensor([0, 0, 0, 1, 0, 0, 0, 0, 0, 1], dtype=torch.bool)
    rb = ReplayBuffer(storage=LazyTensorStorage(20))
    rb.extend(steps([0] * 10))
    rb.set_sampler(PrioritizedSliceSampler(alpha=1.0, beta=1.0, eps=0.0, slice_len=3, ends=ends))
    rb.set_rng(torch.Generator().manual_seed(0))
    rb.update_priority(torch.arange(10), torch.arange(1.0, 11.0))
    drawn = rb.sample(12_000)["index"].reshape(-1, 3)[:, 0]
    assert follows(drawn, law_of([1, 2, 0, 0, 5, 6, 7, 8, 0, 0]))
    rb.extend(steps([0]))
    refuses(RuntimeError, "ends", rb.sample, 3)


@pytest.mark.pitfall("BD5")
def test_all_window_makers_use_the_same_ends() -> None:
    flags = torch.tensor([0, 0, 1, 0, 0, 0, 0, 0, 0, 0], dtype=torch.bool)
    rows = TensorDict(
        {
            "step": torch.arange(10),
            "episode": torch.tensor([0, 0, 0, 0, 0, 1, 1, 1, 1, 1]),
            "next": {"done": torch.zeros(10, dtype=torch.bool), "truncated": flags},
        },
        batch_size=[10],
    )
    rb = slices(10, 2)
    rb.extend(rows)
    data = rb.sample(400)["index"].reshape(-1, 2)
    pairs = {tuple(pair) for pair in data.tolist()}
    unit = Sequence(2)
    index, info = unit.expand(torch.arange(10), {}, rb.storage)
    both = info["validity_mask"].reshape(10, 2).all(1)
    assert pairs == {tuple(pair) for pair in index.reshape(10, 2)[both].tolist()}
    assert pairs == {(0, 1), (1, 2), (3, 4), (5, 6), (6, 7), (7, 8), (8, 9)}
    rb.set_sampler(SliceSampler(slice_len=2))
    assert pairs == {tuple(pair) for pair in rb.sample(400)["index"].reshape(-1, 2).tolist()}


# -- windows that are not full --------------------------------------------------------------------


def shares(rb: ReplayBuffer, size: int) -> dict[tuple[int, ...], int]:
    data = rb.sample(size)
    found: dict[tuple[int, ...], int] = {}
    for window in data["sequence_id"].unique():
        rows = tuple(data["step"][data["sequence_id"] == window].tolist())
        found[rows] = found.get(rows, 0) + 1
    return found


@pytest.mark.parametrize(
    ("options", "done", "windows"),
    [
        (
            {"strict_length": False},
            [0, 1, 0, 0, 0, 0, 1, 1, 0, 0],
            {(0, 1), (2, 3, 4), (3, 4, 5), (4, 5, 6), (7,), (8, 9)},
        ),
        ({"span": (False, 1)}, [0] * 5, {(0, 1, 2), (1, 2, 3), (2, 3, 4), (3, 4)}),
        ({"span": (False, True)}, [0] * 5, {(0, 1, 2), (1, 2, 3), (2, 3, 4), (3, 4), (4,)}),
        ({"span": (2, False)}, TWO, {(s, s + 1, s + 2) for s in (0, 1, 4, 5, 6, 7)}),
    ],
)
def test_windows_that_are_not_full(options: dict[str, Any], done: Any, windows: Any) -> None:
    """A span at the left is ignored with a warning."""
    ignored = options.get("span", (False,))[0]
    warns = pytest.warns(UserWarning, match="start of an episode")
    with warns if ignored else contextlib.nullcontext():
        rb = slices(len(done), **options)
    rb.extend(steps(done))
    assert set(shares(rb, 1200)) == windows


def test_padding_at_the_right() -> None:
    rb = slices(8, pad="right", pad_value=-1, flat=False)
    rb.extend(steps([0, 0, 0, 0, 0, 1, 0, 1]))
    rb.update_priority(torch.arange(8), torch.arange(1.0, 9.0))
    data = rb.sample(3 * 9000)
    assert data.batch_size == (9000, 3)
    mask = data["collector", "mask"]
    start = data["index"][:, 0]
    # Of an episode no longer than the slice there is one window, the whole of it.
    assert follows(start, law_of([1, 2, 3, 4, 5, 6, 7, 0]))
    assert (data["step"][~mask] == -1).all()
    left = torch.where(start < 6, 6 - start, 8 - start).clamp(max=3)
    assert torch.equal(mask.sum(1), left)
    assert (data["next", "done"].sum(1) == 1).all()


# -- other draws ----------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"stratified": True}, {"draw": "stratified"}])
def test_stratified_draws_count_exactly(options: dict[str, Any]) -> None:
    rb = slices(10, 1, **options)
    rb.extend(steps([0, 0]))
    assert rb.sample(1000)["index"].bincount().tolist() == [500, 500]
    rb.extend(steps([0] * 8))
    rb.update_priority(torch.arange(10), torch.tensor([1.0, 3] + [0.5] * 8))
    counts = rb.sample(800)["index"].bincount()
    assert counts.tolist() == [100, 300] + [50] * 8


def test_draw_without_replacement_repeats_no_start() -> None:
    rb = slices(10, draw="without_replacement")
    rb.extend(steps(TWO))
    for _ in range(20):
        assert sorted(starts(rb, 6).tolist()) == [0, 1, 4, 5, 6, 7]
    refuses(NotEnoughData, "6 with weight", rb.sample, 21)
    assert rb.can_sample(18)
    assert not rb.can_sample(21)
    rb = slices(10, draw="without_replacement", allow_short=True)
    rb.extend(steps(TWO))
    assert rb.sample(300).batch_size == (18,)


@pytest.mark.parametrize("capacity", [4, 400])
def test_successive_draws_exclude_earlier_draws(capacity: int) -> None:
    rb = slices(capacity, 1, draw="without_replacement")
    rb.extend(steps([0] * capacity))
    p = torch.zeros(capacity)
    p[:4] = torch.tensor([1.0, 2.0, 4.0, 100.0])
    rb.update_priority(torch.arange(capacity), p)
    pairs = torch.stack([rb.sample(2)["index"] for _ in range(1500)])
    law = torch.zeros(4, 4, dtype=torch.float64)
    for first in range(4):
        for second in range(4):
            if first != second:
                law[first, second] = p[first] / 107 * p[second] / (107 - p[first])
    assert follows(pairs[:, 0] * 4 + pairs[:, 1], law.reshape(-1))


# -- sequences reference S7, S9, S10, F20, F21 ----------------------------------------------------


def test_starts_respect_needs_of_transforms() -> None:
    rb = slices(12, 2)
    set_chain(rb, Compose(Needing(past=2, open_future=1)))
    init = torch.zeros(12, 1, dtype=torch.bool)
    rb.extend(steps([0, 0, 0, 0, 0, 1] + [0] * 6, is_init=init))
    p = torch.arange(1.0, 13.0)
    rb.update_priority(torch.arange(12), p)
    # Starts from the third row of an episode on; the open one does not use its newest row.
    assert follows(starts(rb, 8000, 2), law_of([0, 0, 3, 4, 5, 0, 0, 0, 9, 10, 0, 0]))


# -- updates --------------------------------------------------------------------------------------


@pytest.mark.parametrize("flat", [True, False])
def test_padding_does_not_affect_priorities(flat: bool) -> None:
    rb = slices(6, 3, pad="right", flat=flat)
    rb.extend(steps([0, 0, 0, 0, 0, 1]))
    data = rb.sample(300)
    mask = data["collector", "mask"]
    assert not mask.all()
    data["td_error"] = data["step"].float() + 2
    data["td_error"][~mask] = float("nan")
    rb.update_tensordict_priority(data)
    assert rb.sampler.state_dict()["_priorities"].tolist() == [2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("options", [{}, {"flat": False}, {"pad": "right"}])
def test_whole_slices_have_one_priority(options: dict[str, Any]) -> None:
    rb = slices(10, unit="slice", **options)
    rb.extend(steps(TWO))
    data = rb.sample(30)
    mask = torch.ones(data.batch_size, dtype=torch.bool)
    if options.get("pad"):
        mask = data["collector", "mask"]
    first = data["index"].reshape(10, 3)[:, :1].expand(10, 3)
    assert torch.equal(data["anchor_index"].reshape(10, 3), first)
    data["td_error"] = torch.rand(data.batch_size, generator=torch.Generator().manual_seed(0))
    data["td_error"][~mask] = float("inf")
    rb.update_tensordict_priority(data)
    now = rb.sampler.state_dict()["_priorities"]
    flat = data.reshape(-1)
    for row in range(10):
        own = (flat["anchor_index"] == row) & mask.reshape(-1)
        assert now[row] == (flat["td_error"][own].max() if own.any() else 1.0)


def test_whole_slices_that_were_overwritten() -> None:
    rb = slices(6, 2, unit="slice")
    rb.extend(steps([0] * 6))
    data = rb.sample(80)
    rb.extend(steps([0, 0], start=6))
    data["td_error"] = torch.full((80,), 5.0)
    rb.update_tensordict_priority(data)
    # The window of rows 5 and 6 is gone, its start is not.
    assert rb.sampler.state_dict()["_priorities"].tolist() == [1, 1, 5, 5, 5, 1]


def test_lanes_update_by_row() -> None:
    rb = slices(12, 2, storage=LazyTensorStorage(12, ndim=2), unit="slice")
    rb.extend(torch.stack([steps([0] * 6), steps([0] * 6, start=100)]))
    data = rb.sample(200)
    data["td_error"] = data["step"].float()
    rb.update_tensordict_priority(data)
    now = rb.sampler.state_dict()["_priorities"].reshape(6, 2)
    assert now[:, 0].tolist() == [1, 2, 3, 4, 5, 1]
    assert now[:, 1].tolist() == [101, 102, 103, 104, 105, 1]


# -- what it must not do --------------------------------------------------------------------------


@pytest.mark.pitfall("BD17")
@pytest.mark.parametrize(
    "where",
    [
        "replaykit.samplers.priority_table.PriorityTable.draw_weighted",
        "replaykit.samplers.window_forms.Window.numbers",
        "replaykit.samplers.priority_draws.EligiblePriorities._derive_all",
        "replaykit.samplers.priority_draws.EligiblePriorities._derive",
    ],
)
def test_a_draw_that_fails_changes_no_priority(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rb = slices(40)
    rb.extend(steps([0] * 40))
    rb.update_priority(torch.arange(40), torch.arange(1.0, 41.0))
    if where.endswith("_derive"):
        rb.sample(3)
        rb.update_priority(torch.tensor([5]), torch.tensor([6.0]))
    before = rb.sampler.state_dict()["_priorities"]
    leaves = rb.sampler._table._sums.leaves

    def fail(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(where, fail)
        with pytest.raises(ZeroDivisionError):
            rb.sample(30)
    assert torch.equal(rb.sampler.state_dict()["_priorities"], before)
    assert torch.equal(rb.sampler._table._sums.leaves, leaves)
    expected = torch.arange(1.0, 41.0)
    expected[38:] = 0
    assert follows(starts(rb, 8000), law_of(expected))


# -- refusals -------------------------------------------------------------------------------------


def test_zero_weight_of_all_starts_raises_error() -> None:
    rb = slices(10)
    rb.extend(steps(TWO))
    refuses(RuntimeError, "slice_len=3", rb.sample, 10)
    rb.update_priority(torch.arange(10), torch.tensor([0.0, 0, 5, 5, 0, 0, 0, 0, 5, 5]))
    assert not rb.can_sample(3)
    with pytest.raises(RuntimeError, match="zero") as raised:
        rb.sample(3)
    assert not isinstance(raised.value, NotEnoughData)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"pad": "left"}, ValueError),
        ({"pad": "both"}, ValueError),
        ({"pad": "middle"}, ValueError),
        ({"draw": "sequential"}, ValueError),
        ({"unit": "window"}, ValueError),
        ({"stratified": True, "draw": "without_replacement"}, ValueError),
        ({"allow_short": True}, ValueError),
        ({"pad_value": 3}, ValueError),
        ({"alpha": -1.0}, ValueError),
        ({"beta": float("nan")}, ValueError),
        ({"reduction": "first"}, ValueError),
        ({"weight_norm": "none"}, ValueError),
        ({"num_slices": 2, "slice_len": 2}, TypeError),
        ({"slice_len": None}, TypeError),
        ({"replacement": False}, TypeError),
        ({"end_key": "a", "end_keys": ["b"]}, RuntimeError),
        ({"pad_output": True}, ValueError),
        ({"flat": False, "strict_length": False}, ValueError),
        ({"recent": 0.5}, TypeError),
        ({"recent": (0.5, 3), "draw": "without_replacement"}, ValueError),
    ],
)
def test_invalid_arguments_are_refused(options: dict[str, Any], error: type[Exception]) -> None:
    given = {"alpha": 1.0, "beta": 1.0, "slice_len": 3, **options}
    with pytest.raises(error):
        PrioritizedSliceSampler(**given)


def test_capacity_may_be_given_by_position() -> None:
    refuses(TypeError, "alpha", PrioritizedSliceSampler, slice_len=3)
    assert PrioritizedSliceSampler(100, 0.5, 0.4, slice_len=3).max_capacity == 100


def test_content_without_episodes() -> None:
    rb = slices(10, storage=ListStorage(10))
    rb.extend([steps([0])[0]])
    refuses(RuntimeError, "TensorDict", rb.sample, 3)
    with pytest.raises(ValueError, match="PrioritizedSliceSampler"):
        ReplayBuffer(
            storage=LazyTensorStorage(3),
            sampler=PrioritizedSliceSampler(alpha=1.0, beta=1.0, slice_len=2),
            sample_unit=Sequence(2),
        )


# -- state ----------------------------------------------------------------------------------------


def test_a_copy_is_independent() -> None:
    rb = slices(10)
    rb.extend(steps(TWO))
    rb.sample(3)
    other = copy.deepcopy(rb)
    assert torch.equal(rb.sample(30)["index"], other.sample(30)["index"])
    other.update_priority(torch.arange(10), 3.0)
    assert (rb.sampler.state_dict()["_priorities"] == 1).all()


def test_set_storage_resets_priorities() -> None:
    rb = slices(10)
    rb.extend(steps(TWO))
    rb.update_priority(torch.arange(10), torch.arange(1.0, 11.0))
    rb.sample(3)
    other = LazyTensorStorage(8)
    ReplayBuffer(storage=other).extend(steps([0, 0, 0, 0, 1, 0, 0, 0]))
    rb.set_storage(other)
    assert follows(starts(rb, 4000), law_of([1, 1, 1, 0, 0, 1, 0, 0]))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("ndim", [1, 2])
@pytest.mark.parametrize("draw", ["iid", "stratified", "without_replacement"])
def test_slices_follow_the_law_on_cuda(ndim: int, draw: str) -> None:
    storage = LazyTensorStorage(40, ndim=ndim, device="cuda")
    rb = ReplayBuffer(
        storage=storage,
        sampler=PrioritizedSliceSampler(
            alpha=1.0, beta=1.0, eps=0.0, slice_len=3, draw=draw, unit="slice"
        ),
        generator=torch.Generator("cuda").manual_seed(0),
    )
    rows = steps([0, 0, 0, 1] * 5)
    rb.extend(rows if ndim == 1 else torch.stack([rows, rows.clone()]))
    for _ in range(3):
        data = rb.sample(15)
        assert data["index"].is_cuda
        assert data["priority_weight"].is_cuda
        assert (data["step"].reshape(5, 3).diff(dim=1) == 1).all()
        data["td_error"] = data["step"].float() + 1
        rb.update_tensordict_priority(data)
        rb.extend(rows[:4] if ndim == 1 else torch.stack([rows[:4], rows[:4].clone()]))
    rb = ReplayBuffer(storage=storage, sample_unit=Sequence(3, burn_in=1))
    data = rb.sample(8)
    assert data["anchor_index"].is_cuda
    assert data["validity_mask"].is_cuda


@pytest.mark.parametrize("writer", [RoundRobinWriter, lambda: LaneWriter(60), EpisodeWriter])
@pytest.mark.parametrize("pad", [None, "right"])
def test_streams_have_the_draws_of_a_copy_that_reads_all_rows(writer: Any, pad: Any) -> None:
    """Rows are written, removed and moved, and priorities set, between draws."""
    draw, sampler = random.Random(0), PrioritizedSliceSampler(256, 1.0, 0.5, slice_len=3, pad=pad)
    rb = ReplayBuffer(
        storage=LazyTensorStorage(256, lane_key="env"),
        sampler=sampler,
        writer=writer(),
        batch_size=30,
        generator=torch.Generator().manual_seed(0),
    )
    queues, draws = writer is not RoundRobinWriter, 0
    for step in range(300):
        env, count = step, draw.randrange(1, 8)
        env = env if writer is EpisodeWriter else env % 4
        done = torch.zeros(count, dtype=torch.bool)
        done[-1] = draw.random() < 0.3
        rows = {"env": torch.full((count,), env), "next": {"done": done}}
        rb.extend(TensorDict(rows, [count]))
        if draw.random() < 0.3:
            rb.update_priority(torch.randint(len(rb), (4,)), torch.rand(4) + 0.1)
        if queues and draw.random() < 0.2:
            rb.remove_oldest(draw.randrange(1, 4), lane=env)
        if sampler.can_sample(rb.storage, 30) and draw.random() < 0.5:
            one, two = copy.deepcopy(rb).sample(), rb.sample()
            assert torch.equal(one["index"], two["index"])
            assert torch.equal(one["priority_weight"], two["priority_weight"])
            draws += 1
    assert draws > 90
