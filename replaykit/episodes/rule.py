"""Which columns tell where episodes end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from replaykit.episodes.codes import GOES_ON, NOT_INIT, TERMINATED, TRUNCATED
from replaykit.schema import Schema
from replaykit.structure import Path
from replaykit.ted import DEFAULT_DONE_KEYS, EPISODE_KEYS, end_flags, format_key

__all__ = ["BoundColumns", "BoundaryRule"]

_IS_INIT: Path = ("is_init",)


@dataclass(frozen=True)
class BoundaryRule:
    """Which flags and which ids end an episode, and which column names the stream of a row.

    Attributes:
        flags: keys of which any one that is set ends an episode; those that are not stored are
            left out. None: ``done``, ``truncated`` and ``terminated`` under ``next``, or at the
            root where none of them is there (`end_flags`).
        ids: keys of which a change between rows that follow each other ends an episode. None:
            ``("collector", "traj_ids")``, ``episode`` and ``seed``, those that are stored.
        strict: refuse data without any such column.

    Example:
        >>> from replaykit.episodes import BoundaryRule
        >>> BoundaryRule(flags=(("next", "done"),)).flags
        (('next', 'done'),)
    """

    flags: tuple[Path, ...] | None = None
    ids: tuple[Path, ...] | None = None
    strict: bool = False

    def bind(self, schema: Schema) -> BoundColumns:
        """Returns the columns that there are of those it names.

        Raises:
            KeyError: a key that was asked for is not stored, or nothing that could end an episode.
        """
        stored = schema.leaves
        flags = end_flags(stored) if self.flags is None else self.flags
        flags = tuple(path for path in flags if path in stored)
        if self.flags and not flags:
            raise KeyError(
                f"expected one of {_names(self.flags)} to end episodes by, got the columns "
                f"{_names(tuple(stored))}"
            )
        ids = [path for path in _or_default(self.ids, EPISODE_KEYS) if path in stored]
        if self.ids and len(ids) < len(self.ids):
            missing = tuple(path for path in self.ids if path not in stored)
            raise KeyError(
                f"expected {_names(missing)} to tell trajectories apart, got the columns "
                f"{_names(tuple(stored))}"
            )
        # Whoever names one kind of column has decided; else data that tells nothing is refused.
        silent = (self.flags is None or self.ids is None) and not (flags or ids)
        if self.strict and silent and not (self.flags or self.ids):
            raise KeyError(
                f"expected a column that ends episodes ({_names(_FLAGS)}) or tells them apart "
                f"({_names(EPISODE_KEYS)}), got {_names(tuple(stored))}; name one with end_key= "
                "or traj_key=, or give both as ()"
            )
        init = _IS_INIT if _IS_INIT in stored else None
        return BoundColumns(flags, tuple(ids), init, schema)


_FLAGS: tuple[Path, ...] = tuple(("next", name) for name in DEFAULT_DONE_KEYS)


class BoundColumns:
    """The columns of one schema that a rule goes by.

    Attributes:
        flags, ids: their keys. ``init``: that of ``is_init``, or None.
        paths: all of them; an edit of any makes what was noted old.
    """

    def __init__(
        self, flags: tuple[Path, ...], ids: tuple[Path, ...], init: Path | None, schema: Schema
    ) -> None:
        self.flags, self.ids, self.init = flags, ids, init
        self.paths = frozenset((*flags, *ids, *(() if init is None else (init,))))
        # Whether an end was a termination is told by `terminated`, whatever it is found by.
        told = [path for path in end_flags(schema.leaves) if path[-1] == "terminated"]
        self.terminal = told[0] if told else None
        if self.terminal is not None:
            self.paths |= {self.terminal}

    def codes(
        self, leaves: Mapping[Path, torch.Tensor], ndim: int
    ) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any] | None]:
        """Reads rows ``[n, *lanes, ...]`` that follow each other.

        Returns:
            uint8 ``[n, lanes]`` without the ends that ids make, and the ids, uint8
            ``[n, lanes, bytes]``; None where there are none.
        """
        shape = _cells(leaves, self.paths, ndim)
        codes = np.zeros(shape, np.uint8)
        for path in self.flags:
            is_set = _is_set(leaves[path], ndim, shape)
            if self.terminal is not None or path[-1] == "truncated":
                codes[is_set] = TRUNCATED
            else:  # `done` alone is read as terminated
                codes[is_set & (codes == GOES_ON)] = TERMINATED
        if self.terminal is not None:
            codes[_is_set(leaves[self.terminal], ndim, shape) & (codes != GOES_ON)] = TERMINATED
        if self.init is not None:
            codes[~_is_set(leaves[self.init], ndim, shape)] |= NOT_INIT
        if not self.ids:
            return codes, None
        parts = []
        for path in self.ids:
            values = leaves[path].detach()
            own = torch.empty(values.shape, dtype=values.dtype, device="cpu").copy_(values)
            size = values.shape[ndim:].numel() * values.dtype.itemsize
            parts.append(own.view(-1).view(torch.uint8).numpy().reshape(*shape, size))
        return codes, np.concatenate(parts, -1)


def _is_set(tensor: torch.Tensor, ndim: int, shape: tuple[int, int]) -> np.ndarray[Any, Any]:
    """Bool ``[n, lanes]``: where any number of a cell is not zero."""
    size = tensor.shape[ndim:].numel()
    found = (tensor.detach() != 0).cpu().numpy().reshape(*shape, size)
    return np.asarray(found[..., 0] if found.shape[-1] == 1 else found.any(-1))


def _cells(
    leaves: Mapping[Path, torch.Tensor], paths: frozenset[Path], ndim: int
) -> tuple[int, int]:
    leaf = leaves[next(iter(paths))] if paths else next(iter(leaves.values()))
    return leaf.shape[0], leaf.shape[1:ndim].numel()


def _or_default(given: tuple[Path, ...] | None, default: tuple[Path, ...]) -> tuple[Path, ...]:
    return default if given is None else given


def _names(paths: tuple[Path, ...]) -> str:
    return ", ".join(format_key(path) for path in paths)
