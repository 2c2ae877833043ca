"""Programs are no tests: they import TorchRL, which takes seconds, only when a test runs them."""

from __future__ import annotations

from pathlib import Path

collect_ignore = [
    path.name for path in Path(__file__).parent.glob("*.py") if path.name[:5] != "test_"
]
