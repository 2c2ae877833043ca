"""The card of a pushed data set: what a Hub shows of it, and what it is found by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from replaykit.datasets.manifest import Manifest

__all__ = ["CARD_NAME", "card", "size_category"]

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
    """Returns the text of a card: a YAML block and a description.

    The text of an existing card that somebody has written is kept, and so is what its YAML block
    says of other things; tags are added to those that are there.

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
            # Whatever its parser of YAML raises.
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
    """Returns the range of a number of rows as Hubs name it.

    Example:
        >>> from replaykit.datasets.hub_card import size_category
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
