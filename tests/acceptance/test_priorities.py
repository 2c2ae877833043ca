"""Prioritized sequences, and the trees below them."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch

from replaykit import (
    PrioritizedSampler,
    PrioritizedSliceSampler,
    SliceSampler,
    StackFrames,
)
from replaykit.errors import NotEnoughData


def prioritized(**options: Any) -> PrioritizedSliceSampler:
    return PrioritizedSliceSampler(**{"alpha": 1.0, "beta": 1.0, "eps": 0.0, **options})


@pytest.mark.acceptance("S8", "F13")
def test_stratified_shares_are_exact_and_repeat_while_the_other_never_does(
    ted: Any, buffer: Any
) -> None:
    makers = [
        lambda draw: SliceSampler(slice_len=1, draw=draw),
        lambda draw: prioritized(slice_len=1, draw=draw),
    ]
    for make in makers:
        rb = buffer(10, make("stratified"))
        rb.extend(ted([1, 1]))
        for _ in range(5):
            assert Counter(rb.sample(1000)["t"].tolist()) == {0: 500, 1: 500}
        rb = buffer(10, make("without_replacement"))
        rb.extend(ted([1, 1, 1]))
        counts = Counter(tuple(sorted(rb.sample(2)["t"].tolist())) for _ in range(600))
        assert set(counts) == {(0, 1), (0, 2), (1, 2)}
        assert all(140 < count < 260 for count in counts.values())
        with pytest.raises(NotEnoughData):
            rb.sample(4)
        rb = buffer(10, make("stratified"))
        rb.extend(ted([1, 1, 1]))
        repeats = sum(len(set(rb.sample(2)["t"].tolist())) == 1 for _ in range(1800))
        assert 140 < repeats < 260, repeats  # 1/9 of them


@pytest.mark.acceptance("S9")
def test_single_lane_fills_all_slices(ted: Any, buffer: Any) -> None:
    rb = buffer(100, prioritized(num_slices=4), lane_key="lane", generator=torch.Generator())
    rb.extend(ted([0], lane=[1]))
    assert rb.sample(4)["priority_weight"].tolist() == [1.0] * 4
    with pytest.raises(NotEnoughData):
        rb.sample(8)
    rb.extend(ted([0], 1, lane=[1]))
    batch = rb.sample(8)
    assert batch["lane"].tolist() == [1] * 8
    assert batch["t"].tolist() == [0, 1] * 4
    assert batch["priority_weight"].tolist() == [1.0] * 8
    rb.set_sampler(prioritized(slice_len=1, draw="stratified"))
    assert Counter(rb.sample(1000)["t"].tolist()) == {0: 500, 1: 500}


@pytest.mark.acceptance("S10")
def test_loaded_buffer_keeps_slice_weights_and_empty_ends_draws(
    ted: Any, buffer: Any, tmp_path: Any
) -> None:
    rb = buffer(100, prioritized(num_slices=6, beta=0.5), lane_key="lane")
    rb.extend(ted([0] * 4, lane=[0] * 4))
    rb.extend(ted([0], lane=[1]))
    for _ in range(50):  # the first row of the new lane starts no window of two
        assert set(rb.sample(12)["lane"].tolist()) == {0}
    rb.update_priority(torch.arange(5), torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]))
    rb.dumps(tmp_path / "saved")
    other = buffer(100, prioritized(num_slices=6, beta=0.5), lane_key="lane")
    other.loads(tmp_path / "saved")
    # The same rows have the same weights.
    for batch in (rb.sample(12), other.sample(12)):
        start = batch["index"].reshape(6, 2)[:, 0].tolist()
        weight = batch["priority_weight"].reshape(6, 2)[:, 0].tolist()
        for row, found in zip(start, weight, strict=True):
            assert found == pytest.approx((row + 1) ** -0.5)
    rb.empty()
    with pytest.raises(RuntimeError):
        rb.sample(12)


@pytest.mark.acceptance("S10", "F21")
def test_changed_slice_length_keeps_priorities(ted: Any, buffer: Any) -> None:
    """Episodes of 3 and 5 rows; the law of single rows, of windows of three, and back."""
    rb = buffer(16, prioritized(num_slices=64, draw="stratified"))
    rb.extend(ted([0, 0, 1, 0, 0, 0, 0, 1]))
    priority = torch.tensor([1.0, 8.0, 7.0, 2.0, 4.0, 1.0, 16.0, 25.0])
    rb.update_priority(torch.arange(8), priority)  # 64 in all

    def shares(length: int) -> dict[int, int]:
        starts = rb.sample(64 * length)["index"].reshape(64, length)[:, 0]
        return dict(Counter(starts.tolist()))

    single = {row: int(share) for row, share in enumerate(priority.tolist())}
    assert shares(1) == single
    assert shares(3) == {0: 8, 3: 16, 4: 32, 5: 8}  # 1, 2, 4 and 1 of 8
    assert shares(1) == single
    assert shares(5) == {3: 64}
    assert shares(1) == single


@pytest.mark.acceptance("S10", "F1")
def test_streams_that_come_and_go_under_one_sampler(ted: Any, buffer: Any) -> None:
    """What is drawn from is kept up from draw to draw: other streams may have the same numbers."""
    dice = random.Random(0)
    rb = buffer(12, prioritized(num_slices=64, draw="stratified"), lane_key="lane")
    rows: list[tuple[int, int]] = []
    clock: Counter[int] = Counter()
    for _ in range(300):
        lanes = [dice.randrange(9) for _ in range(dice.randint(1, 3))]
        own = ted([0] * len(lanes), lane=lanes)
        for at, lane in enumerate(lanes):
            clock[lane] += 1
            own["t"][at] = clock[lane]
            rows.append((lane, clock[lane]))
        rb.extend(own)
        stored = set(rows[-12:])
        wanted = {(lane, t) for lane, t in stored if (lane, t + 1) in stored}
        if wanted:
            batch = rb.sample(128)
            pairs = list(zip(batch["lane"].tolist(), batch["t"].tolist(), strict=True))
            assert set(pairs[::2]) == wanted
            assert pairs[1::2] == [(lane, t + 1) for lane, t in pairs[::2]]


@pytest.mark.acceptance("F8")
def test_updates_of_overwritten_rows_change_nothing(ted: Any, buffer: Any) -> None:
    rb = buffer(4, prioritized(slice_len=1))
    rb.extend(ted([0] * 4))
    old = rb.sample(64)
    old["td_error"] = torch.full((64,), 100.0)
    rb.extend(ted([0] * 4, 4))
    before = rb.state_dict()
    rb.update_tensordict_priority(old)
    empty = torch.zeros(0, dtype=torch.long)
    rb.update_priority(empty, torch.zeros(0))
    rb.update_priority(old["index"], 100.0, generation=old["index_generation"])
    after = rb.state_dict()
    assert torch.equal(before["_sampler"]["_priorities"], after["_sampler"]["_priorities"])
    assert rb.sample(64)["priority_weight"].unique().tolist() == [1.0]


@pytest.mark.acceptance("S10", "F9")
@pytest.mark.parametrize("slices", [False, True])
def test_a_late_update_does_not_make_a_guarded_row_drawable(
    slices: bool, ted: Any, buffer: Any
) -> None:
    sampler: Any = PrioritizedSampler(alpha=1.0, beta=1.0, eps=0.0)
    if slices:
        sampler = prioritized(slice_len=2)
    rb = buffer(6, sampler, transform=StackFrames(["observation"], 3))
    rb.extend(ted([0] * 6))
    handle = rb.sample(200)
    assert set(handle["t"].tolist()) == set(range(6))
    rb.extend(ted([0] * 2, 6))  # rows 2..7 are left; rows 2 and 3 have lost their history
    handle["td_error"] = torch.full((200,), 50.0)
    rb.update_tensordict_priority(handle)
    assert set(rb.sample(400)["t"].tolist()) == {4, 5, 6, 7}
    rb.update_priority(torch.tensor([2, 3]), 1e6)  # slots of rows 2 and 3, no generation
    batch = rb.sample(400)
    assert set(batch["t"].tolist()) == {4, 5, 6, 7}
    assert batch["observation"][:, 0].tolist() == (batch["t"] - 2).tolist()


@pytest.mark.acceptance("F6", "F20")
def test_weights_and_draws_survive_a_restart(ted: Any, buffer: Any, tmp_path: Any) -> None:
    """Window lengths change from call to call; the restored buffer draws the original's batches."""

    def make() -> Any:
        return buffer(32, prioritized(num_slices=8, alpha=0.7, beta=0.4, eps=1e-6))

    rb, other = make(), make()
    rb.extend(ted([0, 0, 0, 1] * 6))
    rb.update_priority(torch.arange(24), torch.arange(24) / 7)
    for length in (1, 3, 2):
        rb.sample(8 * length)
    rb.dumps(tmp_path / "saved")
    other.loads(tmp_path / "saved")
    for length in (2, 3, 1, 4):
        one, two = rb.sample(8 * length), other.sample(8 * length)
        for key in ("t", "priority_weight", "sequence_id"):
            assert torch.equal(one[key], two[key])
        assert torch.isfinite(one["priority_weight"]).all()
