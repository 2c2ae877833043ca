"""Samplers and sample units of one's own: what they may draw, and what becomes of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import RoundRobinWriter, Sampler, SampleUnit, Storage
from tests.buffer.building import buffer_of, unchanged


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
    """BD9: what users see is always a tensor ``[B]``."""
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


@pytest.mark.parametrize("form", ["tensor", "tuple"])
def test_custom_sampler_draws_coordinates_of_rows_with_lanes(form: str):
    time, lane = torch.tensor([2, 0, 1]), torch.tensor([0, 1, 1])
    drawn = (time, lane) if form == "tuple" else torch.stack((time, lane), -1)
    buffer = buffer_of("tensor", 10, ndim=2, sampler=Known(drawn))
    buffer.extend(TensorDict({"x": torch.arange(6).view(2, 3)}, [2, 3]))
    batch = buffer.sample(3)
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
    buffer = buffer_of(
        filled=5,
        sampler=sampler,
        sample_unit=Twice(),
        batch_size=2,
        prefetch=prefetch,
        writer=RoundRobinWriter(track_generations=True),
    )
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
