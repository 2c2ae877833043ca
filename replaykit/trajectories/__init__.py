"""Rows of whole trajectories: one after the other, side by side and padded, or each alone.

Three forms of the same transitions: flat ``[N]``, as buffers keep them; a list of ``[n_i]``; and
``[E, T]`` with a ``mask``, as sequence models want them. Values are moved, never computed with.
"""

from replaykit.trajectories.collate import pad_collate
from replaykit.trajectories.split import join_trajectories, split_trajectories

__all__ = ["join_trajectories", "pad_collate", "split_trajectories"]
