"""Connections to other libraries: Stable-Baselines3, Gymnasium, LeRobot, Minari, Zarr.

Each name is imported at its first use, so the room needs none of these libraries by itself.
"""

from replaykit.registry import room

__all__, __getattr__, __dir__ = room(__name__)
