"""Runs of rows read where they lie: as plain indexing of all rows has them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from replaykit.schema import Schema, split_leaves
from replaykit.storages.columns import Columns, ScatteredColumns

STARTS, LENGTHS = torch.tensor([3, 20, 21, 60]), torch.tensor([5, 1, 30, 4])
ROWS = torch.cat([torch.arange(a, a + n) for a, n in zip(STARTS, LENGTHS, strict=True)])


@pytest.fixture
def rows() -> TensorDict:
    draw = np.random.default_rng(0)
    wide = torch.from_numpy(draw.normal(size=(64, 50, 3)))
    depth = torch.from_numpy(draw.integers(0, 1 << 16, (64, 2)).astype(np.uint16))
    flag = torch.from_numpy(draw.random((64, 1)) < 0.5)
    return TensorDict({"wide": wide, "depth": depth, "next": {"done": flag}}, [64])


@pytest.fixture
def columns(rows: TensorDict) -> ScatteredColumns:
    found = split_leaves(rows, 1)
    everything = Columns(Schema(found.root), found.leaves, 1, mapped=True)
    return ScatteredColumns(everything, STARTS, LENGTHS)


def same(found: Any, rows: TensorDict, at: torch.Tensor) -> None:
    for path, leaf in found.items():
        stored = rows[path if len(path) > 1 else path[0]].numpy()
        assert leaf.dtype == rows[path if len(path) > 1 else path[0]].dtype
        assert np.array_equal(leaf.numpy(), stored[ROWS[at].numpy()]), path


@pytest.mark.parametrize("asked", [(), ("next", "done"), ("depth",)])
def test_scattered_rows_match_their_runs(columns, rows, asked):
    """Also where a leaf lies in one tensor, since somebody asked for it."""
    assert columns.slots == 40
    if asked:
        assert np.array_equal(columns[asked].numpy(), rows[asked].numpy()[ROWS.numpy()])
    at = torch.tensor([39, 0, 7, 7, 4, 5])
    same(columns.gather(at), rows, at)
    found = columns.read(at.to(torch.int32), 40)
    assert np.array_equal(found["wide"], rows["wide"][ROWS[at]])
    same(columns.gather_keys([("wide",), ("next", "done")], at), rows, at)
    part = columns.part([("wide",)])
    same(dict(zip(part.order, part.gather_elements(at, 40), strict=True)), rows, at)
    assert part is columns.part([("wide",)])
    for index in (slice(4, 9), slice(None, None, 7), torch.tensor([[1, 2], [8, 9]]), 6):
        selected = torch.arange(30)[index]
        same(columns.view(30, index), rows, selected)
    same({("wide",): columns.column(("wide",), 11)}, rows, torch.arange(11))
    same(columns.parts([("depth",)], 3, 9), rows, torch.arange(3, 9))
    with pytest.raises(IndexError, match=r"expected rows in \[0, 12\), got 39"):
        columns.gather(at, 12)


@pytest.mark.parametrize("asked", [(), ("next", "done")])
def test_writes_reach_scattered_rows(columns, rows, asked):
    before = rows.clone()
    flags = columns[asked] if asked else None
    slots = torch.tensor([6, 5, 39])
    leaves = columns.gather(slots)
    new = {
        path: ~leaf if leaf.dtype is torch.bool else torch.zeros_like(leaf)
        for path, leaf in leaves.items()
    }
    columns.scatter(slots, new, slice(None))
    columns.put(torch.tensor([0]), {("wide",): torch.ones(1, 50, 3, dtype=torch.float64)})
    values = torch.stack([torch.full((50, 3), float(k), dtype=torch.float64) for k in range(3)])
    columns.put(torch.tensor([2, 1]), {("wide",): values[1:]})
    found = columns.view(40)
    assert not found["wide",][slots].any()
    assert (found["wide",][0] == 1).all()
    assert (found["wide",][1] == 2).all()
    assert (found["wide",][2] == 1).all()
    for path, leaf in new.items():
        assert torch.equal(found[path][slots], leaf)
    if flags is None:
        assert torch.equal(rows["next", "done"][ROWS[slots]], new["next", "done"])
    else:
        assert torch.equal(flags[slots], new["next", "done"])
    others = torch.ones(64, dtype=torch.bool)
    others[ROWS[torch.tensor([0, 1, 2, 5, 6, 39])]] = False
    assert (rows["wide"][others] == before["wide"][others]).all()


def test_interrupt_is_raised_after_all_rows_are_written(columns, monkeypatch):
    put, calls = Columns.put, []

    def interrupted(self: Columns, *args: Any) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt
        put(self, *args)

    monkeypatch.setattr(columns._all, "put", interrupted.__get__(columns._all))
    with pytest.raises(KeyboardInterrupt):
        columns.put(torch.tensor([4]), {("wide",): torch.zeros(1, 50, 3, dtype=torch.float64)})
    assert not columns.gather(torch.tensor([4]))["wide",].any()


def test_memory_grows_only_with_requested_columns(columns):
    memory = columns.nbytes()
    assert columns.tensors["wide",].data_ptr() == columns._all.tensors["wide",].data_ptr()
    columns["next", "done"]
    assert columns.nbytes() == memory + 40
