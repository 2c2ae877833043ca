"""What one buffer can do and one over shards cannot, and why."""

from __future__ import annotations

from typing import NoReturn

__all__ = ["REFUSED", "refuse"]

_PARTS = "the parts of shards are made by the functions that the constructor got, and stay"
_EDITS = (
    "stored rows may have been overwritten, or lost with their shard, since anybody looked; "
    "update_if_present() changes those that are still there"
)
_SAVES = "all shards are saved at one instant, each by itself; keep what is yours beside it"

REFUSED: dict[str, str] = {
    "append_transform": _PARTS,
    "as_remote": "its rows lie in actors already; client() is a handle for other processes",
    "checkpointer": "dumps and loads have one format, for all shards together",
    "dim_extend": "rows of shards lie along dimension 0, streams are told apart by shard_key",
    "episodes": "the index of episodes lies in the shards; slices are drawn by it",
    "insert_transform": _PARTS,
    "priority_key": "it was given to the buffers of the shards, which look for it",
    "register_load_hook": _SAVES,
    "register_save_hook": _SAVES,
    "service_backend": "its rows lie in actors of Ray; the constructor has backend=",
    "set_": _EDITS,
    "set_at_": _EDITS,
    "set_sampler": _PARTS,
    "set_storage": _PARTS,
    "set_writer": _PARTS,
    "share": "client() is a handle for other processes, which all see the same rows",
    "shared": "client() is a handle for other processes, which all see the same rows",
    "storage": "rows lie in the storages of the shards; rb[...] reads them",
    "transform": _PARTS,
    "update_": _EDITS,
    "write_all": _EDITS,
    "writer": "every shard has a writer of its own",
}
"""Public names of ``ReplayBuffer`` that a sharded one has not, and the reason."""


def refuse(kind: type, name: str) -> NoReturn:
    """Raises the AttributeError of a name that is not there.

    Example:
        >>> from replaykit.sharding import ShardedClient
        >>> from replaykit.sharding.refused import refuse
        >>> refuse(ShardedClient, "writer")
        Traceback (most recent call last):
        AttributeError: a ShardedClient has no 'writer': every shard has a writer of its own
    """
    if name in REFUSED:
        raise AttributeError(f"a {kind.__name__} has no {name!r}: {REFUSED[name]}")
    raise AttributeError(f"{kind.__name__!r} object has no attribute {name!r}")
