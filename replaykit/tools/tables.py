"""Information about folders that hold tables of another library, with checks and repairs."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from replaykit.datasets.converting import convert
from replaykit.datasets.engine.locations import RuleFindings
from replaykit.datasets.engine.policies import Judge, Policies
from replaykit.datasets.engine.table_sources import TableLayout
from replaykit.datasets.sources import files_below
from replaykit.errors import CorpusError
from replaykit.tools.facts import Facts, Finding, Table, counted
from replaykit.tools.layouts import table_layout_of, unread_sources
from replaykit.tools.source_facts import corpus_facts

_BLOCK_BYTES: Final = 16 << 20


def _layout_of(path: Path) -> TableLayout:
    found = table_layout_of(path)
    if found is None:
        raise ValueError(f"expected a folder with a LeRobot data set, got {path}")
    return found


def table_facts(path: Path, stack: ExitStack) -> tuple[Facts, Table]:
    """Return information about a table and its rows, from a conversion without images.

    Args:
        path: the folder.
        stack: removes the temporary folder of the conversion at its end.

    Raises:
        CorpusError: no episode can be converted.
    """
    layout = _layout_of(path)
    files = files_below(path, layout.suffixes)
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
    about = {**{name: facts.about[name] for name in ("layout",)}}
    about |= {
        name: ", ".join(value.values()) if isinstance(value, dict) else value
        for name, value in source.facts.items()
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
        source = layout.open(unread_sources(files_below(path, layout.suffixes)), Policies(), judge)
        kept = source.episodes.lengths > 0
        kept[list(judge.bad)] = False
        keys = [column.key for column in source.columns]
        for block in source.blocks(kept, keys, _BLOCK_BYTES):
            advance(sum(values.nbytes for values in block.values()))
    except CorpusError as error:
        return [Finding("rules", False, str(error))]
    found = [Finding("rules", False, text) for text in dict.fromkeys(judge.bad.values())]
    found += [Finding("rules", False, f"{note.first}: {note.text} [{note.rule}]") for note in notes]
    count = int(np.count_nonzero(kept)) - len([each for each in judge.bad if kept[each]])
    text = f"{counted(count, 'episode')} of layout {layout.name} without a fault"
    if skipped := len(kept) - count - len(judge.bad):  # `convert` leaves them out, too
        text += f", and {skipped} without rows"
    return [*found, Finding("episodes", count > 0 and not judge.bad, text)]


def repair(path: Path) -> list[str]:
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
    return _layout_of(path).repair(path)
