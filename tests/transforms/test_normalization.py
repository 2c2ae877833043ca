"""Columns normalized by running statistics, against NumPy."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    Compose,
    LazyTensorStorage,
    ListStorage,
    Normalize,
    NStep,
    RenameTransform,
    ReplayBuffer,
    RewardScale,
    RunningNorm,
    StackFrames,
    Unnormalize,
    Windows,
)
from replaykit.errors import SchemaError
from tests.support.refusals import refuses

SIZES = [1, 4, 1, 30, 7]


def rows(values: np.ndarray[Any, Any]) -> TensorDict:
    x = torch.from_numpy(values)
    return TensorDict({"x": x, "next": {"x": x + 1, "reward": x[:, :1] * 2}}, [len(x)])


def parts(offset: float = 1e6) -> list[np.ndarray[Any, Any]]:
    """Far from zero, where sums of squares would lose all digits."""
    random = np.random.default_rng(0)
    return [offset + random.normal(size=(size, 3)) * [1, 5, 0] for size in SIZES]


def buffer(transform: RunningNorm, **arguments: Any) -> ReplayBuffer:
    return ReplayBuffer(storage=LazyTensorStorage(20), transform=transform, **arguments)


MODELS: dict[str, Any] = {
    "running": lambda seen: np.ones(len(seen)),
    "window": lambda seen: np.arange(len(seen)) >= len(seen) - 12,
    "ema": lambda seen: 0.9 ** np.arange(len(seen) - 1, -1, -1),
}


@pytest.mark.acceptance("C35")
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("update_on", ["write", "sample", "update"])
def test_statistics_are_those_of_all_rows_with_their_weights(kind: str, update_on: str) -> None:
    norm = RunningNorm(
        ["x"], kind, update_on="write" if update_on == "write" else "sample", size=12, rate=0.1
    )
    rb = buffer(norm)
    assert norm.moments("x") is None
    for number, part in enumerate(parts()):
        if number:  # rows without a finite number in each place are not counted
            part = np.insert(part, number % len(part), [0, [-math.inf, math.nan][number % 2], 1], 0)
        if update_on == "write":
            rb.extend(rows(part)) if number else rb.add(rows(part)[0])
        else:
            (norm if update_on == "sample" else norm.update)(rows(part))
        seen = np.concatenate(parts()[: number + 1])
        weights = MODELS[kind](seen)
        mean = np.average(seen, 0, weights)
        std = np.sqrt(np.average((seen - mean) ** 2, 0, weights) + 1e-8)
        found = norm.moments("x")
        assert found is not None
        assert found.weight == pytest.approx(weights.sum())
        np.testing.assert_allclose(found.mean.numpy(), mean, rtol=1e-13)
        np.testing.assert_allclose(found.std.numpy(), std, rtol=1e-6)
    if update_on == "write":
        expected = (rb.storage[:]["x"].numpy() - mean) / std
        np.testing.assert_allclose(rb[:]["x"].numpy(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    "storage",
    [
        lambda: ListStorage(20),
        lambda: LazyTensorStorage(20, dedup_next=True),
        lambda: LazyTensorStorage(20, ndim=2),
    ],
)
def test_rows_of_any_storage_are_counted(storage: Any) -> None:
    norm = RunningNorm(["x"])
    rb = ReplayBuffer(storage=storage(), transform=norm)
    x = torch.arange(6.0)[:, None]
    data = TensorDict({"x": x, "next": {"x": x + 1, "done": torch.zeros(6, 1).bool()}}, [6])
    rb.extend(data.reshape(2, 3) if rb.storage.ndim == 2 else data)
    found = norm.moments("x")
    assert found is not None
    assert (found.weight, found.mean.item()) == (6, 2.5)
    assert rb.sample(4)["x"].abs().max() < 1.5


def test_options_change_the_values_read_but_not_those_stored() -> None:
    norm = RunningNorm(["x"], clip=0.5, center=False, with_next=True)
    rb = buffer(norm)
    data = rows(np.array([[2.0, 0, 1], [4, 0, 9], [6, 0, 2]]))
    rb.extend(data)
    std = np.sqrt(np.var(data["x"].numpy(), 0) + 1e-8)
    for key in ("x", ("next", "x")):
        expected = (data[key].numpy() / std).clip(-0.5, 0.5)
        np.testing.assert_allclose(rb[:][key].numpy(), expected)
        assert (rb.storage[:][key] == data[key]).all()
    whole = TensorDict({"x": torch.tensor([[1], [3]])}, [2])
    rewards = RunningNorm(["x"], update_on="sample")(whole)["x"]
    assert rewards.dtype is torch.float32
    assert rewards.flatten().tolist() == pytest.approx([-1, 1])


def test_padding_is_neither_counted_nor_changed() -> None:
    norm = RunningNorm(["x"], update_on="sample")
    mask = torch.tensor([[True, True], [True, False]])
    batch = TensorDict({"x": torch.tensor([[1.0, 2.0], [3.0, 77.0]]), "mask": mask}, [2, 2])
    made = norm(batch)
    found = norm.moments("x")
    assert found is not None
    assert (found.weight, found.mean.item()) == (3, 2)
    scale = math.sqrt(3 / 2)
    assert made["x"].flatten().tolist() == pytest.approx([-scale, 0, scale, 77])
    norm(batch.clone().set("mask", torch.zeros(2, 2, dtype=torch.bool)))
    assert norm.moments("x") is found


def test_only_successful_writes_are_counted() -> None:
    norm = RunningNorm(["x"])
    rb = buffer(norm)
    rb.extend(rows(np.ones((2, 3))))
    before = norm.moments("x")
    with pytest.raises(SchemaError):
        rb.extend(rows(np.ones((2, 4))))
    with pytest.raises(KeyError, match="'x'"):
        buffer(RunningNorm(["x"])).extend(TensorDict({"y": torch.ones(2)}, [2]))
    for read in (lambda: rb.sample(5), lambda: rb[:], lambda: rb.empty()):
        read()
    assert norm.moments("x") is before
    norm.frozen = True
    rb.extend(rows(np.full((2, 3), 7.0)))
    norm.update(rows(np.full((2, 3), 7.0)))
    assert norm.moments("x") is before


@pytest.mark.parametrize("kind", ["running", "ema", "window"])
def test_statistics_of_other_keys_or_kinds_are_refused(kind: str) -> None:
    norm = RunningNorm(["x", ("next", "reward")], kind, size=5)
    rb = buffer(norm)
    rb.extend(rows(parts()[0]))
    state = rb.transform[0].state_dict()
    other = RunningNorm(["x", ("next", "reward")], kind, size=5)
    other.load_state_dict({**state, "frozen": True})
    assert other.frozen
    refuses(ValueError, "of 1 keys", RunningNorm(["x"], kind).load_state_dict, state)
    wrong = "running" if kind == "window" else "window"
    with pytest.raises(ValueError, match="of 2 keys and the kind"):
        RunningNorm(["x", "y"], wrong).load_state_dict(state)


def test_prefetched_batches_are_counted_in_the_order_of_delivery() -> None:
    found = []
    for prefetch in (0, 3):
        rb = buffer(
            RunningNorm(["x"], update_on="sample"),
            batch_size=4,
            prefetch=prefetch,
            generator=torch.Generator().manual_seed(0),
        )
        rb.extend(rows(parts(0.0)[3]))
        found.append(torch.cat([rb.sample()["x"] for _ in range(5)]))
    assert torch.equal(*found)


def test_statistics_are_kept_apart_from_copies() -> None:
    norm = RunningNorm(["x"])
    norm.update(rows(np.ones((2, 3))))
    other = copy.deepcopy(norm)
    other.update(rows(np.zeros((2, 3))))
    assert [one.moments("x").mean[0].item() for one in (norm, other)] == [1, 0.5]  # type: ignore[union-attr]
    rb = buffer(RunningNorm(["x"]))
    rb.transform[0].load_state_dict(norm.state_dict())
    refuses(ValueError, r"x.*: expected rows of the shape \[3\]", rb.extend, rows(np.ones((2, 4))))
    assert len(rb) == 0
    assert Compose(norm).spans_rows
    assert not Compose(RunningNorm(["x"], update_on="sample")).spans_rows


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"keys": "x"}, TypeError),
        ({"keys": []}, ValueError),
        ({"kind": "mean"}, ValueError),
        ({"update_on": "read"}, ValueError),
        ({"size": 0}, ValueError),
        ({"rate": 0}, ValueError),
        ({"rate": 1.0}, ValueError),
        ({"clip": 0}, ValueError),
    ],
)
def test_invalid_arguments_are_refused(arguments: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        RunningNorm(**{"keys": ["x"], **arguments})


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (TensorDict({"y": torch.ones(2)}, [2]), KeyError),
        (TensorDict({"x": torch.ones(2, dtype=torch.bool)}, [2]), TypeError),
        (torch.ones(2), TypeError),
    ],
)
def test_invalid_batches_are_refused(data: Any, error: type[Exception]) -> None:
    for update_on in ("write", "sample"):
        with pytest.raises(error):
            RunningNorm(["x"], update_on=update_on)(data)
    refuses(ValueError, "not in list", RunningNorm(["x"]).moments, "y")


REWARD = ("next", "reward")


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
def test_written_rows_are_counted_as_the_transforms_before_return_them(storage: Any) -> None:
    norm = RunningNorm(["y", REWARD])
    chain = Compose(RewardScale(3.0), RenameTransform(["x"], ["y"]), norm)
    rb = ReplayBuffer(storage=storage(20), transform=chain, batch_size=7)
    rb.extend(rows(parts()[3][:7]))
    for key in ("y", REWARD):
        found = rb[:][key].double()
        np.testing.assert_allclose(found.mean(0), 0, atol=1e-6)
        np.testing.assert_allclose(found.std(0, correction=0)[..., :2], 1, rtol=1e-5)
    assert rb.storage[:][0]["x"][0] > 1e5


def test_columns_made_of_several_rows_are_not_counted_on_write() -> None:
    for before, keys in ((StackFrames(["x"], 2), ["x"]), (NStep(2, 0.9), [REWARD])):
        with pytest.raises(ValueError, match="which makes its columns from several rows"):
            buffer(Compose(before, RunningNorm(keys)))  # type: ignore[arg-type]
        buffer(Compose(before, RunningNorm(keys, update_on="sample")))  # type: ignore[arg-type]
    norm = RunningNorm(["x"])
    rb = buffer(Compose(NStep(2, 0.9), Windows({"x": [-1, 0]}), norm))  # type: ignore[arg-type]
    rb.extend(rows(np.diag([1.0, 3.0])).set(("next", "done"), torch.zeros(2, 1).bool()))
    assert norm.moments("x").weight == 2  # type: ignore[union-attr]
    torch.testing.assert_close(rb[:]["x"][..., 0], torch.tensor([[1.0, 1], [1, -1]]).double())


def statistics_of(values: np.ndarray[Any, Any], axis: Any = 0) -> dict[str, Any]:
    model = {"mean": np.mean, "std": np.std, "min": np.min, "max": np.max}
    found = {name: fn(values, axis, keepdims=axis != 0) for name, fn in model.items()}
    found["quantiles"] = np.quantile(values, [0.1, 0.5, 0.9], axis, keepdims=axis != 0)
    if axis != 0:
        found = {name: one.squeeze(-4) for name, one in found.items()}
    return {name: torch.from_numpy(np.asarray(one)) for name, one in found.items()}


@pytest.mark.parametrize("mode", ["mean_std", "min_max", "quantiles"])
def test_columns_are_normalized_by_statistics_and_restored(mode: str, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    x = random.normal(size=(40, 3)) * [1, 1e-3, 0] + [2, 900, 0.1]
    image = random.integers(0, 256, (40, 2, 4, 4)).astype(np.uint8)
    statistics = {"x": statistics_of(x), "image": statistics_of(image, (0, 2, 3))}
    modes = {"x": mode, "image": mode}
    rb = ReplayBuffer(
        storage=LazyTensorStorage(50),
        transform=Compose(Windows({"x": [-1, 0]}), Normalize(statistics, modes)),
    )
    done = torch.zeros(40, 1, dtype=torch.bool)
    data = TensorDict({"x": torch.from_numpy(x), "image": torch.from_numpy(image)}, [40])
    rb.extend(data.set(("next", "done"), done))
    for key, values in (("x", x), ("image", image.astype(float))):
        low, high = {
            "mean_std": lambda s: (s["mean"] - s["std"], s["mean"] + s["std"]),
            "min_max": lambda s: (s["min"], s["max"]),
            "quantiles": lambda s: (s["quantiles"][0], s["quantiles"][-1]),
        }[mode](statistics[key])
        low, high = np.asarray(low, float), np.asarray(high, float)
        width = np.where(high - low > 1e-9, (high - low) / 2, 1)
        wanted = (values - (low + high) / 2) / width
        if key == "x":
            wanted = np.stack([wanted[np.maximum(np.arange(40) - 1, 0)], wanted], 1)
        found = rb[:]
        np.testing.assert_allclose(found[key].numpy(), wanted, rtol=1e-6, atol=1e-6)
        assert key != "x" or not found["x"][..., 2].any()  # the constant
    restored = Unnormalize(rb.transform[1])(rb[:])
    np.testing.assert_allclose(restored["x"][:, 1], x, rtol=1e-12)
    np.testing.assert_allclose(restored["image"], image, atol=1e-4)
    rb.dumps(tmp_path)
    other = {key: {name: one + 1 for name, one in s.items()} for key, s in statistics.items()}
    again = Compose(Windows({"x": [-1, 0]}), Unnormalize(Normalize(other, modes)))
    loaded = ReplayBuffer(storage=LazyTensorStorage(50), transform=again)
    loaded.loads(tmp_path)
    assert loaded.transform[1].norm.state_dict()["shift"][0].equal(rb.transform[1].scales()[0][0])
    with pytest.raises(ValueError, match="the numbers of columns"):
        Normalize({"x": statistics["x"]}, {"x": mode}).load_state_dict(rb.transform[1].state_dict())


def test_one_inverse_fits_all_normalizing_transforms() -> None:
    norm = RunningNorm(["x"], center=False, with_next=True)
    norm.update(rows(parts(3.0)[3]))
    data = rows(parts(3.0)[4])
    restored = Unnormalize(norm, ["x"])(norm(data))
    for key in ("x", ("next", "x")):
        torch.testing.assert_close(restored[key], data[key])
    refuses(ValueError, "expected keys of RunningNorm", Unnormalize, norm, ["y"])
    refuses(TypeError, "a Normalize or RunningNorm", Unnormalize, Compose(norm))


@pytest.mark.parametrize(
    ("statistics", "modes", "error", "text"),
    [
        ({}, {"x": "mean_std"}, KeyError, "no statistics of 'x'"),
        ({"o": {"s": {"std": 1.0}}}, {"o.s": "mean_std"}, KeyError, r"meant: \('o', 's'\)"),
        ({"x": {"min": 0.0}}, {"x": "min_max"}, KeyError, "'max', got min"),
        ({"x": {"mean": math.nan, "std": 1.0}}, {"x": "mean_std"}, ValueError, "finite 'mean'"),
        ({"x": {"min": 0.0, "max": math.inf}}, {"x": "min_max"}, ValueError, "'x'.*got inf"),
        ({"x": {}}, {"x": "log"}, ValueError, "mode: expected one of"),
        ({"x": {}}, ["x"], TypeError, "a mapping of keys"),
    ],
)
def test_unusable_statistics_are_refused(
    statistics: Any, modes: Any, error: type[Exception], text: str
) -> None:
    refuses(error, text, Normalize, statistics, modes)
