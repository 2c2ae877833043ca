"""Declarations of files that are listed ahead by several processes.

Opening the datasets of thousands of groups is most of a scan. It is the same work for every file,
while the scan itself goes from file to file, since each is compared with those before it.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import closing
from functools import partial

from replaykit.datasets.engine.finding import Segments, WholeFile
from replaykit.datasets.engine.h5 import Leaf, open_h5
from replaykit.datasets.engine.layout import Layout
from replaykit.datasets.engine.places import Place
from replaykit.datasets.sources import SourceFile, Sources
from replaykit.datasets.workers import run_in_processes
from replaykit.errors import CorpusError

__all__ = ["Listing", "listings"]

Listing = Mapping[str, list[Leaf]]
"""The datasets below each group of episodes, as `H5File.leaves` returns them."""


def listings(sources: Sources, layout: Layout, workers: int) -> Generator[Listing, None, None]:
    """Yields what is known ahead of each file, in order; empty where listing it would not pay.

    What is wrong with a file is not said here: it is missing, and the scan finds it.

    Args:
        sources: the files.
        layout: what the corpus declares.
        workers: how many processes list at once; 1 stands for none.
    """
    files = sources.files
    if workers < 2 or len(files) < 2 or isinstance(layout.episodes, (Segments, WholeFile)):
        yield from ({} for _ in files)
        return
    job = partial(_list, files, layout)
    pieces = [(index, index) for index in range(len(files))]
    crew = run_in_processes(
        job, pieces, min(workers, len(files)), threads=1, start_method=None, max_tasks=None
    )
    waiting: dict[int, Listing] = {}
    wanted = 0
    with closing(crew):
        for index, found in crew:
            waiting[index] = found
            while wanted in waiting:
                yield waiting.pop(wanted)
                wanted += 1


def _list(
    files: tuple[SourceFile, ...], layout: Layout, piece: tuple[int, int]
) -> tuple[int, Listing]:
    source, found = files[piece[0]], {}
    # Leaves of most groups are equal: what is one object is sent once.
    known: dict[Leaf, Leaf] = {}
    try:
        with open_h5(source.path, is_verified=source.is_verified) as file:
            place = Place(source.path, source.name)
            resolved = layout.resolve(file, place)
            episodes = resolved.episodes.find(file, resolved, place, 1 << 20).episodes
            for group in dict.fromkeys(episode.group for episode in episodes):
                try:
                    found[group] = [known.setdefault(leaf, leaf) for leaf in file.leaves(group)]
                except CorpusError:
                    continue
    except (ValueError, OSError):
        pass
    return piece[0], found
