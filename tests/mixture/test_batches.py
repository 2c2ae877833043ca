"""Samples of members put together: what is in them, where they lie, how they are collated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, TensorDict, tensorclass

import replaykit
from replaykit import Cast, LazyStackStorage, LazyTensorStorage, ReplayBuffer, ReplayBufferEnsemble
from replaykit.mixture.joining import BatchParts, stacked
from tests.mixture.members import check_rows, holding, make_member, rows_of
from tests.support.refusals import refuses


@tensorclass
class Step:
    x: torch.Tensor
    y: torch.Tensor


def both(*members: ReplayBuffer, **arguments: Any) -> ReplayBufferEnsemble:
    return ReplayBufferEnsemble(*members, sample_from_all=True, **arguments)


@pytest.mark.parametrize(
    "arguments",
    [{"sample_from_all": True}, {"p": [1, 0, 2], "num_buffer_sampled": 2}, {}],
    ids=["all", "weights", "plain"],
)
def test_batches_have_the_form_of_torchrl(arguments: dict[str, Any]) -> None:
    def made(library: Any) -> Any:
        members = []
        for number in range(3):
            rb = library.TensorDictReplayBuffer(storage=library.LazyTensorStorage(20))
            rb.extend(rows_of(number, 12))
            members.append(rb)
        return library.ReplayBufferEnsemble(*members, batch_size=12, **arguments)

    ours = made(replaykit).sample()
    theirs = made(pytest.importorskip("torchrl.data")).sample()
    assert ours.batch_size == theirs.batch_size
    assert set(ours.keys(True, True)) - {"index_generation"} == set(theirs.keys(True, True))
    for key in theirs.keys(True, True):
        assert (ours[key].dtype, ours[key].shape) == (theirs[key].dtype, theirs[key].shape), key
    for batch in (ours, theirs):
        check_rows(batch)
        ids = batch["index", "buffer_ids"]
        assert (ids == ids[:, :1]).all()


@given(
    members=st.lists(st.integers(0, 3), min_size=1, max_size=12),
    rows=st.integers(1, 4),
    width=st.sampled_from([1, 3, 200_000]),
)
@settings(max_examples=60, deadline=None)
def test_rows_are_placed_at_their_part(members: list[int], rows: int, width: int) -> None:
    """Against the plain way: part by part, in the order of the members."""
    if len(members) * rows * width > 4_000_000:
        width = 1
    pieces, queues = [], {}
    for member in sorted(set(members)):
        count = members.count(member) * rows
        data = (torch.arange(count) + 1000 * member)[:, None].expand(-1, width).contiguous()
        pieces.append(data)
        queues[member] = list(data.split(rows))
    plain = torch.stack([queues[member].pop(0) for member in members])
    places = BatchParts(members, rows)
    assert torch.equal(places.join(pieces), plain)
    ids = torch.tensor(members)[:, None].expand(-1, rows)
    assert torch.equal(places.ids(torch.device("cpu")), ids)


@pytest.mark.pitfall("RD7")
def test_samples_that_differ_are_refused_by_key_and_member() -> None:
    """RD7: a data set knows more than an online buffer does."""
    more = holding(rows_of(0, 9).set("episode", torch.arange(9)))
    other = rows_of(1, 9)
    other["observation"] = other["observation"].double()
    other["next", "reward"] = other["next", "reward"].expand(-1, 2)
    with pytest.raises(ValueError, match="of members 0 and 1") as caught:
        both(more, holding(other)).sample(4)
    text = str(caught.value)
    assert "'episode': int64 [] and nothing" in text
    assert "'observation': float32 [3] and float64 [3]" in text
    assert "('next', 'reward'): float32 [1] and float32 [2]" in text
    assert "'id'" not in text
    assert "keys=" in text


@pytest.mark.pitfall("RD7")
def test_keys_argument_selects_keys_of_all_members() -> None:
    more = holding(rows_of(0, 9).set("episode", torch.arange(9)))
    ensemble = both(more, make_member(1), keys=["id", ("next", "reward")])
    batch = ensemble.sample(6)
    assert set(batch.keys(True, True)) == {
        "id",
        ("next", "reward"),
        ("index", "index"),
        ("index", "buffer_ids"),
        "index_generation",
    }
    check_rows(batch)
    assert set(ensemble[:, 0].keys(True, True)) == {"id", ("next", "reward")}
    with pytest.raises(KeyError, match="member 1: no 'episode'"):
        both(more, make_member(1), keys=["id", "episode"]).sample(6)
    with pytest.raises(TypeError, match="member 0: expected a TensorDict"):
        both(holding(torch.arange(4)), keys=["id"]).sample(1)


def test_transforms_of_members_can_make_unlike_samples_equal() -> None:
    double = rows_of(1, 9)
    double["observation"] = double["observation"].double()
    rb = holding(double, transform=Cast(torch.float32, ["observation"]))
    assert both(make_member(0), rb).sample(6)["observation"].dtype == torch.float32


def test_the_order_of_keys_does_not_matter() -> None:
    rows = rows_of(1, 9)
    turned = TensorDict({key: rows[key] for key in reversed(list(rows.keys()))}, rows.batch_size)
    check_rows(both(make_member(0), holding(turned)).sample(6))


@pytest.mark.parametrize(
    "make",
    [
        lambda x: Step(x=x, y=x * 2.0, batch_size=[len(x)]),
        lambda x: {"x": x, "y": (x * 2.0, x.double())},
        lambda x: (x, [x * 2, x * 3]),
        lambda x: x,
        lambda x: TensorDict({"x": TensorDict({"z": x}, [len(x)])}, [len(x)]),
    ],
    ids=["tensorclass", "mapping", "sequence", "tensor", "nested"],
)
def test_members_of_every_container_are_joined(make: Any) -> None:
    members = [holding(make(torch.arange(5) + 10 * i)) for i in range(2)]
    data, info = both(*members).sample(6, return_info=True)
    expected = info["index", "index"] + 10 * info["index", "buffer_ids"]
    made = make(expected.reshape(-1))
    for one, other in zip(_leaves(data), _leaves(made), strict=True):
        assert torch.equal(one.flatten(0, 1), other)
    assert type(data) is type(made)
    nested = both(both(*members), members[0])
    assert [leaf.shape[:2] for leaf in _leaves(nested.sample(8))] == [(2, 4) for _ in _leaves(made)]


def _leaves(data: Any) -> list[torch.Tensor]:
    if isinstance(data, torch.Tensor):
        return [data]
    if isinstance(data, Step):
        return [data.x, data.y]
    if isinstance(data, TensorDict):
        return [
            data[key]
            for key in sorted(data.keys(True, True), key=str)
            if key[0] != "index" and key != "index_generation"
        ]
    items = data.values() if isinstance(data, dict) else data
    return [leaf for item in items for leaf in _leaves(item)]


def test_containers_of_different_kinds_are_refused() -> None:
    x = torch.arange(5)
    table, step = TensorDict({"x": x, "y": x}, [5]), Step(x=x, y=x, batch_size=[5])
    refuses(ValueError, "containers of other kinds", both(holding(table), holding(step)).sample, 4)
    refuses(ValueError, "of members 0 and 1", both(holding(table), holding(x)).sample, 4)


def test_rows_that_cannot_be_stacked_ask_for_a_collate_fn() -> None:
    members = [
        holding([TensorDict({"x": torch.zeros(n + first)}) for n in range(3)], LazyStackStorage(9))
        for first in (1, 2)
    ]
    with pytest.raises(ValueError, match=r"member 0: .*give a collate_fn="):
        both(*members, generator=torch.Generator().manual_seed(0)).sample(6)
    ensemble = both(*members, collate_fn=LazyStackedTensorDict.lazy_stack)
    batch = ensemble.sample(6)
    assert batch.batch_size == (2, 3)
    assert batch["index", "buffer_ids"].tolist() == [[0] * 3, [1] * 3]
    lengths = [[row["x"].shape[0] for row in part.unbind(0)] for part in batch.unbind(0)]
    assert lengths == (batch["index", "index"] + batch["index", "buffer_ids"] + 1).tolist()


def test_custom_collate_functions_collate_members_and_batches() -> None:
    seen: list[Any] = []

    def collate(samples: list[TensorDict]) -> TensorDict:
        seen.extend(samples)
        return torch.stack(samples).set("parts", torch.full((len(samples), 2), len(samples)))

    members = [holding(rows_of(0, 9).set("episode", torch.arange(9))), make_member(1)]
    ensemble = ReplayBufferEnsemble(
        *members,
        num_buffer_sampled=4,
        collate_fn=collate,
        collate_fns=[lambda rows: rows.exclude("episode"), None],
        generator=torch.Generator().manual_seed(2),
    )
    batch = ensemble.sample(8)
    check_rows(batch)
    assert [len(sample) for sample in seen] == [2] * 4
    assert (batch["parts"] == 4).all()
    assert "episode" in members[0].sample(2)  # the member's own samples are as they were


def test_changing_a_batch_does_not_change_the_members() -> None:
    ensemble = both(make_member(0), make_member(1))
    batch = ensemble.sample(6)
    batch["id"].fill_(-1)
    batch["index", "index"].fill_(-1)
    assert (ensemble[0][:]["id"] >= 0).all()
    check_rows(ensemble.sample(6))


def test_contiguous_option_makes_batches_contiguous() -> None:
    ensemble = ReplayBufferEnsemble(make_member(0), num_buffer_sampled=2, contiguous=True)
    batch = ensemble.sample(6)
    assert all(batch[key].is_contiguous() for key in batch.keys(True, True))


def test_a_transform_that_changes_the_number_of_rows_is_named() -> None:
    shrinking = make_member(1, transform=lambda batch: batch[:1])
    with pytest.raises(RuntimeError, match=r"member 1: .* made 1 of 3 rows"):
        both(make_member(0), shrinking).sample(6)


def test_stacked_joins_tensors_and_refuses_unlike_records() -> None:
    places = BatchParts([0, 1], 2)
    assert stacked([(0, torch.arange(2)), (1, torch.arange(2))], places).shape == (2, 2)
    objects = TensorDict({"x": torch.arange(2), "name": "a"}, [2])
    with pytest.raises(TypeError, match=r"member 1: .*non-tensor"):
        stacked([(0, TensorDict({"x": torch.arange(2)}, [2])), (1, objects)], places)


def test_values_computed_by_transforms_keep_their_gradient() -> None:
    weight = torch.ones(3, requires_grad=True)

    def encode(batch: Any) -> Any:
        return batch.set("code", batch["observation"] * weight)

    members = [make_member(i, transform=encode) for i in range(2)]
    for arguments in ({"sample_from_all": True}, {"num_buffer_sampled": 6}):
        batch = ReplayBufferEnsemble(*members, **arguments).sample(6)
        weight.grad = None
        batch["code"].sum().backward()
        assert weight.grad is not None
        assert torch.equal(weight.grad, batch["observation"].sum((0, 1)))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_members_on_several_devices_need_a_device_argument() -> None:
    there = holding(rows_of(1, 9), LazyTensorStorage(20, device="cuda"))
    refuses(ValueError, "give device=", both(make_member(0), there).sample, 6)
    for device in ("cpu", "cuda"):
        batch = both(make_member(0), there, device=device).sample(6)
        assert all(batch[key].device.type == device for key in batch.keys(True, True))
        check_rows(batch)
