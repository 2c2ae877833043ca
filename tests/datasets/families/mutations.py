"""Random damage of files, and conversions of the damaged copies."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from replaykit.datasets import convert
from replaykit.errors import CorpusError


def refusals(
    source: Path,
    layout: Any,
    folder: Path,
    check: Callable[[Any, str], None],
    *,
    names: Sequence[str] = ("*",),
    count: int = 60,
) -> int:
    """Convert damaged copies of a source, and return how many were refused.

    A bit is flipped, or bytes are removed or repeated, in one file that matches a name. An error
    must name the copy and a rule. Otherwise ``check`` gets the data set and the name of the file.
    """
    random, errors = np.random.default_rng(7), 0
    for number in range(count):
        copy = folder / f"{number}{source.suffix}"
        if source.is_file():
            shutil.copyfile(source, copy)
            files = [copy]
        else:
            shutil.copytree(source, copy)
            files = sorted({f for name in names for f in copy.rglob(name) if f.is_file()})
        file = files[number // 3 % len(files)]
        content = bytearray(file.read_bytes())
        at, size = int(random.integers(len(content))), int(random.integers(1, 9))
        if number % 3 == 0:
            content[at] ^= 1 << size - 1
        elif number % 3 == 1:
            del content[at : at + size]
        else:
            content[at:at] = content[at : at + size]
        file.write_bytes(content)
        found: Any
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                found = convert(copy, layout, folder / "data", force=True)
        except CorpusError as error:
            found = error
        if isinstance(found, CorpusError):
            errors += 1
            assert str(copy) in str(found), found
            assert "[V" in str(found), found
        else:
            check(found, file.name)
    return errors
