"""The corpus families, each with a declaration and its special code."""

from replaykit.registry import room

__all__, __getattr__, __dir__ = room(__name__)
