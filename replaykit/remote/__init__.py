"""The buffer behind Ray."""

from replaykit._ray import DEFAULT_REMOTE_CLASS_CONFIG

__all__ = ["DEFAULT_REMOTE_CLASS_CONFIG"]
