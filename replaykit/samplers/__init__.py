"""Which records come next."""

from replaykit.registry import room

__all__, __getattr__, __dir__ = room(__name__)
