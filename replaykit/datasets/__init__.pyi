# Written by `python -m tests.generated` from replaykit/registry.py.

from replaykit.datasets.converting import (
    convert,
    open,
)
from replaykit.datasets.dataset import (
    BaseDatasetExperienceReplay,
    load_dataset,
    plan,
    register_dataset,
)
from replaykit.datasets.engine.episode_finders import (
    Groups,
    Segments,
    WholeFile,
)
from replaykit.datasets.engine.fields import (
    ARRIVALS,
    FINAL_STATE,
    STATE_RECORDS,
    STEPS,
    Alignment,
    Field,
)
from replaykit.datasets.engine.layout import (
    Layout,
)
from replaykit.datasets.engine.policies import (
    Policies,
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
from replaykit.datasets.http_files import (
    download,
)
from replaykit.datasets.hub_sharing import (
    pull,
    push,
)
from replaykit.datasets.offline_to_online import (
    OfflineToOnlineReplayBuffer,
    prefill_replay_buffer,
)
from replaykit.datasets.published_buffer import (
    CorpusExperienceReplay,
)

__all__ = [
    "ARRIVALS",
    "FINAL_STATE",
    "STATE_RECORDS",
    "STEPS",
    "Alignment",
    "AlohaExperienceReplay",
    "BaseDatasetExperienceReplay",
    "CorpusExperienceReplay",
    "D4RLExperienceReplay",
    "Field",
    "Groups",
    "IsaacLabExperienceReplay",
    "Layout",
    "LeRobotExperienceReplay",
    "LiberoExperienceReplay",
    "ManiSkillExperienceReplay",
    "MinariArrowExperienceReplay",
    "MinariExperienceReplay",
    "OfflineToOnlineReplayBuffer",
    "Policies",
    "RldsExperienceReplay",
    "RobomimicExperienceReplay",
    "RobosetExperienceReplay",
    "Segments",
    "VD4RLExperienceReplay",
    "WholeFile",
    "ZarrExperienceReplay",
    "convert",
    "download",
    "load_dataset",
    "open",
    "plan",
    "prefill_replay_buffer",
    "pull",
    "push",
    "register_dataset",
]
