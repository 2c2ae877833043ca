"""Manifests and states of every kind of buffer with random entries changed: refused, or loaded."""

from __future__ import annotations

import copy
import functools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from replaykit.errors import CheckpointError
from tests.checkpoint.test_damage import KINDS, fill
from tests.checkpoint.values import plain

GONE = object()
JUNK = [
    *(GONE, None, True, -1, 0, 1, 3, 2**31, 2**62, 2**70, -(2**70), 0.5, float("nan"), "", "x"),
    *("t0", "t9", "../x", [], {}, [0], [[]], {"$": 1}, {"$": "tensor", "name": "t0"}),
]
TENSORS = [
    *(torch.zeros(0).long(), torch.zeros(3), torch.arange(24) - 1, torch.full((24,), 2**40)),
    *(torch.arange(24).flip(0), torch.zeros(24).double(), torch.zeros(2, 2), torch.tensor(3)),
]
MUTATIONS = 20
MAY_REFUSE_DRAWS = ("staleness", "ensemble")
"""Kinds whose draws refuse versions of the future, or members with different rows."""
OF_OBJECTS = ("list", "lazy stack", "ensemble")
"""Kinds that store any rows."""


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if not isinstance(value, (dict, list)):
        return []
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return [each for key, item in items for each in ((*path, key), *places(item, (*path, key)))]


def put(state: Any, path: tuple[Any, ...], value: Any) -> None:
    for part in path[:-1]:
        state = state[part]
    if value is GONE:
        del state[path[-1]]
    else:
        state[path[-1]] = copy.deepcopy(value)


class Pair:
    """A buffer that loads changed states of another one."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.renew()

    def renew(self) -> None:
        self.live = KINDS[self.kind]()
        fill(self.live, 400, 7)
        self.before = plain(self.live.state_dict())

    def refuses(self, load: str, argument: Any, what: object) -> bool:
        """Return whether the buffer refused to load; if so, nothing has changed."""
        try:
            getattr(self.live, load)(argument)
        except (ValueError, CheckpointError) as error:
            if isinstance(error, UnicodeError) or not str(error):
                raise
            assert plain(self.live.state_dict()) == self.before, what
            return True
        if self.kind not in MAY_REFUSE_DRAWS:
            self.live.sample()
        self.renew()
        return False


@pytest.mark.pitfall("CK7")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:.*left out")
def test_a_changed_entry_is_refused_or_makes_a_buffer_that_works(
    kind: str, tmp_path: Path, forge: Any
) -> None:
    """CK7: in a state, and in a manifest with a checksum that is right."""
    draw, source, target = random.Random(kind), KINDS[kind](), Pair(kind)
    fill(source, 0, 31)
    source.sample()
    source.dumps(tmp_path)
    good = (tmp_path / "manifest.json").read_text()
    state, manifest = source.state_dict(), json.loads(good)
    in_state = [p for p in places(state) if kind not in OF_OBJECTS or "_storage" not in p[:-1]]
    in_manifest = [place for place in places(manifest) if place != ("crc32",)]
    refused = 0
    for number in range(MUTATIONS):
        place, value = draw.choice(in_state), draw.choice([*JUNK, *TENSORS])
        changed = copy.deepcopy(state)
        put(changed, place, value)
        refused += target.refuses("load_state_dict", changed, (number, place, value))
        place, value = draw.choice(in_manifest), draw.choice(JUNK)
        (tmp_path / "manifest.json").write_text(good)
        forge(tmp_path, functools.partial(put, path=place, value=value))
        refused += target.refuses("loads", tmp_path, (number, place, value))
    assert refused > MUTATIONS / 2
    source.shutdown()
    target.live.shutdown()
