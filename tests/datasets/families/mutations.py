"""Random damage of files, and conversions of the damaged copies."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replaykit.datasets import convert
from replaykit.errors import CorpusError

_LONG = [pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 9)]
SEEDS = pytest.mark.parametrize("seed", [0, *_LONG])
"""Parametrizes tests of `refusals`: 540 copies, 60 of them in short runs."""


def refusals(
    source: Path,
    layout: Any,
    folder: Path,
    check: Callable[[Any, str], None],
    *,
    names: Sequence[str] = ("*",),
    seed: int,
) -> int:
    """Convert 60 damaged copies of a source, and return how many were refused.

    One file that matches a name is damaged: a flipped bit, bytes that are removed, repeated, zeros
    or missing at the end, and in folders also a missing file, or one with another's content. An
    error must name the copy and a rule. Otherwise ``check`` gets the data set and the name of the
    file.
    """
    random, errors = np.random.default_rng(seed), 0
    for number in range(60):
        copy = folder / f"{number}{source.suffix}"
        if source.is_file():
            shutil.copyfile(source, copy)
            files = [copy]
        else:
            shutil.copytree(source, copy)
            files = sorted({f for name in names for f in copy.rglob(name) if f.is_file()})
        file, other = (files[at] for at in random.integers(len(files), size=2))
        content = bytearray(file.read_bytes())
        at, size = int(random.integers(len(content))), int(random.integers(1, 9))
        kind = number % (5 if source.is_file() else 7)
        if kind == 0:
            content[at] ^= 1 << size - 1
        elif kind == 1:
            del content[at : at + size]
        elif kind == 2:
            content[at:at] = content[at : at + size]
        elif kind == 3:
            content[at : at + size] = bytes(len(content[at : at + size]))
        elif kind == 4:
            del content[at:]
        elif kind == 5 and not (file.name.isdecimal() and other.name.isdecimal()):
            # Chunks of Zarr do not say to which rows they belong.
            content = bytearray(other.read_bytes())
        file.write_bytes(content)
        if kind == 6:
            file.unlink()
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
        for made in (copy, folder / "data"):
            shutil.rmtree(made, ignore_errors=True)
    return errors


def refused(
    folder: Path, damaged: Path, layout: Any, change: Callable[[Path], Any], says: str, rule: str
) -> None:
    """Damage files of a folder, which must be refused by its name and a rule, leaving nothing."""
    change(damaged)
    target = folder.parent / "data"
    with pytest.raises(CorpusError, match=rf"(?s){says}.*\[{rule}\]") as caught:
        convert(folder, layout, target)
    assert str(folder) in str(caught.value)
    assert not target.exists()
