# Written by `python -m tests.generated` from replaykit/registry.py.

from replaykit._ray import (
    DEFAULT_REMOTE_CLASS_CONFIG,
)
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
from replaykit.buffer.buffer_variants import (
    HERReplayBuffer,
    read_torchrl,
)
from replaykit.buffer.events import (
    Event,
    Metrics,
    PeriodicSave,
    wait_ready,
)
from replaykit.datasets.dataset import (
    BaseDatasetExperienceReplay,
)
from replaykit.datasets.families.d4rl import (
    D4RLExperienceReplay,
    VD4RLExperienceReplay,
)
from replaykit.datasets.families.lerobot import (
    LeRobotExperienceReplay,
)
from replaykit.datasets.families.minari import (
    MinariArrowExperienceReplay,
    MinariExperienceReplay,
)
from replaykit.datasets.families.rlds import (
    RldsExperienceReplay,
)
from replaykit.datasets.families.robohive import (
    AlohaExperienceReplay,
    RobosetExperienceReplay,
)
from replaykit.datasets.families.robomimic import (
    IsaacLabExperienceReplay,
    LiberoExperienceReplay,
    ManiSkillExperienceReplay,
    RobomimicExperienceReplay,
)
from replaykit.datasets.families.zarr_arrays import (
    ZarrExperienceReplay,
)
from replaykit.datasets.offline_to_online import (
    OfflineToOnlineReplayBuffer,
    prefill_replay_buffer,
)
from replaykit.datasets.published_buffer import (
    CorpusExperienceReplay,
)
from replaykit.distributed import (
    RayReplayBuffer,
    RayReplayBufferClient,
    RemoteResult,
    ShardedClient,
    ShardedReplayBuffer,
    ShardedResult,
    ShardLoss,
)
from replaykit.environments import (
    EpisodeAssembler,
    VectorSteps,
    transition,
)
from replaykit.feeds import (
    AlfCheckpoint,
    AmagoTrajectories,
    EmoteTable,
    TrajectoryChunks,
    TrajectoryFolder,
    TrajectorySource,
    TrajectoryWriter,
    feed_trajectories,
)
from replaykit.mixture import (
    JointBatch,
    Ramp,
    ReplayBufferEnsemble,
    SamplerEnsemble,
    ScheduledChoice,
    StorageEnsemble,
    WriterEnsemble,
)
from replaykit.pace import (
    RateLimiter,
)
from replaykit.priorities import (
    MaxSegmentTree,
    MinSegmentTree,
    SumSegmentTree,
)
from replaykit.samplers.consuming import (
    ConsumingSampler,
)
from replaykit.samplers.episode_measures import (
    Coverage,
)
from replaykit.samplers.prioritized import (
    PrioritizedSampler,
)
from replaykit.samplers.prioritized_slices import (
    PrioritizedSliceSampler,
)
from replaykit.samplers.sampler import (
    Sampler,
    SampleUnit,
    Transition,
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
    SliceSamplerWithoutReplacement,
)
from replaykit.samplers.staleness import (
    StalenessAwareSampler,
)
from replaykit.samplers.uniform import (
    RandomSampler,
    SamplerWithoutReplacement,
)
from replaykit.storages.episode_tags import (
    EpisodeData,
)
from replaykit.storages.lists import (
    LazyStackStorage,
    ListStorage,
)
from replaykit.storages.memmap import (
    LazyMemmapStorage,
)
from replaykit.storages.storage import (
    Storage,
)
from replaykit.storages.tensors import (
    LazyTensorStorage,
    TensorStorage,
)
from replaykit.ted import (
    DEFAULT_DONE_KEYS,
)
from replaykit.trajectories import (
    MiniBatches,
    join_trajectories,
    pad_collate,
    split_trajectories,
)
from replaykit.transfer import (
    to_device,
)
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
from replaykit.writers.episode_writer import (
    EpisodeWriter,
    Evictor,
    Fifo,
    LowestPriority,
    MostSampled,
    Oldest,
    Uniform,
)
from replaykit.writers.max_value import (
    TensorDictMaxValueWriter,
)
from replaykit.writers.ring_writers import (
    ImmutableDatasetWriter,
    LaneWriter,
    RoundRobinWriter,
    TensorDictRoundRobinWriter,
)
from replaykit.writers.writer import (
    Writer,
)

__all__ = [
    "DEFAULT_DONE_KEYS",
    "DEFAULT_REMOTE_CLASS_CONFIG",
    "AlfCheckpoint",
    "AlohaExperienceReplay",
    "AmagoTrajectories",
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
    "Coverage",
    "D4RLExperienceReplay",
    "EmoteTable",
    "Episode",
    "EpisodeAssembler",
    "EpisodeData",
    "EpisodeWriter",
    "Episodes",
    "Event",
    "Evictor",
    "ExcludeTransform",
    "ExpandTag",
    "Fifo",
    "FrameStream",
    "HERReplayBuffer",
    "HindsightGoal",
    "HistoryTransform",
    "ImageScale",
    "ImmutableDatasetWriter",
    "IsaacLabExperienceReplay",
    "JointBatch",
    "KeepRaw",
    "LambdaScheduler",
    "LaneWriter",
    "LazyMemmapStorage",
    "LazyStackStorage",
    "LazyTensorStorage",
    "LeRobotExperienceReplay",
    "LiberoExperienceReplay",
    "LinearScheduler",
    "ListStorage",
    "LowestPriority",
    "ManiSkillExperienceReplay",
    "MaxSegmentTree",
    "Metrics",
    "MinSegmentTree",
    "MinariArrowExperienceReplay",
    "MinariExperienceReplay",
    "MiniBatches",
    "MostSampled",
    "NStep",
    "NStepWriting",
    "Normalize",
    "OfflineToOnlineReplayBuffer",
    "Oldest",
    "Pad",
    "ParameterScheduler",
    "PeriodicSave",
    "PreviousStep",
    "PrioritizedReplayBuffer",
    "PrioritizedSampler",
    "PrioritizedSliceSampler",
    "Ramp",
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
    "RldsExperienceReplay",
    "RobomimicExperienceReplay",
    "RobosetExperienceReplay",
    "RoundRobinWriter",
    "RunningNorm",
    "SampleUnit",
    "Sampler",
    "SamplerEnsemble",
    "SamplerWithoutReplacement",
    "ScheduledChoice",
    "SchedulerList",
    "SelectTransform",
    "Sequence",
    "ShardLoss",
    "ShardedClient",
    "ShardedReplayBuffer",
    "ShardedResult",
    "Shift",
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
    "Tag",
    "TensorDictMaxValueWriter",
    "TensorDictPrioritizedReplayBuffer",
    "TensorDictReplayBuffer",
    "TensorDictRoundRobinWriter",
    "TensorStorage",
    "TrajectoryChunks",
    "TrajectoryFolder",
    "TrajectorySource",
    "TrajectoryTransform",
    "TrajectoryWriter",
    "Transform",
    "Transition",
    "Uniform",
    "Unnormalize",
    "VD4RLExperienceReplay",
    "VectorSteps",
    "WindowLast",
    "Windows",
    "Writer",
    "WriterEnsemble",
    "ZarrExperienceReplay",
    "__version__",
    "feed_trajectories",
    "join_trajectories",
    "pad_collate",
    "prefill_replay_buffer",
    "read_torchrl",
    "split_trajectories",
    "to_device",
    "transition",
    "wait_ready",
]
