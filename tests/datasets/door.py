"""A repository of several directories on a loopback Hub, and its listing by the client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from replaykit.datasets.hub_files import HubListing, Retry, list_files

REPO = "me/data"
DOOR = "DAPG(expert)/door_v2d-v1"
A, B, C = (f"{DOOR}/seed{seed}/door_v2d-v1_trace.h5" for seed in (0, 10, 2))
DATA = {A: bytes(range(256)) * 37, B: b"second " * 999, C: b"third " * 777}
NOTES = f"{DOOR}/seed0/notes.txt"
OTHERS = {
    f"{DOOR}_extra/seed0/x.h5": b"sibling",
    f"{DOOR}.h5": b"beside",
    f"{DOOR}/README.md": b"words",
    NOTES: b"kept by git itself, not by LFS\n" * 9,
    "DAPG(human)/door_v2d-v1/seed0/x.h5": b"other",
    "nested/DAPG(expert)/door_v2d-v1/x.h5": b"deeper",
}
FILES = {**DATA, **OTHERS}
QUICK = Retry(attempts=3, first_wait_s=0.01, stall_s=20)


def listing_of(directory: str = DOOR, **options: Any) -> HubListing:
    options = {"suffix": ".h5", "retry": QUICK, **options}
    return list_files(REPO, directory=directory, **options)


def contents(paths: list[Path]) -> list[bytes]:
    return [path.read_bytes() for path in paths]
