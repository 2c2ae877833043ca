"""Facts of H5 files that were not converted: their datasets, and what a conversion would make."""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from replaykit.datasets.engine.conversion import ConvertOptions, ensure_dataset
from replaykit.datasets.engine.layout import Layout
from replaykit.datasets.engine.plan import Plan
from replaykit.datasets.engine.policies import Policies
from replaykit.datasets.opened import Published
from replaykit.errors import CorpusError
from replaykit.inspection.corpus import corpus_facts
from replaykit.inspection.facts import EpisodeFacts, Facts, KeyFacts, LayoutGuess
from replaykit.inspection.h5_columns import H5Column, OpenFiles, Piece, found_columns
from replaykit.inspection.layouts import guess_layout, layout_named, scan_files, unread_sources
from replaykit.inspection.table import Table, measure

__all__ = ["opened_h5"]

_WANTED: Final = (("action",), ("next", "reward"))
"""What is converted for facts of files that are too large to be converted whole, besides flags."""
_WHOLE_BYTES: Final = 256 << 20
"""Bytes of values up to which all of them are converted, so that every rule is applied."""
_ROOM: Final = 3
"""Times the values that the temporary folder must have free: most are stored twice."""
_NOT_READ: Final = ("[V36]", "left out by the policies")
"""Warnings that come of leaving keys out of the conversion for facts."""


@contextmanager
def opened_h5(
    path: Path, files: Sequence[Path], layout: str | None, most_bytes: int | None
) -> Iterator[tuple[Facts, Table]]:
    """Opens H5 files of one data set and yields what is known of them.

    Datasets are listed as they are. Episodes, returns, reasons of ends and warnings are those that
    a conversion gives: the files are converted into a directory that is removed. What a conversion
    would refuse is said, and episodes that break a rule are left out then. Of files of more than
    256 MiB of values only actions, rewards, flags and what layouts compare are converted, which is
    said too, unless ``most_bytes`` is ``None``. Where no layout fits, there are no episodes.

    Args:
        path: the file or folder that was asked for.
        files: in order.
        layout: by name; ``None``: the one that fits.

    Raises:
        CorpusError: a file is not HDF5, or damaged. OSError: it cannot be read.
    """
    guess = LayoutGuess(layout, ("it was given",)) if layout else guess_layout(files)
    said: list[str] = []
    episodes = plan = None
    if guess.layout is None:
        said.append("no layout of the package fits, so its episodes are not known")
    else:
        chosen = layout_named(guess.layout)
        episodes, plan = _episodes(files, chosen, said, is_exact=most_bytes is None)
    with OpenFiles() as handles:
        columns = found_columns(handles, files)
        keys = []
        for key, column in columns.items():
            keys.append(_key(key, column, most_bytes))
        table = _table(columns, plan, files)
        yield (
            Facts(
                "H5 file" if path.is_file() else "H5 folder",
                str(path),
                None if plan is None else plan.rows,
                sum(file.stat().st_size for file in files),
                {"files": len(files)} if len(files) > 1 else {},
                tuple(keys),
                episodes,
                tuple(said),
                guess,
            ),
            table,
        )


def _key(key: str, column: H5Column, most_bytes: int | None) -> KeyFacts:
    count = len(column.pieces)
    note = f"{count} datasets" if count > 1 else None
    if column.differs:
        other = f"{column.differs} more of another shape or type"
        note = f"{note}, {other}" if note else other
    if column.problem is not None:
        return KeyFacts(key, column.shape, "-", column.rows, note=column.problem)
    statistics, rows = measure(column, most_bytes)
    return KeyFacts(key, column.shape, str(column.dtype), column.rows, statistics, rows, note=note)


def _episodes(
    files: Sequence[Path], layout: Layout, said: list[str], *, is_exact: bool
) -> tuple[EpisodeFacts | None, Plan | None]:
    """Converts as the command would; where that is refused, without what breaks a rule.

    Where nothing is left then, what is known without comparing observations is better than nothing.
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
                found = _found(published, said, is_whole=is_whole)
        except (CorpusError, ImportError) as error:
            reads_all = reads_all and not isinstance(error, ImportError)
            text = f"a conversion would be refused: {error}"
            if text not in said:
                said.append(text)
            continue
        if not has_room:
            said.append(
                f"the files have {plan.source_bytes:,} bytes of values, of which only actions, "
                "rewards, flags and what the layout compares were checked: a conversion, and "
                "--exact, check all"
            )
        elif not is_whole:
            said.append(
                "what is said of episodes comes from actions, rewards, flags and what the layout "
                "compares alone, since a conversion of all keys is refused"
            )
        return found, plan
    return None, None


def _is_small(plan: Plan) -> bool:
    free = shutil.disk_usage(tempfile.gettempdir()).free
    return plan.source_bytes <= min(_WHOLE_BYTES, free // _ROOM)


def _policies(plan: Plan, on_invalid: Literal["error", "skip"], *, is_whole: bool) -> Policies:
    if is_whole:
        return Policies(on_invalid=on_invalid)
    keys = [target.key for leaf in plan.leaves for target in leaf.targets]
    wanted = [key for key in _WANTED if any(each[: len(key)] == key for each in keys)]
    # Flags and ids are always there; a file may have nothing else of it.
    return Policies(on_invalid=on_invalid, include=[*wanted, ("episode",)], all_nan="keep")


def _found(published: Published, said: list[str], *, is_whole: bool) -> EpisodeFacts:
    """Returns the episodes of what was converted, apart from its files; adds its warnings."""
    facts, _ = corpus_facts(published.path)
    episodes = facts.episodes
    assert episodes is not None
    said.extend(
        text for text in facts.warnings if is_whole or not any(part in text for part in _NOT_READ)
    )
    returns = episodes.returns
    return EpisodeFacts(
        np.array(episodes.lengths),
        episodes.ends,
        None if returns is None else returns.copy(),
        episodes.names,
    )


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


def _table(columns: dict[str, H5Column], plan: Plan | None, files: Sequence[Path]) -> Table:
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
        # Several episodes in one array: those of the plan.
        for column in numbers.values():
            _cut(column, plan, files)
    return Table(numbers, len(plan.episodes), roles["action"], roles["reward"])


def _cut(column: H5Column, plan: Plan, files: Sequence[Path]) -> None:
    pieces = {(piece.path, piece.dataset): piece for piece in column.pieces}
    cuts = []
    for episode in plan.episodes:
        for (path, _), piece in pieces.items():
            if path == files[episode.file]:
                rows = max(0, min(episode.records, piece.rows - episode.base))
                cuts.append(Piece(path, piece.dataset, episode.base, rows))
    column.cuts = cuts
