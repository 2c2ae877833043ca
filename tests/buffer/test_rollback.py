"""A save with prefetched batches: all is as if they had never been drawn."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    Coverage,
    LazyTensorStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
)
from tests.buffer.building import Turning

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


def make(sampler: Any, prefetch: int | None, seed: int = 0, filled: int = ROWS) -> ReplayBuffer:
    rb = ReplayBuffer(
        storage=LazyTensorStorage(ROWS),
        sampler=sampler(),
        batch_size=4,
        prefetch=prefetch,
        generator=torch.Generator().manual_seed(seed),
    )
    if filled:
        rb.extend(rows(0, filled))
    return rb


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
    ahead.shutdown()


@pytest.mark.parametrize("kind", SAMPLERS)
def test_state_after_a_shutdown_is_that_of_a_buffer_without_prefetch(kind: str) -> None:
    ahead, plain = make(SAMPLERS[kind], 3), make(SAMPLERS[kind], None)
    for _ in range(3):
        assert ahead.sample()["id"].equal(plain.sample()["id"])
    ahead.shutdown()
    for name in ("_sampler", "_rng"):
        assert equal(ahead.state_dict()[name], plain.state_dict()[name])


@pytest.mark.parametrize("kind", ["pass", "slice pass", "sequential"])
def test_writes_end_a_loaded_pass_whose_first_batch_failed(kind: str) -> None:
    ahead, plain, failing = make(SAMPLERS[kind], 3), make(SAMPLERS[kind], None), [True]

    def fails(batch: TensorDict) -> TensorDict:
        if failing[0]:
            raise ArithmeticError("on request")
        return batch

    plain.sample()
    state = plain.state_dict()
    for buffer in (ahead, plain):
        buffer.load_state_dict(state)
    ahead.append_transform(fails)
    with pytest.raises(ArithmeticError):
        ahead.sample()
    failing[0] = False
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


@pytest.mark.parametrize("size", [3, 7])
def test_batches_of_another_size_leave_every_row_once_in_the_pass(size: int) -> None:
    rb = make(SamplerWithoutReplacement, 2)
    seen = [rb.sample()["id"], rb.sample(size)["id"]]
    other = make(SamplerWithoutReplacement, None, 1)
    other.load_state_dict(rb.state_dict())
    for buffer in (rb, other):
        rest = [batch["id"] for batch in buffer]
        assert sorted(torch.cat([*seen, *rest]).tolist()) == list(range(ROWS))
    rb.shutdown()


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


def test_failed_batches_return_to_the_pass_at_a_save() -> None:
    for prefetch in (None, 2):
        rb, failing = make(SamplerWithoutReplacement, prefetch), [False]

        def fails(batch: TensorDict, failing: list[bool] = failing) -> TensorDict:
            if failing[0]:
                raise ArithmeticError("on request")
            return batch

        rb.append_transform(fails)
        seen = [rb.sample()["id"]]
        failing[0] = True
        while failing[0]:  # up to two batches are finished already
            try:
                batch = rb.sample()
            except ArithmeticError:
                failing[0] = False
            else:
                seen.append(batch["id"])
        other = make(SamplerWithoutReplacement, None, 1)
        other.load_state_dict(rb.state_dict())
        for buffer in (rb, other):
            rest = [batch["id"] for batch in buffer]
            assert sorted(torch.cat([*seen, *rest]).tolist()) == list(range(ROWS))
        rb.shutdown()


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
def test_failed_draws_of_episodes_are_undone_by_a_save(size: int | None) -> None:
    """A Coverage does not count them, and round robin slices begin with their first episode."""
    for sampler in (Coverage(1.0), "round_robin"):
        options = {"draw": sampler} if sampler == "round_robin" else {"measure": sampler}
        rb = make(lambda options=options: SliceSampler(slice_len=2, **options), None)
        failing = [True]

        def fails(batch: TensorDict, failing: list[bool] = failing) -> TensorDict:
            if failing[0]:
                raise ArithmeticError("on request")
            return batch

        rb.append_transform(fails)
        with pytest.raises(ArithmeticError):
            rb.sample()
        failing[0] = False
        if size is not None:
            rb.sample(size)
        rb.state_dict()
        with rb.storage.lock:
            draws = rb.storage.indexes.data().draws
        if sampler == "round_robin":
            assert rb.sample()["episode"].tolist() == [0, 0, 1, 1]
        else:
            assert draws.sum() == (size or 0) // 2
