# SPDX-License-Identifier: Apache-2.0

"""The scripts `.ci/find-...` with fake programs and fake package managers, in a PATH with nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

CI = Path(__file__).resolve().parent.parent / ".ci"
TOOLS = ("sh", "cat", "chmod", "cp", "dirname", "head", "mkdir", "mktemp", "rm", "sed", "tail", "touch")


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

    def script(self, path: str | Path, text: str) -> Path:
        """Put a script into ``bin``, or where the absolute path says."""
        path = self.bin / path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
        path.chmod(0o755)
        return path

    def user_is(self, uid: int) -> None:
        self.script("id", f"echo {uid}")

    def programs(self, folder: str, *names: str) -> Path:
        """Put empty programs into a folder, which is returned."""
        for name in names:
            self.script(self.root / folder / name, "")
        return self.root / folder

    def find(self, name: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a copy of `find-NAME` in the machine's own repository, which looks nowhere outside of the machine."""
        folder = self.root / ".ci"
        folder.mkdir(exist_ok=True)
        for script in (f"find-{name}", "program.sh"):
            text = (CI / script).read_text(encoding="utf-8")
            for root in ("/usr/sbin/", "/sbin/", "/Applications/"):
                text = text.replace(f"\n{root}", f"\n{self.root}{root}").replace(f'"{root}', f'"{self.root}{root}')
            (folder / script).write_text(text, encoding="utf-8")
        folders = {"HEADGATE_JVM_FOLDERS": f"{self.root}/jvm", "HEADGATE_POSTGRES_FOLDERS": f"{self.root}/lib"}
        return subprocess.run(
            [str(self.bin / "sh"), str(folder / f"find-{name}")],
            env={"PATH": str(self.bin), "HOME": str(self.root), **folders, **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def finds(self, name: str, path: Path, **environment: str) -> None:
        """Nothing is on stdout but what was found."""
        found = self.find(name, **environment)
        assert (found.returncode, found.stdout) == (0, f"{path}\n"), found.stderr

    def finds_nothing(self, name: str, **environment: str) -> list[str]:
        """Return the lines on stderr."""
        found = self.find(name, **environment)
        assert found.returncode != 0
        assert found.stdout == ""
        return found.stderr.splitlines()

    @property
    def apt_calls(self) -> list[str]:
        calls = self.root / "apt-calls"
        return calls.read_text(encoding="utf-8").splitlines() if calls.exists() else []


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


# The stderr of `java -version`, as each vendor writes it.
JAVA_8 = 'java version "1.8.0_412"'
JAVA_11 = 'openjdk version "11.0.23" 2024-04-16'
JAVA_17 = 'openjdk version "17.0.15" 2025-04-15'
JAVA_21 = 'java version "21" 2023-09-19 LTS'
JAVA_25_EARLY = 'openjdk version "25-ea" 2025-09-16'


def says(version_line: str, home: Path) -> str:
    """Return the shell lines of a Java that answers like HotSpot, entirely on stderr."""
    return (
        "echo 'Picked up JAVA_TOOL_OPTIONS: -Dsome.version=3' >&2\n"
        f"[ \"$1\" = -version ] || printf '%s\\n' 'Property settings:' '    java.home = {home}' >&2\n"
        f"echo '{version_line}' >&2"
    )


def a_java(machine: Machine, home: str, version_line: str) -> Path:
    """Put a Java under the folder ``home`` and return its home."""
    machine.script(machine.root / home / "bin" / "java", says(version_line, machine.root / home))
    return machine.root / home


@dataclass(frozen=True)
class Sought:
    """What `find-NAME` looks for.

    ``installed`` are the files that the package brings, relative to the machine; ``result`` is what is then printed.
    ``only`` is all that apt-get is called for, if nothing else may be.
    """

    name: str
    variable: str
    what: str
    package: str
    installed: tuple[str, ...]
    result: str
    only: tuple[str, ...] = field(default=())


def a_program(name: str, program: str, package: str, what: str) -> Sought:
    calls = ("update", f"install -y --no-install-recommends {package}")
    variable = {"redis": "REDIS_SERVER", "ip": "IP_COMMAND"}.get(name, name.upper())
    return Sought(name, variable, what, package, (f"bin/{program}",), f"bin/{program}", calls)


JAVA = Sought("java", "JAVA_HOME", "Java", "openjdk-17-jre-headless", ("jvm/new/bin/java",), "jvm/new")
POSTGRES = Sought(
    *("postgres", "POSTGRES_BIN", "a PostgreSQL server", "postgresql"),
    ("lib/15/bin/initdb", "lib/15/bin/postgres"),
    "lib/15/bin",
)
PROGRAMS = (
    a_program("redis", "redis-server", "redis-server", "a Redis server"),
    a_program("pgbouncer", "pgbouncer", "pgbouncer", "PgBouncer"),
    a_program("chromium", "chromium", "chromium fonts-liberation", "Chromium"),
    a_program("prometheus", "prometheus", "prometheus", "Prometheus"),
    a_program("ip", "ip", "iproute2", "the command ip"),
)
of_all = pytest.mark.parametrize("sought", [JAVA, POSTGRES, *PROGRAMS], ids=lambda sought: sought.name)
of_programs = pytest.mark.parametrize("sought", PROGRAMS, ids=lambda sought: sought.name)


def an_apt(machine: Machine, sought: Sought, package: str = "") -> None:
    """Create an apt-get that notes its calls, and whose only package brings what is sought."""
    template = machine.script(machine.root / "template", says(JAVA_21, machine.root / sought.result))
    made = "; ".join(
        f"mkdir -p '{(machine.root / path).parent}'; cp '{template}' '{machine.root / path}'"
        for path in sought.installed
    )
    machine.script(
        "apt-get",
        f"echo \"$*\" >> '{machine.root}/apt-calls'\n"
        f"case \"$*\" in update) ;; *-common) ;; *' {package or sought.package}') {made} ;; "
        "*) echo 'E: Unable to locate package' >&2; exit 100 ;; esac",
    )


# --- in all scripts that can install with a package manager ----------------------------------------------------------


@of_all
def test_the_environment_comes_before_the_path_and_the_usual_folders(machine: Machine, sought: Sought) -> None:
    for path in sought.installed:
        machine.script(machine.root / path, says(JAVA_21, machine.root / sought.result))
    machine.finds(sought.name, machine.root / sought.result)
    for path in sought.installed:
        machine.script(machine.root / "chosen" / path, says(JAVA_17, machine.root / "chosen" / sought.result))
    chosen = machine.root / "chosen" / sought.result
    machine.finds(sought.name, chosen, **{sought.variable: str(chosen)})


@of_all
def test_without_rights_one_line_says_how_to_get_it_and_nothing_is_installed(machine: Machine, sought: Sought) -> None:
    an_apt(machine, sought)
    (line,) = machine.finds_nothing(sought.name)
    if sought is JAVA:
        assert line == (
            "headgate: Spark needs Java 17 or later, and none was found. "
            "To get it: sudo apt-get install openjdk-17-jre-headless (or 21)"
        )
    else:
        assert line == (
            f"headgate: tests need {sought.what}, and none was found. To get it: sudo apt-get install {sought.package}"
        )
    assert machine.apt_calls == []


@pytest.mark.parametrize(
    ("sought", "package"),
    [*((sought, sought.package) for sought in (JAVA, POSTGRES, *PROGRAMS)), (JAVA, "openjdk-21-jre-headless")],
    ids=lambda value: getattr(value, "name", value),
)
def test_root_on_a_debian_like_machine_gets_it_installed(machine: Machine, sought: Sought, package: str) -> None:
    an_apt(machine, sought, package)
    machine.user_is(0)
    machine.finds(sought.name, machine.root / sought.result)
    assert machine.apt_calls[0] == "update"
    assert machine.apt_calls.count("update") == 1
    assert machine.apt_calls[-1].endswith(package)
    assert not sought.only or tuple(machine.apt_calls) == sought.only


@of_all
def test_when_the_install_fails_its_reason_and_the_way_out_are_told(machine: Machine, sought: Sought) -> None:
    an_apt(machine, sought, "some-other-package")
    machine.user_is(0)
    lines = machine.finds_nothing(sought.name)
    assert "E: Unable to locate package" in lines
    assert f"sudo apt-get install {sought.package}" in lines[-1]


# --- programs --------------------------------------------------------------------------------------------------------


@of_programs
def test_without_a_package_manager_the_line_names_the_variable(machine: Machine, sought: Sought) -> None:
    (line,) = machine.finds_nothing(sought.name)
    assert line.endswith(f"To get it: install it and set {sought.variable} to its path")


@of_programs
def test_what_was_not_found_is_not_installed_again(machine: Machine, sought: Sought) -> None:
    an_apt(machine, sought)
    machine.user_is(0)
    assert len(machine.finds_nothing(sought.name, **{sought.variable: ""})) == 1
    assert machine.apt_calls == []


@pytest.mark.parametrize(
    "place",
    [
        ".cache/ms-playwright/chromium-1200/chrome-linux64/chrome",
        "Library/Caches/ms-playwright/chromium-1200/chrome-mac-arm64/Chrome for Testing.app/Contents/MacOS/Chrome",
        "Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    ],
)
def test_a_browser_of_playwright_or_macos_is_found(machine: Machine, place: str) -> None:
    machine.finds("chromium", machine.script(machine.root / place, ""))


def test_the_newest_postgres_in_the_usual_folders_that_is_whole_is_found(machine: Machine) -> None:
    machine.programs("lib/13/bin", "initdb", "postgres")
    newest = machine.programs("lib/17/bin", "initdb", "postgres")
    machine.programs("lib/18/bin", "postgres")
    machine.finds("postgres", newest)


# --- Java ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version_line", [JAVA_17, JAVA_21, JAVA_25_EARLY])
def test_a_java_that_is_new_enough_is_used_without_a_word(machine: Machine, version_line: str) -> None:
    home = a_java(machine, "Program Files/jdk 17", version_line)
    (machine.bin / "java").symlink_to(a_java(machine, "other", JAVA_21) / "bin" / "java")
    machine.finds("java", home, JAVA_HOME=str(home))
    assert machine.find("java", JAVA_HOME=str(home)).stderr == ""


def test_a_java_on_the_path_is_followed_through_its_links_to_its_home(machine: Machine) -> None:
    home = a_java(machine, "opt/jdk-17", JAVA_17)
    alternatives = machine.root / "alternatives-java"
    alternatives.symlink_to("opt/jdk-17/bin/java")
    (machine.bin / "java").symlink_to(alternatives)
    machine.finds("java", home)
    machine.finds("java", home, JAVA_HOME="/no/such/folder")


def test_a_wrapper_script_on_the_path_is_asked_where_java_lives(machine: Machine) -> None:
    home = a_java(machine, "real", JAVA_17)
    machine.script("java", says(JAVA_17, home))
    machine.finds("java", home)


@pytest.mark.parametrize("version_line", [JAVA_8, JAVA_11])
def test_an_old_java_is_passed_over_for_a_newer_one_elsewhere(machine: Machine, version_line: str) -> None:
    old = a_java(machine, "old", version_line)
    (machine.bin / "java").symlink_to(old / "bin" / "java")
    machine.finds("java", a_java(machine, "jvm/java-17", JAVA_17), JAVA_HOME=str(old))


@pytest.mark.parametrize(
    ("script", "reason"), [(says(JAVA_11, Path("/old")), "is version 11"), ("exit 127", "does not run")]
)
def test_with_an_unusable_java_only_one_line_says_so(machine: Machine, script: str, reason: str) -> None:
    machine.script("java", script)
    (line,) = machine.finds_nothing("java")
    assert reason in line
    assert "17 or later" in line
    assert "OpenJDK" in line


# --- Azurite, which npm installs -------------------------------------------------------------------------------------

AZURITE = ".azurite/node_modules/.bin/azurite-blob"


def an_npm(machine: Machine) -> str:
    """The lines of an npm that notes its calls and installs Azurite."""
    made = machine.root / AZURITE
    return (
        f"echo \"$*\" >> '{machine.root}/npm-calls'\n"
        f"mkdir -p '{made.parent}' && echo '#!/bin/sh' > '{made}' && chmod +x '{made}'"
    )


def test_the_environment_comes_before_the_path_for_azurite(machine: Machine) -> None:
    machine.finds("azurite", machine.script("azurite-blob", "exit 0"))
    chosen = machine.programs("chosen", "azurite-blob") / "azurite-blob"
    machine.finds("azurite", chosen, AZURITE_BLOB=str(chosen))


def test_without_npm_one_line_says_how_to_get_azurite(machine: Machine) -> None:
    (line,) = machine.finds_nothing("azurite")
    assert line.startswith("headgate: tests need Azurite, and none was found. To get it: npm install --global azurite@")


def test_azurite_that_was_not_found_is_not_looked_for_again(machine: Machine) -> None:
    machine.script("npm", an_npm(machine))
    assert len(machine.finds_nothing("azurite", AZURITE_BLOB="")) == 1


def test_npm_installs_azurite_once(machine: Machine) -> None:
    machine.script("npm", an_npm(machine))
    for _ in range(2):
        machine.finds("azurite", machine.root / AZURITE)
    assert len((machine.root / "npm-calls").read_text(encoding="utf-8").splitlines()) == 1


def test_root_on_a_debian_like_machine_gets_npm_first(machine: Machine) -> None:
    machine.script(machine.root / "npm", an_npm(machine))
    machine.script(
        "apt-get",
        f"echo \"$*\" >> '{machine.root}/apt-calls'\n"
        f"case \"$*\" in *' npm') cp '{machine.root}/npm' '{machine.bin}/npm' ;; esac",
    )
    machine.user_is(0)
    machine.finds("azurite", machine.root / AZURITE)
    assert machine.apt_calls[0] == "update"


def test_when_npm_fails_its_reason_and_the_way_out_are_told(machine: Machine) -> None:
    machine.script("npm", "echo 'npm error no network' >&2; exit 1")
    lines = machine.finds_nothing("azurite")
    assert "npm error no network" in lines
    assert "npm install --global azurite@" in lines[-1]


# --- Python ----------------------------------------------------------------------------------------------------------


def a_python(machine: Machine, name: str, *, good: bool) -> Path:
    """An interpreter called ``name``: the running one, or one that fails at everything."""
    return machine.script(name, f'exec "{sys.executable}" "$@"' if good else "exit 1")


def test_python3_is_taken_when_it_is_new_enough_unless_another_is_asked_for(machine: Machine) -> None:
    python3, other = a_python(machine, "python3", good=True), a_python(machine, "python3.12", good=True)
    machine.finds("python", python3)
    machine.finds("python", other, PYTHON=str(other))


def test_a_newer_one_by_its_full_name_is_taken_where_python3_is_too_old(machine: Machine) -> None:
    a_python(machine, "python3", good=False)
    machine.finds("python", a_python(machine, "python3.12", good=True))


def test_without_any_python_one_line_says_what_is_needed(machine: Machine) -> None:
    a_python(machine, "python3", good=False)
    (line,) = machine.finds_nothing("python")
    assert "3.11" in line
    assert "python3-venv" in line
