"""Where robomimic's data sets are hosted: those of release 1.5 on the Hub, those of 0.1 by their
authors, with images and with sizes that are known."""

from __future__ import annotations

import os
from typing import Final

from replaykit.datasets.http_cache import WebFile
from replaykit.datasets.http_sources import WebFiles
from replaykit.datasets.hub_sources import HubFiles

__all__ = ["ROBOMIMIC_REPOSITORY", "robomimic_ids", "robomimic_remote"]

ROBOMIMIC_REPOSITORY: Final = "robomimic/robomimic_datasets"
_FIRST_RELEASE: Final = "http://downloads.cs.stanford.edu/downloads/rt_benchmark"
_FIRST: Final = "v0.1/"
_IDS: Final = [
    f"{task}/{kind}/{name}"
    for kind, tasks, names in (
        ("ph", ("lift", "can", "square", "transport", "tool_hang"), ("low_dim", "demo")),
        ("mh", ("lift", "can", "square", "transport"), ("low_dim", "demo")),
        ("mg", ("lift", "can"), ("low_dim_sparse", "low_dim_dense", "demo")),
        ("paired", ("can",), ("low_dim", "demo")),
    )
    for task in tasks
    for name in names
]
_SIZES: Final = {
    "lift/ph/low_dim": 18_548_952,
    "lift/ph/image": 837_217_792,
    "lift/mh/low_dim": 47_947_760,
    "lift/mh/image": 2_683_867_952,
    "lift/mg/low_dim_sparse": 316_926_856,
    "lift/mg/image_sparse": 19_369_836_272,
    "can/ph/low_dim": 45_491_992,
    "can/ph/image": 2_010_694_944,
    "can/mh/low_dim": 112_486_112,
    "can/mh/image": 5_426_502_864,
    "can/mg/low_dim_sparse": 1_079_740_536,
    "can/mg/image_sparse": 50_617_343_640,
    "square/ph/low_dim": 50_004_112,
    "square/ph/image": 2_603_429_840,
    "square/mh/low_dim": 123_863_240,
    "square/mh/image": 6_959_859_145,
    "transport/ph/low_dim": 309_012_088,
    "transport/ph/image": 16_185_926_632,
    "transport/mh/low_dim": 636_980_704,
    "transport/mh/image": 33_795_402_208,
    "tool_hang/ph/low_dim": 201_634_440,
    "tool_hang/ph/image": 66_530_916_816,
}
"""Bytes of the files of release 0.1."""
_SHA256: Final = {
    "lift/ph/low_dim": "18106c8c072020672fecdd2a9ffbfe7dc656823cb877f972ade7fad34d2a5b74"
}


def robomimic_ids() -> list[str]:
    """Returns the ids, those of release 0.1 last."""
    return [*_IDS, *(f"{_FIRST}{name}" for name in _SIZES)]


def robomimic_remote(dataset_id: str) -> HubFiles | WebFiles:
    """Says where the file of an id is; ``REPLAYKIT_ROBOMIMIC_URL`` names a mirror of release 0.1.

    Example:
        >>> from replaykit.datasets.families.robomimic_files import robomimic_remote
        >>> robomimic_remote("v0.1/lift/ph/image").known_bytes
        837217792
    """
    folder, _, name = dataset_id.rpartition("/")
    first = dataset_id.removeprefix(_FIRST)
    if first == dataset_id:
        return HubFiles(ROBOMIMIC_REPOSITORY, f"v1.5/{folder}", f"/{name}_v15.hdf5")
    base = (os.environ.get("REPLAYKIT_ROBOMIMIC_URL") or _FIRST_RELEASE).rstrip("/")
    return WebFiles((WebFile(f"{base}/{first}.hdf5", _SIZES.get(first), _SHA256.get(first)),))
