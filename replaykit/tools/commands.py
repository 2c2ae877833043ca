"""The commands for data sets of corpora, and for inspection and validation of paths."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, Final

import click
from rich.table import Table
from rich.text import Text

from replaykit._version import __version__
from replaykit.datasets.engine.policies import Policies, meant
from replaykit.tools.app import Output, plain, policy_options, sheet


@click.group(
    help=(
        "Fetch, convert, inspect, validate and share data sets and replay buffers on disk.\n\n"
        "Exit codes: 0 success, 1 validate found an error, 2 wrong option, 3 refused data, "
        "4 not found, 5 network failure, 6 system failure, 70 fault of replaykit, "
        "130 interrupted."
    ),
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
        "show_default": True,
    },
)
@click.version_option(__version__, message="replaykit %(version)s")
def app() -> None:
    """Accept the options that precede the command."""


def _command(function: Callable[..., Any]) -> click.Command:
    """Make a function a command, which gets the `Output` of the run as its first argument."""
    command = app.command()(click.pass_obj(function))
    for name, about in (
        ("--json", "Print one JSON document, also for errors."),
        ("--debug", "Show the traceback of an error."),
    ):
        command.params.append(click.Option([name], is_flag=True, expose_value=False, help=about))
    return command


PATH: Final = click.Path(path_type=Path)
_root = click.option(
    "--root",
    type=PATH,
    help="Folder of converted data sets; default ~/.cache/replaykit/<family>.",
)
_workers = click.option(
    "--workers",
    type=click.IntRange(min=1),
    default=1,
    help="Number of processes; each converts one file after another.",
)
_token = click.option(
    "--token",
    envvar="HF_TOKEN",
    help="Token of the Hub; better set HF_TOKEN; default the token of `hf auth login`.",
)


def _layout(default: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    about = f"Layout of the files: a name, module:NAME or file.py:NAME; default {default}."
    return click.option("--layout", help=about)


def families() -> dict[str, Any]:
    """Return the corpus classes by family name, sorted."""
    from replaykit.datasets.dataset import families as known

    return dict(sorted(known().items()))


@_command
@click.argument("family", required=False)
@_root
def datasets(output: Output, family: str | None, root: Path | None) -> None:
    """List the families of data sets, or the ids, sizes and local copies of one FAMILY.

    \b
    Examples:
      replaykit datasets
      replaykit datasets robomimic
    """
    known = families()
    if family is not None and family not in known:
        near = meant(family, known)
        raise ValueError(f"expected a family as one of {sorted(known)}, got {family!r}{near}")
    records = [
        {
            "family": name,
            "class": kind.__name__,
            "from": _origin(kind),
            "other_ids": bool(kind.any_id),
            "datasets": [_record(kind, name, each, root) for each in kind.available_datasets],
        }
        for name, kind in known.items()
        if family in (None, name)
    ]
    if output.as_json:
        output.document({"families": records})
    elif family is None:
        output.console.print(_by_family(records))
        output.line(("replaykit datasets FAMILY lists the ids of one", "dim"))
    else:
        output.console.print(_by_id(records[0]))


def _by_id(record: dict[str, Any]) -> Table:
    """Return a table with one row for each id of a family."""
    from replaykit.tools.facts import size

    table = sheet("family", "id", "size", "here")
    for each in record["datasets"]:
        here = Text("yes" if each["path"] else "", "green")
        table.add_row(record["family"], each["name"], size(each["bytes"]), here)
    if record["other_ids"]:
        is_on_hub = record["from"].startswith("the Hub") or not record["datasets"]
        note = f"{record['family']}:... any id; {record['from']}"
        table.add_row(record["family"], Text(note + ", or your own files" * (not is_on_hub), "dim"))
    return table


def _by_family(records: list[dict[str, Any]]) -> Table:
    """Return a table with one row for each family."""
    from replaykit.tools.facts import size

    columns = ("family", "ids", "here", "size", "from", "example")
    table = sheet(*columns, right=("ids", "here", "size"))
    for record in records:
        ids = record["datasets"]
        known = [each["bytes"] for each in ids if each["bytes"] is not None]
        here = sum(each["path"] is not None for each in ids)
        table.add_row(
            record["family"],
            f"{len(ids):,}{'+' * record['other_ids']}" if ids else "any",
            Text(f"{here:,}" if here else "-", "green" if here else "dim"),
            size(sum(known) if known and len(known) == len(ids) else None),
            plain(record["from"]),
            Text(ids[0]["name"] if ids else f"{record['family']}:<your name>", "dim"),
        )
    return table


def _origin(kind: Any) -> str:
    where = getattr(kind, "repository", None) or getattr(kind, "owner", None)
    if where:
        return f"the Hub, {where}"
    places = {kind.remote(each).location for each in kind.available_datasets[:1]}
    return next(iter(places), "your own files")


def _record(kind: Any, family: str, dataset_id: str, root: Path | None) -> dict[str, Any]:
    from replaykit.datasets.dataset_manifest import MANIFEST_NAME

    home = Path.home() / ".cache" / "replaykit" / kind.corpus if root is None else root
    path = home / dataset_id
    remote = kind.remote(dataset_id)
    return {
        "id": dataset_id,
        "name": f"{family}:{dataset_id}",
        "bytes": None if remote is None else remote.known_bytes,
        "path": str(path) if (path / MANIFEST_NAME).is_file() else None,
    }


@_command
@click.argument("name", metavar="ID")
@_root
@click.option("--force", is_flag=True, help="Fetch and convert again, then replace the old copy.")
@_workers
@_layout("the family's")
@policy_options
@click.option("--dry-run", is_flag=True, help="List the files to fetch, without fetching them.")
def download(
    output: Output,
    name: str,
    root: Path | None,
    force: bool,
    workers: int,
    layout: str | None,
    policies: Policies,
    dry_run: bool,
) -> None:
    """Fetch a data set, verify it, and convert it once. ID is a family:id.

    Complete files stay in the cache of the Hub's client or of web downloads. A repeated command
    continues an interrupted file of a web server, if the server allows it. It begins an interrupted
    file of a Hub again.

    \b
    Examples:
      replaykit download robomimic:lift/ph/low_dim
      replaykit download minari:D4RL/door/human-v2 --root data
      replaykit download d4rl:hopper-medium-v2 --cast float64=float32 --repeated once
      replaykit download d4rl:hopper-medium-v2 --dry-run
    """
    from replaykit.datasets import load_dataset, plan
    from replaykit.tools.layouts import layout_named

    with redirect_stdout(sys.stderr):  # the module of a custom layout may print
        rules = None if layout is None else layout_named(layout)
    if dry_run:
        _print_plan(output, plan(name, root=root))
        return
    output.when_interrupted = (
        "fetched files are kept, and the same command fetches the rest; an interrupted file of a "
        "Hub begins again; nothing was published"
    )
    with output.warnings():
        data = load_dataset(
            name,
            1,
            root=root,
            download="force" if force else True,
            policies=policies,
            layout=rules,
            workers=workers,
        )
    print_dataset(output, data.published, name)


def _print_plan(output: Output, found: Any) -> None:
    from replaykit.tools.facts import size

    record = {
        "name": found.name,
        "origin": dict(found.origin),
        "files": [
            {"name": file.name, "bytes": file.size, "is_cached": file.is_cached}
            for file in found.files
        ],
        "bytes": found.nbytes,
        "missing_bytes": found.missing_bytes,
        "free_bytes": found.free_bytes,
        "cache": str(found.cache),
        "path": str(found.target),
        "is_converted": found.is_converted,
    }
    if output.as_json:
        output.document(record)
        return
    table = sheet("file", "size", "here")
    for file in found.files:
        here = Text("yes" if file.is_cached else "", "green")
        table.add_row(plain(file.name), size(file.size), here)
    output.console.print(table)
    ending = "is there already" if found.is_converted else "would be made"
    output.line(
        f"{size(found.missing_bytes)} of {size(found.nbytes)} would be fetched to "
        f"{found.cache} ({size(found.free_bytes)} free); {found.target} {ending}"
    )


def print_dataset(
    output: Output,
    published: Any,
    name: str | None = None,
    more: Mapping[str, Any] | None = None,
) -> None:
    """Print a summary of a published data set. ``more`` is for JSON output only."""
    from replaykit.tools.facts import counted, size

    manifest = published.manifest
    rows = int(published.episodes["length"].sum())
    nbytes = sum(nbytes for _, nbytes, _ in manifest.files())
    layout = manifest.converter["name"]
    record = {
        "name": name,
        "path": str(published.path),
        "layout": layout,
        "rows": rows,
        "episodes": manifest.episodes,
        "bytes": nbytes,
        "content": manifest.content_id(),
        "warnings": output.warned,
        **(more or {}),
    }
    episodes = counted(manifest.episodes, "episode")
    text = f"{published.path}: {rows:,} rows in {episodes}, {size(nbytes)}, layout {layout}"
    output.result(record, text)


@_command
@click.argument("files", nargs=-1, required=True)
@click.option("--to", type=PATH, required=True, help="Folder of the result.")
@_layout("a guess")
@policy_options
@_workers
@click.option("--force", is_flag=True, help="Convert again, then replace the old data set.")
def convert(
    output: Output,
    files: tuple[str, ...],
    to: Path,
    layout: str | None,
    policies: Policies,
    workers: int,
    force: bool,
) -> None:
    """Convert files of other libraries into a data set of transitions.

    The data set is made completely or not at all. FILES are H5 files, folders of H5 files, a set of
    LeRobot, Minari or RLDS, a folder or .zip file of Zarr, or https:// URLs. Without --layout, the
    command uses the layout that fits, and prints the reasons.

    \b
    Examples:
      replaykit convert demo.hdf5 --layout robomimic --to data/lift
      replaykit convert episodes/ --to data/aloha --cast float64=float32 --workers 4
      replaykit convert https://example.org/hopper.hdf5 --layout d4rl --to data/hopper
      replaykit convert pusht/ --layout lerobot-pixels --to data/pusht
      replaykit convert cup.zarr.zip --to data/cup
      replaykit convert run.h5 --layout my_layouts.py:ARM --to data/arm --on-invalid skip
    """
    from replaykit.datasets import convert as converted
    from replaykit.tools.layouts import layout_named

    output.when_interrupted = (
        f"nothing was published at {to}, and nothing there was changed; the same command "
        "continues the conversion"
    )
    guess: Any = _guessed(output, list(files)) if layout is None else None
    name = guess.layout if layout is None else layout
    # A custom layout may print, but stdout is reserved for the output of the command.
    with output.warnings(), redirect_stdout(sys.stderr):
        data = converted(
            list(files),
            layout_named(name),
            to,
            policies=policies,
            workers=workers,
            force=force,
            progress=output.shows_progress,
        )
    said = None if guess is None else {"layout": guess.layout, "reasons": guess.reasons}
    print_dataset(output, data.published, more={"guess": said})


def _guessed(output: Output, files: list[str]) -> Any:
    from replaykit.datasets.converting import paths_of
    from replaykit.tools.facts import LayoutGuess
    from replaykit.tools.layouts import (
        TIE,
        guess_layout,
        known_layouts,
        table_layout_of,
        table_layouts,
    )

    table = table_layout_of(Path(files[0])) if len(files) == 1 else None
    if table is not None:
        return LayoutGuess(table.name, (f"{files[0]} has its files",))
    found = paths_of(files)
    guess = guess_layout(found)
    if guess.layout is None:
        raise ValueError(
            f"no layout fits {found[0]}: give one with --layout (one of "
            f"{', '.join([*known_layouts(), *table_layouts()])}, or a custom one); replaykit "
            f"inspect {found[0]} gives the reason for each of them"
        )
    if not output.as_json:
        tied = [reason for reason in guess.reasons[3:] if reason.startswith(TIE)]
        why = "; ".join([*guess.reasons[:3], *tied])
        output.line(("layout ", "bold"), (guess.layout, "bold green"), f": {why}", to_stderr=True)
    return guess


@_command
@click.argument("path", type=PATH)
@click.argument("repo", metavar="OWNER/NAME")
@click.option(
    "--license",
    help="License in the Hub's notation, such as cc-by-4.0; default the source's license.",
)
@click.option("--tag", "tags", multiple=True, help="A tag of the card; may be repeated.")
@click.option("--private", is_flag=True, help="Make a new repository private.")
@click.option("--branch", "revision", help="Branch; default main.")
@click.option("--message", help="Commit message.")
@_token
def push(output: Output, path: Path, repo: str, **settings: Any) -> None:
    """Check the data set at PATH and upload it to a Hub, with a card, in one commit.

    \b
    Examples:
      replaykit push data/lift me/lift --license mit
      replaykit push data/arm lab/arm --license cc-by-4.0 --tag robotics --private
    """
    from replaykit.datasets import push as pushed

    output.when_interrupted = (
        "nothing was committed; the same command uploads only the missing files"
    )
    with output.warnings(), output.working("pushing"):
        url = pushed(path, repo, **settings)
    record = {"path": str(path), "repository": repo, "url": url}
    output.result(record, ("pushed: ", "bold green"), url)


@_command
@click.argument("repo", metavar="OWNER/NAME")
@click.option("--revision", help="Branch, tag or commit; default main.")
@click.option(
    "--root",
    type=PATH,
    help="Folder of pulled data sets; default ~/.cache/replaykit/pulled.",
)
@_token
def pull(output: Output, repo: str, **settings: Any) -> None:
    """Fetch a pushed data set from a Hub, at one commit, and verify every file.

    \b
    Examples:
      replaykit pull me/lift
      replaykit pull lab/arm --revision v2 --root data
    """
    from replaykit.datasets import pull as pulled

    output.when_interrupted = (
        "complete files are kept, and the same command fetches the others; nothing was published"
    )
    with output.warnings():
        data = pulled(repo, progress=output.shows_progress, **settings)
    print_dataset(output, data.published, repo)


@_command
@click.argument("path", type=PATH)
@click.option("--html", type=PATH, help="Write an HTML page with plots to this file.")
@_layout("a guess")
@click.option(
    "--episodes", type=click.IntRange(min=0), default=10, help="Number of episodes to list."
)
@click.option("--exact", is_flag=True, help="Compute statistics over all rows, also of large data.")
def inspect(
    output: Output, path: Path, html: Path | None, layout: str | None, episodes: int, exact: bool
) -> None:
    """Show keys, shapes, dtypes, statistics, episodes and warnings of the data at PATH.

    PATH is a data set, a checkpoint, a recording, a buffer's folder, a set of LeRobot, Minari or
    RLDS, a folder or .zip file of Zarr, an H5 file, or a folder of H5 files.

    \b
    Examples:
      replaykit inspect demo.hdf5
      replaykit inspect data/lift --html lift.html
      replaykit inspect checkpoint --json
    """
    from replaykit.tools.validation import MOST_BYTES, opened

    output.when_interrupted = "nothing was changed, and no page was written"
    most = None if exact else MOST_BYTES
    with (
        output.warnings(),
        output.working("reading"),
        opened(path, layout=layout, most_bytes=most) as (facts, table),
    ):
        if html is not None:
            from replaykit.tools.page import write_page

            write_page(html, facts, table)
    if output.as_json:
        record = facts.to_json(episodes=episodes)
        output.document({**record, "html": None if html is None else str(html)})
        return
    _print(output, facts, episodes)
    if html is not None:
        output.line((f"page: {html}", "bold green"))


def _print(output: Output, facts: Any, episodes: int) -> None:
    from replaykit.tools.facts import KEY_COLUMNS, details, key_texts, size

    rows = "" if facts.rows is None else f", {facts.rows:,} rows"
    output.line((facts.path, "bold"), f": {facts.kind}{rows}, {size(facts.nbytes)}")
    for name, value, remarks in details(facts):
        output.line((f"  {name}: ", "dim"), value)
        for remark in remarks:
            output.line((f"    {remark}", "dim"))
    if facts.keys:
        table = sheet("key", *KEY_COLUMNS, right=KEY_COLUMNS[1:])
        for key in facts.keys:
            *cells, nan = key_texts(key)
            note = key.note if key.statistics is None else None
            if key.statistics is not None and key.looked_at < key.rows:
                note = f"of {key.looked_at:,} rows"
            name = plain(f"{key.key} ({note})" if note else key.key)
            has_nan = nan not in ("-", "0")
            table.add_row(name, *map(plain, cells), Text(nan, "red" if has_nan else "dim"))
        output.console.print()
        output.console.print(table)
    if facts.episodes is not None:
        output.console.print()
        _print_episodes(output, facts.episodes, episodes)
    for text in facts.warnings:
        output.line(("warning: ", "bold yellow"), text)


def _print_episodes(output: Output, episodes: Any, most: int) -> None:
    from replaykit.tools.facts import counted, episode_texts, number

    summary = episodes.summary()
    ends = ", ".join(f"{count:,} {end}" for end, count in summary["ends"].items())
    output.line((counted(summary["count"], "episode"), "bold"), f": {ends}")
    names = ("min", "median", "mean", "max", "sum")
    spreads = sheet("", *names, right=names)
    for name in ("lengths", "returns"):
        if (spread := summary[name]) is not None:
            spreads.add_row(name, *map(number, vars(spread).values()))
    output.console.print(spreads)
    rows = episode_texts(episodes, most)
    if not rows:
        return
    table = sheet("episode", "rows", "return", "end", "where")
    for *cells, name in rows:
        table.add_row(*cells, Text(plain(name), "dim"))
    output.console.print(table)
    if len(episodes) > most:
        output.line((f"... {len(episodes) - most:,} more", "dim"))


_EXPORTS: Final = {
    "lerobot-v3": "to_lerobot",
    "minari": "to_minari",
    "rlds": "to_rlds",
    "robomimic": "to_robomimic",
    "zarr": "to_zarr",
}
"""Names of functions of `replaykit.adapters`, by format."""


@_command
@click.argument("source", type=PATH)
@click.argument("target")
@click.option("--to", "form", type=click.Choice(tuple(_EXPORTS)), required=True, help="The format.")
@click.option("--fps", type=click.IntRange(min=1), help="Frames per second, for lerobot-v3.")
@click.option("--task", help="The task in words, for lerobot-v3.")
@click.option("--video", is_flag=True, help="Store images as lossy MP4, for lerobot-v3.")
@click.option("--env", help="Id of the environment, for minari; default unbounded spaces.")
@click.option("--force", is_flag=True, help="Replace an existing target at the end.")
def export(output: Output, source: Path, target: str, form: str, force: bool, **given: Any) -> int:
    """Write the episodes of the data at SOURCE for another library, all or nothing.

    SOURCE is a data set, a checkpoint, a recording, or a buffer made with recover=True. TARGET is a
    path, or an id such as name-v0 for minari. The command validates SOURCE first, and exports
    nothing if an error is found. All written values are read back and compared with those of
    SOURCE, before TARGET becomes visible.

    \b
    Examples:
      replaykit export data/lift lift --to lerobot-v3 --fps 20 --task "lift the cube"
      replaykit export data/lift lift.zarr.zip --to zarr
      replaykit export checkpoint lift.hdf5 --to robomimic
      replaykit export checkpoint lift/1.0.0 --to rlds
      replaykit export data/pole cartpole/random-v0 --to minari --env CartPole-v1
    """
    from replaykit import adapters
    from replaykit.adapters.export_files import check_apart
    from replaykit.adapters.exporting import unbounded_spaces
    from replaykit.tools.stored_facts import opened_buffer
    from replaykit.tools.validation import kind_of
    from replaykit.tools.validation import validate as validated

    options = {name: value for name, value in given.items() if value}
    allowed = {"lerobot-v3": {"fps", "task", "video"}, "minari": {"env"}}.get(form, set())
    for name in options.keys() - allowed:
        raise click.UsageError(f"--{name} is not an option of --to {form}")
    if form == "lerobot-v3" and "fps" not in options:
        raise click.UsageError("--to lerobot-v3 needs --fps")
    if form != "minari":
        check_apart(Path(target), source)
    output.when_interrupted = "nothing was exported, and an old target was not changed"
    with output.warnings(), output.progress("checking") as advance:
        kind = kind_of(source)
        findings = validated(source, advance)
    wrong = [found for found in findings if not found.ok and not found.is_warning]
    if wrong:
        said = "; ".join(f"{found.check}: {found.text}" for found in wrong)
        raise ValueError(f"{source} is not exported, because it is not valid: {said}")
    with output.warnings(), output.working("exporting"), opened_buffer(source, kind) as data:
        if form == "minari" and not options:
            options = unbounded_spaces(data)
        getattr(adapters, _EXPORTS[form])(data, target, overwrite=force, **options)
        counts = len(data.episodes), int(data.episodes.lengths.sum())
    if form == "lerobot-v3":
        findings += validated(Path(target))
    record = {"source": str(source), "target": target, "to": form, "findings": findings}
    output.result(
        {**record, "episodes": counts[0], "rows": counts[1]},
        ("exported: ", "bold green"),
        f"{target}: {counts[1]:,} rows in {counts[0]:,} episodes, read back and equal",
    )
    return 0


@_command
@click.argument("path", type=PATH)
def validate(output: Output, path: Path) -> int:
    """Verify all checksums, and check that the files agree. Errors give exit code 1.

    PATH is a data set, a checkpoint, a recording, a buffer's folder, a set of LeRobot, Minari or
    RLDS, or a folder or .zip file of Zarr. Of a data set, the command checks sizes, checksums, ids,
    returns, and the episode table against the flags. It also checks that each row's next
    observation is the observation of the next row. Of a checkpoint, it checks every file of every
    version. Of a recording and of a buffer made with recover=True, it checks the files and the
    committed state.

    \b
    Examples:
      replaykit validate data/lift
      replaykit validate checkpoint --json
    """
    from replaykit.tools.validation import validate as validated

    with output.warnings(), output.progress("checking") as advance:
        findings = validated(path, advance)
    wrong = [found for found in findings if not found.ok and not found.is_warning]
    if output.as_json:
        output.document({"path": str(path), "ok": not wrong, "findings": findings})
        return 1 if wrong else 0
    table = sheet("", "", "", show_header=False)
    for found in findings:
        mark = Text("ok", "green")
        if not found.ok:
            mark = Text("warning", "yellow") if found.is_warning else Text("wrong", "bold red")
        table.add_row(mark, found.check, plain(found.text))
    output.console.print(table)
    verdict = (f"{len(wrong)} wrong", "bold red") if wrong else ("all right", "bold green")
    output.line(f"{path}: ", verdict)
    return 1 if wrong else 0


@_command
@click.argument("path", type=PATH)
def repair(output: Output, path: Path) -> None:
    """Correct the metadata of the LeRobot data set at PATH where it follows from the frames.

    Lengths, offsets, totals and statistics are computed again. Frames and videos never change. The
    folder meta is replaced in one step. If any other fault remains, nothing is changed.

    \b
    Examples:
      replaykit repair pusht/
    """
    from replaykit.tools.source_facts import repair as repaired

    output.when_interrupted = "nothing was changed"
    with output.warnings(), output.working("reading"):
        changes = repaired(path)
    if output.as_json:
        output.document({"path": str(path), "changes": changes})
        return
    for text in changes:
        output.line(text)
    output.line(
        f"{path}: ", (f"{len(changes)} changes" if changes else "nothing to repair", "bold green")
    )
