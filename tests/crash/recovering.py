"""What a child does to a buffer that lives on disk, and the same in memory."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from replaykit import (
    EpisodeWriter,
    LaneWriter,
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    ReplayBuffer,
    ReturnToGo,
    TensorDictMaxValueWriter,
)
from replaykit.episodes.boundaries import RESTORED

SLOTS = 24

KINDS = ("ring", "lanes", "streams", "best", "rings", "returns", "episodes")
ONCE = ("once ring", "once lanes", "once streams", "once rings", "once best", "once episodes")
"""The same, and rings of streams, with observations stored once."""
SHARED = (
    "shared ring",
    "shared lanes",
    "shared streams",
    "shared rings",
    "shared returns",
    "shared episodes",
    "shared once ring",
    "shared once lanes",
    "shared once streams",
    "shared once rings",
    "shared once episodes",
)
"""The same in a buffer that processes share."""


def rows_of(draw: random.Random, kind: str, first: int, count: int) -> TensorDict:
    lanes = [3] if "lanes" in kind else []
    shape = [count, *lanes]
    number = torch.arange(first, first + count).reshape([count] + [1] * len(lanes)).expand(shape)
    seed = draw.randrange(2**31)
    noise = torch.rand(shape, generator=torch.Generator().manual_seed(seed))
    rows = TensorDict(
        {
            "number": number.contiguous(),
            "lane": number % 3,
            "pixels": number.unsqueeze(-1).expand(*shape, 5000).to(torch.uint8).contiguous(),
            "next": {"reward": noise, "done": noise < 0.15},
        },
        shape,
    )
    if "episodes" in kind:
        split = draw.randrange(count) if count <= SLOTS else 0
        later = number >= first + split
        rows["lane"] = first + later.long()
        rows["next", "done"] = (number == first + split - 1) | (number == first + count - 1)
    if "once" in kind:
        step = 3 if "streams" in kind or "rings" in kind else 1
        ahead = number + step
        rows["place"] = number.float()
        rows["next", "place"] = ahead.float()
        rows["next", "pixels"] = ahead.unsqueeze(-1).expand(*shape, 5000).to(torch.uint8)
    return rows.transpose(0, 1).contiguous() if lanes else rows


def new_buffer(kind: str, folder: Path | None, *, durable: bool = False) -> ReplayBuffer:
    """The buffer of a kind: in files that are recovered, or in memory."""
    options: dict[str, Any] = {"ndim": 2} if "lanes" in kind else {}
    if "streams" in kind or "rings" in kind or "episodes" in kind:
        options["lane_key"] = "lane"
    if "once" in kind:
        options |= {"dedup_next": True, "on_mismatch": "dense"}
    size = SLOTS * 3 if "lanes" in kind else SLOTS
    writer: Any = TensorDictMaxValueWriter() if "best" in kind else None
    if "rings" in kind:
        writer = LaneWriter(length=7)
    if "episodes" in kind:
        writer = EpisodeWriter(over_long="split", on_duplicate="replace")
    if folder is None:
        storage: Any = LazyTensorStorage(size, **options)
    else:
        storage = LazyMemmapStorage(
            size, scratch_dir=folder, recover=True, durable=durable, **options
        )
    return ReplayBuffer(
        storage=storage,
        sampler=PrioritizedSampler(alpha=0.7, beta=0.5),
        writer=writer,
        transform=ReturnToGo(0.5) if "returns" in kind else None,
        shared="shared" in kind and folder is not None,
    )


def apply(buffer: ReplayBuffer, kind: str, step: int) -> None:
    """One operation, which follows from its number."""
    draw = random.Random(step)
    what, stored = draw.random(), len(buffer)
    if stored and what < 0.25:
        some = torch.tensor(draw.choices(range(stored), k=5))
        if "lanes" in kind:
            some = torch.stack([some // 3, some % 3], -1)
        values = torch.tensor([draw.random() * 3 for _ in range(5)])
        buffer.update_priority(some, values)
    elif stored and what < 0.33 and "lanes" not in kind and "returns" not in kind:
        at = sorted(draw.sample(range(stored), min(3, stored)))
        new = buffer[torch.tensor(at)]
        new["pixels"] = (255 - new["pixels"]).contiguous()
        buffer[torch.tensor(at)] = new
    elif stored and what < 0.37 and kind.endswith("ring"):
        buffer.cut()
    elif what < 0.39:
        buffer.empty()
    elif stored and what < 0.5 and "episodes" in kind:
        buffer.remove_oldest(draw.choice([1, 3]))
    elif stored and what < 0.55 and "episodes" in kind:
        buffer.tag(torch.tensor([draw.randrange(stored)]), {"mark": -step})
    else:
        count = draw.choice([1, 2, 5, 9, SLOTS + 5])
        first = 1000 * step if "episodes" not in kind else 1000 * draw.randrange(20)
        if "once" in kind and draw.random() < 0.7:
            first = buffer.storage.ledger.next_position  # goes on
        tags = {"mark": step} if "episodes" in kind else None
        buffer.extend(rows_of(draw, kind, first, count), tags=tags)


def restart(buffer: ReplayBuffer) -> None:
    """What opening again does: nothing spans a restart."""
    indexes = buffer.storage.indexes
    with buffer.storage.lock:
        if len(buffer):
            indexes.cut(code=RESTORED)
        else:  # nor does an episode that was open when all rows were forgotten
            indexes.restore(None, None, None)


def shown(buffer: ReplayBuffer) -> dict[str, Any]:
    """Everything that is to be there again."""
    with buffer.storage.lock:  # it undoes the change of a killed process
        return _shown(buffer)


def _shown(buffer: ReplayBuffer) -> dict[str, Any]:
    storage = buffer.storage
    ledger = storage.ledger
    found: dict[str, Any] = {
        "len": len(buffer),
        "cursor": ledger.cursor,
        "position": ledger.next_position,
        "count": buffer.write_count,
        "order": ledger.write_order().tolist(),
        "generations": ledger.generations(torch.arange(SLOTS)).tolist(),
    }
    if len(buffer):
        rows = buffer[:]
        for key in rows.keys(True, True):
            found[str(key)] = rows[key].clone()
        found["priorities"] = buffer.sampler.state_dict()["_priorities"]
        found["default"] = buffer.sampler.default_priority
        table = storage.episodes.table()
        found["episodes"] = [column.tolist() for column in (table.code, table.head)]
        spans = zip(table.first, table.last, strict=True)
        found["lengths"] = [int(last - first) for first, last in spans]
        before = zip(table.first, table.begin, strict=True)
        data = storage.indexes.data()
        found["tags"] = [data[name].tolist() for name in storage.indexes.tags.names]
        found["gone"] = [int(first - begin) for first, begin in before]
    return found


def differences(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """The names of what differs."""
    names = []
    for name in sorted(found.keys() | wanted.keys()):
        one, other = found.get(name), wanted.get(name)
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            same = one.shape == other.shape and bool((one == other).all())
        else:
            same = one == other
        if not same:
            names.append(name)
    return names


def kill_at(die_at: int, since: str = "") -> None:
    """Kills this process at that call of a function of the package; 0: at none.

    Args:
        since: the function from whose first call on they are counted.
    """
    calls, begun = 0, not since

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls, begun
        if event in ("call", "return", "c_call", "c_return"):
            if "replaykit" not in frame.f_code.co_filename:
                return
            begun = begun or frame.f_code.co_name == since
            calls += begun
            if begun and calls == die_at:
                os.kill(os.getpid(), signal.SIGKILL)

    if die_at:
        sys.setprofile(count)


class Child:
    """A process that says over a pipe what it has done.

    Args:
        work: function that takes the other arguments, and the end of the pipe as ``said``.
    """

    def __init__(self, context: Any, work: Callable[..., Any], *given: Any, **options: Any) -> None:
        self.hear, said = context.Pipe(duplex=False)
        self.process = context.Process(target=work, args=given, kwargs={**options, "said": said})
        self.process.start()
        said.close()

    def wait(self) -> None:
        """Wait until it says that it is ready."""
        assert self.hear.poll(60)
        assert self.hear.recv() == "ready"

    def last_said(self, done: Any = -1) -> Any:
        """Return its last message, after it has ended or was killed."""
        with contextlib.suppress(EOFError):
            while True:
                done = self.hear.recv()
        self.process.join(60)
        assert self.process.exitcode in (0, -signal.SIGKILL), (self.process.exitcode, done)
        return done


def child(kind: str, folder: Path, steps: range, said: Any, die_at: int) -> None:
    """Works until it is done, saying after every step which one that was.

    Args:
        said: end of a pipe to say it on.
        die_at: the call of a function of the package at which it is killed; 0: none.
    """
    said.send("ready")
    kill_at(die_at)
    buffer = new_buffer(kind, folder)
    for step in steps:
        apply(buffer, kind, step)
        said.send(step)
    sys.setprofile(None)


def loading(kind: str, folder: Path, saved: Path, said: Any, die_at: int) -> None:
    """Opens a folder and loads a checkpoint into it; says when it begins and when it has it."""
    buffer = new_buffer(kind, folder)
    said.send(0)
    kill_at(die_at)
    buffer.loads(saved)
    sys.setprofile(None)
    said.send(1)
