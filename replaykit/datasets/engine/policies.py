"""Define what a caller decides about a conversion, and suggest the nearest names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from typing import Any, Final, Literal, get_args, get_origin, get_type_hints

import numpy as np

from replaykit.ted import DEFAULT_DONE_KEYS, Key

__all__ = ["Policies", "meant", "nearest"]

_MOST: Final = 3


def nearest(entry: str, names: Iterable[str]) -> list[str]:
    """Return at most three names that look like ``entry``, the most similar first.

    Upper and lower case count as equal. A name that contains ``entry`` looks like it too.
    Cost: one comparison for each name, for an error text.

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
    """Return ``" (meant: 'a' or 'b'?)"``, or an empty text where no name looks like ``entry``."""
    found = nearest(entry, names)
    return f" (meant: {' or '.join(map(repr, found))}?)" if found else ""


_Choice = Literal["keep", "drop"]
_MOST_NAMES: Final = 50
"""Names that a message lists."""


@dataclass(frozen=True, kw_only=True)
class Policies:
    """What is done with keys, dtypes and episodes that are not as one would wish.

    Whatever is decided is in the manifest, with the keys and episodes that it met. An entry of
    ``casts``, ``include`` or ``exclude`` that meets nothing in the files is an error of the
    conversion, before anything is written: it would else be a typo that nobody sees.

    Attributes:
        missing: keys that some episodes lack. ``"layout"``: as the layout says: an error where
            the key is required, else left out and reported. ``"error"``: always one. ``"drop"``:
            left out and reported, unless it is the action, the reward or an end. ``"pad"``:
            zeros, with a bool ``[N]`` below ``"present"`` that tells them from values. An
            observation whose next one no file has, or the other way round, is an error as well;
            with ``"drop"`` and ``"pad"`` it stays and is reported.
        extra: datasets that the layout has no field for: ``"drop"`` reports them, ``"error"``
            refuses the file.
        casts: NumPy dtype of the source -> dtype to store, such as ``{"float64": "float32"}``.
            A value that becomes infinite is an error.
        constant: columns of infos in which all rows are equal: ``"drop"`` takes them out and
            keeps their value in the manifest; those that it cannot hold, of more than 4,096
            numbers or not finite, stay and are reported.
        all_nan: infos that are NaN throughout.
        duplicate: columns of infos that are another one bit for bit: ``"drop"`` keeps the first
            and notes the other name in the manifest.
        repeated: columns under ``next`` that repeat those of the following row, such as next
            observations. ``"once"`` stores of them only what the last row of each episode arrives
            at: half of what observations take. Rows are the same, and put together when they are
            read; `TensorDict.load_memmap` of the folder does not know of it.
        include: the keys to keep, with all below them; ``None`` for all. Flags, ``episode`` and
            ``seed`` are always there.
        exclude: keys to leave out, with all below them.
        unrecorded: the last step of an episode where the state that it led to was not recorded.
            ``"terminated"``: kept if the episode terminated there, since the state is then of no
            use; ``"drop"``: never kept; ``"keep"``: always kept. A kept one has its own
            observation as the next one and ``("next", "observed")`` False.
        copies: episodes with the observations and actions of an earlier one. ``"layout"``: as the
            layout says; ``"keep"`` reports them; ``"drop"`` leaves them out and reports them;
            ``"error"`` refuses them. Where all observations are left out none can be told: then
            none is reported, and ``"drop"`` and ``"error"`` are errors.
        on_invalid: episodes that break a rule. ``"error"`` stops at the first; ``"skip"`` leaves
            them out and reports them, and files that cannot be read at all; ``"keep"`` keeps
            values that break a rule and reports them, while what cannot be rows at all is an
            error.
        strict: whatever would be a warning is an error, told of together when all has been read:
            nothing is published. Steps whose next state was not recorded are dropped, unless
            ``unrecorded`` is ``"keep"``.

    Raises:
        ValueError: another value; a dtype that there is not; a key that is always there.

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
        for name, known in _choices().items():
            given = getattr(self, name)
            if given not in known:
                raise ValueError(f"expected {name} as one of {known}, got {given!r}")
        casts = {}
        for source, target in self.casts.items():
            from replaykit.datasets.column_files import (
                torch_dtype,  # the command's help needs no torch
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
        """When a last step stays whose next state was not recorded; as ``unrecorded``."""
        return "drop" if self.strict and self.unrecorded == "terminated" else self.unrecorded

    @property
    def may_shrink(self) -> bool:
        """Whether columns may take less room than what they are made of."""
        given = (self.include, self.exclude, self.casts)
        lasting = (self.constant, self.duplicate, self.repeated)
        return any(given) or set(lasting) != {"keep"} or self.on_invalid == "skip"

    def keeps(self, key: Key) -> bool:
        """Whether a column of that key is asked for."""
        if any(key[: len(above)] == above for above in self.exclude):
            return False
        return self.include is None or any(key[: len(above)] == above for above in self.include)

    def stored_dtype(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """Returns the dtype to store values of a dtype in."""
        return np.dtype(self.casts.get(dtype.name, dtype))

    def check_met(
        self, columns: Iterable[tuple[Key, np.dtype[Any] | None]], always: Iterable[Key]
    ) -> None:
        """Checks that each entry meets what files declare.

        Args:
            columns: the keys that datasets of the files would fill, also where they are left out
                for what is in them; with the dtype that a cast would meet, if it may be cast.
            always: the keys that are there whatever the files hold.

        Raises:
            ValueError: an entry of ``include`` or ``exclude`` with no key at or below it; a dtype
                of ``casts`` that nothing has.
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
        """Returns JSON values."""
        values = dict(vars(self))
        if not self.strict:
            # As it was said before there was a choice: it is part of what a data set is.
            del values["strict"]
        values["exclude"] = [list(key) for key in self.exclude]
        values["include"] = None if self.include is None else [list(key) for key in self.include]
        return values


@cache
def _choices() -> dict[str, tuple[Any, ...]]:
    """What there is to choose from, by the policies that are a choice."""
    types = get_type_hints(Policies)
    choices = {name: get_args(each) for name, each in types.items() if get_origin(each) is Literal}
    return {**choices, "strict": (False, True)}


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
        f"{name}: {entry!r} meets nothing in the files{near}; expected it among the {what} "
        f"{', '.join(names[:_MOST_NAMES])}{more}"
    )
