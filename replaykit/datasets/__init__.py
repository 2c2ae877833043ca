"""Conversion of H5 corpora, local or on a Hub, into memory-mapped columns.

Each name is imported at its first use, so the command can show its help without torch.
"""

from replaykit.registry import room

__all__, __getattr__, __dir__ = room(__name__)
