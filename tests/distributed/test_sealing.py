"""Small messages as bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import LazyTensorStorage, ReplayBuffer
from replaykit.distributed.wire_format import ITSELF, pack, seal, unpack
from tests.conftest import make_rows
from tests.distributed.test_packing import VALUES, check

SMALL = sorted(set(VALUES) - {"nothing", "large", "each second"})


@pytest.mark.parametrize("name", SMALL)
def test_small_values_survive_a_round_trip_through_bytes(name: str) -> None:
    sealed = seal(pack(VALUES[name]))
    assert type(sealed) is bytes
    check(unpack(sealed), VALUES[name])


def test_values_of_every_size_begin_where_they_may_be_read() -> None:
    given = {
        str(dtype): torch.arange(count).to(dtype)
        for dtype in (torch.uint8, torch.int16, torch.float64, torch.complex128)
        for count in (1, 3, 8)
    }
    for values in (given, TensorDict({name: x[None] for name, x in given.items()}, [1])):
        found = unpack(seal(pack(values)))
        for name, value in found.items():
            assert value.data_ptr() % value.itemsize == 0
            assert torch.equal(value, values[name])


def test_a_batch_may_be_changed_and_the_bytes_stay() -> None:
    """Who reads them twice gets two batches; each column is one of its own to autograd."""
    rb = ReplayBuffer(storage=LazyTensorStorage(50), batch_size=8)
    rb.extend(make_rows(0, 50))
    batch = rb.sample()
    sealed = seal(pack(batch))
    one, other = unpack(sealed), unpack(sealed)
    one["observation"].zero_()
    assert one["id"]._version == 0
    check(other, batch)
    check(unpack(sealed), batch)
    assert bool((one["observation"] == 0).all())


@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(100_000, dtype=torch.uint8),
        {str(number): torch.zeros(16_384, dtype=torch.uint8) for number in range(6)},
        [torch.zeros(20_000, dtype=torch.uint8) for _ in range(17)],
        "text",
        None,
        ITSELF,
    ],
    ids=["large", "large together", "many pieces", "text", "nothing", "itself"],
)
def test_other_messages_stay_unchanged(value: Any) -> None:
    """What goes to Ray's store is not copied; what is no memory gains nothing."""
    message = pack(value)
    assert seal(message) is message


def test_a_message_with_warnings_stays_as_it_is() -> None:
    message = [*pack(make_rows(0, 3)), {"warnings": [pack(UserWarning("odd"))]}]
    assert seal(message) is message
