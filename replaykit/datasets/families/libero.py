"""The LIBERO family: replayed demonstrations, whose observations follow the action.

The replay appends the observation that a step returned, but states and actions keep their index. So
record ``j`` holds the state before action ``j``, action ``j``, and the observation after action
``j``. With robomimic's similar layout, every observation would be one step late.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from replaykit.buffer.components import SamplerT
from replaykit.datasets.dataset import BaseDatasetExperienceReplay
from replaykit.datasets.engine.episode_finders import Finder
from replaykit.datasets.engine.fields import ARRIVALS, Alignment, Field
from replaykit.datasets.engine.h5 import H5File
from replaykit.datasets.engine.layout import Counters, Layout
from replaykit.datasets.engine.locations import Location
from replaykit.datasets.families.robomimic import DEMONSTRATIONS, first_entries, libero_signs
from replaykit.datasets.remote_sources import HubFiles

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
