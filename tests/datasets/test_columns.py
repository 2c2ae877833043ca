"""Column files: what tensordict makes of the same columns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from replaykit.datasets.column_files import ColumnSpec, create_columns

LEAVES: dict[tuple[str, ...], tuple[tuple[int, ...], torch.dtype]] = {
    ("observation",): ((3, 4), torch.float32),
    ("next", "observation"): ((3, 4), torch.float32),
    ("next", "deep", "flag"): ((1,), torch.bool),
    ("info", "rgb:left cam/50%"): ((), torch.uint8),
    ("info", 'a"b\\c*?<>|\t\x7f'): ((2,), torch.uint16),
    ("info", "größe"): ((), torch.int64),
    ("..", "."): ((), torch.float16),
    ("nothing",): ((0,), torch.complex64),
}


def _tree(rows: tuple[int, ...]) -> TensorDict:
    tree = TensorDict({}, batch_size=rows)
    for key, (shape, dtype) in LEAVES.items():
        tree.set(key, torch.zeros((*rows, *shape), dtype=dtype))
    return tree


def _content(folder: Path) -> dict[str, Any]:
    """Bytes of the columns and what is said of them, in order."""
    return {
        path.relative_to(folder).as_posix(): (
            list(json.loads(path.read_bytes()).items())
            if path.suffix == ".json"
            else path.read_bytes()
        )
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("rows", [(7,), (2, 5)])
def test_columns_have_the_layout_of_tensordict(tmp_path, rows):
    specs = [ColumnSpec(key, shape, dtype) for key, (shape, dtype) in LEAVES.items()]
    columns = create_columns(tmp_path / "ours", specs, rows)
    _tree(rows).memmap_like(tmp_path / "theirs")
    assert _content(tmp_path / "ours") == _content(tmp_path / "theirs")
    column = columns["next", "observation"]
    values = np.arange(column.nbytes // 4, dtype=np.float32).reshape(-1, 3, 4)
    column.write(0, values)
    loaded: Any = TensorDict.load_memmap(tmp_path / "ours")
    assert loaded.batch_size == torch.Size(rows)
    assert {key: value.dtype for key, value in loaded.items(True, True)} == {
        key if len(key) > 1 else key[0]: dtype for key, (_, dtype) in LEAVES.items()
    }
    assert loaded["next", "observation"].numpy().tobytes() == values.tobytes()


def test_keys_that_map_to_the_same_file_are_refused(tmp_path, monkeypatch):
    # As on a file system that does not tell small letters from large ones.
    monkeypatch.setattr("replaykit.datasets.column_files._file_name", str.lower)
    specs = [ColumnSpec((name,), (), torch.uint8) for name in ("Arm", "arm")]
    with pytest.raises(
        ValueError, match="'Arm' and 'arm' have the same file name on this file system"
    ):
        create_columns(tmp_path / "data", specs, (3,))
