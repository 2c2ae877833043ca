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

GONE = object()
NAME = "data-0123456789ab-00000.bin"
GROUP = ("parts", "storage", "groups", 0)
COLUMN = (*GROUP, "columns", 1)
SCHEMA = (*GROUP, "schema")
PIECE = ("tensors", "t0", "pieces", 0)


def _tensor(name: str, kind: str = "tensor") -> dict[str, Any]:
    return {"$": kind, "name": name}


def _set(*path: Any, value: Any = GONE) -> Any:
    def change(manifest: dict[str, Any]) -> None:
        target: Any = manifest
        for part in path[:-1]:
            target = target[part]
        if value is GONE:
            del target[path[-1]]
        else:
            target[path[-1]] = value

    shown = "gone" if value is GONE else str(value)[:40]
    change.__name__ = f"{'.'.join(map(str, path))}={shown}"
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


FILES = [
    *(_file(name) for name in (f"../{NAME}", "/etc/passwd", f"{NAME}/../../x", NAME)),
    *(_file(name) for name in ("manifest.json", "")),
    *(_file(NAME, {"size": size, "crc32": 0}) for size in (-1, True, 10**18)),
    _file(NAME, 5),
]
ENTRIES: list[tuple[tuple[Any, ...], list[Any]]] = [
    *(
        (("files", name), [{"size": 0, "crc32": 0}])
        for name in (f"{NAME}\0", f"{NAME}\n", f"./{NAME}")
    ),
    (("version",), [0, True, 10**30, "3"]),
    (("save",), [None, ["x"]]),
    (("format",), [GONE, "another-checkpoint"]),
    (("format_version",), [GONE, 0, -1, "1", None, True, 1.0]),
    *(((name,), [GONE, []]) for name in ("files", "tensors", "parts")),
    (("parts", "storage"), [GONE, 5, _deep(300, "list")]),
    (("parts", "writer"), [GONE, 5, _deep(300, "tuple")]),
    (("parts", "sampler"), [GONE, 5]),
    (("parts", "transforms"), [GONE, 5, {"0": {"x": 1}}]),
    (
        ("parts", "generator"),
        [GONE, 5, _deep(450, "list"), _tensor("t0"), _tensor("t0", "ndarray")],
    ),
    ((*COLUMN, "field"), [-4, 1, 16, 2**70, 8.0, "8", None, True]),
    ((*COLUMN, "dtype"), ["int32", "load"]),
    ((*COLUMN, "shape"), [[], [2], [-1], 1, None]),
    (COLUMN, [{}, _tensor("t0")]),
    ((*GROUP, "columns"), [[]]),
    ((*GROUP, "records"), [GONE, 5, None, [1], _tensor("t1")]),
    (("tensors", "t0"), [5]),
    (("tensors", "t0", "dtype"), ["load", "no_such", "float32", 5]),
    (("tensors", "t0", "shape"), [3, [], [64], [4, 32], [16, 8], [-1], ["8"], [True], [10**9]]),
    (("tensors", "t0", "shape"), [[2**62, 2**62]]),
    (("tensors", "t0", "pieces"), [5, [], [[NAME, 0, 8]], [["data", 0]]]),
    ((*PIECE, 0), ["manifest.json", ["x"]]),
    ((*PIECE, 1), [-8, 1, 10**15, 2**62, 0.0]),
    ((*PIECE, 2), [-1, 7, 2**62, "x"]),
    (("parts", "writer", "_kind"), ["max_value"]),
    (("parts", "writer", "_ledger", "positions"), [[1, 2], _tensor("t1")]),
    (("parts", "writer", "_episodes", "heads"), [GONE]),
    (("parts", "sampler", "_length"), [2]),
    (("parts", "sampler", "_remaining"), [_tensor("t0")]),
    (("parts", "generator", "device"), ["nowhere", 5]),
    (("parts", "generator", "state"), [5, _tensor("t0")]),
    (("parts", "prepared"), [{}, [5], [{"index": 5, "anchors": 5, "info": [], "ran_out": False}]]),
    (("parts", "storage", "rows"), [7, 2**70]),
    (("parts", "storage", "lanes"), [[2], [0]]),
    (("parts", "storage", "groups"), [[], [5]]),
    (("parts", "storage", "plain"), [[1], {"$": "dict", "items": [[0, 1]]}]),
    (("parts", "storage", "order"), [[0]]),
    (SCHEMA, [5]),
    ((*SCHEMA, "kind"), ["exec", "tensorclass"]),
    ((*SCHEMA, "children"), [[]]),
    ((*SCHEMA, "children", 0, 1, "dtype"), ["float32", "__builtins__"]),
    ((*SCHEMA, "children", 0, 1, "shape"), [[2**40]]),
]
CRAFTED = [*FILES, *(_set(*path, value=value) for path, values in ENTRIES for value in values)]


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
