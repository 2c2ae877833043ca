"""A save with prefetched batches: all is as if they had never been drawn."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    Coverage,
    HindsightGoal,
    LazyTensorStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    Sequence,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    StepCount,
    TrajectoryTransform,
)
from tests.buffer.building import Turning, same
from tests.support.refusals import refuses

ROWS = 30
SAMPLERS: dict[str, Any] = {
    "random": RandomSampler,
    "pass": SamplerWithoutReplacement,
    "prioritized": lambda: PrioritizedSampler(alpha=0.7, beta=0.5),
    "slices": lambda: SliceSampler(slice_len=2, traj_key="episode"),
    "slice pass": lambda: SliceSamplerWithoutReplacement(slice_len=2, traj_key="episode"),
    "sequential": lambda: SliceSampler(slice_len=2, traj_key="episode", draw="sequential"),
}


def rows(start: int, count: int) -> TensorDict:
    number = torch.arange(start, start + count)
    return TensorDict({"id": number, "episode": number // 5}, [count])


def make(
    sampler: Any, prefetch: int | None, seed: int = 0, filled: int = ROWS, **options: Any
) -> ReplayBuffer:
    rb = ReplayBuffer(
        storage=LazyTensorStorage(ROWS),
        sampler=sampler(),
        batch_size=4,
        prefetch=prefetch,
        generator=torch.Generator().manual_seed(seed),
        **options,
    )
    if filled:
        rb.extend(rows(0, filled))
    return rb


class Fails:
    """A transform that raises an error while it is on."""

    on = False

    def __call__(self, batch: TensorDict) -> TensorDict:
        if self.on:
            raise ArithmeticError("on request")
        return batch


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return set(one) == set(other) and all(equal(one[key], other[key]) for key in one)
    return bool(one == other)


@pytest.mark.pitfall("RD3")
@pytest.mark.parametrize("way", ["directory", "dict", "pickle", "copy"])
@pytest.mark.parametrize("kind", SAMPLERS)
def test_saved_state_is_that_of_a_buffer_without_prefetch(
    kind: str, way: str, tmp_path: Path
) -> None:
    ahead, plain = make(SAMPLERS[kind], 3), make(SAMPLERS[kind], None)
    for turn in range(12):
        for _ in range(turn % 4 + 1):
            assert ahead.sample()["id"].equal(plain.sample()["id"])
        if way == "directory":
            ahead.dumps(tmp_path)
            loaded = make(SAMPLERS[kind], turn % 3, 1)
            loaded.loads(tmp_path)
        elif way == "dict":
            loaded = make(SAMPLERS[kind], turn % 3, 1)
            loaded.load_state_dict(ahead.state_dict())
        else:
            loaded = pickle.loads(pickle.dumps(ahead)) if way == "pickle" else copy.deepcopy(ahead)
        assert ahead.stats()["prefetch_queue_size"] == 0
        assert equal(loaded.sampler.state_dict(), plain.sampler.state_dict())
        assert equal(loaded.state_dict()["_rng"], plain.state_dict()["_rng"])
        more = rows(100 * turn, 5)
        for buffer in (ahead, plain):
            if turn % 3 == 1:
                buffer.extend(more)
            elif turn % 3 == 2 and buffer.sampler.prioritized:
                buffer.update_priority(torch.arange(4), torch.arange(4.0) + turn)
    assert ahead.sample()["id"].equal(plain.sample()["id"])
    ahead.shutdown()
    assert equal(ahead.sampler.state_dict(), plain.sampler.state_dict())
    for name in ("_sampler", "_rng"):
        assert equal(ahead.state_dict()[name], plain.state_dict()[name])


@pytest.mark.parametrize("kind", ["pass", "slice pass", "sequential"])
def test_writes_end_a_loaded_pass_whose_first_batch_failed(kind: str) -> None:
    fails = Fails()
    ahead, plain = make(SAMPLERS[kind], 3, transform=fails), make(SAMPLERS[kind], None)
    plain.sample()
    state = plain.state_dict()
    for buffer in (ahead, plain):
        buffer.load_state_dict(state)
    fails.on = True
    refuses(ArithmeticError, "on request", ahead.sample)
    fails.on = False
    for buffer in (ahead, plain):
        buffer.extend(rows(ROWS, 5))
    assert equal(ahead.state_dict()["_sampler"], plain.state_dict()["_sampler"])
    assert ahead.sample()["id"].equal(plain.sample()["id"])
    ahead.shutdown()


def test_write_over_a_failed_window_undoes_all_draws() -> None:
    ahead, plain = make(SAMPLERS["slices"], 3), make(SAMPLERS["slices"], None)
    failing = iter([True])

    def fails(batch: TensorDict) -> TensorDict:
        if next(failing, False):
            raise ArithmeticError("on request")
        return batch

    ahead.append_transform(fails)
    while True:  # one of the batches that are drawn ahead fails
        try:
            ahead.sample()
        except ArithmeticError:
            break
        plain.sample()
    for buffer in (ahead, plain):
        buffer.extend(rows(ROWS, ROWS))
    for _ in range(4):
        assert ahead.sample()["id"].equal(plain.sample()["id"])
    ahead.shutdown()


def test_numbers_of_other_code_are_never_drawn_twice() -> None:
    rb, generator = make(RandomSampler, 2), torch.Generator()
    rb.set_rng(generator.manual_seed(0))
    rb.sample()
    seen = torch.rand(4, generator=generator)
    state = generator.get_state()
    rb.state_dict()
    assert torch.equal(generator.get_state(), state)
    assert not torch.equal(torch.rand(4, generator=generator), seen)
    rb.shutdown()


def check_rest_of_pass(rb: ReplayBuffer, seen: list[torch.Tensor]) -> None:
    """The buffer, and a copy of its state, draw the rows of the pass that were not seen."""
    other = make(SamplerWithoutReplacement, None, 1)
    other.load_state_dict(rb.state_dict())
    for buffer in (rb, other):
        rest = [batch["id"] for batch in buffer]
        assert sorted(torch.cat([*seen, *rest]).tolist()) == list(range(ROWS))
    rb.shutdown()


@pytest.mark.parametrize("size", [3, 7])
def test_batches_of_another_size_leave_every_row_once_in_the_pass(size: int) -> None:
    rb = make(SamplerWithoutReplacement, 2)
    seen = [rb.sample()["id"], rb.sample(size)["id"]]
    check_rest_of_pass(rb, seen)


@pytest.mark.parametrize(("kind", "batches"), [("pass", 7), ("slice pass", 2)])
def test_undelivered_end_of_a_pass_comes_first_in_the_next_pass(kind: str, batches: int) -> None:
    rb = make(SAMPLERS[kind], 1)
    seen = [rb.sample()["id"] for _ in range(batches)]
    seen.append(rb.sample(2)["id"])  # of the next pass
    rb.state_dict()
    found = torch.cat([*seen, *(batch["id"] for batch in rb)])
    each = found if kind == "pass" else found[::2] // 5
    assert set(torch.bincount(each).tolist()) == {2}
    rb.shutdown()


@pytest.mark.parametrize("prefetch", [None, 2])
def test_failed_batches_return_to_the_pass_at_a_save(prefetch: int | None) -> None:
    fails = Fails()
    rb = make(SamplerWithoutReplacement, prefetch, transform=fails)
    seen = [rb.sample()["id"]]
    fails.on = True
    while fails.on:  # up to two batches are finished already
        try:
            seen.append(rb.sample()["id"])
        except ArithmeticError:
            fails.on = False
    check_rest_of_pass(rb, seen)


@pytest.mark.parametrize("kind", ["pass", "slice pass", "sequential"])
def test_a_failed_load_keeps_the_pass(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead, plain = make(SAMPLERS[kind], 3), make(SAMPLERS[kind], None)
    state = plain.state_dict()
    for buffer in (ahead, plain):
        buffer.sample()

    def fails(*_: Any, **__: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(LazyTensorStorage, "load_content", fails)
        with pytest.raises(MemoryError):
            ahead.load_state_dict(state)
    assert equal(ahead.state_dict()["_sampler"], plain.state_dict()["_sampler"])
    assert ahead.sample()["index"].equal(plain.sample()["index"]) or kind == "slice pass"
    ahead.shutdown()


def test_custom_samplers_go_back_by_their_state() -> None:
    rb = make(Turning, 2)
    assert rb.sample()["id"].tolist() == [0, 1, 2, 3]
    state = rb.state_dict()
    assert state["_sampler"]["at"] == 4
    for _ in range(2):
        assert rb.sample()["id"].tolist() == [4, 5, 6, 7]
        rb.load_state_dict(state)
    rb.sample()
    rb.extend(rows(30, 1))  # which the token does not know
    assert rb.state_dict()["_sampler"]["at"] == 16
    rb.shutdown()


def saved_draw(index: torch.Tensor, *, ran_out: bool = False) -> dict[str, Any]:
    """Return a draw as earlier releases saved it."""
    return {
        "index": index,
        "anchors": index,
        "info": [],
        "ran_out": ran_out,
        "size": len(index),
        "since": 0,
        "random": None,
    }


@pytest.mark.parametrize("kind", ["pass", "slice pass", "sequential"])
def test_draws_in_checkpoints_of_earlier_releases_come_first(kind: str) -> None:
    rb = make(SAMPLERS[kind], None)
    first = rb.sample()["id"]
    undelivered = [rb.sample()["index"] for _ in range(2)]
    state = {**rb.state_dict(), "_prefetch_state": [saved_draw(one) for one in undelivered]}
    seen = [first]
    for prefetch in (None, 2):
        other = make(SAMPLERS[kind], prefetch, 1)
        other.load_state_dict(state)
        found = [other.sample()["id"] for _ in range(2)]
        if kind != "slice pass":  # where a window is drawn within each episode
            assert torch.equal(torch.cat(found), torch.cat(undelivered))
        if kind == "pass":
            rest = [batch["id"] for batch in other]
            assert sorted(torch.cat([*seen, *found, *rest]).tolist()) == list(range(ROWS))
        elif kind == "slice pass":
            episodes = torch.cat([first, *found])[::2] // 5
            assert sorted(episodes.tolist()) == list(range(6))
        other.shutdown()


@pytest.mark.parametrize(("kind", "batches"), [("pass", 7), ("slice pass", 2)])
def test_draws_of_two_passes_in_checkpoints_of_earlier_releases(kind: str, batches: int) -> None:
    rb, other = make(SAMPLERS[kind], None), make(SAMPLERS[kind], None, 1)
    for _ in range(batches):
        rb.sample()
    last, following = rb.sample(), rb.sample()["index"]
    draws = [saved_draw(last["index"], ran_out=True), saved_draw(following)]
    other.load_state_dict({**rb.state_dict(), "_prefetch_state": draws})
    assert torch.equal(other.sample()["episode"], last["episode"])
    assert other.sampler.ran_out
    found = torch.cat([batch["id"] for batch in other])
    assert len(found) == (ROWS if kind == "pass" else 12)
    assert len(found.unique()) == len(found)


def test_draws_of_members_return_to_their_passes() -> None:
    def made(prefetch: int | None) -> ReplayBufferEnsemble:
        members = [make(SamplerWithoutReplacement, None, seed) for seed in range(2)]
        return ReplayBufferEnsemble(
            *members,
            sample_from_all=True,
            batch_size=8,
            prefetch=prefetch,
            generator=torch.Generator().manual_seed(4),
        )

    ahead, plain = made(2), made(None)
    for turn in range(9):
        assert ahead.sample()["id"].equal(plain.sample()["id"])
        if turn % 3 == 1:
            one, other = ahead.state_dict(), plain.state_dict()
            for name in one["_members"]:
                assert equal(one["_members"][name]["sampler"], other["_members"][name]["sampler"])
            assert equal(one["_own"], other["_own"])
    state, batch = plain.state_dict(), plain.sample()
    later = plain.state_dict()
    draws = [
        {"member": member, "draws": [saved_draw(batch["index", "index"][member])]}
        for member in range(2)
    ]
    later["_own"][""]["prepared"] = [
        {"members": [0, 1], "rows": 4, "size": 8, "ran_out": False, "parts": draws}
    ]
    ahead.load_state_dict(later)
    assert ahead.sample()["id"].equal(batch["id"])
    ahead.load_state_dict(state)
    assert ahead.sample()["id"].equal(batch["id"])
    ahead.shutdown()


@pytest.mark.parametrize("size", [None, 6])
@pytest.mark.parametrize("options", [{"measure": Coverage(1.0)}, {"draw": "round_robin"}])
def test_failed_draws_of_episodes_are_undone_by_a_save(
    options: dict[str, Any], size: int | None
) -> None:
    """A Coverage does not count them, and round robin slices begin with their first episode."""
    fails = Fails()
    rb = make(lambda: SliceSampler(slice_len=2, **options), None, transform=fails)
    fails.on = True
    refuses(ArithmeticError, "on request", rb.sample)
    fails.on = False
    if size is not None:
        rb.sample(size)
    rb.state_dict()
    if "draw" in options:
        assert rb.sample()["episode"].tolist() == [0, 0, 1, 1]
    else:
        with rb.storage.lock:
            assert rb.storage.indexes.data().draws.sum() == (size or 0) // 2


# -- batches drawn ahead, and transforms and writes after them ------------------------------------


def episodes(count: int, start: int = 0) -> TensorDict:
    """Episodes of ten rows that reach their number as a goal."""
    number = torch.arange(start, start + count)
    goal = number.float()[:, None]
    after = {"achieved": goal + 1, "goal": goal * 0, "reward": goal}
    after["done"] = (number % 10 == 9)[:, None]
    return TensorDict({"id": number, "goal": goal * 0, "next": after}, [count])


def drawn_ahead(sampler: Any, **options: Any) -> ReplayBuffer:
    """Make a buffer of a hundred rows, with three batches that are drawn and not delivered."""
    rb = ReplayBuffer(
        storage=LazyTensorStorage(100),
        sampler=sampler(),
        batch_size=24,
        prefetch=3,
        generator=torch.Generator().manual_seed(0),
        **options,
    )
    rb.extend(episodes(100))
    rb.sample()
    assert rb.stats()["prefetch_queue_size"] == 3
    return rb


@pytest.mark.parametrize(
    ("sampler", "transform"),
    [
        (RandomSampler, HindsightGoal(0.5, achieved="achieved", goal="goal")),
        (lambda: SliceSampler(slice_len=4), TrajectoryTransform(lambda episode: episode)),
        (lambda: SliceSampler(slice_len=12, strict_length=False), None),
        (lambda: SliceSampler(slice_len=4, span=True), None),
    ],
    ids=["goals", "edited", "short", "span"],
)
def test_a_save_with_prefetched_batches_gives_the_same_batches(
    sampler: Any, transform: Any, tmp_path: Path
) -> None:
    """Also where transforms draw too, and where batches have fewer rows than were asked for."""
    buffer, other = (drawn_ahead(sampler, transform=transform) for _ in range(2))
    other.sample()
    buffer.dumps(tmp_path)
    other.loads(tmp_path)
    for _ in range(6):
        same(buffer.sample(), other.sample())


def loaded(buffer: ReplayBuffer) -> ReplayBuffer:
    other = drawn_ahead(lambda: SliceSampler(slice_len=8))
    other.load_state_dict(buffer.state_dict())
    return other


def transformed(buffer: ReplayBuffer) -> ReplayBuffer:
    return buffer.append_transform(StepCount())


@pytest.mark.parametrize(
    ("options", "change"),
    [
        ({"sampler": lambda: SliceSampler(slice_len=8)}, loaded),
        ({"sampler": lambda: SliceSampler(slice_len=8)}, transformed),
        ({"sampler": RandomSampler, "sample_unit": Sequence(length=8)}, transformed),
    ],
    ids=["loaded slices", "slices", "sequences"],
)
def test_windows_drawn_ahead_do_not_cross_the_seam_of_a_later_write(
    options: dict[str, Any], change: Callable[[ReplayBuffer], ReplayBuffer]
) -> None:
    for start in range(5, 100, 10):
        buffer = change(drawn_ahead(**options))
        buffer.extend(episodes(start, 100))
        for _ in range(3):
            windows = buffer.sample().reshape(-1, 8)
            follows = windows["id"].diff(dim=1) == 1
            if "sample_unit" in options:
                follows |= ~windows["validity_mask"][:, 1:]
            assert follows.all()


def test_sequential_pass_continues_after_returned_windows() -> None:
    buffer = drawn_ahead(lambda: SliceSampler(slice_len=4, draw="sequential"))
    buffer.append_transform(StepCount())
    buffer.extend(episodes(10, 100))  # over windows that were delivered, and one that was not
    assert buffer.sample()["id"][::4].tolist() == [30, 34, 40, 44, 50, 54]
