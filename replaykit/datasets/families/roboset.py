"""The RoboSet family: simulated tasks and recordings of real robots."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Final, Literal

from replaykit.buffer.components import SamplerT
from replaykit.datasets.converting import local_paths
from replaykit.datasets.dataset import BaseDatasetExperienceReplay
from replaykit.datasets.engine.episode_finders import Finder, Groups
from replaykit.datasets.engine.fields import STEPS, Alignment, Field
from replaykit.datasets.engine.h5 import open_h5
from replaykit.datasets.engine.layout import Layout
from replaykit.datasets.families.robohive import ROBOHIVE
from replaykit.datasets.remote_sources import HubFiles

_TRIALS: Final = Groups("Trial", having=("data",), noun="trial")
_COMMAND: Final = ("data/ctrl_arm", "data/ctrl_ee")


@dataclass(frozen=True, kw_only=True)
class RobosetRealLayout(Layout):
    """Layout of trials of RoboSet's teleoperation, kinesthetic and autonomous sets.

    The action is the command of the arm, followed by the command of the gripper. Joints, gripper
    and cameras are below ``observation``. Derived values and ``solved`` are below ``info``.
    Published files contain copies of trials. The first copy is kept, and the report lists the
    others (rule V36). ``Policies(copies="keep")`` keeps all copies. Some trials have gaps of NaN.
    ``Policies(on_invalid="skip")`` leaves these trials out.
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
    """Return whether the first trial of a file was recorded on a real robot.

    The result is False for a file that cannot be read. Cost: the file is opened, and the names of
    one group are read.
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
    commit, verified, and converted once into memory-mapped columns. A source record contains
    observation, reward, done and infos of a *state*, and the action chosen in that state. The last
    record of a trial is the final state. So a trial of T records makes T - 1 rows. The reward of a
    row is the reward of the state after the step.

    The keys of a row are ``observation``, ``action``, ``time``, ``info``, ``episode``, ``seed``,
    ``done``, ``terminated`` and ``truncated``. ``episode`` is the number of the trial in its file,
    and ``seed`` is the number of the file. The keys under ``next`` are ``observation``, ``reward``,
    ``done``, ``terminated``, ``truncated`` and ``info``. Flags and reward have the shape ``[N,
    1]``. Dtypes are those of the source. Rows are ordered by ``seed``, then by ``episode``.

    Files of the real-robot sets are given with ``source``, under any id. Local files are recognized
    by their content. For URLs, pass ``layout=ROBOSET_REAL``. The files have states with camera
    frames and the command given in each state, but no rewards and no flags; see
    `RobosetRealLayout`.

    See BaseDatasetExperienceReplay for arguments, errors and methods. Source:
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
        """The layout of the files of the data set, or of ``source``."""
        own = () if self.source is None else local_paths(self.source)
        return ROBOSET_REAL if own and is_real_robot(own[0]) else ROBOHIVE

    @classmethod
    def remote(cls, dataset_id: str) -> HubFiles:
        """Return the location of a data set's files."""
        return HubFiles(cls.repository, dataset_id, ".h5")
