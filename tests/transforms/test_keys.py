"""Keys that are selected, excluded, renamed, joined, or kept as they are stored."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    CatTensors,
    Compose,
    ExcludeTransform,
    KeepRaw,
    LazyTensorStorage,
    ListStorage,
    RenameTransform,
    ReplayBuffer,
    RewardScale,
    SelectTransform,
)
from tests.support.refusals import refuses


@pytest.fixture
def data() -> TensorDict:
    return TensorDict(
        {
            "a": torch.arange(4).view(2, 2),
            "b": torch.arange(4, 6).view(2, 1),
            "next": {"a": torch.arange(10, 14).view(2, 2), "deep": {"c": torch.zeros(2)}},
        },
        [2],
    )


def _keys(data: TensorDict) -> set[Any]:
    return set(data.keys(True, True))


ALL = {"a", "b", ("next", "a"), ("next", "deep", "c")}


@pytest.mark.parametrize(
    ("transform", "left"),
    [
        (ExcludeTransform("a"), ALL - {"a"}),
        (ExcludeTransform(("next", "deep", "c")), ALL - {("next", "deep", "c")}),
        (ExcludeTransform("a", "zoo", ("next", "zoo"), ("zoo", "a")), ALL - {"a"}),
        (ExcludeTransform(), ALL),
        (SelectTransform("b", ("next", "deep", "c")), {"b", ("next", "deep", "c")}),
        (SelectTransform("next"), {("next", "a"), ("next", "deep", "c")}),
        (RenameTransform(["next"], ["n"]), {"a", "b", ("n", "a"), ("n", "deep", "c")}),
    ],
)
def test_excluded_keys_go_and_selected_ones_stay(
    data: TensorDict, fingerprint: Any, transform: Any, left: set[Any]
) -> None:
    before = fingerprint(data)
    assert _keys(transform(data)) == left
    assert fingerprint(data) == before


@pytest.mark.parametrize(
    ("in_keys", "out_keys", "moved"),
    [
        (["a"], ["z"], {"z": "a"}),
        (
            [("next", "deep", "c")],
            [("new", "place", "c")],
            {("new", "place", "c"): ("next", "deep", "c")},
        ),
        (["a", "b"], ["b", "a"], {"b": "a", "a": "b"}),
        (["a", ("next", "a")], [("next", "a"), "a"], {("next", "a"): "a", "a": ("next", "a")}),
        (["a"], ["b"], {"b": "a"}),
        ([], [], {}),
    ],
)
def test_renamed_keys_keep_their_values_and_may_be_swapped(
    data: TensorDict,
    fingerprint: Any,
    in_keys: list[Any],
    out_keys: list[Any],
    moved: dict[Any, Any],
) -> None:
    before = fingerprint(data)
    renamed = RenameTransform(in_keys, out_keys)(data)
    for new, old in moved.items():
        assert renamed[new] is data[old]
    assert _keys(renamed) == (ALL - set(in_keys)) | set(moved)
    for key in ALL - set(in_keys) - set(moved):
        assert renamed[key] is data[key]
    assert fingerprint(data) == before


@pytest.mark.parametrize(
    ("dim", "shape"),
    [(-1, (2, 3, 8)), (1, (2, 3, 8)), (0, (2, 6, 4)), (-2, (2, 6, 4))],
)
def test_parts_are_joined_along_a_feature_dimension(dim: int, shape: tuple[int, ...]) -> None:
    """A dimension that is not negative counts from the first feature dimension."""
    one, two = torch.rand(2, 3, 4), torch.rand(2, 3, 4)
    data = TensorDict({"one": one, "n": {"two": two}}, [2])
    joined = CatTensors([("n", "two"), "one"], "out", dim=dim)(data)
    assert joined["out"].shape == shape
    assert torch.equal(joined["out"], torch.cat([two, one], dim if dim < 0 else dim + 1))
    assert _keys(joined) == {"out"}


def test_joined_parts_stay_on_request(data: TensorDict, fingerprint: Any) -> None:
    before = fingerprint(data)
    joined = CatTensors(["a", "b"], ("obs", "all"), del_keys=False)(data)
    assert joined["obs", "all"].tolist() == [[0, 1, 4], [2, 3, 5]]
    assert _keys(joined) == ALL | {("obs", "all")}
    nested = CatTensors(["a"], ("next", "new"), del_keys=False)(data)
    assert _keys(nested) == ALL | {("next", "new")}
    again = CatTensors(["a", "b"], "a")(data)
    assert again["a"].shape == (2, 3)
    assert _keys(again) == ALL - {"b"}
    assert fingerprint(data) == before


@pytest.mark.parametrize(
    "transform",
    [
        SelectTransform("a", "zoo"),
        SelectTransform(("next", "zoo")),
        RenameTransform(["zoo"], ["a"]),
        RenameTransform([("a", "zoo")], ["b"]),
        CatTensors(["a", "zoo"], "out"),
    ],
    ids=repr,
)
def test_absent_keys_are_named_with_those_that_are_there(
    data: TensorDict, fingerprint: Any, transform: Any
) -> None:
    before = fingerprint(data)
    refuses(KeyError, r"no key .*zoo.*; there are .*a.*, .*b", transform, data)
    assert fingerprint(data) == before


def test_writing_is_not_affected(data: TensorDict) -> None:
    for transform in (
        ExcludeTransform("a"),
        SelectTransform("a"),
        RenameTransform(["a"], ["z"]),
        CatTensors(["a", "b"], "out"),
    ):
        assert transform.inv(data) is data


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
def test_key_transforms_keep_the_index_in_a_buffer(storage: Any, make_rows: Any) -> None:
    rb = ReplayBuffer(
        storage=storage(4),
        batch_size=5,
        transform=Compose(
            ExcludeTransform(("next", "done")),
            RenameTransform(["action", ("next", "reward")], [("extra", "action"), "reward"]),
            CatTensors(["observation", "reward"], "all"),
            SelectTransform("id", "all", ("extra", "action")),
        ),
    )
    rb.extend(make_rows(0, 4))
    batch = rb.sample()
    assert _keys(batch) == {"id", "all", ("extra", "action"), "index"}
    assert torch.equal(batch["index"], batch["id"])
    assert torch.equal(batch["all"][:, 0], batch["id"] * 10.0)
    assert torch.equal(batch["all"][:, 3], batch["id"] / 2)
    assert _keys(rb[:]) == {"id", "all", ("extra", "action")}
    assert set(rb.storage[0].keys(True, True)) == set(make_rows(0, 1).keys(True, True))


def test_select_of_keys_that_samples_add_is_too_early(make_rows: Any) -> None:
    """Info is merged after the transforms, so that none can lose it; none sees it either."""
    rb = ReplayBuffer(storage=LazyTensorStorage(4), transform=SelectTransform("index"))
    rb.extend(make_rows(0, 4))
    refuses(KeyError, r"no key .*index", rb.sample, 2)


def make(rows: int) -> TensorDict:
    return TensorDict({"next": {"reward": torch.arange(rows)[:, None] * 1.0}}, [rows])


def test_keep_raw_adds_stored_values_to_transformed_batch() -> None:
    keep = KeepRaw([("next", "reward")], under="stored")
    refuses(ValueError, "KeepRaw.*'stored'.*before.*RewardScale", Compose, RewardScale(2.0), keep)
    chain = Compose(RewardScale(2.0), keep, order="auto")
    assert [type(each) for each in chain] == [KeepRaw, RewardScale]
    rb = ReplayBuffer(storage=LazyTensorStorage(10), transform=chain)
    rb.extend(make(8))
    batch = rb.sample(32)
    assert torch.equal(batch["stored", "next", "reward"][:, 0].long(), batch["index"])
    assert torch.equal(batch["next", "reward"], batch["stored", "next", "reward"] * 2)


def test_a_key_that_is_not_there_or_in_the_way_is_named() -> None:
    refuses(KeyError, "absent", KeepRaw(["absent"]), make(2))
    data = make(2).set(("raw", "next", "reward"), torch.zeros(2))
    refuses(KeyError, "expected no key", KeepRaw([("next", "reward")]), data)
