# SPDX-License-Identifier: Apache-2.0

"""``python -m headgate checkpoints``: what it prints about a directory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from spark_bridge.command import main
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
