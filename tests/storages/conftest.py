"""Files, folders and rows of the storages' tests."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from tensordict import TensorDict

from replaykit.structure import raw_bytes


@pytest.fixture(scope="session")
def files_in() -> Callable[[Path], list[str]]:
    """``files_in(folder)``: the names of all files below it."""
    return lambda folder: sorted(
        str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file()
    )


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where private folders are made during a test."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


# -- rows of any layout ---------------------------------------------------------------------------


_DTYPES = [
    torch.bool, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.int64, torch.uint64,
    torch.float8_e4m3fn, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.complex64, torch.complex128,
]  # fmt: skip
_SHAPES = [(), (1,), (3,), (17,), (2, 3), (0,), (1, 1), (130,), (20, 30)]


def _filled(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Values of random bits; bool has two of them only."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
    if dtype == torch.bool:
        raw %= 2
    # Through a view, since a tensor without a dimension has no last one to divide.
    return torch.empty(0, dtype=dtype).set_(raw.untyped_storage()).view(shape)


@pytest.fixture(scope="session")
def filled() -> Callable[..., torch.Tensor]:
    """``filled(shape, dtype, seed)``: random bits."""
    return _filled


@pytest.fixture(scope="session")
def layouts() -> st.SearchStrategy[dict[str, tuple[torch.dtype, tuple[int, ...]]]]:
    """Names of leaves with a dtype and a shape: small, wide and empty ones."""
    leaf = st.tuples(st.sampled_from(_DTYPES), st.sampled_from(_SHAPES))
    return st.lists(leaf, min_size=1, max_size=7).map(
        lambda leaves: {f"leaf{place}": leaf for place, leaf in enumerate(leaves)}
    )


@pytest.fixture(scope="session")
def same_bits() -> Callable[[Any, Any], bool]:
    """Whether two tensors agree in dtype, shape and every bit, NaN and -0.0 among them."""

    def same(a: torch.Tensor, b: torch.Tensor) -> bool:
        return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(raw_bytes(a), raw_bytes(b))

    return same


# -- transitions ----------------------------------------------------------------------------------


class Stream:
    """Transitions of endless episodes of random lengths, one for each lane.

    ``observation`` has random bits, NaN among them; ``pixels`` are wide enough to lie alone.
    """

    def __init__(self, seed: int, lanes: tuple[int, ...] = (), wide: int = 600) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.lanes = lanes
        self.wide = wide
        self.now = self._state()
        self.count = 0

    def _bits(self, *shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=self.generator)

    def _state(self) -> dict[str, torch.Tensor]:
        return {
            "observation": self._bits(*self.lanes, 12).view(torch.float32),
            "pixels": self._bits(*self.lanes, self.wide),
        }

    def steps(self, count: int) -> TensorDict:
        """The next rows, ``[count, *lanes]``."""
        rows = []
        for _ in range(count):
            following = self._state()
            done = self._bits(*self.lanes, 1) < 60
            rows.append(
                TensorDict(
                    {
                        **self.now,
                        "action": torch.full((*self.lanes,), self.count),
                        "next": {**following, "reward": done.float(), "done": done},
                    },
                    self.lanes,
                )
            )
            fresh = self._state()
            self.now = {
                key: torch.where(done, fresh[key], value) for key, value in following.items()
            }
            self.count += 1
        return torch.stack(rows)

    def noise(self, count: int) -> TensorDict:
        """Rows that have nothing to do with each other, ``[count, *lanes]``."""
        return torch.stack(
            [
                TensorDict(
                    {
                        **self._state(),
                        "action": self._bits(*self.lanes).long(),
                        "next": {
                            **self._state(),
                            "reward": self._bits(*self.lanes, 1).float(),
                            "done": self._bits(*self.lanes, 1) < 60,
                        },
                    },
                    self.lanes,
                )
                for _ in range(count)
            ]
        )


@pytest.fixture(scope="session")
def transitions() -> type[Stream]:
    """``transitions(seed, lanes)``: episodes, and rows that are none."""
    return Stream


@pytest.fixture(scope="session")
def same_rows(same_bits: Callable[[Any, Any], bool]) -> Callable[[TensorDict, TensorDict], bool]:
    """Whether two TensorDicts have the same keys with the same bits."""

    def same(a: TensorDict, b: TensorDict) -> bool:
        left, right = dict(a.items(True, True)), dict(b.items(True, True))
        return left.keys() == right.keys() and all(same_bits(left[key], right[key]) for key in left)

    return same
