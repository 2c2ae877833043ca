"""Every record once, before any comes again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from replaykit import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
from tests.support.refusals import refuses


def _buffer(
    rows: int, batch_size: int | None, capacity: int | None = None, seed: int = 0, **options: Any
) -> ReplayBuffer:
    rb = ReplayBuffer(
        storage=LazyTensorStorage(capacity or max(rows, 1)),
        sampler=SamplerWithoutReplacement(**options),
        batch_size=batch_size,
        generator=torch.Generator().manual_seed(seed),
    )
    if rows:
        rb.extend(torch.arange(rows))
    return rb


def _epoch(rb: ReplayBuffer) -> list[list[int]]:
    return [batch.tolist() for batch in rb]


# -- epochs ---------------------------------------------------------------------------------------


def test_epochs_differ_and_are_uniform() -> None:
    """Each of the 24 orders of four rows, and each row first, equally often; fixed seed."""
    rb = _buffer(4, 4)
    orders = [tuple(rb.sample().tolist()) for _ in range(4800)]
    counts = [orders.count(order) for order in set(orders)]
    assert len(counts) == 24
    chi_square = sum((count - 200) ** 2 / 200 for count in counts)
    assert chi_square < 23 + 5 * (2 * 23) ** 0.5


def test_emptying_begins_a_new_epoch() -> None:
    rb = _buffer(6, 4, shuffle=False)
    rb.sample()
    rb.empty()
    assert not rb.can_sample()
    rb.extend(torch.arange(6) + 20)
    assert rb.sample().tolist() == [20, 21, 22, 23]


def test_drop_last_needs_a_batch_size_and_as_many_rows() -> None:
    refuses(ValueError, r"\(4\) is .* 3 rows are stored", _buffer(3, 4, drop_last=True).sample)
    refuses(ValueError, "give the buffer a batch_size", _buffer, 6, None, drop_last=True)
    rb = ReplayBuffer(storage=LazyTensorStorage(3))
    with pytest.raises(ValueError, match="give the buffer a batch_size"):
        rb.set_sampler(SamplerWithoutReplacement(drop_last=True))


# -- state ----------------------------------------------------------------------------------------


def test_a_state_is_a_copy() -> None:
    rb = _buffer(6, 2, shuffle=False)
    rb.sample()
    state = rb.sampler.state_dict()
    state["_remaining"].fill_(0)
    assert rb.sample().tolist() == [2, 3]
    other = SamplerWithoutReplacement()
    state = rb.sampler.state_dict()
    other.load_state_dict(state)
    state["_remaining"].fill_(0)
    assert other.state_dict()["_remaining"].tolist() == [4, 5]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"_kind": "random"}, "the state of a 'without_replacement' sampler, got 'random'"),
        ({"_length": -1}, "_length as an int of at least 0, got -1"),
        ({"_length": True}, "_length as an int"),
        ({"_ran_out": 1}, "_ran_out as a bool, got 1"),
        ({"_remaining": [1, 2]}, "_remaining as int64"),
        ({"_remaining": torch.tensor([0.0])}, "_remaining as int64"),
        ({"_remaining": torch.tensor([6])}, r"_remaining in \[0, 6\)"),
        ({"_remaining": torch.tensor([-1])}, r"_remaining in \[0, 6\)"),
    ],
)
def test_invalid_state_is_refused(changes: dict[str, Any], message: str) -> None:
    rb = _buffer(6, 2)
    rb.sample()
    with pytest.raises(ValueError, match=message):
        rb.sampler.check_state({**rb.sampler.state_dict(), **changes}, rb.storage)
    refuses(ValueError, message, rb.sampler.load_state_dict, {**rb.sampler.state_dict(), **changes})
    assert len(rb.sample()) + len(rb.sample()) == 4


@pytest.mark.pitfall("CK9")
@pytest.mark.parametrize("capacity", [5, 30])
@pytest.mark.parametrize(("written", "later"), [(7, 0), (11, 0), (25, 0), (7, 4)])
def test_epoch_continues_in_another_capacity(capacity: int, written: int, later: int) -> None:
    """CK9: what is left of the epoch follows its rows, and rows that are gone leave it. Rows that
    were written later end it."""
    rb = _buffer(written, 3, capacity=11)
    seen = {int(value) for _ in range(2) for value in rb.sample()}
    if later:
        rb.extend(torch.arange(written, written + later))
        seen = set()
    stored = set(rb[:].tolist())
    twin = _buffer(0, 3, capacity=capacity)
    if capacity < len(stored):
        with pytest.warns(UserWarning, match="do not fit"):
            twin.load_state_dict(rb.state_dict())
    else:
        twin.load_state_dict(rb.state_dict())
    kept = set(twin[:].tolist())
    assert len(kept) == min(capacity, len(stored))
    rest = [number for piece in _epoch(twin) for number in piece]
    # Where every row that is left has come, the epoch is over and another one begins.
    assert sorted(rest) == sorted(kept - seen or kept)
    assert sorted(n for piece in _epoch(twin) for n in piece) == sorted(kept)


def test_lanes_move_step_by_step(make_lanes: Any) -> None:
    rb = ReplayBuffer(
        storage=LazyTensorStorage(8, ndim=2), sampler=SamplerWithoutReplacement(), batch_size=3
    )
    rb.extend(make_lanes(0, 6))  # steps 2 to 5 are left, 4 and 5 in slots 0 and 1
    seen = set(rb.sample()["id"].tolist())
    twin = ReplayBuffer(
        storage=LazyTensorStorage(4, ndim=2), sampler=SamplerWithoutReplacement(), batch_size=3
    )
    with pytest.warns(UserWarning, match="2 rows do not fit"):
        twin.load_state_dict(rb.state_dict())
    rest = torch.cat([batch["id"] for batch in twin]).tolist()
    assert sorted(rest) == sorted({4, 5, 104, 105} - seen)


# -- draws that are given back --------------------------------------------------------------------


@pytest.mark.pitfall("RD2")
def test_returned_draws_are_drawn_again_first() -> None:
    """RD2: a draw that nobody got is not lost, and its rows keep their order."""
    rb = _buffer(10, 3)
    sampler, storage = rb.sampler, rb.storage
    whole = _buffer(10, 3)
    expected = [whole.sample().tolist() for _ in range(4)]
    first = rb.sample().tolist()
    for pieces in (2, 3):  # also those that ended the pass
        drawn = [sampler.sample(storage, 3)[0] for _ in range(pieces)]
        assert [first, *(piece.tolist() for piece in drawn)] == expected[: pieces + 1]
        assert sampler.ran_out is (pieces == 3)
        sampler.put_back(drawn, storage)
    assert [rb.sample().tolist() for _ in range(3)] == expected[1:]
    assert sampler.ran_out


def test_cells_of_lanes_can_be_put_back(make_lanes: Any) -> None:
    rb = ReplayBuffer(
        storage=LazyTensorStorage(6, ndim=2), sampler=SamplerWithoutReplacement(shuffle=False)
    )
    rb.extend(make_lanes(0, 3))
    drawn, _ = rb.sampler.sample(rb.storage, 4)
    assert drawn.tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
    rb.sampler.put_back([drawn], rb.storage)
    batch = rb.sample(7)  # every cell, once
    assert batch["id"].tolist() == [0, 100, 1, 101, 2, 102]
    assert torch.equal(batch["index"], torch.cartesian_prod(torch.arange(3), torch.arange(2)))


def test_repr_shows_options() -> None:
    assert repr(SamplerWithoutReplacement(True, False)) == (
        "SamplerWithoutReplacement(drop_last=True, shuffle=False)"
    )


@pytest.mark.pitfall("SL8")
def test_batch_cost_does_not_depend_on_stored_rows() -> None:
    """Cost O(B): a draw takes views of the permutation and copies none of it."""
    rb = _buffer(1000, 10)
    rb.sample()
    before = rb.sampler._remaining.untyped_storage().data_ptr()
    rb.sample()
    assert rb.sampler._remaining.untyped_storage().data_ptr() == before
