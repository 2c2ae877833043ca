"""Which rows are the last of their trajectory: flags, ids, and the end of the data."""

from __future__ import annotations

from typing import Any

import torch

from replaykit._compat import lookup
from replaykit.ted import (
    DEFAULT_DONE_KEYS,
    EPISODE_KEYS,
    FLAG_KEYS,
    Key,
    end_flags,
    format_key,
    unravel,
)

__all__ = ["find_ends"]


def find_ends(data: Any, end_keys: Any, traj_key: Any) -> torch.Tensor:
    """Returns which rows are the last of their trajectory, bool ``[N]``."""
    flags = _end_columns(data, end_keys)
    ids = _id_columns(data, traj_key)
    # Who gives both as () has decided; else data that tell nothing are refused.
    if not flags and not ids and (end_keys is None or traj_key is None):
        defaults = [("next", name) for name in DEFAULT_DONE_KEYS]
        known = ", ".join(format_key(key) for key in (*defaults, *EPISODE_KEYS))
        raise KeyError(
            f"nothing says where trajectories end: expected one of {known}; "
            "or give end_keys and traj_key both as ()"
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
    if given is None:
        keys = end_flags([key for key in FLAG_KEYS if lookup(data, key) is not None])
    else:
        keys = tuple(map(unravel, given))
    found = {key: lookup(data, key) for key in keys}
    there = {key: value for key, value in found.items() if value is not None}
    if given and not there:
        raise KeyError(f"end_keys: none of {', '.join(map(format_key, found))} is there")
    return _only_tensors("end_keys", there)


def _id_columns(data: Any, given: Any) -> dict[Key, torch.Tensor]:
    if given is None:
        found = {key: lookup(data, key) for key in EPISODE_KEYS}
        found = {key: value for key, value in found.items() if value is not None}
        return _only_tensors("traj_key", found)
    several = isinstance(given, list) or given == ()
    found = {key: lookup(data, key) for key in map(unravel, given if several else [given])}
    for key, value in found.items():
        if value is None:
            raise KeyError(f"traj_key: no key {format_key(key)}")
    return _only_tensors("traj_key", found)


def _only_tensors(argument: str, found: dict[Key, Any]) -> dict[Key, torch.Tensor]:
    for key, value in found.items():
        if not isinstance(value, torch.Tensor):
            raise ValueError(
                f"{argument}: {format_key(key)}: expected a tensor, got {type(value).__name__}; "
                "a list takes several keys, a tuple is one nested key"
            )
    return found
