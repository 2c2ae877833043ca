"""Members of an ensemble by index, and rows of all of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from replaykit import ReplayBufferEnsemble, SamplerEnsemble, StorageEnsemble, WriterEnsemble
from replaykit.mixture.member_parts import chosen
from tests.mixture.members import STRIDE, check_rows, make_ensemble, make_member
from tests.support.refusals import refuses


@pytest.mark.parametrize(
    ("index", "found"),
    [
        (1, 1),
        (-1, 3),
        (np.int64(2), 2),
        (torch.tensor(2), 2),
        (slice(1, 3), [1, 2]),
        (..., [0, 1, 2, 3]),
        ([3, 0, -1], [3, 0, 3]),
        (range(2), [0, 1]),
        (torch.tensor([1, 1]), [1, 1]),
        (np.array([2]), [2]),
        ([], []),
        ([True, False, False, True], [0, 3]),
    ],
)
def test_every_form_of_an_index_chooses_members(index: Any, found: Any) -> None:
    assert chosen(index, 4, "it") == found


@pytest.mark.parametrize(
    ("index", "error", "words"),
    [
        (4, IndexError, "in \\[-4, 4\\), got 4"),
        (-5, IndexError, "got -5"),
        ([0, 7], IndexError, "got 7"),
        (1.0, TypeError, "got 1.0"),
        ([0.5], TypeError, "integers"),
        (torch.tensor([1.0]), TypeError, "integers"),
        (True, TypeError, "got True"),
        ("id", TypeError, "got 'id'"),
        (torch.zeros(1, 1, dtype=torch.int64), RuntimeError, "one dimension, got 2"),
        ([True, False], IndexError, "expected 4 bools"),
    ],
)
def test_invalid_member_indices_are_refused(index: Any, error: type[Exception], words: str) -> None:
    refuses(error, words, chosen, index, 4, "it")


def test_index_gives_a_member_or_a_smaller_ensemble() -> None:
    ensemble = make_ensemble([5, 6, 7], p=[1, 2, 5], batch_size=6, num_buffer_sampled=3)
    assert ensemble[1] is ensemble.members[1]
    assert ensemble[-1] is ensemble.members[2]
    assert ensemble[:] is ensemble
    assert ensemble[...] is ensemble
    picked = ensemble[[0, 2]]
    assert isinstance(picked, ReplayBufferEnsemble)
    assert picked.members == (ensemble[0], ensemble[2])
    assert torch.allclose(picked.sampler.p, torch.tensor([1, 5]).double() / 6)
    assert picked.sampler.num_buffer_sampled == 3
    assert picked.sample().shape == (3, 2)
    refuses(IndexError, "at least one", lambda: ensemble[[]])
    refuses(RuntimeError, "dimension", lambda: ensemble[torch.zeros(1, 1, dtype=torch.int64)])


def test_selection_keeps_sample_from_all() -> None:
    picked = make_ensemble([5, 6, 7], sample_from_all=True)[[2, 0]]
    batch = picked.sample(4)
    assert (batch["id"] // STRIDE).tolist() == [[2, 2], [0, 0]]
    assert batch["index", "buffer_ids"].tolist() == [[0, 0], [1, 1]]


def test_two_indices_read_rows_of_several_members() -> None:
    ensemble = make_ensemble([5, 6, 7])
    assert ensemble[:, 3]["id"].tolist() == [3, STRIDE + 3, 2 * STRIDE + 3]
    assert ensemble[[2, 0], 1:3]["id"].tolist() == [
        [2 * STRIDE + 1, 2 * STRIDE + 2],
        [1, 2],
    ]
    assert ensemble[[1, 1], [0, 4]]["id"].tolist() == [[STRIDE, STRIDE + 4]] * 2
    assert ensemble[..., torch.tensor(2)]["id"].tolist() == [2, STRIDE + 2, 2 * STRIDE + 2]
    assert int(ensemble[1, 3]["id"]) == STRIDE + 3
    assert ensemble[:, 0].batch_size == (3,)
    refuses(ValueError, "equally many", lambda: ensemble[:, :])
    with pytest.raises(IndexError):
        ensemble[:, 6]


def test_read_rows_pass_through_a_custom_collate_function() -> None:
    ensemble = make_ensemble([5, 6], collate_fn=lambda samples: torch.stack(samples).select("id"))
    assert set(ensemble[:, :2].keys()) == {"id"}


def test_parts_take_the_same_indices_as_the_ensemble() -> None:
    ensemble = make_ensemble([5, 6, 7], p=[1, 1, 2])
    storages, samplers, writers = ensemble.storage, ensemble.sampler, ensemble.writer
    for number in range(3):
        assert storages[number] is ensemble[number].storage
        assert samplers[number] is ensemble[number].sampler
        assert writers[number] is ensemble[number].writer
    assert isinstance(storages[1:], StorageEnsemble)
    assert isinstance(samplers[[0, 2]], SamplerEnsemble)
    assert isinstance(writers[torch.tensor([1])], WriterEnsemble)
    assert [len(part[1:]) for part in (storages, samplers, writers)] == [2, 2, 2]
    assert torch.allclose(samplers[[0, 2]].p, torch.tensor([1, 2]).double() / 3)
    assert int(storages[1, 4]["id"]) == STRIDE + 4
    assert [int(row["id"]) for row in storages[:, 4]] == [4, STRIDE + 4, 2 * STRIDE + 4]
    assert [storage is ensemble[i].storage for i, storage in enumerate(storages)] == [True] * 3
    for part in (storages, samplers, writers):
        refuses(TypeError, "0.5", lambda part=part: part[0.5])


def test_generations_are_those_of_each_member() -> None:
    members = [make_member(0), make_member(1, capacity=10)]  # the second has wrapped
    ensemble = ReplayBufferEnsemble(*members, sample_from_all=True)
    batch = ensemble.sample(8)
    assert batch["index_generation"].tolist() == [[0] * 4, [1] * 4]


def test_selection_leaves_the_ensemble_as_it_is() -> None:
    ensemble = make_ensemble([5, 6, 7], p=[1, 1, 2])
    picked = ensemble[:2]
    picked.sampler.p = [0, 1]
    assert ensemble.sampler.p.tolist() == [0.25, 0.25, 0.5]
    picked.append_transform(lambda batch: batch.set("new", batch["id"]))
    assert "new" not in ensemble.sample(6)
    check_rows(ensemble.sample(6))
