"""What `pip install` brings: the packages whole, and nothing of what is for development."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("actors", "headgate", "protocol", "spark_bridge")
TRAVELS = {".py", ".java", ".typed"}


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The paths in a freshly built wheel, but for its own metadata."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("headgate-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def test_the_wheel_holds_the_packages_and_no_others(wheel_names: set[str]) -> None:
    assert {name.split("/")[0] for name in wheel_names} == set(PACKAGES)


def test_every_source_of_the_packages_is_in_the_wheel(wheel_names: set[str]) -> None:
    sources = {
        str(file.relative_to(ROOT))
        for package in PACKAGES
        for file in (ROOT / package).rglob("*")
        if file.suffix in TRAVELS
    }
    assert wheel_names == sources


def test_the_java_source_of_the_relay_travels(wheel_names: set[str]) -> None:
    assert any(name.startswith("spark_bridge/bridge/relay/") and name.endswith(".java") for name in wheel_names)


def test_each_package_says_that_it_is_typed(wheel_names: set[str]) -> None:
    assert {f"{package}/py.typed" for package in PACKAGES} <= wheel_names
