"""Facts of the directory of a memory-mapped storage."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from replaykit.errors import CheckpointError
from replaykit.inspection.facts import Facts
from replaykit.inspection.stored import episodes_of, keys_of, table_of
from replaykit.inspection.table import Table
from replaykit.storages import LazyMemmapStorage
from replaykit.storages.committing import PRIORITIES

__all__ = ["RECOVERY", "is_scratch", "opened_scratch"]

RECOVERY: Final = "%recovery"
_SUFFIX: Final = ".memmap"


def is_scratch(path: Path) -> bool:
    """Whether a directory is that of a memory-mapped storage."""
    return (path / RECOVERY / "manifest.json").exists() or any(path.rglob(f"*{_SUFFIX}"))


@contextmanager
def opened_scratch(path: Path, most_bytes: int | None) -> Iterator[tuple[Facts, Table]]:
    """Opens the directory of a storage and yields what is known of it.

    One made with ``recover=True`` is opened as the storage itself opens it: a write that was cut
    off is taken back, and nobody else may have it open. Of another one only the files are known:
    nothing in them says what they hold.

    Raises:
        CheckpointError: a file is missing or damaged; names it.
        RuntimeError: a process has it open.
    """
    files = [file for file in path.rglob(f"*{_SUFFIX}") if file.is_file()]
    nbytes = sum(file.stat().st_size for file in files)
    if not (path / RECOVERY / "manifest.json").exists():
        names = ", ".join(sorted(str(file.relative_to(path)) for file in files)[:20])
        warning = (
            "the storage was made without recover=True, so nothing says which keys, dtypes and "
            "rows these files hold: save the buffer with dumps() and inspect the checkpoint"
        )
        about = {"files": f"{len(files)}: {names}"}
        yield Facts("buffer", str(path), None, nbytes, about, (), None, (warning,)), Table()
        return
    storage = _opened(path)
    content = storage.content()
    episodes, facts = episodes_of(storage) if content.rows and content.groups else (None, None)
    table = table_of(content, episodes, _priorities(storage))
    described: dict[str, Any] = {
        "storage": f"LazyMemmapStorage of {storage.max_size:,} rows, recover=True",
        "lanes": list(content.lanes),
    }
    if not content.lanes:
        del described["lanes"]
    yield (
        Facts(
            "buffer", str(path), len(storage), nbytes, described, keys_of(table, most_bytes), facts
        ),
        table,
    )


def _opened(path: Path) -> LazyMemmapStorage:
    file = path / RECOVERY / "manifest.json"
    try:
        content = json.loads(file.read_text("utf-8"))["content"]
        lanes = [int(size) for size in content["lanes"]]
        slots, ndim, key = int(content["slots"]), int(content["ndim"]), content["lane_key"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file} is damaged: {error}") from None
    return LazyMemmapStorage(
        slots * int(np.prod(lanes)),
        scratch_dir=path,
        ndim=ndim,
        lane_key=tuple(key) if isinstance(key, list) else key,
        dedup_next=[tuple(path) for path in content.get("dedup_next", ())] or False,
        recover=True,
    )


def _priorities(storage: LazyMemmapStorage) -> torch.Tensor | None:
    recovery: Any = storage.recovery
    kept = recovery._still_saved()
    if kept is None or not kept.priorities or not kept.priorities[0].length:
        return None
    length = kept.priorities[0].length
    return torch.from_numpy(recovery.home.table(PRIORITIES, np.float64, length)[:length])
