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
from tests.buffer.building import KINDS, buffer_of, rows, same, snapshot, unchanged
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


def test_a_state_has_the_documented_entries():
    state = used("tensor").state_dict()
    assert set(state) == ENTRIES
    assert (state["_batch_size"], state["_consume_after_n_samples"]) == (2, None)
    assert set(state["_storage"]) == {"_storage", "initialized", "_len"}
    assert state["_storage"]["_len"] == 8


@pytest.mark.pitfall("CK5")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prefetch", [None, 2])
def test_later_changes_do_not_reach_a_state_nor_the_other_way(kind: str, prefetch: int | None):
    """States that alias live memory change under the user's hands."""
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
    before = snapshot(other)
    for tensor in tensors(state):
        tensor.zero_()
    same(before, snapshot(other))


def test_smaller_capacity_warns_once():
    buffer = buffer_of("tensor", 8, filled=8)
    with pytest.warns(UserWarning, match="5 rows") as caught:
        buffer_of("tensor", 3).load_state_dict(buffer.state_dict())
    assert [warning.filename for warning in caught] == [__file__]


BAD: list[tuple[tuple[str, ...], Any]] = [
    *[((entry,), 5) for entry in sorted(ENTRIES - {"_batch_size", "_consume_after_n_samples"})],
    (("_storage", "_len"), 3),
    (("_storage", "_storage"), torch.zeros(8)),
    (("_storage", "_storage"), TensorDict({"id": torch.zeros(8)}, [8])),
    (("_writer", "_kind"), "max_value"),
    (("_writer", "_write_count"), -1),
    (("_writer", "_ledger", "slots"), 0),
    (("_writer", "_ledger", "length"), 5),
    (("_writer", "_ledger", "cursor"), 8),
    (("_writer", "_ledger", "positions"), torch.zeros(2)),
    (("_sampler", "_kind"), "random"),
    (("_sampler", "_length"), -1),
    (("_sampler", "_remaining"), torch.tensor([99])),
    (("_sampler", "_remaining"), torch.tensor([0.5])),
    (("_transforms",), {"3": {"calls": torch.zeros(1)}}),
    (("_rng", "device"), "nowhere"),
    (("_rng", "state"), torch.zeros(3)),
    (("_prefetch_state",), [5]),
]


@pytest.mark.pitfall("CK2")
@pytest.mark.parametrize(("path", "value"), BAD, ids=str)
def test_a_state_that_does_not_fit_changes_nothing(path: tuple[str, ...], value: Any):
    state = used("tensor").state_dict()
    part = state
    for name in path[:-1]:
        part = part[name]
    part[path[-1]] = value
    buffer = used("tensor", seed=5)
    unchanged(buffer, ValueError, lambda: buffer.load_state_dict(state))
    refuses((TypeError, ValueError), "got None", buffer.load_state_dict, None)


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
