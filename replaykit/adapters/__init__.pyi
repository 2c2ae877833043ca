# Written by `python -m tests.generated` from replaykit/registry.py.

from replaykit.adapters.exporting import (
    to_d3rlpy,
    to_minari,
    to_robomimic,
)
from replaykit.adapters.lerobot_export import (
    to_lerobot,
)
from replaykit.adapters.recording import (
    RecordReplay,
    record,
)
from replaykit.adapters.recording_folder import (
    open_recording,
)
from replaykit.adapters.rlds_export import (
    to_rlds,
)
from replaykit.adapters.sb3 import (
    SB3HerReplayBuffer,
    SB3ReplayBuffer,
)
from replaykit.adapters.zarr_export import (
    to_zarr,
)

__all__ = [
    "RecordReplay",
    "SB3HerReplayBuffer",
    "SB3ReplayBuffer",
    "open_recording",
    "record",
    "to_d3rlpy",
    "to_lerobot",
    "to_minari",
    "to_rlds",
    "to_robomimic",
    "to_zarr",
]
