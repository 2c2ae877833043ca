"""Batches to other devices: one copy for what is small, and the same tensors there.

Without an accelerator the moves are those of ``_move_packed`` by a function that copies and counts,
and those to ``meta``, which has shapes and no values.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from replaykit import LazyTensorStorage, ReplayBuffer, to_device
from replaykit.structure import raw_bytes
from replaykit.transfer import _ALONE_BYTES, _move_packed, _moved, is_plain
from tests.support.containers import containers, described


class Moves:
    """A move that copies, and notes how many bytes went at once."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, block: torch.Tensor) -> torch.Tensor:
        self.sizes.append(0 if block.is_sparse else block.nbytes)
        return block.clone()


def packed(*tensors: torch.Tensor) -> tuple[list[torch.Tensor], list[int]]:
    moves = Moves()
    return _move_packed(list(tensors), moves), moves.sizes


def check_same(moved: list[torch.Tensor], given_: Any, strides: bool = True) -> None:
    assert len(moved) == len(given_)
    for there, here in zip(moved, given_, strict=True):
        assert (there.dtype, there.shape) == (here.dtype, here.shape)
        assert torch.equal(raw_bytes(there), raw_bytes(here))
        assert not strides or there.stride() == here.stride()
        assert there.untyped_storage().data_ptr() != here.untyped_storage().data_ptr()


def memories(tensors: Any) -> int:
    return len({tensor.untyped_storage().data_ptr() for tensor in tensors})


# -- one copy -------------------------------------------------------------------------------------


def test_small_tensors_go_in_one_move_and_large_ones_alone() -> None:
    small = [torch.rand(3), torch.arange(7), torch.ones(2, 3, dtype=torch.bool)]
    large = [torch.arange(_ALONE_BYTES + 3).to(torch.uint8), torch.rand(_ALONE_BYTES // 4)]
    given_ = [small[0], large[0], *small[1:], large[1]]
    moved, sizes = packed(*given_)
    check_same(moved, given_)
    assert sorted(sizes) == [3 * 64, _ALONE_BYTES, _ALONE_BYTES + 3]  # no byte of padding
    assert memories(moved) == 3


def test_empty_input_moves_nothing() -> None:
    assert packed() == ([], [])


def test_a_sampled_batch_is_one_move_and_one_memory_there() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(9), batch_size=50)
    ids = torch.arange(9)
    rows = {"x": ids[:, None] + torch.rand(9, 3), "done": ids[:, None] > 5, "id": ids}
    rb.extend(TensorDict({**rows, "next": {"x": torch.rand(9, 3).double()}}, [9]))
    leaves = list(rb.sample().values(True, True))
    moved, sizes = packed(*leaves)
    check_same(moved, leaves)
    assert len(sizes) == 1
    before = [leaf._version for leaf in moved]
    moved[0].add_(1)
    assert [leaf._version for leaf in moved[1:]] == before[1:]
    assert not any(leaf._is_view() for leaf in moved)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_views_of_any_memories_arrive_as_they_are(data: st.DataObject) -> None:
    """Those that share memory share it there, unless they are small parts of much."""
    dtypes = [torch.uint8, torch.int16, torch.float32, torch.float64, torch.complex128]
    given_ = []
    for seed in range(data.draw(st.integers(1, 3))):
        size = data.draw(st.sampled_from([16, 48, 160, 4000, _ALONE_BYTES + 16]))
        generator = torch.Generator().manual_seed(seed)
        memory = torch.randint(0, 120, (size,), dtype=torch.uint8, generator=generator)
        for _ in range(data.draw(st.integers(1, 3))):
            values = memory.view(data.draw(st.sampled_from(dtypes)))
            start = data.draw(st.integers(0, min(7, len(values) - 1)))
            step = data.draw(st.sampled_from([1, 1, 2, 3]))
            view = values[start::step]
            if len(view) % 2 == 0 and data.draw(st.booleans()):
                view = view.view(2, -1).T
            if data.draw(st.booleans()):
                view = view[:1].expand(5, *view.shape[1:])
            given_.append(view)
    kept = [view.clone() for view in given_]
    moved, _ = packed(*given_)
    check_same(moved, given_, strides=False)
    check_same(given_, kept, strides=False)  # what was moved is as it was


def test_views_of_one_memory_share_it_there() -> None:
    memory = torch.arange(30.0)
    given_ = [
        memory[:20],
        memory[5:25].view(4, 5).T,
        memory[:1].expand(9),
        memory.view(torch.int32),
    ]
    moved, sizes = packed(*given_)
    check_same(moved, given_)
    assert (memories(moved), len(sizes)) == (1, 1)
    moved[0][6] = -1
    assert moved[1][1, 0] == -1
    assert moved[1]._version == 0


def test_a_small_part_of_much_memory_is_moved_without_the_rest() -> None:
    much = torch.arange(3_000_000.0).view(3000, 1000)
    given_ = [much[5], much[:, 7], much[10:13, ::500]]
    moved, sizes = packed(*given_)
    check_same(moved, given_, strides=False)
    assert sum(sizes) < 20_000
    assert all(tensor.is_contiguous() for tensor in moved)


def test_arrays_that_share_a_start_address_keep_their_lengths() -> None:
    array = np.arange(100.0)
    given_ = [torch.from_numpy(array[:2]), torch.from_numpy(array)]
    for order in (given_, given_[::-1]):
        check_same(packed(*order)[0], order)


def test_one_tensor_twice_is_one_tensor_there() -> None:
    x = torch.rand(4)
    moved = to_device([x, {"again": x}, torch.rand(4)], "meta")
    assert moved[0] is moved[1]["again"]
    assert moved[0] is not moved[2]


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.uint16, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.complex128],
)
def test_every_dtype_arrives(dtype: torch.dtype) -> None:
    raw = torch.arange(7 * dtype.itemsize) % 2
    given_ = [raw.to(torch.uint8).view(dtype), torch.rand(3), raw.to(torch.uint8).view(dtype)[2]]
    check_same(packed(*given_)[0], given_)


# -- what is not its bytes -------------------------------------------------------------------------


def _of_every_kind() -> dict[str, torch.Tensor]:
    z = torch.tensor([1 + 2j, 3 - 1j])
    return {
        "conjugate": z.conj(),
        "negative": z.conj().imag,
        "gradient": torch.ones(3, requires_grad=True) * 2,
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(5.0),
        "sparse": torch.eye(3).to_sparse(),
    }


def _move(data: Any) -> tuple[Any, list[int]]:
    moves = Moves()
    moved = _moved(data, moves, lambda tensor: False, device=None)
    return moved, moves.sizes


def test_tensors_that_are_more_than_bytes_move_by_themselves() -> None:
    given_ = _of_every_kind()
    plain = {name for name, tensor in given_.items() if is_plain(tensor)}
    assert plain == {"scalar"}
    moved, sizes = _move({**given_, "a": torch.rand(2), "b": torch.rand(3)})
    assert len(sizes) == len(given_) - len(plain) + 1
    for name, tensor in given_.items():
        there, here = (t.to_dense() if t.is_sparse else t for t in (moved[name], tensor))
        assert torch.equal(there, here)
    assert moved["gradient"].grad_fn is not None
    moved["parameter"].sum().backward()
    assert given_["parameter"].grad is not None


def test_tensors_already_on_the_device_stay_the_same_objects() -> None:
    for device in ("cpu", torch.device("cpu"), "cpu:0"):
        given_ = [*_of_every_kind().values(), torch.rand(3)]
        moved = to_device(given_, device)
        assert all(a is b for a, b in zip(moved, given_, strict=True))


# -- containers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", containers())
def test_containers_arrive_as_they_are(name: str) -> None:
    data = containers()[name]
    before, kept = described(data, "cpu" if name == "tensor" else None), copy.copy(data)
    moved = to_device(data, "meta")
    assert type(moved) is type(data)
    assert described(moved, "meta") == before
    assert described(data) == described(kept) == before


@pytest.mark.parametrize("name", ["tensordict", "tensorclass", "ragged", "ragged inside", "pytree"])
def test_all_tensors_of_a_container_go_in_one_move(name: str, fingerprint: Any) -> None:
    data = containers()[name]
    moved, sizes = _move(data)
    assert len(sizes) == 1
    if "ragged" not in name:  # whose rows have no values in common to look at
        assert fingerprint(moved) == fingerprint(data)
    assert described(moved) == described(data)


def test_a_factory_of_defaults_stays_with_its_dict() -> None:
    moved = to_device(containers()["default"], "meta")
    assert moved["new"] == []


# -- with an accelerator --------------------------------------------------------------------------


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("non_blocking", [True, False])
@pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("cuda")])
def test_values_move_to_an_accelerator_and_back(
    device: Any, non_blocking: bool, fingerprint: Any
) -> None:
    for name in ("tensordict", "tensorclass", "pytree", "with objects"):
        data = containers()[name]
        there = to_device(data, device, non_blocking=non_blocking)
        torch.cuda.synchronize()
        assert described(there, "cuda") == described(data)
        back = to_device(there, "cpu")
        assert described(back, "cpu") == described(data)
        if name != "pytree":
            assert torch.equal(
                raw_bytes(back.x if name == "tensorclass" else back["x"]),
                raw_bytes(data.x if name == "tensorclass" else data["x"]),
            )
        again = to_device(there, device)
        leaf = "x"
        if isinstance(there, TensorDict):
            assert again[leaf] is there[leaf]


@pytest.mark.cuda
@needs_cuda
def test_a_pinned_batch_is_in_pinned_memory_and_the_same() -> None:
    from replaykit.transfer import pin

    given_ = [torch.rand(3), torch.arange(9), torch.rand(_ALONE_BYTES // 4 + 1), torch.zeros(0, 2)]
    pinned = pin(given_)
    assert all(tensor.is_pinned() for tensor in pinned if tensor.numel())
    assert memories(pinned[:2]) == 1
    check_same(pinned[:3], given_[:3])
    assert all(a is b for a, b in zip(pin(pinned[:3]), pinned[:3], strict=True))
