"""Cut a stream of rows into chunks, and write them into a folder."""

from __future__ import annotations

import os
import time
import uuid
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from typing_extensions import Self

from replaykit._compat import TensorDictBase, lookup
from replaykit.declared import Count, Positive, read_value
from replaykit.errors import Closed
from replaykit.feeds.chunk_files import (
    ChunkHeader,
    ChunkLayout,
    Format,
    Partition,
    chunk_name,
    encode_chunk,
    publish_chunk,
)
from replaykit.filesystem import sync_directory
from replaykit.interrupts import Lock, deferred
from replaykit.keywords import checked_keywords, named_after
from replaykit.schema import Rows, Schema, split_leaves
from replaykit.structure import Path as Key
from replaykit.ted import EPISODE_KEYS, end_flags, format_key, unravel
from replaykit.transforms.frames import PREVIOUS, STEPS, VALID

Flush = Literal["done", "call"]

_TAILS = ("cut", "terminated", "truncated")
"""The tails of chunks. Codes of rows are positions in this tuple; 0 if the episode continues."""


class _Finished(NamedTuple):
    values: dict[str, Any]  # of the header
    leaves: dict[Key, torch.Tensor]


class _LaneRows:
    """The rows of one lane that are not in a finished chunk yet."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.pieces: list[dict[Key, torch.Tensor]] = []
        self.rows = self.limit = 0
        self.step, self.head = 0, "reset"
        self.chunks = 0


@named_after
class TrajectoryWriter:
    """A writer that cuts rows into chunks and writes each chunk as one file.

    Any number of writers, in any processes and on any machines, may write below one root. A file
    gets its name only when it is complete and on the disk. `TrajectoryFolder` reads the files.

    A chunk ends with its episode, or after its limit of rows. Then the next chunk of the lane
    continues the episode: the first observation of that chunk is the last next observation of this
    one. Each row is in exactly one chunk.

    Args:
        root: the folder, which is made with its parents.
        max_len: the largest number of rows of a chunk; None for whole episodes.
        stagger: the limit of each chunk is drawn uniformly from ``max_len - stagger`` to ``max_len
            + stagger``, so that cuts do not always fall on the same steps.
        partition: ``"fifo"``, or ``"protected"`` for chunks that no owner evicts.
        flush: ``"done"`` writes each chunk when it is complete. ``"call"`` keeps complete chunks in
            memory until `flush` or `close`.
        format: ``"safetensors"``, ``"npz"`` or ``"npz-compressed"``. The library safetensors reads
            files of the first, and NumPy reads those of the others.
        lanes: number of environments that are written together; None for one environment.
        previous: keys whose values of the row before are stored with every row, under
            ``("previous", key)``. So they are known at the first row of a chunk, even if a reader
            lacks the chunk before. ``("previous", "valid")`` is False for the first row of an
            episode, and ``("previous", "steps")`` counts its earlier rows. The transforms
            ``PreviousStep(keys, stored=True)`` and ``StepCount(stored=True)`` read them.
        generator: the source of the drawn limits. Default: torch's global generator.

    Raises:
        ValueError: an argument is out of range or unknown.
        TypeError: the generator is no torch.Generator, or ``previous`` is no list of keys.

    A writer that is not closed loses the rows after its last complete chunk. A loss of power may
    also lose whole chunks that were written after the last `flush`. All methods may be
    called from any thread. A process that receives a writer, or is forked, must make its own.

    Example:
        >>> import os, tempfile, torch
        >>> from tensordict import TensorDict
        >>> from replaykit import TrajectoryWriter
        >>> root = tempfile.mkdtemp()
        >>> done = torch.arange(7) == 4
        >>> rows = TensorDict({"x": torch.arange(7.0), "next": {"done": done}}, [7])
        >>> with TrajectoryWriter(root, max_len=3) as writer:
        ...     writer.extend(rows)
        >>> len(os.listdir(f"{root}/fifo"))  # rows 0 to 2, 3 and 4, 5 and 6
        3
    """

    @checked_keywords
    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        max_len: int | None = None,
        stagger: int = 0,
        partition: Literal["fifo", "protected"] = "fifo",
        flush: Literal["done", "call"] = "done",
        format: Literal["safetensors", "npz", "npz-compressed"] = "safetensors",
        lanes: int | None = None,
        previous: Sequence[Any] = (),
        generator: torch.Generator | None = None,
    ) -> None:
        self._max_len: int | None = read_value(Positive | None, max_len, "max_len")
        self._stagger: int = read_value(Count, stagger, "stagger")
        if self._stagger >= (1 if max_len is None else max_len):
            raise ValueError(f"expected stagger below max_len={max_len}, got {stagger}")
        self._format: Format = read_value(Format, format, "format")
        self._now = read_value(Flush, flush, "flush") == "done"
        if generator is not None and not isinstance(generator, torch.Generator):
            raise TypeError(f"expected a torch.Generator, got {type(generator).__name__}")
        self._generator = generator
        self._single = lanes is None
        count = read_value(Positive | None, lanes, "lanes") or 1
        self._folder = Path(root).expanduser() / read_value(Partition, partition, "partition")
        self._lock = Lock()
        self._name, self._process = uuid.uuid4().hex[:16], os.getpid()
        self._lanes = [_LaneRows(number) for number in range(count)]
        for lane in self._lanes:
            lane.limit = self._drawn_limit()
        self._layout: ChunkLayout | None = None
        # Ids, and values of keys of ``previous``, of the newest row of each lane.
        self._last: dict[Key, torch.Tensor] = {}
        if not isinstance(previous, (list, tuple)):
            raise TypeError(f"previous: expected a list of keys, got {previous!r}")
        self._previous = [unravel(key) for key in previous]
        if {VALID[1:], STEPS[1:]} & set(self._previous):
            raise ValueError(f"previous: 'valid' and 'steps' are reserved, got {previous}")
        self._finished: deque[_Finished] = deque()
        self._written = 0
        self._closed = False

    # -- for users --------------------------------------------------------------------------------

    def add(self, row: TensorDictBase) -> None:
        """Accept one row of each environment.

        Args:
            row: a TensorDict of batch size ``[]``, or ``[lanes]``.

        Raises:
            SchemaError, TypeError, ValueError, RuntimeError, OSError: as for `extend`.
        """
        self._accept(row, single=True)

    def extend(self, rows: TensorDictBase) -> None:
        """Accept consecutive rows.

        Args:
            rows: a TensorDict of batch size ``[T]``, or ``[T, lanes]``.

        Raises:
            TypeError: the rows are no TensorDict.
            SchemaError: keys, shapes or dtypes differ from the first rows. Nothing has changed.
            ValueError: the number of lanes differs. Nothing has changed.
            Closed: the writer is closed; a RuntimeError.
            RuntimeError: the writer belongs to another process.
            OSError: a file cannot be written. The writer has accepted the rows, and writes their
                complete chunks in the next call.

        Cost: one copy of the rows, one step of Python for each chunk and lane, and the write of
        complete chunks.
        """
        self._accept(rows, single=False)

    def cut(self, lane: int | None = None) -> None:
        """End the open episodes of a lane, or of all lanes, without a flag.

        The next rows follow a reset of the environment.

        Raises:
            IndexError: there is no such lane.
            RuntimeError, OSError: as for `extend`.
        """
        with deferred, self._lock:
            self._check()
            if lane is not None and not 0 <= lane < len(self._lanes):
                raise IndexError(f"expected a lane below {len(self._lanes)}, got {lane}")
            for own in self._lanes if lane is None else [self._lanes[lane]]:
                self._sever(own)
            self._write()

    def flush(self) -> None:
        """Write all complete chunks, so that they also survive a loss of power.

        Raises:
            RuntimeError, OSError: as for `extend`.
        """
        with deferred, self._lock:
            self._check()
            self._write(flush=True)
            self._sync()

    def close(self, *, drop_partial: bool = False) -> None:
        """Write all chunks, and accept no more rows. A second call has no effect.

        Args:
            drop_partial: drop the rows of chunks that are not complete.

        Raises:
            OSError: a file cannot be written. The writer stays open, and a second call continues.
        """
        with deferred, self._lock:
            if self._closed:
                return
            self._check()
            for lane in self._lanes:
                if drop_partial:
                    lane.pieces, lane.rows = [], 0
                self._sever(lane)
            self._write(flush=True)
            self._sync()
            self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self._folder)!r}, name={self._name!r})"

    # -- cutting ----------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._closed:
            raise Closed("the writer is closed; make another one")
        if self._process != os.getpid():
            raise RuntimeError("the writer belongs to another process; make one in each process")

    def _accept(self, data: Any, *, single: bool) -> None:
        if not isinstance(data, TensorDictBase):
            raise TypeError(f"expected rows as a TensorDict, got {type(data).__name__}")
        ndim = 1 if self._single else 2
        with deferred, self._lock:
            self._check()
            layout = self._layout
            schema = None if layout is None else layout.schema
            data = self._with_previous(data)
            rows = split_leaves(data, ndim, single=single, schema=schema)
            if not self._single and rows.batch[1] != len(self._lanes):
                raise ValueError(f"expected {len(self._lanes)} lanes, got {rows.batch[1]}")
            if not len(rows) or not rows.leaves:
                return
            if schema is None:
                schema = Schema(rows.root)
                layout = ChunkLayout.of(schema)
            schema.check(rows.root)
            self._layout = layout
            self._divide(rows)
            self._write()

    def _divide(self, rows: Rows) -> None:
        """Append rows to their lanes, and finish the chunks that they complete."""
        # The caller may change its tensors later.
        leaves = {path: leaf.to("cpu", copy=True) for path, leaf in rows.leaves.items()}
        if self._single:
            leaves = {path: leaf.unsqueeze(1) for path, leaf in leaves.items()}
        count, lanes = len(rows), len(self._lanes)
        codes = _codes_of(leaves, count, lanes)
        begins = self._begins(leaves, count, lanes)
        if self._previous:
            self._fill_previous(leaves, codes, begins)
        for lane in self._lanes:
            own = {path: leaf[:, lane.number] for path, leaf in leaves.items()}
            self._divide_lane(lane, own, codes[:, lane.number], begins[:, lane.number])

    def _begins(self, leaves: dict[Key, torch.Tensor], count: int, lanes: int) -> Any:
        """Return whether the id of each row differs from that of the row before, ``[T, lanes]``."""
        begins = np.zeros((count, lanes), bool)
        for path in EPISODE_KEYS:
            if path not in leaves:
                continue
            ids = leaves[path].reshape(count, lanes, -1)
            before = torch.cat([self._last.get(path, ids[:1]), ids[:-1]])
            begins |= (ids != before).any(-1).numpy()
            self._last[path] = ids[-1:]
        return begins

    def _with_previous(self, data: Any) -> Any:
        """Return the rows with columns for the values of the rows before."""
        if not self._previous:
            return data
        if PREVIOUS in data.keys():  # noqa: SIM118 - not a mapping
            raise ValueError(f"previous: expected rows without the key {PREVIOUS!r}, got it")
        data = data.copy()
        for key in self._previous:
            if (value := lookup(data, key)) is None:
                raise KeyError(f"previous: expected rows with the key {format_key(key)}")
            data.set((PREVIOUS, *key), torch.zeros_like(value))
        shape = (*data.batch_size, 1)
        data.set(VALID, torch.zeros(shape, dtype=torch.bool))
        data.set(STEPS, torch.zeros(shape, dtype=torch.int64))
        return data

    def _fill_previous(self, leaves: dict[Key, torch.Tensor], codes: Any, begins: Any) -> None:
        """Set the columns of the rows before, if those are of the same episode."""
        first = begins.copy()
        first[1:] |= codes[:-1] > 0
        first[0] |= [lane.head == "reset" and not lane.rows for lane in self._lanes]
        valid = torch.from_numpy(~first)
        leaves[VALID] = valid.view(leaves[VALID].shape)
        at, known = np.arange(len(first))[:, None], [lane.step + lane.rows for lane in self._lanes]
        begin = np.maximum.accumulate(np.where(first, at, -1))
        steps = np.where(begin < 0, at + known, at - begin)
        leaves[STEPS] = torch.from_numpy(steps).view(leaves[STEPS].shape)
        for key in self._previous:
            own, column = leaves[key], (PREVIOUS, *key)
            before = torch.cat([self._last.get(column, own[:1]), own[:-1]])
            self._last[column] = own[-1:]
            before[~valid] = 0
            leaves[column] = before.reshape(leaves[column].shape)

    def _divide_lane(
        self, lane: _LaneRows, leaves: dict[Key, torch.Tensor], codes: Any, begins: Any
    ) -> None:
        count, first = len(codes), 0
        bounds = np.unique(
            np.concatenate([np.flatnonzero(codes) + 1, np.flatnonzero(begins), [count]])
        )
        for until in bounds.tolist():
            while first < until:
                stop = until if lane.limit == 0 else min(until, first + lane.limit - lane.rows)
                lane.pieces.append({path: leaf[first:stop] for path, leaf in leaves.items()})
                lane.rows += stop - first
                first = stop
                if codes[first - 1]:
                    self._sever(lane, _TAILS[codes[first - 1]])
                elif lane.rows == lane.limit:
                    self._finish(lane, "cut")
            if until < count and begins[until]:
                self._sever(lane)

    def _sever(self, lane: _LaneRows, tail: str = "cut") -> None:
        """Finish the chunk of a lane, whose next row follows a reset."""
        if lane.rows:
            self._finish(lane, tail)
        lane.step, lane.head = 0, "reset"

    def _finish(self, lane: _LaneRows, tail: str) -> None:
        pieces = lane.pieces
        leaves = {path: torch.cat([piece[path] for piece in pieces]) for path in pieces[0]}
        values = {"head": lane.head, "tail": tail, "step": lane.step, "rows": lane.rows}
        values |= {"lane": lane.number, "number": lane.chunks}
        self._finished.append(_Finished(values, leaves))
        lane.step, lane.head = lane.step + lane.rows, "cut"
        lane.pieces, lane.rows, lane.chunks = [], 0, lane.chunks + 1
        lane.limit = self._drawn_limit()

    def _drawn_limit(self) -> int:
        """Return the limit of the next chunk; 0 for no limit."""
        if self._max_len is None or not self._stagger:
            return self._max_len or 0
        low, high = self._max_len - self._stagger, self._max_len + self._stagger
        return int(torch.randint(low, high + 1, (), generator=self._generator))

    # -- writing ----------------------------------------------------------------------------------

    def _sync(self) -> None:
        with suppress(FileNotFoundError):  # no chunk was written, or the folder was removed
            sync_directory(self._folder)

    def _write(self, *, flush: bool = False) -> None:
        """Write the complete chunks, in order, unless only ``flush`` writes them."""
        if not (flush or self._now):
            return
        while self._finished:
            values, leaves = self._finished[0]
            assert self._layout is not None
            # A clock that goes back must not change the order of a writer's chunks.
            self._written = max(time.time_ns(), self._written + 1)
            header = ChunkHeader(writer=self._name, written=self._written, **values)
            data = encode_chunk(header, self._layout, leaves, self._format)
            publish_chunk(self._folder / chunk_name(header, self._format), data)
            self._finished.popleft()


def _codes_of(leaves: dict[Key, torch.Tensor], count: int, lanes: int) -> Any:
    """Return positions in `_TAILS` for rows with flags, uint8 ``[T, lanes]``."""
    codes = np.zeros((count, lanes), np.uint8)
    flags = end_flags(leaves)
    names = {path[-1] for path in flags}
    # A flag `done` alone shows terminations. With `terminated`, it shows any end.
    order = sorted(flags, key=lambda path: ("done", "truncated", "terminated").index(path[-1]))
    for path in order:
        ends = leaves[path].reshape(count, lanes, -1).bool().any(-1).numpy()
        truncates = path[-1] == "truncated" or (path[-1] == "done" and "terminated" in names)
        codes[ends] = 2 if truncates else 1
    return codes
