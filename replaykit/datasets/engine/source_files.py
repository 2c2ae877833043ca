"""Join files that hold one sequence together, and list files in parallel."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import PurePosixPath
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from replaykit.datasets.engine.finding import Segments, WholeFile
from replaykit.datasets.engine.h5 import H5File, H5Leaf, H5Member, open_h5
from replaykit.datasets.engine.h5_values import Held, HeldValues
from replaykit.datasets.engine.layout import Layout
from replaykit.datasets.engine.places import Place, SourcePart, path_below
from replaykit.datasets.sources import SourceFile, Sources
from replaykit.datasets.worker_pool import WorkerPool
from replaykit.errors import CorpusError

__all__ = [
    "NOT_LISTED",
    "ChunkedFile",
    "JoinedFile",
    "Listing",
    "listings",
    "open_sources",
    "units_of",
]

_NUMBER: Final = r"0|[1-9][0-9]{0,17}"


class JoinedFile(H5File):
    """Files as one: entries of the root, and arrays below it, one after the other.

    Args:
        files: the files, in order.
        names: their paths in the corpus.
        clock: the array whose lengths say where the records of each file begin.
    """

    def __init__(self, files: Sequence[H5File], names: Sequence[str], clock: str) -> None:
        self.path = files[0].path
        self._files = files
        lengths = [file.shape(clock)[0] for file in files]
        starts = [int(start) for start in np.cumsum([0, *lengths[:-1]])]
        self.parts = tuple(
            SourcePart(start, file.path, name)
            for start, file, name in zip(starts, files, names, strict=True)
        )

    def has_group(self, path: str) -> bool:
        return self._files[0].has_group(path)

    def members(self, group: str = "") -> Iterator[H5Member]:
        return self._files[0].members(group)

    def attributes(self, group: str, names: Collection[str]) -> dict[str, Any]:
        return self._files[0].attributes(group, names)

    def leaves(self, group: str, *, without: Collection[str] = ()) -> list[H5Leaf]:
        """Returns the datasets of the first file, as long as those of all files together.

        One that another file lacks, or has with another shape or dtype, has a ``problem``.
        """
        each = [{leaf.path: leaf for leaf in f.leaves(group, without=without)} for f in self._files]
        found = []
        for path, leaf in each[0].items():
            problem, length = leaf.problem, 0
            for file, leaves in zip(self._files, each, strict=True):
                other = leaves.get(path)
                if problem is None and _kind(other) != _kind(leaf):
                    problem = f"{file.path.name} has {_said(other)}, unlike {_said(leaf)} before"
                length += other.shape[0] if other is not None and other.shape else 0
            shape = (length, *leaf.shape[1:]) if leaf.shape else ()
            found.append(replace(leaf, shape=shape, problem=problem))
        return found

    def read(
        self, dataset: str, start: int, stop: int, into: npt.NDArray[Any] | None = None
    ) -> npt.NDArray[Any]:
        parts = [file.read(dataset, a, b) for file, a, b in self._within(dataset, start, stop)]
        if into is not None:
            return np.concatenate(parts, out=into)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    @contextmanager
    def keeping(self, datasets: Collection[str], nbytes: int) -> Iterator[None]:
        with ExitStack() as stack:
            for file in self._files:
                stack.enter_context(file.keeping(datasets, nbytes))
            yield

    def entries(self, dataset: str, start: int, stop: int) -> npt.NDArray[Any]:
        parts = [file.entries(dataset, a, b) for file, a, b in self._within(dataset, start, stop)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def shape(self, dataset: str) -> tuple[int, ...]:
        shapes = [file.shape(dataset) for file in self._files]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:]) if shapes[0] else ()

    def stripe(self, dataset: str) -> tuple[int, int]:
        stripes = [file.stripe(dataset) for file in self._files]
        return max(rows for rows, _ in stripes), max(nbytes for _, nbytes in stripes)

    def _within(self, dataset: str, start: int, stop: int) -> Iterator[tuple[H5File, int, int]]:
        """Yields the files that hold records ``start .. stop - 1``, and which of theirs."""
        base, is_none = 0, True
        for file in self._files:
            length = file.shape(dataset)[0]
            begin, end = max(start - base, 0), min(stop - base, length)
            if begin < end:
                is_none = False
                yield file, begin, end
            base += length
        if is_none:
            yield self._files[0], 0, 0


class ChunkedFile(JoinedFile):
    """A file whose flat arrays are cut into numbered groups, which stand for consecutive records.

    Args:
        file: the file.
        above: the group that holds them.
        numbers: their names, as numbers.
        clock: as of `JoinedFile`.
    """

    def __init__(self, file: H5File, above: str, numbers: Sequence[int], clock: str) -> None:
        chunks = [file.below(f"{above}/{number}") for number in numbers]
        self._clock = clock
        super().__init__(chunks, [str(number) for number in numbers], clock)
        # Records are counted through the file: there is no other one to name.
        self.parts = ()

    def leaves(self, group: str, *, without: Collection[str] = ()) -> list[H5Leaf]:
        """As of `JoinedFile`; one whose records are those of other chunks has a ``problem``."""
        lengths = [chunk.shape(self._clock)[0] for chunk in self._files]
        found = []
        for leaf in super().leaves(group, without=without):
            if leaf.problem is None and leaf.shape[:1] == (sum(lengths),):
                mine = [chunk.shape(path_below(group, leaf.path))[0] for chunk in self._files]
                if mine != lengths:
                    text = f"its chunks have {mine} records, those of {self._clock!r} {lengths}"
                    leaf = replace(leaf, problem=text)
            found.append(leaf)
        return found


def _chunked(file: H5File, name: str, above: str, clock: str) -> H5File:
    """Returns a file, or its chunks as one where it holds the arrays in no other way.

    Raises:
        CorpusError: a chunk is missing between others (rule V32), or has no clock (rule V12).
    """
    if not above or not file.has_group(above):
        return file
    if any(member.name == clock for member in file.members()):
        return file
    place = file.place(name).at(group=above)
    chunks = {
        int(member.name): member
        for member in file.members(above)
        if member.is_group and re.fullmatch(_NUMBER, member.name)
    }
    if not chunks:
        return file
    numbers = sorted(chunks)
    for number in range(min(numbers[0], 1), numbers[-1]):
        if number not in chunks:
            raise place.error(
                f"the chunk {number} is missing before {numbers[-1]}: records that do not follow "
                "one another would be joined",
                "V32",
            )
    for number, member in sorted(chunks.items()):
        if clock not in member.children:
            raise place.at(key=f"{number}/{clock}").error("the required key is missing", "V12")
    return ChunkedFile(file, above, numbers, clock)


def _kind(leaf: H5Leaf | None) -> Any:
    return leaf and (leaf.shape[1:] if leaf.shape else None, leaf.dtype, leaf.problem)


def _said(leaf: H5Leaf | None) -> str:
    if leaf is None:
        return "none"
    return leaf.problem or f"shape {list(leaf.shape)} and dtype {leaf.dtype}"


@contextmanager
def open_sources(
    files: Sequence[SourceFile], clock: str, held: Held | None = None, chunks: str = ""
) -> Iterator[H5File]:
    """Opens a file, or several as one; see `open_h5` for what it raises.

    Args:
        files: the files.
        clock: as of `JoinedFile`.
        held: takes small datasets, and gives those that it has.
        chunks: as of `Layout.chunks`.
    """
    with ExitStack() as stack:
        opened = [
            stack.enter_context(open_h5(file.path, is_verified=file.is_verified)) for file in files
        ]
        if held is not None:
            for file in opened:
                file.hold(held.of(file.path))
        if len(opened) == 1:
            yield _chunked(opened[0], files[0].name, chunks, clock)
        else:
            yield JoinedFile(opened, [file.name for file in files], clock)


def units_of(
    sources: Sources, layout: Layout, fail: Callable[[int, Exception], None]
) -> list[tuple[int, ...]]:
    """Returns which files are to be opened as one, by their positions.

    Every file by itself, but where a layout lets episodes go on in the next file: there a file
    belongs to the one before it if it goes on with its last episode. Cost: there each file is
    opened once more, and its first record read.

    Args:
        sources: the files.
        layout: what the corpus declares.
        fail: told the position of a file that cannot be opened or is of another layout; may raise.

    Raises:
        CorpusError: the file in which an episode should go on is missing (rule V32).
    """
    if not layout.joined:
        return [(index,) for index in range(len(sources.files))]
    units: list[tuple[int, ...]] = []
    for index, source in enumerate(sources.files):
        place = Place(source.path, source.name)
        try:
            with open_h5(source.path, is_verified=source.is_verified) as file:
                layout.resolve(file, place)
                goes_on = layout.goes_on(file, place)
        except (ValueError, OSError) as error:
            fail(index, error)
            units.append((index,))
            continue
        if goes_on and units:
            units[-1] = (*units[-1], index)
        else:
            units.append((index,))
    for unit in units:
        for before, after in pairwise(sources.files[index] for index in unit):
            numbers = [_number(file.name) for file in (before, after)]
            if None not in numbers and numbers[1] != (numbers[0] or 0) + 1:
                place = Place(after.path, after.name)
                raise place.error(
                    f"it goes on in an episode that does not begin in it, and the file before it "
                    f"is {before.name}: those between are missing",
                    "V32",
                )
    return units


def _number(name: str) -> int | None:
    match = re.search(r"([0-9]{1,18})$", PurePosixPath(name).stem)
    return int(match[1]) if match else None


@dataclass(frozen=True)
class Listing:
    """What the groups of episodes of a file declare, as far as it is known ahead.

    Attributes:
        leaves: the datasets below each group, as `H5File.leaves` returns them.
        attributes: those of `Layout.seen_attributes` of each group.
        held: values that were read on the way.
    """

    leaves: dict[str, list[H5Leaf]]
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
    with WorkerPool(
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
    known: dict[H5Leaf, H5Leaf] = {}
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
