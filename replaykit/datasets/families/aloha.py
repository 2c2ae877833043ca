"""The ALOHA and ACT family: one file per episode, with joints, images and commands."""

from __future__ import annotations

import io
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from replaykit.buffer.components import SamplerT
from replaykit.datasets.dataset import LocalFilesReplay
from replaykit.datasets.engine.episode_finders import Finder, WholeFile
from replaykit.datasets.engine.fields import STEPS, Alignment, Decoder, Field, Images, image_module
from replaykit.datasets.engine.h5 import H5File
from replaykit.datasets.engine.layout import Layout
from replaykit.datasets.engine.locations import Location

_FILE: Final = WholeFile(having=("action", "observations"))
_IMAGES: Final = "observations/images/"


@dataclass(frozen=True, kw_only=True)
class AlohaLayout(Layout):
    """Layout of ALOHA episodes, in which T records make T - 1 rows.

    Episodes have no rewards, and end truncated. Compressed images are decoded to pixels. Depth and
    raw images are stored unchanged.

    Attributes:
        action_shift: 0 pairs a command with the observation of the same record. -1 pairs it with
            the observation of the next record, as ACT's loader does for real robots. T records then
            make T - 2 rows.

    Raises:
        ValueError: ``action_shift`` is neither 0 nor -1.

    Example:
        >>> from replaykit.datasets.families import ALOHA, AlohaLayout
        >>> ALOHA.lost, AlohaLayout(action_shift=-1).lost
        (1, 2)
    """

    name: str = "aloha"
    version: int = 1
    episodes: Finder = _FILE
    alignment: Alignment = STEPS
    clock: str = "action"
    fields: tuple[Field, ...] = ()
    about: tuple[str, tuple[str, ...]] | None = ("", ("sim", "compress"))
    natural_files: bool = True
    action_shift: int = 0

    def __post_init__(self) -> None:
        if self.action_shift not in (0, -1):
            raise ValueError(f"expected action_shift as 0 or -1, got {self.action_shift}")
        observation = Field(
            "observations/",
            "observation",
            ("observation",),
            ("next", "observation"),
            shift=-self.action_shift,
        )
        base = ("info", "base_action")
        fields = (
            observation,
            Field("action", "action", before=("action",)),
            Field("base_action", "info", before=base, moment="action", required=False),
        )
        object.__setattr__(self, "fields", fields)

    def resolve(self, file: H5File, location: Location) -> Layout:
        """Return the layout with decoders for the compressed images.

        The size of the images comes from the first image of each camera.
        """
        decoders: list[tuple[str, Decoder]] = []
        for leaf in file.leaves(""):
            is_bytes = leaf.problem is None and np.dtype(leaf.dtype) == np.uint8
            is_encoded = len(leaf.shape) == 1 if leaf.problem is not None else len(leaf.shape) == 2
            if not leaf.path.startswith(_IMAGES) or not is_encoded or 0 in leaf.shape:
                continue
            if leaf.problem is None and not is_bytes:
                continue
            decoders.append((leaf.path, Images(_size(file, leaf.path, location))))
        return replace(self, decoders=tuple(decoders))


ALOHA: Final = AlohaLayout()


def _size(file: H5File, path: str, location: Location) -> tuple[int, ...]:
    Image = image_module()
    entry = np.asarray(file.entries(path, 0, 1)[0], np.uint8).tobytes()
    try:
        with Image.open(io.BytesIO(entry)) as image:
            bands = len(image.getbands())
            return (image.height, image.width, *((bands,) if bands > 1 else ()))
    except (OSError, ValueError, SyntaxError) as error:
        at = location.at(key=path, record=0)
        raise at.error(f"is not an image that can be decoded ({error})", "V03") from error


class AlohaExperienceReplay(LocalFilesReplay[SamplerT]):
    """Transitions of ALOHA and ACT files of one episode each, given with ``source``.

    See `AlohaLayout` for the layout, and BaseDatasetExperienceReplay for arguments, errors and
    methods.

    Example:
        >>> from replaykit.datasets import AlohaExperienceReplay
        >>> AlohaExperienceReplay("../up", 32)
        Traceback (most recent call last):
        ValueError: expected names with '/' between them as an id, got '../up'
    """

    corpus = "aloha"
    layout = ALOHA
