"""Files that are joined to one sequence, and parallel listings of files."""

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

from replaykit.datasets.engine.episode_finders import Segments, WholeFile
from replaykit.datasets.engine.h5 import H5File, H5Leaf, H5Member, open_h5
from replaykit.datasets.engine.h5_values import Held, HeldValues
from replaykit.datasets.engine.layout import Layout
from replaykit.datasets.engine.locations import Location, SourcePart, path_below
from replaykit.datasets.sources import SourceFile, Sources
from replaykit.datasets.worker_pool import WorkerPool
from replaykit.errors import CorpusError

_NUMBER: Final = r"0|[1-9][0-9]{0,17}"


class JoinedFile(H5File):
    """Several files that are read as one, with arrays joined along the records.

    Args:
        files: the files, in order.
        names: the paths of the files in the corpus.
        clock: the array whose length is the number of records of each file.
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
        """Return the datasets of the first file, with the total lengths in all files.

        A dataset gets a ``problem`` if another file lacks it, or has another shape or dtype.
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
        """Yield the files that contain records ``start .. stop - 1``, with the ranges."""
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
    """A file whose flat arrays are cut into numbered groups of consecutive records.

    Args:
        file: the file.
        above: the parent of the numbered groups.
        numbers: the names of the groups, as numbers.
        clock: as for `JoinedFile`.
    """

    def __init__(self, file: H5File, above: str, numbers: Sequence[int], clock: str) -> None:
        chunks = [file.below(f"{above}/{number}") for number in numbers]
        self._clock = clock
        super().__init__(chunks, [str(number) for number in numbers], clock)
        # Records are counted across all chunks, because messages only name this file.
        self.parts = ()

    def leaves(self, group: str, *, without: Collection[str] = ()) -> list[H5Leaf]:
        """Return the datasets as `JoinedFile` does, and compare the lengths of chunks.

        A dataset gets a ``problem`` if its chunks have other lengths than the chunks of the clock.
        """
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
    """Return a file, or its joined chunks if only the chunks hold the arrays.

    Raises:
        CorpusError: a chunk between other chunks is missing (rule V32), or has no clock (rule V12).
    """
    if not above or not file.has_group(above):
        return file
    if any(member.name == clock for member in file.members()):
        return file
    location = file.location(name).at(group=above)
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
            raise location.error(
                f"the chunk {number} is missing before {numbers[-1]}: records that do not follow "
                "one another would be joined",
                "V32",
            )
    for number, member in sorted(chunks.items()):
        if clock not in member.children:
            raise location.at(key=f"{number}/{clock}").error("the required key is missing", "V12")
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
    """Open a file, or several files as one; see `open_h5` for the errors.

    Args:
        files: the files.
        clock: as for `JoinedFile`.
        held: stores values of small datasets, and provides the values that it already has.
        chunks: as for `Layout.chunks`.
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
    """Return the positions of the files that are opened together.

    Files are opened separately, unless the layout allows episodes to continue in the next file.
    Then a file that continues the last episode of the preceding file is joined to that file. For
    such layouts, each file is opened once more, and its first record is read.

    Args:
        sources: the files.
        layout: the declaration of the corpus.
        fail: called with the position of a file that cannot be opened or has another layout, and
            the error. It may raise an exception.

    Raises:
        CorpusError: a file that contains a part of an episode is missing (rule V32).
    """
    if not layout.joined:
        return [(index,) for index in range(len(sources.files))]
    units: list[tuple[int, ...]] = []
    for index, source in enumerate(sources.files):
        location = Location(source.path, source.name)
        try:
            with open_h5(source.path, is_verified=source.is_verified) as file:
                layout.resolve(file, location)
                goes_on = layout.goes_on(file, location)
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
                location = Location(after.path, after.name)
                raise location.error(
                    f"it continues an episode that does not begin in it, but the file before it "
                    f"is {before.name}: the files between are missing",
                    "V32",
                )
    return units


def _number(name: str) -> int | None:
    match = re.search(r"([0-9]{1,18})$", PurePosixPath(name).stem)
    return int(match[1]) if match else None


@dataclass(frozen=True)
class Listing:
    """The declarations of a file's episode groups that are known before its scan.

    Attributes:
        leaves: the result of `H5File.leaves` for each group.
        attributes: the attributes of each group that `Layout.seen_attributes` names.
        held: values that were read together with the declarations.
    """

    leaves: dict[str, list[H5Leaf]]
    attributes: dict[str, dict[str, Any]]
    held: HeldValues | None = None


NOT_LISTED: Final = Listing({}, {})
_AHEAD: Final = 2
"""Number of files per worker that are listed in advance. Each listing takes memory."""


def listings(
    sources: Sources, layout: Layout, workers: int, room: int
) -> Generator[Listing, None, None]:
    """Yield a listing of each file, in order.

    A listing is empty if listing the file in advance would save no time.

    A listing is also empty if no worker has begun the file when the caller needs it. The caller
    then lists the file itself. An error of a file is not reported here. It makes the listing
    incomplete, and the scan later reports the error.

    Args:
        sources: the files.
        layout: the declaration of the corpus.
        workers: number of processes that read declarations, including this one.
        room: count of bytes for the values that are read together with the declarations of a file.
    """
    files = sources.files
    if workers < 2 or len(files) < 2 or isinstance(layout.episodes, (Segments, WholeFile)):
        yield from (NOT_LISTED for _ in files)
        return
    others = min(workers, len(files)) - 1
    waiting: dict[int, Listing] = {}
    with WorkerPool(
        partial(_list, files, layout, room), range(1, len(files)), others, ahead=_AHEAD * others
    ) as pool:
        for index in range(len(files)):
            if not index or pool.take(index) is not None:
                yield NOT_LISTED
                continue
            while index not in waiting:
                waiting.update([pool.answer()])
            yield waiting.pop(index)


def _list(
    files: tuple[SourceFile, ...], layout: Layout, room: int, index: int
) -> tuple[int, Listing]:
    source, held = files[index], HeldValues(room)
    found = Listing({}, {}, held)
    # The leaves of most groups are equal, and pickle sends an object only once.
    known: dict[H5Leaf, H5Leaf] = {}
    try:
        with open_h5(source.path, is_verified=source.is_verified) as file:
            file.hold(held)
            location = Location(source.path, source.name)
            resolved = layout.resolve(file, location)
            names = resolved.seen_attributes
            episodes = resolved.episodes.find(file, resolved, location, 1 << 20).episodes
            for group in episodes.groups:
                try:
                    leaves = [known.setdefault(leaf, leaf) for leaf in file.leaves(group)]
                    said = file.attributes(group, names) if names else {}
                except CorpusError:
                    continue
                found.leaves[group], found.attributes[group] = leaves, said
    except (ValueError, OSError):
        pass
    return index, found
