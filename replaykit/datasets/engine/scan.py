"""The scan of a corpus for its episodes and their common schema."""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np

from replaykit.datasets.engine.conversion_report import skipped_lines
from replaykit.datasets.engine.episode_finders import EpisodeRefs, Segments
from replaykit.datasets.engine.fields import Preceded, Target
from replaykit.datasets.engine.h5 import H5File, H5Leaf
from replaykit.datasets.engine.h5_values import Held
from replaykit.datasets.engine.layout import ALWAYS, Layout, SourceFacts
from replaykit.datasets.engine.locations import WHOLE_FILE, Location, RuleFindings, path_below
from replaykit.datasets.engine.plan import (
    OBSERVED_KEY,
    Entry,
    EpisodeSpan,
    Excluded,
    H5Plan,
    PlannedLeaf,
    SourceEpisode,
    SourceEpisodes,
    Spans,
    check_plan,
)
from replaykit.datasets.engine.policies import Policies
from replaykit.datasets.engine.schema_union import SchemaUnion
from replaykit.datasets.engine.source_files import (
    NOT_LISTED,
    Listing,
    listings,
    open_sources,
    units_of,
)
from replaykit.datasets.sources import Sources
from replaykit.errors import CorpusError


def gives_no_row(records: int) -> str:
    """Return the reason to leave out an episode that is too short (rule V37)."""
    return f"it has {records} record{'s' * (records != 1)}, so it gives no row [V37]"


_MOST_KINDS: Final = 5
"""Number of reasons that an error lists."""
_SMALL_BYTES: Final = 1 << 18
_HELD_BLOCKS: Final = 2
"""Memory for values that are read with the declarations of all files, in blocks."""


def scan(
    sources: Sources,
    layout: Layout,
    *,
    policies: Policies,
    without: Mapping[str, str],
    excluded: Excluded,
    block_bytes: int,
    notes: RuleFindings,
    workers: int = 1,
) -> H5Plan:
    """Read the declarations of every file, and return the plan of the data set.

    Args:
        sources: the files, in order.
        layout: the declaration of the corpus.
        policies: the caller's decisions.
        without: the reasons to leave out fields, by source.
        excluded: episodes to leave out.
        block_bytes: greatest number of bytes in one read.
        notes: collects findings that do not stop the conversion.
        workers: number of processes that read declarations, including this one.

    Raises:
        CorpusError: a file breaks a rule of the layout. The message names file, episode and key.
        ValueError: a policy names a key or dtype that no file has.
        OSError: a file cannot be opened.
    """
    held = Held(_HELD_BLOCKS * block_bytes, (source.path for source in sources.files))
    state = _Scan(sources, layout, policies, without, excluded, block_bytes, notes, held)
    with closing(listings(sources, layout, workers, held.share)) as ahead:
        for unit in units_of(sources, layout, state.fail):
            listed = [next(ahead) for _ in unit]
            state.unit(unit, listed[0])
    if not len(state.episodes):
        raise state.without_a_row()
    plan = state.plan()
    check_plan(plan, sources)
    return plan


@dataclass
class _Scan:
    sources: Sources
    layout: Layout
    policies: Policies
    without: Mapping[str, str]
    excluded: Excluded
    block_bytes: int
    notes: RuleFindings
    held: Held
    schema: SchemaUnion | None = None
    first_file: Location | None = None
    skipped: list[Entry] = field(default_factory=list)
    numbering: list[Entry] = field(default_factory=list)
    splits: dict[str, list[int]] = field(default_factory=dict)
    about: dict[int, dict[str, Any]] = field(default_factory=dict)
    units: dict[int, tuple[int, ...]] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)
    listed: Listing = NOT_LISTED
    rows: int = 0
    records: int = 0
    is_empty: bool = True

    def __post_init__(self) -> None:
        self.spans = Spans()
        is_flat = isinstance(self.layout.episodes, Segments)
        self.episodes = SourceEpisodes(self.spans, is_whole=not is_flat)

    def fail(self, index: int, error: Exception) -> None:
        """Record an unreadable file or a file of another layout, or raise the error."""
        if self.policies.on_invalid != "skip" or not is_about_the_file(error):
            raise error
        self.failed.add(index)
        self.is_empty = False
        self.skip(index, WHOLE_FILE, str(error))

    def skip(self, index: int, name: str, why: str) -> None:
        """Record an episode of a file that gives no rows, or another entry of the file."""
        self.skipped.append({"file": self.sources.files[index].name, "name": name, "why": why})

    def without_a_row(self) -> CorpusError:
        """Return the error for a corpus whose episodes give no rows (rule V38)."""
        files = [str(source.path) for source in self.sources.files[:5]]
        more = len(self.sources.files) - len(files)
        names = ", ".join(files) + (f" and {more:,} more" if more else "")
        lines = skipped_lines(self.skipped)
        others = len(lines) - _MOST_KINDS
        if others > 0:
            lines[_MOST_KINDS:] = [f"and {others:,} more reason{'s' * (others != 1)}"]
        empty = "; the source is empty" if self.is_empty else ""
        reasons = f": {'. '.join(lines)}" if lines else ""
        return CorpusError(
            f"{names}: no episode gives a row ({len(self.skipped):,} skipped){empty}{reasons} [V38]"
        )

    def unit(self, unit: tuple[int, ...], listed: Listing) -> None:
        """Scan a file, or several files read as one. ``listed`` has known declarations."""
        if unit[0] in self.failed:
            for index in unit[1:]:
                why = f"it continues an episode that begins in {self.sources.files[unit[0]].name}"
                self.skip(index, WHOLE_FILE, f"{why}, which is skipped")
            return
        files = [self.sources.files[index] for index in unit]
        if listed.held is not None:
            self.held.store(files[0].path, listed.held)
        before, schema = (len(self.episodes), self.rows, self.records), self.schema
        try:
            with open_sources(files, self.layout.clock, self.held, self.layout.chunks) as file:
                file.listed, self.listed = listed.leaves, listed
                self.units[unit[0]] = unit
                self.file(unit[0], file, file.location(files[0].name))
        except (ValueError, OSError) as error:
            if (len(self.episodes), self.rows, self.records) != before:
                raise
            for index in unit:
                self.fail(index, error)
            self.schema = schema

    def file(self, index: int, file: H5File, location: Location) -> None:
        resolved = self.layout.resolve(file, location)
        if self.schema is None:
            self.schema = SchemaUnion(resolved, self.policies, self.without, self.notes)
            self.first_file = location
        elif resolved != self.schema.layout:
            ours = {entry.name for entry in resolved.fields}
            theirs = {entry.name for entry in self.schema.layout.fields}
            raise location.error(
                f"the file has {sorted(ours - theirs)} and lacks {sorted(theirs - ours)}, other "
                f"than {self.first_file}: files of one data set must be of one kind",
                "V10",
            )
        counted: Mapping[str, Any] = {}
        if resolved.about is not None and (
            not resolved.about[0] or file.has_group(resolved.about[0])
        ):
            counters = [name for name, _ in resolved.counters]
            counted = file.attributes(resolved.about[0], (*resolved.about[1], *counters))
            self.about[index] = {
                name: value
                for name, value in counted.items()
                if isinstance(value, (str, int, float)) and name not in counters
            }
        said = resolved.sidecar_facts(location)
        if said:
            self.about[index] = {**self.about.get(index, {}), **said}
        found = resolved.episodes.find(file, resolved, location, self.block_bytes)
        for name, why in found.strangers:
            self.skip(index, name, why)
        if found.numbering is not None:
            self.numbering.append({"file": location.name, "why": found.numbering})
        for rule, text, at in found.odd:
            self.notes.add(rule, text, at)
        self.is_empty = self.is_empty and not len(found.episodes)
        if found.episodes.has_twins:
            listed = sorted(found.episodes.numbers.tolist())
            raise location.error(f"two episodes have one number: {listed}", "V33")
        first, seen, is_whole = len(self.spans), self.records, True
        for number, group in enumerate(found.episodes.groups):
            at = location.at(group=group or None)
            try:
                self.span(index, file, group, found.episodes, number, at)
            except CorpusError as error:
                if self.policies.on_invalid != "skip":
                    raise
                self.skip(index, group or WHOLE_FILE, str(error))
                is_whole = False
        self._check_totals(resolved, len(found.episodes), self.records - seen, location)
        if is_whole:
            self._check_counters(
                resolved, counted, len(found.episodes), self.records - seen, location
            )
        self._record_splits(resolved.splits(file, location), first, location)

    def _check_totals(
        self, layout: Layout, episodes: int, records: int, location: Location
    ) -> None:
        said, seen = layout.totals(location), {"episodes": episodes, "records": records}
        for name, count in said.items():
            if count != seen[name]:
                text = (
                    f"the file has {seen[name]} {name}, but its description says {count!r:.40}: it "
                    "was cut short, or changed after it was described"
                )
                if self.policies.on_invalid == "error":
                    raise location.error(text, "V15")
                self.notes.add("V15", f"{text}; the data in the file is used", location)

    def _check_counters(
        self,
        layout: Layout,
        said: Mapping[str, Any],
        episodes: int,
        records: int,
        location: Location,
    ) -> None:
        """Report attributes that are outdated because episodes were removed."""
        seen, at = {"episodes": episodes, "records": records}, (layout.about or ("",))[0]
        for name, what in layout.counters:
            if name in said and not np.array_equal(said[name], seen[what]):
                text = (
                    f"the attribute {name!r} says {said[name]!r:.40} {what}, but the file has "
                    f"{seen[what]}, which are used: it was not updated as episodes were removed"
                )
                self.notes.add("V15", text, location.at(group=at or None))

    def _record_splits(
        self, splits: Mapping[str, list[str]], first: int, location: Location
    ) -> None:
        """Record the episodes of named parts. ``first`` is the first span of the file."""
        if not splits:
            return
        mine = self.spans.within(range(first, len(self.spans)))
        positions = {span.group: span.first for span in mine}
        for name, groups in splits.items():
            known = [positions[group] for group in groups if group in positions]
            self.splits.setdefault(name, []).extend(sorted(known))
            if len(known) < len(groups):
                text = f"the split {name!r} names episodes that are not in the data set"
                missing = len(groups) - len(known)
                self.notes.add("V15", text, location, count=missing, name=repr(name))

    def span(
        self,
        index: int,
        file: H5File,
        group: str,
        refs: EpisodeRefs,
        at: int,
        location: Location,
    ) -> None:
        """Add the arrays of a group with their episodes, or nothing after an error.

        ``at`` is the position of the group among those of the file.
        """
        assert self.schema is not None
        layout, first = self.schema.layout, len(self.episodes)
        beside = layout.episodes.beside if isinstance(layout.episodes, Segments) else ()
        leaves = {leaf.path: leaf for leaf in file.leaves(group, without=beside)}
        for path, decoder in layout.decoders:
            if path in leaves:
                leaves[path] = decoder.declare(leaves[path])
        records = self.schema.check_lengths(leaves, location)
        self.records += records
        facts = self._facts(file, group, records, location)
        rows = self.rows
        try:
            if refs.bases is not None:
                starts = [part.start for part in file.parts] or [0]
                columns = self._flat_episodes(refs, self.units[index], starts)
                columns |= {"source_seed": facts.source_seed, "success": facts.success}
                self.episodes.extend(columns, dict(zip(self.units[index], starts, strict=True)))
                rows += int(columns["rows"].sum())
            elif episode := self._episode(
                index, file, group, int(refs.numbers[at]), leaves, records, facts
            ):
                self.episodes.append(episode)
                rows += episode.rows
            stop = len(self.episodes)
            if first == stop:
                return
            specs, form = self.schema.add(leaves, records, location, count=stop - first)
            for path, spec in specs.items():
                if self.schema.is_in_question(path, spec):
                    count = 1 if spec.is_per_episode else records + spec.extra
                    if self._has_values(file, group, path, spec.record_bytes, count):
                        self.schema.with_values.add(path)
        except CorpusError:
            self.episodes.cut(first)
            raise
        span = EpisodeSpan(index, group, records, first, stop, self.rows, rows - self.rows,
                    frozenset(specs), form)  # fmt: skip
        self.spans.append(span)
        self.rows = rows

    def _flat_episodes(
        self, refs: EpisodeRefs, unit: Sequence[int], starts: Sequence[int]
    ) -> dict[str, Any]:
        """Return columns of the episodes that give rows, after noting why others give none.

        Args:
            refs: the episodes, with first records, lengths and the reasons for their ends.
            unit: positions of the files that are read as one.
            starts: the first record of each of these files.
        """
        assert self.schema is not None
        assert refs.bases is not None
        assert refs.records is not None
        assert refs.terminated is not None
        layout, last_steps = self.schema.layout, self.policies.last_steps
        bases, records = refs.bases, refs.records
        parts = np.zeros(len(refs), np.int64) if refs.parts is None else refs.parts
        files = np.array(unit)[parts]
        is_open = np.full(len(refs), layout.is_open and last_steps == "keep")
        if layout.is_open and last_steps == "terminated":
            is_open = refs.terminated & (records > 0)
        rows = records - layout.lost + is_open
        why = {at: gives_no_row(int(records[at])) for at in np.flatnonzero(rows < 1).tolist()}
        if self.excluded:
            for at, key in enumerate(zip(files.tolist(), bases.tolist(), strict=True)):
                text = self.excluded.get((key[0], "", key[1]))
                if text is not None:
                    why[at] = text
        for at in sorted(why):
            first = int(bases[at]) - starts[int(parts[at])]
            self.skip(int(files[at]), f"[{first}:{first + int(records[at])}]", why[at])
        kept = np.ones(len(refs), np.bool_)
        kept[list(why)] = False
        rows = rows[kept]
        return {
            "file": files[kept],
            "number": refs.numbers[kept],
            "base": bases[kept],
            "records": records[kept],
            "rows": rows,
            "start": self.rows + np.cumsum(rows) - rows,
            "is_open": is_open[kept],
            "terminated": refs.terminated[kept],
        }

    def _facts(self, file: H5File, group: str, records: int, location: Location) -> SourceFacts:
        assert self.schema is not None
        layout = self.schema.layout
        names, attributes = layout.seen_attributes, self.listed.attributes.get(group)
        if attributes is None:
            attributes = file.attributes(group, names) if names else {}
        if layout.count is not None and layout.count in attributes:
            said = attributes[layout.count]
            # An attribute with several values or no value is not a count.
            if not np.array_equal(said, records):
                text = f"has {records} records, but the attribute {layout.count!r} says {said}"
                at = location.at(key=layout.clock)
                if self.policies.on_invalid != "keep":
                    raise at.error(text, "V15")
                self.notes.add("V15", f"{text}; all records are kept", at)
        return layout.facts(attributes, location.name, records, location, self.notes)

    def _episode(
        self,
        index: int,
        file: H5File,
        group: str,
        number: int,
        leaves: Mapping[str, H5Leaf],
        records: int,
        facts: SourceFacts,
    ) -> SourceEpisode | None:
        """Return the episode that a group holds, or None after noting why it gives no row."""
        assert self.schema is not None
        layout = self.schema.layout
        is_open = layout.is_open and self._is_kept(file, group, leaves, records, facts)
        rows = records - layout.lost + is_open
        why = self.excluded.get((index, group, 0))
        if why is None and rows < 1:
            why = gives_no_row(records)
        if why is not None:
            self.skip(index, group, why)
            return None
        return SourceEpisode(
            index, group, number, 0, records, rows, self.rows, is_open, True, facts
        )  # fmt: skip

    def _is_kept(
        self,
        file: H5File,
        group: str,
        leaves: Mapping[str, H5Leaf],
        records: int,
        facts: SourceFacts,
    ) -> bool:
        """Return whether to keep a last step without a recorded next state."""
        assert self.schema is not None
        choice = self.policies.last_steps
        if choice != "terminated" or not records:
            return choice == "keep"
        if facts.terminated is not None:
            return facts.terminated
        return any(
            bool(file.read(path_below(group, entry.name), records - 1, records).any())
            for entry in self.schema.layout.fields
            if entry.role == "terminated" and entry.name in leaves
        )

    def _has_values(
        self, file: H5File, group: str, path: str, record_bytes: int, records: int
    ) -> bool:
        """Return whether a leaf has a value other than NaN in these records."""
        # One record is enough for nearly every leaf. A small leaf is read in one read.
        start, step = 0, records if records * record_bytes <= _SMALL_BYTES else 1
        while start < records:
            stop = min(start + step, records)
            if not np.isnan(file.read(path_below(group, path), start, stop)).all():
                return True
            start, step = stop, max(1, self.block_bytes // max(1, record_bytes))
        return False

    def plan(self) -> H5Plan:
        assert self.schema is not None
        if not self.without and not self.excluded:
            # This is checked in the first scan only. Later scans may leave out the keys in
            # policies.
            self.schema.check_policies((*ALWAYS, OBSERVED_KEY))
        layout = self.schema.layout
        leaves, left_out = self.schema.leaves()
        observed = {leaf.is_unwanted for leaf in leaves if leaf.role == "observation"}
        return H5Plan(
            layout=layout,
            leaves=leaves,
            facts={
                target.key: _facts_of(leaf, target) for leaf in leaves for target in leaf.targets
            },
            episodes=self.episodes,
            spans=self.spans,
            location=partial(_location_of, self.sources, self.episodes),
            first=Location(self.sources.files[0].path, self.sources.files[0].name),
            # Without all observations of the layout, different episodes may look equal.
            detects_copies=False in observed
            or all(entry.role != "observation" for entry in layout.fields),
            left_out=left_out,
            skipped=self.skipped,
            numbering=self.numbering,
            splits=self.splits,
            about=self.about,
            units=self.units,
            held=self.held,
        )


def _facts_of(leaf: PlannedLeaf, target: Target) -> dict[str, Any]:
    """Return the facts of a column for the manifest."""
    return {
        "source": leaf.path,
        # The shift counts records of the dataset, because the preceding record is in another
        # dataset.
        "shift": target.offset - isinstance(leaf.decoder, Preceded),
        **({"source_dtype": leaf.dtype.name} if leaf.dtype != leaf.stored else {}),
        **({"one_per_episode": True} if leaf.is_per_episode else {}),
    }


def _location_of(sources: Sources, episodes: SourceEpisodes, position: int) -> Location:
    found = episodes[position]
    file = sources.files[found.file]
    return Location(file.path, file.name, found.name)


def is_about_the_file(error: Exception) -> bool:
    """Return whether the file, not a lack of resources, causes an error."""
    if isinstance(error, OSError):
        return isinstance(error, (PermissionError, IsADirectoryError)) or error.errno == errno.EIO
    return isinstance(error, CorpusError)
