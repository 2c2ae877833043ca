"""Prioritized replay through buffers, as users write it."""

from __future__ import annotations

import inspect
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    LazyTensorStorage,
    ListStorage,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
)
from tests.buffer.building import in_threads, same, snapshot
from tests.support.refusals import refuses

NAMED = [PrioritizedReplayBuffer, TensorDictPrioritizedReplayBuffer]


def rows(count: int, start: int = 0) -> TensorDict:
    return TensorDict({"x": torch.arange(start, start + count)}, [count])


def make(cls: Any = TensorDictPrioritizedReplayBuffer, size: int = 10, **options: Any) -> Any:
    seed = options.pop("seed", 0)
    options = {"alpha": 0.7, "beta": 0.9, "batch_size": 4, **options}
    generator = torch.Generator().manual_seed(seed)
    return cls(storage=LazyTensorStorage(size), generator=generator, **options)


def raw(buffer: ReplayBuffer) -> list[float]:
    return buffer.sampler.state_dict()["_priorities"].tolist()


# -- constructors ---------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", NAMED)
def test_arguments_reach_the_sampler(cls: Any) -> None:
    buffer = make(
        cls,
        eps=1e-3,
        reduction="mean",
        sampler_device="cpu",
        stratified=True,
        weight_norm="batch",
        max_priority_within_buffer=True,
        dtype=torch.float64,
    )
    sampler = buffer.sampler
    assert (sampler.alpha, sampler.beta, sampler.eps) == (0.7, 0.9, 1e-3)
    assert (sampler.reduction, sampler.weight_norm, sampler.stratified) == ("mean", "batch", True)
    assert sampler.max_priority_within_buffer
    assert (sampler.dtype, sampler.device) == (torch.float64, torch.device("cpu"))
    buffer.extend(rows(3))
    assert buffer.sample()["priority_weight"].dtype == torch.float64


@pytest.mark.pitfall("IF6")
@pytest.mark.parametrize("cls", NAMED)
def test_named_buffers_are_buffers(cls: Any) -> None:
    """IF6: with signatures that say which arguments they need."""
    assert issubclass(cls, ReplayBuffer)
    parameters = inspect.signature(cls).parameters
    assert parameters["alpha"].default is inspect.Parameter.empty
    assert parameters["alpha"].kind is inspect.Parameter.KEYWORD_ONLY
    refuses(TypeError, "alpha", cls, beta=0.9)
    refuses(TypeError, "unknown", cls, alpha=0.7, beta=0.9, unknown=3)
    refuses(ValueError, "beta", cls, alpha=0.7, beta=-1)


def test_a_sampler_takes_the_place_of_the_named_ones() -> None:
    own = PrioritizedSampler(alpha=0.1, beta=0.2)
    assert make(PrioritizedReplayBuffer, sampler=own).sampler is own
    made = make(PrioritizedReplayBuffer, sampler=RandomSampler)
    assert isinstance(made.sampler, RandomSampler)
    with pytest.raises(TypeError, match="sampler or sampler_device, got both"):
        make(PrioritizedReplayBuffer, sampler=own, sampler_device="cpu")
    with pytest.raises(TypeError, match="makes its own sampler"):
        make(TensorDictPrioritizedReplayBuffer, sampler=RandomSampler())


@pytest.mark.parametrize("source", [*NAMED, "plain"])
@pytest.mark.parametrize("target", [*NAMED, "plain"])
def test_checkpoints_are_interchangeable(source: Any, target: Any, tmp_path: Path) -> None:
    def built(cls: Any, seed: int) -> Any:
        if cls != "plain":
            return make(cls, seed=seed)
        sampler = PrioritizedSampler(alpha=0.7, beta=0.9)
        return ReplayBuffer(
            storage=LazyTensorStorage(10),
            sampler=sampler,
            batch_size=4,
            generator=torch.Generator().manual_seed(seed),
        )

    buffer, other = built(source, 0), built(target, 1)
    buffer.extend(rows(14))
    buffer.update_priority(torch.arange(10), torch.rand(10))
    buffer.dumps(tmp_path)
    other.loads(tmp_path)
    for _ in range(3):
        assert bool((buffer.sample() == other.sample()).all())


# -- the learner's loop ---------------------------------------------------------------------------


@pytest.mark.pitfall("PR10")
@pytest.mark.parametrize("wrong", [1e39, float("nan"), -1.0])
def test_priorities_in_the_data_are_checked_before_rows_are_stored(wrong: float) -> None:
    """PR10: also those that are finite as they come and infinite as they would be kept."""
    buffer = make(alpha=0.5)
    buffer.extend(rows(3).set("td_error", torch.ones(3, dtype=torch.float64)))
    before = snapshot(buffer)
    bad = rows(3).set("td_error", torch.tensor([1.0, wrong, 2.0], dtype=torch.float64))
    refuses(ValueError, "priorities", buffer.extend, bad)
    refuses(ValueError, "priorities", buffer.add, bad[1])
    same(before, snapshot(buffer))
    buffer.extend(bad, update_priority=False)
    assert len(buffer) == 6


@pytest.mark.pitfall("PR10")
@pytest.mark.parametrize(
    ("reduction", "expected"),
    [("max", 4.0), ("min", 1.0), ("mean", 2.25), ("median", 2.0), ("sum", 9.0)],
)
def test_priorities_with_more_dimensions_are_reduced(reduction: str, expected: float) -> None:
    """PR10: in the data and from the learner."""
    buffer = make(reduction=reduction)
    values = torch.tensor([1.0, 2.0, 2.0, 4.0]).expand(3, 4)
    buffer.extend(rows(3).set("td_error", values))
    assert raw(buffer) == [expected] * 3
    batch = buffer.sample()
    buffer.update_tensordict_priority(batch.set("td_error", batch["td_error"] * 2))
    assert set(raw(buffer)) <= {expected, 2 * expected}


def test_objects_have_priorities_too() -> None:
    buffer = PrioritizedReplayBuffer(
        alpha=1.0, beta=1.0, eps=0.0, storage=ListStorage(5), collate_fn=list, batch_size=10
    )
    index = buffer.extend(["left", "right", "stop"])
    buffer.update_priority(index, torch.tensor([0.0, 1.0, 0.0]))
    assert set(buffer.sample()) == {"right"}
    rewritten, info = buffer.sample(return_info=True)
    assert rewritten == ["right"] * 10
    assert info["priority_weight"].tolist() == [1.0] * 10


# -- going on -------------------------------------------------------------------------------------


@pytest.mark.pitfall("TH4")
def test_no_reader_sees_a_new_row_with_its_predecessors_priority() -> None:
    """TH4: rows of even rounds have priority 1 and of odd ones 0: those are never drawn."""
    buffer = make(size=8, eps=0.0, alpha=1.0)
    done = threading.Event()

    def round_of(number: int) -> TensorDict:
        drawable = torch.arange(8) % 2 == number % 2
        return TensorDict({"drawable": drawable, "td_error": drawable.float()}, [8])

    buffer.extend(round_of(0))
    rounds = [0]

    def write() -> None:
        try:
            for number in range(1, 400):
                buffer.extend(round_of(number))
                rounds[0] = number
        finally:
            done.set()

    def read() -> None:
        while not done.is_set():
            batch = buffer.sample(8)
            assert bool(batch["drawable"].all())
            assert bool((batch["priority_weight"] == 1).all())

    in_threads(write, read, read)
    assert rounds[0] == 399


def test_updates_draws_and_exponents_from_several_threads() -> None:
    """The trees stay those of the priorities, also where the sampler itself is used."""
    buffer = make(size=64, batch_size=16)
    buffer.extend(rows(64))

    def learn() -> None:
        for number in range(150):
            batch = buffer.sample()
            buffer.update_tensordict_priority(batch.set("td_error", torch.rand(16) + number % 3))

    def write() -> None:
        for number in range(150):
            buffer.extend(rows(5, number))

    def anneal() -> None:
        for number in range(150):
            buffer.sampler.alpha = number % 5 / 4
            buffer.sampler.update_priority(torch.arange(64), torch.rand(64))
            buffer.sampler.state_dict()

    in_threads(learn, learn, write, anneal)
    sampler = buffer.sampler
    stored = torch.tensor(raw(buffer))
    assert torch.equal(sampler._table._sums.leaves, sampler._table.law.values(stored).float())
    assert sampler._table.smallest() == sampler._table._sums.leaves.min().item()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_process_gets_separate_priority_trees(run_python: Any) -> None:
    """A thread of the parent may hold the lock of a tree when the process forks."""
    done = run_python(
        """
import os, signal, torch, warnings
from replaykit import LazyTensorStorage, PrioritizedReplayBuffer

rb = PrioritizedReplayBuffer(alpha=0.7, beta=0.9, storage=LazyTensorStorage(50), batch_size=20,
                             generator=torch.Generator().manual_seed(0))
rb.update_priority(rb.extend(torch.arange(40)), torch.arange(40.0))
table = rb.sampler._table
warnings.simplefilter("ignore", DeprecationWarning)  # torch has threads
with table._sums._lock, table._least._lock:
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        drawn = rb.sample()
        rb.update_priority(torch.arange(40), 1.0)
        rb.extend(torch.arange(20))
        rb.sample()
        os.write(1, str(drawn.tolist()).encode())
        os._exit(0)
_, status = os.waitpid(child, 0)
assert status == 0, status
assert rb.sampler.state_dict()["_priorities"].tolist() == list(range(40))
os.write(1, b"\\n" + str(rb.sample().tolist()).encode())
"""
    )
    of_child, of_parent = done.stdout.splitlines()
    assert of_child == of_parent
