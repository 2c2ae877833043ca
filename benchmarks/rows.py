"""The rows that all contenders hold, and the forms in which they are handed over."""

from __future__ import annotations

import torch
from tensordict import TensorDict

__all__ = [
    "Leaves",
    "as_tensordict",
    "make_episodes",
    "make_images",
    "make_transitions",
    "row_bytes",
    "row_count",
    "take_rows",
]

Leaves = dict[tuple[str, ...], torch.Tensor]

FLAGS = ("done", "terminated", "truncated")


def make_transitions(rows: int) -> Leaves:
    """Returns 10 columns of 170 bytes a row: two observations of 17, an action of 6, reward, six
    flags. The reward of a row is its number."""
    draw = torch.Generator().manual_seed(0)
    leaves: Leaves = {
        ("observation",): torch.randn(rows, 17, generator=draw),
        ("action",): torch.randn(rows, 6, generator=draw),
        ("next", "observation"): torch.randn(rows, 17, generator=draw),
        ("next", "reward"): torch.arange(rows, dtype=torch.float32).unsqueeze(-1),
    }
    for name in FLAGS:
        leaves[(name,)] = torch.rand(rows, 1, generator=draw) < 0.5
        leaves["next", name] = torch.rand(rows, 1, generator=draw) < 0.01
    return leaves


def make_episodes(rows: int, length: int) -> Leaves:
    """Returns the columns of ``make_transitions`` and goals of 3 numbers, 218 bytes a row, in
    episodes of ``length`` rows that are truncated. The reward of a row is its number."""
    leaves = make_transitions(rows)
    draw = torch.Generator().manual_seed(1)
    for name in FLAGS:
        leaves[(name,)] = torch.zeros(rows, 1, dtype=torch.bool)
        leaves["next", name] = torch.zeros(rows, 1, dtype=torch.bool)
    for name in ("done", "truncated"):
        leaves["next", name][length - 1 :: length] = True
    for name in ("achieved_goal", "desired_goal"):
        leaves[(name,)] = torch.randn(rows, 3, generator=draw)
        leaves["next", name] = torch.randn(rows, 3, generator=draw)
    return leaves


def make_images(rows: int) -> Leaves:
    """Returns two columns of 3 x 64 x 64 pixels, 24576 bytes a row."""
    draw = torch.Generator().manual_seed(0)
    shape = (rows, 3, 64, 64)
    return {
        key: torch.randint(256, shape, dtype=torch.uint8, generator=draw)
        for key in (("pixels",), ("next", "pixels"))
    }


def row_count(leaves: Leaves) -> int:
    return len(next(iter(leaves.values())))


def row_bytes(leaves: Leaves) -> int:
    """Returns the bytes of the values of one row."""
    return sum(leaf[0].numel() * leaf.element_size() for leaf in leaves.values())


def take_rows(leaves: Leaves, start: int, count: int) -> Leaves:
    """Returns rows in a row, in memory of their own."""
    return {key: leaf[start : start + count].clone() for key, leaf in leaves.items()}


def as_tensordict(leaves: Leaves) -> TensorDict:
    """Returns the columns as one TensorDict, without a copy."""
    data = TensorDict({}, batch_size=[row_count(leaves)])
    for key, value in leaves.items():
        data.set(key, value)
    return data
