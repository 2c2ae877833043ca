"""The schema that all episodes of a corpus share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Final

import numpy as np

from replaykit.datasets.column_files import torch_dtype, unstorable
from replaykit.datasets.engine.fields import Field
from replaykit.datasets.engine.h5 import H5Leaf
from replaykit.datasets.engine.layout import Bounds, Layout
from replaykit.datasets.engine.locations import Location, RuleFindings
from replaykit.datasets.engine.plan import Entry, PlannedLeaf
from replaykit.datasets.engine.policies import Policies
from replaykit.ted import Key

_Use = tuple[str, int]
"""A dataset, and the position of a field that takes it.

Several fields may take the same dataset.
"""

_MOST_NAMES: Final = 5
"""Number of keys that a message lists."""
_NARROW: Final = ("float16", "int8")
"""Default dtypes of loggers that lose digits or wrap around (rule V14)."""


@dataclass(frozen=True)
class Spec:
    """The declaration of a leaf in an episode. ``shape`` is the shape of one record."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    stored: np.dtype[Any]
    problem: str | None
    is_per_episode: bool
    extra: int

    @property
    def record_bytes(self) -> int:
        """Size of one record, in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        if self.problem is not None:
            return self.problem
        length = "one value, of" if self.is_per_episode else ""
        shape = ", ".join(["T"][self.is_per_episode :] + [str(size) for size in self.shape])
        return f"{length} shape [{shape}] and dtype {self.dtype}".lstrip()


@dataclass
class _Signature:
    """The leaves of episodes with equal declarations."""

    specs: dict[_Use, Spec]
    first: Location
    number: int
    count: int = 0


class SchemaUnion:
    """The union of the declarations of all episodes of a corpus.

    Args:
        layout: the declaration of the corpus.
        policies: the caller's decisions.
        without: the reasons to leave out fields, by source.
        notes: collects findings that do not stop the conversion.
    """

    def __init__(
        self, layout: Layout, policies: Policies, without: Mapping[str, str], notes: RuleFindings
    ) -> None:
        self.layout = layout
        self.with_values: set[str] = set()
        self._policies = policies
        self._without = without
        self._notes = notes
        self._fields: dict[str, dict[_Use, Field]] = {}
        self._specs: dict[tuple[Any, ...], Spec] = {}
        self._signatures: dict[tuple[Any, ...], _Signature] = {}
        self._foreign: dict[str, Location] = {}
        self._episodes = 0

    # -- one episode after another --------------------------------------------------------------

    def check_lengths(self, leaves: Mapping[str, H5Leaf], location: Location) -> int:
        """Check the lengths of all leaves of fields, and return the length of the clock.

        An optional leaf may also be a single value, which is then used for all records.

        Raises:
            CorpusError: a leaf breaks one of the rules V10 to V12.
        """
        for entry in self.layout.fields:
            if entry.required and not any(map(self._why_without, entry.sources)):
                self._require(entry, leaves, location)
        clock = leaves.get(self.layout.clock)
        if clock is None:
            raise location.at(key=self.layout.clock).error("the required key is missing", "V12")
        for path, leaf in leaves.items():
            for known in self.fields_of(path).values():
                self._check_length(path, leaf, known, clock, location)
        return clock.shape[0]

    def _check_length(
        self, path: str, leaf: H5Leaf, known: Field, clock: H5Leaf, location: Location
    ) -> None:
        is_unusable = leaf.problem is not None and not leaf.shape
        if is_unusable and known.required:
            raise location.at(key=path).error(f"cannot be a column: {leaf.problem}", "V10")
        if is_unusable or (clock.shape and not known.required and leaf.shape[:1] in ((), (1,))):
            return
        extra = known.extra(self.layout.alignment)
        if not leaf.shape or not clock.shape or leaf.shape[0] != clock.shape[0] + extra:
            text = f"has {_length(leaf)}, but {self.layout.clock!r} has {_length(clock)}"
            if extra:
                text += f", so that {clock.shape[0] + extra if clock.shape else 0} are expected"
            hint = self.layout.hint(path, leaf.shape)
            raise location.at(key=path).error(text if hint is None else f"{text}; {hint}", "V11")

    def _require(self, entry: Field, leaves: Mapping[str, H5Leaf], location: Location) -> None:
        if entry.is_group:
            missing = [] if any(map(entry.covers, leaves)) else [entry.name.rstrip("/")]
        else:
            missing = [path for path in entry.sources if path not in leaves]
        for path in missing:
            below = not entry.is_group and any(name.startswith(f"{path}/") for name in leaves)
            what = "is a group, expected an array" if below else "is missing"
            raise location.at(key=path).error(f"the required key {what}", "V12")

    def add(
        self, leaves: Mapping[str, H5Leaf], records: int, location: Location, *, count: int
    ) -> tuple[dict[str, Spec], int]:
        """Add declarations of episodes, and return the leaves of fields and their form.

        Raises:
            CorpusError: a required leaf differs from the leaf of the first episode.
        """
        specs: dict[_Use, Spec] = {}
        for path, leaf in leaves.items():
            fields = self.fields_of(path)
            if fields:
                for use, entry in fields.items():
                    specs[use] = self._known_spec(use, leaf, entry, records)
            elif self._policies.extra == "error" and not self._why_without(path):
                at = location.at(key=path)
                raise at.error(f"it is no part of the layout {self.layout.name!r}", "V10")
            else:
                self._foreign.setdefault(path, location)
        # Equal specs are one object.
        known = tuple((use, id(spec)) for use, spec in specs.items())
        signature = self._signatures.get(known)
        if signature is None:
            signature = _Signature(specs, location, len(self._signatures))
            self._compare(signature)
            self._signatures[known] = signature
        signature.count += count
        self._episodes += count
        # The order is reversed, so that the first of several uses of a leaf is returned.
        return {path: specs[path, at] for path, at in reversed(specs)}, signature.number

    def fields_of(self, path: str) -> dict[_Use, Field]:
        """Return the fields that take a leaf.

        These are the first field that covers the leaf, other fields of the same source, and fields
        that name the leaf. The result is cached, because every leaf of every episode needs it.
        """
        if path not in self._fields:
            found: dict[_Use, Field] = {}
            first: Field | None = None
            for at, entry in enumerate(self.layout.fields):
                if not entry.covers(path) or self._why_without(path):
                    continue
                first = first or entry
                if entry.source == first.source or path in entry.sources:
                    found[path, at] = entry
            self._fields[path] = found
        return self._fields[path]

    def is_in_question(self, path: str, spec: Spec) -> bool:
        """Return whether a leaf is left out if all its values are NaN."""
        if path in self.with_values or spec.problem is not None:
            return False
        if all(entry.required for entry in self.fields_of(path).values()):
            return False
        is_plain = path not in dict(self.layout.decoders)
        is_float = spec.dtype.kind in "fc" and 0 not in spec.shape
        if not is_plain or not is_float or self._policies.all_nan == "keep":
            self.with_values.add(path)
            return False
        return True

    def _is_required(self, entry: Field) -> bool:
        if entry.is_group and self._policies.missing in ("drop", "pad"):
            return False
        return entry.required

    def _compare(self, signature: _Signature) -> None:
        """Compare the required leaves with the leaves of the first episode."""
        first = next(iter(self._signatures.values()), signature)
        for use in dict.fromkeys([*signature.specs, *first.specs]):
            path, entry = use[0], self.layout.fields[use[1]]
            if not (self._is_required(entry) or self._policies.missing == "error"):
                continue
            at = signature.first.at(key=path)
            spec, expected = signature.specs.get(use), first.specs.get(use)
            if spec is None or expected is None:
                has, lacks = (first, at) if spec is None else (signature, first.first.at(key=path))
                raise lacks.error(f"the key is missing, but {has.first} has it", "V12")
            if spec.problem is not None:
                raise at.error(f"cannot be a column: {spec.problem}", "V10")
            if (entry.role == "reward" or entry.is_end) and math.prod(spec.shape) != 1:
                raise at.error(f"has {spec}, expected one number per record", "V10")
            same = spec.stored == expected.stored or entry.is_end
            if (
                spec.shape != expected.shape
                or not same
                or spec.is_per_episode != expected.is_per_episode
            ):
                raise at.error(f"has {spec}, but {first.first} has {expected}", "V10")

    def _known_spec(self, use: _Use, leaf: H5Leaf, entry: Field, records: int) -> Spec:
        is_full = leaf.shape[:1] == (records + entry.extra(self.layout.alignment),)
        kind = (use, leaf.shape[1:], leaf.dtype, leaf.problem, is_full)
        found = self._specs.get(kind)
        if found is None:
            spec = self._spec(leaf, entry, records)
            found = next((known for known in self._specs.values() if known == spec), spec)
            self._specs[kind] = found
        return found

    def _spec(self, leaf: H5Leaf, entry: Field, records: int) -> Spec:
        extra = entry.extra(self.layout.alignment)
        is_per_episode = leaf.problem is None and leaf.shape[:1] != (records + extra,)
        shape = leaf.shape[1:]
        is_column = entry.column or entry.role == "reward"
        if shape == () and is_column:
            shape = (1,)
        elif (entry.is_end or entry.role == "reward") and math.prod(shape) == 1:
            shape = (1,) if is_column else ()
        dtype = np.dtype(leaf.dtype)
        stored = np.dtype(entry.dtype) if entry.dtype else self._policies.stored_dtype(dtype)
        return Spec(shape, dtype, stored, leaf.problem, is_per_episode, extra)

    # -- all of them ----------------------------------------------------------------------------

    @property
    def _first(self) -> Location:
        """The location of the first episode."""
        return next(iter(self._signatures.values())).first

    def leaves(self) -> tuple[list[PlannedLeaf], list[Entry]]:
        """Return the leaves that become columns, and the leaves that are left out.

        Raises:
            CorpusError: successors have another shape or dtype than the states.
        """
        foreign = f"it is no part of the layout {self.layout.name!r}"
        left_out = [
            {"key": path, "why": self._why_without(path) or f"{foreign} (in {location.brief})"}
            for path, location in sorted(self._foreign.items())
        ]
        specs: dict[_Use, Spec] = {}
        for signature in self._signatures.values():
            for use, spec in signature.specs.items():
                specs.setdefault(use, spec)
        found = []
        for use in sorted(specs):
            path, entry = use[0], self.layout.fields[use[1]]
            if not isinstance(entry.source, str) and path != entry.sources[0]:
                continue
            why = None if self._is_required(entry) else self._why_left_out(use, specs[use])
            if why is not None:
                left_out.append({"key": path, "why": why})
                continue
            found.append(self._leaf(use, entry, specs))
        # Leaves that the caller does not want are still compared.
        witnesses = set(self.layout.witnesses({leaf.path for leaf in found}))
        self._report_unverified(found)
        found = [leaf for leaf in found if not leaf.is_unwanted or leaf.path in witnesses]
        found.sort(key=lambda leaf: leaf.is_successor)
        self._compare_successors([leaf for leaf in found if not leaf.is_unwanted])
        return found, left_out

    def _report_unverified(self, leaves: Sequence[PlannedLeaf]) -> None:
        """Report next states that are not compared because a key is left out."""
        targets = [
            (leaf, target.key)
            for leaf in leaves
            for target in self.layout.fields[leaf.field].targets(
                self.layout.alignment, leaf.paths[0]
            )
        ]
        states = {key for _, key in targets}
        left_out: dict[Key, str] = {}
        for leaf, key in targets:
            if leaf.is_successor and key[1:] in states:
                lacking = [each for each in (key, key[1:]) if not self._policies.keeps(each)]
                left_out |= dict.fromkeys(lacking, leaf.path)
        if left_out:
            names = ["/".join(key) for key in left_out]
            listed = ", ".join(names[:_MOST_NAMES]) + ", ..." * (len(names) > _MOST_NAMES)
            text = (
                f"{listed} left out by the policies, so that it is unverified whether steps arrive "
                "at the states that the next ones start from"
            )
            self._notes.add("V22", text, self._first.at(key=next(iter(left_out.values()))))

    def check_policies(self, always: Iterable[Key]) -> None:
        """Check that policies name existing keys. ``always`` has the keys without a leaf.

        Raises:
            ValueError: an entry of the policies matches nothing.
        """
        declared = {
            (path, spec.dtype)
            for signature in self._signatures.values()
            for (path, _), spec in signature.specs.items()
        }
        columns = []
        for path, dtype in declared:
            for entry in self.fields_of(path).values():
                castable = None if entry.dtype else dtype
                targets = entry.targets(self.layout.alignment, path)
                columns += [(target.key, castable) for target in targets]
        self._policies.check_met(columns, always)

    def _compare_successors(self, leaves: Sequence[PlannedLeaf]) -> None:
        """Check that successors have the shape and dtype of the states (rule V10)."""
        self._require_pairs([leaf.path for leaf in leaves])
        states = {target.key: leaf for leaf in leaves for target in leaf.targets}
        for leaf in leaves:
            for target in leaf.targets if leaf.is_successor else ():
                state = states.get(target.key[1:], leaf)
                if (state.shape, state.stored) != (leaf.shape, leaf.stored):
                    raise self._first.at(key=leaf.path).error(
                        f"has shape {list(leaf.shape)} and dtype {leaf.stored}, but {state.path} "
                        f"has {list(state.shape)} and {state.stored}",
                        "V10",
                    )

    def _require_pairs(self, paths: Sequence[str]) -> None:
        """Check that each state has a successor, and each successor a state (rule V12).

        Without this check, rows could have a key only before or only after the step. If the
        policies drop or pad missing keys, the unpaired key is kept and reported.
        """
        groups = [entry for entry in self.layout.fields if entry.is_group]
        for state, successor in product(groups, groups):
            if state.before is None or successor.describes != "successor":
                continue
            if successor.after != ("next", *state.before):
                continue
            ours, theirs = _names(state, paths), _names(successor, paths)
            for name in sorted(ours ^ theirs):
                has, lacks = (state, successor) if name in ours else (successor, state)
                above = state.before if lacks is state else ("next", *state.before)
                if not self._policies.keeps((*above, *name.split("/"))):
                    continue
                at = self._first.at(key=f"{lacks.name}{name}")
                text = f"the key is missing, but {has.name}{name} is there"
                if self._policies.missing not in ("drop", "pad"):
                    raise at.error(text, "V12")
                self._notes.add("V12", text, at, name=f"{has.name}{name}")

    def _leaf(self, use: _Use, entry: Field, specs: Mapping[_Use, Spec]) -> PlannedLeaf:
        path, spec = use[0], specs[use]
        if spec.dtype.name in _NARROW and not entry.is_end:
            text = f"{path} is stored as {spec.dtype}, the loggers' default, and kept so"
            self._notes.add("V14", text, self._first, name=path)
        paths: tuple[str, ...] = (path,)
        name = path
        if not isinstance(entry.source, str):
            parts = [specs[part, use[1]] for part in entry.sources]
            width = sum(math.prod(part.shape) for part in parts)
            dtype = np.result_type(*(part.dtype for part in parts))
            stored = np.dtype(entry.dtype) if entry.dtype else self._policies.stored_dtype(dtype)
            spec = replace(spec, shape=(width,), dtype=dtype, stored=stored)
            paths, name = entry.sources, entry.name
        targets = entry.targets(self.layout.alignment, path)
        return PlannedLeaf(
            path=name,
            paths=paths,
            role=entry.role,
            shape=spec.shape,
            dtype=spec.dtype,
            stored=spec.stored,
            targets=tuple(target for target in targets if self._policies.keeps(target.key)),
            extra=spec.extra,
            is_per_episode=spec.is_per_episode,
            is_padded=any(use not in known.specs for known in self._signatures.values()),
            is_successor=entry.describes == "successor",
            decoder=dict(self.layout.decoders).get(path),
            bounds=self._bounds(path, spec.shape),
            field=use[1],
        )

    def _bounds(self, path: str, shape: tuple[int, ...]) -> Bounds | None:
        """Return the bounds of a leaf, or ``None`` if no bounds fit its shape."""
        found = dict(self.layout.bounds).get(path)
        fits = found is not None and all(len(side) in (1, math.prod(shape)) for side in found)
        return found if fits else None

    def _why_without(self, path: str) -> str | None:
        for source, why in self._without.items():
            if path.startswith(source) if source.endswith("/") else path == source:
                return why
        return None

    def _why_left_out(self, use: _Use, spec: Spec) -> str | None:
        """Return why an optional leaf is left out, or ``None`` if it is kept."""
        path, entry = use[0], self.layout.fields[use[1]]
        lacking = [known for known in self._signatures.values() if use not in known.specs]
        if lacking:
            others, where = [name for name, _ in lacking[0].specs], lacking[0].first.brief
            below = any(o.startswith(f"{path}/") for o in (*others, *self._foreign))
            above = any(path.startswith(f"{other}/") for other in others)
            if below or above:
                return f"it is an array in some episodes and a group in others ({where})"
            if self._policies.missing != "pad":
                count = sum(known.count for known in lacking)
                return f"missing from {count} of {self._episodes} episodes, first {where}"
        if spec.problem is not None:
            return spec.problem
        if 0 in spec.shape and entry.source == "/":
            return f"it has {spec}: nothing in a record"
        for known in self._signatures.values():
            other = known.specs.get(use)
            if other is not None and other != spec:
                return f"it has {spec} in one episode and {other} in {known.first.brief}"
        if path not in self.with_values and not entry.required:
            return "it is NaN throughout"
        try:
            torch_dtype(spec.stored)
        except TypeError as error:
            return str(error)
        return unstorable(tuple(path.split("/")))


def _names(entry: Field, paths: Sequence[str]) -> set[str]:
    return {path.removeprefix(entry.name) for path in paths if path.startswith(entry.name)}


def _length(leaf: H5Leaf) -> str:
    if not leaf.shape:
        return "no length"
    return f"{leaf.shape[0]} record{'s' * (leaf.shape[0] != 1)}"
