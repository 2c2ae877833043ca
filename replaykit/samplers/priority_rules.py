"""Check priorities and options of samplers, and turn priorities into draw weights."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, NamedTuple, NoReturn

import numpy as np
import torch

from replaykit._compat import as_tensor
from replaykit.checkpoint import MappedRows
from replaykit.declared import Count, Positive, decode_state, read_value, vector, within
from replaykit.errors import CheckpointError, PriorityCountError
from replaykit.keywords import as_number, one_of
from replaykit.native import power
from replaykit.reductions import REDUCTIONS
from replaykit.storages import Storage
from replaykit.storages.indexing import check_range, ravel

_MOST_ELEMENTS = 2.0**48


class PriorityLaw:
    """The law ``v = (p + eps) ** alpha``, and the range of allowed ``p``.

    If ``p`` and ``eps`` are 0, then ``v`` is 0 for every alpha, even for alpha 0. Such a row is
    never drawn. Source: Schaul et al. 2016, equation 1.

    Attributes:
        most: the largest allowed ``v``.

    Args:
        alpha, eps: finite numbers of at least 0.
        dtype: dtype of ``p`` and ``v``, float32 or float64.

    Raises:
        TypeError: alpha or eps is not a number.
        ValueError: alpha or eps is negative, NaN or infinite.

    Example:
        >>> import torch
        >>> from replaykit.samplers.priority_rules import PriorityLaw
        >>> PriorityLaw(0.5, 0.0, torch.float32).values(torch.tensor([0.0, 1.0, 4.0]))
        tensor([0., 1., 2.], dtype=torch.float64)
    """

    def __init__(self, alpha: Any, eps: Any, dtype: torch.dtype) -> None:
        self.alpha, self.eps = checked_number("alpha", alpha), checked_number("eps", eps)
        self.dtype = dtype
        limits = torch.finfo(dtype)
        # Sums are float64. If v is float64 too, the limit leaves room for a sum over all rows.
        self.most = limits.max / (_MOST_ELEMENTS if dtype == torch.float64 else 1.0)
        self.may_be_zero = _power(self.eps, self.alpha) < 2 * limits.tiny
        """True if ``v`` can be 0. If False, every stored row can be drawn."""
        self._one: tuple[float, float] | None = None

    def check(self, least: float, most: float) -> None:
        """Raise ValueError unless all priorities between these two are allowed.

        NaN is not allowed.
        """
        # The condition has this form so that it also refuses NaN.
        if not least >= 0:
            raise ValueError(f"expected priorities that are not negative or NaN, got {least}")
        if not most < float("inf"):
            raise ValueError(f"expected priorities that are finite in {self.dtype}, got {most}")
        if not _power(most + self.eps, self.alpha) <= self.most:
            raise ValueError(
                f"expected priorities small enough for the power alpha={self.alpha} in "
                f"{self.dtype}, got {most}"
            )

    def values(self, priority: torch.Tensor) -> torch.Tensor:
        """Return ``v`` of allowed priorities ``[K]``, float64 on their device.

        Trees round it to their dtype. On the CPU the bits depend only on the priority, not on its
        position in a batch or on the machine; see ``native.power``.
        """
        if not priority.is_cpu:
            base = priority.to(torch.float64) + self.eps
            return base.pow(self.alpha) if self.alpha else base.sign()
        base = np.add(priority.numpy(), self.eps, dtype=np.float64)
        return torch.from_numpy(power(base, self.alpha))

    def value_of(self, priority: float) -> float:
        """Return ``v`` of one allowed priority, with the same bits as ``values``."""
        known = self._one
        if known is None or known[0] != priority:
            values = self.values(torch.full((1,), priority, dtype=self.dtype, device="cpu"))
            known = self._one = priority, values.item()
        return known[1]

    def positive(self, value: Any) -> Any:
        """Return ``v`` with infinity for each value that trees store as 0.

        The smallest of the results is then the smallest positive ``v``.
        """
        if not self.may_be_zero:
            return value
        tiny = torch.finfo(self.dtype).tiny
        if isinstance(value, float):
            return value if value >= tiny else float("inf")
        value = value.to(self.dtype)  # this may round a number just below the limit up
        return value.masked_fill(value < tiny, float("inf"))


def importance_weights(
    values: torch.Tensor, smallest: Any, beta: float, dtype: torch.dtype
) -> torch.Tensor:
    """Return ``(v / smallest) ** -beta``, ``[B]`` in ``dtype``, of float64 ``v``.

    This equals ``(N P(i)) ** -beta`` divided by its largest value (Schaul et al. 2016, section
    3.4), because N and the sum cancel.

    Args:
        smallest: the ``v`` to which the weights are relative, as a number or scalar tensor.

    Example:
        >>> import torch
        >>> from replaykit.samplers.priority_rules import importance_weights
        >>> importance_weights(torch.tensor([1.0, 4.0], dtype=torch.float64), 1.0, 0.5,
        ...                    torch.float32)
        tensor([1.0000, 0.5000])
    """
    if not values.is_cpu:
        return (values / smallest).pow(-beta).to(dtype)
    weights = power(np.divide(values.numpy(), float(smallest)), -beta)
    return torch.from_numpy(weights if dtype is torch.float64 else weights.astype(np.float32))


def checked_number(name: str, value: Any) -> float:
    """Return a finite number of at least 0 as a float.

    Raises:
        TypeError: the value is not a number.
        ValueError: the value is negative, NaN or infinite.
    """
    number = as_number(name, value)
    if not 0 <= number < float("inf"):
        than = "than" if name == "alpha" else "to"
        raise ValueError(
            f"{name} must be greater or equal {than} 0 and finite, got {name}={number}"
        )
    return number


def _power(base: float, alpha: float) -> float:
    """Return ``base ** alpha`` for checks of limits; infinity if it is too large."""
    try:
        return base**alpha if base else 0.0
    except OverflowError:
        return float("inf")


_FAR = 1 << 40
"""A number above every slot, and small enough to be multiplied by the number of lanes."""


class Update(NamedTuple):
    """The checked arguments of a call of ``update_priority``.

    Attributes:
        elements: flat indices of stored rows, int64 ``[K]``, possibly with repetitions.
        priorities: ``[K]`` in the law's dtype, all of them allowed.
        top: the largest flat index plus 1; 0 without entries.
        most: the largest priority; 0 without entries.
        dropped: number of entries that were skipped because their row had been overwritten.
    """

    elements: torch.Tensor
    priorities: torch.Tensor
    top: int
    most: float
    dropped: int


def resolved_update(
    index: Any,
    priority: Any,
    generation: Any,
    law: PriorityLaw,
    storage: Storage | None,
    limit: int,
) -> Update:
    """Check the arguments of ``update_priority`` and return the priorities to set.

    Args:
        limit: number of stored rows.

    Raises:
        TypeError, ValueError, IndexError: as ``update_priority`` does.
    """
    elements = as_elements(index, torch.Size() if storage is None else storage.lanes)
    count = elements.shape[0]
    values = as_priorities(priority, count, law.dtype)
    if not count:
        return Update(elements, values, 0, 0.0, 0)
    least, most = bounds(values)
    law.check(least, most)
    dropped = 0
    if generation is not None:
        live = _live(elements, generation, storage)
        if live is not None:
            dropped = count - int(live.sum())
            elements, values = elements[live], values[live.to(values.device)]
    kept, top = stored_elements(elements, limit)
    if kept is not elements:
        values = values[(elements != -1).to(values.device)]
    if kept.shape[0] < count:
        most = bounds(values)[1] if top else 0.0
    return Update(kept, values, top, most, dropped)


def as_elements(index: Any, lanes: torch.Size) -> torch.Tensor:
    """Return the flat indices of an index: int64 ``[K]``. An entry of -1 stays -1.

    The function does not check whether the rows are stored.

    Args:
        index: an int, a LongTensor ``[K]`` (``[K, ndim]`` with lanes), a tuple of one LongTensor
            per dimension, or a sequence or array of such numbers.
        lanes: sizes of the dimensions after time.

    Raises:
        TypeError: the index does not consist of integers.
        ValueError: the index has another shape.
        IndexError: a lane does not exist.
    """
    ndim = len(lanes) + 1
    if type(index) is torch.Tensor and index.dtype is torch.int64 and index.dim() == 1 == ndim:
        return index
    if isinstance(index, tuple) and (ndim > 1 or len(index) == 1):
        parts = torch.broadcast_tensors(*(_integers(part) for part in index))
        index = torch.stack([part.reshape(-1) for part in parts], -1)
    index = _integers(index)
    if ndim == 1:
        if index.ndim > 2 or (index.ndim == 2 and index.shape[1] != 1):
            raise ValueError(f"expected an index of shape [K], got {list(index.shape)}")
        return index.reshape(-1)
    if index.ndim == 1 and index.shape[0] == ndim:
        index = index[None]
    if index.ndim != 2 or index.shape[1] != ndim:
        raise ValueError(f"expected an index of shape [K, {ndim}], got {list(index.shape)}")
    refused = index[:, 0] == -1
    for dim, size in enumerate(lanes, start=1):
        check_range(index[:, dim].masked_fill(refused, 0), 0, size)
    time = index[:, :1].clamp(-2, _FAR)
    return ravel(torch.cat([time, index[:, 1:]], 1), lanes).masked_fill_(refused, -1)


def _integers(index: Any) -> torch.Tensor:
    if not isinstance(index, torch.Tensor):
        if isinstance(index, (str, bytes)) or not isinstance(
            index, (int, np.integer, np.ndarray, range, Sequence)
        ):
            raise TypeError(f"expected an index as a LongTensor, got {type(index).__name__}")
        index = as_tensor(np.asarray(index) if np.size(index) else [], dtype=None)
        index = index if index.numel() else index.to(torch.int64)
    if index.dtype is torch.int64:
        return index
    if index.dtype is torch.bool or index.is_floating_point() or index.is_complex():
        raise TypeError(f"expected an index of integers, got dtype {index.dtype}")
    return index.to(torch.int64)


def as_priorities(priority: Any, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return one priority for each of ``count`` rows, ``[count]``, detached.

    The function does not check whether the law allows them.

    Raises:
        PriorityCountError: the priorities are not one number, ``[count]`` or ``[count, 1]``. This
            is a ValueError.
        ValueError: the priorities are complex numbers.
    """
    plain = type(priority) is torch.Tensor and not priority.requires_grad
    if plain and priority.dtype is dtype and priority.shape == (count,) and not priority.is_neg():
        return priority
    if not isinstance(priority, torch.Tensor):
        priority = as_tensor(np.asarray(priority))  # Python numbers become float64
    priority = priority.detach().resolve_neg()
    if priority.is_complex():
        raise ValueError(f"expected real numbers as priorities, got {priority.dtype}")
    if priority.dtype is not dtype:
        priority = priority.to(dtype)
    if priority.ndim == 0:
        return priority.repeat(count)
    if priority.shape[0] != count or priority.numel() != count:
        raise PriorityCountError(
            "priority should be a number or an iterable of the same length as index: expected one "
            f"number, or a priority for each of the {count} index entries, got shape "
            f"{list(priority.shape)}"
        )
    return priority.reshape(-1)


def as_it_is(tensor: Any, dtype: torch.dtype, count: int) -> bool:
    """Return whether the core can read ``count`` numbers of ``dtype`` from the tensor."""
    return (
        type(tensor) is torch.Tensor
        and tensor.dtype is dtype
        and tensor.is_cpu
        and tensor.shape == (count,)
        and tensor.is_contiguous()
    )


def last_of_each(index: torch.Tensor, priority: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Give every occurrence of a flat index the priority of its last occurrence.

    Then the order in which a device writes the entries does not matter. No shape depends on the
    data, so no step waits for the device.
    """
    ordered, order = index.sort(stable=True)
    last = torch.searchsorted(ordered, ordered, right=True) - 1
    return ordered, priority[order[last]]


def bounds(values: torch.Tensor) -> tuple[Any, Any]:
    """Return the smallest and largest of ``[K]`` values, K at least 1.

    The results are NaN if any value is NaN. On cuda this waits once for the device.
    """
    least, most = torch.aminmax(values)
    if values.is_cpu:
        return least.item(), most.item()
    return tuple(torch.stack([least, most]).tolist())


def _live(elements: torch.Tensor, generation: Any, storage: Storage | None) -> torch.Tensor | None:
    """Return a mask ``[K]`` of the rows that still have this generation; None: all.

    The mask is True for entries of -1. Raises IndexError for a row that was never stored.
    """
    if storage is None:
        raise ValueError("expected a storage to compare generations with, got none")
    seen = _integers(generation).to(elements.device)
    if seen.dim() != 1:
        seen = seen.reshape(-1)
    if seen.shape != elements.shape:
        raise ValueError(
            f"expected a generation for each of the {len(elements)} index entries, got {len(seen)}"
        )
    lanes = storage.lanes.numel()
    slots = elements if lanes == 1 else torch.div(elements, lanes, rounding_mode="floor")
    now = storage.ledger.generations(slots)
    if torch.equal(now, seen):
        return None
    ignored = elements == -1
    never = (now == -1) & ~ignored
    if bool(never.any()):
        _raise_outside(elements[never], len(storage))
    return (now == seen) | ignored


def stored_elements(elements: torch.Tensor, limit: int) -> tuple[torch.Tensor, int]:
    """Return the flat indices without -1, and the largest index plus 1.

    Raises:
        IndexError: an index is outside ``[0, limit)``.
    """
    if not elements.numel():
        return elements, 0
    least, most = bounds(elements)
    if least < 0:
        elements = elements[elements != -1]
        if not len(elements):
            return elements, 0
        least, most = bounds(elements)
    if least < 0 or most >= limit:
        _raise_outside(elements, limit)
    return elements, most + 1


def _raise_outside(elements: torch.Tensor, limit: int) -> NoReturn:
    outside = elements[(elements < 0) | (elements >= limit)]
    raise IndexError(
        f"expected an index in [0, {limit}), or -1 to leave an entry out, got {int(outside[0])}"
    )


class _Required:
    def __repr__(self) -> str:
        return "<required>"


REQUIRED: Any = _Required()
"""Default of a required argument that follows arguments with a default."""


def check_options(
    kind: str,
    alpha: Any,
    beta: Any,
    max_capacity: Any,
    dtype: Any,
    reduction: Any,
    weight_norm: Any,
) -> None:
    """Check the arguments of ``PrioritizedSampler``, except the values of exponents.

    Args:
        kind: class name of the sampler, for the messages.

    Raises:
        TypeError, ValueError, NotImplementedError: as ``PrioritizedSampler`` does.
    """
    for name, value in (("alpha", alpha), ("beta", beta)):
        if value is REQUIRED:
            raise TypeError(f"{kind} needs {name}; got none")
    read_value(Positive | None, max_capacity, "max_capacity")
    if dtype not in (torch.float32, torch.float64):
        raise NotImplementedError(f"expected dtype float32 or float64, got {dtype}")
    one_of("reduction", reduction, REDUCTIONS)
    one_of("weight_norm", weight_norm, ("global", "batch"))


_VERSION = 1
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_Finite = Annotated[float, within(0, sys.float_info.max)]


@dataclass(frozen=True)
class SavedPriorities:
    """Exponents, counters, and the raw priorities of the stored rows.

    Attributes:
        alpha, beta, eps: parameters of the sampler.
        max_priority: the largest raw priority ever set, at least 1.
        dropped_updates: number of update entries that came too late.
        priorities: raw priorities, float ``[N]``, in the order of the slots. MappedRows are still
            in files, and unchecked.
        schema_version: version of the state.
    """

    PREFIX: ClassVar[str] = "_"
    alpha: _Finite
    beta: _Finite
    eps: _Finite
    max_priority: _Finite
    dropped_updates: Count
    priorities: Annotated[Any, vector(*_FLOATS)]
    schema_version: Positive = _VERSION

    @classmethod
    def from_state(cls, state: dict[str, Any], dtype: torch.dtype) -> SavedPriorities:
        """Read a state dict, with the priorities in ``dtype``. MappedRows are not read.

        Raises:
            ValueError: an entry is missing or invalid.
            CheckpointError: the state has a newer version.
        """
        saved = decode_state(cls, state, "the state of priorities")
        if saved.schema_version > _VERSION:
            raise CheckpointError(
                f"expected a sampler's state of version {_VERSION} or older, got "
                f"{saved.schema_version}"
            )
        # Round the number as the table does, so that it compares correctly with stored priorities.
        most = torch.tensor(saved.max_priority, dtype=torch.float64, device="cpu").to(dtype).item()
        if not 1 <= most < float("inf"):
            raise ValueError(
                f"expected '_max_priority' of at least 1 and finite in {dtype}, got "
                f"{saved.max_priority}"
            )
        raw = saved.priorities
        if isinstance(raw, MappedRows) and raw.dtype != dtype:
            raw = raw.spanned()
        if isinstance(raw, torch.Tensor):
            raw = raw.detach().to(dtype)
        return replace(saved, max_priority=most, priorities=raw)

    def law(self) -> PriorityLaw:
        """Return the sampler's law. Raises ValueError if it forbids a priority in memory."""
        law = PriorityLaw(self.alpha, self.eps, self.priorities.dtype)
        law.check(0.0, self.max_priority)
        if isinstance(self.priorities, torch.Tensor) and len(self.priorities):
            law.check(*bounds(self.priorities))
        return law
