# SPDX-License-Identifier: Apache-2.0

"""The scripts around `.ci/program.sh` with fake programs and fake package managers, in a PATH with nothing else."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.test_find_postgres import Machine

CI = Path(__file__).resolve().parent.parent / ".ci"


@dataclass(frozen=True)
class Sought:
    """``name``: of the script, `find-name`, and of the program. ``package``: Debian's."""

    name: str
    program: str
    variable: str
    package: str
    what: str


ALL = (
    Sought("redis", "redis-server", "REDIS_SERVER", "redis-server", "a Redis server"),
    Sought("chromium", "chromium", "CHROMIUM", "chromium fonts-liberation", "Chromium"),
    Sought("prometheus", "prometheus", "PROMETHEUS", "prometheus", "Prometheus"),
    Sought("ip", "ip", "IP_COMMAND", "iproute2", "the command ip"),
)
CHROMIUM = ALL[1]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.fixture(params=ALL, ids=lambda sought: sought.name)
def sought(request: pytest.FixtureRequest) -> Sought:
    found: Sought = request.param
    return found


def find(machine: Machine, sought: Sought, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a copy of the script that looks nowhere outside of the machine."""
    folder = machine.root / ".ci"
    folder.mkdir(exist_ok=True)
    for name in (f"find-{sought.name}", "program.sh"):
        text = (CI / name).read_text(encoding="utf-8")
        for root in ("/usr/sbin/", "/sbin/", "/Applications/"):
            text = text.replace(f"\n{root}", f"\n{machine.root}{root}").replace(f'"{root}', f'"{machine.root}{root}')
        (folder / name).write_text(text, encoding="utf-8")
    return machine.run(folder / f"find-{sought.name}", HOME=str(machine.root), **environment)


def test_the_environment_comes_before_the_path(machine: Machine, sought: Sought) -> None:
    machine.script(sought.program, "exit 0")
    assert find(machine, sought).stdout == f"{machine.bin}/{sought.program}\n"
    chosen = machine.server("chosen", sought.program) / sought.program
    assert find(machine, sought, **{sought.variable: str(chosen)}).stdout == f"{chosen}\n"


def test_without_rights_one_line_says_how_to_get_it(machine: Machine, sought: Sought) -> None:
    machine.script("apt-get", "exit 1")
    found = find(machine, sought)
    assert (found.returncode, found.stdout) == (1, "")
    assert found.stderr.splitlines() == [
        f"headgate: tests need {sought.what}, and none was found. To get it: sudo apt-get install {sought.package}"
    ]


def test_without_a_package_manager_the_line_names_the_variable(machine: Machine, sought: Sought) -> None:
    (line,) = find(machine, sought).stderr.splitlines()
    assert line.endswith(f"To get it: install it and set {sought.variable} to its path")


def test_root_on_a_debian_like_machine_gets_it_installed(machine: Machine, sought: Sought) -> None:
    calls = machine.root / "calls"
    program = machine.bin / sought.program
    machine.script(
        "apt-get",
        f"echo \"$*\" >> '{calls}'\n"
        f"case \"$*\" in *' {sought.package}') echo '#!/bin/sh' > '{program}'; chmod +x '{program}' ;; esac",
    )
    machine.user_is(0)
    found = find(machine, sought)
    assert (found.returncode, found.stdout) == (0, f"{program}\n"), found.stderr
    assert calls.read_text(encoding="utf-8").splitlines() == [
        "update",
        f"install -y --no-install-recommends {sought.package}",
    ]


def test_what_was_not_found_is_not_installed_again(machine: Machine, sought: Sought) -> None:
    machine.script("apt-get", f"touch '{machine.root}/called'")
    machine.user_is(0)
    found = find(machine, sought, **{sought.variable: ""})
    assert (found.returncode, found.stdout) == (1, "")
    assert len(found.stderr.splitlines()) == 1
    assert not (machine.root / "called").exists()


def test_when_the_install_fails_its_reason_and_the_way_out_are_told(machine: Machine, sought: Sought) -> None:
    machine.script("apt-get", "echo 'E: no network' >&2; exit 100")
    machine.user_is(0)
    found = find(machine, sought)
    assert (found.returncode, found.stdout) == (1, "")
    assert "E: no network" in found.stderr
    assert f"sudo apt-get install {sought.package}" in found.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    "place",
    [
        ".cache/ms-playwright/chromium-1200/chrome-linux64/chrome",
        "Library/Caches/ms-playwright/chromium-1200/chrome-mac-arm64/Chrome for Testing.app/Contents/MacOS/Chrome",
        "Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    ],
)
def test_a_browser_of_playwright_or_macos_is_found(machine: Machine, place: str) -> None:
    program = machine.root / place
    machine.server(str(Path(place).parent), program.name)
    found = find(machine, CHROMIUM)
    assert (found.returncode, found.stdout) == (0, f"{program}\n"), found.stderr
