"""One row per episode: a flat data set laid out again as ``[E, T]``, padded at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from replaykit.datasets.columns import ColumnFile, ColumnSpec, create_columns, synced_early
from replaykit.datasets.engine.conversion import ConvertOptions
from replaykit.datasets.episode_table import write_episode_table
from replaykit.datasets.locking import target_lock
from replaykit.datasets.manifest import Array, Manifest
from replaykit.datasets.opened import Published
from replaykit.datasets.progress import progress_bar
from replaykit.datasets.publish import ensure_published, hold_back, open_published
from replaykit.ted import Key, format_key

__all__ = ["MASK_KEY", "SPLIT_FORM", "TRAJ_IDS_KEY", "ensure_split"]

MASK_KEY: Final[Key] = ("mask",)
TRAJ_IDS_KEY: Final[Key] = ("traj_ids",)
SPLIT_FORM: Final = {"form": "split trajectories"}
"""What the identity of a split data set has beside that of the flat one."""
_INDEX_BYTES: Final = 16
"""Bytes per entry for finding out which entries are rows: an integer in, an integer out."""
_CONVERTER: Final = {"name": "split-trajectories", "version": 1}


def ensure_split(
    flat: str | Path,
    target: str | Path,
    *,
    force: bool = False,
    progress: bool | None = None,
    identity: Mapping[str, Any] | None = None,
    options: ConvertOptions | None = None,
) -> Published:
    """Opens the split form of a data set; makes it where it is absent or of an older version.

    The split form has the batch size ``[E, T]``: an entry for each episode, as long as the
    longest. Behind the end of an episode everything is zero and flags are ``False``. Two keys are
    added: ``mask``, bool ``[E, T]``, true on the rows of the episode, and ``traj_ids``, int64
    ``[E, T]``, the position of the episode. It is published as the flat one is: complete or not
    at all, once for all processes that ask. The flat data set is kept and not changed.

    Args:
        flat: directory of the published flat data set.
        target: directory of the split one.
        force: make it anew.
        progress: whether a bar is shown; by default only on a terminal.
        identity: entries that the identities of both must have. Rules of another version are no
            matter here: what was made by them from another flat data set is made again.
        options: ``block_bytes`` bounds the memory.

    Raises:
        FileNotFoundError: there is no flat data set.
        OSError: there is no room for the result; names the file and what to do.
        RuntimeError: one of the directories is there and is not the data set that it should be,
            or one of another identity.
        ValueError: the data set has a key ``mask`` or ``traj_ids`` of its own, or is split.

    Cost: reads and writes every value once; ``E * T`` entries are kept on disk, so one very long
    episode among short ones makes the result large. Memory: one block.
    """
    options = ConvertOptions() if options is None else options
    origin = open_published(flat, identity=identity)
    made_from = origin.manifest.content_id()

    def build(directory: Path) -> Manifest:
        # Held so that the flat data set is not replaced while it is read.
        with target_lock(origin.path):
            return _split(directory, open_published(origin.path), options, progress)

    return ensure_published(
        target,
        build,
        force=force,
        identity={**({} if identity is None else identity), **SPLIT_FORM},
        is_current=lambda manifest: manifest.source.get("flat") == made_from,
    )


def _split(
    directory: Path, flat: Published, options: ConvertOptions, progress: bool | None
) -> Manifest:
    manifest = flat.manifest
    if len(manifest.batch) != 1:
        raise ValueError(f"{flat.path} is split already: its batch is {list(manifest.batch)}")
    for key in (MASK_KEY, TRAJ_IDS_KEY):
        if key in flat.columns:
            raise ValueError(f"{flat.path} has a key {format_key(key)} of its own")
    lengths = flat.episodes["length"].numpy()
    batch = (len(lengths), int(lengths.max(initial=0)))
    arrays = [*manifest.arrays, *manifest.finals]
    specs = [ColumnSpec(array.key, array.shape[1:], array.dtype) for array in arrays]
    added = [ColumnSpec(MASK_KEY, (), torch.bool), ColumnSpec(TRAJ_IDS_KEY, (), torch.int64)]
    columns = create_columns(directory, [*specs, *added], batch)
    hold_back(directory)
    total = sum(array.nbytes for array in manifest.arrays)
    with progress_bar("splitting", total, progress) as advance, synced_early(columns):
        for array in manifest.arrays:
            _split_column(flat.path, array, columns[array.key], lengths, options, advance)
        for array in manifest.finals:
            _split_following(flat, array.key, columns[array.key], lengths, options)
    _write_ids(columns, lengths, batch[1], options)
    table = {name: values.numpy() for name, values in flat.episodes.items()}
    episode_arrays, group_file = write_episode_table(directory, table, flat.groups())
    facts: dict[Key, Mapping[str, Any]] = {array.key: array.facts for array in arrays}
    return Manifest(
        rows=batch[0],
        batch=batch,
        episodes=batch[0],
        arrays=tuple(
            column.describe(directory, facts.get(key, {})) for key, column in columns.items()
        ),
        episode_arrays=episode_arrays,
        group_file=group_file,
        converter=_CONVERTER,
        identity={**manifest.identity, **SPLIT_FORM},
        source={**manifest.source, "flat": manifest.content_id()},
        report=manifest.report,
        options=asdict(options),
    )


def _split_column(
    home: Path,
    array: Array,
    column: ColumnFile,
    lengths: npt.NDArray[np.int64],
    options: ConvertOptions,
    advance: Callable[[int], object],
) -> None:
    """Copies one column. It is handled as bytes: no dtype needs to be known."""
    width, size = column.shape[1], column.spec.entry_bytes
    if not size or array.file is None:
        return
    with ExitStack() as stack:
        file = stack.enter_context((home / array.file).open("rb"))
        nbytes = width * (size + _INDEX_BYTES)
        for first, stop in _runs(len(lengths), nbytes, options.block_bytes):
            counts = lengths[first:stop]
            if stop - first == 1 and nbytes > options.block_bytes:
                _copy_long(file, column, first * width, int(counts[0]), options.block_bytes)
                column.skip(width - int(counts[0]))
            else:
                # The rows of neighbouring episodes are neighbours in the flat file.
                rows = np.fromfile(file, np.uint8, int(counts.sum()) * size).reshape(-1, size)
                block = np.zeros((stop - first, width, size), np.uint8)
                block[_mask(counts, width)] = rows
                column.write(first * width, block.reshape(-1, size))
            advance(int(counts.sum()) * size)


def _split_following(
    flat: Published,
    key: Key,
    column: ColumnFile,
    lengths: npt.NDArray[np.int64],
    options: ConvertOptions,
) -> None:
    """Copies a column that is not stored: its rows are those of the following row."""
    width, size = column.shape[1], column.spec.entry_bytes
    if not size:
        return
    step = max(1, options.block_bytes // size)
    row = 0
    for episode, count in enumerate(lengths.tolist()):
        for done in range(0, count, step):
            stop = row + min(done + step, count)
            block = flat.following(key, row + done, stop)
            values = block.flatten().view(torch.uint8).numpy().reshape(-1, size)
            column.write(episode * width + done, values)
        column.skip(width - count)
        row += count


def _copy_long(file: Any, column: ColumnFile, start: int, count: int, block_bytes: int) -> None:
    size = column.spec.entry_bytes
    step = max(1, block_bytes // size)
    for done in range(0, count, step):
        entries = min(step, count - done)
        rows = np.fromfile(file, np.uint8, entries * size).reshape(-1, size)
        column.write(start + done, rows)


def _write_ids(
    columns: Mapping[Key, ColumnFile],
    lengths: npt.NDArray[np.int64],
    width: int,
    options: ConvertOptions,
) -> None:
    mask_column, ids_column = columns[MASK_KEY], columns[TRAJ_IDS_KEY]
    nbytes = width * _INDEX_BYTES
    for first, stop in _runs(len(lengths), nbytes, options.block_bytes):
        if stop - first == 1 and nbytes > options.block_bytes:
            count, start = int(lengths[first]), first * width
            step = min(count, max(1, options.block_bytes // 8))
            mask, ids = np.ones(step, np.bool_), np.full(step, first, np.int64)
            for done in range(0, count, step):
                mask_column.write(start + done, mask[: count - done])
                ids_column.write(start + done, ids[: count - done])
            for column in (mask_column, ids_column):
                column.skip(width - count)
            continue
        mask = _mask(lengths[first:stop], width)
        ids = np.where(mask, np.arange(first, stop)[:, None], 0)
        mask_column.write(first * width, mask.reshape(-1))
        ids_column.write(first * width, ids.reshape(-1))


def _mask(lengths: npt.NDArray[np.int64], width: int) -> npt.NDArray[np.bool_]:
    return np.arange(width) < lengths[:, None]


def _runs(count: int, nbytes: int, block_bytes: int) -> Iterator[tuple[int, int]]:
    """Yields runs of episodes that fit a block together, at least one each."""
    step = max(1, block_bytes // max(1, nbytes))
    for first in range(0, count, step):
        yield first, min(first + step, count)
