# SPDX-License-Identifier: Apache-2.0

"""`.ci/find-java` against fake Javas and fake package managers, in a PATH with nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

FIND_JAVA = Path(__file__).resolve().parent.parent / ".ci" / "find-java"
TOOLS = ("sh", "cat", "head", "mktemp", "rm", "sed", "tail", "cp")

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


@dataclass
class Machine:
    """A machine made of one folder: its PATH contains only ``bin``."""

    root: Path

    @property
    def bin(self) -> Path:
        return self.root / "bin"

    @property
    def jvm(self) -> Path:
        return self.root / "jvm"

    def script(self, path: Path, text: str) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
        path.chmod(0o755)
        return path

    def java(self, home: str, version_line: str) -> Path:
        """Put a Java under the folder ``home`` and return its home."""
        java_home = self.root / home
        self.script(java_home / "bin" / "java", says(version_line, java_home))
        return java_home

    def on_path(self, java_home: Path) -> None:
        (self.bin / "java").symlink_to(java_home / "bin" / "java")

    def user_is(self, uid: int) -> None:
        self.script(self.bin / "id", f"echo {uid}")

    def find(self, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.bin / "sh"), str(FIND_JAVA)],
            env={"PATH": str(self.bin), "HEADGATE_JVM_FOLDERS": str(self.jvm), **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    new = Machine(tmp_path)
    new.bin.mkdir()
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found, f"this machine has no {tool}"
        (new.bin / tool).symlink_to(os.path.realpath(found))
    new.user_is(1000)
    return new


@pytest.mark.parametrize("version_line", [JAVA_17, JAVA_21, JAVA_25_EARLY])
def test_java_home_is_used_when_it_is_new_enough(machine: Machine, version_line: str) -> None:
    home = machine.java("vendor/jdk", version_line)
    done = machine.find(JAVA_HOME=str(home))
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{home}\n", "")


def test_java_home_comes_before_the_path(machine: Machine) -> None:
    machine.on_path(machine.java("other", JAVA_21))
    home = machine.java("chosen", JAVA_17)
    assert machine.find(JAVA_HOME=str(home)).stdout == f"{home}\n"


def test_a_java_on_the_path_is_followed_through_its_links_to_its_home(machine: Machine) -> None:
    home = machine.java("opt/jdk-17", JAVA_17)
    alternatives = machine.root / "alternatives-java"
    alternatives.symlink_to("opt/jdk-17/bin/java")
    (machine.bin / "java").symlink_to(alternatives)
    assert machine.find().stdout == f"{home}\n"


def test_a_folder_with_spaces_in_its_name_is_found(machine: Machine) -> None:
    home = machine.java("Program Files/jdk 17", JAVA_17)
    assert machine.find(JAVA_HOME=str(home)).stdout == f"{home}\n"


def test_a_wrapper_script_on_the_path_is_asked_where_java_lives(machine: Machine) -> None:
    home = machine.java("real", JAVA_17)
    machine.script(machine.root / "shims" / "java", says(JAVA_17, home))
    (machine.bin / "java").symlink_to(machine.root / "shims" / "java")
    assert machine.find().stdout == f"{home}\n"


@pytest.mark.parametrize("version_line", [JAVA_8, JAVA_11])
def test_an_old_java_is_passed_over_for_a_newer_one_elsewhere(machine: Machine, version_line: str) -> None:
    old = machine.java("old", version_line)
    machine.on_path(old)
    new = machine.java("jvm/java-17", JAVA_17)
    assert machine.find(JAVA_HOME=str(old)).stdout == f"{new}\n"


def test_a_java_home_that_does_not_exist_is_passed_over(machine: Machine) -> None:
    home = machine.java("jdk", JAVA_17)
    machine.on_path(home)
    assert machine.find(JAVA_HOME="/no/such/folder").stdout == f"{home}\n"


def test_with_an_old_java_only_one_line_says_so_and_how_to_get_another(machine: Machine) -> None:
    machine.on_path(machine.java("old", JAVA_11))
    done = machine.find()
    assert done.returncode != 0
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "is version 11" in done.stderr
    assert "17 or later" in done.stderr
    assert "OpenJDK" in done.stderr


def test_a_java_that_does_not_run_is_named(machine: Machine) -> None:
    machine.script(machine.bin / "java", "exit 127")
    done = machine.find()
    assert done.returncode != 0
    assert "does not run" in done.stderr


def test_without_rights_the_package_is_named_and_nothing_is_installed(machine: Machine) -> None:
    machine.script(machine.bin / "apt-get", f"echo called >> '{machine.root}/apt-calls'")
    done = machine.find()
    assert done.returncode != 0
    assert "apt-get install openjdk-17-jre-headless" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (machine.root / "apt-calls").exists()


def fake_apt(machine: Machine, offers: str) -> Path:
    """Create an apt-get whose only package is ``offers``; it installs a Java. Return the Java's home."""
    home = machine.java("prepared/java", JAVA_21)
    calls = machine.root / "apt-calls"
    machine.script(
        machine.bin / "apt-get",
        f"echo \"$*\" >> '{calls}'\n"
        'case "$*" in\n'
        "    update) echo 'Reading package lists...'; exit 0 ;;\n"
        f"    *' {offers}') cp -R '{machine.root}/prepared' '{machine.jvm}' ;;\n"
        "    *) echo 'E: Unable to locate package' >&2; exit 100 ;;\n"
        "esac",
    )
    return home


@pytest.mark.parametrize("offers", ["openjdk-17-jre-headless", "openjdk-21-jre-headless"])
def test_root_on_a_debian_like_machine_gets_a_java_installed(machine: Machine, offers: str) -> None:
    home = fake_apt(machine, offers)
    machine.user_is(0)
    done = machine.find()
    assert (done.returncode, done.stdout) == (0, f"{home}\n"), done.stderr
    calls = (machine.root / "apt-calls").read_text(encoding="utf-8").splitlines()
    assert calls[0] == "update"
    assert calls.count("update") == 1
    assert calls[-1].endswith(offers)


def test_when_the_install_fails_its_reason_and_the_way_out_are_told(machine: Machine) -> None:
    fake_apt(machine, "some-other-package")
    machine.user_is(0)
    done = machine.find()
    assert done.returncode != 0
    assert done.stdout == ""
    assert "Unable to locate package" in done.stderr
    assert "openjdk-17-jre-headless" in done.stderr.splitlines()[-1]
