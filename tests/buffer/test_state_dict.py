"""``state_dict``: copies both ways, and the rules of ``loads``."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    RoundRobinWriter,
)
from tests.buffer.building import KINDS, buffer_of, rows, same, unchanged
from tests.support.refusals import refuses

ENTRIES = {
    "_storage",
    "_sampler",
    "_writer",
    "_transforms",
    "_batch_size",
    "_consume_after_n_samples",
    "_rng",
}


class Counter:
    """A transform whose state is the tensor that it works with."""

    def __init__(self) -> None:
        self.calls = torch.zeros(1)

    def forward(self, data: Any) -> Any:
        self.calls += 1
        return data

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]


def tensors(value: Any) -> list[torch.Tensor]:
    """Every tensor inside of a state."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, TensorDict) or hasattr(value, "to_dict"):
        return [t for t in value.values(True, True) if isinstance(t, torch.Tensor)]
    if isinstance(value, dict):
        return [t for item in value.values() for t in tensors(item)]
    if isinstance(value, (list, tuple)):
        return [t for item in value for t in tensors(item)]
    return []


def used(kind: str, **options: Any) -> ReplayBuffer:
    """A buffer with a state in every part."""
    buffer = buffer_of(
        kind,
        8,
        sampler="without",
        writer=RoundRobinWriter(track_generations=True),
        batch_size=2,
        transform=Counter(),
        **{"seed": 0, **options},
    )
    buffer.extend(rows(5))
    buffer.empty(empty_write_count=False)
    buffer.extend(rows(7))
    buffer.extend(rows(3, 7))
    buffer.writer.write_at(torch.tensor([1]), rows(1, 50))
    buffer.sample()
    return buffer


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_has_the_documented_entries(kind: str):
    state = used(kind).state_dict()
    assert set(state) == ENTRIES
    assert (state["_batch_size"], state["_consume_after_n_samples"]) == (2, None)
    assert set(state["_storage"]) == {"_storage", "initialized", "_len"}
    assert state["_storage"]["_len"] == 8


@pytest.mark.pitfall("CK5")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prefetch", [None, 2])
def test_later_changes_do_not_reach_a_state_nor_the_other_way(kind: str, prefetch: int | None):
    """CK5, D9: states that alias live memory change under the user's hands."""
    buffer = used(kind, prefetch=prefetch)
    state = buffer.state_dict()
    taken = copy.deepcopy(state)
    buffer.sample()
    buffer.extend(rows(8, 60))
    buffer[0] = rows(1, 90)[0]
    buffer.writer.write_at(torch.tensor([2]), rows(1, 91))
    buffer.empty()
    same(taken, state)

    buffer.load_state_dict(state)
    buffer.extend(rows(8, 60))
    buffer.sample()
    same(taken, state)

    other = used(kind, prefetch=prefetch)
    other.load_state_dict(state)
    other.shutdown()  # batches under way go through the transform
    before = other.storage.state_dict(), other.storage.ledger.state(), other.transform[0].calls
    before = copy.deepcopy(before)
    for tensor in tensors(state):
        tensor.zero_()
    same(
        before, (other.storage.state_dict(), other.storage.ledger.state(), other.transform[0].calls)
    )


def test_smaller_capacity_warns_once():
    buffer = buffer_of("tensor", 8, filled=8)
    with pytest.warns(UserWarning, match="5 rows") as caught:
        buffer_of("tensor", 3).load_state_dict(buffer.state_dict())
    assert [warning.filename for warning in caught] == [__file__]


def change(entry: str, key: str | None, value: Any) -> Any:
    def apply(state: dict[str, Any]) -> None:
        if key is None:
            state[entry] = value
        else:
            state[entry][key] = value

    apply.__name__ = f"{entry}.{key}"
    return apply


def ledger(key: str, value: Any) -> Any:
    def apply(state: dict[str, Any]) -> None:
        state["_writer"]["_ledger"][key] = value

    apply.__name__ = f"ledger.{key}={value}"
    return apply


BAD = [
    *[
        change(entry, None, 5)
        for entry in sorted(ENTRIES - {"_batch_size"})
        if "consume" not in entry
    ],
    change("_storage", "_len", 3),
    change("_storage", "_storage", torch.zeros(8)),
    change("_storage", "_storage", TensorDict({"id": torch.zeros(8)}, [8])),
    change("_writer", "_kind", "max_value"),
    change("_writer", "_write_count", -1),
    change("_sampler", "_kind", "random"),
    change("_sampler", "_length", -1),
    change("_sampler", "_remaining", torch.tensor([99])),
    change("_sampler", "_remaining", torch.tensor([0.5])),
    change("_transforms", None, {"3": {"calls": torch.zeros(1)}}),
    change("_rng", "device", "nowhere"),
    change("_rng", "state", torch.zeros(3)),
    change("_prefetch_state", None, [5]),
    ledger("slots", 0),
    ledger("length", 5),
    ledger("cursor", 8),
    ledger("positions", torch.zeros(2)),
]


@pytest.mark.pitfall("CK2")
@pytest.mark.parametrize("apply", BAD, ids=lambda apply: apply.__name__)
def test_a_state_that_does_not_fit_changes_nothing(apply: Any):
    """CK2, G1: everything is checked first."""
    state = used("tensor").state_dict()
    apply(state)
    buffer = used("tensor", seed=5)
    unchanged(buffer, ValueError, lambda: buffer.load_state_dict(state))


@pytest.mark.parametrize("entry", sorted(ENTRIES - {"_batch_size", "_consume_after_n_samples"}))
def test_a_missing_entry_is_named(entry: str):
    state = used("tensor").state_dict()
    del state[entry]
    buffer = used("tensor")
    unchanged(buffer, ValueError, lambda: buffer.load_state_dict(state), entry)


def test_states_of_pytrees_are_refused(tmp_path: Any):
    buffer = ReplayBuffer(storage=LazyTensorStorage(3))
    buffer.extend({"a": torch.zeros(2)})
    refuses(TypeError, "dumps", buffer.state_dict)


def test_states_of_objects_are_copies():
    buffer = ReplayBuffer(storage=ListStorage(5), collate_fn=list)
    buffer.extend([{"a": [torch.zeros(1)]}, "text", 3])
    state = buffer.state_dict()
    buffer[0]["a"][0].fill_(7)
    assert state["_storage"]["_storage"][0]["a"][0].item() == 0
    buffer.load_state_dict(state)
    state["_storage"]["_storage"][0]["a"][0].fill_(9)
    assert buffer[0]["a"][0].item() == 0
    assert buffer[1:] == ["text", 3]
