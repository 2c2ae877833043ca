"""Every row through a function, into memory-mapped columns, by several processes."""

from __future__ import annotations

import math
import multiprocessing
import os
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any, Final

import torch
from tensordict import is_tensorclass

from replaykit._compat import is_tensordict
from replaykit.datasets.locking import target_lock
from replaykit.datasets.publish import recover
from replaykit.datasets.workers import pool_size, run_in_pool, run_in_processes
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
from replaykit.structure import Leaf, build, flatten
from replaykit.structure import Path as LeafPath

__all__ = ["preprocess_rows"]

_PIECE_BYTES: Final = 64 << 20
"""Most bytes of the source in one piece, unless the user says how many rows: pieces of a large
data set stay short enough for progress to be seen and for workers to end together."""
_BLOCK_BYTES: Final = 1 << 20
"""Most bytes of the source that a worker copies at a time; but at least one row. Allocators keep
some tens of those that are let go."""
_BLOCK_ROWS: Final = 256
"""Most rows at a time: beside its values, each has a container of its own, of some kilobytes."""


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
    """Maps a storage; see BaseDatasetExperienceReplay.preprocess."""
    if not isinstance(storage, TensorStorage):
        raise TypeError(f"expected a tensor storage, got {type(storage).__name__}")
    workers = multiprocessing.cpu_count() if num_workers is None else num_workers
    _require_int("num_workers", workers, 0)
    if pool is not None:
        workers = pool_size(pool) or workers
    _require_int("worker_threads", worker_threads, 1)
    if max_tasks_per_child is not None:
        _require_int("max_tasks_per_child", max_tasks_per_child, 1)
    methods = multiprocessing.get_all_start_methods()
    if mp_start_method is not None and mp_start_method not in methods:
        raise ValueError(f"expected mp_start_method in {methods}, got {mp_start_method!r}")
    source = _Source.along(storage, dim, num_frames)
    step = _piece_rows(source, workers, chunksize, num_chunks)
    # Links are followed: a folder behind one is replaced where it lies, not the link.
    target = Path(os.path.realpath(dest))
    _check_target(target)
    seed = _seed(generator)
    first = _probe(source, fn, seed)

    def results(job: _Job) -> Generator[int, None, None]:
        pieces = source.pieces(step)
        some = pieces if index_with_generator else list(pieces)
        if pool is not None:
            return run_in_pool(pool, job.run, some)
        if workers == 0:
            return (job.run(piece) for piece in some)
        return run_in_processes(
            job.run,
            some,
            workers,
            threads=worker_threads,
            start_method=mp_start_method,
            max_tasks=max_tasks_per_child,
        )

    with target_lock(target):
        recover(target)
        _check_target(target)  # it may have been filled while this waited for the lock
        draft = private_path(target, "tmp")
        try:
            files = _make_columns(draft, first, source.rows)
            job = _Job(source, _Portable(fn), draft, files, first.schema, seed)
            with closing(results(job)) as done:
                _follow(done, source.rows, pbar)
            sync_tree(draft)
            os.rename(draft, target)  # an empty directory is replaced in the same step
            sync_directory(target.parent)
        finally:
            remove_tree(draft)
        leaves = {
            path: map_file(target / name, *first.column(path, source.rows))
            for path, name in files.items()
        }
    batch = torch.Size([source.rows])
    return TensorStorage(build(first.schema.root, leaves, batch, torch.device("cpu")))


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
        """Yields copies of the rows ``[start, stop)``, one by one.

        Memory: one block, of ``_BLOCK_BYTES`` or one row, whatever the number of rows.
        """
        data = self.storage.view_at()
        block = min(_BLOCK_ROWS, max(1, _BLOCK_BYTES // max(1, self.row_bytes)))
        for first in range(start, stop, block):
            at = (slice(None),) * self.dim + (slice(first, min(first + block, stop)),)
            yield from data[at].clone().unbind(self.dim)


@dataclass(frozen=True)
class _First:
    """The result of the first row: what all results must look like."""

    value: Any
    schema: Schema

    def column(self, path: LeafPath, rows: int) -> tuple[torch.Size, torch.dtype]:
        leaf: Leaf = self.schema.leaves[path]
        return torch.Size([rows, *leaf.shape]), leaf.dtype


@dataclass(frozen=True)
class _Job:
    """What a worker has to know; small wherever the storage is mapped."""

    source: _Source
    fn: _Portable
    directory: Path
    files: dict[LeafPath, str]
    schema: Schema
    seed: int

    def run(self, piece: tuple[int, int]) -> int:
        """Maps rows ``[start, stop)`` into their place; returns how many there were."""
        start, stop = piece
        columns = {
            path: map_file(
                self.directory / name,
                torch.Size([self.source.rows, *self.schema.leaves[path].shape]),
                self.schema.leaves[path].dtype,
            )
            for path, name in self.files.items()
        }
        with torch.random.fork_rng(devices=[]):  # here, or in a process of the user's pool
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
    """A function that can be sent to another process, also if it is local or a lambda."""

    def __init__(self, fn: Callable[[Any], Any]) -> None:
        self.fn = fn

    def __call__(self, row: Any) -> Any:
        return self.fn(row)

    # Only ever between a process and the workers that it has started itself.
    def __getstate__(self) -> bytes:
        import cloudpickle

        return cloudpickle.dumps(self.fn)

    def __setstate__(self, state: bytes) -> None:
        import cloudpickle

        self.fn = cloudpickle.loads(state)


def _require_int(name: str, value: Any, least: int) -> None:
    if type(value) is not int or value < least:
        raise ValueError(f"expected {name} as an int of at least {least}, got {value!r}")


def _check_target(target: Path) -> None:
    """Refuses, before any work, a place to which no directory can be moved at the end."""
    if os.path.lexists(target) and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(f"expected an empty or absent directory, {target} is neither")
    if os.path.ismount(target):
        raise ValueError(
            f"expected a directory that can be replaced, {target} is a mount point; give a "
            "folder inside it"
        )
    above = next(path for path in target.parents if os.path.lexists(path))
    if not above.is_dir():
        raise NotADirectoryError(f"expected a directory above {target}, {above} is none")


def _piece_rows(
    source: _Source, workers: int, chunksize: int | None, num_chunks: int | None
) -> int:
    if chunksize is not None and num_chunks is not None:
        raise ValueError("expected chunksize or num_chunks, got both")
    if chunksize is not None:
        _require_int("chunksize", chunksize, 0)
        return max(1, chunksize)
    if num_chunks is not None:
        _require_int("num_chunks", num_chunks, 1)
        return math.ceil(source.rows / num_chunks)
    most = max(1, _PIECE_BYTES // max(1, source.row_bytes))
    return min(most, math.ceil(source.rows / max(1, workers)))


def _probe(source: _Source, fn: Callable[[Any], Any], seed: int) -> _First:
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
    return _First(value, Schema(root))


def _make_columns(directory: Path, first: _First, rows: int) -> dict[LeafPath, str]:
    """Makes empty columns, in the layout of ``TensorDict.load_memmap``; returns their files."""
    total = rows * first.schema.row_bytes()
    largest = max(
        math.prod(first.column(p, rows)[0]) * first.column(p, rows)[1].itemsize
        for p in first.schema.leaves
    )
    require_room(directory, total, largest)
    directory.mkdir()
    if isinstance(first.value, torch.Tensor):
        names = {(): "data.memmap"}
        (directory / names[()]).touch()
    else:
        with disk_errors(directory, total):
            stored = first.value.expand(rows, *first.value.batch_size).memmap_like(directory)
        names = {
            path: str(Path(_leaf(stored, path).filename).relative_to(directory))
            for path in first.schema.leaves
        }
    for path, name in names.items():
        shape, dtype = first.column(path, rows)
        reserve(directory / name, shape.numel() * dtype.itemsize)
    return names


def _leaf(data: Any, path: LeafPath) -> Any:
    for part in path:
        data = data.get(part)
    return data


def _seed(generator: torch.Generator | None) -> int:
    device = "cpu" if generator is None else generator.device
    return int(torch.randint(2**62, (), generator=generator, device=device))


def _seed_row(seed: int, row: int) -> None:
    # By row: results depend neither on the pieces nor on who works them off. Not by
    # `torch.manual_seed`: it costs a hundred times as much and would seed the GPUs of this process.
    torch.default_generator.manual_seed((seed + row) % 2**63)


def _follow(results: Iterable[int], rows: int, pbar: bool) -> None:
    from tqdm import tqdm

    with tqdm(total=rows, unit="rows", disable=not pbar) as bar:
        for done in results:
            bar.update(done)
