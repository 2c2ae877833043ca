"""Transforms of rows that are written and of batches that are read."""

from replaykit.registry import room

__all__, __getattr__, __dir__ = room(__name__)
