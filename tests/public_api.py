"""Describe every public name of the package; ``python -m tests.public_api`` writes the snapshot."""

from __future__ import annotations

import enum
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import replaykit

SNAPSHOT = Path(__file__).with_name("public_api.txt")

MODULES = (
    "replaykit",
    "replaykit.adapters",
    "replaykit.checkpoint",
    "replaykit.datasets",
    "replaykit.datasets.families",
    "replaykit.errors",
    "replaykit.inspection",
    "replaykit.ted",
    "replaykit.testing",
)
"""Modules whose ``__all__`` users may import from, as the documentation does."""


def describe() -> str:
    """Return one line for each public name, and one for each public member of a class.

    Members that a class shares with a public base class are listed there only.
    """
    lines: list[str] = []
    seen: dict[int, str] = {}
    for module in MODULES:
        found = importlib.import_module(module)
        for name in sorted(getattr(found, "__all__", ())):
            value, path = getattr(found, name), f"{module}.{name}"
            if inspect.isclass(value) or inspect.isfunction(value):
                if id(value) in seen:
                    lines.append(f"{path} = {seen[id(value)]}")
                    continue
                seen[id(value)] = path
            lines += _described(path, value, seen)
    return "\n".join(lines) + "\n"


def _described(path: str, value: Any, seen: dict[int, str]) -> Iterator[str]:
    if inspect.isclass(value):
        base = next((each for each in value.__mro__[1:] if _is_public(each)), None)
        inherited = {_member(base, name) for name in _members(base)} if base else set()
        yield f"class {path}{_signature(value)}{f' is a {base.__name__}' if base else ''}"
        for name in sorted(_members(value)):
            if (member := _member(value, name)) not in inherited:
                yield f"    {member}"
    elif inspect.isroutine(value):
        yield f"def {path}{_signature(value)}"
    else:
        yield f"{path}: {type(value).__name__}"


def _is_public(cls: type) -> bool:
    """Return whether users can import a class from the package itself."""
    return getattr(replaykit, cls.__name__, None) is cls


def _members(cls: type) -> set[str]:
    """Public attributes that the package's own classes define, without those of other libraries."""
    own = [base for base in cls.__mro__ if base.__module__.split(".")[0] == "replaykit"]
    names = {name for base in own for name in vars(base)}
    special = {"__call__", "__getitem__", "__setitem__", "__iter__", "__len__", "__contains__"}
    return {name for name in names if not name.startswith("_") or name in special}


def _member(cls: type, name: str) -> str:
    found = inspect.getattr_static(cls, name)
    if isinstance(cls, enum.EnumMeta) and name in cls.__members__:
        return f"{name} = {cls[name].value!r}"
    if isinstance(found, property):
        return f"{name}: property{' (can be set)' if found.fset else ''}"
    if isinstance(found, (classmethod, staticmethod)):
        return f"{type(found).__name__} {name}{_signature(found.__func__)}"
    if inspect.isroutine(found) and callable(found):  # not every descriptor is a method
        return f"{name}{_signature(found)}"
    return f"{name}: attribute"


def _signature(value: Any) -> str:
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return "(...)"
    text = str(
        signature.replace(
            parameters=[
                each.replace(
                    annotation=_annotation(each.annotation), default=_default(each.default)
                )
                for each in signature.parameters.values()
            ],
            return_annotation=_annotation(signature.return_annotation),
        )
    )
    return re.sub(r" at 0x[0-9a-f]+", "", text)


class _Text(str):
    """A string that prints without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _annotation(annotation: Any) -> Any:
    if annotation is inspect.Signature.empty:
        return annotation
    return _Text(
        annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    )


def _default(default: Any) -> Any:
    if default is inspect.Parameter.empty:
        return default
    if inspect.isroutine(default) or inspect.isclass(default):
        return _Text(f"{default.__module__.split('.')[0]}.{default.__qualname__}")
    return default


if __name__ == "__main__":
    SNAPSHOT.write_text(describe(), "utf-8")
