"""What a prioritized sampler takes that looks odd, and what it refuses before anything changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    LazyTensorStorage,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
)


def _buffer(**options: Any) -> PrioritizedReplayBuffer:
    return PrioritizedReplayBuffer(
        alpha=0.6, beta=1.0, storage=LazyTensorStorage(8), batch_size=4, **options
    )


def _rows(count: int) -> TensorDict:
    return TensorDict({"x": torch.zeros(count)}, [count])


def test_a_maximum_beyond_the_dtype_is_refused_with_the_state() -> None:
    """Taken over, it would be the default of the next row, which no table could hold."""
    wide, narrow = _buffer(dtype=torch.float64), _buffer()
    for buffer in (wide, narrow):
        buffer.extend(_rows(3))
    wide.update_priority([0], [1e39])
    wide.update_priority([0], [1.0])
    before = narrow.sampler.state_dict()
    with pytest.raises(ValueError, match="'_max_priority' of at least 1 and finite in"):
        narrow.load_state_dict(wide.state_dict())
    assert narrow.sampler.default_priority == before["_max_priority"] == 1.0
    narrow.extend(_rows(2))
    assert len(narrow) == 5


def test_a_maximum_is_rounded_as_priorities_are() -> None:
    wide, narrow = _buffer(dtype=torch.float64), _buffer()
    wide.extend(_rows(3))
    wide.update_priority([0], [1.1])
    narrow.load_state_dict(wide.state_dict())
    index = narrow.extend(_rows(1))
    saved = narrow.sampler.state_dict()
    assert saved["_priorities"][index].item() == saved["_max_priority"] == torch.tensor(1.1).item()


@pytest.mark.parametrize("shape", [[0], [0, 1], [1, 0]])
def test_updates_of_no_rows_change_nothing(shape: list[int]) -> None:
    rb = _buffer()
    rb.extend(_rows(4))
    before = rb.sampler.state_dict()["_priorities"].tolist()
    batch = {"td_error": torch.zeros(shape), "index": torch.zeros(shape, dtype=torch.int64)}
    rb.update_tensordict_priority(TensorDict(batch, shape))
    assert rb.sampler.state_dict()["_priorities"].tolist() == before


def test_lazily_negated_priorities_are_accepted() -> None:
    rb = _buffer()
    rb.extend(_rows(4))
    lazily = torch.tensor([1 - 2j, 1 - 3j]).conj().imag
    assert lazily.is_neg()
    rb.update_priority(torch.tensor([0, 1]), lazily)
    batch = TensorDict({"td_error": lazily + 0.0, "index": torch.tensor([2, 3])}, [2])
    batch["td_error"] = torch.tensor([1 - 4j, 1 - 5j]).conj().imag
    rb.update_tensordict_priority(batch)
    assert rb.sampler.state_dict()["_priorities"].tolist() == [2.0, 3.0, 4.0, 5.0]


@pytest.mark.parametrize(
    "option",
    [
        {"dtype": torch.float64},
        {"reduction": "mean"},
        {"max_priority_within_buffer": True},
        {"weight_norm": "batch"},
        {"stratified": True},
    ],
    ids=lambda option: next(iter(option)),
)
def test_options_that_a_given_sampler_would_not_see_are_refused(option: dict[str, Any]) -> None:
    sampler = PrioritizedSampler(alpha=0.5, beta=0.5)
    with pytest.raises(TypeError, match=f"got sampler and {next(iter(option))}"):
        _buffer(sampler=sampler, **option)
    assert _buffer(sampler=sampler).sampler is sampler
