"""Images that stay encoded in files of a data set, and are decoded when rows are read."""

from __future__ import annotations

import io
import os
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from replaykit.errors import CorpusError, import_extra
from replaykit.ted import Key, format_key
from replaykit.transforms import Transform

REFERENCE_WIDTH: Final = 3
"""Numbers of a reference: the number of the file, then the presentation time and 0 of a frame, or
the offset and the size of an image. Files count from 1, so that zeros refer to no frame."""
_MOST_OPEN: Final = 16
_QUALITY: Final = 95
_MODES: Final = ("L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "HSV")
"""Modes of Pillow with one byte for each channel."""

Array = npt.NDArray[Any]


def video_module() -> Any:
    """Return the module ``av`` (PyAV), which has its own FFmpeg.

    Raises:
        ImportError: PyAV is not installed.
    """
    return import_extra("av", "videos need PyAV", "lerobot")


@contextmanager
def _video_errors(path: str) -> Iterator[None]:
    try:
        yield
    except (video_module().FFmpegError, IndexError, ValueError) as error:
        if isinstance(error, (FileNotFoundError, CorpusError)):
            raise
        raise CorpusError(f"{path}: is not a video that can be decoded ({error}) [V03]") from error


@dataclass(frozen=True)
class VideoIndex:
    """The frames of a video in the order of presentation.

    Attributes:
        times: the presentation times in units of the stream, int64 ``[n]``.
        seconds: the same times in seconds, float64 ``[n]``.
        height, width: the size of a frame.
    """

    times: npt.NDArray[np.int64]
    seconds: npt.NDArray[np.float64]
    height: int
    width: int

    def nearest(self, seconds: Array) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """Return the times of the nearest frames, and their distances in seconds."""
        after = np.searchsorted(self.seconds, seconds).clip(1, max(1, len(self.seconds) - 1))
        after = np.minimum(after, len(self.seconds) - 1)
        before = np.maximum(after - 1, 0)
        is_before = seconds - self.seconds[before] <= self.seconds[after] - seconds
        found = np.where(is_before, before, after)
        return self.times[found], self.seconds[found] - seconds


def video_index(path: Path) -> VideoIndex:
    """Return the frames of a video, without decoding them. Cost: the file is read once.

    Raises:
        CorpusError: the file is not a video, or has no frames (rule V03).
        ImportError: PyAV is not installed.
    """
    with _video_errors(str(path)), video_module().open(str(path)) as container:
        stream = container.streams.video[0]
        # Packets that the list of edits of an MP4 file removes are never shown.
        found = [
            each.pts
            for each in container.demux(stream)
            if each.pts is not None and not each.is_discard
        ]
        if not found:
            raise ValueError("it has no frames")
        times = np.sort(np.array(found, np.int64))
        seconds = (times * float(stream.time_base)).astype(np.float64)
        return VideoIndex(times, seconds, stream.height, stream.width)


class _Video:
    """An open video, which continues decoding instead of seeking where that is shorter."""

    def __init__(self, path: str) -> None:
        self._path = path
        with _video_errors(path):
            self._container = video_module().open(path)
            self._stream = self._container.streams.video[0]
            # A forked process lacks the threads of a decoder, and would wait for them for ever
            # when it frees the decoder.
            self._stream.codec_context.thread_count = 1
            # Without this, decoders replace damaged parts by those of frames that they have seen.
            self._stream.codec_context.options = {"err_detect": "explode"}
            entries = self._stream.index_entries
            self._keys = sorted(each.timestamp for each in entries if each.is_keyframe)
        self._frames = _decoded(self._container, self._stream)
        self._last: Any = None

    def __del__(self) -> None:
        # Containers are in reference cycles, so their files would stay open for long.
        if hasattr(self, "_container"):
            self._container.close()

    def read(self, times: Sequence[int], out: Array) -> None:
        """Decode the frames at ascending presentation times into ``out [n, H, W, C]``."""
        form = "rgb24" if out.shape[-1] == 3 else "gray"
        with _video_errors(self._path):
            for time, pixels in zip(times, out, strict=True):
                found = self._frame(time).to_ndarray(format=form, threads=1)
                if found.shape[:2] != pixels.shape[:2]:
                    raise ValueError(
                        f"its frames are {list(found.shape)}, expected {list(pixels.shape)}"
                    )
                pixels[...] = found.reshape(pixels.shape)

    def _frame(self, time: int) -> Any:
        """Return the frame of a presentation time."""
        at = bisect_right(self._keys, time) - 1
        last = None if self._last is None else self._last.pts
        goes_on = last is not None and last <= time and bisect_right(self._keys, last) - 1 == at
        if not goes_on:
            self._seek(time)
        try:
            return self._next(time)
        except (video_module().FFmpegError, ValueError, StopIteration):
            # Frames that are shown before the keyframe may need others, from before it.
            keys = [0, 0, *self._keys]
            self._seek(keys[max(0, at)], strict_from=keys[max(0, at + 1)])
            return self._next(time)

    def _next(self, time: int) -> Any:
        """Decode up to the frame of a presentation time, unless that is the last one."""
        while self._last is None or self._last.pts < time:
            self._last = next(self._frames, None)
            if self._last is None:
                raise ValueError(f"it has no frame at {time}")
        if self._last.pts != time:
            raise ValueError(f"it has no frame at {time}")
        if self._last.is_corrupt:
            raise ValueError(f"its frame at {time} is corrupt")
        return self._last

    def _seek(self, time: int, strict_from: int | None = None) -> None:
        self._container.seek(time, stream=self._stream)
        self._frames = _decoded(self._container, self._stream, strict_from)
        self._last = None


def _decoded(container: Any, stream: Any, strict_from: int | None = None) -> Iterator[Any]:
    """Yield frames. Errors in packets that are shown before ``strict_from`` are ignored."""
    for packet in container.demux(stream):
        try:
            frames = packet.decode()
        except video_module().FFmpegError:
            if strict_from is None or packet.pts is None or packet.pts >= strict_from:
                raise
            continue
        yield from frames


class FrameFiles:
    """Files with encoded frames, of which each process keeps some open.

    Args:
        paths: the files, to which references refer by number, from 1 on.
        most_open: the number of open videos that a process keeps.

    Several threads may read at once. A forked or spawned process opens the files again.
    """

    def __init__(self, paths: Sequence[Path], *, most_open: int = _MOST_OPEN) -> None:
        self.paths = [str(path) for path in paths]
        self._most = most_open
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._open: OrderedDict[int, _Video] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {"paths": self.paths, "_most": self._most}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    def read_videos(self, references: Array, out: Array) -> None:
        """Decode frames ``[n, 3]`` into ``out [n, H, W, C]``. References must be sorted."""
        for file, rows in _by_file(references):
            with self._video(file) as video:
                video.read(references[rows, 1].tolist(), out[rows])

    @contextmanager
    def _video(self, file: int) -> Iterator[_Video]:
        """Take a video out of the cache, so that no other thread uses it."""
        if self._process != os.getpid():
            # The parent's decoders are kept, because ending them here may wait for its threads.
            self._parents = self._open
            self._begin()
        with self._lock:
            video = self._open.pop(file, None)
        video = _Video(self.paths[file]) if video is None else video
        yield video
        self._replace(file, video)  # closes the videos that it returns

    def _replace(self, file: int, video: _Video) -> list[_Video]:
        """Put a video into the cache, and return those that it no longer holds."""
        removed = []
        with self._lock:
            if file in self._open:
                removed.append(self._open.pop(file))
            self._open[file] = video
            while len(self._open) > self._most:
                removed.append(self._open.popitem(last=False)[1])
        return removed

    def read_images(self, references: Array, out: Array) -> None:
        """Decode images ``[n, 3]`` into ``out [n, H, W, C]``. References must be sorted."""
        for file, rows in _by_file(references):
            with open(self.paths[file], "rb") as stored:
                for (_, offset, size), pixels in zip(
                    references[rows].tolist(), out[rows], strict=True
                ):
                    encoded = os.pread(stored.fileno(), size, offset)
                    decode_image(encoded, pixels, f"{self.paths[file]}, byte {offset}")


def _by_file(references: Array) -> Iterator[tuple[int, slice]]:
    """Yield the position of each file of sorted references, and its rows of them."""
    files, starts = np.unique(references[:, 0], return_index=True)
    stops = [*starts[1:], len(references)]
    for file, start, stop in zip(files.tolist(), starts, stops, strict=True):
        yield file - 1, slice(start, stop)


def image_module() -> Any:
    """Return ``PIL.Image``.

    Raises:
        ImportError: Pillow is not installed. The message has the install command.
    """
    return import_extra("PIL.Image", "encoded images need Pillow", "images")


@contextmanager
def open_image(encoded: Any, where: str) -> Iterator[Any]:
    """Open an image from ``bytes`` or an array of them, without decoding it.

    Raises:
        CorpusError: the block or Pillow finds that the bytes are no image (V03).
        ImportError: Pillow is not installed.
    """
    Image = image_module()
    try:
        if type(encoded) is not bytes:
            encoded = np.asarray(encoded, np.uint8).tobytes()
        with Image.open(io.BytesIO(encoded)) as image:
            yield image
    except (OSError, TypeError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        if isinstance(error, CorpusError):
            raise
        raise CorpusError(
            f"{where}: is not an image that can be decoded ({error}) [V03]"
        ) from error


def _check_size(kind: str, found: tuple[int, ...], shape: tuple[int, ...], where: str) -> None:
    if (kind, found) != ("uint8", shape):
        raise CorpusError(
            f"{where}: is an image {kind} {list(found)}, expected uint8 {list(shape)} [V10]"
        )


def check_image(encoded: bytes, shape: tuple[int, ...], where: str) -> None:
    """Check the size of a JPEG or PNG in its header.

    Raises:
        CorpusError: the bytes are no such image (V03), or it has another size (V10).
        ImportError: Pillow is not installed.
    """
    with open_image(encoded, where) as image:
        kind = "uint8" if image.mode in _MODES else image.mode
        _check_size(kind, (image.height, image.width, len(image.getbands())), shape, where)


def decode_image(encoded: Any, out: Array, where: str) -> None:
    """Decode a JPEG or PNG into ``out [H, W, C]``, or ``[H, W]`` for one channel.

    Raises:
        CorpusError: the bytes are no such image (V03), or it has another size (V10).
        ImportError: Pillow is not installed.
    """
    with open_image(encoded, where) as image:
        pixels = np.asarray(image)
    if pixels.ndim == 2 < out.ndim:
        pixels = pixels[:, :, None]
    _check_size(pixels.dtype.name, pixels.shape, out.shape, where)
    out[...] = pixels


def encode_jpeg(pixels: Array) -> bytes:
    """Return pixels ``uint8 [H, W, C]`` as a JPEG, which loses details.

    Raises:
        ImportError: Pillow is not installed.
    """
    data = io.BytesIO()
    of = pixels[:, :, 0] if pixels.shape[-1] == 1 else pixels
    image_module().fromarray(of).save(data, "JPEG", quality=_QUALITY)
    return data.getvalue()


class EncodedFrames(Transform):
    """A transform that replaces references by the frames that they refer to.

    A data set with encoded frames adds this transform to its buffer. References are int64 ``[*B,
    3]``, and become pixels, uint8 ``[*B, H, W, C]``. Frames that occur several times in a batch are
    decoded once.

    Args:
        frames: for each key, the ``kind``, ``"video"`` or ``"image"``, and the ``shape`` of a
            frame.
        paths: the files, to which references refer by number, from 1 on.

    Raises:
        CorpusError: a file cannot be decoded. The message names it.
        ImportError: PyAV or Pillow is not installed.

    Cost: each frame of a video needs all frames since the keyframe before it. Each process keeps at
    most 16 videos open.
    """

    def __init__(self, frames: Mapping[Key, Mapping[str, Any]], paths: Sequence[Path]) -> None:
        self.frames = dict(frames)
        self._files = FrameFiles(paths)

    def __repr__(self) -> str:
        return f"EncodedFrames({', '.join(map(format_key, self.frames))})"

    def forward(self, data: Any) -> Any:
        """Replace the references of a batch by pixels, also those of `Shift` below ``next``."""
        for stored, facts in self.frames.items():
            for key in (stored, ("next", *stored)):
                references = data.get(key, None)
                if references is not None and references.dtype == torch.int64:
                    data.set(key, self.decode(references, facts, key))
        return data

    def decode(self, references: torch.Tensor, facts: Mapping[str, Any], key: Key) -> torch.Tensor:
        """Return the pixels of references ``[*B, 3]``, as ``[*B, H, W, C]``."""
        if references.shape[-1:] != (REFERENCE_WIDTH,):
            raise ValueError(
                f"key {format_key(key)}: expected references [..., {REFERENCE_WIDTH}], got "
                f"{list(references.shape)}"
            )
        flat = references.reshape(-1, REFERENCE_WIDTH).cpu().numpy()
        shape = tuple(facts["shape"])
        order = np.lexsort(flat.T[::-1])
        ordered = flat[order]
        is_new = np.ones(len(flat), bool)
        is_new[1:] = (ordered[1:] != ordered[:-1]).any(1)
        wanted = ordered[is_new]
        found = torch.empty((len(wanted), *shape), dtype=torch.uint8)
        none = int(np.searchsorted(wanted[:, 0], 1))  # padding, which becomes black
        found[:none] = 0
        reader: Callable[[Array, Array], None] = self._files.read_images
        if facts["kind"] == "video":
            reader = self._files.read_videos
        reader(wanted[none:], found[none:].numpy())
        if is_new.all() and (order[1:] > order[:-1]).all():
            frames = found
        else:
            at = np.empty(len(flat), np.int64)
            at[order] = is_new.cumsum() - 1
            frames = found[torch.from_numpy(at)]
        return frames.reshape(*references.shape[:-1], *shape).to(references.device)
