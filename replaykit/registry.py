"""List every public name with its kind and its module.

All other lists of names are made from `ENTRIES`. These are the exports of packages, the corpus
families and layouts, the laws of shards, the type stubs and the tables in the docs. To add a
sampler, storage, writer, transform or corpus family, add a file and an entry here. ``python -m
tests.generated`` then writes the stubs and the tables.

This module imports no other module of the package. No other module may name a module above its own.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable
from typing import Any, Final, NamedTuple


class Entry(NamedTuple):
    """One public name.

    Attributes:
        name: name of the class, function or constant.
        kind: category of the name. Names of one kind form one table in the docs.
        module: path of the module that defines the name, below ``replaykit``.
        law: for a sampler that shards can use, the law that divides its draws among the shards. It
            is a key of ``replaykit.distributed.shard_config.LAWS``.
        single_rows: True for a sampler that draws any number of single rows at once. An ensemble
            then requests all parts of a batch from a member in one draw.
    """

    name: str
    kind: str
    module: str
    law: str | None = None
    single_rows: bool = False


ENTRIES: Final[tuple[Entry, ...]] = (
    Entry("__version__", "constant", "_version"),
    Entry("DEFAULT_DONE_KEYS", "constant", "ted"),
    # Buffers
    Entry("ReplayBuffer", "buffer", "buffer"),
    Entry("TensorDictReplayBuffer", "buffer", "buffer"),
    Entry("PrioritizedReplayBuffer", "buffer", "buffer"),
    Entry("TensorDictPrioritizedReplayBuffer", "buffer", "buffer"),
    Entry("HERReplayBuffer", "buffer", "buffer.buffer_variants"),
    Entry("BufferDataset", "buffer part", "buffer"),
    Entry("BufferLoader", "buffer part", "buffer"),
    Entry("ConditionalUpdateResult", "buffer part", "buffer"),
    Entry("Episode", "buffer part", "buffer"),
    Entry("Episodes", "buffer part", "buffer"),
    Entry("RateLimiter", "buffer part", "pace"),
    Entry("Event", "buffer part", "buffer.events"),
    Entry("Metrics", "buffer part", "buffer.events"),
    Entry("PeriodicSave", "buffer part", "buffer.events"),
    Entry("wait_ready", "function", "buffer.events"),
    Entry("read_torchrl", "function", "buffer.buffer_variants"),
    # Storages
    Entry("Storage", "base", "storages.storage"),
    Entry("ListStorage", "storage", "storages.lists"),
    Entry("LazyStackStorage", "storage", "storages.lists"),
    Entry("TensorStorage", "storage", "storages.tensors"),
    Entry("LazyTensorStorage", "storage", "storages.tensors"),
    Entry("LazyMemmapStorage", "storage", "storages.memmap"),
    # Samplers
    Entry("Sampler", "base", "samplers.sampler"),
    Entry("RandomSampler", "sampler", "samplers.uniform", law="rows", single_rows=True),
    Entry("SamplerWithoutReplacement", "sampler", "samplers.uniform", single_rows=True),
    Entry("SliceSampler", "sampler", "samplers.slices", law="windows"),
    Entry("SliceSamplerWithoutReplacement", "sampler", "samplers.slices"),
    Entry(
        "PrioritizedSampler",
        "sampler",
        "samplers.prioritized",
        law="prioritized rows",
        single_rows=True,
    ),
    Entry(
        "PrioritizedSliceSampler",
        "sampler",
        "samplers.prioritized_slices",
        law="prioritized windows",
    ),
    Entry("ConsumingSampler", "sampler", "samplers.consuming"),
    Entry("StalenessAwareSampler", "sampler", "samplers.staleness"),
    Entry("SampleUnit", "base", "samplers.sampler"),
    Entry("Transition", "sample unit", "samplers.sampler"),
    Entry("Sequence", "sample unit", "samplers.sequence"),
    Entry("ParameterScheduler", "base", "samplers.schedulers"),
    Entry("Coverage", "measure", "samplers.episode_measures"),
    Entry("EpisodeData", "measure", "storages.episode_tags"),
    Entry("LambdaScheduler", "scheduler", "samplers.schedulers"),
    Entry("LinearScheduler", "scheduler", "samplers.schedulers"),
    Entry("StepScheduler", "scheduler", "samplers.schedulers"),
    Entry("SchedulerList", "scheduler", "samplers.schedulers"),
    # Writers
    Entry("Writer", "base", "writers.writer"),
    Entry("RoundRobinWriter", "writer", "writers.ring_writers"),
    Entry("TensorDictRoundRobinWriter", "writer", "writers.ring_writers"),
    Entry("TensorDictMaxValueWriter", "writer", "writers.max_value"),
    Entry("LaneWriter", "writer", "writers.ring_writers"),
    Entry("EpisodeWriter", "writer", "writers.episode_writer"),
    Entry("Evictor", "base", "writers.episode_writer"),
    Entry("Fifo", "evictor", "writers.episode_writer"),
    Entry("Uniform", "evictor", "writers.episode_writer"),
    Entry("MostSampled", "evictor", "writers.episode_writer"),
    Entry("LowestPriority", "evictor", "writers.episode_writer"),
    Entry("Oldest", "evictor", "writers.episode_writer"),
    Entry("ImmutableDatasetWriter", "writer", "writers.ring_writers"),
    # Transforms
    Entry("Transform", "base", "transforms.transform"),
    Entry("HistoryTransform", "base", "transforms.history"),
    Entry("Around", "transform part", "transforms.history"),
    Entry("Surroundings", "transform part", "transforms.history"),
    Entry("FrameStream", "transform part", "transforms.frames"),
    Entry("Compose", "transform", "transforms.transform"),
    Entry("NStep", "transform", "transforms.n_step"),
    Entry("NStepWriting", "transform", "transforms.n_step"),
    Entry("Bootstrap", "transform", "transforms.discounting"),
    Entry("StackFrames", "transform", "transforms.frames"),
    Entry("Windows", "transform", "transforms.neighbours"),
    Entry("PreviousStep", "transform", "transforms.frames"),
    Entry("StepCount", "transform", "transforms.frames"),
    Entry("HindsightGoal", "transform", "transforms.hindsight"),
    Entry("ReturnToGo", "transform", "transforms.discounting"),
    Entry("Shift", "transform", "transforms.neighbours"),
    Entry("WindowLast", "transform", "transforms.neighbours"),
    Entry("Tag", "transform", "transforms.neighbours"),
    Entry("ExpandTag", "transform", "transforms.neighbours"),
    Entry("TrajectoryTransform", "transform", "transforms.trajectory_edits"),
    Entry("KeepRaw", "transform", "transforms.value_transforms"),
    Entry("RewardClip", "transform", "transforms.value_transforms"),
    Entry("RewardScale", "transform", "transforms.value_transforms"),
    Entry("RewardShift", "transform", "transforms.value_transforms"),
    Entry("RewardMap", "transform", "transforms.value_transforms"),
    Entry("Pad", "transform", "transforms.normalization"),
    Entry("RunningNorm", "transform", "transforms.normalization"),
    Entry("Normalize", "transform", "transforms.normalization"),
    Entry("Unnormalize", "transform", "transforms.normalization"),
    Entry("ImageScale", "transform", "transforms.value_transforms"),
    Entry("Cast", "transform", "transforms.value_transforms"),
    Entry("SelectTransform", "transform", "transforms.value_transforms"),
    Entry("ExcludeTransform", "transform", "transforms.value_transforms"),
    Entry("RenameTransform", "transform", "transforms.value_transforms"),
    Entry("CatTensors", "transform", "transforms.value_transforms"),
    # Several buffers, several processes
    Entry("ReplayBufferEnsemble", "ensemble", "mixture"),
    Entry("StorageEnsemble", "ensemble", "mixture"),
    Entry("SamplerEnsemble", "ensemble", "mixture"),
    Entry("WriterEnsemble", "ensemble", "mixture"),
    Entry("Ramp", "ensemble", "mixture"),
    Entry("JointBatch", "ensemble", "mixture"),
    Entry("ScheduledChoice", "ensemble", "mixture"),
    Entry("OfflineToOnlineReplayBuffer", "ensemble", "datasets.offline_to_online"),
    Entry("prefill_replay_buffer", "function", "datasets.offline_to_online"),
    Entry("RayReplayBuffer", "remote", "distributed"),
    Entry("RayReplayBufferClient", "remote", "distributed"),
    Entry("RemoteResult", "remote", "distributed"),
    Entry("DEFAULT_REMOTE_CLASS_CONFIG", "constant", "_ray"),
    Entry("ShardedReplayBuffer", "shards", "distributed"),
    Entry("ShardedClient", "shards", "distributed"),
    Entry("ShardedResult", "shards", "distributed"),
    Entry("ShardLoss", "shards", "distributed"),
    # Folders that other processes fill
    Entry("TrajectoryWriter", "feed", "feeds"),
    Entry("TrajectoryFolder", "feed", "feeds"),
    Entry("TrajectorySource", "base", "feeds"),
    Entry("TrajectoryChunks", "trajectory source", "feeds"),
    Entry("AmagoTrajectories", "trajectory source", "feeds"),
    Entry("EmoteTable", "trajectory source", "feeds"),
    Entry("AlfCheckpoint", "trajectory source", "feeds"),
    Entry("feed_trajectories", "function", "feeds"),
    # Tools
    Entry("VectorSteps", "environment", "environments"),
    Entry("transition", "environment", "environments"),
    Entry("EpisodeAssembler", "environment", "environments"),
    Entry("SumSegmentTree", "segment tree", "priorities"),
    Entry("MinSegmentTree", "segment tree", "priorities"),
    Entry("MaxSegmentTree", "segment tree", "priorities"),
    Entry("split_trajectories", "function", "trajectories"),
    Entry("join_trajectories", "function", "trajectories"),
    Entry("pad_collate", "function", "trajectories"),
    Entry("MiniBatches", "buffer part", "trajectories"),
    Entry("to_device", "function", "transfer"),
    # Corpora. A family is a class with ids. A layout declares how its files are read.
    Entry("BaseDatasetExperienceReplay", "base", "datasets.dataset"),
    Entry("CorpusExperienceReplay", "data set", "datasets.published_buffer"),
    Entry("RobosetExperienceReplay", "family", "datasets.families.robohive"),
    Entry("D4RLExperienceReplay", "family", "datasets.families.d4rl"),
    Entry("MinariExperienceReplay", "family", "datasets.families.minari"),
    Entry("RobomimicExperienceReplay", "family", "datasets.families.robomimic"),
    Entry("LiberoExperienceReplay", "family", "datasets.families.robomimic"),
    Entry("ManiSkillExperienceReplay", "family", "datasets.families.robomimic"),
    Entry("VD4RLExperienceReplay", "family", "datasets.families.d4rl"),
    Entry("IsaacLabExperienceReplay", "family", "datasets.families.robomimic"),
    Entry("AlohaExperienceReplay", "family", "datasets.families.robohive"),
    Entry("LeRobotExperienceReplay", "family", "datasets.families.lerobot"),
    Entry("ZarrExperienceReplay", "family", "datasets.families.zarr_arrays"),
    Entry("MinariArrowExperienceReplay", "family", "datasets.families.minari"),
    Entry("RldsExperienceReplay", "family", "datasets.families.rlds"),
    Entry("ROBOHIVE", "layout", "datasets.families.robohive"),
    Entry("ROBOSET_REAL", "layout", "datasets.families.robohive"),
    Entry("D4RL", "layout", "datasets.families.d4rl"),
    Entry("MINARI", "layout", "datasets.families.minari"),
    Entry("ROBOMIMIC", "layout", "datasets.families.robomimic"),
    Entry("ROBOSUITE", "layout", "datasets.families.robomimic"),
    Entry("LIBERO", "layout", "datasets.families.robomimic"),
    Entry("ISAACLAB", "layout", "datasets.families.robomimic"),
    Entry("MANISKILL", "layout", "datasets.families.robomimic"),
    Entry("VD4RL", "layout", "datasets.families.d4rl"),
    Entry("ALOHA", "layout", "datasets.families.robohive"),
    Entry("LEROBOT", "table layout", "datasets.families.lerobot"),
    Entry("ZARR", "table layout", "datasets.families.zarr_arrays"),
    Entry("MINARI_ARROW", "table layout", "datasets.families.minari"),
    Entry("RLDS", "table layout", "datasets.families.rlds"),
    Entry("RldsLayout", "layout class", "datasets.families.rlds"),
    Entry("MinariArrowLayout", "layout class", "datasets.families.minari"),
    Entry("ZarrLayout", "layout class", "datasets.families.zarr_arrays"),
    Entry("LEROBOT_PIXELS", "table layout", "datasets.families.lerobot"),
    Entry("LEROBOT_JPEG", "table layout", "datasets.families.lerobot"),
    Entry("LeRobotLayout", "layout class", "datasets.families.lerobot"),
    Entry("RoboHiveLayout", "layout class", "datasets.families.robohive"),
    Entry("D4RLLayout", "layout class", "datasets.families.d4rl"),
    Entry("RobosuiteLayout", "layout class", "datasets.families.robomimic"),
    Entry("AlohaLayout", "layout class", "datasets.families.robohive"),
    Entry("Layout", "conversion", "datasets.engine.layout"),
    Entry("Alignment", "conversion", "datasets.engine.fields"),
    Entry("STATE_RECORDS", "conversion", "datasets.engine.fields"),
    Entry("FINAL_STATE", "conversion", "datasets.engine.fields"),
    Entry("STEPS", "conversion", "datasets.engine.fields"),
    Entry("ARRIVALS", "conversion", "datasets.engine.fields"),
    Entry("Field", "conversion", "datasets.engine.fields"),
    Entry("Groups", "conversion", "datasets.engine.episode_finders"),
    Entry("WholeFile", "conversion", "datasets.engine.episode_finders"),
    Entry("Segments", "conversion", "datasets.engine.episode_finders"),
    Entry("Policies", "conversion", "datasets.engine.policies"),
    Entry("convert", "conversion", "datasets.converting"),
    Entry("open", "conversion", "datasets.converting"),
    Entry("download", "conversion", "datasets.http_files"),
    Entry("load_dataset", "conversion", "datasets.dataset"),
    Entry("register_dataset", "conversion", "datasets.dataset"),
    Entry("plan", "conversion", "datasets.dataset"),
    Entry("pull", "conversion", "datasets.hub_sharing"),
    Entry("push", "conversion", "datasets.hub_sharing"),
    # Adapters
    Entry("SB3ReplayBuffer", "adapter", "adapters.sb3"),
    Entry("SB3HerReplayBuffer", "adapter", "adapters.sb3"),
    Entry("RecordReplay", "adapter", "adapters.recording"),
    Entry("record", "adapter", "adapters.recording"),
    Entry("open_recording", "adapter", "adapters.recording_folder"),
    Entry("to_minari", "adapter", "adapters.exporting"),
    Entry("to_d3rlpy", "adapter", "adapters.exporting"),
    Entry("to_robomimic", "adapter", "adapters.exporting"),
    Entry("to_lerobot", "adapter", "adapters.lerobot_export"),
    Entry("to_rlds", "adapter", "adapters.rlds_export"),
    Entry("to_zarr", "adapter", "adapters.zarr_export"),
)

ROOMS: Final = (
    "replaykit",
    "replaykit.adapters",
    "replaykit.datasets",
    "replaykit.datasets.families",
    "replaykit.samplers",
    "replaykit.storages",
    "replaykit.transforms",
    "replaykit.writers",
)
"""Packages whose public names all come from `ENTRIES`.

Each package has a generated stub.
"""

_BY_NAME: Final = {entry.name: entry for entry in ENTRIES}

_EXPORTED_BY: Final = {
    "conversion": ("replaykit.datasets",),
    "layout": ("replaykit.datasets.families",),
    "table layout": ("replaykit.datasets.families",),
    "layout class": ("replaykit.datasets.families",),
    "adapter": ("replaykit.adapters",),
}
"""Packages that export a kind. The default is ``replaykit`` and the module's package."""

MOVED: Final = {
    "replaykit.checkpoint.read_torchrl": "replaykit.read_torchrl",
    "replaykit.samplers.SamplerEnsemble": "replaykit.SamplerEnsemble",
    "replaykit.storages.StorageEnsemble": "replaykit.StorageEnsemble",
    "replaykit.writers.WriterEnsemble": "replaykit.WriterEnsemble",
}
"""New full names by old name.

The old names still work for one more release, with a warning.
"""


def of_kind(kind: str) -> list[Entry]:
    """Return the entries of one kind, in the order of the table."""
    return [entry for entry in ENTRIES if entry.kind == kind]


def exports(package: str) -> dict[str, Entry]:
    """Return the entries that a package exports, by name."""
    found = {}
    for entry in ENTRIES:
        room = f"replaykit.{entry.module.partition('.')[0]}"
        if package in _EXPORTED_BY.get(entry.kind, ("replaykit", room)):
            found[entry.name] = entry
    return found


def load(entry: Entry) -> Any:
    """Import the module of an entry and return the value of its name."""
    return getattr(importlib.import_module(f"replaykit.{entry.module}"), entry.name)


def entry_of(kind: type) -> Entry | None:
    """Return the entry of exactly this class; None for other classes and subclasses."""
    entry = _BY_NAME.get(kind.__name__)
    if entry is None:
        return None
    module = sys.modules.get(f"replaykit.{entry.module}")
    return entry if getattr(module, entry.name, None) is kind else None


def room(package: str) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__all__``, ``__getattr__`` and ``__dir__`` of a package."""
    names = sorted(exports(package))
    return names, getter(package), lambda: list(names)


def getter(package: str) -> Callable[[str], Any]:
    """Return ``__getattr__`` of a package.

    The function loads each exported name once. It also finds old names and modules.
    """
    names = exports(package)

    def __getattr__(name: str) -> Any:
        if name in names:
            value = load(names[name])
            setattr(sys.modules[package], name, value)
            return value
        full = f"{package}.{name}"
        if full in MOVED:
            return _moved(full)
        if not name.startswith("_") and importlib.util.find_spec(full) is not None:
            return importlib.import_module(full)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return __getattr__


def _moved(full: str) -> Any:
    """Return the value of an old name, with a warning at the code that uses it."""
    new = MOVED[full]
    warnings.warn(
        f"{full} is deprecated and works for one more release; use {new}",
        DeprecationWarning,
        stacklevel=3,
    )
    module, _, name = new.rpartition(".")
    return getattr(importlib.import_module(module), name)
