"""JSON files beside source files, which say what is in them."""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from replaykit.datasets.engine.places import Place

__all__ = ["Sidecar", "read_sidecar"]


class Sidecar:
    """A JSON object and where it was.

    Attributes:
        path: the file.
        sha256: of its content, for the manifest.
        content: the object.
    """

    def __init__(self, path: Path, text: bytes) -> None:
        self.path = path
        self.sha256 = hashlib.sha256(text).hexdigest()
        found = json.loads(text)
        if not isinstance(found, dict):
            raise ValueError(f"it holds {type(found).__name__}, expected an object")
        self.content: dict[str, Any] = found

    def facts(self, *names: str) -> dict[str, Any]:
        """Returns the sidecar's name and hash, and some of its plain values."""
        known = {name: self.content.get(name) for name in names}
        return {
            "described_by": {"name": self.path.name, "sha256": self.sha256},
            **{k: v for k, v in known.items() if isinstance(v, (str, int, float, bool))},
        }


def read_sidecar(place: Place, name: str) -> Sidecar | None:
    """Reads the file of a name beside a source file; ``None`` where there is none.

    Raises:
        CorpusError: it is no JSON object (rule V04).
    """
    path = Path(place.file).with_name(name)
    try:
        status = path.stat()
        return _read(path, status.st_mtime_ns, status.st_size)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise place.error(f"{path}, which describes it, cannot be read ({error})", "V04") from error


@lru_cache(maxsize=8)
def _read(path: Path, mtime: int, size: int) -> Sidecar:
    # Asked for with every episode; the time and the size are there to see that it has changed.
    return Sidecar(path, path.read_bytes())
