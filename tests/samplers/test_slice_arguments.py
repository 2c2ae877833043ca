"""What is refused of the arguments of slice samplers, and ends that are given."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    LazyTensorStorage,
    ReplayBuffer,
    Shift,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    StackFrames,
)
from tests.samplers.building import rows, sliced


@pytest.mark.parametrize("kind", [SliceSampler, SliceSamplerWithoutReplacement])
@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({}, TypeError, "num_slices or slice_len .* Got num_slices=None"),
        ({"num_slices": 2, "slice_len": 3}, TypeError, "num_slices or .* Got num_slices=2"),
        ({"slice_len": 0}, ValueError, "slice_len of at least 1, got 0"),
        ({"num_slices": -1}, ValueError, "num_slices of at least 1, got -1"),
        ({"slice_len": 2.5}, TypeError, "slice_len as an int, got 2.5"),
        ({"slice_len": True}, TypeError, "slice_len as an int, got True"),
        (
            {"end_key": "a", "end_keys": ["b"]},
            RuntimeError,
            "`end_keys` are exclusive",
        ),
        ({"ends": [1], "trajectories": [1]}, RuntimeError, "trajectories and ends are exclusive"),
        ({"ends": [1], "traj_key": "a"}, RuntimeError, "replaces the keys of columns"),
        ({"ends": [[1]]}, ValueError, r"ends as a 1-D tensor, got shape \[1, 1\]"),
        ({"end_key": 3}, TypeError, "expected a key"),
        ({"end_keys": 3}, TypeError, "end_keys as a key or several"),
        ({"truncated_key": 3}, TypeError, "expected a key"),
        ({"truncated_key": ("next", "done")}, ValueError, "differ from its siblings"),
        ({"init_key": 3}, TypeError, "expected a key"),
    ],
)
def test_invalid_arguments_are_refused_at_construction(
    kind: Any, options: dict[str, Any], error: type[Exception], text: str
) -> None:
    if set(options) & {"num_slices", "slice_len"} or not options:
        sizes = {}
    else:
        sizes = {"slice_len": 2}
    with pytest.raises(error, match=text):
        kind(**sizes, **options)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        (
            {"measure": "rows"},
            ValueError,
            "measure: expected one of 'window', 'trajectory', 'lane'",
        ),
        ({"draw": "all"}, ValueError, "draw: expected one of 'iid', 'stratified'"),
        ({"draw": 3}, ValueError, "draw: expected one of 'iid'"),
        (
            {"pad": "up"},
            ValueError,
            "pad: expected one of 'none', 'left'.* got 'up'",
        ),
        (
            {"pad": "left", "short": "some"},
            ValueError,
            "short: expected one of 'exclude', 'whole'",
        ),
        ({"pad": "left", "align": "top"}, ValueError, "align: expected one of 'left', 'right'"),
        ({"short": "whole"}, ValueError, "they need pad="),
        ({"align": "right"}, ValueError, "they need pad="),
        ({"pad_value": 3}, ValueError, "needs pad="),
        ({"pad": "left", "pad_value": "0"}, TypeError, "pad_value as a number"),
        ({"pad": "left", "strict_length": False}, ValueError, "short= decides"),
        ({"pad": "left", "span": True}, ValueError, "more than one of them"),
        ({"pad_output": True}, ValueError, "set strict_length=False"),
        (
            {"pad_output": True, "strict_length": False, "span": 1},
            ValueError,
            "span or pad_output",
        ),
        ({"span": 3}, ValueError, "span below the 3 rows of a slice, got 3"),
        ({"span": (0, 4)}, ValueError, "span below the 3 rows"),
        ({"span": -1}, ValueError, "span of at least 0"),
        ({"span": 0.5}, TypeError, "span as a bool, an int"),
        ({"span": (1, 1, 1)}, TypeError, "span as a bool, an int"),
        ({"flat": False, "span": True}, ValueError, "slices of one length"),
        ({"flat": False, "strict_length": False}, ValueError, "slices of one length"),
        ({"recent": 0.5}, TypeError, r"recent as \(ratio, steps\)"),
        ({"recent": (1.5, 3)}, ValueError, r"in \[0, 1\], got 1.5"),
        ({"recent": (-0.1, 3)}, ValueError, r"in \[0, 1\], got -0.1"),
        ({"recent": (0.5, 0)}, ValueError, "at least 1, got 0"),
        ({"recent": (0.5, 3), "draw": "sequential"}, ValueError, "recent= needs"),
        ({"recent": (0.5, 3), "draw": "without_replacement"}, ValueError, "recent= needs"),
        ({"strict_lanes": True}, ValueError, "strict_lanes needs measure='lane'"),
        ({"stride": 2}, ValueError, "stride needs draw='sequential'"),
        ({"draw": "sequential", "stride": 0}, ValueError, "stride of at least 1"),
        ({"draw": "sequential", "stride": 1.5}, TypeError, "stride as an int"),
        ({"draw": "sequential", "span": 1}, ValueError, "pad=None, none or right"),
        ({"draw": "sequential", "pad": "both"}, ValueError, "pad=None, none or right"),
        ({"allow_short": True}, ValueError, "allow_short needs"),
    ],
)
def test_invalid_modes_are_refused_at_construction(
    options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        SliceSampler(slice_len=3, **options)


def test_slices_of_a_number_that_may_be_less_have_no_shape() -> None:
    options: dict[str, Any] = {"draw": "without_replacement", "allow_short": True, "flat": False}
    with pytest.raises(ValueError, match="expected slice_len with flat=False"):
        SliceSampler(num_slices=3, **options)
    with pytest.raises(ValueError, match="expected slice_len with flat=False"):
        SliceSamplerWithoutReplacement(num_slices=3, flat=False)
    assert SliceSampler(slice_len=3, **options).shape_of(6) == (2, 3)


@pytest.mark.parametrize("draw", ["iid", "sequential"])
def test_invalid_options_are_refused_when_drawing(draw: str) -> None:
    rb = sliced([9], slice_len=4, draw=draw)
    for size in (6, 3):
        assert not rb.can_sample(size)
        with pytest.raises(RuntimeError, match=r"batch_size=.* and slice_len=4"):
            rb.sample(size)
    rb = sliced([9], num_slices=4, draw=draw)
    with pytest.raises(RuntimeError, match="batch_size=2 and num_slices=4"):
        rb.sample(2)
    assert rb.can_sample(8)
    rb = sliced([5, 7, 2], num_slices=1, draw=draw)
    with pytest.raises(RuntimeError, match="14 rows are stored, and the longest episode has 7"):
        rb.sample(8)
    rb = sliced((), 4, slice_len=1, draw=draw)
    with pytest.raises(RuntimeError, match=r"Cannot sample from an empty storage\."):
        rb.sample(2)
    rb = sliced([9], num_slices=3, span=3)
    with pytest.raises(ValueError, match="span below the 2 rows"):
        rb.sample(6)
    assert not rb.can_sample(6)
    assert rb.can_sample(12)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
def test_padding_and_missing_rows_of_all_dtypes_are_filled(dtype: torch.dtype) -> None:
    x, done = torch.tensor([3, 4, 2**15 + 5]).to(dtype), torch.tensor([False, False, True])
    rows = TensorDict({"x": x, "y": x, "next": {"done": done}}, [3])
    rb = ReplayBuffer(storage=LazyTensorStorage(3), batch_size=60)
    rb.extend(rows)
    for options, value in (({}, 0), ({"pad_value": 2**15 + 1}, 2**15 + 1)):
        rb.set_sampler(SliceSampler(slice_len=4, pad="right", **options))
        batch = rb.sample()
        real = batch["collector", "mask"].flatten()
        assert batch["x"].dtype == dtype
        assert set(batch["x"].long()[real].tolist()) == set(x.long().tolist())
        assert set(batch["x"].long()[~real].tolist()) == {value}
    rb.append_transform(StackFrames(["x"], 2, pad="zero"))
    rb.append_transform(Shift("y", 1, "mask"))
    assert rb[:]["x"].long().tolist() == [[0, 3], [3, 4], [4, 2**15 + 5]]
    assert rb[:]["y+1"].long().tolist() == [4, 2**15 + 5, 0]


def test_values_of_padding_are_for_stored_keys() -> None:
    rb = sliced([9], slice_len=4, pad="both", pad_value={"y": 1})
    with pytest.raises(KeyError, match="pad_value names 'y', which is not stored"):
        rb.sample(4)
    rb = sliced([9], slice_len=4, pad="both", pad_value={"t": 0.5})
    with pytest.raises(ValueError, match=r"key 't': expected pad_value as torch.int64"):
        rb.sample(4)


# -- ends that are given --------------------------------------------------------------------------


def _starts(rb: ReplayBuffer, length: int, draws: int = 300) -> set[int]:
    index = rb.sample(length * draws)["index"].reshape(-1, length)
    assert ((index.diff(dim=1) - 1) % rb.storage.max_size == 0).all()
    return set(index[:, 0].tolist())


@pytest.mark.pitfall("BD4")
def test_given_ends_of_a_half_filled_storage(tmp_path: Any) -> None:
    ends = torch.zeros(10, dtype=torch.bool)
    ends[3] = True
    rb = sliced(rows([10]), 20, slice_len=3, ends=ends)
    expected = {0, 1, *range(4, 8)}
    assert _starts(rb, 3) == expected
    loaded = pickle.loads(pickle.dumps(rb))
    assert _starts(loaded, 3) == expected
    sampler = pickle.loads(pickle.dumps(rb.sampler))
    other = sliced(rows([10]), 20, slice_len=3)
    other.set_sampler(sampler)
    assert _starts(other, 3) == expected
    for buffer in (rb, loaded, other):
        buffer.extend(rows([2]))
        assert not buffer.can_sample(3)
        with pytest.raises(RuntimeError, match="ends for the 12 stored rows, got 10"):
            buffer.sample(3)


def test_given_ends_of_a_ring() -> None:
    """The last slot goes on in the first one where the ring has wrapped, and only there."""
    ends = torch.zeros(10, dtype=torch.bool)
    ends[6] = True
    rb = sliced(rows([14], open_=True), 10, slice_len=3)  # the oldest row lies in slot 4
    rb.set_sampler(SliceSampler(slice_len=3, ends=ends))
    assert _starts(rb, 3) == {4, 7, 8, 9, 0, 1}
    rb.extend(rows([1]))
    with pytest.raises(RuntimeError, match="rows were written since"):
        rb.sample(3)
    full = sliced(rows([10], open_=True), 10, slice_len=3, ends=ends)
    assert _starts(full, 3) == {0, 1, 2, 3, 4, 7}


def test_given_ids_around_a_ring() -> None:
    rb = sliced(rows([14], open_=True), 10, slice_len=3)
    same = torch.tensor([5, 5, 5, 5, 6, 6, 6, 5, 5, 5])
    rb.set_sampler(SliceSampler(slice_len=3, trajectories=same))
    assert _starts(rb, 3) == {4, 7, 8, 9, 0, 1}
    rb.set_sampler(SliceSampler(slice_len=3, trajectories=torch.arange(10) // 4 * 2))
    assert _starts(rb, 3) == {0, 1, 4, 5}


def test_given_ends_are_of_one_stream() -> None:
    rb = ReplayBuffer(
        storage=LazyTensorStorage(20, ndim=2),
        sampler=SliceSampler(slice_len=2, ends=torch.zeros(20)),
    )
    rb.extend(torch.stack([rows([10]), rows([10])], 0))
    with pytest.raises(RuntimeError, match="ends describe rows of one stream"):
        rb.sample(2)


def test_given_ends_without_replacement() -> None:
    rb = sliced(rows([10]), 20, slice_len=3)
    rb.set_sampler(SliceSamplerWithoutReplacement(slice_len=3, trajectories=torch.arange(10) // 4))
    index = rb.sample(9)["index"]
    assert len(index) == 6
    assert sorted((index.reshape(-1, 3)[:, 0] // 4).tolist()) == [0, 1]
