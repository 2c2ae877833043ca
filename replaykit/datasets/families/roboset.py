"""RoboSet: Franka kitchen and Adroit hand in simulation, and files of real robots."""

from __future__ import annotations

from functools import cached_property
from typing import ClassVar

from replaykit.buffer.generic import SamplerT
from replaykit.datasets.base import BaseDatasetExperienceReplay
from replaykit.datasets.converting import local_paths
from replaykit.datasets.engine.layout import Layout
from replaykit.datasets.families.robohive import ROBOHIVE
from replaykit.datasets.families.roboset_real import ROBOSET_REAL, is_real_robot
from replaykit.datasets.hub_sources import HubFiles

__all__ = ["RobosetExperienceReplay"]

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
