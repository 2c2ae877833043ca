"""Corpora: from files on a Hub to transitions in memory-mapped columns."""

from replaykit.datasets.base import BaseDatasetExperienceReplay
from replaykit.datasets.roboset import RobosetExperienceReplay

__all__ = ["BaseDatasetExperienceReplay", "RobosetExperienceReplay"]
