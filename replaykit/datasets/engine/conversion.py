"""Conversion of source files: scan, plan, write in blocks, validate and publish.

Every source value is read once, and written to all its columns. For example, an observation is the
state before one step and the state after the preceding step. Memory is bounded by a block of one
leaf and about 100 bytes for each episode, whatever the size of the corpus.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from replaykit.datasets.column_files import (
    EPISODE_DIRECTORY,
    ColumnOutput,
    create_columns,
    write_episode_table,
)
from replaykit.datasets.dataset_manifest import MANIFEST_NAME, Array, Manifest, provenance
from replaykit.datasets.engine.conversion_report import (
    duplicates,
    make_report,
    summary,
    warn_caller,
)
from replaykit.datasets.engine.layout import DropLeaves, Layout
from replaykit.datasets.engine.locations import RuleFindings
from replaykit.datasets.engine.plan import Excluded, H5Plan, Plan, column_specs
from replaykit.datasets.engine.policies import Policies
from replaykit.datasets.engine.resuming import (
    FilePart,
    ImagesPart,
    Unfinished,
    conversion_digest,
    plan_digest,
)
from replaykit.datasets.engine.scan import scan
from replaykit.datasets.engine.table_conversion import TableConversion
from replaykit.datasets.engine.table_sources import TableLayout
from replaykit.datasets.engine.write_files import (
    FINALS_DIRECTORY,
    WrittenRows,
    condense,
    has_rows_of,
    store_once,
    without_episodes,
    write_files,
)
from replaykit.datasets.publishing import Published, ensure_published, hold_back
from replaykit.datasets.sources import Sources
from replaykit.datasets.transfers import progress_bar
from replaykit.errors import CorpusError
from replaykit.filesystem import remove_tree
from replaykit.ted import Key

_LATE: Final = (MANIFEST_NAME, EPISODE_DIRECTORY, FINALS_DIRECTORY)
"""Names in a data set that a conversion makes after all rows."""
FLAT_FORM: Final = {"form": None}
"""The identity entry of flat data sets.

It excludes split data sets of the same files, because their identity has a ``form``.
"""


@dataclass(frozen=True)
class ConvertOptions:
    """The options of a conversion.

    Attributes:
        block_bytes: number of bytes of one leaf in one read. HDF5 decompresses whole chunks, so a
            chunk larger than ``block_bytes`` takes additional memory. A chunk of more than 160 MiB
            is decompressed again for every block that is read from it.
        policies: the treatment of unusual keys, dtypes and episodes.
        workers: number of processes that convert files in parallel. Each process needs memory for
            its blocks. The result does not depend on this number.

    Raises:
        ValueError: ``block_bytes`` or ``workers`` is less than 1.
    """

    block_bytes: int = 16 << 20
    policies: Policies = field(default_factory=Policies)
    workers: int = 1

    def __post_init__(self) -> None:
        if self.block_bytes < 1:
            raise ValueError(f"expected block_bytes >= 1, got {self.block_bytes}")
        if self.workers < 1:
            raise ValueError(f"expected workers >= 1, got {self.workers}")

    def to_json(self) -> dict[str, Any]:
        """Return the options, without ``workers``, as JSON values."""
        return {"block_bytes": self.block_bytes, "policies": self.policies.to_json()}


def ensure_dataset(
    target: str | Path,
    *,
    get_sources: Callable[[], Sources],
    layout: Layout | TableLayout,
    force: bool = False,
    progress: bool | None = None,
    identity: Mapping[str, Any] | None = None,
    options: ConvertOptions | None = None,
) -> Published:
    """Open the data set at a path, after converting it if there is none.

    Processes that request the same path at once share one conversion. After an interruption, the
    next call continues with the unfinished files. The result appears completely or not at all. With
    ``force``, the old data set stays until the new data set is complete.

    Args:
        target: directory of the data set.
        get_sources: returns the source files. Only the process that converts calls it.
        layout: the declaration of the corpus.
        force: convert again, and replace the data set at the path even if it is damaged.
        progress: show a progress bar; by default only on a terminal.
        identity: JSON values that identify the data set, such as its id and commit. The manifest
            stores them. They are compared with the identity of an existing data set.
        options: the options of the conversion.

    Raises:
        CorpusError: a source file breaks a rule of its corpus. The message names file, episode and
            key.
        OSError: a file cannot be read, or no space is left. The message names the file and the
            remedy.
        ValueError: a source file is at or below the path, so it would be replaced.
        RuntimeError: the path holds files that belong to no data set. Or, without ``force``, the
            path holds an incomplete data set, or a data set of another identity or converter.
        ImportError: h5py is needed and not installed.

    Warns:
        UserWarning: leaves were left out, episodes were skipped, or values are unusual. One warning
            reports everything. The manifest's ``report`` has more details.

    Example:
        >>> import tempfile, numpy as np
        >>> from pathlib import Path, PurePosixPath
        >>> from replaykit.datasets.engine.conversion import ensure_dataset
        >>> from replaykit.datasets.families.robohive import ROBOHIVE
        >>> from replaykit.datasets.sources import Sources
        >>> from replaykit.testing.robohive_files import RoboHiveWriter
        >>> root = Path(tempfile.mkdtemp())
        >>> with RoboHiveWriter(root / "a.h5") as writer:
        ...     _ = writer.add_trial(
        ...         np.arange(8.0).reshape(4, 2), np.zeros((3, 1)), np.arange(4.0),
        ...         np.zeros(4, bool), np.arange(4.0),
        ...     )
        >>> found = ensure_dataset(
        ...     root / "data", get_sources=lambda: Sources.local([root / "a.h5"]), layout=ROBOHIVE
        ... )
        >>> found.columns["next", "reward"].flatten()  # of the state that was arrived at
        tensor([1., 2., 3.], dtype=torch.float64)
        >>> found.columns["next", "truncated"].flatten()
        tensor([False, False,  True])
    """
    options = ConvertOptions() if options is None else options
    named = full_identity(layout, identity)
    warning_texts: list[str] = []
    found: list[Sources] = []

    def build(directory: Path) -> Manifest:
        sources = found[-1]
        if layout.has_files:
            sources.check()
        named_files = [(file.path, file.name) for file in sources.files]
        before = stamps_of(named_files, layout)
        said = {"options": options.to_json(), "identity": named}
        digest = conversion_digest(sources, layout, said, before)
        plan, written, notes = _convert(directory, sources, layout, options, digest, progress)
        if stamps_of(named_files, layout) != before:
            raise CorpusError(
                "a source file changed while it was converted; convert it again [V02]"
            )
        names = plan.episodes.names()
        episode_arrays, group_file = write_episode_table(directory, written.table, names)
        text = summary(written.report, notes)
        if text is not None:
            if options.policies.strict:
                raise CorpusError(f"{plan.first.file}: refused, since policies are strict: {text}")
            warning_texts.append(text)
        return Manifest(
            rows=plan.rows,
            batch=(plan.rows,),
            episodes=len(plan.episodes),
            arrays=_arrays(directory, plan, written.columns, written),
            finals=_arrays(directory, plan, written.finals, written),
            attached=tuple(written.attached),
            episode_arrays=episode_arrays,
            group_file=group_file,
            converter={"name": layout.name, "version": layout.version},
            identity=named,
            source=sources.to_json(),
            report=written.report,
            options=options.to_json(),
            made={**provenance(), "source_stamps": before},
        )

    def prepare() -> None:
        found.append(get_sources())
        _check_apart(target, found[-1])

    published = ensure_published(
        target,
        build,
        force=force,
        identity={**named, **FLAT_FORM},
        prepare=prepare,
        goes_on=True,
    )
    for text in warning_texts:
        warn_caller(f"{published.path}: {text}")
    return published


def _check_apart(target: str | Path, sources: Sources) -> None:
    """Check that replacing the data set at a path would delete no source file."""
    home = Path(os.path.realpath(target))
    for file in sources.files:
        path = Path(os.path.realpath(file.path))
        if path == home or home in path.parents:
            raise ValueError(
                f"{target}: expected a directory without source files, but {file.path} is in it "
                "and would be replaced; choose another directory for the data set"
            )


def full_identity(
    layout: Layout | TableLayout, identity: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the identity as the manifest stores it, with the layout and its version."""
    return {
        **({} if identity is None else identity),
        "layout": layout.name,
        "layout_version": layout.version,
    }


def _steps(
    directory: Path,
    sources: Sources,
    layout: Layout | TableLayout,
    options: ConvertOptions,
    digest: str,
) -> tuple[Callable[..., Plan], Callable[..., WrittenRows], Unfinished[Any]]:
    """Return the functions that plan and write rows, and the record of finished rows."""
    policies, block_bytes, workers = options.policies, options.block_bytes, options.workers
    if not isinstance(layout, Layout):
        table = TableConversion(directory, sources, layout, policies, block_bytes)
        return table.plan, table.write, Unfinished(directory, digest, ImagesPart)
    return (
        partial(scan, sources, layout, policies=policies, block_bytes=block_bytes, workers=workers),
        partial(
            write_files,
            sources=sources,
            block_bytes=block_bytes,
            on_invalid=policies.on_invalid,
            workers=workers,
        ),
        Unfinished(directory, digest, FilePart),
    )


def _convert(
    directory: Path,
    sources: Sources,
    layout: Layout | TableLayout,
    options: ConvertOptions,
    digest: str,
    progress: bool | None,
) -> tuple[Plan, WrittenRows, RuleFindings]:
    """Fill a directory with the columns of files; return their plan, the rows and findings."""
    policies = options.policies
    plan_rows, write_rows, unfinished = _steps(directory, sources, layout, options, digest)
    # The fields and episodes that an interrupted conversion had to leave out.
    without, excluded = unfinished.without, unfinished.excluded
    is_guess = bool(without or excluded)
    made: _Made | None = None
    while True:
        notes, found = RuleFindings(), RuleFindings()
        plan = plan_rows(without=without, excluded=excluded, notes=notes)
        if is_guess and not unfinished.is_of(plan_digest(plan)):
            without, excluded, is_guess = {}, {}, False
            continue
        is_guess = False
        if policies.copies in ("drop", "error") and not plan.detects_copies:
            raise ValueError(
                f"copies={policies.copies!r}: copies of episodes cannot be recognized if "
                'all observations are left out; keep observations, or pass copies="keep"'
            )
        if made is not None and has_rows_of(made.plan, plan, made.kept):
            unfinished.forget()
            written = without_episodes(directory, made.written, made.plan, plan, made.kept)
            notes.extend(made.notes)
            break
        create = partial(_columns, directory, plan, unfinished, without, excluded)
        try:
            with progress_bar("converting", plan.source_bytes, progress) as advance:
                written = write_rows(
                    plan, create, notes=found, advance=advance, unfinished=unfinished
                )
        except DropLeaves as drop:
            # This is rare, and an earlier check would read every file twice.
            if drop.source in without:
                raise RuntimeError(f"{layout.name}: {drop.source} is dropped twice") from drop
            without[drop.source] = drop.why
            continue
        bad = {**written.bad, **_copies(plan, written, policies)}
        if not bad and written.table:
            notes.extend(found)
            break
        for position, why in bad.items():
            episode = plan.episodes[position]
            excluded[episode.file, episode.group, episode.base] = why
        if isinstance(plan, H5Plan):  # the attached files of tables are written again
            kept = np.delete(np.arange(len(plan.episodes)), list(bad))
            made = _Made(plan, kept, written, found)
    removed = condense(directory, plan, written.columns, policies, notes)
    if policies.repeated == "once":
        lasts = plan.episodes.column("start") + plan.episodes.column("rows") - 1
        written.finals = store_once(directory, lasts, written.columns)
    copies = duplicates(written.table["digest"]) if plan.detects_copies else ()
    written.report = {
        **make_report(plan, notes, copies),
        "removed": removed,
        "splits": dict(plan.splits),
        **written.report,
    }
    written.attached = tuple(written.attached)
    return plan, written, notes


def _columns(
    directory: Path,
    plan: Plan,
    unfinished: Unfinished[Any],
    without: Mapping[str, str],
    excluded: Excluded,
) -> dict[Key, ColumnOutput]:
    """Create the columns of a plan, or reopen them with the rows that are finished."""
    digest = plan_digest(plan)
    goes_on = unfinished.is_of(digest)
    if not goes_on:
        unfinished.begin(digest, without, excluded)
    for name in _LATE if goes_on else os.listdir(directory):
        remove_tree(directory / name)
    columns = create_columns(directory, column_specs(plan), (plan.rows,), is_new=not goes_on)
    hold_back(directory)
    return columns


@dataclass(frozen=True)
class _Made:
    """Rows that were written before it was known which episodes to leave out."""

    plan: Plan
    kept: npt.NDArray[np.int64]
    written: WrittenRows
    notes: RuleFindings


def _copies(plan: Plan, written: WrittenRows, policies: Policies) -> dict[int, str]:
    """Return the copies of episodes to leave out, with the reasons (V36).

    Raises:
        CorpusError: there is a copy, and the policy for copies is ``"error"``.
    """
    choice = plan.layout.copies if policies.copies == "layout" else policies.copies
    if choice == "keep" or not plan.detects_copies or "digest" not in written.table:
        return {}
    # Only valid episodes are compared. If the first of three copies is bad, the second copy stays.
    kept = np.delete(np.arange(len(plan.episodes)), list(written.bad))
    found = {}
    for pair in duplicates(written.table["digest"][kept]):
        later, first = (int(kept[each]) for each in pair)
        what = f"it has the observations and actions of {plan.location(first).brief}"
        if choice == "error":
            raise plan.location(later).error(what, "V36")
        found[later] = f"{what} [V36]"
    return found


def _arrays(
    directory: Path, plan: Plan, columns: Mapping[Key, ColumnOutput], written: WrittenRows
) -> tuple[Array, ...]:
    measured = {key: {"statistics": of.to_json()} for key, of in written.statistics.items()}
    return tuple(
        column.describe(directory, {**plan.facts.get(key, {}), **measured.get(key, {})})
        for key, column in columns.items()
    )


def stamps_of(
    files: Iterable[tuple[Path, str]], layout: Layout | TableLayout
) -> dict[str, list[int]]:
    """Return size and modification time of files and their descriptions, by name.

    If all stamps are equal, the files count as unchanged. No file is read.
    """
    found = {}
    for path, name in files:
        for each in (path, *layout.described_by(path)):
            with suppress(FileNotFoundError):
                status = each.stat()
                key = PurePosixPath(name).with_name(each.name).as_posix()
                found[key] = [status.st_size, status.st_mtime_ns]
    return found
