"""Values that are not stored as numbers: encoded images and text."""

from __future__ import annotations

import io
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from replaykit.datasets.engine.h5 import H5File, Leaf
from replaykit.errors import CorpusError

__all__ = ["Decoder", "Images", "Preceded", "Text", "image_module"]


class Decoder(Protocol):
    """Makes numbers of what a dataset stores."""

    def declare(self, leaf: Leaf) -> Leaf:
        """Returns the leaf as it is after decoding: shape, dtype, and no problem."""

    def read(self, file: H5File, dataset: str, start: int, stop: int) -> npt.NDArray[Any]:
        """Returns decoded entries ``start .. stop - 1``.

        Raises:
            CorpusError: an entry cannot be decoded; names file, dataset and entry.
        """


def image_module() -> Any:
    """Returns ``PIL.Image``.

    Raises:
        ImportError: Pillow is not installed; says how to.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError(
            "reading encoded images needs Pillow, which is not installed: "
            "`pip install 'replaykit[images]'`"
        ) from error
    return Image


@dataclass(frozen=True)
class Images:
    """Encoded images of one size, such as JPEG bytes, as pixels ``uint8 [H, W, C]``.

    An entry is a string of bytes of varying length, or a row of bytes padded with zeros.

    Args:
        shape: height, width and channels of every image.
    """

    shape: tuple[int, ...]

    def declare(self, leaf: Leaf) -> Leaf:
        return replace(leaf, shape=(*leaf.shape[:1], *self.shape), dtype=np.uint8, problem=None)

    def read(self, file: H5File, dataset: str, start: int, stop: int) -> npt.NDArray[Any]:
        Image = image_module()
        found = np.empty((stop - start, *self.shape), np.uint8)
        for at, entry in enumerate(file.entries(dataset, start, stop)):
            try:
                with Image.open(io.BytesIO(np.asarray(entry, np.uint8).tobytes())) as image:
                    pixels = np.asarray(image)
            except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
                raise CorpusError(
                    f"{file.path}: {dataset}, record {start + at}: is not an image that can be "
                    f"decoded ({error}) [V03]"
                ) from error
            if pixels.ndim == 2 and self.shape[2:] == (1,):
                pixels = pixels[:, :, None]
            if pixels.shape != self.shape or pixels.dtype != np.uint8:
                raise CorpusError(
                    f"{file.path}: {dataset}, record {start + at}: is an image of shape "
                    f"{list(pixels.shape)}, expected {list(self.shape)} [V10]"
                )
            found[at] = pixels
        return found


@dataclass(frozen=True)
class Text:
    """Text as its UTF-8 bytes ``uint8 [width]``, padded with zeros.

    Args:
        width: the longest text in bytes.
    """

    width: int

    def declare(self, leaf: Leaf) -> Leaf:
        return replace(leaf, shape=(*leaf.shape[:1], self.width), dtype=np.uint8, problem=None)

    def read(self, file: H5File, dataset: str, start: int, stop: int) -> npt.NDArray[Any]:
        found = np.zeros((stop - start, self.width), np.uint8)
        for at, entry in enumerate(file.entries(dataset, start, stop)):
            text = entry.encode() if isinstance(entry, str) else bytes(entry)
            if len(text) > self.width:
                raise CorpusError(
                    f"{file.path}: {dataset}, record {start + at}: is a text of {len(text)} bytes, "
                    f"expected at most {self.width} [V10]"
                )
            found[at, : len(text)] = np.frombuffer(text, np.uint8)
        return found


@dataclass(frozen=True)
class Preceded:
    """Numbers whose first record is stored apart from the others.

    Args:
        part: the part of the path that the others are below.
        first: what it is where the first record is; a dataset of one record.
    """

    part: str
    first: str

    def declare(self, leaf: Leaf) -> Leaf:
        return replace(leaf, shape=(leaf.shape[0] + 1, *leaf.shape[1:])) if leaf.shape else leaf

    def read(self, file: H5File, dataset: str, start: int, stop: int) -> npt.NDArray[Any]:
        if start:
            return file.read(dataset, start - 1, stop - 1)
        first = f"/{dataset}".replace(f"/{self.part}/", f"/{self.first}/")[1:]
        rest = file.read(dataset, 0, max(0, stop - 1))
        before = file.read(first, 0, 1)
        if before.shape[1:] != rest.shape[1:] or before.dtype != rest.dtype:
            raise CorpusError(
                f"{file.path}: {first}: has records of shape {list(before.shape[1:])} and dtype "
                f"{before.dtype}, but {dataset} has {list(rest.shape[1:])} and {rest.dtype} [V10]"
            )
        return np.concatenate([before, rest])[:stop]
