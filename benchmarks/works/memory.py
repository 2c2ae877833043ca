"""Bytes that a buffer's records and a tree take for a row.

What counts is memory that is there, to the page: room that was asked for and never touched takes
none, and the rest of a large page of which a few bytes are in use is taken.
"""

from __future__ import annotations

import torch

from benchmarks.holders import Replaykit
from benchmarks.report import SUBJECT, Line, Target
from benchmarks.rows import make_transitions, row_bytes
from benchmarks.setting import Setting
from benchmarks.stored import distinct_bytes, tensors_of_storage, tensors_within
from replaykit.priorities import SumSegmentTree

__all__ = ["asked", "run"]

RECORDS, TREE = "memory of records", "memory of a float32 tree"
RECORDS_AT_MOST, TREE_AT_MOST = 1.05, 5.5


def asked(setting: Setting) -> dict[str, tuple[Target, ...]]:
    """Returns what is asked, by the title of a work."""
    return {
        RECORDS: (Target("raw bytes", RECORDS_AT_MOST),),
        TREE: (Target(SUBJECT, TREE_AT_MOST),),
    }


def run(setting: Setting) -> list[Line]:
    """Counts the memory behind all tensors once, however many of them share it."""
    return [*_records(setting), _tree(setting)]


def _records(setting: Setting) -> list[Line]:
    leaves = make_transitions(setting.rows)
    holder = Replaykit(leaves)
    holder.check_label()
    raw = row_bytes(leaves)
    found = distinct_bytes(tensors_of_storage(holder.buffer.storage)) / setting.rows
    return [
        Line(RECORDS, SUBJECT, found, "B/row"),
        Line(RECORDS, "raw bytes", raw, "B/row", ratio=found / raw, at_most=RECORDS_AT_MOST),
    ]


def _tree(setting: Setting) -> Line:
    tree = SumSegmentTree(setting.rows, dtype=torch.float32)
    tree.load(torch.ones(setting.rows))
    found = distinct_bytes(tensors_within(tree)) / setting.rows
    return Line(TREE, SUBJECT, found, "B/row", at_most=TREE_AT_MOST)
