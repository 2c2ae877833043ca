"""A sharded buffer draws what one big buffer draws: frequencies, weights, windows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    LazyTensorStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictMaxValueWriter,
)
from tests.distributed.laws import chi_square, counts, episodes

FAR = 4.0
"""Standard deviations of chi-square that one law is never away from itself with these seeds."""


def test_uniform_draws_do_not_see_how_rows_are_spread(sharded: Any) -> None:
    """Shards with 1, 9 and 90 rows: every row is as likely."""
    rb = sharded(3, shard_key="key")
    keys = np.arange(1000)
    from replaykit.distributed.routing import ByKey

    shard = ByKey(3, "key").route({("key",): torch.from_numpy(keys)}, 1000, [])
    one, nine, ninety = keys[shard == 0][:1], keys[shard == 1][:9], keys[shard == 2][:90]
    chosen = torch.from_numpy(np.concatenate([one, nine, ninety]))
    rb.extend(TensorDict({"key": chosen, "x": torch.arange(100)}, [100]))
    assert sorted(rb.stats()["shards"]) == [1, 9, 90]
    found = counts(rb, 40_000, 2000, 100)
    assert abs(chi_square(found, np.full(100, 400.0))) < FAR


@pytest.mark.parametrize("measure", ["window", "trajectory", "transition"])
def test_windows_are_as_likely_as_in_one_buffer(sharded: Any, single: Any, measure: str) -> None:
    """Against the exact law, and against what one buffer draws."""
    lengths = [3, 4, 4, 7, 12, 5, 9, 20, 4, 2]
    rows, length = episodes(lengths), 4

    def sampler() -> Any:
        return SliceSampler(slice_len=length, measure=measure)

    rb, one = sharded(3, sampler=sampler, shard_key="episode"), single(sampler())
    rb.extend(rows)
    one.extend(rows)
    windows = np.array([max(0, size - length + 1) for size in lengths])
    share = {
        "window": windows,
        "trajectory": (windows > 0).astype(float),
        "transition": np.where(windows > 0, lengths, 0),
    }[measure]
    expected = np.zeros(len(rows))
    begin = 0
    for size, count, weight in zip(lengths, windows, share, strict=True):
        expected[begin : begin + count] = weight / max(count, 1)
        begin += size
    expected *= 15_000 / expected.sum()
    for buffer in (rb, one):
        found = counts(buffer, 60_000, 4000, len(rows))
        assert abs(chi_square(found, expected)) < FAR


def test_slices_by_number_have_the_length_of_the_whole_batch(sharded: Any) -> None:
    rb = sharded(4, sampler=lambda: SliceSampler(num_slices=6), shard_key="episode")
    rb.extend(episodes([9, 10, 11, 12, 13]))
    batch = rb.sample(30)
    assert batch["sequence_id"].tolist() == sorted(list(range(6)) * 5)
    steps = batch["x"].reshape(6, 5)
    assert (steps.diff(dim=1) == 1).all()
    assert (batch["episode"].reshape(6, 5).diff(dim=1) == 0).all()
    assert (batch["next", "done"].reshape(6, 5).sum(1) == 1).all()
    assert rb.sample(12)["x"].reshape(6, 2).diff(dim=1).eq(1).all()


def test_windows_of_any_length_keep_their_rows_together(sharded: Any, single: Any) -> None:
    """Windows over the end of an episode, and shorter episodes, make batches of any size."""

    def sampler() -> Any:
        return SliceSampler(slice_len=4, strict_length=False, span=(False, True))

    rb = sharded(3, sampler=sampler, shard_key="episode")
    rb.extend(episodes([2, 3, 8, 5, 1, 6]))
    for _ in range(50):
        batch = rb.sample(40)
        windows = batch["sequence_id"]
        assert windows.unique_consecutive().tolist() == list(range(10))
        inside = windows[1:] == windows[:-1]
        assert (batch["x"].diff()[inside] == 1).all()
        assert (batch["episode"].diff()[inside] == 0).all()


def test_a_batch_of_slices_has_the_shape_that_was_asked_for(sharded: Any) -> None:
    rb = sharded(
        2, sampler=lambda: SliceSampler(slice_len=3, flat=False), shard_key="episode", batch_size=12
    )
    rb.extend(episodes([6, 6, 6]))
    assert rb.sample().batch_size == (4, 3)


@pytest.mark.parametrize("weight_norm", ["global", "batch"])
@pytest.mark.parametrize("shards", [1, 3])
def test_priorities_and_weights_are_those_of_one_buffer(
    sharded: Any, single: Any, shards: int, weight_norm: str
) -> None:
    """Frequencies by chi-square against the exact law; weights to the bit against one buffer."""

    def sampler() -> Any:
        return PrioritizedSampler(alpha=0.7, beta=0.5, eps=0.0, weight_norm=weight_norm)

    rb, one = sharded(shards, sampler=sampler), single(sampler())
    count = 50
    rows = TensorDict({"x": torch.arange(count)}, [count])
    p = torch.rand(count, generator=torch.Generator().manual_seed(3)) * 4
    p[::7] = 0
    for buffer in (rb, one):
        index = buffer.extend(rows)
        buffer.update_priority(index, p)
    assert index.tolist() == list(range(count))
    v = p.double().numpy() ** 0.7
    for buffer in (rb, one):
        found = counts(buffer, 40_000, 2000, count)
        assert abs(chi_square(found, 40_000 * v / v.sum())) < FAR
    batch = rb.sample(400)
    if weight_norm == "global":
        known = {int(x): w for x, w in zip(*_pairs(one.sample(4000)), strict=True)}
        assert all(float(w) == known[int(x)] for x, w in zip(*_pairs(batch), strict=True))
    least = v[v > 0].min() if weight_norm == "global" else v[batch["x"].numpy()].min()
    expected = (v[batch["x"].numpy()] / least) ** -0.5
    np.testing.assert_allclose(batch["priority_weight"].numpy(), expected, rtol=1e-5)


def _pairs(batch: Any) -> tuple[list[int], list[float]]:
    return batch["x"].tolist(), batch["priority_weight"].tolist()


def test_prioritized_windows_start_where_one_buffer_lets_them(sharded: Any, single: Any) -> None:
    lengths, length = [3, 6, 9, 4, 8, 2, 7], 3

    def sampler() -> Any:
        return PrioritizedSliceSampler(alpha=1.0, beta=1.0, eps=0.0, slice_len=length)

    rb, one = sharded(3, sampler=sampler, shard_key="episode"), single(sampler())
    rows = episodes(lengths)
    p = torch.rand(len(rows), generator=torch.Generator().manual_seed(5)) + 0.1
    begin = np.cumsum([0, *lengths[:-1]])
    start = np.concatenate([b + np.arange(n - 2) for b, n in zip(begin, lengths, strict=True)])
    v = np.zeros(len(rows))
    v[start] = p.numpy()[start]
    for buffer in (rb, one):
        buffer.update_priority(buffer.extend(rows), p)
        found = counts(buffer, 90_000, 4500, len(rows))
        assert abs(chi_square(found, 30_000 * v / v.sum())) < FAR
    batch = rb.sample(300)
    assert (batch["x"].reshape(100, 3).diff(dim=1) == 1).all()
    least, starts = float(p.min()), batch["x"].reshape(100, 3)[:, 0]
    expected = (p[starts] / least) ** -1.0
    found_weights = batch["priority_weight"].reshape(100, 3)
    torch.testing.assert_close(found_weights, expected[:, None].expand(100, 3))


def test_a_new_exponent_reaches_the_shards_with_the_next_draw(sharded: Any) -> None:
    """alpha 0: all rows with weight are as likely; beta is the client's alone."""
    rb = sharded(2, sampler=lambda: PrioritizedSampler(alpha=1.0, beta=1.0))
    rb.update_priority(rb.extend(TensorDict({"x": torch.arange(4)}, [4])), [1e-4, 1.0, 2.0, 30.0])
    assert counts(rb, 2000, 200, 4)[0] < 5
    rb.sampler.alpha = 0.0
    assert abs(chi_square(counts(rb, 20_000, 2000, 4), np.full(4, 5000.0))) < FAR
    rb.sampler.alpha, rb.sampler.beta = 1.0, 0.0
    assert (rb.sample(100)["priority_weight"] == 1).all()


def test_an_exponent_that_is_refused_changes_nothing(sharded: Any) -> None:
    rb = sharded(2, sampler=lambda: PrioritizedSampler(alpha=1.0, beta=1.0))
    index = rb.extend(torch.arange(4))
    rb.update_priority(index, torch.full((4,), 1e30))
    rb.sampler.alpha = 9.0  # of which this client's copy knows no priority
    with pytest.raises(ValueError, match="alpha=9"):
        rb.sample(2)
    rb.sampler.alpha = 0.5
    assert rb.extend(torch.arange(2)).tolist() == [4, 5]
    assert len(rb.sample(8)) == 8


def test_new_rows_get_the_largest_priority_of_all_shards(sharded: Any) -> None:
    rb = sharded(3, sampler=lambda: PrioritizedSampler(alpha=1.0, beta=1.0, eps=0.0))
    first = rb.extend(TensorDict({"x": torch.arange(3)}, [3]))
    rb.update_priority(first, torch.tensor([2.0, 50.0, 1.0]))
    rb.extend(TensorDict({"x": torch.arange(3) + 3}, [3]))
    p = np.array([2.0, 50.0, 1.0, 50.0, 50.0, 50.0])
    assert abs(chi_square(counts(rb, 40_000, 2000, 6), 40_000 * p / p.sum())) < FAR


def test_draws_do_not_depend_on_their_place_in_the_batch(sharded: Any) -> None:
    """A batch is in the order of its draws, so that any part of it has the same law."""
    rb = sharded(3)
    rb.extend(TensorDict({"x": torch.arange(9)}, [9]))
    found = np.zeros(9, np.int64)
    for _ in range(9):
        found += np.bincount(rb.sample(3000)["x"][:1000].numpy(), minlength=9)
    assert abs(chi_square(found, np.full(9, 1000.0))) < FAR


def test_one_seed_gives_the_same_batches_again(sharded: Any) -> None:
    drawn = []
    for _ in range(2):
        rb = sharded(3, generator=torch.Generator().manual_seed(7), batch_size=20)
        rb.extend(torch.arange(100))
        batches = iter(rb)
        drawn.append([next(batches).tolist() for _ in range(3)])
    assert drawn[0] == drawn[1]
    assert drawn[0][0] != drawn[0][1]


def test_weights_undo_the_probabilities_that_rows_really_had(sharded: Any) -> None:
    """A client whose table is old draws shards by old masses: its weights are of that law."""
    rb = sharded(2, sampler=lambda: PrioritizedSampler(alpha=1.0, beta=1.0, eps=0.0), max_age=1e9)
    index = rb.extend(TensorDict({"x": torch.arange(4)}, [4]))
    rb.update_priority(index, torch.ones(4))
    rb.sample(4)
    other = rb.client()
    other.update_priority(index[::2], torch.tensor([3.0, 1.0]))  # shard 0: 3 and 1, was 1 and 1
    batch = rb.sample(4000)  # shards still one to one
    found = np.bincount(batch["x"].numpy(), minlength=4)
    p = np.array([0.5 * 0.75, 0.25, 0.5 * 0.25, 0.25])
    assert abs(chi_square(found, 4000 * p)) < FAR
    expected = torch.from_numpy((p / p.min()) ** -1.0)[batch["x"]]
    torch.testing.assert_close(batch["priority_weight"], expected.float())
    p = np.array([3.0, 1.0, 1.0, 1.0]) / 6
    assert abs(chi_square(counts(rb, 8000, 2000, 4), 8000 * p)) < FAR


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"sampler": SamplerWithoutReplacement}, "SamplerWithoutReplacement"),
        ({"sampler": lambda: SliceSampler(slice_len=2)}, "shard_key"),
        (
            {"sampler": lambda: SliceSampler(slice_len=2, draw="stratified"), "shard_key": "k"},
            "draw='iid'",
        ),
        ({"sampler": lambda: PrioritizedSampler(alpha=1, beta=1, stratified=True)}, "stratified"),
        ({"writer": TensorDictMaxValueWriter}, "order"),
        ({"storage": lambda: LazyTensorStorage(8, ndim=2)}, "ndim=1"),
        ({"num_shards": 0}, "num_shards"),
        ({"backend": "threads"}, "backend"),
    ],
)
def test_components_that_cannot_be_sharded_are_refused(
    arguments: dict[str, Any], words: str
) -> None:
    from replaykit import ShardedReplayBuffer

    given = {"num_shards": 2, "storage": lambda: LazyTensorStorage(8), "backend": "local"}
    with pytest.raises(ValueError, match=words):
        ShardedReplayBuffer(**{**given, **arguments})


def test_a_storage_that_is_made_already_is_refused() -> None:
    from replaykit import ShardedReplayBuffer

    with pytest.raises(TypeError, match="expected storage as a function"):
        ShardedReplayBuffer(num_shards=2, storage=LazyTensorStorage(8), backend="local")


def test_errors_without_drawable_rows_match_one_buffer(sharded: Any, single: Any) -> None:
    rb = sharded(2, sampler=lambda: SliceSampler(slice_len=9), shard_key="episode")
    with pytest.raises(RuntimeError, match=r"Cannot sample from an empty storage\."):
        rb.sample(9)
    assert not rb.can_sample(9)
    rb.extend(episodes([4, 5, 6]))
    with pytest.raises(RuntimeError, match="expected 1 slices of 9 rows, got no window"):
        rb.sample(9)
    rb.extend(episodes([10]))
    assert rb.can_sample(9)
    assert not rb.can_sample(8)
    rb = sharded(2, sampler=lambda: PrioritizedSampler(alpha=1.0, beta=1.0, eps=0.0))
    rb.update_priority(rb.extend(torch.arange(4)), torch.zeros(4))
    with pytest.raises(RuntimeError, match="every stored priority is zero"):
        rb.sample(2)
    assert isinstance(single(RandomSampler()), ReplayBuffer)


def test_mass_for_an_outdated_exponent_is_requested_again(sharded: Any) -> None:
    """Another thread may learn it between the question and the draw; it is not a mass of 0."""
    rb = sharded(
        2, sampler=lambda: PrioritizedSampler(alpha=1.0, beta=1.0), batch_size=64, max_age=1000
    )
    rb.extend(TensorDict({"x": torch.arange(8)}, [8]))
    rb.sample()
    members = rb._members
    refresh, asked = members.refresh, []

    def interrupted(terms: Any, max_age: float) -> None:
        refresh(terms, max_age)
        asked.append(max_age)
        if len(asked) == 1:
            members.receive(1, members.send(1, "facts", terms._replace(alpha=0.5)))

    members.refresh = interrupted
    for draw in (rb.sample, lambda: rb.sample() if rb.can_sample() else None):
        asked.clear()
        batch = draw()
        assert len(asked) >= 2
        assert set((batch["x"] % 2).tolist()) == {0, 1}
