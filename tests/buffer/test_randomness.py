"""Random draws of a buffer: a generator fixes them, and no other one is touched."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from replaykit import ReplayBuffer, RoundRobinWriter
from tests.buffer.building import buffer_of, rows
from tests.support.refusals import refuses

SAMPLERS = [
    "random",
    "without",
    "prioritized",
    "stratified",
    "slices",
    "slices by trajectory",
    "stratified slices",
    "distinct slices",
    "slice pass",
    "prioritized slices",
]


def _exercise(buffer: ReplayBuffer) -> None:
    for start in range(0, 30, 6):
        buffer.extend(rows(6, start))
        buffer.sample(2)
        buffer.next()
        buffer[:3]
        buffer.set_("id", buffer["id"].clone())
        buffer.update_if_present(
            index=torch.tensor([0]), generation=torch.tensor([0]), patch={"id": torch.tensor([1])}
        )
    buffer.load_state_dict(buffer.state_dict())
    buffer.empty()


@pytest.mark.pitfall("PR5")
@pytest.mark.pitfall("RD14")
@pytest.mark.parametrize("sampler", ["ordered", *SAMPLERS])
@pytest.mark.parametrize("prefetch", [None, 2])
def test_no_global_generator_is_read_or_advanced(sampler: str, prefetch: int | None):
    """G5, PR5, RD14: with a generator, NumPy's, Python's and torch's own stay where they were."""
    buffer = buffer_of(
        sampler=sampler,
        seed=0,
        batch_size=4,
        prefetch=prefetch,
        writer=RoundRobinWriter(track_generations=True),
    )
    before = (torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate())  # noqa: NPY002
    _exercise(buffer)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]  # noqa: NPY002
    assert random.getstate() == before[2]


@pytest.mark.pitfall("RD14")
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("prefetch", [None, 3])
def test_a_generator_fixes_every_draw(sampler: str, prefetch: int | None):
    """RD14: the same seed and calls give the same rows, whatever the global generator does."""
    drawn = []
    for seed in (1, 1, 2):
        buffer = buffer_of(
            sampler=sampler, max_size=50, filled=50, seed=seed, batch_size=8, prefetch=prefetch
        )
        torch.manual_seed(len(drawn))
        drawn.append([buffer.sample()["index"].tolist() for _ in range(12)])
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.pitfall("PR5")
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_draws_without_a_generator_follow_the_seed_of_torch(sampler: str):
    """PR5: ``torch.manual_seed`` reproduces, ``numpy.random.seed`` does not matter."""
    drawn = []
    for seed in (5, 5, 6):
        buffer = buffer_of(max_size=50, filled=50, sampler=sampler)
        torch.manual_seed(seed)
        np.random.seed(len(drawn))  # noqa: NPY002
        drawn.append([buffer.sample(8)["index"].tolist() for _ in range(5)])
    assert drawn[0] == drawn[1] != drawn[2]


def test_set_rng_gives_the_sampler_another_generator():
    buffer = buffer_of(max_size=50, filled=50, seed=1)
    expected = [buffer.sample(8)["index"].tolist() for _ in range(3)]
    buffer.set_rng(torch.Generator().manual_seed(1))
    assert [buffer.sample(8)["index"].tolist() for _ in range(3)] == expected
    buffer.set_rng(None)
    torch.manual_seed(4)
    first = buffer.sample(8)["index"].tolist()
    torch.manual_seed(4)
    assert buffer.sample(8)["index"].tolist() == first
    refuses(TypeError, "generator", buffer.set_rng, 3)
