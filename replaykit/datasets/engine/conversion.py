"""The conversion engine: scan, lay out, write in blocks, validate, publish.

Every source value is read once and written to each column that it belongs to: an observation is
the one before a step and the next one of the step that led to it. Memory is bounded by a block of
one leaf and some 100 bytes for each episode, whatever the size of the corpus.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Final

import numpy as np

from replaykit.datasets.column_files import (
    EPISODE_DIRECTORY,
    ColumnOutput,
    create_columns,
    synced_early,
    write_episode_table,
)
from replaykit.datasets.dataset_manifest import MANIFEST_NAME, Array, Manifest, provenance
from replaykit.datasets.engine.conversion_report import (
    duplicates,
    make_report,
    summary,
    warn_caller,
)
from replaykit.datasets.engine.fields import Preceded
from replaykit.datasets.engine.layout import DropLeaves, Layout
from replaykit.datasets.engine.places import Notes, Place
from replaykit.datasets.engine.plan import Plan, column_specs
from replaykit.datasets.engine.policies import Policies
from replaykit.datasets.engine.resuming import Excluded, Unfinished, conversion_digest
from replaykit.datasets.engine.scan import scan
from replaykit.datasets.engine.write_files import (
    WrittenFile,
    condense,
    kept_episodes,
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

__all__ = ["FLAT_FORM", "ConvertOptions", "ensure_dataset", "full_identity", "stamps_of"]

FLAT_FORM: Final = {"form": None}
"""What the identity of a flat data set must not have: the split one of the same files has it."""


@dataclass(frozen=True)
class ConvertOptions:
    """How to convert.

    Attributes:
        block_bytes: how much of one leaf is read at a time. HDF5 decompresses whole chunks: one
            that is larger takes its own memory besides, and over 160 MiB it is decompressed for
            every block of it.
        policies: what is done with keys, dtypes and episodes that are not as one would wish.
        workers: how many processes convert at once, each a file. The result does not depend on
            it; each takes memory for blocks of its own.

    Raises:
        ValueError: a block of no bytes, or no worker.
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
        """Returns JSON values."""
        return {"block_bytes": self.block_bytes, "policies": self.policies.to_json()}


def ensure_dataset(
    target: str | Path,
    *,
    get_sources: Callable[[], Sources],
    layout: Layout,
    force: bool = False,
    progress: bool | None = None,
    identity: Mapping[str, Any] | None = None,
    options: ConvertOptions | None = None,
) -> Published:
    """Opens the data set at a path; converts it from its source files where there is none.

    Processes that ask for one path at once share one conversion. One that was interrupted or killed
    goes on with the files that it had not finished, and in a long one where it had come to. The
    result appears complete or not at all; with ``force`` the old version stays until the new one is
    complete.

    Args:
        target: directory of the data set.
        get_sources: returns the source files; called only when they are needed, by the process
            that converts.
        layout: what the corpus declares.
        force: convert anew, and replace the data set at the path, be it a damaged one.
        progress: whether a bar is shown; by default only on a terminal.
        identity: JSON values that say which data set this is, such as its id and commit; kept in
            the manifest, and compared with it when a data set is there already.
        options: how to convert.

    Raises:
        CorpusError: a source file breaks a rule of its corpus; names file, episode and key.
        OSError: a file cannot be read, or there is no room; names the file and what to do.
        ValueError: a source file lies at the path or below it, where it would be replaced.
        RuntimeError: without ``force``, what is at the path is not a complete data set, or one of
            another identity or converter; in any case, files that are no part of a data set.
        ImportError: h5py is needed and not installed.

    Warns:
        UserWarning: leaves were left out, episodes skipped, or values are odd; one warning for
            all of it. The manifest's ``report`` has the same and more.

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
    told: list[str] = []
    found: list[Sources] = []

    def build(directory: Path) -> Manifest:
        manifest, text = _convert(directory, found[-1], layout, options, named, progress)
        if text is not None:
            told.append(text)
        return manifest

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
    for text in told:
        warn_caller(f"{published.path}: {text}")
    return published


def _check_apart(target: str | Path, sources: Sources) -> None:
    """Checks that replacing what is at a path takes no source file away."""
    home = Path(os.path.realpath(target))
    for file in sources.files:
        path = Path(os.path.realpath(file.path))
        if path == home or home in path.parents:
            raise ValueError(
                f"{target}: expected a place for the data set apart from its source files, but "
                f"{file.path} lies there and would be replaced with it"
            )


def full_identity(layout: Layout, identity: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns which data set it is and by which rules it is made, as the manifest has it."""
    return {
        **({} if identity is None else identity),
        "layout": layout.name,
        "layout_version": layout.version,
    }


def _convert(
    directory: Path,
    sources: Sources,
    layout: Layout,
    options: ConvertOptions,
    identity: Mapping[str, Any],
    progress: bool | None,
) -> tuple[Manifest, str | None]:
    """Fills a directory with columns and episode table; returns manifest and warning."""
    sources.check()
    before = stamps_of(((file.path, file.name) for file in sources.files), layout)
    said = {"options": options.to_json(), "identity": dict(identity)}
    unfinished = Unfinished(directory, conversion_digest(sources, layout, said, before))
    # What was found out by writing rows need not be found out again.
    without, excluded = unfinished.without, unfinished.excluded
    is_guess = bool(without or excluded)
    made: _Made | None = None
    while True:
        notes, found = Notes(), Notes()
        plan = scan(
            sources,
            layout,
            policies=options.policies,
            without=without,
            excluded=excluded,
            block_bytes=options.block_bytes,
            notes=notes,
            workers=options.workers,
        )
        if is_guess and not unfinished.is_of(plan):
            without, excluded, is_guess = {}, {}, False
            continue
        is_guess = False
        if options.policies.copies in ("drop", "error") and not plan.tells_copies:
            raise ValueError(
                f"copies={options.policies.copies!r}: copies of episodes cannot be told where all "
                'observations are left out; keep observations, or take copies="keep"'
            )
        kept = None if made is None else kept_episodes(made.plan, plan)
        if made is not None and kept is not None:
            unfinished.forget()
            columns, written = without_episodes(
                directory, made.columns, made.written, made.plan, plan, kept
            )
            notes.extend(made.notes)
            break
        columns = _columns(directory, plan, unfinished, without, excluded)
        try:
            with (
                progress_bar("converting", plan.source_bytes, progress) as advance,
                synced_early(columns),
            ):
                written = write_files(
                    plan,
                    sources,
                    columns,
                    block_bytes=options.block_bytes,
                    on_invalid=options.policies.on_invalid,
                    workers=options.workers,
                    notes=found,
                    advance=advance,
                    unfinished=unfinished,
                )
        except DropLeaves as drop:
            # Rare, so it is not looked for in advance: that would read every file twice.
            if drop.source in without:
                raise RuntimeError(f"{layout.name}: {drop.source} is dropped twice") from drop
            without[drop.source] = drop.why
            continue
        bad = {**written.bad, **_copies(plan, written, sources, options.policies)}
        if not bad:
            notes.extend(found)
            break
        for position, why in bad.items():
            episode = plan.episodes[position]
            excluded[episode.file, episode.group, episode.base] = why
        made = _Made(plan, columns, written, found)
    if stamps_of(((file.path, file.name) for file in sources.files), layout) != before:
        raise CorpusError("a source file changed while it was converted; convert it again [V02]")
    first = Place(sources.files[0].path, sources.files[0].name)
    policies = options.policies
    if "drop" in (policies.constant, policies.duplicate) or policies.repeated == "once":
        unfinished.forget()  # columns go
    removed = condense(directory, plan, columns, options.policies, notes, first)
    finals = store_once(directory, plan, columns) if options.policies.repeated == "once" else {}
    names = plan.episodes.names()
    episode_arrays, group_file = write_episode_table(directory, written.table, names)
    report = {
        **make_report(plan, sources, notes, written.facts, written.table["digest"]),
        "removed": removed,
        "splits": dict(plan.splits),
        "rules": plan.layout.declaration(),
    }
    text = summary(report, notes)
    if text is not None and options.policies.strict:
        raise CorpusError(f"{first.file}: refused, since policies are strict: {text}")
    manifest = Manifest(
        rows=plan.rows,
        batch=(plan.rows,),
        episodes=len(plan.episodes),
        arrays=_arrays(directory, plan, columns, written),
        finals=_arrays(directory, plan, finals, written),
        episode_arrays=episode_arrays,
        group_file=group_file,
        converter={"name": layout.name, "version": layout.version},
        identity=dict(identity),
        source={
            "origin": dict(sources.origin),
            "files": [
                {"name": file.name, "size": file.size, "sha256": file.sha256}
                for file in sources.files
            ],
        },
        report=report,
        options=options.to_json(),
        made={**provenance(), "source_stamps": before},
    )
    return manifest, text


def _columns(
    directory: Path,
    plan: Plan,
    unfinished: Unfinished,
    without: Mapping[str, str],
    excluded: Excluded,
) -> dict[Key, ColumnOutput]:
    """Makes the columns of a plan: with the rows of the files that are finished, or empty."""
    goes_on = unfinished.is_of(plan)
    if not goes_on:
        unfinished.begin(plan, without, excluded)
        for path in directory.iterdir():
            remove_tree(path)
    else:
        for name in (MANIFEST_NAME, EPISODE_DIRECTORY):
            remove_tree(directory / name)
    columns = create_columns(directory, column_specs(plan), (plan.rows,), is_new=not goes_on)
    hold_back(directory)
    if goes_on:
        unfinished.go_on(columns, plan)
    return columns


@dataclass(frozen=True)
class _Made:
    """What was written before it was known which episodes are to be left out."""

    plan: Plan
    columns: Mapping[Key, ColumnOutput]
    written: WrittenFile
    notes: Notes


def _copies(
    plan: Plan, written: WrittenFile, sources: Sources, policies: Policies
) -> dict[int, str]:
    """Returns the episodes that are to be left out as copies of others, and why (rule V36).

    Raises:
        CorpusError: there is one, and the caller wants an error.
    """
    choice = plan.layout.copies if policies.copies == "layout" else policies.copies
    if choice == "keep" or not plan.tells_copies:
        return {}
    # Among those that stay: of three of which the first one is bad, the second one stays alone.
    good = np.ones(len(plan.episodes), bool)
    good[list(written.bad)] = False
    kept = np.flatnonzero(good)
    found = {}
    for pair in duplicates(written.table["digest"][kept]):
        later, first = (int(kept[each]) for each in pair)
        names = [f"{sources.files[e.file].name}: {e.name}" for e in
                 (plan.episodes[later], plan.episodes[first])]  # fmt: skip
        if choice == "error":
            path = sources.files[plan.episodes[later].file].path
            name = plan.episodes[later].name
            raise CorpusError(
                f"{path}: {name}: it has the observations and actions of {names[1]} [V36]"
            )
        found[later] = f"it has the observations and actions of {names[1]} [V36]"
    return found


def _arrays(
    directory: Path, plan: Plan, columns: Mapping[Key, ColumnOutput], written: WrittenFile
) -> tuple[Array, ...]:
    facts: dict[Key, dict[str, Any]] = {
        target.key: {
            "source": leaf.path,
            # Counted in records of the dataset: what precedes them lies in another one.
            "shift": target.offset - isinstance(leaf.decoder, Preceded),
            **({"source_dtype": leaf.dtype.name} if leaf.dtype != leaf.stored else {}),
            **({"one_per_episode": True} if leaf.is_once else {}),
        }
        for leaf in plan.leaves
        for target in leaf.targets
    }
    return tuple(
        column.describe(
            directory, {**facts.get(key, {}), "statistics": written.statistics[key].to_json()}
        )
        for key, column in columns.items()
    )


def stamps_of(files: Iterable[tuple[Path, str]], layout: Layout) -> dict[str, list[int]]:
    """Returns size and time of change of files, and of those that describe them, by their names.

    Two that are equal are taken for the same content; none is read.
    """
    found = {}
    for path, name in files:
        for each in (path, *layout.described_by(path)):
            with suppress(FileNotFoundError):
                status = each.stat()
                key = PurePosixPath(name).with_name(each.name).as_posix()
                found[key] = [status.st_size, status.st_mtime_ns]
    return found
