"""Declare RoboSet: simulated tasks, and recordings of real robots."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Final, Literal

from replaykit.buffer.core import SamplerT
from replaykit.datasets.converting import local_paths
from replaykit.datasets.dataset import BaseDatasetExperienceReplay
from replaykit.datasets.engine.fields import STEPS, Alignment, Field
from replaykit.datasets.engine.finding import Finder, Groups
from replaykit.datasets.engine.h5 import open_h5
from replaykit.datasets.engine.layout import Layout
from replaykit.datasets.families.robohive import ROBOHIVE
from replaykit.datasets.remote_sources import HubFiles

__all__ = ["ROBOSET_REAL", "RobosetExperienceReplay", "RobosetRealLayout", "is_real_robot"]

_TRIALS: Final = Groups("Trial", having=("data",), noun="trial")
_COMMAND: Final = ("data/ctrl_arm", "data/ctrl_ee")


@dataclass(frozen=True, kw_only=True)
class RobosetRealLayout(Layout):
    """Trials of the teleoperation, kinesthetic and autonomous sets.

    The action is the command of the arm with that of the gripper behind. Joints, gripper and
    cameras are below ``observation``; what is derived from them, and ``solved``, below ``info``.
    In published files trials are copies of one another: the first is kept, and the report lists
    the others (rule V36); ``Policies(copies="keep")`` keeps all. Some have holes of NaN: leave
    these out with ``Policies(on_invalid="skip")``.
    """

    name: str = "roboset-real"
    version: int = 1
    episodes: Finder = _TRIALS
    alignment: Alignment = STEPS
    clock: str = "data/ctrl_arm"
    copies: Literal["keep", "drop"] = "drop"
    fields: tuple[Field, ...] = (
        Field(_COMMAND, "action", before=("action",), column=True),
        Field("data/time", "time", before=("time",), required=False),
        Field("data/user", "info", before=("info", "user"), required=False),
        Field("data/", "observation", ("observation",), ("next", "observation"), column=True),
        Field("derived/", "info", ("info",), ("next", "info"), required=False),
        Field("config/solved", "info", before=("info", "solved"), required=False),
    )


ROBOSET_REAL: Final = RobosetRealLayout()


def is_real_robot(path: Path) -> bool:
    """Whether the first trial of a file is one of a real robot; no file that can be read is none.

    Cost: opens the file, and looks at the names of one group.
    """
    try:
        with open_h5(path) as file:
            names = next((member.children for member in file.members() if member.is_group), ())
    except (OSError, ValueError):
        return False
    return "data" in names and "actions" not in names


_DAPG = ("door_v2d-v1", "relocate_v2d-v1", "hammer_v2d-v1", "pen_v2d-v1")
_KITCHEN = (
    "FK1_MicroOpenRandom_v2d-v4",
    "FK1_Knob2OffRandom_v2d-v4",
    "FK1_LdoorOpenRandom_v2d-v4",
    "FK1_SdoorOpenRandom_v2d-v4",
    "FK1_Knob1OnRandom_v2d-v4",
)
_BY_TASK = (
    "human_demo_singleTask_Fixed-v4",
    "FK1_SdoorOpenRandom_v2d-v4",
    "FK1_LdoorOpenRandom_v2d-v4",
    "FK1_Knob2OffRandom_v2d-v4",
    "FK1_Knob1OnRandom_v2d-v4",
    "FK1_MicroOpenRandom_v2d-v4",
)


class RobosetExperienceReplay(BaseDatasetExperienceReplay[SamplerT]):
    """Transitions of the simulated RoboSet tasks, and of recordings of real robots.

    The files of a data set are fetched from the Hub repository ``jdvakil/RoboSet_Sim`` at one
    commit, verified, and converted once into memory-mapped columns. A source record describes a
    *state* (its observation, reward, done, infos) and the action chosen in it, and the last record
    of a trial is the final state. So a trial of T records makes T - 1 rows, and the reward of a
    row is that of the state it arrived at.

    Rows have ``observation``, ``action``, ``time``, ``info``, ``episode`` (number of the trial in
    its file), ``seed`` (number of the file), ``done``, ``terminated``, ``truncated``, and under
    ``next`` ``observation``, ``reward``, ``done``, ``terminated``, ``truncated``, ``info``. Flags
    and reward are ``[N, 1]``; dtypes are those of the source. They are ordered by ``seed``, then
    ``episode``.

    Files of the real-robot sets are given with ``source``, under any id, and told by what is in
    them; for URLs of them say ``layout=ROBOSET_REAL``. They have frames of a state and the command
    given there, but neither reward nor flags: see `RobosetRealLayout`.

    Arguments, errors and methods: see BaseDatasetExperienceReplay. Sources:
    https://sites.google.com/view/robohive/roboset, MIT licence.

    Example:
        >>> from replaykit.datasets import RobosetExperienceReplay
        >>> len(RobosetExperienceReplay.available_datasets)
        20
        >>> RobosetExperienceReplay("DAPG(expert)/door_v2d-v1", batch_size=32, download=False,
        ...                         root="no-such-folder")
        Traceback (most recent call last):
        FileNotFoundError: the data set 'DAPG(expert)/door_v2d-v1' is not in ...
    """

    available_datasets: ClassVar[list[str]] = [
        *(f"DAPG(expert)/{task}" for task in _DAPG),
        *(f"DAPG(human)/{task}" for task in _DAPG),
        *(f"FK1-v4(expert)/{task}" for task in _KITCHEN),
        "FK1-v4(human)/human_demos_by_playdata",
        *(f"FK1-v4(human)/human_demos_by_task/{task}" for task in _BY_TASK),
    ]
    corpus = "roboset"
    license = "mit"
    repository: ClassVar[str] = "jdvakil/RoboSet_Sim"

    @cached_property
    def layout(self) -> Layout:
        """How the files of the data set, or of ``source``, are laid out."""
        own = () if self.source is None else local_paths(self.source)
        return ROBOSET_REAL if own and is_real_robot(own[0]) else ROBOHIVE

    @classmethod
    def remote(cls, dataset_id: str) -> HubFiles:
        """Says where the files of a data set are."""
        return HubFiles(cls.repository, dataset_id, ".h5")
