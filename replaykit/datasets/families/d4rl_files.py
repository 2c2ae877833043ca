"""Where the data sets of D4RL are hosted: which file an id names, its size and its checksum."""

from __future__ import annotations

import csv
import os
from functools import lru_cache
from importlib import resources
from typing import Final

from replaykit.datasets.http_cache import WebFile

__all__ = ["D4RL_BASE", "d4rl_base", "d4rl_file", "d4rl_ids"]

D4RL_BASE: Final = "http://rail.eecs.berkeley.edu/datasets/offline_rl"
_TABLE: Final = "d4rl_files.tsv"
_UNKNOWN: Final = "-"


def d4rl_base() -> str:
    """Returns the folder of all files: REPLAYKIT_D4RL_URL for a mirror, or that of the authors."""
    return (os.environ.get("REPLAYKIT_D4RL_URL") or D4RL_BASE).rstrip("/")


def d4rl_ids() -> list[str]:
    """Returns the ids in alphabetical order."""
    return list(_table())


def d4rl_file(dataset_id: str) -> WebFile | None:
    """Returns the file of an id, with size and SHA-256 where they are known; None without one.

    Example:
        >>> from replaykit.datasets.families.d4rl_files import d4rl_file
        >>> file = d4rl_file("hopper-medium-v2")
        >>> file.name, file.size
        ('hopper_medium-v2.hdf5', 152756557)
    """
    found = _table().get(dataset_id)
    if found is None:
        return None
    path, size, sha256 = found
    return WebFile(f"{d4rl_base()}/{path}", size, sha256)


@lru_cache(maxsize=1)
def _table() -> dict[str, tuple[str, int | None, str | None]]:
    text = resources.files(__package__).joinpath(_TABLE).read_text(encoding="utf-8")
    return {
        row["id"]: (
            row["path"],
            None if row["bytes"] == _UNKNOWN else int(row["bytes"]),
            None if row["sha256"] == _UNKNOWN else row["sha256"],
        )
        for row in csv.DictReader(text.splitlines(), delimiter="\t")
    }
