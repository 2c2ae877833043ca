# Written by `python -m tests.generated` from replaykit/registry.py.

from replaykit.transforms.discounting import (
    Bootstrap,
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
)
from replaykit.transforms.normalization import (
    Normalize,
    RunningNorm,
    Unnormalize,
)
from replaykit.transforms.padding import (
    Pad,
)
from replaykit.transforms.return_to_go import (
    ReturnToGo,
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
from replaykit.transforms.windows import (
    Windows,
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
