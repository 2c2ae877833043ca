"""What a record becomes on its way in or out."""

from replaykit.transforms.base import Compose, Transform
from replaykit.transforms.cast import Cast
from replaykit.transforms.history import Around, HistoryTransform, Surroundings
from replaykit.transforms.images import ImageScale
from replaykit.transforms.keys import (
    CatTensors,
    ExcludeTransform,
    RenameTransform,
    SelectTransform,
)
from replaykit.transforms.raw import KeepRaw
from replaykit.transforms.rewards import RewardClip, RewardMap, RewardScale, RewardShift

__all__ = [
    "Around",
    "Cast",
    "CatTensors",
    "Compose",
    "ExcludeTransform",
    "HistoryTransform",
    "ImageScale",
    "KeepRaw",
    "RenameTransform",
    "RewardClip",
    "RewardMap",
    "RewardScale",
    "RewardShift",
    "SelectTransform",
    "Surroundings",
    "Transform",
]
