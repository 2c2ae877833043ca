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

from replaykit.checkpoint.chunks import RowChunks
from replaykit.checkpoint.directory import FORMAT, FORMAT_VERSION, Checkpoint, save_checkpoint
from replaykit.checkpoint.mapped import MappedCheckpoint, MappedRows

__all__ = [
    "FORMAT",
    "FORMAT_VERSION",
    "Checkpoint",
    "MappedCheckpoint",
    "MappedRows",
    "RowChunks",
    "save_checkpoint",
]
