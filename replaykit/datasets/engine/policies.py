"""The caller's decisions about a conversion, and suggestions of similar names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Final, Literal

import numpy as np

from replaykit.datasets.engine.locations import Location, RuleFindings
from replaykit.declared import check_fields
from replaykit.errors import CorpusError
from replaykit.ted import DEFAULT_DONE_KEYS, Key

_MOST: Final = 3


def nearest(entry: str, names: Iterable[str]) -> list[str]:
    """Return at most three names similar to ``entry``, the most similar first.

    Upper and lower case count as equal. If no name is similar, names that contain ``entry`` are
    returned. Cost: one comparison for each name.

    Example:
        >>> from replaykit.datasets.engine.policies import nearest
        >>> nearest("Hoper-v2", ["hopper-v2", "walker-v2"])
        ['hopper-v2']
    """
    known = {name.casefold(): name for name in names}
    wanted = entry.casefold()
    found = get_close_matches(wanted, known, _MOST, 0.7)
    if not found and len(wanted) > 2:
        found = [name for name in known if wanted in name][:_MOST]
    return [known[name] for name in found or get_close_matches(wanted, known, 1)]


def meant(entry: str, names: Iterable[str]) -> str:
    """Return ``" (meant: 'a' or 'b'?)"``, or an empty text if no name is similar to ``entry``."""
    found = nearest(entry, names)
    return f" (meant: {' or '.join(map(repr, found))}?)" if found else ""


_Choice = Literal["keep", "drop"]
_MOST_NAMES: Final = 50
"""Number of names that a message lists."""


@dataclass(frozen=True, kw_only=True)
class Policies:
    """The treatment of unusual keys, dtypes and episodes in a conversion.

    The manifest records the decisions, with the affected keys and episodes. An entry of ``casts``,
    ``include`` or ``exclude`` that matches nothing in the files is probably a typo. The conversion
    then raises an error before the first write.

    Attributes:
        missing: keys that some episodes lack. ``"layout"`` raises an error if the layout requires
            the key, and otherwise drops the key and reports it. ``"error"`` always raises an error.
            ``"drop"`` drops the key and reports it, unless it is the action, the reward or an end.
            ``"pad"`` stores zeros. A bool ``[N]`` below ``"present"`` then marks the values. If no
            file has the next observation of an observation, or the reverse, this is an error, too.
            With ``"drop"`` and ``"pad"``, the unpaired key is kept and reported instead.
        extra: datasets without a field in the layout. ``"drop"`` drops and reports them.
            ``"error"`` refuses the file.
        casts: the dtypes to store, by NumPy dtype of the source, such as ``{"float64":
            "float32"}``. A value that becomes infinite, or is no value of an integer dtype,
            breaks a rule (V10).
        constant: info columns in which all rows are equal. ``"drop"`` removes them, and stores
            their value in the manifest. A column is kept and reported if its value has more than
            4,096 numbers, or is not finite.
        all_nan: info keys that contain only NaN.
        duplicate: info columns that are bit-identical to another info column. ``"drop"`` keeps the
            first column, and lists the other name in the manifest.
        repeated: columns under ``next`` that repeat values of the following row, such as next
            observations. ``"once"`` stores only the values of the last row of each episode, which
            halves the size of observations. Reading a row through this package adds the other
            values, so the rows do not change. `TensorDict.load_memmap` of the directory does not
            add these values.
        include: the keys to keep, with all keys below them; ``None`` for all keys. Flags,
            ``episode`` and ``seed`` are always kept.
        exclude: keys to leave out, with all keys below them.
        unrecorded: the last step of an episode if the state after it was not recorded.
            ``"terminated"`` keeps the step if the episode terminated there, because a target then
            does not need the next state. ``"drop"`` never keeps the step, and ``"keep"`` always
            keeps it. In a kept step, the next observation repeats the observation, and ``("next",
            "observed")`` is False.
        copies: episodes whose observations and actions equal those of an earlier episode.
            ``"layout"`` uses the choice of the layout. ``"keep"`` keeps and reports them.
            ``"drop"`` leaves them out and reports them. ``"error"`` raises an error. If all
            observations are left out, copies cannot be recognized. No copy is then reported, and
            ``"drop"`` and ``"error"`` raise an error.
        on_invalid: episodes that break a rule. ``"error"`` stops at the first such episode.
            ``"skip"`` leaves out and reports such episodes, and files that cannot be read.
            ``"keep"`` keeps and reports values that break a rule. Episodes that cannot become rows
            are still errors.
        strict: True to raise an error instead of any warning. The error is raised after all files
            are read, and contains all warnings. Nothing is published. Steps whose next state was
            not recorded are dropped, unless ``unrecorded`` is ``"keep"``.

    Raises:
        ValueError: a value or dtype is unknown, or an excluded key is always kept.

    Example:
        >>> from replaykit.datasets import Policies
        >>> Policies(casts={"float64": "float32"}, exclude=["info"]).exclude
        (('info',),)
        >>> Policies(missing="ignore")
        Traceback (most recent call last):
        ValueError: expected missing as one of ('layout', 'error', 'drop', 'pad'), got 'ignore'
    """

    missing: Literal["layout", "error", "drop", "pad"] = "layout"
    extra: Literal["drop", "error"] = "drop"
    casts: Mapping[str, str] = field(default_factory=dict)
    constant: _Choice = "keep"
    all_nan: _Choice = "drop"
    duplicate: _Choice = "keep"
    repeated: Literal["keep", "once"] = "keep"
    include: Sequence[str | Key] | None = None
    exclude: Sequence[str | Key] = ()
    unrecorded: Literal["terminated", "drop", "keep"] = "terminated"
    copies: Literal["layout", "keep", "drop", "error"] = "layout"
    on_invalid: Literal["error", "skip", "keep"] = "error"
    strict: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        casts = {}
        for source, target in self.casts.items():
            from replaykit.datasets.column_files import (
                torch_dtype,  # imported here, because the command's help needs no torch
            )

            try:
                torch_dtype(target)
                casts[np.dtype(source).name] = np.dtype(target).name
            except TypeError:
                raise ValueError(
                    f"expected casts from NumPy dtypes to dtypes of torch, got {source!r} -> "
                    f"{target!r}"
                ) from None
        object.__setattr__(self, "casts", casts)
        object.__setattr__(self, "exclude", _keys("exclude", self.exclude))
        if self.include is not None:
            object.__setattr__(self, "include", _keys("include", self.include))
        for key in self.exclude:
            if key[-1] in DEFAULT_DONE_KEYS or key in (("episode",), ("seed",)):
                raise ValueError(f"expected exclude without flags and ids, got {key}")

    @property
    def last_steps(self) -> Literal["terminated", "drop", "keep"]:
        """The value of ``unrecorded``, with the effect of ``strict``."""
        return "drop" if self.strict and self.unrecorded == "terminated" else self.unrecorded

    @property
    def may_shrink(self) -> bool:
        """True if columns may take less space than their sources."""
        given = (self.include, self.exclude, self.casts)
        lasting = (self.constant, self.duplicate, self.repeated)
        return any(given) or set(lasting) != {"keep"} or self.on_invalid == "skip"

    def keeps(self, key: Key) -> bool:
        """Return whether the caller wants the column of a key."""
        if any(key[: len(above)] == above for above in self.exclude):
            return False
        return self.include is None or any(key[: len(above)] == above for above in self.include)

    def stored_dtype(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """Return the stored dtype for values of a dtype."""
        return np.dtype(self.casts.get(dtype.name, dtype))

    def check_met(
        self, columns: Iterable[tuple[Key, np.dtype[Any] | None]], always: Iterable[Key]
    ) -> None:
        """Check that each entry matches a declaration in the files.

        Args:
            columns: the keys that datasets of the files would fill, including keys that are left
                out for their content. The value is the dtype that a cast would change, or ``None``
                if no cast is allowed.
            always: the keys that exist in every data set.

        Raises:
            ValueError: no key equals or is below an entry of ``include`` or ``exclude``, or no
                column has a dtype of ``casts``.
        """
        dtypes: dict[Key, set[str]] = {}
        for key, dtype in columns:
            dtypes.setdefault(key, set()).update(() if dtype is None else (dtype.name,))
        for name, entries, keys in (
            ("include", self.include or (), (*dtypes, *always)),
            ("exclude", self.exclude, (*dtypes,)),
        ):
            for entry in entries:
                if not any(key[: len(entry)] == entry for key in keys):
                    raise ValueError(_unmet(name, "/".join(entry), map("/".join, keys)))
        there = set().union(*dtypes.values())
        for source in self.casts:
            if source not in there:
                raise ValueError(_unmet("casts", source, there))

    def to_json(self) -> dict[str, Any]:
        """Return the policies as JSON values."""
        values = dict(vars(self))
        if not self.strict:
            # Identities of older data sets contain these values, but not this policy.
            del values["strict"]
        values["exclude"] = [list(key) for key in self.exclude]
        values["include"] = None if self.include is None else [list(key) for key in self.include]
        return values


def _keys(name: str, given: Any) -> tuple[Key, ...]:
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise ValueError(f"expected {name} as a list of keys, got {given!r}")
    keys = tuple((key,) if isinstance(key, str) else tuple(key) for key in given)
    if not all(key and all(isinstance(part, str) for part in key) for key in keys):
        raise ValueError(f"expected {name} as a list of keys, got {given!r}")
    return keys


def _unmet(name: str, entry: str, there: Iterable[str]) -> str:
    names = sorted(set(there))
    more = ", ..." * (len(names) > _MOST_NAMES)
    what = "dtypes" if name == "casts" else "keys"
    near = meant(entry, names)
    return (
        f"{name}: {entry!r} matches nothing in the files{near}; expected it among the {what} "
        f"{', '.join(names[:_MOST_NAMES])}{more}"
    )


class Judge:
    """The decision about episodes that break a rule; see `Policies.on_invalid`.

    Attributes:
        bad: the reasons to leave out episodes, by position.
    """

    def __init__(self, on_invalid: str, notes: RuleFindings) -> None:
        self.bad: dict[int, str] = {}
        self.notes = notes
        self._on_invalid = on_invalid

    @property
    def skips(self) -> bool:
        """True if bad episodes are left out."""
        return self._on_invalid == "skip"

    def condemn(self, position: int, error: CorpusError) -> None:
        """Record that an episode cannot become rows.

        Raises:
            CorpusError: the given ``error``, unless bad episodes are left out.
        """
        if not self.skips:
            raise error
        self.bad.setdefault(position, str(error))

    def fail(self, position: int, location: Location, what: str, rule: str) -> None:
        """Record that values of an episode break a rule.

        Raises:
            CorpusError: the violation, unless bad episodes are left out or such values are
                accepted.
        """
        if self._on_invalid == "keep":
            self.notes.add(rule, f"{what}, and is kept", location)
        else:
            self.condemn(position, location.error(what, rule))
