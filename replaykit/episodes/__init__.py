"""Indexes of the episodes among stored rows, updated as rows are written."""

from replaykit.episodes.boundaries import BoundaryRule, CutMarks
from replaykit.episodes.episode_laws import (
    EPISODES,
    NOTHING,
    ROWS,
    WINDOWS,
    CountLaw,
    EndReason,
    Head,
    Needs,
)
from replaykit.episodes.index import EpisodeIndex, Windows
from replaykit.episodes.interleaved import InterleavedIndex
from replaykit.episodes.ring import RingEpisodes

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
    "Head",
    "InterleavedIndex",
    "Needs",
    "RingEpisodes",
    "Windows",
]
