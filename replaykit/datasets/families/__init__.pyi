# Written by `python -m tests.generated` from replaykit/registry.py.

from replaykit.datasets.families.aloha import (
    ALOHA,
    AlohaLayout,
)
from replaykit.datasets.families.d4rl import (
    D4RL,
    D4RLLayout,
)
from replaykit.datasets.families.isaaclab import (
    ISAACLAB,
)
from replaykit.datasets.families.lerobot import (
    LEROBOT,
    LEROBOT_JPEG,
    LEROBOT_PIXELS,
    LeRobotLayout,
)
from replaykit.datasets.families.libero import (
    LIBERO,
)
from replaykit.datasets.families.maniskill import (
    MANISKILL,
)
from replaykit.datasets.families.minari import (
    MINARI,
)
from replaykit.datasets.families.minari_arrow import (
    MINARI_ARROW,
    MinariArrowLayout,
)
from replaykit.datasets.families.rlds import (
    RLDS,
    RldsLayout,
)
from replaykit.datasets.families.robohive import (
    ROBOHIVE,
    RoboHiveLayout,
)
from replaykit.datasets.families.robomimic import (
    ROBOMIMIC,
    ROBOSUITE,
    RobosuiteLayout,
)
from replaykit.datasets.families.roboset import (
    ROBOSET_REAL,
)
from replaykit.datasets.families.vd4rl import (
    VD4RL,
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
