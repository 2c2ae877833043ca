"""Records: where small leaves lie in a row, and what the tensors are that a batch is taken apart
into."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from replaykit import LazyTensorStorage, ReplayBuffer
from replaykit.schema import Schema
from replaykit.storages.records import WIDE_BYTES, alone, plan_records
from replaykit.structure import Branch, Leaf

Layout = dict[str, tuple[torch.dtype, tuple[int, ...]]]


def schema_of(leaves: Layout) -> Schema:
    children = tuple((key, Leaf(torch.Size(s), dtype)) for key, (dtype, s) in leaves.items())
    return Schema(Branch("tensordict", children, TensorDict))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(data=st.data())
def test_leaves_of_a_record_are_aligned_apart_and_little_is_lost(
    layouts: Any, data: st.DataObject
) -> None:
    leaves = data.draw(layouts)
    schema = schema_of(leaves)
    layout = plan_records(schema)
    nbytes = {(key,): torch.Size(s).numel() * d.itemsize for key, (d, s) in leaves.items()}
    small = [path for path, size in nbytes.items() if 0 < size < WIDE_BYTES]
    if len(small) < 2:
        assert layout is None
        assert alone(schema.leaves, layout) == list(schema.leaves)
        return
    assert layout is not None
    assert sorted(layout.offsets) == sorted(small)
    assert len(layout) == len(small)
    assert alone(schema.leaves, layout) == [path for path in nbytes if path not in small]
    end = 0
    for path in sorted(small, key=layout.offsets.__getitem__):
        assert layout.sizes[path] == nbytes[path]
        assert layout.offsets[path] >= end
        assert layout.offsets[path] % schema.leaves[path].dtype.itemsize == 0
        end = layout.offsets[path] + nbytes[path]
    widest = max(schema.leaves[path].dtype.itemsize for path in small)
    total = sum(nbytes[path] for path in small)
    assert end == total  # no gap between leaves
    assert end <= layout.stride
    assert layout.stride % widest == 0
    assert layout.stride <= 1.05 * total or layout.stride - total < widest
    assert layout.stride % layout.word.itemsize == 0


def _rows(count: int = 6) -> TensorDict:
    ids = torch.arange(count)
    return TensorDict(
        {
            "x": ids[:, None] + torch.zeros(3),
            "y": ids.double(),
            "matrix": (ids[:, None, None] + torch.zeros(2, 2)).half(),
            "flag": ids[:, None] % 2 == 1,
            "wide": ids[:, None] + torch.zeros(200),
        },
        [count],
    )


@pytest.fixture(params=["core", "torch"])
def buffer(request: pytest.FixtureRequest, tmp_path: Any) -> ReplayBuffer:
    rb = ReplayBuffer(storage=LazyTensorStorage(6), batch_size=4)
    rb.extend(_rows())
    if request.param == "torch":
        rb.storage.require()._native = None
    return rb


def _sampled(rb: ReplayBuffer, grad: bool) -> TensorDict:
    with torch.set_grad_enabled(grad):
        return rb.sample()


@pytest.mark.parametrize("grad", [True, False])
def test_leaves_of_a_batch_are_independent_of_the_buffer_and_of_each_other(
    buffer: ReplayBuffer, grad: bool, fingerprint: Any
) -> None:
    stored = fingerprint(buffer[:].clone())
    batch = _sampled(buffer, grad)
    kept = batch.clone()
    for key in ("x", "y", "matrix", "flag", "wide"):
        keys = list(batch.keys())
        versions = {k: batch[k]._version for k in keys}
        batch[key].zero_()
        changed = {k for k in keys if batch[k]._version != versions[k]}
        assert changed == {key}
        assert not batch[key].any()
        batch[key].copy_(kept[key])
        assert fingerprint(batch) == fingerprint(kept)
    assert fingerprint(buffer[:]) == stored


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("key", ["x", "y", "matrix", "wide"])
def test_gradients_flow_through_a_change_in_place(
    buffer: ReplayBuffer, grad: bool, key: str
) -> None:
    """Also where rows were drawn without gradients, as training loops do."""
    batch = _sampled(buffer, grad)
    before = batch[key].clone()
    weight = torch.ones((), dtype=before.dtype, requires_grad=True)
    batch[key].mul_(weight)
    batch[key].sum().backward()
    assert weight.grad == before.sum()


def test_in_place_change_of_one_leaf_keeps_gradients_of_others(buffer: ReplayBuffer) -> None:
    """Views of one tensor would share a version, and the backward pass would refuse."""
    batch = buffer.sample()
    weight = torch.ones(3, requires_grad=True)
    loss = (batch["x"] * weight).sum()  # keeps x for the backward pass
    batch["matrix"].zero_()
    batch["y"] += 1
    loss.backward()
    assert torch.equal(weight.grad, batch["x"].sum(0))
    loss = (batch["x"] * weight).sum()
    batch["x"].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("grad", [True, False])
def test_leaves_can_change_their_shape_in_place(buffer: ReplayBuffer, grad: bool) -> None:
    batch = _sampled(buffer, grad)
    kept = batch.clone()
    x, y = batch["x"], batch["y"]
    x.unsqueeze_(0)
    assert x.shape == (1, 4, 3)
    y.resize_(1000)  # the memory grows and moves, for the others as well
    assert y.shape == (1000,)
    x.squeeze_(0).transpose_(0, 1)
    assert torch.equal(x.T, kept["x"])
    batch["matrix"].transpose_(1, 2)
    assert torch.equal(batch["matrix"].transpose(1, 2), kept["matrix"])


def test_batches_taken_in_inference_mode_do_not_spoil_later_ones(buffer: ReplayBuffer) -> None:
    with torch.inference_mode():
        assert buffer.sample()["x"].is_inference()
    batch = buffer.sample()
    assert not batch["x"].is_inference()
    batch["x"].mul_(torch.ones((), requires_grad=True)).sum().backward()


def test_a_batch_can_be_pickled_and_read_by_numpy(buffer: ReplayBuffer, fingerprint: Any) -> None:
    batch = buffer.sample()
    assert fingerprint(pickle.loads(pickle.dumps(batch))) == fingerprint(batch)
    assert batch["x"].numpy()[:, 0].tolist() == batch["y"].tolist()
