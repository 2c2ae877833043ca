"""From raw priorities to what records are drawn by."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from replaykit.native import power

__all__ = ["PriorityLaw", "checked_number", "importance_weights"]

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
        >>> from replaykit.samplers.priority_law import PriorityLaw
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
        >>> from replaykit.samplers.priority_law import importance_weights
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
