"""Parts <-> one directory on disk: atomic, checked, without pickle.

A part is a state made of plain values and tensors; this room knows none of them by name.

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

from replaykit.checkpoint.again import Base
from replaykit.checkpoint.directory import Checkpoint
from replaykit.checkpoint.manifests import FORMAT, FORMAT_VERSION, checkpoint_versions
from replaykit.checkpoint.mapped import MappedCheckpoint, MappedRows
from replaykit.checkpoint.read_later import ReadLater, ReadOnce
from replaykit.checkpoint.row_chunks import RowChunks
from replaykit.checkpoint.saving import save_checkpoint, save_snapshot
from replaykit.checkpoint.snapshot import Snapshot
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
