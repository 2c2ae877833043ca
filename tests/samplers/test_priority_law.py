"""From a raw priority to what a record is drawn by."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from replaykit import native
from replaykit.samplers.priority_rules import PriorityLaw, importance_weights
from tests.native import reference
from tests.support.refusals import refuses

DTYPES = [torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 0.7, 1.0, 2.0])
def test_the_value_of_a_priority_depends_on_nothing_else(alpha: float, dtype: torch.dtype) -> None:
    """Not on its place in a batch, nor on the size of the batch; torch's power does."""
    law = PriorityLaw(alpha, 1e-8, dtype)
    p = torch.rand(1003, dtype=dtype, generator=torch.Generator().manual_seed(0)) * 9
    whole = law.values(p)
    assert whole.dtype == torch.float64
    assert torch.equal(torch.cat([law.values(p[i : i + 1]) for i in range(len(p))]), whole)
    assert torch.equal(torch.cat([law.values(piece) for piece in p.split(17)]), whole)
    assert torch.equal(law.values(p.flip(0)).flip(0), whole)
    assert [law.value_of(x) for x in p.tolist()] == whole.tolist()
    exact = (p.double() + 1e-8) ** alpha
    assert torch.allclose(whole.double(), exact, rtol=1e-15, atol=0)


@pytest.mark.parametrize("exponent", [-1e280, -2.5, -0.4, 0.0, 0.3, 0.7, 1.0, 30.0, 1e300])
def test_powers_have_the_bits_of_the_reference(exponent: float) -> None:
    sizes = 2.0 ** np.random.default_rng(0).uniform(-1000, 1000, 4000)
    base = np.array([0.0, 1.0, 5e-324, 2e-308, 1.7e308, *sizes])
    assert native.power(base, exponent).tobytes() == reference.power(base, exponent).tobytes()


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0, 3.0])
def test_zero_priority_has_zero_value(alpha: float) -> None:
    law = PriorityLaw(alpha, 0.0, torch.float32)
    assert law.values(torch.tensor([0.0, 1.0])).tolist() == [0.0, 1.0]
    assert law.value_of(0.0) == 0.0
    assert law.may_be_zero


def test_law_knows_if_a_value_can_be_zero() -> None:
    assert not PriorityLaw(0.7, 1e-8, torch.float32).may_be_zero
    assert not PriorityLaw(0.0, 1e-300, torch.float32).may_be_zero
    assert PriorityLaw(5.0, 1e-8, torch.float32).may_be_zero  # 1e-40 is kept as 0
    assert not PriorityLaw(5.0, 1e-8, torch.float64).may_be_zero


@pytest.mark.parametrize("dtype", DTYPES)
def test_check_refuses_priorities_out_of_range(dtype: torch.dtype) -> None:
    law = PriorityLaw(2.0, 0.0, dtype)
    law.check(0.0, 1e18)
    for least, most in ((-1.0, 1.0), (float("nan"), float("nan")), (0.0, float("inf"))):
        refuses(ValueError, "priorities", law.check, least, most)
    refuses(ValueError, "power", law.check, 0.0, 1e200)


def test_importance_weights_accept_any_base() -> None:
    values = torch.tensor([2.0, 4.0, 8.0], dtype=torch.float64)
    for dtype in DTYPES:
        weights = importance_weights(values, 2.0, 1.0, dtype)
        assert (weights.dtype, weights.tolist()) == (dtype, [1.0, 0.5, 0.25])
        weights = importance_weights(values, torch.tensor([2.0]), 2.0, dtype)
        assert weights.tolist() == [1.0, 0.25, 0.0625]
        assert importance_weights(values, values.amin(), 0.0, dtype).tolist() == [1.0, 1.0, 1.0]
    assert values.tolist() == [2.0, 4.0, 8.0]
