# SPDX-License-Identifier: Apache-2.0

"""The contents of `pip install`, and the parts of `make release` that need neither Spark nor a network."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.release.__main__ import TYPED_PROGRAM, StepFailed, run, step
from tests.release.contents import (
    PACKAGES,
    changelog_problems,
    pins_of,
    required_by,
    sbom_problems,
    sdist_problems,
    supported_pythons,
    version_of,
    wheel_problems,
)
from tests.release.pythons import find_python

ROOT = Path(__file__).resolve().parent.parent
TRAVELS = {".py", ".java", ".jar", ".typed", ".html", ".js", ".css"}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a freshly built wheel and source distribution."""
    folder = tmp_path_factory.mktemp("dist")
    run([sys.executable, "-m", "hatchling", "build", "-d", folder])
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (wheel,) = built.glob("headgate-*.whl")
    return wheel


@pytest.fixture(scope="module")
def sdist(built: Path) -> Path:
    (sdist,) = built.glob("headgate-*.tar.gz")
    return sdist


def test_nothing_is_wrong_with_what_is_built(wheel: Path, sdist: Path) -> None:
    assert [*wheel_problems(wheel), *sdist_problems(sdist)] == []


def test_every_source_of_the_packages_is_in_the_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    files = (file for package in PACKAGES for file in (ROOT / package).rglob("*") if file.suffix in TRAVELS)
    examples = {f"headgate/examples/{file.name}" for file in (ROOT / "examples").glob("[!_]*.py")}
    assert names == {str(file.relative_to(ROOT)) for file in files} | examples
    assert any(name.startswith("spark_bridge/bridge/relay/") and name.endswith(".java") for name in names)


def test_every_source_in_the_wheel_names_its_license(wheel: Path) -> None:
    """For Java and what runs in a browser too; ruff checks all Python of the repository."""
    with zipfile.ZipFile(wheel) as archive:
        sources = {
            name: archive.read(name) for name in archive.namelist() if name.endswith((".py", ".java", ".js", ".css"))
        }
    named = tuple(b"%s SPDX-License-Identifier: Apache-2.0" % sign for sign in (b"#", b"//", b"/*"))
    assert [name for name, source in sources.items() if not source.startswith(named)] == []


@pytest.mark.long  # mypy reads all of PySpark; make release does it for each Python, with pyright too
def test_a_users_program_passes_mypy_with_the_wheel_installed(wheel: Path, tmp_path: Path) -> None:
    """Check it outside the repository, where only ``py.typed`` and ``__all__`` say what may be imported."""
    venv.create(tmp_path / "env")
    python = tmp_path / "env" / "bin" / "python"
    (site,) = (tmp_path / "env" / "lib").glob("python3.*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    (site / "what_it_needs.pth").write_text(sysconfig.get_path("purelib"))
    program = shutil.copy(TYPED_PROGRAM, tmp_path)
    run([sys.executable, "-m", "mypy", "--strict", "--python-executable", python, program], cwd=tmp_path)


WORLDS = """
import pytest
from headgate import OperatorCoordinator

class Doubling(OperatorCoordinator):
    async def handle_request(self, subtask, attempt, request):
        return 2 * request

    async def close(self):
        print("closed")

{marks}
async def test_a_world(headgate_world):
    for request in (1, 2):
        world = await headgate_world(Doubling, parallelism=1)
        (task,) = await world.launch_all()
        answer = task.request(request)
        await world.settle()
        assert answer.value == 2 * request
"""
FUNCTION_SCOPE = ["-o", "asyncio_default_fixture_loop_scope=function"]  # otherwise pytest-asyncio warns
UNUSED = """
import sys

def test_that_asks_for_nothing():
    assert not {"actors", "protocol", "pyspark", "py4j"} & sys.modules.keys()
"""
NOT_ASYNC = """
def test_that_is_not_async(headgate_world):
    headgate_world()
"""


@pytest.mark.parametrize(
    ("options", "program", "told"),
    [
        ([*FUNCTION_SCOPE, "-o", "asyncio_mode=auto"], WORLDS.format(marks=""), ["closed\nclosed", "1 passed"]),
        (FUNCTION_SCOPE, WORLDS.format(marks="@pytest.mark.asyncio"), ["closed\nclosed", "1 passed"]),
        (
            ["-p", "no:asyncio"],
            WORLDS.format(marks="@pytest.mark.parametrize('anyio_backend', ['asyncio'])\n@pytest.mark.anyio"),
            ["closed\nclosed", "1 passed"],
        ),
        (FUNCTION_SCOPE, UNUSED, ["1 passed"]),
        (FUNCTION_SCOPE, NOT_ASYNC, ["test_that_is_not_async is not async", "1 error"]),
    ],
    ids=["auto", "strict", "anyio", "unused", "not async"],
)
def test_pytest_finds_the_fixtures_of_an_installed_wheel(
    wheel: Path, tmp_path: Path, options: list[str], program: str, told: list[str]
) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    (tmp_path / "test_program.py").write_text(program, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "pytest", "-s", "-p", "no:cacheprovider", *options, "test_program.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site"), "PYTEST_ADDOPTS": ""},
    )  # fmt: skip
    assert [text for text in told if text not in done.stdout] == [], done.stdout + done.stderr


@pytest.mark.parametrize(
    ("without", "problem"),
    [
        ("actors/py.typed", "the wheel lacks actors/py.typed"),
        ("protocol/", "the wheel brings actors, headgate, spark_bridge, not actors, headgate, protocol, spark_bridge"),
        ("headgate-{}.dist-info/licenses/", "the wheel lacks headgate-{}.dist-info/licenses/LICENSE"),
    ],
)
def test_a_wheel_that_lacks_something_is_refused(wheel: Path, tmp_path: Path, without: str, problem: str) -> None:
    version = wheel.name.split("-")[1]
    lesser = tmp_path / wheel.name
    with zipfile.ZipFile(wheel) as archive, zipfile.ZipFile(lesser, "w") as copy:
        for name in archive.namelist():
            if not name.startswith(without.format(version)):
                copy.writestr(name, archive.read(name))
    assert problem.format(version) in list(wheel_problems(lesser))


def test_a_wheel_with_two_versions_is_refused(wheel: Path, tmp_path: Path) -> None:
    other = tmp_path / wheel.name
    with zipfile.ZipFile(wheel) as archive, zipfile.ZipFile(other, "w") as copy:
        for name in archive.namelist():
            text = archive.read(name)
            copy.writestr(name, b'__version__ = "9.9"\n' if name == "headgate/__init__.py" else text)
    (problem,) = wheel_problems(other)
    assert problem.endswith("headgate.__version__ is '9.9'")


def test_a_source_distribution_with_leftovers_is_refused(tmp_path: Path) -> None:
    cache = tmp_path / "x.pyc"
    cache.touch()
    with tarfile.open(tmp_path / "headgate.tar.gz", "w:gz") as archive:
        archive.add(cache, "headgate-1/tests/__pycache__/x.pyc")
    problems = list(sdist_problems(tmp_path / "headgate.tar.gz"))
    assert "the source distribution lacks pyproject.toml" in problems
    assert "the source distribution holds tests/__pycache__/x.pyc, which a tool left behind" in problems


def component(name: str, version: str) -> dict[str, Any]:
    license_of = [{"license": {"id": "MIT"}}]
    return {
        "bom-ref": f"{name}=={version}",
        "name": name,
        "version": version,
        "purl": f"pkg:pypi/{name}",
        "licenses": license_of,
    }


def sbom_of(product_version: str = "1.0") -> dict[str, Any]:
    return {
        "metadata": {"component": {"bom-ref": "root-component", "name": "headgate", "version": product_version}},
        "components": [component("anyio", "4.1"), component("typing_extensions", "4.2")],
        "dependencies": [
            {"ref": "root-component", "dependsOn": ["anyio==4.1"]},
            {"ref": "anyio==4.1", "dependsOn": ["typing_extensions==4.2"]},
            {"ref": "typing_extensions==4.2"},
        ],
    }


def problems_of(sbom: dict[str, Any]) -> list[str]:
    return list(sbom_problems(sbom, [Requirement("anyio>=4")], "1.0", {"anyio": "4.1", "typing-extensions": "4.2"}))


def test_an_sbom_lists_what_the_wheel_needs_and_no_more() -> None:
    assert problems_of(sbom_of()) == []
    assert problems_of(sbom_of("0.9")) == ["the SBOM is of headgate 0.9, not of headgate 1.0"]
    sbom = sbom_of()
    sbom["components"] = [component("pip", "26.0")]
    assert problems_of(sbom) == [
        "the SBOM lacks anyio",
        "the SBOM has pip 26.0, the lock has None",
        "the SBOM has pip==26.0, which Headgate does not need",
    ]
    sbom = sbom_of()
    sbom["components"][1] = component("typing_extensions", "4.2") | {"version": "4.3", "licenses": []}
    assert problems_of(sbom) == [
        "the SBOM has typing-extensions 4.3, the lock has 4.2",
        "the SBOM has no licenses of typing_extensions==4.2",
    ]


def test_the_wheel_requires_the_dependencies_of_the_project_without_its_extras(wheel: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["optional-dependencies"]
    assert sorted(map(str, required_by(wheel))) == sorted(str(Requirement(one)) for one in project["dependencies"])


def test_no_requirement_replaces_what_a_platform_has(wheel: Path) -> None:
    """Spark comes with its own extras alone, and no other extra asks for less than the newest version of a package."""
    with zipfile.ZipFile(wheel) as archive:
        (path,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(path).decode())
    extras: dict[str, list[Requirement]] = {}
    for one in map(Requirement, metadata.get_all("Requires-Dist", [])):
        named = re.search(r"extra == [\"']([\w-]+)", str(one.marker))
        extras.setdefault(named[1] if named else "", []).append(one)
    sparks = {extra for extra, needed in extras.items() if any("spark" in one.name for one in needed)}
    assert sparks == {"pyspark", "pyspark-client"}
    bounded = {
        (extra, one.name)
        for extra in extras.keys() - sparks - {""}
        for one in extras[extra]
        if any(clause.operator != ">=" for clause in one.specifier)
    }
    assert bounded == set()


def test_the_wheel_brings_the_command_and_the_fixtures(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (path,) = (name for name in archive.namelist() if name.endswith(".dist-info/entry_points.txt"))
        points = archive.read(path).decode()
    assert points == (
        "[console_scripts]\nheadgate = spark_bridge.command:main\n\n[pytest11]\nheadgate = headgate._pytest\n"
    )


def test_the_pins_of_a_lock_are_its_versions() -> None:
    lock = "# by a tool\nanyio==4.1 \\\n    --hash=sha256:00\n    # via headgate\nuvloop==1.0 ; os_name == 'posix' \\\n"
    assert pins_of(lock, "pyspark==4.3.0 \\\n") == {"anyio": "4.1", "uvloop": "1.0", "pyspark": "4.3.0"}


def test_the_version_has_its_entry_in_the_changelog() -> None:
    version = version_of((ROOT / "headgate" / "__init__.py").read_text(encoding="utf-8"))
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert version
    assert list(changelog_problems(changelog, version)) == []
    assert list(changelog_problems(changelog, "9.9")) == ["CHANGELOG.md has no entry for 9.9"]


def test_the_supported_pythons_are_those_of_the_classifiers() -> None:
    assert supported_pythons((ROOT / "pyproject.toml").read_text(encoding="utf-8")) == ["3.11", "3.12", "3.13", "3.14"]


LOCKS = sorted(ROOT.glob("requirements*.lock"))
PINNED = re.compile(r"^([\w.-]+)==([^ ;]+)[^\n]*\\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", re.MULTILINE)


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.name)
def test_every_requirement_of_a_lock_has_one_version_and_hashes(lock: Path) -> None:
    text = lock.read_text(encoding="utf-8")
    assert PINNED.search(text)
    others = [line for line in PINNED.sub("", text).splitlines() if not line.lstrip().startswith("#")]
    assert "".join(others) == ""


def test_the_locks_have_what_the_project_asks_for() -> None:
    """If this fails, run ``make lock``."""
    pins: dict[str, set[str]] = {}
    for lock in LOCKS:
        for name, version, _ in PINNED.findall(lock.read_text(encoding="utf-8")):
            pins.setdefault(name, set()).add(version)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wanted = [*project["build-system"]["requires"], *project["project"]["dependencies"]]
    wanted += project["project"]["optional-dependencies"]["pyspark"]
    wanted += [one for group in project["dependency-groups"].values() for one in group]
    for one in map(Requirement, wanted):
        versions = pins.get(canonicalize_name(one.name), set())
        assert versions, f"no lock has {one.name}"
        assert all(version in one.specifier for version in versions), f"{one} is not {versions}"


def test_the_small_environment_has_what_headgate_needs_of_the_large_one_and_what_builds_it() -> None:
    """``make run`` is the first command of a new user, who waits for each package."""
    small, large = (
        pins_of((ROOT / name).read_text(encoding="utf-8")) for name in ("requirements-run.lock", "requirements.lock")
    )
    assert small.items() <= large.items()
    assert {"anyio", "fsspec", "msgpack", "structlog", "py4j"} <= small.keys()
    assert not {"grpcio", "numpy", "pandas", "pyarrow", "pytest"} & small.keys()
    assert len(small) < len(large) / 5


def test_the_makefile_and_the_locks_name_the_same_versions_of_spark() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = re.findall(r"^(?:OTHER_SPARKS|SPARK) := (.+)$", makefile, re.MULTILINE)
    locked = [lock.stem.removeprefix("requirements-spark-") for lock in LOCKS if "spark" in lock.name]
    assert sorted(" ".join(named).split()) == locked


def put_python(folder: Path, *, works: bool) -> Path:
    folder.mkdir(parents=True)
    python = folder / "python{}.{}".format(*sys.version_info)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n' if works else "#!/bin/sh\nexit 127\n")
    python.chmod(0o755)
    return python


def test_a_python_is_found_behind_a_shim_that_leads_nowhere(tmp_path: Path) -> None:
    version = "{}.{}".format(*sys.version_info)
    shim = put_python(tmp_path / "shims", works=False)
    installed = put_python(tmp_path / ".pyenv" / "versions" / f"{version}.1" / "bin", works=True)
    assert find_python(version, [str(shim.parent)], tmp_path) == installed
    assert find_python("3.99", [str(shim.parent)], tmp_path) is None


def test_a_step_that_fails_says_so_and_shows_what_the_command_printed(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> str:
        return run([sys.executable, "-c", "print('the reason'); raise SystemExit(3)"])

    assert not step("metadata", fail)
    shown = capsys.readouterr()
    assert shown.out == "metadata:     FAILED\n"
    assert "exit status 3\nthe reason\n" in shown.err


def test_a_command_sees_nothing_of_our_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSPARK_PYTHON", "ours")
    program = "import os; print(os.environ.get('PYSPARK_PYTHON'), os.environ['PATH'])"
    assert run([sys.executable, "-c", program], PATH="theirs") == "None theirs\n"


def test_a_command_that_cannot_be_started_fails_its_step() -> None:
    with pytest.raises(StepFailed, match="no-such-command"):
        run([os.devnull + "/no-such-command"])
