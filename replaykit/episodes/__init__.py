"""Where episodes begin and end among stored rows, kept up as they are written."""

from replaykit.episodes.codes import EndReason, Head
from replaykit.episodes.index import EpisodeIndex, Windows
from replaykit.episodes.interleaved import InterleavedIndex
from replaykit.episodes.law import EPISODES, NOTHING, ROWS, WINDOWS, CountLaw, Needs
from replaykit.episodes.marks import CutMarks
from replaykit.episodes.ring import RingEpisodes
from replaykit.episodes.rule import BoundaryRule

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
