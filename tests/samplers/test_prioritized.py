"""Construction and what a draw gives."""

from __future__ import annotations

import copy
import gc
import inspect
import math
import sys
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
)
from tests.samplers.building import law, prioritized, raw
from tests.support.refusals import refuses

NAN, INF, REQUIRED = math.nan, math.inf, object()


# -- construction ---------------------------------------------------------------------------------


@pytest.mark.pitfall("IF6")
def test_the_signature_is_there_to_read() -> None:
    """IF6: names, defaults and annotations of every argument, also of those given by position."""
    given = (10, 0.7, 0.9, 1e-6, torch.float64, "mean", True, torch.device("cpu"))
    sampler, parameters = (
        PrioritizedSampler(*given),
        inspect.signature(PrioritizedSampler).parameters,
    )
    assert tuple(getattr(sampler, name) for name in list(parameters)[:8]) == given
    assert list(parameters)[8:] == ["weight_norm", "stratified", "replacement"]
    assert parameters["eps"].default == 1e-8
    assert parameters["weight_norm"].kind is inspect.Parameter.KEYWORD_ONLY
    assert "required" in repr(parameters["alpha"].default)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"alpha": REQUIRED}, TypeError, "PrioritizedSampler needs alpha"),
        ({"max_capacity": 10, "beta": REQUIRED}, TypeError, "needs beta"),
        *[
            case
            for name in ("alpha", "beta", "eps")
            for case in (
                ({name: -0.1}, ValueError, f"{name} must be greater or equal"),
                ({name: NAN}, ValueError, f"{name} must be greater or equal"),
                ({name: INF}, ValueError, f"{name} must be greater or equal"),
                ({name: "large"}, TypeError, f"{name}: expected a number"),
            )
        ],
        ({"dtype": torch.float16}, NotImplementedError, "float32 or float64, got torch.float16"),
        ({"dtype": torch.int64}, NotImplementedError, "dtype"),
        ({"reduction": "product"}, ValueError, "reduction: .* got 'product'"),
        ({"weight_norm": "row"}, ValueError, "weight_norm: .* got 'row'"),
        ({"max_capacity": 0}, ValueError, "max_capacity"),
        ({"max_capacity": 2.0}, ValueError, "max_capacity"),
        ({"replacement": False}, TypeError, "without-replacement"),
        ({"alpha": 2.0, "eps": 1e30}, ValueError, "power alpha=2.0"),
    ],
)
def test_invalid_arguments_are_refused(options: Any, error: Any, match: str) -> None:
    given = {"alpha": 0.7, "beta": 0.9, **options}
    given = {name: value for name, value in given.items() if value is not REQUIRED}
    refuses(error, match, PrioritizedSampler, **given)


@pytest.mark.pitfall("PR14")
def test_setters_check_as_the_constructor_does() -> None:
    """PR14: a beta of -1 or NaN was taken, and weights were wrong from then on."""
    sampler = prioritized([1.0, 2.0]).sampler
    for name in ("alpha", "beta"):
        for wrong in (-1, NAN, INF):
            refuses(ValueError, f"{name} must be greater or equal", setattr, sampler, name, wrong)
    with pytest.raises(ValueError, match="power alpha=200"):
        sampler.alpha = 200.0
    assert (sampler.alpha, sampler.beta, raw(sampler)) == (0.7, 0.9, [1.0, 2.0])


def test_alpha_is_refused_where_new_records_could_not_have_the_default() -> None:
    """They get it when they are stored already: it must not fail then."""
    buffer = prioritized([1e30])
    buffer.update_priority(0, 1.0)
    with pytest.raises(ValueError, match=r"power alpha=2\.0"):
        buffer.sampler.alpha = 2.0
    buffer.extend(torch.arange(1))
    assert raw(buffer) == [torch.tensor(1e30).item()]
    buffer.empty()
    buffer.sampler.alpha = 2.0


@pytest.mark.pitfall("PR4")
def test_a_capacity_below_the_storages_is_refused() -> None:
    """PR4, E16: it gave wrong probabilities without a word."""
    storage = LazyTensorStorage(8)
    with pytest.raises(ValueError, match="at least the storage's max_size of 8, got 7"):
        ReplayBuffer(storage=storage, sampler=PrioritizedSampler(7, 0.7, 0.9))
    buffer = ReplayBuffer(storage=storage)
    buffer.extend(torch.arange(3))
    refuses(ValueError, "max_size of 8, got 2", buffer.set_sampler, PrioritizedSampler(2, 0.7, 0.9))
    assert isinstance(buffer.sampler, RandomSampler)
    buffer.set_sampler(PrioritizedSampler(8, 0.7, 0.9))
    before = copy.deepcopy(buffer.sampler.state_dict())
    refuses(ValueError, "max_size of 9, got 8", buffer.set_storage, LazyTensorStorage(9))
    assert buffer.storage is storage
    assert torch.equal(buffer.sampler.state_dict()["_priorities"], before["_priorities"])
    ReplayBuffer(storage=LazyTensorStorage(8), sampler=PrioritizedSampler(100, 0.7, 0.9))


def test_capacity_is_compared_with_requested_storage_size() -> None:
    """With lanes the first write rounds it up to whole time steps."""
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(10, ndim=2), sampler=PrioritizedSampler(10, 0.7, 0.9)
    )
    buffer.extend(torch.zeros(4, 5))
    assert (buffer.storage.max_size, len(raw(buffer))) == (12, 12)
    buffer.set_sampler(PrioritizedSampler(10, 0.7, 0.9))
    assert buffer.sample(20, return_info=True)[1]["index"].shape == (20, 2)
    with pytest.raises(ValueError, match="max_size of 12, got 8"):
        buffer.set_sampler(PrioritizedSampler(8, 0.7, 0.9))


# -- a draw ---------------------------------------------------------------------------------------


@pytest.mark.pitfall("PR16")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_match_textbook_example(dtype: torch.dtype) -> None:
    """PR16: priorities 1 to 4 with alpha 0.7 and beta 0.9."""
    buffer = prioritized([1.0, 2.0, 3.0, 4.0], dtype=dtype)
    assert law([1, 2, 3, 4], 0.7).tolist() == pytest.approx([0.135, 0.219, 0.291, 0.356], abs=5e-4)
    index, info = buffer.sampler.sample(buffer.storage, 1000)
    weight = info["priority_weight"]
    assert (weight.dtype, weight.shape) == (dtype, (1000,))
    expected = torch.tensor([1.0, 0.6462, 0.5005, 0.4175], dtype=dtype)
    assert torch.allclose(weight, expected[index], atol=5e-5)
    exact = (torch.tensor([1.0, 2, 3, 4], dtype=torch.float64) + 1e-8) ** 0.7
    exact = (exact / exact[0]) ** -0.9
    bound = 1e-6 if dtype == torch.float32 else 1e-14
    assert torch.allclose(weight.double(), exact[index], rtol=bound, atol=0)
    assert weight.max() == 1


def test_batch_carries_index_generation_and_weight() -> None:
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(10), sampler=PrioritizedSampler(alpha=0.7, beta=0.9)
    )
    buffer.extend(TensorDict({"x": torch.arange(10)}, [10]))
    batch, info = buffer.sample(4, return_info=True)
    assert set(batch.keys()) == {"x", "index", "index_generation", "priority_weight"}
    assert torch.equal(batch["x"], batch["index"])
    for key, dtype in (("priority_weight", torch.float32), ("index_generation", torch.int64)):
        assert (batch[key].shape, batch[key].dtype) == ((4,), dtype)
        assert torch.equal(batch[key], info[key])


@pytest.mark.pitfall("PR7")
@pytest.mark.parametrize("alpha", [0.0, 0.7])
def test_all_zero_priorities_raise_error_with_advice(alpha: float) -> None:
    """PR7: and draws nothing from the generator; a positive priority ends it."""
    buffer = prioritized([0.0, 0.0], alpha=alpha, eps=0.0)
    state = buffer.sampler.generator.get_state()
    assert not buffer.can_sample(1)
    refuses(RuntimeError, r"every stored priority is zero .* larger eps", buffer.sample, 1)
    assert torch.equal(buffer.sampler.generator.get_state(), state)
    buffer.update_priority(1, 1e-30)
    assert buffer.can_sample(1)
    assert buffer.sample(3).tolist() == [1, 1, 1]


def test_powers_too_small_to_be_kept_are_zero() -> None:
    """They are stored as 0 and so are never drawn; the smallest of the others counts."""
    buffer = prioritized([1e-30, 0.5, 1.0], alpha=2.0, beta=1.0, eps=0.0)
    index, info = buffer.sampler.sample(buffer.storage, 50)
    assert set(index.tolist()) == {1, 2}
    assert torch.equal(info["priority_weight"], torch.where(index == 1, 1.0, 0.25))


def test_a_storage_without_a_limit_takes_as_much_memory_as_it_needs() -> None:
    buffer = ReplayBuffer(
        storage=ListStorage(), sampler=PrioritizedSampler(alpha=1.0, beta=1.0), collate_fn=list
    )
    for start in range(0, 3000, 500):
        buffer.extend(list(range(start, start + 500)))
    buffer.update_priority(torch.arange(3000), torch.zeros(3000))
    buffer.update_priority(2999, 1.0)
    assert set(buffer.sample(50)) == {2999}
    assert buffer.sampler._table.capacity < 8192


@pytest.mark.pitfall("SL4")
def test_memory_follows_the_capacity_at_powers_of_two() -> None:
    """SL4: it doubled where the capacity is a power of two."""
    capacities = []
    for capacity in (1 << 14, (1 << 14) - 1):
        buffer = ReplayBuffer(
            storage=LazyTensorStorage(capacity), sampler=PrioritizedSampler(alpha=0.7, beta=0.9)
        )
        buffer.extend(torch.arange(capacity - 100))
        buffer.extend(torch.arange(200))
        buffer.sample(1)  # gives the rows their priorities
        capacities.append(buffer.sampler._table.capacity)
    assert capacities == [1 << 14, (1 << 14) - 1]


def test_repr_shows_parameters() -> None:
    shown = repr(PrioritizedSampler(alpha=0.7, beta=0.9))
    assert shown == "PrioritizedSampler(alpha=0.7, beta=0.9, eps=1e-08, reduction='max')"


@pytest.mark.pitfall("SL3")
def test_no_python_step_per_record() -> None:
    """SL3: as many calls for a thousand records as for sixteen."""
    calls: dict[int, int] = {}
    # One buffer and one piece of memory for all: where memory lies decides how closely rows are
    # looked at for being views of the columns.
    buffer, source = prioritized(torch.rand(4096) + 0.1), torch.arange(1024)
    for count in (16, 16, 1024):  # the first time fills what Python keeps of classes
        buffer.sampler.alpha = 0.7
        rows = source[:count]
        buffer.sample(count)
        seen = 0

        def count_calls(frame: Any, event: str, argument: Any) -> None:
            nonlocal seen
            seen += event in ("call", "c_call")

        gc.collect()  # what earlier tests left behind is not to be counted
        gc.disable()
        sys.setprofile(count_calls)
        try:
            index, info = buffer.sampler.sample(buffer.storage, count)
            generation = buffer.storage.ledger.generations(index)
            buffer.update_priority(index, info["priority_weight"], generation=generation)
            buffer.extend(rows)
            state = buffer.sampler.state_dict()
            buffer.sampler.load_state_dict(state)
            buffer.sampler.alpha = 0.5
        finally:
            sys.setprofile(None)
            gc.enable()
        calls[count] = seen
    assert abs(calls[16] - calls[1024]) < 16  # the log of changes may begin a new entry
