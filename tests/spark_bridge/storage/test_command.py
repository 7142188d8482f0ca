# SPDX-License-Identifier: Apache-2.0

"""``headgate checkpoints``: what it prints about a directory."""

from __future__ import annotations

import json
import os
import random
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgpack
import pytest

from protocol.describing import TEXT_CHARS_MAX
from protocol.wire.checkpoint_format import StoredCheckpoint, encode_checkpoint
from protocol.wire.messages import RestoreMode
from spark_bridge.command import main
from tests.fuzz.reseal import resealed
from tests.spark_bridge.storage.checkpoints import a_checkpoint, a_prepared_storage, a_storage_with

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A storage of two operators."""
    storage, _ = a_storage_with(tmp_path, 2)
    (letters,) = storage.reserve_ids(1)
    storage.store("letters of München", a_checkpoint(letters))
    return tmp_path


def test_it_lists_every_checkpoint(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoints", str(root)]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["OPERATOR", "ID", "TIME", "(UTC)", "BYTES", "PARALLELISM", "SUBTASKS", "HELD", "STATE"]
    assert [
        (line.startswith("letters of München"), line.endswith("2            1         1     ok")) for line in lines
    ] == [(True, True), (False, True), (False, True)]


def test_it_lists_one_operator_as_json(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoints", str(root), "--operator", "words", "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert (first["operator_id"], first["checkpoint_id"], second["checkpoint_id"]) == ("words", 1, 2)
    assert (first["parallelism"], first["subtasks"], first["held_events"], first["problem"]) == (2, 1, 1, "")
    assert first["size_bytes"] == os.path.getsize(first["file"])


def test_it_shows_a_label(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    storage = a_prepared_storage(root)
    (labelled,) = storage.reserve_ids(1)
    storage.store("words", replace(a_checkpoint(labelled), label="batch 3"))
    assert main(["checkpoints", str(root), "--operator", "words"]) == 0
    states = [line.partition("  1         1     ")[2] for line in capsys.readouterr().out.splitlines()[1:]]
    assert states == ["ok", "ok", "ok, batch 3"]
    main(["checkpoints", str(root), "--operator", "words", "--json"])
    assert [info["label"] for info in json.loads(capsys.readouterr().out)] == ["", "", "batch 3"]


def test_a_long_name_does_not_widen_the_other_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """H157"""
    (tmp_path / "long.hgc").write_bytes(
        encode_checkpoint(StoredCheckpoint("o" * 100_000, RestoreMode.STREAMING, 1, "r", a_checkpoint(1)))
    )
    (tmp_path / "short.hgc").write_bytes(
        encode_checkpoint(StoredCheckpoint("words", RestoreMode.STREAMING, 1, "r", a_checkpoint(1)))
    )
    main(["checkpoints", str(tmp_path)])
    rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 3
    assert max(map(len, rows)) < 250 + len(str(tmp_path)), rows


def test_it_names_what_is_damaged(root: Path, capsys: pytest.CaptureFixture[str]) -> None:  # H50
    file = root / "words" / "checkpoint-1.hgc"
    os.truncate(file, 100)
    assert main(["checkpoints", str(root)]) == 1
    out = capsys.readouterr().out
    assert f"{file}: it is truncated or altered: it has 100 of" in out
    assert [line.split()[-1] for line in out.splitlines()[1:4]] == ["ok", "DAMAGED", "ok"]


def test_it_looks_at_one_file(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    storage = a_prepared_storage(root)
    file = storage.store_savepoint(tmp_path / "by hand", "words", a_checkpoint(9))
    assert main(["checkpoints", file]) == 0
    assert "words     9" in capsys.readouterr().out
    os.truncate(file, 10)
    assert main(["checkpoints", file]) == 1
    assert f"{file}: it is truncated: 10 bytes" in capsys.readouterr().out


@pytest.mark.parametrize("place", ["nothing here", "empty", "nothing here/checkpoint-1.hgc", "nonsense://x"])
def test_a_directory_that_is_not_a_storage(place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    assert main(["checkpoints", place if "://" in place else str(tmp_path / place)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("headgate: ")
    assert len(said.err.splitlines()) == 1


def test_a_storage_without_checkpoints_is_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a_prepared_storage(tmp_path)
    assert main(["checkpoints", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "no checkpoints\n"


def test_it_changes_nothing(root: Path) -> None:
    before = sorted((path, path.stat().st_mtime_ns) for path in root.rglob("*"))
    main(["checkpoints", str(root)])
    assert sorted((path, path.stat().st_mtime_ns) for path in root.rglob("*")) == before


def test_it_runs_where_neither_spark_nor_java_is(root: Path) -> None:
    program = (
        "import runpy, sys\n"
        "for name in ('pyspark', 'py4j'): sys.modules[name] = None\n"
        f"sys.argv = ['headgate', 'checkpoints', {str(root)!r}]\n"
        "runpy.run_module('headgate', run_name='__main__')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={"PATH": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == 4


@pytest.mark.parametrize("arguments", [["--help"], ["checkpoints", "--help"]])
def test_help_is_given(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 0
    assert "checkpoints" in capsys.readouterr().out


def test_a_command_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([])
    assert end.value.code == 2
    assert "COMMAND" in capsys.readouterr().err


# --- hostile files ------------------------------------------------------------------------------------------------

HEAD_BYTES, DIGEST_BYTES = 20, 32


def a_file_of(values: bytes) -> bytes:
    """A file with a right head and checksum, and this body."""
    return resealed(bytes(HEAD_BYTES) + values + bytes(DIGEST_BYTES))


def a_body(*values: object, then: bytes = b"") -> bytes:
    return a_file_of(b"".join(map(msgpack.packb, values)) + then)


CLAIMED = b"\x89HGC\r\n\x1a\n" + struct.pack(">IQ", 1, 2**63)
HOSTILE_FILES: dict[str, bytes] = {
    "nothing": b"",
    "NUL": bytes(1000),
    "a text": b"hello\x1b[2J",
    "a head that claims 8 EiB": CLAIMED,
    "a head that claims 8 EiB, with a body": CLAIMED + bytes(1000),
    "deep nesting": a_file_of(b"\x91" * 100_000 + b"\xc0"),
    "nested maps": a_file_of(b"\x81\xa1a" * 100_000 + b"\xc0"),
    "a text that claims 4 GiB": a_file_of(b"\xdb\xff\xff\xff\xff"),
    "bytes that claim 4 GiB": a_body("words", 1, 2, 1, 0, "0.1", then=b"\xc6\xff\xff\xff\xff"),
    "a list that claims 4 G entries": a_file_of(b"\xdd\xff\xff\xff\xff"),
    "4 G subtasks": a_body("words", 1, 2, 1, 0, "0.1", b"", 2**32),
    "4 G states": a_body("words", 1, 2, 1, 0, "0.1", b"", 1, 0, 0, 2**32),
    "4 G held events": a_body("words", 1, 2, 1, 0, "0.1", b"", 1, 0, 0, 0, 2**32),
    "an extension type": a_file_of(b"\xc7\xff\x05" + bytes(255)),
    "a float as the parallelism": a_body("words", 1, 2.0),
    "a list as the operator": a_body(["words"], 1, 2),
    "True as the checkpoint": a_body("words", True, 2),
    "a parallelism of 2**62": a_body("words", 1, 2**62),
    "an unknown mode": a_body("words", 1, 2, 77),
    "bytes as the release": a_body("words", 1, 2, 1, 0, b"0.1"),
    "an operator that is not UTF-8": a_file_of(b"\xa2\xff\xfe"),
    "bytes after the end": a_body("words", 1, 2, 1, 0, "0.1", b"", 0, 0),
}


def looked_at(file: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The problem of a file that the command refuses with one line, within a small memory."""
    tracemalloc.start()
    try:
        status = main(["checkpoints", str(file)])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    out, err = capsys.readouterr()
    assert (status, err) == (1, "")
    assert all(one.isprintable() for one in out.split("\n"))
    _, row, problem = out.splitlines()
    assert row.split()[-1] == "DAMAGED"
    assert problem.startswith(f"{file}: ")
    assert peak < 2**24 + 10 * file.stat().st_blocks * 512, f"{peak} bytes"
    return problem


@pytest.mark.parametrize("content", HOSTILE_FILES.values(), ids=HOSTILE_FILES)
def test_a_hostile_file_is_named_in_one_line_and_takes_no_memory(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # H156
    file = tmp_path / "checkpoint-1.hgc"
    file.write_bytes(content)
    assert len(looked_at(file, capsys)) < 400


def test_a_file_that_is_large_and_empty_is_not_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "checkpoint-1.hgc"
    for head, size in ((b"", 2**40), (CLAIMED, 2**40), (CLAIMED[:12] + struct.pack(">Q", 2**31 - 52), 2**33)):
        file.write_bytes(head)
        os.truncate(file, size)
        looked_at(file, capsys)


def mutated(random_: random.Random, content: bytes) -> bytes:
    data = bytearray(content)
    for _ in range(random_.randrange(1, 5)):
        place = random_.randrange(len(data))
        change: Callable[[], None] = random_.choice(
            [
                lambda place=place: data.__setitem__(place, random_.randrange(256)),
                lambda place=place: data.__delitem__(slice(place, place + random_.randrange(1, 30))),
                lambda place=place: data.__setitem__(slice(place, place), random_.randbytes(9)),
                lambda place=place: data.__setitem__(
                    slice(place, place), random_.choice([b"\x91", b"\xdd\xff\xff\xff\xff", b"\xc0", b"\xcb" + bytes(8)])
                ),
            ]
        )
        if len(data) > 40:
            change()
    return bytes(data)


@pytest.mark.parametrize("seed", range(40))
def test_cut_flipped_and_forged_files_are_refused_in_one_line_or_are_checkpoints(
    seed: int, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # H156
    random_ = random.Random(seed)
    whole = (root / "words" / "checkpoint-1.hgc").read_bytes()
    file = root / "one.hgc"
    for _ in range(10):
        data = mutated(random_, whole)
        file.write_bytes(resealed(data) if random_.random() < 0.7 and len(data) > 52 else data)
        status = main(["checkpoints", str(file)])
        out, err = capsys.readouterr()
        assert status in (0, 1), seed
        assert err == ""
        assert all(one.isprintable() for one in out.split("\n")), seed
        assert len(out.splitlines()) == 2 + status, seed
        main(["checkpoints", str(root), "--json"])
        json.dumps(json.loads(capsys.readouterr().out), ensure_ascii=False).encode()


def test_hostile_texts_in_a_whole_file_and_in_its_name_are_shown_harmlessly(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # H156
    hostile = "\x1b]0;owned\x07\n\0<script>"
    content = a_body(hostile, 1, 2, 1, 2**62, hostile, b"", 0)
    for name in (b"\xff\xfe.hgc", b"a\x1b[2J.hgc"):
        Path(os.fsdecode(os.fsencode(root) + b"/" + name)).write_bytes(content)
    assert main(["checkpoints", str(root)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert all(one.isprintable() for one in out.split("\n"))
    assert max(map(len, out.splitlines())) < TEXT_CHARS_MAX
    assert main(["checkpoints", str(root), "--json"]) == 0
    read = json.loads(capsys.readouterr().out)
    json.dumps(read, ensure_ascii=False).encode()  # strict readers refuse lone surrogates
    assert hostile in {one["operator_id"] for one in read}
