"""Samplers and sample units: the choice of the rows of a batch."""

from replaykit.registry import room

__all__, __getattr__, __dir__ = room(__name__)
