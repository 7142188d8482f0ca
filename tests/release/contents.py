# SPDX-License-Identifier: Apache-2.0

"""Required and forbidden contents of the wheel and the source distribution."""

from __future__ import annotations

import re
import tarfile
import zipfile
from collections.abc import Iterator
from email.message import Message
from email.parser import Parser
from pathlib import Path

PACKAGES = ("actors", "headgate", "protocol", "spark_bridge")
TO_BUILD_AND_TEST = (
    *(".ci/find-java", ".ci/find-python", ".ci/run", "CHANGELOG.md", "LICENSE", "Makefile", "README.md"),
    *("pyproject.toml", "requirements.lock", "requirements-release.lock", "requirements-spark-4.3.lock"),
    *("benchmarks/__init__.py", "docs/contract.md", "mkdocs.yml", "examples/squares.py", "tests/__init__.py"),
    *(f"{package}/py.typed" for package in PACKAGES),
)
LEFTOVERS = (
    "__pycache__",
    ".venv",
    ".git/",
    "cache",
    ".hypothesis",
    ".log",
    "spark-warehouse",
    "benchmarks/out",
    ".pyc",
)
CLASSIFIER = "Programming Language :: Python :: "


def supported_pythons(pyproject: str) -> list[str]:
    """The versions of Python that the classifiers name."""
    return re.findall(rf'"{CLASSIFIER}(3\.\d+)"', pyproject)


def version_of(init: str) -> str:
    found = re.search(r'^__version__ = "(.+)"$', init, re.MULTILINE)
    return found.group(1) if found else ""


def wheel_problems(wheel: Path) -> Iterator[str]:
    """Find the problems of a wheel, one per line."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (path,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(path).decode())
        version = version_of(archive.read("headgate/__init__.py").decode())
    info = path.rpartition("/")[0]
    tops = {name.partition("/")[0] for name in names} - {info}
    if tops != set(PACKAGES):
        yield f"the wheel brings {', '.join(sorted(tops))}, not {', '.join(PACKAGES)}"
    for needed in (*(f"{package}/py.typed" for package in PACKAGES), f"{info}/licenses/LICENSE"):
        if needed not in names:
            yield f"the wheel lacks {needed}"
    yield from metadata_problems(metadata, version)


def metadata_problems(metadata: Message, version: str) -> Iterator[str]:
    """``version`` is that of ``headgate.__version__``."""
    if metadata["Version"] != version:
        yield f"the metadata has version {metadata['Version']}, headgate.__version__ is {version!r}"
    classifiers = metadata.get_all("Classifier", [])
    versions = [one.removeprefix(CLASSIFIER) for one in classifiers if re.fullmatch(rf"{CLASSIFIER}3\.\d+", one)]
    if metadata["Requires-Python"] != f">={versions[0] if versions else None}":
        yield f"Requires-Python is {metadata['Requires-Python']}, the classifiers begin with {versions[:1]}"
    if "Typing :: Typed" not in classifiers:
        yield "the classifiers do not say Typing :: Typed"
    for field in ("Summary", "License-Expression", "Description-Content-Type", "Keywords"):
        if not metadata[field]:
            yield f"the metadata has no {field}"


def sdist_problems(sdist: Path) -> Iterator[str]:
    """Find the problems of a source distribution."""
    names = sdist_names(sdist)
    for needed in TO_BUILD_AND_TEST:
        if needed not in names:
            yield f"the source distribution lacks {needed}"
    for name in sorted(names):
        if any(leftover in name for leftover in LEFTOVERS):
            yield f"the source distribution holds {name}, which a tool left behind"


def sdist_names(sdist: Path) -> set[str]:
    """The paths of its files, without the top folder."""
    with tarfile.open(sdist) as archive:
        return {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}


def changelog_problems(changelog: str, version: str) -> Iterator[str]:
    if not re.search(rf"^## \[{re.escape(version)}\]", changelog, re.MULTILINE):
        yield f"CHANGELOG.md has no entry for {version}"
