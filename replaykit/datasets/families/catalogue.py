"""The corpus classes: which data sets there are, where they are hosted, how they are laid out."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from replaykit import registry
from replaykit.buffer.core import SamplerT
from replaykit.datasets.dataset import BaseDatasetExperienceReplay
from replaykit.datasets.engine.layout import Layout
from replaykit.datasets.engine.policies import meant, nearest
from replaykit.datasets.families.aloha import ALOHA
from replaykit.datasets.families.d4rl import D4RL, d4rl_file, d4rl_ids
from replaykit.datasets.families.isaaclab import ISAACLAB
from replaykit.datasets.families.libero import LIBERO
from replaykit.datasets.families.maniskill import MANISKILL
from replaykit.datasets.families.minari import MINARI, minari_ids
from replaykit.datasets.families.robomimic import (
    ROBOMIMIC,
    ROBOMIMIC_REPOSITORY,
    ROBOSUITE,
    robomimic_ids,
    robomimic_remote,
)
from replaykit.datasets.families.vd4rl import VD4RL
from replaykit.datasets.publishing import Published
from replaykit.datasets.remote_sources import HubFiles, WebFiles
from replaykit.datasets.sources import DownloadPlan
from replaykit.keywords import Replaced

__all__ = [
    "AlohaExperienceReplay",
    "D4RLExperienceReplay",
    "IsaacLabExperienceReplay",
    "LiberoExperienceReplay",
    "ManiSkillExperienceReplay",
    "MinariExperienceReplay",
    "RobomimicExperienceReplay",
    "VD4RLExperienceReplay",
    "families",
    "load_dataset",
    "plan",
]


class _OwnFiles(BaseDatasetExperienceReplay[SamplerT]):
    """A corpus of which not everything can be fetched: any id may name files of one's own."""

    any_id = True

    def _identity(self) -> dict[str, Any]:
        # Under an id that is not hosted there is but one kind of files: those that were converted
        # before may be opened by the id.
        found = super()._identity()
        if self.source is None and self.remote(self.dataset_id) is None:
            del found["source"]
        return found

    def _flat(self) -> Published:
        if self.source is None and not self.data_path_root.exists():
            with self._suggesting(self.dataset_id):
                self._require_remote(self.dataset_id)
        return super()._flat()


class _D4RLIds:
    """The ids that are hosted, read when they are asked for."""

    def __get__(self, instance: object, owner: type) -> list[str]:
        return d4rl_ids()


class D4RLExperienceReplay(_OwnFiles[SamplerT]):
    """Transitions of D4RL files of any release.

    Files are fetched over plain HTTP from their authors, or from the folder that the environment's
    ``REPLAYKIT_D4RL_URL`` names, and verified where their SHA-256 is known; those that one has are
    given with ``source``, under any id. ``next_observations`` are used where a release has them,
    and the simulator's state where it was logged one step late (AntMaze v0); episodes then end
    where the environment was reset, whatever the flags say. Elsewhere they end at the flags, and
    the last step of an episode is kept if the episode terminated there, with ``("next",
    "observed")`` False, and dropped if not. Rows have ``observation``, ``action``, ``info``, ids
    and flags, and under ``next`` the rest; see `D4RLLayout`.

    Arguments, errors and methods: see BaseDatasetExperienceReplay. Source: Fu et al., "D4RL:
    Datasets for Deep Data-Driven Reinforcement Learning", 2020; data CC BY 4.0.

    Example:
        >>> from replaykit.datasets import D4RLExperienceReplay
        >>> "hopper-medium-v2" in D4RLExperienceReplay.available_datasets
        True
        >>> D4RLExperienceReplay("hopper-medium-v2", 32, source="no-such-file.hdf5")
        Traceback (most recent call last):
        FileNotFoundError: ...
    """

    available_datasets: ClassVar[list[str]] = _D4RLIds()  # type: ignore[assignment]
    corpus = "d4rl"
    license = "cc-by-4.0"
    layout = D4RL
    _replaced: ClassVar[dict[str, Replaced]] = {
        "direct_download": Replaced(
            (True, None), "files are always read without the d4rl package; leave it out"
        ),
        "from_env": Replaced(
            (False,),
            "rows always have what env.get_dataset() gives, every step and the infos; leave it out",
        ),
        "use_truncated_as_done": Replaced(
            (True,),
            "('next', 'done') is terminated or truncated; read ('next', 'terminated') in its place",
        ),
        "terminate_on_end": Replaced(
            (False, None),
            "policies=Policies(unrecorded='keep') keeps the last step of every episode, with "
            "('next', 'done') set",
        ),
    }

    @classmethod
    def remote(cls, dataset_id: str) -> WebFiles | None:
        """Says where the file of a data set is; None for an id that is one's own."""
        file = d4rl_file(dataset_id)
        return None if file is None else WebFiles((file,))


class IsaacLabExperienceReplay(_OwnFiles[SamplerT]):
    """Transitions of demonstrations that Isaac Lab has recorded, given with ``source``.

    See `IsaacLabLayout`. Arguments, errors and methods: see BaseDatasetExperienceReplay.

    Example:
        >>> from replaykit.datasets import IsaacLabExperienceReplay
        >>> IsaacLabExperienceReplay("my-demos", 32, root="no-such-folder")
        Traceback (most recent call last):
        FileNotFoundError: files of isaaclab:my-demos cannot be fetched: ...
    """

    corpus = "isaaclab"
    layout = ISAACLAB


class AlohaExperienceReplay(_OwnFiles[SamplerT]):
    """Transitions of episodes of ALOHA and ACT, one file each, given with ``source``.

    See `AlohaLayout`. Arguments, errors and methods: see BaseDatasetExperienceReplay.

    Example:
        >>> from replaykit.datasets import AlohaExperienceReplay
        >>> AlohaExperienceReplay("../up", 32)
        Traceback (most recent call last):
        ValueError: expected names with '/' between them as an id, got '../up'
    """

    corpus = "aloha"
    layout = ALOHA


class RobomimicExperienceReplay(BaseDatasetExperienceReplay[SamplerT]):
    """Transitions of robomimic's simulated demonstrations, and of robosuite's raw ones.

    Ids are ``task/kind/name``; those named ``demo`` hold simulator states only. ``split`` takes
    the filters of the files, such as ``"train"``. Image files of these are rendered by their users:
    give them with ``source``, under any id. Under ``v0.1/task/kind/name`` are the files of the
    first release, with images, on their authors' server. See `RobomimicLayout`.

    Arguments, errors and methods: see BaseDatasetExperienceReplay. Source: Mandlekar et al., "What
    Matters in Learning from Offline Human Demonstrations for Robot Manipulation", 2021; MIT.

    Example:
        >>> from replaykit.datasets import RobomimicExperienceReplay
        >>> "lift/ph/low_dim" in RobomimicExperienceReplay.available_datasets
        True
    """

    available_datasets: ClassVar[list[str]] = robomimic_ids()
    corpus = "robomimic"
    license = "mit"
    repository: ClassVar[str] = ROBOMIMIC_REPOSITORY

    @property
    def layout(self) -> Layout:
        """How the files of this id are laid out."""
        return ROBOSUITE if self.dataset_id.endswith("/demo") else ROBOMIMIC

    @classmethod
    def remote(cls, dataset_id: str) -> HubFiles | WebFiles:
        """Says where the files of a data set are."""
        return robomimic_remote(dataset_id)


class LiberoExperienceReplay(BaseDatasetExperienceReplay[SamplerT]):
    """Transitions of LIBERO's demonstrations, a suite of tasks an id.

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
        """Says where the files of a data set are."""
        return HubFiles(cls.repository, dataset_id, "_demo.hdf5")


class MinariExperienceReplay(BaseDatasetExperienceReplay[SamplerT]):
    """Transitions of Minari's data sets in HDF5 storage.

    Ids are Minari's, such as ``D4RL/door/human-v2``: the first part names the repository below
    ``farama-minari``. Those of ``D4RL`` and ``mujoco`` are listed, others are taken too. See
    `MinariLayout` for spaces, images and text.

    Arguments, errors and methods: see BaseDatasetExperienceReplay. Source:
    https://minari.farama.org; each data set has a licence of its own.

    Example:
        >>> from replaykit.datasets import MinariExperienceReplay
        >>> "mujoco/hopper/medium-v0" in MinariExperienceReplay.available_datasets
        True
        >>> MinariExperienceReplay("D4RL/door/human-v2", 32, download=False,
        ...                        root="no-such-folder")
        Traceback (most recent call last):
        FileNotFoundError: the data set 'D4RL/door/human-v2' is not in ...
    """

    available_datasets: ClassVar[list[str]] = minari_ids()
    any_id = True
    corpus = "minari"
    layout = MINARI
    _replaced: ClassVar[dict[str, Replaced]] = {
        "load_from_local_minari": Replaced(
            (False,),
            "source= takes the local files, such as "
            "'~/.minari/datasets/D4RL/door/human-v2/data/main_data.hdf5'",
        ),
    }
    owner: ClassVar[str] = "farama-minari"

    @classmethod
    def remote(cls, dataset_id: str) -> HubFiles:
        """Says where the files of a data set are."""
        namespace, _, rest = dataset_id.partition("/")
        if not rest:
            raise FileNotFoundError(
                f"{dataset_id!r} names no repository: expected namespace/.../name-v0, or "
                "files of one's own with source="
            )
        return HubFiles(f"{cls.owner}/{namespace}", rest, ".hdf5", beside=("/metadata.json",))


class ManiSkillExperienceReplay(BaseDatasetExperienceReplay[SamplerT]):
    """Transitions of ManiSkill's demonstrations, with what the JSON file beside them says.

    Ids are folders of ``demos`` in the repository, such as ``PickCube-v1/rl``; those listed are by
    motion planning, and any other is taken too. A folder may hold several files, of one observation
    mode or control mode each, which are data sets of their own: they are named without their
    ending, as ``PickCube-v1/rl/trajectory.none.pd_joint_delta_pos``. Archives beside the folders
    are not fetched.
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
        """Says where the files of a data set are."""
        folder, _, name = dataset_id.rpartition("/")
        if folder and name.startswith("trajectory"):
            file = f"/{name}"
            return HubFiles(
                cls.repository, f"demos/{folder}", f"{file}.h5", beside=(f"{file}.json",)
            )
        return HubFiles(cls.repository, f"demos/{dataset_id}", ".h5", beside=(".json",))


class VD4RLExperienceReplay(BaseDatasetExperienceReplay[SamplerT]):
    """Transitions of V-D4RL: pixels of 84 by 84, in shards that an episode may cross.

    Ids are folders of the repository; those that are listed are the main tasks, and others, such as
    ``distracting/...``, are taken too. The folders named ``64px`` hold no H5 files and are refused.
    See `VD4RLLayout`. Arguments, errors and methods: see BaseDatasetExperienceReplay. Source: Lu et
    al., "Challenges and Opportunities in Offline Reinforcement Learning from Visual Observations",
    2022; MIT.

    Example:
        >>> from replaykit.datasets import VD4RLExperienceReplay
        >>> VD4RLExperienceReplay.available_datasets[0]
        'main/walker_walk/random/84px'
        >>> VD4RLExperienceReplay("main/walker_walk/random/64px", 32)
        Traceback (most recent call last):
        ValueError: expected a folder of H5 files, got 'main/walker_walk/random/64px', ...
    """

    available_datasets: ClassVar[list[str]] = [
        f"main/{task}/{quality}/84px"
        for task in ("walker_walk", "cheetah_run", "humanoid_walk")
        for quality in ("random", "medium_replay", "medium", "medium_expert", "expert")
    ]
    any_id = True
    corpus = "vd4rl"
    license = "mit"
    layout = VD4RL
    _replaced: ClassVar[dict[str, Replaced]] = {
        "totensor": Replaced(
            (False,), "transform=ImageScale(0.0, 1.0) reads images as floats from 0 to 1"
        ),
        "image_size": Replaced(
            (None,),
            "images are stored in the size of the files; transform= takes a function that resizes "
            "those of a batch",
        ),
        "num_workers": Replaced((0,), "workers= says how many processes convert at once"),
    }
    repository: ClassVar[str] = "conglu/vd4rl"

    @classmethod
    def _check_id(cls, dataset_id: str, *, is_own: bool = False) -> None:
        super()._check_id(dataset_id, is_own=is_own)
        if dataset_id.split("/")[-1] == "64px":
            raise ValueError(
                f"expected a folder of H5 files, got {dataset_id!r}, which holds one npz file an "
                f"episode; the same episodes are in {dataset_id.removesuffix('64px') + '84px'!r}"
            )

    @classmethod
    def remote(cls, dataset_id: str) -> HubFiles:
        """Says where the files of a data set are."""
        # Shards follow one another by their numbers: 2.hdf5 comes before 10.hdf5.
        return HubFiles(cls.repository, dataset_id, ".hdf5", natural=True)


@functools.cache
def families() -> Mapping[str, type[BaseDatasetExperienceReplay[Any]]]:
    """Return the classes of the corpus families by the name of the family."""
    classes = (registry.load(entry) for entry in registry.of_kind("family"))
    return {each.corpus: each for each in classes}


def load_dataset(
    name: str,
    batch_size: int,
    *,
    sampler: SamplerT | Callable[[], SamplerT] | None = None,
    **kwargs: Any,
) -> BaseDatasetExperienceReplay[SamplerT]:
    """Constructs a data set by one name: ``family:id``.

    Args:
        name: such as ``"robomimic:lift/ph/low_dim"``.
        batch_size, sampler, kwargs: as for the class of the family, such as ``policies`` and
            ``workers``.

    Raises:
        ValueError: a family that there is not, or what the class raises.

    Example:
        >>> from replaykit.datasets import load_dataset
        >>> load_dataset("atari:pong", 32)
        Traceback (most recent call last):
        ValueError: expected name as family:id with one of the families ['aloha', 'd4rl', ...
    """
    family, dataset_id = _family(name)
    return family(dataset_id, batch_size, sampler=sampler, **kwargs)


def plan(name: str, *, root: str | Path | None = None) -> DownloadPlan:
    """Says what fetching a data set would take, and fetches nothing.

    Args:
        name: ``family:id``.
        root: as for the class of the family.

    Raises:
        ValueError: a family or an id that there is not.
        FileNotFoundError: the files of this data set cannot be fetched, or are not there.
        PermissionError, DownloadError: the server does not say.

    Cost: a listing of the repository; for files of the web whose size is not known, a request each.

    Example:
        >>> from replaykit.datasets import plan
        >>> found = plan("d4rl:hopper-medium-v2", root="data")
        >>> [(file.name, file.size) for file in found.files], str(found.target)
        ([('hopper_medium-v2.hdf5', 152756557)], 'data/hopper-medium-v2')
    """
    family, dataset_id = _family(name)
    return family.plan(dataset_id, root=root)


def _family(name: str) -> tuple[type[BaseDatasetExperienceReplay[Any]], str]:
    family, colon, dataset_id = name.partition(":")
    known = families()
    if not colon or family not in known:
        raise ValueError(
            f"expected name as family:id with one of the families {sorted(known)}, got "
            f"{name!r}{_meant(name)}"
        )
    return known[family], dataset_id


def _meant(name: str) -> str:
    """Name the data sets that look like one whose family is missing or not known."""
    family, colon, dataset_id = name.partition(":")
    if not colon:
        dataset_id = family
    else:
        near = nearest(family, families())
        if near:
            return meant(name, [f"{each}:{dataset_id}" for each in near])
    return meant(
        dataset_id,
        [f"{each}:{id_}" for each, kind in families().items() for id_ in kind.available_datasets],
    )
