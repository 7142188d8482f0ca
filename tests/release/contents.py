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
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PACKAGES = ("actors", "headgate", "protocol", "spark_bridge")
TO_BUILD_AND_TEST = (
    *(".ci/find-java", ".ci/find-python", ".ci/run", "CHANGELOG.md", "LICENSE", "Makefile", "README.md"),
    *(
        "pyproject.toml",
        "requirements.lock",
        "requirements-release.lock",
        "requirements-run.lock",
        "requirements-spark-4.3.lock",
    ),
    *("benchmarks/__init__.py", "docs/contract.md", "mkdocs.yml", "examples/squares.py", "tests/__init__.py"),
    *(f"{package}/py.typed" for package in PACKAGES),
)
LEFTOVERS = (
    "__pycache__",
    ".venv",
    ".git/",
    ".mypy_cache",
    ".pytest_cache",
    ".ruff_cache",
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


def pins_of(*locks: str) -> dict[str, str]:
    """Map each package of these locks to its version. If that depends on the version of Python: to the last one."""
    return dict(re.findall(r"^([\w.-]+)==([^ ;]+)", "\n".join(locks), re.MULTILINE))


def required_by(wheel: Path) -> list[Requirement]:
    """What a wheel needs at run time without any extra."""
    with zipfile.ZipFile(wheel) as archive:
        (path,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(path).decode())
    needed = map(Requirement, metadata.get_all("Requires-Dist", []))
    return [one for one in needed if one.marker is None or one.marker.evaluate({"extra": ""})]


def sbom_problems(
    sbom: dict[str, Any], required: list[Requirement], version: str, pins: dict[str, str]
) -> Iterator[str]:
    """Find the problems of a CycloneDX document: it lists what is required, what that needs in turn, and no more."""
    product = sbom["metadata"]["component"]
    if (product["name"], product.get("version")) != ("headgate", version):
        yield f"the SBOM is of {product['name']} {product.get('version')}, not of headgate {version}"
    components = {one["bom-ref"]: one for one in sbom.get("components", [])}
    listed = {canonicalize_name(one["name"]): one.get("version") for one in components.values()}
    for one in required:
        if canonicalize_name(one.name) not in listed:
            yield f"the SBOM lacks {one.name}"
    for name, found in listed.items():
        if found != pins.get(name):
            yield f"the SBOM has {name} {found}, the lock has {pins.get(name)}"
    needs = {one["ref"]: one.get("dependsOn", []) for one in sbom["dependencies"]}
    reached, new = set[str](), {product["bom-ref"]}
    while new:
        reached |= new
        new = {ref for one in new for ref in needs.get(one, [])} - reached
    for ref, component in components.items():
        if ref not in reached:
            yield f"the SBOM has {ref}, which Headgate does not need"
        yield from (f"the SBOM has no {field} of {ref}" for field in ("purl", "licenses") if not component.get(field))


def changelog_problems(changelog: str, version: str) -> Iterator[str]:
    if not re.search(rf"^## \[{re.escape(version)}\]", changelog, re.MULTILINE):
        yield f"CHANGELOG.md has no entry for {version}"
