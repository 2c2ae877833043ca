"""Numbers of a sampler that change step by step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch

from replaykit._compat import Uncompiled
from replaykit.samplers.sampler import Sampler

__all__ = [
    "LambdaScheduler",
    "LinearScheduler",
    "ParameterScheduler",
    "SchedulerList",
    "StepScheduler",
]


class ParameterScheduler(Uncompiled, ABC):
    """Sets a numeric attribute of a sampler at every ``step``: a number, or several, float64
    ``[n]``, such as the weights ``p`` of an ensemble, of which each changes as one number would.

    A scheduler of one's own brings ``value(k, current)``, and names what it is configured by in
    ``configuration`` so that it is saved.

    Args:
        obj: a sampler, or a buffer: then the sampler that it has at each step.
        param_name: the attribute, such as "beta".
        min_value, max_value: what results are clipped to, 0 included; None: no bound.

    Raises:
        TypeError: neither a sampler nor a buffer.
        ValueError: no such attribute, one that is no number, or ``min_value`` above ``max_value``.

    Cost of a step: that of setting the attribute; O(1) for beta, one pass over the stored
    priorities for alpha.

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
    """The value at construction."""

    configuration: tuple[str, ...] = ()
    """Names of the attributes that belong to the saved state."""

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
        """The sampler whose attribute is set now."""
        found = self.obj if isinstance(self.obj, Sampler) else self.obj.sampler
        assert isinstance(found, Sampler)
        return found

    @property
    def current(self) -> Any:
        """What the attribute is now; ValueError where there is none or it is no number."""
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
        """An argument that is one number, or as many as the attribute has.

        Raises:
            ValueError: another number of them.
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
        """Returns what the attribute is to be after ``step`` steps, before it is clipped."""

    def step(self) -> None:
        """Sets the attribute to its next value; where that is refused, nothing has changed."""
        value = self.value(self.steps + 1, self.current)
        if isinstance(value, torch.Tensor):
            if self.min_value is not None or self.max_value is not None:
                value = value.clamp(self.min_value, self.max_value)
        else:
            if self.min_value is not None:
                value = max(value, self.min_value)
            if self.max_value is not None:
                value = min(value, self.max_value)
        sampler = self.sampler
        sampler._settle_draws()
        setattr(sampler, self.param_name, value)
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        """Returns step count and configuration, without the sampler and without functions."""
        names = ("param_name", "min_value", "max_value", "initial", "steps", *self.configuration)
        values = {name: getattr(self, name) for name in names}
        return {
            "kind": type(self).__name__,
            **{n: v.tolist() if isinstance(v, torch.Tensor) else v for n, v in values.items()},
        }

    def check_state(self, state_dict: dict[str, Any]) -> None:
        """Raises ValueError where the state is not that of a scheduler of this class."""
        if not isinstance(state_dict, dict) or set(state_dict) != set(self.state_dict()):
            raise ValueError(
                f"expected a state with {sorted(self.state_dict())}, got {state_dict!r}"
            )
        for name, expected in (("kind", type(self).__name__), ("param_name", self.param_name)):
            if state_dict[name] != expected:
                raise ValueError(f"expected {name} {expected!r}, got {state_dict[name]!r}")
        if type(state_dict["steps"]) is not int or state_dict["steps"] < 0:
            raise ValueError(f"expected a count of steps, got {state_dict['steps']!r}")
        for name, mine in self.state_dict().items():
            found = state_dict[name]
            if isinstance(mine, str):
                fits = type(found) is str
            elif name in ("min_value", "max_value"):
                fits = found is None or _is_number(found)
            elif isinstance(mine, list):
                fits = _is_number(found) or (
                    isinstance(found, list)
                    and len(found) == len(mine)
                    and all(map(_is_number, found))
                )
            else:
                fits = _is_number(found)
            if not fits:
                raise ValueError(f"expected {name!r} like {mine!r}, got {found!r}")
            if name in ("num_steps", "n_steps") and (type(found) is not int or found < 1):
                raise ValueError(f"expected {name!r} as an int of at least 1, got {found!r}")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on where the saved scheduler was; the attribute itself is the sampler's state.

        Raises:
            ValueError: the state of another scheduler; nothing has changed.
        """
        self.check_state(state_dict)
        for name, value in state_dict.items():
            if name != "kind":
                several = isinstance(value, list)
                setattr(self, name, torch.tensor(value, dtype=torch.float64) if several else value)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.param_name!r}, steps={self.steps})"


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and value == value


class LambdaScheduler(ParameterScheduler):
    """Sets the value at construction times ``lambda_fn(k)``, k counting steps from 1.

    Args:
        lambda_fn: from the number of the step to a factor, or one for each of several numbers; not
            saved.

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
        return self.initial * self._like("what lambda_fn returns", self.lambda_fn(step))


class LinearScheduler(ParameterScheduler):
    """Goes in a straight line to ``final_value``, which it reaches exactly and keeps.

    Args:
        final_value: after ``num_steps`` steps; of weights those that sum to 1, since it is these
            that go in a straight line.
        num_steps: at least 1, else ValueError.

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
        if type(num_steps) is not int or num_steps < 1:
            raise ValueError(f"expected num_steps as an int of at least 1, got {num_steps!r}")
        super().__init__(obj, param_name)
        self.final_value, self.num_steps = self._like("final_value", final_value), num_steps

    def value(self, step: int, current: Any) -> Any:
        if step >= self.num_steps:
            return self.final_value
        return self.initial + (self.final_value - self.initial) * step / self.num_steps


class StepScheduler(ParameterScheduler):
    """Multiplies by ``gamma``, or adds it, every ``n_steps`` steps.

    Args:
        gamma: factor, or what is added; or one for each of several numbers.
        n_steps: at least 1, else ValueError.
        mode: "multiplicative" or "additive", else ValueError.

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
        if type(n_steps) is not int or n_steps < 1:
            raise ValueError(f"expected n_steps as an int of at least 1, got {n_steps!r}")
        if mode not in ("multiplicative", "additive"):
            raise ValueError(f"expected mode 'multiplicative' or 'additive', got {mode!r}")
        super().__init__(obj, param_name, min_value, max_value)
        self.gamma, self.n_steps, self.mode = self._like("gamma", gamma), n_steps, mode

    def value(self, step: int, current: Any) -> Any:
        if step % self.n_steps:
            return current
        return current * self.gamma if self.mode == "multiplicative" else current + self.gamma


class SchedulerList:
    """Steps several schedulers at once, in their order.

    Args:
        schedulers: ParameterSchedulers, or lists of them.

    Raises:
        TypeError: something else.

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
        """Adds a scheduler at the end."""
        if not isinstance(scheduler, (ParameterScheduler, SchedulerList)):
            raise TypeError(f"expected a scheduler, got {type(scheduler).__name__}")
        self.schedulers.append(scheduler)

    def step(self) -> None:
        """Steps each of them."""
        for scheduler in self.schedulers:
            scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """Returns the states of all."""
        return {"schedulers": [scheduler.state_dict() for scheduler in self.schedulers]}

    def check_state(self, state_dict: dict[str, Any]) -> None:
        """Raises ValueError where the state is not one of as many schedulers of these classes."""
        states = state_dict.get("schedulers") if isinstance(state_dict, dict) else None
        if not isinstance(states, list) or len(states) != len(self.schedulers):
            raise ValueError(
                f"expected the states of {len(self.schedulers)} schedulers, got {state_dict!r}"
            )
        for scheduler, state in zip(self.schedulers, states, strict=True):
            scheduler.check_state(state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on where the saved ones were.

        Raises:
            ValueError: the states of other schedulers; nothing has changed.
        """
        self.check_state(state_dict)
        for scheduler, state in zip(self.schedulers, state_dict["schedulers"], strict=True):
            scheduler.load_state_dict(state)

    def __len__(self) -> int:
        return len(self.schedulers)
