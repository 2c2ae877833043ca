"""Crafted manifests, with a checksum that is right: an error, and nothing changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
from replaykit.errors import CheckpointError
from tests.checkpoint.building import make, save, state_of
from tests.support.refusals import refuses


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


NAME = "data-0123456789ab-00000.bin"
LEDGER = ("parts", "writer", "_ledger")
GROUP = ("parts", "storage", "groups", 0)
SCHEMA = (*GROUP, "schema")
PIECE = ("tensors", "t0", "pieces", 0)


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
    *[
        _set("files", name, value={"size": 0, "crc32": 0})
        for name in (f"{NAME}\0", f"{NAME}\n", f"./{NAME}")
    ],
    *[_set("version", value=v) for v in (0, True, 10**30, "3")],
    *[_set("save", value=v) for v in (None, ["x"])],
    *[_drop(name) for name in ("format", "format_version", "files", "tensors", "parts")],
    *[_set("format_version", value=v) for v in (0, -1, "1", None, True, 1.0)],
    _set("format", value="another-checkpoint"),
    *[_set(name, value=[]) for name in ("files", "tensors", "parts")],
    *[_drop("parts", name) for name in ("storage", "writer", "sampler", "transforms", "generator")],
    *[
        _set("parts", name, value=5)
        for name in ("storage", "writer", "sampler", "transforms", "generator")
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
    _set("tensors", "t0", value=5),
    *[_set("tensors", "t0", "dtype", value=v) for v in ("load", "no_such", "float32", 5)],
    *[
        _set("tensors", "t0", "shape", value=v)
        for v in (3, [], [64], [4, 32], [16, 8], [-1], ["8"], [True], [10**9], [2**62, 2**62])
    ],
    *[
        _set("tensors", "t0", "pieces", value=v)
        for v in (5, [], [["data-0123456789ab-00000.bin", 0, 8]], [["data", 0]])
    ],
    *[_set(*PIECE, 0, value=v) for v in ("manifest.json", ["x"])],
    *[_set(*PIECE, 1, value=v) for v in (-8, 1, 10**15, 2**62, 0.0)],
    *[_set(*PIECE, 2, value=v) for v in (-1, 7, 2**62, "x")],
    _set("parts", "writer", "_kind", value="max_value"),
    _set(*LEDGER, "positions", value=[1, 2]),
    _set(*LEDGER, "positions", value={"$": "tensor", "name": "t1"}),
    _set("parts", "sampler", "_length", value=2),
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
    change: Any, forge: Any, tmp_path: Path
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


def test_the_largest_write_count_is_read_and_the_next_one_is_named(forge: Any, tmp_path: Path):
    save(tmp_path)
    forge(tmp_path, _set("parts", "writer", "_write_count", value=2**62 - 1))
    live = make()
    live.loads(tmp_path)
    assert live.write_count == 2**62 - 1
    forge(tmp_path, _set("parts", "writer", "_write_count", value=2**62))
    refuses(ValueError, f"expected _write_count as .*, got {2**62}", live.loads, tmp_path)


def test_a_manifest_that_nests_without_end_is_damaged(tmp_path: Path):
    save(tmp_path)
    for text in ("[" * 10**5 + "]" * 10**5, "[" * 10**5, "\xff", "", "null", "[]"):
        (tmp_path / "manifest.json").write_bytes(text.encode("latin-1"))
        refuses(CheckpointError, r"manifest\.json is damaged", make().loads, tmp_path)


@pytest.mark.parametrize(
    "anchors",
    [
        5,
        [0, 1, 2, 3],
        torch.zeros(4),
        torch.tensor(0),
        torch.zeros(4, 2, dtype=torch.int64),
        torch.zeros(4, 0, dtype=torch.int64),
        torch.tensor([0, 1, 2, 10**6]),
        torch.tensor([0, 1, 2, -1]),
    ],
    ids=str,
)
def test_rows_of_a_saved_draw_are_checked_before_anything_changes(anchors: Any):
    """Earlier releases saved the draws that were not delivered."""

    def make(first: int) -> ReplayBuffer:
        buffer = ReplayBuffer(
            storage=LazyTensorStorage(8),
            sampler=SamplerWithoutReplacement(),
            generator=torch.Generator().manual_seed(first),
            batch_size=4,
        )
        buffer.extend(TensorDict({"id": torch.arange(first, first + 8)}, [8]))
        return buffer

    saved, live = make(0), make(8)
    drawn = saved.sample()["index"]
    right = {**saved.state_dict(), "_prefetch_state": [{"anchors": drawn, "ran_out": False}]}
    wrong = {**right, "_prefetch_state": [{"anchors": anchors, "ran_out": False}]}
    refuses(ValueError, r"a prepared draw: |expected draws among", live.load_state_dict, wrong)
    assert live[:]["id"].tolist() == list(range(8, 16))
    assert live.sample()["id"].min() >= 8
    live.load_state_dict(right)
    assert live.sample()["index"].equal(drawn)  # its rows come first
    assert live.sample()["index"].equal(saved.sample()["index"])
