"""Flat rows to trajectories and back, against a scan that looks at one row after the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorData, TensorDict

from replaykit import join_trajectories, pad_collate, split_trajectories
from replaykit.datasets.dataset_passes import ensure_split
from replaykit.datasets.engine.conversion import ensure_dataset
from replaykit.datasets.families.robohive import ROBOHIVE
from replaykit.datasets.sources import Sources
from replaykit.testing.robohive_files import RoboHiveWriter, make_trial
from tests.support.refusals import refuses

FLAGS = ("done", "truncated", "terminated")


def scan(columns: dict[Any, list[int]], n: int) -> list[list[int]]:
    """Rows of each trajectory, by the rules as they are written: union of flags, ids, the end."""
    found: list[list[int]] = [[]] if n else []
    for row in range(n):
        found[-1].append(row)
        if row == n - 1:
            break
        flagged = any(columns[key][row] for key in columns if key[0] == "next")
        ids = [values for key, values in columns.items() if key[0] != "next"]
        changed = any(values[row] != values[row + 1] for values in ids)
        if flagged or changed:
            found.append([])
    return found


@st.composite
def tables(draw: Any) -> tuple[TensorDict, list[list[int]]]:
    n = draw(st.integers(0, 25))
    names = [("next", flag) for flag in FLAGS]
    names += [("episode",), ("seed",), ("collector", "traj_ids")]
    used = draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
    columns: dict[Any, list[int]] = {}
    data = TensorDict({"row": torch.arange(1, n + 1), "next": TensorDict({}, [n])}, [n])
    data["next", "x"] = torch.randn(n, 2, generator=torch.Generator().manual_seed(n))
    for key in used:
        flag = key[0] == "next"
        numbers = st.sampled_from([0, 0, 0, 1]) if flag else st.sampled_from([3, 3, 3, -7])
        columns[key] = draw(st.lists(numbers, min_size=n, max_size=n))
        dtype = draw(st.sampled_from([torch.bool, torch.float32])) if flag else torch.int64
        column = torch.tensor(columns[key], dtype=dtype)
        data[key] = column[:, None] if draw(st.booleans()) else column
    return data, scan(columns, n)


@settings(max_examples=150, deadline=None)
@given(tables())
def test_split_matches_scan_and_join_reverses_it(made: tuple[Any, Any]) -> None:
    data, expected = made
    before = data.clone()
    split = split_trajectories(data)
    width = max(map(len, expected), default=0)
    assert split.batch_size == split["next"].batch_size == (len(expected), width)
    assert (split["mask"].dtype, split["traj_ids"].dtype) == (torch.bool, torch.int64)
    for number, rows in enumerate(expected):
        padding = [0] * (width - len(rows))
        assert split["row"][number].tolist() == [row + 1 for row in rows] + padding
        assert split["mask"][number].tolist() == [True] * len(rows) + [False] * len(padding)
        assert split["traj_ids"][number].tolist() == [number] * len(rows) + padding
        for key in data.keys(True, True):
            assert torch.equal(split[key][number, : len(rows)], data[key][rows])
            assert not split[key][number, len(rows) :].any()
    assert set(split.keys(True, True)) == {*data.keys(True, True), "mask", "traj_ids"}
    one_by_one = split_trajectories(data, as_list=True)
    numbers = [[row + 1 for row in rows] for rows in expected]
    assert [one["row"].tolist() for one in one_by_one] == numbers
    back = [join_trajectories(split)]
    if one_by_one:
        back += [join_trajectories(one_by_one), join_trajectories(pad_collate(one_by_one))]
    for joined in back:
        assert joined.batch_size == joined["next"].batch_size == data.batch_size
        assert set(joined.keys(True, True)) == set(data.keys(True, True))
        for key in data.keys(True, True):
            assert joined[key].dtype == data[key].dtype
            assert torch.equal(joined[key], data[key])
    assert set(data.keys(True, True)) == set(before.keys(True, True))
    assert (data == before).all()


def table(**columns: list[int]) -> TensorDict:
    n = len(next(iter(columns.values())))
    data = TensorDict({"row": torch.arange(n)}, [n])
    for name, values in columns.items():
        data[tuple(name.split("__"))] = torch.tensor(values)
    return data


def lengths(data: TensorDict, **arguments: Any) -> list[int]:
    return split_trajectories(data, **arguments)["mask"].sum(1).tolist()


def test_end_keys_and_traj_keys_end_trajectories() -> None:
    data = table(
        next__done=[0, 1, 0, 0, 0, 0],
        next__stop=[0, 0, 1, 0, 0, 0],
        episode=[0, 0, 0, 0, 1, 1],
        mine=[0, 0, 0, 0, 0, 1],
    )
    assert lengths(data) == [2, 2, 2]
    assert lengths(data, traj_key=()) == [2, 4]
    assert lengths(data, end_keys=()) == [4, 2]
    assert lengths(data, end_keys=(), traj_key=()) == [6]
    assert lengths(data, end_keys=[("next", "stop")]) == [3, 1, 2]
    assert lengths(data, end_keys=[("next", "stop"), ("next", "zoo")], traj_key="mine") == [3, 2, 1]
    assert lengths(data, end_keys=(), traj_key=["mine", ("episode",)]) == [4, 1, 1]


def test_root_flags_and_is_init_end_no_trajectory() -> None:
    data = table(done=[1, 1, 1], is_init=[1, 1, 1], next__done=[0, 0, 1])
    assert lengths(data) == [3]


def test_ids_of_several_parts_are_compared_whole() -> None:
    data = TensorDict({"pair": torch.tensor([[1, 1], [1, 2], [1, 2], [2, 2]])}, [4])
    assert lengths(data, traj_key="pair") == [1, 2, 1]


def test_lists_are_views_and_split_is_not() -> None:
    data = table(next__done=[0, 1, 0])
    split_trajectories(data, as_list=True)[1]["row"].fill_(9)
    assert data["row"].tolist() == [0, 1, 9]
    split_trajectories(data)["row"].fill_(7)
    assert data["row"].tolist() == [0, 1, 9]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"end_keys": "done"}, TypeError, "end_keys: expected a list of keys, got 'done'"),
        ({"end_keys": [("next", "zoo")]}, KeyError, r"expected one of \('next', 'zoo'\), got none"),
        ({"end_keys": ("next", "done")}, ValueError, "'next': expected a tensor, got TensorDict"),
        ({"traj_key": "zoo"}, KeyError, "traj_key: no key 'zoo'"),
        ({"traj_key": ["row", "zoo"]}, KeyError, "traj_key: no key 'zoo'"),
        ({"traj_key": 3}, TypeError, "expected a key"),
        ({"end_keys": ()}, KeyError, "which end trajectories, got none"),
    ],
)
def test_missing_keys_are_refused(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    refuses(error, message, split_trajectories, table(next__done=[0, 1, 0]), **arguments)


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (table(row=[1, 2]), KeyError, "which end trajectories, got none"),
        (table(mask=[1, 1], episode=[1, 1]), ValueError, "expected no key 'mask'"),
        (table(traj_ids=[1, 1], episode=[1, 1]), ValueError, "expected no key 'traj_ids'"),
        (table(episode=[1, 1])[0], ValueError, r"expected batch size \[n\], got \[\]"),
        (torch.zeros(3), TypeError, "data: expected a TensorDict, got Tensor"),
        (
            table(episode=[1, 1]).set("name", NonTensorData("x", batch_size=[2])),
            TypeError,
            "key 'name': expected a tensor",
        ),
    ],
)
def test_invalid_data_cannot_be_split(data: Any, error: type[Exception], message: str) -> None:
    refuses(error, message, split_trajectories, data)


# Join


def test_a_mask_may_lie_anywhere() -> None:
    mask = torch.tensor([[False, True, True], [True, False, True]])
    data = TensorDict({"x": torch.arange(6).view(2, 3), "valid": {"m": mask}}, [2, 3])
    data["traj_ids"] = torch.ones(2, 3)
    joined = join_trajectories(data, mask_key=("valid", "m"))
    assert joined["x"].tolist() == [1, 2, 3, 5]
    assert "traj_ids" not in joined.keys()  # noqa: SIM118 - a TensorDict is no mapping
    kept = join_trajectories(data, mask_key=("valid", "m"), ids_key=None)
    assert kept["traj_ids"].tolist() == [1] * 4


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_join_accepts_split_of_torchrl() -> None:
    from torchrl.collectors.utils import split_trajectories as theirs

    data = table(next__done=[0, 1, 0, 0, 1, 0], collector__traj_ids=[4, 4, 2, 2, 2, 7])
    split = theirs(data)
    ours = split_trajectories(data)
    assert torch.equal(split["row"], ours["row"])
    assert torch.equal(split["collector", "mask"], ours["mask"])
    joined = join_trajectories(split, mask_key=("collector", "mask"))
    assert joined["row"].tolist() == data["row"].tolist()
    assert joined["collector", "traj_ids"].tolist() == [4, 4, 2, 2, 2, 7]


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        ([], ValueError, "at least one TensorDict"),
        (torch.zeros(2), TypeError, r"\[E, T\] or a list of them"),
        (table(episode=[1]), ValueError, r"expected batch size \[E, T\], got \[1\]"),
        (TensorDict({"x": torch.zeros(2, 3)}, [2, 3]), KeyError, "mask of rows under 'mask'"),
        (
            TensorDict({"mask": torch.ones(2, 3)}, [2, 3]),
            ValueError,
            "bool, got torch.float",
        ),
        (TensorDict({"mask": {"x": torch.ones(2, 3)}}, [2, 3]), ValueError, "bool, got TensorDict"),
        (
            TensorDict({"mask": torch.ones(2, 3, 1, dtype=torch.bool)}, [2, 3]),
            ValueError,
            r"expected shape \[2, 3\], got \[2, 3, 1\]",
        ),
        ([table(a=[1]), table(a=[2]), table(b=[3])], KeyError, "item 2 has no key 'a'"),
        ([table(a=[1]), table(a=[2]).float()], ValueError, "item 1, key 'row'"),
    ],
)
def test_invalid_data_cannot_be_joined(data: Any, error: type[Exception], message: str) -> None:
    refuses(error, message, join_trajectories, data)


def test_items_without_rows_join() -> None:
    joined = join_trajectories([table(a=[1, 2]), table(a=[1])[:0], table(a=[3])])
    assert joined["a"].tolist() == [1, 2, 3]


# Data sets


def test_a_split_data_set_is_laid_out_the_same(tmp_path: Path) -> None:
    file = tmp_path / "trials.h5"
    with RoboHiveWriter(file, float_dtype=None) as writer:
        for k, length in enumerate((5, 2, 8)):
            writer.add_trial(**make_trial(length, seed=k, terminated=k == 1))
    flat = ensure_dataset(
        tmp_path / "flat", get_sources=lambda: Sources.local([file]), layout=ROBOHIVE
    )
    on_disk = ensure_split(tmp_path / "flat", tmp_path / "split").tensordict()
    here = split_trajectories(flat.tensordict())
    assert here.batch_size == on_disk.batch_size == (3, 7)
    assert set(here.keys(True, True)) == set(on_disk.keys(True, True))
    for key, leaf in on_disk.items(True, True):
        assert here[key].dtype == leaf.dtype
        assert torch.equal(here[key], leaf), key
    joined = join_trajectories(on_disk)
    for key, leaf in flat.tensordict().items(True, True):
        assert torch.equal(joined[key], leaf), key


@pytest.mark.parametrize("place", [lambda: torch.device("meta"), torch.inference_mode])
def test_default_device_and_inference_mode_do_not_affect_split(place: Any) -> None:
    data = table(next__done=[0, 1, 0])
    with place():
        split = split_trajectories(data)
        joined = join_trajectories(split)
        assert lengths(data, end_keys=(), traj_key=()) == [3]
    assert split["traj_ids"].device.type == "cpu"
    assert joined["row"].tolist() == [0, 1, 2]
