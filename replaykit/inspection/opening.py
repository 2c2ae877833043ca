"""What a path holds, whatever it is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from replaykit.checkpoint import FORMAT as CHECKPOINT
from replaykit.datasets.engine.finding import natural_key
from replaykit.datasets.manifest import FORMAT as CORPUS
from replaykit.datasets.sources import h5_below, require_plain
from replaykit.inspection.checkpoint import opened_checkpoint
from replaykit.inspection.corpus import corpus_facts
from replaykit.inspection.facts import Facts
from replaykit.inspection.h5 import opened_h5
from replaykit.inspection.scratch import is_scratch, opened_scratch
from replaykit.inspection.table import Table

__all__ = ["MOST_BYTES", "h5_files", "kind_of", "opened"]

MOST_BYTES: Final = 64 << 20
"""Bytes of a key that statistics look at, where they are not known already."""


def kind_of(path: Path) -> str:
    """Returns ``corpus``, ``checkpoint``, ``buffer``, ``H5 file`` or ``H5 folder``.

    Raises:
        FileNotFoundError: there is nothing. ValueError: a folder holds none of these; or the path,
            or an H5 file in the folder, is a pipe, a device or a socket.

    Example:
        >>> from pathlib import Path
        >>> from replaykit.inspection import kind_of
        >>> kind_of(Path("no-such-folder"))
        Traceback (most recent call last):
        FileNotFoundError: no-such-folder is not there
    """
    if not path.exists():
        raise FileNotFoundError(f"{path} is not there")
    require_plain(path)
    if path.is_file():
        return "H5 file"
    said = _format(path / "manifest.json")
    if said == CORPUS:
        return "corpus"
    if said == CHECKPOINT or (path / "manifest.json").exists():
        return "checkpoint"
    if is_scratch(path):
        return "buffer"
    if h5_files(path):
        return "H5 folder"
    raise ValueError(
        f"expected a converted data set, a checkpoint, a buffer's directory, or H5 files, got "
        f"{path}, which holds none of them"
    )


def _format(manifest: Path) -> str | None:
    if not manifest.is_file():  # reading a pipe would wait for a writer
        return None
    try:
        found = json.loads(manifest.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return found.get("format") if isinstance(found, dict) else None


def h5_files(path: Path) -> list[Path]:
    """Returns the H5 files of a folder, by natural order, or the file itself.

    Links to files in the folder are followed, as by `convert`.

    Raises:
        ValueError: one is a pipe, a device or a socket.
    """
    require_plain(path)
    if path.is_file():
        return [path]
    return sorted(h5_below(path), key=lambda each: natural_key(str(each)))


@contextmanager
def opened(
    path: Path, *, layout: str | None = None, most_bytes: int | None = MOST_BYTES
) -> Iterator[tuple[Facts, Table]]:
    """Opens whatever lies at a path, and yields facts, and columns to be read.

    Args:
        path: of a converted data set, a checkpoint, the directory of a memory-mapped buffer, an H5
            file, or a folder of H5 files.
        layout: of H5 files, by name; ``None``: the one that fits.
        most_bytes: of each key that statistics look at, in rows that lie evenly, where they are
            not known already; ``None``: all.

    Raises:
        FileNotFoundError: there is nothing. ValueError: it is none of these.
        RuntimeError, CorpusError, CheckpointError, OSError: it is damaged; names the file.

    Example:
        >>> import tempfile, torch
        >>> from pathlib import Path
        >>> from replaykit import LazyTensorStorage, ReplayBuffer
        >>> from replaykit.inspection import opened
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10))
        >>> _ = rb.extend(torch.arange(3.0))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     rb.dumps(folder)
        ...     with opened(Path(folder)) as (facts, table):
        ...         facts.kind, facts.rows, facts.keys[0].statistics["mean"]
        ('checkpoint', 3, 1.0)
    """
    kind = kind_of(path)
    if kind == "corpus":
        yield corpus_facts(path)
    elif kind == "checkpoint":
        with opened_checkpoint(path, most_bytes) as found:
            yield found
    elif kind == "buffer":
        with opened_scratch(path, most_bytes) as found:
            yield found
    else:
        with opened_h5(path, h5_files(path), layout, most_bytes) as found:
            yield found
