"""Validation: whole things pass, each single fault is found and named."""

from __future__ import annotations

import json

import pytest

from replaykit import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer
from replaykit.datasets.dataset_passes import ensure_split
from replaykit.inspection import opened, validate
from tests.support.refusals import refuses


def wrong(path):
    """Text of what is wrong, warnings apart."""
    return [found.text for found in validate(path) if not found.ok and not found.is_warning]


def files_of(corpus):
    return sorted(
        str(each.relative_to(corpus)) for each in corpus.rglob("*")
        if each.is_file() and each.name not in ("manifest.json", "meta.json")
    )  # fmt: skip


def test_whole_corpus_passes_validation(corpus, tmp_path):
    seen = []
    findings = validate(str(corpus), seen.append)
    assert all(found.ok for found in findings)
    assert [found.check for found in findings] == [
        "manifest and sizes", "checksums", "descriptions", "episode table", "flags",
        "flags before", "ids", "returns", "successors", "numbers", "duplicates",
    ]  # fmt: skip
    assert sum(seen) > sum((corpus / name).stat().st_size for name in files_of(corpus))
    split = ensure_split(corpus, tmp_path / "split", progress=False).path
    assert wrong(split) == []
    with opened(split) as (facts, _):
        assert (facts.rows, len(facts.episodes)) == (12, 3)


def test_a_flipped_bit_of_any_file_names_the_file(corpus):
    names = files_of(corpus)
    assert len(names) > 20
    for name in names:
        file = corpus / name
        content = file.read_bytes()
        file.write_bytes(bytes([content[0] ^ 1]) + content[1:])
        found = [text for text in wrong(corpus) if "does not match its checksum" in text]
        assert len(found) == 1, name
        assert found[0].startswith(f"{name} ("), name
        file.write_bytes(content)
    assert wrong(corpus) == []


def test_a_flipped_bit_of_the_manifest_is_found(corpus):
    file = corpus / "manifest.json"
    content = file.read_bytes()
    assert len(content) > 2000
    for at in [*range(0, len(content) - 40, 97), *range(len(content) - 40, len(content))]:
        file.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        assert wrong(corpus), at  # or a file is missing that it has another name for now
    file.write_bytes(content)
    assert wrong(corpus) == []


@pytest.mark.parametrize("name", ["meta.json", "next/observation/meta.json", "episodes/meta.json"])
def test_descriptions_that_do_not_fit_are_found(corpus, name):
    """No checksum covers what tensordict reads."""
    file = corpus / name
    content = file.read_bytes()
    dtype = b"torch.int64" if name.startswith("episodes") else b"torch.float64"
    for damaged in (
        content[: len(content) // 2],
        content.replace(dtype, dtype[:-1] + b"5"),
        content.replace(b'"shape":[', b'"shape":[1', 1),
        content.replace(b'"is_nested":false', b'"is_nested":true '),
    ):
        if damaged != content:
            file.write_bytes(damaged)
            (found,) = wrong(corpus)
            assert found.startswith(f"{file} ")
    file.unlink()
    assert f"{file} is damaged" in wrong(corpus)[0]
    file.write_bytes(content)
    assert wrong(corpus) == []


def test_missing_short_and_torn_files_are_named(corpus):
    (corpus / "action.memmap").rename(corpus / "gone")
    assert "action.memmap is missing" in wrong(corpus)[0]
    (corpus / "gone").rename(corpus / "action.memmap")
    with (corpus / "action.memmap").open("ab") as file:
        file.write(b"more")
    assert "action.memmap has 292 bytes, expected 288" in wrong(corpus)[0]
    manifest = corpus / "manifest.json"
    manifest.write_text(manifest.read_text()[:100])
    assert "manifest.json is damaged" in wrong(corpus)[0]


def set_at(row, value):
    def change(values):
        values[row] = value

    return change


@pytest.mark.parametrize(
    ("key", "change", "says"),
    [
        ("next/done", set_at(2, True), "not next/terminated or next/truncated at row 2 (step 2 of "
         "episode 0) [V30]"),
        ("next/terminated", set_at(4, False), "at row 4 (step 4 of episode 0) [V30]"),
        ("terminated", set_at(6, True), "terminated is set at row 6 (step 1 of episode 1)"),
        ("episode", set_at(6, 2), "another one at row 6 (step 1 of episode 1) [V33]"),
        ("seed", set_at(0, 9), "another one at row 0 (step 0 of episode 0) [V33]"),
        ("table/length", set_at(0, 4), "episode 1 starts at row 5, expected 4 [V32]"),
        ("table/length", set_at(2, 0), "episode 2 has length 0 [V32]"),
        ("table/length", set_at(2, 3), "its episodes have 11 rows, the columns 12 [V32]"),
        ("table/terminated", set_at(0, False), "the table has terminated False of episode 0, its "
         "last row next/terminated True [V31]"),
        ("table/return", set_at(1, 1e6), "the table has 1000000 of episode 1"),
        ("table/episode", set_at(1, 0), "two episodes have the same seed and episode [V33]"),
    ],
)  # fmt: skip
def test_each_contradiction_is_found(corpus, tamper, key, change, says):
    tamper(corpus, key, change)
    found = wrong(corpus)
    assert len(found) == 1
    assert says in found[0]


def test_an_end_in_the_middle_is_found(corpus, tamper):
    for key in ("next/done", "next/terminated"):
        tamper(corpus, key, set_at(2, True))
    (text,) = wrong(corpus)
    assert "row 2 (step 2 of episode 0) is set before the end of an episode [V31]" in text


def test_changed_successor_with_a_separate_source_is_a_warning(corpus, tamper):
    """robomimic stores next observations apart, so that the source may contradict itself."""
    tamper(corpus, "next/observation/eef", set_at(5, 7.0))
    findings = validate(corpus)
    (found,) = [each for each in findings if not each.ok]
    assert found.is_warning
    assert "in 1 rows, first at row 5 (step 0 of episode 1) [V22]" in found.text
    # The last row of an episode has no row after it.
    tamper(corpus, "next/observation/eef", set_at(4, 7.0))
    assert "in 1 rows" in next(each for each in validate(corpus) if not each.ok).text


def test_duplicate_episodes_are_a_warning(corpus, tamper):
    def same(values):
        values[2] = values[0]

    tamper(corpus, "table/digest", same)
    (found,) = [each for each in validate(corpus) if not each.ok]
    assert found.is_warning
    assert "2 as 0 [V36]" in found.text


def test_nan_in_an_action_is_found(corpus):
    manifest = corpus / "manifest.json"
    record = json.loads(manifest.read_text())
    (array,) = [array for array in record["arrays"] if array["key"] == ["action"]]
    array["statistics"]["nan"] = 3
    del record["crc32"]  # as an earlier version wrote it
    manifest.write_text(json.dumps(record))
    assert wrong(corpus) == ["action holds 3 NaN [V20]"]
    record["options"]["policies"]["on_invalid"] = "keep"
    manifest.write_text(json.dumps(record))
    assert wrong(corpus) == []


@pytest.fixture
def saved(tmp_path, transitions):
    rb = ReplayBuffer(storage=LazyTensorStorage(30))
    for _ in range(3):
        rb.extend(transitions(10))
        rb.dumps(tmp_path / "saved", keep=2)
    return tmp_path / "saved"


def test_whole_checkpoint_passes_validation(saved):
    findings = validate(saved)
    assert all(found.ok for found in findings)
    assert [found.check for found in findings] == [
        f"version {version}: {what}"
        for version in (2, 3)
        for what in ("manifest", "files", "records")
    ]


def test_each_file_of_a_checkpoint_is_checked_and_named(saved):
    files = sorted(saved.glob("data-*.bin"))
    for file in files:
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        (text,) = wrong(saved)
        assert text.startswith(f"{file} is damaged: expected crc32")
        file.write_bytes(content[:-1])
        assert any(f"{file} is torn" in text for text in wrong(saved))
        file.unlink()
        assert any(f"{file} is missing" in text for text in wrong(saved))
        file.write_bytes(content)
    assert wrong(saved) == []
    # All that are damaged are named, not the first one only.
    for file in files:
        file.write_bytes(b"x" * file.stat().st_size)
    assert len(wrong(saved)) == len(files)


def test_manifests_of_a_checkpoint_are_checked(saved):
    older = saved / "manifest-2.json"
    content = older.read_text()
    older.write_text(content.replace('"len"', '"lem"'))
    (text,) = wrong(saved)
    assert "manifest-2.json" in text
    older.write_text(content)
    newest = saved / "manifest.json"
    newest.write_text(newest.read_text()[:50])
    assert "manifest.json is damaged" in wrong(saved)[0]


def test_leftovers_of_a_checkpoint_are_a_warning(saved):
    (saved / "data-000000000000-00000.bin").write_bytes(b"old")
    (found,) = [each for each in validate(saved) if not each.ok]
    assert found.is_warning
    assert "data-000000000000-00000.bin" in found.text


def test_buffer_on_disk_is_validated_when_unused(tmp_path, transitions):
    rb = ReplayBuffer(storage=LazyMemmapStorage(30, scratch_dir=tmp_path / "b", recover=True))
    rb.extend(transitions(10))
    assert "in use by another" in wrong(tmp_path / "b")[0]
    del rb
    assert wrong(tmp_path / "b") == []
    state = tmp_path / "b" / "%recovery" / "state-0.bin"
    state.write_bytes(state.read_bytes()[:100])
    assert "state-0.bin" in wrong(tmp_path / "b")[0]


def test_files_that_were_not_converted_are_refused(tmp_path, write_robomimic):
    path = write_robomimic(tmp_path / "a.hdf5")
    refuses(ValueError, "was not converted yet", validate, path)
    refuses(FileNotFoundError, "absent is not there", validate, tmp_path / "absent")
