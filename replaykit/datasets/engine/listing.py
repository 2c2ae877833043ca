"""Declarations of files that are listed ahead by several processes.

Opening the datasets of thousands of groups is most of a scan. It is the same work for every file,
while the scan itself goes from file to file, since each is compared with those before it.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from replaykit.datasets.crew import Crew
from replaykit.datasets.engine.finding import Segments, WholeFile
from replaykit.datasets.engine.h5 import Leaf, open_h5
from replaykit.datasets.engine.held import HeldValues
from replaykit.datasets.engine.layout import Layout
from replaykit.datasets.engine.places import Place
from replaykit.datasets.sources import SourceFile, Sources
from replaykit.errors import CorpusError

__all__ = ["NOT_LISTED", "Listing", "listings"]


@dataclass(frozen=True)
class Listing:
    """What the groups of episodes of a file declare, as far as it is known ahead.

    Attributes:
        leaves: the datasets below each group, as `H5File.leaves` returns them.
        attributes: those of `Layout.seen_attributes` of each group.
        held: values that were read on the way.
    """

    leaves: dict[str, list[Leaf]]
    attributes: dict[str, dict[str, Any]]
    held: HeldValues | None = None


NOT_LISTED: Final = Listing({}, {})
_AHEAD: Final = 2
"""Files for each worker that may be listed before the scan wants them: each takes memory."""


def listings(
    sources: Sources, layout: Layout, workers: int, room: int
) -> Generator[Listing, None, None]:
    """Yields what is known ahead of each file, in order; empty where listing it would not pay.

    So it is of files that no other process has begun when the caller comes to them: it looks at
    these itself. What is wrong with a file is not said here: it is missing, and the scan finds it.

    Args:
        sources: the files.
        layout: what the corpus declares.
        workers: how many processes look at files at once, this one among them.
        room: bytes for values of each file that are read on the way.
    """
    files = sources.files
    if workers < 2 or len(files) < 2 or isinstance(layout.episodes, (Segments, WholeFile)):
        yield from (NOT_LISTED for _ in files)
        return
    pieces = [(index, index) for index in range(len(files))]
    others = min(workers, len(files)) - 1
    waiting: dict[int, Listing] = {}
    with Crew(
        partial(_list, files, layout, room), pieces[1:], others, ahead=_AHEAD * others
    ) as crew:
        for piece in pieces:
            if piece == pieces[0] or crew.take(piece) is not None:
                yield NOT_LISTED
                continue
            while piece[0] not in waiting:
                index, found = crew.answer()
                waiting[index] = found
            yield waiting.pop(piece[0])


def _list(
    files: tuple[SourceFile, ...], layout: Layout, room: int, piece: tuple[int, int]
) -> tuple[int, Listing]:
    source, held = files[piece[0]], HeldValues(room)
    found = Listing({}, {}, held)
    # Leaves of most groups are equal: what is one object is sent once.
    known: dict[Leaf, Leaf] = {}
    try:
        with open_h5(source.path, is_verified=source.is_verified) as file:
            file.hold(held)
            place = Place(source.path, source.name)
            resolved = layout.resolve(file, place)
            names = resolved.seen_attributes
            episodes = resolved.episodes.find(file, resolved, place, 1 << 20).episodes
            for group in dict.fromkeys(episode.group for episode in episodes):
                try:
                    leaves = [known.setdefault(leaf, leaf) for leaf in file.leaves(group)]
                    said = file.attributes(group, names) if names else {}
                except CorpusError:
                    continue
                found.leaves[group], found.attributes[group] = leaves, said
    except (ValueError, OSError):
        pass
    return piece[0], found
