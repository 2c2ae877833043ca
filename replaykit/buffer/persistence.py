"""Save a buffer to files, dictionaries or pickles, and load it."""

from __future__ import annotations

import copy
import multiprocessing.context
import os
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from replaykit.buffer.buffer_state import (
    BufferState,
    apply_state,
    generator_state,
    saved_generator,
    saved_sampler,
)
from replaykit.buffer.component_checks import check_mappable, uses_of
from replaykit.buffer.components import of_another_kind, restarted
from replaykit.buffer.core import DataT, SamplerT, StorageT, WriterT
from replaykit.buffer.drawing import Drawing
from replaykit.buffer.prefetch import Prefetcher
from replaykit.checkpoint import Base, Checkpoint, MappedCheckpoint, Snapshot, save_snapshot
from replaykit.errors import CheckpointError
from replaykit.interrupts import deferred
from replaykit.storages import Storage
from replaykit.storages.content import Content
from replaykit.storages.save_hooks import Hook, content_after_load, content_to_save
from replaykit.storages.tensor_bytes import by_value, from_value

__all__ = ["Saving"]


class Saving(Drawing[DataT, StorageT, SamplerT, WriterT]):
    """``dumps``, ``loads``, ``state_dict``, ``load_state_dict``, hooks, pickling."""

    def dumps(self, path: str | os.PathLike[str], *, keep: int = 1) -> None:
        """Save the whole buffer into a directory, or leave the directory unchanged.

        A checkpoint holds the stored rows, cursor, write count and generations. It also holds the
        states of the sampler, the transforms and the generator. Prefetched batches are drawn again
        after the save, and after a load. The files are raw arrays and JSON, without pickle.

        The checkpoint holds the buffer as of the instant of the call. Other threads can sample and
        write meanwhile. They wait at most while 8 MiB are copied. A writer that is about to
        overwrite unsaved rows also waits until these rows are copied.

        Args:
            path: the directory. It is created with its parents. If it holds a checkpoint, it is
                replaced atomically.
            keep: the maximum number of checkpoints in the directory afterwards, including the new
                one. ``loads(path, version=...)`` reads the older ones.

        Raises:
            TypeError: a value cannot be saved. The error names it, and nothing was written.
            ValueError: ``keep`` is below 1, or ``path`` is empty.
            CheckpointError: ``manifest.json`` in the directory does not belong to a checkpoint.
                Other files in the directory are not changed.
            OSError: a file operation failed; the error names the file.

        Cost: the first save makes one pass over the bytes of the stored rows. A later save may
        write fewer rows, if one of this buffer's last four saves has written to the same directory.
        It then writes only the rows and priorities that were written since that save, in chunks of
        1/4096 of the capacity. It writes all rows if code outside the buffer may have changed them.
        For a TensorStorage this is always so. For other storages it is so while a view of rows
        (``rb[a:b]``) exists, and for one save after that. Rows of lists, and rows that pass through
        a hook, are always written.

        With ``shared=True`` it is enough that one of the last sixteen saves by any process has
        written to the directory. A save then writes the rows that any process has written since
        that save. It first copies these rows in memory, while writers wait. A first save therefore
        needs memory for all stored rows and priorities. It frees that memory in steps of about 64
        MiB as it writes.

        Example:
            >>> import tempfile, torch
            >>> from replaykit import LazyTensorStorage, ReplayBuffer
            >>> rb = ReplayBuffer(storage=LazyTensorStorage(1_000_000), batch_size=2,
            ...                   generator=torch.Generator().manual_seed(0))
            >>> _ = rb.extend(torch.arange(10))
            >>> other = ReplayBuffer(storage=LazyTensorStorage(1_000_000), batch_size=2)
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     rb.dumps(folder)
            ...     other.loads(folder)
            >>> [bool((rb.sample() == other.sample()).all()) for _ in range(3)]
            [True, True, True]
        """
        save_snapshot(path, lambda base: self._snapshot(path, base), keep=keep)

    def _snapshot(self, path: str | os.PathLike[str], base: Base) -> Snapshot:
        with self._locked(settled=False) as storage:
            parts = self._saved_parts(storage, path)
            writer = parts["writer"]
            document = {
                "components": {
                    "buffer": type(self).__name__,
                    "storage": type(storage).__name__,
                    "sampler": type(self._sampler).__name__,
                    "writer": type(self._writer).__name__,
                },
                "schema": None if storage.schema is None else storage.schema.to_json(),
                "ndim": storage.ndim,
                "lanes": list(storage.lanes),
                "len": len(storage),
                "max_size": storage.max_size,
                "cursor": writer["_cursor"],
                "write_count": self._writer.write_count,
                "batch_size": self._batch_size,
                "consume_after_n_samples": uses_of(self._sampler),
            }
            return Snapshot(parts, document, storage.lock, base)

    def _saved_parts(self, storage: Storage, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Return the parts of a save. Large parts are read later.

        The caller holds the lock.
        """
        self._rewind()
        writer = self._writer.state_dict()
        pace = {} if self._pace is None else {"pace": self._pace.state()}
        return {
            **pace,
            # Only the state may hold views of rows, because any other view counts as a possible
            # change.
            "storage": content_to_save(storage, path).to_state(tracked=True),
            "writer": writer,
            "sampler": saved_sampler(self._sampler, tracked=storage),
            "transforms": self._chain.state_dict(),
            "generator": generator_state(self._generator),
        }

    def loads(
        self,
        path: str | os.PathLike[str],
        *,
        version: int | None = None,
        mmap: bool = False,
        verify: bool | None = None,
    ) -> None:
        """Load a buffer that ``dumps`` saved.

        This buffer and the saved one then draw the same batches. The writer must be of the saved
        kind. The storage may have another kind and capacity. With the same capacity every row keeps
        its slot. With another capacity the rows are stored in write order from slot 0. A smaller
        storage keeps the newest rows, or the largest with a TensorDictMaxValueWriter. A UserWarning
        reports the number of dropped rows. The buffer still stores where their episodes began, as
        in a ring that has overwritten first rows.

        The sampler may also be of another kind. It then starts over with the loaded rows. A
        prioritized sampler uses the saved priorities, or 1 for each
        row if none were saved. A UserWarning reports the choice.

        The load ends open episodes. The first write or ``flush`` after the load stores the rows
        that transforms held back. These rows are cut short, so that none of them spans the restart.

        Args:
            path: the directory.
            version: the number of a checkpoint that ``dumps(path, keep=...)`` has kept.
                ``replaykit.checkpoint.checkpoint_versions`` lists the numbers. None for the newest.
            mmap: leave the rows in the files, and read them page by page as they are sampled. A
                checkpoint of any size then opens in milliseconds. The files are mapped
                copy-on-write, so later writes change pages in memory and never reach the files. The
                files may be replaced or removed meanwhile, but must not be truncated or written to.
                The storage must be a LazyTensorStorage on the CPU, without load hooks and never
                written to. Its ``dedup_next`` and ``lane_key`` must equal the saved ones. Its
                capacity must let every row keep its slot.
            verify: read every file and compare its checksum. None verifies only without ``mmap``.
                File sizes and the checksum of the manifest are always compared.

        Raises:
            FileNotFoundError: there is no checkpoint, or no checkpoint of that version.
            CheckpointError: the checkpoint is damaged, or has a newer format; the error names the
                file.
            ValueError: keys, shapes, dtypes, lanes or kind of writer differ. With ``mmap``, also if
                the storage cannot map these files.
            NotImplementedError: ``mmap`` on a system other than 64-bit POSIX.
            OSError: the operating system cannot map the files.

        The load checks everything first. If it raises, nothing has changed. Without ``mmap``, the
        buffer does not use the files after the load. With ``mmap``, some state is read later, in
        O(rows). The first draw or update reads priorities, draw counts, the order of policy
        versions and the rest of a pass. The first write, or first use of episodes, reads the
        columns that show where episodes end.

        Cost: one pass over the files. With ``mmap``, the load reads all state except rows and
        priorities. The size of that state depends on the rows in two cases only. If rows were
        placed, cleared, ranked or in streams (``lane_key``), the load reads 8 to 16 bytes per row.
        For a pass without replacement over episodes, it reads 8 bytes per episode.

        Example:
            >>> import tempfile, torch
            >>> from replaykit import LazyTensorStorage, ReplayBuffer
            >>> rb = ReplayBuffer(storage=LazyTensorStorage(4), batch_size=2)
            >>> _ = rb.extend(torch.arange(4))
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     rb.dumps(folder)
            ...     other = ReplayBuffer(storage=LazyTensorStorage(4), batch_size=2)
            ...     other.loads(folder, mmap=True)
            ...     _ = other.extend(torch.tensor([40, 50]))
            ...     rb.loads(folder)
            >>> other[:], rb[:]
            (tensor([40, 50,  2,  3]), tensor([0, 1, 2, 3]))
        """
        self._ready()
        if mmap:
            check_mappable(self.storage)
        checked = verify or (verify is None and not mmap)
        with deferred, (MappedCheckpoint if mmap else Checkpoint)(path, version) as saved:
            if checked:
                saved.verify(wait=mmap)
            head = saved.part("storage", mapped=["groups"])
            late = (self._writer.mapped_entries, self._sampler.mapped_entries) if mmap else ((), ())
            with self._locked() as storage:
                try:
                    content = Content.from_state(head)
                except ValueError as error:
                    raise CheckpointError(f"the rows in {path} are damaged: {error}") from None
                if checked and not mmap:
                    # Files may be verified after the copy, because no reader uses that memory yet.
                    if storage.checks_before_load:
                        content = replace(content, check=saved.verify)
                    else:
                        saved.verify()
                content = content_after_load(storage, content)
                writer = saved.part("writer", mapped=late[0])
                sampler = saved.part("sampler", mapped=late[1])
                undelivered = saved.part("prepared") if "prepared" in saved else []
                if of_another_kind(sampler, self._sampler):
                    if mmap:  # all of it is needed now
                        sampler = saved.part("sampler")
                    sampler, undelivered = restarted(self._sampler, sampler, content), []
                apply_state(
                    self,
                    BufferState(
                        content,
                        None,
                        writer,
                        sampler,
                        saved.part("transforms"),
                        saved.part("generator"),
                        undelivered,
                        mapped=mmap,
                        pace=saved.part("pace") if "pace" in saved else None,
                    ),
                )

    dump = save = dumps
    load = loads

    def register_save_hook(self, hook: Hook) -> None:
        """Add a function that changes the rows before ``dumps`` writes them.

        The hook receives a copy of all rows. It also receives the path as ``path=`` if it accepts
        that argument. If the hook has attributes ``shift`` and ``is_full``, they are set before the
        call. ``shift`` is the slot after the newest row, and ``is_full`` is True if every slot
        holds a row. Hooks run in the order of registration. They are not saved.

        Example:
            >>> import tempfile, torch
            >>> from replaykit import LazyTensorStorage, ReplayBuffer
            >>> rb = ReplayBuffer(storage=LazyTensorStorage(3))
            >>> _ = rb.extend(torch.tensor([1.0, 2.0]))
            >>> rb.register_save_hook(lambda data: data * 2)
            >>> rb.register_load_hook(lambda data: data / 2)
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     rb.dumps(folder)
            ...     rb.loads(folder)
            >>> rb[:]
            tensor([1., 2.])
        """
        self.storage.register_save_hook(hook)

    def register_load_hook(self, hook: Hook) -> None:
        """Add a function that changes the rows after ``loads`` has read them.

        The hook receives the saved rows. If it accepts an argument ``out=``, it also receives the
        buffer's current rows, or None if there are none. Hooks run in the order of registration.
        """
        self.storage.register_load_hook(hook)

    def state_dict(self) -> dict[str, Any]:
        """Return a dictionary with copies of everything that ``dumps`` saves.

        Later writes do not change the dictionary, and changes of the dictionary do not affect the
        buffer.

        Raises:
            TypeError: rows are pytrees other than TensorDicts and tensors.

        Example:
            >>> import torch
            >>> from replaykit import LazyTensorStorage, ReplayBuffer
            >>> rb = ReplayBuffer(storage=LazyTensorStorage(3))
            >>> _ = rb.extend(torch.arange(2))
            >>> state = rb.state_dict()
            >>> rb.empty()
            >>> rb.load_state_dict(state)
            >>> rb[:]
            tensor([0, 1])
        """
        with self._locked(settled=False) as storage:
            self._rewind()
            return {
                "_storage": storage.state_dict(),
                "_sampler": copy.deepcopy(saved_sampler(self._sampler)),
                "_writer": self._writer.state_dict(),
                "_transforms": copy.deepcopy(self._chain.state_dict()),
                "_batch_size": self._batch_size,
                "_consume_after_n_samples": uses_of(self._sampler),
                "_rng": generator_state(self._generator),
                **({} if self._pace is None else {"_pace": self._pace.state()}),
            }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a copy of a state from ``state_dict``, by the rules of ``loads``.

        Raises:
            ValueError: entries are missing, or do not fit this buffer; nothing has changed.
        """
        if not isinstance(state_dict, Mapping):
            raise ValueError(f"expected the state of a buffer, got {type(state_dict).__name__}")
        names = ("_storage", "_sampler", "_writer", "_transforms", "_rng")
        missing = [name for name in names if name not in state_dict]
        if missing:
            raise ValueError(f"expected the entries {list(names)}, missing {missing}")
        rows = state_dict["_storage"]
        if not isinstance(rows, Mapping):
            raise ValueError(f"expected the state of a storage, got {type(rows).__name__}")
        with self._locked() as storage:
            apply_state(
                self,
                BufferState(
                    storage.content_of(dict(rows)),
                    rows,
                    state_dict["_writer"],
                    state_dict["_sampler"],
                    state_dict["_transforms"],
                    state_dict["_rng"],
                    state_dict.get("_prefetch_state", []),
                    pace=state_dict.get("_pace"),
                ),
            )

    # -- pickling -----------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        if self._shared:
            self._ready()  # otherwise each process would make separate components
        if not self._initialized:
            generator = by_value(generator_state(self._generator))
            return {**self.__dict__, "_generator": generator, "_making": None, "_staging": None}
        spawning = multiprocessing.context.get_spawning_popen() is not None
        if spawning and not self._shared and self._writer.kind != "immutable":
            raise RuntimeError(
                "a buffer that can be written to cannot be handed to a spawned process: each "
                "process would write to a separate copy, and rows would be lost; make it with "
                "shared=True, save it with dumps() and load it there, or hand over a read-only "
                "data set"
            )
        with self._locked(settled=False) as storage:
            self._rewind()
            state = dict(self.__dict__)
            state["_prefetcher"] = state["_making"] = state["_staging"] = None
            # Other threads may sample while the rest is pickled. So this state is copied now.
            sampler = state["_sampler"] = copy.deepcopy(self._sampler, {id(storage): storage})
            sampler.owner = self
            state["_generator"] = by_value(generator_state(self._generator))
            state["_shared"] = self._shared and spawning  # any other copy has separate rows
            # A copy has separate counts, too. A shared buffer stores the counts with its rows.
            state["_pace"] = None if self._pace is None else self._pace.state()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._making = threading.RLock()
        self._generator = saved_generator(from_value(state["_generator"]))
        if not self._initialized:
            return
        self._sampler.generator = self._generator
        self._claim(self._sampler, self._writer)
        self._writer.register_storage(self._storage)
        self._storage.attach(cast(Any, self))
        if self._shared:
            self._sampler.attach(self._storage)
        else:
            self._sampler.rejoin(self._storage)
        self._pace = self._new_pace(self._storage, shared=self._shared)
        if self._pace is not None:
            if not self._shared:
                self._pace.load_state(state["_pace"], len(self._storage))
            if self._closed:
                self._pace.close()
        if self._prefetch_depth and not self._closed:
            self._prefetcher = Prefetcher(self._prefetch_depth, cast(Any, self))
