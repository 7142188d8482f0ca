# SPDX-License-Identifier: Apache-2.0

"""``headgate``: what all commands have in common; each has its own tests as well."""

from __future__ import annotations

import io
import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from spark_bridge.command import main
from tests.spark_bridge.observability.test_history import FAILED, START, notes, written
from tests.spark_bridge.storage.checkpoints import a_storage_with

ROOT = Path(__file__).resolve().parents[2]
SECRET = "h1dd3n"


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command says that does not accept its arguments."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    return capsys.readouterr().err


# --- arguments ----------------------------------------------------------------------------------------------------

SIDECAR = ("sidecar", "m:f", "--secret-file", "f")
UNKNOWN: dict[str, tuple[str, ...]] = {
    "the beginning of an option": (*SIDECAR, "--status-token", SECRET),
    "the beginning of an option, with its value": (*SIDECAR, f"--status-token={SECRET}"),
    "before the command": ("--token", SECRET, "checkpoints", "x"),
    "before the command, with its value": (f"--token={SECRET}", "checkpoints", "x"),
    "in place of the command": (SECRET,),
    "in place of the command, with quotes": (f"{SECRET}' (choose \"{SECRET}",),
    "a short option": ("checkpoints", "x", f"-p{SECRET}"),
    "a short option and its value": ("top", "--secret-file", "f", "-p", SECRET),
    "a misspelt option": ("top", "--secret-file", "f", f"--secret-text={SECRET}=x"),
    "one word too many": ("history", "x", SECRET),
    "after all options": ("checkpoints", "x", "--", SECRET),
    "a value of an option that takes none": ("checkpoints", "x", f"--json={SECRET}"),
    "a value with a quote of an option that takes none": ("checkpoints", "x", f"--json={SECRET}'\n\"{SECRET}"),
}


def test_the_nearest_command_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert "Did you mean headgate check?" in refused(capsys, "chekc")
    assert "Did you mean" not in refused(capsys, "something")


@pytest.mark.parametrize("arguments", UNKNOWN.values(), ids=UNKNOWN)
def test_the_value_of_an_unknown_argument_is_not_shown(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:  # H156
    said = refused(capsys, *arguments)
    assert SECRET not in said
    assert "unrecognized arguments: " in said or "(not shown)" in said


def test_an_unknown_option_is_named_with_where_to_look(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, *SIDECAR, "--status-token", SECRET, f"--tokens={SECRET}", "-x")
    assert "unrecognized arguments: --status-token ... --tokens=... ...; --help lists those that there are" in said


def test_no_option_of_any_command_may_be_abbreviated(capsys: pytest.CaptureFixture[str]) -> None:  # H156
    for arguments in (
        ("checkpoints", "x", "--js"),
        ("checkpoints", "x", "--op", "a"),
        ("history", "x", "--js"),
        ("top", "--secret", "x"),
        ("top", "--secret-file", "x", "--on"),
        (*SIDECAR, "--stor", "x"),
        ("connect-server", "x", "--new", "y"),
    ):
        assert "unrecognized arguments: " in (said := refused(capsys, *arguments)) or "are required: " in said


@pytest.mark.parametrize("seed", range(50))
def test_a_secret_anywhere_but_in_the_value_of_a_known_option_is_not_shown(
    seed: int, capsys: pytest.CaptureFixture[str]
) -> None:  # H156
    random_ = random.Random(seed)
    options = ["--status-token", "--token", "--password", "--secret", "--storage-options", "-p", "-t", "--key"]
    given = list(random_.choice([("checkpoints", "x"), ("history", "x"), ("top", "--secret-file", "f"), SIDECAR]))
    for _ in range(random_.randrange(1, 4)):
        option = random_.choice(options)
        unknown = random_.choice([[option, SECRET], [f"{option}={SECRET}"], [SECRET], [option + SECRET[:0], SECRET]])
        place = len(given) if random_.random() < 0.7 else 0
        given[place:place] = unknown
    assert SECRET not in refused(capsys, *given), given


URLS = {
    "the query of a file": f"file:///tmp/x?token={SECRET}",
    "the query of a file with one slash": f"file:/tmp/x?a=b&access_token={SECRET}",
    "the query of a bucket": f"s3://bucket/x?secret_key={SECRET}&region=us",
    "a signature": f"https://host/x.hgc?sv=2&sig={SECRET}",
    "a fragment": f"gs://bucket/x#token={SECRET}",
    "a name in capitals": f"abfs://c@a/x?X-Amz-Credential={SECRET}",
    "an escaped name": f"s3://bucket/x?tok%65n={SECRET}",
    "a login": f"s3://key:{SECRET}@bucket/x",
}


@pytest.mark.parametrize("url", URLS.values(), ids=URLS)
@pytest.mark.parametrize("arguments", [("checkpoints",), (*SIDECAR, "--storage")], ids=["checkpoints", "sidecar"])
def test_a_secret_in_a_url_is_refused_and_not_shown(
    url: str, arguments: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # H156
    (tmp_path / "f").write_text("ab" * 32)
    (tmp_path / "f").chmod(0o600)
    given = [str(tmp_path / "f") if one == "f" else one for one in arguments]
    given = ["json:loads" if one == "m:f" else one for one in given]
    assert main([*given, url]) in (1, 2)
    out, err = capsys.readouterr()
    assert out == ""
    assert SECRET not in err
    assert re.search(r"give it in (storage_details=StorageDetails\()?options", err)


# --- output -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lines", [1, 3000])
@pytest.mark.parametrize(
    "arguments",
    [("history", "log"), ("history", "log", "--json"), ("checkpoints", "stored"), ("checkpoints", "stored", "--json")],
    ids=" ".join,
)
def test_a_reader_that_leaves_ends_a_command_without_a_word(
    arguments: tuple[str, ...], lines: int, tmp_path: Path
) -> None:  # H155
    written(tmp_path / "log", START, *[notes(FAILED)] * lines)
    a_storage_with(tmp_path / "stored", min(lines, 100), retained=1000)
    assert ended_by_its_reader(tmp_path, *arguments) == (0, "")


@pytest.mark.parametrize("arguments", [("--help",), ("sidecar", "--help"), ("version",)], ids=" ".join)
def test_a_reader_that_leaves_ends_what_has_no_records_either(arguments: tuple[str, ...], tmp_path: Path) -> None:
    assert ended_by_its_reader(tmp_path, *arguments) == (0, "")


COMMANDS = ("checkpoints", "history", "sidecar", "top", "connect-server", "version", "check")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_plain_text(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    said = capsys.readouterr().out
    assert said.startswith(f"usage: headgate {command}")
    assert "`" not in said


def test_an_output_that_breaks_when_it_is_flushed_ends_a_command(monkeypatch: pytest.MonkeyPatch) -> None:  # H155
    class Left(io.StringIO):
        def flush(self) -> None:
            raise BrokenPipeError

    for arguments in (["--help"], ["version"]):
        monkeypatch.setattr(sys, "stdout", Left())
        assert main(arguments) == 0
        assert sys.stdout is None, "Python would flush it again at the end"


def ended_by_its_reader(folder: Path, *arguments: str) -> tuple[int, str]:
    """The exit status and the errors of a command whose reader has left before it writes."""
    program = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); input(); from headgate.__main__ import main; sys.exit(main())"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        process.stdin.write("\n")
        process.stdin.close()
        said = process.stderr.read()
        return process.wait(60), said


def test_what_is_printed_of_the_history_is_json_line_by_line(tmp_path: Path) -> None:
    log = written(tmp_path / "log", START, notes(FAILED))
    done = subprocess.run(
        f"{sys.executable} -m headgate history {log} --json | head -1",
        shell=True,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    assert json.loads(done.stdout)["what"] == "application started"
