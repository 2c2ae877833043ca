"""Messages: what arrives is what was sent, over the memory that came with it."""

from __future__ import annotations

import pickle
import threading
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict, tensorclass

from replaykit import LazyTensorStorage, ReplayBuffer
from replaykit.distributed.protocol import ITSELF, pack, seal, unpack
from tests.conftest import fingerprint, make_rows


def sent(message: Any) -> tuple[Any, list[Any]]:
    """A message as Ray sends it: buffers out of band, read-only at the other end."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
    memory = [bytes(buffer.raw()) for buffer in buffers]
    return pickle.loads(data, buffers=memory), memory


def travelled(value: Any, **options: Any) -> Any:
    return unpack(sent(pack(value))[0], **options)


@tensorclass
class Record:
    x: torch.Tensor
    name: str = "none"


def check(found: Any, given: Any) -> None:
    """Compare values, kinds and the order of keys; received tensors are aligned."""
    assert type(found) is type(given)
    assert fingerprint(found) == fingerprint(given)
    if isinstance(given, (dict, TensorDict)):
        assert list(found.keys()) == list(given.keys())
    if isinstance(given, TensorDict):
        assert found.device == given.device
    for leaf in torch.utils._pytree.tree_leaves(found):
        if isinstance(leaf, torch.Tensor):
            assert leaf.data_ptr() % max(leaf.itemsize, 1) == 0


ONE = np.arange(1000)


def one_address(*sizes: int) -> TensorDict:
    """Two memories, of arrays of NumPy over one another."""
    return TensorDict({f"{n}": torch.from_numpy(ONE[:n])[None] for n in sizes}, [1])


VALUES = {
    "nothing": None,
    "numbers": (1, 2.5, True, "text", 2**70),
    "rows": make_rows(3, 20),
    "a device": TensorDict({"x": torch.arange(3)}, [3], device="cpu"),
    "no rows": make_rows(0, 4)[:0],
    "no keys": TensorDict({}, [7]),
    "a tensor": torch.randn(3, 4),
    "a number": torch.tensor(7, dtype=torch.int16),
    "turned": torch.arange(12).view(3, 4).t(),
    "each second": torch.arange(100_000)[::2],
    "expanded": torch.ones(3, 1).expand(3, 50),
    "halves": torch.randn(5).to(torch.bfloat16),
    "complex": torch.randn(4, dtype=torch.complex128),
    "conjugate": torch.randn(4, dtype=torch.complex64).conj(),
    "imaginary": torch.randn(4, dtype=torch.complex64).conj().imag,
    "learnt": torch.ones(3, requires_grad=True),
    "large": torch.arange(100_000),
    "a dict": {"index": torch.arange(4), ("next", "x"): torch.zeros(2), "n": 1},
    "a list": [torch.arange(4), TensorDict({"x": torch.ones(2)}, [2]), "text"],
    "every size": [
        torch.arange(count).to(dtype)
        for dtype in (torch.uint8, torch.int16, torch.float64, torch.complex128)
        for count in (1, 3, 8)
    ],
    "one address": one_address(10, 1000),
    "one address, turned": one_address(1000, 10),
    "rows and info": (make_rows(0, 5), {"index": torch.arange(5)}),
}


@pytest.mark.parametrize("name", VALUES)
def test_packed_values_survive_a_round_trip(name: str) -> None:
    check(travelled(VALUES[name]), VALUES[name])
    check(travelled(VALUES[name], own=True), VALUES[name])
    sealed = seal(pack(VALUES[name]))
    assert (type(sealed) is bytes) is (name not in ("nothing", "large", "each second"))
    check(unpack(sealed), VALUES[name])
    for found in (travelled(VALUES[name]), unpack(sealed)):
        for leaf in torch.utils._pytree.tree_leaves(found):
            if isinstance(leaf, torch.Tensor):
                leaf.detach().zero_()  # G3: also where Ray's memory is read-only
    check(unpack(sealed), VALUES[name])  # who reads it twice gets two batches


def test_each_column_of_a_message_is_separate_to_autograd() -> None:
    rows = unpack(seal(pack(make_rows(0, 8))))
    rows["observation"].zero_()
    assert rows["id"]._version == 0


def test_other_containers_keep_their_kind() -> None:
    record = travelled(Record(torch.arange(3), "walk", batch_size=[3]))
    assert (record.x.tolist(), record.name, record.batch_size) == ([0, 1, 2], "walk", (3,))
    named = travelled(TensorDict({"x": torch.zeros(2, 3)}, [2, 3], names=["env", "time"]))
    assert named.names == ["env", "time"]
    words = travelled(TensorDict({"x": torch.zeros(2), "word": NonTensorData("w", [2])}, [2]))
    assert words["word"] == "w"
    rows = [TensorDict({"x": torch.zeros(n)}, []) for n in (1, 2)]
    ragged = travelled(LazyStackedTensorDict(*rows))
    assert [len(row["x"]) for row in ragged.tensordicts] == [1, 2]
    sparse = torch.eye(3).to_sparse()
    assert torch.equal(travelled(sparse).to_dense(), torch.eye(3))
    assert travelled(torch.nn.Parameter(torch.ones(2))).requires_grad
    assert travelled(torch.Generator().manual_seed(3)).initial_seed() == 3
    assert travelled(lambda x: x + 1)(1) == 2
    assert travelled(ITSELF) is ITSELF


def test_tensor_packed_twice_arrives_as_one_tensor() -> None:
    one = torch.arange(3)
    first, second = travelled([one, one])
    assert first is second
    column = torch.arange(6).view(3, 2)
    left, right = travelled([column[:, 0], column[:, 1]])
    assert left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()


def test_batch_is_sent_without_a_further_copy() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(4000), batch_size=2000)
    rb.extend(make_rows(0, 4000))
    batch = rb.sample()
    begin = min(leaf.data_ptr() for leaf in batch.values(True, True))
    message = pack(batch)
    sizes = [buffer.raw().nbytes for buffer in message[2:]]
    assert sum(sizes) <= 1.2 * sum(leaf.nbytes for leaf in batch.values(True, True))
    assert any(
        torch.frombuffer(buffer.raw(), dtype=torch.uint8).data_ptr() <= begin
        for buffer in message[2:]
    )
    received, memory = sent(message)
    found = unpack(received)
    check(found, batch)
    arrays = [np.frombuffer(block, np.uint8) for block in memory]
    ranges = [(array.ctypes.data, array.ctypes.data + array.nbytes) for array in arrays]
    for leaf in found.values(True, True):
        assert any(low <= leaf.data_ptr() < high for low, high in ranges)


def test_tensors_of_equal_shape_keep_their_separate_memory() -> None:
    """Shapes, strides and offsets are the same; whose memory it is, and where, is not."""
    for turn in range(3):
        table = torch.arange(120.0).view(30, 4) + turn
        other = -table
        for left, right in ((table, table), (table, other), (other, table), (other, other)):
            nothing = torch.empty(30, 0)
            given = TensorDict({"x": left[:, :2], "none": nothing, "y": right[:, 2:]}, [30])
            check(travelled(given), given)
            assert len(pack(given)[2:]) == 1


def test_few_rows_of_much_memory_travel_alone() -> None:
    rows = torch.arange(10**6)
    message = pack(TensorDict({"x": rows[5:8], "y": rows[10:13]}, [3]))
    assert sum(buffer.raw().nbytes for buffer in message[2:]) < 1000
    assert unpack(sent(message)[0])["y"].tolist() == [10, 11, 12]


def test_owned_values_do_not_share_memory_with_the_message() -> None:
    received, memory = sent(pack(torch.arange(100_000)))
    kept, mapped = unpack(received, own=True), unpack(received)
    mapped.zero_()
    assert memory[0][:8] == bytes(8)
    assert memory[0][-8:] == bytes(8)
    assert kept.tolist() == list(range(100_000))


def test_unpicklable_value_is_refused() -> None:
    with pytest.raises((TypeError, pickle.PicklingError)):
        pack(threading.Lock())


@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(100_000, dtype=torch.uint8),
        {str(number): torch.zeros(16_384, dtype=torch.uint8) for number in range(6)},
        [torch.zeros(20_000, dtype=torch.uint8) for _ in range(17)],
        "text",
        None,
        ITSELF,
    ],
    ids=["large", "large together", "many pieces", "text", "nothing", "itself"],
)
def test_other_messages_stay_unchanged(value: Any) -> None:
    """What goes to Ray's store is not copied; what is no memory gains nothing."""
    message = pack(value)
    assert seal(message) is message
