"""Writers, which choose the slots of new rows."""

from replaykit.registry import room

__all__, __getattr__, __dir__ = room(__name__)
