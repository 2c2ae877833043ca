"""From raw priorities to what records are drawn by, and the table of both."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from replaykit import native
from replaykit.samplers import priority_table
from replaykit.samplers.priority_rules import PriorityLaw
from replaykit.samplers.priority_table import PriorityTable
from tests.native import reference

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


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_priorities_are_loaded_as_few_are(dtype: torch.dtype) -> None:
    """Block by block, and to the bit what updates one after the other give."""
    count = 2 * priority_table._BLOCK + 5
    raw = torch.rand(count, dtype=dtype, generator=torch.Generator().manual_seed(0))
    law = PriorityLaw(0.6, 1e-3, dtype)

    def table() -> PriorityTable:
        return PriorityTable(law, torch.device("cpu"), smallest=True, within_buffer=True).follow(
            None
        )

    whole, parts = table(), table()
    whole.load(law, raw, 1.0)
    parts.reserve(count)
    for at in range(0, count, 1000):
        top = min(count, at + 1000)
        parts.set(torch.arange(at, top), raw[at:top], top)
        parts.cover(top, 1.0)
    assert torch.equal(whole.priorities, parts.priorities)
    assert torch.equal(whole.values(), parts.values())
    assert torch.equal(whole.values(), law.values(raw).to(dtype))
    assert (whole.smallest(), whole.largest()) == (parts.smallest(), parts.largest())
    draws = [t.draw(1000, torch.Generator().manual_seed(1), False)[0] for t in (whole, parts)]
    assert torch.equal(*draws)
