# Written by `python -m tests.generated` from replaykit/registry.py.

from replaykit._version import (
    __version__,
)
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
from replaykit.buffer.torchrl import (
    read_torchrl,
)
from replaykit.datasets.base import (
    BaseDatasetExperienceReplay,
)
from replaykit.datasets.corpus import (
    CorpusExperienceReplay,
)
from replaykit.datasets.families.catalogue import (
    AlohaExperienceReplay,
    D4RLExperienceReplay,
    IsaacLabExperienceReplay,
    LiberoExperienceReplay,
    ManiSkillExperienceReplay,
    MinariExperienceReplay,
    RobomimicExperienceReplay,
    VD4RLExperienceReplay,
)
from replaykit.datasets.families.roboset import (
    RobosetExperienceReplay,
)
from replaykit.ensembles import (
    ReplayBufferEnsemble,
    SamplerEnsemble,
    StorageEnsemble,
    WriterEnsemble,
)
from replaykit.environments import (
    VectorSteps,
    transition,
)
from replaykit.pace import (
    RateLimiter,
)
from replaykit.priorities import (
    MaxSegmentTree,
    MinSegmentTree,
    SumSegmentTree,
)
from replaykit.remote import (
    DEFAULT_REMOTE_CLASS_CONFIG,
    RayReplayBuffer,
    RayReplayBufferClient,
    RemoteResult,
)
from replaykit.samplers.base import (
    Sampler,
)
from replaykit.samplers.consuming import (
    ConsumingSampler,
)
from replaykit.samplers.prioritized import (
    PrioritizedSampler,
)
from replaykit.samplers.prioritized_slices import (
    PrioritizedSliceSampler,
)
from replaykit.samplers.random import (
    RandomSampler,
)
from replaykit.samplers.schedulers import (
    LambdaScheduler,
    LinearScheduler,
    ParameterScheduler,
    SchedulerList,
    StepScheduler,
)
from replaykit.samplers.sequence import (
    Sequence,
)
from replaykit.samplers.slices import (
    SliceSampler,
)
from replaykit.samplers.slices_without_replacement import (
    SliceSamplerWithoutReplacement,
)
from replaykit.samplers.staleness import (
    StalenessAwareSampler,
)
from replaykit.samplers.units import (
    SampleUnit,
    Transition,
)
from replaykit.samplers.without_replacement import (
    SamplerWithoutReplacement,
)
from replaykit.sharding import (
    ShardedClient,
    ShardedReplayBuffer,
    ShardedResult,
    ShardLoss,
)
from replaykit.storages.base import (
    Storage,
)
from replaykit.storages.lazy_stack import (
    LazyStackStorage,
)
from replaykit.storages.lists import (
    ListStorage,
)
from replaykit.storages.memmap import (
    LazyMemmapStorage,
)
from replaykit.storages.tensors import (
    LazyTensorStorage,
    TensorStorage,
)
from replaykit.ted import (
    DEFAULT_DONE_KEYS,
)
from replaykit.trajectories import (
    join_trajectories,
    pad_collate,
    split_trajectories,
)
from replaykit.transfer import (
    to_device,
)
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
from replaykit.writers.base import (
    Writer,
)
from replaykit.writers.immutable import (
    ImmutableDatasetWriter,
)
from replaykit.writers.lanes import (
    LaneWriter,
)
from replaykit.writers.max_value import (
    TensorDictMaxValueWriter,
)
from replaykit.writers.round_robin import (
    RoundRobinWriter,
    TensorDictRoundRobinWriter,
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
    "VectorSteps",
    "Writer",
    "WriterEnsemble",
    "__version__",
    "join_trajectories",
    "pad_collate",
    "read_torchrl",
    "split_trajectories",
    "to_device",
    "transition",
]
