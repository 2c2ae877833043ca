"""Where records live: lists, tensors on any device, memory-mapped files."""

from replaykit.registry import room

__all__, __getattr__, __dir__ = room(__name__)
