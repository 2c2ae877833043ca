"""Examples that ``help()`` shows run as they stand: nothing is known but what they import."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import replaykit

PACKAGE = Path(replaykit.__file__).parent
MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}


class Finder(doctest.DocTestFinder):
    """Finds functions where they are written, whatever module they name for pickle."""

    def _from_module(self, module: Any, object: Any) -> bool:
        if inspect.isfunction(object):
            return inspect.unwrap(object).__globals__ is vars(module)
        return super()._from_module(module, object)  # type: ignore[misc]


def examples_of(module: str) -> list[doctest.DocTest]:
    """The examples of a module, each with empty globals (but for ``__name__``) of its own."""
    found = Finder().find(importlib.import_module(module), globs={})
    return [example for example in found if example.examples]


EXAMPLES = [example for module in MODULES for example in examples_of(module)]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_docstring_example_runs_with_its_imports_alone(
    example: doctest.DocTest, pytestconfig: pytest.Config
) -> None:
    assert example.globs == {"__name__": "__main__"}
    flags = sum(doctest.OPTIONFLAGS_BY_NAME[f] for f in pytestconfig.getini("doctest_optionflags"))
    said: list[str] = []
    result = doctest.DocTestRunner(verbose=False, optionflags=flags).run(example, out=said.append)
    assert result.failed == 0, "".join(said)


@pytest.mark.parametrize("module", MODULES)
def test_every_example_of_a_source_is_found(module: str) -> None:
    written = re.findall(r"^ *>>> ", MODULES[module].read_text("utf-8"), re.MULTILINE)
    assert sum(len(example.examples) for example in examples_of(module)) == len(written)
