"""The families of simulated demonstrations, such as robomimic and LIBERO.

LIBERO's replay appends the observation that a step returned, but states and actions keep their
index. So record ``j`` holds the state before action ``j``, action ``j``, and the observation after
it. Isaac Lab stores observations before the action and states after it, with the first state in a
separate group. ManiSkill stores one more observation than actions, and facts about trajectories in
a JSON file of the same name.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np

from replaykit.buffer.components import SamplerT
from replaykit.datasets.dataset import BaseDatasetExperienceReplay, LocalFilesReplay
from replaykit.datasets.engine.episode_finders import Finder, Groups
from replaykit.datasets.engine.fields import (
    ARRIVALS,
    FINAL_STATE,
    STEPS,
    Alignment,
    Field,
    Preceded,
)
from replaykit.datasets.engine.h5 import H5File
from replaykit.datasets.engine.layout import (
    Counters,
    Layout,
    Sidecar,
    SourceFacts,
    SourceWindow,
    read_sidecar,
)
from replaykit.datasets.engine.locations import Location, RuleFindings
from replaykit.datasets.http_files import WebFile
from replaykit.datasets.remote_sources import HubFiles, WebFiles

_FIRST_RELEASE: Final = "http://downloads.cs.stanford.edu/downloads/rt_benchmark"
_FIRST: Final = "v0.1/"
_IDS: Final = [
    f"{task}/{kind}/{name}"
    for kind, tasks, names in (
        ("ph", ("lift", "can", "square", "transport", "tool_hang"), ("low_dim", "demo")),
        ("mh", ("lift", "can", "square", "transport"), ("low_dim", "demo")),
        ("mg", ("lift", "can"), ("low_dim_sparse", "low_dim_dense", "demo")),
        ("paired", ("can",), ("low_dim", "demo")),
    )
    for task in tasks
    for name in names
]
_SIZES: Final = {
    "lift/ph/low_dim": 18_548_952,
    "lift/ph/image": 837_217_792,
    "lift/mh/low_dim": 47_947_760,
    "lift/mh/image": 2_683_867_952,
    "lift/mg/low_dim_sparse": 316_926_856,
    "lift/mg/image_sparse": 19_369_836_272,
    "can/ph/low_dim": 45_491_992,
    "can/ph/image": 2_010_694_944,
    "can/mh/low_dim": 112_486_112,
    "can/mh/image": 5_426_502_864,
    "can/mg/low_dim_sparse": 1_079_740_536,
    "can/mg/image_sparse": 50_617_343_640,
    "square/ph/low_dim": 50_004_112,
    "square/ph/image": 2_603_429_840,
    "square/mh/low_dim": 123_863_240,
    "square/mh/image": 6_959_859_145,
    "transport/ph/low_dim": 309_012_088,
    "transport/ph/image": 16_185_926_632,
    "transport/mh/low_dim": 636_980_704,
    "transport/mh/image": 33_795_402_208,
    "tool_hang/ph/low_dim": 201_634_440,
    "tool_hang/ph/image": 66_530_916_816,
}
"""The sizes of the files of release 0.1, in bytes."""
_SHA256: Final = {
    "lift/ph/low_dim": "18106c8c072020672fecdd2a9ffbfe7dc656823cb877f972ade7fad34d2a5b74"
}


DEMONSTRATIONS: Final = Groups("demo_", below="data", noun="demonstration")
"""The groups in files of robomimic and of derived formats."""
_LIBERO: Final = ("bddl_file_name", "bddl_file_content", "problem_info")
_LIBERO_DEMO: Final = ("robot_states", "init_state")
_RAW: Final = Groups("demo_", below="data", having=("states",), noun="demonstration")


def first_entries(file: H5File, below: str) -> dict[str, bool] | None:
    """Return the entries of the first subgroup, each with True if it is a group.

    The result is ``None`` if there is no subgroup.
    """
    if not file.has_group(below):
        return None
    first = next((member.name for member in file.members(below) if member.is_group), None)
    if first is None:
        return None
    return {entry.name: entry.is_group for entry in file.members(f"{below}/{first}")}


def libero_signs(file: H5File, below: str) -> list[str]:
    """Return the names in a file that occur only in LIBERO's files.

    Each name is an entry or attribute of the first demonstration, or an attribute of the parent
    group.
    """
    found = list(file.attributes(below, _LIBERO)) if file.has_group(below) else []
    entries = first_entries(file, below) or {}
    found += [name for name in _LIBERO_DEMO if name in entries]
    if entries:
        first = next(member.name for member in file.members(below) if member.is_group)
        said = file.attributes(f"{below}/{first}", _LIBERO_DEMO)
        found += [name for name in said if name not in found]
    return found


@dataclass(frozen=True, kw_only=True)
class RobomimicLayout(Layout):
    """Layout of demonstrations of robomimic and MimicGen.

    An episode is a group. ``dones`` marks success and does not end the episode. After success,
    ``dones`` stays set for some steps. It is never set in a demonstration that failed. ``dones``
    becomes ``("next", "success")``. The episode terminated if ``dones`` is set at the last step.
    Filters below ``mask`` are splits.
    """

    name: str = "robomimic"
    version: int = 1
    episodes: Finder = DEMONSTRATIONS
    alignment: Alignment = STEPS
    clock: str = "actions"
    count: str | None = "num_samples"
    about: tuple[str, tuple[str, ...]] | None = ("data", ("env_args",))
    counters: Counters = (("total", "records"),)
    fields: tuple[Field, ...] = (
        Field("obs/", "observation", before=("observation",)),
        Field("next_obs/", "observation", after=("next", "observation"), moment="successor"),
        Field("actions", "action", before=("action",)),
        Field("rewards", "reward", after=("next", "reward"), column=True),
        Field(
            "dones", "terminated", after=("next", "success"), column=True, held=True, dtype="bool"
        ),
        Field("states", "info", before=("state",), required=False),
    )

    def resolve(self, file: H5File, location: Location) -> Layout:
        """Refuse similar layouts, and replace a missing ``next_obs`` by the next ``obs``."""
        entries = first_entries(file, "data")
        if entries is None or "actions" not in entries:
            return self
        other = None
        if "obs" not in entries:
            other = "robosuite's raw demonstrations, which have states only"
        elif signs := libero_signs(file, "data"):
            said = ", ".join(signs)
            other = f"LIBERO, whose observations are those after the action: it has {said}"
        elif "initial_state" in entries or entries.get("states"):
            other = "Isaac Lab, whose states are those after the action"
        if other is not None:
            raise location.error(f"this is no file of {self.name}, but one of {other}", "V04")
        if "next_obs" in entries:
            return self
        rest = tuple(entry for entry in self.fields if entry.source not in ("obs/", "next_obs/"))
        both = Field("obs/", "observation", ("observation",), ("next", "observation"))
        return replace(self, fields=(both, *rest))

    def splits(self, file: H5File, location: Location) -> dict[str, list[str]]:
        """Return the filters below ``mask``."""
        if not file.has_group("mask"):
            return {}
        found = {}
        for leaf in file.leaves("mask"):
            if len(leaf.shape) == 1:
                found[leaf.path] = names = file.texts(f"mask/{leaf.path}")
                for at, name in enumerate(
                    names
                ):  # in place, because memory may not hold a second list
                    names[at] = f"data/{name}"
        return found


@dataclass(frozen=True, kw_only=True)
class RobosuiteLayout(Layout):
    """Layout of robosuite's raw demonstrations, with simulator states and actions.

    The state after the last action was not recorded, so T records make T - 1 rows. There are no
    rewards and no flags, so episodes end truncated.

    Attributes:
        actions: the datasets that are concatenated to the action, in this order. Releases before
            1.0 store the controls separately.

    Example:
        >>> from replaykit.datasets.families import RobosuiteLayout
        >>> RobosuiteLayout(actions=("joint_velocities", "gripper_actuations")).fields[1].name
        'joint_velocities+gripper_actuations'
    """

    name: str = "robosuite-raw"
    version: int = 1
    episodes: Finder = _RAW
    alignment: Alignment = STEPS
    clock: str = "states"
    fields: tuple[Field, ...] = ()
    about: tuple[str, tuple[str, ...]] | None = (
        "data",
        ("env", "env_info", "repository_version", "date", "time"),
    )
    actions: tuple[str, ...] = ("actions",)

    def __post_init__(self) -> None:
        source = self.actions[0] if len(self.actions) == 1 else self.actions
        state = ("observation", "state")
        fields = (
            Field("states", "observation", before=state, after=("next", *state)),
            Field(source, "action", before=("action",)),
            Field("/", "info", before=("info",), required=False),
        )
        object.__setattr__(self, "fields", fields)
        super().__post_init__()

    def resolve(self, file: H5File, location: Location) -> Layout:
        """Refuse files of similar layouts, and files without the requested actions."""
        entries = first_entries(file, "data")
        if entries is None or "states" not in entries:
            return self
        if "obs" in entries or entries["states"]:
            raise location.error(
                f"this is no file of {self.name}, but one with observations: of robomimic, LIBERO "
                "or Isaac Lab",
                "V04",
            )
        missing = [name for name in self.actions if name not in entries]
        if missing:
            raise location.error(
                f"the demonstrations have no {', '.join(map(repr, missing))}; they hold "
                f"{', '.join(map(repr, sorted(entries)))}: name those that are the controls with "
                "RobosuiteLayout(actions=(...))",
                "V12",
            )
        return self


ROBOMIMIC: Final = RobomimicLayout()
ROBOSUITE: Final = RobosuiteLayout()


class RobomimicExperienceReplay(BaseDatasetExperienceReplay[SamplerT]):
    """Transitions of robomimic's simulated and robosuite's raw demonstrations.

    Ids have the form ``task/kind/name``. Data sets with the name ``demo`` hold simulator states
    only. ``split`` accepts the filters of the files, such as ``"train"``. Image files are not
    downloaded. Render them with robomimic, then pass the path as ``source``; the id may be any
    name. Ids of the form ``v0.1/task/kind/name`` name the files of the first release, with images,
    on the authors' server, or on the mirror in the environment variable
    ``REPLAYKIT_ROBOMIMIC_URL``. See `RobomimicLayout`.

    See BaseDatasetExperienceReplay for arguments, errors and methods. Source: Mandlekar et al.,
    "What Matters in Learning from Offline Human Demonstrations for Robot Manipulation", 2021; MIT.

    Example:
        >>> from replaykit.datasets import RobomimicExperienceReplay
        >>> "lift/ph/low_dim" in RobomimicExperienceReplay.available_datasets
        True
    """

    available_datasets: ClassVar[list[str]] = [*_IDS, *(f"{_FIRST}{name}" for name in _SIZES)]
    corpus = "robomimic"
    license = "mit"
    repository: ClassVar[str] = "robomimic/robomimic_datasets"

    @property
    def layout(self) -> Layout:
        """The layout of the files of this id."""
        return ROBOSUITE if self.dataset_id.endswith("/demo") else ROBOMIMIC

    @classmethod
    def remote(cls, dataset_id: str) -> HubFiles | WebFiles:
        """Return the location of a data set's files."""
        folder, _, name = dataset_id.rpartition("/")
        first = dataset_id.removeprefix(_FIRST)
        if first == dataset_id:
            return HubFiles(cls.repository, f"v1.5/{folder}", f"/{name}_v15.hdf5")
        base = (os.environ.get("REPLAYKIT_ROBOMIMIC_URL") or _FIRST_RELEASE).rstrip("/")
        return WebFiles((WebFile(f"{base}/{first}.hdf5", _SIZES.get(first), _SHA256.get(first)),))


_ROBOT: Final = ("info", "robot_states")


@dataclass(frozen=True, kw_only=True)
class LiberoLayout(Layout):
    """Layout of LIBERO's demonstrations, in which T records make T - 1 rows.

    Images are stored unchanged. The manifest contains ``macros_image_convention``, which shows
    whether images are upside down.
    """

    name: str = "libero"
    version: int = 1
    episodes: Finder = DEMONSTRATIONS
    alignment: Alignment = ARRIVALS
    clock: str = "actions"
    count: str | None = "num_samples"
    about: tuple[str, tuple[str, ...]] | None = (
        "data",
        ("env_name", "bddl_file_name", "problem_info", "env_args", "macros_image_convention"),
    )
    counters: Counters = (("total", "records"), ("num_demos", "episodes"))
    fields: tuple[Field, ...] = (
        Field("obs/", "observation", ("observation",), ("next", "observation")),
        Field("actions", "action", before=("action",)),
        Field("rewards", "reward", after=("next", "reward"), column=True, dtype="float32"),
        Field("dones", "terminated"),
        Field("states", "info", before=("state",), moment="action", required=False),
        Field("robot_states", "info", _ROBOT, ("next", *_ROBOT), required=False),
    )

    def resolve(self, file: H5File, location: Location) -> Layout:
        """Refuse files of similar layouts."""
        entries = first_entries(file, "data")
        if entries is None or "actions" not in entries:
            return self
        if libero_signs(file, "data") and "next_obs" not in entries:
            return self
        raise location.error(
            f"this is no file of {self.name}: it has neither robot_states nor init_state, "
            "problem_info or the name of a BDDL file, or it has next_obs; is it one of robomimic?",
            "V04",
        )


LIBERO: Final = LiberoLayout()


class LiberoExperienceReplay(BaseDatasetExperienceReplay[SamplerT]):
    """Transitions of LIBERO's demonstrations. An id names a suite of tasks.

    See `LiberoLayout`. Arguments, errors and methods: see BaseDatasetExperienceReplay. Source: Liu
    et al., "LIBERO: Benchmarking Knowledge Transfer for Lifelong Robot Learning", 2023; data CC BY
    4.0.

    Example:
        >>> from replaykit.datasets import LiberoExperienceReplay
        >>> LiberoExperienceReplay.available_datasets[:2]
        ['libero_spatial', 'libero_object']
    """

    available_datasets: ClassVar[list[str]] = [
        f"libero_{suite}" for suite in ("spatial", "object", "goal", "10", "90")
    ]
    corpus = "libero"
    license = "cc-by-4.0"
    layout = LIBERO
    repository: ClassVar[str] = "yifengzhu-hf/LIBERO-datasets"

    @classmethod
    def remote(cls, dataset_id: str) -> HubFiles:
        """Return the location of a data set's files."""
        return HubFiles(cls.repository, dataset_id, "_demo.hdf5")


_BEFORE: Final = "obs/actions"
_SAID: Final = {"true": True, "1": True, "false": False, "0": False}
"""The meanings of texts for ``success``."""


@dataclass(frozen=True, kw_only=True)
class IsaacLabLayout(Layout):
    """Layout of demonstrations of Isaac Lab and Isaac Lab Mimic.

    T records make T rows if the attribute ``success`` is true, and otherwise T - 1 rows. The
    observation after the last action was not recorded, so the last of T rows is marked. The files
    have no rewards.
    """

    name: str = "isaaclab"
    version: int = 2
    episodes: Finder = DEMONSTRATIONS
    alignment: Alignment = STEPS
    clock: str = "actions"
    attributes: tuple[str, ...] = ("success", "seed")
    count: str | None = "num_samples"
    about: tuple[str, tuple[str, ...]] | None = ("data", ("env_args",))
    counters: Counters = (("total", "records"),)
    fields: tuple[Field, ...] = (
        Field("obs/", "observation", ("observation",), ("next", "observation")),
        Field("actions", "action", before=("action",)),
        Field("states/", "info", ("state",), ("next", "state"), required=False, more=1),
        Field("initial_state/", "info", required=False),
    )

    def resolve(self, file: H5File, location: Location) -> Layout:
        """Refuse files of similar layouts, and put the first state before the others."""
        entries = first_entries(file, "data")
        if entries is None or "actions" not in entries:
            return self
        if "next_obs" in entries or "robot_states" in entries or entries.get("states") is False:
            raise location.error(
                f"this is no file of {self.name}, whose states are a group: is it one of robomimic "
                "or LIBERO?",
                "V04",
            )
        group = DEMONSTRATIONS.select(file.members("data"), location, self.name, is_inside=True)
        # An episode without its first state is reported when it is read, so that only it is
        # skipped.
        states = {
            leaf.path
            for name in group.episodes.groups
            for leaf in file.leaves(name)
            if leaf.path.startswith("states/")
        }
        pairs = tuple((path, Preceded("states", "initial_state")) for path in sorted(states))
        return replace(self, decoders=pairs)

    def facts(
        self,
        attributes: Mapping[str, Any],
        name: str,
        records: int,
        location: Location,
        notes: RuleFindings,
    ) -> SourceFacts:
        """Return seed and success from the attributes. Success counts as termination."""
        success = _success(attributes["success"], location) if "success" in attributes else -1
        return SourceFacts(SourceFacts.seed_of(attributes.get("seed")), success, success == 1)

    def witnesses(self, leaves: Collection[str]) -> tuple[str, ...]:
        return tuple(path for path in (_BEFORE, "actions") if path in leaves)

    def examine(self, window: SourceWindow) -> None:
        """Check that observations precede their action.

        The check needs observations that contain the action of the preceding record.
        """
        if _BEFORE not in window.arrays:
            text = (
                f"without {_BEFORE} nothing confirms that observations are those before the "
                "action; recordings of real robots have them otherwise in this layout"
            )
            window.notes.add("V51", text, window.location)
            return
        seen, actions = window.arrays[_BEFORE], window.arrays["actions"]
        if seen.shape != actions.shape or np.array_equal(seen[1:], actions[:-1]):
            return
        what = "is the action of the same record" if np.array_equal(seen, actions) else "is neither"
        raise window.location.at(key=_BEFORE).error(
            f"the observed action {what}, expected that of the record before: the observations of "
            "this file are not those before the action, and this layout does not read it",
            "V51",
        )


ISAACLAB: Final = IsaacLabLayout()


def _success(said: Any, location: Location) -> int:
    """Return 1 or 0. Text is parsed, because ``bool("False")`` is True."""
    known = _SAID.get(said.strip().lower()) if isinstance(said, str) else None
    if isinstance(said, (bool, int, float)) and said in (0, 1):
        known = bool(said)
    if known is None:
        raise location.at(key="success").error(
            f"is {said!r:.40}, expected true or false: a bool, 1 or 0, or one of these as text",
            "V30",
        )
    return int(known)


class IsaacLabExperienceReplay(LocalFilesReplay[SamplerT]):
    """Transitions of demonstrations recorded by Isaac Lab, given with ``source``.

    See `IsaacLabLayout` for the layout, and BaseDatasetExperienceReplay for arguments, errors and
    methods.

    Example:
        >>> from replaykit.datasets import IsaacLabExperienceReplay
        >>> IsaacLabExperienceReplay("my-demos", 32, root="no-such-folder")
        Traceback (most recent call last):
        FileNotFoundError: files of isaaclab:my-demos cannot be fetched: ...
    """

    corpus = "isaaclab"
    layout = ISAACLAB


_TRAJECTORIES: Final = Groups("traj_", noun="trajectory")
_OUTCOMES: Final = tuple(
    Field(
        name,
        "info",
        after=("next", name),
        moment="outcome",
        column=True,
        dtype="bool",
        required=False,
    )
    for name in ("success", "fail")
)


@dataclass(frozen=True, kw_only=True)
class ManiSkillLayout(Layout):
    """Layout of trajectories recorded by ManiSkill 3.

    A recorder that is closed early leaves no flag, so such an episode ends truncated. If no
    observations were recorded, the simulator's states replace them.
    """

    name: str = "maniskill"
    version: int = 1
    episodes: Finder = _TRAJECTORIES
    alignment: Alignment = FINAL_STATE
    clock: str = "actions"
    fields: tuple[Field, ...] = (
        Field("obs", "observation", ("observation",), ("next", "observation"), nested=True),
        Field("actions", "action", before=("action",)),
        Field("rewards", "reward", after=("next", "reward"), column=True, required=False),
        Field("terminated", "terminated"),
        Field("truncated", "truncated"),
        *_OUTCOMES,
        Field("env_states/", "info", ("state",), ("next", "state"), required=False),
    )

    def resolve(self, file: H5File, location: Location) -> Layout:
        """Use the simulator's states as observations if the file has no observations."""
        first = next((m for m in file.members() if m.is_group and "actions" in m.children), None)
        if first is None or "obs" in first.children:
            return self
        if "env_states" not in first.children:
            raise location.at(group=first.name).error(
                "there are neither observations nor states of the simulator: replay the "
                "trajectories with an observation mode",
                "V12",
            )
        states = Field("env_states/", "observation", ("observation",), ("next", "observation"))
        rest = [entry for entry in self.fields if entry.source not in ("obs", "env_states/")]
        return replace(self, fields=(states, *rest))

    def sidecar_facts(self, location: Location) -> dict[str, Any]:
        """Return the entries of the JSON file that hold for all trajectories."""
        found = _sidecar(location)
        if found is None:
            return {}
        environment = found.content.get("env_info")
        named = environment.get("env_id") if isinstance(environment, dict) else None
        return {**found.facts("source_type", "source_desc"), "env_id": named}

    def described_by(self, path: Path) -> tuple[Path, ...]:
        return (path.with_suffix(".json"),)

    def facts(
        self,
        attributes: Mapping[str, Any],
        name: str,
        records: int,
        location: Location,
        notes: RuleFindings,
    ) -> SourceFacts:
        """Return seed and success from the JSON file, after checking the length in it."""
        found = _sidecar(location)
        if found is None:
            return SourceFacts()
        number = _TRAJECTORIES.number(location.group or "")
        known = found.content.get("episodes")
        entries = [e for e in known if isinstance(e, dict)] if isinstance(known, list) else []
        entry = next((e for e in entries if e.get("episode_id") == number), None)
        if entry is None:
            raise location.error(f"{found.path.name} has no episode of the id {number}", "V15")
        steps, seed, success = (
            entry.get(name) for name in ("elapsed_steps", "episode_seed", "success")
        )
        if isinstance(steps, int) and steps != records:
            raise location.at(key=self.clock).error(
                f"has {records} records, but {found.path.name} says {steps} steps", "V15"
            )
        return SourceFacts(
            SourceFacts.seed_of(seed),
            int(success) if isinstance(success, bool) else -1,
        )


MANISKILL: Final = ManiSkillLayout()


def _sidecar(location: Location) -> Sidecar | None:
    return read_sidecar(location, Path(location.file).with_suffix(".json").name)


class ManiSkillExperienceReplay(BaseDatasetExperienceReplay[SamplerT]):
    """Transitions of ManiSkill's demonstrations, with seeds and success.

    Ids are folders of ``demos`` in the repository, such as ``PickCube-v1/rl``. The ids of motion
    planning are listed; other ids are also accepted. A folder may hold several files with different
    observation or control modes. Each file is then a separate data set. Its id ends with the file
    name without suffix: ``PickCube-v1/rl/trajectory.none.pd_joint_delta_pos``. Seeds and success
    come from the JSON file of each trajectory file. Archives next to the folders are not fetched.

    See `ManiSkillLayout`. Arguments, errors and methods: see BaseDatasetExperienceReplay. Source:
    Tao et al., "ManiSkill3", 2024; Apache-2.0.

    Example:
        >>> from replaykit.datasets import ManiSkillExperienceReplay
        >>> ManiSkillExperienceReplay("PickCube-v1/rl", 32, download=False, root="no-such-folder")
        Traceback (most recent call last):
        FileNotFoundError: the data set 'PickCube-v1/rl' is not in ...
    """

    available_datasets: ClassVar[list[str]] = [
        f"{name}-v1/motionplanning"
        for name in ("PickCube", "StackCube", "PegInsertionSide", "PlugCharger")
    ]
    any_id = True
    corpus = "maniskill"
    layout = MANISKILL
    repository: ClassVar[str] = "haosulab/ManiSkill_Demonstrations"

    @classmethod
    def remote(cls, dataset_id: str) -> HubFiles:
        """Return the location of a data set's files."""
        folder, _, name = dataset_id.rpartition("/")
        if folder and name.startswith("trajectory"):
            file = f"/{name}"
            return HubFiles(
                cls.repository, f"demos/{folder}", f"{file}.h5", descriptions=(f"{file}.json",)
            )
        return HubFiles(cls.repository, f"demos/{dataset_id}", ".h5", descriptions=(".json",))
