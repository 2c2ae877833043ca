"""replaykit: replay buffers and offline data sets over TensorDicts.

Every public name can be imported from here. What is behind it, torch and tensordict
too, is loaded when it is first asked for.
"""

from replaykit.registry import room

__all__, __getattr__, __dir__ = room(__name__)
