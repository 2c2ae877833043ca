"""Random programs over every combination of parts, against a buffer in plain Python.

``python -m tests.programs`` runs more of them, and prints the shortest program that differs.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
import torch

from tests import effort
from tests.programs.combinations import Combination, accepted, combinations, refusals_of
from tests.programs.operations import OPERATIONS, names_for
from tests.programs.rows import make_values, to_tensordict
from tests.programs.runner import Program, make_program, prepare_process, run, run_seed, shrink
from tests.programs.session import Session
from tests.rooms import ROOT

BLOCKS, PROGRAMS, OPERATIONS_EACH = 10, 30, 25


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Prepare the process for programs, and give other tests their threads back."""
    threads = torch.get_num_threads()
    prepare_process()
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("block", range(BLOCKS))
def test_random_programs_agree_with_model(block: int) -> None:
    """Each program has another combination; their order mixes all parts."""
    found = accepted()
    count = effort.cases(PROGRAMS)
    for seed in range(block * count, (block + 1) * count):
        difference = run_seed(seed, OPERATIONS_EACH, found)
        assert difference is None, difference


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_ten_thousand_programs_agree_with_model() -> None:
    command = [sys.executable, "-m", "tests.programs", "--count", "10000"]
    jobs = str(os.cpu_count() or 1)
    done = subprocess.run(
        [*command, "--jobs", jobs], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5_000:]


def test_only_declared_combinations_are_refused(tmp_path: Path) -> None:
    """Each other combination is constructed; programs show that it works."""
    for number, combination in enumerate(combinations()):
        expected = refusals_of(combination, "make")
        found = None
        try:
            combination.make(tmp_path / str(number), 0).shutdown()
        except (TypeError, ValueError) as error:
            found = str(error)
        assert (found is not None) == bool(expected), f"{combination}: {found or 'no error'}"
        assert found is None or any(text in found for text in expected), f"{combination}: {found}"


def test_declared_combinations_refuse_to_sample(tmp_path: Path) -> None:
    rows = [make_values(0, step, "open") for step in range(4)]
    for number, combination in enumerate(combinations()):
        expected = refusals_of(combination, "sample")
        if not expected or refusals_of(combination, "make") or combination.writer == "immutable":
            continue
        buffer = combination.make(tmp_path / str(number), 0)
        buffer.extend(to_tensordict(rows))
        with pytest.raises(RuntimeError) as caught:
            buffer.sample()
        assert any(text in str(caught.value) for text in expected), f"{combination}: {caught.value}"
        buffer.shutdown()


def test_each_operation_occurs_in_programs() -> None:
    found = accepted()
    assert {name for combination in found for name in names_for(combination)[0]} == set(OPERATIONS)
    seen = {name for seed in range(1200) for name, _ in make_program(seed, 50, found).steps}
    assert seen == set(OPERATIONS)


def test_difference_is_reported_as_shortest_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report has only the operations that are needed, as lines of the program."""

    def unknown_to_the_model(session: Session, rng: Random) -> None:
        session.call("rb.empty()", lambda rb: rb.empty())

    wrong = dataclasses.replace(OPERATIONS["empty"], act=unknown_to_the_model)
    monkeypatch.setitem(OPERATIONS, "empty", wrong)
    names = ["extend", "cut", "sample", "edit_row", "empty", "sample", "extend"]
    steps = [(name, seed) for seed, name in enumerate(names)]
    difference = run(Program(3, Combination("lazy"), steps))
    assert difference is not None
    shortest = shrink(difference)
    assert [line.partition("(")[0] for line in shortest.lines] == ["rb.extend", "rb.empty"]
    assert "expected" in str(shortest)
