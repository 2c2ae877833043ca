"""Conversion of files and URLs, and opening of data sets, without a corpus class."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit
from urllib.request import url2pathname

from replaykit.buffer.components import SamplerT
from replaykit.datasets.dataset_manifest import MANIFEST_NAME, Manifest
from replaykit.datasets.engine.conversion import ConvertOptions, ensure_dataset, stamps_of
from replaykit.datasets.engine.episode_finders import natural_key
from replaykit.datasets.engine.layout import Layout, rules_digest
from replaykit.datasets.engine.policies import Policies
from replaykit.datasets.engine.table_sources import TableLayout, TrajectoryLayout, content_of
from replaykit.datasets.http_files import WebFile
from replaykit.datasets.published_buffer import CorpusExperienceReplay
from replaykit.datasets.remote_sources import WebFiles
from replaykit.datasets.sources import (
    SUFFIXES,
    Sources,
    files_below,
    names_of,
    require_plain,
    room_needed_at,
    sha256_of,
)
from replaykit.errors import CorpusError
from replaykit.feeds.trajectory_sources import TrajectorySource

_WEB: Final = ("http://", "https://")

Files = (
    str
    | os.PathLike[str]
    | Iterable[str | os.PathLike[str]]
    | Mapping[str, str | None]
    | Mapping[os.PathLike[str], str | None]
)
"""Files or their directories, as paths or URLs; or a mapping of files to their SHA-256."""


def convert(
    files: Files | TrajectorySource,
    layout: Layout | TableLayout | None,
    dest: str | Path,
    *,
    policies: Policies | None = None,
    workers: int = 1,
    force: bool = False,
    progress: bool | None = None,
) -> CorpusExperienceReplay:
    """Convert files or trajectories into a data set of transitions, and open it.

    The call scans all files before it writes the first row. The result appears at ``dest``
    completely or not at all. An existing data set at ``dest`` is opened unchanged if it has these
    files, layout and policies.

    An interrupted or killed call leaves a hidden directory next to ``dest``. Repeating the same
    call skips the files that were finished, or the decoded videos of episodes. Other tables begin
    again. The result has the same bytes as that of an uninterrupted call. Any other call for
    ``dest`` removes that directory.

    Args:
        files: H5 files, or directories to search for ``.h5``, ``.hdf5`` and ``.hdf`` files, as
            paths or ``file://`` URLs. ``http://`` and ``https://`` URLs are fetched as in
            `download`. Links to files are followed, also inside a directory. Links to directories
            inside a directory are not followed. A mapping gives the SHA-256 of each file, or None.
            Rows are ordered by the paths of their files. For a table layout, the folder of a set,
            or a ``.zip`` file of Zarr. Or a `TrajectorySource`, whose rows are read twice.
        layout: the layout of the files; see `Layout`, and for tables ``LEROBOT``, ``ZARR``,
            ``MINARI_ARROW`` and ``RLDS``. The ``repr`` of its parts must show their values, as for
            dataclasses. None for a `TrajectorySource`.
        dest: directory of the data set.
        policies: the treatment of unusual keys, dtypes and episodes.
        workers: number of processes. Each process converts one file after another. The result does
            not depend on this number. Tables and trajectories are converted by one process.
        force: convert again, and replace the data set at ``dest`` in one step at the end.
        progress: show a progress bar; by default only on a terminal.

    Raises:
        CorpusError: a file breaks a rule of its layout, or does not match its SHA-256. The message
            names file, episode, key and rule. The class is a subclass of ValueError.
        ValueError: the policies name a key or dtype that no file has. Or a file is a pipe, a device
            or a socket, or has a name that is not UTF-8. Or ``dest`` is in a folder of the files.
        FileNotFoundError: a file does not exist, or a directory holds no H5 file.
        DownloadError, PermissionError: as in `download`.
        OSError: a file cannot be read, or the disk has too little room. The message names the file.
            Before a download, the disk must have room for the files and as much again for the
            columns. The room for the columns is not checked if policies may make them smaller.
        RuntimeError: without ``force``, ``dest`` holds another data set or other files. With
            ``force``, ``dest`` holds files that are not part of a data set; such files are never
            removed.
        ImportError: h5py is not installed.

    Warns:
        UserWarning: keys were left out, episodes were skipped, or values are unusual. A call gives
            at most one warning. ``published.manifest.report`` of the result has the details.

    Cost: every value is read once for the checksum of its file, and once for the conversion. Every
    value is also written once for each column that contains it. Memory: a few blocks of 16 MiB for
    each worker, and about 100 bytes for each episode; for LeRobot, also the columns of two Parquet
    files.

    Example:
        >>> import tempfile, h5py, numpy as np
        >>> from pathlib import Path
        >>> from replaykit.datasets import Policies, convert
        >>> from replaykit.datasets.families import D4RL
        >>> root = Path(tempfile.mkdtemp())
        >>> (root / "files").mkdir()
        >>> with h5py.File(root / "files" / "a.hdf5", "w") as file:
        ...     file["observations"], file["actions"] = np.eye(4), np.zeros((4, 1))
        ...     file["rewards"], file["terminals"] = np.ones(4), np.arange(4) == 1
        >>> policies = Policies(casts={"float64": "float32"})
        >>> data = convert(root / "files", D4RL, root / "data", policies=policies)
        >>> data.episode_table["length"], data[:]["next", "observed"].flatten()
        (tensor([2, 1]), tensor([ True, False,  True]))
    """
    options = ConvertOptions(policies=Policies() if policies is None else policies, workers=workers)
    identity: dict[str, Any] = {"policies": options.policies.to_json()}
    if isinstance(files, TrajectorySource):
        layout = TrajectoryLayout(source=files)
        sources = Sources((), {"kind": "trajectories", "source": type(files).__name__})
        identity["files"] = content_of(files)
    elif not isinstance(layout, Layout | TableLayout):
        raise TypeError(
            f"expected a layout for {files!r:.80}, such as LEROBOT of replaykit.datasets.families, "
            f"got {layout!r:.80}"
        )
    else:
        check_outside(dest, files)
        sources = local_sources(
            files,
            natural=layout.natural_files,
            suffixes=layout.suffixes,
            threads=max(2, workers),  # a second thread halves the time before the first row
            checked=isinstance(layout, Layout) and options.policies.on_invalid != "skip",
            target=room_needed_at(Path(dest), may_shrink=options.policies.may_shrink, force=force),
        )
        identity |= {"files": digest_of(sources, layout), "rules": rules_digest(layout)}
    published = ensure_dataset(
        dest,
        get_sources=lambda: sources,
        layout=layout,
        force=force,
        progress=progress,
        identity=identity,
        options=options,
    )
    return CorpusExperienceReplay(published)


def open(
    dest: str | Path,
    batch_size: int | None = None,
    *,
    sampler: SamplerT | Callable[[], SamplerT] | None = None,
    **kwargs: Any,
) -> CorpusExperienceReplay[SamplerT]:
    """Open a converted data set; see `CorpusExperienceReplay`.

    Example:
        >>> import replaykit.datasets
        >>> replaykit.datasets.open("no-such-folder")
        Traceback (most recent call last):
        FileNotFoundError: [Errno 2] No such file or directory: ...
    """
    return CorpusExperienceReplay(dest, batch_size, sampler=sampler, **kwargs)


def check_outside(dest: str | Path, files: Files) -> None:
    """Check that a data set would not be in a folder of its source files.

    Raises:
        ValueError: the data set would be there.
    """
    home = Path(os.path.realpath(dest))
    for path in map(_path, _given(files)):
        if path.is_dir() and Path(os.path.realpath(path)) in (home, *home.parents):
            raise ValueError(
                f"{dest}: expected a directory outside of the source {path}, whose files it would "
                "join; choose another directory for the data set"
            )


def local_sources(
    files: Files,
    *,
    natural: bool = False,
    suffixes: Sequence[str] = SUFFIXES,
    threads: int = 1,
    checked: bool = True,
    target: Path | None = None,
) -> Sources:
    """Describe the H5 files that a caller gives, and fetch web URLs.

    Args:
        files: the files; see `Files`.
        natural: True to order numbers in file names by value, so that 9 comes before 10.
        suffixes: the suffixes by which folders are searched; empty for all files.
        threads: count of files that are read in parallel.
        checked: True to raise an error for files that are not HDF5.
        target: the directory of the columns. Its free space is checked before a download.

    Raises:
        FileNotFoundError: a file does not exist, or a directory holds no H5 file.
        CorpusError: a file does not match its SHA-256, or, with ``checked``, is not HDF5.
        ValueError: ``files`` mixes web URLs and paths.
    """
    web = _web_files(files)
    if web:
        return WebFiles(web, natural).sources(target)
    paths = _paths(files, suffixes)
    sources = Sources.local(paths, natural=natural, threads=threads, checked=checked)
    if isinstance(files, Mapping):
        wanted = {os.path.abspath(_path(name)): sha256 for name, sha256 in files.items()}
        for file in sources.files:
            expected = wanted.get(str(file.path))
            if expected is not None and file.sha256 != expected:
                raise CorpusError(
                    f"{file.path}: expected sha256 {expected}, got {file.sha256} [V02]"
                )
    return sources


def paths_of(files: Files) -> list[Path]:
    """Return the paths of the caller's H5 files, in natural order; fetch URLs.

    Raises:
        FileNotFoundError: a file does not exist, or a directory holds no H5 file.
        DownloadError, PermissionError, OSError: as in `download`.
        ValueError: ``files`` mixes web URLs and paths.
    """
    web = _web_files(files)
    if web:
        return [file.path for file in WebFiles(web, natural=True).sources().files]
    return local_paths(files)


def local_paths(files: Files) -> list[Path]:
    """Return the paths of the caller's H5 files, in natural order; none for web URLs.

    Raises:
        FileNotFoundError: a file does not exist, or a directory holds no H5 file.
        ValueError: ``files`` mixes web URLs and paths.
    """
    if _web_files(files):
        return []
    return sorted(_paths(files), key=lambda path: natural_key(str(path)))


def digest_of(sources: Sources, layout: Layout | TableLayout) -> str:
    """Return a digest of source files and of the files that describe them."""
    digest = hashlib.sha256()
    for file in sources.files:
        digest.update(f"{file.name}\0{file.sha256}\n".encode())
        for beside in layout.described_by(file.path):
            if beside.is_file():
                digest.update(f"{beside.name}\0{sha256_of(beside)}\n".encode())
    return digest.hexdigest()


def known_digest(files: Files, layout: Layout | TableLayout, path: Path) -> str | None:
    """Return the digest of source files from the manifest, without reading them.

    The result is ``None`` if there is no data set. It is also ``None`` if the name, size or
    modification time of a file has changed since the conversion. For web URLs, the result is a
    digest of the URLs.

    Args:
        files: the source files.
        layout: the layout of the files.
        path: the directory of the data set.

    Raises:
        FileNotFoundError: a file does not exist, or a directory holds no H5 file.
    """
    web = _web_files(files)
    if web:
        return _listing(web)
    stamps = stamps_of(names_of(_paths(files, layout.suffixes)), layout)
    said = path / MANIFEST_NAME
    if not said.is_file():  # reading a pipe would wait for a writer
        return None
    try:
        manifest = Manifest.parse(said.read_bytes())
    except (OSError, ValueError):
        return None
    if manifest.made.get("source_stamps") != stamps:
        return None
    found = manifest.identity.get("source")
    return found if isinstance(found, str) else None


def _listing(files: Sequence[WebFile]) -> str:
    """Return a digest of the URLs and the known SHA-256 of files."""
    found = sorted(((file.url, file.sha256) for file in files), key=repr)
    return hashlib.sha256(repr(found).encode()).hexdigest()


def _paths(files: Files, suffixes: Sequence[str] = SUFFIXES) -> list[Path]:
    paths: list[Path] = []
    for path in map(_path, _given(files)):
        if not path.exists():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        require_plain(path)
        if not path.is_dir():
            paths.append(path)
            continue
        found = files_below(path, suffixes)
        if not found:
            raise FileNotFoundError(f"{path}: no file below it ends in {', '.join(suffixes)}")
        paths.extend(found)
    return paths


def _web_files(files: Files) -> tuple[WebFile, ...]:
    """Return the web files that a caller gives; none for paths."""
    given = _given(files)
    urls = [each for each in given if isinstance(each, str) and each.startswith(_WEB)]
    if urls and len(urls) < len(given):
        raise ValueError(f"files: expected either web URLs or paths, got {given}")
    sums: Mapping[Any, str | None] = files if isinstance(files, Mapping) else {}
    return tuple(WebFile(url, sha256=sums.get(url)) for url in urls)


def _given(files: Files) -> list[str | os.PathLike[str]]:
    return [files] if isinstance(files, (str, os.PathLike)) else list(files)


def _path(given: str | os.PathLike[str]) -> Path:
    if not isinstance(given, str) or not given.startswith("file:"):
        return Path(given)
    parts = urlsplit(given)
    if parts.netloc not in ("", "localhost"):
        raise ValueError(f"files: expected file:///path, got {given!r}")
    return Path(url2pathname(parts.path))
