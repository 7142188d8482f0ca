# SPDX-License-Identifier: Apache-2.0

"""`.ci/find-postgres` with fake programs and fake package managers, in a PATH with nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

FIND_POSTGRES = Path(__file__).resolve().parent.parent / ".ci" / "find-postgres"
TOOLS = ("sh", "dirname", "mktemp", "rm", "tail", "mkdir", "touch", "chmod")


class Machine:
    """A machine made of one folder: its PATH contains only ``bin``."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.bin = root / "bin"
        self.bin.mkdir()
        for tool in TOOLS:
            found = shutil.which(tool)
            assert found, f"this machine has no {tool}"
            (self.bin / tool).symlink_to(os.path.realpath(found))
        self.user_is(1000)

    def script(self, name: str, text: str) -> None:
        path = self.bin / name
        path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
        path.chmod(0o755)

    def user_is(self, uid: int) -> None:
        self.script("id", f"echo {uid}")

    def server(self, folder: str, *programs: str) -> Path:
        made = self.root / folder
        made.mkdir(parents=True, exist_ok=True)
        for program in programs or ("initdb", "postgres"):
            (made / program).touch()
            (made / program).chmod(0o755)
        return made

    def run(self, script: Path, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.bin / "sh"), str(script)],
            env={"PATH": str(self.bin), **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )

    def find(self, **environment: str) -> subprocess.CompletedProcess[str]:
        return self.run(FIND_POSTGRES, HEADGATE_POSTGRES_FOLDERS=str(self.root / "lib"), **environment)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_the_newest_version_in_the_usual_folders_is_found(machine: Machine) -> None:
    machine.server("lib/13/bin")
    newest = machine.server("lib/17/bin")
    machine.server("lib/18/bin", "postgres")  # not whole
    found = machine.find()
    assert (found.returncode, found.stdout, found.stderr) == (0, f"{newest}\n", "")


def test_the_environment_comes_first(machine: Machine) -> None:
    machine.server("lib/17/bin")
    chosen = machine.server("chosen")
    assert machine.find(POSTGRES_BIN=str(chosen)).stdout == f"{chosen}\n"


def test_without_rights_one_line_says_how_to_get_it(machine: Machine) -> None:
    machine.script("apt-get", "exit 1")
    found = machine.find()
    assert (found.returncode, found.stdout) == (1, "")
    assert found.stderr.splitlines() == [
        "headgate: tests need a PostgreSQL server, and none was found. To get it: sudo apt-get install postgresql"
    ]


def test_root_on_a_debian_like_machine_gets_it_installed(machine: Machine) -> None:
    folder = machine.root / "lib/15/bin"
    calls = machine.root / "calls"
    machine.script(
        "apt-get",
        f"echo \"$*\" >> '{calls}'\n"
        'case "$*" in\n'
        f"    *' postgresql') mkdir -p '{folder}'; touch '{folder}/initdb' '{folder}/postgres'\n"
        f"        chmod +x '{folder}/initdb' '{folder}/postgres' ;;\n"
        "esac",
    )
    machine.user_is(0)
    found = machine.find()
    assert (found.returncode, found.stdout) == (0, f"{folder}\n"), found.stderr
    assert calls.read_text(encoding="utf-8").splitlines()[0] == "update"


def test_when_the_install_fails_its_reason_and_the_way_out_are_told(machine: Machine) -> None:
    machine.script("apt-get", "echo 'E: no network' >&2; exit 100")
    machine.user_is(0)
    found = machine.find()
    assert (found.returncode, found.stdout) == (1, "")
    assert "E: no network" in found.stderr
    assert "sudo apt-get install postgresql" in found.stderr.splitlines()[-1]
