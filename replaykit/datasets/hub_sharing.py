"""Push and pull of published data sets on a Hub."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any, Final
from urllib.parse import quote

from replaykit.buffer.components import SamplerT
from replaykit.datasets.column_files import link_or_copy
from replaykit.datasets.dataset_manifest import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    Manifest,
    crc32_of_file,
)
from replaykit.datasets.hub_files import (
    HubFile,
    HubListing,
    Subject,
    cache_root,
    check_repo_id,
    endpoint,
    fetch,
    is_commit,
    list_files,
    offline_error,
)
from replaykit.datasets.published_buffer import CorpusExperienceReplay
from replaykit.datasets.publishing import (
    META,
    ensure_published,
    hold_back,
    open_published,
    verify_published,
)
from replaykit.datasets.transfers import Progress, Retry, is_offline, write_note
from replaykit.errors import DownloadError, UploadError
from replaykit.filesystem import existing, require_room

CARD_NAME: Final = "README.md"
_TAGS: Final = ("replaykit", "reinforcement-learning")
_MARK: Final = "<!-- written by replaykit; without this line the text is kept by the next push -->"
_UNITS: Final = ("", "K", "M", "B", "T")
_MOST_COLUMNS: Final = 40


def card(
    manifest: Manifest,
    repo_id: str,
    *,
    license: str,
    tags: Sequence[str] = (),
    existing: str | None = None,
) -> str:
    """Return the text of a dataset card, which is a YAML block and a description.

    If replaykit did not write the existing card, its text and the other entries of its YAML block
    are kept. New tags are added to the existing tags.

    Raises:
        ValueError: the YAML block of the existing card cannot be read.
    """
    from huggingface_hub import DatasetCard, DatasetCardData

    there: dict[str, Any] = {}
    text = None
    if existing is not None:
        try:
            found = DatasetCard(existing, ignore_metadata_errors=False)
        except Exception as error:
            # The YAML parser may raise errors of any class.
            raise ValueError(
                f"the YAML block of {CARD_NAME} in {repo_id!r} cannot be read: {error}; correct "
                "it, or remove the file"
            ) from error
        if _MARK not in found.text:
            there, text = found.data.to_dict(), found.text
    said = there.get("tags") or []
    known = [said] if isinstance(said, str) else list(said)
    data = DatasetCardData(
        **{
            **there,
            "license": license,
            "tags": list(dict.fromkeys([*known, *_TAGS, *tags])),
            "size_categories": [size_category(manifest.rows)],
        }
    )
    if text is None:
        text = "\n" + _description(manifest, repo_id, license)
    return f"---\n{data.to_yaml()}\n---\n{text}"


def size_category(rows: int) -> str:
    """Return the Hub's size category for a number of rows.

    Example:
        >>> from replaykit.datasets.hub_sharing import size_category
        >>> [size_category(n) for n in (0, 999, 1000, 250_000, 10**6, 10**12)]
        ['n<1K', 'n<1K', '1K<n<10K', '100K<n<1M', '1M<n<10M', 'n>1T']
    """
    if rows < 1000:
        return "n<1K"
    digits = len(str(rows)) - 1
    if digits >= 12:
        return "n>1T"
    return f"{_round(digits)}<n<{_round(digits + 1)}"


def _round(power: int) -> str:
    return f"{10 ** (power % 3)}{_UNITS[power // 3]}"


def _description(manifest: Manifest, repo_id: str, license: str) -> str:
    origin = manifest.source.get("origin", {})
    where = " ".join(
        str(origin[name]) for name in ("repository", "commit", "base") if origin.get(name)
    )
    name = manifest.identity.get("dataset_id") or repo_id.rpartition("/")[2]
    files = manifest.source.get("files", [])
    arrays = manifest.arrays[:_MOST_COLUMNS]
    columns = "\n".join(
        f"| `{'/'.join(array.key)}` | {str(array.dtype).removeprefix('torch.')} "
        f"| {list(array.shape[len(manifest.batch) :])} |"
        for array in arrays
    )
    left = len(manifest.arrays) - len(arrays)
    more = f"\n\nand {left} more." if left else ""
    nbytes = sum(size for _, size, _ in manifest.files())
    return f"""# {name}

{_MARK}

{manifest.rows:,} rows, {manifest.episodes:,} episodes, {nbytes:,} bytes. A row is a transition; \
its outcome is under `next`. Columns are memory-mapped files, described by `manifest.json` with \
their sizes and checksums (format {manifest.format_version} of replaykit).

```python
import replaykit.datasets

data = replaykit.datasets.pull("{repo_id}", batch_size=256)
data.sample()
```

| column | dtype | shape of a row |
|---|---|---|
{columns}{more}

Converted by the rules `{manifest.converter.get("name")}`, version \
{manifest.converter.get("version")}, from {len(files)} files\
{f" of {where}" if where else ""}; their names, sizes and SHA-256 are in `manifest.json`. Licence: \
{license}.
"""


FORMAT_TAG: Final = f"replaykit-format-{FORMAT_VERSION}"
"""The tag of the newest commit that this version of the package can read."""


def push(
    path: str | Path,
    repo_id: str,
    *,
    license: str | None = None,
    tags: Sequence[str] = (),
    private: bool = False,
    revision: str | None = None,
    token: str | None = None,
    message: str | None = None,
) -> str:
    """Upload a data set to a Hub repository, and return the URL of the commit.

    The data set is first read completely and checked. One commit adds its files and a card. The
    same commit removes files of the earlier version that the data set no longer has. Other files of
    the local directory are not uploaded. The text of a card that replaykit did not write is kept.
    The commit is tagged with the format version. If a call was interrupted, a repeated call does
    not upload the same files again.

    Args:
        path: directory of a data set that `convert` or a corpus class has made.
        repo_id: ``owner/name``. A missing repository is created.
        license: the licence in the notation of Hubs, such as ``"cc-by-4.0"``. The default is the
            licence of the source, which the manifest contains for known corpora.
        tags: tags of the card, in addition to ``replaykit`` and ``reinforcement-learning``.
        private: make a new repository private. An existing repository does not change.
        revision: a branch, which is created if it does not exist; by default ``main``. Only commits
            on ``main`` are tagged.
        token: the token of the Hub; by default the client's token.
        message: the commit message.

    Raises:
        FileNotFoundError: the path does not exist.
        RuntimeError: the path is not a complete data set, or contains damaged files.
        ValueError: the licence is neither known nor given, or differs from the licence of the
            source. Or ``repo_id`` is malformed.
        PermissionError: the token is missing, or may not write to the repository.
        UploadError: the Hub cannot be reached or fails, or another client has pushed in the
            meantime.

    Cost: every file is read once for its checksum, and once for the upload.

    Example:
        >>> from replaykit.datasets import convert, pull, push
        >>> from replaykit.datasets.families import D4RL
        >>> convert("steps.hdf5", D4RL, "data")  # doctest: +SKIP
        >>> push("data", "me/steps", license="mit")  # doctest: +SKIP
        >>> data = pull("me/steps", batch_size=256)  # doctest: +SKIP
    """
    check_repo_id(repo_id)
    if "/" not in repo_id:
        raise ValueError(f"repo_id: expected 'owner/name', got {repo_id!r}")
    published = open_published(path)
    licence = _licence(published.manifest, license)
    verify_published(path)
    subject = Subject(repo_id, revision or "main", endpoint())
    if is_offline():
        raise offline_error(subject)
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
    from huggingface_hub.errors import RevisionNotFoundError

    api = HfApi(endpoint=subject.endpoint, token=token)
    known: dict[str, Any] = {"repo_id": repo_id, "repo_type": "dataset"}
    with _upload_errors(subject):
        api.create_repo(**known, private=private, exist_ok=True)
        if revision is not None and revision != "main":
            api.create_branch(**known, branch=revision, exist_ok=True)
        head = str(api.dataset_info(repo_id, revision=subject.revision).sha)
        there = set(api.list_repo_files(**known, revision=head))
        old = {
            name: Path(api.hf_hub_download(**known, filename=name, revision=head)).read_bytes()
            for name in there & {CARD_NAME, MANIFEST_NAME}
        }
    existing = old[CARD_NAME].decode() if CARD_NAME in old else None
    text = card(published.manifest, repo_id, license=licence, tags=tags, existing=existing)
    ours = list(members(published.path, published.manifest))
    obsolete = there & _named(old.get(MANIFEST_NAME, b"")) - set(ours)
    operations: list[Any] = [
        CommitOperationAdd(name, str(published.path.joinpath(*name.split("/")))) for name in ours
    ]
    operations.append(CommitOperationAdd(CARD_NAME, text.encode()))
    operations += [CommitOperationDelete(name) for name in sorted(obsolete)]
    with _upload_errors(subject):
        commit = api.create_commit(
            **known,
            operations=operations,
            commit_message=message or f"Push {published.manifest.rows:,} rows with replaykit",
            revision=subject.revision,
            parent_commit=head,
        )
        if subject.revision == "main":
            with suppress(RevisionNotFoundError):
                api.delete_tag(**known, tag=FORMAT_TAG)
            api.create_tag(**known, tag=FORMAT_TAG, revision=commit.oid)
    return str(commit.commit_url)


def members(directory: Path, manifest: Manifest) -> Iterator[str]:
    """Yield the files of a data set: the files in its manifest, and ``meta.json`` files.

    Locks, parts and other files in the directory are not part of the data set.
    """
    yield MANIFEST_NAME
    yield from (name for name, _, _ in manifest.files())
    for folder in sorted(map(str, manifest.folders())):
        name = str(PurePosixPath(folder, META))
        if directory.joinpath(name).is_file():
            yield name


def _licence(manifest: Manifest, given: str | None) -> str:
    known = manifest.source.get("origin", {}).get("license")
    if given is None and known is None:
        raise ValueError(
            "the licence of the data set is not known: name the licence of its publication, "
            'such as license="cc-by-4.0"'
        )
    if given is not None and known is not None and given.lower() != str(known).lower():
        raise ValueError(f"license: the source has {known!r}, got {given!r}")
    return str(known) if given is None else given


@contextmanager
def _upload_errors(subject: Subject) -> Iterator[None]:
    """Convert errors of the client into the errors of `push`."""
    try:
        yield
    except Exception as error:
        # The client also raises exceptions of its HTTP library, so no narrower type is enough.
        raise _explained(subject, error) from error


def _explained(subject: Subject, error: Exception) -> Exception:
    response = getattr(error, "response", None)
    if response is None:
        response = getattr(error.__cause__, "response", None)
    status = getattr(response, "status_code", None)
    where = subject.repository
    if status in (401, 403):
        return PermissionError(
            f"writing to {where} was refused (HTTP {status}): log in with a token that may write "
            "(`hf auth login`, or set HF_TOKEN)"
        )
    refused = subject.refusal(error)
    if refused is not None:
        return refused
    first = (str(error).strip() or "no details").splitlines()[0]
    said = f"{type(error).__name__}: {first}"
    if status == 412:
        said = "another client has pushed to it in between"
    elif status is not None:
        said = f"the server answered HTTP {status} ({said})"
    return UploadError(
        f"could not push to {where}, revision {subject.revision}: {said}; push again: uploaded "
        "files are not sent again"
    )


def _named(text: bytes) -> set[str]:
    """Return the files in the text of an earlier manifest, or none if it is malformed."""
    try:
        manifest = Manifest.parse(text)
    except ValueError:
        return set()
    names = {name for name, _, _ in manifest.files()}
    return names | {str(folder / META) for folder in manifest.folders()}


_REVISIONS: Final = ".revisions"


def pull(
    repo_id: str,
    *,
    revision: str | None = None,
    root: str | Path | None = None,
    batch_size: int | None = None,
    token: str | None = None,
    progress: bool | Callable[[Progress], object] = False,
    retry: Retry = Retry(),  # noqa: B008 - frozen
    sampler: SamplerT | Callable[[], SamplerT] | None = None,
    **kwargs: Any,
) -> CorpusExperienceReplay[SamplerT]:
    """Open a data set of a Hub repository, after fetching it if it is not local.

    The revision is resolved to a commit. Every file is fetched at that commit. It is verified by
    the Hub's hash and by the manifest's checksum. The data set appears in
    ``<root>/<owner>/<name>/<commit>``, completely or not at all. Its bytes equal the pushed bytes.
    Each commit has a separate folder, so an open data set never changes.

    The client's cache keeps the files of an interrupted download. Processes that pull the same
    commit at once share one download. A local data set is opened without a request in offline mode,
    or if a full commit id is given.

    Args:
        repo_id: ``owner/name``.
        revision: a branch, a tag or a commit id; by default ``main``.
        root: folder of the pulled data sets; by default ``~/.cache/replaykit/pulled``.
        batch_size: default number of rows of a sample.
        token: the token for repositories that are not public; by default the client's token.
        progress: True shows a bar on stderr. A function is called with a `Progress`.
        retry: the attempts and waits after failures of a server.
        sampler: chooses the rows of a batch; by default ``RandomSampler()``.
        kwargs: other arguments of `CorpusExperienceReplay`, such as ``split``.

    Raises:
        FileNotFoundError: the repository or revision does not exist, or holds no data set. Or
            offline mode is on, and the data set is not local.
        PermissionError: the repository is gated, or refuses access.
        DownloadError: the server fails, or a file fails verification.
        OSError: the disk has too little room.
        ValueError: ``repo_id`` is malformed.

    Cost: every file is read twice, once for each checksum. Files are linked, not copied, if the
    client's cache is on the same file system.

    Example: see `push`.
    """
    check_repo_id(repo_id)
    base = Path.home() / ".cache" / "replaykit" / "pulled" if root is None else Path(root)
    folder = base.joinpath(*repo_id.split("/"))
    wanted = "main" if revision is None else revision
    options: dict[str, Any] = {"token": token, "retry": retry}
    listing, commit = None, wanted if is_commit(wanted) else None
    if is_offline():
        commit = commit or _recall(folder, wanted)
        if commit is None or not (folder / commit).exists():
            raise offline_error(Subject(repo_id, wanted, endpoint()))
    elif commit is None or not (folder / commit).exists():
        listing = list_files(repo_id, directory="", suffix="", revision=wanted, **options)
        commit = listing.commit

    def build(directory: Path) -> bytes:
        # There is no listing if the data set was local above, but was removed in the meantime.
        found = listing or list_files(repo_id, directory="", suffix="", revision=commit, **options)
        return _receive(found, directory, progress, options)

    published = ensure_published(folder / commit, build)
    _remember(folder, wanted, published.path.name)
    return CorpusExperienceReplay(published.path, batch_size, sampler=sampler, **kwargs)


def _receive(
    listing: HubListing,
    directory: Path,
    progress: bool | Callable[[Progress], object],
    options: Mapping[str, Any],
) -> bytes:
    """Fill a directory with the files of a data set, and return its manifest's text."""
    known = {file.path: file for file in listing.files}
    if MANIFEST_NAME not in known:
        raise FileNotFoundError(
            f"dataset repository {listing.repo_id!r} has no {MANIFEST_NAME} at commit "
            f"{listing.commit}: expected a data set that replaykit has pushed"
        )
    first = replace(listing, files=(known[MANIFEST_NAME],))
    text = fetch(first, **options)[0].read_bytes()
    try:
        manifest = Manifest.parse(text)
    except ValueError as error:
        raise DownloadError(
            f"dataset repository {listing.repo_id!r} at commit {listing.commit}: its "
            f"{MANIFEST_NAME} {error}; the tag {FORMAT_TAG!r}, if it exists, marks a commit that "
            "this version can read"
        ) from error
    checksums = {name: (size, crc32) for name, size, crc32 in manifest.files()}
    descriptions = {name for name in known if name.rpartition("/")[2] == META}
    missing = sorted(({*checksums, META}) - known.keys())
    if missing:
        raise _broken(listing, f"has no {', '.join(missing)}, which its {MANIFEST_NAME} names")
    files = tuple(known[name] for name in sorted({*checksums, *descriptions}))
    for file in files:
        if file.path in checksums and file.size != checksums[file.path][0]:
            expected = checksums[file.path][0]
            raise _broken(
                listing, f"has {file.path} with {file.size:,} bytes, expected {expected:,}"
            )
    _require_room(directory, files)
    chosen = replace(listing, files=files)
    paths = fetch(chosen, progress=progress, **options)
    for file, path in zip(files, paths, strict=True):
        target = directory.joinpath(*file.path.split("/"))
        link_or_copy(path, target)
        if file.path in checksums and crc32_of_file(target) != checksums[file.path][1]:
            raise _broken(listing, f"has another {file.path} than its {MANIFEST_NAME} describes")
    hold_back(directory)
    return text


def _broken(listing: HubListing, what: str) -> DownloadError:
    return DownloadError(
        f"dataset repository {listing.repo_id!r} {what} (commit {listing.commit}): it was damaged "
        "after it was pushed; ask its owner to push it again"
    )


def _require_room(directory: Path, files: tuple[HubFile, ...]) -> None:
    """Check the room in the target if files will be copied. `fetch` checks the cache."""
    if existing(cache_root()).stat().st_dev != directory.stat().st_dev:
        sizes = [file.size for file in files]
        require_room(directory, sum(sizes), max(sizes))


def _recall(folder: Path, revision: str) -> str | None:
    """Return the commit of a branch or tag at its last pull, or None."""
    try:
        commit = _record_revision(folder, revision).read_text(encoding="ascii")
    except (OSError, ValueError):
        return None
    return commit if is_commit(commit) else None


def _remember(folder: Path, revision: str, commit: str) -> None:
    if is_commit(revision) or _recall(folder, revision) == commit:
        return
    with suppress(OSError):  # a folder that cannot be written is usable without the record
        write_note(_record_revision(folder, revision), commit)


def _record_revision(folder: Path, revision: str) -> Path:
    return folder / _REVISIONS / quote(revision, safe="")
