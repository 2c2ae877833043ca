"""The ManiSkill family: one group per trajectory, with one more observation than actions.

A JSON file with the same name in the same folder holds seed, success and length of each trajectory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Final

from replaykit.buffer.components import SamplerT
from replaykit.datasets.dataset import BaseDatasetExperienceReplay
from replaykit.datasets.engine.episode_finders import Finder, Groups
from replaykit.datasets.engine.fields import FINAL_STATE, Alignment, Field
from replaykit.datasets.engine.h5 import H5File
from replaykit.datasets.engine.layout import Layout, SourceFacts
from replaykit.datasets.engine.locations import Location, RuleFindings
from replaykit.datasets.families.minari import Sidecar, read_sidecar
from replaykit.datasets.remote_sources import HubFiles

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

    def beside(self, location: Location) -> dict[str, Any]:
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
