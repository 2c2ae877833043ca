"""What goes into a checkpoint and comes out: keys, tensors, objects, storages of one's own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorClass, TensorDict

from replaykit import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    Storage,
    TensorStorage,
)
from replaykit.checkpoint import chunks
from replaykit.errors import CheckpointError
from tests.checkpoint.building import make
from tests.support.refusals import refuses


class Point(TensorClass):
    """Content that is no TensorDict, with a field that is no tensor."""

    x: torch.Tensor
    about: Any = None


@pytest.mark.pitfall("CK12")
@pytest.mark.parametrize("make_storage", [LazyTensorStorage, LazyMemmapStorage, ListStorage])
def test_any_key_can_be_saved(make_storage: Any, tmp_path: Path):
    """CK12: separators, dots, Unicode, long names, names that differ in case only."""
    keys: list[Any] = [
        "a.b",
        ("a", "b"),
        "a/b",
        "ä",
        "A",
        "..",
        ".",
        " ",
        "manifest.json",
        "data-0123456789ab-00000.bin",
        "$",
        "\u0000",
        "\ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16"),
        "x" * 200,
        ("n" * 200, "m" * 200),
    ]
    data = TensorDict({}, [3])
    for number, key in enumerate(keys):
        data[key] = torch.arange(3) + number * 10
    buffer = ReplayBuffer(storage=make_storage(3))
    buffer.extend(data)
    buffer.dumps(tmp_path)
    loaded = ReplayBuffer(storage=make_storage(3))
    loaded.loads(tmp_path)
    for number, key in enumerate(keys):
        column = loaded[:].get(key if isinstance(key, tuple) else (key,))
        assert column.tolist() == [number * 10, number * 10 + 1, number * 10 + 2], key


CONTENTS = {
    "tensor": torch.arange(6).view(3, 2),
    "tensordict": TensorDict({"a": {"b": {"c": torch.arange(3)}}, "z": torch.ones(3, 0)}, [3]),
    "tensorclass": Point(x=torch.arange(3.0), about=("a", [1, None]), batch_size=[3]),
    "nested tensorclass": TensorDict({"p": Point(x=torch.arange(3.0), batch_size=[3])}, [3]),
    "trajectories": TensorDict({"x": torch.arange(12).view(3, 4)}, [3, 4]),
    "tuple": (torch.arange(3), [torch.ones(3, 2)]),
    "mapping": {"a": torch.arange(3), 7: (torch.zeros(3),), "$": torch.ones(3)},
    "zero-size": torch.zeros(3, 0, 2),
    "flags": TensorDict({"done": torch.tensor([True, False, True])}, [3]),
}


@pytest.mark.parametrize("name", CONTENTS)
@pytest.mark.parametrize("make_storage", [LazyTensorStorage, LazyMemmapStorage, TensorStorage])
def test_any_content_of_tensors_comes_back(name: str, make_storage: Any, tmp_path: Path):
    content = CONTENTS[name]
    lazy = make_storage is not TensorStorage
    buffer = ReplayBuffer(storage=make_storage(5) if lazy else TensorStorage(content))
    if lazy:
        buffer.extend(content)
    buffer.dumps(tmp_path)
    loaded = ReplayBuffer(storage=LazyTensorStorage(5 if lazy else 3))
    loaded.loads(tmp_path)
    expected, found = buffer[:], loaded[:]
    assert type(found) is type(expected)
    flat = [
        (torch.utils._pytree.tree_leaves(v) if isinstance(v, (tuple, dict)) else [v])
        for v in (expected, found)
    ]
    for a, b in zip(*flat, strict=True):
        assert (a == b).all()
        assert a.shape == b.shape
    if name == "tensorclass":
        assert found.about == ("a", [1, None])


ITEMS = [
    torch.arange(3),
    torch.zeros(()),
    TensorDict({"x": torch.ones(2)}, [2]),
    TensorDict({"x": torch.ones(5), "y": torch.ones(5)}, [5]),
    TensorDict({"a": {"b": torch.zeros(2, 3)}, "z": torch.tensor([1 + 2j, 3j]).conj()}, [2]),
    TensorDict({}, []),
    Point(x=torch.zeros(1), about=("text", [2]), batch_size=[1]),
    np.arange(4.0),
    np.array(5, dtype=np.uint16),
    np.arange(6).reshape(2, 3).T,
    np.arange(10)[::-2],
    np.zeros((0, 3), dtype=np.complex64),
    np.float32(1.5),
    np.int64(-3),
    np.bool_(True),
    np.float64("nan"),
    True,
    -(2**80),
    1.5,
    float("nan"),
    "text \ud800",
    b"\x00\xff",
    None,
    torch.device("cpu"),
    torch.Size([2, 0]),
    [1, (2, {"k": [torch.ones(1), None]})],
    {"$": 1, "a": np.float32(2)},
    (),
    # More than a file takes.
    torch.arange(70),
    {"a": torch.arange(50), "b": [torch.arange(50).numpy()]},
]


def test_every_documented_kind_of_object_comes_back_in_its_place(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """4.3: tensors, TensorDicts, arrays, plain values, and nested lists, tuples and dicts."""
    monkeypatch.setattr(chunks, "_CHUNK_BYTES", 64)
    buffer = ReplayBuffer(storage=ListStorage(100), collate_fn=list)
    buffer.extend(ITEMS * 2)
    buffer.dumps(tmp_path)
    loaded = ReplayBuffer(storage=ListStorage(100), collate_fn=list)
    loaded.loads(tmp_path)
    for file in tmp_path.glob("data-*"):  # nothing of it is read later
        file.write_bytes(b"")
    assert len(loaded) == 2 * len(ITEMS)
    for expected, found in zip(ITEMS * 2, loaded[:], strict=True):
        assert type(found) is type(expected)
        if isinstance(found, Point):
            assert (found.about, found.x.tolist()) == (expected.about, expected.x.tolist())
        elif isinstance(found, TensorDict):
            assert repr(found) == repr(expected)
            assert (found == expected).all()
        else:
            assert repr(found) == repr(expected)
    loaded[:][-1]["a"] += 1  # what was loaded can be changed


@pytest.mark.pitfall("CK7")
@pytest.mark.parametrize(
    ("storage", "rows", "named"),
    [
        (ListStorage, [torch.zeros(1), "fine", object()], r"\[2\].*object"),
        (ListStorage, ["fine", [{"a": (1, lambda: None)}]], r"\[1\].*function"),
        (LazyTensorStorage, {(1, 2): torch.zeros(2)}, r"\(1, 2\)"),
    ],
    ids=["object", "function", "key"],
)
def test_unsupported_content_is_named_before_anything_is_written(
    storage: Any, rows: Any, named: str, tmp_path: Path
):
    """CK7, C3: its place and its type; the directory is not even made."""
    buffer = ReplayBuffer(storage=storage(50), collate_fn=list)
    buffer.extend(rows)
    refuses(TypeError, named, buffer.dumps, tmp_path / "new")
    assert os.listdir(tmp_path) == []


def test_a_storage_can_be_saved_alone(tmp_path: Path):
    buffer = make(11)
    buffer.storage.dumps(tmp_path)
    other = LazyTensorStorage(8)
    other.loads(tmp_path)
    assert other[:]["id"].tolist() == [8, 9, 10, 3, 4, 5, 6, 7]
    listed = ListStorage(4)
    with pytest.warns(UserWarning, match="4 rows") as caught:
        listed.loads(tmp_path)
    assert caught[0].filename == __file__
    assert [int(row["id"]) for row in listed] == [7, 8, 9, 10]
    refuses(CheckpointError, "no part 'writer'", make().loads, tmp_path)


class Minimal(Storage):
    """The least that a storage of one's own brings."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.rows: dict[int, Any] = {}

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        self.rows[int(cursor)] = data

    def get(self, index: Any) -> Any:
        if isinstance(index, int):
            return self.rows[index]
        if isinstance(index, slice):
            return [self.rows[i] for i in range(*index.indices(len(self)))]
        return [self.rows[int(i)] for i in index]

    def __len__(self) -> int:
        return len(self.rows)

    def contains(self, item: Any) -> Any:
        return item < len(self)

    def state_dict(self) -> dict[str, Any]:
        return {"rows": dict(self.rows)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if "rows" not in state_dict:
            raise ValueError("expected rows")
        self.rows = dict(state_dict["rows"])


def test_custom_storage_is_saved_and_loaded(tmp_path: Path):
    buffer = ReplayBuffer(storage=Minimal(5), generator=torch.Generator())
    for number in range(7):
        buffer.add({"n": number})
    buffer.dumps(tmp_path)
    loaded, taken = ReplayBuffer(storage=Minimal(5)), ReplayBuffer(storage=Minimal(5))
    loaded.loads(tmp_path)
    taken.load_state_dict(buffer.state_dict())
    for other in (loaded, taken):
        assert other[:] == buffer[:] == [{"n": n} for n in (5, 6, 2, 3, 4)]
        assert other.extend([{"n": 9}]).tolist() == [2]
    state = buffer.state_dict()
    del state["_storage"]["rows"]
    refuses(ValueError, "expected rows", taken.load_state_dict, state)
    assert taken[2] == {"n": 9}
