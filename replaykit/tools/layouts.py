"""Layouts by name, and guesses of the layout of files.

A guess scans a file with every layout, as a conversion does. The errors of a scan are the reasons
against the layout. Its findings are the reasons for the layout.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from replaykit import registry
from replaykit.datasets.engine.conversion import ConvertOptions
from replaykit.datasets.engine.layout import Layout
from replaykit.datasets.engine.locations import RuleFindings
from replaykit.datasets.engine.plan import H5Plan
from replaykit.datasets.engine.policies import Policies, meant
from replaykit.datasets.engine.scan import scan
from replaykit.datasets.engine.table_sources import TableLayout
from replaykit.datasets.sources import SourceFile, Sources, names_of
from replaykit.errors import CorpusError
from replaykit.tools.facts import LayoutGuess, counted

_OTHER: Final = ("[V04]", "[V12]", "[V10]")
"""Rules that files of another layout break.

A file that breaks only other rules has the scanned layout.
"""
_EMPTY: Final = "[V38]"
_MOST_NAMES: Final = 8
TIE: Final = "a tie with"
"""The first words of the reason that names a layout which fits equally well."""


def known_layouts() -> dict[str, Layout]:
    """Return the layouts of the package, by name.

    Example:
        >>> from replaykit.inspection import known_layouts
        >>> "robomimic" in known_layouts()
        True
    """
    return dict(sorted(_of_kind("layout").items()))


def table_layouts() -> dict[str, TableLayout]:
    """Return the package's layouts of tables, by name."""
    return _of_kind("table layout")


def _of_kind(kind: str) -> dict[str, Any]:
    return {layout.name: layout for layout in map(registry.load, registry.of_kind(kind))}


def table_layout_of(path: Path) -> TableLayout | None:
    """Return the layout of a folder or file that holds a table; None for other data."""
    return next((each for each in table_layouts().values() if each.recognizes(path)), None)


def layout_named(name: str) -> Layout | TableLayout:
    """Return a layout of the package, or a custom one.

    Args:
        name: the name of a layout, or ``package.module:NAME`` or ``file.py:NAME`` for a custom
            layout.

    Raises:
        ValueError: there is no layout of this name.
        ImportError, OSError: the module cannot be loaded, or its code raises an error.

    Example:
        >>> from replaykit.inspection import layout_named
        >>> layout_named("aloha").natural_files
        True
        >>> layout_named("replaykit.datasets.families:ALOHA").name
        'aloha'
    """
    known: dict[str, Layout | TableLayout] = {**known_layouts(), **table_layouts()}
    if name in known:
        return known[name]
    module, _, attribute = name.rpartition(":")
    if not module or not attribute:
        raise ValueError(
            f"expected a layout as one of {sorted(known)}, or a custom one as module:NAME or "
            f"file.py:NAME, got {name!r}{meant(name, known)}"
        )
    try:
        found = getattr(_module(module), attribute, None)
    except (ImportError, OSError):
        raise
    except (Exception, SystemExit) as error:  # the module may raise anything
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise ImportError(f"{module} cannot be loaded: {why}") from error
    if not isinstance(found, (Layout, TableLayout)):
        raise ValueError(f"expected {name} to be a replaykit.datasets.Layout, got {found!r:.80}")
    return found


def _module(name: str) -> object:
    if not name.endswith(".py"):
        return importlib.import_module(name)
    path = Path(name).resolve()
    if not path.is_file():
        raise FileNotFoundError(f"{name} is not there")
    # The prefix makes the name unique, because the file may have the name of an installed module.
    spec = importlib.util.spec_from_file_location(f"replaykit_layouts_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{name} cannot be loaded as a module")
    module = importlib.util.module_from_spec(spec)
    # Worker processes find the classes of a layout by the name of their module.
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[spec.name]
        raise
    return module


def guess_layout(paths: Sequence[Path]) -> LayoutGuess:
    """Guess the layout of files among the package's layouts, with reasons.

    Args:
        paths: H5 files of one data set. Only the first file is scanned.

    Raises:
        CorpusError: the file is not HDF5, or damaged.
        OSError: the file cannot be opened.

    Cost: the names and shapes in one file are read once per layout. The flags of a flat file are
    also read.
    """
    path = Path(paths[0])
    fits: dict[str, tuple[int, tuple[str, ...], str | None]] = {}
    refused: dict[str, str] = {}
    for name, layout in known_layouts().items():
        try:
            plan = scan_files([path], layout)
        except CorpusError as error:
            text = str(error).removeprefix(f"{path}: ")
            if "[V01]" in text or "[V03]" in text:
                raise
            if text.endswith(_OTHER):
                refused[name] = text
            else:
                is_empty = text.endswith(_EMPTY)
                reason = "its arrays exist but have no rows" if is_empty else "its keys exist"
                fits[name] = (1_000_000, (reason,), text)
            continue
        fits[name] = (len(plan.left_out), _reasons(plan), None)
    if not fits:
        return LayoutGuess(None, (), refused)
    # The layout that leaves out the fewest datasets describes the file best.
    ordered = sorted(fits, key=lambda name: (fits[name][0], name))
    best = ordered[0]
    reasons = fits[best][1]
    for name in ordered[1:]:
        if fits[name][0] == fits[best][0]:
            reasons += (
                f"{TIE} {name}, which leaves out as many: {best} is the first by name; give "
                f"{name} as the layout if it is that",
            )
        else:
            reasons += (f"{name} also fits, but leaves out more ({_said(fits[name])})",)
    return LayoutGuess(best, reasons, refused, fits[best][2])


def _said(entry: tuple[int, tuple[str, ...], str | None]) -> str:
    return entry[2] or f"{entry[0]} datasets that are not in the layout"


def _reasons(plan: H5Plan) -> tuple[str, ...]:
    episodes, skipped = len(plan.episodes), len(plan.skipped)
    first, last = plan.episodes[0].name, plan.episodes[-1].name
    where = f"{first} ... {last}" if episodes > 1 else first
    records = sum(span.records for span in plan.spans)
    found = [
        f"{counted(episodes, 'episode')} at the paths of the layout: {where}",
        f"{records} records of {plan.layout.clock!r} make {plan.rows} rows",
    ]
    by_role: dict[str, list[str]] = {}
    for leaf in plan.leaves:
        by_role.setdefault(leaf.role, []).append(leaf.path)
    for role, paths in by_role.items():
        shown = ", ".join(paths[:_MOST_NAMES]) + ", ..." * (len(paths) > _MOST_NAMES)
        found.append(f"{role}: {shown}")
    if plan.left_out:
        shown = ", ".join(entry["key"] for entry in plan.left_out[:_MOST_NAMES])
        found.append(f"{len(plan.left_out)} datasets are not in the layout: {shown}")
    if skipped:
        found.append(f"{skipped} entries are not episodes")
    return tuple(found)


def unread_sources(paths: Sequence[Path], *, natural: bool = False) -> Sources:
    """Describe files without reading them. The checksums are empty.

    Raises:
        FileNotFoundError: a file does not exist.
    """
    files = [SourceFile(path, name, path.stat().st_size, "") for path, name in names_of(paths)]
    return Sources(tuple(files), {"kind": "local"}, natural)


def scan_files(paths: Sequence[Path], layout: Layout, policies: Policies | None = None) -> H5Plan:
    """Return the plan of a conversion.

    Raises:
        CorpusError: the files break a rule of the layout.
    """
    return scan(
        unread_sources(paths, natural=layout.natural_files),
        layout,
        policies=Policies() if policies is None else policies,
        without={},
        excluded={},
        block_bytes=ConvertOptions().block_bytes,
        notes=RuleFindings(),
    )
