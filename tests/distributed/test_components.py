"""Shards with transforms, streams, tensorclasses and units: as one buffer with the same parts."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict, tensorclass

from replaykit import (
    Compose,
    HindsightGoal,
    LaneWriter,
    LazyMemmapStorage,
    LazyTensorStorage,
    NStep,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    ReturnToGo,
    RewardScale,
    SliceSampler,
    StackFrames,
    Transform,
)
from replaykit.distributed.host import Host
from replaykit.distributed.shard_server import ShardHolder
from replaykit.distributed.wire_format import pack
from replaykit.errors import SchemaError
from tests.distributed.laws import chi_square, counts, episodes


@tensorclass
class Step:
    """A record that is no TensorDict."""

    x: torch.Tensor


class Halved(Transform):
    """What is stored looks other than what is written."""

    def inv(self, data: Any) -> Any:
        return data.copy().set("half", data["x"] / 2)


class ShardlessRay:
    """As much of ray as a supervisor needs, with no process behind it."""

    def __init__(self) -> None:
        self.running, self.killed, self.fails = False, 0, False
        self.within: float | None = None
        self.exceptions = importlib.import_module("ray.exceptions")

    def __getattr__(self, name: str) -> Any:  # .remote(...) of what there is: all are one
        return self

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self

    def init(self) -> None:
        self.running = True

    def is_initialized(self) -> bool:
        return self.running

    def get(self, ref: Any, timeout: float | None = None) -> Any:
        self.within = timeout
        if self.fails:
            raise RuntimeError("no shards today")
        return []

    def kill(self, actor: Any, *, no_restart: bool) -> None:
        self.killed += 1

    def shutdown(self) -> None:
        self.running = False


@pytest.mark.parametrize("fails", [False, True])
def test_ray_keeps_running(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """Others may have come to use it since it was started for the shards."""
    pytest.importorskip("ray", reason="needs the extra `ray`")
    from replaykit.distributed.shards import RaySupervisor

    ray = ShardlessRay()
    monkeypatch.setitem(sys.modules, "ray", ray)
    ray.fails = fails
    recipe: Any = None
    if fails:
        with pytest.raises(RuntimeError, match="no shards today"):
            RaySupervisor.start(recipe, None, None, 1.0)
    else:
        RaySupervisor.start(recipe, None, None, 1.0).close()
    assert ray.running
    assert ray.killed == 1


def test_shards_have_their_time_to_start(monkeypatch: pytest.MonkeyPatch, recipe: Any) -> None:
    """However soon they are to answer once they are there; who waits in vain is told for what."""
    pytest.importorskip("ray", reason="needs the extra `ray`")
    from ray.exceptions import GetTimeoutError

    from replaykit.distributed.shards import RaySupervisor

    class Full(ShardlessRay):
        def get(self, ref: Any, timeout: float | None = None) -> Any:
            super().get(ref, timeout)
            raise GetTimeoutError("Get timed out")

    ray = Full()
    monkeypatch.setitem(sys.modules, "ray", ray)
    for timeout, within in ((0.0, 180), (1.0, 180), (200.0, 200)):
        text = rf"1 shards have not started within {within} s; each needs .*'num_cpus': 7"
        with pytest.raises(TimeoutError, match=text):
            RaySupervisor.start(recipe(), {"num_cpus": 7}, None, timeout)
        assert ray.within == within
    assert ray.killed == 3


def test_actor_answers_with_the_error_of_its_creation(recipe: Any) -> None:
    """Its own type and text, not those of an actor that has died."""
    holder = ShardHolder(recipe(), 0)
    holder.save_own()
    holder.close()
    host = Host(ShardHolder, {"recipe": recipe(), "shard": 0})
    with pytest.raises(FileExistsError, match="another buffer"):
        host.ask("facts", pack(()))


def test_transforms_change_rows_in_their_shards(sharded: Any) -> None:
    rb = sharded(2, transform_factory=lambda: RewardScale(scale=2.0), batch_size=40)
    reward = torch.arange(10.0)[:, None]
    rb.extend(TensorDict({"x": torch.arange(10), "next": {"reward": reward}}, [10]))
    batch = rb.sample()
    assert torch.equal(batch["next", "reward"], 2 * reward[batch["x"]])
    assert torch.equal(rb[torch.tensor([3])]["next", "reward"], 2 * reward[3:4])


def test_rows_before_transforms_have_the_same_layout_in_all_shards(
    sharded: Any, tmp_path: Path
) -> None:
    """Of every client, of shards that hold none yet, and after a load: what is agreed on is what
    writers give, not what shards store."""

    def rows(dtype: torch.dtype, count: int) -> TensorDict:
        return TensorDict({"x": torch.ones(count, dtype=dtype)}, [count])

    rb, other = (sharded(count, transform_factory=Halved) for count in (3, 2))
    rb.add(rows(torch.float32, 1)[0])
    for client in (rb, rb.client()):
        with pytest.raises(SchemaError, match="expected float32"):
            client.add(rows(torch.float64, 1)[0])
    assert rb.stats()["shards"] == [1, 0, 0]
    rb.dumps(tmp_path)
    other.extend(rows(torch.float64, 2))
    other.loads(tmp_path)
    for client in (other, other.client()):
        with pytest.raises(SchemaError, match="expected float32"):
            client.extend(rows(torch.float64, 2))
        client.extend(rows(torch.float32, 2))
    assert len(other) == 5
    assert other[:]["x"].dtype is torch.float32


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
    known = set(range(27))
    expected = np.zeros(27)
    expected[sorted({int(x) for x in one.sample(2000)["x"]})] = 1.0
    assert 0 < expected.sum() < len(known)
    found = counts(rb, 20_000, 2000, 27)
    assert abs(chi_square(found, 20_000 * expected / expected.sum())) < 4
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
    """What one shard refused would be half of a batch; in other numbers of shards rows lie beside
    others."""

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
            storage=lambda: LazyTensorStorage(400, lane_key="env"),
            writer=lambda: LaneWriter(40),
            sampler=lambda: SliceSampler(slice_len=3, measure="lane"),
            shard_key="env",
        )

    rb = make(3)
    envs, steps = 5, 12
    for step in range(steps):
        present = torch.arange(envs)[: 3 if step >= 6 else envs]
        rows = {
            "env": present,
            "x": present * steps + step,
            "next": {"done": torch.zeros(len(present), 1, dtype=torch.bool)},
        }
        rb.extend(TensorDict(rows, [len(present)]))
    rb.dumps(tmp_path)
    other = make(shards)
    other.loads(tmp_path)
    lengths = [12, 12, 12, 6, 6]
    expected = np.zeros(envs * steps)
    for env, length in enumerate(lengths):
        expected[env * steps : env * steps + length - 2] = 1 / (length - 2)
    for buffer in (rb, other):
        found = counts(buffer, 30_000, 3000, envs * steps)
        assert abs(chi_square(found, 10_000 * expected / expected.sum())) < 4


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
    found = counts(rb, 6000, 600, 6)
    assert found[0] == found[1] == 0
    assert abs(chi_square(found, np.array([0, 0, 1000, 0, 2000, 0]))) < 4


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


def test_another_kind_of_sampler_is_refused_and_nothing_changes(
    sharded: Any, tmp_path: Path
) -> None:
    rb = sharded(2)
    rb.extend(torch.arange(6))
    rb.dumps(tmp_path)
    for count in (2, 3):
        other = sharded(count, sampler=lambda: PrioritizedSampler(alpha=1.0, beta=1.0))
        other.extend(torch.arange(4) + 100)
        with pytest.raises(ValueError, match="sampler"):
            other.loads(tmp_path)
        assert other[:].tolist() == [100, 101, 102, 103]
