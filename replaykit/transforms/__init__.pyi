# Written by `python -m tests.generated` from replaykit/registry.py.

from replaykit.transforms.base import (
    Compose,
    Transform,
)
from replaykit.transforms.bootstrap import (
    Bootstrap,
)
from replaykit.transforms.cast import (
    Cast,
)
from replaykit.transforms.frame_stream import (
    FrameStream,
)
from replaykit.transforms.hindsight import (
    HindsightGoal,
)
from replaykit.transforms.history import (
    Around,
    HistoryTransform,
    Surroundings,
)
from replaykit.transforms.images import (
    ImageScale,
)
from replaykit.transforms.keys import (
    CatTensors,
    ExcludeTransform,
    RenameTransform,
    SelectTransform,
)
from replaykit.transforms.n_step import (
    NStep,
)
from replaykit.transforms.n_step_writing import (
    NStepWriting,
)
from replaykit.transforms.previous_step import (
    PreviousStep,
    StepCount,
)
from replaykit.transforms.raw import (
    KeepRaw,
)
from replaykit.transforms.return_to_go import (
    ReturnToGo,
)
from replaykit.transforms.rewards import (
    RewardClip,
    RewardMap,
    RewardScale,
    RewardShift,
)
from replaykit.transforms.stack_frames import (
    StackFrames,
)
from replaykit.transforms.trajectory import (
    TrajectoryTransform,
)

__all__ = [
    "Around",
    "Bootstrap",
    "Cast",
    "CatTensors",
    "Compose",
    "ExcludeTransform",
    "FrameStream",
    "HindsightGoal",
    "HistoryTransform",
    "ImageScale",
    "KeepRaw",
    "NStep",
    "NStepWriting",
    "PreviousStep",
    "RenameTransform",
    "ReturnToGo",
    "RewardClip",
    "RewardMap",
    "RewardScale",
    "RewardShift",
    "SelectTransform",
    "StackFrames",
    "StepCount",
    "Surroundings",
    "TrajectoryTransform",
    "Transform",
]
