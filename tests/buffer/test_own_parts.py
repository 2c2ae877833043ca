"""Parts that belong to one buffer, and parts of a user's own."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from replaykit import (
    LazyTensorStorage,
    RandomSampler,
    ReplayBuffer,
    RoundRobinWriter,
    Sampler,
    SamplerWithoutReplacement,
    Storage,
    TensorDictMaxValueWriter,
)


def make(**parts: Any) -> ReplayBuffer:
    return ReplayBuffer(storage=LazyTensorStorage(6), batch_size=2, **parts)


# -- one buffer, one writer -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", [RoundRobinWriter, TensorDictMaxValueWriter])
def test_a_writer_serves_one_buffer(kind: Any):
    """Its rows would go where the other buffer is."""
    writer = kind()
    first = make(writer=writer)
    with pytest.raises(ValueError, match="one that another buffer uses"):
        make(writer=writer)
    other = make()
    own = other.writer
    with pytest.raises(ValueError, match="one that another buffer uses"):
        other.set_writer(writer)
    assert other.writer is own
    assert first.writer.storage is first.storage
    other.extend(torch.arange(3))
    assert (len(first), len(other)) == (0, 3)


def test_replaced_or_orphaned_writer_can_serve_another_buffer():
    writer = RoundRobinWriter()
    first = make(writer=writer)
    first.set_writer(RoundRobinWriter())
    second = make(writer=writer)
    second.extend(torch.arange(3))
    assert (len(first), len(second)) == (0, 3)
    del second
    assert make(writer=writer).extend(torch.arange(1)).tolist() == [0]


def test_a_sampler_with_a_pass_serves_one_buffer():
    sampler = SamplerWithoutReplacement()
    first = make(sampler=sampler)
    with pytest.raises(ValueError, match="a SamplerWithoutReplacement for this buffer alone"):
        make(sampler=sampler)
    other = make()
    with pytest.raises(ValueError, match="another buffer uses"):
        other.set_sampler(sampler)
    assert isinstance(other.sampler, RandomSampler)
    first.extend(torch.arange(4))
    assert sum(len(batch) for batch in first) == 4


def test_random_sampler_may_serve_buffers_that_share_a_generator():
    sampler = RandomSampler()
    buffers = [make(sampler=sampler) for _ in range(2)]
    for buffer in buffers:
        buffer.extend(torch.arange(6))
    torch.manual_seed(0)
    expected = [torch.randint(6, (2,)) for _ in range(4)]
    torch.manual_seed(0)
    found = [buffers[turn % 2].sample() for turn in range(4)]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    with pytest.raises(ValueError, match="another buffer uses"):
        make(sampler=sampler, generator=torch.Generator())


def test_copies_do_not_share_writers_and_samplers():
    buffer = make(sampler=SamplerWithoutReplacement())
    buffer.extend(torch.arange(4))
    for twin in (copy.deepcopy(buffer), pickle.loads(pickle.dumps(buffer))):
        twin.extend(torch.arange(1))
        assert (len(buffer), len(twin)) == (4, 5)
        with pytest.raises(ValueError, match="another buffer uses"):
            make(writer=twin.writer)


# -- a sampler of one's own -----------------------------------------------------------------------


class Cyclic(Sampler):
    """Its state is a plain dictionary that knows nothing of kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.at = 0

    def sample(self, storage: Any, batch_size: int) -> tuple[torch.Tensor, dict[str, Any]]:
        index = (torch.arange(batch_size) + self.at) % len(storage)
        self.at += batch_size
        return index, {}

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.at = state_dict["at"]


@pytest.mark.parametrize("way", ["files", "state"])
def test_custom_sampler_resumes_from_its_saved_state(way: str, tmp_path: Path):
    buffer = make(sampler=Cyclic())
    buffer.extend(torch.arange(6))
    buffer.sample()
    buffer.dumps(tmp_path)
    state = buffer.state_dict()
    other = make(sampler=Cyclic())
    if way == "files":
        other.loads(tmp_path)
    else:
        other.load_state_dict(state)
    assert [other.sample().tolist() for _ in range(3)] == [[2, 3], [4, 5], [0, 1]]
    for target in (make(), make(sampler=SamplerWithoutReplacement())):
        with pytest.raises(ValueError, match="got 'Cyclic'"):
            target.load_state_dict(state)
        assert len(target) == 0
    with pytest.raises(ValueError, match="expected the state of a 'Cyclic' sampler"):
        make(sampler=Cyclic()).load_state_dict(make().state_dict())


# -- a storage of one's own -----------------------------------------------------------------------


class Six(Storage):
    """The six methods that a storage has to bring."""

    def __init__(self, max_size: int) -> None:
        super().__init__(max_size)
        self.rows: dict[int, Any] = {}

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        slots = torch.as_tensor(cursor).reshape(-1).tolist()
        for slot, row in zip(slots, [data] if isinstance(cursor, int) else data, strict=True):
            self.rows[slot] = row

    def get(self, index: Any) -> Any:
        if isinstance(index, int):
            return self.rows[index]
        return torch.stack([self.rows[i] for i in torch.arange(len(self))[index].tolist()])

    def __len__(self) -> int:
        return len(self.rows)

    def contains(self, item: Any) -> bool:
        return item in self.rows

    def state_dict(self) -> dict[str, Any]:
        return {"rows": dict(self.rows)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rows = dict(state_dict["rows"])


class Seven(Six):
    """And the one that lets a buffer be emptied."""

    def clear(self) -> None:
        self.rows.clear()


def test_failed_empty_of_a_storage_keeps_its_rows():
    buffer = ReplayBuffer(storage=Six(4), batch_size=2)
    buffer.extend(torch.ones(4))
    with pytest.raises(NotImplementedError, match=r"Six cannot be emptied.*clear\(self\)"):
        buffer.empty()
    assert (len(buffer), buffer.write_count) == (4, 4)
    assert buffer.sample().tolist() == [1, 1]


def test_custom_storage_can_be_emptied():
    buffer = ReplayBuffer(storage=Seven(4), batch_size=2)
    buffer.extend(torch.ones(4))
    buffer.empty()
    assert len(buffer) == 0
    buffer.extend(torch.full((1,), 5.0))
    assert buffer.sample().tolist() == [5, 5]
