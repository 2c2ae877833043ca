"""Facts of H5 files that were not converted: their datasets, and what a conversion would make."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

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
"""What a conversion for facts writes, besides flags: layouts look at the actions too."""
_NOT_READ: Final = ("[V36]", "[V51]", "[V52]")
"""Rules that compare what is not read for it: what they say then is of no use."""


@contextmanager
def opened_h5(
    path: Path, files: Sequence[Path], layout: str | None, most_bytes: int | None
) -> Iterator[tuple[Facts, Table]]:
    """Opens H5 files of one data set and yields what is known of them.

    Datasets are listed as they are. Episodes, returns, reasons of ends and warnings are those that
    a conversion gives: rewards and flags are converted into a directory that is removed, and
    episodes that break a rule are left out and reported. Where no layout fits, there are none.

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
        if guess.problem:
            said.append(guess.problem)
        else:
            episodes, plan = _episodes(files, chosen, said)
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
    files: Sequence[Path], layout: Layout, said: list[str]
) -> tuple[EpisodeFacts | None, Plan | None]:
    try:
        plan = scan_files(files, layout, Policies(on_invalid="skip"))
        with tempfile.TemporaryDirectory(prefix="replaykit-") as folder:
            published = _dry_run(Path(folder) / "data", files, layout, plan)
            facts, _ = corpus_facts(published.path)
            lengths = np.array(facts.episodes.lengths) if facts.episodes else np.zeros(0, np.int64)
            said.extend(
                text for text in facts.warnings if not any(rule in text for rule in _NOT_READ)
            )
            assert facts.episodes is not None
            returns = facts.episodes.returns
            return (
                EpisodeFacts(
                    lengths,
                    facts.episodes.ends,
                    None if returns is None else returns.copy(),
                    facts.episodes.names,
                ),
                plan,
            )
    except CorpusError as error:
        said.append(f"a conversion would be refused: {error}")
        return None, None


def _dry_run(target: Path, files: Sequence[Path], layout: Layout, plan: Plan) -> Published:
    keys = [target.key for leaf in plan.leaves for target in leaf.targets]
    wanted = [key for key in _WANTED if any(each[: len(key)] == key for each in keys)]
    # Flags and ids are always there; a file may have nothing else of it.
    policies = Policies(on_invalid="skip", include=[*wanted, ("episode",)], all_nan="keep")
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
