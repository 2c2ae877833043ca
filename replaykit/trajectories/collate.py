"""Trajectories of different lengths side by side, padded behind their ends or jagged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from replaykit._compat import LazyStackedTensorDict, TensorDict, as_tensor, is_tensordict
from replaykit.structure import Path, build
from replaykit.ted import FLAG_KEYS, Key, format_key, unravel
from replaykit.trajectories.layout import MASK_KEY, padded, take_items

__all__ = ["pad_collate"]

_LENGTHS: Final[Key] = ("lengths",)


def pad_collate(
    items: Sequence[Any],
    pad_value: Any = 0,
    pad_to: int | None = None,
    multiple_of: int | None = None,
    layout: str = "padded",
) -> TensorDict:
    """Lays trajectories of different lengths side by side: ``B`` of ``[n_i]`` as ``[B, T]``.

    Made for ``collate_fn=`` of a buffer or a loader whose records are trajectories.

    Args:
        items: TensorDicts ``[n_i]``, ``n_i >= 1``, all with the same keys, feature shapes, dtypes
            and device; or a stack of them: a lazy one, as a LazyStackStorage gives, or a
            TensorDict ``[B, n]``, as trajectories of one length make.
        pad_value: what stands behind the end of a trajectory. A number counts for every key but
            bools and flags (``done``, ``terminated``, ``truncated``, also under ``next``), which
            are padded with ``False`` (0). A dict gives a number per key, 0 for those not in it.
        pad_to: ``T``; None: the longest length.
        multiple_of: ``T`` is the longest length rounded up to a multiple of this.
        layout: "padded"; or "jagged": nothing is padded, leaves are nested tensors.

    Returns:
        "padded": a TensorDict ``[B, T]`` of new memory, and in it ``mask``, bool ``[B, T]``, true
        on rows that were given. The mask follows from the lengths alone: a row that happens to
        equal the pad value is a row. Every leaf keeps its dtype.

        "jagged": a TensorDict ``[B]`` whose leaves are ``torch.nested`` tensors ``[B, n_i, *F]``
        of layout ``torch.jagged``, and ``lengths``, int64 ``[B]``. All leaves share one
        ``offsets()``, int64 ``[B + 1]``, so that they can be combined; ``values()`` are the rows
        one after another. ``lengths`` is plain.

        Tensors are without autograd history.

    Raises:
        TypeError: an item is no TensorDict, or holds something that is no tensor; a length that
            is no integer; a pad value that is no number.
        KeyError: an item lacks a key of the first one, or has another; names item and key. A
            ``pad_value`` for a key that is not there.
        ValueError: no items; an item without rows or with another batch size than ``[n]``; feature
            shapes, dtypes or devices differ; a key ``mask`` (``lengths``) is there already;
            a trajectory longer than ``pad_to``; ``pad_to`` and ``multiple_of`` both, or below 1;
            a pad value that the dtype does not have, or a flag that is not padded with
            ``False``; an unknown layout, or one of the other arguments together with "jagged".

    Cost: two copies of every value, a few calls a key and a Python step per leaf of every item.

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
    if layout not in ("padded", "jagged"):
        raise ValueError(f'layout: expected "padded" or "jagged", got {layout!r}')
    jagged = layout == "jagged"
    pad_to = _length_argument("pad_to", pad_to)
    multiple_of = _length_argument("multiple_of", multiple_of)
    if pad_to is not None and multiple_of is not None:
        raise ValueError(f"expected pad_to ({pad_to}) or multiple_of ({multiple_of}), not both")
    no_padding = pad_to is multiple_of is None and not isinstance(pad_value, Mapping)
    if jagged and not (no_padding and pad_value == 0):
        raise ValueError('layout="jagged" pads nothing: no pad_value, pad_to or multiple_of')
    items = _unstacked(items)
    node, tables, lengths = take_items(items, _LENGTHS if jagged else MASK_KEY, shortest=1)
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
    """The trajectories of a stack; anything else as it is."""
    if isinstance(items, LazyStackedTensorDict):
        return items.unbind(items.stack_dim)
    if is_tensordict(items) and items.batch_dims == 2:
        return items.unbind(0)
    return items


def _length_argument(name: str, value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}: expected an integer, got {value!r}")
    number = int(value)
    if number < 1:
        raise ValueError(f"{name}: expected at least 1, got {number}")
    return number


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
    """Returns what each leaf is padded with."""
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
            raise ValueError(f"pad_value: flag {format_key(path)} is padded with False")
    return found


def _as_value(value: Any, path: Path, dtype: torch.dtype) -> Any:
    """Returns a pad value that a tensor of ``dtype`` can hold."""
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
            f"pad_value: key {format_key(path)} is {dtype}, which has no {value!r}; "
            "a dict gives a value per key"
        )
    return value
