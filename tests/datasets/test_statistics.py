"""Statistics of columns: against NumPy over all rows, whatever the size of the numbers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from replaykit import TensorStorage
from replaykit.datasets import CorpusExperienceReplay, column_statistics
from replaykit.datasets.column_statistics import Statistics
from replaykit.datasets.dataset_passes import ensure_split
from tests.datasets.test_split import flat
from tests.support.refusals import refuses

LEVELS = [0.0, 0.1, 0.5, 0.77, 1.0]
LENGTHS = (3, 5, 2, 40)


def open_rows(path: Path, padded: bool, **choice: Any) -> CorpusExperienceReplay:
    path.mkdir(exist_ok=True)
    published = flat(path / "flat", *LENGTHS)
    if padded:
        published = ensure_split(path / "flat", path / "split")
    return CorpusExperienceReplay(published, **choice)


@pytest.mark.parametrize("choice", [{}, {"episodes": [0, 3]}, {"split": "1:3"}])
@pytest.mark.parametrize("padded", [False, True])
def test_statistics_are_those_of_the_chosen_rows_with_their_edits(
    tmp_path: Path, monkeypatch: Any, padded: bool, choice: Any
) -> None:
    data = open_rows(tmp_path, padded, **choice)
    row = data[0].clone()
    row["action"].fill_(torch.nan)
    data[0] = row
    rows = data[:][data[:]["mask"]] if padded else data[:]
    storage = TensorStorage(rows.exclude("mask", "traj_ids"))
    wanted = column_statistics.column_statistics(storage, None, LEVELS, {})
    assert (wanted["action", "nan"] > 0).all()
    monkeypatch.setattr(column_statistics, "_BLOCK", 600)  # several blocks of some rows
    monkeypatch.setattr(column_statistics, "_COUNTS", 60_000)
    found = data.statistics(quantiles=LEVELS)
    for key, value in wanted.items(True, True):
        torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-14, equal_nan=True)


def test_invalid_requests_are_refused(tmp_path: Path) -> None:
    ask = open_rows(tmp_path, False).statistics
    said = r"'next.reward' \(meant: \('next', 'reward'\)\?\); there are"
    refuses(KeyError, said, ask, ["next.reward"])
    refuses(TypeError, "keys: expected a list of keys, got 'action'", ask, "action")
    said = "channels: expected a mapping of keys to dimensions"
    refuses(TypeError, said, ask, ["action"], channels=["action"])
    refuses(ValueError, "from 0 to 1", ask, ["action"], quantiles=[1.1])
    rows = {
        "none": torch.zeros(3, 0),
        "complex": torch.zeros(3, 2).cfloat(),
        "frames": torch.ones(3),
    }
    storage = TensorStorage(TensorDict(rows, [3]))
    assert not column_statistics.column_statistics(storage, None, [], {}, {("frames",)}).keys()
    for key, got in {"none": r"\[0\]", "complex": "complex64", "frames": "encoded images"}.items():
        with pytest.raises(TypeError, match=f"key '{key}': expected real numbers, got .*{got}"):
            column_statistics.column_statistics(storage, [key], [], {}, {("frames",)})


def odd_columns() -> dict[str, torch.Tensor]:
    """Columns of many dtypes, some with numbers that are not finite."""
    random = np.random.default_rng(0)
    spread = torch.from_numpy(random.normal(size=(301, 4)) * [1, 1e4, 1e-6, 0] + [0, 3, 1e3, 7])
    holes = spread.clone()
    holes[::7, 0], holes[:, 1], holes[5, 2], holes[::2, 3] = torch.nan, -torch.nan, torch.inf, 0.0
    ends = spread.clone()
    ends[4, 0], ends[9, 0], ends[:200, 1], ends[3, 2] = torch.inf, -torch.inf, -torch.inf, -0.0
    floats = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    made = {
        f"{name} {dtype}": values.to(dtype)
        for dtype in floats
        for name, values in (("spread", spread), ("holes", holes), ("ends", ends))
    }
    for dtype in (torch.int8, torch.int16, torch.int32, torch.int64):
        limits = torch.iinfo(dtype)
        numbers = random.integers(limits.min, limits.max, (301, 3), endpoint=True)
        made[str(dtype)] = torch.from_numpy(numbers).to(dtype)
    made["bool"] = spread > 0
    made["image"] = torch.from_numpy(random.integers(0, 256, (301, 3, 4, 5), dtype=np.uint8))
    made["depth"] = torch.from_numpy(random.normal(size=(301, 4, 5, 2)).astype(np.float32))
    return made


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy's model
@pytest.mark.parametrize("block", [900, 8 << 20])
def test_odd_columns_have_the_statistics_of_numpy(monkeypatch: Any, block: int) -> None:
    monkeypatch.setattr(column_statistics, "_BLOCK", block)
    monkeypatch.setattr(column_statistics, "_COUNTS", 40 * block)
    columns = odd_columns()
    storage = TensorStorage(TensorDict(columns, [301]))
    channels = {"image": 0, "depth": -1}
    found = column_statistics.column_statistics(storage, None, LEVELS, channels)
    for key, column in columns.items():
        values, shape = column.double().numpy(), found[key, "mean"].shape
        if key in channels:
            values = np.moveaxis(values, (-1, 1)[1 + channels[key]], -1).reshape(-1, shape.numel())
        for name, tolerance, model in (
            ("min", 0, np.nanmin(values, 0)),
            ("max", 0, np.nanmax(values, 0)),
            ("mean", 1e-12, np.nanmean(values, 0)),
            ("std", 1e-7, np.nanstd(values, 0)),
            ("quantiles", 1e-15, np.nanquantile(values, LEVELS, 0)),
        ):
            one, wanted = (
                found[key, name].double().numpy(),
                model.reshape(*model.shape[:-1], *shape),
            )
            if name == "quantiles":  # NumPy also has NaN where a neighbour is infinite
                assert np.isinf(values).any() or (np.isnan(one) == np.isnan(wanted)).all()
                wanted = np.where(np.isnan(wanted), one, wanted)
            np.testing.assert_allclose(one, wanted, tolerance, err_msg=f"{key} {name}")
        assert found[key, "nan"].sum() == np.isnan(values).sum()
    with pytest.raises(ValueError, match=r"a dimension of rows \[3, 4, 5\] for 'image', got 3"):
        column_statistics.column_statistics(storage, None, [], {"image": 3})


def of(*blocks: np.ndarray) -> dict[str, object]:
    found = Statistics()
    for block in blocks:
        found.add(block)
    return found.to_json()


@pytest.mark.parametrize("signs", [(1.0, 1.0), (1.0, -1.0), (-1.0, -1.0)])
def test_mean_is_exact_when_the_sum_overflows(signs):
    blocks = [np.full(70_000, sign * 1.5e308) for sign in signs]
    found = of(*blocks)
    assert found["mean"] == pytest.approx(sum(signs) / 2 * 1.5e308, rel=1e-12, abs=1e294)
    assert found["min"] == min(signs) * 1.5e308
    assert found["max"] == max(signs) * 1.5e308


def test_values_without_a_mean_are_counted():
    assert of(np.array([1.0, math.inf]))["mean"] is None
    assert of(np.array([-math.inf, math.inf]), np.ones(3))["mean"] is None
    block = np.array([1 + 2j, complex(math.nan, 0), complex(0, math.nan)], np.complex64)
    assert of(block, block[:2]) == {"min": None, "max": None, "mean": None, "std": None, "nan": 3}
