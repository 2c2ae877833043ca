"""A published data set as a storage and as a replay buffer."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fractions import Fraction
from functools import partial
from multiprocessing.pool import Pool
from pathlib import Path
from pathlib import Path as FilePath
from typing import Any, Final

import numpy as np
import torch
from tensordict import TensorDict

from replaykit.buffer import ReplayBuffer
from replaykit.buffer.components import SamplerT
from replaykit.datasets.column_statistics import column_statistics
from replaykit.datasets.dataset_passes import preprocess_rows
from replaykit.datasets.encoded_frames import EncodedFrames
from replaykit.datasets.publishing import (
    Published,
    nested_columns,
    open_directory,
    open_published,
)
from replaykit.schema import Schema, split_leaves
from replaykit.storages import Storage, TensorStorage
from replaykit.storages.columns import Columns, ScatteredColumns, grow_in_memory
from replaykit.storages.dedup_columns import DedupColumns
from replaykit.storages.next_rows import pairs_of
from replaykit.storages.references import References
from replaykit.structure import Path as KeyPath
from replaykit.ted import format_key
from replaykit.writers import ImmutableDatasetWriter, Writer

_PERCENT: Final = r"(?:([0-9]+(?:\.[0-9]+)?)%)?"
_FRACTION: Final = re.compile(rf"(?=.*%){_PERCENT}:{_PERCENT}(?:@([0-9]{{1,9}}))?")

Episodes = slice | Iterable[int] | torch.Tensor | Callable[[TensorDict], torch.Tensor]
"""Positions in the episode table, a slice of it, or a function that maps it to bool ``[E]``."""


def chosen_episodes(
    published: Published, split: str | None, episodes: Episodes | None
) -> torch.Tensor | None:
    """Return the positions of episodes that both arguments choose; ``None`` for all.

    Args:
        published: the data set.
        split: a name that the corpus defines, such as ``"train"``, or a range of positions, such as
            ``"0:100"``. Or a range of percentages, such as ``"0%:80%"``, of all episodes in a
            random order. The seed of that order may follow, as in ``"0%:80%@7"``.
        episodes: see `Episodes`.

    Raises:
        ValueError: the name is unknown, the range is malformed, or a position does not exist. Or a
            function has a wrong result, or no episode is chosen.
    """
    if split is None and episodes is None:
        return None
    count = published.manifest.episodes
    keep = torch.ones(count, dtype=torch.bool)
    if split is not None:
        keep &= _mask(_of_split(published, split, count), count, "split")
    if episodes is not None:
        keep &= _mask(_of_episodes(published, episodes, count), count, "episodes")
    if not keep.any():
        raise ValueError(
            f"expected split and episodes to choose some of {count} episodes, got none with "
            f"split={split!r}"
        )
    return keep.nonzero().flatten()


def _of_split(published: Published, split: str, count: int) -> torch.Tensor:
    known = published.manifest.report.get("splits", {})
    if split in known:
        return torch.tensor(known[split], dtype=torch.int64)
    match = re.fullmatch(r"([0-9]*):([0-9]*)", split) if isinstance(split, str) else None
    if match is not None:
        first, stop = (int(part) if part else None for part in match.groups())
        return torch.arange(count)[first:stop]
    fraction = _FRACTION.fullmatch(split) if isinstance(split, str) else None
    if fraction is not None:
        return _of_fraction(fraction, split, count)
    names = f"one of {sorted(known)} or " if known else ""
    raise ValueError(f"expected split as {names}a range such as '0:100' or '0%:80%', got {split!r}")


def _of_fraction(match: re.Match[str], split: str, count: int) -> torch.Tensor:
    """Return the positions between two percentages of the episodes in a random order.

    Both ends are rounded in the same way. So adjacent ranges are disjoint and leave out no episode.
    """
    first, stop = Fraction(match[1] or "0"), Fraction(match[2] or "100")
    if not 0 <= first <= stop <= 100:
        raise ValueError(f"expected split as a range within '0%:100%', got {split!r}")
    # NumPy guarantees that the random numbers of RandomState never change between versions.
    order = np.random.RandomState(int(match[3] or 0)).permutation(count)
    begin, end = (round(count * part / 100) for part in (first, stop))
    return torch.from_numpy(order[begin:end].astype(np.int64))


def _of_episodes(published: Published, episodes: Episodes, count: int) -> torch.Tensor:
    if isinstance(episodes, slice):
        return torch.arange(count)[episodes]
    if callable(episodes):
        found = torch.as_tensor(episodes(published.episodes))
        if found.dtype != torch.bool or found.shape != (count,):
            raise ValueError(
                f"expected the function for episodes to return bool [{count}], got {found.dtype} "
                f"{list(found.shape)}"
            )
        return found.nonzero().flatten()
    given: Any = episodes if isinstance(episodes, torch.Tensor) else list(episodes)
    found = torch.as_tensor(given)
    if found.numel() and (found.dtype.is_floating_point or found.dtype == torch.bool):
        raise ValueError(f"expected episodes as positions, got {found.dtype}")
    return found.reshape(-1).to(torch.int64)


def _mask(positions: torch.Tensor, count: int, name: str) -> torch.Tensor:
    bad = positions[(positions < 0) | (positions >= count)]
    if bad.numel():
        raise ValueError(f"expected {name} as positions below {count}, got {int(bad[0])}")
    mask = torch.zeros(count, dtype=torch.bool)
    mask[positions] = True
    return mask


def _decoded(frames: EncodedFrames, fn: Callable[[Any], Any], row: Any) -> Any:
    return fn(frames(row))


def encoded_frames(storage: Any) -> EncodedFrames | None:
    """Return the transform that decodes the images of a data set; None if none are encoded."""
    published = getattr(storage, "published", None)
    if published is None:
        return None
    manifest = published.manifest
    frames = {
        array.key: array.facts["frames"]
        for array in (*manifest.arrays, *manifest.finals)
        if "frames" in array.facts
    }
    paths = [published.path / file.file for file in manifest.attached]
    return EncodedFrames(frames, paths) if frames else None


def rows_of(published: Published, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the runs of rows of episodes.

    The result is the first row and the length of each run, int64 ``[R]`` each. Consecutive episodes
    make one run.
    """
    if len(published.manifest.batch) > 1:
        starts, lengths = positions, torch.ones_like(positions)
    else:
        starts, lengths = (published.episodes[name][positions] for name in ("start", "length"))
    begins = torch.ones(len(starts), dtype=torch.bool)
    begins[1:] = starts[1:] != starts[:-1] + lengths[:-1]
    first = begins.nonzero().flatten()
    stops = torch.cat([first[1:], torch.tensor([len(starts)])]) - 1
    return starts[first], starts[stops] + lengths[stops] - starts[first]


def _following(
    stored: Columns, published: Published, episodes: torch.Tensor | None
) -> DedupColumns:
    """Return columns that read next values from the following rows or the finals.

    The finals are the next values of the last rows of episodes.
    """
    lengths, finals = published.episodes["length"], published.finals
    if episodes is not None:
        lengths = lengths[episodes]
        first, last = int(episodes[0]), int(episodes[-1])
        is_run = len(episodes) == last + 1 - first
        at = slice(first, last + 1) if is_run else episodes
        finals = {key: value[at] for key, value in finals.items()}
    leaves = {**published.columns, **{key: published.columns[key[1:]] for key in finals}}
    data = nested_columns(leaves, published.batch_size)
    pairs = pairs_of(Schema(split_leaves(data, 1).root), tuple(key[1:] for key in finals))
    if isinstance(stored, ScatteredColumns):
        rows = stored.part(list(pairs.stored.leaves))
    else:
        rows = Columns(
            pairs.stored, stored.tensors, 1, mapped=stored.advise, changes=stored.changes
        )
    found = DedupColumns(pairs, rows, grow_in_memory(rows.device))
    last = (lengths.cumsum(0) - 1).numpy()
    references = References(rows.slots, 1, (last,), len(last))
    found.table.adopt_later([references], Columns(pairs.overflow, finals, 1), rows.slots)
    return found


class MappedStorage(TensorStorage):
    """The rows of a published data set, mapped copy-on-write.

    Opening the storage reads no data. Edits are visible in this process only, and never reach the
    disk. If a storage without edits is pickled, the copy maps the same files.

    Args:
        published: the opened data set.
        episodes: positions of the episodes to serve, in ascending order; ``None`` for all. Rows are
            read from the files without a copy of the data set. If the episodes are not consecutive,
            ``storage[a:b]`` and ``column`` return copies instead of views; see `ScatteredColumns`.
    """

    def __init__(self, published: Published, episodes: torch.Tensor | None = None) -> None:
        data = nested_columns(published.columns, published.batch_size)
        starts, lengths = torch.zeros(1, dtype=torch.int64), torch.tensor([published.rows])
        if episodes is not None:
            starts, lengths = rows_of(published, episodes)
        first = int(starts[0]) if len(starts) == 1 else 0
        super().__init__(data[first : first + int(lengths.sum())])
        stored = self.require()
        stored.advise = True
        if len(starts) > 1:
            leaves = split_leaves(data, 1).leaves
            everything = Columns(stored.schema, leaves, 1, mapped=True)
            stored = self._columns = ScatteredColumns(everything, starts, lengths)
            stored.changes.lend()  # the columns of all rows share the counters of changes
            self._adopt(stored)
        if published.finals and isinstance(stored, Columns):
            self._columns = _following(stored, published, episodes)
            self._adopt(self._columns)
        self._published: Published | None = published
        # These two belong to a copy that was made after an edit.
        self._table: TensorDict | None = None
        self._origin: tuple[FilePath, str]
        self.chosen = episodes
        self._opened = self.ledger.log.number

    @property
    def published(self) -> Published:
        """The data set on disk; a copy of edited rows opens it at the first use.

        Raises:
            RuntimeError: the folder holds another version of the data set.
        """
        if self._published is None:
            self._published = _reopened(*self._origin)
        return self._published

    @property
    def _place(self) -> tuple[FilePath, str]:
        """The folder of the data set, and its content id."""
        if self._published is None:
            return self._origin
        return self._published.path, self._published.manifest.content_id()

    @property
    def _edited(self) -> bool:
        """True if rows were changed in this process."""
        return self.ledger.log.rows_changed(self._opened)

    @property
    def fps(self) -> float | None:
        """The rows per second that the source states; None if it states none."""
        report = {} if self.published is None else self.published.manifest.report
        return report.get("about", {}).get("fps")

    @property
    def episode_table(self) -> TensorDict:
        """The table of served episodes, ``[E]``. ``start`` counts rows of this storage."""
        if self._table is not None:
            return self._table
        table = self.published.episodes
        if self.chosen is None:
            return table
        table = table[self.chosen]
        lengths = table["length"]
        return table.set("start", lengths.cumsum(0) - lengths)

    @property
    def identity(self) -> dict[str, Any] | None:
        """The content id and the chosen episodes; None after an edit in this process."""
        if self._edited:
            return None
        chosen = None if self.chosen is None else self.chosen.clone()
        return {"content": self._place[1], "episodes": chosen}

    def _check_addable(self, paths: Collection[KeyPath]) -> None:
        raise RuntimeError(
            f"key {format_key(next(iter(paths)))}: expected a stored key, since a published data "
            "set has fixed columns; preprocess(fn, dest=...) makes one with other columns"
        )

    def for_readers(self) -> Any:
        return super().for_readers() if self._edited else self

    def __getstate__(self) -> dict[str, Any]:
        if self._edited:
            table = self.episode_table
            own = {"_published": None, "_origin": self._place, "_table": table, "_opened": -1}
            return {**super().__getstate__(), **own}
        path, content = self._place
        return {
            "path": str(path),
            "content": content,
            "chosen": self.chosen,
            "ledger": self.ledger.state(),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "path" not in state:
            super().__setstate__(state)
            return
        published = _reopened(FilePath(state["path"]), state["content"])
        self.__init__(published, state["chosen"])  # type: ignore[misc]
        self.ledger.restore(state["ledger"], None)
        self._opened = self.ledger.log.number


def _reopened(path: FilePath, content: str) -> Published:
    """Open the folder of a data set; raise RuntimeError if it holds another version."""
    published = open_directory(path)
    if published.manifest.content_id() != content:
        raise RuntimeError(
            f"{path} holds another version of the data set than the pickled one; open it again"
        )
    return published


class CorpusExperienceReplay(ReplayBuffer[TensorDict, Storage, SamplerT, Writer]):
    """A ReplayBuffer over a published data set, with a table of its episodes.

    Args:
        path: an opened data set, or the directory of a data set that `convert` or a corpus class
            has made.
        batch_size: default number of rows of a sample.
        split: the part of the episodes to serve. It is a name that the corpus defines, such as
            robomimic's ``"train"``, or a range of positions, such as ``"0:100"``. Or it is a range
            of percentages, such as ``"0%:80%"``, of all episodes in a random order. The seed of
            that order may follow, as in ``"0%:80%@7"``.
        episodes: the episodes to serve: positions in the episode table, a slice of it, or a
            function that maps the table to bool ``[E]``. With ``split``, only episodes that both
            arguments choose are served.
        sampler: chooses the rows of a batch, or a function that returns the sampler; by default
            ``RandomSampler()``.
        kwargs: other keywords of ReplayBuffer, such as ``transform`` and ``generator``, but not
            ``storage``.

    Raises:
        FileNotFoundError: the path does not exist.
        RuntimeError: the path is not a complete data set. The message has the remedy.
        ValueError: ``split`` or ``episodes`` names unknown episodes, or chooses no episode.

    Opening a data set maps the columns without reading them. Chosen episodes are served in the
    order of the data set, without a copy. If the episodes are not consecutive, ``data[2:5]`` and
    ``data["action"]`` return copies instead of views. Rows can be edited in place. Edits are
    visible in this process only, and never reach the disk.

    Example:
        >>> from replaykit.datasets import CorpusExperienceReplay
        >>> CorpusExperienceReplay("no-such-folder")
        Traceback (most recent call last):
        FileNotFoundError: [Errno 2] No such file or directory: ...
    """

    def __init__(
        self,
        path: str | Path | Published,
        batch_size: int | None = None,
        *,
        split: str | None = None,
        episodes: Episodes | None = None,
        sampler: SamplerT | Callable[[], SamplerT] | None = None,
        **kwargs: Any,
    ) -> None:
        kwargs.setdefault("writer", ImmutableDatasetWriter())

        def mapped() -> MappedStorage:
            published = path if isinstance(path, Published) else open_published(path)
            return MappedStorage(published, chosen_episodes(published, split, episodes))

        super().__init__(storage=mapped, sampler=sampler, batch_size=batch_size, **kwargs)
        self._decode_frames()

    def _decode_frames(self) -> None:
        """Decode images that the data set keeps encoded, before values are transformed."""
        frames = encoded_frames(self.storage)
        if frames is not None:
            entries = enumerate(self._chain.entries, 1)
            at = max((at for at, each in entries if each.is_before_values), default=0)
            self.insert_transform(at, frames)

    @property
    def published(self) -> Published:
        """The data set on disk, with path, manifest, columns and episode table."""
        return self._mapped().published

    def _mapped(self) -> MappedStorage:
        storage = self.storage
        if not isinstance(storage, MappedStorage):
            raise RuntimeError(
                "the storage was replaced, so this is no longer a published data set"
            )
        return storage

    @property
    def episode_table(self) -> TensorDict:
        """The table of served episodes, a TensorDict ``[E]``.

        ``start`` and ``length`` count rows. ``seed`` is the position of the source file, and
        ``episode`` is the number of the episode in that file. ``success`` is 1, 0, or -1 if it is
        not known. ``return`` is NaN without rewards. ``digest`` has the shape ``[E, 16]``. The
        other keys are ``source_seed``, ``terminated`` and ``truncated``.
        """
        return self._mapped().episode_table

    def statistics(
        self,
        keys: Sequence[Any] | None = None,
        quantiles: Sequence[float] = (),
        channels: Mapping[Any, int] | None = None,
    ) -> TensorDict:
        """Return statistics of columns over all rows of the chosen episodes.

        Each number of a row has separate statistics, so their shape is that of a row, ``[*F]``.
        Edited rows count as they are now. Padding of split trajectories does not count, and
        transforms do not apply.

        Args:
            keys: the columns; None for all columns of real numbers, without images that stay
                encoded.
            quantiles: Q numbers from 0 to 1.
            channels: for keys of images, the dimension of a row that numbers the channels, such as
                0 for ``[C, H, W]``. The pixels of a channel then have common statistics, of shape
                ``[C, 1, 1]``.

        Returns:
            A TensorDict with an entry for each column. ``mean`` and ``std`` are float64, ``min``
            and ``max`` have the dtype of the column, and ``nan`` is the count of NaNs, which the
            others leave out. ``quantiles`` is float64 ``[Q, *F]``, interpolated linearly. All are
            as in ``numpy.nanmean`` and the like. So infinite values make ``mean`` infinite or NaN,
            and ``std`` NaN.

        Raises:
            KeyError: a key is not stored.
            ValueError: a quantile is outside [0, 1], or a dimension of ``channels`` does not exist.
            TypeError: a column of ``keys`` is complex, holds images that stay encoded, or has rows
                without numbers.

        Cost: one pass over each column, in blocks of 8 MiB. Quantiles take another pass for each
        byte of a number, with counts of at most 128 MiB, for up to 32,768 / Q numbers of a row at
        a time.

        Example:
            >>> import tempfile
            >>> from pathlib import Path
            >>> from replaykit.datasets import convert
            >>> from replaykit.datasets.families import ROBOHIVE
            >>> from replaykit.testing import RoboHiveWriter, make_trial
            >>> folder = Path(tempfile.mkdtemp())
            >>> with RoboHiveWriter(folder / "trials.h5") as writer:
            ...     _ = writer.add_trial(**make_trial(5))
            >>> data = convert(folder / "trials.h5", ROBOHIVE, folder / "data")
            >>> found = data.statistics(["action"], quantiles=[0.5])
            >>> found["action", "mean"].shape, found["action", "quantiles"].shape
            (torch.Size([2]), torch.Size([1, 2]))
        """
        return column_statistics(self._mapped(), keys, quantiles, channels or {}, self._encoded())

    def _encoded(self) -> Mapping[KeyPath, Any]:
        """Return the columns of images that stay encoded."""
        frames = encoded_frames(self.storage)
        return {} if frames is None else frames.frames

    # -- mapping ------------------------------------------------------------------------------

    def preprocess(
        self,
        fn: Callable[[Any], Any],
        dim: int = 0,
        num_workers: int | None = None,
        *,
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
        dest: str | Path,
    ) -> TensorStorage:
        """Apply a function to every row, and return the results as a storage.

        Args:
            fn: maps one row to a TensorDict, tensorclass or tensor. For ``dim=0``, a row is a
                TensorDict of batch size ``[]``; for split trajectories, it is an episode. All
                results must have the layout of the first result.
            dim: the dimension of the rows. A negative number counts from the last dimension.
            num_workers: number of processes. None is the number of processors. With 0, this process
                does all work.
            chunksize: number of rows in one piece of work. By default, the rows are divided into
                equal pieces of at most 64 MiB of the source.
            num_chunks: number of pieces. It cannot be given together with ``chunksize``.
            pool: a pool of processes to use instead of new processes.
            generator: draws the seed for torch's CPU generator in ``fn``. None uses the generator
                of this data set or, without one, the global generator. Each row has a separate
                seed, so the results do not depend on pieces and workers. The caller's global
                generator is used for this draw only.
            max_tasks_per_child: number of pieces after which a worker is replaced.
            worker_threads: torch threads in each worker.
            index_with_generator: make the pieces one by one, instead of all at the start.
            pbar: show a progress bar.
            mp_start_method: ``"fork"``, ``"spawn"`` or ``"forkserver"``.
            num_frames: the number of rows to map, from the first row on; by default all.
            dest: folder of the result, or a link to it. The result appears there completely or not
                at all. A lock file stays next to the folder. Calls with the same ``dest`` run one
                after the other. A call removes the files that killed calls have left.

        Returns:
            The memory-mapped storage. Changes to it reach the files.

        Raises:
            FileExistsError: ``dest`` exists and is not empty.
            TypeError: ``pool`` is a pool of threads.
            ValueError: an option is out of range, which is checked before any work. Or the result
                of a row differs in layout from the first result; the message names the row.
            RuntimeError: a worker died. The message names the signal or exit code.
            OSError: the disk has too little room.

        An error in ``fn`` is raised to the caller, and ``dest`` stays empty. The source does not
        change. New workers always end with this process, even if it is killed. A worker copies the
        source in blocks of 1 MiB, or of one row if a row is larger.
        """
        frames = encoded_frames(self.storage)
        return preprocess_rows(
            self.storage,
            fn if frames is None else partial(_decoded, frames, fn),
            dest=dest,
            dim=dim,
            num_workers=num_workers,
            chunksize=chunksize,
            num_chunks=num_chunks,
            pool=pool,
            generator=self._generator if generator is None else generator,
            max_tasks_per_child=max_tasks_per_child,
            worker_threads=worker_threads,
            index_with_generator=index_with_generator,
            pbar=pbar,
            mp_start_method=mp_start_method,
            num_frames=num_frames,
        )
