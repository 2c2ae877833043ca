"""Change numbers of a sampler step by step."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal

import torch

from replaykit._compat import Uncompiled
from replaykit.declared import Count, Positive, Rule, read_value
from replaykit.samplers.sampler import Sampler


class ParameterScheduler(Uncompiled, ABC):
    """Sets a numeric attribute of a sampler at every ``step``.

    The attribute is one number, or several numbers, float64 ``[n]``, such as the weights ``p`` of
    an ensemble. Several numbers change in the same way as a single number.

    A custom scheduler defines ``value(k, current)``. It lists its parameters in ``configuration``,
    so that they are saved.

    Args:
        obj: a sampler or a buffer. For a buffer, each step uses the sampler that the buffer then
            has.
        param_name: name of the attribute, such as "beta".
        min_value, max_value: bounds of the results. A bound of 0 counts, too. None: no bound.

    Raises:
        TypeError: ``obj`` is neither a sampler nor a buffer.
        ValueError: the attribute is missing or not numeric, or ``min_value`` is above
            ``max_value``.

    Cost: a step costs the same as setting the attribute: O(1) for beta, and one pass over the
    stored priorities for alpha.

    Example:
        >>> from replaykit import ParameterScheduler, PrioritizedSampler
        >>> class Halving(ParameterScheduler):
        ...     def value(self, step, current):
        ...         return self.initial / 2**step
        >>> sampler = PrioritizedSampler(alpha=0.5, beta=0.8)
        >>> schedule = Halving(sampler, "beta")
        >>> schedule.step()
        >>> sampler.beta
        0.4
    """

    initial: Any
    """The value at construction time."""

    configuration: tuple[str, ...] = ()
    """Names of the attributes that the saved state contains."""

    def __init__(
        self,
        obj: Any,
        param_name: str,
        min_value: float | None = None,
        max_value: float | None = None,
    ) -> None:
        if not isinstance(obj, Sampler) and not isinstance(getattr(obj, "sampler", None), Sampler):
            raise TypeError(f"expected a sampler or a buffer, got {type(obj).__name__}")
        if min_value is not None and max_value is not None and not min_value <= max_value:
            raise ValueError(f"expected min_value <= max_value, got {min_value} and {max_value}")
        self.obj = obj
        self.param_name = param_name
        found = getattr(type(self.sampler), param_name, None)
        if isinstance(found, property) and found.fset is None:
            raise ValueError(
                f"expected an attribute of {type(self.sampler).__name__} that can be set, got "
                f"{param_name!r}"
            )
        self.min_value, self.max_value = min_value, max_value
        self.steps = 0
        self.initial = self.current

    @property
    def sampler(self) -> Sampler:
        """The sampler whose attribute the next step sets."""
        found = self.obj if isinstance(self.obj, Sampler) else self.obj.sampler
        assert isinstance(found, Sampler)
        return found

    @property
    def current(self) -> Any:
        """The attribute's value. Raises ValueError if it is missing or not numeric."""
        sampler = self.sampler
        try:
            found = getattr(sampler, self.param_name)
            if isinstance(found, torch.Tensor) and found.ndim == 1:
                return found.to("cpu", torch.float64, copy=True)
            return float(found)
        except AttributeError:
            raise ValueError(
                f"Provided class {type(sampler).__name__} does not have an attribute "
                f"{self.param_name}; expected an attribute that it has, got {self.param_name!r}"
            ) from None
        except (TypeError, ValueError):
            raise ValueError(
                f"expected {self.param_name!r} of {type(sampler).__name__} to be a number, or "
                f"several, got {found!r}"
            ) from None

    def _like(self, name: str, given: Any) -> Any:
        """Convert an argument to one number, or to as many numbers as the attribute has.

        Raises:
            ValueError: the argument has another number of values.
        """
        if isinstance(given, (int, float)):
            return float(given)
        count = self.initial.shape[0] if isinstance(self.initial, torch.Tensor) else None
        found = torch.as_tensor(given, dtype=torch.float64, device="cpu").detach().clone()
        if found.ndim == 0:
            return float(found)
        if found.shape != (count,):
            wanted = "a number" if count is None else f"a number or {count}"
            raise ValueError(f"expected {name} as {wanted}, got shape {list(found.shape)}")
        return found

    @abstractmethod
    def value(self, step: int, current: Any) -> Any:
        """Return the attribute's value after ``step`` steps, without the bounds."""

    def step(self) -> None:
        """Set the attribute to its next value; nothing changes if the sampler raises."""
        value = self.value(self.steps + 1, self.current)
        least, most = self.min_value, self.max_value
        # Without bounds the value may be of any type that the attribute accepts.
        if isinstance(value, torch.Tensor):
            value = value if least is most is None else value.clamp(least, most)
        else:
            value = value if least is None else max(value, least)
            value = value if most is None else min(value, most)
        setattr(self.sampler, self.param_name, value)
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        """Return step count and configuration, without the sampler and without functions."""
        names = ("param_name", "min_value", "max_value", "initial", "steps", *self.configuration)
        values = {name: getattr(self, name) for name in names}
        return {
            "kind": type(self).__name__,
            **{n: v.tolist() if isinstance(v, torch.Tensor) else v for n, v in values.items()},
        }

    def check_state(self, state_dict: dict[str, Any]) -> None:
        """Raise ValueError unless the state comes from a scheduler of this class."""
        own = self.state_dict()
        if not isinstance(state_dict, dict) or set(state_dict) != set(own):
            raise ValueError(f"expected a state with {sorted(own)}, got {state_dict!r}")
        for name in ("kind", "param_name"):
            if state_dict[name] != own[name]:
                raise ValueError(f"expected {name} {own[name]!r}, got {state_dict[name]!r}")
        for name, mine in own.items():
            rule: Any = str if isinstance(mine, str) else float
            if isinstance(mine, list):
                several = Rule(f"of {len(mine)}", functools.partial(_is_long, len(mine)))
                rule = float | Annotated[list[float], several]
            read_value(_ENTRIES.get(name, rule), state_dict[name], name)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved scheduler.

        The attribute itself is part of the sampler's state.

        Raises:
            ValueError: the state comes from another scheduler; nothing has changed.
        """
        self.check_state(state_dict)
        for name, value in state_dict.items():
            if name != "kind":
                several = isinstance(value, list)
                setattr(self, name, torch.tensor(value, dtype=torch.float64) if several else value)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.param_name!r}, steps={self.steps})"


def _is_long(count: int, values: list[float]) -> bool:
    return len(values) == count


_ENTRIES: dict[str, Any] = {
    "min_value": float | None,
    "max_value": float | None,
    "steps": Count,
    "num_steps": Positive,
    "n_steps": Positive,
}


class LambdaScheduler(ParameterScheduler):
    """Sets the initial value times ``lambda_fn(k)`` at step k = 1, 2, ...

    Args:
        lambda_fn: function that maps k to a factor. If the attribute consists of several numbers,
            the function may return one factor per number. The function is not saved.

    Example:
        >>> from replaykit import LambdaScheduler, PrioritizedSampler
        >>> sampler = PrioritizedSampler(alpha=0.5, beta=0.4)
        >>> schedule = LambdaScheduler(sampler, "beta", lambda k: 1 + k, max_value=1.0)
        >>> schedule.step()
        >>> sampler.beta
        0.8
        >>> schedule.step()
        >>> sampler.beta
        1.0
    """

    def __init__(
        self,
        obj: Any,
        param_name: str,
        lambda_fn: Callable[[int], Any],
        min_value: float | None = None,
        max_value: float | None = None,
    ) -> None:
        if not callable(lambda_fn):
            raise TypeError(f"expected lambda_fn as a function, got {type(lambda_fn).__name__}")
        super().__init__(obj, param_name, min_value, max_value)
        self.lambda_fn = lambda_fn

    def value(self, step: int, current: Any) -> Any:
        return self.initial * self._like("the result of lambda_fn", self.lambda_fn(step))


class LinearScheduler(ParameterScheduler):
    """Moves the attribute linearly to ``final_value``, and keeps exactly that value.

    Args:
        final_value: value after ``num_steps`` steps. An ensemble normalizes its weights ``p``, so
            final weights should sum to 1, too.
        num_steps: number of steps, at least 1.

    Raises:
        ValueError: ``num_steps`` is not an int of at least 1.

    Example:
        >>> from replaykit import LinearScheduler, PrioritizedSampler
        >>> sampler = PrioritizedSampler(alpha=0.5, beta=0.4)
        >>> schedule = LinearScheduler(sampler, "beta", final_value=1.0, num_steps=2)
        >>> for _ in range(3):
        ...     schedule.step()
        ...     print(sampler.beta)
        0.7
        1.0
        1.0
    """

    configuration = ("final_value", "num_steps")

    def __init__(self, obj: Any, param_name: str, final_value: Any, num_steps: int) -> None:
        read_value(Positive, num_steps, "num_steps")
        super().__init__(obj, param_name)
        self.final_value, self.num_steps = self._like("final_value", final_value), num_steps

    def value(self, step: int, current: Any) -> Any:
        if step >= self.num_steps:
            return self.final_value
        return self.initial + (self.final_value - self.initial) * step / self.num_steps


class StepScheduler(ParameterScheduler):
    """Multiplies an attribute by ``gamma``, or adds ``gamma``, at regular steps.

    Args:
        gamma: the factor or summand. If the attribute consists of several numbers, ``gamma`` may
            have one value per number.
        n_steps: number of steps between two changes, at least 1.
        mode: "multiplicative" or "additive".

    Raises:
        ValueError: ``n_steps`` is not an int of at least 1, or ``mode`` is unknown.

    Example:
        >>> from replaykit import PrioritizedSampler, StepScheduler
        >>> sampler = PrioritizedSampler(alpha=0.5, beta=0.25)
        >>> schedule = StepScheduler(sampler, "beta", gamma=0.25, n_steps=2, mode="additive")
        >>> for _ in range(4):
        ...     schedule.step()
        >>> sampler.beta
        0.75
    """

    configuration = ("gamma", "n_steps", "mode")

    def __init__(
        self,
        obj: Any,
        param_name: str,
        gamma: Any = 0.9,
        n_steps: int = 1,
        mode: str = "multiplicative",
        min_value: float | None = None,
        max_value: float | None = None,
    ) -> None:
        read_value(Positive, n_steps, "n_steps")
        read_value(Literal["multiplicative", "additive"], mode, "mode")
        super().__init__(obj, param_name, min_value, max_value)
        self.gamma, self.n_steps, self.mode = self._like("gamma", gamma), n_steps, mode

    def value(self, step: int, current: Any) -> Any:
        if step % self.n_steps:
            return current
        return current * self.gamma if self.mode == "multiplicative" else current + self.gamma


class SchedulerList:
    """Steps several schedulers in their order.

    Args:
        schedulers: ParameterSchedulers or SchedulerLists.

    Raises:
        TypeError: an item is not a scheduler.

    Example:
        >>> from replaykit import LinearScheduler, PrioritizedSampler, SchedulerList
        >>> sampler = PrioritizedSampler(alpha=0.5, beta=0.5)
        >>> both = SchedulerList([LinearScheduler(sampler, "beta", 1.0, 1)])
        >>> both.append(LinearScheduler(sampler, "alpha", 0.0, 1))
        >>> both.step()
        >>> sampler.alpha, sampler.beta
        (0.0, 1.0)
    """

    def __init__(self, schedulers: Iterable[Any] = ()) -> None:
        self.schedulers: list[Any] = []
        for scheduler in schedulers:
            self.append(scheduler)

    def append(self, scheduler: Any) -> None:
        """Add a scheduler at the end."""
        if not isinstance(scheduler, (ParameterScheduler, SchedulerList)):
            raise TypeError(f"expected a scheduler, got {type(scheduler).__name__}")
        self.schedulers.append(scheduler)

    def step(self) -> None:
        """Step each scheduler."""
        for scheduler in self.schedulers:
            scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all schedulers."""
        return {"schedulers": [scheduler.state_dict() for scheduler in self.schedulers]}

    def check_state(self, state_dict: dict[str, Any]) -> None:
        """Raise ValueError unless the state has one valid state for each scheduler."""
        states = state_dict.get("schedulers") if isinstance(state_dict, dict) else None
        if not isinstance(states, list) or len(states) != len(self.schedulers):
            raise ValueError(
                f"expected the states of {len(self.schedulers)} schedulers, got {state_dict!r}"
            )
        for scheduler, state in zip(self.schedulers, states, strict=True):
            scheduler.check_state(state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from saved schedulers.

        Raises:
            ValueError: the states come from other schedulers; nothing has changed.
        """
        self.check_state(state_dict)
        for scheduler, state in zip(self.schedulers, state_dict["schedulers"], strict=True):
            scheduler.load_state_dict(state)

    def __len__(self) -> int:
        return len(self.schedulers)
