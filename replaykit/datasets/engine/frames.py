"""Whether images show anything: all black, or all the same, in an episode (rule V26)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from replaykit.datasets.engine.places import Notes, Place
from replaykit.datasets.engine.plan import PlannedLeaf

__all__ = ["Frames", "is_image"]


def is_image(leaf: PlannedLeaf) -> bool:
    """Whether the values of a leaf are taken for images: observed bytes in rows and columns."""
    return leaf.role == "observation" and leaf.dtype == np.uint8 and len(leaf.shape) >= 2


class Frames:
    """The images of one leaf, as the records of one episode after another come by.

    Cost: as a rule a look at the first two images of an episode; all of them where these are
    alike.
    """

    def __init__(self, path: str, notes: Notes) -> None:
        self._path = path
        self._notes = notes
        self._first: npt.NDArray[Any] | None = None
        self._seen = 0
        self._is_still = True

    def take(self, images: npt.NDArray[Any], *, is_end: bool, place: Place) -> None:
        """Takes the next images of an episode, ``is_end`` with the last one of it."""
        if self._first is None:
            self._first = images[0].copy()
        if self._is_still:
            # The second image settles it, as a rule.
            self._is_still = bool((images[:2] == self._first).all()) and bool(
                (images[2:] == self._first).all()
            )
        self._seen += len(images)
        if not is_end:
            return
        if self._is_still and self._seen > 1:
            what = "the same image" if self._first.any() else "black images"
            text = f"{self._path} holds nothing but {what} throughout an episode"
            self._notes.add("V26", text, place, name=self._path)
        self._first, self._seen, self._is_still = None, 0, True
