"""What one buffer can do: one over shards can do it too, or says why not."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import LazyTensorStorage, PrioritizedSampler, ReplayBuffer, ShardedReplayBuffer
from replaykit.distributed.sharded_client import REFUSED


def test_every_name_of_a_buffer_is_there_or_is_refused_with_a_reason(sharded: Any) -> None:
    rb = sharded(2)
    names = {name for name in dir(ReplayBuffer) if not name.startswith("_")}
    assert names - set(dir(ShardedReplayBuffer)) == set(REFUSED)
    for handle in (rb, rb.client()):
        for name, reason in REFUSED.items():
            with pytest.raises(
                AttributeError, match=f"Sharded[A-Za-z]* has no '{name}': "
            ) as found:
                getattr(handle, name)
            assert reason in str(found.value)
            assert not hasattr(handle, name)
        with pytest.raises(AttributeError, match="object has no attribute 'nothing'"):
            print(handle.nothing)
        with pytest.raises(TypeError, match="update_if_present"):
            handle[0] = torch.zeros(())
    assert rb.initialized
    with pytest.raises(TypeError, match="client"):
        copy.deepcopy(rb)
    client = copy.copy(rb.client())
    assert client.num_shards == 2
    with pytest.raises(TypeError, match="client"):
        pickle.dumps(rb)


def test_rows_get_the_default_priority_of_one_big_buffer(sharded: Any, single: Any) -> None:
    def sampler() -> PrioritizedSampler:
        return PrioritizedSampler(alpha=0.7, beta=1.0)

    one, rb = single(sampler()), sharded(3, sampler=sampler)
    rows = TensorDict({"x": torch.arange(12)}, [12])
    for buffer in (one, rb):
        index = buffer.extend(rows)
        buffer.update_priority(index, torch.linspace(0.5, 3.0, 12))
        buffer.update_priority(index[10:], 0.1)  # the largest ever is not the largest there is
    other = rb.client()
    for buffer in (one, other):
        buffer.mark_update(torch.tensor([0, 5, -1]))
        buffer.mark_update(7)
        with pytest.raises(IndexError):
            buffer.mark_update(torch.tensor([1, 12]))

    def weights(buffer: Any) -> dict[int, float]:
        batch = buffer.sample(3000)
        found = zip(batch["x"].tolist(), batch["priority_weight"].tolist(), strict=True)
        return {x: round(weight, 5) for x, weight in found}

    assert weights(other) == weights(one)
    assert len(weights(one)) == 12
    plain = sharded(2)
    plain.extend(rows)
    plain.mark_update(3)
    assert torch.equal(plain.read_all_in_order(5)["x"], rows["x"][:5])


def test_rows_are_read_by_index_place_mask_and_key(sharded: Any) -> None:
    rb = sharded(3)
    with pytest.raises(RuntimeError):
        rb["x"]
    index = rb.extend(
        TensorDict({"x": torch.arange(8) * 10, "next": {"reward": torch.rand(8, 1)}}, [8])
    )
    assert torch.equal(index, torch.arange(8))
    assert torch.equal(rb["x"], torch.arange(8) * 10)
    assert torch.equal(rb["next", "reward"], rb[:]["next", "reward"])
    assert rb["next", "reward"].shape == (8, 1)
    assert rb[torch.tensor(3)]["x"] == rb[3]["x"] == 30
    assert rb[torch.arange(8) > 5]["x"].tolist() == [60, 70]
    assert rb[[True] + 7 * [False]]["x"].tolist() == [0]
    assert rb[...]["x"].shape == (8,)
    assert rb[::-3]["x"].tolist() == [70, 40, 10]
    assert rb[[]].shape == (0,)
    with pytest.raises(KeyError, match=r"no key 'y'; there are 'x', \('next', 'reward'\)"):
        rb["y"]
    with pytest.raises(IndexError, match=r"mask of shape \[8\], got \[3\]"):
        rb[torch.ones(3, dtype=torch.bool)]
    keyed = sharded(4, shard_key="x")
    keyed.add(TensorDict({"x": torch.tensor(5)}, []))  # the other shards know of no rows
    assert keyed[[]].shape == keyed[1:1].shape == (0,)
    assert keyed[[]]["x"].dtype is torch.int64
    for wrong in (True, 1.5, torch.zeros(2, 2, dtype=torch.int64)):
        with pytest.raises(TypeError, match="expected an index as an int, slice, mask, key"):
            rb[wrong]


def test_include_info_works_as_in_one_buffer(sharded: Any) -> None:
    rb = sharded(2, batch_size=4)
    rb.extend(TensorDict({"x": torch.arange(8)}, [8]))
    assert set(rb.sample(include_info=True).keys()) == {"index", "x"}
    for ask in (rb.sample, lambda **given: rb.sample_async(**given).result()):
        with pytest.warns(DeprecationWarning, match="include_info=False") as told:
            batch, info = ask(return_info=True, include_info=False)
        assert told[0].filename == __file__
        assert set(batch.keys()) == {"x"}
        assert torch.equal(batch["x"], info["index"])


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("batch_size", 0, ValueError),
        ("batch_size", 1.5, ValueError),
        ("generator", 3, TypeError),
        ("on_loss", 3, TypeError),
    ],
)
def test_invalid_arguments_are_refused_before_shards_are_made(
    sharded: Any, name: str, value: Any, error: type[Exception]
) -> None:
    made = []

    def storage() -> LazyTensorStorage:
        made.append(None)
        return LazyTensorStorage(10)

    with pytest.raises(error, match=f"expected {name} as"):
        sharded(2, storage=storage, **{name: value})
    assert not made
    rb = sharded(2)
    if name != "batch_size":
        with pytest.raises(error, match=f"expected {name} as"):
            rb.client(**{name: value})
    if name == "generator":
        with pytest.raises(error, match=f"expected {name} as"):
            rb.set_rng(value)
