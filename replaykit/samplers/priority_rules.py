"""Check priorities and options of samplers, and turn priorities into draw weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch

from replaykit._compat import as_tensor
from replaykit.checkpoint import MappedRows
from replaykit.errors import CheckpointError, PriorityCountError
from replaykit.native import power
from replaykit.reductions import REDUCTIONS
from replaykit.storages import Storage
from replaykit.storages.indexing import check_range, ravel

__all__ = [
    "REQUIRED",
    "PriorityLaw",
    "SavedPriorities",
    "Update",
    "as_elements",
    "as_it_is",
    "as_priorities",
    "bounds",
    "check_options",
    "checked_number",
    "importance_weights",
    "last_of_each",
    "resolved_update",
    "stored_elements",
]

_MOST_ELEMENTS = 2.0**48


class PriorityLaw:
    """``v = (p + eps) ** alpha`` (Schaul et al. 2016, equation 1), and which ``p`` are allowed.

    ``p = 0`` with ``eps = 0`` gives 0 for every alpha, also for 0: such a record is never drawn.

    Attributes:
        most: the largest ``v`` that is allowed.

    Args:
        alpha, eps: finite numbers of at least 0.
        dtype: of ``p`` and ``v``, float32 or float64.

    Raises:
        TypeError: no number. ValueError: negative, NaN or infinite.

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
        # Sums are float64: where v is too, it leaves room for a sum over all elements.
        self.most = limits.max / (_MOST_ELEMENTS if dtype == torch.float64 else 1.0)
        self.may_be_zero = _power(self.eps, self.alpha) < 2 * limits.tiny
        """Whether ``v`` can be 0 at all; where it cannot, there is always something to draw."""
        self._one: tuple[float, float] | None = None

    def check(self, least: float, most: float) -> None:
        """Raises ValueError unless all priorities between these two are allowed; NaN is not."""
        # Written so that a comparison with NaN fails.
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
        """Returns ``v`` of allowed priorities ``[K]``, float64 on their device; trees round it.

        On the CPU the bits depend on the number alone, not on its place in a batch and not on the
        machine: see ``native.power``.
        """
        if not priority.is_cpu:
            base = priority.to(torch.float64) + self.eps
            return base.pow(self.alpha) if self.alpha else base.sign()
        base = np.add(priority.numpy(), self.eps, dtype=np.float64)
        return torch.from_numpy(power(base, self.alpha))

    def value_of(self, priority: float) -> float:
        """Returns ``v`` of one allowed priority, to the bit what ``values`` gives."""
        known = self._one
        if known is None or known[0] != priority:
            values = self.values(torch.full((1,), priority, dtype=self.dtype, device="cpu"))
            known = self._one = priority, values.item()
        return known[1]

    def positive(self, value: Any) -> Any:
        """``v`` where it is to count for the smallest one; infinite where it is kept as 0."""
        if not self.may_be_zero:
            return value
        tiny = torch.finfo(self.dtype).tiny
        if isinstance(value, float):
            return value if value >= tiny else float("inf")
        value = value.to(self.dtype)  # what is just below may be rounded up
        return value.masked_fill(value < tiny, float("inf"))


def importance_weights(
    values: torch.Tensor, smallest: Any, beta: float, dtype: torch.dtype
) -> torch.Tensor:
    """Returns ``(v / smallest) ** -beta``, ``[B]`` in ``dtype``, of float64 ``v``.

    This is ``(N P(i)) ** -beta`` over its largest value (Schaul et al. 2016, section 3.4); N and
    the sum cancel.

    Args:
        smallest: of the values that the weights are relative to; a number, or a scalar tensor.

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
    """Returns a finite number of at least 0 as a float.

    Raises:
        TypeError: no number. ValueError: negative, NaN or infinite.
    """
    try:
        if isinstance(value, (str, bytes)):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"expected {name} as a number, got {value!r}") from None
    if not 0 <= number < float("inf"):
        than = "than" if name == "alpha" else "to"
        raise ValueError(
            f"{name} must be greater or equal {than} 0 and finite, got {name}={number}"
        )
    return number


def _power(base: float, alpha: float) -> float:
    """``base ** alpha`` for the sake of limits; infinite where it is too large for a float."""
    try:
        return base**alpha if base else 0.0
    except OverflowError:
        return float("inf")


_FAR = 1 << 40
"""Beyond every slot, and small enough to be multiplied by a number of lanes."""


class Update(NamedTuple):
    """What a call of ``update_priority`` comes to.

    Attributes:
        elements: int64 ``[K]``, all of them stored, possibly one several times.
        priorities: ``[K]`` in the law's dtype, all of them allowed.
        top: what lies above every element; 0 where there is none.
        most: the largest priority; 0 where there is none.
        dropped: entries that were left out because their record had been overwritten.
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
    """Checks the arguments of ``update_priority`` and returns what is left to be set.

    Args:
        limit: number of stored elements.

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
    """Returns the elements that an index names: int64 ``[K]``, -1 where it says -1.

    Args:
        index: int, LongTensor ``[K]`` (``[K, ndim]`` where there are lanes), tuple of one
            LongTensor a dimension, or a sequence or array of such numbers.
        lanes: sizes of the dimensions beside time.

    Raises:
        TypeError: not integers. ValueError: another shape. IndexError: a lane that does not exist.
        Whether the elements are stored is not looked at.
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
    """Returns one priority for each of ``count`` elements, ``[count]``, detached.

    Raises:
        ValueError: not one number for all, ``[count]`` or ``[count, 1]`` (PriorityCountError), or
            complex numbers.
        Whether they can be set is not looked at.
    """
    plain = type(priority) is torch.Tensor and not priority.requires_grad
    if plain and priority.dtype is dtype and priority.shape == (count,) and not priority.is_neg():
        return priority
    if not isinstance(priority, torch.Tensor):
        priority = as_tensor(np.asarray(priority))  # numbers of Python as float64
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
    """Whether the core can read ``count`` numbers of the dtype where the tensor lies."""
    return (
        type(tensor) is torch.Tensor
        and tensor.dtype is dtype
        and tensor.is_cpu
        and tensor.dim() == 1
        and tensor.numel() == count
        and tensor.is_contiguous()
    )


def last_of_each(index: torch.Tensor, priority: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gives every occurrence of an element the priority of its last one.

    Then the order in which a device writes them does not matter. No shape depends on the data, so
    that nothing waits for the device.
    """
    ordered, order = index.sort(stable=True)
    last = torch.searchsorted(ordered, ordered, right=True) - 1
    return ordered, priority[order[last]]


def bounds(values: torch.Tensor) -> tuple[Any, Any]:
    """Returns the least and the largest of ``[K]``, K at least 1; NaN where there is one.

    On cuda this waits for the device, once.
    """
    least, most = torch.aminmax(values)
    if values.is_cpu:
        return least.item(), most.item()
    return tuple(torch.stack([least, most]).tolist())


def _live(elements: torch.Tensor, generation: Any, storage: Storage | None) -> torch.Tensor | None:
    """Which elements ``[K]`` still have the generation that was seen; None: all of them.

    Elements -1 count as live. IndexError for one that never was stored.
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
    """Returns elements without those that are -1, and what lies above the largest.

    Raises:
        IndexError: one outside ``[0, limit)``.
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


_WEIGHT_NORMS = ("global", "batch")


class _Required:
    def __repr__(self) -> str:
        return "<required>"


REQUIRED: Any = _Required()
"""Default of an argument without one, that follows others with one."""


def check_options(
    kind: str,
    alpha: Any,
    beta: Any,
    max_capacity: Any,
    dtype: Any,
    reduction: Any,
    weight_norm: Any,
) -> None:
    """Raises what ``PrioritizedSampler`` does, but for the values of the exponents.

    Args:
        kind: class of the sampler, for what is said.
    """
    for name, value in (("alpha", alpha), ("beta", beta)):
        if value is REQUIRED:
            raise TypeError(f"{kind} needs {name}; got none")
    if max_capacity is not None and (type(max_capacity) is not int or max_capacity < 1):
        raise ValueError(f"expected max_capacity as an int of at least 1, got {max_capacity!r}")
    if dtype not in (torch.float32, torch.float64):
        raise NotImplementedError(f"expected dtype float32 or float64, got {dtype}")
    if reduction not in REDUCTIONS:
        raise ValueError(f"expected reduction as one of {REDUCTIONS}, got {reduction!r}")
    if weight_norm not in _WEIGHT_NORMS:
        raise ValueError(f"expected weight_norm as one of {_WEIGHT_NORMS}, got {weight_norm!r}")


_VERSION = 1


@dataclass(frozen=True)
class SavedPriorities:
    """Exponents, counters, and the raw priorities of the stored elements.

    Attributes:
        alpha, beta, eps: of the sampler.
        max_priority: the largest raw priority ever set, at least 1.
        dropped_updates: entries of updates that came too late.
        priorities: raw, float ``[N]``, in physical order.
        unread: the files in which they lie yet, unchecked; empty where they are in memory.
    """

    alpha: float
    beta: float
    eps: float
    max_priority: float
    dropped_updates: int
    priorities: torch.Tensor
    unread: str = ""

    def to_state(self) -> dict[str, Any]:
        """Returns it as the entries of a state dict."""
        return {
            "_schema_version": _VERSION,
            "_alpha": self.alpha,
            "_beta": self.beta,
            "_eps": self.eps,
            "_max_priority": self.max_priority,
            "_dropped_updates": self.dropped_updates,
            "_priorities": self.priorities,
        }

    @classmethod
    def from_state(cls, state: dict[str, Any], dtype: torch.dtype) -> SavedPriorities:
        """Reads it from a state dict, with the priorities in ``dtype``; MappedRows are not read.

        Raises:
            ValueError: an entry is missing or impossible. CheckpointError: of a newer version.
        """
        version = state.get("_schema_version")
        if type(version) is not int or version < 1:
            raise ValueError(f"expected a schema version in the sampler's state, got {version!r}")
        if version > _VERSION:
            raise CheckpointError(
                f"expected a sampler's state of version {_VERSION} or older, got {version}"
            )
        alpha, beta, eps, most = (
            _number(state, name) for name in ("_alpha", "_beta", "_eps", "_max_priority")
        )
        # As it would be stored, and compared with what is.
        rounded = torch.full((), most, dtype=torch.float64, device="cpu").to(dtype).item()
        if not 1 <= rounded < float("inf"):
            raise ValueError(
                f"expected '_max_priority' of at least 1 and finite in {dtype}, got {most}"
            )
        dropped = state.get("_dropped_updates")
        # Storages in files keep it as an int64, to which more are added.
        if type(dropped) is not int or not 0 <= dropped <= 2**62:
            raise ValueError(f"expected '_dropped_updates' as a count, got {dropped!r}")
        raw = state.get("_priorities")
        where = ""
        if isinstance(raw, MappedRows):
            where, raw = raw.where, raw.spanned()
        if not isinstance(raw, torch.Tensor) or raw.ndim != 1 or not raw.is_floating_point():
            raise ValueError(f"expected '_priorities' as a vector of floats, got {raw!r}")
        return cls(
            alpha,
            beta,
            eps,
            rounded,
            dropped,
            raw.detach().to(dtype),
            where if raw.dtype == dtype else "",
        )

    def law(self) -> PriorityLaw:
        """The sampler's law; ValueError where it does not allow the priorities, as far as they are
        read."""
        law = PriorityLaw(self.alpha, self.eps, self.priorities.dtype)
        law.check(0.0, self.max_priority)
        if len(self.priorities) and not self.unread:
            law.check(*bounds(self.priorities))
        return law


def _number(state: dict[str, Any], name: str) -> float:
    try:
        return checked_number(name, state.get(name))
    except TypeError as error:
        raise ValueError(str(error)) from None
