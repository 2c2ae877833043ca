"""Spare processes that tests start the import of torch's compiler.

tensordict marks functions for the compiler when it is imported, and so imports it. That is half of
the processor time of a process that starts. `tests/conftest.py` puts this folder into PYTHONPATH.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_MARKS = ("allow_in_graph", "assume_constant_result")


class _Finder:
    """Finds ``torch.compiler`` and lets its marks be nothing until the compiler is there."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "torch.compiler":
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = _without_marks(spec.loader.exec_module)
        return spec


def _without_marks(execute: Any) -> Any:
    def exec_module(module: ModuleType) -> None:
        execute(module)
        for name in _MARKS:
            setattr(module, name, _only_with_compiler(getattr(module, name)))

    return exec_module


def _only_with_compiler(mark: Any) -> Any:
    return lambda function: mark(function) if "torch._dynamo" in sys.modules else function


sys.meta_path.insert(0, _Finder())  # type: ignore[arg-type]
