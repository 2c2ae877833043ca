"""Commands on Zarr, Minari's Arrow files and RLDS."""

from __future__ import annotations

import pytest

from tests.datasets.families import test_minari_arrow, test_rlds, test_zarr

SETS = {
    "zarr": (test_zarr.write, 20, "3 episodes of layout zarr without a fault"),
    "zarr.zip": (test_zarr.write, 20, "3 episodes of layout zarr without a fault"),
    "minari-arrow": (
        lambda path: test_minari_arrow.write(path, "arrow"), 14,
        "3 episodes of layout minari-arrow without a fault",
    ),
    "rlds": (test_rlds.write, 14, "3 episodes of layout rlds without a fault, and 1 without rows"),
}  # fmt: skip


@pytest.mark.parametrize("name", SETS)
def test_folders_and_archives_are_recognized(name, command, tmp_path):
    write, rows, says = SETS[name]
    layout = name.removesuffix(".zip")
    path = tmp_path / f"set{name.removeprefix(layout)}"
    write(path)
    done = command("validate", path)
    assert (done.code, says in done.out) == (0, True), done
    done = command("inspect", path)
    assert (done.code, f"{rows} rows" in done.out, f"layout: {layout}" in done.out) == (
        0,
        True,
        True,
    )
    for number, options in enumerate(((), ("--layout", layout))):
        done = command("convert", path, "--to", tmp_path / f"{number}", *options, "--json")
        assert (done.code, f'"rows": {rows}' in done.out) == (0, True), done
    other = "zarr" if layout == "rlds" else "rlds"
    done = command("convert", path, "--to", tmp_path / "other", "--layout", other)
    assert (done.code, "[V04]" in done.err) == (3, True), done
    assert not (tmp_path / "other").exists()
