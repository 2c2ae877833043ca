"""``python -m benchmarks``: the figures of this machine."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from benchmarks.harness import describe_machine, print_timings
from benchmarks.transitions import run


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows in the buffers")
    parser.add_argument("--rounds", type=int, default=200, help="turns that each contender takes")
    parser.add_argument("--threads", type=int, default=2, help="threads that torch may use")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    machine = describe_machine()
    print(", ".join(f"{key} {value}" for key, value in machine.items()), end="\n\n")
    timings, absent = run(arguments.rows, arguments.rounds)
    print_timings(timings)
    print("\nratio: time over that of the first contender, in the same round")
    for name, reason in absent.items():
        print(f"left out: {name}: {reason}")
    if arguments.json is not None:
        record = {
            "machine": machine,
            "rows": arguments.rows,
            "timings": [timing.to_json() for timing in timings],
            "left_out": absent,
        }
        arguments.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
