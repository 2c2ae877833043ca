"""Slices of episodes: which rows, and how likely."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    LazyTensorStorage,
    ReplayBuffer,
    SliceSampler,
)
from replaykit.errors import NotEnoughData
from tests.samplers.building import rows, sliced, windows_of
from tests.support.refusals import refuses

# -- sizes and keys --------------------------------------------------------------------------------


@pytest.mark.pitfall("BD9")
def test_batch_has_expected_keys_shapes_and_dtypes() -> None:
    rb = sliced([5, 9], slice_len=4)
    batch, info = rb.sample(12, return_info=True)
    assert batch.shape == (12,)
    assert {"t", "e", "index", "sequence_id", ("next", "done")} <= set(batch.keys(True))
    assert batch.get("is_init", None) is None
    for found in (batch["index"], info["index"]):
        assert (found.shape, found.dtype) == ((12,), torch.int64)
        assert found.is_contiguous()
    assert batch["sequence_id"].tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert batch["sequence_id"].dtype == torch.int64
    for name in ("done", "truncated", "terminated"):
        flag = batch["next", name]
        assert (flag.shape, flag.dtype) == ((12, 1), torch.bool)
    assert torch.equal(batch["t"], batch["index"])
    assert all(w == list(range(w[0], w[0] + 4)) for w in windows_of(batch))


def test_number_of_slices_instead_of_their_length() -> None:
    rb = sliced([20], num_slices=3)
    assert rb.sample(12)["sequence_id"].bincount().tolist() == [4, 4, 4]
    assert rb.sample(3)["sequence_id"].bincount().tolist() == [1, 1, 1]


def test_slices_by_length_on_request() -> None:
    rb = sliced([20], slice_len=4, flat=False, batch_size=12)
    batch = rb.sample()
    assert batch.shape == (3, 4)
    assert batch["sequence_id"].tolist() == [[0] * 4, [1] * 4, [2] * 4]
    assert (batch["t"].diff(dim=1) == 1).all()
    assert batch["next", "done"].shape == (3, 4, 1)
    rb = sliced([20, 2], num_slices=2, flat=False, pad="right")
    assert rb.sample(10).shape == (2, 5)


@pytest.mark.parametrize("flags", ["[N]", "[N,1]", "both"])
@pytest.mark.pitfall("BD6")
def test_flags_are_of_one_shape(flags: str) -> None:
    first, second = rows([4, 4]), rows([4])
    for part, wide in ((first, flags == "[N,1]"), (second, flags != "[N]")):
        for name in ("done", "truncated", "terminated"):
            if wide:
                part["next", name] = part["next", name].unsqueeze(-1)
    rb = sliced(first, 20, slice_len=3)
    rb.extend(second)
    batch = rb.sample(9)
    assert batch["next", "done"].shape == (9, 1)
    assert batch["next", "done"].sum() == 3


# -- what ends an episode --------------------------------------------------------------------------


@pytest.mark.pitfall("BD2")
def test_numbers_that_start_again_do_not_merge() -> None:
    seed = torch.arange(3).repeat_interleave(20)
    episode = torch.arange(4).repeat_interleave(5).repeat(3)
    data = TensorDict({"t": torch.arange(60), "seed": seed, "episode": episode}, [60])
    rb = sliced(data, slice_len=5)
    batch = rb.sample(5 * 600)
    assert {w[0] for w in windows_of(batch)} == set(range(0, 60, 5))
    pairs = (batch["seed"] * 4 + batch["episode"]).reshape(-1, 5)
    assert (pairs == pairs[:, :1]).all()


@pytest.mark.pitfall("BD14")
def test_interleaved_streams_are_refused_with_counts_of_rows() -> None:
    ids = torch.arange(4).repeat(6)
    data = TensorDict({"t": torch.arange(24), "collector": {"traj_ids": ids}}, [24])
    rb = sliced(data, slice_len=3)
    text = "slices of 3 rows, got no window: 24 rows are stored, and the longest episode has 1"
    with pytest.raises(RuntimeError, match=text) as refused:
        rb.sample(6)
    assert "ndim=2" in str(refused.value)
    assert not rb.can_sample(6)
    lanes = data.reshape(6, 4).transpose(0, 1).contiguous()
    rb = sliced(lanes, slice_len=3, ndim=2)
    batch = rb.sample(30)
    assert batch["index"].shape == (30, 2)
    assert (batch["t"].reshape(-1, 3).diff(dim=1) == 4).all()


def test_custom_trajectory_and_end_keys_bound_slices() -> None:
    data = rows([10])
    data["life"] = torch.arange(10) // 4
    data["next", "lost"] = torch.arange(10) == 5
    known: list[tuple[dict[str, Any], set[int]]] = [
        ({"traj_key": "life"}, {0, 1, 4, 5}),
        ({"end_key": ("next", "lost")}, {0, 1, 2, 3, 6, 7}),
        ({"end_keys": [("next", "lost"), ("next", "done")]}, {0, 1, 2, 3, 6, 7}),
        ({"end_key": ("next", "lost"), "traj_key": ["life"]}, {0, 1}),
        ({"end_keys": (), "traj_key": ()}, set(range(8))),
    ]
    for options, expected in known:
        rb = sliced(data, slice_len=3, **options)
        assert {w[0] for w in windows_of(rb.sample(900))} == expected, options


@pytest.mark.pitfall("BD18")
def test_columns_that_are_not_there_are_an_error() -> None:
    for options in ({"end_key": "lost"}, {"end_keys": ["a", "b"]}):
        rb = sliced([5, 5], slice_len=2, **options)
        assert not rb.can_sample(4)
        refuses(KeyError, "expected", rb.sample, 4)
    rb = sliced(TensorDict({"t": torch.arange(5)}, [5]), slice_len=2)
    refuses(KeyError, "end_key=", rb.sample, 4)
    rb = sliced(TensorDict({"t": torch.arange(5)}, [5]), slice_len=2, traj_key="life")
    with pytest.raises(KeyError, match="'life'"):  # and no flag to go by in its place
        rb.sample(4)
    # Of several flags those that are not there are left out.
    rb = sliced([5, 5], slice_len=5, end_keys=["lost", ("next", "done")])
    assert {w[0] for w in windows_of(rb.sample(100))} == {0, 5}


@pytest.mark.pitfall("BD15")
def test_a_sampler_goes_by_the_keys_of_the_storage_it_is_given() -> None:
    rb = sliced((), 20, slice_len=5)
    sampler = rb.sampler
    assert not rb.can_sample(5)
    rb.extend(rows([5, 5]))
    assert {w[0] for w in windows_of(rb.sample(500))} == {0, 5}
    ids = TensorDict({"t": torch.arange(12), "episode": torch.arange(12) // 6}, [12])
    other = ReplayBuffer(storage=LazyTensorStorage(12))
    other.extend(ids)
    rb.set_sampler(SliceSampler(slice_len=2))
    other.set_sampler(sampler)
    assert {w[0] for w in windows_of(other.sample(500))} == {0, 1, 6, 7}


# -- the newest rows, lanes ------------------------------------------------------------------------


def test_recent_rows_only_where_plain_draws_would_miss_them() -> None:
    """Active where ``ratio * (rows - (T - 1)) > steps``, and then a share rounded up."""
    for rows_, active in ((10, False), (11, True)):
        rb = sliced([rows_], slice_len=3, recent=(0.5, 4))
        starts = torch.cat([rb.sample(15)["t"].reshape(5, 3)[:, :1].T for _ in range(200)])
        newest = starts >= rows_ - 3 + 1 - 4
        assert bool(newest[:, :3].all()) == active
        assert not newest[:, 3:].all()


def test_strict_lanes_need_a_window_in_every_lane() -> None:
    data = torch.stack([rows([8]), rows([2, 2, 2, 2])], 0)
    rb = sliced(data, slice_len=3, ndim=2, measure="lane")
    assert rb.can_sample(9)
    rb = sliced(data, slice_len=3, ndim=2, measure="lane", strict_lanes=True)
    assert not rb.can_sample(9)
    refuses(NotEnoughData, r"none in 1 of the lanes \(the first: 1\)", rb.sample, 9)


def test_draws_without_replacement() -> None:
    rb = sliced([3, 4], slice_len=2, draw="without_replacement")
    for _ in range(20):
        assert sorted(w[0] for w in windows_of(rb.sample(10))) == [0, 1, 3, 4, 5]
    refuses(NotEnoughData, "6 slices of 2 rows, got 5 windows", rb.sample, 12)
    assert not rb.can_sample(12)
    rb = sliced([3, 4], slice_len=2, draw="without_replacement", allow_short=True)
    assert sorted(w[0] for w in windows_of(rb.sample(12))) == [0, 1, 3, 4, 5]
