"""What a batch of slices says of its rows: ends, padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    LazyTensorStorage,
    PrioritizedSliceSampler,
    ReplayBuffer,
    SliceSampler,
    SliceSamplerWithoutReplacement,
)
from tests.samplers.building import rows, sliced

# -- marks -----------------------------------------------------------------------------------------


@pytest.mark.pitfall("BD12")
@pytest.mark.pitfall("BD7")
def test_flags_distinguish_episode_ends_from_slice_cuts() -> None:
    data = rows([6, 6])  # the first one terminated, the second one truncated
    data["next", "terminated"][11] = False
    data["next", "truncated"][11] = True
    rb = sliced(data, slice_len=3)
    batch = rb.sample(3 * 200)
    last = torch.arange(600) % 3 == 2
    t, done, terminated, truncated = (
        batch[key].reshape(-1)
        for key in ("t", ("next", "done"), ("next", "terminated"), ("next", "truncated"))
    )
    assert torch.equal(done, last)
    assert torch.equal(terminated, t == 5)
    assert torch.equal(truncated, last & (t != 5))


def test_truncated_key_moves_or_disables_marks() -> None:
    batch = sliced([5, 5], slice_len=3, truncated_key=("cut", "truncated")).sample(6)
    assert batch["cut", "done"].sum() == 2
    assert torch.equal(batch["cut", "truncated"] | batch["cut", "terminated"], batch["cut", "done"])
    assert torch.equal(batch["next", "done"].reshape(-1), (batch["t"] % 5 == 4))
    batch = sliced([5, 5], slice_len=3, truncated_key=None).sample(6)
    assert torch.equal(batch["next", "done"].reshape(-1), (batch["t"] % 5 == 4))


def test_marks_of_data_without_flags() -> None:
    data = TensorDict({"t": torch.arange(8), "episode": torch.arange(8) // 4}, [8])
    batch = sliced(data, slice_len=2).sample(6)
    last = torch.arange(6).reshape(-1, 1) % 2 == 1
    assert torch.equal(batch["next", "done"], last)
    assert torch.equal(batch["next", "truncated"], last)
    assert not batch["next", "terminated"].any()
    batch["next", "truncated"][:] = False  # memory of its own
    assert torch.equal(batch["next", "done"], last)


@pytest.mark.parametrize("key", ["is_init", "first", ("collector", "first"), None])
@pytest.mark.parametrize(
    "make",
    [
        lambda **given: SliceSampler(slice_len=3, **given),
        lambda **given: SliceSamplerWithoutReplacement(slice_len=3, **given),
        lambda **given: PrioritizedSliceSampler(alpha=0.7, beta=0.5, slice_len=3, **given),
    ],
    ids=["uniform", "without_replacement", "prioritized"],
)
def test_first_rows_are_marked_under_the_key_that_was_given(
    make: Callable[..., Any], key: Any
) -> None:
    data = rows([5, 5, 5])
    stored = (torch.arange(15) % 5 == 0).unsqueeze(-1)
    names = ["is_init", "first", ("collector", "first")]
    for name in names:
        data[name] = stored.clone()
    sampler = make(init_key=key)
    assert sampler.init_key == key
    rb = ReplayBuffer(storage=LazyTensorStorage(20), sampler=sampler, batch_size=9)
    rb.extend(data)
    for _ in range(20):
        batch = rb.sample()
        first = torch.arange(len(batch)).unsqueeze(-1) % 3 == 0
        for name in names:
            kept = (batch["t"] % 5 == 0).unsqueeze(-1)
            assert torch.equal(batch[name], first | kept if name == key else kept)
    for name in names:
        assert torch.equal(rb[:][name], stored)


# -- padding ---------------------------------------------------------------------------------------


@pytest.mark.pitfall("BD8")
@pytest.mark.parametrize(
    "options", [{"strict_length": False, "pad_output": True}, {"pad": "none"}, {"pad": "right"}]
)
def test_batch_always_carries_a_mask(options: dict[str, Any]) -> None:
    batch = sliced([1000], slice_len=2, **options).sample(4)
    assert batch["collector", "mask"].all()
    assert (batch["collector", "mask"].shape, batch["collector", "mask"].dtype) == (
        (4,),
        torch.bool,
    )


def test_short_windows_repeat_their_last_row() -> None:
    data = rows([2])
    data["is_init"] = torch.tensor([[True], [False]])
    batch = sliced(data, slice_len=4, strict_length=False, pad_output=True).sample(8)
    assert batch["t"].tolist() == [0, 1, 1, 1] * 2
    assert batch["index"].tolist() == [0, 1, 1, 1] * 2
    assert batch["collector", "mask"].tolist() == [True, True, False, False] * 2
    for name in ("done", "terminated"):
        assert batch["next", name].reshape(-1).tolist() == [False, True, False, False] * 2
    assert not batch["next", "truncated"].any()
    assert batch["is_init"].reshape(-1).tolist() == [True, False, False, False] * 2


@pytest.mark.parametrize("align", ["left", "right"])
def test_padding_has_its_values(align: str) -> None:
    data = rows([2])
    data["x"] = torch.ones(2, 2, 3)
    data["flag"] = torch.ones(2, dtype=torch.bool)
    values = {"t": -5, "x": 0.5}
    batch = sliced(data, slice_len=4, pad="right", align=align, pad_value=values).sample(4)
    mask = batch["collector", "mask"]
    assert mask.tolist() == (
        [True] * 2 + [False] * 2 if align == "left" else [False] * 2 + [True] * 2
    )
    assert batch["t"][mask].tolist() == [0, 1]
    assert batch["t"][~mask].tolist() == [-5, -5]
    assert (batch["x"][mask] == 1).all()
    assert (batch["x"][~mask] == 0.5).all()
    assert batch["e"][~mask].tolist() == [0, 0]
    assert not batch["flag"][~mask].any()
    assert not batch["next", "done"][~mask].any()
    assert batch["next", "done"][mask].reshape(-1).tolist() == [False, True]
    assert (sliced(data, slice_len=4, pad="both")[:]["x"] == 1).all()


@pytest.mark.parametrize("options", [{}, {"strict_length": False}, {"pad": "both"}, {"span": True}])
def test_tensors_of_a_device_are_marked_alike(
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Elsewhere than on the CPU the flags stay tensors."""
    data = rows([2, 5, 9])
    data["is_init"] = torch.tensor([True, False, *[True, *[False] * 4], *[True, *[False] * 8]])
    data["next", "truncated"][6] = True
    data["next", "terminated"][6] = False
    here = sliced(data, slice_len=4, **options).sample(80)
    monkeypatch.setattr("replaykit.samplers.window_forms._array", lambda tensor: tensor)
    there = sliced(data, slice_len=4, **options).sample(80)
    assert (here == there).all()
    assert set(here.keys(True)) == set(there.keys(True))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("options", [{}, {"pad": "both"}, {"draw": "sequential"}])
def test_rows_on_a_device(options: dict[str, Any]) -> None:
    rb = ReplayBuffer(
        storage=LazyTensorStorage(50, device="cuda"), sampler=SliceSampler(slice_len=4, **options)
    )
    rb.extend(rows([5, 9, 6]))
    batch = rb.sample(40)
    assert {leaf.device.type for leaf in batch.values(True, True)} == {"cuda"}
    assert batch["next", "done"].sum() == 10
    assert torch.equal(batch["t"][batch["next", "done"][:, 0]] >= 0, torch.ones(10).bool().cuda())


def test_transforms_see_stored_flags_not_marks_of_windows() -> None:
    seen = []

    def note(rows: TensorDict) -> TensorDict:
        seen.append(rows["next", "done"].clone())
        return rows

    buffer = ReplayBuffer(
        storage=LazyTensorStorage(12),
        sampler=SliceSampler(slice_len=2),
        transform=note,
        batch_size=4,
    )
    ends = torch.arange(12)[:, None] == 11
    flags = {"done": ends, "terminated": ends, "truncated": torch.zeros_like(ends)}
    buffer.extend(TensorDict({"x": torch.arange(12), "next": flags}, [12]))
    for _ in range(5):
        batch = buffer.sample()
        assert torch.equal(seen.pop(), batch["x"][:, None] == 11)
        assert batch["next", "done"].flatten().tolist() == [False, True] * 2
