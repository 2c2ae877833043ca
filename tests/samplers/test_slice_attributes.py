"""What slice samplers say of themselves, under the names that TorchRL has for it."""

from __future__ import annotations

import contextlib
import copy
import pickle
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import replaykit
from replaykit import LazyTensorStorage, PrioritizedSliceSampler, ReplayBuffer, SliceSampler

peer_data: Any = pytest.importorskip("torchrl.data")
theirs: Any = pytest.importorskip("torchrl.data.replay_buffers.samplers")

NAMES = (
    "slice_len",
    "num_slices",
    "traj_key",
    "end_key",
    "end_keys",
    "span",
    "strict_length",
    "pad_output",
    "truncated_key",
    "init_key",
    "cache_values",
)

ARGUMENTS: list[dict[str, Any]] = [
    {"slice_len": 3},
    {"num_slices": 2},
    {"num_slices": 2, "traj_key": "episode"},
    {"num_slices": 2, "traj_key": ("collector", "traj_ids")},
    {"num_slices": 2, "end_keys": [("next", "done"), ("next", "truncated")], "traj_key": "episode"},
    {"num_slices": 2, "strict_length": False, "truncated_key": None},
    {"num_slices": 2, "truncated_key": ("next", "cut")},
    {"num_slices": 2, "init_key": None},
    {"num_slices": 2, "init_key": ("collector", "first")},
]

SPANS: list[dict[str, Any]] = [
    {"num_slices": 2, "span": True},
    {"num_slices": 2, "span": 1},
    {"num_slices": 2, "span": (False, 2)},
    {"num_slices": 2, "strict_length": False, "pad_output": True, "cache_values": True},
]


def rows(*ids: str) -> TensorDict:
    number = torch.arange(20)
    ends = (number % 5 == 4).unsqueeze(-1)
    flags = {"done": ends, "truncated": ends, "terminated": torch.zeros_like(ends)}
    columns: dict[str, Any] = {"step": number, "next": TensorDict(flags, [20])}
    if "episode" in ids:
        columns["episode"] = number // 5
    if "collector" in ids:
        columns["collector"] = TensorDict({"traj_ids": number // 5}, [20])
    return TensorDict(columns, [20])


def said(sampler: Any) -> dict[str, Any]:
    return {name: getattr(sampler, name) for name in NAMES}


@pytest.mark.parametrize("ids", [(), ("episode",), ("episode", "collector")], ids=str)
@pytest.mark.parametrize("name", ["SliceSampler", "SliceSamplerWithoutReplacement"])
def test_attributes_are_those_of_torchrl_before_and_after_data_came(
    name: str, ids: tuple[str, ...]
) -> None:
    torch.manual_seed(0)  # one draw in hundreds of TorchRL's with span= is an IndexError
    every = [*ARGUMENTS, *(SPANS if name == "SliceSampler" else [])]
    for given in every:
        wanted = {given.get("traj_key", "episode")} - {"episode" if "episode" in ids else None}
        if wanted - {("collector", "traj_ids") if "collector" in ids else "episode"}:
            continue  # a key that is not stored
        peer, own = getattr(theirs, name)(**given), getattr(replaykit, name)(**given)
        assert said(own) == said(peer), given
        peer_storage = peer_data.LazyTensorStorage(100)
        peer_buffer = peer_data.TensorDictReplayBuffer(
            storage=peer_storage, sampler=peer, batch_size=6
        )
        buffer = ReplayBuffer(storage=LazyTensorStorage(100), sampler=own, batch_size=6)
        peer_buffer.extend(rows(*ids))
        buffer.extend(rows(*ids))
        with contextlib.suppress(IndexError):  # its right spans may run out of rows
            peer_buffer.sample()
        assert said(own) == said(peer), given


def test_attributes_show_that_prioritized_slices_never_precede_a_start() -> None:
    with pytest.warns(UserWarning, match="cannot extend"):
        sampler = PrioritizedSliceSampler(alpha=0.6, beta=0.4, slice_len=3, span=True)
    assert said(sampler) == {
        **said(theirs.SliceSampler(slice_len=3)),
        "span": (False, True),
    }


@pytest.mark.parametrize("name", NAMES)
def test_attributes_cannot_be_set(name: str) -> None:
    sampler = SliceSampler(slice_len=3)
    with pytest.raises(AttributeError):
        setattr(sampler, name, 1)
    assert sampler.slice_len == 3


def test_the_trajectory_key_follows_the_storage_of_the_buffer() -> None:
    sampler = SliceSampler(slice_len=3)
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, batch_size=6)
    buffer.extend(rows("episode"))
    assert sampler.traj_key == "episode"
    other = LazyTensorStorage(100)
    buffer.set_storage(other)
    assert sampler.traj_key is None
    buffer.extend(rows("episode", "collector"))
    assert sampler.traj_key == ("collector", "traj_ids")


def test_several_trajectory_keys_are_named_together_and_none_as_none() -> None:
    many = SliceSampler(slice_len=3, traj_key=["episode", "seed"])
    assert many.traj_key == ("episode", "seed")
    assert SliceSampler(slice_len=3, traj_key=()).traj_key is None
    given = SliceSampler(slice_len=3, ends=torch.arange(20) % 5 == 4)
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), sampler=given, batch_size=6)
    buffer.extend(rows("episode"))
    assert (given.traj_key, given.end_key, given.end_keys) == (None, None, None)


def test_attributes_show_padded_windows() -> None:
    padded = SliceSampler(slice_len=3, pad="right")
    assert (padded.pad_output, padded.strict_length) == (True, False)
    strict = SliceSampler(slice_len=3, pad="right", short="exclude")
    assert (strict.pad_output, strict.strict_length) == (True, True)


def test_attributes_survive_a_copy() -> None:
    sampler = SliceSampler(num_slices=2, span=(False, 2), cache_values=True, traj_key="episode")
    assert said(pickle.loads(pickle.dumps(sampler))) == said(sampler)


@pytest.mark.parametrize("how", ["pickle", "deepcopy"])
@pytest.mark.parametrize("storage", ["LazyTensorStorage", "LazyMemmapStorage"])
@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("SliceSampler", {}),
        ("SliceSamplerWithoutReplacement", {}),
        ("PrioritizedSliceSampler", {"max_capacity": 100, "alpha": 0.7, "beta": 0.5}),
    ],
)
def test_the_trajectory_key_that_was_found_survives_a_copy_of_the_buffer(
    name: str, given: dict[str, Any], written: bool, storage: str, how: str
) -> None:
    buffer = ReplayBuffer(
        storage=getattr(replaykit, storage)(100),
        sampler=getattr(replaykit, name)(slice_len=2, **given),
        batch_size=6,
    )
    if written:
        buffer.extend(rows("episode"))
        buffer.sample()
    copied = pickle.loads(pickle.dumps(buffer)) if how == "pickle" else copy.deepcopy(buffer)
    assert said(copied.sampler) == said(buffer.sampler)
    alone = copy.deepcopy(buffer.sampler)
    assert said(alone) == said(buffer.sampler)
    copied.extend(rows("episode"))
    copied.sample()
    assert copied.sampler.traj_key == "episode"


@pytest.mark.parametrize(
    "make",
    [
        replaykit.RandomSampler,
        replaykit.SamplerWithoutReplacement,
        lambda: SliceSampler(slice_len=2),
        lambda: replaykit.PrioritizedSampler(alpha=0.7, beta=0.5),
        replaykit.RoundRobinWriter,
        replaykit.TensorDictRoundRobinWriter,
        lambda: replaykit.TensorDictMaxValueWriter(rank_key="x"),
        replaykit.ImmutableDatasetWriter,
    ],
)
def test_a_part_alone_has_the_same_attributes_as_its_copy(make: Any) -> None:
    part = make()
    for copied in (pickle.loads(pickle.dumps(part)), copy.deepcopy(part)):
        assert vars(copied).keys() == vars(part).keys()
