"""The corpus classes, with their data sets, file hosts and layouts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from replaykit import registry
from replaykit.buffer.components import SamplerT
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
    """A corpus that is hosted only in part, or not at all.

    Any id may name local files of the user.
    """

    any_id = True

    def _identity(self) -> dict[str, Any]:
        # An id that is not hosted names only the user's files. Without source=, the id opens the
        # data set that was converted from these files before.
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
    """The hosted ids, which are read from the table at the first access."""

    def __get__(self, instance: object, owner: type) -> list[str]:
        return d4rl_ids()


class D4RLExperienceReplay(_OwnFiles[SamplerT]):
    """Transitions of D4RL files of any release.

    Files are fetched over plain HTTP from their authors, or from the URL in the environment
    variable ``REPLAYKIT_D4RL_URL``. A file is verified if its SHA-256 is known. Local files can be
    given with ``source``, under any id.

    Next observations come from ``next_observations`` if the release has this array. They come from
    the simulator's state if it was logged one step late (AntMaze v0). If next observations come
    from either source, episodes end at the resets of the environment, independently of the flags.
    In all other files, episodes end at the flags. If an episode that ends at a flag terminated, its
    last step is kept, with ``("next", "observed")`` False. Otherwise its last step is dropped. Rows
    have ``observation``, ``action``, ``info``, ids and flags; all other keys are under ``next``.
    See `D4RLLayout`.

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
            "rows always have the values of env.get_dataset(), every step and the infos; leave "
            "it out",
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
        """Return the location of a data set's file; None for an id that is not hosted."""
        file = d4rl_file(dataset_id)
        return None if file is None else WebFiles((file,))


class IsaacLabExperienceReplay(_OwnFiles[SamplerT]):
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


class AlohaExperienceReplay(_OwnFiles[SamplerT]):
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


class RobomimicExperienceReplay(BaseDatasetExperienceReplay[SamplerT]):
    """Transitions of robomimic's simulated and robosuite's raw demonstrations.

    Ids have the form ``task/kind/name``. Data sets with the name ``demo`` hold simulator states
    only. ``split`` accepts the filters of the files, such as ``"train"``. Image files are not
    downloaded. Render them with robomimic, then pass the path as ``source``; the id may be any
    name. Ids of the form ``v0.1/task/kind/name`` name the files of the first release, with images,
    on the authors' server. See `RobomimicLayout`.

    See BaseDatasetExperienceReplay for arguments, errors and methods. Source: Mandlekar et al.,
    "What Matters in Learning from Offline Human Demonstrations for Robot Manipulation", 2021; MIT.

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
        """The layout of the files of this id."""
        return ROBOSUITE if self.dataset_id.endswith("/demo") else ROBOMIMIC

    @classmethod
    def remote(cls, dataset_id: str) -> HubFiles | WebFiles:
        """Return the location of a data set's files."""
        return robomimic_remote(dataset_id)


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


class MinariExperienceReplay(BaseDatasetExperienceReplay[SamplerT]):
    """Transitions of Minari's data sets in HDF5 storage.

    Ids are Minari's ids, such as ``D4RL/door/human-v2``. The first part names the repository below
    ``farama-minari``. The ids of ``D4RL`` and ``mujoco`` are listed; other ids are also accepted.
    See `MinariLayout` for spaces, images and text.

    See BaseDatasetExperienceReplay for arguments, errors and methods. Source:
    https://minari.farama.org; each data set has a separate licence.

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
        """Return the location of a data set's files."""
        namespace, _, rest = dataset_id.partition("/")
        if not rest:
            raise FileNotFoundError(
                f"{dataset_id!r} names no repository: expected namespace/.../name-v0, or local "
                "files with source="
            )
        return HubFiles(f"{cls.owner}/{namespace}", rest, ".hdf5", beside=("/metadata.json",))


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
                cls.repository, f"demos/{folder}", f"{file}.h5", beside=(f"{file}.json",)
            )
        return HubFiles(cls.repository, f"demos/{dataset_id}", ".h5", beside=(".json",))


class VD4RLExperienceReplay(BaseDatasetExperienceReplay[SamplerT]):
    """Transitions of V-D4RL, with images of 84 by 84 pixels. Episodes may cross files.

    Ids are folders of the repository. The main tasks are listed; other ids, such as
    ``distracting/...``, are also accepted. Folders with the name ``64px`` hold no H5 files, and are
    refused. See `VD4RLLayout`. See BaseDatasetExperienceReplay for arguments, errors and methods.
    Source: Lu et al., "Challenges and Opportunities in Offline Reinforcement Learning from Visual
    Observations", 2022; MIT.

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
        """Return the location of a data set's files."""
        # The files are ordered by their numbers, so 2.hdf5 comes before 10.hdf5.
        return HubFiles(cls.repository, dataset_id, ".hdf5", natural=True)


@functools.cache
def families() -> Mapping[str, type[BaseDatasetExperienceReplay[Any]]]:
    """Return the corpus classes by family name."""
    classes = (registry.load(entry) for entry in registry.of_kind("family"))
    return {each.corpus: each for each in classes}


def load_dataset(
    name: str,
    batch_size: int,
    *,
    sampler: SamplerT | Callable[[], SamplerT] | None = None,
    **kwargs: Any,
) -> BaseDatasetExperienceReplay[SamplerT]:
    """Construct a data set from its name, ``family:id``.

    Args:
        name: a name such as ``"robomimic:lift/ph/low_dim"``.
        batch_size, sampler, kwargs: the arguments of the family's class, such as ``policies`` and
            ``workers``.

    Raises:
        ValueError: the family is unknown, or the class refuses an argument.

    Example:
        >>> from replaykit.datasets import load_dataset
        >>> load_dataset("atari:pong", 32)
        Traceback (most recent call last):
        ValueError: expected name as family:id with one of the families ['aloha', 'd4rl', ...
    """
    family, dataset_id = _family(name)
    return family(dataset_id, batch_size, sampler=sampler, **kwargs)


def plan(name: str, *, root: str | Path | None = None) -> DownloadPlan:
    """Return the files, sizes and target of a download, without fetching files.

    Args:
        name: ``family:id``.
        root: as for the class of the family.

    Raises:
        ValueError: the family or the id is unknown.
        FileNotFoundError: the files of this data set cannot be fetched, or do not exist.
        PermissionError, DownloadError: the server refuses or fails to list the files.

    Cost: one listing of the repository, or one request for each web file of unknown size.

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
    """Return a hint with names similar to one whose family is missing or unknown."""
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
