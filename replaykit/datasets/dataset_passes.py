"""Split of a data set into episodes, and functions applied to every row."""

from __future__ import annotations

import math
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from tensordict import is_tensorclass

from replaykit._compat import is_tensordict
from replaykit.datasets.column_files import (
    ATTACHED,
    ColumnOutput,
    ColumnSpec,
    attach_files,
    create_columns,
    synced_early,
    write_episode_table,
)
from replaykit.datasets.dataset_manifest import Manifest
from replaykit.datasets.engine.conversion import ConvertOptions
from replaykit.datasets.publishing import (
    Published,
    ensure_published,
    hold_back,
    open_published,
    recover,
)
from replaykit.datasets.transfers import progress_bar, target_lock
from replaykit.datasets.worker_pool import WorkerPool, pool_size, run_in_pool
from replaykit.declared import Count, Positive, read_value
from replaykit.errors import SchemaError
from replaykit.filesystem import (
    disk_errors,
    private_path,
    remove_tree,
    require_room,
    reserve,
    sync_directory,
    sync_tree,
)
from replaykit.schema import Schema
from replaykit.storages import Storage, TensorStorage
from replaykit.storages.row_files import map_file
from replaykit.structure import Path as LeafPath
from replaykit.structure import build, flatten
from replaykit.ted import Key, format_key

MASK_KEY: Final[Key] = ("mask",)
TRAJ_IDS_KEY: Final[Key] = ("traj_ids",)
SPLIT_FORM: Final = {"form": "split trajectories"}
"""The entries that a split data set adds to the identity of the flat data set."""
_INDEX_BYTES: Final = 16
"""Bytes per entry while the mask of rows is computed: one integer in, one integer out."""
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
    """Open the split form of a data set, and make it if it is absent or outdated.

    The split form has the batch size ``[E, T]``, with one entry for each episode. Each episode is
    padded with zeros and ``False`` to the length of the longest. The key ``mask``, bool ``[E, T]``,
    is true on the rows of the episode. The key ``traj_ids``, int64 ``[E, T]``, contains the
    position of the episode. Like the flat data set, the split data set appears completely or not at
    all. Processes that request it at once share one call that makes it. The flat data set does not
    change.

    Args:
        flat: directory of the published flat data set.
        target: directory of the split data set.
        force: True to make the split data set again even if it is up to date.
        progress: show a progress bar; by default only on a terminal.
        identity: entries that the identities of both data sets must have. If the split form was
            made from another version of the flat data set, it is made again.
        options: ``block_bytes`` is the size of one block in memory.

    Raises:
        FileNotFoundError: there is no flat data set.
        OSError: the disk has too little room. The message names the file and the remedy.
        RuntimeError: one of the directories holds something else, or a data set of another
            identity.
        ValueError: the data set already has a key ``mask`` or ``traj_ids``, or is split.

    Cost: every value is read and written once. The result has ``E * T`` entries on disk, so one
    very long episode makes it large. Memory: one block.
    """
    options = ConvertOptions() if options is None else options
    origin = open_published(flat, identity=identity)
    made_from = origin.manifest.content_id()

    def build(directory: Path) -> Manifest:
        # The lock prevents a replacement of the flat data set while it is read.
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
            raise ValueError(f"{flat.path} already has a key {format_key(key)}")
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
            stored = partial(_stored, flat.path / (array.file or ""), columns[array.key])
            _pad(columns[array.key], stored, lengths, options.block_bytes, advance)
        for array in manifest.finals:
            following = partial(flat.following, array.key)
            _pad(columns[array.key], following, lengths, options.block_bytes)
        stops = torch.from_numpy(lengths.cumsum())
        _pad(columns[MASK_KEY], _ones, lengths, options.block_bytes)
        _pad(columns[TRAJ_IDS_KEY], partial(_ids, stops), lengths, options.block_bytes)
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
        attached=tuple(
            attach_files(
                directory,
                {
                    file.file.removesuffix(ATTACHED): flat.path / file.file
                    for file in manifest.attached
                },
            )
        ),
        converter=_CONVERTER,
        identity={**manifest.identity, **SPLIT_FORM},
        source={**manifest.source, "flat": manifest.content_id()},
        report=manifest.report,
        options=asdict(options),
    )


def _stored(path: Path, column: ColumnOutput, start: int, stop: int) -> torch.Tensor:
    """Return rows of a column as bytes. Pages of a mapped file would count as memory."""
    size = column.spec.entry_bytes
    values = np.fromfile(path, np.uint8, (stop - start) * size, offset=start * size)
    return torch.from_numpy(values)


def _ones(start: int, stop: int) -> torch.Tensor:
    return torch.ones(stop - start, dtype=torch.bool)


def _ids(stops: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Return the positions of the episodes of rows."""
    return torch.bucketize(torch.arange(start, stop), stops, right=True)


def _pad(
    column: ColumnOutput,
    read: Callable[[int, int], torch.Tensor],
    lengths: npt.NDArray[np.int64],
    block_bytes: int,
    advance: Callable[[int], object] = bool,
) -> None:
    """Write one column, each episode padded with zeros to the length of the longest.

    Args:
        column: the column ``[E, T, ...]``.
        read: returns rows ``start .. stop - 1`` of the flat column, or their bytes.
        lengths: the lengths of the episodes.
        block_bytes: number of bytes in memory.
        advance: called with the number of bytes that were read.
    """
    width, size = column.shape[1], column.spec.entry_bytes
    if not size:
        return
    entry_bytes = size + _INDEX_BYTES
    step = max(1, block_bytes // entry_bytes)
    episodes = max(1, step // max(1, width))
    row = 0
    for first in range(0, len(lengths), episodes):
        counts = lengths[first : first + episodes]
        total = int(counts.sum())
        for done in range(0, total, step):
            values = read(row + done, row + min(done + step, total)).contiguous().view(-1)
            block = values.view(torch.uint8).numpy().reshape(-1, size)
            if len(counts) > 1:
                # Consecutive episodes have consecutive rows in the flat data set.
                padded = np.zeros((len(counts), width, size), np.uint8)
                padded[np.arange(width) < counts[:, None]] = block
                block = padded.reshape(-1, size)
            column.write(first * width + done, block)
        if len(counts) == 1:
            column.skip(width - total)
        advance(total * size)
        row += total


_PIECE_BYTES: Final = 64 << 20
"""Most bytes of the source in one piece, unless the user gives a number of rows.

Short pieces make progress visible, and let all workers end at about the same time.
"""
_BLOCK_BYTES: Final = 1 << 20
"""Most bytes of the source in one copy by a worker, but at least one row.

Allocators keep some tens of freed blocks.
"""
_BLOCK_ROWS: Final = 256
"""Most rows in one copy by a worker. Each row has a container of some kilobytes."""


def preprocess_rows(
    storage: Storage,
    fn: Callable[[Any], Any],
    *,
    dest: str | Path,
    dim: int = 0,
    num_workers: int | None = None,
    chunksize: int | None = None,
    num_chunks: int | None = None,
    pool: Pool | None = None,
    generator: torch.Generator | None = None,
    max_tasks_per_child: int | None = None,
    worker_threads: int = 1,
    index_with_generator: bool = False,
    pbar: bool = False,
    mp_start_method: str | None = None,
    num_frames: int | None = None,
) -> TensorStorage:
    """Apply a function to the rows of a storage; see BaseDatasetExperienceReplay.preprocess."""
    if not isinstance(storage, TensorStorage):
        raise TypeError(f"expected a tensor storage, got {type(storage).__name__}")
    workers = multiprocessing.cpu_count() if num_workers is None else num_workers
    read_value(Count, workers, "num_workers")
    if pool is not None:
        workers = pool_size(pool) or workers
    read_value(Positive, worker_threads, "worker_threads")
    read_value(Positive | None, max_tasks_per_child, "max_tasks_per_child")
    methods = multiprocessing.get_all_start_methods()
    if mp_start_method is not None and mp_start_method not in methods:
        raise ValueError(f"expected mp_start_method in {methods}, got {mp_start_method!r}")
    source = _Source.along(storage, dim, num_frames)
    step = _piece_rows(source, workers, chunksize, num_chunks)
    # Links are followed: the folder behind a link is replaced, not the link.
    target = Path(os.path.realpath(dest))
    _check_target(target)
    seed = _seed(generator)
    first, schema = _probe(source, fn, seed)

    def results(job: _Job, stack: ExitStack) -> Iterator[int]:
        pieces = source.pieces(step)
        some = pieces if index_with_generator else list(pieces)
        if pool is not None:
            return stack.enter_context(closing(run_in_pool(pool, job.run, some)))
        if workers == 0:
            return map(job.run, some)
        processes = WorkerPool(
            job.run,
            some,
            workers,
            threads=worker_threads,
            start_method=mp_start_method,
            max_tasks=max_tasks_per_child,
        )
        return stack.enter_context(processes).answers()

    with target_lock(target):
        recover(target)
        _check_target(target)  # another process may have filled it before this one got the lock
        draft = private_path(target, "tmp")
        try:
            files = _make_columns(draft, first, schema, source.rows)
            job = _Job(source, _Portable(fn), draft, files, schema, seed)
            with ExitStack() as stack:
                _report_progress(results(job, stack), source.rows, pbar)
            sync_tree(draft)
            os.rename(draft, target)  # an empty directory is replaced in the same step
            sync_directory(target.parent)
        finally:
            remove_tree(draft)
        leaves = job.columns(target)
    batch = torch.Size([source.rows])
    return TensorStorage(build(schema.root, leaves, batch, torch.device("cpu")))


@dataclass(frozen=True)
class _Source:
    """The rows to map: the first ``rows`` along a batch dimension of a storage."""

    storage: TensorStorage
    dim: int
    rows: int
    row_bytes: int

    @classmethod
    def along(cls, storage: TensorStorage, dim: int, num_frames: int | None) -> _Source:
        data = storage.view_at()
        shape = data.shape if isinstance(data, torch.Tensor) else data.batch_size
        ndim = len(shape)
        if type(dim) is not int or not -ndim <= dim < ndim:
            raise ValueError(f"expected dim as an int in [{-ndim}, {ndim}), got {dim!r}")
        dim %= ndim
        rows = shape[dim]
        if not rows:
            raise ValueError(f"expected at least one row, got the shape {list(shape)}")
        total = sum(leaf.numel() * leaf.element_size() for leaf in flatten(data, 0)[1].values())
        if num_frames is None:
            return cls(storage, dim, rows, total // rows)
        if type(num_frames) is not int or not 1 <= num_frames <= rows:
            raise ValueError(f"expected num_frames in [1, {rows}], got {num_frames!r}")
        return cls(storage, dim, num_frames, total // rows)

    def pieces(self, step: int) -> Iterator[tuple[int, int]]:
        for start in range(0, self.rows, step):
            yield start, min(start + step, self.rows)

    def copies(self, start: int, stop: int) -> Iterator[Any]:
        """Yield copies of the rows ``[start, stop)``, one by one.

        Memory: one block, of ``_BLOCK_BYTES`` or one row.
        """
        data = self.storage.view_at()
        block = min(_BLOCK_ROWS, max(1, _BLOCK_BYTES // max(1, self.row_bytes)))
        for first in range(start, stop, block):
            at = (slice(None),) * self.dim + (slice(first, min(first + block, stop)),)
            yield from data[at].clone().unbind(self.dim)


@dataclass(frozen=True)
class _Job:
    """The job of a worker. Its pickle is small if the storage is mapped."""

    source: _Source
    fn: _Portable
    directory: Path
    files: dict[LeafPath, str]
    schema: Schema
    seed: int

    def columns(self, directory: Path) -> dict[LeafPath, torch.Tensor]:
        """Map the columns of all results, which are in a directory."""
        return {
            path: map_file(
                directory / name,
                torch.Size([self.source.rows, *self.schema.leaves[path].shape]),
                self.schema.leaves[path].dtype,
            )
            for path, name in self.files.items()
        }

    def run(self, piece: tuple[int, int]) -> int:
        """Map rows ``[start, stop)``, write the results, and return the number of rows."""
        start, stop = piece
        columns = self.columns(self.directory)
        with torch.random.fork_rng(devices=[]):  # the process may be the caller's or a pool's
            for row, data in enumerate(self.source.copies(start, stop), start):
                _seed_row(self.seed, row)
                root, leaves = flatten(self.fn(data), 0)
                try:
                    self.schema.check(root)
                except SchemaError as error:
                    raise ValueError(
                        f"the result of row {row} differs from row 0's: {error}"
                    ) from None
                for path, leaf in leaves.items():
                    columns[path][row].copy_(leaf)
        return stop - start


class _Portable:
    """A wrapper that makes local functions and lambdas picklable."""

    def __init__(self, fn: Callable[[Any], Any]) -> None:
        self.fn = fn

    def __call__(self, row: Any) -> Any:
        return self.fn(row)

    # Unpickling is safe: the data comes only from the process that started the worker.
    def __getstate__(self) -> bytes:
        import cloudpickle

        return cloudpickle.dumps(self.fn)

    def __setstate__(self, state: bytes) -> None:
        import cloudpickle

        self.fn = cloudpickle.loads(state)


def _check_target(target: Path) -> None:
    """Refuse a target that a directory cannot be renamed to, before any work."""
    if os.path.lexists(target) and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(f"expected an empty or absent directory, {target} is neither")
    if os.path.ismount(target):
        raise ValueError(
            f"expected a directory that can be replaced, {target} is a mount point; give a "
            "folder inside it"
        )
    above = next(path for path in target.parents if os.path.lexists(path))
    if not above.is_dir():
        raise NotADirectoryError(f"expected a directory above {target}, {above} is not one")


def _piece_rows(
    source: _Source, workers: int, chunksize: int | None, num_chunks: int | None
) -> int:
    if chunksize is not None and num_chunks is not None:
        raise ValueError("expected chunksize or num_chunks, got both")
    if chunksize is not None:
        read_value(Count, chunksize, "chunksize")
        return max(1, chunksize)
    if num_chunks is not None:
        read_value(Positive, num_chunks, "num_chunks")
        return math.ceil(source.rows / num_chunks)
    most = max(1, _PIECE_BYTES // max(1, source.row_bytes))
    return min(most, math.ceil(source.rows / max(1, workers)))


def _probe(source: _Source, fn: Callable[[Any], Any], seed: int) -> tuple[Any, Schema]:
    """Return the result of the first row, and its layout, which all results must have."""
    with torch.random.fork_rng(devices=[]):
        _seed_row(seed, 0)
        value = fn(next(source.copies(0, 1)))
    if not (is_tensordict(value) or is_tensorclass(value) or isinstance(value, torch.Tensor)):
        raise TypeError(
            f"expected fn to return a TensorDict, tensorclass or tensor, got {type(value).__name__}"
        )
    root, leaves = flatten(value, 0)
    if not leaves:
        raise ValueError("expected fn to return at least one tensor, got none")
    return value, Schema(root)


def _make_columns(directory: Path, first: Any, schema: Schema, rows: int) -> dict[LeafPath, str]:
    """Create empty columns for ``TensorDict.load_memmap``, and return their file names."""
    sizes = {
        path: rows * leaf.shape.numel() * leaf.dtype.itemsize
        for path, leaf in schema.leaves.items()
    }
    total = sum(sizes.values())
    require_room(directory, total, max(sizes.values()))
    directory.mkdir()
    if isinstance(first, torch.Tensor):
        names = {(): "data.memmap"}
        (directory / names[()]).touch()
    else:
        with disk_errors(directory, total):
            stored = first.expand(rows, *first.batch_size).memmap_like(directory)
        names = {
            path: str(Path(_leaf(stored, path).filename).relative_to(directory)) for path in sizes
        }
    for path, name in names.items():
        reserve(directory / name, sizes[path])
    return names


def _leaf(data: Any, path: LeafPath) -> Any:
    for part in path:
        data = data.get(part)
    return data


def _seed(generator: torch.Generator | None) -> int:
    device = "cpu" if generator is None else generator.device
    return int(torch.randint(2**62, (), generator=generator, device=device))


def _seed_row(seed: int, row: int) -> None:
    # The seed depends on the row only, so pieces and workers do not change the results.
    # `torch.manual_seed` would take a hundred times as long and seed the GPUs of this process.
    torch.default_generator.manual_seed((seed + row) % 2**63)


def _report_progress(results: Iterable[int], rows: int, pbar: bool) -> None:
    from tqdm import tqdm

    with tqdm(total=rows, unit="rows", disable=not pbar) as bar:
        for done in results:
            bar.update(done)
