"""Store rows in lists, in tensors on any device, or in memory-mapped files."""

from replaykit.registry import room

__all__, __getattr__, __dir__ = room(__name__)
