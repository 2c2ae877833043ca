"""Raw priorities of a table, and the trees over them."""

from __future__ import annotations

import pytest
import torch

from replaykit.samplers import priority_table
from replaykit.samplers.priority_rules import PriorityLaw
from replaykit.samplers.priority_table import PriorityTable


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_many_priorities_are_loaded_as_few_are(dtype: torch.dtype):
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
