"""Arguments that do not fit: what callers learn of them, by the names that callers know."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from types import FunctionType
from typing import Any, NamedTuple, TypeVar, cast

__all__ = ["Replaced", "checked_keywords", "named_after", "refuse_unknown"]

_Class = TypeVar("_Class", bound=type)
_Init = TypeVar("_Init", bound=Callable[..., None])


class Replaced(NamedTuple):
    """A keyword of TorchRL that a class has no parameter for.

    Attributes:
        same: values that ask for what the class does anyway; they are accepted.
        instead: what callers use in the place of any other value; goes into the error.
    """

    same: tuple[Any, ...]
    instead: str

    def accepts(self, value: Any) -> bool:
        """Whether a value asks for what is done anyway."""
        return any(type(value) is type(known) and value == known for known in self.same)


def checked_keywords(init: _Init) -> _Init:
    """Makes a constructor say which class was called, and which keyword was meant.

    Where the class, or a base of it, has an attribute ``_replaced`` of `Replaced` by keyword, such
    keywords are taken out if they ask for what is done anyway.

    Raises:
        ValueError: when called, such a keyword with another value; says what to use.
        TypeError: when called, arguments that do not fit, in the words of Python; with the
            nearest keyword, where one is near.

    Cost: a few microseconds an object.

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
                if not replaced.accepts(value):
                    raise ValueError(
                        f"{_name(cls)} does not take {name}={value!r:.80}: {replaced.instead}"
                    )
        try:
            init(self, *args, **kwargs)
        except TypeError as error:
            trace = error.__traceback__
            if trace is not None and trace.tb_next is not None:
                raise  # from inside of the constructor: about something else
            refuse_unknown(cls, kwargs, _known(cls))
            text = str(error).replace(f"{init.__qualname__}()", f"{_name(cls)}.__init__()", 1)
            raise TypeError(text) from None

    return cast(_Init, checked)


def named_after(cls: _Class) -> _Class:
    """Names the methods that a class has from private bases after the class.

    Python's errors about arguments name the class in which a method was written, such as
    ``Drawing.sample()``, where callers know ``ReplayBuffer.sample()``. Bases that were given to
    this function before keep their methods.

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
        for name, member in vars(base).items():
            if isinstance(member, (classmethod, staticmethod)):
                member = member.__func__
            for method in (member.fget, member.fset) if isinstance(member, property) else (member,):
                found = getattr(method, "__qualname__", None)
                if isinstance(method, FunctionType) and found == f"{base.__name__}.{name}":
                    method.__qualname__ = f"{cls.__name__}.{name}"
                    method.__module__ = cls.__module__  # where pickle finds it by that name
    return cls


def refuse_unknown(cls: type, given: Mapping[str, Any], known: Collection[str]) -> None:
    """Raises TypeError where a keyword is not known; names the nearest one that is."""
    for name in given:
        if name in known:
            continue
        near = get_close_matches(name, known, 1)
        text = f"{_name(cls)}.__init__() got an unexpected keyword argument {name!r}"
        raise TypeError(f"{text}; did you mean {near[0]!r}?" if near else text)


def _name(cls: type) -> str:
    """The class as callers know it: a private one has the name of the public one it stands for."""
    return next((base.__name__ for base in cls.__mro__ if base.__name__[0] != "_"), cls.__name__)


def _known(cls: type) -> set[str]:
    """Names of the parameters of a class, with those that its constructor hands on."""
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
