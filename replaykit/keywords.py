"""Use public class and method names in errors about wrong arguments."""

from __future__ import annotations

import functools
import inspect
import math
import operator
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from difflib import get_close_matches
from types import FunctionType
from typing import Any, NamedTuple, TypeVar, cast

_Class = TypeVar("_Class", bound=type)
_Init = TypeVar("_Init", bound=Callable[..., None])


class Replaced(NamedTuple):
    """A keyword of TorchRL for which a class has no parameter.

    Attributes:
        same: accepted values, which match the behavior of the class.
        instead: advice for all other values, as a part of the error message.
    """

    same: tuple[Any, ...]
    instead: str


def checked_keywords(init: _Init) -> _Init:
    """Make a constructor's errors name the called class and suggest a similar keyword.

    The class and its bases may have an attribute ``_replaced``, a dict of `Replaced` by keyword.
    The constructor accepts and drops such a keyword if its value matches the behavior of the class.

    Raises:
        ValueError: from a constructor call, if such a keyword has another value. The error gives
            the advice.
        TypeError: from a constructor call, if arguments do not fit. The message is Python's, with a
            similar keyword if there is one.

    Cost: a few microseconds per object.

    Example:
        >>> from replaykit.keywords import Replaced, checked_keywords
        >>> class Bag:
        ...     _replaced = {"sync": Replaced((True,), "leave sync out")}
        ...     @checked_keywords
        ...     def __init__(self, *, capacity: int = 1) -> None: ...
        >>> class Sack(Bag): ...
        >>> _ = Sack(sync=True)
        >>> Sack(capacty=3)
        Traceback (most recent call last):
        TypeError: Sack.__init__() got an unexpected keyword argument 'capacty'; did you mean...
        >>> Sack(sync=False)
        Traceback (most recent call last):
        ValueError: Sack does not take sync=False: leave sync out
    """

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        cls = type(self)
        for base in cls.__mro__:
            for name, replaced in vars(base).get("_replaced", {}).items():
                if name not in kwargs:
                    continue
                value = kwargs.pop(name)
                if not any(type(value) is type(one) and value == one for one in replaced.same):
                    raise ValueError(
                        f"{_name(cls)} does not take {name}={value!r:.80}: {replaced.instead}"
                    )
        try:
            init(self, *args, **kwargs)
        except TypeError as error:
            trace = error.__traceback__
            if trace is not None and trace.tb_next is not None:
                raise  # from inside the constructor, not from the call
            refuse_unknown(cls, kwargs, _known(cls))
            text = str(error).replace(f"{init.__qualname__}()", f"{_name(cls)}.__init__()", 1)
            raise TypeError(text) from None

    return cast(_Init, checked)


def named_after(cls: _Class) -> _Class:
    """Name the methods that a class inherits from private bases after the class.

    Python's errors about arguments name the class that defines a method, such as
    ``ColumnReads.cut()``. Callers expect ``TensorStorage.cut()``. Bases that were passed to this
    function earlier keep the names of their methods.

    Example:
        >>> from replaykit.keywords import named_after
        >>> class Part:
        ...     def sample(self): ...
        >>> @named_after
        ... class Whole(Part): ...
        >>> Whole().sample(3)
        Traceback (most recent call last):
        TypeError: Whole.sample() takes 1 positional argument but 2 were given
    """
    cls._named = True  # type: ignore[attr-defined]
    for base in cls.__mro__:
        if base is object or ("_named" in vars(base) and base is not cls):
            continue
        for name, method in functions_of(base):
            if method.__qualname__ == f"{base.__name__}.{name}":
                method.__qualname__ = f"{cls.__name__}.{name}"
                method.__module__ = cls.__module__  # pickle finds the method there by that name
    return cls


def functions_of(cls: type) -> Iterator[tuple[str, FunctionType]]:
    """Yield the functions that a class itself defines, with the names of its members."""
    for name, member in vars(cls).items():
        if isinstance(member, (classmethod, staticmethod)):
            member = member.__func__
        for function in (member.fget, member.fset) if isinstance(member, property) else (member,):
            if isinstance(function, FunctionType):
                yield name, function


def refuse_unknown(cls: type, given: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise TypeError for an unknown keyword, with the most similar known one."""
    for name in given:
        if name in known:
            continue
        near = get_close_matches(name, known, 1)
        text = f"{_name(cls)}.__init__() got an unexpected keyword argument {name!r}"
        raise TypeError(f"{text}; did you mean {near[0]!r}?" if near else text)


def _name(cls: type) -> str:
    """Return the name of the class, or of its nearest public base."""
    return next((base.__name__ for base in cls.__mro__ if base.__name__[0] != "_"), cls.__name__)


def _known(cls: type) -> set[str]:
    """Return the names of a constructor's parameters, including those for bases."""
    found: set[str] = set()
    for base in cls.__mro__:
        if "__init__" not in vars(base):
            continue
        parameters = inspect.signature(vars(base)["__init__"]).parameters.values()
        named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        found |= {one.name for one in parameters if one.kind in named}
        if not any(one.kind is one.VAR_KEYWORD for one in parameters):
            break
    return found - {"self"}


class _OldName(property):
    """A property whose getter errors show with the name of the class and the attribute."""

    def __set_name__(self, owner: type, name: str) -> None:
        cast(FunctionType, self.fget).__qualname__ = f"{owner.__name__}.{name}"


def old_name(old: str, new: str) -> property:
    """Return a deprecated property that reads an attribute by its old name.

    Example:
        >>> import warnings
        >>> from replaykit.keywords import old_name
        >>> class Ring:
        ...     def poll(self):
        ...         return 3
        ...
        ...     look = old_name("look", "poll")
        >>> with warnings.catch_warnings(record=True) as found:
        ...     warnings.simplefilter("always")
        ...     Ring().look()
        3
        >>> str(found[0].message)
        'Ring.look is deprecated and works for one more release; use Ring.poll'
    """

    def read(self: Any) -> Any:
        name = type(self).__name__
        warnings.warn(
            f"{name}.{old} is deprecated and works for one more release; use {name}.{new}",
            DeprecationWarning,
            stacklevel=2,
        )
        return getattr(self, new)

    return _OldName(read, doc=f"The old name of `{new}`; deprecated.")


def whole_number(name: str, value: Any, least: int | None = None) -> int:
    """Return an argument as an int.

    Raises:
        TypeError: the value is not an int, or is a bool.
        ValueError: the value is below ``least``.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"expected {name} as an int, got {value!r}") from None
    if least is not None and number < least:
        raise ValueError(f"expected {name} of at least {least}, got {value!r}")
    return number


def as_number(name: str, value: Any, *, finite: bool = False) -> float:
    """Return the value of the argument ``name`` as a float.

    Raises:
        TypeError: the value is not a number.
        ValueError: the value is infinite or NaN, and ``finite`` is True.
    """
    try:
        number = float("no number" if isinstance(value, (bool, str, bytes)) else value)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name}: expected a number, got {value!r}") from None
    if finite and not math.isfinite(number):
        raise ValueError(f"{name}: expected a finite number, got {number}")
    return number


def as_share(name: str, value: Any) -> float:
    """Return the argument ``name`` as a float.

    Raises:
        TypeError: the value is not a number.
        ValueError: the value is outside [0, 1].
    """
    number = as_number(name, value)
    if not 0 <= number <= 1:
        raise ValueError(f"{name}: expected a number in [0, 1], got {value!r}")
    return number


def one_of(name: str, value: object, known: Collection[str]) -> str:
    """Return the argument ``name``. Raises ValueError unless it is one of the known texts."""
    if not isinstance(value, str) or value not in known:
        listed = ", ".join(map(repr, known))
        raise ValueError(f"{name}: expected one of {listed}, got {value!r}")
    return value
