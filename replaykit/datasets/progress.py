"""A progress bar for long work on data sets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["progress_bar"]


@contextmanager
def progress_bar(title: str, nbytes: int, shown: bool | None) -> Iterator[Callable[[int], object]]:
    """Shows a bar for work on so many bytes; yields what is told of each step's bytes.

    Args:
        shown: whether there is a bar; ``None`` shows it on a terminal only.
    """
    from tqdm import tqdm

    disable = None if shown is None else not shown
    with tqdm(total=nbytes, desc=title, unit="B", unit_scale=True, disable=disable) as bar:
        yield bar.update
