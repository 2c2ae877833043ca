"""What a record becomes on its way in or out."""

from replaykit.registry import room

__all__, __getattr__, __dir__ = room(__name__)
