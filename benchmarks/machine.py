"""What figures depend on: the machine, and the versions of what runs on it."""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

__all__ = ["Neighbours", "describe", "fingerprint", "memory_bytes"]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    facts = {
        line.split(":", 1)[0].strip(): line.split(":", 1)[1].strip()
        for line in lines
        if ":" in line
    }
    name = facts.get("model name") or platform.processor() or platform.machine()
    family, model = facts.get("cpu family"), facts.get("model")
    return f"{name} (family {family}, model {model})" if family else name


def memory_bytes() -> int:
    """Returns the memory of the machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def fingerprint() -> dict[str, Any]:
    """Returns what must agree for constants to hold."""
    return {
        "processor": _processor(),
        "processors": os.cpu_count(),
        "memory_gib": round(memory_bytes() / 2**30),
        "system": platform.system(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


def _large_pages() -> str:
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text(encoding="utf-8")
    except OSError:
        return "unknown"
    return text[text.find("[") + 1 : text.find("]")]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def describe() -> dict[str, Any]:
    """Returns all that is worth knowing beside the figures."""
    import replaykit

    return {
        **fingerprint(),
        "threads": torch.get_num_threads(),
        "large pages": _large_pages(),
        "python": sys.version.split()[0],
        "kernel": platform.release(),
        "replaykit": replaykit.__version__,
        **{name: _version(name) for name in ("tensordict", "torchrl", "cpprb")},
    }


class Neighbours:
    """How much of the machine others took since this was made, or None where nobody counts."""

    def __init__(self) -> None:
        self._before = self._ticks()

    @staticmethod
    def _ticks() -> tuple[float, float, float] | None:
        """Seconds of all processors so far, those that were busy, and those of this process and of
        its children that have ended."""
        try:
            line = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0]
        except OSError:
            return None
        user, nice, system, idle, waiting, *rest = (int(part) for part in line.split()[1:9])
        busy = user + nice + system + sum(rest)
        second = os.sysconf("SC_CLK_TCK")
        own = os.times()
        return (busy + idle + waiting) / second, busy / second, sum(own[:4])

    def share(self) -> float | None:
        """Returns the share of the processors' time that others took, in 0 .. 1."""
        now = self._ticks()
        if now is None or self._before is None:
            return None
        total, busy, own = (a - b for a, b in zip(now, self._before, strict=True))
        return min(1.0, max(0.0, (busy - own) / total)) if total > 0 else 0.0
