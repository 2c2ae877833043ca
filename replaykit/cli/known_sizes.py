"""Sizes of source files as they are published, in bytes, by family and id.

Source: the checksum lists of TensorFlow Datasets for D4RL. Other repositories are listed when they
are fetched; their sizes are not known in advance.
"""

from __future__ import annotations

from typing import Final

__all__ = ["KNOWN_SIZES"]

_MUJOCO: Final = {
    "ant": (384466831, 376239825, 373231677, 136482252, 449390167, 748335217),
    "halfcheetah": (237338037, 237727262, 237464597, 59448533, 291381762, 474567252),
    "hopper": (152525345, 152756557, 152427435, 75854457, 187998921, 304537315),
    "walker2d": (216109364, 232254996, 230567195, 86323963, 285115514, 462197079),
}
_KINDS: Final = ("random", "medium", "expert", "medium-replay", "full-replay", "medium-expert")
_ADROIT: Final = {
    "door": (3121206, 294356136, 536056678),
    "hammer": (5606475, 446616879, 557047483),
    "pen": (2040573, 155074191, 262040663),
    "relocate": (6206987, 581319494, 715618341),
}

KNOWN_SIZES: Final[dict[str, dict[str, int]]] = {
    "d4rl": {
        **{
            f"{robot}-{kind}-v2": nbytes
            for robot, sizes in _MUJOCO.items()
            for kind, nbytes in zip(_KINDS, sizes, strict=True)
        },
        **{
            f"{task}-{kind}-v1": nbytes
            for task, sizes in _ADROIT.items()
            for kind, nbytes in zip(("human", "cloned", "expert"), sizes, strict=True)
        },
    }
}
