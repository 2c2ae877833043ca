# Written by `python -m tests.generated` from replaykit/registry.py.

from replaykit.datasets.families.d4rl import (
    D4RL,
    VD4RL,
    D4RLLayout,
)
from replaykit.datasets.families.lerobot import (
    LEROBOT,
    LEROBOT_JPEG,
    LEROBOT_PIXELS,
    LeRobotLayout,
)
from replaykit.datasets.families.minari import (
    MINARI,
    MINARI_ARROW,
    MinariArrowLayout,
)
from replaykit.datasets.families.rlds import (
    RLDS,
    RldsLayout,
)
from replaykit.datasets.families.robohive import (
    ALOHA,
    ROBOHIVE,
    ROBOSET_REAL,
    AlohaLayout,
    RoboHiveLayout,
)
from replaykit.datasets.families.robomimic import (
    ISAACLAB,
    LIBERO,
    MANISKILL,
    ROBOMIMIC,
    ROBOSUITE,
    RobosuiteLayout,
)
from replaykit.datasets.families.zarr_arrays import (
    ZARR,
    ZarrLayout,
)

__all__ = [
    "ALOHA",
    "D4RL",
    "ISAACLAB",
    "LEROBOT",
    "LEROBOT_JPEG",
    "LEROBOT_PIXELS",
    "LIBERO",
    "MANISKILL",
    "MINARI",
    "MINARI_ARROW",
    "RLDS",
    "ROBOHIVE",
    "ROBOMIMIC",
    "ROBOSET_REAL",
    "ROBOSUITE",
    "VD4RL",
    "ZARR",
    "AlohaLayout",
    "D4RLLayout",
    "LeRobotLayout",
    "MinariArrowLayout",
    "RldsLayout",
    "RoboHiveLayout",
    "RobosuiteLayout",
    "ZarrLayout",
]
