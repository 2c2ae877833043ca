"""Pushing a published data set to a Hub: checked, described, in one commit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Final, TypeVar

from replaykit.datasets.hub_cache import endpoint, is_offline
from replaykit.datasets.hub_card import CARD_NAME, card
from replaykit.datasets.hub_errors import Subject, offline_error, refusal
from replaykit.datasets.hub_listing import check_repo_id
from replaykit.datasets.manifest import FORMAT_VERSION, MANIFEST_NAME, Manifest
from replaykit.datasets.publish import open_published, verify_published
from replaykit.errors import UploadError

__all__ = ["FORMAT_TAG", "members", "push"]

T = TypeVar("T")

FORMAT_TAG: Final = f"replaykit-format-{FORMAT_VERSION}"
"""The tag of the newest commit of a repository that this version of the package can read."""
_META_NAME: Final = "meta.json"


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
    """Uploads a converted data set to a Hub repository, and returns the URL of the commit.

    The data set is read whole and checked first. The repository gets its files, a card, and nothing
    else of the directory, in one commit; files of an earlier version that it no longer has are
    removed by the same commit. A card whose text somebody has written is kept. The commit is tagged
    by the version of the format. What a push that broke off has uploaded is not uploaded again.

    Args:
        path: directory of the data set, as `convert` and the corpus classes make it.
        repo_id: ``owner/name``; made if it is not there.
        license: as Hubs abbreviate it, such as ``"cc-by-4.0"``. By default that of the source,
            which the manifest has for corpora that are known.
        tags: of the card, beside ``replaykit`` and ``reinforcement-learning``.
        private: whether the repository is made private, if it is made; others stay as they are.
        revision: a branch, made if it is not there; by default ``main``. Only commits on
            ``main`` are tagged.
        token: of the Hub; by default the client's own.
        message: of the commit.

    Raises:
        FileNotFoundError: there is nothing at the path.
        RuntimeError: what is there is not a complete data set, or files of it are damaged.
        ValueError: the licence is not known and not given, or another one is; a malformed
            ``repo_id``.
        PermissionError: the Hub refuses; the token is missing or may not write there.
        UploadError: the Hub cannot be reached or fails, or somebody else has pushed meanwhile.

    Cost: reads every file twice, once for its checksum and once to send it.

    Example:
        >>> import os, tempfile, h5py, numpy as np
        >>> from pathlib import Path
        >>> from unittest.mock import patch
        >>> from replaykit.datasets import convert, pull, push
        >>> from replaykit.datasets.families import D4RL
        >>> from replaykit.testing import LoopbackHub
        >>> root = Path(tempfile.mkdtemp())
        >>> with h5py.File(root / "a.hdf5", "w") as file:
        ...     file["observations"], file["actions"] = np.eye(4), np.zeros((4, 1))
        ...     file["rewards"], file["terminals"] = np.ones(4), np.arange(4) == 3
        >>> data = convert(root / "a.hdf5", D4RL, root / "data")
        >>> with LoopbackHub() as hub, patch.dict(os.environ, hub.env(root / "hf")):
        ...     url = push(root / "data", "me/steps", license="mit", token="any")
        ...     again = pull("me/steps", root=root / "pulled", batch_size=2)
        >>> url.rpartition("/")[2] == hub.head("me/steps"), len(again) == len(data) == 4
        (True, True)
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

    api = HfApi(endpoint=subject.endpoint, token=token)
    known: dict[str, Any] = {"repo_id": repo_id, "repo_type": "dataset"}
    ask = _Asker(subject)
    ask(api.create_repo, **known, private=private, exist_ok=True)
    if revision is not None and revision != "main":
        ask(api.create_branch, **known, branch=revision, exist_ok=True)
    head = str(ask(api.dataset_info, repo_id, revision=subject.revision).sha)
    there = set(ask(api.list_repo_files, **known, revision=head))
    text = card(
        published.manifest,
        repo_id,
        license=licence,
        tags=tags,
        existing=_text(ask, api, known, head, CARD_NAME) if CARD_NAME in there else None,
    )
    ours = list(members(published.path, published.manifest))
    obsolete: set[str] = set()
    if MANIFEST_NAME in there:
        obsolete = there & _named(_text(ask, api, known, head, MANIFEST_NAME)) - set(ours)
    operations: list[Any] = [
        CommitOperationAdd(name, str(published.path.joinpath(*name.split("/")))) for name in ours
    ]
    operations.append(CommitOperationAdd(CARD_NAME, text.encode()))
    operations += [CommitOperationDelete(name) for name in sorted(obsolete)]
    commit = ask(
        api.create_commit,
        **known,
        operations=operations,
        commit_message=message or f"Push {published.manifest.rows:,} rows with replaykit",
        revision=subject.revision,
        parent_commit=head,
    )
    if subject.revision == "main":
        _move_tag(ask, api, known, commit.oid)
    return str(commit.commit_url)


def members(directory: Path, manifest: Manifest) -> Iterator[str]:
    """Yields the files of a data set: those that its manifest names, and what describes them.

    Locks, parts and whatever else lies in the directory are none.
    """
    names = [name for name, _, _ in manifest.files()]
    yield MANIFEST_NAME
    yield from names
    for folder in sorted({str(parent) for name in names for parent in PurePosixPath(name).parents}):
        name = str(PurePosixPath(folder, _META_NAME))
        if directory.joinpath(name).is_file():
            yield name


def _licence(manifest: Manifest, given: str | None) -> str:
    known = manifest.source.get("origin", {}).get("license")
    if given is None and known is None:
        raise ValueError(
            "the licence of the data set is not known: say under which one it may be passed on, "
            'such as license="cc-by-4.0"'
        )
    if given is not None and known is not None and given.lower() != str(known).lower():
        raise ValueError(f"license: the source has {known!r}, got {given!r}")
    return str(known) if given is None else given


class _Asker:
    """Calls the client; what it raises becomes what `push` raises."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject

    def __call__(self, call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        try:
            return call(*args, **kwargs)
        except Exception as error:
            # The client lets exceptions of its HTTP library out: no narrower type will do.
            raise self._explain(error) from error

    def _explain(self, error: Exception) -> Exception:
        response = getattr(error, "response", None)
        if response is None:
            response = getattr(error.__cause__, "response", None)
        status = getattr(response, "status_code", None)
        where = self._subject.repository
        if status in (401, 403):
            return PermissionError(
                f"writing to {where} was refused (HTTP {status}): log in with a token that may "
                "write (`hf auth login`, or set HF_TOKEN)"
            )
        refused = refusal(error, self._subject)
        if refused is not None:
            return refused
        first = (str(error).strip() or "no details").splitlines()[0]
        said = f"{type(error).__name__}: {first}"
        if status == 412:
            said = "somebody else has pushed to it meanwhile"
        elif status is not None:
            said = f"the server answered HTTP {status} ({said})"
        return UploadError(
            f"could not push to {where}, revision {self._subject.revision}: {said}; push again, "
            "what has arrived is not sent anew"
        )


def _text(ask: _Asker, api: Any, known: Mapping[str, Any], commit: str, name: str) -> str:
    path = ask(api.hf_hub_download, **known, filename=name, revision=commit)
    return Path(path).read_text(encoding="utf-8")


def _named(text: str) -> set[str]:
    """Returns the files that the manifest of an earlier version names; none where it is none."""
    try:
        manifest = Manifest.parse(text.encode())
    except ValueError:
        return set()
    names = {name for name, _, _ in manifest.files()}
    folders = {parent for name in names for parent in PurePosixPath(name).parents}
    return names | {str(folder / _META_NAME) for folder in folders}


def _move_tag(ask: _Asker, api: Any, known: Mapping[str, Any], commit: str) -> None:
    from huggingface_hub.errors import RevisionNotFoundError

    def remove() -> None:
        try:
            api.delete_tag(**known, tag=FORMAT_TAG)
        except RevisionNotFoundError:
            return

    ask(remove)
    ask(api.create_tag, **known, tag=FORMAT_TAG, revision=commit)
