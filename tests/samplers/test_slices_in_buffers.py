"""Slices of rings, checkpoints and lanes, with transforms, writers and generators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictMaxValueWriter,
)
from replaykit.episodes import Needs
from replaykit.errors import NotEnoughData
from replaykit.storages.columns import Columns
from replaykit.transforms import HistoryTransform
from tests.support.refusals import refuses

Make = Callable[..., ReplayBuffer]
Windows = Callable[[TensorDict], list[list[int]]]


# -- rings -----------------------------------------------------------------------------------------


# -- what transforms need --------------------------------------------------------------------------


class _Needing(HistoryTransform):
    """Needs rows around, and changes nothing."""

    def __init__(self, **needs: Any) -> None:
        super().__init__()
        self.needs = Needs(**needs)

    def apply(self, data: Any, fetched: Any, around: Any) -> Any:
        return data


@pytest.mark.parametrize(
    ("needs", "expected"),
    [
        ({}, {2, 3, 6, 7, 10, 11}),
        ({"past": 1}, {3, 6, 7, 10, 11}),
        ({"past": 2}, {6, 7, 10, 11}),
        ({"open_future": 1}, {2, 3, 6, 7, 10}),
        ({"closed": True}, {2, 3, 6, 7}),
        ({"intact": True}, {6, 7, 10, 11}),
    ],
)
@pytest.mark.parametrize("options", [{}, {"draw": "stratified"}, {"measure": "trajectory"}])
def test_rows_around_that_transforms_need(
    needs: dict[str, Any],
    expected: set[int],
    options: dict[str, Any],
    sliced: Make,
    rows: Callable[..., Any],
    windows_of: Windows,
) -> None:
    """Rows 2..13 are stored: the first episode has lost its head, the last one is open."""
    data = rows([6, 4, 4])  # 0..5, 6..9, 10..13
    data["next", "done"][13] = data["next", "terminated"][13] = False
    rb = sliced(data[:12], 12, slice_len=3, **options)
    rb.extend(data[12:])
    rb.append_transform(_Needing(**needs))
    assert {w[0] for w in windows_of(rb.sample(3 * 300))} == expected
    rb.set_sampler(SliceSampler(slice_len=3, draw="sequential", stride=1))
    assert {w[0] for w in windows_of(rb.sample(3 * len(expected)))} == expected


def test_unmet_needs_of_transforms_raise_error(sliced: Make, rows: Callable[..., Any]) -> None:
    rb = sliced(rows([6], open_=True), slice_len=3)
    rb.append_transform(_Needing(closed=True))
    assert not rb.can_sample(3)
    refuses(NotEnoughData, r"longest episode has 6; transforms also need", rb.sample, 3)


@pytest.mark.pitfall("SL2")
def test_rows_are_read_once(sliced: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    rb = sliced([50], slice_len=5)
    read = []
    plain = Columns.read

    def counted(self: Any, index: torch.Tensor, *args: Any, **options: Any) -> Any:
        read.append(len(index))
        return plain(self, index, *args, **options)

    monkeypatch.setattr(Columns, "read", counted)
    rb.sample(20)
    assert read == [20]


# -- other components ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [SliceSampler, SliceSamplerWithoutReplacement])
def test_a_writer_that_does_not_keep_the_order(kind: Any) -> None:
    text = f"{kind.__name__} needs rows in the order in which they were written"
    with pytest.raises(ValueError, match=text):
        ReplayBuffer(
            storage=LazyTensorStorage(5),
            sampler=kind(slice_len=2),
            writer=TensorDictMaxValueWriter(),
        )
    rb = ReplayBuffer(storage=LazyTensorStorage(5), writer=TensorDictMaxValueWriter())
    refuses(ValueError, text, rb.set_sampler, kind(slice_len=2))
    rb = ReplayBuffer(storage=LazyTensorStorage(5), sampler=kind(slice_len=2))
    refuses(ValueError, text, rb.set_writer, TensorDictMaxValueWriter())
    assert type(rb.sampler) is kind


def test_other_content_is_refused() -> None:
    rb = ReplayBuffer(storage=ListStorage(5), sampler=SliceSampler(slice_len=2))
    rb.extend([1, 2, 3])
    refuses(RuntimeError, "got a ListStorage", rb.sample, 2)
    assert not rb.can_sample(2)
    rb = ReplayBuffer(storage=LazyTensorStorage(5), sampler=SliceSampler(slice_len=2))
    rb.extend(torch.arange(5))
    refuses(RuntimeError, "slices need TensorDicts", rb.sample, 2)


def test_mapped_storage(tmp_path: Any, rows: Callable[..., Any], windows_of: Windows) -> None:
    rb = ReplayBuffer(
        storage=LazyMemmapStorage(10, scratch_dir=tmp_path), sampler=SliceSampler(slice_len=3)
    )
    rb.extend(rows([4, 10])[:13])
    assert {w[0] for w in windows_of(rb.sample(300))} == {4, 5, 6, 7, 8, 9, 10}


@pytest.mark.pitfall("BD20")
def test_slices_from_the_starts_of_episodes(sliced: Make, windows_of: Windows) -> None:
    """The recipe: sequential draws, a stride as long as any episode."""
    rb = sliced([4, 9, 6], slice_len=3, draw="sequential", stride=100)
    assert [w[0] for w in windows_of(rb.sample(9))] == [0, 4, 13]


def test_replacement_makes_the_other_class() -> None:
    made = SliceSampler(replacement=False, slice_len=4, shuffle=False)
    assert type(made) is SliceSamplerWithoutReplacement
    assert not made.shuffle
    assert type(SliceSampler(replacement=True, slice_len=4)) is SliceSampler
