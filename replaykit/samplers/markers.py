"""What a batch of windows says of its rows: where windows end, and what padding holds."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from replaykit._compat import is_tensordict, lookup
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
        self._read = self._ends
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
        window = info[SEQUENCE_ID]
        if not is_tensordict(rows) or rows.batch_size != window.shape or not len(window):
            return rows
        mask = info.get(MASK)
        # On the CPU the flags are NumPy's: with few rows the calls are what costs.
        number = _array(window)
        real = None if mask is None else _array(mask.unsqueeze(-1))
        if self._keys is not None:
            flags = {path: _flag(rows, path) for path in self._read}
            end, truncated = _any(flags, self._ends), _any(flags, self._truncated)
            terminated = _any(flags, self._terminated)
            last = _edge(number, real, last=True)
            never = last & ~last if end is None or terminated is None else None
            end = never if end is None else end
            done, cut = last | end, last > end
            truncated = cut if truncated is None else cut | truncated
            # A flag of its own, not memory of the rows.
            terminated = never | never if terminated is None else terminated | terminated
            if real is not None:
                done, truncated, terminated = done & real, truncated & real, terminated & real
            done_key, truncated_key, terminated_key = self._keys
            info[done_key] = _tensor(done)
            info[truncated_key] = _tensor(truncated)
            info[terminated_key] = _tensor(terminated)
        init = _flag(rows, _IS_INIT)
        if init is not None:
            first = _edge(number, real, last=False)
            info["is_init"] = _tensor(first | (init if real is None else init & real))
        if self.pad_value is not None and mask is not None:
            self._blank(rows, ~mask)
        return rows

    def _blank(self, rows: Any, padding: torch.Tensor, above: Path = ()) -> None:
        """Puts values where ``padding``, bool ``[B]``, is True."""
        assert self.pad_value is not None
        for name, leaf in rows.items():
            path = (*above, name)
            if is_tensordict(leaf):
                self._blank(leaf, padding, path)
                continue
            value = self.pad_value.get(path)
            if value is None:
                is_flag = path in FLAG_KEYS or leaf.dtype == torch.bool
                value = False if is_flag else self.pad_value[()]
            if not leaf.dtype.is_floating_point and not leaf.dtype.is_complex:
                value = int(value.real)
            leaf.masked_fill_(padding.view(-1, *[1] * (leaf.ndim - 1)), value)


def _edge(window: Any, real: Any | None, *, last: bool) -> Any:
    """Bool ``[B, 1]``: the first or the last real rows of windows."""
    if isinstance(window, torch.Tensor):
        edge: Any = torch.ones((len(window), 1), dtype=torch.bool, device=window.device)
    else:
        edge = np.ones((len(window), 1), bool)
    inner = edge[:-1, 0] if last else edge[1:, 0]
    inner[:] = window[1:] != window[:-1]
    if real is not None:
        inner |= ~(real[1:, 0] if last else real[:-1, 0])
        edge &= real
    return edge


def _any(flags: dict[Path, Any], paths: tuple[Path, ...]) -> Any:
    """Bool ``[B, 1]``: whether any of these flags is set; None where none is there."""
    found = None
    for path in paths:
        flag = flags[path]
        if flag is not None:
            found = flag if found is None else found | flag
    return found


def _flag(rows: Any, path: Path) -> Any:
    """A flag as bool ``[B, 1]``; None where it is not there."""
    leaf = lookup(rows, path)
    if not isinstance(leaf, torch.Tensor):
        return None
    flag = leaf if leaf.dtype is torch.bool else leaf != 0
    if flag.ndim != 2 or flag.shape[1] != 1:
        flag = flag.reshape(len(flag), -1).any(1, keepdim=True)
    return _array(flag)


def _array(tensor: torch.Tensor) -> Any:
    return tensor.numpy() if tensor.device.type == "cpu" else tensor


def _tensor(flag: Any) -> torch.Tensor:
    return flag if isinstance(flag, torch.Tensor) else torch.from_numpy(flag)
