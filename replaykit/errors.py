"""The error kinds of the package: subclasses of built-in exceptions, so that either can be caught.

Example:
    >>> from replaykit.errors import SchemaError
    >>> issubclass(SchemaError, ValueError)
    True
"""

from __future__ import annotations

__all__ = [
    "ActorLost",
    "BufferFull",
    "CheckpointError",
    "CorpusError",
    "DownloadError",
    "EmptyDistributionError",
    "NoEpisodeColumns",
    "NotEnoughData",
    "PriorityCountError",
    "RateLimiterTimeout",
    "SchemaError",
    "StaleAddress",
    "UploadError",
]


class ActorLost(RuntimeError):
    """The actor that holds a remote buffer has ended, was closed, or cannot be reached."""


class SchemaError(ValueError):
    """Data does not have the keys, feature shapes or dtypes that the storage was given first."""


class EmptyDistributionError(ValueError):
    """No weight is positive, so there is nothing that could be drawn."""


class NoEpisodeColumns(KeyError, RuntimeError):
    """Nothing that is stored tells where episodes end; TorchRL raises one or the other kind."""

    def __str__(self) -> str:
        return RuntimeError.__str__(self)  # a KeyError would put quotes around the sentence


class PriorityCountError(ValueError, RuntimeError):
    """There is neither one priority for all rows nor one for each; TorchRL has a RuntimeError."""


class BufferFull(RuntimeError):
    """Rows would have to be removed that are to be kept."""


class NotEnoughData(RuntimeError):
    """Fewer rows are eligible than the request needs."""


class RateLimiterTimeout(TimeoutError):
    """A write waited for samples, or a sample for writes, for too long; nothing has changed."""


class StaleAddress(LookupError):
    """The rows that were asked for have been overwritten or forgotten since."""


class CheckpointError(RuntimeError):
    """A checkpoint is torn, damaged, of an unknown version, or not a checkpoint."""


class CorpusError(ValueError):
    """A source file breaks a rule of its corpus; the message names the file and the rule."""


class DownloadError(RuntimeError):
    """A file could not be fetched or did not verify; names repository, commit and path."""


class UploadError(RuntimeError):
    """A data set could not be pushed; names the repository and what to do."""
