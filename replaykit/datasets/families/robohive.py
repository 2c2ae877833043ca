"""The families of robot trials: RoboHive, RoboSet, and ALOHA.

RoboSet's simulations have the layout of RoboHive, with one group per trial. Record ``t`` holds
observation, reward, done and infos of state ``t``, and the action chosen in state ``t``. The action
of the final state is NaN. So reward and done belong to the step that led to their record. The last
action of an episode is in the record before the last.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

import numpy as np
import numpy.typing as npt

from replaykit.buffer.components import SamplerT
from replaykit.datasets.converting import local_paths
from replaykit.datasets.dataset import BaseDatasetExperienceReplay, LocalFilesReplay
from replaykit.datasets.encoded_frames import open_image
from replaykit.datasets.engine.episode_finders import Finder, Groups, WholeFile
from replaykit.datasets.engine.fields import (
    STATE_RECORDS,
    STEPS,
    Alignment,
    Decoder,
    Field,
    Images,
)
from replaykit.datasets.engine.h5 import H5File, open_h5
from replaykit.datasets.engine.layout import (
    DropLeaves,
    Ends,
    Flags,
    Layout,
    SourceFacts,
    SourceWindow,
)
from replaykit.datasets.engine.locations import Location, RuleFindings
from replaykit.datasets.remote_sources import HubFiles
from replaykit.declared import check_fields

_TRIALS: Final = Groups("Trial", noun="trial")
_INFOS: Final = "env_infos/"
_OBS_DICT: Final = "env_infos/obs_dict/"
_DENSE: Final = "env_infos/rwd_dense"
_SPARSE: Final = "env_infos/rwd_sparse"
_CHECKED: Final = 16
"""Number of records that are compared first, which excludes most columns."""


_Reward = Literal["recorded", "relabelled"]
_Infos = Literal["before", "after"]


@dataclass(frozen=True, kw_only=True)
class RoboHiveLayout(Layout):
    """Layout of trials of RoboHive's logger, such as RoboSet's simulation files.

    Attributes:
        reward: with ``"recorded"``, the rewards must equal the dense or the sparse rewards that the
            logger wrote to the infos (rule V52). With ``"relabelled"``, the rewards were computed
            later, one for each state as in the logger's files. They are not compared.
        infos: with ``"before"``, a record has infos, reward and ``done`` of its state, as the
            logger writes them. With ``"after"``, a record has infos, reward and ``done`` of the
            state that its action led to. The trial then has no closing record of NaN. T records
            make T - 1 rows, or T rows if the trial terminated. Infos are then below ``("next",
            "info")`` only. ``obs_dict`` confirms either choice (rule V51).

    Raises:
        ValueError: ``reward`` or ``infos`` has an unknown value.

    Example:
        >>> from replaykit.datasets.families import RoboHiveLayout
        >>> RoboHiveLayout(reward="relabelled").name
        'robohive-trials-relabelled'
        >>> RoboHiveLayout(infos="after").alignment.name
        'steps'
    """

    name: str = "robohive-trials"
    version: int = 1
    episodes: Finder = _TRIALS
    alignment: Alignment = STATE_RECORDS
    clock: str = "actions"
    fields: tuple[Field, ...] = (
        Field("observations", "observation", ("observation",), ("next", "observation")),
        Field("actions", "action", before=("action",)),
        Field("rewards", "reward", after=("next", "reward"), column=True),
        Field("done", "terminated"),
        Field("time", "time", before=("time",)),
        Field(_INFOS, "info", ("info",), ("next", "info"), required=False),
    )
    # The name contains ``reward`` and ``infos``, so different layouts have different names.
    reward: _Reward = field(default="recorded", repr=False)
    infos: _Infos = field(default="before", repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self)
        suffixes = ["relabelled"] * (self.reward != "recorded")
        if self.infos == "after":
            suffixes.append("after")
            fields = tuple(
                replace(each, before=None, moment="outcome") if each.source == _INFOS else each
                for each in self.fields
            )
            object.__setattr__(self, "alignment", STEPS)
            object.__setattr__(self, "fields", fields)
        missing = [each for each in suffixes if not self.name.endswith(f"-{each}")]
        object.__setattr__(self, "name", "-".join([self.name, *missing]))

    def flags(
        self,
        ends: Mapping[str, Ends],
        last: Mapping[str, npt.NDArray[Any]],
        facts: SourceFacts,
        location: Location,
        notes: RuleFindings,
    ) -> Flags:
        """Return "terminated" if the final state is done, else "truncated".

        Without the closing record of NaN, the outcome of the last action was not recorded. The
        episode is then truncated at the last recorded state, whatever that state's ``done`` is.
        """
        if self.infos == "after":
            if last["actions"].dtype.kind in "fc" and np.isnan(last["actions"]).any():
                raise location.at(key="actions").error(
                    "a record of NaN closes the trial, as the logger writes it with the infos of "
                    'each state: expected none with infos="after"; remove that record from every '
                    "array",
                    "V50",
                )
            return super().flags(ends, last, facts, location, notes)
        done = ends["done"]
        final = done.records - 1
        if done.first is not None and done.first < final:
            at = location.at(key="done", record=done.first)
            raise at.error(f"done is set before the last of {done.records} records", "V53")
        is_tailed = _is_tail(last["actions"], location, final)
        if not is_tailed:
            notes.add(
                "V50",
                "no closing record (the last action is not NaN): the outcome of the last action "
                "is unknown, the episode ends truncated at the last recorded state",
                location,
                quiet=True,
            )
        return Flags(done.last, not (done.last and is_tailed))

    def witnesses(self, leaves: Collection[str]) -> tuple[str, ...]:
        """Return the paths of observation and reward, and of the infos that repeat them."""
        infos = [path for path in leaves if path.startswith(_OBS_DICT) or path in (_DENSE, _SPARSE)]
        return ("observations", "rewards", *infos)

    def examine(self, window: SourceWindow) -> None:
        """Check which state the infos describe, and find the kind of the reward."""
        if "rewards" in window.arrays and self.reward == "recorded":
            self._check_reward(window)
        if "observations" in window.arrays:
            self._check_infos(window)

    def file_facts(self, memory: Mapping[str, Any]) -> dict[str, Any]:
        """Return the kind of the reward: dense, sparse, both if they are equal, or unknown."""
        if self.reward == "relabelled":
            return {"reward": ["relabelled"]}
        return {"reward": sorted(memory.get("rewards", ())) or None}

    def hint(self, path: str, shape: tuple[int, ...]) -> str | None:
        """Return a hint if the logger's path compression left ``observations`` empty.

        The observation is not rebuilt from ``obs_dict``, because the file does not name the leaves
        that are part of the observation, or their order.
        """
        if path != "observations" or 0 not in shape[:1]:
            return None
        return (
            "the trace was saved with path compression, which leaves observations empty; the order "
            "of obs_dict in them is that of the environment and not in the file: write "
            "observations from env_infos/obs_dict in that order, or save the trace without it"
        )

    def source_seed(self, name: str) -> int:
        """Return the training seed from a directory ``seed<k>`` of the path, or -1."""
        for part in name.split("/")[:-1]:
            match = re.fullmatch(r"seed([0-9]{1,18})", part)
            if match:
                return int(match[1])
        return -1

    def _other_way(self) -> str:
        if self.infos == "after":
            return (
                "the infos describe the state of their record, expected that after the action: "
                'this file is of RoboHiveLayout(infos="before"), the default'
            )
        return (
            "the infos describe the state after the action, not before it; rewards of such a file "
            'must not be shifted: RoboHiveLayout(infos="after") reads it as it is'
        )

    def _check_reward(self, window: SourceWindow) -> None:
        rewards = window.arrays["rewards"].reshape(-1)
        known = {
            label: window.arrays[path]
            for label, path in (("dense", _DENSE), ("sparse", _SPARSE))
            if path in window.arrays
        }
        if not known:
            text = "neither rwd_dense nor rwd_sparse is there to compare the rewards with"
            window.notes.add("V52", text, window.location, quiet=True)
            return
        equal = {
            label
            for label, array in known.items()
            if array.size == rewards.size
            and np.array_equal(array.reshape(-1), rewards, equal_nan=rewards.dtype.kind in "fc")
        }
        if not equal:
            at = window.location.at(key="rewards")
            raise at.error(
                f"the rewards equal none of {sorted(known)}: if they were relabelled, pass "
                'RoboHiveLayout(reward="relabelled")',
                "V52",
            )
        so_far = window.memory.setdefault("rewards", equal)
        if not so_far & equal:
            at = window.location.at(key="rewards")
            raise at.error(
                f"the rewards are {sorted(equal)} here and {sorted(so_far)} in earlier trials of "
                "the file",
                "V52",
            )
        window.memory["rewards"] = so_far & equal

    def _check_infos(self, window: SourceWindow) -> None:
        observations = window.arrays["observations"]
        observations = observations.reshape(len(observations), -1)
        blocks = {
            path: array.reshape(len(array), -1)
            for path, array in window.arrays.items()
            if path.startswith(_OBS_DICT) and array.size
        }
        # A leaf that never changes cannot distinguish this record from the next record.
        moving = {path: block for path, block in blocks.items() if _changes(block)}
        if not blocks or not observations.size or not _changes(observations):
            return
        if not moving:
            raise DropLeaves(
                _INFOS,
                f"in {window.location.brief} obs_dict stays the same while the observation "
                "changes: the infos were logged by reference",
            )
        # A leaf usually has the same columns as in the last trial.
        columns: dict[str, int] = window.memory.setdefault("columns", {})
        confirmed, is_after = False, self.infos == "after"
        for path, block in moving.items():
            at = columns.get(path)
            mine, theirs = _paired(block, observations, is_after=is_after)
            if at is None or not _lies_at(mine, theirs, at):
                at = _find_columns(mine, theirs) if _changes(mine) else None
            if at is not None:
                columns[path] = at
                confirmed = True
                continue
            mine, theirs = _paired(block, observations, is_after=not is_after)
            if _changes(mine) and _find_columns(mine, theirs) is not None:
                # One such leaf is enough, because all infos are logged together.
                raise window.location.at(key=path).error(self._other_way(), "V51")
        if not confirmed:
            text = "no leaf of obs_dict occurs in the observation, so the alignment is unconfirmed"
            window.notes.add("V51", text, window.location)


ROBOHIVE: Final = RoboHiveLayout()


def _is_tail(action: npt.NDArray[Any], location: Location, record: int) -> bool:
    """Return whether the last action is NaN, as for a final state.

    Raises:
        CorpusError: the action is partly NaN (rule V50).
    """
    if action.dtype.kind not in "fc":
        return False
    holes = np.isnan(action)
    if holes.any() and not holes.all():
        at = location.at(key="actions", record=record)
        raise at.error("the action is partly NaN", "V50")
    return bool(holes.all())


def _changes(block: npt.NDArray[Any]) -> bool:
    differs = block[1:] != block[:1]
    if block.dtype.kind in "fc":
        differs &= ~(np.isnan(block[1:]) & np.isnan(block[:1]))
    return bool(differs.any())


def _paired(
    block: npt.NDArray[Any], observations: npt.NDArray[Any], *, is_after: bool
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return the infos, and the observations of the states that they describe."""
    return (block[:-1], observations[1:]) if is_after else (block, observations)


def _lies_at(block: npt.NDArray[Any], observations: npt.NDArray[Any], column: int) -> bool:
    width = block.shape[1]
    return bool(np.array_equal(observations[:, column : column + width], block))


def _find_columns(block: npt.NDArray[Any], observations: npt.NDArray[Any]) -> int | None:
    """Return the first observation column of an equal block, or ``None``."""
    if len(block) != len(observations):
        return None
    # A few records exclude most columns. One record is not enough, because it is often zero.
    last = max(0, observations.shape[1] - block.shape[1] + 1)
    some = slice(None, None, max(1, len(block) // _CHECKED))
    may_be = (observations[some, :last] == block[some, :1]).all(axis=0)
    for column in np.flatnonzero(may_be):
        if _lies_at(block, observations, int(column)):
            return int(column)
    return None


_REAL_TRIALS: Final = Groups("Trial", having=("data",), noun="trial")
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
    episodes: Finder = _REAL_TRIALS
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


_FILE: Final = WholeFile(having=("action", "observations"))
_IMAGES: Final = "observations/images/"


@dataclass(frozen=True, kw_only=True)
class AlohaLayout(Layout):
    """Layout of ALOHA episodes, in which T records make T - 1 rows.

    Episodes have no rewards, and end truncated. Compressed images are decoded to pixels. Depth and
    raw images are stored unchanged.

    Attributes:
        action_shift: 0 pairs a command with the observation of the same record. -1 pairs it with
            the observation of the next record, as ACT's loader does for real robots. T records then
            make T - 2 rows.

    Raises:
        ValueError: ``action_shift`` is neither 0 nor -1.

    Example:
        >>> from replaykit.datasets.families import ALOHA, AlohaLayout
        >>> ALOHA.lost, AlohaLayout(action_shift=-1).lost
        (1, 2)
    """

    name: str = "aloha"
    version: int = 1
    episodes: Finder = _FILE
    alignment: Alignment = STEPS
    clock: str = "action"
    fields: tuple[Field, ...] = ()
    about: tuple[str, tuple[str, ...]] | None = ("", ("sim", "compress"))
    natural_files: bool = True
    action_shift: int = 0

    def __post_init__(self) -> None:
        if self.action_shift not in (0, -1):
            raise ValueError(f"expected action_shift as 0 or -1, got {self.action_shift}")
        observation = Field(
            "observations/",
            "observation",
            ("observation",),
            ("next", "observation"),
            shift=-self.action_shift,
        )
        base = ("info", "base_action")
        fields = (
            observation,
            Field("action", "action", before=("action",)),
            Field("base_action", "info", before=base, moment="action", required=False),
        )
        object.__setattr__(self, "fields", fields)

    def resolve(self, file: H5File, location: Location) -> Layout:
        """Return the layout with decoders for the compressed images.

        The size of the images comes from the first image of each camera.
        """
        decoders: list[tuple[str, Decoder]] = []
        for leaf in file.leaves(""):
            is_bytes = leaf.problem is None and np.dtype(leaf.dtype) == np.uint8
            is_encoded = len(leaf.shape) == 1 if leaf.problem is not None else len(leaf.shape) == 2
            if not leaf.path.startswith(_IMAGES) or not is_encoded or 0 in leaf.shape:
                continue
            if leaf.problem is None and not is_bytes:
                continue
            decoders.append((leaf.path, Images(_size(file, leaf.path, location))))
        return replace(self, decoders=tuple(decoders))


ALOHA: Final = AlohaLayout()


def _size(file: H5File, path: str, location: Location) -> tuple[int, ...]:
    where = str(location.at(key=path, record=0))
    with open_image(file.entries(path, 0, 1)[0], where) as image:
        bands = len(image.getbands())
        return (image.height, image.width, *((bands,) if bands > 1 else ()))


class AlohaExperienceReplay(LocalFilesReplay[SamplerT]):
    """Transitions of ALOHA and ACT files of one episode each, given with ``source``.

    See `AlohaLayout` for the layout, and BaseDatasetExperienceReplay for arguments, errors and
    methods.

    Example:
        >>> from replaykit.datasets import AlohaExperienceReplay
        >>> AlohaExperienceReplay("../up", 32)
        Traceback (most recent call last):
        ValueError: expected names with '/' between them as an id, got '../up'
    """

    corpus = "aloha"
    layout = ALOHA
