"""Corpora: from H5 files, on a Hub or at hand, to transitions in memory-mapped columns.

A name is loaded when it is first asked for: the command says its help without torch.
"""

from replaykit.registry import room

__all__, __getattr__, __dir__ = room(__name__)
