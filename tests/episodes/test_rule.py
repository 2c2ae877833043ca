"""What flags and ids of stored columns say, by both ways of reading them."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from replaykit import LazyTensorStorage, ReplayBuffer
from replaykit.episodes import EpisodeIndex, StreamEpisodes
from replaykit.episodes.streams import ColumnReader


def new_index(columns: dict[Any, torch.Tensor], slots: int, ndim: int = 1) -> EpisodeIndex:
    """Of a buffer that these rows were written to."""
    shape = next(iter(columns.values())).shape[:ndim]
    rows = TensorDict(batch_size=list(shape))
    for key, column in columns.items():
        rows[key] = column
    rb = ReplayBuffer(storage=LazyTensorStorage(slots * shape[1:].numel(), ndim=ndim))
    rb.extend(rows.transpose(0, ndim - 1))
    return rb.storage.episodes


def ends(index: EpisodeIndex) -> list[tuple[int, int, int, int]]:
    """lane, first, last and reason of every episode, from time 0 on."""
    table = index.table()
    return list(
        zip(*(c.tolist() for c in (table.lane, table.first, table.last, table.code)), strict=True)
    )


FLAGS = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
]  # fmt: skip


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 2)])
@pytest.mark.parametrize("dtype", [*FLAGS, torch.complex64])
def test_any_number_that_is_not_zero_sets_a_flag(dtype: torch.dtype, shape: Any) -> None:
    done = torch.zeros(8, *shape).to(dtype)
    flat = done.view(8, -1)
    flat[2, -1] = 1
    flat[5, 0] = 1 if dtype is torch.bool else torch.tensor(0.25 if dtype.is_floating_point else 64)
    if dtype.is_floating_point:
        flat[3] = -0.0
        flat[6, -1] = float("nan")
    index = new_index({("next", "done"): done, "x": torch.zeros(8)}, 10)
    wanted = [(0, 0, 2, 1), (0, 3, 5, 1), (0, 6, 7, 0)]
    if dtype.is_floating_point:
        wanted[2:] = [(0, 6, 6, 1), (0, 7, 7, 0)]
    assert ends(index) == wanted


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int32, torch.int64, torch.float32, torch.complex64]
)
@pytest.mark.parametrize("shape", [(), (1,), (3,), (0,)])
def test_ids_are_compared_by_their_bytes(dtype: torch.dtype, shape: Any) -> None:
    ids = torch.zeros(9, *shape, dtype=dtype)
    if ids.numel():
        ids.view(9, -1)[3:, -1] = 1
        ids.view(9, -1)[4:6, 0] = 0
    index = new_index({"episode": ids, "seed": torch.tensor([0] * 7 + [1] * 2)}, 12)
    changes = [7] if not ids.numel() else [3, 4, 6, 7] if shape != (3,) else [3, 7]
    borders = [0, *changes, 9]
    want = [(0, a, b - 1, 3 if b < 9 else 0) for a, b in itertools.pairwise(borders)]
    assert ends(index) == want


def test_flags_decide_if_an_episode_terminated_or_was_truncated() -> None:
    """Without `terminated` a `done` is a termination unless `truncated` says otherwise."""
    done = torch.tensor([0, 1, 0, 1, 0, 0], dtype=torch.bool)
    truncated = torch.tensor([0, 1, 0, 0, 1, 0], dtype=torch.bool)
    both = {("next", "done"): done, ("next", "truncated"): truncated}
    want = [(0, 0, 1, 2), (0, 2, 3, 1), (0, 4, 4, 2), (0, 5, 5, 0)]
    assert ends(new_index(both, 6)) == want
    both["next", "terminated"] = torch.tensor([0, 1, 1, 0, 0, 0], dtype=torch.bool)
    want = [(0, 0, 1, 1), (0, 2, 2, 1), (0, 3, 3, 2), (0, 4, 4, 2), (0, 5, 5, 0)]
    assert ends(new_index(both, 6)) == want
    assert ends(new_index({"x": done}, 6)) == [(0, 0, 5, 0)]


@pytest.mark.parametrize(("done", "reads"), [
    (torch.zeros(4, 1, dtype=torch.bool), True),
    (torch.zeros(4, 2, dtype=torch.bfloat16), True),
    (torch.zeros(4, dtype=torch.complex64), False),
])  # fmt: skip
def test_the_core_says_which_columns_it_cannot_read(done: torch.Tensor, reads: bool) -> None:
    """It reads all that are usual: else every write would go the long way, with the same result."""
    rb = ReplayBuffer(storage=LazyTensorStorage(4))
    rb.extend(TensorDict({"next": {"done": done}}, [4]))
    columns, ring = rb.storage.require(), StreamEpisodes(4, 1)
    reader = ColumnReader(rb.storage.episodes.bound, columns)
    source, first = reader.stored(1, 4)
    assert first == reads  # a copy begins with the first row
    ring.append_columns(source, first, first + 3, None, None)
    assert ring.hi == 3
    if reads:
        with pytest.raises(IndexError, match=r"rows in \[0, 4\), got 2 to 5"):
            ring.append_columns(source, 2, 5, None, None)
        for after, codes, error, text in (
            ([2, 4], [4, 4], IndexError, r"in \[1, 3\] in `after`, got 4"),
            ([0], [4], IndexError, "got 0"),
            ([2], [3], ValueError, "codes of 0, 4 or 5"),
            ([2, 3], [4], ValueError, "expected 2 entries in `ends`, got 1"),
        ):
            ends = np.array(after), np.array(codes, np.uint8)[:, None]
            with pytest.raises(error, match=text):
                ring.append_columns(source, 1, 4, *ends)
        assert ring.hi == 3
