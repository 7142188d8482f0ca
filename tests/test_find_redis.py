# SPDX-License-Identifier: Apache-2.0

"""`.ci/find-redis` with fake programs and fake package managers, in a PATH with nothing else."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.test_find_postgres import Machine

FIND_REDIS = Path(__file__).resolve().parent.parent / ".ci" / "find-redis"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def find(machine: Machine, **environment: str) -> subprocess.CompletedProcess[str]:
    return machine.run(FIND_REDIS, **environment)


def test_the_environment_comes_before_the_path(machine: Machine) -> None:
    machine.script("redis-server", "exit 0")
    assert find(machine).stdout == f"{machine.bin}/redis-server\n"
    chosen = machine.server("chosen", "redis-server") / "redis-server"
    assert find(machine, REDIS_SERVER=str(chosen)).stdout == f"{chosen}\n"


def test_without_rights_one_line_says_how_to_get_it(machine: Machine) -> None:
    machine.script("apt-get", "exit 1")
    found = find(machine)
    assert (found.returncode, found.stdout) == (1, "")
    assert found.stderr.splitlines() == [
        "headgate: tests need a Redis server, and none was found. To get it: sudo apt-get install redis-server"
    ]


def test_root_on_a_debian_like_machine_gets_it_installed(machine: Machine) -> None:
    calls = machine.root / "calls"
    server = machine.bin / "redis-server"
    machine.script(
        "apt-get",
        f"echo \"$*\" >> '{calls}'\n"
        f"case \"$*\" in *' redis-server') echo '#!/bin/sh' > '{server}'; chmod +x '{server}' ;; esac",
    )
    machine.user_is(0)
    found = find(machine)
    assert (found.returncode, found.stdout) == (0, f"{server}\n"), found.stderr
    assert calls.read_text(encoding="utf-8").splitlines()[0] == "update"


def test_when_the_install_fails_its_reason_and_the_way_out_are_told(machine: Machine) -> None:
    machine.script("apt-get", "echo 'E: no network' >&2; exit 100")
    machine.user_is(0)
    found = find(machine)
    assert (found.returncode, found.stdout) == (1, "")
    assert "E: no network" in found.stderr
    assert "sudo apt-get install redis-server" in found.stderr.splitlines()[-1]
