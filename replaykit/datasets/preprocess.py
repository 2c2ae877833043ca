"""Every row through a function, into memory-mapped columns, by several processes."""

from __future__ import annotations

import math
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any

import torch
from tensordict import is_tensorclass

from replaykit._compat import is_tensordict
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
from replaykit.storages.memmap import map_file
from replaykit.structure import Leaf, build, flatten
from replaykit.structure import Path as LeafPath

__all__ = ["preprocess_rows"]

_PIECE_ROWS = 1024
_PIECES_AHEAD = 4


def preprocess_rows(
    storage: Storage,
    fn: Callable[[Any], Any],
    *,
    dest: Path,
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
    if dest.exists() and (not dest.is_dir() or any(dest.iterdir())):
        raise FileExistsError(f"expected an empty or absent directory, {dest} is neither")
    rows = _rows_of(storage, dim, num_frames)
    workers = multiprocessing.cpu_count() if num_workers is None else num_workers
    if type(workers) is not int or workers < 0:
        raise ValueError(f"expected num_workers as an int of at least 0, got {num_workers!r}")
    pieces = _pieces(rows, chunksize, num_chunks)
    first = _probe(storage, fn, dim)
    dest.parent.mkdir(parents=True, exist_ok=True)
    draft = private_path(dest, "tmp")
    try:
        files = _make_columns(draft, first, rows)
        job = _Job(storage, _Portable(fn), dim, draft, files, first.schema, rows, _seed(generator))
        with _mapper(
            job, workers, pool, max_tasks_per_child, worker_threads, mp_start_method
        ) as run:
            _follow(run(pieces if index_with_generator else list(pieces)), rows, pbar)
        sync_tree(draft)
        os.rename(draft, dest)  # an empty directory is replaced in the same step
        sync_directory(dest.parent)
    finally:
        remove_tree(draft)
    leaves = {path: map_file(dest / files[path], *first.column(path, rows)) for path in files}
    batch = torch.Size([rows])
    return TensorStorage(build(first.schema.root, leaves, batch, torch.device("cpu")))


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

    storage: TensorStorage
    fn: _Portable
    dim: int
    directory: Path
    files: dict[LeafPath, str]
    schema: Schema
    rows: int
    seed: int

    def run(self, piece: tuple[int, int]) -> int:
        """Maps rows ``[start, stop)`` into their place; returns how many there were."""
        start, stop = piece
        columns = {
            path: map_file(
                self.directory / name,
                torch.Size([self.rows, *self.schema.leaves[path].shape]),
                self.schema.leaves[path].dtype,
            )
            for path, name in self.files.items()
        }
        # Seeded by piece, so that results do not depend on which worker does it.
        torch.manual_seed((self.seed + start) % 2**63)
        for row, data in enumerate(_rows_between(self.storage, start, stop, self.dim), start):
            result = self.fn(data)
            root, leaves = flatten(result, 0)
            try:
                self.schema.check(root)
            except SchemaError as error:
                raise ValueError(f"the result of row {row} differs from row 0's: {error}") from None
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


def _rows_between(storage: TensorStorage, start: int, stop: int, dim: int) -> Any:
    """Returns copies of the rows ``[start, stop)`` along a batch dimension, one by one."""
    if dim == 0:
        block = storage.view_at(slice(start, stop))
    else:
        block = storage.view_at()[(slice(None),) * dim + (slice(start, stop),)]
    return block.clone().unbind(dim)


def _rows_of(storage: TensorStorage, dim: int, num_frames: int | None) -> int:
    data = storage.view_at()
    shape = data.shape if isinstance(data, torch.Tensor) else data.batch_size
    if not -len(shape) <= dim < len(shape):
        raise ValueError(f"expected dim in [0, {len(shape)}), got {dim}")
    rows = shape[dim]
    if num_frames is None:
        return int(rows)
    if type(num_frames) is not int or not 1 <= num_frames <= rows:
        raise ValueError(f"expected num_frames in [1, {rows}], got {num_frames!r}")
    return num_frames


def _pieces(rows: int, chunksize: int | None, num_chunks: int | None) -> Iterator[tuple[int, int]]:
    if chunksize is not None and num_chunks is not None:
        raise ValueError("expected chunksize or num_chunks, got both")
    for name, value, least in (("chunksize", chunksize, 0), ("num_chunks", num_chunks, 1)):
        if value is not None and (type(value) is not int or value < least):
            raise ValueError(f"expected {name} as an int of at least {least}, got {value!r}")
    step = _PIECE_ROWS
    if chunksize is not None:
        step = max(1, chunksize)
    elif num_chunks is not None:
        step = math.ceil(rows / num_chunks)
    return ((start, min(start + step, rows)) for start in range(0, rows, step))


def _probe(storage: TensorStorage, fn: Callable[[Any], Any], dim: int) -> _First:
    with torch.random.fork_rng(devices=[]):
        value = fn(_rows_between(storage, 0, 1, dim)[0])
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
    # Without a generator: always the same, and the global one is left alone.
    return int(torch.randint(2**62, (), generator=generator or torch.Generator()))


def _follow(results: Iterable[int], rows: int, pbar: bool) -> None:
    from tqdm import tqdm

    with tqdm(total=rows, unit="rows", disable=not pbar) as bar:
        for done in results:
            bar.update(done)


_Run = Callable[[Iterable[tuple[int, int]]], Iterator[int]]


@contextmanager
def _mapper(
    job: _Job,
    workers: int,
    pool: Pool | None,
    max_tasks_per_child: int | None,
    worker_threads: int,
    start_method: str | None,
) -> Iterator[_Run]:
    """Gives what maps pieces: here, in the user's pool, or in processes of its own."""
    if pool is not None:
        yield lambda pieces: pool.imap(job.run, pieces)
        return
    if workers == 0:
        with torch.random.fork_rng(devices=[]):
            yield lambda pieces: map(job.run, pieces)
        return
    context: Any = multiprocessing.get_context(start_method)
    if max_tasks_per_child is not None:
        with context.Pool(workers, _begin, (job, worker_threads), max_tasks_per_child) as own:
            yield lambda pieces: own.imap(_work, pieces)
        return
    # Unlike a Pool, an executor notices that a worker was killed.
    executor = ProcessPoolExecutor(workers, context, _begin, (job, worker_threads))
    try:
        yield lambda pieces: _in_order(executor, pieces, workers * _PIECES_AHEAD)
    finally:
        executor.shutdown(cancel_futures=True)


def _in_order(
    executor: ProcessPoolExecutor, pieces: Iterable[tuple[int, int]], ahead: int
) -> Iterator[int]:
    todo = iter(pieces)
    waiting: list[Future[int]] = [executor.submit(_work, piece) for piece in islice(todo, ahead)]
    while waiting:
        try:
            yield waiting.pop(0).result()
        except BrokenProcessPool:
            raise RuntimeError(
                "a worker died before it was done (killed, or out of memory); use fewer workers "
                "or smaller rows"
            ) from None
        waiting.extend(executor.submit(_work, piece) for piece in islice(todo, 1))


_job: list[_Job] = []
"""In a worker: the one job that it was started for."""


def _begin(job: _Job, threads: int) -> None:
    torch.set_num_threads(threads)
    _job[:] = [job]


def _work(piece: tuple[int, int]) -> int:
    return _job[0].run(piece)
