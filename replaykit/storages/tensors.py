"""Store rows in contiguous tensors, on any device."""

from __future__ import annotations

from collections.abc import Mapping
from multiprocessing.context import get_spawning_popen
from pathlib import Path as FilePath
from typing import Any, ClassVar

import numpy as np
import torch
from typing_extensions import Self

from replaykit.episodes.streams import stream_keys
from replaykit.keywords import Replaced, checked_keywords, named_after, old_name
from replaykit.schema import MatchedRows, Rows, Schema, split_leaves
from replaykit.storages.column_storage import AnyColumns, ColumnStorage
from replaykit.storages.columns import Columns, Grow, grow_in_memory
from replaykit.storages.content import Content
from replaykit.storages.dedup_columns import DedupColumns
from replaykit.storages.episode_indexes import EpisodeIndexes
from replaykit.storages.ledger import Ledger
from replaykit.storages.next_rows import (
    DedupNext,
    Mismatch,
    Pairs,
    chains,
    check_follows,
    checked_keys,
    checked_mismatch,
    following_lanes,
    pairs_of,
)
from replaykit.storages.recoverable_files import hand_over, make_columns
from replaykit.storages.restorable import RestorableStorage, adopt_mapped, mapped_rows
from replaykit.storages.shared_storage import HOW, begin_sharing, memory_folder
from replaykit.structure import build
from replaykit.ted import format_key

DESCRIBED = ("max_size", "ndim", "lane_key", "dedup_next", "on_mismatch")
"""Names of the arguments that processes find in the description of a shared storage."""


@named_after
class TensorStorage(RestorableStorage):
    """An existing TensorDict, tensorclass, tensor or pytree, used without a copy.

    The storage is full from the start, and the first write goes to slot 0. For ``ndim > 1`` the
    leading dimensions of the data are ``[time, *lanes]``.

    Args:
        storage: the data. All leaves have the same first ``ndim`` dimensions.
        max_size: must equal the number of rows of the data, if given.
        device: ``"auto"`` leaves the data where it is. For another device the data is copied.
        ndim: number of leading dimensions that count as rows.
        lane_key: as for LazyTensorStorage.

    Raises:
        ValueError: there is no data, or the first dimensions of its leaves differ.
        ValueError: ``max_size`` is not the number of rows, or ``lane_key`` is given with ``ndim >
            1``.
        KeyError: the data has no column ``lane_key``.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from replaykit import TensorStorage
        >>> data = TensorDict({"x": torch.arange(3)}, [3])
        >>> storage = TensorStorage(data)
        >>> storage[1]["x"].item(), len(storage)
        (1, 3)
        >>> storage.column("x").data_ptr() == data["x"].data_ptr()
        True
    """

    @checked_keywords
    def __init__(
        self,
        storage: Any,
        max_size: int | None = None,
        *,
        device: Any = "auto",
        ndim: int = 1,
        compilable: bool = False,
        lane_key: Any = None,
    ) -> None:
        if storage is None:
            raise ValueError(
                "Expected storage to be non-null, got None; LazyTensorStorage starts empty"
            )
        rows = split_leaves(storage, ndim)
        if not rows.batch.numel():
            raise ValueError(f"expected at least one row, got batch shape {list(rows.batch)}")
        if max_size is not None and max_size != len(rows):
            raise ValueError(
                f"The max-size and the storage shape mismatch: got max_size={max_size} for "
                f"{len(rows)} rows"
            )
        super().__init__(rows.batch.numel(), device=device, ndim=ndim, lane_key=lane_key)
        self._check_lane_key(rows.leaves)
        leaves = rows.leaves
        if device != "auto":
            leaves = {path: leaf.to(self._device) for path, leaf in leaves.items()}
        devices = {leaf.device for leaf in leaves.values()}
        if len(devices) > 1:
            raise ValueError(f"expected all tensors on one device, got {sorted(map(str, devices))}")
        self._columns = Columns(Schema(rows.root), leaves, ndim)
        self._columns.changes.lend()  # the caller may change the data at any time
        self._adopt(self._columns)
        self.ledger.advance(self._columns.slots)

    def flatten(self) -> TensorStorage:
        """Return a storage with ``ndim == 1`` over the same rows, without a copy.

        Raises:
            RuntimeError: nothing was written yet, or the rows are not contiguous in memory.
        """
        columns = self.require()
        if self.ndim == 1:
            return self
        if isinstance(columns, DedupColumns):
            raise RuntimeError(
                "rows whose observations are stored once cannot be flattened without a copy; use "
                "storage[:]"
            )
        if not len(self):
            raise RuntimeError("nothing is stored now; there are no rows to flatten")
        leaves = {}
        columns.changes.expose()
        for path, view in columns.view(self.ledger.length).items():
            try:
                leaves[path] = view.view(len(self), *view.shape[self.ndim :])
            except RuntimeError:
                raise RuntimeError(f"the column {path} is not contiguous in memory") from None
        batch = torch.Size([len(self)])
        return TensorStorage(build(columns.schema.root, leaves, batch, columns.device))


class LazyTensorStorage(TensorStorage):
    """Rows in memory that the first write allocates.

    The small leaves of a row are stored in one record, and each wide leaf in a separate tensor.

    Args:
        max_size: capacity in rows. For ``ndim > 1``, rows of all lanes count, and the capacity is
            rounded up to whole time steps.
        device: device of the rows; ``"auto"`` for the device of the first data.
        ndim: number of leading dimensions that count as rows. Dimension 0 is time, and the others
            are lanes.
        dedup_next: store observations once. Each row refers to its observation ``key`` and to its
            next observation ``("next", key)``. The next observation of a row and the observation of
            the following row are stored once if their bits are equal. With ``lane_key``, that is
            the following row of the same stream. Overflow rows store the observations that exceed
            one for each row. There is one for the last row of an episode, for the newest row, and
            for rows edited or placed by hand. A list names the root keys. ``True`` selects every
            key that occurs at the root and under ``next`` with one shape and dtype, except
            ``reward``, flags, and ids of episodes or streams. Every read returns the same bits as
            without this option. But views of these keys (``storage[a:b]``, ``rb[i]``, ``column``)
            become copies. If observations are most of a row, the rows take half the memory.
            ``False`` costs nothing.
        on_mismatch: the reaction to a row that continues an episode, but whose observation differs
            from the next observation of the row before. ``"error"`` refuses the batch, and
            ``"dense"`` stores both observations. A row continues an episode under three conditions.
            No flag under ``next`` of the row before is set, no id column of ``ted.EPISODE_KEYS``
            changes, and no ``cut`` comes between. The first row after ``write_at``, an edit of
            these keys, ``empty`` or a load is not checked. With ``lane_key``, this holds for the
            first row of each stream. Rows placed by hand are never checked. In a shared buffer, the
            first rows after a write of another process are not checked either.
        lane_key: the column that names the stream of a row, such as the id of an environment or a
            trajectory. Use it if rows of several environments arrive one by one in any order. The
            rows of one stream then follow each other, even if rows of other streams are written
            between them. It requires ``ndim=1``. With None all rows form one stream.

    Raises:
        ValueError: ``max_size`` or ``ndim`` is not an int of at least 1, or ``dedup_next`` is
            empty.
        ValueError: ``on_mismatch`` is another word, or ``lane_key`` is given with ``ndim > 1``.
        TypeError: ``dedup_next`` holds no keys.
        ValueError: at the first write, a key of ``dedup_next`` is missing at the root or under
            ``next``, or its counterpart is the ``lane_key``.
        ValueError: at any write, ``on_mismatch="error"`` refuses a row. The storage has not changed
            then.
        KeyError: at the first write, the data has no column ``lane_key``.
        MemoryError: at the first write, the device has less memory than the capacity needs.

    Example:
        >>> import torch
        >>> from replaykit import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(4))
        >>> rb.extend(torch.arange(6))
        tensor([0, 1, 2, 3, 0, 1])
        >>> rb[:]
        tensor([4, 5, 2, 3])

        Two environments whose rows arrive one by one:

        >>> from tensordict import TensorDict
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100, lane_key="env"))
        >>> done = torch.tensor([0, 0, 1, 0, 0, 1], dtype=torch.bool)
        >>> _ = rb.extend(TensorDict({"env": torch.arange(6) % 2, "next": {"done": done}}, [6]))
        >>> [episode.index.tolist() for episode in rb.episodes]
        [[0, 2], [4], [1, 3, 5]]

        An episode of four steps has five observations. The last observation is in an overflow row:

        >>> from tensordict import TensorDict
        >>> x = torch.arange(5.0)
        >>> steps = TensorDict({"observation": x[:4], "next": {"observation": x[1:]}}, [4])
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100, dedup_next=True))
        >>> _ = rb.extend(steps)
        >>> rb["next", "observation"], rb.storage.overflow_rows
        (tensor([1., 2., 3., 4.]), 1)

        Two environments that take turns. Each has an overflow row for its newest row:

        >>> storage = LazyTensorStorage(100, dedup_next=True, lane_key="env")
        >>> rows = {"env": torch.arange(6) % 2, "observation": torch.arange(6) // 2}
        >>> rows["next"] = {"observation": rows["observation"] + 1}
        >>> _ = ReplayBuffer(storage=storage).extend(TensorDict(rows, [6]))
        >>> storage[:]["next", "observation"], storage.overflow_rows
        (tensor([1, 1, 2, 2, 3, 3]), 2)
    """

    _replaced: ClassVar[dict[str, Replaced]] = {
        "consolidated": Replaced(
            (False,), "the small columns of a row lie in one piece of memory anyway; leave it out"
        ),
        "shared_init": Replaced(
            (False,),
            "ReplayBuffer(..., shared=True) has processes share rows, of which the first that "
            "writes makes the columns; leave shared_init out",
        ),
        "cleanup_memmap": Replaced(
            (True,),
            "LazyMemmapStorage(..., scratch_dir=folder) keeps rows in files that stay; leave "
            "cleanup_memmap out",
        ),
    }

    _invited: Mapping[str, bool] | None = None
    """The parts that the buffers of all processes have in common.

    It is None unless rows were joined for which no buffer was made yet.
    """

    @checked_keywords
    def __init__(
        self,
        max_size: int,
        *,
        device: Any = "cpu",
        ndim: int = 1,
        dedup_next: DedupNext = False,
        on_mismatch: Mismatch = "error",
        compilable: bool = False,
        lane_key: Any = None,
    ) -> None:
        self.dedup_next = checked_keys(dedup_next)
        self.on_mismatch = checked_mismatch(on_mismatch)
        ColumnStorage.__init__(self, max_size, device=device, ndim=ndim, lane_key=lane_key)

    @property
    def shared_init(self) -> bool:
        """Always False, because the first process that writes makes the shared columns."""
        return False

    @property
    def consolidated(self) -> bool:
        """Always False, because the small columns of a row are always in one piece."""
        return False

    def share(self, parts: Mapping[str, bool] | None = None) -> bool:
        """Share the rows with other processes that receive this storage.

        These processes can then write and read the same rows. The buffer calls this before any row
        is stored in this process.

        Args:
            parts: for each part by name, whether the buffers of all processes must have it.

        Returns:
            Whether the storage has joined other processes before.

        Raises:
            ValueError: rows are stored already, or the device is not the CPU. Or the storage has
                joined other processes, whose ``parts`` differ.
            RuntimeError: another process or storage uses the folder of this storage.
            OSError: the folder cannot be made.
        """
        name, parts = type(self).__name__, parts or {}
        if self._invited is not None:
            for part, own in parts.items():
                if self._invited.get(part, False) is not own:
                    how = "with" if not own else "without"
                    raise ValueError(
                        f"expected a buffer {how} a {part}, like the other processes that share "
                        f"{self.recovery.folder}"
                    )
            self._invited = None
            return True
        if self.recovery is not None and self.recovery.shared:
            raise ValueError(f"expected a {name} that no other buffer shares for shared=True")
        if self._columns is not None or self.ledger.next_position:
            got = f"{len(self)} rows" if len(self) else "one that was emptied"
            raise ValueError(
                f"expected a {name} that was never written to for shared=True, got {got}: keys "
                "and memory of the first write stay, and processes cannot share them; make a new "
                "buffer with shared=True"
            )
        if self._device == "auto" or torch.device(self._device).type != "cpu":
            raise ValueError(
                f"expected a {name} on the CPU for shared=True, got device {self._device}"
            )
        self._open_sharing(parts)
        return False

    def _open_sharing(self, parts: Mapping[str, bool]) -> None:
        self._begin_sharing(parts, memory_folder(), private=True, mapped=False)

    def _begin_sharing(
        self, parts: Mapping[str, bool] | None, folder: FilePath, **how: Any
    ) -> None:
        """Use files that processes share, and their lock, from now on.

        If ``parts`` is None, join other processes. Rows that this process has recovered alone stay.
        """
        with self.lock:
            alone, shared = self.recovery, begin_sharing(self, folder, join=parts is None, **how)
            assert shared.sharing is not None
            if parts is not None:
                own = {name: getattr(self, name) for name in DESCRIBED}
                shared.sharing.describe_sharing({**own, "parts": dict(parts)})
            if alone is not None:
                hand_over(alone, (0, 0))  # no element is logged yet
                self._forget_rows()
            self.recovery = shared
            self.__dict__.pop("lock", None)
            if alone is not None:
                alone.home.close()

    def _forget_rows(self) -> None:
        """Drop the rows of this object; the rows of the shared files replace them."""
        self._columns = self._matcher = None
        self.ledger, self.indexes = Ledger(self.max_size), EpisodeIndexes(self)

    @classmethod
    def join_folder(cls, folder: FilePath, found: Mapping[str, Any]) -> Self:
        """Return a storage over rows that other processes share.

        Args:
            folder: the folder of the files.
            found: the result of ``read_description``.

        Raises:
            RuntimeError: the folder is gone, or one process recovers it alone.
        """
        storage = cls(**{name: found[name] for name in DESCRIBED})
        storage._begin_sharing(None, folder, **{name: found[name] for name in HOW})
        storage._invited = found["parts"]
        return storage

    def for_readers(self) -> Any:
        if self.recovery is not None and self.recovery.shared:
            return self
        return super().for_readers()

    def __getstate__(self) -> dict[str, Any]:
        recovery = self.recovery
        if recovery is None or not recovery.shared or get_spawning_popen() is None:
            return super().__getstate__()
        # The new process gets the shared rows, not copies.
        state = self.__dict__.copy()
        for name in ("_columns", "_matcher", "ledger", "indexes", "lock", "_listeners"):
            state.pop(name, None)
        log = self.ledger.log
        return {**state, "recovery": None, "_shared": recovery.sharing.invitation(), "_log": log}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_shared" not in state:
            super().__setstate__(state)
            return
        state = dict(state)
        invitation, log = state.pop("_shared"), state.pop("_log")
        self.__dict__.update(state)
        self._listeners = []
        self._forget_rows()
        self.ledger.log = log
        self._begin_sharing(None, **invitation)

    @property
    def overflow_rows(self) -> int:
        """Number of stored observations that exceed one for each row.

        For ``ndim > 1``, rows of all lanes count.
        """
        with self.lock:  # the first call reads references that are still in files
            columns = self._columns
            return columns.overflow_rows if isinstance(columns, DedupColumns) else 0

    kept_beside = old_name("kept_beside", "overflow_rows")

    @property
    def nbytes(self) -> int:
        """Bytes of memory, or of files, that all slots take; 0 before the first write.

        The number includes free slots, and the tables of observations that are stored once. It
        does not include the tables of samplers and of episodes.
        """
        with self.lock:  # the first call reads overflow rows that are still in files
            columns = self._columns
            return 0 if columns is None else columns.nbytes()

    @torch.inference_mode(False)  # tensors made in that mode cannot be changed outside of it
    def map_content(self, content: Content, slots: int) -> None:
        """Map checked rows of a checkpoint copy-on-write, without reading them.

        Nothing was ever written to this storage.

        Args:
            content: the rows; its columns are MappedRows.
            slots: number of slots of the storage.

        Raises:
            OSError: the system refuses to map them. The storage has not changed then.
        """
        if not content.groups:
            return
        group = content.single_group()
        pairs = self.pairs_for(group.schema)
        rows = mapped_rows(group, group.schema if pairs is None else pairs.stored, slots, self.ndim)
        columns: AnyColumns = rows
        if pairs is not None:
            columns = DedupColumns(pairs, rows, self._grow(rows.device), self.lane_key)
            adopt_mapped(columns, group, content.rows)
        self._columns = columns
        self._adopt(columns)

    def pairs_for(self, schema: Schema) -> Pairs | None:
        """Return the leaves of a schema that are stored once; None if there are none.

        Raises:
            ValueError: as for the first write.
        """
        return self._pairs_of(schema) if self.dedup_next else None

    def check_order(self, rows: Any) -> None:
        if not self.dedup_next or self.on_mismatch == "dense" or not isinstance(rows, Rows):
            return
        self._check(rows)
        columns = self._columns
        if isinstance(columns, DedupColumns):
            matched = isinstance(rows, MatchedRows) and rows.matcher is self._matcher
            columns.check(rows, self.ledger.cursor, matched=matched)
            return
        pairs, lanes = self._pairs_of(Schema(rows.root)), rows.batch[1:].numel()
        if self.lane_key is None:
            before = following_lanes(rows.batch.numel(), lanes, -1)
        else:
            before = chains(stream_keys(rows.leaves[self.lane_key])).before(len(rows))
        leaves = {path: leaf.flatten(0, self.ndim - 1) for path, leaf in rows.leaves.items()}
        none = np.zeros(0, np.int64)
        streams = self.lane_key is not None
        check_follows(leaves, before, pairs, lanes, {}, none, streams=streams)

    def _allocate(self, schema: Schema, lanes: torch.Size, rows: Rows | None) -> AnyColumns:
        pairs = self.pairs_for(schema)
        if self.recovery is not None:
            return make_columns(self.recovery, schema, lanes, pairs)
        if pairs is None:
            return self._allocate_memory(schema, lanes, rows)
        taken = self._allocate_memory(pairs.stored, lanes, rows)
        return DedupColumns(pairs, taken, self._grow(taken.device), self.lane_key)

    def clear(self) -> None:
        super().clear()
        if self.recovery is not None:
            self.put_back()  # the ledger may still fail to clear, and keep the rows

    def put_back(self) -> None:
        """Have the next write derive data again from the rows that the ledger then has."""
        if isinstance(self._columns, DedupColumns):
            self._columns.outdate(self.ledger)

    def _pairs_of(self, schema: Schema) -> Pairs:
        pairs = pairs_of(schema, self.dedup_next, self.lane_key)
        if self.lane_key in pairs.root_of:
            raise ValueError(
                f"dedup_next: expected no lane_key under 'next', got {format_key(self.lane_key)}: "
                "it is needed to find the next row; name the root key, or give dedup_next a list"
            )
        return pairs

    def _grow(self, device: torch.device) -> Grow:
        """Return a function that allocates overflow rows and does not refer to ``self``."""
        return grow_in_memory(device)
