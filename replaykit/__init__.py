"""replaykit: replay buffers and offline data sets over TensorDicts.

Every public name can be imported from this package. The first access to a name loads its module,
torch and tensordict.
"""

from replaykit.registry import room

__all__, __getattr__, __dir__ = room(__name__)
