"""Store rows of any kind in a Python list."""

from __future__ import annotations

import contextlib
import multiprocessing.context
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import is_tensorclass, lazy_stack

from replaykit._compat import TensorDictBase, arange, clone, is_tensordict, lookup
from replaykit.declared import decode_state
from replaykit.episodes import CutMarks
from replaykit.episodes.boundaries import RESTORED
from replaykit.errors import SchemaError
from replaykit.keywords import checked_keywords
from replaykit.storages.content import Content, RowsState, to_plain
from replaykit.storages.episode_tags import MovedPositions
from replaykit.storages.indexing import as_index, as_slots, is_stored
from replaykit.storages.ledger import Ledger
from replaykit.storages.memory import as_device
from replaykit.storages.storage import Storage
from replaykit.structure import Path, from_numbers
from replaykit.ted import FLAG_KEYS, RESERVED_KEYS, format_key

_UNBOUNDED = 2**63 - 1


class ListStorage(Storage):
    """A Python list of rows of any type, without a schema.

    A write copies tensors, TensorDicts and arrays, also inside dicts, lists and tuples. Other
    objects are stored without a copy. A batch is a list of rows. The buffer stacks tensors,
    TensorDicts, arrays and numbers. Other objects need a ``collate_fn``. Reads and writes take one
    Python step per row.

    Args:
        max_size: capacity in rows; ``None`` for 2^63 - 1.
        device: device to which a write moves tensors and TensorDicts.

    Example:
        >>> from replaykit import ListStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=ListStorage(10), collate_fn=list)
        >>> _ = rb.extend(["left", "right"])
        >>> rb[:], rb[1]
        (['left', 'right'], 'right')
    """

    @checked_keywords
    def __init__(
        self, max_size: int | None = None, *, device: Any = None, compilable: bool = False
    ) -> None:
        super().__init__(_UNBOUNDED if max_size is None else max_size)
        self._device = None if device is None else as_device(device)
        self._items: list[Any] = []
        # The ends of episodes that no flag shows. A storage that indexes episodes may load them.
        self._cuts = CutMarks()

    @property
    def device(self) -> torch.device | str:
        return torch.device("cpu") if self._device is None else self._device

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(len={len(self)}, max_size={self.max_size})"

    # -- writing ------------------------------------------------------------------------------

    def prepare(
        self,
        data: Any,
        *,
        single: bool = False,
        time_dim: int = 0,
        optional: Collection[Path] = (),
    ) -> list[Any]:
        """Return copies of the elements of ``data`` along ``time_dim``, as a list.

        Raises:
            SchemaError: the data is a single row, without that dimension.
            TypeError: the data is not a list, tuple, range, set, array, tensor, TensorDict or
                tensorclass.
        """
        if single:
            return [self._owned(data)]
        if is_tensordict(data) or is_tensorclass(data) or isinstance(data, torch.Tensor):
            dims = data.ndim if isinstance(data, torch.Tensor) else data.batch_dims
            _check_batch(data, dims, time_dim)
            # torch cannot unbind a dimension of size 0.
            return list(self._owned(data).unbind(time_dim)) if data.shape[time_dim] else []
        if isinstance(data, np.ndarray):
            _check_batch(data, data.ndim, time_dim)
            data = np.moveaxis(data, time_dim, 0)
        if isinstance(data, (list, tuple, range, set, frozenset, np.ndarray)):
            return [self._owned(row) for row in data]
        raise TypeError(
            "expected a list, tuple, range, set, ndarray, tensor, TensorDict or tensorclass whose "
            f"elements are the rows, got {type(data).__name__}; add() stores it as one row"
        )

    def batch_of_one(self, data: Any, dim: int) -> Any:
        if isinstance(data, torch.Tensor) or is_tensordict(data) or is_tensorclass(data):
            return data.unsqueeze(dim)
        return [data]

    def _owned(self, item: Any) -> Any:
        if is_tensordict(item):
            item = _normalised(item)
        elif type(item) is dict:
            fields = {key: self._owned(value) for key, value in item.items()}
            return fields if any(fields[key] is not item[key] for key in item) else item
        elif type(item) in (list, tuple):
            parts = [self._owned(part) for part in item]
            changed = any(new is not old for new, old in zip(parts, item, strict=True))
            return type(item)(parts) if changed else item
        elif not (is_tensorclass(item) or isinstance(item, torch.Tensor)):
            return item.copy() if isinstance(item, np.ndarray) else item
        copied = clone(item.detach())
        return copied if self._device is None else copied.to(self._device)

    def write(self, slots: torch.Tensor, rows: list[Any], kept: torch.Tensor | slice) -> None:
        picked = rows[kept] if isinstance(kept, slice) else [rows[row] for row in kept.tolist()]
        # A batch longer than the capacity may begin at any slot, because it fills every slot.
        fresh = max(slots.tolist(), default=-1) + 1 - len(self._items)
        self._items.extend([None] * max(fresh, 0))
        for slot, item in zip(slots.tolist(), picked, strict=True):
            self._items[slot] = item

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Write one object at a slot, or a batch at any index that is not an int.

        Raises:
            RuntimeError: a write would leave an empty slot, or a slot is beyond the capacity.
            ValueError: the numbers of rows and slots differ.
        """
        rows = self.prepare(data, single=isinstance(cursor, int))
        with self.lock:
            try:
                slots = self._slots_at(cursor, rows)
            except IndexError as error:
                raise RuntimeError(f"cannot write beyond the capacity: {error}") from None
            if len(slots) != len(rows):
                raise ValueError(f"expected {len(slots)} rows for as many slots, got {len(rows)}")
            end = len(self._items)
            are_new = set_cursor or not end
            for slot in slots.tolist():
                if slot > end or (slot == end and not are_new):
                    raise RuntimeError(f"expected a position up to {end}, got {slot}")
                end = max(end, slot + 1)
            if not are_new:
                self.ledger.log.edit(slots.numpy())
                self.write(slots, rows, slice(None))
            elif len(slots):
                self.place(slots, rows, move_cursor=set_cursor)
                self.notify(slots)

    def edit(self, index: Any, value: Any, *, time_dim: int = 0) -> None:
        """Replace stored rows.

        Raises:
            IndexError: rows that are not stored.
            ValueError: the numbers of rows and slots differ.
        """
        with self.lock:
            at = as_index(index, len(self))
            rows = self.prepare(value, single=isinstance(at, int))
            slots = as_slots(at, len(self))
            if len(slots) != len(rows):
                raise ValueError(f"expected {len(slots)} rows for as many slots, got {len(rows)}")
            self.ledger.log.edit(slots.numpy())
            self.write(slots, rows, slice(None))

    def edit_columns(self, values: Mapping[Path, torch.Tensor]) -> None:
        """Set keys of all rows, which must be TensorDicts or dicts of tensors.

        Args:
            values: the values ``[N, ...]`` by path. Rows are along the same dimension as in
                ``rb[:]``.

        Raises:
            RuntimeError: the rows have no keys.
            SchemaError: the number of values is not the number of rows.

        If it raises, nothing has changed.
        """
        with self.lock:
            rows = list(self._items)
            for path, value in values.items():
                parts = self._per_row(path, value, rows)
                rows = [_with_key(row, path, part) for row, part in zip(rows, parts, strict=True)]
            rows = [self._owned(row) for row in rows]
            self.ledger.log.edit(None, values)
            self.write(arange(len(rows)), rows, slice(None))

    def _per_row(self, path: Path, value: torch.Tensor, rows: list[Any]) -> Sequence[Any]:
        dim = self._dim(rows) if rows else 0
        if value.ndim <= dim or value.shape[dim] != len(rows):
            raise SchemaError(
                f"key {format_key(path)}: expected {len(rows)} values along dimension {dim}, got "
                f"shape {list(value.shape)}"
            )
        return value.unbind(dim) if rows else ()

    def _dim(self, rows: list[Any]) -> int:
        """Return the dimension along which a batch stacks these rows."""
        return 0

    # -- reading ------------------------------------------------------------------------------

    def get(self, index: Any) -> Any:
        """Return the object at an int, or a list of objects for any other index.

        Raises:
            IndexError: rows that are not stored.
        """
        with self.lock:
            at = as_index(index, len(self))
            if not isinstance(at, torch.Tensor):
                return self._items[at]
            if at.ndim != 1:
                raise IndexError(
                    f"expected an index of one dimension for a list, got shape {list(at.shape)}"
                )
            return [self._items[row] for row in at.tolist()]

    def read(self, index: torch.Tensor, *, own: bool = True) -> Any:
        """Return a list of copies, or with ``own=False`` of the stored objects."""
        with self.lock:
            rows = self.get(index)
        return [copy_item(row) for row in rows] if own else rows

    def collate(self, rows: Any) -> Any:
        """Stack rows that are tensors, TensorDicts, arrays or numbers.

        Rows that are dicts or tuples of these are stacked value by value.

        Raises:
            TypeError: the rows have other types.
            ValueError: the rows cannot be stacked, or there are none.
        """
        if not len(rows):
            raise ValueError("expected at least one row to stack, got none")
        first = rows[0]
        if isinstance(first, torch.Tensor) or is_tensordict(first) or is_tensorclass(first):
            try:
                return torch.stack(rows)
            except (RuntimeError, TypeError, AttributeError) as error:
                raise ValueError(
                    f"the rows differ and cannot be stacked ({_difference(rows) or error}); use "
                    "LazyStackStorage for TensorDicts, or give the buffer a collate_fn"
                ) from None
        try:
            numbers = from_numbers(rows)
        except SchemaError as error:
            raise ValueError(
                f"the rows differ and cannot be stacked ({error}); give the buffer a collate_fn"
            ) from None
        if numbers is not None:
            return numbers
        if all(isinstance(row, np.ndarray) for row in rows):
            return torch.from_numpy(np.stack(rows))
        if type(first) is dict and all(type(r) is dict and r.keys() == first.keys() for r in rows):
            return {key: self.collate([row[key] for row in rows]) for key in first}
        if type(first) is tuple and all(type(r) is tuple and len(r) == len(first) for r in rows):
            return tuple(self.collate(list(parts)) for parts in zip(*rows, strict=True))
        raise TypeError(
            "expected rows that are tensors, TensorDicts, arrays or numbers, or dicts or tuples "
            f"of them that have the same keys, got {type(first).__name__}; give the buffer a "
            "collate_fn"
        )

    def contains(self, item: Any) -> bool | torch.Tensor:
        """Return whether rows are stored: a bool for an int, bools for a tensor.

        Raises:
            TypeError: ``item`` is neither an int nor an integer tensor.
        """
        return is_stored(item, len(self))

    def clear(self) -> None:
        """Release all objects."""
        self._items.clear()

    @contextlib.contextmanager
    def resized(self, max_size: int, rows: torch.Tensor | None) -> Iterator[None]:
        with self._undone_on_error():
            if rows is not None:
                self._items = [self._items[row] for row in rows.tolist()]
            self.max_size = max_size
            self.ledger.resize(max_size, rows)
            yield

    # -- state --------------------------------------------------------------------------------

    def content(self) -> Content:
        return Content.of_items(self._items)

    def check_content(self, content: Content) -> list[Any]:
        if content.lanes:
            raise SchemaError(
                f"expected rows of a storage with ndim=1, got ndim={len(content.lanes) + 1}"
            )
        return [self._owned(item) for item in content.items()]

    def load_content(self, content: Content, target: Any, rows: torch.Tensor | None) -> None:
        self._items = target if rows is None else [target[row] for row in rows.tolist()]

    def state_dict(self) -> dict[str, Any]:
        """Return the rows, with copies of tensors and TensorDicts; share other objects."""
        with self.lock:
            items = [to_plain(copy_item(item)) for item in self._items]
        return {"_storage": items, "initialized": True, "_len": len(items)}

    def content_of(self, state_dict: dict[str, Any]) -> Content:
        """Read the rows of a state dict.

        Raises:
            ValueError: an entry is missing or contradicts another one.
        """
        state = decode_state(RowsState, state_dict, "the state of a storage")
        items = [] if state._storage is None else state.rows(_rows_of)
        if len(items) != state._len:
            raise ValueError(f"expected {state._len} rows, got {len(items)}")
        order = torch.full((len(items),), -1, device="cpu")
        # check_content copies tensors, but not always the containers that hold them.
        plain = (copy_item(i) if isinstance(i, (dict, list, tuple)) else i for i in items)
        return Content(len(items), torch.Size(), (), order, tuple(plain))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._load_rows(self.content_of(state_dict))

    # -- episodes -----------------------------------------------------------------------------

    def resume(self, *, over: bool) -> None:
        if self.ledger.length:
            newest = np.array(
                [int(self.ledger.positions(as_slots(self.ledger.newest, self.max_size)))]
            )
            if over:
                self._cuts.add(newest, RESTORED, 0)
            else:
                self._cuts.remove(newest, RESTORED)

    def episode_state(self) -> dict[str, Any] | None:
        marks, codes = self._cuts.numbers.tolist(), self._cuts.codes.tolist()
        if not marks:
            return None
        return {"marks": marks, "codes": codes, "heads": None, "root_flags": True}

    def restore_episodes(
        self, state: dict[str, Any] | None, old: Ledger, rows: torch.Tensor | None
    ) -> None:
        self._cuts = CutMarks()
        if state is not None and self.ledger.length:
            marks, codes = (np.array(state[name], np.int64) for name in ("marks", "codes"))
            there, now = MovedPositions(old, self.ledger, rows).find(marks)
            self._cuts = CutMarks(now.tolist(), codes[there].tolist())
        self.resume(over=True)  # no episode spans a restart

    def __getstate__(self) -> dict[str, Any]:
        if multiprocessing.context.get_spawning_popen() is not None:
            raise RuntimeError(
                f"a {type(self).__name__} cannot be handed to a spawned process: its rows would "
                "be copied and the copies diverge; use a tensor or memmap storage"
            )
        with self.lock:
            state = super().__getstate__()
            return {**state, "_items": list(self._items)}


def _difference(rows: Sequence[Any]) -> str:
    """Describe how the types or shapes of rows differ; empty if they do not."""
    kinds = sorted({type(row).__name__ for row in rows})
    if len(kinds) > 1:
        return f"expected one kind of rows, got {' and '.join(kinds)}"
    shapes = sorted({tuple(row.shape) for row in rows})
    if len(shapes) > 1:
        return f"expected one shape of rows, got {' and '.join(str(list(s)) for s in shapes[:3])}"
    return ""


def _with_key(row: Any, path: Path, value: torch.Tensor) -> Any:
    """Return a row with another value under a key; the given row does not change."""
    if is_tensordict(row):
        return row.copy().set(path, value)
    if is_tensorclass(row) and path[0] in type(row).__dataclass_fields__:
        return row.copy().set(path, value)
    if type(row) is dict:
        inner = value if len(path) == 1 else _with_key(row.get(path[0], {}), path[1:], value)
        return {**row, path[0]: inner}
    raise RuntimeError(
        f"key {format_key(path)}: expected rows that are TensorDicts or dicts, got a "
        f"{type(row).__name__}"
    )


def _normalised(item: TensorDictBase) -> TensorDictBase:
    reserved = [key for key in RESERVED_KEYS if item.get(key, None) is not None]
    flat = [
        path
        for path in FLAG_KEYS
        if isinstance(flag := lookup(item, path), torch.Tensor) and flag.ndim == item.batch_dims
    ]
    if reserved:
        item = item.exclude(*reserved)
    if flat:
        item = item.copy()
        for path in flat:
            item.set(path, item.get(path).unsqueeze(-1))
    return item


def _rows_of(stored: Any) -> list[Any]:
    return stored if isinstance(stored, list) else list(stored.unbind(0))


def _check_batch(data: Any, dims: int, dim: int) -> None:
    if dims <= dim:
        raise SchemaError(
            f"expected rows along dimension {dim}, got a {type(data).__name__} of shape "
            f"{list(data.shape)}; add() stores one row"
        )


def copy_item(item: Any) -> Any:
    """Return a copy of a tensor, TensorDict or array, also in lists, tuples and dicts.

    Any other object is returned as it is.
    """
    if isinstance(item, torch.Tensor) or is_tensordict(item) or is_tensorclass(item):
        return clone(item)
    if type(item) is dict:
        return {key: copy_item(value) for key, value in item.items()}
    if type(item) in (list, tuple):
        return type(item)(copy_item(value) for value in item)
    return item.copy() if isinstance(item, np.ndarray) else item


class LazyStackStorage(ListStorage):
    """A list of TensorDicts whose batches are lazily stacked TensorDicts.

    Rows may differ in keys and in feature shapes. If some rows of a batch lack a key, the lazy
    stack hides that key. The rows that have the key still show it.

    Args:
        max_size: capacity in rows; ``None`` for 2^63 - 1.
        stack_dim: dimension along which batches are stacked; negative values count from the end.
        device: device to which a write moves TensorDicts.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from replaykit import LazyStackStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyStackStorage(10))
        >>> for length in (2, 3):
        ...     _ = rb.add(TensorDict({"x": torch.ones(length)}, []))
        >>> [row["x"].tolist() for row in rb[:].unbind(0)]
        [[1.0, 1.0], [1.0, 1.0, 1.0]]
    """

    rows_have_batches = True  # `add` takes a row with batch dimensions without a warning

    @checked_keywords
    def __init__(
        self,
        max_size: int | None = None,
        *,
        stack_dim: int = 0,
        device: Any = None,
        compilable: bool = False,
    ) -> None:
        super().__init__(max_size, device=device)
        self.stack_dim = stack_dim

    def prepare(
        self,
        data: Any,
        *,
        single: bool = False,
        time_dim: int = 0,
        optional: Collection[Path] = (),
    ) -> list[Any]:
        """Return copies of the rows as a list; TypeError if a row is not a TensorDict."""
        rows = super().prepare(data, single=single, time_dim=time_dim, optional=optional)
        for row in rows:
            if not (is_tensordict(row) or is_tensorclass(row)):
                raise TypeError(
                    f"expected rows that are TensorDicts, got {type(row).__name__}; "
                    "ListStorage takes any object"
                )
        return rows

    def get(self, index: Any) -> Any:
        """Return the row at an int, or a lazy stack for any other index.

        If no row is selected, the result is an empty list.
        """
        rows = super().get(index)
        return self._stacked(rows) if isinstance(rows, list) and rows else rows

    def read(self, index: torch.Tensor, *, own: bool = True) -> Any:
        """Return a lazy stack of copies."""
        with self.lock:
            rows = ListStorage.get(self, index)
        return self._stacked([copy_item(row) for row in rows])

    def _stacked(self, rows: list[Any]) -> Any:
        """Return the rows as one lazy stack; ValueError if they cannot be stacked."""
        try:
            return lazy_stack(rows, self._dim(rows))
        except RuntimeError as error:
            found = sorted({tuple(row.batch_size) for row in rows})
            raise ValueError(
                "expected rows with equally many batch dimensions, got batch sizes "
                f"{' and '.join(str(list(size)) for size in found[:3])}; use a ListStorage with a "
                "collate_fn for rows that cannot be stacked"
            ) from error

    def collate(self, rows: Any) -> Any:
        """Return the lazy stack unchanged."""
        return rows

    def _dim(self, rows: list[Any]) -> int:
        return self.stack_dim if self.stack_dim >= 0 else self.stack_dim + rows[0].batch_dims + 1
