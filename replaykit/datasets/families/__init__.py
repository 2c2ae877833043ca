"""The corpus families: a declaration each, with what is truly its own."""

from replaykit.registry import room

__all__, __getattr__, __dir__ = room(__name__)
