"""Give columns of different data sets the same scale and the same shape."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from tensordict import TensorDict

from replaykit._compat import lookup
from replaykit.declared import Positive, Rule, decode_state, read_value
from replaykit.keywords import as_number, one_of
from replaykit.storages import Storage
from replaykit.structure import Path, build
from replaykit.ted import format_key, no_key, unravel
from replaykit.transforms.batch_values import (
    ValueTransform,
    as_keys,
    keep_padding,
    real_rows,
    require_numbers,
    require_tensor,
    with_values,
)
from replaykit.transforms.neighbours import Windows
from replaykit.transforms.transform import Compose

KINDS = ("running", "window", "ema")

MODES = ("mean_std", "min_max", "quantiles")

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


_Scale = tuple[torch.Tensor, torch.Tensor]
"""The numbers to subtract from a column, and the divisors of the result; float64 ``[*F]``."""


class _Scaling(ValueTransform):
    """A transform that subtracts numbers from columns and divides them by others.

    Attributes:
        keys: the keys of the columns.
        with_next: True to change the same keys under ``next``, too.
        clip: limits of results, ``[-clip, clip]``; None for no limit.
    """

    keys: list[Path]
    with_next: bool
    clip: float | None = None

    @abstractmethod
    def scales(self) -> list[_Scale | None]:
        """Return the numbers for each key; None if the column is to stay as it is."""

    def forward(self, data: Any) -> Any:
        """Return the batch with normalized columns; ``data`` does not change."""
        return self._changed(data, self.keys, self._normalized)

    def restore(self, data: Any, keys: Sequence[Path]) -> Any:
        """Return the batch with the columns as they were before ``forward``."""
        return self._changed(data, keys, lambda old, shift, scale: old * scale + shift)

    def _normalized(
        self, old: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor
    ) -> torch.Tensor:
        new = (old - shift) / scale
        return new if self.clip is None else new.clamp(-self.clip, self.clip)

    def _changed(self, data: Any, keys: Sequence[Path], change: Callable[..., Any]) -> Any:
        values: dict[Path, torch.Tensor] = {}
        scales = dict(zip(self.keys, self.scales(), strict=True))
        for key in keys:
            for path in (key, ("next", *key)) if self.with_next else (key,):
                old, found = require_numbers(data, path), scales[key]
                if found is not None:
                    dtype = old.dtype if old.is_floating_point() else torch.get_default_dtype()
                    new = change(old.double(), *(one.to(old.device) for one in found)).to(dtype)
                    values[path] = keep_padding(real_rows(data), new, old)
        return with_values(data, values)


class RunningNorm(_Scaling):
    """A transform that subtracts the mean from columns and divides them by their deviation.

    Each number of a row has separate statistics, in float64. Reads do not change stored rows.
    Padding rows keep their values, and are not counted. A column does not count its rows that have
    an infinite number or NaN. Before the first row, columns are read unchanged. Checkpoints contain
    the statistics.

    Args:
        keys: a list of keys of columns.
        kind: "running" counts all rows equally. "window" counts only the latest ``size`` rows.
            "ema" lowers the weight of a row by the factor ``1 - rate`` with each row after it.
        update_on: "write" counts each row once, when its write has succeeded, with the values that
            the transforms before this one give it. "sample" counts the rows of each batch that is
            read, also of ``rb[...]``.
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
            read, loaded statistics have another shape. A buffer raises it if an earlier transform
            makes the columns from several rows, and ``update_on`` is "write".
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
        self._lock = threading.Lock()

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
            value, real = require_numbers(data, key), real_rows(data)
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
            self._moments = [
                self._after(old, one.detach().double())
                for old, one in zip(self._moments, rows, strict=True)
            ]

    def _after(self, old: Moments | None, rows: torch.Tensor) -> Moments | None:
        rows = rows[rows.isfinite().flatten(1).all(1)] if rows.ndim > 1 else rows[rows.isfinite()]
        if not len(rows):
            return old
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

    def listener(self, before: Compose) -> _Counting | None:
        """Return the object that counts written rows, as the transforms before return them.

        Raises:
            ValueError: a transform before this one makes the columns from several rows.
        """
        return _Counting(self, before) if self.update_on == "write" else None

    # -- reads ----------------------------------------------------------------------------------

    def scales(self) -> list[_Scale | None]:
        """Return mean and deviation of each column; None before the first row."""
        return [
            None
            if one is None
            else (one.mean if self.center else torch.zeros_like(one.mean), one.std)
            for one in self._moments
        ]

    def forward(self, data: Any) -> Any:
        """Return the batch with normalized columns; ``data`` does not change."""
        if self.update_on == "sample":
            self.update(data)
        return super().forward(data)

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
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        keys = ", ".join(map(format_key, self.keys))
        return f"RunningNorm([{keys}], {self.kind!r}, update_on={self.update_on!r})"


class _Counting:
    """Counts the rows of successful writes for a ``RunningNorm``.

    Rows are counted as samples will have them, after the transforms before the ``RunningNorm``.
    """

    def __init__(self, norm: RunningNorm, before: Compose) -> None:
        self._norm, self._before = norm, Compose()
        for entry in before.entries:
            one = entry.transform
            # Windows have the values of stored rows.
            makes = entry.reads_around and not isinstance(one, Windows)
            changed: frozenset[Path] = one.changes if makes else frozenset()
            if not set(norm.keys).isdisjoint(changed):
                raise ValueError(
                    f"expected {norm!r} before {one!r}, which makes its columns from several rows; "
                    "or use update_on='sample'"
                )
            apart = isinstance(one, _Scaling) and set(one.keys).isdisjoint(norm.keys)
            if not entry.reads_around and not apart:
                self._before.append(one, invert=entry.invert)
        # Written rows by thread, from the check to the commit of a write.
        self._given: dict[int, list[torch.Tensor]] = {}

    def check_rows(self, storage: Storage, rows: Any) -> None:
        """Remember the rows of a write, before it."""
        norm, dims = self._norm, storage.ndim
        if isinstance(rows, list):
            data: Any = torch.stack(rows)
        else:
            leaf = next(iter(rows.leaves.values()))
            data = build(rows.root, rows.leaves, rows.batch, leaf.device)
        if len(self._before):
            data = self._before.forward(data.copy())
        given = [
            require_numbers(data, key).flatten(0, dims - 1).detach().double() for key in norm.keys
        ]
        norm._check_shapes(given)
        self._given[threading.get_ident()] = given

    def written(self, storage: Storage) -> None:
        """Count the rows of the write that has succeeded."""
        given = self._given.pop(threading.get_ident(), None)
        if given is not None and not self._norm.frozen:
            self._norm._count(given)


@dataclass(frozen=True)
class _ScaleState:
    shift: list[_Moment]
    scale: list[_Moment]


class Normalize(_Scaling):
    """A transform that normalizes columns by the statistics of a data set.

    Reads do not change stored rows. Windows and images are normalized, too: statistics are
    broadcast to their shape. A number that is the same in all rows becomes 0. Padding rows keep
    their values. Checkpoints contain the numbers. ``Unnormalize`` is the inverse.

    Args:
        statistics: the result of ``data.statistics()``, or a mapping of the same form.
        modes: the mode of each key. "mean_std": subtract the mean and divide by the deviation.
            "min_max": map minimum and maximum to -1 and 1. "quantiles": map the first and the last
            quantile to -1 and 1.
        with_next: also normalize the same keys under ``next``, by the same statistics.

    Raises:
        TypeError: ``modes`` is not a mapping; on read, a column is bool or complex.
        ValueError: a mode is unknown, or a statistic is infinite or NaN.
        KeyError: there are no such statistics of a key; on read, a key is absent.

    Cost: two passes over the columns for a read.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from replaykit import Normalize, Unnormalize
        >>> statistics = {"action": {"min": torch.tensor([0.0, 2.0]),
        ...                          "max": torch.tensor([4.0, 2.0])}}
        >>> norm = Normalize(statistics, {"action": "min_max"})
        >>> batch = norm(TensorDict({"action": torch.tensor([[1.0, 2.0], [4.0, 2.0]])}, [2]))
        >>> batch["action"]
        tensor([[-0.5000,  0.0000],
                [ 1.0000,  0.0000]])
        >>> Unnormalize(norm)(batch)["action"]
        tensor([[1., 2.],
                [4., 2.]])
    """

    ordered = False

    def __init__(
        self, statistics: Any, modes: Mapping[Any, str], *, with_next: bool = False
    ) -> None:
        if not isinstance(modes, Mapping):
            raise TypeError(f"modes: expected a mapping of keys to modes, got {modes!r}")
        self.keys, self.with_next = as_keys(list(modes)), bool(with_next)
        self.modes = dict(zip(self.keys, modes.values(), strict=True))
        self._scales = [_scale_of(statistics, key, mode) for key, mode in self.modes.items()]

    def scales(self) -> list[_Scale | None]:
        """Return, for each key, the number that becomes 0 and its distance to the one for 1."""
        return list(self._scales)

    def state_dict(self) -> dict[str, Any]:
        """Return the numbers."""
        return {
            "shift": [shift for shift, _ in self._scales],
            "scale": [scale for _, scale in self._scales],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load numbers.

        Raises:
            ValueError: they belong to other keys or shapes.
        """
        state = decode_state(_ScaleState, state_dict, "the state of a Normalize")
        own = [shift.shape for shift, _ in self._scales]
        for found in (state.shift, state.scale):
            if [one.shape for one in found] != own:
                raise ValueError(
                    f"expected the numbers of columns {[list(shape) for shape in own]}, got "
                    f"{[list(one.shape) for one in found]}"
                )
        self._scales = list(zip(state.shift, state.scale, strict=True))

    def __repr__(self) -> str:
        modes = ", ".join(f"{format_key(key)}: {mode!r}" for key, mode in self.modes.items())
        return f"Normalize({{{modes}}})"


def _scale_of(statistics: Any, key: Path, mode: str) -> _Scale:
    """Return the numbers for a mode, from the statistics of a key."""
    one_of(f"key {format_key(key)}: mode", mode, MODES)
    found = dict(statistics.items())
    for part in key:
        found = dict(found.get(part, {}).items())
    if not found:
        leaves = TensorDict(dict(statistics.items()), []).keys(True, True)
        raise no_key(key, {unravel(leaf)[:-1] for leaf in leaves}, "statistics of")

    def read(name: str) -> torch.Tensor:
        if name not in found:
            known = ", ".join(found)
            raise KeyError(f"key {format_key(key)}: expected statistics with {name!r}, got {known}")
        numbers = torch.as_tensor(found[name]).double()
        wrong = numbers[~numbers.isfinite()]
        if len(wrong):
            raise ValueError(f"key {format_key(key)}: expected a finite {name!r}, got {wrong[0]:g}")
        return numbers

    if mode == "mean_std":
        shift, scale = read("mean"), read("std")
        if "min" in found and "max" in found:
            # Rounding may give a constant column a deviation, and move its mean.
            same = read("min") == read("max")
            shift, scale = torch.where(same, read("min"), shift), scale.masked_fill(same, 0.0)
    else:
        bounds = (read("min"), read("max")) if mode == "min_max" else read("quantiles")
        shift, scale = (bounds[0] + bounds[-1]) / 2, (bounds[-1] - bounds[0]) / 2
    return shift, scale.masked_fill(scale <= 0, 1.0)


class Unnormalize(ValueTransform):
    """A transform that undoes a ``Normalize`` or ``RunningNorm``, for example of actions.

    Args:
        norm: the transform to undo. Its statistics are used as they are at the call.
        keys: a list of its keys; None for all.

    Raises:
        TypeError: ``norm`` is another transform.
        ValueError: a key is not a key of ``norm``.
        KeyError: on read, a key is absent.

    Values that a ``RunningNorm`` has clipped are not restored. Checkpoints contain the statistics.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from replaykit import RunningNorm, Unnormalize
        >>> norm = RunningNorm(["x"])
        >>> norm.update(TensorDict({"x": torch.tensor([1.0, 3.0])}, [2]))
        >>> Unnormalize(norm)(TensorDict({"x": torch.tensor([0.0, 1.0])}, [2]))["x"]
        tensor([2., 3.])
    """

    ordered = False

    def __init__(self, norm: Normalize | RunningNorm, keys: Sequence[Any] | None = None) -> None:
        if not isinstance(norm, _Scaling):
            raise TypeError(f"expected a Normalize or RunningNorm, got {norm!r}")
        self.norm = norm
        self.keys = norm.keys if keys is None else as_keys(keys)
        for key in self.keys:
            if key not in norm.keys:
                raise ValueError(f"expected keys of {norm!r}, got {format_key(key)}")

    def forward(self, data: Any) -> Any:
        """Return the batch with the original columns; ``data`` does not change."""
        return self.norm.restore(data, self.keys)

    def state_dict(self) -> dict[str, Any]:
        """Return the statistics."""
        return self.norm.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load statistics into the transform to undo, as its ``load_state_dict`` does."""
        self.norm.load_state_dict(state_dict)

    def __repr__(self) -> str:
        return f"Unnormalize({self.norm!r})"


class Pad(ValueTransform):
    """A transform that pads columns to a common width, and adds columns that a data set lacks.

    The members of a mixture need equal keys, shapes and dtypes. As a transform of each member,
    ``Pad`` appends zeros to the last dimension of a column. A mask, bool ``[B, width]``, is True at
    the numbers that were there. Its key is the key with the suffix ``_mask``.

    Args:
        widths: for each key, the size of its last dimension. Or a tensor with the shape and dtype
            of a row: if the key is absent, its column becomes zeros, and its mask False.

    Raises:
        TypeError: ``widths`` is not a mapping, or a width is neither an int nor a tensor.
        ValueError: a width is below 1, or a tensor has no dimension; on read, a row is wider, has
            no dimension, or differs from the tensor in another dimension or in its dtype.
        KeyError: on read, a key with a width is absent.

    Cost: one copy of each column that is padded.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from replaykit import Pad
        >>> pad = Pad({"action": 3, "wrist": torch.zeros(2, 2, dtype=torch.uint8)})
        >>> batch = pad(TensorDict({"action": torch.ones(1, 2)}, [1]))
        >>> batch["action"], batch["action_mask"]
        (tensor([[1., 1., 0.]]), tensor([[ True,  True, False]]))
        >>> batch["wrist"].shape, batch["wrist_mask"]
        (torch.Size([1, 2, 2]), tensor([[False, False]]))
    """

    def __init__(self, widths: Mapping[Any, int | torch.Tensor]) -> None:
        if not isinstance(widths, Mapping):
            raise TypeError(f"widths: expected a mapping of keys to widths, got {widths!r}")
        self.widths: dict[Path, int | torch.Tensor] = {}
        for key, width in widths.items():
            name = f"key {key!r}: width"
            if isinstance(width, torch.Tensor):
                if not width.ndim:
                    raise ValueError(f"{name}: expected a tensor with dimensions, got {width!r}")
            elif type(width) is not int:
                raise TypeError(f"{name}: expected an int or a tensor, got {width!r}")
            else:
                read_value(Positive, width, name)
            self.widths[unravel(key)] = width

    def forward(self, data: Any) -> Any:
        """Return a TensorDict with padded columns and masks; ``data`` does not change."""
        made: dict[Path, torch.Tensor] = {}
        for key, width in self.widths.items():
            if isinstance(width, torch.Tensor) and lookup(data, key) is None:
                device = next(iter(data.values(True, True))).device
                shape = (*data.batch_size, *width.shape[:-1], 0)
                old = torch.zeros(shape, dtype=width.dtype, device=device)
            else:
                old = require_tensor(data, key)
            new, size = self._padded(old, data.batch_dims, key, width), old.shape[-1]
            mask = torch.arange(new.shape[-1], device=new.device) < size
            mask_key = (*key[:-1], f"{key[-1]}_mask")
            made |= {key: new, mask_key: mask.expand(*data.batch_size, len(mask)).clone()}
        return with_values(data, made)

    def _padded(
        self, old: torch.Tensor, dims: int, key: Path, width: int | torch.Tensor
    ) -> torch.Tensor:
        row = old.shape[dims:]
        wanted = width.shape if isinstance(width, torch.Tensor) else (*row[:-1], width)
        fits = bool(row) and row[:-1] == wanted[:-1] and row[-1] <= wanted[-1]
        if not fits or (isinstance(width, torch.Tensor) and old.dtype is not width.dtype):
            kind = f"{width.dtype} " if isinstance(width, torch.Tensor) else ""
            raise ValueError(
                f"key {format_key(key)}: expected rows of at most {kind}{list(wanted)}, got "
                f"{old.dtype} {list(row)}"
            )
        if row == wanted:
            return old
        return torch.nn.functional.pad(old, (0, wanted[-1] - row[-1]))

    def __repr__(self) -> str:
        said = (
            f"{format_key(key)}: {list(width.shape) if isinstance(width, torch.Tensor) else width}"
            for key, width in self.widths.items()
        )
        return f"Pad({{{', '.join(said)}}})"
