"""Crafted manifests, with a checksum that is right: an error, and nothing changes."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from replaykit import LazyTensorStorage, ReplayBuffer, SliceSampler
from replaykit.buffer.buffer_state import checked_draw
from replaykit.errors import CheckpointError


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


GROUP = ("parts", "storage", "groups", 0)
SCHEMA = (*GROUP, "schema")


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
    *[
        _set(*GROUP, "columns", 1, "field", value=v)
        for v in (-4, 1, 16, 2**70, 8.0, "8", None, True)
    ],
    _set(*GROUP, "columns", 1, "dtype", value="int32"),
    _set(*GROUP, "columns", 1, "dtype", value="load"),
    *[_set(*GROUP, "columns", 1, "shape", value=v) for v in ([], [2], [-1], 1, None)],
    _set(*GROUP, "columns", 1, value={}),
    _set(*GROUP, "columns", 1, value={"$": "tensor", "name": "t0"}),
    _set(*GROUP, "columns", value=[]),
    _drop(*GROUP, "records"),
    *[_set(*GROUP, "records", value=v) for v in (5, None, [1], {"$": "tensor", "name": "t1"})],
    _set("tensors", "t0", "shape", value=[64]),
    _set("tensors", "t0", "shape", value=[4, 32]),
    _set("tensors", "t0", "shape", value=[16, 8]),
    _set("tensors", "t0", value=5),
    _set("tensors", "t0", "dtype", value="load"),
    _set("tensors", "t0", "dtype", value="float32"),
    _set("tensors", "t0", "shape", value=[2**62, 2**62]),
    _set("tensors", "t0", "shape", value=[10**9]),
    _set("tensors", "t0", "pieces", value=[["data-0123456789ab-00000.bin", 0, 8]]),
    _set("parts", "writer", "_kind", value="max_value"),
    _set("parts", "writer", "_write_count", value=-1),
    _set("parts", "writer", "_write_count", value="5"),
    *[
        _set("parts", "writer", "_write_count", value=v)
        for v in (2**62, 2**62 + 1, 2**63 - 1, 2**63, 2**70)
    ],
    *[_set(*LEDGER, "slots", value=v) for v in (0, -1, 2**70, 7.5, None, 3)],
    *[_set(*LEDGER, "length", value=v) for v in (-1, 9, 7, "8")],
    *[_set(*LEDGER, "cursor", value=v) for v in (-1, 8, 2**70)],
    *[_set(*LEDGER, "next_position", value=v) for v in (-1, 3, None)],
    _set(*LEDGER, "positions", value=[1, 2]),
    _set(*LEDGER, "positions", value={"$": "tensor", "name": "t1"}),
    _set(*LEDGER, "generations", value="text"),
    *[_drop(*LEDGER, name) for name in ("positions", "generations", "length")],
    _set("parts", "sampler", "_length", value=-5),
    _set("parts", "sampler", "_length", value=2),
    _set("parts", "sampler", "_ran_out", value=1),
    _set("parts", "sampler", "_remaining", value=[1, 2]),
    _set("parts", "sampler", "_remaining", value={"$": "tensor", "name": "t0"}),
    _set("parts", "transforms", value={"0": {"x": 1}}),
    _set("parts", "generator", value={"$": "ndarray", "name": "t0"}),
    _set("parts", "generator", value={"$": "tensor", "name": "t0"}),
    _set("parts", "generator", "device", value="nowhere"),
    _set("parts", "generator", "device", value=5),
    _set("parts", "generator", "state", value=5),
    _set("parts", "generator", "state", value={"$": "tensor", "name": "t0"}),
    _set("parts", "prepared", value={}),
    _set("parts", "prepared", value=[5]),
    _set("parts", "prepared", value=[{"index": 5, "anchors": 5, "info": [], "ran_out": False}]),
    _drop("parts", "writer", "_episodes", "heads"),
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
    change: Any, make: Any, state_of: Any, forge: Any, tmp_path: Path, save: Any
):
    """CK7, C6: with a checksum that is right."""
    save(tmp_path)
    forge(tmp_path, change)
    for live in (make(5, seed=3, start=70), make()):
        before = state_of(live)
        with pytest.raises((ValueError, CheckpointError)) as caught:
            live.loads(tmp_path)
        assert not isinstance(caught.value, (UnicodeError, RecursionError))
        assert state_of(live) == before


def test_the_largest_write_count_is_read_and_the_next_one_is_named(
    make: Any, forge: Any, tmp_path: Path, save: Any
):
    save(tmp_path)
    forge(tmp_path, _set("parts", "writer", "_write_count", value=2**62 - 1))
    live = make()
    live.loads(tmp_path)
    assert live.write_count == 2**62 - 1
    forge(tmp_path, _set("parts", "writer", "_write_count", value=2**62))
    with pytest.raises(ValueError, match=f"expected '_write_count' as .*, got {2**62}"):
        live.loads(tmp_path)


def test_a_manifest_that_nests_without_end_is_damaged(make: Any, tmp_path: Path, save: Any):
    save(tmp_path)
    for text in ("[" * 10**5 + "]" * 10**5, "[" * 10**5, "\xff", "", "null", "[]"):
        (tmp_path / "manifest.json").write_bytes(text.encode("latin-1"))
        with pytest.raises(CheckpointError, match=r"manifest\.json is damaged"):
            make().loads(tmp_path)


@pytest.mark.parametrize("key", [5, None, (), ("x", 5), (["x"],), [], torch.Size([1])])
def test_info_keys_of_a_saved_draw_must_be_names(key: Any):
    none = torch.zeros(0, dtype=torch.int64)
    draw = {"index": none, "anchors": none, "ran_out": False}
    assert checked_draw({**draw, "info": [[("x", "y"), 1], ["x", 2]]}).info["x"] == 2
    with pytest.raises(ValueError, match="expected a prepared draw"):
        checked_draw({**draw, "info": [[key, 1]]})


@pytest.mark.parametrize("since", [-1, 2**70, 0.5, True])
def test_saved_draw_has_a_checked_count_of_writes(since: Any):
    none = torch.zeros(0, dtype=torch.int64)
    draw = {"index": none, "anchors": none, "ran_out": False, "info": []}
    assert checked_draw({**draw, "since": 3}).written == -3
    with pytest.raises(ValueError, match="expected a prepared draw"):
        checked_draw({**draw, "since": since})


TOLD = [
    ("sequence_id", 5),
    ("sequence_id", [0, 0, 1, 1]),
    ("sequence_id", torch.zeros(4)),
    ("sequence_id", torch.zeros(4, dtype=torch.uint8)),
    ("sequence_id", torch.zeros(3, dtype=torch.int64)),
    ("sequence_id", torch.tensor(0)),
    ("validity_mask", "text"),
    (("collector", "mask"), 1.5),
    (("collector", "mask"), torch.ones(4, dtype=torch.int64)),
    (("collector", "mask"), torch.ones(5, dtype=torch.bool)),
    ("anchor_index", {"x": 1}),
    ("anchor_index", torch.zeros(4, 0, dtype=torch.int64)),
    ("anchor_index", torch.tensor([0, 1, 2, 10**6])),
    ("anchor_index", torch.tensor([0, 1, 2, -1])),
]


@pytest.mark.parametrize(("key", "value"), TOLD, ids=str)
def test_info_of_a_saved_draw_is_checked_before_anything_changes(key: Any, value: Any):
    """Else the first batch would raise, or the compiled core read memory that is not there."""

    def make(first: int) -> ReplayBuffer:
        rows = TensorDict({"id": torch.arange(first, first + 8), "episode": torch.zeros(8)}, [8])
        buffer = ReplayBuffer(
            storage=LazyTensorStorage(8),
            sampler=SliceSampler(slice_len=2, traj_key="episode"),
            generator=torch.Generator().manual_seed(first),
            batch_size=4,
            prefetch=1,
        )
        buffer.extend(rows)
        return buffer

    saved, live = make(0), make(8)
    saved.sample()
    state = saved.state_dict()
    assert state["_prefetch_state"]
    info = state["_prefetch_state"][0]["info"]
    info.append(["of_its_own", 5])
    right = copy.deepcopy(state)
    info[:] = [item for item in info if item[0] != key] + [[key, value]]
    with pytest.raises(ValueError, match=r"of a prepared draw as|expected draws among"):
        live.load_state_dict(state)
    assert live[:]["id"].tolist() == list(range(8, 16))
    assert live.sample()["id"].min() >= 8
    live.load_state_dict(right)
    assert live.sample()["id"].equal(saved.sample()["id"])
    saved.shutdown()
    live.shutdown()


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
    data: Any, make: Any, state_of: Any, forge: Any, tmp_path: Path, save: Any
):
    """CK7: whatever is put wherever, with a checksum that is right."""
    if not (tmp_path / "manifest.json").exists():
        save(tmp_path)
        shutil.copy(tmp_path / "manifest.json", tmp_path / "good")
    shutil.copy(tmp_path / "good", tmp_path / "manifest.json")
    manifest = json.loads((tmp_path / "good").read_text())
    places = [p for p in _places(manifest) if p != ("crc32",)]
    for _ in range(data.draw(st.integers(1, 2))):
        place = data.draw(st.sampled_from(places))
        value = data.draw(JUNK)
        gone = value is None and data.draw(st.booleans())
        try:
            change = _drop(*place) if gone else _set(*place, value=copy.deepcopy(value))
            forge(tmp_path, change)
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
