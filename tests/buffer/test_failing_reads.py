"""Draws whose rows could not be read: as if they had not been made."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    ConsumingSampler,
    LazyTensorStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    SliceSamplerWithoutReplacement,
)
from tests.buffer.building import same

ROWS = 20


class Failing(LazyTensorStorage):
    """Fails to read as often as it is told to."""

    fails = 0

    def read(self, index: torch.Tensor, **options: Any) -> Any:
        if self.fails:
            self.fails -= 1
            raise OSError("the disk is gone")
        return super().read(index, **options)


def filled(sampler: Any, seed: int = 0, **options: Any) -> Any:
    rb = ReplayBuffer(
        storage=Failing(ROWS),
        sampler=sampler,
        batch_size=4,
        generator=torch.Generator().manual_seed(seed),
        **options,
    )
    number = torch.arange(ROWS)
    rb.extend(TensorDict({"id": number, "episode": number // 5}, [ROWS]))
    return rb


@pytest.mark.parametrize("prefetch", [None, 1, 3])
@pytest.mark.parametrize(
    "sampler",
    [
        RandomSampler,
        SamplerWithoutReplacement,
        lambda: PrioritizedSampler(alpha=0.7, beta=0.5),
        lambda: SliceSamplerWithoutReplacement(slice_len=2, traj_key="episode"),
    ],
    ids=["random", "without", "prioritized", "slices"],
)
def test_unread_draw_is_delivered_next(sampler: Any, prefetch: int | None) -> None:
    """The batches are those of a buffer whose reads never failed."""
    failing, plain = filled(sampler(), prefetch=prefetch), filled(sampler())
    failed = 0
    for turn in range(16):
        failing.storage.fails += turn % 3
        for _ in range(20):
            try:
                batch = failing.sample()
            except OSError:
                failed += 1
            else:
                break
        same(plain.sample(), batch)
    failing.shutdown()
    # Of 15; errors of batches that are drawn ahead are raised later.
    assert failed + failing.storage.fails >= 15 - (prefetch or 0)
    assert failed >= 8


@pytest.mark.parametrize("sampler", [RandomSampler, SamplerWithoutReplacement])
def test_failed_read_of_a_small_batch_loses_no_draw(
    sampler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Callers read such batches at once, when they draw ahead."""
    begin, calls = LazyTensorStorage.begin_held, itertools.count()

    def fails(storage: Any, *given: Any) -> Any:
        if next(calls) % 3 == 1:
            raise OSError("the disk is gone")
        return begin(storage, *given)

    monkeypatch.setattr(LazyTensorStorage, "begin_held", fails)
    made = [
        ReplayBuffer(
            storage=LazyTensorStorage(ROWS),
            sampler=sampler(),
            batch_size=4,
            prefetch=depth,
            generator=torch.Generator().manual_seed(3),
        )
        for depth in (2, None)
    ]
    for rb in made:
        rb.extend(TensorDict({"id": torch.arange(ROWS)}, [ROWS]))
    failing, plain = made
    failed = 0
    for _ in range(16):
        while True:
            try:
                batch = failing.sample()
                break
            except OSError:
                failed += 1
        same(plain.sample(), batch)
    assert failed >= 4
    failing.shutdown()


@pytest.mark.parametrize("uses", [1, 2])
def test_records_that_were_not_read_are_not_used_up(uses: int) -> None:
    rb = filled(ConsumingSampler(uses))
    for _ in range(3):
        rb.storage.fails = 1
        with pytest.raises(OSError, match="disk"):
            rb.sample()
    assert len(rb) == ROWS
    found = torch.cat([batch["id"] for batch in rb])
    assert torch.bincount(found).tolist() == [uses] * ROWS


def test_other_batch_size_after_a_failed_read_repeats_the_draw() -> None:
    """With the same numbers; rows of a pass go back to it."""
    failing, plain = filled(RandomSampler()), filled(RandomSampler())
    failing.storage.fails = 1
    with pytest.raises(OSError, match="disk"):
        failing.sample(7)
    assert failing.sample(7)["id"].equal(plain.sample(7)["id"])
    rb = filled(SamplerWithoutReplacement())
    rb.storage.fails = 1
    with pytest.raises(OSError, match="disk"):
        rb.sample(7)
    found = torch.cat([batch["id"] for batch in rb])
    assert sorted(found.tolist()) == list(range(ROWS))


def test_members_of_an_ensemble_lose_no_rows() -> None:
    members = [filled(SamplerWithoutReplacement()), filled(ConsumingSampler())]
    ensemble = ReplayBufferEnsemble(*members, sample_from_all=True, batch_size=8)
    found: list[list[int]] = [[], []]
    for turn in range(5):
        for member in members:
            member.storage.fails = 1
            with pytest.raises(OSError, match="disk"):
                ensemble.sample()
        for mine, ids in zip(found, ensemble.sample()["id"].tolist(), strict=True):
            mine += ids
        assert len(members[1]) == ROWS - 4 * (turn + 1)
    assert [sorted(mine) for mine in found] == [list(range(ROWS))] * 2
