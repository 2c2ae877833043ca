"""The command as a whole: help, exit codes, errors, and what its import loads."""

from __future__ import annotations

import builtins
import contextlib
import json
import os
import re
import signal
import subprocess
import sys

import h5py
import numpy as np
import pytest

import replaykit
from replaykit.testing.robohive_files import RoboHiveWriter
from replaykit.tools.app import Output
from replaykit.tools.commands import families
from replaykit_command import main
from tests.datasets.test_hub_processes import wait_for
from tests.support import Fault, LoopbackHub

COMMANDS = ("datasets", "download", "convert", "inspect", "validate", "push", "pull")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_examples(command, name):
    done = command(name, "--help")
    assert (done.code, done.err) == (0, "")
    assert "Examples" in done.out
    assert f"replaykit {name} " in done.out
    assert "--json" in done.out
    assert "--debug" in done.out


def test_help_lists_commands_and_exit_codes(command):
    done = command("--help")
    assert done.code == 0
    assert all(name in done.out for name in COMMANDS)
    assert "130 interrupted" in " ".join(done.out.split())
    assert command("--version").out == f"replaykit {replaykit.__version__}\n"


CONVERT = ["convert", "{demos}", "--to", "{data}"]
BY_KEYS = [*CONVERT, "--layout", "robomimic"]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["bogus"], 2, "No such command 'bogus'; replaykit --help"),
        (["inspect"], 2, "Missing argument"),
        (["inspect", "a", "--bogus"], 2, "No such option"),
        (["convert", "a.h5"], 2, "Missing option '--to'"),
        ([*CONVERT, "--on-invalid", "maybe"], 2, "'maybe' is not one of"),
        ([*CONVERT, "--workers", "0"], 2, "'--workers'"),
        ([*CONVERT, "--cast", "float64"], 3, "--cast as float64=float32, got 'float64'"),
        ([*CONVERT, "--layout", "atari"], 3, "expected a layout as one of ['aloha'"),
        ([*CONVERT, "--layout", "aloha"], 3, "no episode of the layout 'aloha'"),
        ([*CONVERT, "--exclude", "next/done"], 3, "expected exclude without flags"),
        ([*CONVERT, "--layout", "no_such_module:ARM"], 6, "No module named 'no_such_module'"),
        ([*BY_KEYS, "--include", "acton"], 3, "'acton' matches nothing .* (meant: 'action'?)"),
        ([*BY_KEYS, "--exclude", "next/info"], 3, "exclude: 'next/info' matches nothing in the"),
        ([*BY_KEYS, "--cast", "float16=float32"], 3, "expected it among the dtypes float64"),
        (["convert", "{other}", "--to", "{data}"], 3, "no layout fits .* give one with --layout"),
        (["convert", "{absent}", "--to", "{data}", "--layout", "d4rl"], 4, "absent.h5"),
        (["convert", "{absent}", "--to", "{data}"], 4, "absent.h5"),
        (["convert", "{empty}", "--to", "{data}"], 4, "empty"),
    ],
)
def test_errors_are_a_sentence_and_a_code(command, demos, tmp_path, arguments, code, says):
    names = {name: tmp_path / name for name in ("data", "empty", "other", "absent.h5")}
    names["empty"].mkdir()
    with h5py.File(names["other"], "w") as file:
        file["a"] = np.arange(3)
    paths = {name.split(".")[0]: path for name, path in names.items()}
    arguments = [text.format(demos=demos, **paths) for text in arguments]
    pattern = re.escape(says).replace(r"\ \.\*\ ", ".* ")
    done = command(*arguments)
    assert (done.code, done.out, done.err.count("\n")) == (code, "", 1)
    assert done.err.startswith("replaykit: ")
    assert re.search(pattern, done.err)
    assert not names["data"].exists()
    found = command(*arguments, "--json")
    assert (found.code, found.err) == (code, "")
    error = found.json["error"]
    assert (error["exit_code"], error["kind"] == "UsageError") == (code, code == 2)
    assert re.search(pattern, error["message"])


def test_no_command_shows_the_help(command):
    done = command()
    assert done.code == 2
    assert "Usage: replaykit" in done.out
    assert command("--json").json["error"]["exit_code"] == 2


def test_internal_error_asks_for_a_report(command, monkeypatch, tmp_path):
    def broken(*_: object, **__: object) -> None:
        raise KeyError("observations")

    monkeypatch.setattr("replaykit.tools.validation.validate", broken)
    done = command("validate", tmp_path)
    assert done.code == 70
    assert "KeyError: observations" in done.err
    assert "--debug" in done.err
    assert "Traceback" not in done.err
    done = command("validate", tmp_path, "--debug")
    assert done.code == 70
    assert "Traceback" in done.err


def test_no_traceback_unless_asked_for(command, tmp_path):
    done = command("inspect", tmp_path / "absent")
    assert done.code == 4
    assert done.err == f"replaykit: {tmp_path}/absent is not there\n"
    done = command("inspect", tmp_path / "absent", "--debug")
    assert "Traceback" in done.err
    assert done.err.endswith(f"replaykit: {tmp_path}/absent is not there\n")


def test_datasets_lists_every_family_and_id(command, tmp_path):
    found = command("datasets", "--json", "--root", tmp_path).json["families"]
    listed = {record["family"]: record for record in found}
    assert listed.keys() == families().keys()
    for name, kind in families().items():
        ids = [each["id"] for each in listed[name]["datasets"]]
        assert kind.available_datasets == ids
        assert all(each["path"] is None for each in listed[name]["datasets"])
    hopper = {each["id"]: each["bytes"] for each in listed["d4rl"]["datasets"]}
    assert hopper["hopper-medium-v2"] == 152_756_557
    assert hopper["door-human-v1"] == 3_121_206
    assert listed["d4rl"]["from"] == "rail.eecs.berkeley.edu"
    assert listed["roboset"]["from"] == "the Hub, jdvakil/RoboSet_Sim"
    assert listed["aloha"]["from"] == "your own files"
    done = command("datasets", "d4rl", "--root", tmp_path)
    (line,) = [line for line in done.out.splitlines() if "d4rl:hopper-medium-v2" in line]
    assert "152.8 MB" in line
    assert command("datasets", "atari").code == 3
    assert "(meant: 'robomimic'?)" in command("datasets", "robomimc").err


def test_datasets_is_a_table_of_families(command, tmp_path):
    (tmp_path / "libero_goal").mkdir()
    (tmp_path / "libero_goal" / "manifest.json").write_text("{}")
    done = command("datasets", "--root", tmp_path)
    assert done.code == 0
    head, *lines, last = done.out.splitlines()
    assert head.split() == ["family", "ids", "here", "size", "from", "example"]
    rows = {line.split()[0]: line for line in lines}
    assert rows.keys() == families().keys()  # a line each, whatever the number of ids
    assert len(lines) == len(families())
    assert rows["libero"].split()[:3] == ["libero", "5", "1"]
    assert rows["roboset"].split()[:3] == ["roboset", "20", "-"]
    count = len(families()["minari"].available_datasets)
    assert rows["minari"].split()[:2] == ["minari", f"{count}+"]
    assert rows["aloha"].split()[1] == "any"
    assert "FAMILY" in last


ROBOSET = "FK1-v4(expert)/FK1_MicroOpenRandom_v2d-v4"


def write_trials(path, seed):
    """Two trials of random numbers, 4 and 3 rows."""
    draw = np.random.default_rng(seed)
    with RoboHiveWriter(path) as writer:
        for records in (5, 4):
            writer.add_trial(
                draw.normal(size=(records, 3)), draw.normal(size=(records - 1, 2)),
                draw.normal(size=records), np.zeros(records, bool), np.arange(float(records)),
            )  # fmt: skip


@pytest.fixture
def hub(tmp_path, lead_client_to):
    """A Hub on this machine with one data set of two trials."""
    write_trials(tmp_path / "a.h5", 0)
    files = {f"{ROBOSET}/seed0/x_trace.h5": tmp_path / "a.h5"}
    with LoopbackHub({"jdvakil/RoboSet_Sim": files}) as served:
        lead_client_to(served)
        yield served


def test_download_fetches_converts_and_is_listed(command, hub, tmp_path):
    root = tmp_path / "root"
    done = command("download", f"roboset:{ROBOSET}", "--root", root, "--json", "--workers", 2)
    assert done.code == 0, done.out
    assert (done.json["rows"], done.json["episodes"]) == (7, 2)
    assert done.json["path"] == str(root / ROBOSET)
    found = command("datasets", "roboset", "--root", root, "--json").json["families"][0]
    assert [each["path"] for each in found["datasets"] if each["id"] == ROBOSET] == [
        str(root / ROBOSET)
    ]
    asked = len(hub.requests)
    assert command("download", f"roboset:{ROBOSET}", "--root", root).code == 0
    assert len(hub.requests) == asked  # what is there is not fetched again
    assert command("validate", root / ROBOSET).code == 0


def test_download_takes_policies_and_a_layout(command, hub, tmp_path):
    name, root = f"roboset:{ROBOSET}", tmp_path / "root"
    (tmp_path / "own.py").write_text(
        "from dataclasses import replace\n"
        "from replaykit.datasets.families import ROBOHIVE\n"
        "OWN = replace(ROBOHIVE, version=99)\n"
    )
    options = ("--cast", "float64=float32", "--exclude", "time", "--layout")
    done = command("download", name, "--root", root, *options, f"{tmp_path / 'own.py'}:OWN")
    assert done.code == 0, done.out
    manifest = json.loads((root / ROBOSET / "manifest.json").read_text())
    assert manifest["converter"]["version"] == 99
    assert manifest["options"]["policies"]["casts"] == {"float64": "float32"}
    refused = command("download", name, "--root", root)
    assert refused.code not in (0, 1)
    assert "policies" in refused.err
    bad = command("download", name, "--root", tmp_path / "other", "--exclude", "acton")
    assert bad.code == 3
    assert "exclude: 'acton' matches nothing" in bad.err


def test_dry_run_lists_missing_files_and_fetches_nothing(command, hub, tmp_path):
    name, root = f"roboset:{ROBOSET}", tmp_path / "root"
    said = command("download", name, "--root", root, "--dry-run", "--json").json
    nbytes = (tmp_path / "a.h5").stat().st_size
    assert [(file["bytes"], file["is_cached"]) for file in said["files"]] == [(nbytes, False)]
    assert (said["missing_bytes"], said["is_converted"]) == (nbytes, False)
    assert said["path"] == str(root / ROBOSET)
    assert not root.exists()
    command("download", name, "--root", root)
    done = command("download", name, "--root", root, "--dry-run")
    assert done.code == 0
    assert " ".join(done.out.split()).startswith("file size here " + said["files"][0]["name"])
    assert "0 B of" in done.out
    assert "is there already" in done.out
    assert command("download", "aloha:mine", "--dry-run").code == 4


def test_failed_download_is_one_sentence_with_an_exit_code(command, hub, tmp_path):
    root = tmp_path / "root"
    done = command("download", "atari:pong", "--root", root)
    assert done.code == 3
    assert "family:id" in done.err
    other = "DAPG(expert)/door_v2d-v1"
    done = command("download", f"roboset:{other}", "--root", root)
    assert done.code in (3, 4, 5)
    assert "Traceback" not in done.err
    assert done.err.count("\n") == 1
    assert not (root / other).exists()


@pytest.fixture
def unloaded(monkeypatch):
    """The modules of the command are imported again."""
    for name in ("app", "commands"):
        monkeypatch.delitem(sys.modules, f"replaykit.tools.{name}", raising=False)


@pytest.mark.parametrize("module", ["rich.table", "replaykit.tools.app"])
def test_interrupted_import_of_a_module_prints_one_sentence(command, monkeypatch, unloaded, module):
    real = builtins.__import__

    def load(name: str, *rest: object) -> object:
        if name == module:
            raise KeyboardInterrupt
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", load)
    done = command("datasets")
    assert (done.code, done.out) == (130, "")
    assert done.err == "replaykit: interrupted: nothing was begun\n"


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_command_with_a_closed_pipe_keeps_its_exit_code(command, demos, tmp_path, form):
    command("convert", demos, "--to", tmp_path / "data")
    codes = []
    for name in ("inspect", "validate", "broken"):
        if name == "broken":
            file, name = tmp_path / "data" / "action.memmap", "validate"
            file.write_bytes(bytes(len(file.read_bytes())))
        reads, writes = os.pipe()
        os.close(reads)
        with open(writes, "w") as stdout, contextlib.redirect_stdout(stdout):
            codes.append(main([name, str(tmp_path / "data"), *form]))
    assert codes == [0, 0, 1]


def test_command_names_a_missing_extra(command, monkeypatch, unloaded):
    monkeypatch.setitem(sys.modules, "click", None)
    done = command("inspect", "x")
    assert (done.code, done.out) == (6, "")
    assert done.err == (
        "replaykit: the command needs click, which is not installed: pip install 'replaykit[cli]'\n"
    )


# Waits before it publishes what it wrote: however late the interrupt comes, it comes before that.
LINGERS = """
import sys, time
from replaykit_command import main
from replaykit.datasets.engine import conversion
whole = conversion.write_episode_table
conversion.write_episode_table = lambda *given: (time.sleep(60), whole(*given))[1]
sys.exit(main())
"""


def interrupted(until, *program):
    """What a program prints to stderr that gets SIGINT once that is so."""
    running = subprocess.Popen(
        [sys.executable, *map(str, program)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    wait_for(until, running)
    os.killpg(running.pid, signal.SIGINT)  # as a terminal does
    out, err = running.communicate(timeout=60)
    assert (running.returncode, out) == (130, ""), err
    return err


def test_an_interrupted_conversion_publishes_nothing_and_can_be_run_again(command, tmp_path):
    """By SIGINT, in the middle of writing, with workers; what is left is what was there."""
    rows = 40_000
    (tmp_path / "files").mkdir()
    for number in range(2):
        with h5py.File(tmp_path / "files" / f"{number}.h5", "w") as file:
            file["observations"] = np.zeros((rows, 20), np.float32)
            file["next_observations"] = np.zeros((rows, 20), np.float32)
            file["actions"], file["rewards"] = np.zeros((rows, 2)), np.zeros(rows)
            file["terminals"] = np.arange(rows) % 1000 == 999
    target = tmp_path / "data"
    arguments = ["convert", tmp_path / "files", "--layout", "d4rl", "--to", target, "--workers", 2]
    err = interrupted(lambda: list(tmp_path.glob(".data.tmp*/*")), "-c", LINGERS, *arguments)
    assert err == (
        f"replaykit: interrupted: nothing was published at {target}, and nothing there was "
        "changed; the same command continues the conversion\n"
    )
    assert not target.exists()
    # A file may have been finished by then.
    assert all((path / "unfinished").is_file() for path in tmp_path.glob(".data.tmp*"))
    assert command(*arguments, "--json").json["rows"] == 2 * rows
    assert not list(tmp_path.glob(".data.tmp*"))


def test_an_interrupted_download_keeps_whole_files(command, tmp_path, monkeypatch):
    """SIGINT while one file comes in slowly: it begins again, and the other is not asked for."""
    import huggingface_hub

    files = {}
    for seed in range(2):
        write_trials(tmp_path / f"{seed}.h5", seed)
        files[f"{ROBOSET}/seed{seed}/x_trace.h5"] = tmp_path / f"{seed}.h5"
    cut = f"{ROBOSET}/seed1/x_trace.h5"
    root, cache = tmp_path / "root", tmp_path / "cache"
    with LoopbackHub({"jdvakil/RoboSet_Sim": files}) as hub:
        for name, value in hub.env(cache).items():
            monkeypatch.setenv(name, value)
        hub.faults.append(Fault(path=cut, method="GET", bytes_per_s=500))
        # A file of the snapshot is one that is whole. Unlike glob, rglob fails if one of the
        # client's temporary folders vanishes on the way.
        whole = f"hub/*/snapshots/*/{ROBOSET}"
        err = interrupted(
            lambda: bodies_of(hub) == [1, 1] and list(cache.glob(f"{whole}/seed0/*.h5")),
            *("-m", "replaykit", "download", f"roboset:{ROBOSET}", "--root", root),
        )
        assert err == (
            "replaykit: interrupted: fetched files are kept, and the same command fetches the "
            "rest; an interrupted file of a Hub begins again; nothing was published\n"
        )
        assert not (root / ROBOSET).exists()
        assert not list(cache.glob(f"{whole}/seed1/*.h5"))
        hub.faults.clear()
        done = command("download", f"roboset:{ROBOSET}", "--root", root, "--json")
        assert done.json["rows"] == 14
        assert bodies_of(hub) == [1, 2]
        asked = [each for each in hub.requests if each.method == "GET" and cut in each.path]
        assert [each.range for each in asked] == [None, None]
    huggingface_hub.close_session()


def bodies_of(hub):
    """How often the content of each of two files was asked for."""
    gets = [each.path for each in hub.requests if each.method == "GET"]
    return [sum(f"/seed{seed}/x_trace.h5" in path for path in gets) for seed in range(2)]


def test_progress_is_shown_to_people_and_not_to_programs(command, demos, tmp_path, monkeypatch):
    assert "converting" not in command("convert", demos, "--to", tmp_path / "a").err
    monkeypatch.setattr(Output, "shows_progress", property(lambda output: not output.as_json))
    assert "converting" in command("convert", demos, "--to", tmp_path / "b").err
    assert command("convert", demos, "--to", tmp_path / "c", "--json").err == ""


def test_damaged_files_are_named_and_never_an_internal_error(command, demos, tmp_path):
    """Bytes flipped, and files cut: facts, or a sentence that names the file."""
    draw = np.random.default_rng(5)
    whole = demos.read_bytes()
    codes = []
    for number in range(24):
        content = bytearray(whole)
        if number % 6 == 0:
            content = content[: int(draw.integers(1, len(whole)))]
        for place in draw.integers(0, len(content), int(draw.integers(1, 12))):
            content[place] = int(draw.integers(0, 256))
        path = tmp_path / f"bad{number}.h5"
        path.write_bytes(content)
        done = command("inspect", path, "--json")
        codes.append(done.code)
        assert done.code in (0, 3), (number, done.out)
        if done.code:
            assert path.name in done.json["error"]["message"], (number, done.out)
    assert set(codes) == {0, 3}
