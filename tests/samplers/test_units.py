"""What one drawn record stands for in a batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from replaykit import LazyTensorStorage, ReplayBuffer, SampleUnit, Transition
from replaykit.writers import RoundRobinWriter


class WithNext(SampleUnit):
    """Every record together with the one in the slot after it."""

    def expand(
        self, index: torch.Tensor, info: dict[str, Any], storage: Any
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        both = torch.stack([index, (index + 1) % len(storage)], 1).flatten()
        return both, {"anchor_index": index.repeat_interleave(2)}


def test_a_unit_decides_which_records_a_batch_has(make_rows: Any) -> None:
    rb = ReplayBuffer(
        storage=LazyTensorStorage(5),
        sample_unit=WithNext(),
        writer=RoundRobinWriter(track_generations=True),
        batch_size=3,
    )
    rb.extend(make_rows(0, 8))
    batch, info = rb.sample(return_info=True)
    assert batch.batch_size == (6,)
    slots = batch["index"]
    assert torch.equal(batch["id"], torch.tensor([5, 6, 7, 3, 4])[slots])
    assert torch.equal(slots[1::2], (slots[::2] + 1) % 5)
    assert torch.equal(batch["anchor_index"], slots[::2].repeat_interleave(2))
    # What else is known is known of the records of the batch, not of the anchors.
    assert torch.equal(batch["index_generation"], (slots < 3).long())
    assert info["index"].shape == (6,)


@pytest.mark.parametrize("unit", [Transition, "transition", 3, object()])
def test_invalid_sample_unit_is_refused(unit: Any) -> None:
    with pytest.raises(TypeError, match="must be a SampleUnit instance, got"):
        ReplayBuffer(sample_unit=unit)
