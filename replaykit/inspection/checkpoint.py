"""Facts of a checkpoint, as its manifest has them; rows stay in its files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from replaykit.buffer import ReplayBuffer
from replaykit.buffer.state import BufferState, apply_state, saved_sampler
from replaykit.checkpoint import Checkpoint, MappedCheckpoint, checkpoint_versions
from replaykit.errors import CheckpointError
from replaykit.inspection.facts import EpisodeFacts, Facts
from replaykit.inspection.stored import episodes_of, keys_of, table_of
from replaykit.inspection.table import Table
from replaykit.mapping import can_map_spans
from replaykit.storages import LazyTensorStorage
from replaykit.storages.content import Content
from replaykit.writers import RoundRobinWriter

__all__ = ["opened_checkpoint"]


@contextmanager
def opened_checkpoint(path: Path, most_bytes: int | None) -> Iterator[tuple[Facts, Table]]:
    """Opens the newest checkpoint of a directory and yields what is known of it.

    Sizes and the manifest's checksum are compared, checksums of data are not.

    Raises:
        FileNotFoundError: there is none. CheckpointError: it is damaged; names the file.
    """
    kind = MappedCheckpoint if can_map_spans() else Checkpoint
    with kind(path) as saved:
        manifest = saved.manifest
        try:
            content = Content.from_state(saved.part("storage", mapped=["groups"]))
        except ValueError as error:
            raise CheckpointError(f"the rows in {path} are damaged: {error}") from None
        warnings: list[str] = []
        episodes, facts = _episodes(saved, content, warnings)
        table = table_of(content, episodes, _priorities(saved))
        if content.groups and not table.columns:
            warnings.append(
                f"rows of {len(content.groups)} layouts in one list: their values are not looked at"
            )
        versions = checkpoint_versions(path)
        about: dict[str, Any] = {
            "buffer": ", ".join(str(name) for name in manifest["components"].values()),
            "capacity": manifest["max_size"],
            "written": manifest["write_count"],
            "version": f"{versions[-1]} (kept: {', '.join(map(str, versions))})",
            "format": f"{manifest['format_version']}, by replaykit {manifest['library_version']}",
        }
        if manifest["lanes"]:
            about["lanes"] = manifest["lanes"]
        if table.priorities is not None:
            sampler = saved.part("sampler", mapped=["_priorities"])
            about["priorities"] = ", ".join(
                f"{name} {sampler[f'_{name}']:g}"
                for name in ("alpha", "beta", "eps")
                if isinstance(sampler.get(f"_{name}"), (int, float))
            )
        yield (
            Facts(
                "checkpoint",
                str(path),
                manifest["len"],
                sum(record["size"] for record in manifest["files"].values()),
                about,
                keys_of(table, most_bytes),
                facts,
                tuple(warnings),
            ),
            table,
        )


def _priorities(saved: Checkpoint) -> Any:
    """Returns the priorities as they lie in the files; ``None`` where there are none."""
    if "sampler" not in saved:
        return None
    state = saved.part("sampler", mapped=["_priorities"])
    return state.get("_priorities") if isinstance(state, dict) else None


def _episodes(
    saved: Checkpoint, content: Content, warnings: list[str]
) -> tuple[Any, EpisodeFacts | None]:
    """Returns the episodes by way of a buffer whose rows stay in the files."""
    if not content.groups or not content.rows:
        return None, None
    manifest, writer = saved.manifest, saved.part("writer")
    slots = manifest["max_size"]
    storage = LazyTensorStorage(slots, ndim=manifest["ndim"])
    buffer = ReplayBuffer(storage=storage, writer=RoundRobinWriter())
    # What was drawn and how is no matter here: of the state only rows, their order and episodes
    # are taken, into a writer and a sampler that know no more than these.
    state = {**writer, "_kind": buffer.writer.kind}
    try:
        with buffer._locked():
            apply_state(
                buffer,
                BufferState(
                    content,
                    None,
                    state,
                    saved_sampler(buffer.sampler),
                    buffer._chain.state_dict(),
                    None,
                    [],
                    mapped=isinstance(saved, MappedCheckpoint),
                ),
            )
        return episodes_of(storage)
    except (ValueError, KeyError, TypeError, NotImplementedError) as error:
        warnings.append(f"the episodes are not listed: {error}")
        return None, None
