"""A small file of each family, and its rows computed with h5py and NumPy alone.

The rows are those of the alignment tables of the families, written down here a second time: nothing
of the engine is used for them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from replaykit.datasets import Layout
from replaykit.datasets import families as known
from replaykit.testing import RoboHiveWriter, make_trial

Key = tuple[str, ...]


def leaves(group: h5py.Group, prefix: str = "", *, without: str = "") -> Iterator[tuple[str, Any]]:
    """Every dataset below a group by its path; not links by name, nor below ``without``."""
    for name in group:
        if name != without and isinstance(group.get(name, getlink=True), h5py.HardLink):
            node = group[name]
            if isinstance(node, h5py.Dataset):
                yield prefix + name, node
            elif isinstance(node, h5py.Group):
                yield from leaves(node, f"{prefix}{name}/")


def native(node: Any) -> np.ndarray:
    found = node[()]
    return np.asarray(found, found.dtype.newbyteorder("="))


Rules = dict[str, tuple[str, ...]]
"""The keys that the arrays of a path give, each with the record of row 0, and words.

A path that ends in ``/`` stands for all below it, one in ``*`` for itself too. ``held``: the record
after, and the last one where it is not known. ``fill``: an array may be one value for all records,
of which there is one more with ``fill+1``. ``column``: one number is a row of one.
"""


def rest_of(pattern: str, path: str) -> list[str] | None:
    """Return the parts of a path below a pattern, or None where it does not match."""
    head = pattern.rstrip("*")
    if path == head:
        return []
    if head and not head.endswith("/") and not pattern.endswith("*"):
        return None
    below = head if not head or head.endswith("/") else f"{head}/"
    return path[len(below) :].split("/") if path.startswith(below) else None


@dataclass
class Rows:
    """Columns by key, as pieces that are read when they are asked for; where each comes from."""

    pieces: dict[Key, list[Callable[[], Any]]] = field(default_factory=dict)
    source: dict[Key, str] = field(default_factory=dict)
    starts: list[int] = field(default_factory=list)
    count: int = 0

    def put(self, key: Key, path: str, piece: Callable[[], Any]) -> None:
        self.pieces.setdefault(key, []).append(piece)
        self.source[key] = path

    def fill(
        self,
        arrays: Iterable[tuple[str, Any]],
        rules: Rules,
        rows: int,
        *,
        total: int = 0,
        base: int = 0,
        stop: int | None = None,
    ) -> None:
        """Take rows of arrays by the first rule for their paths; ``base``: the first record.

        ``total``: how many records optional arrays should have, or they are one value for all.
        """
        for path, node in arrays:
            found = ((rest_of(pattern, path), takes) for pattern, takes in rules.items())
            rest, takes = next((each for each in found if each[0] is not None), ([], ()))
            for take in takes:
                key, first, *words = take.split()

                def piece(node: Any = node, first: str = first, words: Any = words) -> np.ndarray:
                    values = native(node)
                    if first == "held":
                        return held(values[base:stop][1:], values[base:stop], rows)
                    expected = total + ("fill+1" in words)
                    if words and words[-1].startswith("fill") and values.shape[:1] != (expected,):
                        values = np.broadcast_to(values, (expected, *values.shape[1:]))
                    values = values[base + int(first) :][:rows]
                    if "column" in words or ("flat" in words and node.ndim == 1):
                        values = values.reshape(rows, -1) if values.size == rows else values
                    if "bool" in words:
                        return values != 0
                    return values.astype("f4") if "f4" in words else values

                self.put((*key.split("/"), *(rest or [])), path, piece)

    def end(self, rows: int, terminated: bool, truncated: bool) -> None:
        """An episode of so many rows, and how it ended."""
        last = np.arange(rows)[:, None] == rows - 1
        for name, value in (
            ("terminated", terminated),
            ("truncated", truncated),
            ("done", terminated or truncated),
        ):
            self.put(("next", name), "", lambda value=value: last & value)
        self.starts.append(self.count)
        self.count += rows

    def column(self, key: Key) -> np.ndarray:
        return np.concatenate([piece() for piece in self.pieces[key]])


@dataclass(frozen=True)
class Corpus:
    """A family: its layout, how its file is written, and what its rows are."""

    layout: Layout
    write: Callable[[Path], Path]
    rows: Callable[[h5py.File, list[str]], Rows]


# -- groups, a field each --------------------------------------------------------------------------


def roboset(folder: Path) -> Path:
    with RoboHiveWriter(folder / "trace.h5") as writer:
        for seed, records in enumerate((5, 3)):
            trial = make_trial(records, seed=seed, terminated=seed == 1)
            trial["env_infos"]["once"] = np.array([2.5])
            writer.add_trial(**trial)
    return folder / "trace.h5"


ROBOSET: Rules = {
    "observations": ("observation 0", "next/observation 1"),
    "actions": ("action 0",),
    "time": ("time 0",),
    "rewards": ("next/reward 1 column",),
    "env_infos/": ("info 0 fill", "next/info 1 fill"),
}


def roboset_rows(file: h5py.File, names: list[str]) -> Rows:
    found = Rows()
    for name in names:
        trial = file[name]
        total = len(trial["actions"])
        found.fill(leaves(trial), ROBOSET, total - 1, total=total)
        done = native(trial["done"]).reshape(total)[-1] != 0
        tailed = np.isnan(native(trial["actions"])[-1]).all()
        found.end(total - 1, bool(done), not (done and tailed))
    return found


def minari(folder: Path) -> Path:
    draw = np.random.default_rng(0)
    with h5py.File(folder / "main_data.hdf5", "w", track_order=True) as file:
        for number, steps in enumerate((4, 3)):
            group = file.create_group(f"episode_{number}")
            group.attrs.update({"id": number, "total_steps": steps, "seed": 7 + number})
            group["observations/x"] = draw.normal(size=(steps + 1, 2)).astype("f4")
            group["observations/tup/_index_0"] = draw.integers(0, 9, steps + 1)
            group["actions"] = draw.integers(0, 3, steps)
            group["rewards"] = draw.normal(size=steps)
            group["terminations"] = np.arange(steps) == steps - 1 + number
            group["truncations"] = np.arange(steps) == steps - number
            group["infos/k"] = draw.normal(size=steps + 1)
    box = {"type": "Box", "dtype": "float32", "shape": [2], "low": [-9, -9], "high": [9, 9]}
    part = {"type": "Tuple", "subspaces": [{"type": "Discrete", "dtype": "int64", "n": 9}]}
    space = {"type": "Dict", "subspaces": {"x": box, "tup": part}}
    said = {
        "total_episodes": 2,
        "total_steps": 7,
        "data_format": "hdf5",
        "jpeg_encoding": True,
        "observation_space": json.dumps(space),
        "action_space": json.dumps({"type": "Discrete", "dtype": "int64", "n": 3}),
    }
    (folder / "metadata.json").write_text(json.dumps(said))
    return folder / "main_data.hdf5"


MINARI: Rules = {
    "observations*": ("observation 0 fill+1", "next/observation 1 fill+1"),
    "infos*": ("info 0 fill+1", "next/info 1 fill+1"),
    "actions*": ("action 0",),
    "rewards": ("next/reward 0 column",),
}


def minari_rows(file: h5py.File, names: list[str]) -> Rows:
    return final_state_rows(file, names, MINARI, "rewards", ("terminations", "truncations"))


def maniskill(folder: Path) -> Path:
    draw = np.random.default_rng(1)
    with h5py.File(folder / "trajectory.h5", "w") as file:
        for number, steps in ((0, 3), (2, 4)):  # a gap in the numbering
            group = file.create_group(f"traj_{number}")
            group["obs/agent/qpos"] = draw.normal(size=(steps + 1, 3)).astype("f4")
            group["obs/depth"] = draw.integers(0, 60000, (steps + 1, 2, 2), np.uint16)
            group["env_states/actors/cube"] = draw.normal(size=(steps + 1, 5)).astype("f4")
            group["actions"] = draw.normal(size=(steps, 2)).astype("f4")
            group["rewards"] = draw.normal(size=steps).astype("f4")
            group["success"] = np.arange(steps) > 1
            group["terminated"] = np.zeros(steps, bool)
            group["truncated"] = np.arange(steps) == steps - 1
    episodes = [
        {"episode_id": number, "elapsed_steps": steps, "episode_seed": 5 + number}
        for number, steps in ((0, 3), (2, 4))
    ]
    (folder / "trajectory.json").write_text(json.dumps({"episodes": episodes}))
    return folder / "trajectory.h5"


MANISKILL: Rules = {
    "obs*": ("observation 0 fill+1", "next/observation 1 fill+1"),
    "env_states*": ("state 0 fill+1", "next/state 1 fill+1"),
    "actions*": ("action 0",),
    "rewards": ("next/reward 0 column fill",),
    "success": ("next/success 0 column bool fill",),
    "fail": ("next/fail 0 column bool fill",),
}


def maniskill_rows(file: h5py.File, names: list[str]) -> Rows:
    rules = MANISKILL
    if "obs" not in file[names[0]]:
        rules = {**MANISKILL, "env_states*": MANISKILL["obs*"]}
    return final_state_rows(file, names, rules, "actions", ("terminated", "truncated"))


def final_state_rows(
    file: h5py.File, names: list[str], rules: Rules, clock: str, flags: tuple[str, str]
) -> Rows:
    """T steps and T + 1 states."""
    found = Rows()
    for name in names:
        group = file[name]
        steps = len(group[clock])
        found.fill(leaves(group), rules, steps, total=steps)
        over, timed = (bool(native(group[flag]).reshape(steps)[-1] != 0) for flag in flags)
        found.end(steps, over, timed or not over)
    return found


def robomimic(folder: Path) -> Path:
    draw = np.random.default_rng(2)
    with h5py.File(folder / "low_dim.hdf5", "w") as file:
        file.create_group("data").attrs.update({"total": 999, "env_args": "{}"})
        for number, steps in ((0, 4), (10, 3)):
            demo = file["data"].create_group(f"demo_{number}")
            demo.attrs.update({"num_samples": steps, "model_file": "<x/>"})
            position = draw.normal(size=(steps + 1, 2))
            demo["obs/position"], demo["next_obs/position"] = position[:-1], position[1:]
            demo["actions"] = draw.normal(size=(steps, 2))
            demo["states"] = draw.normal(size=(steps, 3))
            demo["rewards"] = (np.arange(steps) > 1) * 1.0
            demo["dones"] = ((np.arange(steps) > 1) & (number == 0)).astype(np.int64)
        file["mask/train"] = np.array([b"demo_0", b"demo_77"])
    return folder / "low_dim.hdf5"


ROBOMIMIC: Rules = {
    "obs*": ("observation 0",),
    "next_obs*": ("next/observation 0",),
    "actions": ("action 0",),
    "states": ("state 0 fill",),
    "rewards": ("next/reward 0 column",),
    "dones": ("next/success 0 column bool",),
}


def robomimic_rows(file: h5py.File, names: list[str]) -> Rows:
    found, rules = Rows(), ROBOMIMIC
    # A file without next observations: the record after, and a last one that is not known.
    has_next = "next_obs" in file[names[0]]
    if not has_next:  # such arrays are reported as left out
        rules = {**ROBOMIMIC, "obs*": ("observation 0", "next/observation held"), "next_obs*": ()}
    kept = []
    for name in names:
        demo = file[name]
        steps = len(demo["actions"])
        solved = bool(native(demo["dones"]).reshape(steps)[-1] != 0)
        rows = steps - (not has_next and not solved)
        kept.append((rows, not has_next and solved))
        found.fill(leaves(demo), rules, rows, total=steps)
        over = solved and rows == steps
        found.end(rows, over, not over)
    observe(found, kept)
    return found


def held(after: np.ndarray, before: np.ndarray, rows: int) -> np.ndarray:
    """The states after each row; where the last one is not known, the one before it."""
    return np.concatenate([after, before[-1:]])[:rows]


def observe(found: Rows, kept: list[tuple[int, bool]]) -> None:
    if any(is_open for _, is_open in kept):
        for rows, is_open in kept:
            known = ~((np.arange(rows)[:, None] == rows - 1) & is_open)
            found.put(("next", "observed"), "", lambda known=known: known)


def robosuite(folder: Path) -> Path:
    draw = np.random.default_rng(3)
    with h5py.File(folder / "demo.hdf5", "w") as file:
        data = file.create_group("data")
        data.attrs.update({"env": "Lift", "date": "today"})
        for number, steps in ((1, 5), (2, 4)):
            demo = data.create_group(f"demo_{number}")
            demo["states"] = draw.normal(size=(steps, 3))
            demo["actions"] = draw.normal(size=(steps, 2))
            demo["joint_torques"] = draw.normal(size=(steps, 2))
            demo["right_dpos"] = np.zeros((steps, 0))
    return folder / "demo.hdf5"


ROBOSUITE: Rules = {
    "states": ("observation/state 0", "next/observation/state 1"),
    "actions": ("action 0",),
    "*": ("info 0 fill",),
}


def robosuite_rows(file: h5py.File, names: list[str]) -> Rows:
    found = Rows()
    for name in names:
        rows = len(file[name]["states"]) - 1
        found.fill(leaves(file[name]), ROBOSUITE, rows, total=rows + 1)
        found.end(rows, False, True)
    return found


def libero(folder: Path) -> Path:
    draw = np.random.default_rng(4)
    with h5py.File(folder / "task_demo.hdf5", "w") as file:
        data = file.create_group("data")
        data.attrs.update({"bddl_file_name": "x.bddl", "num_demos": 2})
        for number, steps in enumerate((4, 5)):
            demo = data.create_group(f"demo_{number}")
            demo.attrs["num_samples"] = steps
            demo["actions"] = draw.normal(size=(steps, 2))
            demo["states"] = draw.normal(size=(steps, 3))
            demo["robot_states"] = draw.normal(size=(steps, 2))
            demo["obs/rgb"] = draw.integers(0, 256, (steps, 2, 2, 3), np.uint8)
            demo["rewards"] = demo["dones"] = (np.arange(steps) == steps - 1).astype(np.uint8)
    return folder / "task_demo.hdf5"


LIBERO: Rules = {
    "obs*": ("observation 0", "next/observation 1"),
    "robot_states": ("info/robot_states 0 fill", "next/info/robot_states 1 fill"),
    "states": ("state 1 fill",),
    "actions": ("action 1",),
    "rewards": ("next/reward 1 column f4",),
}


def libero_rows(file: h5py.File, names: list[str]) -> Rows:
    found = Rows()
    for name in names:
        demo = file[name]
        total = len(demo["actions"])
        found.fill(leaves(demo), LIBERO, total - 1, total=total)
        over = bool(native(demo["dones"]).reshape(total)[-1] != 0)
        found.end(total - 1, over, not over)
    return found


def isaaclab(folder: Path) -> Path:
    draw = np.random.default_rng(5)
    with h5py.File(folder / "dataset.hdf5", "w") as file:
        data = file.create_group("data")
        data.attrs.update({"total": 999, "env_args": "{}"})  # stale
        for number, (steps, success) in enumerate(((4, True), (3, False))):
            demo = data.create_group(f"demo_{3 * number}")
            demo.attrs.update({"num_samples": steps, "success": success})
            actions = draw.normal(size=(steps, 2)).astype("f4")
            arm = draw.normal(size=(steps + 1, 3)).astype("f4")
            demo["actions"] = actions
            demo["obs/actions"] = np.concatenate([np.zeros((1, 2), "f4"), actions[:-1]])
            demo["obs/joint_pos"] = arm[:-1]
            demo["states/articulation/robot/pos"] = arm[1:]
            demo["initial_state/articulation/robot/pos"] = arm[:1]
    return folder / "dataset.hdf5"


ISAACLAB: Rules = {"obs*": ("observation 0", "next/observation held"), "actions": ("action 0",)}


def isaaclab_rows(file: h5py.File, names: list[str]) -> Rows:
    found, kept = Rows(), []
    for name in names:
        demo = file[name]
        steps = len(demo["actions"])
        solved = bool(demo.attrs.get("success", False))
        rows = steps - 1 + solved
        kept.append((rows, solved))
        found.fill(leaves(demo), ISAACLAB, rows)
        for path, node in leaves(demo):
            root, *rest = path.split("/")
            if root != "states":
                continue
            first = demo["/".join(["initial_state", *rest])]
            for key, start in ((("state", *rest), 0), (("next", "state", *rest), 1)):

                def states(start: int = start, node: Any = node, first: Any = first) -> Any:
                    return np.concatenate([native(first), native(node)])[start:]

                found.put(key, path, lambda states=states, rows=rows: states()[:rows])
        found.end(rows, solved, not solved)
    observe(found, kept)
    return found


def roboset_real(folder: Path) -> Path:
    draw = np.random.default_rng(6)
    with h5py.File(folder / "robot.h5", "w") as file:
        for number, frames in enumerate((4, 3)):
            trial = file.create_group(f"Trial{number}")
            arm, hand = (draw.normal(size=(frames, n)).astype("f2") for n in (3, 1))
            arm[-1] = hand[-1] = np.nan
            trial["data/ctrl_arm"], trial["data/ctrl_ee"] = arm, hand
            trial["data/time"] = np.arange(frames) + 1e9
            trial["data/qp_arm"] = draw.normal(size=(frames, 3)).astype("f2")
            trial["data/rgb_top"] = draw.integers(0, 256, (frames, 2, 2, 3), np.uint8)
            trial["derived/pose"] = draw.normal(size=(frames, 2)).astype("f2")
            trial["config/solved"] = np.ones(1, "f2")
    return folder / "robot.h5"


ROBOSET_REAL: Rules = {
    "data/time": ("time 0 fill",),
    "data/user": ("info/user 0 fill",),
    "data/": ("observation 0 flat", "next/observation 1 flat"),
    "derived/": ("info 0 fill", "next/info 1 fill"),
    "config/solved": ("info/solved 0 fill",),
}


def roboset_real_rows(file: h5py.File, names: list[str]) -> Rows:
    found = Rows()
    for name in names:
        trial = file[name]
        total = len(trial["data/ctrl_arm"])
        arm, hand = trial["data/ctrl_arm"], trial["data/ctrl_ee"]

        def action(arm: Any = arm, hand: Any = hand, total: int = total) -> np.ndarray:
            parts = [native(part).reshape(total, -1) for part in (arm, hand)]
            return np.concatenate(parts, 1)[:-1]

        found.put(("action",), "data/ctrl_arm+data/ctrl_ee", action)
        others = [each for each in leaves(trial) if not each[0].startswith("data/ctrl")]
        found.fill(others, ROBOSET_REAL, total - 1, total=total)
        found.end(total - 1, False, True)
    return found


# -- flat arrays, and a file an episode ------------------------------------------------------------


def d4rl(folder: Path, *, with_next: bool = True) -> Path:
    draw = np.random.default_rng(7)
    states = draw.normal(size=(11, 3)).astype("f4")
    inside = [0, 1, 2, 3, 5, 6, 7, 8]  # episodes of 4, of 4 and of 1
    with h5py.File(folder / "flat.hdf5", "w") as file:
        file["observations"] = np.concatenate([states[inside], draw.normal(size=(1, 3))]).astype(
            "f4"
        )
        if with_next:
            following = np.concatenate([states[np.add(inside, 1)], states[:1]])
            file["next_observations"] = following
        file["actions"] = draw.normal(size=(9, 2)).astype("f4")
        file["rewards"] = draw.normal(size=(9, 1))
        file["terminals"] = (np.arange(9) == 3) * 1.0
        file["timeouts"] = (np.arange(9) == 7) * 1.0
        file["infos/goal"] = draw.normal(size=(9, 2))
        file["metadata/weights"] = np.ones((2, 2))
    return folder / "flat.hdf5"


D4RL: Rules = {
    "observations": ("observation 0",),
    "next_observations": ("next/observation 0",),
    "actions": ("action 0",),
    "rewards": ("next/reward 0 column",),
    "infos/": ("info 0 fill",),
}


def d4rl_rows(file: h5py.File, names: list[str]) -> Rows:
    found, kept = Rows(), []
    arrays = dict(leaves(file, without="metadata"))
    total = len(arrays["actions"])
    over = native(arrays["terminals"]).reshape(total) != 0
    cut = over.copy()
    if "timeouts" in arrays:
        timed = native(arrays["timeouts"]).reshape(total) != 0
        cut |= timed
    else:
        timed = np.zeros(total, bool)
    has_next, rules = "next_observations" in arrays, D4RL
    if not has_next:
        rules = {**D4RL, "observations": ("observation 0", "next/observation held")}
    if has_next and (cut[:-1] & cut[1:]).any():
        # Flags are held: an episode ends where the next record starts from another state.
        arrived, after = native(arrays["next_observations"]), native(arrays["observations"])
        if arrived.shape == after.shape and arrived.dtype == after.dtype:
            for t in range(total - 1):
                cut[t] &= arrived[t].tobytes() != after[t + 1].tobytes()
    base = 0
    for stop in [*(np.flatnonzero(cut) + 1).tolist(), total]:
        records = stop - base
        if not records:
            continue
        is_open = not has_next and bool(over[stop - 1])
        rows = records - (not has_next and not is_open)
        if rows:
            kept.append((rows, is_open))
            found.fill(arrays.items(), rules, rows, total=total, base=base, stop=stop)
            ended = bool(over[stop - 1]), bool(timed[stop - 1])
            if rows < records:
                ended = False, True
            found.end(rows, ended[0], ended[1] or not ended[0])
        base = stop
    observe(found, kept)
    return found


def vd4rl(folder: Path) -> Path:
    draw = np.random.default_rng(8)
    kinds = np.array([0, 1, 2, 0, 1, 1, 2], "f4")
    with h5py.File(folder / "1.hdf5", "w") as file:
        file["observation"] = draw.integers(0, 256, (7, 3, 2, 2), np.uint8)
        file["action"] = draw.normal(size=(7, 2)).astype("f4")
        file["reward"] = draw.normal(size=7).astype("f4")
        file["discount"] = (np.arange(7) != 2).astype("f4")
        file["step_type"] = kinds
    return folder / "1.hdf5"


VD4RL: Rules = {
    "observation": ("observation 0", "next/observation 1"),
    "action": ("action 1",),
    "reward": ("next/reward 1 column",),
    "discount": ("next/discount 1 column",),
}


def vd4rl_rows(file: h5py.File, names: list[str]) -> Rows:
    found = Rows()
    kinds = np.rint(native(file["step_type"])).reshape(-1)
    discount = native(file["discount"]).reshape(-1)
    firsts = np.flatnonzero(kinds == 0).tolist()
    for base, stop in zip(firsts, [*firsts[1:], len(kinds)], strict=True):
        rows = stop - base - 1
        if not rows:
            continue
        found.fill(leaves(file), VD4RL, rows, base=base)
        over = bool(discount[stop - 1] == 0)
        found.end(rows, over, not over)
    return found


def aloha(folder: Path) -> Path:
    draw = np.random.default_rng(9)
    with h5py.File(folder / "episode_3.hdf5", "w") as file:
        file.attrs.update({"sim": True, "compress": False})
        file["action"] = draw.normal(size=(5, 4)).astype("f4")
        file["base_action"] = draw.normal(size=(5, 2)).astype("f4")
        file["observations/qpos"] = draw.normal(size=(5, 4)).astype("f4")
        file["observations/images/top"] = draw.integers(0, 256, (5, 2, 3, 3), np.uint8)
    return folder / "episode_3.hdf5"


ALOHA: Rules = {
    "observations*": ("observation 0", "next/observation 1"),
    "action": ("action 0",),
    "base_action": ("info/base_action 0 fill",),
}


def aloha_rows(file: h5py.File, names: list[str]) -> Rows:
    found, total = Rows(), len(file["action"])
    found.fill(leaves(file), ALOHA, total - 1, total=total)
    found.end(total - 1, False, True)
    return found


CORPORA = {
    "roboset": Corpus(known.ROBOHIVE, roboset, roboset_rows),
    "roboset-real": Corpus(known.ROBOSET_REAL, roboset_real, roboset_real_rows),
    "d4rl-v2": Corpus(known.D4RL, d4rl, d4rl_rows),
    "d4rl-v0": Corpus(known.D4RL, lambda folder: d4rl(folder, with_next=False), d4rl_rows),
    "minari": Corpus(known.MINARI, minari, minari_rows),
    "robomimic": Corpus(known.ROBOMIMIC, robomimic, robomimic_rows),
    "robosuite": Corpus(known.ROBOSUITE, robosuite, robosuite_rows),
    "libero": Corpus(known.LIBERO, libero, libero_rows),
    "isaaclab": Corpus(known.ISAACLAB, isaaclab, isaaclab_rows),
    "maniskill": Corpus(known.MANISKILL, maniskill, maniskill_rows),
    "vd4rl": Corpus(known.VD4RL, vd4rl, vd4rl_rows),
    "aloha": Corpus(known.ALOHA, aloha, aloha_rows),
}


def numbers_of(names: list[str]) -> list[int]:
    """The numbers that the names of episodes give them; their order where they give none."""
    found = [re.search(r"[0-9]+", name.rpartition("/")[2]) for name in names]
    numbers = [int(match[0]) for match in found if match]
    return numbers if len(set(numbers)) == len(names) else list(range(len(names)))
