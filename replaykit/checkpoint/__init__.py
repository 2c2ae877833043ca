"""Save parts to a directory atomically, and load them with checks, without pickle.

A part is a state of plain values and tensors, with any name.

Example:
    >>> import tempfile, torch
    >>> from replaykit.checkpoint import Checkpoint, save_checkpoint
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_checkpoint(folder, {"sampler": {"left": torch.arange(3)}}, {"rows": 3})
    ...     with Checkpoint(folder) as saved:
    ...         saved.verify()
    ...         saved.manifest["rows"], saved.part("sampler")
    (3, {'left': tensor([0, 1, 2])})
"""

from replaykit.checkpoint.checkpoint_format import FORMAT, FORMAT_VERSION, checkpoint_versions
from replaykit.checkpoint.checkpoint_writer import Snapshot, save_checkpoint, save_snapshot
from replaykit.checkpoint.chunks import Base
from replaykit.checkpoint.reader import (
    Checkpoint,
    MappedCheckpoint,
    MappedRows,
    ReadLater,
    ReadOnce,
    RowChunks,
)
from replaykit.registry import getter

__all__ = [
    "FORMAT",
    "FORMAT_VERSION",
    "Base",
    "Checkpoint",
    "MappedCheckpoint",
    "MappedRows",
    "ReadLater",
    "ReadOnce",
    "RowChunks",
    "Snapshot",
    "checkpoint_versions",
    "save_checkpoint",
    "save_snapshot",
]

__getattr__ = getter(__name__)
