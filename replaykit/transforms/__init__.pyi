# Written by `python -m tests.generated` from replaykit/registry.py.

from replaykit.transforms.discounting import (
    Bootstrap,
    ReturnToGo,
)
from replaykit.transforms.frames import (
    FrameStream,
    PreviousStep,
    StackFrames,
    StepCount,
)
from replaykit.transforms.hindsight import (
    HindsightGoal,
)
from replaykit.transforms.history import (
    Around,
    HistoryTransform,
    Surroundings,
)
from replaykit.transforms.n_step import (
    NStep,
    NStepWriting,
)
from replaykit.transforms.neighbours import (
    ExpandTag,
    Shift,
    Tag,
    WindowLast,
    Windows,
)
from replaykit.transforms.normalization import (
    Normalize,
    Pad,
    RunningNorm,
    Unnormalize,
)
from replaykit.transforms.trajectory_edits import (
    TrajectoryTransform,
)
from replaykit.transforms.transform import (
    Compose,
    Transform,
)
from replaykit.transforms.value_transforms import (
    Cast,
    CatTensors,
    ExcludeTransform,
    ImageScale,
    KeepRaw,
    RenameTransform,
    RewardClip,
    RewardMap,
    RewardScale,
    RewardShift,
    SelectTransform,
)

__all__ = [
    "Around",
    "Bootstrap",
    "Cast",
    "CatTensors",
    "Compose",
    "ExcludeTransform",
    "ExpandTag",
    "FrameStream",
    "HindsightGoal",
    "HistoryTransform",
    "ImageScale",
    "KeepRaw",
    "NStep",
    "NStepWriting",
    "Normalize",
    "Pad",
    "PreviousStep",
    "RenameTransform",
    "ReturnToGo",
    "RewardClip",
    "RewardMap",
    "RewardScale",
    "RewardShift",
    "RunningNorm",
    "SelectTransform",
    "Shift",
    "StackFrames",
    "StepCount",
    "Surroundings",
    "Tag",
    "TrajectoryTransform",
    "Transform",
    "Unnormalize",
    "WindowLast",
    "Windows",
]
