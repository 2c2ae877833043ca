"""Check the arguments of slice samplers: number, length, and ends of episodes."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch

from replaykit.episodes import BoundaryRule, EpisodeIndex
from replaykit.episodes.boundaries import CONTINUES, SWITCHED
from replaykit.errors import NoEpisodeColumns
from replaykit.keywords import one_of, whole_number
from replaykit.samplers.window_forms import ALIGNS, PADS, SHORTS, WindowForm
from replaykit.schema import Schema
from replaykit.storages import Storage
from replaykit.storages.column_storage import ColumnStorage
from replaykit.storages.memory import by_value, from_value
from replaykit.structure import Branch, Path
from replaykit.ted import EPISODE_KEYS, format_key, unravel


class SliceSize:
    """Number and length of the slices of a batch. The user gives one of the two."""

    def __init__(self, num_slices: int | None, slice_len: int | None) -> None:
        if (num_slices is None) == (slice_len is None):
            raise TypeError(
                "Either num_slices or slice_len must be not None, and not both. Got "
                f"num_slices={num_slices} and slice_len={slice_len}."
            )
        self.num_slices = None if num_slices is None else whole_number("num_slices", num_slices, 1)
        self.slice_len = None if slice_len is None else whole_number("slice_len", slice_len, 1)
        self.known: int = self.slice_len or self.num_slices  # type: ignore[assignment]

    def of(self, batch_size: int) -> tuple[int, int]:
        """Return number and length of a batch's slices. RuntimeError if they do not fit."""
        known = self.known
        other, rest = divmod(batch_size, known)
        if rest or not other:
            name = "slice_len" if self.slice_len else "num_slices"
            what = "slice length" if self.slice_len else "number of slices"
            raise RuntimeError(
                f"The batch-size must be divisible by the {what}, got batch_size={batch_size} and "
                f"{name}={known}"
            )
        return (other, known) if self.slice_len else (known, other)

    def __repr__(self) -> str:
        if self.slice_len:
            return f"slice_len={self.slice_len}"
        return f"num_slices={self.num_slices}"


class Boundaries:
    """The ends of episodes for one sampler, given by columns or by tensors.

    Args:
        end_key, end_keys, traj_key, ends, trajectories: as in ``SliceSampler``.

    Raises:
        RuntimeError: arguments exclude each other.
        TypeError, ValueError: an argument is not a key, or not a 1-D tensor.
    """

    def __init__(
        self,
        end_key: Any = None,
        end_keys: Any = None,
        traj_key: Any = None,
        ends: Any = None,
        trajectories: Any = None,
    ) -> None:
        given = {
            "end_key": end_key,
            "end_keys": end_keys,
            "traj_key": traj_key,
            "ends": ends,
            "trajectories": trajectories,
        }
        named = [name for name, value in given.items() if value is not None]
        for pair in (("`end_key`", "`end_keys`"), ("trajectories", "ends")):
            if {name.strip("`") for name in pair} <= set(named):
                raise RuntimeError(
                    f"{' and '.join(pair)} are exclusive arguments: expected one, got both"
                )
        if len(named) > 1 and {"ends", "trajectories"} & set(named):
            static = "trajectories" if ends is None else "ends"
            raise RuntimeError(
                f"`{static}` and `end_key`, `end_keys` or `traj_key` are exclusive arguments: it "
                f"replaces the keys of columns, got {named}"
            )
        flags = (unravel(end_key),) if end_key is not None else _keys("end_keys", end_keys)
        self.rule = BoundaryRule(flags=flags, ids=_keys("traj_key", traj_key), strict=True)
        self._named = named
        self._used = self.rule
        self._said_missing: list[Path] = []
        self._ends = None
        if ends is not None:
            self._ends = _vector("ends", ends) != 0
        elif trajectories is not None:
            ids = _vector("trajectories", trajectories)
            self._ends = ids != ids.roll(-1)  # in a full ring, the first slot follows the last one
        # The index that these rules give. The storage has only a weak reference to it.
        self._index: EpisodeIndex | None = None
        self._pinned: tuple[int, int] | None = None
        self._home: weakref.ref[Storage] | None = None
        # The last schema whose rows were TensorDicts.
        self._schema: Schema | None = None

    @property
    def end_key(self) -> Any:
        """The single flag that ends episodes; None if other arguments replace it."""
        if self.rule.flags is not None and "end_key" in self._named:
            return _as_written(self.rule.flags[0])
        others = {"end_keys", "ends", "trajectories"} & set(self._named)
        return None if others else ("next", "done")

    @property
    def end_keys(self) -> tuple[Any, ...] | None:
        """The flags that were given as a list; None without a list."""
        if self.rule.flags is None or "end_keys" not in self._named:
            return None
        return tuple(_as_written(path) for path in self.rule.flags)

    @property
    def traj_key(self) -> Any:
        """The given key or keys, or else the first default id key that the storage has."""
        if self.rule.ids is not None:
            keys = tuple(_as_written(path) for path in self.rule.ids)
            return keys if len(keys) > 1 else (keys or (None,))[0]
        storage = None if self._home is None else self._home()
        schema = self._schema if storage is None else storage.schema
        if schema is None or self._ends is not None:
            return None
        return next((_as_written(path) for path in EPISODE_KEYS if path in schema.leaves), None)

    def without_flags(self) -> Boundaries:
        """Return boundaries at changes of the same ids only, and at ends without a flag.

        Raises:
            ValueError: tensors give the ends.
        """
        if self._ends is not None:
            raise ValueError(
                "expected cross=True with columns that end episodes, got ends or trajectories"
            )
        other = Boundaries(end_keys=())
        other.rule = replace(self.rule, flags=(), strict=False)
        return other

    def attach(self, storage: Storage) -> None:
        """Attach to a storage. The tensors of ends describe the rows stored now."""
        self._index = None
        self._pinned = None
        self.rejoin(storage)
        if self._ends is not None and len(storage):
            self._pinned = _state(storage)

    def rejoin(self, storage: Storage) -> None:
        """Attach to a copy of the storage, with the same rows."""
        self._home = weakref.ref(storage)

    def index(self, storage: Storage) -> EpisodeIndex:
        """Return the episodes by these rules, up to date. The caller holds the lock.

        Raises:
            RuntimeError: the rows are not TensorDicts, or they have changed since their ends were
                given.
            NoEpisodeColumns: requested columns are not stored.
        """
        schema = storage.schema
        try:
            if schema is None or schema is not self._schema:
                schema = _require_tensordicts(storage).require().schema
                self._used = self.rule if self._ends is not None else self._rule_for(schema)
                self._schema = schema
                self.rejoin(storage)
            columns = cast(ColumnStorage, storage)
            if self._ends is not None:
                return self._static(columns)
            index = columns.indexes.of(self._used) if self._named else columns.episodes
            if index is not self._index:
                self._used.bind(schema)  # the storage's rule is less strict
                self._index = index
        except KeyError as error:
            raise NoEpisodeColumns(self._found_none(error.args[0], schema)) from None
        return index

    def _found_none(self, text: str, schema: Schema | None) -> str:
        """Return the error text for missing columns, with the words that TorchRL uses."""
        keys = self.end_keys
        stored = () if schema is None else schema.leaves
        if keys is None or any(path in stored for path in self.rule.flags or ()):
            return text
        return f"None of the end_keys {keys} could be found in the storage: {text}"

    def _rule_for(self, schema: Schema) -> BoundaryRule:
        """Return the rule without ids that the data lacks, and warn once.

        If the data has no flags that end episodes, return the rule unchanged.
        """
        missing = [path for path in self.rule.ids or () if path not in schema.leaves]
        if not missing:
            return self.rule
        kept = tuple(path for path in self.rule.ids or () if path not in missing)
        other = replace(self.rule, ids=kept)
        bare = replace(other, ids=(), strict=False)
        flags = bare.bind(schema).flags if self.rule.flags != () else ()
        if not flags:
            return self.rule  # the error of this rule names the missing columns
        if self._said_missing != missing:
            self._said_missing = missing
            names = ", ".join(map(format_key, missing))
            warnings.warn(
                f"the data has no {names} (traj_key); episodes are separated by "
                f"{', '.join(map(format_key, flags))}",
                stacklevel=2,
            )
        return other

    def _static(self, storage: ColumnStorage) -> EpisodeIndex:
        assert self._ends is not None
        name = self._named[0]
        if storage.ndim > 1:
            raise RuntimeError(f"{name} describe rows of one stream, got a storage with lanes")
        if self._pinned is None:
            self._pinned = _state(storage)
            self._home = weakref.ref(storage)
        if len(self._ends) != len(storage):
            raise RuntimeError(
                f"expected {name} for the {len(storage)} stored rows, got {len(self._ends)}"
            )
        if self._pinned != _state(storage):
            raise RuntimeError(f"{name} describe the rows at attachment: rows were written since")
        index = self._index
        if not isinstance(index, StaticEpisodes) or index.is_old or index._storage is not storage:
            index = self._index = StaticEpisodes(storage, self._ends)
        return index

    def __getstate__(self) -> dict[str, Any]:
        # Counts of writes belong to the storage. They may restart after this object is loaded.
        home = None if self._home is None else self._home()
        old = self._pinned is not None and home is not None and self._pinned != _state(home)
        pinned = (-1, -1) if old else None
        return by_value({**self.__dict__, "_index": None, "_home": None, "_pinned": pinned})

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(from_value(state))


class StaticEpisodes(EpisodeIndex):
    """The index of the current rows with given ends, valid until the next write.

    Args:
        storage: a storage without lanes.
        ends: bool ``[N]``, True at the last rows of episodes, in slot order. If the ring has
            wrapped, the first slot follows the last slot.

    Cost: O(N).
    """

    def __init__(self, storage: ColumnStorage, ends: torch.Tensor) -> None:
        ledger = storage.ledger
        self.rule, self.key = BoundaryRule(flags=(), ids=()), None
        self._storage, self._columns = storage, storage.require()
        self.bound = self.rule.bind(self._columns.schema)
        self.slots = self._columns.slots
        start = ledger.cursor if ledger.length == self.slots and ledger.in_order else 0
        self._use(self._new(1, start=start))
        codes = np.where(ends.numpy(), SWITCHED, CONTINUES).astype(np.uint8)
        self._streams.append(np.roll(codes, -start)[:, None])
        self._noted, self._changes = ledger.next_position, ledger.changes
        self._edited, self._ordered_from, self._versions, self.rebuilt = False, 0, 0, 0

    @property
    def is_old(self) -> bool:
        """True if rows were written that the index does not have."""
        ledger = self._storage.ledger
        return ledger.next_position != self._noted or ledger.changes != self._changes


def _state(storage: Storage) -> tuple[int, int]:
    """Return two numbers that change with every write."""
    return storage.ledger.next_position, storage.ledger.changes


def _require_tensordicts(storage: Storage) -> ColumnStorage:
    if not isinstance(storage, ColumnStorage):
        raise RuntimeError(
            "Could not get a tensordict out of the storage, which is required for SliceSampler to "
            "compute the trajectories: expected TensorDicts in a tensor or memmap storage, got a "
            f"{type(storage).__name__}"
        )
    root = storage.require().schema.root
    if not isinstance(root, Branch) or root.kind != "tensordict":
        kind = root.kind if isinstance(root, Branch) else "tensor"
        raise RuntimeError(
            f"slices need TensorDicts, got rows of kind {kind}; write TensorDicts, for example "
            "from replaykit.transition()"
        )
    return storage


def _keys(name: str, keys: Any) -> tuple[Path, ...] | None:
    """Return the paths of one key or several; None: the default, ``()``: no keys."""
    if keys is None:
        return None
    if isinstance(keys, list) or (name == "end_keys" and isinstance(keys, (tuple, set))):
        return tuple(unravel(key) for key in keys)
    if keys == ():
        return ()
    if isinstance(keys, (str, tuple)):
        return (unravel(keys),)
    raise TypeError(f"expected {name} as a key or several of them, got {keys!r}")


def _as_written(path: Path) -> Any:
    """Return a key in the form in which users write it: a string if it has one part."""
    return path if len(path) > 1 else path[0]


def _vector(name: str, value: Any) -> torch.Tensor:
    tensor = torch.as_tensor(value, device="cpu").detach()
    if tensor.ndim != 1:
        raise ValueError(f"expected {name} as a 1-D tensor, got shape {list(tensor.shape)}")
    return tensor.clone()


def checked_span(span: Any) -> tuple[int | bool, int | bool]:
    """Return the left and the right span.

    Raises:
        TypeError: the span is not a bool, an int or a pair of these.
        ValueError: a number is negative.
    """
    both = span if isinstance(span, (tuple, list)) else (span, span)
    if len(both) != 2 or not all(isinstance(one, (bool, int, np.integer)) for one in both):
        raise TypeError(f"expected span as a bool, an int or two of them, got {span!r}")
    if any(one < 0 for one in both):
        raise ValueError(f"expected span of at least 0, got {span!r}")
    left, right = (one if isinstance(one, bool) else int(one) for one in both)
    return left, right


def checked_form(
    *,
    span: Any = False,
    strict_length: bool = True,
    pad_output: bool = False,
    pad: str | None = None,
    short: str | None = None,
    align: str = "left",
) -> WindowForm:
    """Return the form of windows. Raises ValueError for contradictory arguments."""
    hang = checked_span(span)
    one_of("align", align, ALIGNS)
    if pad_output and strict_length:
        raise ValueError(
            "pad_output=True is incompatible with strict_length=True, which excludes short slices; "
            "set strict_length=False"
        )
    if pad_output and any(hang):
        raise ValueError("expected span or pad_output, got both: spanning slices are never padded")
    if pad is None:
        if short is not None or align != "left":
            raise ValueError("short= and align= describe how windows are padded: they need pad=")
        return WindowForm(span=hang, strict=bool(strict_length), repeat=bool(pad_output))
    one_of("pad", pad, PADS)
    if any(hang) or pad_output:
        raise ValueError(f"expected pad={pad!r} or span or pad_output, got more than one of them")
    if not strict_length:
        raise ValueError("with pad=, short= decides about short episodes: leave strict_length out")
    short = ("exclude" if pad == "none" else "whole") if short is None else short
    one_of("short", short, SHORTS)
    return WindowForm(pad=pad, short=short, align=align)


def checked_pad_value(pad_value: Any) -> dict[Path, Any]:
    """Return padding values by key; the value for all other keys is under ``()``.

    Raises:
        TypeError: the value is not a number or a dict of numbers.
    """
    values = pad_value if isinstance(pad_value, Mapping) else {(): pad_value}
    found = {key if key == () else unravel(key): value for key, value in values.items()}
    for value in found.values():
        if not isinstance(value, (bool, int, float, complex, np.number, np.bool_)):
            raise TypeError(f"expected pad_value as a number or numbers by key, got {value!r}")
    return {(): 0, **found}
