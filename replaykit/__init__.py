"""replaykit: replay buffers and offline data sets over TensorDicts.

Every public name can be imported from here. Those that need more than torch and tensordict are
loaded when they are first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from replaykit._version import __version__
from replaykit.buffer import (
    BufferDataset,
    BufferLoader,
    ConditionalUpdateResult,
    Episode,
    Episodes,
    PrioritizedReplayBuffer,
    ReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from replaykit.ensembles import (
    ReplayBufferEnsemble,
    SamplerEnsemble,
    StorageEnsemble,
    WriterEnsemble,
)
from replaykit.pace import RateLimiter
from replaykit.priorities import MaxSegmentTree, MinSegmentTree, SumSegmentTree
from replaykit.samplers import (
    ConsumingSampler,
    LambdaScheduler,
    LinearScheduler,
    ParameterScheduler,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    Sampler,
    SamplerWithoutReplacement,
    SampleUnit,
    SchedulerList,
    Sequence,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    StalenessAwareSampler,
    StepScheduler,
    Transition,
)
from replaykit.storages import (
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    Storage,
    TensorStorage,
)
from replaykit.ted import DEFAULT_DONE_KEYS
from replaykit.trajectories import join_trajectories, pad_collate, split_trajectories
from replaykit.transfer import to_device
from replaykit.transforms import (
    Around,
    Bootstrap,
    Cast,
    CatTensors,
    Compose,
    ExcludeTransform,
    FrameStream,
    HindsightGoal,
    HistoryTransform,
    ImageScale,
    KeepRaw,
    NStep,
    NStepWriting,
    PreviousStep,
    RenameTransform,
    ReturnToGo,
    RewardClip,
    RewardMap,
    RewardScale,
    RewardShift,
    SelectTransform,
    StackFrames,
    StepCount,
    Surroundings,
    TrajectoryTransform,
    Transform,
)
from replaykit.writers import (
    ImmutableDatasetWriter,
    LaneWriter,
    RoundRobinWriter,
    TensorDictMaxValueWriter,
    TensorDictRoundRobinWriter,
    Writer,
)

if TYPE_CHECKING:
    from replaykit.datasets import (
        AlohaExperienceReplay,
        BaseDatasetExperienceReplay,
        CorpusExperienceReplay,
        D4RLExperienceReplay,
        IsaacLabExperienceReplay,
        LiberoExperienceReplay,
        ManiSkillExperienceReplay,
        MinariExperienceReplay,
        RobomimicExperienceReplay,
        RobosetExperienceReplay,
        VD4RLExperienceReplay,
    )
    from replaykit.remote import (
        DEFAULT_REMOTE_CLASS_CONFIG,
        RayReplayBuffer,
        RayReplayBufferClient,
        RemoteResult,
    )
    from replaykit.sharding import (
        ShardedClient,
        ShardedReplayBuffer,
        ShardedResult,
        ShardLoss,
    )

__all__ = [
    "DEFAULT_DONE_KEYS",
    "DEFAULT_REMOTE_CLASS_CONFIG",
    "AlohaExperienceReplay",
    "Around",
    "BaseDatasetExperienceReplay",
    "Bootstrap",
    "BufferDataset",
    "BufferLoader",
    "Cast",
    "CatTensors",
    "Compose",
    "ConditionalUpdateResult",
    "ConsumingSampler",
    "CorpusExperienceReplay",
    "D4RLExperienceReplay",
    "Episode",
    "Episodes",
    "ExcludeTransform",
    "FrameStream",
    "HindsightGoal",
    "HistoryTransform",
    "ImageScale",
    "ImmutableDatasetWriter",
    "IsaacLabExperienceReplay",
    "KeepRaw",
    "LambdaScheduler",
    "LaneWriter",
    "LazyMemmapStorage",
    "LazyStackStorage",
    "LazyTensorStorage",
    "LiberoExperienceReplay",
    "LinearScheduler",
    "ListStorage",
    "ManiSkillExperienceReplay",
    "MaxSegmentTree",
    "MinSegmentTree",
    "MinariExperienceReplay",
    "NStep",
    "NStepWriting",
    "ParameterScheduler",
    "PreviousStep",
    "PrioritizedReplayBuffer",
    "PrioritizedSampler",
    "PrioritizedSliceSampler",
    "RandomSampler",
    "RateLimiter",
    "RayReplayBuffer",
    "RayReplayBufferClient",
    "RemoteResult",
    "RenameTransform",
    "ReplayBuffer",
    "ReplayBufferEnsemble",
    "ReturnToGo",
    "RewardClip",
    "RewardMap",
    "RewardScale",
    "RewardShift",
    "RobomimicExperienceReplay",
    "RobosetExperienceReplay",
    "RoundRobinWriter",
    "SampleUnit",
    "Sampler",
    "SamplerEnsemble",
    "SamplerWithoutReplacement",
    "SchedulerList",
    "SelectTransform",
    "Sequence",
    "ShardLoss",
    "ShardedClient",
    "ShardedReplayBuffer",
    "ShardedResult",
    "SliceSampler",
    "SliceSamplerWithoutReplacement",
    "StackFrames",
    "StalenessAwareSampler",
    "StepCount",
    "StepScheduler",
    "Storage",
    "StorageEnsemble",
    "SumSegmentTree",
    "Surroundings",
    "TensorDictMaxValueWriter",
    "TensorDictPrioritizedReplayBuffer",
    "TensorDictReplayBuffer",
    "TensorDictRoundRobinWriter",
    "TensorStorage",
    "TrajectoryTransform",
    "Transform",
    "Transition",
    "VD4RLExperienceReplay",
    "Writer",
    "WriterEnsemble",
    "__version__",
    "join_trajectories",
    "pad_collate",
    "split_trajectories",
    "to_device",
]

_LAZY = {
    "AlohaExperienceReplay": "replaykit.datasets",
    "BaseDatasetExperienceReplay": "replaykit.datasets",
    "CorpusExperienceReplay": "replaykit.datasets",
    "D4RLExperienceReplay": "replaykit.datasets",
    "IsaacLabExperienceReplay": "replaykit.datasets",
    "LiberoExperienceReplay": "replaykit.datasets",
    "ManiSkillExperienceReplay": "replaykit.datasets",
    "MinariExperienceReplay": "replaykit.datasets",
    "RobomimicExperienceReplay": "replaykit.datasets",
    "VD4RLExperienceReplay": "replaykit.datasets",
    "RobosetExperienceReplay": "replaykit.datasets",
    "DEFAULT_REMOTE_CLASS_CONFIG": "replaykit.remote",
    "RayReplayBuffer": "replaykit.remote",
    "RayReplayBufferClient": "replaykit.remote",
    "RemoteResult": "replaykit.remote",
    "ShardLoss": "replaykit.sharding",
    "ShardedClient": "replaykit.sharding",
    "ShardedReplayBuffer": "replaykit.sharding",
    "ShardedResult": "replaykit.sharding",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        value = getattr(importlib.import_module(_LAZY[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
