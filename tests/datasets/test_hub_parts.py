"""Large files of a Hub go on where a download was broken off, and wrong parts are thrown away."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from replaykit.datasets.hub_cache import HubCache, cache_root
from replaykit.datasets.hub_files import HubListing, Retry, fetch, list_files
from replaykit.errors import DownloadError
from replaykit.testing import Fault

REPO = "me/data"
FILES = {"door/a.h5": b"first " * 99}
QUICK = Retry(attempts=3, first_wait_s=0.01, stall_s=20)
# The client reads blocks of 10 MiB: so much of a file that is broken off later is there.
BLOCK = 10 << 20
BIG = "door/big.h5"
BIG_DATA = hashlib.sha256(b"seed").digest() * (11 * (1 << 20) // 32)


def listing_of() -> HubListing:
    return list_files(REPO, directory="door", suffix=".h5", retry=QUICK)


def only(listing: HubListing, path: str) -> HubListing:
    files = tuple(file for file in listing.files if file.path == path)
    return HubListing(listing.repo_id, listing.commit, listing.endpoint, files)


def cached(tmp_path: Path) -> list[Path]:
    root = tmp_path / "hf" / "hub"
    return [path for path in root.rglob("*") if path.is_file() and ".locks" not in path.parts]


def part_of(tmp_path: Path) -> Path:
    digest = hashlib.sha256(BIG_DATA).hexdigest()
    (folder,) = (tmp_path / "hf" / "hub").glob("datasets--*")
    return folder / "blobs" / f"{digest}.incomplete"


@pytest.mark.pitfall("DS12")
@pytest.mark.parametrize("symlinks", [True, False])
@pytest.mark.parametrize("ignore_range", [False, True])
def test_next_call_continues_a_large_file(
    hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ignore_range: bool, symlinks: bool
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_SYMLINKS", not symlinks)
    hub.commit(REPO, {BIG: BIG_DATA})
    listing = only(listing_of(), BIG)
    cut = [Fault(path=BIG, method="GET", cut_after=BLOCK + 9, times=1),
           Fault(path=BIG, method="GET", status=503)]  # fmt: skip
    hub.faults.extend(cut)
    with pytest.raises(DownloadError, match="HTTP 503"):
        fetch(listing, retry=Retry(attempts=1))
    assert part_of(tmp_path).read_bytes() == BIG_DATA[:BLOCK]
    left = len(BIG_DATA) - BLOCK
    assert HubCache(cache_root(), REPO, listing.commit).missing_bytes(listing.files) == left
    hub.faults[:] = [Fault(path=BIG, ignore_range=ignore_range)]
    hub.clear_log()
    seen: list[int] = []
    (path,) = fetch(listing, progress=lambda now: seen.append(now.bytes_done), retry=QUICK)
    assert path.read_bytes() == BIG_DATA
    assert [request.range for request in hub.asked("GET", "resolve")] == [f"bytes={BLOCK}-"]
    assert hub.bytes_served == (len(BIG_DATA) if ignore_range else left)
    assert (seen[0], seen[-1]) == (BLOCK, len(BIG_DATA))
    assert path.is_symlink() is symlinks
    # Its content lies there once.
    assert sum(not p.is_symlink() for p in cached(tmp_path) if p.stat().st_size > BLOCK) == 1
    assert not part_of(tmp_path).exists()


@pytest.mark.parametrize("part", [b"x" * BLOCK, BIG_DATA + b"x", BIG_DATA, b"x" * len(BIG_DATA)])
def test_a_part_that_is_wrong_is_thrown_away(hub: Any, tmp_path: Path, part: bytes) -> None:
    fetch(listing_of(), retry=QUICK)
    hub.commit(REPO, {BIG: BIG_DATA})
    part_of(tmp_path).write_bytes(part)
    hub.clear_log()
    assert [path.read_bytes() for path in fetch(only(listing_of(), BIG), retry=QUICK)] == [BIG_DATA]
    assert len(hub.asked("GET", "resolve")) <= 2
    assert (hub.bytes_served == 0) is (part == BIG_DATA)
    assert not part_of(tmp_path).exists()


def test_a_large_file_that_is_always_wrong_is_refused(hub: Any, tmp_path: Path) -> None:
    hub.commit(REPO, {BIG: BIG_DATA})
    hub.faults.append(Fault(path=BIG, method="GET", body=b"x" * len(BIG_DATA)))
    with pytest.raises(DownloadError, match="does not verify: expected sha256"):
        fetch(only(listing_of(), BIG), retry=QUICK)
    assert [path for path in cached(tmp_path) if path.stat().st_size > BLOCK] == []
