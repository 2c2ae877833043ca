"""What a record becomes on its way in or out."""

from replaykit.transforms.base import Compose, Transform
from replaykit.transforms.history import Around, HistoryTransform, Surroundings
from replaykit.transforms.keys import (
    CatTensors,
    ExcludeTransform,
    RenameTransform,
    SelectTransform,
)

__all__ = [
    "Around",
    "CatTensors",
    "Compose",
    "ExcludeTransform",
    "HistoryTransform",
    "RenameTransform",
    "SelectTransform",
    "Surroundings",
    "Transform",
]
