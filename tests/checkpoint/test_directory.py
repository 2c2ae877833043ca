"""One directory on disk: what damages it is found, what is crafted does nothing."""

from __future__ import annotations

import copy
import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import NonTensorData, TensorClass, TensorDict

from replaykit import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    Storage,
    TensorStorage,
)
from replaykit.checkpoint import FORMAT_VERSION, Checkpoint, save_checkpoint
from replaykit.errors import CheckpointError


class Point(TensorClass):
    """Content that is no TensorDict, with a field that is no tensor."""

    x: torch.Tensor
    about: Any = None


def save(folder: Path, make: Any) -> ReplayBuffer:
    buffer = make(11)
    buffer.sample()
    buffer.dumps(folder)
    return buffer


# -- damage ---------------------------------------------------------------------------------------


@pytest.mark.pitfall("CK2")
def test_every_damaged_file_is_named_and_nothing_changes(make: Any, state_of: Any, tmp_path: Path):
    """CK2, C6: each file removed, truncated, grown, or with one byte flipped, in turn."""
    good, bad = tmp_path / "good", tmp_path / "bad"
    save(good, make)
    live = make(5, seed=3, start=70)
    live.sample()
    before = state_of(live)
    files = [file.name for file in good.iterdir() if file.name != ".lock"]
    assert len(files) >= 2
    for name in files:
        content = (good / name).read_bytes()
        steps = {0, 1, len(content) // 2, len(content) - 1}
        damages: list[bytes | None] = [None, content + b"\0"]
        damages += [content[:size] for size in steps]
        for at in range(0, len(content), 11):
            flipped = bytearray(content)
            flipped[at] ^= 1 << (at % 8)
            damages.append(bytes(flipped))
        for damage in damages:
            shutil.rmtree(bad, ignore_errors=True)
            shutil.copytree(good, bad)
            if damage is None:
                (bad / name).unlink()
            else:
                (bad / name).write_bytes(damage)
            missing = damage is None and name == "manifest.json"
            with pytest.raises(
                FileNotFoundError if missing else CheckpointError,
                match="bad" if missing else name,
            ):
                live.loads(bad)
        assert state_of(live) == before
    live.loads(good)
    assert len(live) == 8


@pytest.mark.pitfall("CK10")
def test_a_newer_version_is_told_from_damage(make: Any, forge: Any, tmp_path: Path):
    """CK10: the message says which version wrote it and which one reads it."""
    save(tmp_path, make)
    forge(tmp_path, lambda m: m.update(format_version=FORMAT_VERSION + 1, library_version="9.9"))
    with pytest.raises(RuntimeError, match=r"version 2.*up to 1.*replaykit 9\.9"):
        make().loads(tmp_path)
    # Also where the newer version puts its checksum somewhere else.
    (tmp_path / "manifest.json").write_text(
        json.dumps({"format": "replaykit-checkpoint", "format_version": 7})
    )
    with pytest.raises(CheckpointError, match="version 7"):
        make().loads(tmp_path)


def test_a_checkpoint_is_read_piece_by_piece(tmp_path: Path):
    parts = {"a": {"t": torch.arange(3), "n": 1}, "b": [torch.zeros(2)]}
    save_checkpoint(tmp_path, parts, {"note": "text"})
    with Checkpoint(tmp_path) as saved:
        saved.verify()
        assert saved.manifest["note"] == "text"
        assert saved.part("a")["n"] == 1
        kept = saved.part("a")["t"]
        assert saved.part("a", mapped=["t"])["t"].tolist() == [0, 1, 2]
        with pytest.raises(CheckpointError, match="'c'"):
            saved.part("c")
        saved.part("a", mapped=["t"])["t"].fill_(9)  # stays in this process
    for file in tmp_path.iterdir():
        file.unlink()
    assert kept.tolist() == [0, 1, 2]
    save_checkpoint(tmp_path, {}, {})
    with Checkpoint(tmp_path) as empty:
        empty.verify()


# -- crafted manifests ----------------------------------------------------------------------------


def _set(*path: Any, value: Any) -> Any:
    def change(manifest: dict[str, Any]) -> None:
        target: Any = manifest
        for part in path[:-1]:
            target = target[part]
        target[path[-1]] = value

    change.__name__ = f"{'.'.join(map(str, path))}={str(value)[:40]}"
    return change


def _drop(*path: Any) -> Any:
    def change(manifest: dict[str, Any]) -> None:
        target: Any = manifest
        for part in path[:-1]:
            target = target[part]
        del target[path[-1]]

    change.__name__ = f"without {'.'.join(map(str, path))}"
    return change


def _file(name: str, record: Any = None) -> Any:
    def change(manifest: dict[str, Any]) -> None:
        old = next(iter(manifest["files"]))
        found = manifest["files"].pop(old)
        manifest["files"][name] = found if record is None else record

    change.__name__ = f"file {name}={record}"
    return change


def _deep(levels: int, kind: str) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value] if kind == "list" else {"$": "tuple", "items": [value]}
    return value


LEDGER = ("parts", "writer", "_ledger")
SCHEMA = ("parts", "storage", "groups", 0, "schema")
CRAFTED = [
    _file("../data-0123456789ab-00000.bin"),
    _file("/etc/passwd"),
    _file("data-0123456789ab-00000.bin/../../x"),
    _file("manifest.json"),
    _file(""),
    _file("data-0123456789ab-00000.bin"),
    _file("data-0123456789ab-00000.bin", {"size": -1, "crc32": 0}),
    _file("data-0123456789ab-00000.bin", {"size": True, "crc32": 0}),
    _file("data-0123456789ab-00000.bin", {"size": 10**18, "crc32": 0}),
    _file("data-0123456789ab-00000.bin", 5),
    *[_drop(name) for name in ("format", "format_version", "files", "tensors", "parts")],
    *[_set("format_version", value=v) for v in (0, -1, "1", None, True, 1.0)],
    _set("format", value="another-checkpoint"),
    *[_set(name, value=[]) for name in ("files", "tensors", "parts")],
    *[
        _drop("parts", name)
        for name in ("storage", "writer", "sampler", "transforms", "generator", "prepared")
    ],
    *[
        _set("parts", name, value=5)
        for name in ("storage", "writer", "sampler", "transforms", "generator", "prepared")
    ],
    _set("tensors", "t0", value=5),
    _set("tensors", "t0", "dtype", value="load"),
    _set("tensors", "t0", "dtype", value="float32"),
    _set("tensors", "t0", "shape", value=[2**62, 2**62]),
    _set("tensors", "t0", "shape", value=[10**9]),
    _set("tensors", "t0", "pieces", value=[["data-0123456789ab-00000.bin", 0, 8]]),
    _set("parts", "writer", "_kind", value="max_value"),
    _set("parts", "writer", "_write_count", value=-1),
    _set("parts", "writer", "_write_count", value="5"),
    *[_set(*LEDGER, "slots", value=v) for v in (0, -1, 2**70, 7.5, None, 3)],
    *[_set(*LEDGER, "length", value=v) for v in (-1, 9, 7, "8")],
    *[_set(*LEDGER, "cursor", value=v) for v in (-1, 8, 2**70)],
    *[_set(*LEDGER, "next_position", value=v) for v in (-1, 3, None)],
    _set(*LEDGER, "positions", value=[1, 2]),
    _set(*LEDGER, "positions", value={"$": "tensor", "name": "t1"}),
    _set(*LEDGER, "generations", value="text"),
    _set("parts", "sampler", "_kind", value="random"),
    _set("parts", "sampler", "_length", value=-5),
    _set("parts", "sampler", "_length", value=2),
    _set("parts", "sampler", "_ran_out", value=1),
    _set("parts", "sampler", "_remaining", value=[1, 2]),
    _set("parts", "sampler", "_remaining", value={"$": "tensor", "name": "t1"}),
    _set("parts", "transforms", value={"0": {"x": 1}}),
    _set("parts", "generator", "device", value="nowhere"),
    _set("parts", "generator", "device", value=5),
    _set("parts", "generator", "state", value=5),
    _set("parts", "generator", "state", value={"$": "tensor", "name": "t0"}),
    _set("parts", "prepared", value={}),
    _set("parts", "prepared", value=[5]),
    _set("parts", "prepared", value=[{"index": 5, "anchors": 5, "info": [], "ran_out": False}]),
    _set("parts", "storage", "rows", value=7),
    _set("parts", "storage", "rows", value=2**70),
    _set("parts", "storage", "lanes", value=[2]),
    _set("parts", "storage", "lanes", value=[0]),
    _set("parts", "storage", "groups", value=[]),
    _set("parts", "storage", "groups", value=[5]),
    _set("parts", "storage", "plain", value=[1]),
    _set("parts", "storage", "plain", value={"$": "dict", "items": [[0, 1]]}),
    _set("parts", "storage", "order", value=[0]),
    _set(*SCHEMA, value=5),
    _set(*SCHEMA, "kind", value="exec"),
    _set(*SCHEMA, "kind", value="tensorclass"),
    _set(*SCHEMA, "children", value=[]),
    _set(*SCHEMA, "children", 0, 1, "dtype", value="float32"),
    _set(*SCHEMA, "children", 0, 1, "dtype", value="__builtins__"),
    _set(*SCHEMA, "children", 0, 1, "shape", value=[2**40]),
    _set("parts", "storage", value=_deep(300, "list")),
    _set("parts", "writer", value=_deep(300, "tuple")),
    _set("parts", "generator", value=_deep(450, "list")),
]


@pytest.mark.pitfall("CK7")
@pytest.mark.parametrize("change", CRAFTED, ids=lambda change: change.__name__)
def test_a_crafted_manifest_is_an_error_and_changes_nothing(
    change: Any, make: Any, state_of: Any, forge: Any, tmp_path: Path
):
    """CK7, C6: with a checksum that is right."""
    save(tmp_path, make)
    forge(tmp_path, change)
    for live in (make(5, seed=3, start=70), make()):
        before = state_of(live)
        with pytest.raises((ValueError, CheckpointError)) as caught:
            live.loads(tmp_path)
        assert not isinstance(caught.value, (UnicodeError, RecursionError))
        assert state_of(live) == before


def test_a_manifest_that_nests_without_end_is_damaged(make: Any, tmp_path: Path):
    save(tmp_path, make)
    for text in ("[" * 10**5 + "]" * 10**5, "[" * 10**5, "\xff", "", "null", "[]"):
        (tmp_path / "manifest.json").write_bytes(text.encode("latin-1"))
        with pytest.raises(CheckpointError, match=r"manifest\.json is damaged"):
            make().loads(tmp_path)


JUNK = st.sampled_from(
    [None, True, -1, 0, 1, 3, 2**31, 2**62, 2**70, 0.5, "", "x", "t0", "t9", [], {}, [0], {"$": 1}]
)


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    found = []
    for key, item in items:
        found.append((*path, key))
        if isinstance(item, (dict, list)):
            found += _places(item, (*path, key))
    return found


@pytest.mark.pitfall("CK7")
@given(data=st.data())
@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@pytest.mark.filterwarnings("ignore:.*left out")
def test_any_manifest_gives_an_error_or_a_buffer_that_works(
    data: Any, make: Any, state_of: Any, forge: Any, tmp_path: Path
):
    """CK7: whatever is put wherever, with a checksum that is right."""
    if not (tmp_path / "manifest.json").exists():
        save(tmp_path, make)
        shutil.copy(tmp_path / "manifest.json", tmp_path / "good")
    shutil.copy(tmp_path / "good", tmp_path / "manifest.json")
    manifest = json.loads((tmp_path / "good").read_text())
    places = [p for p in _places(manifest) if p != ("crc32",)]
    for _ in range(data.draw(st.integers(1, 2))):
        place = data.draw(st.sampled_from(places))
        value = data.draw(JUNK)
        try:
            forge(tmp_path, _set(*place, value=copy.deepcopy(value)))
        except (KeyError, IndexError, TypeError):
            return  # the first change took the place of the second
    live = make(5, seed=3, start=70)
    before = state_of(live)
    try:
        live.loads(tmp_path)
    except (ValueError, CheckpointError):
        assert state_of(live) == before
    else:
        assert 0 <= len(live) <= 8
        live.extend(live[:1])
        assert len(live.sample()) == 2
        live.dumps(tmp_path / "again")


# -- what goes in and out -------------------------------------------------------------------------


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
    TensorDict({}, []),
    Point(x=torch.zeros(1), about="text", batch_size=[1]),
    np.arange(4.0),
    True,
    -(2**80),
    1.5,
    float("nan"),
    "text \ud800",
    b"\x00\xff",
    None,
    [1, (2, {"k": [torch.ones(1), None]})],
    {"$": 1, "a": np.float32(2)},
    (),
]


def test_every_documented_kind_of_object_comes_back_in_its_place(tmp_path: Path):
    """4.3: tensors, TensorDicts, arrays, plain values, and nested lists, tuples and dicts."""
    buffer = ReplayBuffer(storage=ListStorage(50), collate_fn=list)
    buffer.extend(ITEMS * 2)
    buffer.dumps(tmp_path)
    loaded = ReplayBuffer(storage=ListStorage(50), collate_fn=list)
    loaded.loads(tmp_path)
    assert len(loaded) == 2 * len(ITEMS)
    for expected, found in zip(ITEMS * 2, loaded[:], strict=True):
        assert type(found) is type(expected)
        if isinstance(found, Point):
            assert (found.about, found.x.tolist()) == (expected.about, expected.x.tolist())
        else:
            assert repr(found) == repr(expected)


@pytest.mark.pitfall("CK7")
@pytest.mark.parametrize(
    ("item", "kind"),
    [
        (object(), "object"),
        ({1, 2}, "set"),
        ([{"a": (1, lambda: None)}], "function"),
        (np.array(["a"]), "dtype"),
        (TensorDict({"t": NonTensorData("text")}, []), "non-tensor"),
        (torch.eye(2).to_sparse(), "sparse"),
        (range(3), "range"),
        (1j, "complex"),
    ],
    ids=["object", "set", "function", "array", "text", "sparse", "range", "complex"],
)
def test_an_object_that_cannot_be_saved_is_named_before_anything_is_written(
    item: Any, kind: str, tmp_path: Path
):
    """CK7, C3: its position and its type; the directory is not even made."""
    buffer = ReplayBuffer(storage=ListStorage(50), collate_fn=list)
    buffer.extend([torch.zeros(1), "fine", torch.zeros(1)])
    buffer.add(item)
    with pytest.raises(TypeError, match=rf"\[3\].*{kind}"):
        buffer.dumps(tmp_path / "new")
    assert os.listdir(tmp_path) == []


def test_pytree_keys_that_cannot_be_saved_are_named(tmp_path: Path):
    buffer = ReplayBuffer(storage=LazyTensorStorage(3))
    buffer.extend({(1, 2): torch.zeros(2)})
    with pytest.raises(TypeError, match=r"\(1, 2\)"):
        buffer.dumps(tmp_path / "new")
    assert os.listdir(tmp_path) == []


def test_a_storage_can_be_saved_alone(make: Any, tmp_path: Path):
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
    with pytest.raises(CheckpointError, match="no part 'writer'"):
        make().loads(tmp_path)


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


def test_a_storage_of_ones_own_is_saved_and_loaded(tmp_path: Path):
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
    with pytest.raises(ValueError, match="expected rows"):
        taken.load_state_dict(state)
    assert taken[2] == {"n": 9}


# -- two at once ----------------------------------------------------------------------------------


@pytest.mark.pitfall("CK1")
def test_saves_and_loads_at_once_see_whole_checkpoints(make: Any, tmp_path: Path):
    """CK1, C12: of saves to one path each is whole; loads read one of them."""
    path = tmp_path / "shared"
    make(8, start=100).dumps(path)
    wrong: list[Any] = []

    def save_often(number: int) -> None:
        for turn in range(12):
            start = 1000 * number + 10 * turn
            make(8, start=start).dumps(path)

    def load_often() -> None:
        buffer = make()
        for _ in range(25):
            buffer.loads(path)
            ids = buffer["id"].tolist()
            if ids != list(range(ids[0], ids[0] + 8)) or ids[0] % 10:
                wrong.append(ids)
            if buffer["next", "x"].flatten().tolist() != [float(i) for i in ids]:
                wrong.append(ids)

    errors: list[BaseException] = []

    def guarded(call: Any) -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    calls = [lambda: save_often(1), lambda: save_often(2), load_often, load_often]
    threads = [threading.Thread(target=guarded, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert (errors, wrong) == ([], [])
    manifest = json.loads((path / "manifest.json").read_text())
    assert set(os.listdir(path)) == {"manifest.json", ".lock", *manifest["files"]}
