"""StalenessAwareSampler: exact laws, what is followed and at what cost, state."""

from __future__ import annotations

import copy
import itertools
import os
import pickle
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    LaneWriter,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    RoundRobinWriter,
    StackFrames,
    StalenessAwareSampler,
    StepCount,
    TensorDictMaxValueWriter,
    TensorStorage,
)
from replaykit.samplers.policy_versions import VersionColumn
from tests.samplers.chi_square import chi_square_p
from tests.support.refusals import refuses


def rows(versions: Any, key: str = "policy_version") -> TensorDict:
    versions = torch.as_tensor(versions)
    number = torch.arange(versions.shape[0])
    return TensorDict({key: versions, "x": number.float()}, [versions.shape[0]])


def stale(versions: Any = (), capacity: int = 50, **options: Any) -> ReplayBuffer:
    names = ("max_staleness", "staleness_weight_fn", "version_key")
    sampler = StalenessAwareSampler(**{n: options.pop(n) for n in names if n in options})
    sampler.consumer_version = options.pop("consumer_version", 0)
    rb = ReplayBuffer(
        storage=options.pop("storage") if "storage" in options else LazyTensorStorage(capacity),
        sampler=sampler,
        generator=torch.Generator().manual_seed(options.pop("seed", 0)),
        **options,
    )
    if len(versions):
        rb.extend(rows(versions))
    return rb


def drawn(rb: ReplayBuffer, count: int) -> list[int]:
    """What the sampler draws, without the way of a batch, which takes ten times as long."""
    index: list[int] = rb.sampler.sample(rb.storage, count)[0].tolist()
    return index


def fits(found: Counter[Any], law: dict[Any, float]) -> None:
    """Counts agree with probabilities; the seed is fixed, so that it cannot flicker."""
    total = sum(found.values())
    assert set(found) <= set(law)
    observed = [found[key] for key in law]
    assert chi_square_p(observed, [total * p for p in law.values()]) > 0.001


# -- the law --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{}, {"staleness_weight_fn": lambda s: 1e308 / (s + 1)}],  # their sum exceeds a float
    ids=["default", "large"],
)
def test_draws_follow_the_weights(options: dict[str, Any]) -> None:
    versions = [0, 1, 1, 4, 4, 4, 5, 5]
    rb = stale(versions, consumer_version=5, **options)
    weights = np.array([1 / (5 - v + 1) for v in versions])
    found = Counter(rb.sample(20_000)["index"].tolist())  # more than there are: independent
    fits(found, dict(enumerate(weights / weights.sum())))


def successive(weights: dict[int, float], count: int) -> dict[tuple[int, ...], float]:
    """Probability of each ordered draw without replacement, from the definition."""
    law = {}
    for order in itertools.permutations(weights, count):
        left, p = sum(weights.values()), 1.0
        for item in order:
            p *= weights[item] / left
            left -= weights[item]
        law[order] = p
    return law


@pytest.mark.parametrize("count", [2, 3])
def test_small_batches_are_drawn_without_replacement(count: int) -> None:
    versions = [3, 0, 2, 3, 1]
    rb = stale(versions, consumer_version=3)
    weights = {i: 1 / (3 - v + 1) for i, v in enumerate(versions)}
    law = successive(weights, count)
    found = Counter(tuple(drawn(rb, count)) for _ in range(6000))
    fits(found, law)


def test_the_law_is_the_same_where_repeated_draws_are_dropped() -> None:
    """Batches below a quarter of the rows: pairs, of which the versions are counted."""
    versions = [0] * 6 + [1] * 4 + [2] * 3
    rb = stale(versions, consumer_version=2, staleness_weight_fn=lambda s: 4.0 ** (2 - s))
    weights = {i: 4.0**v for i, v in enumerate(versions)}
    law: Counter[tuple[int, int]] = Counter()
    for order, p in successive(weights, 2).items():
        law[tuple(versions[i] for i in order)] += p  # type: ignore[index]
    found = Counter(tuple(versions[i] for i in drawn(rb, 2)) for _ in range(5000))
    fits(found, dict(law))


def test_few_rows_with_most_of_the_weight_come_first() -> None:
    """Where draws again and again hit the same rows, all that are left get a key."""
    versions = [9, 9] + [0] * 98
    weight = lambda s: torch.where(s == 0, 1e9, 1.0)  # noqa: E731
    rb = stale(versions, 100, consumer_version=9, staleness_weight_fn=weight)
    found: Counter[int] = Counter()
    for _ in range(400):
        batch = drawn(rb, 12)
        assert len(set(batch)) == 12
        assert set(batch[:2]) == {0, 1}
        found.update(batch[2:])
    fits(found, dict.fromkeys(range(2, 100), 1 / 98))


@pytest.mark.parametrize("shape", [[6], [6, 1]])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.float32])
def test_versions_of_any_kind(shape: list[int], dtype: torch.dtype) -> None:
    versions = torch.tensor([0, 1, 2, 3, 3, 0]).to(dtype).view(shape)
    rb = stale(versions, consumer_version=4, max_staleness=3)
    batch = rb.sample(4)
    assert sorted(batch["index"].tolist()) == [1, 2, 3, 4]
    assert batch["staleness"].dtype == torch.float32
    assert batch["staleness"].shape == (4,)
    assert batch["staleness"].tolist() == (4 - batch["policy_version"].view(-1).float()).tolist()


def test_max_staleness_excludes_older_rows() -> None:
    rb = stale([0, 5, 6, 7], consumer_version=8, max_staleness=2)
    assert set(rb.sample(500)["index"].tolist()) == {2, 3}
    rb.sampler.max_staleness = 3
    assert set(rb.sample(500)["index"].tolist()) == {1, 2, 3}
    rb.sampler.increment_consumer_version()
    assert set(rb.sample(500)["index"].tolist()) == {2, 3}
    rb.sampler.consumer_version = 30
    assert not rb.can_sample(1)
    refuses(RuntimeError, r"max_staleness=3 with consumer_version=30", rb.sample, 1)
    rb.sampler.max_staleness = -1
    assert set(rb.sample(500)["index"].tolist()) == {0, 1, 2, 3}


def test_zero_weights_exclude_rows_or_raise_error() -> None:
    rb = stale([0, 1], consumer_version=1, staleness_weight_fn=lambda s: torch.zeros_like(s))
    refuses(RuntimeError, "weight of all 2 rows is 0", rb.sample, 1)
    some = stale([0, 0, 1], consumer_version=1, staleness_weight_fn=lambda s: (s == 0).double())
    assert some.sample(1)["index"].tolist() == [2]
    assert some.sample(5)["index"].tolist() == [2] * 5  # 1 row can be drawn: with replacement


@pytest.mark.parametrize(
    "weight",
    [
        lambda s: s[:-1],
        lambda s: s.new_ones(7),
        lambda s: s[:, None],
        lambda s: 1.0,
        lambda s: -torch.ones_like(s),
        lambda s: torch.full_like(s, float("nan")),
        lambda s: torch.full_like(s, float("inf")),
    ],
)
def test_invalid_weights_are_refused(weight: Any) -> None:
    rb = stale([0, 1, 1], consumer_version=1, staleness_weight_fn=weight)
    assert not rb.can_sample(1)
    refuses(ValueError, "staleness_weight_fn", rb.sample, 1)


def test_a_version_that_is_set_in_the_middle_of_a_draw_is_for_the_next_one() -> None:
    """The learner's thread sets it while batches are made ahead."""

    def weight(staleness: torch.Tensor) -> torch.Tensor:
        rb.sampler.increment_consumer_version()  # type: ignore[attr-defined]
        return 1 / (staleness + 1)

    rb = stale([0, 1, 2, 3, 4, 5], consumer_version=5, max_staleness=2, staleness_weight_fn=weight)
    batch = rb.sample(3)
    assert sorted(batch["staleness"].tolist()) == [0, 1, 2]
    assert sorted(batch["policy_version"].tolist()) == [3, 4, 5]
    assert sorted(rb.sample(2)["staleness"].tolist()) == [1, 2]


def test_a_draw_does_not_look_at_all_versions() -> None:
    """Where each row has a version of its own: a draw of 64 of 10^6 takes at most four times as
    long as of 10^4, where a look at each would take hundreds of times."""

    def seconds(count: int) -> float:
        rb = stale(torch.arange(count), count, consumer_version=count)
        rb.sample(64)
        best = float("inf")
        for _ in range(30):
            began = time.perf_counter()
            rb.sample(64)
            best = min(best, time.perf_counter() - began)
        return best

    assert any(seconds(1_000_000) < 4 * seconds(10_000) for _ in range(3))


def test_invalid_arguments_and_columns_are_refused() -> None:
    with pytest.raises(TypeError, match="callable"):
        StalenessAwareSampler(staleness_weight_fn=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="max_staleness as an int"):
        StalenessAwareSampler(max_staleness=1.5)  # type: ignore[arg-type]
    refuses(ValueError, "at least 0, or -1", StalenessAwareSampler, max_staleness=-2)
    with pytest.raises(TypeError, match="consumer_version as an int"):
        StalenessAwareSampler().consumer_version = 1.5  # type: ignore[assignment]
    refuses(TypeError, "no without-replacement variant", StalenessAwareSampler, replacement=False)
    rb = stale(version_key="other")
    refuses(RuntimeError, "Cannot sample from an empty storage", rb.sample, 1)
    rb.extend(rows([0, 1]))
    assert not rb.can_sample(1)
    refuses(KeyError, "other", rb.sample, 1)
    wide = stale()
    wide.extend(TensorDict({"policy_version": torch.zeros(3, 2)}, [3]))
    refuses(ValueError, "one version a row", wide.sample, 1)
    young = stale([1, 2], consumer_version=1)  # 1 / 0
    refuses(ValueError, "negative staleness", young.sample, 1)


def test_nested_keys_lists_and_lanes() -> None:
    nested = stale(version_key=("next", "v"), consumer_version=1, max_staleness=0)
    nested.extend(TensorDict({"next": {"v": torch.tensor([0, 1])}}, [2]))
    assert nested.sample(1)["index"].tolist() == [1]
    listed = stale([0, 1], storage=ListStorage(4), consumer_version=1, max_staleness=0)
    assert listed.sample(1)["policy_version"].tolist() == [1]
    bare = stale(storage=ListStorage(4))
    bare.extend([TensorDict({"x": torch.zeros(())}, [])])
    refuses(KeyError, "policy_version", bare.sample, 1)
    lanes = stale(storage=LazyTensorStorage(12, ndim=2), consumer_version=2, max_staleness=0)
    lanes.extend(TensorDict({"policy_version": torch.tensor([[0, 1, 2], [2, 2, 0]])}, [2, 3]))
    batch = lanes.sample(3)
    assert {tuple(cell) for cell in batch["index"].tolist()} == {(2, 0), (0, 1), (1, 1)}
    assert batch["staleness"].tolist() == [0, 0, 0]
    lanes.extend(TensorDict({"policy_version": torch.full((2, 3), 2)}, [2, 3]))  # goes round
    lanes.extend(TensorDict({"policy_version": torch.full((2, 1), 2)}, [2, 1]))
    cells = {tuple(cell) for cell in lanes.sample(2000)["index"].tolist()}
    version = lanes.storage.column("policy_version")
    assert cells == {tuple(cell) for cell in (version == 2).nonzero().tolist()}


@pytest.mark.pitfall("RD5")
def test_seeded_run_with_lanes_repeats_and_reports_staleness() -> None:
    found = []
    for _ in range(2):
        rb = stale(storage=LazyTensorStorage(40, ndim=2), consumer_version=9, seed=4)
        version = torch.randint(0, 10, (2, 20), generator=torch.Generator().manual_seed(1))
        rb.extend(TensorDict({"policy_version": version}, [2, 20]))
        for _ in range(20):
            batch = rb.sample(7)
            time, lane = batch["index"].unbind(-1)
            assert torch.equal(batch["staleness"], 9.0 - version[lane, time])
            found.append(batch["index"].tolist())
    assert found[:20] == found[20:]


def test_transforms_that_read_the_rows_around() -> None:
    done = torch.zeros(8, 1, dtype=torch.bool)
    done[3] = True
    data = TensorDict(
        {
            "policy_version": torch.tensor([0, 1, 1, 0, 1, 0, 0, 1]),
            "observation": torch.arange(8.0)[:, None],
            "is_init": torch.tensor([1, 0, 0, 0, 1, 0, 0, 0]).bool()[:, None],
            "next": {"observation": torch.arange(1.0, 9.0)[:, None], "done": done},
        },
        [8],
    )
    rb = stale(transform=StackFrames(["observation"], 2), consumer_version=1, max_staleness=0)
    rb.extend(data)
    found = Counter(rb.sample(4000)["index"].tolist())
    fits(found, {1: 0.25, 2: 0.25, 4: 0.25, 7: 0.25})
    assert sorted(rb.sample(4)["index"].tolist()) == [1, 2, 4, 7]
    needy = stale(transform=StepCount(), consumer_version=1, max_staleness=0)
    needy.extend(data)
    assert set(needy.sample(300)["index"].tolist()) <= {1, 2, 4, 7}


# -- what is followed -----------------------------------------------------------------------------


def known(rb: ReplayBuffer) -> dict[int, int]:
    """The version of each element, as the sampler has it."""
    groups = rb.sampler._versions.follow(rb.storage)  # type: ignore[attr-defined]
    elements, versions, counts = groups.state()
    return dict(zip(elements.tolist(), np.repeat(versions, counts).tolist(), strict=True))


def stored(rb: ReplayBuffer) -> dict[int, int]:
    return dict(enumerate(rb.storage.column("policy_version").reshape(-1).tolist()))


MANY = 10**6


@pytest.mark.parametrize("kind", ["ring", "memmap", "lanes", "by stream", "ranked", "reused"])
@pytest.mark.parametrize("seed", range(3))
def test_known_versions_match_stored_versions_after_any_change(
    kind: str, seed: int, tmp_path: Path
) -> None:
    chance = random.Random(f"{kind} {seed}")
    storage: Any = {
        "ring": lambda: LazyTensorStorage(20),
        "memmap": lambda: LazyMemmapStorage(20, scratch_dir=tmp_path / "rows"),
        "lanes": lambda: LazyTensorStorage(24, ndim=2),
        "by stream": lambda: LazyTensorStorage(20, lane_key="lane"),
        "ranked": lambda: LazyTensorStorage(20),
        "reused": lambda: LazyTensorStorage(20),
    }[kind]()
    writer: Any = RoundRobinWriter(track_generations=True)
    if kind == "by stream":
        writer = LaneWriter(4, track_generations=True)
    elif kind == "ranked":
        writer = TensorDictMaxValueWriter(rank_key="x")
    rb = stale(storage=storage, writer=writer, consumer_version=MANY)
    other = ReplayBuffer(storage=storage)

    def data(n: int) -> TensorDict:
        shape = [2, n] if kind == "lanes" else [n]
        few = chance.choice([2, 7, MANY])  # versions that many rows have, or one alone
        version = torch.tensor([chance.randrange(few) for _ in range(torch.Size(shape).numel())])
        leaves = {"policy_version": version.view(shape), "x": torch.rand(shape)}
        if kind == "by stream":
            leaves["lane"] = torch.tensor([chance.randint(0, 4) for _ in range(n)])
        return TensorDict(leaves, shape)

    for _ in range(60):
        turn = chance.random()
        if turn < 0.5 or not len(rb):
            rb.extend(data(chance.randint(1, 9)))
        elif turn < 0.6 and kind in ("ring", "lanes", "memmap"):
            other.extend(data(chance.randint(1, 25)))
        elif turn < 0.65 and kind == "reused":
            at = torch.randperm(len(rb))[:3]
            rb.writer.write_at(at, data(3)[: len(at)])
        elif turn < 0.75:
            rb["policy_version"] = (rb["policy_version"] + 1) % MANY
        elif turn < 0.8:
            rb["x"] = torch.rand_like(rb["x"])
        elif turn < 0.9 and kind not in ("lanes", "ranked"):
            k = chance.randint(1, 5)
            at = torch.tensor([chance.randrange(len(rb)) for _ in range(k)])
            rb.update_if_present(
                index=at,
                generation=rb.writer.generations_of(at),
                patch={"x": torch.rand(k)},
                version_key="policy_version",
                version=torch.tensor([chance.randint(0, 6) for _ in range(k)]),
            )
        elif turn < 0.93:
            rb.empty()
            rb.sampler.consumer_version = MANY
        elif turn < 0.96:
            rb.load_state_dict(rb.state_dict())
        if len(rb) and chance.random() < 0.6:
            assert known(rb) == stored(rb)
            batch = rb.sample(3)
            version = batch["policy_version"].view(-1)
            assert batch["staleness"].tolist() == (float(MANY) - version).tolist()


class Counting(VersionColumn):
    """Counts the rows that are read."""

    read = 0

    def _read(self, storage: Any, elements: Any) -> Any:
        self.read += len(elements)
        return super()._read(storage, elements)


def test_no_draw_looks_at_all_rows() -> None:
    rb = stale(capacity=10_000, writer=RoundRobinWriter(track_generations=True))
    counting = rb.sampler._versions = Counting(("policy_version",))  # type: ignore[attr-defined]
    asked = []

    def weight(staleness: torch.Tensor) -> torch.Tensor:
        asked.append(len(staleness))
        return 1 / (staleness + 1)

    rb.sampler._weight_fn = weight  # type: ignore[attr-defined]
    rb.extend(rows(torch.zeros(10_000, dtype=torch.int64)))
    counting.read = 0
    other = ReplayBuffer(storage=rb.storage)
    for version in range(1, 30):
        (rb if version % 2 else other).extend(rows(torch.full((50,), version)))
        rb.sampler.consumer_version = version
        at = torch.arange(100, 110)
        rb.update_if_present(
            index=at,
            generation=rb.writer.generations_of(at),
            patch={"x": torch.zeros(10)},
            version_key="policy_version",
            version=version,
        )
        rb["x"] = torch.zeros(10_000)
        for _ in range(3):
            rb.sample(64)
    assert counting.read == 29 * 60
    assert len(asked) == 29
    assert max(asked) <= 31


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_mark_update_does_not_hide_rows_of_another_process() -> None:
    """Another process writes as many rows as ``mark_update`` is then named of here."""
    rb = stale([0] * 10, 10, consumer_version=10, shared=True)
    rb.sample(10)
    child = os.fork()
    if not child:
        rb.extend(rows([9, 9, 9]))
        os._exit(0)
    os.waitpid(child, 0)
    rb.mark_update(torch.tensor([5, 6, 7]))
    batch = rb.sample(10)
    assert sorted(batch["policy_version"].tolist()) == [0] * 7 + [9] * 3
    assert batch["staleness"].equal(10.0 - batch["policy_version"])


def test_edits_that_are_remembered_take_no_more_than_the_rows() -> None:
    rb = stale([0] * 500, 500, consumer_version=99, writer=RoundRobinWriter(track_generations=True))
    rb.sample(1)
    for turn in range(20):
        rb.update_if_present(
            index=torch.arange(400),
            generation=torch.zeros(400, dtype=torch.int64),
            patch={"policy_version": torch.full((400,), turn)},
        )
    changes = rb.storage.ledger.log.since(rb.storage.ledger.log._oldest)
    assert changes is not None
    named = sum(len(change.slots) for change in changes if isinstance(change.slots, np.ndarray))
    assert 400 <= named <= 500 + 4096 + 1024
    assert known(rb) == stored(rb)


def test_wrapped_data_and_replaced_storage_are_sampled() -> None:
    rb = stale(storage=TensorStorage(rows([0, 1, 2])), consumer_version=2, max_staleness=0)
    assert rb.sample(1)["index"].tolist() == [2]
    rb.extend(rows([2]))
    assert sorted(rb.sample(2)["index"].tolist()) == [0, 2]
    old = rb.set_storage(LazyTensorStorage(4))
    refuses(RuntimeError, "empty storage", rb.sample, 1)
    rb.extend(rows([0, 2]))
    rb.sampler.consumer_version = 2
    assert rb.sample(1)["index"].tolist() == [1]
    rb.set_storage(old)
    rb.sampler.consumer_version = 2
    assert sorted(rb.sample(2)["index"].tolist()) == [0, 2]


# -- state ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["dumps", "state_dict", "pickle", "deepcopy"])
def test_saved_buffer_continues_with_equal_draws(form: str, tmp_path: Path) -> None:
    """In the middle of writes and patches, and as a buffer goes on that was never saved."""

    def step(rb: ReplayBuffer, seed: int) -> list[Any]:
        chance, found = random.Random(seed), []
        for _ in range(12):
            rb.extend(rows([chance.randint(0, 5) for _ in range(chance.randint(1, 9))]))
            at = torch.tensor(chance.sample(range(len(rb)), 1))
            patched = {"policy_version": torch.tensor([chance.randint(0, 5)])}
            if chance.random() < 0.5:
                rb.update_if_present(
                    index=at, generation=rb.writer.generations_of(at), patch=patched
                )
            if chance.random() < 0.5:
                found.append(rb.sample(min(4, len(rb)))["index"].tolist())
            rb.sampler.increment_consumer_version()
        if seed == 1:  # one that nobody has looked at yet
            rb.update_if_present(
                index=torch.tensor([0, 3]),
                generation=rb.writer.generations_of(torch.tensor([0, 3])),
                patch={"policy_version": torch.tensor([4, 4])},
            )
        return found

    def made(seed: int = 3) -> ReplayBuffer:
        writer = RoundRobinWriter(track_generations=True)
        return stale(capacity=30, writer=writer, consumer_version=6, seed=seed, max_staleness=50)

    whole, rb = made(), made()
    step(whole, 1)
    step(rb, 1)
    again = made(seed=8)
    if form == "dumps":
        rb.dumps(tmp_path / "saved")
        again.loads(tmp_path / "saved")
    elif form == "state_dict":
        again.load_state_dict(rb.state_dict())
    elif form == "pickle":
        again = pickle.loads(pickle.dumps(rb))
    else:
        again = copy.deepcopy(rb)
    assert again.sampler.consumer_version == 18
    wanted = step(whole, 2)
    assert step(again, 2) == wanted
    assert step(rb, 2) == wanted


def test_state_holds_versions_and_parameters() -> None:
    rb = stale([0, 1], consumer_version=4, max_staleness=7)
    state = rb.sampler.state_dict()
    assert (state["consumer_version"], state["max_staleness"]) == (4, 7)
    other = StalenessAwareSampler()
    other.load_state_dict(state)
    assert (other.consumer_version, other.max_staleness) == (4, 7)
    assert repr(other) == "StalenessAwareSampler(max_staleness=7, consumer_version=4)"
    for name, bad in (
        ("consumer_version", "4"),
        ("max_staleness", -2),
        ("_elements", torch.tensor([0, 0])),
        ("_elements", state["_elements"].double()),
        ("_counts", state["_counts"].double()),
        ("_versions", state["_versions"].bool()),
        ("_counts", torch.tensor([2])),
        ("_versions", [1]),
    ):
        refuses(ValueError, "expected", rb.sampler.load_state_dict, {**state, name: bad})
    rb.empty()
    assert rb.sampler.consumer_version == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("capacity", [4, 30])
def test_loading_into_another_capacity_keeps_versions(capacity: int) -> None:
    rb = stale([0, 1, 2, 3, 4, 5], 6, consumer_version=5)
    rb.extend(rows([5, 5]))
    again = stale(capacity=capacity)
    if capacity < 6:
        with pytest.warns(UserWarning, match="2 rows"):
            again.load_state_dict(rb.state_dict())
    else:
        again.load_state_dict(rb.state_dict())
    assert known(again) == stored(again)
