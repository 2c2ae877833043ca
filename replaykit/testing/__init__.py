"""Test support for users: a writer of RoboHive files.

Example:
    >>> from replaykit.testing import RoboHiveWriter, make_trial
    >>> sorted(make_trial(3))[:2]
    ['actions', 'done']
"""

from __future__ import annotations

from replaykit.testing.robohive_files import RoboHiveWriter, make_trial

__all__ = ["RoboHiveWriter", "make_trial"]
