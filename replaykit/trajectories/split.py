"""Flat rows taken apart into trajectories, and trajectories laid end to end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from replaykit._compat import is_tensordict, lookup
from replaykit.structure import Rules, build, flatten
from replaykit.ted import Key, format_key, unravel
from replaykit.trajectories.ends import find_ends
from replaykit.trajectories.layout import (
    MASK_KEY,
    check_rows,
    padded,
    picked,
    refuse_own,
    take_items,
)

__all__ = ["join_trajectories", "split_trajectories"]

_IDS: Final[Key] = ("traj_ids",)


def split_trajectories(
    data: Any,
    *,
    end_keys: Sequence[Any] | None = None,
    traj_key: Any = None,
    as_list: bool = False,
) -> Any:
    """Takes flat rows apart into trajectories: ``[N]`` becomes ``[E, T]``, one entry each.

    A row ends its trajectory where a flag is set, where an id of the next row is another one, and
    at the end of the data. ``replaykit.datasets`` lays data sets out the same way with
    ``split_trajs=True``.

    Args:
        data: a TensorDict ``[N]`` of rows in time order, trajectories end to end.
        end_keys: a list of flag keys of which any one ends a trajectory; those that are absent
            are left out. None: ``done``, ``terminated`` and ``truncated`` under ``next``, or at
            the root where none of them is there. ``()``: none.
        traj_key: an id column, or a list of them, of which a change ends a trajectory. None:
            those of ``("collector", "traj_ids")``, ``episode`` and ``seed`` that are there.
            ``()``: none. With ``()`` for both everything is one trajectory.
        as_list: the trajectories one by one.

    Returns:
        A TensorDict ``[E, T]`` of new memory without autograd history; ``T`` is the longest
        length. Behind a trajectory's end everything is 0 and flags are ``False``. Two keys are
        added: ``mask``, bool ``[E, T]``, true on rows, and ``traj_ids``, int64 ``[E, T]``, the
        number of the trajectory, 0 on padding. With ``as_list``: a list of ``E`` TensorDicts
        ``[n_i]``, views of ``data`` and nothing added.

        TorchRL's function of that name puts both keys under ``"collector"`` where there is such
        an entry, ends by one ``done_key`` or by ids, not by both, and adds no ids where a column
        of them is there. Here all keys of ``data`` stay as they are, ids included.

    Raises:
        TypeError: ``data`` is no TensorDict, holds something that is no tensor, or what is no
            list of keys.
        KeyError: ``traj_key`` is absent, or all of ``end_keys`` are; there is neither flag nor id
            and not both arguments are ``()``.
        ValueError: another batch size than ``[N]``; a key ``mask`` or ``traj_ids`` is there
            already (not with ``as_list``); a column of flags or ids that is no tensor.

    Cost: one pass over flags and ids, one copy of every value, ``E * T`` entries of memory: one
    very long trajectory among short ones makes the result large. With ``as_list`` no copy and a
    Python step per leaf of every trajectory.

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
    """Lays trajectories end to end: ``[E, T]`` with a mask, or a list of ``[n_i]``, as ``[N]``.

    The inverse of ``split_trajectories`` and ``pad_collate``: every bit of every row is back.

    Args:
        data: a TensorDict ``[E, T]`` with a mask; or a list of TensorDicts ``[n_i]`` with the same
            keys, feature shapes, dtypes and device.
        mask_key: the mask in a padded TensorDict, bool ``[E, T]``, true on rows, which may lie
            anywhere; it is dropped.
        ids_key: numbers of trajectories in a padded TensorDict that are dropped with it, where
            they are there; None: all other keys stay.

    Returns:
        A TensorDict ``[N]`` of new memory without autograd history, trajectory after trajectory,
        each in order. Nothing marks where one ends but the flags and ids among its keys.

    Raises:
        TypeError: neither; something that is no tensor.
        KeyError: no mask; an item of the list lacks a key of the first one, or has another.
        ValueError: an empty list; a batch size other than ``[E, T]`` or ``[n]``; the mask is not
            bool ``[E, T]``; feature shapes, dtypes or devices of items differ.

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
        node, tables, lengths = take_items(data, None, shortest=0)
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
        raise KeyError(f"no mask {format_key(path)} that says which entries are rows")
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
