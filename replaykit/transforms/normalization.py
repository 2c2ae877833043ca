"""Normalize columns by statistics that follow the data."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch

from replaykit.declared import Positive, Rule, decode_state, read_value
from replaykit.keywords import one_of
from replaykit.storages import Storage
from replaykit.structure import Path
from replaykit.ted import format_key
from replaykit.transforms.batch_values import (
    ValueTransform,
    as_keys,
    as_number,
    keep_padding,
    real_rows,
    require_tensor,
)

__all__ = ["RunningNorm"]

KINDS = ("running", "window", "ema")

_EPS = 1e-8
"""Summand of a variance, so that a constant column can be divided by its deviation."""


def _is_moment(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.float64


_Moment = Annotated[Any, Rule("a float64 tensor", _is_moment)]


@dataclass(frozen=True)
class Moments:
    """Mean and sum of squared distances from it, for each number of a row.

    Attributes:
        weight: sum of the weights of rows.
        mean, squares: float64 ``[*F]``.
        recent: the rows of a window, float64 ``[N, *F]``; None for other kinds.
    """

    weight: float
    mean: _Moment
    squares: _Moment
    recent: _Moment | None = None

    @classmethod
    def of(cls, rows: torch.Tensor, rate: float = 0.0) -> Moments:
        """Return the moments of rows float64 ``[N, *F]``, the last of which has the weight 1.

        Args:
            rate: the share by which the weight of a row falls with each row after it.
        """
        ages = torch.arange(len(rows) - 1, -1, -1, dtype=torch.float64, device=rows.device)
        weights = ((1.0 - rate) ** ages).view(-1, *[1] * (rows.ndim - 1))
        weight = float(weights.sum())
        mean = (weights * rows).sum(0) / weight
        return cls(weight, mean, (weights * (rows - mean) ** 2).sum(0))

    def followed_by(self, later: Moments, kept: float = 1.0) -> Moments:
        """Return the moments of these rows, with weights times ``kept``, and of later rows."""
        weight = self.weight * kept + later.weight
        apart = later.mean - self.mean
        share = later.weight / weight
        squares = self.squares * kept + later.squares
        squares = squares + apart**2 * (self.weight * kept * share)
        return Moments(weight, self.mean + apart * share, squares)

    @property
    def std(self) -> torch.Tensor:
        """The standard deviation, float64 ``[*F]``."""
        return (self.squares / self.weight + _EPS).sqrt()


@dataclass(frozen=True)
class _NormState:
    frozen: bool
    moments: list[Moments | None]


class RunningNorm(ValueTransform):
    """A transform that subtracts the mean from columns and divides them by their deviation.

    Each number of a row has separate statistics, in float64. Reads do not change stored rows.
    Padding rows keep their values, and are not counted. Before the first row, columns are read
    unchanged. Checkpoints contain the statistics.

    Args:
        keys: a list of keys of columns.
        kind: "running" counts all rows equally. "window" counts only the latest ``size`` rows.
            "ema" lowers the weight of a row by the factor ``1 - rate`` with each row after it.
        update_on: "write" counts each row once, when its write has succeeded. "sample" counts the
            rows of each batch that is read, also of ``rb[...]``.
        size: number of rows of a window.
        rate: a number between 0 and 1.
        clip: limits results to ``[-clip, clip]``; None for no limit.
        center: subtract the mean. Use False for rewards, whose shift would change returns.
        with_next: also normalize the same keys under ``next``, by the same statistics.

    Attributes:
        frozen: if True, statistics do not change. It may be set at any time.

    Raises:
        TypeError: ``keys`` is not a list of keys, or a column is bool or complex.
        ValueError: ``kind`` or ``update_on`` is unknown, or a number is out of range. On write or
            read, loaded statistics have another shape.
        KeyError: on write or read, a key is absent.

    Cost: two passes over the columns for a read, and two for an update. A window also copies its
    rows at each update.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from replaykit import LazyTensorStorage, ReplayBuffer, RunningNorm
        >>> norm = RunningNorm(["observation"], clip=1.0)
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), transform=norm)
        >>> _ = rb.extend(TensorDict({"observation": torch.tensor([1.0, 3.0, 5.0])}, [3]))
        >>> norm.moments("observation").mean, rb[:]["observation"]
        (tensor(3., dtype=torch.float64), tensor([-1.,  0.,  1.]))
        >>> norm.frozen = True
        >>> _ = rb.extend(TensorDict({"observation": torch.tensor([99.0])}, [1]))
        >>> norm.moments("observation").mean
        tensor(3., dtype=torch.float64)
    """

    def __init__(
        self,
        keys: Sequence[Any],
        kind: str = "running",
        *,
        update_on: str = "write",
        size: int = 10_000,
        rate: float = 0.001,
        clip: float | None = None,
        center: bool = True,
        with_next: bool = False,
    ) -> None:
        self.keys = as_keys(keys)
        one_of("kind", kind, KINDS)
        one_of("update_on", update_on, ("write", "sample"))
        self.kind, self.update_on = kind, update_on
        self.size: int = read_value(Positive, size, "size")
        self.rate = as_number("rate", rate)
        self.clip = None if clip is None else as_number("clip", clip)
        if not 0 < self.rate < 1:
            raise ValueError(f"rate: expected a number between 0 and 1, got {rate}")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip: expected a positive number, got {clip}")
        self.center, self.with_next, self.frozen = bool(center), bool(with_next), False
        self.ordered = update_on == "sample"
        self._moments: list[Moments | None] = [None] * len(self.keys)
        self._set_hooks()

    def _set_hooks(self) -> None:
        # Written rows by thread, from the check to the commit of a write.
        self._given: dict[int, list[torch.Tensor]] = {}
        self._lock = threading.Lock()
        if self.update_on == "write":
            self.check_rows, self.written = self._check_rows, self._count_written

    def moments(self, key: Any) -> Moments | None:
        """Return weight, mean and deviation of a column; None before the first row.

        Raises:
            ValueError: the transform has no such key.
        """
        return self._moments[self.keys.index(as_keys([key])[0])]

    def update(self, data: Any) -> None:
        """Count the real rows of a batch, if the statistics are not frozen."""
        if self.frozen:
            return
        rows = []
        for key in self.keys:
            value, real = _numbers(require_tensor(data, key), key), real_rows(data)
            rows.append(value.flatten(0, data.batch_dims - 1) if real is None else value[real])
        self._check_shapes(rows)
        self._count(rows)

    def _check_shapes(self, rows: list[torch.Tensor]) -> None:
        for key, old, one in zip(self.keys, self._moments, rows, strict=True):
            if old is not None and old.mean.shape != one.shape[1:]:
                raise ValueError(
                    f"key {format_key(key)}: expected rows of the shape {list(old.mean.shape)} of "
                    f"the statistics, got {list(one.shape[1:])}"
                )

    def _count(self, rows: list[torch.Tensor]) -> None:
        if not len(rows[0]):
            return
        with self._lock:
            found = [
                self._after(old, one.detach().double())
                for old, one in zip(self._moments, rows, strict=True)
            ]
            self._moments = list(found)

    def _after(self, old: Moments | None, rows: torch.Tensor) -> Moments:
        if self.kind == "window":
            if old is not None:
                assert old.recent is not None
                rows = torch.cat([old.recent.to(rows.device), rows])
            recent = rows[-self.size :].clone()
            made = Moments.of(recent)
            return Moments(made.weight, made.mean, made.squares, recent)
        rate = self.rate if self.kind == "ema" else 0.0
        made = Moments.of(rows, rate)
        return made if old is None else old.followed_by(made, (1.0 - rate) ** len(rows))

    # -- writes ---------------------------------------------------------------------------------

    def _check_rows(self, storage: Storage, rows: Any) -> None:
        """Remember the rows of a write, before it."""
        given = []
        for key in self.keys:
            if isinstance(rows, list):
                value = torch.stack([require_tensor(row, key) for row in rows])
            elif key in rows.leaves:
                value = rows.leaves[key].flatten(0, storage.ndim - 1)
            else:
                raise KeyError(f"no key {format_key(key)} in the written rows")
            given.append(_numbers(value, key).detach().double())
        self._check_shapes(given)
        self._given[threading.get_ident()] = given

    def _count_written(self, storage: Storage) -> None:
        """Count the rows of the write that has succeeded."""
        given = self._given.pop(threading.get_ident(), None)
        if given is not None and not self.frozen:
            self._count(given)

    # -- reads ----------------------------------------------------------------------------------

    def forward(self, data: Any) -> Any:
        """Return the batch with normalized columns; ``data`` does not change."""
        if self.update_on == "sample":
            self.update(data)
        values: dict[Path, torch.Tensor] = {}
        for key, found in zip(self.keys, self._moments, strict=True):
            for path in (key, ("next", *key)) if self.with_next else (key,):
                old = _numbers(require_tensor(data, path), path)
                if found is not None:
                    new = self._normalized(old, found)
                    values[path] = keep_padding(real_rows(data), new, old)
        made = data.copy()
        for path, value in values.items():
            made.set(path, value)
        return made

    def _normalized(self, old: torch.Tensor, found: Moments) -> torch.Tensor:
        dtype = old.dtype if old.is_floating_point() else torch.get_default_dtype()
        new = old.double()
        if self.center:
            new = new - found.mean.to(old.device)
        new = new / found.std.to(old.device)
        return (new if self.clip is None else new.clamp(-self.clip, self.clip)).to(dtype)

    # -- state ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the statistics."""
        moments = [None if one is None else dict(vars(one)) for one in self._moments]
        return {"frozen": self.frozen, "moments": moments}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load statistics.

        Raises:
            ValueError: they belong to another number of keys, or to another kind.
        """
        state = decode_state(_NormState, state_dict, "the state of a RunningNorm")
        windows = {one.recent is not None for one in state.moments if one is not None}
        if len(state.moments) != len(self.keys) or not windows <= {self.kind == "window"}:
            raise ValueError(
                f"expected the statistics of {len(self.keys)} keys and the kind {self.kind!r}, got "
                f"those of {len(state.moments)} keys, {'with' if any(windows) else 'without'} rows"
            )
        self._moments, self.frozen = list(state.moments), state.frozen

    def __getstate__(self) -> dict[str, Any]:
        left_out = ("_given", "_lock", "check_rows", "written")
        return {name: value for name, value in vars(self).items() if name not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._set_hooks()

    def __repr__(self) -> str:
        keys = ", ".join(map(format_key, self.keys))
        return f"RunningNorm([{keys}], {self.kind!r}, update_on={self.update_on!r})"


def _numbers(value: torch.Tensor, key: Path) -> torch.Tensor:
    """Return a column; raise TypeError if it does not hold real numbers."""
    if value.dtype is torch.bool or value.dtype.is_complex:
        raise TypeError(f"key {format_key(key)}: expected real numbers, got {value.dtype}")
    return value
