"""Inspect, validate and fetch data on disk, as functions and as the command ``replaykit``.

`replaykit.inspection` has the public names. This module imports nothing, so that the help of the
command does not load torch.
"""
