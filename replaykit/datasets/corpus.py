"""A published data set as a replay buffer."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from replaykit.buffer import ReplayBuffer
from replaykit.buffer.generic import SamplerT
from replaykit.datasets.mapped import MappedStorage
from replaykit.datasets.opened import Published
from replaykit.datasets.preprocess import preprocess_rows
from replaykit.datasets.publish import open_published
from replaykit.datasets.selection import Episodes, chosen_episodes
from replaykit.storages import Storage, TensorStorage
from replaykit.writers import ImmutableDatasetWriter, Writer

__all__ = ["CorpusExperienceReplay"]


class CorpusExperienceReplay(ReplayBuffer[TensorDict, Storage, SamplerT, Writer]):
    """A ReplayBuffer over a published data set: its rows as transitions, its episodes as a table.

    Args:
        path: directory of the data set, as `convert` and the corpus classes make it; or what it
            was opened as.
        batch_size: default number of rows of a sample.
        split: only a part of the episodes: a name that the corpus gives, such as robomimic's
            ``"train"``; a range of positions such as ``"0:100"``; or a range of hundredths of all
            episodes in a random order, ``"0%:80%"`` and ``"80%:100%"``, with a seed for the order
            behind an ``@``, as in ``"0%:80%@7"``.
        episodes: only these: positions in the episode table, a slice of it, or a function that
            gets the table and returns bool ``[E]``. With ``split``: those of both.
        sampler: which rows come next, or a function that makes it; ``RandomSampler()``.
        kwargs: other keywords of ReplayBuffer, such as ``transform``, ``generator``; not
            ``storage``.

    Raises:
        FileNotFoundError: there is nothing at the path.
        RuntimeError: what is there is not a complete data set; says what to do.
        ValueError: ``split`` or ``episodes`` choose what there is not, or nothing.

    Opening maps the columns and reads none of them. Episodes that are chosen are served in the
    order of the data set, from where they lie; where they do not follow one another, what would be
    views of rows (``data[2:5]``, ``data["action"]``) are copies. Rows can be edited in place; edits
    are seen in this process only and never reach the disk.

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

    @property
    def published(self) -> Published:
        """The data set as it lies on disk: path, manifest, columns, episode table."""
        return self._mapped().published

    def _mapped(self) -> MappedStorage:
        storage = self.storage
        if not isinstance(storage, MappedStorage):
            raise RuntimeError("the storage was exchanged; this is no published data set any more")
        return storage

    @property
    def episode_table(self) -> TensorDict:
        """The episodes that are served, a TensorDict ``[E]``.

        ``start`` and ``length`` in rows, ``seed`` and ``episode`` (position of the source file and
        number in it), ``source_seed``, ``success`` (1, 0, or -1 where the source does not say),
        ``terminated``, ``truncated``, ``return`` (NaN where rows have no reward), and ``digest``
        ``[E, 16]``.
        """
        return self._mapped().episode_table

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
        """Applies a function to every row and returns the results as a memory-mapped storage.

        Args:
            fn: gets one row (for ``dim=0`` a TensorDict of batch size ``[]``, for split
                trajectories that of an episode) and returns a TensorDict, tensorclass or tensor.
                All results have the layout of the first.
            dim: dimension along which rows are taken; negative ones count from the last.
            num_workers: processes; None: as many as there are processors; 0: none, all work is
                done here.
            chunksize: rows given to a worker at a time; by default all are divided evenly, in
                pieces of at most 64 MiB of the source.
            num_chunks: into how many pieces the rows are divided; not together with
                ``chunksize``.
            pool: a pool of processes to use instead of own ones.
            generator: what the seed of torch's CPU generator in ``fn`` is drawn from; None: the
                generator of this data set, or the global one. Every row has a seed of its own:
                pieces and workers do not change the results. The caller's global generator is
                not changed but by that draw.
            max_tasks_per_child: pieces after which a worker is replaced.
            worker_threads: torch threads in each worker.
            index_with_generator: make the pieces one by one instead of all at first.
            pbar: show a progress bar.
            mp_start_method: ``"fork"``, ``"spawn"`` or ``"forkserver"``.
            num_frames: only the first rows.
            dest: folder of the result, or a link to it; it appears there complete or not at
                all. Beside it stays a lock file: calls for one ``dest`` run one after the other,
                and remove what killed ones have left.

        Returns:
            The storage; changes to it reach the files.

        Raises:
            FileExistsError: ``dest`` is there and not empty.
            TypeError: ``pool`` is one of threads.
            ValueError: an option is out of range (before any work); or a row's result differs in
                layout from the first one's; names the row.
            RuntimeError: a worker died; says how.
            OSError: the disk has too little room.

        Whatever ``fn`` raises is raised here, and nothing is left at ``dest``. The source does
        not change. Own workers end with this process, however it ends. A worker copies 1 MiB of
        the source, or one row, at a time.
        """
        return preprocess_rows(
            self.storage,
            fn,
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
