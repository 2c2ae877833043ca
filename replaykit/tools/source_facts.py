"""Information about data sets, H5 files and tables; repairs of tables."""

from __future__ import annotations

import copy
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from replaykit.datasets.converting import convert
from replaykit.datasets.engine.conversion import ConvertOptions, ensure_dataset
from replaykit.datasets.engine.conversion_report import lines_of
from replaykit.datasets.engine.episode_finders import natural_key
from replaykit.datasets.engine.h5 import H5File, H5Leaf, open_h5
from replaykit.datasets.engine.layout import Layout
from replaykit.datasets.engine.locations import RuleFindings
from replaykit.datasets.engine.plan import H5Plan
from replaykit.datasets.engine.policies import Judge, Policies
from replaykit.datasets.engine.table_sources import TableLayout, ValueChecks
from replaykit.datasets.publishing import Published, open_published
from replaykit.datasets.sources import files_below
from replaykit.errors import CorpusError
from replaykit.tools.facts import (
    EpisodeFacts,
    Facts,
    Finding,
    KeyFacts,
    LayoutGuess,
    Table,
    counted,
    evenly,
    measured,
    table_of,
)
from replaykit.tools.layouts import (
    guess_layout,
    layout_named,
    scan_files,
    table_layout_of,
    unread_sources,
)


def corpus_facts(path: Path) -> tuple[Facts, Table]:
    """Return information about a data set, and its table.

    Statistics cover all values, because the conversion has computed them. Cost: O(E). No column is
    read.

    Raises:
        FileNotFoundError: the path does not exist.
        RuntimeError: the path is not a complete data set.
    """
    published = open_published(path)
    manifest = published.manifest
    rows = int(np.prod(manifest.batch))
    keys = []
    for array in (*manifest.arrays, *manifest.finals):
        shape, dtype = array.shape[len(manifest.batch) :], str(array.dtype).removeprefix("torch.")
        if "frames" in array.facts:  # the column has references, which reads replace by pixels
            shape, dtype = tuple(array.facts["frames"]["shape"]), "uint8"
        keys.append(
            KeyFacts(
                "/".join(array.key),
                shape,
                dtype,
                rows,
                array.facts.get("statistics"),
                rows if "statistics" in array.facts else 0,
                _source(array.facts),
            )
        )
    about: dict[str, Any] = {
        "layout": f"{manifest.converter.get('name')} {manifest.converter.get('version')}",
        "content": manifest.content_id()[:16],
        "made": f"{manifest.made.get('time')} by {manifest.made.get('library')} "
        f"{manifest.made.get('version')}",
        "source": _origin(manifest.source),
    }
    if manifest.identity.get("dataset_id"):
        about = {"data set": manifest.identity["dataset_id"], **about}
    splits = manifest.report.get("splits") or {}
    if splits:
        about["splits"] = ", ".join(f"{name} ({len(of)})" for name, of in splits.items())
    if len(manifest.batch) > 1:
        about["form"] = f"split trajectories {list(manifest.batch)}, padded with zeros"
    nbytes = sum(size for _, size, _ in manifest.files())
    return (
        Facts(
            "corpus",
            str(path),
            int(published.episodes["length"].sum()),
            nbytes,
            about,
            tuple(keys),
            _episodes(published),
            tuple(lines_of(manifest.report)),
        ),
        _table(published),
    )


def _source(facts: Any) -> str | None:
    if "source" not in facts:
        return None
    if facts.get("one_per_episode"):
        return f"{facts['source']}, one an episode"
    shift = facts.get("shift", 0)
    return f"{facts['source']}[t{f'{shift:+d}' if shift else ''}]"


def _origin(source: Any) -> str:
    origin, files = source.get("origin", {}), source.get("files", [])
    size = sum(file["size"] for file in files)
    where = "local files"
    if origin.get("repository"):
        where = f"{origin['repository']} at {str(origin.get('commit'))[:12]}"
    elif origin.get("url"):
        where = str(origin["url"])
    return f"{where}: {counted(len(files), 'file')}, {size:,} bytes"


def _episodes(published: Published) -> EpisodeFacts:
    table = published.episodes
    terminated = table["terminated"].tolist()
    truncated = table["truncated"].tolist()
    ends = tuple(
        " and ".join(name for name, is_set in (("terminated", a), ("truncated", b)) if is_set)
        or "open"
        for a, b in zip(terminated, truncated, strict=True)
    )
    has_rewards = ("next", "reward") in published.columns
    returns = table["return"].numpy().astype(np.float64) if has_rewards else None
    return EpisodeFacts(table["length"].numpy(), ends, returns, tuple(published.groups()))


def _table(published: Published) -> Table:
    starts = published.episodes["start"].numpy()
    lengths = published.episodes["length"].numpy()
    batch = published.manifest.batch

    def rows_of(number: int) -> npt.NDArray[np.int64]:
        first = starts[number] if len(batch) == 1 else number * batch[1]
        return np.arange(first, first + lengths[number])

    leaves = {
        key: (values, values.shape[len(batch) :], values.dtype)
        for key, values in published.columns.items()
    }
    return table_of(leaves, batch, len(starts), rows_of)


Array = npt.NDArray[Any]

_NUMBER: Final = re.compile(r"[0-9]+")


class OpenFiles(ExitStack):
    """A context manager of H5 files, of which at most one is open."""

    _path: Path | None = None

    def get(self, path: Path) -> H5File:
        """Return an open file, which is closed when another file is requested.

        Raises:
            CorpusError: the file is not HDF5, or damaged.
        """
        if path != self._path:
            self._path = None
            self.close()
            self._file = self.enter_context(open_h5(path))
            self._path = path
        return self._file


@dataclass(frozen=True)
class H5Piece:
    """A dataset, or the records of one episode in a dataset."""

    path: Path
    dataset: str
    start: int
    rows: int


@dataclass
class H5Column:
    """The datasets whose paths match one pattern, as one column.

    Attributes:
        files: the open files.
        pattern: the path of the datasets, with ``*`` for the numbers in which they differ.
        shape: the shape of one record.
        dtype: the dtype of the values.
        problem: the reason why the values are not numbers; ``None`` if they are.
        pieces: the datasets, in the order of files and names.
        cuts: the records of each episode; ``None`` if each piece is one episode.
        differs: the number of datasets that are left out because their shape or type differs.
    """

    files: OpenFiles
    pattern: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    problem: str | None = None
    pieces: list[H5Piece] = field(default_factory=list)
    cuts: list[H5Piece] | None = None
    differs: int = 0

    @property
    def rows(self) -> int:
        """The total number of records of the pieces."""
        return sum(piece.rows for piece in self.pieces)

    @cached_property
    def _starts(self) -> Array:
        return np.cumsum([0, *(piece.rows for piece in self.pieces)])

    def read(self, start: int, stop: int) -> Array:
        """Return records of the column, which may be in several pieces."""
        found = []
        number = int(np.searchsorted(self._starts, start, "right")) - 1
        while start < stop:
            piece, base = self.pieces[number], int(self._starts[number])
            end = min(stop, base + piece.rows)
            if end > start:
                found.append(self._read(piece, start - base, end - base))
            start, number = end, number + 1
        return np.concatenate(found) if found else np.empty((0, *self.shape), self.dtype)

    def episode(self, number: int, most: int) -> Array:
        """Return at most ``most`` evenly spaced records of an episode, in about eight reads."""
        parts = self.pieces if self.cuts is None else self.cuts
        if number >= len(parts):
            return np.empty((0, *self.shape), self.dtype)
        piece = parts[number]
        if piece.rows <= most:
            return self._read(piece, 0, piece.rows)
        length = max(1, most // 8)
        starts = evenly(np.arange(piece.rows - length + 1), max(1, most // length))
        return np.concatenate([self._read(piece, int(at), int(at) + length) for at in starts])

    def _read(self, piece: H5Piece, start: int, stop: int) -> Array:
        file = self.files.get(piece.path)
        block = file.read(piece.dataset, piece.start + start, piece.start + stop)
        return block.reshape(stop - start, *self.shape)


def found_columns(files: OpenFiles, paths: Sequence[Path]) -> dict[str, H5Column]:
    """Return the datasets of files as columns, by pattern.

    In a pattern, ``*`` replaces the numbers in the names of the two outer groups. Numbers below
    these groups stay, because they distinguish keys. Cost: every dataset is opened once, and none
    is read.
    """
    found: dict[str, H5Column] = {}
    for path in paths:
        for leaf in sorted(_leaves(files.get(path)), key=lambda leaf: natural_key(leaf.path)):
            *groups, name = leaf.path.split("/")
            outer = [_NUMBER.sub("*", group) for group in groups[:2]]
            _add(found, files, path, leaf, "/".join([*outer, *groups[2:], name]))
    return found


def _leaves(file: H5File) -> Iterator[H5Leaf]:
    # Each group has a separate walk, because the number of entries in a walk is limited.
    groups = [member.name for member in file.members() if member.is_group]
    for group in groups:
        children = list(file.members(group))
        walks = [group]
        if children and all(child.is_group for child in children):
            walks = [f"{group}/{child.name}" for child in children]
        for walk in walks:
            yield from (replace(leaf, path=f"{walk}/{leaf.path}") for leaf in file.leaves(walk))
    yield from file.leaves("", without=groups)


def _add(
    found: dict[str, H5Column], files: OpenFiles, path: Path, leaf: H5Leaf, pattern: str
) -> None:
    rows = leaf.shape[0] if leaf.shape else 1
    shape, dtype = tuple(leaf.shape[1:]), np.dtype(leaf.dtype)
    column = found.get(pattern)
    if column is None:
        column = found[pattern] = H5Column(files, pattern, shape, dtype, leaf.problem)
    same = (column.shape, column.dtype) == (shape, dtype)
    if not same or (column.problem is None) != (leaf.problem is None):
        column.differs += 1
        return
    column.pieces.append(H5Piece(path, leaf.path, 0, rows))


_WANTED: Final = (("action",), ("next", "reward"))
"""The keys that are converted, in addition to flags, if files are too large for all keys."""
_WHOLE_BYTES: Final = 256 << 20
"""Size of the values up to which all keys are converted, so that every rule is checked."""
_ROOM: Final = 3
"""Needed free space per byte of values in the temporary folder. Most are stored twice."""
_NOT_READ: Final = ("[V36]", "left out by the policies")
"""Warnings that only result from leaving out keys in the conversion."""


def h5_facts(
    path: Path,
    files: Sequence[Path],
    layout: str | None,
    most_bytes: int | None,
    stack: ExitStack,
) -> tuple[Facts, Table]:
    """Open H5 files of one data set, and return information about them and their table.

    The keys are paths in the files. Episodes, returns, ends and warnings come from a conversion
    into a temporary directory. If the conversion is refused, another conversion leaves out the
    episodes that break a rule. If the files have more than 256 MiB of values, only some keys are
    converted. These are actions, rewards, flags and the keys that layouts compare. A warning
    reports that episodes or keys were left out. With ``most_bytes=None`` all keys are converted. If
    no layout fits, there are no episodes.

    Args:
        path: the file or folder that the caller gave.
        files: the H5 files, in order.
        layout: the name of the layout. ``None`` guesses the layout.
        most_bytes: number of bytes of each key that are read for statistics. ``None`` reads all
            bytes.
        stack: closes the files at its end.

    Raises:
        CorpusError: a file is not HDF5, or damaged.
        OSError: a file cannot be read.
    """
    guess = LayoutGuess(layout, ("it was given",)) if layout else guess_layout(files)
    said: list[str] = []
    episodes = plan = None
    if guess.layout is None:
        said.append("no layout of the package fits, so its episodes are not known")
    else:
        chosen = layout_named(guess.layout)
        if not isinstance(chosen, Layout):
            raise ValueError(f"expected a layout of H5 files for {path}, got {guess.layout!r}")
        episodes, plan = _episode_facts(files, chosen, said, is_exact=most_bytes is None)
    columns = found_columns(stack.enter_context(OpenFiles()), files)
    keys = [_key(key, column, most_bytes) for key, column in columns.items()]
    facts = Facts(
        "H5 file" if path.is_file() else "H5 folder",
        str(path),
        None if plan is None else plan.rows,
        sum(file.stat().st_size for file in files),
        {"files": len(files)} if len(files) > 1 else {},
        tuple(keys),
        episodes,
        tuple(said),
        guess,
    )
    return facts, _file_table(columns, plan, files)


def _key(key: str, column: H5Column, most_bytes: int | None) -> KeyFacts:
    if column.problem is not None:
        return KeyFacts(key, column.shape, "-", column.rows, note=column.problem)
    notes = [f"{len(column.pieces)} datasets"] if len(column.pieces) > 1 else []
    if column.differs:
        notes.append(f"{column.differs} more of another shape or type")
    return measured(key, column, most_bytes, ", ".join(notes) or None)


def _episode_facts(
    files: Sequence[Path], layout: Layout, said: list[str], *, is_exact: bool
) -> tuple[EpisodeFacts | None, H5Plan | None]:
    """Convert as the command does. After an error, skip episodes that break a rule.

    If no episode is left, a third attempt converts without a comparison of observations.
    """
    reads_all = True
    attempts: tuple[tuple[Literal["error", "skip"], bool], ...] = (
        ("error", True), ("skip", True), ("skip", False),
    )  # fmt: skip
    for on_invalid, may_be_whole in attempts:
        try:
            plan = scan_files(files, layout, Policies(on_invalid=on_invalid))
            has_room = is_exact or _is_small(plan)
            is_whole = may_be_whole and reads_all and has_room
            policies = _policies(plan, on_invalid, is_whole=is_whole)
            with tempfile.TemporaryDirectory(prefix="replaykit-") as folder:
                published = _dry_run(Path(folder) / "data", files, layout, policies)
                facts, _ = corpus_facts(published.path)
                assert facts.episodes is not None
                found = copy.deepcopy(facts.episodes)  # the folder is removed
        except (CorpusError, ImportError) as error:
            reads_all = reads_all and not isinstance(error, ImportError)
            text = f"a conversion would be refused: {error}"
            if text not in said:
                said.append(text)
            continue
        said += [
            text
            for text in facts.warnings
            if is_whole or not any(part in text for part in _NOT_READ)
        ]
        if not has_room:
            said.append(
                f"the files have {plan.source_bytes:,} bytes of values, of which only actions, "
                "rewards, flags and the keys that the layout compares were checked; a "
                "conversion or --exact checks all values"
            )
        elif not is_whole:
            said.append(
                "the episodes were read from actions, rewards, flags and the keys that the layout "
                "compares, because a conversion of all keys is refused"
            )
        return found, plan
    return None, None


def _is_small(plan: H5Plan) -> bool:
    free = shutil.disk_usage(tempfile.gettempdir()).free
    return plan.source_bytes <= min(_WHOLE_BYTES, free // _ROOM)


def _policies(plan: H5Plan, on_invalid: Literal["error", "skip"], *, is_whole: bool) -> Policies:
    if is_whole:
        return Policies(on_invalid=on_invalid)
    keys = [target.key for leaf in plan.leaves for target in leaf.targets]
    wanted = [key for key in _WANTED if any(each[: len(key)] == key for each in keys)]
    # Flags and ids always exist. A file may have none of the other keys.
    return Policies(on_invalid=on_invalid, include=[*wanted, ("episode",)], all_nan="keep")


def _dry_run(target: Path, files: Sequence[Path], layout: Layout, policies: Policies) -> Published:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return ensure_dataset(
            target,
            get_sources=lambda: unread_sources(files, natural=layout.natural_files),
            layout=layout,
            progress=False,
            options=ConvertOptions(policies=policies),
        )


def _file_table(columns: dict[str, H5Column], plan: H5Plan | None, files: Sequence[Path]) -> Table:
    numbers: dict[str, Any] = {
        key: column for key, column in columns.items() if column.problem is None and column.rows
    }
    if plan is None:
        episodes = max((len(column.pieces) for column in numbers.values()), default=0)
        return Table(numbers, episodes if episodes > 1 else 0)
    by_role: dict[str, set[str]] = {}
    for leaf in plan.leaves:
        by_role.setdefault(leaf.role, set()).update(leaf.paths)
    span = plan.spans[0]
    prefix = f"{span.group}/" if span.group else ""
    roles: dict[str, tuple[str, ...]] = {}
    for role in ("action", "reward"):
        wanted = {f"{prefix}{path}" for path in by_role.get(role, ())}
        roles[role] = tuple(
            key
            for key, column in numbers.items()
            if any(piece.dataset in wanted for piece in column.pieces)
        )
    if not span.group:
        # One array holds several episodes, so the episodes of the plan are used.
        for column in numbers.values():
            _cut(column, plan, files)
    return Table(numbers, len(plan.episodes), roles["action"], roles["reward"])


def _cut(column: H5Column, plan: H5Plan, files: Sequence[Path]) -> None:
    pieces = {(piece.path, piece.dataset): piece for piece in column.pieces}
    cuts = []
    for episode in plan.episodes:
        for (path, _), piece in pieces.items():
            if path == files[episode.file]:
                rows = max(0, min(episode.records, piece.rows - episode.base))
                cuts.append(H5Piece(path, piece.dataset, episode.base, rows))
    column.cuts = cuts


_BLOCK_BYTES: Final = 16 << 20


def _layout_of(path: Path) -> TableLayout:
    found = table_layout_of(path)
    if found is None:
        raise ValueError(
            f"expected a folder with a LeRobot data set, got {path}; convert other data again "
            "with force=True"
        )
    return found


def _files(path: Path, layout: TableLayout) -> list[Path]:
    return [path] if path.is_file() else files_below(path, layout.suffixes)


def table_facts(path: Path, stack: ExitStack) -> tuple[Facts, Table]:
    """Return information about a table and its rows, from a conversion without images.

    Args:
        path: the folder.
        stack: removes the temporary folder of the conversion at its end.

    Raises:
        CorpusError: no episode can be converted.
    """
    layout = _layout_of(path)
    files = _files(path, layout)
    source = layout.open(unread_sources(files), Policies(), Judge("skip", RuleFindings()))
    images = [column.key for column in source.columns if column.frames]
    home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="replaykit-")))
    said: list[str] = []
    for on_invalid in ("error", "skip"):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                policies = Policies(on_invalid=on_invalid, exclude=images)
                data = convert(path, layout, home / "data", policies=policies, progress=False)
            break
        except CorpusError as error:
            if on_invalid == "skip":
                raise
            said.append(f"a conversion would be refused: {error}")
    facts, table = corpus_facts(data.published.path)
    about = {"layout": facts.about["layout"]} | {
        name: ", ".join(value.values()) if isinstance(value, dict) else value
        for name, value in source.facts.items()
        if value not in (None, {})
    }
    if images:
        about["images"] = ", ".join(".".join(key) for key in images)
    return (
        replace(
            facts,
            kind="table",
            path=str(path),
            nbytes=sum(file.stat().st_size for file in files),
            about=about,
            warnings=(*said, *facts.warnings),
        ),
        table,
    )


def table_findings(path: Path, advance: Callable[[int], object]) -> list[Finding]:
    """Check the rules of a table, without converting it.

    Cost: all files are read once; frames are counted and timed, but not decoded.
    """
    layout = _layout_of(path)
    notes = RuleFindings()
    judge = Judge("skip", notes)
    try:
        source = layout.open(unread_sources(_files(path, layout)), Policies(), judge)
        kept = source.episodes.lengths > 0
        kept[list(judge.bad)] = False
        checks = ValueChecks(source, source.columns, kept, judge)
        at = {column.key: 0 for column in source.columns}
        for block in source.blocks(kept, [*at], _BLOCK_BYTES):
            for key, values in block.items():
                checks.check(key, values, at[key])
                at[key] += len(values)
                advance(values.nbytes)
    except CorpusError as error:
        return [Finding("rules", False, str(error))]
    found = [Finding("rules", False, text) for text in dict.fromkeys(judge.bad.values())]
    found += [Finding("rules", False, f"{note.first}: {note.text} [{note.rule}]") for note in notes]
    count = int(np.count_nonzero(kept)) - len([each for each in judge.bad if kept[each]])
    text = f"{counted(count, 'episode')} of layout {layout.name} without a fault"
    if skipped := len(kept) - count - len(judge.bad):  # `convert` leaves them out, too
        text += f", and {skipped} without rows"
    return [*found, Finding("episodes", count > 0, text)]


def repair(path: str | Path) -> list[str]:
    """Correct the metadata of a LeRobot data set where it follows from the frames.

    Lengths, offsets, totals and statistics are computed again. Frames and videos never change. The
    metadata is replaced in one step, or not at all.

    Args:
        path: the folder of the data set.

    Returns:
        The changes, one text for each; empty if nothing was wrong.

    Raises:
        ValueError: the folder holds no such data set.
        CorpusError: a fault cannot be repaired. The message names file and rule.

    Cost: all frames and all videos are read, but not decoded.

    Example:
        >>> import json, tempfile
        >>> from pathlib import Path
        >>> from replaykit.inspection import repair
        >>> from replaykit.testing import make_lerobot
        >>> folder = Path(tempfile.mkdtemp()) / "set"
        >>> _ = make_lerobot(folder, [3, 4], cameras=[])
        >>> info = json.loads((folder / "meta/info.json").read_text())
        >>> _ = (folder / "meta/info.json").write_text(json.dumps({**info, "total_frames": 9}))
        >>> repair(folder), repair(folder)
        (['meta/info.json: total_frames is 7, not 9'], [])
    """
    return _layout_of(path := Path(path)).repair(path)
