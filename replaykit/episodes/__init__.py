"""Indexes of the episodes among stored rows, updated as rows are written."""

from replaykit.episodes.boundaries import (
    EPISODES,
    NOTHING,
    ROWS,
    WINDOWS,
    BoundaryRule,
    CountLaw,
    CutMarks,
    EndReason,
    Found,
    Head,
    Needs,
)
from replaykit.episodes.index import EpisodeIndex
from replaykit.episodes.streams import StreamEpisodes

__all__ = [
    "EPISODES",
    "NOTHING",
    "ROWS",
    "WINDOWS",
    "BoundaryRule",
    "CountLaw",
    "CutMarks",
    "EndReason",
    "EpisodeIndex",
    "Found",
    "Head",
    "Needs",
    "StreamEpisodes",
]
