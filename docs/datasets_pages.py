"""Write the pages of the data sets: one page for each family of corpora.

``make docs`` calls ``write``. ``python docs/datasets_pages.py --measure FOLDER`` measures the H5
files below a folder, and writes ``docs/corpora_statistics.json``. The pages show these statistics,
so the site is built without the files.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import io
import json
import math
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from replaykit import registry
from replaykit.datasets import dataset
from replaykit.datasets.engine.layout import Layout
from replaykit.datasets.engine.table_sources import TableLayout
from replaykit.ted import DEFAULT_DONE_KEYS
from replaykit.tools.facts import counted

__all__ = ["FACTS", "LAYOUTS", "STATISTICS", "Facts", "measure", "plot", "snippet", "write"]

STATISTICS: Final = Path(__file__).with_name("corpora_statistics.json")
"""The committed results of ``measure``."""

UNKNOWN: Final = "not stated by the publisher"

MOST_PLOTTED: Final = 24
"""Number of episodes, or of action components, that a plot shows one by one."""


def families() -> dict[str, Any]:
    """Return the classes of families of H5 files. Guides describe the families of tables.

    Example:
        >>> import datasets_pages
        >>> [name in datasets_pages.families() for name in ("aloha", "zarr")]
        [True, False]
    """
    found = dataset.families().items()
    return {name: kind for name, kind in found if not isinstance(kind.layout, TableLayout)}


LAYOUTS: Final = {
    "roboset": ("ROBOHIVE", "ROBOSET_REAL"),
    "d4rl": ("D4RL",),
    "minari": ("MINARI",),
    "robomimic": ("ROBOMIMIC", "ROBOSUITE"),
    "libero": ("LIBERO",),
    "maniskill": ("MANISKILL",),
    "vd4rl": ("VD4RL",),
    "isaaclab": ("ISAACLAB",),
    "aloha": ("ALOHA",),
}
"""Names of the layouts of each family, in the registry."""

ALIGNMENTS: Final = {
    "state-records": "A record has a state, the reward and the flags of that state, and the action "
    "chosen in it.",
    "final-state": "A file has one state more than actions.",
    "steps": "A record is a step: a state, the action chosen in it, and the outcome.",
    "arrivals": "A record has a state, the action that led to it, and the outcome of that action.",
}
"""A sentence for each known alignment."""


# -- facts that the code does not have ------------------------------------------------------------


@dataclass(frozen=True)
class Fact:
    """A statement about a corpus, with the place where its publisher says so."""

    text: str
    source: str = ""

    def __str__(self) -> str:
        source = re.sub(r"https://[^\s;,]+", r"<\g<0>>", self.source)
        return f"{self.text} ({source})" if source else self.text


@dataclass(frozen=True)
class Facts:
    """Facts about a family that neither the registry nor the layouts have.

    Attributes:
        title: the title of the page.
        contents: a description of the corpus.
        size: the size of the published corpus.
        licence: the licence of the data.
        citation: the publication to cite, and its source.
        homepage: the page of the publisher.
        dataset_id: the id in the example. Empty if no id is hosted.
        files: the files in the example of ``source=``.
        arrays: path, shape and dtype of the arrays in the publisher's files, for a family of which
            no file was measured.
        arrays_source: where the arrays are described.
        notes: further remarks on the alignment.
    """

    title: str
    contents: Fact
    size: Fact
    licence: Fact
    citation: Fact
    homepage: str
    dataset_id: str
    files: str
    arrays: tuple[tuple[str, str, str], ...] = ()
    arrays_source: str = ""
    notes: tuple[str, ...] = ()


FACTS: Final[Mapping[str, Facts]] = {
    "roboset": Facts(
        title="RoboSet",
        contents=Fact(
            "Simulated manipulation tasks of RoboHive: dexterous hands (DAPG) and a Franka arm in "
            "a kitchen (FK1). Expert sets are rollouts of trained policies. Human sets were "
            "teleoperated. The real-robot sets hold 12 skills in 38 tasks",
            "RoboHive wiki, page Datasets; https://robopen.github.io/",
        ),
        size=Fact(UNKNOWN + " for the simulated sets; `replaykit.datasets.plan` lists the files"),
        licence=Fact("MIT", "https://github.com/robopen/roboagent, section License; RoboHive wiki"),
        citation=Fact(
            "H. Bharadhwaj, J. Vakil, M. Sharma, A. Gupta, S. Tulsiani, V. Kumar: RoboAgent: "
            "Generalization and Efficiency in Robot Manipulation via Semantic Augmentations and "
            "Action Chunking, 2023",
            "https://arxiv.org/abs/2309.01918",
        ),
        homepage="https://sites.google.com/view/robohive/roboset",
        dataset_id="FK1-v4(expert)/FK1_MicroOpenRandom_v2d-v4",
        files="trace.h5",
        notes=(
            "The reward of a record is the reward of its *state*. So row *t* takes the reward of "
            "record *t + 1*. The action of the last record is NaN.",
            "A time limit leaves no flag. Such an episode ends truncated.",
        ),
    ),
    "d4rl": Facts(
        title="D4RL",
        contents=Fact(
            "Benchmark of offline reinforcement learning: Gym-MuJoCo locomotion, Adroit hands, "
            "AntMaze, Maze2D, Franka kitchen, MiniGrid, CARLA, Flow and PyBullet",
            "https://github.com/Farama-Foundation/D4RL",
        ),
        size=Fact(
            "the table of ids has the sizes of single files",
            "checksum lists of the D4RL builders in https://github.com/tensorflow/datasets",
        ),
        licence=Fact(
            "CC BY 4.0, unless otherwise noted",
            "https://github.com/Farama-Foundation/D4RL, section Licenses",
        ),
        citation=Fact(
            "J. Fu, A. Kumar, O. Nachum, G. Tucker, S. Levine: D4RL: Datasets for Deep Data-Driven "
            "Reinforcement Learning, 2020",
            "https://arxiv.org/abs/2004.07219",
        ),
        homepage="https://sites.google.com/view/d4rl/home",
        dataset_id="hopper-medium-v2",
        files="hopper_medium-v2.hdf5",
        notes=(
            "If a file has `next_observations`, row *t* takes its next observation from record *t* "
            "of that array.",
            "In Adroit `human-v0` and `cloned-v0` the flags do not match the resets. The "
            "conversion refuses them; prefer the v1 files.",
        ),
    ),
    "minari": Facts(
        title="Minari",
        contents=Fact(
            "Reference data sets of the Farama Foundation. The ids of `D4RL` rebuild tasks of D4RL "
            "with Gymnasium. The ids of `mujoco` are rollouts of policies of several levels",
            "https://minari.farama.org",
        ),
        size=Fact("differs by data set", "field `dataset_size` of the data set's metadata, in MB"),
        licence=Fact(
            "differs by data set", "the metadata of each data set; the library itself is MIT"
        ),
        citation=Fact(
            "O. G. Younis, R. Perez-Vicente, J. U. Balis, W. Dudley, A. Davey, J. K. Terry: "
            "Minari, 2024",
            "https://doi.org/10.5281/zenodo.13767625",
        ),
        homepage="https://minari.farama.org",
        dataset_id="D4RL/door/human-v2",
        files="main_data.hdf5",
        notes=(
            "Observations and infos have one record more than actions.",
            "Only the HDF5 storage is read. Data sets with Arrow storage are refused.",
        ),
    ),
    "robomimic": Facts(
        title="robomimic",
        contents=Fact(
            "Demonstrations of manipulation tasks in robosuite: by one proficient operator (`ph`, "
            "200 demonstrations of each task), by several operators (`mh`), and from the replay "
            "buffer of an agent (`mg`)",
            "https://www.tensorflow.org/datasets/catalog/robomimic_ph and robomimic_mg",
        ),
        size=Fact(
            "the table of ids has the sizes of release 0.1",
            "checksum lists of the robomimic builders in https://github.com/tensorflow/datasets",
        ),
        licence=Fact("MIT", "card of the Hub repository `robomimic/robomimic_datasets`"),
        citation=Fact(
            "A. Mandlekar, D. Xu, J. Wong, S. Nasiriany, C. Wang, R. Kulkarni, L. Fei-Fei, "
            "S. Savarese, Y. Zhu, R. Martín-Martín: What Matters in Learning from Offline Human "
            "Demonstrations for Robot Manipulation, CoRL 2021",
            "https://arxiv.org/abs/2108.03298",
        ),
        homepage="https://robomimic.github.io",
        dataset_id="lift/ph/low_dim",
        files="low_dim.hdf5",
    ),
    "libero": Facts(
        title="LIBERO",
        contents=Fact(
            "Teleoperated demonstrations of 130 manipulation tasks in four suites for lifelong "
            "robot learning. The suite of 100 tasks is divided into `libero_90` and `libero_10`",
            "https://github.com/Lifelong-Robot-Learning/LIBERO",
        ),
        size=Fact(UNKNOWN + "; `replaykit.datasets.plan` lists the files"),
        licence=Fact(
            "CC BY 4.0",
            "https://github.com/Lifelong-Robot-Learning/LIBERO, section License; the card of the "
            "Hub copy says Apache-2.0",
        ),
        citation=Fact(
            "B. Liu, Y. Zhu, C. Gao, Y. Feng, Q. Liu, Y. Zhu, P. Stone: LIBERO: Benchmarking "
            "Knowledge Transfer for Lifelong Robot Learning, 2023",
            "https://arxiv.org/abs/2306.03310",
        ),
        homepage="https://libero-project.github.io",
        dataset_id="libero_spatial",
        files="task_demo.hdf5",
        arrays=(
            ("actions", "T, A", "float64"),
            ("states", "T, S", "float64"),
            ("robot_states", "T, R", "float64"),
            ("rewards, dones", "T", "uint8"),
            ("obs/agentview_rgb, obs/eye_in_hand_rgb", "T, 128, 128, 3", "uint8"),
            ("obs/gripper_states, obs/joint_states, obs/ee_states", "T, ...", "float64"),
        ),
        arrays_source="the script of the repository that writes the demonstrations",
        notes=(
            "An observation was recorded *after* the action of the same record. Read with the "
            "rules of robomimic, every action would be paired with the wrong observation.",
        ),
    ),
    "maniskill": Facts(
        title="ManiSkill",
        contents=Fact(
            "Demonstrations of ManiSkill 3 tasks by motion planning, reinforcement learning and "
            "teleoperation, as simulator states that can be replayed to observations",
            "https://maniskill.readthedocs.io",
        ),
        size=Fact(UNKNOWN + "; `replaykit.datasets.plan` lists the files"),
        licence=Fact(
            "Apache-2.0", "card of the Hub repository `haosulab/ManiSkill_Demonstrations`"
        ),
        citation=Fact(
            "S. Tao, F. Xiang, A. Shukla, and others: ManiSkill3: GPU Parallelized Robotics "
            "Simulation and Rendering for Generalizable Embodied AI, 2024",
            "https://arxiv.org/abs/2410.00425",
        ),
        homepage="https://www.maniskill.ai",
        dataset_id="PickCube-v1/motionplanning",
        files="trajectory.h5",
        notes=(
            "Observations and simulator states have one record more than actions.",
            "`success` may be set in the middle of an episode, and does not end it.",
        ),
    ),
    "vd4rl": Facts(
        title="V-D4RL",
        contents=Fact(
            "Pixel versions of locomotion tasks of `dm_control`: walker_walk, cheetah_run and "
            "humanoid_walk, each in five qualities, with distracting and multitask variants",
            "https://github.com/conglu1997/v-d4rl",
        ),
        size=Fact(UNKNOWN + "; `replaykit.datasets.plan` lists the files"),
        licence=Fact("MIT", "https://github.com/conglu1997/v-d4rl, file LICENSE"),
        citation=Fact(
            "C. Lu, P. J. Ball, T. G. J. Rudner, J. Parker-Holder, M. A. Osborne, Y. W. Teh: "
            "Challenges and Opportunities in Offline Reinforcement Learning from Visual "
            "Observations, TMLR 2023",
            "https://arxiv.org/abs/2206.04779",
        ),
        homepage="https://github.com/conglu1997/v-d4rl",
        dataset_id="main/walker_walk/random/84px",
        files="shards/",
        arrays=(
            ("observation", "N, 3, 84, 84", "uint8"),
            ("action", "N, A", "float32"),
            ("reward, discount, step_type", "N", "float32"),
        ),
        arrays_source="the loaders and conversion scripts of the repository",
        notes=(
            "The action of a record led *to* its observation. So row *t* takes the action of "
            "record *t + 1*.",
            "An episode may continue in the next file.",
        ),
    ),
    "isaaclab": Facts(
        title="Isaac Lab",
        contents=Fact(
            "Demonstrations that users record with Isaac Lab and Isaac Lab Mimic. There is no "
            "common repository",
            "https://isaac-sim.github.io/IsaacLab",
        ),
        size=Fact("that of your files"),
        licence=Fact(
            "that of your files; the recorder itself is BSD-3-Clause",
            "https://github.com/isaac-sim/IsaacLab, file LICENSE",
        ),
        citation=Fact(
            "M. Mittal, P. Roth, J. Tigue, and others: Isaac Lab: A GPU-Accelerated Simulation "
            "Framework for Multi-Modal Robot Learning, 2025",
            "https://doi.org/10.48550/arXiv.2511.04831",
        ),
        homepage="https://isaac-sim.github.io/IsaacLab",
        dataset_id="",
        files="demos.hdf5",
        arrays=(
            ("actions", "T, A", "float32"),
            ("obs/...", "T, ...", "float32"),
            ("states/articulation/..., states/rigid_object/...", "T, ...", "float32"),
            ("initial_state/...", "1, ...", "float32"),
        ),
        arrays_source="the recorder of the repository",
        notes=(
            "States were recorded *after* the action, and observations before it. The state before "
            "the first action is `initial_state`.",
        ),
    ),
    "aloha": Facts(
        title="ALOHA and ACT",
        contents=Fact(
            "Bimanual demonstrations, simulated or teleoperated with the ALOHA hardware. A file "
            "holds one episode",
            "https://github.com/tonyzhaozh/act and https://github.com/tonyzhaozh/aloha",
        ),
        size=Fact(UNKNOWN),
        licence=Fact(UNKNOWN + " for the data"),
        citation=Fact(
            "T. Z. Zhao, V. Kumar, S. Levine, C. Finn: Learning Fine-Grained Bimanual "
            "Manipulation with Low-Cost Hardware, RSS 2023",
            "https://arxiv.org/abs/2304.13705",
        ),
        homepage="https://tonyzhaozh.github.io/aloha/",
        dataset_id="",
        files="episodes/",
        arrays=(
            ("observations/qpos, observations/qvel", "T, 14", "float32"),
            ("observations/effort (real robots)", "T, 14", "float32"),
            ("observations/images/<camera>", "T, 480, 640, 3, or compressed", "uint8"),
            ("action", "T, 14", "float32"),
            ("base_action (mobile robots)", "T, 2", "float32"),
        ),
        arrays_source="the recording scripts of both repositories",
        notes=(
            "On real robots, an action is the pose of the leader arm at the same tick. "
            "`AlohaLayout(action_shift=-1)` pairs it as the loader of ACT does.",
        ),
    ),
}
"""The facts of each family, by its name."""

ORIGINS: Final = {
    "robohive/fk1_random_policy_trace.h5": "A trace that RoboHive's repository contains: a random "
    "policy in the kitchen, written by the same writer as RoboSet's simulated files. Not a part of "
    "the published corpus.",
    "d4rl/hopper_medium-v2.hdf5": "A short cut of the published file, from the test data of "
    "TensorFlow Datasets.",
    "d4rl/hopper_medium.hdf5": "A short cut of the published v0 file, from the test data of "
    "TensorFlow Datasets.",
    "d4rl/hopper_medium_replay-v1.hdf5": "A short cut of the published file, from the test data of "
    "TensorFlow Datasets.",
    "d4rl/door-human-v1.hdf5": "A short cut of the published file, from the test data of "
    "TensorFlow Datasets.",
    "d4rl/antmaze-umaze-v0.hdf5": "A short cut of the published file, from the test data of "
    "TensorFlow Datasets.",
    "robomimic/robomimic_ph_lift_low_dim.hdf5": "Two demonstrations of the published file "
    "`v0.1/lift/ph/low_dim`, from the test data of TensorFlow Datasets.",
    "robosuite/panda_lift.hdf5": "A demonstration from robosuite's repository, without "
    "observations and rewards.",
    "maniskill/rlboilerplate_trajectory.h5": "Two PickCube-v1 episodes that ManiSkill 3 recorded, "
    "from a public repository. Not a part of the published corpus.",
    "minari_generated/cartpole/random-v0/data/main_data.hdf5": "A random policy on CartPole-v1, "
    "written with Minari 0.5.4. Not a published data set.",
    "minari_generated/dictenv/random-v0/data/main_data.hdf5": "A test environment with Dict, "
    "Tuple, Text and image spaces, written with Minari 0.5.4. Not a published data set.",
}
"""The origin of each measured file, by its path below the measured folder."""


# -- measuring ------------------------------------------------------------------------------------


def measure(folder: Path) -> dict[str, Any]:
    """Measure all H5 files below a folder, and return the statistics of each family.

    A file without a known layout, or without rows, is left out, and reported on stderr. Numbers
    have six significant digits.

    Returns:
        For each family a list of files in the order of their paths. A file has ``file`` (its path
        below the folder), ``bytes``, ``sha256``, ``layout``, ``rows``, ``lengths``, ``returns``
        (or ``None``), ``ends``, ``columns`` and ``actions``. ``actions`` has the minimum, the 5th,
        25th, 50th, 75th and 95th percentile, and the maximum of each component, or ``None``.

    Raises:
        FileNotFoundError: the folder has no H5 file.

    Cost: each file is converted into a temporary directory.
    """
    from replaykit.datasets.sources import SUFFIXES
    from replaykit.errors import CorpusError

    paths = sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES)
    if not paths:
        raise FileNotFoundError(f"{folder}: expected H5 files below it, found none")
    found: dict[str, list[dict[str, Any]]] = {}
    for path in paths:
        name = path.relative_to(folder).as_posix()
        try:
            family, entry = _measured(path)
        except (CorpusError, LookupError) as error:
            print(f"left out: {name}: {error}", file=sys.stderr)
            continue
        found.setdefault(family, []).append({"file": name, **entry})
    return {family: found[family] for family in FACTS if family in found}


def _measured(path: Path) -> tuple[str, dict[str, Any]]:
    from replaykit.datasets import convert
    from replaykit.inspection import guess_layout, layout_named, opened

    guess = guess_layout([path])
    if guess.layout is None:
        raise LookupError("no layout fits")
    family = next(name for name, names in _layout_names().items() if guess.layout in names)
    with tempfile.TemporaryDirectory() as scratch, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a page lists no dropped keys
        target = Path(scratch, "data")
        data = convert(path, layout_named(guess.layout), target, progress=False)
        with opened(target, most_bytes=None) as (facts, _):
            columns = [
                {
                    "key": each.key,
                    "dtype": each.dtype,
                    "shape": list(each.shape),
                    **{
                        name: _rounded((each.statistics or {}).get(name))
                        for name in ("min", "mean", "max", "std")
                    },
                }
                for each in facts.keys
            ]
            episodes = facts.episodes
        assert episodes is not None
        return family, {
            "bytes": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "layout": guess.layout,
            "rows": len(data),
            "lengths": [int(length) for length in episodes.lengths],
            "returns": None
            if episodes.returns is None
            else [_rounded(float(value)) for value in episodes.returns],
            "ends": episodes.end_counts(),
            "columns": columns,
            "actions": _quantiles(data[:].get("action", None)),
        }


def _quantiles(actions: Any) -> list[list[float]] | None:
    """Return seven quantiles of each component of ``[N, A]``; None for nested actions."""
    import numpy as np
    import torch

    if not isinstance(actions, torch.Tensor):
        return None
    values = actions.reshape(len(actions), -1).numpy().astype(np.float64)
    parts = np.quantile(values, (0, 0.05, 0.25, 0.5, 0.75, 0.95, 1), axis=0)
    return [[_rounded(float(value)) for value in part] for part in parts.T]


def _rounded(value: Any) -> Any:
    """Return a number with six significant digits; other values unchanged."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    return None if not math.isfinite(value) else float(f"{value:.6g}")


def _layout_names() -> dict[str, tuple[str, ...]]:
    """Return the names of the layouts of each family, as the command uses them."""
    return {
        family: tuple(layout.name for layout in _layouts(family).values()) for family in LAYOUTS
    }


def _layouts(family: str) -> dict[str, Layout]:
    """Return the layouts of a family, by their names in the registry."""
    entries = {entry.name: entry for entry in registry.of_kind("layout")}
    return {name: registry.load(entries[name]) for name in LAYOUTS[family]}


# -- pages ----------------------------------------------------------------------------------------


def write(folder: Path) -> None:
    """Write all pages into a folder, and an index of them.

    Raises:
        RuntimeError: a family or a layout of the registry has no page.
        ImportError: matplotlib, which draws the plots, is not installed.
    """
    kinds = families()
    covered = {name for names in LAYOUTS.values() for name in names}
    missing = (set(kinds) - set(FACTS)) | {
        entry.name for entry in registry.of_kind("layout") if entry.name not in covered
    }
    if missing:
        raise RuntimeError(
            f"expected facts and a page for every family and layout, {sorted(missing)} have none; "
            "add them to FACTS and LAYOUTS"
        )
    measured = json.loads(STATISTICS.read_text("utf-8"))
    folder.mkdir(exist_ok=True)
    for family in kinds:
        files = measured.get(family, [])
        for number, entry in enumerate(files):
            _update(folder / f"{family}_{number}.svg", plot(entry, f"{family}{number}"))
        _update(folder / f"{family}.md", _page(family, files))
    _update(folder / "index.md", _index(measured))


def _index(measured: Mapping[str, Any]) -> str:
    lines = [
        "# Data sets",
        "",
        "One class for each family of corpora reads its files, with the right alignment. "
        "[Train on offline data](../guides/offline_data.md) shows their use.",
        "",
        "| family | class | known ids | licence | measured files |",
        "|---|---|---|---|---|",
    ]
    for family, kind in families().items():
        facts = FACTS[family]
        count = len(kind.available_datasets)
        licence = facts.licence.text.split(";")[0]
        lines.append(
            f"| [{facts.title}]({family}.md) | `{kind.__name__}` | {count or '-'}"
            f"{'+' if count and kind.any_id else ''} | {licence} | "
            f"{len(measured.get(family, [])) or '-'} |"
        )
    lines += [
        "",
        "A `+` means that the class also accepts ids that are not listed. Your own files of a "
        "family are read with `source=`.",
        "",
        "```{toctree}",
        ":maxdepth: 1",
        ":hidden:",
        "",
        *families(),
        "```",
        "",
    ]
    return "\n".join(lines)


def _page(family: str, files: Sequence[Mapping[str, Any]]) -> str:
    kind, facts = families()[family], FACTS[family]
    anchor = kind.__name__.lower()
    parts = [
        f"# {facts.title}",
        f"{facts.contents}.",
        f"Class: [`{kind.__name__}`](../reference/data_sets.md#{anchor}). "
        f"Publisher: <{facts.homepage}>.",
        *_paragraphs(kind),
        "## Load",
        f"```python\n{snippet(family)}```",
        "`load_dataset` takes the same arguments, and family and id as one name. "
        "[Train on offline data](../guides/offline_data.md) has complete programs.",
        "## Alignment",
        *_alignment(family),
        "## Columns and statistics",
        *(_statistics(family, files) if files else _arrays(facts)),
        "## Size, licence, citation",
        "\n".join(
            (
                "| | |",
                "|---|---|",
                f"| size | {facts.size} |",
                f"| licence | {facts.licence} |",
                f"| cite | {facts.citation} |",
            )
        ),
        "## Known ids",
        *_ids(kind),
    ]
    return "\n\n".join(parts) + "\n"


def snippet(family: str) -> str:
    """Return a program that opens a data set of a family, and one that reads local files.

    Example:
        >>> import datasets_pages
        >>> print(datasets_pages.snippet("aloha").splitlines()[0])
        from replaykit.datasets import AlohaExperienceReplay
    """
    kind, facts = families()[family].__name__, FACTS[family]
    lines = [f"from replaykit.datasets import {kind}", ""]
    if facts.dataset_id:
        lines += [
            f'data = {kind}("{facts.dataset_id}", batch_size=256)',
            "batch = data.sample()",
            "",
        ]
    lines.append(f'own = {kind}("my/data", batch_size=256, source="{facts.files}")')
    return "\n".join(lines) + "\n"


_REFERENCES: Final = re.compile(r"(?:See|Arguments, errors)\b.*?\.(?:\s+|$)")


def _paragraphs(value: object) -> list[str]:
    """Return the paragraphs of a docstring up to its first section, as Markdown.

    Sentences that refer to the docstring of another class are left out.
    """
    found = []
    for paragraph in (inspect.getdoc(value) or "").split("\n\n")[1:]:
        if re.match(r"(?:Args|Attributes|Raises|Example|Returns):", paragraph):
            break
        text = _REFERENCES.sub("", " ".join(paragraph.split())).strip()
        text = text.partition("Source:")[0].strip()  # the table of the page has it
        if text:
            found.append(text.replace("``", "`"))
    return found


def _alignment(family: str) -> Iterator[str]:
    layouts = _layouts(family)
    for name, layout in layouts.items():
        rule = layout.alignment
        if len(layouts) > 1:
            yield f"### `{layout.name}`"
        lost = "T" if not layout.lost else f"T - {layout.lost}"
        has_ends = any(entry.is_end for entry in layout.fields) or "success" in layout.attributes
        kept = ", or T if the episode terminated" if layout.is_open and has_ends else ""
        yield (
            f"Layout `{name}` (`--layout {layout.name}`), alignment `{rule.name}`. "
            f"{ALIGNMENTS.get(rule.name, '')} T records of `{layout.clock}` make {lost} rows{kept}."
        )
        yield from _paragraphs(type(layout))
        yield _fields(layout)
    yield from FACTS[family].notes


_FLAGS: Final = (("next", "terminated"), ("next", "truncated"))


def _fields(layout: Layout) -> str:
    lines = ["| dataset in the file | meaning | key | row *t* takes |", "|---|---|---|---|"]
    for entry in layout.fields:
        is_rest = entry.source == "/"
        source = "other" if is_rest else " and ".join(f"`{path}`" for path in entry.sources)
        targets = [
            (target.key, target.offset)
            for target in entry.targets(layout.alignment, entry.sources[0])
        ]
        if entry.is_end:
            targets.append((("next", entry.role), entry.end_offset(layout.alignment)))
        below = "/..." if entry.is_group and not entry.nested else ""
        for key, offset in targets:
            record = "record *t*" if not offset else f"record *t + {offset}*"
            last = ", in the last row" if key in _FLAGS else ""
            lines.append(f"| {source} | {entry.role} | `{'/'.join(key)}{below}` | {record}{last} |")
    lines.append("| | ids | `episode`, `seed` | number of the episode, and of its file |")
    return "\n".join(lines)


def _arrays(facts: Facts) -> Iterator[str]:
    yield (
        "No file of this family was measured for this page, so there are no statistics and no "
        f"plots. The arrays of a file, by {facts.arrays_source}:"
    )
    lines = ["| dataset | shape | dtype |", "|---|---|---|"]
    lines += [f"| `{path}` | `[{shape}]` | {dtype} |" for path, shape, dtype in facts.arrays]
    yield "\n".join(lines)


def _statistics(family: str, files: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield (
        "These files were measured by `python docs/datasets_pages.py --measure FOLDER`. They are "
        "small samples, so the numbers show the form of the data, and not the whole corpus. A key "
        "that is `also` under `next` has the values after the step there; the statistics are those "
        "before the step. The plots show each episode, and for each component of the action its "
        "range, its middle half and its median."
    )
    for number, entry in enumerate(files):
        lengths = entry["lengths"]
        yield f"### {_title(entry['file'])}"
        yield " ".join(
            (
                ORIGINS.get(entry["file"], ""),
                f"`{entry['file']}`, {entry['bytes']:,} bytes, SHA-256 "
                f"`{entry['sha256'][:16]}...`, layout `{entry['layout']}`. "
                f"{counted(entry['rows'], 'row')} in "
                f"{counted(len(lengths), 'episode')} of {_span(lengths)} rows. Ends: "
                f"{_ends(entry['ends'])}.",
            )
        ).strip()
        # A narrow screen scrolls the plot, because its text would be too small otherwise.
        yield _RAW.format('<div style="overflow-x:auto">')
        yield _RAW.format(f":file: {family}_{number}.svg")
        yield _RAW.format("</div>")
        yield _columns(entry["columns"])


_RAW: Final = "```{{raw}} html\n{}\n```"


def _title(name: str) -> str:
    """Return a short name of a measured file, which fits a narrow screen."""
    path = Path(name)
    return "/".join(path.parts[1:-2]) if path.stem == "main_data" else path.stem


def _columns(columns: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of columns. A column under ``next`` shares the line of its state column."""
    keys = {column["key"] for column in columns}
    lines = ["| key | under `next` | dtype | shape | min | mean | max | std |", "|---" * 8 + "|"]
    for column in columns:
        key = column["key"]
        rest = key.removeprefix("next/")
        if key in DEFAULT_DONE_KEYS or (rest != key and rest in keys - set(DEFAULT_DONE_KEYS)):
            continue  # root flags are False in every row
        both = "also" if f"next/{key}" in keys else "only" if rest != key else "-"
        shape = ", ".join(map(str, column["shape"]))
        cells = " | ".join(_shown(column[name]) for name in ("min", "mean", "max", "std"))
        lines.append(f"| `{rest}` | {both} | {column['dtype']} | `[{shape}]` | {cells} |")
    return "\n".join(lines)


def _span(values: Sequence[int]) -> str:
    least, most = min(values), max(values)
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


def _ends(ends: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {end}" for end, count in ends.items())


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return str(value).lower() if isinstance(value, bool) else f"{value:.4g}"


def _ids(kind: Any) -> Iterator[str]:
    ids = kind.available_datasets
    if not ids:
        yield "No id is hosted. Any id may name your files, which are given with `source=`."
        return
    remotes = {name: kind.remote(name) for name in ids}
    places = sorted({remote.location for remote in remotes.values()})
    others = " Other ids are accepted too." if kind.any_id else ""
    yield f"{len(ids)} ids, fetched from {' and '.join(places)}.{others}"
    if all(remote.known_bytes is None for remote in remotes.values()):
        yield "\n".join(f"- `{name}`" for name in ids)
        return
    lines = ["| id | size in MB | SHA-256 is verified |", "|---|---|---|"]
    for name, remote in remotes.items():
        size = "-" if remote.known_bytes is None else f"{remote.known_bytes / 1e6:,.1f}"
        known = all(getattr(file, "sha256", None) for file in getattr(remote, "files", (None,)))
        lines.append(f"| `{name}` | {size} | {'yes' if known else '-'} |")
    yield "\n".join(lines)


def _update(path: Path, text: str) -> None:
    """Write a file if its text has changed, so that Sphinx reads only changed pages again."""
    if not path.exists() or path.read_text("utf-8") != text:
        path.write_text(text, "utf-8")


# -- plots ----------------------------------------------------------------------------------------

_INK, _ACCENT, _FAINT = "#010203", "#040506", "#070809"
_COLOURS: Final = {
    _INK: "currentColor",
    _ACCENT: "var(--color-brand-primary)",
    _FAINT: "var(--color-foreground-border)",
}
"""Colours of the page, by the colours with which matplotlib draws."""


def plot(entry: Mapping[str, Any], name: str) -> str:
    """Return an SVG with the lengths, the returns and the action ranges of a measured file.

    The same entry gives the same text with one version of matplotlib. The SVG uses the colours of
    the page, so it follows the light and the dark theme.

    Args:
        entry: a file of the statistics.
        name: a prefix for the ids of the SVG, so that a page can include several.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    settings: dict[Any, Any] = {
        "svg.hashsalt": name,
        "svg.fonttype": "none",
        "font.size": 9,
        "figure.facecolor": "none",
        "axes.facecolor": "none",
        "axes.edgecolor": _FAINT,
        "axes.labelcolor": _INK,
        "text.color": _INK,
        "xtick.color": _INK,
        "ytick.color": _INK,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    panels = [("lengths", "rows of an episode"), ("returns", "return of an episode")]
    panels = [panel for panel in panels if entry[panel[0]] is not None]
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(7.4, 2.2), layout="constrained")
        canvas = FigureCanvasSVG(figure)
        count = len(panels) + (entry["actions"] is not None)
        axes = figure.subplots(1, count, squeeze=False)[0]
        for axis, (key, label) in zip(axes, panels, strict=False):
            _bars(axis, entry[key], label)
        if entry["actions"] is not None:
            _ranges(axes[-1], entry["actions"])
        text = io.StringIO()
        canvas.print_svg(text, metadata={"Date": None, "Creator": None, "Format": None})
    return _for_page(text.getvalue(), name, f"Episodes and actions of {entry['file']}")


def _bars(axis: Any, values: Sequence[float], label: str) -> None:
    """Draw one bar per episode, or a histogram of many episodes."""
    if len(values) <= MOST_PLOTTED:
        axis.bar(range(len(values)), values, color=_ACCENT)
        axis.set(xlabel="episode", title=label)
        _count(axis, len(values))
    else:
        axis.hist(values, bins=20, color=_ACCENT)
        axis.set(xlabel=label, ylabel="episodes")


def _ranges(axis: Any, actions: Sequence[Sequence[float]]) -> None:
    """Draw minimum to maximum, the middle half and the median of each action component."""
    shown = list(actions)[:MOST_PLOTTED]
    for number, (least, _, low, middle, high, _, most) in enumerate(shown):
        axis.plot((number, number), (least, most), color=_FAINT, linewidth=1.5)
        axis.plot((number, number), (low, high), color=_ACCENT, linewidth=5)
        axis.plot((number,), (middle,), color=_INK, marker="_", markersize=7)
    axis.set(xlabel="component", title="action")
    _count(axis, len(shown))


def _count(axis: Any, number: int) -> None:
    """Let the horizontal axis count from 0."""
    axis.set_xlim(-0.7, number - 0.3)
    axis.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)


def _for_page(svg: str, name: str, title: str) -> str:
    """Return an SVG as an element of an HTML page, in its colours and with unique ids."""
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>\s*", "", body, flags=re.DOTALL)
    body = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", body)
    for drawn, shown in _COLOURS.items():
        body = body.replace(drawn, shown)
    body = re.sub(r"font: ([\d.]+px)[^;\"]*", r"font: \1 var(--font-stack)", body)
    return body.replace(
        "<svg",
        f'<svg role="img" aria-label="{title}" style="min-width:34rem;max-width:100%;height:auto"',
        1,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure a folder, or write the pages into ``docs/datasets``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", type=Path, metavar="FOLDER", help="measure the files below it")
    folder = parser.parse_args(arguments).measure
    if folder is None:
        write(Path(__file__).with_name("datasets"))
        return
    found = measure(folder)
    STATISTICS.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", "utf-8")
    counts = ", ".join(f"{len(files)} of {family}" for family, files in found.items())
    print(f"{STATISTICS.name}: {counts}")


if __name__ == "__main__":
    main()
