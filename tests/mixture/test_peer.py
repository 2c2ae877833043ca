"""TorchRL's ensemble and this one, where both promise the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import replaykit
from tests.mixture.members import rows_of
from tests.support.refusals import refuses

peer: Any = pytest.importorskip("torchrl.data")


def made(library: Any, **arguments: Any) -> Any:
    members = []
    for number in range(3):
        rb = library.TensorDictReplayBuffer(storage=library.LazyTensorStorage(20))
        rb.extend(rows_of(number, 12))
        members.append(rb)
    return library.ReplayBufferEnsemble(*members, **arguments)


@pytest.mark.parametrize(
    "arguments",
    [{"sample_from_all": True}, {"p": [1, 0, 2], "num_buffer_sampled": 2}, {}],
    ids=["all", "weights", "plain"],
)
def test_batches_have_the_form_of_torchrl(arguments: dict[str, Any]) -> None:
    mine, theirs = (made(library, batch_size=12, **arguments) for library in (replaykit, peer))
    ours, other = mine.sample(), theirs.sample()
    assert ours.batch_size == other.batch_size
    extra = {"index_generation"}
    assert set(ours.keys(True, True)) - extra == set(other.keys(True, True))
    for key in other.keys(True, True):
        assert (ours[key].dtype, ours[key].shape) == (other[key].dtype, other[key].shape), key
    for batch in (ours, other):
        ids = batch["index", "buffer_ids"]
        assert torch.equal(batch["id"], 1000 * ids + batch["index", "index"])
        assert (ids == ids[:, :1]).all()


def test_indexing_equals_torchrl() -> None:
    mine, theirs = (made(library, p=[1, 2, 5]) for library in (replaykit, peer))
    for ensemble in (mine, theirs):
        assert len(ensemble.storage) == 3
        assert len(ensemble[1:].storage) == 2
        assert len(ensemble[torch.tensor([0, 2])].storage) == 2
        assert len(ensemble[[0, 2]].sampler) == 2
    assert torch.equal(mine[:, 3]["id"], theirs[:, 3]["id"])
    assert torch.equal(mine[:, 2:4]["id"], theirs[:, 2:4]["id"])
    assert torch.equal(mine[1, 3]["id"], theirs[1, 3]["id"])
    for wrong, error in ((1.0, Exception), (torch.zeros(1, 1, dtype=torch.int64), RuntimeError)):
        for ensemble in (mine, theirs):
            with pytest.raises(error):
                ensemble[wrong]


def test_both_libraries_refuse_weights_with_sample_from_all() -> None:
    for library in (replaykit, peer):
        with pytest.raises(RuntimeError):
            made(library, p=[1, 1, 1], sample_from_all=True)
        refuses(ValueError, "divi", made(library, num_buffer_sampled=5).sample, 12)
