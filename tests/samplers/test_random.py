"""Uniform draws: the law, and where its randomness comes from."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from replaykit import (
    LazyTensorStorage,
    ListStorage,
    RandomSampler,
    ReplayBuffer,
    Sampler,
    SamplerWithoutReplacement,
)
from replaykit.errors import NotEnoughData
from tests.samplers.chi_square import chi_square_p
from tests.support.refusals import refuses

SMALLEST_P = 1e-6


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# -- the law --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("written", "capacity"), [(50, 50), (20, 50), (77, 50), (1, 1)])
def test_every_stored_row_is_equally_likely(written: int, capacity: int) -> None:
    """Chi-square, fixed seed: full, partly filled and wrapped."""
    rb = ReplayBuffer(storage=LazyTensorStorage(capacity), generator=_seeded(0))
    rb.extend(torch.arange(written))
    stored, draws = min(written, capacity), 20_000
    _, info = rb.sample(draws, return_info=True)
    assert info["index"].dtype == torch.int64
    counts = torch.bincount(info["index"], minlength=capacity)
    assert not counts[stored:].any()
    assert stored == 1 or chi_square_p(counts[:stored].tolist()) > SMALLEST_P


def test_every_cell_of_the_lanes_is_equally_likely(make_lanes: Any) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(30, ndim=2), generator=_seeded(1))
    rb.extend(make_lanes(0, 4, (5,)))
    batch = rb.sample(20_000)
    assert batch["index"].shape == (20_000, 2)
    step, lane = batch["index"].unbind(-1)
    counts = torch.bincount(step * 5 + lane, minlength=30)
    assert not counts[20:].any()
    assert chi_square_p(counts[:20].tolist()) > SMALLEST_P
    assert torch.equal(batch["id"], step + 100 * lane)


def test_draws_are_independent_of_one_another() -> None:
    """With replacement: pairs of neighbours in a batch fill all cells of the square."""
    rb = ReplayBuffer(storage=LazyTensorStorage(8), generator=_seeded(2))
    rb.extend(torch.arange(8))
    drawn = rb.sample(40_000).view(-1, 2)
    counts = torch.bincount(drawn[:, 0] * 8 + drawn[:, 1], minlength=64)
    assert chi_square_p(counts.tolist()) > SMALLEST_P
    # The test would tell a law that leaves out one cell, or prefers some.
    wrong = torch.randint(63, (20_000,), generator=_seeded(0))
    assert chi_square_p(torch.bincount(wrong, minlength=64).tolist()) < SMALLEST_P
    skewed = (torch.rand(20_000, generator=_seeded(0)) ** 1.2 * 64).long()
    assert chi_square_p(torch.bincount(skewed).tolist()) < SMALLEST_P


# -- errors and the rest --------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", [RandomSampler, SamplerWithoutReplacement])
def test_nothing_is_drawn_from_an_empty_storage(storage_kind: Any, sampler: Any) -> None:
    rb = storage_kind.buffer(4, sampler=sampler(), batch_size=2)
    assert not rb.can_sample()
    with pytest.raises(NotEnoughData) as caught:
        rb.sample()
    assert str(caught.value) == "Cannot sample from an empty storage."
    assert isinstance(caught.value, RuntimeError)
    refuses(RuntimeError, "empty storage", next, iter(rb))


def test_can_sample_draws_nothing(make_rows: Any) -> None:
    generator = _seeded(0)
    rb = ReplayBuffer(storage=LazyTensorStorage(4), generator=generator, batch_size=2)
    state = generator.get_state()
    assert not rb.can_sample()
    rb.extend(make_rows(0, 1))
    assert rb.can_sample()
    assert rb.can_sample(100)  # with replacement, any number can be drawn
    assert torch.equal(generator.get_state(), state)


def test_replacement_false_builds_the_other_sampler() -> None:
    sampler = RandomSampler(replacement=False, drop_last=True, shuffle=False)
    assert type(sampler) is SamplerWithoutReplacement
    assert (sampler.drop_last, sampler.shuffle) == (True, False)
    assert type(RandomSampler(replacement=False)) is SamplerWithoutReplacement
    assert type(RandomSampler(replacement=True)) is RandomSampler
    for value in (True, False):
        assert type(SamplerWithoutReplacement(replacement=value)) is SamplerWithoutReplacement
    for call in (
        lambda: RandomSampler(drop_last=True),
        lambda: RandomSampler(replacement=True, shuffle=False),
        lambda: RandomSampler(replacement=False, wrong=1),
        lambda: RandomSampler(True),
    ):
        with pytest.raises(TypeError):
            call()


class Newest(Sampler):
    """A sampler of a user's: always the last row that was written."""

    def sample(self, storage: Any, batch_size: int) -> tuple[Any, dict[str, Any]]:
        newest = storage.ledger.write_order()[-1]
        return newest.expand(batch_size), {"age": torch.zeros(batch_size)}


def test_custom_sampler_needs_only_sample(make_rows: Any) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(4), sampler=Newest(), batch_size=3)
    rb.extend(make_rows(0, 6))
    batch, info = rb.sample(return_info=True)
    assert batch["id"].tolist() == [5, 5, 5]
    assert set(info) == {"index", "age"}
    assert batch["age"].tolist() == [0.0, 0.0, 0.0]
    assert rb.can_sample()
    assert rb.sampler.default_priority == 1.0
    assert repr(rb.sampler) == "Newest()"
    assert rb.sampler.state_dict() == {"_kind": "Newest"}
    refuses(TypeError, "Newest has no without-replacement variant", Newest, replacement=False)


class Pairs(Sampler):
    """Gives coordinates as a tuple of tensors, as TorchRL's samplers may."""

    def sample(self, storage: Any, batch_size: int) -> tuple[Any, dict[str, Any]]:
        zeros = torch.zeros(batch_size, dtype=torch.int64)
        return (zeros, zeros + 1), {}


@pytest.mark.pitfall("BD9")
def test_a_tuple_of_coordinates_is_taken(make_lanes: Any) -> None:
    """BD9: ``index`` is one tensor ``[B, ndim]`` in the data and in the info, whoever drew it."""
    rb = ReplayBuffer(storage=LazyTensorStorage(8, ndim=2), sampler=Pairs(), batch_size=3)
    rb.extend(make_lanes(0, 3))
    batch, info = rb.sample(return_info=True)
    assert batch["id"].tolist() == [100, 100, 100]
    assert batch["index"].tolist() == info["index"].tolist() == [[0, 1]] * 3


def test_priority_updates_warn_that_they_have_no_effect() -> None:
    sampler = RandomSampler()
    with pytest.warns(UserWarning, match="RandomSampler has no priorities"):
        sampler.update_priority(torch.tensor([0]), torch.tensor([1.0]))
    assert not sampler.prioritized


def test_ran_out_can_be_set_and_is_never_set_by_draws_with_replacement() -> None:
    rb = ReplayBuffer(storage=ListStorage(3), batch_size=2)
    rb.extend([1, 2, 3])
    for _ in range(5):
        rb.sample()
        assert rb.sampler.ran_out is False
    rb.sampler.ran_out = 1
    assert rb.sampler.ran_out is True
    rb.empty()
    assert rb.sampler.ran_out is False


def test_a_state_of_another_kind_is_refused() -> None:
    storage = LazyTensorStorage(3)
    for state in ({"_kind": "without_replacement"}, {}):
        with pytest.raises(ValueError, match="the state of a 'random' sampler, got"):
            RandomSampler().load_state_dict(state)
        with pytest.raises(ValueError, match="the state of a 'random' sampler, got"):
            RandomSampler().check_state(state, storage)
    with pytest.raises(ValueError, match="got None"):
        RandomSampler().check_state(None, storage)  # type: ignore[arg-type]
    RandomSampler().load_state_dict(RandomSampler().state_dict())


def test_a_sampler_can_be_saved_alone(tmp_path: Any) -> None:
    RandomSampler().dumps(tmp_path / "random")
    RandomSampler().loads(tmp_path / "random")
    sampler = SamplerWithoutReplacement(shuffle=False)
    rb = ReplayBuffer(storage=LazyTensorStorage(7), sampler=sampler, batch_size=3)
    rb.extend(torch.arange(7))
    rb.sample()
    sampler.dumps(tmp_path / "without")
    rb.sample()
    with pytest.raises(ValueError, match="'without_replacement' sampler, got 'random'"):
        sampler.loads(tmp_path / "random")
    assert rb.sample().tolist() == [6]
    sampler.loads(tmp_path / "without")
    assert rb.sample().tolist() == [3, 4, 5]
    with pytest.raises(FileNotFoundError):
        sampler.loads(tmp_path / "nowhere")
