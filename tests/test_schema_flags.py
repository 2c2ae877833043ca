"""Flags and reserved keys: what is reshaped or left out of the rows, never in the caller's data."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import LazyTensorStorage, ReplayBuffer

FLAGS = [
    (*prefix, name) for prefix in ((), ("next",)) for name in ("done", "terminated", "truncated")
]


@pytest.mark.pitfall("BD6")
@pytest.mark.parametrize("flat_first", [True, False], ids=["[N] first", "[N,1] first"])
def test_flags_of_any_shape_are_stored_with_a_dimension(
    storage_kind: Any, flat_first: bool
) -> None:
    """BD6: ``[N]`` and ``[N, 1]`` may be mixed, at the root and under ``next``."""

    def rows(count: int, flat: bool, offset: int) -> TensorDict:
        column = (torch.arange(count) + offset) % 2 == 1
        shaped = column if flat else column.unsqueeze(-1)
        data = TensorDict({flag: shaped.clone() for flag in FLAGS}, [count])
        return data.set("plain", column)  # no flag: never reshaped

    example = rows(1, False, 0)[0]
    rb = storage_kind.buffer(20, example, batch_size=7)
    rb.extend(rows(3, flat_first, 0))
    rb.extend(rows(3, not flat_first, 3))
    rb.add(rows(1, flat_first, 6)[0])
    rb.add(rows(1, not flat_first, 7)[0])
    rb.extend([rows(1, flat_first, 8)[0]])
    rb[0] = rows(1, flat_first, 0)[0]
    rb[1:3] = rows(2, not flat_first, 1)
    assert len(rb) == 9
    for flag in FLAGS:
        stored = torch.stack([rb[row][flag] for row in range(9)])
        assert stored.flatten().tolist() == [i % 2 == 1 for i in range(9)]
        assert stored.shape == (9, 1)
        assert rb.sample()[flag].shape == (7, 1)
    assert rb.sample()["plain"].shape == (7,)


@pytest.mark.pitfall("BD6")
def test_flags_of_lanes_and_of_trajectories_get_a_dimension() -> None:
    """BD6 for ``ndim=2`` and for rows that are whole trajectories."""
    flags = torch.arange(6).view(2, 3) % 2 == 0
    flat = TensorDict({"done": flags, "next": {"truncated": flags}}, [2, 3])
    full = TensorDict({"done": flags[..., None], "next": {"truncated": flags[..., None]}}, [2, 3])
    for rows in (flat, full):
        lanes = ReplayBuffer(storage=LazyTensorStorage(12, ndim=2))
        assert lanes.extend(rows).shape == (6, 2)
        lanes.extend(full)
        assert lanes.add(flat[:, 0]).shape == (2, 2)
        assert lanes[:]["done"].shape == (2, 6, 1)  # 7 steps went into a ring of 6
        assert lanes[:]["next", "truncated"][:, 1:3, 0].tolist() == flags[:, 1:].tolist()
        trajectories = ReplayBuffer(storage=LazyTensorStorage(4))
        trajectories.extend(rows)
        trajectories.extend(full)
        trajectories.add(flat[0])
        assert trajectories[:]["next", "truncated"].shape == (4, 3, 1)
        assert trajectories[0]["done"].flatten().tolist() == flags[0].tolist()


def test_flags_of_other_dtypes_are_kept() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(4))
    rb.extend(TensorDict({"done": torch.tensor([0.0, 2.5])}, [2]))
    assert rb[:]["done"].tolist() == [[0.0], [2.5]]


def test_flags_in_records_that_are_no_tensordicts_are_left_alone() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(4))
    rb.extend({"done": torch.zeros(2), "index": torch.ones(2)})
    assert rb[:]["done"].shape == (2,)
    assert rb[:]["index"].tolist() == [1.0, 1.0]


@pytest.mark.pitfall("WR16")
@pytest.mark.parametrize("locked", [False, True])
def test_writes_never_change_data_of_the_caller(
    locked: bool, storage_kind: Any, make_rows: Any, fingerprint: Any
) -> None:
    """WR16 and E1: reserved keys and flat flags are dealt with in copies."""
    rows = make_rows(0, 3).set("index", torch.tensor([7, 7, 7])).set("done", torch.ones(3).bool())
    rows.set("index_generation", torch.zeros(3, dtype=torch.int64))
    rows["next"].set("terminated", torch.zeros(3).bool())
    rows.set("td_error", torch.rand(3))
    example = make_rows(0, 1).set("done", torch.ones(1, 1).bool())
    example["next"].set("terminated", torch.zeros(1, 1).bool())
    example["td_error"] = torch.zeros(1)
    rb = storage_kind.buffer(3, example[0], batch_size=4)
    if locked:
        rows.lock_()
    nested = rows["next"]
    before = fingerprint(rows)
    rb.extend(rows)
    rb.add(rows[0])
    rb.extend(list(rows.unbind(0)))
    rb[0] = rows[0]
    rb[1:3] = rows[1:3]
    rb.writer.write_at(torch.tensor([0, 1]), rows[:2])
    rb.storage.set([0, 1, 2], rows)
    if storage_kind.columns:
        with pytest.warns(UserWarning, match="has no priorities"):
            rb.update_priority(rows)
    assert fingerprint(rows) == before
    assert rows["next"] is nested
    assert "index" not in set(rb[0].keys())
    assert "index_generation" not in set(rb[0].keys())
    sampled = rb.sample()
    assert sampled["index"].max() < 3
    rb.extend(sampled)  # a sample goes back in, without its index
    # The storage has its own copy: what the caller does later is not seen.
    rb.extend(rows)
    rows["id"].fill_(-1)
    assert sorted(int(rb[row]["id"]) for row in range(3)) == [0, 1, 2]


def test_an_index_branch_is_ignored_as_a_whole() -> None:
    """Samples of an ensemble carry ``("index", "buffer_ids")``."""
    rb = ReplayBuffer(storage=LazyTensorStorage(4))
    rows = TensorDict({"x": torch.zeros(2), "index": {"index": torch.zeros(2)}}, [2])
    rb.extend(rows)
    assert set(rb[:].keys()) == {"x"}
