"""Pieces of equal lengths of rows ``[lanes, T]``, shuffled for each epoch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import LazyTensorStorage, MiniBatches, ReplayBuffer
from tests.support.refusals import refuses


@pytest.mark.acceptance("C18")
def test_pieces_keep_lane_and_start() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(40, ndim=2))
    for first, last in ((0, 7), (7, 19)):
        t = torch.arange(first, last).expand(2, -1)
        rb.extend(TensorDict({"t": t, "env": torch.tensor([[5], [6]]).expand_as(t)}, t.shape))
    batches = MiniBatches(rb.drain(skip=7), 3, 3, epochs=4)
    assert len(batches) == 8
    orders = []
    pieces: list[tuple[int, ...]] = []
    for number, batch in enumerate(batches):
        assert batch.shape == (4, 3)
        assert (batch["t"] == batch["position"]).all()
        assert (batch["env"] == batch["lane"] + 5).all()
        assert (batch["position"].diff() == 1).all()
        pieces += zip(batch["lane"][:, 0].tolist(), batch["position"][:, 0].tolist(), strict=True)
        if number % 2:
            orders.append(tuple(pieces))
            assert sorted(pieces) == [(lane, t) for lane in range(2) for t in (7, 10, 13, 16)]
            pieces = []
    assert len(set(orders)) == 4


@pytest.mark.parametrize(
    ("count", "size", "even", "sizes"),
    [
        (264, 32, True, [33] * 8),
        (11, 4, True, [6, 5]),
        (3, 4, True, [3]),
        (11, 4, False, [4, 4, 3]),
    ],
)
def test_sizes_of_batches(count: int, size: int, even: bool, sizes: list[int]) -> None:
    rows = TensorDict({"x": torch.arange(2 * count).reshape(count, 2)}, [count, 2])
    made = [
        MiniBatches(rows, size, 2, even=even, generator=torch.Generator().manual_seed(1))
        for _ in range(2)
    ]
    one, other = (list(batches) for batches in made)
    assert [len(batch) for batch in one] == sizes
    assert all((a == b).all() for a, b in zip(one, other, strict=True))


def test_rows_that_fill_no_piece_are_dropped_or_padded() -> None:
    rows = TensorDict({"x": torch.arange(1, 8)[None], "lane": torch.full((1, 7), 9)}, [1, 7])
    (dropped,) = MiniBatches(rows, 9, 3, tail="drop")
    assert sorted(dropped["x"].tolist()) == [[1, 2, 3], [4, 5, 6]]
    assert (dropped["lane"] == 9).all()
    (padded,) = MiniBatches(rows, 9, 3, tail="pad")
    assert sorted(padded["x"].tolist()) == [[1, 2, 3], [4, 5, 6], [7, 0, 0]]
    assert (padded["mask"] == (padded["x"] > 0)).all()


@pytest.mark.parametrize(
    ("rows", "more", "error", "text"),
    [
        ([1, 7], {"length": 3}, ValueError, "divides T=7, got 3"),
        ([1, 2], {"length": 3, "tail": "drop"}, ValueError, "divides T=2, got 3"),
        ([1, 7], {"length": 0}, ValueError, "length"),
        ([1, 7], {"length": 7, "size": 0}, ValueError, "size"),
        ([1, 7], {"length": 7, "epochs": 0}, ValueError, "epochs"),
        ([1, 7], {"length": 7, "tail": "keep"}, ValueError, "tail"),
        ([7], {"length": 7}, TypeError, r"\[lanes, T\]"),
    ],
)
def test_wrong_arguments_are_named(
    rows: list[int], more: dict[str, Any], error: type[Exception], text: str
) -> None:
    refuses(error, text, MiniBatches, TensorDict({}, rows), **{"size": 1, **more})
