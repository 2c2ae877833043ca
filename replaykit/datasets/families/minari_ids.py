"""The ids of Minari's data sets on the Hub that are stored as HDF5, as they are published there.

Those of ``D4RL`` are the D4RL tasks recorded anew, those of ``mujoco`` the locomotion tasks of
Gymnasium's version 5. Other namespaces, and versions to come, are taken by their ids too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

__all__ = ["minari_ids"]

_D4RL: Final = {
    "antmaze": (
        "v1",
        ("umaze", "umaze-diverse", "medium-play", "medium-diverse", "large-play", "large-diverse"),
    ),
    "door": ("v2", ("human", "cloned", "expert")),
    "hammer": ("v2", ("human", "cloned", "expert")),
    "kitchen": ("v2", ("complete", "mixed", "partial")),
    "minigrid": ("v0", ("fourrooms", "fourrooms-random")),
    "pen": ("v2", ("human", "cloned", "expert")),
    "pointmaze": (
        "v2",
        (
            "open", "open-dense", "umaze", "umaze-dense", "medium", "medium-dense", "large",
            "large-dense",
        ),
    ),
    "relocate": ("v2", ("human", "cloned", "expert")),
}  # fmt: skip
_TWO: Final = ("medium", "expert")
_THREE: Final = ("simple", *_TWO)
_MUJOCO: Final = {
    "ant": _THREE,
    "halfcheetah": _THREE,
    "hopper": _THREE,
    "humanoid": _THREE,
    "humanoidstandup": _THREE,
    "inverteddoublependulum": _TWO,
    "invertedpendulum": _TWO,
    "pusher": _TWO,
    "reacher": _TWO,
    "swimmer": _TWO,
    "walker2d": _THREE,
}


def minari_ids() -> list[str]:
    """Returns the ids, such as ``D4RL/door/human-v2``."""
    return [*_d4rl(), *(f"mujoco/{task}/{level}-v0" for task in _MUJOCO for level in _MUJOCO[task])]


def _d4rl() -> Iterator[str]:
    for task, (version, kinds) in _D4RL.items():
        for kind in kinds:
            yield f"D4RL/{task}/{kind}-{version}"
