"""Read trajectories of other libraries, and chunks, one by one."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch

from replaykit._compat import TensorDict, lookup
from replaykit.buffer import ReplayBuffer
from replaykit.declared import read_value
from replaykit.feeds.chunk_files import (
    FORMATS,
    ZIP_ERRORS,
    ChunkHeader,
    ChunkLayout,
    DamagedChunk,
    Partition,
    read_array,
    read_columns,
    read_header,
)
from replaykit.feeds.trajectory_folder import end_episodes
from replaykit.structure import from_numpy
from replaykit.ted import DONE, NEXT_FLAGS, TERMINATED, TRUNCATED, unravel

Array = np.ndarray[Any, Any]
Keys = Collection[Any] | None


@runtime_checkable
class TrajectorySource(Protocol):
    """Trajectories that can be read one by one, in full or in part.

    Example:
        >>> from replaykit import TrajectoryChunks, TrajectorySource
        >>> isinstance(TrajectoryChunks("no such folder"), TrajectorySource)
        True
    """

    def __len__(self) -> int:
        """Return the number of trajectories."""

    def length(self, number: int) -> int:
        """Return the number of rows of a trajectory."""

    def load(
        self, number: int, keys: Keys = None, start: int = 0, stop: int | None = None
    ) -> TensorDict:
        """Return the rows ``[start, stop)`` of a trajectory in TED, only with these keys."""

    def tags(self, number: int) -> Mapping[str, Any]:
        """Return facts about a trajectory.

        ``head`` is ``"reset"``, or ``"cut"`` if its first step is missing. ``tail`` is
        ``"terminated"``, ``"truncated"``, or ``"cut"`` if no flag ends its last row.
        """


def feed_trajectories(buffer: ReplayBuffer[Any, Any, Any, Any], source: TrajectorySource) -> int:
    """Store the trajectories of a source in a buffer; return the number of rows.

    The buffer is cut around a trajectory that no flag ends. If rows lack the ``lane_key`` of the
    storage, they get it: the ``identity`` among the tags, or else the number of the trajectory. So
    an EpisodeWriter stores each trajectory as an episode.

    Raises:
        ValueError, SchemaError: a trajectory cannot be read or stored. Those before it are stored.

    Example:
        >>> import tempfile, torch
        >>> from tensordict import TensorDict
        >>> from replaykit import LazyTensorStorage, ReplayBuffer, TrajectoryChunks
        >>> from replaykit import TrajectoryWriter, feed_trajectories
        >>> root = tempfile.mkdtemp()
        >>> done = torch.arange(6) % 3 == 2
        >>> with TrajectoryWriter(root) as writer:
        ...     writer.extend(TensorDict({"x": torch.arange(6), "next": {"done": done}}, [6]))
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100))
        >>> feed_trajectories(rb, TrajectoryChunks(root))
        6
        >>> rb.episodes.lengths.tolist()
        [3, 3]
    """
    count, is_open = 0, len(buffer) > 0
    lane_key = getattr(buffer.storage, "lane_key", None)
    for number in range(len(source)):
        tags, rows, lane = source.tags(number), source.load(number), None
        if lane_key is not None and lookup(rows, lane_key) is None:
            lane = int(tags.get("identity", number))
            rows.set(lane_key, torch.full((len(rows),), lane))
        if is_open or lane is not None:
            end_episodes(buffer, [lane], tags.get("head") != "cut")
        buffer.extend(rows)
        count += len(rows)
        is_open = tags.get("tail", "cut") == "cut"
        if is_open and lane is not None:
            end_episodes(buffer, [lane], True)
    if count and is_open:
        end_episodes(buffer, [None], True)
    return count


class TrajectoryChunks:
    """The chunks of a partition as a source, in the order of age.

    Args:
        root, partition: as for ``TrajectoryWriter``.

    Raises:
        ValueError: a file is damaged.

    A load of some keys and rows reads only the bytes of these, and verifies no checksum.

    Example:
        >>> import tempfile, torch
        >>> from tensordict import TensorDict
        >>> from replaykit import TrajectoryChunks, TrajectoryWriter
        >>> root = tempfile.mkdtemp()
        >>> with TrajectoryWriter(root) as writer:
        ...     writer.extend(TensorDict({"x": torch.arange(6), "y": torch.ones(6)}, [6]))
        >>> chunks = TrajectoryChunks(root)
        >>> len(chunks), chunks.length(0), chunks.load(0, ["x"], 2, 4)["x"].tolist()
        (1, 6, [2, 3])
    """

    def __init__(
        self, root: str | os.PathLike[str], partition: Literal["fifo", "protected"] = "fifo"
    ) -> None:
        folder = Path(root).expanduser() / read_value(Partition, partition, "partition")
        self._found: list[tuple[ChunkHeader, ChunkLayout, int, Path]] = []
        for path in sorted(folder.glob("[!.]*")):
            if path.suffix in FORMATS.values():
                with suppress(FileNotFoundError), _named(path):  # it may be evicted meanwhile
                    self._found.append((*read_header(str(path)), path))
        self._found.sort(key=lambda found: (found[0].written, found[0].stream, found[0].number))

    def __len__(self) -> int:
        """Return the number of chunks."""
        return len(self._found)

    def length(self, number: int) -> int:
        """Return the number of rows of a chunk."""
        return self._found[number][0].rows

    def load(
        self, number: int, keys: Keys = None, start: int = 0, stop: int | None = None
    ) -> TensorDict:
        """Return the rows ``[start, stop)`` of a chunk, only with these keys."""
        header, layout, first, path = self._found[number]
        wanted = None if keys is None else {unravel(key) for key in keys}
        first_row, until, _ = slice(start, stop).indices(header.rows)
        with _named(path):
            return read_columns(str(path), header, layout, first, wanted, first_row, until)

    def tags(self, number: int) -> Mapping[str, Any]:
        """Return the header of a chunk."""
        return self._found[number][0]._asdict()


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Name the file in the error of a damaged chunk."""
    try:
        yield
    except DamagedChunk as error:
        raise ValueError(f"{path}: {error}") from None


# -- AMAGO ----------------------------------------------------------------------------------------

_AMAGO_OBSERVATION: Final = "_OBS_KEY_"


class AmagoTrajectories:
    """The trajectories that AMAGO saved as ``npz``, compressed or not.

    Args:
        folder: the folder with the files, such as ``buffer/fifo`` of a data set.

    Observations have the keys ``("observation", name)``, or ``observation`` if that is the only
    name. ``goals``, if there are any, are observations of the same name at the
    root. ``time_idx`` is the step of the episode, int64 ``[n, 1]``. AMAGO saves terminations only;
    the last row of a trajectory without one is cut.

    Raises:
        ValueError: the folder holds ``.traj`` files, which are pickles; or the lengths of arrays
            contradict one another, or an array is missing. The error names file and array.
        FileNotFoundError: there is no such folder.

    Example:
        >>> import tempfile, numpy as np
        >>> from replaykit import AmagoTrajectories
        >>> folder = tempfile.mkdtemp()
        >>> np.savez(f"{folder}/a.npz", _OBS_KEY_observation=np.arange(3.0), actions=np.ones(2),
        ...          rews=np.ones((2, 1)), dones=np.array([[0], [1]]), time_idxs=np.arange(3))
        >>> source = AmagoTrajectories(folder)
        >>> source.load(0)["next", "observation"].tolist(), source.tags(0)["tail"]
        ([1.0, 2.0], 'terminated')
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        names = sorted(os.listdir(folder))
        self._files = [Path(folder) / name for name in names if name.endswith(".npz")]
        pickles = [name for name in names if name.endswith(".traj")]
        if pickles:
            raise ValueError(
                f"{Path(folder) / pickles[0]} is a pickle, which is not read; let AMAGO save "
                "trajectories with save_trajs_as='npz'"
            )

    def __len__(self) -> int:
        """Return the number of files."""
        return len(self._files)

    def length(self, number: int) -> int:
        """Return the number of rows of a trajectory: one less than its observations."""
        with _opened(self._files[number]) as file:
            return len(read_array(file, "rews"))

    def load(
        self, number: int, keys: Keys = None, start: int = 0, stop: int | None = None
    ) -> TensorDict:
        """Return the rows ``[start, stop)`` of a trajectory in TED."""
        with _opened(self._files[number]) as file:
            names = [name.removesuffix(".npy") for name in file.namelist()]
            count = len(read_array(file, "rews"))
            low, high, _ = slice(start, stop).indices(count)

            def part(name: str, more: int = 0, shift: int = 0) -> Callable[[], Array]:
                bounds = low + shift, max(low, high) + shift
                return partial(read_array, file, name, *bounds, count + more)

            rows: dict[Any, Callable[[], Array]] = {
                ("action",): part("actions"),
                ("next", "reward"): part("rews"),
                ("next", "terminated"): part("dones"),
            }
            state: dict[Any, str] = {("goals",): "goals"} if "goals" in names else {}
            seen = [name for name in names if name.startswith(_AMAGO_OBSERVATION)]
            for name in seen:
                key = ("observation", name.removeprefix(_AMAGO_OBSERVATION))
                state[key[:1] if len(seen) == 1 and key[0] == key[1] else key] = name
            for at, name in state.items():
                after = ("next", *at)
                rows[at], rows[after] = part(name, 1), part(name, 1, 1)
            rows["time_idx",] = lambda: part("time_idxs", 1)().reshape(-1, 1)
            return _ted(rows, keys)

    def tags(self, number: int) -> Mapping[str, Any]:
        """Return ``head``, ``tail`` and the name of the ``file``."""
        path = self._files[number]
        with _opened(path) as file:
            first = int(read_array(file, "time_idxs", 0, 1).reshape(-1)[0])
            ended = bool(read_array(file, "dones")[-1:].any())
        head, tail = "cut" if first else "reset", "terminated" if ended else "cut"
        return {"head": head, "tail": tail, "file": path.name}


# -- Emote ----------------------------------------------------------------------------------------


class EmoteTable:
    """The episodes of a memory table that Emote stored, a zip file of version 1.

    Args:
        path: the file.
        actions, rewards: the names of these columns.

    Columns with one value more than the actions are observations. Other columns with as many values
    keep their name. Columns with one value are tags. The tag ``terminal`` is Emote's mask: 1.0 for
    an interrupted episode, whose last row is truncated. All other episodes are terminated.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is no such table, has another version, or its columns contradict one
            another. The error names file and column.

    Example:
        >>> import json, tempfile, zipfile, numpy as np
        >>> from replaykit import EmoteTable
        >>> path = tempfile.mkdtemp() + "/table.zip"
        >>> columns = {"obs": 3, "actions": 2, "rewards": 2}
        >>> with zipfile.ZipFile(path, "w") as file:
        ...     file.writestr("version", "1")
        ...     parts = {"ids": [7], "part_keys": list(columns)}
        ...     file.writestr("configuration.json", json.dumps(parts))
        ...     for name, count in columns.items():
        ...         for key, values in ((name, range(count)), (f"{name}.ranges", [(7, 0, count)])):
        ...             with file.open(f"{key}.npy", "w") as member:
        ...                 np.save(member, np.array(values))
        >>> EmoteTable(path).load(0)["next", "observation", "obs"].tolist()
        [1, 2]
    """

    def __init__(
        self, path: str | os.PathLike[str], *, actions: str = "actions", rewards: str = "rewards"
    ) -> None:
        self._path, self._actions, self._rewards = Path(path), actions, rewards
        try:
            with zipfile.ZipFile(path) as file:
                names = file.namelist()
                if "data.pickle" in names:
                    raise ValueError("it is of the pickled version, which is not read")
                version = file.read("version").decode() if "version" in names else "unknown"
                if version != "1":
                    raise ValueError(f"expected version 1, got {version}")
                found = json.loads(file.read("configuration.json"))
                self._columns: list[str] = list(found["part_keys"])
                self._ids: list[int] = [int(number) for number in found["ids"]]
                kinds = {name: kind for name, kind, *_ in found.get("columns", ())}
                self._tags = {name for name, kind in kinds.items() if kind == "TagColumn"}
                self._ranges = {
                    name: {int(own): (int(first), int(size)) for own, first, size in ranges}
                    for name in self._columns
                    for ranges in (read_array(file, f"{name}.ranges"),)
                }
        except (*ZIP_ERRORS, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is no table of Emote: {error}") from None
        for name in (actions, rewards):
            if name not in self._columns:
                raise ValueError(f"{path} has no column {name!r}, only {self._columns}")

    def __len__(self) -> int:
        """Return the number of episodes."""
        return len(self._ids)

    def length(self, number: int) -> int:
        """Return the number of rows of an episode."""
        return self._range(self._actions, number)[1]

    def _range(self, name: str, number: int) -> tuple[int, int]:
        found = self._ranges[name].get(self._ids[number])
        if found is None:
            raise ValueError(f"{self._path}: column {name!r} lacks episode {self._ids[number]}")
        return found

    def load(
        self, number: int, keys: Keys = None, start: int = 0, stop: int | None = None
    ) -> TensorDict:
        """Return the rows ``[start, stop)`` of an episode in TED."""
        count = self.length(number)
        first_row, until, _ = slice(start, stop).indices(count)
        names = {self._actions: ("action",), self._rewards: ("next", "reward")}
        truncated = self.tags(number)["tail"] == "truncated"
        last = np.arange(first_row, until) == count - 1
        rows: dict[Any, Callable[[], Array]] = {
            ("next", "terminated"): lambda: last & (not truncated),
            ("next", "truncated"): lambda: last & truncated,
        }
        ranges = {name: self._range(name, number) for name in self._columns}
        with _opened(self._path) as file:
            for name, (first, size) in ranges.items():
                read = partial(read_array, file, name)
                at, stop_at = first + first_row, first + until
                if size == count and name not in self._tags:
                    rows[names.get(name, (name,))] = partial(read, at, stop_at)
                elif size == count + 1 and name not in names:
                    rows["observation", name] = partial(read, at, stop_at)
                    rows["next", "observation", name] = partial(read, at + 1, stop_at + 1)
                elif size != 1 or name in names:
                    raise ValueError(
                        f"column {name!r} has {size} values in episode {self._ids[number]}, "
                        f"expected {count} or {count + 1}"
                    )
            return _ted(rows, keys)

    def tags(self, number: int) -> Mapping[str, Any]:
        """Return ``head``, ``tail``, the ``identity`` and Emote's own tags."""
        count, found = self.length(number), {}
        ranges = {name: self._range(name, number) for name in self._columns}
        with _opened(self._path) as file:
            for name, (first, size) in ranges.items():
                if size == 1 and (count > 1 or name in self._tags):
                    found[name] = read_array(file, name, first, first + 1)[0].tolist()
        tail = "truncated" if found.get("terminal") else "terminated"
        return {**found, "head": "reset", "tail": tail, "identity": self._ids[number]}


# -- ALF ------------------------------------------------------------------------------------------

_LAST: Final = 2
"""ALF's number of the last step of an episode; 0 is the first."""


class _Span(NamedTuple):
    lane: int
    first: int
    rows: int
    head: str


class AlfCheckpoint:
    """The trajectories of a replay buffer in a checkpoint of ALF.

    Args:
        path: the file, which ``torch.save`` wrote. Only tensors and plain containers are read.
        buffer: the begin of the buffer's names in the checkpoint, if it has several buffers.

    ALF stores a step with the reward of the action before it. So n rows come from n + 1 steps. The
    keys are ``observation``, ``action`` and, under ``next``, ``observation``, ``reward`` and flags.
    Terminated is a discount of 0, truncated is a last step with another discount.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file has no buffer, several buffers, or other objects than tensors.

    The constructor reads the whole file.

    Example:
        >>> import tempfile, torch
        >>> from replaykit import AlfCheckpoint
        >>> steps = {"observation": [0.0, 1.0, 2.0], "reward": [0.0, 5.0, 6.0],
        ...          "discount": [1.0, 1.0, 0.0], "step_type": [0, 1, 2]}
        >>> state = {f"buffer.{name}": torch.tensor([values]) for name, values in steps.items()}
        >>> state |= {f"buffer._current_{name}": torch.tensor([3]) for name in ("pos", "size")}
        >>> path = tempfile.mkdtemp() + "/ckpt"
        >>> torch.save(state, path)
        >>> AlfCheckpoint(path).load(0)["next", "reward"].flatten().tolist()
        [5.0, 6.0]
    """

    def __init__(self, path: str | os.PathLike[str], *, buffer: str | None = None) -> None:
        try:
            found = torch.load(path, map_location="cpu", weights_only=True)
        except FileNotFoundError:
            raise
        except Exception as error:  # torch has no class for a refused pickle
            raise ValueError(f"{path} is no checkpoint of tensors: {error}") from None
        tensors = dict(_tensors(found, ""))
        ends = [name for name in tensors if name.endswith("_current_pos")]
        prefixes = [name.removesuffix("_current_pos") for name in ends]
        if buffer is not None:
            prefixes = [prefix for prefix in prefixes if prefix.startswith(buffer)]
        if len(prefixes) != 1:
            raise ValueError(
                f"expected one buffer in {path}, got {prefixes}; name one with buffer="
            )
        self._path, prefix = path, prefixes[0]
        own = {
            name[len(prefix) :]: value for name, value in tensors.items() if name.startswith(prefix)
        }
        self._columns: dict[Any, torch.Tensor] = {}
        for name, value in own.items():
            parts = tuple(part for part in name.split("|") if part != "time_step")
            if parts[0] in ("observation", "action", "reward", "discount", "step_type"):
                self._columns[parts] = value
        for part in ("reward", "discount", "step_type", "_current_size"):
            if (part,) not in self._columns and part not in own:
                raise ValueError(f"{path}: the buffer {prefix!r} has no column {part!r}")
        self._spans = list(self._found(own["_current_pos"], own["_current_size"]))

    def _found(self, ends: torch.Tensor, sizes: torch.Tensor) -> Iterable[_Span]:
        """Yield the runs of steps whose pairs are rows."""
        kinds = self._columns["step_type",]
        slots = kinds.shape[1]
        for lane, (end, size) in enumerate(zip(ends.tolist(), sizes.tolist(), strict=True)):
            steps = torch.arange(end - size, end)
            kind = kinds[lane, steps % slots]
            # A run ends with a last step, or before a first one.
            breaks = (kind[:-1] == _LAST) | (kind[1:] == 0)
            bounds = [0, *(breaks.nonzero().flatten() + 1).tolist(), size]
            for low, high in pairwise(bounds):
                if high - low > 1:
                    head = "reset" if kind[low] == 0 else "cut"
                    yield _Span(lane, end - size + low, high - low - 1, head)

    def __len__(self) -> int:
        """Return the number of trajectories."""
        return len(self._spans)

    def length(self, number: int) -> int:
        """Return the number of rows of a trajectory."""
        return self._spans[number].rows

    def load(
        self, number: int, keys: Keys = None, start: int = 0, stop: int | None = None
    ) -> TensorDict:
        """Return the rows ``[start, stop)`` of a trajectory in TED."""
        lane, first, count, _ = self._spans[number]
        low, high, _ = slice(start, stop).indices(count)
        steps = torch.arange(first + low, first + max(low, high) + 1)
        steps %= self._columns["reward",].shape[1]

        def part(key: Any, which: torch.Tensor) -> Callable[[], torch.Tensor]:
            return lambda: self._columns[key][lane, which]

        terminated = part(("discount",), steps[1:])() == 0
        last = part(("step_type",), steps[1:])() == _LAST
        rows: dict[Any, Callable[[], Any]] = {
            ("next", "reward"): part(("reward",), steps[1:]),
            ("next", "terminated"): lambda: terminated,
            ("next", "truncated"): lambda: last & ~terminated,
        }
        for key in self._columns:
            if key[0] in ("observation", "action"):
                rows[key] = part(key, steps[:-1])
            if key[0] == "observation":
                after = ("next", *key)
                rows[after] = part(key, steps[1:])
        return _ted(rows, keys)

    def tags(self, number: int) -> Mapping[str, Any]:
        """Return ``head``, ``tail``, the ``lane`` and the ``position`` of the first step."""
        lane, first, count, head = self._spans[number]
        last = self.load(number, start=count - 1)["next"]
        tail = "terminated" if last["terminated"].any() else "cut"
        tail = "truncated" if last["truncated"].any() else tail
        return {"head": head, "tail": tail, "lane": lane, "position": first}


def _tensors(value: Any, name: str) -> Iterable[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, own in value.items():
            yield from _tensors(own, f"{name}.{key}" if name else str(key))


# -- shared ---------------------------------------------------------------------------------------


@contextmanager
def _opened(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open a zip file. Errors in its content are ValueErrors that name the file."""
    try:
        with zipfile.ZipFile(path) as file:
            yield file
    except (*ZIP_ERRORS, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None


_COLUMNS: Final = (("next", "reward"), *NEXT_FLAGS)
"""Keys of columns ``[n, 1]``."""


def _ted(rows: Mapping[Any, Callable[[], Any]], keys: Keys) -> TensorDict:
    """Return rows in TED, of which only the wanted columns are read."""
    wanted = None if keys is None else {unravel(key) for key in keys}
    known = {*rows, DONE}
    if wanted is not None and not wanted <= known:
        raise KeyError(f"expected keys among {sorted(known)}, got {sorted(wanted - known)}")
    found: dict[Any, torch.Tensor] = {}

    def column(key: Any) -> torch.Tensor:
        value = rows[key]() if key in rows else np.zeros(len(rows[TERMINATED]()), bool)
        tensor = value if isinstance(value, torch.Tensor) else from_numpy(value, key)
        if key in _COLUMNS and tensor.ndim == 1:
            tensor = tensor.unsqueeze(1)
        return tensor.bool() if key in NEXT_FLAGS else tensor

    for key in (*rows, TRUNCATED, DONE):
        if (wanted is None or key in wanted) and key not in found:
            done = key == DONE
            found[key] = column(TERMINATED) | column(TRUNCATED) if done else column(key)
    count = len(next(iter(found.values())))
    data = TensorDict({}, [count])
    for key, values in found.items():
        data.set(key, values)
    return data
