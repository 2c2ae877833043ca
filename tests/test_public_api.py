"""Every public name and its signature, held against a snapshot."""

from __future__ import annotations

import difflib

from tests.public_api import SNAPSHOT, describe


def test_public_names_and_signatures_equal_the_snapshot() -> None:
    """To confirm a change of the public interface: ``python -m tests.public_api``."""
    written, found = SNAPSHOT.read_text("utf-8").splitlines(), describe().splitlines()
    changed = list(difflib.unified_diff(written, found, "snapshot", "package", lineterm="", n=0))
    assert not changed, "\n".join(changed)
