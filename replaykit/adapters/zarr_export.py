"""Write episodes as Zarr arrays in the layout of diffusion policy."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np

from replaykit.adapters.export_files import export_to
from replaykit.adapters.exported_episodes import OBSERVATION, Array, ExportSource
from replaykit.buffer import ReplayBuffer
from replaykit.datasets.families.zarr_arrays import key_of, zarr_module
from replaykit.errors import SchemaError
from replaykit.interrupts import check, deferred
from replaykit.ted import Key, format_key

_CHUNK_BYTES: Final = 1 << 20


def to_zarr(
    data: ReplayBuffer[Any, Any, Any, Any],
    path: str | os.PathLike[str],
    *,
    overwrite: bool = False,
) -> Path:
    """Write the episodes of a buffer as Zarr arrays, as diffusion policy reads them.

    The folder, or the file if the name ends in ``.zip``, appears at ``path`` completely or not at
    all. Its format is Zarr 2, which all versions of the library read. The arrays ``data/<name>``
    hold the rows of all episodes, and ``meta/episode_ends`` the end of each episode, int64 ``[E]``.
    Nested keys become groups, such as ``data/action/arm``. Observations have names without
    ``observation``, unless they have the name of another array. An observation that is a single
    array has the name ``state``, or ``img``. The other arrays are ``terminated``, ``truncated``,
    and, if the rows have them, ``action``, ``reward`` and ``success``. The layout has no next
    observations, so the last one of an episode is lost. Other keys are left out. Images get the
    shape ``[N, H, W, 3]``, and one chunk for each image. The compression is lossless.

    Args:
        data: a buffer or data set.
        path: the folder or the ``.zip`` file. Missing parents are made.
        overwrite: whether to replace existing arrays, in one step at the end.

    Returns:
        The path.

    Raises:
        KeyError: the data lacks a key. The message names it.
        ValueError: the data has no episode, or a next observation differs from the observation of
            the following row in an episode. The message names key and episode.
        SchemaError: two columns get the same name, or a name contains a slash or a backslash, or
            begins with a dot.
        FileExistsError: the path exists, and ``overwrite`` is False, or it is no such folder.
        OSError: the disk has too little room.
        ImportError: zarr is not installed.

    Cost: two passes, because the arrays are read back and compared. Memory: one episode, and one
    chunk of each array.

    Example:
        >>> import tempfile, zarr
        >>> from pathlib import Path
        >>> import torch
        >>> from replaykit import LazyTensorStorage, ReplayBuffer, transition
        >>> from replaykit.adapters import to_zarr
        >>> joints, ends = torch.randn(9, 2), torch.arange(8) == 7
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100))
        >>> never = torch.zeros(8, dtype=torch.bool)
        >>> _ = rb.extend(transition(joints[:-1], joints[:-1], torch.ones(8), joints[1:],
        ...                          ends, never, batch_size=8))
        >>> group = zarr.open_group(to_zarr(rb, Path(tempfile.mkdtemp()) / "a.zarr"), mode="r")
        >>> group["data/state"].shape, group["meta/episode_ends"][:]
        ((8, 2), array([8]))
    """
    zarr = zarr_module()
    from numcodecs import Blosc

    source = ExportSource(data, "Zarr", whole=False)
    names, images = source.table_names(_name)
    for key, name in names.items():
        if "\\" in name:
            raise SchemaError(
                f"key {format_key(key)}: expected a name without a backslash, which Zarr reads as "
                f"'/', got {name!r}; rename the parts of the row"
            )
    target = Path(path).expanduser()
    is_zip = target.suffix == ".zip"
    marker = "" if is_zip else "meta/episode_ends/.zarray"
    with export_to(source, target, marker, overwrite=overwrite) as draft:
        ends: list[int] = []
        lengths = data.episodes.lengths
        total = int(lengths.sum())

        with deferred, _opened(draft.path, "w", is_zip) as store:
            group = zarr.create_group(store, zarr_format=2)

            def create(name: str, like: Array, rows: int, chunk: int) -> Any:
                return group.create_array(
                    name,
                    shape=(rows, *like.shape[1:]),
                    chunks=(chunk, *like.shape[1:]),
                    dtype=like.dtype,
                    compressors=Blosc("zstd", 5, Blosc.BITSHUFFLE),
                    config={"write_empty_chunks": True},  # readers can see that none is missing
                )

            pending: dict[str, _Column] = {}
            for _, rows in source.episodes():
                values = rows.table(names, images)
                draft.wrote(values)
                for name, value in values.items():
                    if name not in pending:
                        each = max(1, value.nbytes // len(value))
                        chunk = 1 if name in images else max(1, min(total, _CHUNK_BYTES // each))
                        made = create(f"data/{name}", value, total, chunk)
                        pending[name] = _Column(made, chunk)
                    pending[name].write(value)
                store.check_writes()
                ends.append(rows.count + (ends[-1] if ends else 0))
            if ends[-1] != total:
                raise RuntimeError(
                    f"{target} was not made: the data changed from {total} to {ends[-1]} rows"
                )
            for column in pending.values():
                column.finish()
            bounds = np.array(ends, np.int64)
            create("meta/episode_ends", bounds, len(bounds), len(bounds))[:] = bounds
            store.check_writes()
        with _opened(draft.path, "r", is_zip) as store:
            group = zarr.open_group(store, mode="r", zarr_format=2)
            starts = [0, *ends]

            def read(number: int) -> dict[str, Array]:
                part = slice(starts[number], starts[number + 1])
                return {name: group[f"data/{name}"][part] for name in pending}

            draft.check(read)
    return target


@contextmanager
def _opened(path: Path, mode: str, is_zip: bool) -> Iterator[Any]:
    """Open a store whose writes never fail, but whose ``check_writes`` raises their first error.

    zarr begins many writes at once. After an error or Ctrl-C, the others would go on while the
    folder is removed, and make it again.
    """
    from zarr.storage import LocalStore, WrapperStore, ZipStore

    class Store(WrapperStore):
        error: OSError | None = None

        async def set(self, key: str, value: Any) -> None:
            await self._keep_error(super().set(key, value))

        async def set_if_not_exists(self, key: str, value: Any) -> None:
            await self._keep_error(super().set_if_not_exists(key, value))

        async def _keep_error(self, write: Any) -> None:
            try:
                await write if self.error is None else write.close()
            except OSError as error:
                self.error = error

        def check_writes(self) -> None:
            check()
            if self.error is not None:
                raise self.error

    store = Store(ZipStore(path, mode=mode) if is_zip else LocalStore(path))
    try:
        yield store
    finally:
        # An error may come before the first use, which opens the file.
        if store._is_open:
            store.close()


class _Column:
    """An array that grows by the rows of episodes, and is written in whole chunks.

    A chunk that is written twice would be stored twice in a ZIP file.
    """

    def __init__(self, array: Any, chunk: int) -> None:
        self._array, self._chunk = array, chunk
        self._waiting: list[Array] = []
        self._at = 0

    def write(self, values: Array) -> None:
        self._waiting.append(values)
        count = sum(map(len, self._waiting))
        if count >= self._chunk:
            self._flush(count // self._chunk * self._chunk)

    def finish(self) -> None:
        self._flush(sum(map(len, self._waiting)))

    def _flush(self, count: int) -> None:
        if count:
            rows = np.concatenate(self._waiting)
            self._array[self._at : self._at + count] = rows[:count]
            self._at, self._waiting = self._at + count, [rows[count:]]


def _name(key: Key, image: bool) -> str:
    """Return the name that a reader turns into the key, without ``observation`` if possible."""
    if key == OBSERVATION:
        return "img" if image else "state"
    name, whole = "/".join(key[1:]), "/".join(key)
    # A group must not have the name of an array outside of observations.
    is_short = key_of(name) == key and key_of(key[1]) == key[:2] and key[1:] != OBSERVATION
    return name if is_short else whole
