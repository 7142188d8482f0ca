# SPDX-License-Identifier: Apache-2.0

"""`.ci/find-azurite` with fake programs and a fake npm, in a PATH with nothing else."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.test_find_postgres import Machine

FIND_AZURITE = Path(__file__).resolve().parent.parent / ".ci" / "find-azurite"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def find(machine: Machine, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a copy of the script, because it installs into the repository that it is in."""
    script = machine.root / "repository" / ".ci" / "find-azurite"
    script.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(FIND_AZURITE, script)
    return machine.run(script, **environment)


def test_the_environment_comes_before_the_path(machine: Machine) -> None:
    machine.script("azurite-blob", "exit 0")
    assert find(machine).stdout == f"{machine.bin}/azurite-blob\n"
    chosen = machine.server("chosen", "azurite-blob") / "azurite-blob"
    assert find(machine, AZURITE_BLOB=str(chosen)).stdout == f"{chosen}\n"


def test_without_npm_one_line_says_how_to_get_it(machine: Machine) -> None:
    found = find(machine)
    assert (found.returncode, found.stdout) == (1, "")
    (line,) = found.stderr.splitlines()
    assert line.startswith("headgate: tests need Azurite, and none was found. To get it: npm install --global azurite@")


def test_what_was_not_found_is_not_looked_for_again(machine: Machine) -> None:
    machine.script("npm", "exit 0")
    found = find(machine, AZURITE_BLOB="")
    assert (found.returncode, found.stdout) == (1, "")
    assert len(found.stderr.splitlines()) == 1


def test_npm_installs_it_once(machine: Machine) -> None:
    calls, program = machine.root / "calls", machine.root / "repository" / ".azurite/node_modules/.bin/azurite-blob"
    machine.script(
        "npm",
        f"echo \"$*\" >> '{calls}'\n"
        f"/bin/mkdir -p '{program.parent}' && echo '#!/bin/sh' > '{program}' && /bin/chmod +x '{program}'",
    )
    for _ in range(2):
        found = find(machine)
        assert (found.returncode, found.stdout) == (0, f"{program}\n"), found.stderr
    assert len(calls.read_text(encoding="utf-8").splitlines()) == 1


def test_root_on_a_debian_like_machine_gets_npm_first(machine: Machine) -> None:
    calls, program = machine.root / "calls", machine.root / "repository" / ".azurite/node_modules/.bin/azurite-blob"
    npm = f"#!/bin/sh\n/bin/mkdir -p '{program.parent}' && echo '#!/bin/sh' > '{program}' && /bin/chmod +x '{program}'"
    machine.script(
        "apt-get",
        f"echo \"$*\" >> '{calls}'\n"
        f"case \"$*\" in *' npm') echo \"{npm}\" > '{machine.bin}/npm'; chmod +x '{machine.bin}/npm' ;; esac",
    )
    machine.user_is(0)
    found = find(machine)
    assert (found.returncode, found.stdout) == (0, f"{program}\n"), found.stderr
    assert calls.read_text(encoding="utf-8").splitlines()[0] == "update"


def test_when_the_install_fails_its_reason_and_the_way_out_are_told(machine: Machine) -> None:
    machine.script("npm", "echo 'npm error no network' >&2; exit 1")
    found = find(machine)
    assert (found.returncode, found.stdout) == (1, "")
    assert "npm error no network" in found.stderr
    assert "npm install --global azurite@" in found.stderr.splitlines()[-1]
