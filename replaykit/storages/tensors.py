"""Records in contiguous tensors, on any device."""

from __future__ import annotations

from multiprocessing.context import get_spawning_popen
from pathlib import Path as FilePath
from typing import Any, ClassVar

import torch

from replaykit.episodes.interleaved import stream_keys
from replaykit.keywords import Replaced, checked_keywords, named_after
from replaykit.schema import Rows, Schema, take_apart
from replaykit.storages.column_storage import AnyColumns, ColumnStorage
from replaykit.storages.columns import Columns
from replaykit.storages.content import Content
from replaykit.storages.dedup_columns import OnceColumns
from replaykit.storages.dedup_streams import StreamColumns
from replaykit.storages.episode_indexes import EpisodeIndexes
from replaykit.storages.ledger import Ledger
from replaykit.storages.next_rows import (
    DedupNext,
    Mismatch,
    Pairs,
    chains,
    check_batch,
    check_newest,
    check_streams,
    checked_keys,
    checked_mismatch,
    pairs_of,
)
from replaykit.storages.overflow_table import Grow, grow_in_memory
from replaykit.storages.restorable import RestorableStorage, adopt_mapped, mapped_rows
from replaykit.storages.schema_match import MatchedRows
from replaykit.storages.shared_storage import Sharing, memory_folder
from replaykit.structure import build
from replaykit.ted import format_key

__all__ = ["LazyTensorStorage", "TensorStorage"]


@named_after
class TensorStorage(RestorableStorage):
    """An existing TensorDict, tensorclass, tensor or pytree as a storage, without a copy.

    It starts full, and the first write goes to row 0. For ``ndim > 1`` the data lies as
    ``[time, *lanes]``.

    Args:
        storage: the data; all leaves share the first ``ndim`` dimensions.
        max_size: if given, the number of rows of the data.
        device: ``"auto"`` keeps the data where it is; another device copies it there.
        ndim: number of leading dimensions that count as rows.
        lane_key: as for LazyTensorStorage.

    Raises:
        ValueError: no data, another ``max_size`` than it has rows, leaves that disagree, or
            ``lane_key`` with ``ndim > 1``.
        KeyError: no column of the name ``lane_key``.

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
        rows = take_apart(storage, ndim)
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
        self._columns.changes.lend()  # whoever brought the data may change it at any time
        self._adopt(self._columns)
        self.ledger.advance(self._columns.slots)

    def flatten(self) -> TensorStorage:
        """Returns a storage with ``ndim == 1`` over the same stored rows, without a copy.

        Raises:
            RuntimeError: nothing was written yet, or the rows are not contiguous in memory.
        """
        columns = self.require()
        if self.ndim == 1:
            return self
        if isinstance(columns, OnceColumns):
            raise RuntimeError(
                "rows whose observations are stored once cannot be seen as flat ones without a "
                "copy; use storage[:]"
            )
        if not len(self):
            raise RuntimeError("nothing is stored now; there are no rows to flatten")
        leaves = {}
        columns.changes.expose()
        for path, view in columns.view(self.ledger.length).items():
            try:
                leaves[path] = view.view(len(self), *view.shape[self.ndim :])
            except RuntimeError:
                raise RuntimeError(f"the column {path} does not lie contiguously") from None
        batch = torch.Size([len(self)])
        return TensorStorage(build(columns.schema.root, leaves, batch, columns.device))


class LazyTensorStorage(TensorStorage):
    """Memory taken at the first write: records of the small leaves, a tensor for each wide one.

    Args:
        max_size: capacity in rows (elements, for ``ndim > 1``; rounded up to whole time slots).
        device: where the rows lie; ``"auto"``: where the first data lies.
        ndim: number of leading dimensions that count as rows: time, then lanes.
        dedup_next: stores observations once: ``("next", key)`` of a row is that of the following
            row (with ``lane_key``, of its stream) at the root, and is kept beside where it is not
            (the last row of an episode, the newest row, rows edited or written elsewhere).
            ``True``: every key that occurs at the root and under ``next`` with one shape and dtype,
            except ``reward`` and flags. A list: these root keys. Every read is bit for bit that of
            dense rows; but what would be views of these keys (``storage[a:b]``, ``rb[i]``,
            ``column``) are copies. Takes half the memory where observations are most of a row.
            With ``False`` it costs nothing.
        on_mismatch: of a row written in turn that goes on an episode (no flag under ``next``
            is set, no id column of ``ted.EPISODE_KEYS`` changes, no ``cut``) with another
            observation than the row before led to: ``"error"`` refuses the batch, ``"dense"``
            stores both. Nothing is expected of the first row written (of each stream, with
            ``lane_key``) after ``write_at``, an edit of these keys, ``empty`` or a load.
        lane_key: column that says which of several streams a row belongs to, where the rows of
            several environments come one by one in any order: an environment's or a trajectory's
            id. Rows of one stream then follow each other whatever lies between them. Only with
            ``ndim=1``; None: all rows are one stream.

    Raises:
        ValueError: ``max_size`` or ``ndim`` is not an int of at least 1, ``dedup_next`` is empty,
            ``on_mismatch`` is another word, or ``lane_key`` comes with ``ndim > 1``.
        TypeError: ``dedup_next`` holds no keys.
        ValueError: at the first write, where a key of ``dedup_next`` is not in both places, or
            its counterpart is the ``lane_key``; at any, where ``on_mismatch`` refuses it. Nothing
            has changed then.
        KeyError: at the first write, where the data has no column ``lane_key``.
        MemoryError: at the first write, where the device has less memory than the capacity needs.

    Example:
        >>> import torch
        >>> from replaykit import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(4))
        >>> rb.extend(torch.arange(6))
        tensor([0, 1, 2, 3, 0, 1])
        >>> rb[:]
        tensor([4, 5, 2, 3])

        Two environments, row by row:

        >>> from tensordict import TensorDict
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100, lane_key="env"))
        >>> done = torch.tensor([0, 0, 1, 0, 0, 1], dtype=torch.bool)
        >>> _ = rb.extend(TensorDict({"env": torch.arange(6) % 2, "next": {"done": done}}, [6]))
        >>> [episode.index.tolist() for episode in rb.episodes]
        [[0, 2], [4], [1, 3, 5]]

        An episode of four steps has five observations, the last one of them kept beside:

        >>> from tensordict import TensorDict
        >>> x = torch.arange(5.0)
        >>> steps = TensorDict({"observation": x[:4], "next": {"observation": x[1:]}}, [4])
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100, dedup_next=True))
        >>> _ = rb.extend(steps)
        >>> rb["next", "observation"], rb.storage.kept_beside
        (tensor([1., 2., 3., 4.]), 1)

        Two environments in turn, of each of which the newest row has it beside:

        >>> storage = LazyTensorStorage(100, dedup_next=True, lane_key="env")
        >>> rows = {"env": torch.arange(6) % 2, "observation": torch.arange(6) // 2}
        >>> rows["next"] = {"observation": rows["observation"] + 1}
        >>> _ = ReplayBuffer(storage=storage).extend(TensorDict(rows, [6]))
        >>> storage[:]["next", "observation"], storage.kept_beside
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
        """False: of processes that share rows, the first that writes makes the columns."""
        return False

    @property
    def consolidated(self) -> bool:
        """False: there is no such mode, and the small columns of a row lie in one piece anyway."""
        return False

    def share(self) -> None:
        """Has other processes that get this storage write and read the same rows; called by the
        buffer, before anything is stored.

        Raises:
            ValueError: rows are stored already, on another device than the CPU, or observations
                once. RuntimeError: others use its folder. OSError: it cannot be made.
        """
        self._check_shareable()
        self._begin_sharing(memory_folder(), private=True, mapped=False)

    def _check_shareable(self) -> None:
        name = type(self).__name__
        if self.recovery is not None and self.recovery.shared:
            raise ValueError(f"expected a {name} that no other buffer shares for shared=True")
        if self._columns is not None or self.ledger.next_position:
            got = f"{len(self)} rows" if len(self) else "one that was emptied"
            raise ValueError(
                f"expected a {name} that was never written to for shared=True, got {got}: keys "
                "and memory of the first write stay, and processes cannot share them; make a new "
                "buffer with shared=True"
            )
        if self.dedup_next:
            raise ValueError(f"expected shared=True without dedup_next, got {self.dedup_next!r}")
        if self._device == "auto" or torch.device(self._device).type != "cpu":
            raise ValueError(
                f"expected a {name} on the CPU for shared=True, got device {self._device}"
            )

    def _begin_sharing(self, folder: FilePath, **how: Any) -> None:
        with self.lock:
            self.recovery = Sharing(self, folder, **how)
            self._locks = {}

    def _take_memory(self, schema: Schema, lanes: torch.Size, rows: Rows | None) -> Columns:
        if self.recovery is not None and self.recovery.shared:
            columns: Columns = self.recovery.make_columns(schema, self._slots_for(lanes), lanes)
            return columns
        return super()._take_memory(schema, lanes, rows)

    def for_readers(self) -> Any:
        if self.recovery is not None and self.recovery.shared:
            return self
        return super().for_readers()

    def __getstate__(self) -> dict[str, Any]:
        recovery = self.recovery
        if recovery is None or not recovery.shared or get_spawning_popen() is None:
            return super().__getstate__()
        # The process that is started gets the rows themselves and not copies.
        state = self.__dict__.copy()
        for name in ("_columns", "_matcher", "ledger", "indexes", "_locks", "_listeners"):
            del state[name]
        return {**state, "recovery": None, "_shared": recovery.invitation()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_shared" not in state:
            super().__setstate__(state)
            return
        state = dict(state)
        invitation = state.pop("_shared")
        self.__dict__.update(state)
        self._columns = self._matcher = None
        self._locks, self._listeners = {}, []
        self.ledger, self.indexes = Ledger(self.max_size), EpisodeIndexes(self)
        self._begin_sharing(**invitation, join=True)

    @property
    def kept_beside(self) -> int:
        """How many rows have their next observations beside (elements, for ``ndim > 1``)."""
        with self.lock:  # who asks first reads what lies in files
            columns = self._columns
            return columns.kept_beside if isinstance(columns, OnceColumns) else 0

    @torch.inference_mode(False)  # what is made in that mode could not be changed outside
    def map_content(self, content: Content, slots: int) -> None:
        """Takes over checked rows of a checkpoint where they lie, copy-on-write; nothing is read.

        Args:
            content: whose columns are MappedRows. The storage was never written to.
            slots: how many there are to be.

        Raises:
            OSError: the system refuses to map them. Nothing has changed then.
        """
        if not content.groups:
            return
        group = content.single_group()
        pairs = self.pairs_for(group.schema)
        rows = mapped_rows(group, group.schema if pairs is None else pairs.stored, slots, self.ndim)
        columns: AnyColumns = rows
        if pairs is not None:
            columns = self._once(pairs, rows, self._grow(rows.device))
            adopt_mapped(columns, group, content.rows)
        self._columns = columns
        self._adopt(columns)

    def pairs_for(self, schema: Schema) -> Pairs | None:
        """Which leaves of rows of a schema are stored once; None: all of them lie in every row.

        Raises:
            ValueError: as the first write does.
        """
        return self._pairs_of(schema) if self.dedup_next else None

    def check_order(self, rows: Any) -> None:
        if not self.dedup_next or self.on_mismatch == "dense" or not isinstance(rows, Rows):
            return
        columns = self._columns
        if (
            isinstance(columns, OnceColumns)
            and isinstance(rows, MatchedRows)
            and rows.matcher is self._matcher
            and columns.goes_on(rows, self.ledger.cursor)
        ):
            return
        self._check(rows)
        if isinstance(columns, StreamColumns):
            matched = isinstance(rows, MatchedRows) and rows.matcher is self._matcher
            columns.check(rows, matched=matched)
            return
        if not isinstance(columns, OnceColumns):
            pairs = self._pairs_of(Schema(rows.root))
            if self.lane_key is None:
                check_batch(rows.leaves, rows.batch, pairs)
            else:
                check_streams(rows.leaves, chains(stream_keys(rows.leaves[self.lane_key])), pairs)
            return
        compared = columns.compare(rows, self.ledger.cursor)
        try:
            if compared.newest is not None and bool(compared.newest.any()):
                newest, severed = columns.newest_rows(), columns.severed
                check_newest(newest, rows.leaves, rows.batch, columns.pairs, severed)
            if compared.inside is not None and bool(compared.inside.any()):
                check_batch(rows.leaves, rows.batch, columns.pairs)
        except BaseException:
            columns.forget()
            raise

    def _allocate(self, schema: Schema, lanes: torch.Size, rows: Rows | None) -> AnyColumns:
        if not self.dedup_next:
            return self._take_memory(schema, lanes, rows)
        pairs = self._pairs_of(schema)
        taken = self._take_memory(pairs.stored, lanes, rows)
        return self._once(pairs, taken, self._grow(taken.device))

    def _once(self, pairs: Pairs, rows: Columns, grow: Grow) -> OnceColumns:
        if self.lane_key is not None:
            return StreamColumns(pairs, rows, grow, self.lane_key)
        return OnceColumns(pairs, rows, grow)

    def put_back(self) -> None:
        """Told that what an operation had overwritten was put back."""
        if isinstance(self._columns, OnceColumns):
            self._columns.reread(self.ledger)

    def _pairs_of(self, schema: Schema) -> Pairs:
        pairs = pairs_of(schema, self.dedup_next)
        if self.lane_key in pairs.root_of:
            raise ValueError(
                f"dedup_next: expected no lane_key under 'next', got {format_key(self.lane_key)}: "
                "it says where the next row lies; name the root key, or give dedup_next a list"
            )
        return pairs

    def _grow(self, device: torch.device) -> Grow:
        """What takes memory for rows beside; it knows nothing of this object, which may die."""
        return grow_in_memory(device)
