"""Shared by all tests: the registry of storages, rows that tell who they are, and snapshots.

A new storage or device is tested by adding it to ``_MAKERS`` or ``DEVICES``.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import gc
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from filelock import FileLock
from tensordict import TensorDict, is_tensor_collection, is_tensorclass

from replaykit import (
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    Storage,
    TensorStorage,
)
from replaykit.structure import build, flatten
from tests import effort
from tests.prepared import python
from tests.ray_cluster import ray_cluster

__all__ = ["ray_cluster"]

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


# -- the run --------------------------------------------------------------------------------------


def pytest_configure(config: pytest.Config) -> None:
    # Tests that draw their cases draw fewer in a run without tests that are marked `long`.
    effort.short = "not long" in config.option.markexpr


@pytest.hookimpl(trylast=True)  # of the items that the marks have left
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        effort.limit_examples(item)
    if dropped := effort.left_out(items):
        config.hook.pytest_deselected(items=list(dropped))
        items[:] = [item for item in items if item not in dropped]
    items.sort(key=_turn)


def _turn(item: pytest.Item) -> int:
    """Tests of Ray come first, so that one worker has them and starts it once; then long ones."""
    if "ray_cluster" in getattr(item, "fixturenames", ()):
        return 0
    return 1 if item.path.parent.name == "crash" else 2


def pytest_collection_finish() -> None:
    # Otherwise each full collection of garbage, and each end of a forked process, visits all tests.
    gc.collect()
    gc.freeze()
    # Processes that tests start get this `sitecustomize`; those that run tests have started.
    paths = [str(Path(__file__).parent / "children"), os.environ.get("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))


_START_METHOD = multiprocessing.get_start_method(allow_none=True)


@pytest.fixture(autouse=True)
def start_method() -> None:
    """Processes are started as they are by default, whatever a library has made of that."""
    if multiprocessing.get_start_method(allow_none=True) not in (None, _START_METHOD):
        multiprocessing.set_start_method(_START_METHOD, force=True)


@pytest.fixture
def forkserver(request: pytest.FixtureRequest) -> Any:
    """Processes that get all they have pickled, as spawned ones do, in hundredths of the time."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload([request.module.__name__])
    return found


@pytest.fixture(params=["fork", "forkserver"])
def context(request: pytest.FixtureRequest) -> Any:
    """Processes that have what is there from before, or that get it pickled."""
    if request.param == "forkserver":
        return request.getfixturevalue("forkserver")
    return multiprocessing.get_context(request.param)


def make_rows(start: int, count: int, **others: torch.Tensor) -> TensorDict:
    """Rows ``start .. start + count - 1``: every value of a row follows from its number."""
    ids = torch.arange(start, start + count)
    return TensorDict(
        {
            "id": ids,
            "observation": ids[:, None] * 10.0 + torch.arange(3),
            "action": (ids % 256).to(torch.uint8),
            "next": {"reward": ids[:, None] / 2, "done": ids[:, None] % 3 == 2},
            **others,
        },
        [count],
    )


def make_lanes(start: int, steps: int, lanes: tuple[int, ...] = (2,)) -> TensorDict:
    """Rows ``[*lanes, steps]``; row (lane l, step t) has the number ``start + 100 * l + t``."""
    lane = torch.arange(torch.Size(lanes).numel()).view(*lanes, 1) * 100
    ids = start + lane + torch.arange(steps)
    return TensorDict(
        {"id": ids, "x": ids[..., None] * 2.0, "next": {"done": ids[..., None] % 3 == 2}},
        [*lanes, steps],
    )


@dataclass(frozen=True)
class StorageKind:
    """A way of making an empty storage."""

    name: str
    device: str
    folder: Path

    @property
    def columns(self) -> bool:
        """Whether the storage has a schema, and one tensor per key."""
        return "list" not in self.name and "stack" not in self.name

    def __call__(self, capacity: int, example: Any = None) -> Storage:
        """Makes it; ``example`` is one row of what will be stored (`make_rows`, by default)."""
        return _MAKERS[self.name](
            self, capacity, make_rows(0, 1)[0] if example is None else example
        )

    def buffer(self, capacity: int, example: Any = None, **arguments: Any) -> ReplayBuffer:
        return ReplayBuffer(storage=self(capacity, example), **arguments)

    def new_folder(self) -> Path:
        return self.folder / f"scratch-{len(list(self.folder.iterdir()))}"


def _emptied(kind: StorageKind, capacity: int, example: Any) -> Storage:
    """A TensorStorage starts full; forgetting its rows makes it comparable with the others."""
    node, leaves = flatten(example, 0)
    columns = {
        path: leaf.expand(capacity, *leaf.shape).clone().to(kind.device)
        for path, leaf in leaves.items()
    }
    storage = TensorStorage(build(node, columns, torch.Size([capacity]), None))
    storage.clear()
    storage.ledger.clear()
    return storage


def _memmap(kind: StorageKind, capacity: int, example: Any) -> Storage:
    folder = kind.new_folder()
    folder.mkdir()
    return LazyMemmapStorage(capacity, scratch_dir=folder)


_MAKERS: dict[str, Callable[[StorageKind, int, Any], Storage]] = {
    "list": lambda kind, capacity, _: ListStorage(capacity, device=kind.device),
    "lazy_stack": lambda kind, capacity, _: LazyStackStorage(capacity, device=kind.device),
    "tensor": _emptied,
    "lazy_tensor": lambda kind, capacity, _: LazyTensorStorage(capacity, device=kind.device),
    "memmap": _memmap,
}

STORAGE_KINDS = [
    (name, device) for name in _MAKERS for device in DEVICES if (name, device) != ("memmap", "cuda")
]
COLUMN_KINDS = [kind for kind in STORAGE_KINDS if kind[0] in ("tensor", "lazy_tensor", "memmap")]


def _ids(kinds: list[tuple[str, str]]) -> list[str]:
    return ["-".join(kind) for kind in kinds]


@pytest.fixture(params=STORAGE_KINDS, ids=_ids(STORAGE_KINDS))
def storage_kind(request: pytest.FixtureRequest, tmp_path: Path) -> StorageKind:
    """Every storage there is, on every device present."""
    return StorageKind(*request.param, tmp_path)


@pytest.fixture(params=COLUMN_KINDS, ids=_ids(COLUMN_KINDS))
def column_kind(request: pytest.FixtureRequest, tmp_path: Path) -> StorageKind:
    """Every storage with a schema, on every device present."""
    return StorageKind(*request.param, tmp_path)


@pytest.fixture(name="make_rows")
def _make_rows() -> Callable[..., TensorDict]:
    return make_rows


@pytest.fixture(name="make_lanes")
def _make_lanes() -> Callable[..., TensorDict]:
    return make_lanes


# -- comparing ------------------------------------------------------------------------------------


def fingerprint(data: Any) -> Any:
    """Everything there is to tell of a container of tensors, as plain values that compare."""
    if isinstance(data, torch.Tensor):
        plain = data.detach().resolve_conj().resolve_neg().cpu().contiguous()
        # One dimension, since a tensor without any has no bytes to look at.
        raw = plain.reshape(-1).view(torch.uint8).numpy().tobytes()
        return (str(data.dtype), tuple(data.shape), raw)
    if isinstance(data, np.ndarray):
        return (str(data.dtype), data.shape, data.tobytes())
    if is_tensorclass(data):
        # Fields that are no tensors lie in either of two places inside, which is no difference.
        fields = {field.name: getattr(data, field.name) for field in dataclasses.fields(data)}
        return (type(data).__name__, tuple(data.batch_size), fingerprint(fields))
    if is_tensor_collection(data):
        keys = sorted(data.keys(), key=str)
        return (
            type(data).__name__,
            tuple(data.batch_size),
            {key: fingerprint(data.get(key)) for key in keys},
        )
    if isinstance(data, dict):
        return {key: fingerprint(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return (type(data).__name__, [fingerprint(value) for value in data])
    return data


def snapshot(buffer: ReplayBuffer) -> Any:
    """What a call that raises must leave as it was: bytes, counters, handles, schema."""
    storage = buffer.storage
    ledger = storage.ledger
    slots = torch.arange(min(ledger.slots, 1000))
    columns = getattr(storage, "_columns", None)
    return fingerprint(
        {
            "len": len(storage),
            "max_size": storage.max_size,
            "schema": repr(storage.schema),
            "columns": None if columns is None else dict(columns.tensors),
            "rows": [storage[row] for row in range(ledger.length)] if ledger.length else [],
            "cursor": ledger.cursor,
            "next_position": ledger.next_position,
            "positions": ledger.positions(slots),
            "generations": ledger.generations(slots),
            "write_count": buffer.write_count,
            "sampler": buffer.sampler.state_dict(),
        }
    )


@pytest.fixture(name="fingerprint")
def _fingerprint() -> Callable[[Any], Any]:
    return fingerprint


@pytest.fixture(name="snapshot")
def _snapshot() -> Callable[[ReplayBuffer], Any]:
    return snapshot


# -- other processes ------------------------------------------------------------------------------


@pytest.fixture
def run_python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a program in a process of its own; fails with its output unless ``check=False``.

    The interpreter has imported replaykit, unless ``fresh=True``.
    """

    def run(
        program: str,
        *arguments: object,
        check: bool = True,
        fresh: bool = False,
        timeout: float = 120,
        **options: Any,
    ) -> subprocess.CompletedProcess[str]:
        interpreter = [sys.executable] if fresh else python()
        done = subprocess.run(
            [*interpreter, "-W", "error", "-c", program, *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            **options,
        )
        if check:
            assert done.returncode == 0, done.stdout + done.stderr
        return done

    return run


@pytest.fixture(scope="session")
def built_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``built_once(name, build)``: a folder that the first worker to ask builds for all workers."""
    # The parent belongs to this run alone, and is the same for all its workers.
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def built(name: str, build: Callable[[Path], None]) -> Path:
        folder = base / name
        with FileLock(f"{folder}.lock"):
            if not (folder / "done").exists():
                shutil.rmtree(folder, ignore_errors=True)  # a build that failed
                folder.mkdir()
                build(folder)
                (folder / "done").touch()
        return folder

    return built


# -- what tests are marked with --------------------------------------------------------------------


@functools.cache
def marked_with(name: str) -> set[str]:
    """Return the identifiers in the marks of that name on all test functions."""
    found = set[str]()
    for path in Path(__file__).parent.rglob("test_*.py"):
        source = path.read_text("utf-8")
        if f"mark.{name}(" not in source:
            continue
        for node in ast.parse(source).body:
            if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test_"):
                continue
            for mark in node.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == f"pytest.mark.{name}":
                    found |= {ast.literal_eval(argument) for argument in mark.args}
    return found


@pytest.fixture(name="marked_with", scope="session")
def _marked_with() -> Callable[[str], set[str]]:
    return marked_with


def _sign(manifest: dict[str, Any]) -> str:
    """The text of a manifest: its last entry is the crc32 of the text without it."""
    text = json.dumps(manifest)
    return f'{text[:-1]}, "crc32": {zlib.crc32(text.encode())}}}'


@pytest.fixture(scope="session")
def forge() -> Callable[[Path, Callable[[dict[str, Any]], Any]], None]:
    """``forge(folder, change)``: changes a manifest and gives it the right checksum."""

    def change_manifest(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
        file = folder / "manifest.json"
        manifest = json.loads(file.read_text())
        del manifest["crc32"]
        change(manifest)
        file.write_text(_sign(manifest))

    return change_manifest
