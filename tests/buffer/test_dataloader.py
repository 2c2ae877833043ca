"""Batches for ``torch.utils.data.DataLoader``: whose they are, in what order, and once more."""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch.utils.data import DataLoader

from replaykit import (
    BufferDataset,
    ConsumingSampler,
    HindsightGoal,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    RandomSampler,
    RateLimiter,
    ReplayBuffer,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
)
from tests.buffer.building import same
from tests.buffer.workers import WORKER_MARKS
from tests.support.refusals import refuses

pytestmark = WORKER_MARKS

ROWS = 40


def rows(count: int = ROWS, start: int = 0) -> TensorDict:
    number = torch.arange(start, start + count)
    goal = number.float()[:, None]
    done = (number % 5 == 4)[:, None]
    after = {"achieved": goal + 1, "goal": goal * 0, "reward": goal, "done": done}
    return TensorDict({"id": number, "goal": goal * 0, "next": after}, [count])


def filled(sampler: Any = None, **options: Any) -> ReplayBuffer:
    options = {"storage": LazyTensorStorage(ROWS), "batch_size": 6, **options}
    rb = ReplayBuffer(sampler=sampler, **options)
    rb.extend(rows())
    return rb


def prioritized() -> PrioritizedSampler:
    return PrioritizedSampler(ROWS, 1.0, 1.0)


PASSES: dict[str, Callable[[], Any]] = {
    "rows": SamplerWithoutReplacement,
    "slices": lambda: SliceSamplerWithoutReplacement(slice_len=3),
}
STREAMS: dict[str, Callable[[], Any]] = {
    "random": RandomSampler,
    "prioritized": prioritized,
    "slices": lambda: SliceSampler(slice_len=3),
}


def ids(batches: Any) -> list[list[int]]:
    return [batch["id"].tolist() for batch in batches]


def flat(batches: list[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(batches))


# -- passes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3, 9])
def test_ranks_have_every_row_once_together(world_size: int) -> None:
    rb = filled(SamplerWithoutReplacement())
    for epoch in range(2):
        found = []
        for rank in range(world_size):
            loader = rb.dataloader(rank=rank, world_size=world_size, seed=5)
            loader.epoch = epoch
            batches = ids(loader)
            assert len(batches) == len(loader)
            found += batches
        assert sorted(flat(found)) == list(range(ROWS))


def test_ranks_get_one_slice_of_every_episode() -> None:
    rb = filled(PASSES["slices"]())
    batches = [ids(rb.dataloader(rank=rank, world_size=2)) for rank in range(2)]
    episodes = sorted(first // 5 for first in flat([flat(found)[::3] for found in batches]))
    assert episodes == list(range(ROWS // 5))


@pytest.mark.parametrize("kind", PASSES)
def test_number_of_workers_does_not_change_a_pass(kind: str) -> None:
    rb = filled(PASSES[kind]())
    expected = ids(rb.dataloader(rank=1, world_size=2, seed=3))
    for workers in (1, 2):
        loader = rb.dataloader(workers=workers, rank=1, world_size=2, seed=3)
        assert ids(loader) == expected
        assert ids(loader) != expected  # the next epoch
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("batch_size", [6, 7, 40])
def test_with_drop_last_ranks_have_equally_many_whole_batches(batch_size: int) -> None:
    rb = filled(SamplerWithoutReplacement())
    for world_size in (1, 2, 4):
        found = []
        for rank in range(world_size):
            loader = rb.dataloader(batch_size, rank=rank, world_size=world_size, drop_last=True)
            found.append(ids(loader))
            assert len(loader) == len(found[-1]) == ROWS // batch_size // world_size
        together = flat([flat(batches) for batches in found])
        assert len(set(together)) == len(together)
        assert all(len(batch) == batch_size for batches in found for batch in batches)


def test_epochs_differ_in_order_and_are_reproducible() -> None:
    rb = filled(SamplerWithoutReplacement())
    loader, again, stopped = (rb.dataloader(seed=1) for _ in range(3))
    epochs = [ids(loader) for _ in range(3)]
    assert [ids(again) for _ in range(3)] == epochs
    assert len({str(epoch) for epoch in epochs}) == 3
    assert ids(rb.dataloader(seed=2)) != epochs[0]
    assert ids(itertools.islice(stopped, 2)) == epochs[0][:2]
    assert ids(stopped) == epochs[1]


# -- streams --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", STREAMS)
def test_workers_and_ranks_draw_different_reproducible_streams(kind: str) -> None:
    rb = filled(STREAMS[kind]())
    seen = []
    for rank in range(2):
        options = {"steps": 7, "seed": 4, "rank": rank, "world_size": 2, "workers": 2}
        loader = rb.dataloader(18, **options)
        batches = ids(loader)
        assert len(batches) == len(loader) == 7
        seen += batches
        if rank:
            assert ids(rb.dataloader(18, **options)) == batches
            seen += ids(loader)  # the next epoch
    assert len({str(batch) for batch in seen}) == len(seen) == 21


def test_loader_draws_by_the_law_of_the_sampler() -> None:
    """Chi-square of both workers' draws, uniform and by priority."""
    weight = torch.arange(ROWS).float() + 1
    for sampler, law in ((None, torch.ones(ROWS)), (prioritized(), weight)):
        rb = filled(sampler)
        if sampler is not None:
            rb.update_priority(torch.arange(ROWS), weight)
        loader = rb.dataloader(200, workers=2, steps=50, seed=9)
        counts = torch.bincount(torch.tensor(flat(ids(loader))), minlength=ROWS)
        expected = law / law.sum() * counts.sum()
        statistic = float(((counts - expected) ** 2 / expected).sum())
        assert counts.sum() == 10_000
        # 39 degrees of freedom: 1 in 10,000 above 81, and as many below 12.
        assert 12 < statistic < 81
    endless = filled().dataloader()
    assert len(list(itertools.islice(endless, 60))) == 60
    refuses(TypeError, "is not known in advance", len, endless)


# -- batches --------------------------------------------------------------------------------------


def test_batch_of_a_worker_equals_the_one_of_the_main_process() -> None:
    """With what transforms draw, marks, generations and all."""
    for sampler in (None, prioritized(), STREAMS["slices"]()):
        rb = filled(
            sampler,
            transform=HindsightGoal(0.5, achieved="achieved", goal="goal"),
            writer=RoundRobinWriter(track_generations=True),
        )
        here, there = (list(rb.dataloader(workers=n, steps=4, seed=1)) for n in (0, 1))
        for left, right in zip(here, there, strict=True):
            same(left, right)
            assert right["index_generation"].dtype == torch.int64
        assert any((batch["next", "goal"] != 0).any() for batch in here)
        # One memory, whatever number of leaves.
        found = {leaf.untyped_storage().data_ptr() for leaf in there[0].values(True, True)}
        assert len(found) == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_plain_data_loader_accepts_the_dataset(workers: int) -> None:
    dataset = BufferDataset(filled(SamplerWithoutReplacement()), seed=1)
    loader = DataLoader(
        dataset, batch_size=None, collate_fn=BufferDataset.collate, num_workers=workers
    )
    first, again = ids(loader), ids(loader)
    assert sorted(flat(first)) == list(range(ROWS))
    assert first == again
    dataset.set_epoch(1)
    assert ids(loader) != first
    dataset.set_epoch(0, start=3)
    assert ids(loader) == first[3:]


def test_lists_of_objects_are_read_by_forked_workers() -> None:
    rb = ReplayBuffer(storage=ListStorage(9), collate_fn=list, batch_size=3)
    rb.extend([{"text": f"row {number}"} for number in range(9)])
    loader = rb.dataloader(workers=1, steps=5)
    assert {item["text"] for batch in loader for item in batch} <= {f"row {n}" for n in range(9)}


@pytest.mark.parametrize("workers", [0, 1])
def test_loader_advances_no_generator_of_the_buffer_or_torch(workers: int) -> None:
    for sampler in (RandomSampler, SamplerWithoutReplacement, prioritized):
        one, other = (
            filled(sampler(), generator=torch.Generator().manual_seed(3)) for _ in range(2)
        )
        same(one.sample(), other.sample())
        state = torch.get_rng_state()
        list(itertools.islice(one.dataloader(workers=workers), 3))
        assert torch.get_rng_state().equal(state)
        same(one.state_dict(), other.state_dict())
        for _ in range(8):
            same(one.sample(), other.sample())


# -- going on -------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["pass", "stream"])
def test_iteration_continues_from_its_saved_state(kind: str, workers: int) -> None:
    """At every batch, with what transforms draw; the epoch after it is the next one."""
    passes = kind == "pass"
    rb = filled(
        SamplerWithoutReplacement() if passes else None,
        transform=HindsightGoal(0.5, achieved="achieved", goal="goal"),
    )
    options: dict[str, Any] = {"workers": workers, "steps": None if passes else 7, "seed": 8}
    loader = rb.dataloader(**options)
    expected = [list(loader), list(loader)]
    for step in range(8) if not workers else (3,):
        stopped = rb.dataloader(**options)
        for _ in itertools.islice(stopped, step):
            pass
        state = stopped.state_dict()
        assert (state["epoch"], state["step"]) == (0, step)
        resumed = rb.dataloader(**options)
        resumed.load_state_dict(state)
        for left, right in zip(list(resumed), expected[0][step:], strict=True):
            same(left, right)
        assert resumed.state_dict() == {**state, "epoch": 1, "step": 0}
        if not workers:
            for left, right in zip(list(resumed), expected[1], strict=True):
                same(left, right)


def test_workers_that_persist_go_from_epoch_to_epoch() -> None:
    rb = filled(SamplerWithoutReplacement())
    once, loader = rb.dataloader(), rb.dataloader(workers=2, persistent_workers=True)
    assert [ids(loader) for _ in range(3)] == [ids(once) for _ in range(3)]
    assert len(multiprocessing.active_children()) == 2
    rb.extend(rows(3))
    refuses(RuntimeError, "no writes during an iteration, got 3 rows written", list, loader)


@pytest.mark.parametrize(
    "options", [{"seed": 1}, {"batch_size": 3}, {"rank": 1, "world_size": 2}, {"workers": 2}]
)
def test_the_state_of_other_batches_is_refused(options: dict[str, Any]) -> None:
    rb = filled()
    loader, other = rb.dataloader(steps=5), rb.dataloader(**{"steps": 5, **options})
    list(itertools.islice(loader, 2))
    state = loader.state_dict()
    refuses(ValueError, "expected the state of a loader with", other.load_state_dict, state)
    assert (other.epoch, other.step) == (0, 0)
    state["step"] = -1
    refuses(ValueError, "expected the state of a loader", loader.load_state_dict, state)


# -- what goes wrong ------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_a_transform_reaches_the_loop(workers: int) -> None:
    def fails(batch: Any) -> Any:
        if 17 in batch["id"].tolist():
            raise ArithmeticError("row 17")
        return batch

    rb = filled(SamplerWithoutReplacement(shuffle=False), transform=fails)
    loader = iter(rb.dataloader(workers=workers))
    found = ids(itertools.islice(loader, 2))
    refuses(ArithmeticError, "row 17", next, loader)
    assert found == [list(range(6)), list(range(6, 12))]


def test_writes_while_workers_read_raise_an_error() -> None:
    for change in (
        lambda rb: rb.extend(rows(1)),
        lambda rb: rb.set_at_("id", torch.tensor([3]), torch.tensor([0])),
    ):
        rb = filled()
        loader = iter(rb.dataloader(workers=1))
        next(loader)
        change(rb)
        refuses(RuntimeError, "no writes while worker processes read the buffer", next, loader)
    rb = filled(SamplerWithoutReplacement())
    loader = iter(rb.dataloader())  # and during a pass
    next(loader)
    rb.extend(rows(2))
    refuses(RuntimeError, "got 2 rows written", next, loader)


def test_second_iteration_ends_the_first() -> None:
    loader = filled().dataloader()
    first = iter(loader)
    next(first)
    second = iter(loader)
    refuses(RuntimeError, "another one has begun", next, first)
    next(second)
    assert (loader.epoch, loader.step) == (1, 1)


REFUSED: list[tuple[type[Exception], str, Callable[[], Any]]] = [
    (TypeError, "expected a ReplayBuffer", lambda: BufferDataset([1, 2], 1)),  # type: ignore[arg-type]
    (TypeError, "rank and world_size", lambda: filled().dataloader(rank=0)),
    (ValueError, "below world_size", lambda: filled().dataloader(rank=2, world_size=2)),
    (ValueError, "rank as an int", lambda: filled().dataloader(rank=0.5, world_size=2)),  # type: ignore[arg-type]
    (ValueError, "steps as an int", lambda: filled().dataloader(steps=0)),
    (ValueError, "seed as an int", lambda: filled().dataloader(seed="a")),  # type: ignore[arg-type]
    (ValueError, "batch_size as an int", lambda: filled().dataloader(0)),
    (ValueError, "workers as an int", lambda: filled().dataloader(workers=-1)),
    (ValueError, "drop_last with", lambda: filled().dataloader(drop_last=True)),
    (
        ValueError,
        "steps=None with SamplerWithoutReplacement",
        lambda: filled(SamplerWithoutReplacement()).dataloader(steps=3),
    ),
    (RuntimeError, "batch_size", lambda: filled(batch_size=None).dataloader()),
    (ValueError, "device='meta'", lambda: filled(device="meta").dataloader(workers=1)),
    (
        RuntimeError,
        "a ListStorage would be copied",
        lambda: filled(storage=ListStorage(ROWS)).dataloader(
            workers=1, multiprocessing_context="spawn"
        ),
    ),
    (
        RuntimeError,
        "a LazyTensorStorage would be copied",
        lambda: filled().dataloader(workers=1, multiprocessing_context="forkserver"),
    ),
    (
        ValueError,
        "ConsumingSampler, which uses rows up",
        lambda: filled(ConsumingSampler()).dataloader(),
    ),
    (
        ValueError,
        "without rate_limiter",
        lambda: filled(rate_limiter=RateLimiter(1.0, 1, 100.0)).dataloader(),
    ),
    (ValueError, "epoch as an int", lambda: BufferDataset(filled()).set_epoch(-1)),
]


@pytest.mark.parametrize(("error", "match", "call"), REFUSED, ids=[m for _, m, _ in REFUSED])
def test_invalid_arguments_of_dataloader_are_named(
    error: type[Exception], match: str, call: Callable[[], Any]
) -> None:
    refuses(error, match, call)
