"""Physical constants of a machine: kept as JSON, and of use on that machine only."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.machine import fingerprint

__all__ = ["Calibration", "OtherHost", "load", "save"]


class OtherHost(Exception):
    """The constants were measured on another machine, or with other versions."""


@dataclass(frozen=True)
class Calibration:
    """What one machine can do.

    Attributes:
        host: what it was measured on.
        copy: GB copied a second (traffic is twice that), by threads.
        read: GB read in sequence a second, by threads.
        lines: nanoseconds for one of many independent loads of a line, by threads and the bytes
            that they are spread over.
        rows: microseconds for 256 random rows out of the largest of those, by what gathers and
            the bytes of a row; not a limit, but what to expect.
        disk: figures of the disk below the scratch folder, or None.
        notes: what could not be measured and why, how large buffers were.
    """

    host: dict[str, Any]
    copy: dict[int, float]
    read: dict[int, float]
    lines: dict[int, dict[int, float]]
    rows: dict[str, dict[int, float]] = field(default_factory=dict)
    disk: dict[str, float] | None = None
    notes: dict[str, str] = field(default_factory=dict)

    def copy_gbs(self, threads: int) -> float:
        """GB that a copy on that many threads moves a second."""
        return self.copy[_at_most(self.copy, threads)]

    def line_ns(self, threads: int, spread: int | None = None) -> float:
        """Nanoseconds of a random load that others run beside; ``spread``: over how many bytes.

        Taken from the largest size measured that is not above: a limit is not to be too high.
        """
        sizes = self.lines[_at_most(self.lines, threads)]
        return sizes[max(sizes) if spread is None else _at_most(sizes, spread)]

    @property
    def disk_iops(self) -> float | None:
        """The most reads of 4 KiB a second, at whichever depth."""
        if self.disk is None:
            return None
        return max((v for k, v in self.disk.items() if k.startswith("reads_per_s")), default=None)

    @property
    def disk_gbs(self) -> float | None:
        """GB read in sequence a second."""
        return None if self.disk is None else self.disk.get("sequential_gbs")


def _at_most(values: dict[int, Any], wanted: int) -> int:
    """The largest key that is not above what is wanted; the smallest where all are."""
    return max((key for key in values if key <= wanted), default=min(values))


def save(calibration: Calibration, file: Path) -> None:
    """Writes the constants, with what they were measured on."""
    file.write_text(json.dumps(asdict(calibration), indent=2) + "\n", encoding="utf-8")


def load(file: Path) -> Calibration:
    """Reads constants.

    Raises:
        OtherHost: they are not this machine's; the message names what differs.
        FileNotFoundError: there is no such file.
    """
    data = json.loads(file.read_text(encoding="utf-8"))
    here, there = fingerprint(), data["host"]
    different = [key for key in here if here[key] != there.get(key)]
    if different:
        raise OtherHost(
            f"{file} is of another host: "
            + ", ".join(f"{key} is {here[key]}, there {there.get(key)}" for key in different)
        )
    return Calibration(
        host=there,
        copy={int(key): value for key, value in data["copy"].items()},
        read={int(key): value for key, value in data["read"].items()},
        lines={int(t): {int(s): v for s, v in at.items()} for t, at in data["lines"].items()},
        rows={k: {int(size): us for size, us in v.items()} for k, v in data["rows"].items()},
        disk=data["disk"],
        notes=data["notes"],
    )
