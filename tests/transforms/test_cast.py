"""Other dtypes on read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import Cast
from tests.support.refusals import refuses


@pytest.fixture
def data() -> TensorDict:
    numbers = torch.arange(6).view(3, 2)
    inside = {"pixels": numbers.byte(), "legal": numbers > 2, "deep": {"x": numbers.double()}}
    return TensorDict(
        {
            "observation": inside,
            "action": numbers,
            "done": numbers[:, :1] > 2,
            "next": {
                "observation": inside,
                "reward": numbers[:, :1] / 2,
                "done": numbers[:, :1] > 2,
                "truncated": (numbers[:, :1] > 2).byte(),
            },
        },
        [3],
    )


DTYPES = [torch.uint8, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64]
DTYPES += [torch.bfloat16, torch.complex64]


@pytest.mark.acceptance("F46")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("key", ["action", ("observation", "pixels"), ("next", "reward")])
def test_cast_changes_dtype_of_named_key(
    data: TensorDict, fingerprint: Any, key: Any, dtype: torch.dtype
) -> None:
    """F46: the dtype is another one afterwards, and the values are the same."""
    before = fingerprint(data)
    out = Cast(dtype, [key])(data)
    assert out[key].dtype is dtype
    expected = data[key].numpy().astype(str(torch.zeros(0, dtype=dtype).float().numpy().dtype))
    if dtype is not torch.complex64 and not dtype.is_floating_point:
        expected = expected.astype(int)
    assert out[key].tolist() == expected.tolist()
    for other in set(data.keys(True, True)) - {key}:
        assert out[other] is data[other]
    assert fingerprint(data) == before
    assert Cast(dtype, [key]).inv(data) is data


def test_next_is_cast_on_request(data: TensorDict) -> None:
    keys = [("observation", "pixels"), ("observation", "deep", "x")]
    alone, both = Cast(torch.float32, keys)(data), Cast(torch.float32, keys, with_next=True)(data)
    for key in keys:
        assert alone[key].dtype is both[key].dtype is torch.float32
        assert alone[("next", *key)] is data[("next", *key)]
        assert both[("next", *key)].dtype is torch.float32


def test_below_an_entry_bools_and_flags_are_left_out(data: TensorDict) -> None:
    out = Cast(torch.float16, ["observation", "next"])(data)
    for key, value in out.items(True, True):
        kept = key in ("action", "done") or "legal" in key or "done" in key or "truncated" in key
        assert value.dtype is (data[key].dtype if kept else torch.float16), key
    assert out["observation"].batch_size == out["next", "observation", "deep"].batch_size == (3,)


def test_tensor_of_the_target_dtype_is_returned_unchanged(data: TensorDict) -> None:
    assert Cast(torch.int64, ["action"])(data)["action"] is data["action"]


@pytest.mark.parametrize(
    ("transform", "error", "message"),
    [
        (Cast(torch.int64, ["zoo"]), KeyError, "no key 'zoo'; there are"),
        (Cast(torch.int64, ["action"], with_next=True), KeyError, r"no key \('next', 'action'\)"),
        (Cast(torch.int64, [("observation", "legal")]), ValueError, "is bool"),
    ],
)
def test_invalid_casts_are_refused(
    data: TensorDict, fingerprint: Any, transform: Any, error: type[Exception], message: str
) -> None:
    before = fingerprint(data)
    refuses(error, message, transform, data)
    assert fingerprint(data) == before
    refuses(TypeError, "expected a TensorDict, got Tensor", transform, torch.zeros(2))
