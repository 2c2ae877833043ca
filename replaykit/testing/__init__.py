"""Test support for users: writers of RoboHive files and of LeRobot data sets.

Example:
    >>> from replaykit.testing import RoboHiveWriter, make_trial
    >>> sorted(make_trial(3))[:2]
    ['actions', 'done']
"""

from __future__ import annotations

from replaykit.testing.lerobot_sets import make_lerobot
from replaykit.testing.robohive_files import RoboHiveWriter, make_trial

__all__ = ["RoboHiveWriter", "make_lerobot", "make_trial"]
