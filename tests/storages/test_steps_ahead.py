"""Sums over several steps that overwrite a batch in one call, against loops over lists."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from replaykit import LazyTensorStorage
from replaykit.storages.columns import Columns
from replaykit.storages.row_kernels import StepsPlan

TAKEN = (("next", "x"), ("next", "done"), ("next", "deep", "n"), ("other",))


def stored(slots: int, lanes: int, dtype: torch.dtype, wide: int) -> tuple[Any, Any]:
    """Columns, and the rows in them ``[slots, lanes]``."""
    cells = slots * lanes
    number = torch.arange(cells)
    data = TensorDict(
        {
            "x": number * 2,
            "reward": ((number * 37) % 13 - 6).to(dtype).unsqueeze(-1) / 4,
            "other": number.to(torch.float32).unsqueeze(-1).expand(cells, 3).contiguous(),
            "next": {
                "x": number.to(torch.uint8).unsqueeze(-1).expand(cells, wide).contiguous(),
                "done": (number % 3 == 0).unsqueeze(-1),
                "deep": {"n": number},
            },
        },
        [cells],
    )
    shaped = data if lanes == 1 else data.reshape(slots, lanes).transpose(0, 1).contiguous()
    ndim = 1 if lanes == 1 else 2
    storage = LazyTensorStorage(cells, ndim=ndim)
    rows = storage.prepare(shaped, time_dim=ndim - 1)
    with storage.lock:
        storage.accept(rows)
        storage.write(torch.arange(slots), rows, slice(None))
    columns = storage.require()
    assert isinstance(columns, Columns)
    return columns, data


@settings(max_examples=80, deadline=None)
@given(
    data=st.data(),
    lanes=st.sampled_from([1, 3]),
    slots=st.integers(1, 9),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    wide=st.sampled_from([2, 70, 9000]),
    contiguous=st.booleans(),
    taken=st.sampled_from([TAKEN, TAKEN[:1], TAKEN[2:], ()]),
    flag=st.sampled_from([None, ("next", "done"), ("x",), ("none",)]),
)
def test_steps_ahead_fill_batch_with_last_steps(
    data: Any,
    lanes: int,
    slots: int,
    dtype: torch.dtype,
    wide: int,
    contiguous: bool,
    taken: Any,
    flag: Any,
) -> None:
    columns, rows = stored(slots, lanes, dtype, wide)
    cells = slots * lanes
    count = data.draw(st.integers(1, 12))
    some = st.lists(st.integers(0, cells - 1), min_size=count, max_size=count)
    element = np.array(data.draw(some))
    further = np.array(data.draw(some)) % slots
    time = element // lanes + 100
    most = data.draw(st.integers(1, 6))
    plan = StepsPlan(("reward",), flag, taken, 0.5, tuple(float(k) for k in range(1, most + 1)))
    ahead = columns.steps_ahead(plan)
    assert ahead is not None
    assert columns.steps_ahead(plan) is ahead
    batch = columns._assemble(
        columns.gather_elements(torch.from_numpy(element), cells, contiguous=contiguous),
        torch.Size([count]),
        columns.device,
    )
    led = ahead.lead(batch, element, time, time + further)
    steps = np.minimum(further, most - 1)
    assert led is not None
    assert led.ends.tolist() == (time + steps).tolist()
    assert led.used.tolist() == (steps + 1)[:, None].tolist()
    assert led.discounts.dtype is led.sums.dtype is dtype
    assert led.discounts.tolist() == (steps + 1.0)[:, None].tolist()
    flat = rows["reward"].double()[:, 0].tolist()
    sums = [
        [sum(0.5**k * flat[(at + k * lanes) % cells] for k in range(on + 1))]
        for at, on in zip(element.tolist(), steps.tolist(), strict=True)
    ]
    assert np.allclose(led.sums.tolist(), sums, rtol=1e-6)
    own = rows[torch.from_numpy(element)]
    last = rows[torch.from_numpy((element + steps * lanes) % cells)]
    if flag == ("next", "done"):
        assert led.open is not None
        assert torch.equal(led.open, ~last["next", "done"])
    else:  # not one bool a row
        assert led.open is None
    for key in rows.keys(True, True):
        path = (key,) if isinstance(key, str) else key
        assert torch.equal(batch[key], (last if path in taken else own)[key]), key


def test_unsupported_sums_are_left_to_other_code() -> None:
    columns, rows = stored(6, 1, torch.float32, 2)

    def plan(reward: Any) -> Any:
        return columns.steps_ahead(StepsPlan(reward, None, TAKEN, 0.5, (0.5, 0.25)))

    for reward in (("x",), ("other",), ("none",)):
        assert plan(reward) is None
    element = np.array([0, 3])
    ahead = plan(("reward",))
    assert ahead.lead({"next": {}}, element, element, element) is None
    assert ahead.lead(rows[:2].exclude("other"), element, element, element) is None
    many = np.zeros(100_000, np.int64)
    assert ahead.lead(rows[torch.from_numpy(many)], many, many, many) is None
    columns.advise = True
    assert plan(("reward",)) is None


@pytest.mark.parametrize(("element", "time", "last"), [(6, 0, 1), (-1, 0, 1), (2, 5, 4), (2, 0, 6)])
def test_rows_outside_storage_raise_error_and_change_nothing(
    element: int, time: int, last: int
) -> None:
    columns, rows = stored(6, 1, torch.float32, 2)
    ahead = columns.steps_ahead(StepsPlan(("reward",), None, TAKEN, 0.5, (0.5,) * 9))
    assert ahead is not None
    batch, before = rows[:2].clone(), rows[:2].clone()
    one = np.ones(1, np.int64)
    with pytest.raises(IndexError, match=f"got row {element} at time {time}"):
        ahead.lead(
            batch,
            np.concatenate([one, one * element]),
            np.concatenate([one, one * time]),
            np.concatenate([one + 2, one * last]),
        )
    assert (batch == before).all()


def test_steps_ahead_follow_moved_memory() -> None:
    columns, _ = stored(6, 1, torch.float32, 2)
    plan = StepsPlan(("reward",), None, TAKEN[:1], 0.5, (0.5, 0.25))
    first = columns.steps_ahead(plan)
    columns._native.point()
    assert columns.steps_ahead(plan) is not first
    for _ in range(20):  # so many plans are not all kept
        columns.steps_ahead(StepsPlan(("reward",), None, TAKEN[:1], 0.5, (0.5, 0.25)))
    assert len(columns._native._plans) <= 8
