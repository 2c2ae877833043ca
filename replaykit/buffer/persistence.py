"""A buffer's state: in files, in dictionaries, in pickles."""

from __future__ import annotations

import copy
import multiprocessing.context
import os
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from replaykit.buffer.buffer_state import (
    BufferState,
    apply_state,
    checked_prepared,
    continue_draws,
    copied_draws,
    generator_state,
    prepared_state,
    saved_generator,
    saved_sampler,
)
from replaykit.buffer.component_checks import check_mappable, uses_of
from replaykit.buffer.components import begun_anew, of_another_kind
from replaykit.buffer.core import BufferCore, DataT, SamplerT, StorageT, WriterT
from replaykit.buffer.prefetch import Prefetcher
from replaykit.checkpoint import Base, Checkpoint, MappedCheckpoint, Snapshot, save_snapshot
from replaykit.errors import CheckpointError
from replaykit.interrupts import deferred
from replaykit.storages import Storage
from replaykit.storages.content import Content
from replaykit.storages.save_hooks import Hook, content_after_load, content_to_save
from replaykit.storages.tensor_bytes import by_value, from_value

__all__ = ["Saving"]


class Saving(BufferCore[DataT, StorageT, SamplerT, WriterT]):
    """``dumps``, ``loads``, ``state_dict``, ``load_state_dict``, hooks, pickling."""

    def dumps(self, path: str | os.PathLike[str], *, keep: int = 1) -> None:
        """Saves the buffer into a directory: all of it, or what was there stays.

        Rows that are in use, cursor, write count, generations, the sampler's state, transforms
        with state, the generator, and batches drawn ahead. Raw arrays and JSON, no pickle.

        What is saved is the buffer at the instant of the call. Other threads go on sampling and
        writing meanwhile; they wait for copies of 8 MiB, and before what is not saved yet is
        overwritten, for a copy of that.

        Args:
            path: the directory; made with its parents, replaced atomically if it holds a
                checkpoint.
            keep: how many checkpoints the directory holds afterwards, at most: this one and those
                before it, which ``loads(path, version=...)`` reads.

        Raises:
            TypeError: something that cannot be represented; names it, nothing was written.
            ValueError: ``keep`` is below 1, or ``path`` is empty.
            CheckpointError: the directory has a ``manifest.json`` of something else; other files
                in it are left alone. OSError: the disk refused; names the file.

        Cost: of the first save one pass over the bytes of the stored rows. Of a save into the
        directory of one of this buffer's last four: the rows and priorities written since, in
        chunks of 1/4096 of the capacity; all of it where somebody outside may have changed rows: a
        TensorStorage, or while a view of rows (``rb[a:b]``) is held, and once after that. Rows of
        lists, and what passed through a hook, are always written. With ``shared=True`` it is one of
        the last sixteen, by any of the processes, and what any of them has written; that is copied
        in memory first, while writers wait. A first save thus takes memory for all stored rows and
        priorities, and writers wait for a copy of all of them; it is given back, some 64 MiB at a
        time, as they are written.

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
        with self._locked() as storage:
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
        """The parts of a save, of which large ones are read later. The lock is held."""
        writer = self._writer.state_dict()
        pace = {} if self._pace is None else {"pace": self._pace.state()}
        prepared = prepared_state(self)  # first, since it may give draws back
        return {
            **pace,
            # No view of rows but those that the state holds is left: others are counted.
            "storage": content_to_save(storage, path).to_state(tracked=True),
            "writer": writer,
            "sampler": saved_sampler(self._sampler, tracked=storage),
            "transforms": self._chain.state_dict(),
            "generator": generator_state(self._generator),
            "prepared": prepared,
        }

    def loads(
        self,
        path: str | os.PathLike[str],
        *,
        version: int | None = None,
        mmap: bool = False,
        verify: bool | None = None,
    ) -> None:
        """Takes over a buffer that ``dumps`` saved; afterwards both draw the same batches.

        The writer is of the kind that was saved; the storage may be of another kind and capacity.
        So may the sampler: it begins anew over the rows, a prioritized one with
        the priorities that were saved, or 1 each; a UserWarning says which, and batches drawn ahead
        are left out. With equal capacity every row keeps its slot. With another one the rows lie in
        write order from 0; of a smaller one the newest (for a TensorDictMaxValueWriter: the
        largest) are kept, and a UserWarning says how many were left out. Where episodes began stays
        known, as in a ring that has overwritten their first rows.

        What was open ends there. Rows that transforms held back are stored, cut short, by the first
        write or ``flush``.

        Args:
            path: the directory.
            version: which of the checkpoints that ``dumps(path, keep=...)`` left there, as
                ``replaykit.checkpoint.checkpoint_versions`` lists them; None: the newest.
            mmap: whether the rows stay in the files, to be read page by page as they are sampled: a
                checkpoint of any size is open in milliseconds. The files are mapped copy-on-write:
                what is written afterwards lies in memory, page by page, and never reaches them.
                They may be replaced or removed meanwhile, but not cut or written to. For a
                LazyTensorStorage on the CPU that was never written to, without load hooks, with the
                ``dedup_next`` and ``lane_key`` that were saved, of a capacity with which every row
                keeps its slot.
            verify: whether every file is read and its checksum compared. None: unless ``mmap``.
                Sizes, and the manifest's own checksum, are always compared.

        Raises:
            FileNotFoundError: there is no checkpoint, or not of that version. CheckpointError: it
                is damaged, or of a newer format; names the file. ValueError: other keys, shapes,
                dtypes, lanes, or kind of writer, or with ``mmap`` a storage that cannot have its
                rows in these files. NotImplementedError: ``mmap`` elsewhere than on
                a 64-bit POSIX system. OSError: the system does not map the files.

        Everything is checked first; nothing has changed if it raises. Without ``mmap`` the files
        are not used afterwards. With it, priorities, counts of draws, the order of versions and
        what is left of a pass over rows are read at the first draw or update, and the columns that
        bound episodes at the first write or question for episodes, in full: O(rows) then.

        Cost: one pass over the files. With ``mmap``, what was saved beside rows and priorities:
        nothing that grows with the rows, unless they were placed by hand, cleared, ranked, or of
        streams (``lane_key``), of which 8 to 16 bytes a row are read, or a pass without replacement
        over episodes was under way, of which 8 bytes an episode are.

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
                    # Fresh memory, which nobody sees before it is whole, is filled meanwhile.
                    if storage.takes_over_whole:
                        content = replace(content, check=saved.verify)
                    else:
                        saved.verify()
                content = content_after_load(storage, content)
                writer = saved.part("writer", mapped=late[0])
                sampler = saved.part("sampler", mapped=late[1])
                prepared = saved.part("prepared")
                if of_another_kind(sampler, self._sampler):
                    if mmap:  # no part of it can be left for later
                        sampler = saved.part("sampler")
                    sampler, prepared = begun_anew(self._sampler, sampler, content), []
                apply_state(
                    self,
                    BufferState(
                        content,
                        None,
                        writer,
                        sampler,
                        saved.part("transforms"),
                        saved.part("generator"),
                        prepared,
                        mapped=mmap,
                        pace=saved.part("pace") if "pace" in saved else None,
                    ),
                )

    dump = save = dumps
    load = loads

    def register_save_hook(self, hook: Hook) -> None:
        """Adds a function that maps the content before ``dumps`` writes it.

        It gets a copy of all rows, and the path under ``path=`` if it accepts that. Its attributes
        ``shift`` and ``is_full``, if it has them, are set before: the slot behind the newest row,
        and whether every slot holds a row. Hooks run in the order they came and are not saved
        themselves.

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
        """Adds a function that maps the content after ``loads`` has read it.

        It gets the rows that were saved, and what the buffer holds now under ``out=`` if it
        accepts that (None if nothing). Hooks run in the order they came.
        """
        self.storage.register_load_hook(hook)

    def state_dict(self) -> dict[str, Any]:
        """Returns copies of all that ``dumps`` saves, as a dictionary.

        Later writes do not change it, and changing it does not change the buffer.

        Raises:
            TypeError: rows that are pytrees other than TensorDicts and tensors.

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
        with self._locked() as storage:
            prepared = prepared_state(self)  # first, since it may give draws back
            return {
                "_storage": storage.state_dict(),
                "_sampler": copy.deepcopy(saved_sampler(self._sampler)),
                "_writer": self._writer.state_dict(),
                "_transforms": copy.deepcopy(self._chain.state_dict()),
                "_batch_size": self._batch_size,
                "_consume_after_n_samples": uses_of(self._sampler),
                "_rng": generator_state(self._generator),
                "_prefetch_state": prepared,
                **({} if self._pace is None else {"_pace": self._pace.state()}),
            }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over what ``state_dict`` gave, by the rules of ``loads``; values are copied.

        Raises:
            ValueError: entries are missing, or do not fit this buffer; nothing has changed.
        """
        if not isinstance(state_dict, Mapping):
            raise ValueError(f"expected the state of a buffer, got {type(state_dict).__name__}")
        names = ("_storage", "_sampler", "_writer", "_transforms", "_rng", "_prefetch_state")
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
                    state_dict["_prefetch_state"],
                    pace=state_dict.get("_pace"),
                ),
            )

    # -- pickling -----------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        if self._shared:
            self._ready()  # each process would make parts of its own
        if not self._initialized:
            generator = by_value(generator_state(self._generator))
            state = {**self.__dict__, "_generator": generator, "_making": None, "_staging": None}
            state.pop("_drawn_by", None)
            return state
        spawning = multiprocessing.context.get_spawning_popen() is not None
        if spawning and not self._shared and self._writer.kind != "immutable":
            raise RuntimeError(
                "a buffer that can be written to cannot be handed to a spawned process: each "
                "process would have a copy of its own, and rows would be lost; make it with "
                "shared=True, save it with dumps() and load it there, or hand over a read-only "
                "data set"
            )
        with self._locked() as storage:
            state = dict(self.__dict__)
            state["_prefetcher"] = state["_making"] = state["_staging"] = None
            state.pop("_drawn_by", None)  # threads of this process
            # Threads that draw ahead go on while the rest is pickled: what belongs to the draws
            # that are taken along is taken now.
            sampler = state["_sampler"] = copy.deepcopy(self._sampler, {id(storage): storage})
            sampler.owner = self
            state["_generator"] = by_value(generator_state(self._generator))
            state["_pending"] = by_value(copied_draws(self))
            state["_shared"] = self._shared and spawning  # a copy has rows of its own
            # The counts of a copy are its own too; those of a shared buffer lie beside its rows.
            state["_pace"] = None if self._pace is None else self._pace.state()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._making = threading.RLock()
        self._generator = saved_generator(from_value(state["_generator"]))
        if not self._initialized:
            return
        self._pending = deque(checked_prepared(from_value(state["_pending"])))
        continue_draws(list(self._pending), self._storage)
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
