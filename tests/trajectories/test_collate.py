"""Trajectories side by side: shapes, masks, pad values, and what does not fit together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorData, TensorDict, lazy_stack

from replaykit import join_trajectories, pad_collate
from tests.support.refusals import refuses


def trajectory(n: int, start: int = 0) -> TensorDict:
    """A TED of n rows; no value is 0, all flags are set."""
    ids = torch.arange(start + 1, start + n + 1)
    flag = torch.ones(n, 1, dtype=torch.bool)
    return TensorDict(
        {
            "observation": TensorDict({"x": ids[:, None] * 1.5, "pixels": ids.byte()}, [n]),
            "action": ids[:, None].expand(n, 2).to(torch.int16),
            "done": flag,
            "next": {"reward": ids[:, None].double(), "done": flag, "truncated": flag.float()},
        },
        [n],
    )


def test_a_pad_value_per_key() -> None:
    item, other = trajectory(1), trajectory(2)
    pads = {"action": -1, ("observation", "x"): float("nan"), "done": False}
    batch = pad_collate([item, other], pad_value=pads)
    assert batch["action"][0, 1].tolist() == [-1, -1]
    assert batch["observation", "x"][0, 1].isnan().all()
    assert batch["next", "reward"][0, 1] == 0
    assert batch["mask"].tolist() == [[True, False], [True, True]]


def test_bool_key_other_than_a_flag_can_be_padded_with_true() -> None:
    items = [TensorDict({"legal": torch.zeros(n, 2, dtype=torch.bool)}, [n]) for n in (1, 2)]
    assert not pad_collate(items, pad_value=1)["legal"].any()
    assert pad_collate(items, pad_value={"legal": True})["legal"][0, 1].all()


DTYPES = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
DTYPES += [torch.uint16, torch.uint32, torch.uint64, torch.float16, torch.bfloat16, torch.float32]
DTYPES += [torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_keeps_every_bit(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    items = []
    for n in (3, 1, 4):
        width = 2 * torch.empty((), dtype=dtype).element_size()
        raw = torch.randint(256, (n, width), generator=generator, dtype=torch.uint8)
        raw = raw % 2 if dtype is torch.bool else raw
        items.append(TensorDict({"x": raw.view(dtype)}, [n]))
    batch = pad_collate(items, pad_value=1)
    assert batch["x"].shape == (3, 4, 2)
    padding = batch["x"][0, 3].to(torch.complex64 if dtype.is_complex else torch.float32)
    assert padding.tolist() == [float(dtype is not torch.bool)] * 2
    for number, item in enumerate(items):
        row = batch["x"][number, : len(item)].contiguous()
        assert torch.equal(row.view(torch.uint8), item["x"].view(torch.uint8))
    flat = join_trajectories(batch)["x"]
    assert torch.equal(flat.view(torch.uint8), torch.cat([i["x"].view(torch.uint8) for i in items]))


@pytest.mark.acceptance("S19")
@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 7), min_size=1, max_size=6),
    st.integers(1, 30),
    st.sampled_from(["pad_to", "multiple_of", None]),
)
def test_padding_matches_loops_for_any_lengths(
    lengths: list[int], number: int, how: str | None
) -> None:
    """S19, F34: a row whose values are those of padding is a row; flags of padding are False."""
    items = [trajectory(n, start=10 * i) for i, n in enumerate(lengths)]
    width = max(lengths)
    arguments = {}
    if how == "multiple_of":
        arguments = {how: number}
        width = next(w for w in range(width, 200) if w % number == 0)
    elif how == "pad_to":
        width += number - 1
        arguments = {how: width}
    batch = pad_collate(items, pad_value=4, **arguments)
    assert batch.batch_size == batch["next"].batch_size == (len(items), width)
    assert batch["mask"].dtype is torch.bool
    assert set(batch.keys(True, True)) == {*items[0].keys(True, True), "mask"}
    for key, leaf in items[0].items(True, True):
        assert (batch[key].shape[2:], batch[key].dtype) == (leaf.shape[1:], leaf.dtype)
    for i, item in enumerate(items):
        for t in range(width):
            assert bool(batch["mask"][i, t]) == (t < len(item))
            for key in item.keys(True, True):
                flag = "done" in key or "truncated" in key
                expected = item[key][t] if t < len(item) else torch.tensor(0 if flag else 4)
                assert (batch[key][i, t] == expected).all()


def test_collated_batch_shares_no_memory_with_items() -> None:
    items = [trajectory(2), trajectory(2)]
    before = [item.clone() for item in items]
    batch = pad_collate(items)
    batch.zero_()
    for item, old in zip(items, before, strict=True):
        assert (item == old).all()
        assert set(item.keys(True, True)) == set(old.keys(True, True))


def test_rows_may_be_strided_lazy_or_locked() -> None:
    rows = trajectory(6)
    lazy = lazy_stack([rows[0], rows[1]])
    batch = pad_collate([rows[::2].lock_(), lazy])
    assert batch["action"][:, :, 0].tolist() == [[1, 3, 5], [1, 2, 0]]
    assert not batch.is_locked


def test_order_of_keys_does_not_matter() -> None:
    a, b = torch.ones(1), torch.full((1,), 2.0)
    batch = pad_collate([TensorDict({"a": a, "b": b}, [1]), TensorDict({"b": b, "a": a}, [1])])
    assert batch["a"].tolist() == [[1], [1]]
    assert batch["b"].tolist() == [[2], [2]]


# Refusals


def _with(item: TensorDict, key: Any, value: Any) -> TensorDict:
    return item.clone().set(key, value)


@pytest.mark.acceptance("F41")
@pytest.mark.parametrize("layout", ["padded", "jagged"])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_keys_of_all_items_are_compared(position: int, layout: str) -> None:
    """F41: also those in the middle."""
    items = [trajectory(2), trajectory(3), trajectory(1)]
    del items[position]["next", "reward"]
    message = f"item {position} has no key" if position else "item 1 has a key .* item 0 lacks"
    with pytest.raises(KeyError, match=message) as error:
        pad_collate(items, layout=layout)
    assert "('next', 'reward')" in str(error.value)


@pytest.mark.parametrize("position", [1, 2])
@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("action", torch.zeros(2, 3, dtype=torch.int16), r"shape \[n, 2\].*got shape \[n, 3\]"),
        ("action", torch.zeros(2, dtype=torch.int16), r"shape \[n, 2\].*got shape \[n\]"),
        ("action", torch.zeros(2, 2), "torch.int16.*torch.float32"),
    ],
)
def test_items_of_other_shapes_and_dtypes_are_refused(
    position: int, key: str, value: Any, message: str
) -> None:
    items = [trajectory(2) for _ in range(3)]
    items[position][key] = value
    refuses(ValueError, f"item {position}, key 'action': .*{message}", pad_collate, items)


@pytest.mark.parametrize(
    ("items", "arguments", "error", "message"),
    [
        ([], {}, ValueError, "at least one TensorDict"),
        (trajectory(2), {}, TypeError, "expected a list of TensorDicts, got TensorDict"),
        ([trajectory(1), {"x": torch.zeros(1)}], {}, TypeError, "item 1: expected a TensorDict"),
        ([trajectory(1), trajectory(1)[:0]], {}, ValueError, "item 1: expected at least 1 row"),
        ([trajectory(4).view(2, 2)], {}, ValueError, r"item 0: expected batch size \[n\]"),
        ([trajectory(1)[0]], {}, ValueError, r"item 0: expected batch size \[n\], got \[\]"),
        (
            [_with(trajectory(2), "mask", torch.zeros(2))],
            {},
            ValueError,
            "item 0: expected no key 'mask'",
        ),
        (
            [_with(trajectory(2), "lengths", torch.zeros(2))],
            {"layout": "jagged"},
            ValueError,
            "expected no key 'lengths'",
        ),
        (
            [_with(trajectory(2), "name", NonTensorData("x", batch_size=[2]))],
            {},
            TypeError,
            "key 'name': expected a tensor",
        ),
        ([trajectory(1), trajectory(3)], {"pad_to": 2}, ValueError, "longest length, 3 of item 1"),
        ([trajectory(1)], {"pad_to": 0}, ValueError, "expected pad_to of at least 1, got 0"),
        ([trajectory(1)], {"pad_to": 2.0}, TypeError, "expected pad_to as an int, got 2.0"),
        ([trajectory(1)], {"multiple_of": True}, TypeError, "expected multiple_of as an int"),
        ([trajectory(1)], {"pad_to": 2, "multiple_of": 2}, ValueError, "not both"),
        ([trajectory(1)], {"layout": "ragged"}, ValueError, "layout: .* got 'ragged'"),
        ([trajectory(1)], {"pad_value": {"zoo": 1}}, KeyError, "no key 'zoo'; there are 'action'"),
        ([trajectory(1)], {"pad_value": "x"}, TypeError, "expected a number or a dict"),
        ([trajectory(1)], {"pad_value": -1}, ValueError, "'pixels'.*uint8, which cannot hold -1"),
        ([trajectory(1)], {"pad_value": 0.5}, ValueError, "which cannot hold 0.5"),
        ([trajectory(1)], {"pad_value": {"action": float("nan")}}, ValueError, "cannot hold nan"),
        (
            [trajectory(1)],
            {"pad_value": {"action": 2**15}},
            ValueError,
            "which cannot hold 32768",
        ),
        ([trajectory(1)], {"pad_value": {("next", "reward"): 1j}}, ValueError, "cannot hold 1j"),
        (
            [trajectory(1)],
            {"pad_value": {"done": True}},
            ValueError,
            "'done' must be padded with False",
        ),
        ([trajectory(1)], {"pad_value": {("next", "truncated"): 1}}, ValueError, "with False"),
        ([trajectory(1)], {"layout": "jagged", "pad_to": 2}, ValueError, "jagged.*expected no"),
        ([trajectory(1)], {"layout": "jagged", "pad_value": 1}, ValueError, "expected no"),
        ([trajectory(1)], {"layout": "jagged", "pad_value": {}}, ValueError, "expected no"),
    ],
)
def test_invalid_items_and_arguments_are_refused(
    items: Any, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    refuses(error, message, pad_collate, items, **arguments)


# Jagged


def test_jagged_leaves_share_their_offsets() -> None:
    items = [trajectory(3), trajectory(5), trajectory(1)]
    batch = pad_collate(items, layout="jagged")
    assert batch.batch_size == (3,)
    assert batch["lengths"].tolist() == [3, 5, 1]
    assert set(batch.keys(True, True)) == {*items[0].keys(True, True), "lengths"}
    for key, leaf in items[0].items(True, True):
        nested = batch[key]
        assert nested.layout is torch.jagged
        assert nested.dtype == leaf.dtype
        assert nested.offsets() is batch["action"].offsets()
        assert nested.offsets().tolist() == [0, 3, 8, 9]
        for part, item in zip(nested.unbind(), items, strict=True):
            assert torch.equal(part, item[key])
    both = batch["next", "reward"] + batch["observation", "x"]
    assert both.values().squeeze(-1).tolist() == [
        2.5 * row for item in items for row in range(1, len(item) + 1)
    ]


@pytest.mark.parametrize("place", [lambda: torch.device("meta"), torch.inference_mode])
def test_default_device_and_inference_mode_do_not_affect_collate(place: Any) -> None:
    items = [trajectory(2), trajectory(3)]
    with place():
        batch = pad_collate(items, pad_value=1)
        jagged = pad_collate(items, layout="jagged")
    assert batch["mask"].device.type == batch["action"].device.type == "cpu"
    assert batch["mask"].sum() == jagged["lengths"].sum() == 5
