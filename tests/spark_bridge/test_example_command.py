# SPDX-License-Identifier: Apache-2.0

"""``headgate example`` in a clone. ``tests/examples`` runs each example with it, from the wheel."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from spark_bridge.command import main
from spark_bridge.driver import examples
from tests.release.environments import brought_by

ROOT = Path(__file__).resolve().parents[2]
FILES = {file.stem: file for file in sorted((ROOT / "examples").glob("[!_]*.py"))}


def listed(capsys: pytest.CaptureFixture[str]) -> dict[str, list[str]]:
    """What is printed without a name: the columns after the name of each example."""
    assert main(["example"]) == 0
    table, _, _ = capsys.readouterr().out.partition("\n\n")
    rows = [re.split(r"  +", line) for line in table.splitlines()]
    return {name: rest for name, *rest in rows}


def test_each_example_is_listed_with_its_first_line(capsys: pytest.CaptureFixture[str]) -> None:
    rows = listed(capsys)
    assert rows.pop("EXAMPLE") == ["NEEDS", "WHAT IT SHOWS"]
    assert rows.keys() == FILES.keys()
    for name, file in FILES.items():
        first, *_ = (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").splitlines()
        assert rows[name][-1] == first.replace("``", "")
    assert rows["checked_orders"][0] == "pyspark, redis, delta"
    assert len(rows["first_actor"]) == 1, "it needs no extra"


@pytest.fixture(scope="module")
def distributions_of() -> Mapping[str, list[str]]:
    """By module: what brings it."""
    return {**metadata.packages_distributions(), "pyspark": ["pyspark", "pyspark-client"]}


@pytest.mark.parametrize("name", FILES)
def test_what_an_example_imports_comes_with_the_extras_that_it_names(
    name: str, distributions_of: Mapping[str, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    needs = [] if len(row := listed(capsys)[name]) == 1 else row[0].split(", ")
    distributions = brought_by(needs)
    tree = ast.parse(FILES[name].read_text(encoding="utf-8"))
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    modules = {str(module).partition(".")[0] for module in imported} - sys.stdlib_module_names - {"headgate"}
    missing = {
        module
        for module in modules
        if not distributions & {canonicalize_name(one) for one in distributions_of.get(module, [module])}
    }
    assert missing == set()


def test_every_example_is_run_by_a_test() -> None:
    folders = (ROOT / "tests" / "examples", ROOT / "tests" / "release")
    tests = "".join(file.read_text(encoding="utf-8") for folder in folders for file in sorted(folder.glob("test_*.py")))
    names = {name.partition("_")[0] if name.startswith("train_") else name for name in FILES}
    assert {name for name in names if f'"{name}' not in tests} == set()


def test_an_example_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    for name, file in FILES.items():
        assert main(["example", name]) == 0
        assert capsys.readouterr().out == file.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["crwal"], "there is no example 'crwal': did you mean crawl?"),
        (["train"], "there is no example 'train': did you mean train_"),
        (["crwal", "--run"], "there is no example 'crwal': did you mean crawl?"),
        (["../README"], "there is no example '../README': headgate example lists those that there are"),
        (["__init__"], "there is no example '__init__': "),
        (["--run", "crawl"], "which example? Name it before --run"),
    ],
)
def test_a_wrong_name_is_an_error_that_says_which_is_meant(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["example", *arguments])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_an_installation_without_the_files_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as an archive of the packages, which a cluster hands to its workers."""
    monkeypatch.setattr(examples, "__file__", str(tmp_path / "spark_bridge" / "driver" / "examples.py"))
    with pytest.raises(SystemExit):
        main(["example"])
    assert "this installation has no examples" in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "status"), [(["--lines", "1", "--on-full", "refuse"], 0), (["--flood"], 2)])
def test_an_example_gets_its_arguments_and_its_exit_status_is_that_of_the_command(
    arguments: list[str], status: int
) -> None:
    command = [sys.executable, "-m", "headgate", "example", "bounded_mailbox", "--run", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == status
    assert ("3 lines sent" in done.stdout) == (status == 0)
    assert ("unrecognized arguments: --flood" in done.stderr) == (status == 2)
