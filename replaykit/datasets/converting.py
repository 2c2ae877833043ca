"""Converting files of one's own, and opening the result: the two functions that need no class."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit
from urllib.request import url2pathname

from replaykit.buffer.core import SamplerT
from replaykit.datasets.dataset_manifest import MANIFEST_NAME, Manifest
from replaykit.datasets.engine.conversion import ConvertOptions, ensure_dataset, stamps_of
from replaykit.datasets.engine.finding import natural_key
from replaykit.datasets.engine.layout import Layout, rules_digest
from replaykit.datasets.engine.policies import Policies
from replaykit.datasets.http_files import WebFile
from replaykit.datasets.published_buffer import CorpusExperienceReplay
from replaykit.datasets.remote_sources import WebFiles
from replaykit.datasets.sources import (
    SUFFIXES,
    Sources,
    h5_below,
    names_of,
    require_plain,
    room_needed_at,
    sha256_of,
)
from replaykit.errors import CorpusError

__all__ = [
    "Files",
    "convert",
    "digest_of",
    "known_digest",
    "local_paths",
    "local_sources",
    "open",
    "paths_of",
]

_WEB: Final = ("http://", "https://")

Files = (
    str
    | os.PathLike[str]
    | Iterable[str | os.PathLike[str]]
    | Mapping[str, str | None]
    | Mapping[os.PathLike[str], str | None]
)
"""Files one by one or by their directories, as paths or URLs; or with a SHA-256 for each."""


def convert(
    files: Files,
    layout: Layout,
    dest: str | Path,
    *,
    policies: Policies | None = None,
    workers: int = 1,
    force: bool = False,
    progress: bool | None = None,
) -> CorpusExperienceReplay:
    """Converts H5 files into a data set of transitions, and opens it.

    All files are scanned before the first row is written. The result appears at ``dest`` complete
    or not at all. A call that was interrupted, or whose process was killed, leaves a hidden
    directory beside ``dest``, and the same call goes on with the files that it had not finished,
    and in a long one where it had come to, up to the same bytes; any other call for ``dest``
    removes it. Where the result is there already, made from these files by this layout and these
    policies, it is opened as it is.

    Args:
        files: H5 files, or directories that are searched for them (``.h5``, ``.hdf5``,
            ``.hdf``), as paths or ``file://`` URLs; or ``http://`` and ``https://`` URLs, which are
            fetched as by `download`. Links to files are followed, those in such a directory too,
            and links to directories in it are not. A mapping gives the SHA-256 of each, or None.
            The order of rows is that of the paths.
        layout: how the files are laid out; see `Layout`. What its parts are must show in their
            ``repr``, as it does for dataclasses.
        dest: directory of the data set.
        policies: what is done with keys, dtypes and episodes that are not as one would wish.
        workers: how many processes convert at once, each a file; the result does not depend on
            it.
        force: convert anew and replace the data set at ``dest``, in one step at the end.
        progress: whether a bar is shown; by default only on a terminal.

    Raises:
        CorpusError: a file breaks a rule of its layout, or is not the one of its SHA-256; names
            file, episode, key and rule. It is a ValueError.
        ValueError: the policies name a key or dtype that no file has; a file is a pipe, a device
            or a socket, also in a directory that is searched; or its name is not UTF-8.
        FileNotFoundError: a file is not there, or a directory holds none.
        DownloadError, PermissionError: as `download` does.
        OSError: a file cannot be read, or there is no room; names the file. Before a download:
            no room for the files and as much again for columns, unless policies may make these
            smaller.
        RuntimeError: without ``force``, what is at ``dest`` is something else; with it, files that
            are no part of a data set, which are never removed.
        ImportError: h5py is not installed.

    Warns:
        UserWarning: keys were left out, episodes skipped, or values are odd; one warning for all
            of it. ``published.manifest.report`` of the result has the same and more.

    Cost: reads every value twice, once for the checksum of its file, and writes it once for each
    column. Memory: some blocks of 16 MiB for each worker, and about 100 bytes for each episode.

    Example:
        >>> import tempfile, h5py, numpy as np
        >>> from pathlib import Path
        >>> from replaykit.datasets import Policies, convert
        >>> from replaykit.datasets.families import D4RL
        >>> root = Path(tempfile.mkdtemp())
        >>> with h5py.File(root / "a.hdf5", "w") as file:
        ...     file["observations"], file["actions"] = np.eye(4), np.zeros((4, 1))
        ...     file["rewards"], file["terminals"] = np.ones(4), np.arange(4) == 1
        >>> policies = Policies(casts={"float64": "float32"})
        >>> data = convert(root, D4RL, root / "data", policies=policies)
        >>> data.episode_table["length"], data[:]["next", "observed"].flatten()
        (tensor([2, 1]), tensor([ True, False,  True]))
    """
    options = ConvertOptions(policies=Policies() if policies is None else policies, workers=workers)
    sources = local_sources(
        files,
        natural=layout.natural_files,
        threads=workers,
        checked=options.policies.on_invalid != "skip",
        target=room_needed_at(Path(dest), may_shrink=options.policies.may_shrink, force=force),
    )
    identity: dict[str, Any] = {
        "files": digest_of(sources, layout),
        "policies": options.policies.to_json(),
        "rules": rules_digest(layout),
    }
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
    """Opens a data set that was converted before; see `CorpusExperienceReplay`.

    Example:
        >>> import replaykit.datasets
        >>> replaykit.datasets.open("no-such-folder")
        Traceback (most recent call last):
        FileNotFoundError: [Errno 2] No such file or directory: ...
    """
    return CorpusExperienceReplay(dest, batch_size, sampler=sampler, **kwargs)


def local_sources(
    files: Files,
    *,
    natural: bool = False,
    threads: int = 1,
    checked: bool = True,
    target: Path | None = None,
) -> Sources:
    """Describes the H5 files that a caller gives, and fetches those that are URLs of the web.

    ``target``: where columns will be made of them, if their room is to be looked at before a fetch.

    Raises:
        FileNotFoundError: a file is not there, or a directory holds none.
        CorpusError: a file is not that of its SHA-256, or, where ``checked``, not HDF5.
        ValueError: URLs of the web and paths are given together.
    """
    web = _web_files(files)
    if web:
        return WebFiles(web, natural).sources(target)
    sources = Sources.local(_paths(files), natural=natural, threads=threads, checked=checked)
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
    """Returns the paths of H5 files that a caller gives, by natural order; URLs are fetched.

    Raises:
        FileNotFoundError: a file is not there, or a directory holds none.
        DownloadError, PermissionError, OSError: as `download` does.
        ValueError: URLs of the web and paths are given together.
    """
    web = _web_files(files)
    if web:
        return [file.path for file in WebFiles(web, natural=True).sources().files]
    return local_paths(files)


def local_paths(files: Files) -> list[Path]:
    """Returns the paths of H5 files that a caller gives, by natural order; none for URLs.

    Raises:
        FileNotFoundError: a file is not there, or a directory holds none.
        ValueError: URLs of the web and paths are given together.
    """
    if _web_files(files):
        return []
    return sorted(_paths(files), key=lambda path: natural_key(str(path)))


def digest_of(sources: Sources, layout: Layout) -> str:
    """Returns a digest of the content of files, and of the files beside that describe them."""
    digest = hashlib.sha256()
    for file in sources.files:
        digest.update(f"{file.name}\0{file.sha256}\n".encode())
        for beside in layout.described_by(file.path):
            if beside.is_file():
                digest.update(f"{beside.name}\0{sha256_of(beside)}\n".encode())
    return digest.hexdigest()


def known_digest(files: Files, layout: Layout, path: Path) -> str | None:
    """Returns the digest of files that a data set was made from, as its manifest has it.

    ``None`` where there is none, or where a file has another name, size or time of change than
    when it was made: then only its content can tell. Cost: reads the manifest and no file.

    Args:
        files: those that are asked about.
        layout: how they are laid out.
        path: the directory of the data set.

    Raises:
        FileNotFoundError: a file is not there, or a directory holds none.
    """
    web = _web_files(files)
    if web:
        return _listing(web)
    stamps = stamps_of(names_of(_paths(files)), layout)
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
    """Returns a digest of the URLs of files, and of what is known of their content."""
    found = sorted(((file.url, file.sha256) for file in files), key=repr)
    return hashlib.sha256(repr(found).encode()).hexdigest()


def _paths(files: Files) -> list[Path]:
    paths: list[Path] = []
    for path in map(_path, _given(files)):
        if not path.exists():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        require_plain(path)
        if not path.is_dir():
            paths.append(path)
            continue
        found = h5_below(path)
        if not found:
            raise FileNotFoundError(f"{path}: no file below it ends in {', '.join(SUFFIXES)}")
        paths.extend(found)
    return paths


def _web_files(files: Files) -> tuple[WebFile, ...]:
    """Returns the files of the web that are given; none where paths are."""
    given = _given(files)
    urls = [each for each in given if isinstance(each, str) and each.startswith(_WEB)]
    if urls and len(urls) < len(given):
        raise ValueError(f"files: expected either URLs of the web or paths, got {given}")
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
