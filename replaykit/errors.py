"""Define the exceptions of the package, which subclass built-in exceptions.

Example:
    >>> from replaykit.errors import SchemaError
    >>> issubclass(SchemaError, ValueError)
    True
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = [
    "ActorLost",
    "BufferFull",
    "CheckpointError",
    "Closed",
    "CorpusError",
    "DownloadError",
    "EmptyDistributionError",
    "NoEpisodeColumns",
    "NotEnoughData",
    "NotReady",
    "PriorityCountError",
    "RateLimiterTimeout",
    "SchemaError",
    "StaleAddress",
    "UploadError",
]


class ActorLost(RuntimeError):
    """The actor of a remote buffer has ended, was closed, or cannot be reached."""


class SchemaError(ValueError):
    """Data does not have the keys, feature shapes or dtypes of the storage's schema."""


class EmptyDistributionError(ValueError):
    """No weight is positive, so nothing can be drawn."""


class NoEpisodeColumns(KeyError, RuntimeError):
    """No stored column shows where episodes end.

    The error is both a KeyError and a RuntimeError, because TorchRL raises either of them.
    """

    def __str__(self) -> str:
        return RuntimeError.__str__(self)  # KeyError would put quotes around the message


class PriorityCountError(ValueError, RuntimeError):
    """The number of priorities is neither one nor the number of rows.

    The error is also a RuntimeError, as in TorchRL.
    """


class BufferFull(RuntimeError):
    """A write would remove rows that must be kept."""


class Closed(RuntimeError):
    """A writer, a data set or a wait is closed."""


class NotEnoughData(RuntimeError):
    """Fewer rows are eligible than the request needs."""


class NotReady(NotEnoughData):
    """A mixture or joint batch was requested before its members have enough data."""


class RateLimiterTimeout(TimeoutError):
    """A write waited too long for samples, or a sample for writes.

    Nothing has changed.
    """


class StaleAddress(LookupError):
    """The requested rows have been overwritten or removed."""


class CheckpointError(RuntimeError):
    """A checkpoint is incomplete, damaged, of an unknown version, or not a checkpoint."""


class CorpusError(ValueError):
    """A source file breaks a rule of its corpus. Names the file and the rule."""


class DownloadError(RuntimeError):
    """A file could not be downloaded or verified. Names repository, commit and path."""


class UploadError(RuntimeError):
    """A data set could not be uploaded. Names the repository and a remedy."""


def import_extra(module: str, need: str, extra: str) -> Any:
    """Return a module of an optional dependency.

    Args:
        need: the subject and verb of the error, and the name of the dependency.
        extra: the extra of this package that installs it.

    Raises:
        ImportError: it is not installed. The message has the install command.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{need}, which is not installed; run pip install 'replaykit[{extra}]'"
        ) from error
