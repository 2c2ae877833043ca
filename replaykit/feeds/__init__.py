"""Feeds: folders of chunks that other processes write, and trajectories of other libraries."""

from replaykit.feeds.trajectory_folder import TrajectoryFolder
from replaykit.feeds.trajectory_sources import (
    AlfCheckpoint,
    AmagoTrajectories,
    EmoteTable,
    TrajectoryChunks,
    TrajectorySource,
    feed_trajectories,
)
from replaykit.feeds.trajectory_writer import TrajectoryWriter

__all__ = [
    "AlfCheckpoint",
    "AmagoTrajectories",
    "EmoteTable",
    "TrajectoryChunks",
    "TrajectoryFolder",
    "TrajectorySource",
    "TrajectoryWriter",
    "feed_trajectories",
]
