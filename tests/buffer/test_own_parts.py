"""Parts that users write: writers and samplers of one buffer, storages, draws and units."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    LazyTensorStorage,
    RandomSampler,
    ReplayBuffer,
    RoundRobinWriter,
    Sampler,
    SamplerWithoutReplacement,
    SampleUnit,
    Storage,
    TensorDictMaxValueWriter,
)
from tests.buffer.building import Turning, buffer_of, unchanged
from tests.support.refusals import refuses


def make(**parts: Any) -> ReplayBuffer:
    return ReplayBuffer(storage=LazyTensorStorage(6), batch_size=2, **parts)


# -- one buffer, one writer -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", [RoundRobinWriter, TensorDictMaxValueWriter])
def test_a_writer_serves_one_buffer(kind: Any):
    """Its rows would go where the other buffer is."""
    writer = kind()
    first = make(writer=writer)
    refuses(ValueError, "one that another buffer uses", make, writer=writer)
    other = make()
    own = other.writer
    refuses(ValueError, "one that another buffer uses", other.set_writer, writer)
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
    refuses(ValueError, "a SamplerWithoutReplacement for this buffer alone", make, sampler=sampler)
    other = make()
    refuses(ValueError, "another buffer uses", other.set_sampler, sampler)
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
    refuses(ValueError, "another buffer uses", make, sampler=sampler, generator=torch.Generator())


# -- a sampler of one's own -----------------------------------------------------------------------


class Cyclic(Turning):
    """Its state is a plain dictionary that knows nothing of kinds."""

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
        refuses(ValueError, "got 'Turning'", target.load_state_dict, state)
        assert len(target) == 0
    with pytest.raises(ValueError, match="expected the state of a 'Turning' sampler"):
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


def test_a_custom_storage_is_emptied_if_it_can_be():
    kept, emptied = (ReplayBuffer(storage=kind(4), batch_size=2) for kind in (Six, Seven))
    for buffer in (kept, emptied):
        buffer.extend(torch.ones(4))
    refuses(NotImplementedError, r"Six cannot be emptied.*clear\(self\)", kept.empty)
    assert (len(kept), kept.write_count) == (4, 4)
    assert kept.sample().tolist() == [1, 1]
    emptied.empty()
    assert len(emptied) == 0
    emptied.extend(torch.full((1,), 5.0))
    assert emptied.sample().tolist() == [5, 5]


# -- draws -----------------------------------------------------------------------------------------


class Twice(SampleUnit):
    """Every drawn record and the one after it."""

    def expand(self, index: torch.Tensor, info: dict[str, Any], storage: Storage) -> Any:
        assert storage.lock.acquire(blocking=False), "called without the storage's lock"
        storage.lock.release()
        step = torch.arange(2).repeat(len(index))
        index = (index.repeat_interleave(2) + step) % len(storage)
        info = {key: value.repeat_interleave(2, 0) for key, value in info.items()}
        return index, {**info, "step": step}


class Known(Sampler):
    """Draws given slots, and knows things of them."""

    def __init__(self, index: Any, **info: Any) -> None:
        super().__init__()
        self.index, self.info = index, info

    def sample(self, storage: Storage, batch_size: int) -> Any:
        return self.index, self.info


@pytest.mark.pitfall("BD9")
@pytest.mark.parametrize("form", ["tensor", "tuple", "list"])
def test_custom_sampler_may_return_a_tuple_or_a_list(form: str):
    """Users always get a tensor ``[B]`` or ``[B, ndim]``."""
    index = torch.tensor([3, 1, 1])
    drawn = {"tensor": index, "tuple": (index,), "list": [3, 1, 1]}[form]
    sampler = Known(drawn, weight=torch.tensor([0.1, 0.2, 0.3]), note=torch.tensor(7), name="me")
    buffer = buffer_of(filled=5, sampler=sampler)
    data, info = buffer.sample(3, return_info=True)
    assert data["index"].tolist() == info["index"].tolist() == data["id"].tolist() == [3, 1, 1]
    assert torch.equal(data["weight"], sampler.info["weight"])
    assert (info["name"], int(info["note"])) == ("me", 7)
    assert set(data.keys()) == {"id", "observation", "pixels", "next", "index", "weight"}
    assert "index" not in sampler.info
    time, lane = torch.tensor([2, 0, 1]), torch.tensor([0, 1, 1])
    cells = (time, lane) if form == "tuple" else torch.stack((time, lane), -1)
    lanes = buffer_of("tensor", 10, ndim=2, sampler=Known(cells))
    lanes.extend(TensorDict({"x": torch.arange(6).view(2, 3)}, [2, 3]))
    batch = lanes.sample(3)
    assert batch["index"].tolist() == [[2, 0], [0, 1], [1, 1]]
    assert batch["x"].tolist() == [2, 3, 4]


def test_info_may_have_nested_keys_and_never_replaces_the_index():
    sampler = Known(torch.tensor([2]))
    sampler.info = {"index": torch.tensor([0]), ("next", "truncated"): torch.tensor([[True]])}
    buffer = buffer_of(filled=5, sampler=sampler)
    data, info = buffer.sample(1, return_info=True)
    assert data["index"].tolist() == info["index"].tolist() == data["id"].tolist() == [2]
    assert data["next", "truncated"].tolist() == [[True]]


def test_a_sampler_that_draws_rows_that_are_not_stored_gets_an_index_error():
    buffer = buffer_of(filled=5, sampler=Known(torch.tensor([5])))
    unchanged(buffer, IndexError, lambda: buffer.sample(1), "5")


@pytest.mark.parametrize("prefetch", [None, 2])
def test_sample_unit_expands_the_drawn_index(prefetch: int | None):
    sampler = Known(torch.tensor([3, 4]), weight=torch.tensor([0.5, 1.0]))
    writer = RoundRobinWriter(track_generations=True)
    given = {"sampler": sampler, "sample_unit": Twice(), "writer": writer, "prefetch": prefetch}
    buffer = buffer_of(filled=5, batch_size=2, **given)
    batch = buffer.sample()
    assert batch.batch_size == (4,)
    assert batch["index"].tolist() == batch["id"].tolist() == [3, 4, 4, 0]
    assert batch["weight"].tolist() == [0.5, 0.5, 1.0, 1.0]
    assert batch["step"].tolist() == [0, 1, 0, 1]
    assert batch["index_generation"].shape == (4,)
    assert sampler.index.tolist() == [3, 4]


class Halves(Sampler):
    """Derives ``ran_out`` from where it is; there is no setter."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn = 0

    @property
    def ran_out(self) -> bool:  # type: ignore[override]
        return self.drawn % 4 == 0

    def sample(self, storage: Storage, batch_size: int) -> Any:
        self.drawn += batch_size
        return torch.arange(self.drawn - batch_size, self.drawn) % len(storage), {}


@pytest.mark.parametrize("prefetch", [None, 2])
def test_custom_sampler_defines_the_end_of_a_pass(prefetch: Any):
    failing = [True]

    def once(data: Any) -> Any:
        if failing and data["id"].tolist() == [2, 3]:
            failing.clear()
            raise ArithmeticError
        return data

    buffer = buffer_of(filled=4, sampler=Halves(), batch_size=2, prefetch=prefetch, transform=once)
    assert buffer.sample()["id"].tolist() == [0, 1]
    with pytest.raises(ArithmeticError):
        buffer.sample()
    assert [batch["id"].tolist() for batch in buffer] == [[2, 3]]
    assert [batch["id"].tolist() for batch in buffer] == [[0, 1], [2, 3]]
