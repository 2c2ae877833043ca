"""Shards draw what one big buffer draws: frequencies, weights, windows, transforms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict, tensorclass

from replaykit import (
    Compose,
    Coverage,
    HindsightGoal,
    LaneWriter,
    LazyMemmapStorage,
    LazyTensorStorage,
    NStep,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    ReturnToGo,
    RewardScale,
    SamplerWithoutReplacement,
    ShardedReplayBuffer,
    SliceSampler,
    StackFrames,
    TensorDictMaxValueWriter,
)
from replaykit.distributed.shard_config import ByKey
from tests.distributed.laws import (
    FAR,
    check_law,
    chi_square,
    counts,
    episodes,
    prioritized,
    steps,
)
from tests.support.refusals import refuses


def test_uniform_draws_do_not_see_how_rows_are_spread(sharded: Any) -> None:
    """Shards with 1, 9 and 90 rows: every row is as likely."""
    rb = sharded(3, shard_key="key")
    keys = np.arange(1000)
    shard = ByKey(3, "key").route({("key",): torch.from_numpy(keys)}, 1000, [])
    one, nine, ninety = keys[shard == 0][:1], keys[shard == 1][:9], keys[shard == 2][:90]
    chosen = torch.from_numpy(np.concatenate([one, nine, ninety]))
    rb.extend(TensorDict({"key": chosen, "x": torch.arange(100)}, [100]))
    assert sorted(rb.stats()["shards"]) == [1, 9, 90]
    check_law(rb, 40_000, 2000, np.ones(100))


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
    for buffer in (rb, one):
        check_law(buffer, 60_000, 4000, expected)


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
    shaped = sharded(2, sampler=lambda: SliceSampler(slice_len=3, flat=False), shard_key="episode")
    shaped.extend(episodes([6, 6, 6]))
    assert shaped.sample(12).batch_size == (4, 3)


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
        check_law(buffer, 40_000, 2000, v)
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
        check_law(buffer, 90_000, 4500, v)
    batch = rb.sample(300)
    assert (batch["x"].reshape(100, 3).diff(dim=1) == 1).all()
    least, starts = float(p.min()), batch["x"].reshape(100, 3)[:, 0]
    expected = (p[starts] / least) ** -1.0
    found_weights = batch["priority_weight"].reshape(100, 3)
    torch.testing.assert_close(found_weights, expected[:, None].expand(100, 3))


def test_a_new_exponent_reaches_the_shards_with_the_next_draw(sharded: Any) -> None:
    """alpha 0: all rows with weight are as likely; beta is the client's alone."""
    rb = sharded(2, sampler=prioritized)
    rb.update_priority(rb.extend(TensorDict({"x": torch.arange(4)}, [4])), [1e-4, 1.0, 2.0, 30.0])
    assert counts(rb, 2000, 200, 4)[0] < 5
    rb.sampler.alpha = 0.0
    check_law(rb, 20_000, 2000, np.ones(4))
    rb.sampler.alpha, rb.sampler.beta = 1.0, 0.0
    assert (rb.sample(100)["priority_weight"] == 1).all()


def test_an_exponent_that_is_refused_changes_nothing(sharded: Any) -> None:
    rb = sharded(2, sampler=prioritized)
    index = rb.extend(torch.arange(4))
    rb.update_priority(index, torch.full((4,), 1e30))
    rb.sampler.alpha = 9.0  # of which this client's copy knows no priority
    refuses(ValueError, "alpha=9", rb.sample, 2)
    rb.sampler.alpha = 0.5
    assert rb.extend(torch.arange(2)).tolist() == [4, 5]
    assert len(rb.sample(8)) == 8


def test_new_rows_get_the_largest_priority_of_all_shards(sharded: Any) -> None:
    rb = sharded(3, sampler=prioritized)
    first = rb.extend(TensorDict({"x": torch.arange(3)}, [3]))
    rb.update_priority(first, torch.tensor([2.0, 50.0, 1.0]))
    rb.extend(TensorDict({"x": torch.arange(3) + 3}, [3]))
    p = np.array([2.0, 50.0, 1.0, 50.0, 50.0, 50.0])
    check_law(rb, 40_000, 2000, p)


def test_draws_do_not_depend_on_their_place_in_the_batch(sharded: Any) -> None:
    """A batch is in the order of its draws, so that any part of it has the same law."""
    rb = sharded(3)
    rb.extend(TensorDict({"x": torch.arange(9)}, [9]))
    first = np.concatenate([rb.sample(3000)["x"][:1000].numpy() for _ in range(9)])
    found = np.bincount(first, minlength=9)
    assert abs(chi_square(found, np.full(9, 1000.0))) < FAR


def test_weights_undo_the_probabilities_that_rows_really_had(sharded: Any) -> None:
    """A client whose table is old draws shards by old masses: its weights are of that law."""
    rb = sharded(2, sampler=prioritized, max_age=1e9)
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
    check_law(rb, 8000, 2000, np.array([3.0, 1.0, 1.0, 1.0]))


def sliced(sampler: Any = SliceSampler, **options: Any) -> dict[str, Any]:
    return {"sampler": lambda: sampler(slice_len=2, **options), "shard_key": "k"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"sampler": SamplerWithoutReplacement}, "SamplerWithoutReplacement"),
        ({"sampler": lambda: SliceSampler(slice_len=2)}, "shard_key"),
        (sliced(draw="stratified"), "draw='iid'"),
        (sliced(measure=Coverage()), "name of a measure"),
        (sliced(where=len), "where="),
        ({"sampler": lambda: PrioritizedSampler(alpha=1, beta=1, stratified=True)}, "stratified"),
        (sliced(PrioritizedSliceSampler, alpha=1, beta=1, unit="episode"), "unit="),
        ({"writer": TensorDictMaxValueWriter}, "order"),
        ({"storage": lambda: LazyTensorStorage(8, ndim=2)}, "ndim=1"),
        ({"num_shards": 0}, "num_shards"),
        ({"backend": "threads"}, "backend"),
        ({"storage": LazyTensorStorage(8)}, "expected storage as a function"),
    ],
)
def test_components_that_cannot_be_sharded_are_refused(
    arguments: dict[str, Any], words: str
) -> None:
    given = {"num_shards": 2, "storage": lambda: LazyTensorStorage(8), "backend": "local"}
    refuses((TypeError, ValueError), words, ShardedReplayBuffer, **{**given, **arguments})


def test_errors_without_drawable_rows_match_one_buffer(sharded: Any) -> None:
    rb = sharded(2, sampler=lambda: SliceSampler(slice_len=9), shard_key="episode")
    refuses(RuntimeError, r"Cannot sample from an empty storage\.", rb.sample, 9)
    assert not rb.can_sample(9)
    rb.extend(episodes([4, 5, 6]))
    refuses(RuntimeError, "expected 1 slices of 9 rows, got no window", rb.sample, 9)
    rb.extend(episodes([10]))
    assert rb.can_sample(9)
    assert not rb.can_sample(8)
    rb = sharded(2, sampler=prioritized)
    rb.update_priority(rb.extend(torch.arange(4)), torch.zeros(4))
    refuses(RuntimeError, "every stored priority is zero", rb.sample, 2)


def test_mass_for_an_outdated_exponent_is_requested_again(sharded: Any) -> None:
    """Another thread may learn it between the question and the draw; it is not a mass of 0."""
    rb = sharded(2, sampler=prioritized, batch_size=64, max_age=1000)
    rb.extend(TensorDict({"x": torch.arange(8)}, [8]))
    rb.sample()
    members = rb._members
    refresh, asked = members.refresh, []

    def interrupted(terms: Any, max_age: float, within: float | None = None) -> None:
        refresh(terms, max_age, within)
        asked.append(max_age)
        if len(asked) == 1:
            members.receive(1, members.send(1, "facts", terms._replace(alpha=0.5)))

    members.refresh = interrupted
    for draw in (rb.sample, lambda: rb.sample() if rb.can_sample() else None):
        asked.clear()
        batch = draw()
        assert len(asked) >= 2
        assert set((batch["x"] % 2).tolist()) == {0, 1}


@tensorclass
class Step:
    """A record that is no TensorDict."""

    x: torch.Tensor


def test_rows_without_required_history_are_not_drawn(sharded: Any, single: Any) -> None:
    """n-step sums need the end of the episode, or enough rows after: masses count these only."""
    rows = episodes([7, 3, 12, 5])
    rows["next", "done"][-1] = False  # open: its last rows wait for what follows
    rows["next", "reward"] = rows["x"][:, None].float()

    def factory() -> Any:
        return NStep(3, gamma=1.0, on_open="exclude")

    rb = sharded(3, transform_factory=factory, shard_key="episode")
    one = single(None, transform=factory())
    for buffer in (rb, one):
        buffer.extend(rows)
    expected = np.zeros(27)
    expected[sorted({int(x) for x in one.sample(2000)["x"]})] = 1.0
    assert 0 < expected.sum() < 27
    check_law(rb, 20_000, 2000, expected)
    sums = {int(x): float(r) for x, r in zip(*_rewards(one), strict=True)}
    assert all(sums[int(x)] == float(r) for x, r in zip(*_rewards(rb), strict=True))


def _rewards(buffer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    batch = buffer.sample(2000)
    return batch["x"], batch["next", "reward"][:, 0]


@pytest.mark.parametrize(
    "factory",
    [
        lambda: StackFrames(["x"], 2),
        lambda: NStep(3),  # of what there is, so that every row may be drawn
        lambda: NStep(3, when="write"),
        lambda: ReturnToGo(0.9),
        lambda: Compose(HindsightGoal(reward_fn=torch.eq), RewardScale(scale=2.0)),
    ],
)
def test_transforms_that_look_at_other_rows_need_a_key(sharded: Any, factory: Any) -> None:
    """Neighbours in a shard would be rows of which others lie in between."""
    with pytest.raises(
        ValueError, match=r"shard_key= with .* transforms that read neighbouring rows"
    ):
        sharded(2, transform_factory=factory)
    sharded(2, transform_factory=factory, shard_key="episode")


def test_observations_stored_once_are_not_compared_in_a_shard_alone(
    sharded: Any, tmp_path: Path
) -> None:
    """One shard can refuse a batch. Other numbers of shards give rows other neighbours."""

    def once(on_mismatch: str) -> Any:
        return lambda: LazyTensorStorage(100, dedup_next=True, on_mismatch=on_mismatch)

    with pytest.raises(ValueError, match=r"on_mismatch='dense' with dedup_next for shards"):
        sharded(2, storage=once("error"), shard_key="episode")
    rb = sharded(2, storage=once("dense"), shard_key="episode")
    for first in (0, 5, 50):  # the last ones go on from none that is there
        x = torch.arange(first, first + 5).repeat(3)
        episode = torch.arange(3).repeat_interleave(5)
        rows = {"x": x, "episode": episode, "next": {"x": x + 1, "done": torch.zeros(15, 1).bool()}}
        rb.extend(TensorDict(rows, [15]))
    rb.dumps(tmp_path)
    for count in (1, 3):
        other = sharded(count, storage=once("dense"), shard_key="episode")
        other.loads(tmp_path)
        assert torch.equal(other["next", "x"], other["x"] + 1)
        assert sorted(other["x"].tolist()) == sorted(rb["x"].tolist())


@pytest.mark.parametrize("shards", [2, 4])
def test_interleaved_streams_stay_streams(sharded: Any, tmp_path: Path, shards: int) -> None:
    """Each stream in one shard; streams as likely, then their windows; also after a load into
    another number of shards."""

    def make(count: int) -> Any:
        return sharded(
            count,
            storage=lambda: LazyTensorStorage(400, lane_key="k"),
            writer=lambda: LaneWriter(40),
            sampler=lambda: SliceSampler(slice_len=3, measure="lane"),
            shard_key="k",
        )

    rb = make(3)
    for step in range(12):
        present = list(range(3 if step >= 6 else 5))
        rb.extend(steps(present, [12 * stream + step for stream in present]))
    rb.dumps(tmp_path)
    other = make(shards)
    other.loads(tmp_path)
    expected = np.zeros(60)
    for stream, length in enumerate([12, 12, 12, 6, 6]):
        expected[12 * stream : 12 * stream + length - 2] = 1 / (length - 2)
    for buffer in (rb, other):
        check_law(buffer, 30_000, 3000, expected)


def test_priorities_of_slices_go_to_their_starts(sharded: Any) -> None:
    rb = sharded(
        2,
        sampler=lambda: PrioritizedSliceSampler(
            alpha=1.0, beta=0.0, eps=0.0, slice_len=2, unit="slice"
        ),
        shard_key="episode",
    )
    rb.extend(episodes([2, 2, 2]))
    batch = rb.sample(60)
    batch["td_error"] = (batch["episode"] == 1).float() + (batch["episode"] == 2) * 2.0
    rb.update_tensordict_priority(batch)
    check_law(rb, 6000, 600, np.array([0, 0, 1, 0, 2, 0]))


def test_tensorclasses_and_files_hold_too(sharded: Any, tmp_path: Path) -> None:
    made = iter(range(100))
    rb = sharded(
        2,
        storage=lambda: LazyMemmapStorage(20, scratch_dir=tmp_path / str(next(made))),
        batch_size=30,
    )
    rb.extend(Step(x=torch.arange(7), batch_size=[7]))
    batch = rb.sample()
    assert type(batch) is Step
    assert set(batch.x.tolist()) <= set(range(7))
    rb.dumps(tmp_path / "saved")
    other = sharded(3)
    other.loads(tmp_path / "saved")
    assert other[:].x.tolist() == list(range(7))
