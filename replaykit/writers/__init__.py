"""Which slots the next records take, and what they displace."""

from replaykit.registry import room

__all__, __getattr__, __dir__ = room(__name__)
