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

Make = Callable[..., ReplayBuffer]
Windows = Callable[[TensorDict], list[list[int]]]


# -- rings -----------------------------------------------------------------------------------------


@pytest.mark.pitfall("BD13")
@pytest.mark.parametrize("without", [False, True])
@pytest.mark.parametrize("more", [0, 1, 9])
def test_slices_of_a_full_ring(
    more: int, without: bool, sliced: Make, rows: Callable[..., Any], windows_of: Windows
) -> None:
    """At the capacity, one more, and after a whole turn less one."""
    rb = sliced(rows([4, 4, 4], open_=True)[:10], 10, slice_len=2)
    if without:
        rb.set_sampler(SliceSamplerWithoutReplacement(slice_len=2))
    data = rows([4] * 6)[10 : 10 + more]
    if more:
        rb.extend(data)
    oldest = more
    expected = {t for t in range(oldest, 10 + more - 1) if t // 4 == (t + 1) // 4}
    seen = set()
    for _ in range(60):
        batch = rb.sample(6)
        for window in windows_of(batch):
            assert window[1] == window[0] + 1
            seen.add(window[0])
        assert torch.equal(batch["index"], batch["t"] % 10)
    assert seen == expected


def test_windows_wrap_but_do_not_cross_the_seam(
    sliced: Make, rows: Callable[..., Any], windows_of: Windows
) -> None:
    rb = sliced(rows([30], open_=True)[:14], 10, slice_len=4)
    batch = rb.sample(4 * 400)
    assert {w[0] for w in windows_of(batch)} == set(range(4, 11))
    assert [8, 9, 0, 1] in batch["index"].reshape(-1, 4).tolist()


@pytest.mark.pitfall("BD3")
@pytest.mark.parametrize("way", ["dumps", "state_dict"])
def test_the_seam_survives_a_checkpoint(
    way: str, tmp_path: Any, sliced: Make, rows: Callable[..., Any], windows_of: Windows
) -> None:
    rb = sliced(rows([40], open_=True)[:17], 10, slice_len=3)
    other = sliced((), 10, slice_len=3)
    if way == "dumps":
        rb.dumps(tmp_path / "saved")
        other.loads(tmp_path / "saved")
    else:
        other.load_state_dict(rb.state_dict())
    for _ in range(2):
        windows = windows_of(other.sample(3 * 300))
        assert all(w == [w[0], w[0] + 1, w[0] + 2] for w in windows)
        assert {w[0] for w in windows} >= set(range(10, 15))
        other.extend(rows([40], open_=True)[17:20])


def test_lanes_of_a_storage(sliced: Make, rows: Callable[..., Any], windows_of: Windows) -> None:
    data = torch.stack([rows([3, 5]), rows([8], start=100)], 0)
    rb = sliced(data, slice_len=3, ndim=2)
    batch = rb.sample(3 * 500)
    assert {w[0] for w in windows_of(batch)} == {0, 3, 4, 5, *range(100, 106)}
    lane = batch["index"][:, 1].reshape(-1, 3)
    assert (lane == lane[:, :1]).all()
    assert torch.equal(batch["t"] // 100, batch["index"][:, 1])


def test_emptied_buffer_cannot_be_sampled_until_new_rows_come(
    sliced: Make, rows: Callable[..., Any], windows_of: Windows
) -> None:
    rb = sliced([5, 5], slice_len=3)
    rb.empty()
    with pytest.raises(RuntimeError, match=r"Cannot sample from an empty storage\."):
        rb.sample(3)
    rb.extend(rows([4], start=50))
    assert {w[0] for w in windows_of(rb.sample(90))} == {50, 51}


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
    with pytest.raises(NotEnoughData, match=r"longest episode has 6; transforms also need"):
        rb.sample(3)


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


@pytest.mark.parametrize("draw", ["iid", "stratified", "without_replacement"])
@pytest.mark.pitfall("RD14")
def test_draws_depend_only_on_the_generator(draw: str, sliced: Make) -> None:
    for measure in ("window", "trajectory", "lane", "transition"):
        one, other = (sliced([9, 30], slice_len=3, draw=draw, measure=measure) for _ in range(2))
        before = torch.get_rng_state()
        first = [one.sample(12)["index"].tolist() for _ in range(5)]
        torch.rand(3)
        torch.set_rng_state(before)
        assert [other.sample(12)["index"].tolist() for _ in range(5)] == first
        assert torch.equal(torch.get_rng_state(), before)
        assert len({tuple(index) for index in first}) > 1


def test_without_a_generator_the_global_one_counts(sliced: Make) -> None:
    rb = sliced([50], slice_len=3)
    rb.set_rng(None)
    torch.manual_seed(4)
    first = rb.sample(30)["index"]
    torch.manual_seed(4)
    assert torch.equal(rb.sample(30)["index"], first)


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
    with pytest.raises(ValueError, match=text):
        rb.set_sampler(kind(slice_len=2))
    rb = ReplayBuffer(storage=LazyTensorStorage(5), sampler=kind(slice_len=2))
    with pytest.raises(ValueError, match=text):
        rb.set_writer(TensorDictMaxValueWriter())
    assert type(rb.sampler) is kind


def test_other_content_is_refused() -> None:
    rb = ReplayBuffer(storage=ListStorage(5), sampler=SliceSampler(slice_len=2))
    rb.extend([1, 2, 3])
    with pytest.raises(RuntimeError, match="got a ListStorage"):
        rb.sample(2)
    assert not rb.can_sample(2)
    rb = ReplayBuffer(storage=LazyTensorStorage(5), sampler=SliceSampler(slice_len=2))
    rb.extend(torch.arange(5))
    with pytest.raises(RuntimeError, match="slices need TensorDicts"):
        rb.sample(2)


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


def test_prefetched_slices(sliced: Make, rows: Callable[..., Any]) -> None:
    rb = ReplayBuffer(
        storage=LazyTensorStorage(50),
        sampler=SliceSampler(slice_len=4),
        batch_size=8,
        prefetch=2,
        generator=torch.Generator().manual_seed(0),
    )
    rb.extend(rows([20, 30]))
    plain = sliced([20, 30], slice_len=4, batch_size=8)
    for _ in range(6):
        assert torch.equal(rb.sample()["index"], plain.sample()["index"])
    rb.shutdown()
