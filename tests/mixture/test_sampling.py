"""Batches of ensembles: of which members, which rows, and what is known of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    LazyTensorStorage,
    ListStorage,
    NStep,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBufferEnsemble,
    ReturnToGo,
    Sampler,
    SamplerEnsemble,
    SamplerWithoutReplacement,
    Sequence,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    StorageEnsemble,
    WriterEnsemble,
)
from tests.mixture.members import (
    STRIDE,
    check_rows,
    holding,
    make_ensemble,
    make_member,
    rows_of,
    same,
)
from tests.support.refusals import refuses

SAMPLERS: dict[str, Callable[[], Sampler]] = {
    "random": RandomSampler,
    "without_replacement": SamplerWithoutReplacement,
    "drop_last": lambda: SamplerWithoutReplacement(drop_last=True),
    "prioritized": lambda: PrioritizedSampler(alpha=0.7, beta=0.5),
    "stratified": lambda: PrioritizedSampler(alpha=0.7, beta=0.5, stratified=True),
    "batch_norm": lambda: PrioritizedSampler(alpha=0.7, beta=0.5, weight_norm="batch"),
    "slices": lambda: SliceSampler(slice_len=2),
    "num_slices": lambda: SliceSampler(num_slices=2),
    "padded": lambda: SliceSampler(slice_len=4, strict_length=False, pad_output=True),
    "slices_without_replacement": lambda: SliceSamplerWithoutReplacement(slice_len=2),
    "prioritized_slices": lambda: PrioritizedSliceSampler(alpha=0.7, beta=0.5, slice_len=2),
    "slice_units": lambda: PrioritizedSliceSampler(alpha=0.7, beta=0.5, slice_len=2, unit="slice"),
}


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("times", [1, 3])
def test_every_part_contains_rows_of_one_member(name: str, times: int) -> None:
    arguments = {"member": {"batch_size": 4}}
    ensemble = make_ensemble(
        [20, 30], [SAMPLERS[name]] * 2, num_buffer_sampled=2 * times, **arguments
    )
    for _ in range(5):
        batch = ensemble.sample(8 * times)
        assert batch.shape == (2 * times, 4)
        check_rows(batch)
        ids = batch["index", "buffer_ids"]
        assert (ids == ids[:, :1]).all()
        if "slices" in name or name == "slice_units":
            windows = batch["id"].reshape(2 * times, -1, 2)
            assert (windows[..., 1] - windows[..., 0] == 1).all()
            # Windows are numbered anew in each part.
            assert (batch["sequence_id"] == torch.tensor([0, 0, 1, 1])).all()


@pytest.mark.parametrize("chosen", [None, ["id"]])
@pytest.mark.parametrize("name", [*SAMPLERS, "sequences"])
def test_batches_of_any_members_have_the_same_keys(name: str, chosen: Any) -> None:
    if name == "sequences":
        members = [make_member(0), make_member(1, sample_unit=Sequence(length=1))]
    else:
        members = [make_member(0), make_member(1, sampler=SAMPLERS[name](), batch_size=4)]
    keys = []
    for p in ([1, 0], [0, 1], [1, 1]):
        ensemble = ReplayBufferEnsemble(*members, p=p, num_buffer_sampled=4, keys=chosen)
        for source in (ReplayBufferEnsemble(ensemble), ensemble):
            batch = source.sample(16)
            keys.append(set(batch.keys(True, True)))
        assert batch["index"].batch_size == (4, 4)
        assert batch["index_generation"].dtype == torch.int64
        if p == [1, 0] and ("next", "truncated") in keys[0]:
            assert not batch["next", "truncated"].any()
    assert all(found == keys[0] for found in keys)


def test_missing_info_of_members_gets_defaults() -> None:
    priorities = PrioritizedSampler(alpha=1.0, beta=1.0)
    ensemble = ReplayBufferEnsemble(
        make_member(0),
        make_member(1, sampler=priorities),
        make_member(2, sampler=SliceSampler(slice_len=4, pad_output=True, strict_length=False)),
        sample_from_all=True,
    )
    ensemble[1].update_priority(torch.arange(20), torch.arange(1.0, 21.0))
    batch = ensemble.sample(24)
    weights = batch["priority_weight"]
    assert (weights[[0, 2]] == 1).all()
    assert torch.allclose(weights[1], 1 / (batch["index", "index"][1] + 1.0))
    assert batch["collector", "mask"][:2].all()
    assert batch["sequence_id"].tolist() == [list(range(8)), list(range(8)), [0] * 4 + [1] * 4]
    assert (batch["index_generation"] == 0).all()


def test_single_row_is_the_anchor_of_itself() -> None:
    sampler = PrioritizedSliceSampler(alpha=1, beta=1, slice_len=2, unit="slice")
    ensemble = ReplayBufferEnsemble(
        make_member(0), make_member(1, sampler=sampler), sample_from_all=True
    )
    batch = ensemble.sample(8)
    assert (batch["anchor_index"][0] == batch["index", "index"][0]).all()
    assert (batch["anchor_generation"][0] == batch["index_generation"][0]).all()
    assert (batch["anchor_index"][1] == batch["index", "index"][1, [0, 0, 2, 2]]).all()


def test_weights_by_size_follow_the_rows() -> None:
    ensemble = make_ensemble([30, 10, 0], p="size", num_buffer_sampled=8, counts="exact")
    assert ensemble.sample(8)["index", "buffer_ids"][:, 0].tolist() == [0] * 6 + [1] * 2
    ensemble[2].extend(rows_of(2, 40))
    assert ensemble.sample(8)["index", "buffer_ids"][:, 0].tolist() == [0] * 3 + [1] + [2] * 4


def test_weights_may_be_set_at_any_time() -> None:
    ensemble = make_ensemble([5, 5], p=[1, 0], num_buffer_sampled=4)
    assert (ensemble.sample(8)["index", "buffer_ids"] == 0).all()
    ensemble.sampler.p = torch.tensor([0, 2])
    assert (ensemble.sample(8)["index", "buffer_ids"] == 1).all()
    with pytest.raises(ValueError, match="above 0"):
        ensemble.sampler.p = [0, 0]
    assert ensemble.sampler.p.tolist() == [0, 1]
    ensemble.sampler.p[0] = 5  # a copy
    assert ensemble.sampler.p.tolist() == [0, 1]


def test_an_empty_member_is_named() -> None:
    ensemble = make_ensemble([5, 0], p=[1, 1e-9])
    assert not ensemble.can_sample(2)
    refuses(RuntimeError, r"^member 1: Cannot sample from an empty storage\.$", ensemble.sample, 2)
    ensemble = make_ensemble([5, 0], sample_from_all=True)
    assert not ensemble.can_sample(2)
    refuses(RuntimeError, "member 1", ensemble.sample, 2)


def test_a_member_that_cannot_be_chosen_may_be_empty() -> None:
    ensemble = make_ensemble([5, 0], p=[1, 0])
    assert ensemble.can_sample(2)
    assert (ensemble.sample(4)["index", "buffer_ids"] == 0).all()


def test_members_that_are_not_ready_are_left_out_if_asked_for() -> None:
    ensemble = make_ensemble([5, 0], p=[1, 3], unready="skip", num_buffer_sampled=4, counts="exact")
    assert (ensemble.sample(4)["index", "buffer_ids"] == 0).all()
    ensemble[1].extend(rows_of(1, 3))
    assert ensemble.sample(4)["index", "buffer_ids"][:, 0].tolist() == [0, 1, 1, 1]
    ensemble[0].empty()
    ensemble[1].empty()
    assert not ensemble.can_sample(4)
    refuses(RuntimeError, "no member", ensemble.sample, 4)


def test_member_without_enough_windows_is_not_ready() -> None:
    samplers: list[Any] = [RandomSampler, lambda: SliceSampler(slice_len=4)]
    ensemble = make_ensemble([20, 3], samplers, unready="skip")
    assert (ensemble.sample(16)["index", "buffer_ids"] == 0).all()
    ensemble = make_ensemble([20, 3], samplers)
    refuses(RuntimeError, r"member 1: .*expected 2 slices of 4 rows", ensemble.sample, 16)


def test_sizes_that_do_not_divide_are_refused() -> None:
    ensemble = make_ensemble([5, 5], num_buffer_sampled=3)
    assert not ensemble.can_sample(4)
    refuses(ValueError, "num_buffer_sampled=3, got 4", ensemble.sample, 4)


def test_failing_member_leaves_all_members_unchanged() -> None:
    """Member 0 has drawn before member 1 fails; neither it nor the generator has moved on."""

    class Failing(RandomSampler):
        fails = False

        def sample(self, storage: Any, batch_size: int) -> Any:
            drawn = super().sample(storage, batch_size)
            if self.fails:
                raise RuntimeError("not now")
            return drawn

    samplers: list[Any] = [SamplerWithoutReplacement, Failing, RandomSampler]
    ensemble, other = (make_ensemble([20, 20, 20], samplers, sample_from_all=True) for _ in "ab")
    assert same(ensemble.sample(12), other.sample(12))
    ensemble[1].sampler.fails = True
    for _ in range(3):
        refuses(RuntimeError, r"^member 1: not now$", ensemble.sample, 12)
    ensemble[1].sampler.fails = False
    for _ in range(3):
        assert same(ensemble.sample(12), other.sample(12))


def test_a_batch_that_could_not_be_made_is_the_next_one_again() -> None:
    ensemble, other = (make_ensemble([20, 20], batch_size=8) for _ in range(2))

    failing = True

    def fails(batch: Any) -> Any:
        if failing:
            raise ValueError("not yet")
        return batch

    ensemble.append_transform(fails)
    for size in (None, 4):
        refuses(ValueError, "not yet", ensemble.sample, size)
    failing = False
    for size in (None, 4, None):
        assert same(ensemble.sample(size), other.sample(size))


@pytest.mark.pitfall("RD3")
@pytest.mark.parametrize("parts", [2, 6])
def test_a_member_without_replacement_gives_each_row_once_a_pass(parts: int) -> None:
    """Also where a pass ends inside a part: the next one gives the rest."""
    ensemble = make_ensemble([10, 7], [SamplerWithoutReplacement] * 2, num_buffer_sampled=parts)
    found: dict[int, list[int]] = {0: [], 1: []}
    for _ in range(40):
        batch = ensemble.sample(12)
        for member in found:
            found[member] += batch["id"][batch["index", "buffer_ids"] == member].tolist()
    for member, size in ((0, 10), (1, 7)):
        ids = found[member]
        for first in range(0, len(ids) - size + 1, size):
            assert sorted(ids[first : first + size]) == [STRIDE * member + i for i in range(size)]


def test_iteration_ends_when_the_last_member_has_ended_a_pass() -> None:
    ensemble = make_ensemble(
        [8, 4], [SamplerWithoutReplacement] * 2, sample_from_all=True, batch_size=4
    )
    for _ in range(2):
        batches = list(ensemble)
        assert len(batches) == 4
        ids = torch.cat([batch["id"][0] for batch in batches])
        assert sorted(ids.tolist()) == list(range(8))
        again = torch.cat([batch["id"][1] for batch in batches])
        assert Counter(again.tolist()) == {STRIDE + i: 2 for i in range(4)}
    assert [ensemble.next() is None for _ in range(6)] == [False] * 4 + [True, False]


def test_iteration_over_draws_with_replacement_does_not_end() -> None:
    ensemble = make_ensemble(
        [2, 2], [SamplerWithoutReplacement, RandomSampler], sample_from_all=True, batch_size=4
    )
    for count, _ in enumerate(ensemble):
        if count == 50:
            break
    assert count == 50
    refuses(RuntimeError, "batch_size", iter, make_ensemble([2, 2]))


def test_windows_that_do_not_fill_a_part_are_refused() -> None:
    samplers: list[Any] = [RandomSampler, lambda: SliceSampler(slice_len=4, strict_length=False)]
    ensemble = make_ensemble([20, 3], samplers, sample_from_all=True)
    refuses(ValueError, "member 1: expected 8 rows, got", ensemble.sample, 16)
    samplers[1] = lambda: SliceSamplerWithoutReplacement(num_slices=3)
    ensemble = make_ensemble([20, 20], samplers, sample_from_all=True)
    ensemble.sample(12)
    refuses(ValueError, r"member 1: .* at the end of a pass.* use slice_len=", ensemble.sample, 12)


def test_sequences_of_members_make_longer_parts() -> None:
    members = [make_member(i, sample_unit=Sequence(length=3, burn_in=1)) for i in range(2)]
    ensemble = ReplayBufferEnsemble(*members, sample_from_all=True)
    batch = ensemble.sample(8)
    assert batch.shape == (2, 16)
    check_rows(batch)
    mixed = ReplayBufferEnsemble(members[0], make_member(1), sample_from_all=True)
    refuses(ValueError, "expected 16 rows a part as of member 0, got 4", mixed.sample, 8)


def test_members_with_and_without_lanes_share_a_batch() -> None:
    rows = torch.stack([rows_of(1, 10), rows_of(1, 10, start=100)])
    lanes = holding(rows, LazyTensorStorage(60, ndim=2))
    batch = ReplayBufferEnsemble(make_member(0), lanes, sample_from_all=True).sample(12)
    index = batch["index", "index"]
    assert index.shape == (2, 6, 2)
    assert (index[0, :, 1] == -1).all()
    assert (index[0, :, 0] == batch["id"][0]).all()
    assert (STRIDE + index[1, :, 0] + 100 * index[1, :, 1] == batch["id"][1]).all()
    alone = ReplayBufferEnsemble(make_member(0), lanes, p=[1, 0]).sample(4)
    assert alone["index", "index"].shape == (2, 2, 2)


def test_index_in_nested_ensembles_is_that_of_the_buffer() -> None:
    deep = make_ensemble([4, 4], seed=None, sample_from_all=True)
    middle = ReplayBufferEnsemble(deep, sample_from_all=True)
    outer = ReplayBufferEnsemble(middle, make_member(7), sample_from_all=True)
    batch = outer.sample(8)
    index = batch["index", "index"]
    assert batch["index", "buffer_ids"].tolist() == [[0] * 4, [1] * 4]
    assert (batch["id"] == index + STRIDE * torch.tensor([[0, 0, 1, 1], [7] * 4])).all()
    assert outer[0] is middle
    assert outer.stats()["size"] == 28


def test_members_of_lists_and_tensors_share_a_batch() -> None:
    listed = holding(list(rows_of(1, 10).unbind(0)), ListStorage(30))
    batch = ReplayBufferEnsemble(make_member(0), listed, sample_from_all=True).sample(8)
    check_rows(batch)
    tensors = [holding(torch.arange(5) + STRIDE * number) for number in range(2)]
    ensemble = ReplayBufferEnsemble(*tensors, sample_from_all=True)
    data, info = ensemble.sample(6, return_info=True)
    assert torch.equal(data, info["index", "index"] + STRIDE * info["index", "buffer_ids"])
    assert info.batch_size == (2, 3)
    assert torch.equal(info["index"]["index"], info["index", "index"])


def test_rows_that_are_trajectories_are_joined() -> None:
    x = torch.arange(9)[:, None].expand(9, 4)
    members = [holding(TensorDict({"x": x + 9 * number}, [9, 4])) for number in range(2)]
    batch = ReplayBufferEnsemble(*members, sample_from_all=True).sample(6)
    assert batch.batch_size == (2, 3, 4)
    ids = batch["index", "index"] + 9 * batch["index", "buffer_ids"]
    assert torch.equal(batch["x"], ids)


def test_transforms_of_members_run_before_those_of_the_ensemble() -> None:
    def tagged(number: int) -> Callable[[Any], Any]:
        return lambda batch: batch.set("tag", torch.full_like(batch["id"], number))

    ensemble = ReplayBufferEnsemble(
        *(make_member(i, transform=tagged(i + 5)) for i in range(2)),
        sample_from_all=True,
        transform=lambda batch: batch.set("twice", batch["tag"] * 2),
    )
    batch = ensemble.sample(6)
    assert batch["twice"].tolist() == [[10] * 3, [12] * 3]
    assert ensemble[:, 2]["twice"].tolist() == [10, 12]
    flat = ReplayBufferEnsemble(
        *ensemble.members, sample_from_all=True, transform=lambda batch: batch.reshape(-1)
    )
    batch = flat.sample(6)
    assert batch.batch_size == (6,)
    check_rows(batch)
    broken = ReplayBufferEnsemble(*ensemble.members, transform=lambda batch: batch[:, :1])
    refuses(RuntimeError, "return_info", broken.sample, 6)
    data, info = broken.sample(6, return_info=True)
    assert (data.batch_size, info.batch_size) == ((2, 1), (2, 3))


def test_transforms_that_read_around_belong_to_members() -> None:
    members = [make_member(i, transform=NStep(2, gamma=0.5)) for i in range(2)]
    batch = ReplayBufferEnsemble(*members, sample_from_all=True).sample(8)
    check_rows(batch)
    alone = members[0].sample(4)
    assert set(alone["next"].keys()) == set(batch["next"].keys())
    # An ensemble is not written to: what works on writes would do nothing.
    for transform in (NStep(2, gamma=0.5), NStep(2, when="write"), ReturnToGo(0.9)):
        with pytest.raises(ValueError, match="give it to the members"):
            ReplayBufferEnsemble(*members, transform=transform)


@pytest.mark.pitfall("RD2")
@pytest.mark.parametrize("depth", [1, 4])
def test_prefetch_does_not_change_the_batches(depth: int) -> None:
    samplers: list[Any] = [SamplerWithoutReplacement, RandomSampler]
    arguments: dict[str, Any] = {"batch_size": 4, "p": [2, 1], "num_buffer_sampled": 4}
    plain = make_ensemble([7, 9], samplers, **arguments)
    ahead = make_ensemble([7, 9], samplers, prefetch=depth, **arguments)
    for _ in range(12):
        assert same(plain.sample(), ahead.sample())
    assert ahead.stats()["prefetch_queue_size"] == depth
    ahead.shutdown()
    refuses(RuntimeError, "shut down", ahead.sample)


def test_members_are_used_by_themselves_too() -> None:
    """What a member has made ahead, or draws from, stays its own."""
    alone = make_member(0, batch_size=4, generator=torch.Generator().manual_seed(5))
    shared = make_member(0, batch_size=4, generator=torch.Generator().manual_seed(5), prefetch=2)
    ensemble = ReplayBufferEnsemble(
        shared, make_member(1), generator=torch.Generator().manual_seed(0)
    )
    for _ in range(5):
        ensemble.sample(8)
        assert same(alone.sample(), shared.sample(), generations=False)
    shared.shutdown()


def test_without_a_generator_members_draw_from_their_own() -> None:
    alone = make_member(0, generator=torch.Generator().manual_seed(5))
    member = make_member(0, generator=torch.Generator().manual_seed(5))
    ensemble = ReplayBufferEnsemble(member, sample_from_all=True)
    for _ in range(3):
        assert torch.equal(ensemble.sample(4)["id"][0], alone.sample(4)["id"])


def test_ensemble_of_storages_samplers_and_writers_samples() -> None:
    made = [make_member(i) for i in range(2)]
    storages = StorageEnsemble(
        *(one.storage for one in made),
        transforms=[None, lambda batch: batch.set("id", -batch["id"])],
    )
    samplers = SamplerEnsemble(RandomSampler(), RandomSampler(), sample_from_all=True)
    writers = WriterEnsemble(*(type(one.writer)() for one in made))
    ensemble = ReplayBufferEnsemble(storages=storages, samplers=samplers, writers=writers)
    batch = ensemble.sample(6)
    assert (batch["id"][1] < 0).all()
    assert ensemble.sampler is samplers
    ensemble[0].extend(rows_of(0, 3, start=20))
    assert ensemble.writer[0].write_count == 3


def test_samplers_and_storages_work_without_their_ensemble() -> None:
    made = make_ensemble([9, 12], p=[1, 3], num_buffer_sampled=4, counts="exact")
    sampler, storage = made.sampler, made.storage
    sampler.generator = torch.Generator().manual_seed(0)
    index, info = sampler.sample(storage, 8)
    assert index["buffer_ids"].tolist() == [0, 1, 1, 1]
    assert index["index"].shape == (4, 2)
    assert set(info) == {"index_generation"}
    found = storage.get(index)
    assert [number for number, _ in found] == [0, 1, 1, 1]
    for (number, rows), slots in zip(found, index["index"], strict=True):
        assert torch.equal(rows["id"], STRIDE * number + slots)
    assert sampler.can_sample(storage, 8)
    assert not sampler.can_sample(storage, 9)
    refuses(TypeError, "StorageEnsemble", sampler.sample, made[0].storage, 8)
    refuses(ValueError, "2 storages, got 1", sampler.sample, StorageEnsemble(made[0].storage), 8)


def test_ensemble_follows_replaced_parts_of_members() -> None:
    ensemble = make_ensemble([5, 5])
    ensemble[1].set_sampler(SamplerWithoutReplacement())
    assert isinstance(ensemble.sampler[1], SamplerWithoutReplacement)
    ensemble[1].set_storage(LazyTensorStorage(3))
    ensemble[1].extend(rows_of(1, 3))
    assert ensemble.stats()["capacity"] == 53
    check_rows(ensemble.sample(6))
