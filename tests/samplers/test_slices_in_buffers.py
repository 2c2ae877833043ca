"""Slices of rings, checkpoints and lanes, with transforms, writers and generators."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from replaykit import (
    LazyTensorStorage,
    ListStorage,
    PrioritizedSliceSampler,
    ReplayBuffer,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictMaxValueWriter,
)
from replaykit.errors import NotEnoughData
from replaykit.storages.columns import Columns
from tests.samplers.building import rows, sliced, windows_of
from tests.samplers.needing import Needing
from tests.support.refusals import refuses

# -- what transforms need --------------------------------------------------------------------------


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
) -> None:
    """Rows 2..13 are stored: the first episode has lost its head, the last one is open."""
    data = rows([6, 4, 4])  # 0..5, 6..9, 10..13
    data["next", "done"][13] = data["next", "terminated"][13] = False
    rb = sliced(data[:12], 12, slice_len=3, **options)
    rb.extend(data[12:])
    rb.append_transform(Needing(**needs))
    assert {w[0] for w in windows_of(rb.sample(3 * 300))} == expected
    rb.set_sampler(SliceSampler(slice_len=3, draw="sequential", stride=1))
    assert {w[0] for w in windows_of(rb.sample(3 * len(expected)))} == expected


def test_unmet_needs_of_transforms_raise_error() -> None:
    rb = sliced(rows([6], open_=True), slice_len=3)
    rb.append_transform(Needing(closed=True))
    assert not rb.can_sample(3)
    refuses(NotEnoughData, r"longest episode has 6; transforms also need", rb.sample, 3)


@pytest.mark.pitfall("SL2")
def test_rows_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize(
    "kind", [SliceSampler, SliceSamplerWithoutReplacement, PrioritizedSliceSampler]
)
def test_a_writer_that_does_not_keep_the_order(kind: Any) -> None:
    text = f"{kind.__name__} needs rows in the order in which they were written"
    priorities = {"alpha": 1.0, "beta": 1.0} if kind is PrioritizedSliceSampler else {}
    make, writer = partial(ReplayBuffer, storage=LazyTensorStorage(5)), TensorDictMaxValueWriter
    sampler = partial(kind, slice_len=2, **priorities)
    refuses(ValueError, text, make, sampler=sampler(), writer=writer())
    refuses(ValueError, text, make(writer=writer()).set_sampler, sampler())
    rb = make(sampler=sampler())
    refuses(ValueError, text, rb.set_writer, writer())
    assert type(rb.sampler) is kind


def test_other_content_is_refused() -> None:
    rb = ReplayBuffer(storage=ListStorage(5), sampler=SliceSampler(slice_len=2))
    rb.extend([1, 2, 3])
    refuses(RuntimeError, "got a ListStorage", rb.sample, 2)
    assert not rb.can_sample(2)
    rb = ReplayBuffer(storage=LazyTensorStorage(5), sampler=SliceSampler(slice_len=2))
    rb.extend(torch.arange(5))
    refuses(RuntimeError, "slices need TensorDicts", rb.sample, 2)


@pytest.mark.pitfall("BD20")
def test_slices_from_the_starts_of_episodes() -> None:
    """The recipe: sequential draws, a stride as long as any episode."""
    rb = sliced([4, 9, 6], slice_len=3, draw="sequential", stride=100)
    assert [w[0] for w in windows_of(rb.sample(9))] == [0, 4, 13]


def test_replacement_makes_the_other_class() -> None:
    made = SliceSampler(replacement=False, slice_len=4, shuffle=False)
    assert type(made) is SliceSamplerWithoutReplacement
    assert not made.shuffle
    assert type(SliceSampler(replacement=True, slice_len=4)) is SliceSampler
