"""What a batch of windows says of its rows: where windows end, and what padding holds."""

from __future__ import annotations

from typing import Any

import torch

from replaykit._compat import as_tensor, is_tensordict, lookup
from replaykit.schema import Schema
from replaykit.structure import Path
from replaykit.ted import DEFAULT_DONE_KEYS, FLAG_KEYS, format_key, unravel

__all__ = ["MASK", "SEQUENCE_ID", "Markers"]

SEQUENCE_ID = "sequence_id"
MASK = ("collector", "mask")

_NEXT = tuple(("next", name) for name in DEFAULT_DONE_KEYS)
_IS_INIT: Path = ("is_init",)


class Markers:
    """Marks the ends of windows in flags of their own, bool ``[B, 1]``.

    Of a window's last real row: ``done`` is set, and ``truncated`` unless its episode ends there.
    ``is_init``, where it is stored, is set at its first row.

    Args:
        truncated_key: where ``truncated`` goes; ``done`` and ``terminated`` are its siblings. None:
            no flags are made.
        flags: other keys that end episodes.
        pad_value: values by key of padded rows, ``()`` for all others; None: they stay copies of
            the nearest real row.

    Raises:
        TypeError: ``truncated_key`` is no key.
    """

    def __init__(
        self,
        truncated_key: Any,
        flags: tuple[Path, ...] | None = None,
        pad_value: dict[Path, Any] | None = None,
    ) -> None:
        self.pad_value = pad_value
        self._checked: Schema | None = None
        self._keys: tuple[Any, Any, Any] | None = None
        if truncated_key is None:
            return
        truncated = unravel(truncated_key)
        paths = [(*truncated[:-1], "done"), truncated, (*truncated[:-1], "terminated")]
        if len(set(paths)) < 3:
            raise ValueError(
                "expected truncated_key to differ from its siblings done and terminated, got "
                f"{format_key(truncated)}"
            )
        done, cut, terminated = (path if len(path) > 1 else path[0] for path in paths)
        self._keys = done, cut, terminated
        own = [path for path in paths if len(path) > 1 and path not in _NEXT]
        self._ends = tuple(dict.fromkeys((*_NEXT, *own, *(flags or ()))))
        self._truncated = tuple(dict.fromkeys((("next", "truncated"), *own[1:2])))
        self._terminated = tuple(dict.fromkeys((("next", "terminated"), *own[2:3])))

    def check(self, schema: Schema) -> None:
        """Raises KeyError, ValueError where values of padding are not for stored keys."""
        if self.pad_value is None or schema is self._checked:
            return
        for path, value in self.pad_value.items():
            if path == ():
                continue
            leaf = schema.leaves.get(path)
            if leaf is None:
                raise KeyError(f"pad_value names {format_key(path)}, which is not stored")
            if (
                not leaf.dtype.is_floating_point
                and not leaf.dtype.is_complex
                and value != int(value.real)
            ):
                raise ValueError(
                    f"key {format_key(path)}: expected pad_value as {leaf.dtype}, got {value!r}"
                )
        self._checked = schema

    def complete(self, rows: Any, info: dict[Any, Any]) -> Any:
        """Adds the flags of rows ``[B]`` to ``info``, and blanks padding; returns the rows."""
        if not is_tensordict(rows) or rows.batch_size != info[SEQUENCE_ID].shape:
            return rows
        mask = info.get(MASK)
        first, last = _edges(info[SEQUENCE_ID], mask)
        if self._keys is not None:
            end = _any(rows, self._ends)
            truncated = _any(rows, self._truncated)
            terminated = _any(rows, self._terminated)
            if terminated is None:
                terminated = torch.zeros_like(last)
            cut = last if end is None else last & ~end
            done = last if end is None else last | end
            truncated = cut if truncated is None else cut | truncated
            if mask is not None:
                real = mask.unsqueeze(-1)
                done, truncated, terminated = done & real, truncated & real, terminated & real
            info[self._keys[0]], info[self._keys[1]] = done, truncated
            info[self._keys[2]] = terminated
        stored = lookup(rows, _IS_INIT)
        if isinstance(stored, torch.Tensor):
            init = _as_flag(stored)
            info["is_init"] = first | (init if mask is None else init & mask.unsqueeze(-1))
        if self.pad_value is not None and mask is not None:
            self._blank(rows, ~mask)
        return rows

    def _blank(self, rows: Any, padding: torch.Tensor) -> None:
        assert self.pad_value is not None
        other = self.pad_value[()]
        for key in rows.keys(True, True):
            path = unravel(key)
            leaf = rows.get(key)
            value = self.pad_value.get(path)
            if value is None:
                value = False if path in FLAG_KEYS or leaf.dtype == torch.bool else other
            if not leaf.dtype.is_floating_point and not leaf.dtype.is_complex:
                value = int(value.real)
            leaf[padding] = as_tensor(value).to(leaf.device, leaf.dtype)


def _edges(window: torch.Tensor, mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Bool ``[B, 1]``: the first and the last real rows of windows."""
    first = torch.empty((len(window), 1), dtype=torch.bool, device=window.device)
    last = torch.empty_like(first)
    inner = first[1:, 0]
    torch.ne(window[1:], window[:-1], out=inner)
    last[:-1, 0] = inner
    first[:1] = True
    last[-1:] = True
    if mask is not None:
        real = mask.unsqueeze(-1)
        first[1:] |= ~real[:-1]
        last[:-1] |= ~real[1:]
        first &= real
        last &= real
    return first, last


def _any(rows: Any, paths: tuple[Path, ...]) -> torch.Tensor | None:
    """Bool ``[B, 1]``: whether any of these flags is set; None where none is there."""
    found = None
    for path in paths:
        leaf = lookup(rows, path)
        if isinstance(leaf, torch.Tensor):
            flag = _as_flag(leaf)
            found = flag if found is None else found | flag
    return found


def _as_flag(leaf: torch.Tensor) -> torch.Tensor:
    flag = leaf if leaf.dtype == torch.bool else leaf != 0
    if flag.ndim == 2 and flag.shape[1] == 1:
        return flag
    return flag.reshape(len(flag), -1).any(1, keepdim=True)
