"""Measurements: contenders in one process, in turn, on the same work, checked before timed."""
