"""What a record becomes on its way in or out."""

from replaykit.transforms.base import Compose, Transform
from replaykit.transforms.keys import (
    CatTensors,
    ExcludeTransform,
    RenameTransform,
    SelectTransform,
)

__all__ = [
    "CatTensors",
    "Compose",
    "ExcludeTransform",
    "RenameTransform",
    "SelectTransform",
    "Transform",
]
