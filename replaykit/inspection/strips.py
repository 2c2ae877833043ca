"""Frames of an episode side by side, as one picture."""

from __future__ import annotations

import base64
import io
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from replaykit.inspection.table import Column

__all__ = ["strip"]

_HEIGHT: Final = 112
_GAP: Final = 3


def strip(column: Column, episode: int, frames: int) -> tuple[str, int, int] | None:
    """Returns frames of an episode, evenly in time, as the URL of a picture, width and height.

    ``None`` where the episode has none.
    """
    from PIL import Image

    found = column.episode(episode, frames)
    if not len(found):
        return None
    pictures = [Image.fromarray(_as_picture(frame)) for frame in found[:frames]]
    scale = _HEIGHT / pictures[0].height
    size = (max(1, round(pictures[0].width * scale)), _HEIGHT)
    how = Image.Resampling.NEAREST if scale > 1 else Image.Resampling.BILINEAR
    pictures = [picture.convert("RGB").resize(size, how) for picture in pictures]
    width = len(pictures) * (size[0] + _GAP) - _GAP
    whole = Image.new("RGB", (width, _HEIGHT), (128, 128, 128))
    for place, picture in enumerate(pictures):
        whole.paste(picture, (place * (size[0] + _GAP), 0))
    data = io.BytesIO()
    whole.save(data, "JPEG", quality=85)
    url = "data:image/jpeg;base64," + base64.b64encode(data.getvalue()).decode()
    return url, width, _HEIGHT


def _as_picture(frame: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    if frame.ndim == 3 and frame.shape[-1] not in (1, 3, 4):
        frame = np.moveaxis(frame, 0, -1)  # channels first
    if frame.ndim == 3 and frame.shape[-1] == 1:
        frame = frame[..., 0]
    return np.ascontiguousarray(frame, np.uint8)
