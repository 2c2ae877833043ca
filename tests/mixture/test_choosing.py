"""Which members an index names."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from replaykit.mixture.member_parts import chosen
from tests.support.refusals import refuses


@pytest.mark.parametrize(
    ("index", "found"),
    [
        (1, 1),
        (-1, 3),
        (np.int64(2), 2),
        (torch.tensor(2), 2),
        (slice(1, 3), [1, 2]),
        (..., [0, 1, 2, 3]),
        ([3, 0, -1], [3, 0, 3]),
        (range(2), [0, 1]),
        (torch.tensor([1, 1]), [1, 1]),
        (np.array([2]), [2]),
        ([], []),
        ([True, False, False, True], [0, 3]),
    ],
)
def test_every_form_of_an_index_chooses_members(index: Any, found: Any) -> None:
    assert chosen(index, 4, "it") == found


@pytest.mark.parametrize(
    ("index", "error", "words"),
    [
        (4, IndexError, "in \\[-4, 4\\), got 4"),
        (-5, IndexError, "got -5"),
        ([0, 7], IndexError, "got 7"),
        (1.0, TypeError, "got 1.0"),
        ([0.5], TypeError, "integers"),
        (torch.tensor([1.0]), TypeError, "integers"),
        (True, TypeError, "got True"),
        ("id", TypeError, "got 'id'"),
        (torch.zeros(1, 1, dtype=torch.int64), RuntimeError, "one dimension, got 2"),
        ([True, False], IndexError, "expected 4 bools"),
    ],
)
def test_invalid_member_indices_are_refused(index: Any, error: type[Exception], words: str) -> None:
    refuses(error, words, chosen, index, 4, "it")
