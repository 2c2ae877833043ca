"""The robomimic family, with robosuite's raw demonstrations."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import ClassVar, Final

from replaykit.buffer.components import SamplerT
from replaykit.datasets.dataset import BaseDatasetExperienceReplay
from replaykit.datasets.engine.episode_finders import Finder, Groups
from replaykit.datasets.engine.fields import STEPS, Alignment, Field
from replaykit.datasets.engine.h5 import H5File
from replaykit.datasets.engine.layout import Counters, Layout
from replaykit.datasets.engine.locations import Location
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
