"""Compare classes and functions with those of the same names in TorchRL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import replaykit
from replaykit import (
    HERReplayBuffer,
    LazyTensorStorage,
    OfflineToOnlineReplayBuffer,
    PrioritizedSampler,
    ReplayBuffer,
    TensorDictReplayBuffer,
    prefill_replay_buffer,
)
from replaykit.datasets import dataset, load_dataset, register_dataset


def peers() -> Any:
    return pytest.importorskip("torchrl.data")


pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the peer's imports

PACKAGES = {"replaykit": lambda: replaykit, "torchrl": peers}
ENDS = (4, 9, 11)
"""Episodes of 5, 5 and 2 rows, and 3 rows of an open one."""
EPISODE = [(0, 4)] * 5 + [(5, 9)] * 5 + [(10, 11)] * 2 + [(12, 14)] * 3


def reached(rows: Any) -> torch.Tensor:
    return (rows["achieved_goal"] == rows["desired_goal"]).float() * 2 - rows["number"][:, None]


def goal_rows() -> TensorDict:
    number = torch.arange(15)
    at, goal = number[:, None] * 1.0, torch.full((15, 1), 99.0)
    done = torch.isin(number, torch.tensor(ENDS))[:, None]
    after = {
        "desired_goal": goal.clone(),
        "reward": torch.zeros(15, 1),
        "done": done,
        "terminated": done,
    }
    return TensorDict(
        {"number": number, "achieved_goal": at, "desired_goal": goal, "next": after}, [15]
    )


def goals_of(strategy: str, row: int) -> list[int]:
    first, last = EPISODE[row]
    if strategy == "random":
        return list(range(15))
    return {
        "future": list(range(row, last + 1)),
        "final": [last],
        "episode": list(range(first, last + 1)),
    }[strategy]


@pytest.mark.parametrize("strategy", ["future", "final", "episode", "random"])
@pytest.mark.parametrize("package", PACKAGES)
def test_the_first_rows_get_goals_with_the_law_of_the_strategy(package: str, strategy: str) -> None:
    library = PACKAGES[package]()
    torch.manual_seed(0)
    rb = library.HERReplayBuffer(
        reached,
        her_ratio=0.75,
        strategy=strategy,
        storage=library.LazyTensorStorage(20),
        batch_size=64,
    )
    rb.extend(goal_rows())
    counts = np.zeros((15, 15))
    for _ in range(120):
        batch = rb.sample()
        goals = batch["desired_goal"].flatten()
        assert (goals[48:] == 99).all()
        assert (batch["next", "desired_goal"].flatten() == goals).all()
        assert (batch["next", "reward"][48:] == 0).all()
        first = batch[:48]
        assert torch.equal(first["next", "reward"], reached(first))
        np.add.at(counts, (first["number"].numpy(), goals[:48].long().numpy()), 1)
    statistic, freedom = 0.0, 0
    for row, found in enumerate(counts):
        allowed = goals_of(strategy, row)
        assert found.sum() == found[allowed].sum() > 100
        expected = found.sum() / len(allowed)
        statistic += ((found[allowed] - expected) ** 2 / expected).sum()
        freedom += len(allowed) - 1
    assert statistic <= freedom + 4 * np.sqrt(2 * max(freedom, 1))
    assert (rb.storage[:]["desired_goal"][:15] == 99).all()


def test_other_keys_and_transforms_and_saves_of_goals(tmp_path: Path) -> None:
    def make() -> HERReplayBuffer:
        return HERReplayBuffer(
            lambda rows: (rows["goals", "have"] == rows["goals", "want"]).flatten().float(),
            her_ratio=1.0,
            strategy="final",
            goal_key=("goals", "want"),
            achieved_goal_key=("goals", "have"),
            reward_key="score",
            transform=lambda data: data.set("twice", data["score"] * 2),
            storage=LazyTensorStorage(20),
            batch_size=9,
            generator=torch.Generator().manual_seed(0),
        )

    rb, other = make(), make()
    number = torch.arange(6)
    goals = {"have": number[:, None] * 1.0, "want": torch.full((6, 1), 99.0)}
    done = (number % 3 == 2)[:, None]
    rb.extend(TensorDict({"goals": goals, "score": torch.zeros(6, 1), "next": {"done": done}}, [6]))
    rb.sample()
    rb.dumps(tmp_path)
    other.loads(tmp_path)
    batch = rb.sample()
    assert (batch["goals", "want"] == batch["goals", "have"] // 3 * 3 + 2).all()
    assert torch.equal(batch["score"], (batch["goals", "have"] % 3 == 2).float())
    assert torch.equal(batch["twice"], batch["score"] * 2)
    assert (batch == other.sample()).all()
    none = HERReplayBuffer(reached, her_ratio=0.0, storage=LazyTensorStorage(20))
    none.extend(goal_rows())
    assert (none.sample(9)["desired_goal"] == 99).all()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"her_ratio": 1.5}, ValueError),
        ({"strategy": "best"}, ValueError),
        ({"end_key": ("next", "over")}, ValueError),
        ({"reward_fn": 3}, TypeError),
    ],
)
def test_invalid_hindsight_is_refused(arguments: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        HERReplayBuffer(**{"reward_fn": reached, **arguments})


def test_missing_goals_are_named() -> None:
    rb = HERReplayBuffer(reached, storage=LazyTensorStorage(20))
    rb.extend(goal_rows().exclude("desired_goal"))
    with pytest.raises(KeyError, match="desired_goal"):
        rb.sample(4)


# -- offline to online ----------------------------------------------------------------------------


def plain(count: int, value: float) -> TensorDict:
    return TensorDict({"x": torch.full((count,), value)}, [count])


@pytest.mark.parametrize("fraction", [0.01, 0.3, 0.5, 0.77])
def test_batches_have_the_counts_of_torchrl(fraction: float) -> None:
    made = []
    for load in PACKAGES.values():
        library = load()
        offline = library.ReplayBuffer(storage=library.LazyTensorStorage(100))
        offline.extend(plain(100, 0.0))
        rb = library.OfflineToOnlineReplayBuffer(
            offline, online_capacity=50, offline_fraction=fraction, batch_size=10,
            transform=lambda data: data.set("y", data["x"] + 1),
        )  # fmt: skip
        found = [rb.sample()["x"].tolist()]
        rb.extend(plain(7, 1.0))
        found += [rb.sample(size)["x"].tolist() for size in (None, 1, 5, 32)]
        for step in (0, 3, 7, 10, 12):
            rb.anneal(step, 10)
            found += [rb.sample()["y"].tolist(), [rb.offline_fraction]]
        found += [[len(rb)], [len(rb.online_buffer), len(rb.offline_buffer)]]
        made.append(found)
    assert made[0] == made[1]


def test_a_joined_buffer_saves_and_sets_priorities(tmp_path: Path) -> None:
    def make(seed: int) -> OfflineToOnlineReplayBuffer:
        offline = ReplayBuffer(
            storage=LazyTensorStorage(20), sampler=PrioritizedSampler(alpha=1.0, beta=1.0)
        )
        offline.extend(plain(20, 0.0))
        return OfflineToOnlineReplayBuffer(
            offline, online_storage=LazyTensorStorage(9), batch_size=8
        )

    rb, other = make(0), make(1)
    rb.extend(plain(9, 1.0))
    rb.anneal(1, 2)
    batch = rb.sample()
    assert batch["index", "buffer_ids"].tolist() == [0] * 2 + [1] * 6
    batch["td_error"] = torch.ones(8)
    rb.update_tensordict_priority(batch)
    rb.dumps(tmp_path)
    other.loads(tmp_path)
    assert (len(other), other.offline_fraction) == (29, 0.25)
    assert other.sample()["x"].tolist() == [0] * 2 + [1] * 6
    assert "offline_fraction=0.250" in repr(other)


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"online_capacity": 5, "online_storage": LazyTensorStorage(5)},
        {"online_capacity": 5, "offline_fraction": 1.0},
        {"online_capacity": 5, "root": "x"},
        {"online_capacity": 5, "offline_dataset": "toy:a"},
    ],
)
def test_invalid_joined_buffers_are_refused_as_in_torchrl(
    package: str, arguments: dict[str, Any]
) -> None:
    library = PACKAGES[package]()
    with pytest.raises(ValueError):
        library.OfflineToOnlineReplayBuffer(
            **{"offline_dataset": library.ReplayBuffer(), **arguments}
        )
    rb = OfflineToOnlineReplayBuffer(ReplayBuffer(), online_capacity=5)
    with pytest.raises(ValueError, match="batch_size"):
        rb.sample()


@pytest.mark.parametrize(("count", "copied"), [(None, 30), (7, 7), (99, 30), (0, 0)])
def test_rows_are_copied_once_and_in_order(count: int | None, copied: int) -> None:
    generator = torch.Generator().manual_seed(0)
    data = TensorDictReplayBuffer(storage=LazyTensorStorage(30), generator=generator)
    data.extend(TensorDict({"x": torch.arange(30)}, [30]))
    rb = ReplayBuffer(storage=LazyTensorStorage(100))
    elsewhere = torch.get_rng_state()
    assert prefill_replay_buffer(rb, data, count, chunk_size=4) is rb
    assert torch.equal(torch.get_rng_state(), elsewhere)
    assert len(rb) == copied
    if copied:
        assert list(rb[:].keys()) == ["x"]
        assert (rb[:]["x"].diff() > 0).all()
    with pytest.raises(ValueError, match="n_samples"):
        prefill_replay_buffer(rb, data, -1)


# -- registered data sets -------------------------------------------------------------------------


class Toy:
    """A data set that remembers its arguments."""

    def __init__(self, dataset_id: str, **kwargs: Any) -> None:
        self.dataset_id, self.options = dataset_id, kwargs


@pytest.fixture(autouse=True)
def own_register(monkeypatch: Any) -> None:
    monkeypatch.setattr(dataset, "_REGISTERED", {})


def test_registered_names_are_constructed() -> None:
    register_dataset(" Toy ", Toy)
    register_dataset("late", f"{__name__}:Toy")
    assert load_dataset("toy:a:b").dataset_id == "a:b"
    found: Any = load_dataset("late:x", 8, root="y")
    assert found.options == {"batch_size": 8, "root": "y"}
    with pytest.raises(KeyError, match="'toy'"):
        register_dataset("TOY", Toy)
    with pytest.raises(KeyError, match="'d4rl'"):
        register_dataset("d4rl", Toy)
    register_dataset("d4rl", Toy, replace=True)
    assert isinstance(load_dataset("d4rl:a"), Toy)
    data = ReplayBuffer(storage=LazyTensorStorage(4))
    data.extend(plain(4, 2.0))
    register_dataset("mine", lambda dataset_id, batch_size: data)
    rb = OfflineToOnlineReplayBuffer("mine:a", online_capacity=3, batch_size=2)
    assert rb.offline_buffer is data
    assert len(prefill_replay_buffer(ReplayBuffer(storage=LazyTensorStorage(9)), "mine:a")) == 4


@pytest.mark.parametrize("package", ["replaykit.datasets", "torchrl.data.datasets"])
@pytest.mark.parametrize(
    ("prefix", "dataset", "error"),
    [
        ("", Toy, ValueError),
        ("a:b", Toy, ValueError),
        ("a", 3, TypeError),
        ("a", "module", ValueError),
        ("a", ":name", ValueError),
    ],
)
def test_invalid_registrations_are_refused_as_in_torchrl(
    package: str, prefix: str, dataset: Any, error: type[Exception]
) -> None:
    with pytest.raises(error):
        pytest.importorskip(package).register_dataset(prefix, dataset)
