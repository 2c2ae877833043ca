"""Convert rows of whole trajectories between three forms.

The first form is flat rows ``[N]``, as in buffers. The second is a list of ``[n_i]``. The third is
padded ``[E, T]`` with a ``mask``, as for sequence models. Values are only moved, never changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from tensordict import pad

from replaykit._compat import LazyStackedTensorDict, TensorDict, as_tensor, is_tensordict, lookup
from replaykit.keywords import one_of, whole_number
from replaykit.structure import Node, Path, Rules, build, flatten
from replaykit.ted import (
    DEFAULT_DONE_KEYS,
    EPISODE_KEYS,
    FLAG_KEYS,
    Key,
    end_flags,
    format_key,
    unravel,
)

MASK_KEY: Final[Key] = ("mask",)
_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Dtypes by item size, in which leaves are indexed bit for bit. Torch cannot index all dtypes."""


def padded(
    node: Node,
    rows: Mapping[Path, torch.Tensor],
    counts: torch.Tensor,
    width: int,
    pads: Mapping[Path, Any],
    device: torch.device | None,
) -> tuple[TensorDict, torch.Tensor]:
    """Pad rows ``[N]`` to ``[E, width]``; add the mask; return both."""
    batch = torch.Size([len(counts), width])
    steps = torch.arange(width, device=counts.device)
    mask = steps < counts[:, None]
    slots = mask.view(-1).nonzero().squeeze(-1)
    leaves = {}
    for path, leaf in rows.items():
        shape = (batch.numel(), *leaf.shape[1:])
        pad = pads.get(path, 0)
        out = torch.zeros(shape, dtype=leaf.dtype, device=leaf.device)
        if pad != 0:
            out.fill_(pad)
        _bits(out).index_copy_(0, slots.to(leaf.device), _bits(leaf))
        leaves[path] = out.view(*batch, *leaf.shape[1:])
    padded: TensorDict = build(node, leaves, batch, device)
    return padded.set(MASK_KEY, mask), mask


def picked(leaf: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Return the entries at ``slots`` of the two leading dimensions, flattened."""
    entries = _bits(leaf).flatten(0, 1)
    return entries.index_select(0, slots.to(leaf.device)).view(leaf.dtype)


def _bits(leaf: torch.Tensor) -> torch.Tensor:
    """Return a view in a dtype of the same size that torch can index."""
    return leaf.view(_BITS.get(leaf.dtype.itemsize, leaf.dtype))


def split_items(
    items: Any, added: Key | None, *, shortest: int
) -> tuple[Node, list[dict[Path, torch.Tensor]], list[int]]:
    """Return the first item's structure, the leaves of each item, and the lengths.

    Raise an error if items do not match, or have the key that will be ``added``.
    """
    if not isinstance(items, (list, tuple)):
        raise TypeError(f"items: expected a list of TensorDicts, got {type(items).__name__}")
    if not items:
        raise ValueError("items: expected at least one TensorDict, got none")
    node: Node | None = None
    tables: list[dict[Path, torch.Tensor]] = []
    for number, item in enumerate(items):
        check_rows(item, f"item {number}", shortest)
        here, leaves = flatten(item, 1)
        node = here if node is None else node
        if added is not None:
            refuse_own(leaves, added, f"item {number}")
        if tables:
            _check_alike(number, leaves, tables[0])
        tables.append(leaves)
    assert node is not None
    return node, tables, [item.batch_size[0] for item in items]


def check_rows(data: Any, name: str, shortest: int = 0) -> None:
    if not is_tensordict(data):
        raise TypeError(f"{name}: expected a TensorDict, got {type(data).__name__}")
    if data.batch_dims != 1:
        raise ValueError(f"{name}: expected batch size [n], got {list(data.batch_size)}")
    if data.batch_size[0] < shortest:
        raise ValueError(f"{name}: expected at least {shortest} row, got none")


def _check_alike(
    number: int, leaves: Mapping[Path, torch.Tensor], first: Mapping[Path, torch.Tensor]
) -> None:
    for path in first:
        if path not in leaves:
            raise KeyError(f"item {number} has no key {format_key(path)}, which item 0 has")
    for path, leaf in leaves.items():
        if path not in first:
            raise KeyError(f"item {number} has a key {format_key(path)}, which item 0 lacks")
        other = first[path]
        alike = leaf.shape[1:] == other.shape[1:] and leaf.dtype == other.dtype
        if not alike or leaf.device != other.device:
            raise ValueError(
                f"item {number}, key {format_key(path)}: expected {_described(other)} as in "
                f"item 0, got {_described(leaf)}"
            )


def _described(leaf: torch.Tensor) -> str:
    shape = ", ".join(["n", *map(str, leaf.shape[1:])])
    return f"shape [{shape}], {leaf.dtype} on {leaf.device}"


def refuse_own(leaves: Mapping[Path, Any], key: Key, name: str) -> None:
    if any(path[: len(key)] == key for path in leaves):
        raise ValueError(
            f"{name}: expected no key {format_key(key)}, which is to be added; rename or drop it"
        )


_LENGTHS: Final[Key] = ("lengths",)


def pad_collate(
    items: Sequence[Any],
    pad_value: Any = 0,
    pad_to: int | None = None,
    multiple_of: int | None = None,
    layout: str = "padded",
) -> TensorDict:
    """Pad ``B`` trajectories ``[n_i]`` to one batch ``[B, T]``.

    Use it as ``collate_fn=`` of a buffer or a loader whose rows are trajectories.

    Args:
        items: TensorDicts ``[n_i]``, ``n_i >= 1``, all with the same keys, feature shapes, dtypes
            and device. Or a lazy stack of them, as from a LazyStackStorage. Or a TensorDict ``[B,
            n]`` of trajectories of one length.
        pad_value: the value after the end of a trajectory. A number applies to every key except
            bools and flags, which are padded with ``False`` (0). Flags are ``done``, ``terminated``
            and ``truncated``, also under ``next``. A dict has a number per key. Keys that are not
            in the dict are padded with 0.
        pad_to: the padded length ``T``; None for the longest length.
        multiple_of: ``T`` is the longest length rounded up to a multiple of this.
        layout: "padded", or "jagged" for nested tensors without padding.

    Returns:
        With "padded", a TensorDict ``[B, T]`` in new memory, with ``mask``, bool ``[B, T]``, True
        at given rows. The mask depends only on the lengths, not on values. Every leaf keeps its
        dtype.

        With "jagged", a TensorDict ``[B]`` whose leaves are ``torch.nested`` tensors ``[B, n_i,
        *F]`` of layout ``torch.jagged``. It also has ``lengths``, a plain tensor int64 ``[B]``. All
        leaves share one ``offsets()``, int64 ``[B + 1]``, so that they can be combined. Their
        ``values()`` are the rows one after another.

        Tensors have no autograd history.

    Raises:
        TypeError: an item is not a TensorDict, or has a leaf that is not a tensor. Also if a length
            is not an integer, or a pad value is not a number.
        KeyError: an item does not have the keys of the first item, or ``pad_value`` has a key that
            the items lack.
        ValueError: ``items`` is empty, or an item has no rows or another batch size than ``[n]``.
            Also if feature shapes, dtypes or devices differ, a key ``mask`` (``lengths``) exists
            already, or a trajectory is longer than ``pad_to``. Also if ``pad_to`` and
            ``multiple_of`` are both given or below 1. Also if a dtype cannot hold its pad value, or
            a flag is not padded with ``False``. Also if ``layout`` is unknown, or "jagged" is
            combined with another argument.

    Cost: two copies of every value, a few calls per key, and a Python step per leaf of every item.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from replaykit import pad_collate
        >>> short = TensorDict({"x": torch.tensor([1.0, 0.0])}, [2])
        >>> long = TensorDict({"x": torch.tensor([2.0, 3.0, 4.0])}, [3])
        >>> batch = pad_collate([short, long], pad_value=-1)
        >>> batch["x"]
        tensor([[ 1.,  0., -1.],
                [ 2.,  3.,  4.]])
        >>> batch["mask"].sum(1)
        tensor([2, 3])
    """
    jagged = one_of("layout", layout, ("padded", "jagged")) == "jagged"
    pad_to = None if pad_to is None else whole_number("pad_to", pad_to, 1)
    multiple_of = None if multiple_of is None else whole_number("multiple_of", multiple_of, 1)
    if pad_to is not None and multiple_of is not None:
        raise ValueError(f"expected pad_to or multiple_of, not both; got {pad_to}, {multiple_of}")
    no_padding = pad_to is multiple_of is None and not isinstance(pad_value, Mapping)
    if jagged and not (no_padding and pad_value == 0):
        raise ValueError('layout="jagged": expected no pad_value, pad_to or multiple_of, got one')
    items = _unstacked(items)
    node, tables, lengths = split_items(items, _LENGTHS if jagged else MASK_KEY, shortest=1)
    if not jagged:
        width = _width(lengths, pad_to, multiple_of)
        pads = _pad_values(pad_value, tables[0])
    device = items[0].device
    rows = {path: torch.cat([table[path] for table in tables]) for path in tables[0]}
    counts = as_tensor(lengths, torch.int64)
    near = next(iter(rows.values())).device if rows else device
    if near is not None:
        counts = counts.to(near)
    if jagged:
        offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
        nested = {
            path: torch.nested.nested_tensor_from_jagged(leaf, offsets=offsets)
            for path, leaf in rows.items()
        }
        batch: TensorDict = build(node, nested, torch.Size([len(lengths)]), device)
        return batch.set(_LENGTHS, counts)
    batch, _ = padded(node, rows, counts, width, pads, device)
    return batch


def _unstacked(items: Any) -> Any:
    """Return the trajectories of a stack; return any other value unchanged."""
    if isinstance(items, LazyStackedTensorDict):
        return items.unbind(items.stack_dim)
    if is_tensordict(items) and items.batch_dims == 2:
        return items.unbind(0)
    return items


def _width(lengths: list[int], pad_to: int | None, multiple_of: int | None) -> int:
    longest = max(lengths)
    if multiple_of is not None:
        return -(-longest // multiple_of) * multiple_of
    if pad_to is None:
        return longest
    if longest > pad_to:
        raise ValueError(
            f"pad_to: expected at least the longest length, {longest} of item "
            f"{lengths.index(longest)}, got {pad_to}"
        )
    return pad_to


def _pad_values(given: Any, leaves: Mapping[Path, torch.Tensor]) -> dict[Path, Any]:
    """Return the pad value of each leaf."""
    if not isinstance(given, Mapping):
        return {
            path: _as_value(given, path, leaf.dtype)
            for path, leaf in leaves.items()
            if path not in FLAG_KEYS and leaf.dtype is not torch.bool
        }
    found = {}
    for key, value in given.items():
        path = unravel(key)
        if path not in leaves:
            known = ", ".join(sorted(format_key(path) for path in leaves))
            raise KeyError(f"pad_value: no key {format_key(path)}; there are {known}")
        found[path] = _as_value(value, path, leaves[path].dtype)
        if path in FLAG_KEYS and found[path] != 0:
            raise ValueError(f"pad_value: the flag {format_key(path)} must be padded with False")
    return found


def _as_value(value: Any, path: Path, dtype: torch.dtype) -> Any:
    """Return a pad value that a tensor of ``dtype`` can hold."""
    if not isinstance(value, (bool, int, float, complex)):
        raise TypeError(f"pad_value: expected a number or a dict of them, got {value!r}")
    fits = True
    if dtype is torch.bool:
        fits = value in (0, 1)
    elif dtype.is_complex:
        pass
    elif isinstance(value, complex):
        fits = False
    elif dtype.is_floating_point:
        info = torch.finfo(dtype)
        fits = value != value or abs(value) == float("inf") or info.min <= value <= info.max
    else:
        limits = torch.iinfo(dtype)
        fits = limits.min <= value <= limits.max and value == int(value)
    if not fits:
        raise ValueError(
            f"pad_value: key {format_key(path)} is {dtype}, which cannot hold {value!r}; "
            "pass a dict with a value per key"
        )
    return value


def find_ends(data: Any, end_keys: Any, traj_key: Any) -> torch.Tensor:
    """Return a mask of the last rows of trajectories, bool ``[N]``."""
    flags = _end_columns(data, end_keys)
    ids = _id_columns(data, traj_key)
    # With () for both arguments, data without any such column is one trajectory.
    if not flags and not ids and (end_keys is None or traj_key is None):
        defaults = [("next", name) for name in DEFAULT_DONE_KEYS]
        known = ", ".join(format_key(key) for key in (*defaults, *EPISODE_KEYS))
        raise KeyError(
            f"expected one of {known}, which end trajectories, got none; to take all rows as one "
            "trajectory, pass () for end_keys and traj_key"
        )
    count = data.batch_size[0]
    columns = [*flags.values(), *ids.values()]
    device = columns[0].device if columns else data.device or torch.device("cpu")
    ends = torch.zeros(count, dtype=torch.bool, device=device)
    if not count:
        return ends
    ends[-1] = True
    for column in flags.values():
        ends |= (column.reshape(count, -1) != 0).any(1).to(device)
    for column in ids.values():
        rows = column.reshape(count, -1)
        ends[:-1] |= (rows[1:] != rows[:-1]).any(1).to(device)
    return ends


def _end_columns(data: Any, given: Any) -> dict[Key, torch.Tensor]:
    if given is not None and not isinstance(given, (list, tuple)):
        raise TypeError(f"end_keys: expected a list of keys, got {given!r}")
    keys: Iterable[Key] = map(unravel, given or ())
    if given is None:
        keys = end_flags([key for key in FLAG_KEYS if lookup(data, key) is not None])
    keys = list(keys)
    found = _columns(data, "end_keys", keys)
    if given and not found:
        raise KeyError(f"end_keys: expected one of {', '.join(map(format_key, keys))}, got none")
    return found


def _id_columns(data: Any, given: Any) -> dict[Key, torch.Tensor]:
    if given is None:
        return _columns(data, "traj_key", EPISODE_KEYS)
    several = isinstance(given, list) or given == ()
    keys = [unravel(key) for key in (given if several else [given])]
    found = _columns(data, "traj_key", keys)
    for key in keys:
        if key not in found:
            raise KeyError(f"traj_key: no key {format_key(key)}")
    return found


def _columns(data: Any, argument: str, keys: Iterable[Key]) -> dict[Key, torch.Tensor]:
    """Return those of the columns that exist. Raises ValueError if one is not a tensor."""
    found = {key: value for key in keys if (value := lookup(data, key)) is not None}
    for key, value in found.items():
        if not isinstance(value, torch.Tensor):
            raise ValueError(
                f"{argument}: {format_key(key)}: expected a tensor, got {type(value).__name__}; "
                "pass several keys as a list; a tuple is one nested key"
            )
    return found


_IDS: Final[Key] = ("traj_ids",)


def split_trajectories(
    data: Any,
    *,
    end_keys: Sequence[Any] | None = None,
    traj_key: Any = None,
    as_list: bool = False,
) -> Any:
    """Split flat rows ``[N]`` into padded trajectories ``[E, T]``.

    A row ends its trajectory if one of its flags is set, if the next row has another id, or if it
    is the last row. ``replaykit.datasets`` returns data sets in this form with
    ``split_trajs=True``.

    Args:
        data: a TensorDict ``[N]`` of rows in time order, one trajectory after the other.
        end_keys: a list of keys of flags, any of which ends a trajectory. Absent keys are ignored.
            None for ``done``, ``terminated`` and ``truncated`` under ``next``, or at the root if
            none of them is under ``next``. ``()`` for no flags.
        traj_key: key of an id column, or a list of such keys. A change of id ends a trajectory.
            None for the keys ``("collector", "traj_ids")``, ``episode`` and ``seed`` that are
            present. ``()`` for no ids. If both arguments are ``()``, all rows are one trajectory.
        as_list: return a list of trajectories without padding.

    Returns:
        A TensorDict ``[E, T]`` in new memory without autograd history. ``T`` is the longest length.
        Padding is 0, or ``False`` in flags. Two keys are added. ``mask``, bool ``[E, T]``, is True
        at rows. ``traj_ids``, int64 ``[E, T]``, is the number of the trajectory, and 0 at padding.
        With ``as_list``, the result is a list of ``E`` TensorDicts ``[n_i]``, which are views of
        ``data`` without added keys.

        TorchRL's function of this name puts both keys under ``"collector"`` if there is such an
        entry. It uses either one ``done_key`` or ids to end trajectories, and adds no ids if there
        is an id column. This function keeps all keys of ``data``, including ids.

    Raises:
        TypeError: ``data`` is not a TensorDict, or has a leaf that is not a tensor; or ``end_keys``
            is not a list of keys.
        KeyError: ``traj_key`` or all of ``end_keys`` are absent; or there are neither flags nor
            ids, unless both arguments are ``()``.
        ValueError: the batch size is not ``[N]``, or a column of flags or ids is not a tensor.
            Without ``as_list``, also if a key ``mask`` or ``traj_ids`` exists already.

    Cost: one pass over flags and ids, one copy of every value, and memory for ``E * T`` rows. One
    very long trajectory among short ones makes the result large. With ``as_list``, values are not
    copied, and each leaf of a trajectory costs a Python step.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from replaykit import join_trajectories, split_trajectories
        >>> done = torch.tensor([0, 1, 0, 0, 1], dtype=torch.bool)
        >>> rows = TensorDict({"x": torch.arange(1, 6), "next": {"done": done}}, [5])
        >>> split = split_trajectories(rows)
        >>> split["x"]
        tensor([[1, 2, 0],
                [3, 4, 5]])
        >>> bool((join_trajectories(split) == rows).all())
        True
        >>> [len(one) for one in split_trajectories(rows, as_list=True)]
        [2, 3]
    """
    check_rows(data, "data")
    ends = find_ends(data, end_keys, traj_key)
    last = ends.nonzero().squeeze(-1)
    counts = torch.diff(last, prepend=last.new_full((1,), -1))
    if as_list:
        return list(data.split(counts.tolist())) if len(counts) else []
    node, rows = flatten(data, 1)
    for key in (MASK_KEY, _IDS):
        refuse_own(rows, key, "data")
    width = int(counts.max()) if len(counts) else 0
    split, mask = padded(node, rows, counts, width, {}, data.device)
    ids = torch.arange(len(counts), device=mask.device)
    return split.set(_IDS, ids[:, None] * mask)


def join_trajectories(data: Any, *, mask_key: Any = "mask", ids_key: Any = "traj_ids") -> Any:
    """Join trajectories to flat rows ``[N]``.

    This is the inverse of ``split_trajectories`` and ``pad_collate``. Values are restored exactly.

    Args:
        data: a TensorDict ``[E, T]`` with a mask, or a list of TensorDicts ``[n_i]`` with the same
            keys, feature shapes, dtypes and device.
        mask_key: key of the mask in a padded TensorDict, bool ``[E, T]``. It is True at rows, which
            may be in any position. The mask is dropped.
        ids_key: key of trajectory numbers in a padded TensorDict. If present, they are also
            dropped. None to keep all other keys.

    Returns:
        A TensorDict ``[N]`` in new memory without autograd history. Trajectories follow one
        another, and each is in order. Their ends are marked only by flags and ids among the keys.

    Raises:
        TypeError: ``data`` is neither a TensorDict nor a list of TensorDicts, or has a leaf that is
            not a tensor.
        KeyError: the mask is absent, or an item of the list does not have the keys of the first
            item.
        ValueError: the list is empty, a batch size is not ``[E, T]`` or ``[n]``, or the mask is not
            bool ``[E, T]``. Also if feature shapes, dtypes or devices of items differ.

    Cost: one copy of every value.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from replaykit import join_trajectories
        >>> mask = torch.tensor([[True, False], [True, True]])
        >>> padded = TensorDict({"x": torch.tensor([[1, 0], [2, 3]]), "mask": mask}, [2, 2])
        >>> join_trajectories(padded)["x"]
        tensor([1, 2, 3])
    """
    if isinstance(data, (list, tuple)):
        node, tables, lengths = split_items(data, None, shortest=0)
        rows = {path: torch.cat([table[path] for table in tables]) for path in tables[0]}
        return build(node, rows, torch.Size([sum(lengths)]), data[0].device)
    if not is_tensordict(data):
        raise TypeError(
            f"data: expected a TensorDict [E, T] or a list of them [n], got {type(data).__name__}"
        )
    if data.batch_dims != 2:
        raise ValueError(f"data: expected batch size [E, T], got {list(data.batch_size)}")
    path = unravel(mask_key)
    mask = lookup(data, path)
    if mask is None:
        raise KeyError(f"expected a mask of rows under {format_key(path)}, got none")
    if not isinstance(mask, torch.Tensor) or mask.dtype is not torch.bool:
        kind = mask.dtype if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise ValueError(f"mask {format_key(path)}: expected bool, got {kind}")
    if mask.shape != data.batch_size:
        raise ValueError(
            f"mask {format_key(path)}: expected shape {list(data.batch_size)}, "
            f"got {list(mask.shape)}"
        )
    dropped = {path} if ids_key is None else {path, unravel(ids_key)}
    node, leaves = flatten(data, 2, Rules(drop=frozenset(dropped)))
    slots = mask.reshape(-1).nonzero().squeeze(-1)
    rows = {key: picked(leaf, slots) for key, leaf in leaves.items()}
    return build(node, rows, torch.Size([len(slots)]), data.device)


class MiniBatches:
    """Shuffled pieces of rows ``[lanes, T]``, as ``rb.drain`` returns them.

    The time of each lane is cut into pieces of ``length`` rows. Each epoch has all pieces once, in
    another order. A batch is ``[B, length]``. It has the keys of the rows, and int64 ``"lane"`` and
    ``"position"``, unless the rows have them: number of the lane, and number of the row in T. So
    ``position[:, 0]`` is the start of each piece. Iterate again for further epochs.

    Args:
        rows: TensorDict ``[lanes, T]``.
        size: number of pieces of a batch.
        length: number of rows of a piece.
        epochs: number of passes over the pieces in one iteration.
        tail: if ``length`` does not divide T: ``"error"``, ``"drop"`` the last rows, or ``"pad"``
            the last pieces with zeros. With ``"pad"``, bool ``"mask"`` is True for real rows.
        even: divide N pieces into ``max(1, N // size)`` batches whose sizes differ by at most 1.
            False: batches of ``size`` pieces, of which the last may have fewer.
        generator: source of the orders. Default: torch's global generator.

    Raises:
        TypeError: the rows are not a TensorDict of two dimensions.
        ValueError: a number is below 1, ``tail`` is unknown, or ``length`` does not divide T.

    Cost: one copy of the rows per epoch.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from replaykit import MiniBatches
        >>> rows = TensorDict({"x": torch.arange(24).reshape(2, 12)}, [2, 12])
        >>> batches = MiniBatches(rows, size=3, length=3, epochs=2)
        >>> len(batches), [tuple(batch.shape) for batch in batches]
        (4, [(4, 3), (4, 3), (4, 3), (4, 3)])
    """

    def __init__(
        self,
        rows: Any,
        size: int,
        length: int,
        epochs: int = 1,
        *,
        tail: str = "error",
        even: bool = True,
        generator: torch.Generator | None = None,
    ) -> None:
        if not is_tensordict(rows) or rows.batch_dims < 2:
            raise TypeError(f"expected a TensorDict [lanes, T], got {type(rows).__name__}")
        self.size, self.length = whole_number("size", size, 1), whole_number("length", length, 1)
        self.epochs = whole_number("epochs", epochs, 1)
        self.even, self.generator = bool(even), generator
        lanes, steps = rows.batch_size[:2]
        left = steps % length
        short = one_of("tail", tail, ("error", "drop", "pad")) != "pad" and left == steps
        if short or (tail == "error" and left):
            raise ValueError(
                f"expected a length that divides T={steps}, got {length}; tail='drop' leaves the "
                "last rows out, and tail='pad' adds rows of zeros"
            )
        rows = rows.copy()
        for key, number in (
            ("lane", torch.arange(lanes)[:, None]),
            ("position", torch.arange(steps)),
        ):
            if lookup(rows, (key,)) is None:
                rows[key] = number.expand(lanes, steps)
        if left and tail == "pad":
            rows[MASK_KEY] = torch.ones(lanes, steps, dtype=torch.bool)
            rows = pad(rows, [0, 0, 0, length - left])
        count = rows.shape[1] // length
        self._pieces = rows[:, : count * length].unflatten(1, (count, length)).flatten(0, 1)

    def __len__(self) -> int:
        """Return the number of batches of one iteration."""
        return self.epochs * len(self._sizes())

    def _sizes(self) -> list[int]:
        count = len(self._pieces)
        parts = max(1, count // self.size) if self.even else -(-count // self.size)
        if not self.even:
            return [min(self.size, count - at * self.size) for at in range(parts)]
        return [(count + at) // parts for at in reversed(range(parts))]

    def __iter__(self) -> Iterator[Any]:
        device = "cpu" if self.generator is None else self.generator.device
        for _ in range(self.epochs):
            order = torch.randperm(len(self._pieces), generator=self.generator, device=device)
            for part in order.split(self._sizes()):
                yield self._pieces[part.to(self._pieces.device or "cpu")]
