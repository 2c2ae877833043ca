"""A small file of each family, and its rows computed with h5py and NumPy alone.

The rows are those of the alignment tables of the families, written down here a second time: nothing
of the engine is used for them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
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

    def take(
        self,
        key: Key,
        path: str,
        node: Any,
        first: int,
        rows: int,
        *,
        column: bool = False,
        dtype: Any = None,
        total: int | None = None,
    ) -> None:
        """``rows`` records of a dataset from ``first`` on; ``total``: how many it should have, or
        it is one value for all of them."""

        def piece() -> np.ndarray:
            values = native(node)
            if total is not None and values.shape[:1] != (total,):
                values = np.broadcast_to(values, (total, *values.shape[1:]))
            found = values[first : first + rows]
            if column:
                found = found.reshape(rows, -1) if found.size == rows else found
            if dtype is not None:
                found = found != 0 if dtype == "bool" else found.astype(dtype)
            return found

        self.put(key, path, piece)

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


def groups(written: list[str]) -> list[str]:
    return [name for name in written if name]


# -- groups, a field each --------------------------------------------------------------------------


def roboset(folder: Path) -> Path:
    with RoboHiveWriter(folder / "trace.h5") as writer:
        for seed, records in enumerate((5, 3)):
            trial = make_trial(records, seed=seed, terminated=seed == 1)
            trial["env_infos"]["once"] = np.array([2.5])
            writer.add_trial(**trial)
    return folder / "trace.h5"


def roboset_rows(file: h5py.File, names: list[str]) -> Rows:
    found = Rows()
    for name in names:
        trial = file[name]
        total = len(trial["actions"])
        rows = total - 1
        for path, node in leaves(trial):
            if path == "observations":
                found.take(("observation",), path, node, 0, rows)
                found.take(("next", "observation"), path, node, 1, rows)
            elif path in ("actions", "time"):
                found.take((path.removesuffix("s"),), path, node, 0, rows)
            elif path == "rewards":
                found.take(("next", "reward"), path, node, 1, rows, column=True)
            elif path.startswith("env_infos/"):
                key = ("info", *path.split("/")[1:])
                found.take(key, path, node, 0, rows, total=total)
                found.take(("next", *key), path, node, 1, rows, total=total)
        done = native(trial["done"]).reshape(total)[-1] != 0
        tailed = np.isnan(native(trial["actions"])[-1]).all()
        found.end(rows, bool(done), not (done and tailed))
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


def minari_rows(file: h5py.File, names: list[str]) -> Rows:
    return final_state_rows(
        file,
        names,
        clock="rewards",
        states={"observations": ("observation",), "infos": ("info",)},
        flags=("terminations", "truncations"),
    )


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
        {"episode_id": number, "elapsed_steps": steps, "episode_seed": 0}
        for number, steps in ((0, 3), (2, 4))
    ]
    (folder / "trajectory.json").write_text(json.dumps({"episodes": episodes}))
    return folder / "trajectory.h5"


def maniskill_rows(file: h5py.File, names: list[str]) -> Rows:
    has_observations = "obs" in file[names[0]]
    states = {"obs": ("observation",), "env_states": ("state",)}
    if not has_observations:
        states = {"env_states": ("observation",)}
    return final_state_rows(
        file,
        names,
        clock="actions",
        states=states,
        flags=("terminated", "truncated"),
        outcomes=("success", "fail"),
    )


def final_state_rows(
    file: h5py.File,
    names: list[str],
    *,
    clock: str,
    states: dict[str, Key],
    flags: tuple[str, str],
    outcomes: tuple[str, ...] = (),
) -> Rows:
    """T steps and T + 1 states."""
    found = Rows()
    for name in names:
        group = file[name]
        steps = len(group[clock])
        for path, node in leaves(group):
            root, *rest = path.split("/")
            if root in states:
                key = (*states[root], *rest)
                found.take(key, path, node, 0, steps, total=steps + 1)
                found.take(("next", *key), path, node, 1, steps, total=steps + 1)
            elif root == "actions":
                found.take(("action", *rest), path, node, 0, steps)
            elif path == "rewards":
                total = steps if clock == "actions" else None
                found.take(("next", "reward"), path, node, 0, steps, column=True, total=total)
            elif path in outcomes:
                key = ("next", path)
                found.take(key, path, node, 0, steps, column=True, dtype="bool", total=steps)
        ended = [bool(native(group[flag]).reshape(steps)[-1] != 0) for flag in flags]
        found.end(steps, ended[0], ended[1] or not ended[0])
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


def robomimic_rows(file: h5py.File, names: list[str]) -> Rows:
    found = Rows()
    # A file without next observations: the record after, and a last one that is not known.
    has_next = "next_obs" in file[names[0]]
    kept = []
    for name in names:
        demo = file[name]
        steps = len(demo["actions"])
        solved = bool(native(demo["dones"]).reshape(steps)[-1] != 0)
        rows = steps - (not has_next and not solved)
        kept.append((rows, not has_next and solved))
        for path, node in leaves(demo):
            root, *rest = path.split("/")
            if root == "obs":
                found.take(("observation", *rest), path, node, 0, rows)
                if not has_next:
                    found.put(
                        ("next", "observation", *rest),
                        path,
                        lambda node=node, rows=rows: held(native(node)[1:], native(node), rows),
                    )
            elif root == "next_obs":
                if has_next:  # else it is reported as left out
                    found.take(("next", "observation", *rest), path, node, 0, rows)
            elif path in ("actions", "states"):
                total = steps if path == "states" else None
                found.take((path.removesuffix("s"),), path, node, 0, rows, total=total)
            elif path == "rewards":
                found.take(("next", "reward"), path, node, 0, rows, column=True)
            elif path == "dones":
                key = ("next", "success")
                found.take(key, path, node, 0, rows, column=True, dtype="bool")
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


def robosuite_rows(file: h5py.File, names: list[str]) -> Rows:
    found = Rows()
    for name in names:
        demo = file[name]
        rows = len(demo["states"]) - 1
        for path, node in leaves(demo):
            if path == "states":
                found.take(("observation", "state"), path, node, 0, rows)
                found.take(("next", "observation", "state"), path, node, 1, rows)
            elif path == "actions":
                found.take(("action",), path, node, 0, rows)
            else:
                found.take(("info", *path.split("/")), path, node, 0, rows, total=rows + 1)
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


def libero_rows(file: h5py.File, names: list[str]) -> Rows:
    found = Rows()
    for name in names:
        demo = file[name]
        total = len(demo["actions"])
        rows = total - 1
        for path, node in leaves(demo):
            root, *rest = path.split("/")
            if root == "obs" or path == "robot_states":
                key = ("observation", *rest) if root == "obs" else ("info", "robot_states")
                optional = total if root != "obs" else None
                found.take(key, path, node, 0, rows, total=optional)
                found.take(("next", *key), path, node, 1, rows, total=optional)
            elif path == "states":
                found.take(("state",), path, node, 1, rows, total=total)
            elif path == "actions":
                found.take(("action",), path, node, 1, rows)
            elif path == "rewards":
                key = ("next", "reward")
                found.take(key, path, node, 1, rows, column=True, dtype="f4")
        over = bool(native(demo["dones"]).reshape(total)[-1] != 0)
        found.end(rows, over, not over)
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


def isaaclab_rows(file: h5py.File, names: list[str]) -> Rows:
    found, kept = Rows(), []
    for name in names:
        demo = file[name]
        steps = len(demo["actions"])
        solved = bool(demo.attrs.get("success", False))
        rows = steps - 1 + solved
        kept.append((rows, solved))
        for path, node in leaves(demo):
            root, *rest = path.split("/")
            if root == "obs":
                found.take(("observation", *rest), path, node, 0, rows)
                found.put(
                    ("next", "observation", *rest),
                    path,
                    lambda node=node, rows=rows: held(native(node)[1:], native(node), rows),
                )
            elif path == "actions":
                found.take(("action",), path, node, 0, rows)
            elif root == "states":
                first = demo["/".join(["initial_state", *rest])]

                def states(node: Any = node, first: Any = first) -> np.ndarray:
                    return np.concatenate([native(first), native(node)])

                for key, start in ((("state", *rest), 0), (("next", "state", *rest), 1)):
                    found.put(
                        key,
                        path,
                        lambda start=start, rows=rows, states=states: states()[
                            start : start + rows
                        ],
                    )
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


def roboset_real_rows(file: h5py.File, names: list[str]) -> Rows:
    found = Rows()
    for name in names:
        trial = file[name]
        total = len(trial["data/ctrl_arm"])
        rows = total - 1
        arm, hand = trial["data/ctrl_arm"], trial["data/ctrl_ee"]

        def action(arm: Any = arm, hand: Any = hand, total: int = total) -> np.ndarray:
            parts = [native(part).reshape(total, -1) for part in (arm, hand)]
            return np.concatenate(parts, 1)[:-1]

        found.put(("action",), "data/ctrl_arm+data/ctrl_ee", action)
        for path, node in leaves(trial):
            if path == "data/time":
                found.take(("time",), path, node, 0, rows, total=total)
            elif path == "data/user":
                found.take(("info", "user"), path, node, 0, rows, total=total)
            elif path.startswith("data/") and not path.startswith("data/ctrl"):
                key = ("observation", *path.split("/")[1:])
                is_flat = node.ndim == 1
                found.take(key, path, node, 0, rows, column=is_flat)
                found.take(("next", *key), path, node, 1, rows, column=is_flat)
            elif path.startswith("derived/"):
                key = ("info", *path.split("/")[1:])
                found.take(key, path, node, 0, rows, total=total)
                found.take(("next", *key), path, node, 1, rows, total=total)
            elif path == "config/solved":
                found.take(("info", "solved"), path, node, 0, rows, total=total)
        found.end(rows, False, True)
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
    has_next = "next_observations" in arrays
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
            for path, node in arrays.items():
                if path == "observations":
                    found.take(("observation",), path, node, base, rows)
                if path == "next_observations":
                    found.take(("next", "observation"), path, node, base, rows)
                elif path == "observations" and not has_next:

                    def after(node: Any = node, a: int = base, b: int = stop, n: int = rows) -> Any:
                        values = native(node)[a:b]
                        return held(values[1:], values, n)

                    found.put(("next", "observation"), path, after)
                elif path == "actions":
                    found.take(("action",), path, node, base, rows)
                elif path == "rewards":
                    found.take(("next", "reward"), path, node, base, rows, column=True)
                elif path.startswith("infos/"):
                    key = ("info", *path.split("/")[1:])
                    found.take(key, path, node, base, rows, total=total)
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


def vd4rl_rows(file: h5py.File, names: list[str]) -> Rows:
    found = Rows()
    kinds = np.rint(native(file["step_type"])).reshape(-1)
    discount = native(file["discount"]).reshape(-1)
    firsts = np.flatnonzero(kinds == 0).tolist()
    for base, stop in zip(firsts, [*firsts[1:], len(kinds)], strict=True):
        rows = stop - base - 1
        if not rows:
            continue
        found.take(("observation",), "observation", file["observation"], base, rows)
        found.take(("next", "observation"), "observation", file["observation"], base + 1, rows)
        found.take(("action",), "action", file["action"], base + 1, rows)
        for name in ("reward", "discount"):
            found.take(("next", name), name, file[name], base + 1, rows, column=True)
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


def aloha_rows(file: h5py.File, names: list[str]) -> Rows:
    found = Rows()
    total = len(file["action"])
    rows = total - 1
    for path, node in leaves(file):
        root, *rest = path.split("/")
        if root == "observations":
            found.take(("observation", *rest), path, node, 0, rows)
            found.take(("next", "observation", *rest), path, node, 1, rows)
        elif path == "action":
            found.take(("action",), path, node, 0, rows)
        elif path == "base_action":
            found.take(("info", "base_action"), path, node, 0, rows, total=total)
    found.end(rows, False, True)
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
