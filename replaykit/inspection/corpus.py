"""Facts of a published data set: its manifest and episode table; columns are read for plots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from replaykit.datasets.engine.report import lines_of
from replaykit.datasets.opened import Published
from replaykit.datasets.publish import open_published
from replaykit.inspection.facts import EpisodeFacts, Facts, KeyFacts
from replaykit.inspection.table import Table, TensorColumn

__all__ = ["corpus_facts"]


def corpus_facts(path: Path) -> tuple[Facts, Table]:
    """Returns what is known of a data set.

    Statistics are those of all values, as they were taken when the data set was made. Cost: O(E);
    no column is read.

    Raises:
        FileNotFoundError: there is nothing. RuntimeError: it is no complete data set.
    """
    published = open_published(path)
    manifest = published.manifest
    keys = tuple(
        KeyFacts(
            "/".join(array.key),
            array.shape[len(manifest.batch) :],
            str(array.dtype).removeprefix("torch."),
            int(np.prod(manifest.batch)),
            array.facts.get("statistics"),
            int(np.prod(manifest.batch)) if "statistics" in array.facts else 0,
            _source(array.facts),
        )
        for array in (*manifest.arrays, *manifest.finals)
    )
    about: dict[str, Any] = {
        "layout": f"{manifest.converter.get('name')} {manifest.converter.get('version')}",
        "content": manifest.content_id()[:16],
        "made": f"{manifest.made.get('time')} by {manifest.made.get('library')} "
        f"{manifest.made.get('version')}",
        "source": _origin(manifest.source),
    }
    if manifest.identity.get("dataset_id"):
        about = {"data set": manifest.identity["dataset_id"], **about}
    splits = manifest.report.get("splits") or {}
    if splits:
        about["splits"] = ", ".join(f"{name} ({len(of)})" for name, of in splits.items())
    if len(manifest.batch) > 1:
        about["form"] = f"split trajectories {list(manifest.batch)}, padded with zeros"
    nbytes = sum(size for _, size, _ in manifest.files())
    return (
        Facts(
            "corpus",
            str(path),
            int(published.episodes["length"].sum()),
            nbytes,
            about,
            keys,
            _episodes(published),
            tuple(lines_of(manifest.report)),
        ),
        _table(published),
    )


def _source(facts: Any) -> str | None:
    if "source" not in facts:
        return None
    if facts.get("one_per_episode"):
        return f"{facts['source']}, one an episode"
    shift = facts.get("shift", 0)
    return f"{facts['source']}[t{f'{shift:+d}' if shift else ''}]"


def _origin(source: Any) -> str:
    origin, files = source.get("origin", {}), source.get("files", [])
    size = sum(file["size"] for file in files)
    where = "files of one's own"
    if origin.get("repository"):
        where = f"{origin['repository']} at {str(origin.get('commit'))[:12]}"
    elif origin.get("url"):
        where = str(origin["url"])
    return f"{where}: {len(files)} file{'s' * (len(files) != 1)}, {size:,} bytes"


def _episodes(published: Published) -> EpisodeFacts:
    table = published.episodes
    terminated = table["terminated"].tolist()
    truncated = table["truncated"].tolist()
    ends = tuple(
        " and ".join(name for name, is_set in (("terminated", a), ("truncated", b)) if is_set)
        or "open"
        for a, b in zip(terminated, truncated, strict=True)
    )
    has_rewards = ("next", "reward") in published.columns
    returns = table["return"].numpy().astype(np.float64) if has_rewards else None
    return EpisodeFacts(table["length"].numpy(), ends, returns, tuple(published.groups()))


def _table(published: Published) -> Table:
    starts = published.episodes["start"].numpy()
    lengths = published.episodes["length"].numpy()
    batch = published.manifest.batch

    def flat(number: int) -> npt.NDArray[np.int64]:
        return np.arange(starts[number], starts[number] + lengths[number])

    def padded(number: int) -> npt.NDArray[np.int64]:
        return number * batch[1] + np.arange(lengths[number])

    rows_of = flat if len(batch) == 1 else padded
    columns = {}
    for key, values in published.columns.items():
        if values.dtype == torch.bfloat16 or not values.numel():
            continue
        shape = tuple(values.shape[len(batch) :])
        columns["/".join(key)] = TensorColumn(
            values.reshape(-1, *shape),
            rows_of,
            shape,
            values.new_empty(0).numpy().dtype,
            int(np.prod(batch)),
        )
    return Table(
        columns,
        len(starts),
        tuple(key for key in columns if key == "action" or key.startswith("action/")),
        tuple(key for key in columns if key == "next/reward"),
    )
