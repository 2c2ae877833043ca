"""Large files of a Hub, received into parts that outlive a process.

The client begins a file anew whenever a download was broken off. Its transport can go on, so that
here a file is received beside its place in the cache, under the client's own lock, verified, and
moved there; the client then finds it and makes the entry. It writes blocks of 10 MiB: of smaller
files no part would be kept, and they are left to it.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from replaykit.datasets.hub_cache import HubCache
from replaykit.datasets.hub_listing import HubFile
from replaykit.datasets.locking import cancellable_lock
from replaykit.datasets.sources import sha256_of

__all__ = ["HubParts"]

_LEAST: Final = 10 << 20
_NO_SUCH_RANGE: Final = 416


@dataclass(frozen=True)
class HubParts:
    """Receives files of one dataset repository at one commit.

    Attributes:
        cache: where they are kept.
        endpoint: the Hub.
        token: for repositories that are not public; None for the client's own.
        timeout_s: how long to wait for what the Hub says of a file.
        most: bytes above which the Hub gives nothing over plain HTTP.
        cancel: set when the fetch is given up.
    """

    cache: HubCache
    endpoint: str
    token: str | None
    timeout_s: int
    most: int
    cancel: threading.Event

    def takes(self, file: HubFile) -> bool:
        """Whether parts of a file are worth keeping, and there is a hash that tells wrong ones."""
        return file.sha256 is not None and _LEAST < file.size <= self.most

    def receive(
        self, file: HubFile, begin: Callable[[int], None], bar_class: type[Any]
    ) -> str | None:
        """Brings the content of a file into the cache, from where the last one broke off.

        Returns what is wrong with what came, which is removed then; None where it is right, or
        where the client is to be asked, since the server has something else there.

        Args:
            file: which one; one that `takes` takes.
            begin: told how many bytes are there already.
            bar_class: takes the others, as a progress bar.

        Raises:
            Cancelled: the fetch was given up.
            Exception: whatever the client raises; what has come stays.

        Cost: one request for where the content lies, one for the content; reads it once, for its
        hash.
        """
        import huggingface_hub
        from huggingface_hub.utils import build_hf_headers

        blob, part = self.cache.blob(file), self.cache.part(file)
        assert blob is not None
        assert part is not None
        url = huggingface_hub.hf_hub_url(
            self.cache.repo_id,
            file.path,
            repo_type="dataset",
            revision=self.cache.commit,
            endpoint=self.endpoint,
        )
        said = huggingface_hub.get_hf_file_metadata(url, token=self.token, timeout=self.timeout_s)
        if said.etag != file.etag or said.size != file.size:
            return None
        headers = {**build_hf_headers(token=self.token), "Accept-Encoding": "identity"}
        if urlsplit(said.location).netloc != urlsplit(url).netloc:
            headers.pop("authorization", None)
        lock = self.cache.lock(file)
        lock.parent.mkdir(parents=True, exist_ok=True)
        with cancellable_lock(lock, self.cancel):
            # Whoever held the lock may have brought it meanwhile.
            if blob.exists():
                return None
            self._receive(file, part, said.location, headers, begin, bar_class)
            digest = sha256_of(part)
            if part.stat().st_size == file.size and digest == file.sha256:
                part.replace(blob)
                return None
            part.unlink()
        return f"expected sha256 {file.sha256}, got {digest}"

    def _receive(
        self,
        file: HubFile,
        part: Path,
        url: str,
        headers: dict[str, str],
        begin: Callable[[int], None],
        bar_class: type[Any],
    ) -> None:
        from huggingface_hub.errors import HfHubHTTPError
        from huggingface_hub.file_download import http_get

        part.parent.mkdir(parents=True, exist_ok=True)
        part.touch()
        start = part.stat().st_size
        if start > file.size:
            start = 0
        begin(start)
        options: dict[str, Any] = {}
        if "tqdm_class" in inspect.signature(http_get).parameters:
            options["tqdm_class"] = bar_class
        with part.open("r+b") as content:
            content.truncate(start)
            content.seek(start)
            try:
                http_get(
                    url,
                    content,
                    resume_size=start,
                    headers=headers,
                    expected_size=file.size,
                    **options,
                )
            except HfHubHTTPError as error:
                if error.response.status_code != _NO_SUCH_RANGE:
                    raise
                content.truncate(0)
                raise ConnectionError("the server has no bytes where ours end") from error
