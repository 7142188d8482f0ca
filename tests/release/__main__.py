# SPDX-License-Identifier: Apache-2.0

"""``python -m tests.release``: build the distributions and the SBOM in ``dist/``, check them, and try the wheel on
each Python here.

The SBOM (software bill of materials) is a CycloneDX file. It lists what the wheel needs at run time, in the locked
versions.

Each Python gets an empty environment with the wheel and its dependencies. There ``headgate check`` and the programs
of ``PROGRAMS`` run, from copies outside of the repository. A user's program, and one that mentions every public name,
must pass mypy and pyright in their strict modes. Nothing is uploaded. Exit status: 0 if all passed, 1 if a step failed;
a line names that step.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from tests.release.contents import (
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

ROOT = Path(__file__).resolve().parent.parent.parent
DIST = ROOT / "dist"
FRONT_DOOR = ("headgate", "headgate.errors", "headgate.sinks", "headgate.sources", "headgate.types")
TYPED_PROGRAM = Path(__file__).with_name("typed_program.py")
# Maps each program to a line that it prints.
PROGRAMS = {
    "examples/squares.py": "[0, 1, 4, 9, 16, 25, 36, 49, 64, 81]",
    "examples/crawl.py": "200 pages visited, 200 of them different; a process was killed: True",
    "tests/release/unstopped.py": "closed",
}


class StepFailed(Exception):
    """A step of the release failed; the text says why."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.release", description=__doc__)
    parser.add_argument("--tools", type=Path, required=True, help="the Python that has the locked release tools")
    tools: Path = parser.parse_args(arguments).tools.absolute()
    with tempfile.TemporaryDirectory(prefix="headgate-release-") as folder:
        return release(tools, Path(folder))


def release(tools: Path, folder: Path) -> int:
    """Run every step in turn; a missing or wrong wheel ends the release, but each Python is tried."""
    steps: dict[str, Callable[[], str]] = {
        "build": build,
        "wheel": lambda: check_wheel(built("*.whl")),
        "sdist": lambda: check_sdist(built("*.tar.gz"), folder / "unpacked"),
        "metadata": lambda: check_metadata(tools),
        "sbom": lambda: write_sbom(tools, folder / "sbom"),
    }
    if not all(step(title, action) for title, action in steps.items()):
        return 1
    outcomes = [try_python(version, tools, folder / version) for version in supported()]
    if all(outcome is None for outcome in outcomes):
        say("FAILED", f"no Python of {', '.join(supported())} was found")
        return 1
    return 1 if False in outcomes else 0


def supported() -> list[str]:
    return supported_pythons((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def say(title: str, text: str) -> None:
    print(f"{title + ':':14}{text}", flush=True)


def step(title: str, action: Callable[[], str]) -> bool:
    """Do one step and print a line about it. Return whether it passed."""
    start = time.monotonic()
    try:
        said = action()
    except StepFailed as failure:
        say(title, "FAILED")
        print(failure, file=sys.stderr, flush=True)
        return False
    say(title, f"ok, {said.strip().splitlines()[-1]} ({time.monotonic() - start:.0f} s)")
    return True


def run(command: Iterable[str | Path], cwd: Path = ROOT, **environment: str) -> str:
    """Run a command as a user would, without this environment's settings for Python and Spark. Returns its output."""
    words = [str(word) for word in command]
    ours = ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON", "PYTHONPATH", "PYTHONHOME", "SPARK_HOME", "VIRTUAL_ENV")
    env = {name: value for name, value in os.environ.items() if name not in ours} | environment
    try:
        done = subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, timeout=1800, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StepFailed(f"{' '.join(words)}: {error}") from error
    if done.returncode != 0:
        raise StepFailed(f"{' '.join(words)}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def built(pattern: str) -> Path:
    (found,) = DIST.glob(pattern)
    return found


def build() -> str:
    """Build both distributions in an otherwise empty ``dist/``. The versions of the build tools are the lock's."""
    shutil.rmtree(DIST, ignore_errors=True)
    run([sys.executable, "-m", "hatchling", "build", "-d", DIST])
    return ", ".join(f"{file.name} ({file.stat().st_size // 1024} KiB)" for file in sorted(DIST.iterdir()))


def own_version() -> str:
    return version_of((ROOT / "headgate" / "__init__.py").read_text(encoding="utf-8"))


def check_wheel(wheel: Path) -> str:
    version = own_version()
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    refuse([*wheel_problems(wheel), *changelog_problems(changelog, version)])
    return f"version {version}, packages, py.typed and classifiers"


def check_sdist(sdist: Path, folder: Path) -> str:
    """Check its content, and that the same wheel can be built from it."""
    refuse(list(sdist_problems(sdist)))
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (source,) = folder.iterdir()
    run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder / "wheel"], cwd=source)
    (again,) = (folder / "wheel").iterdir()
    if again.read_bytes() != built("*.whl").read_bytes():
        raise StepFailed(f"the wheel that {sdist.name} builds is not {built('*.whl').name}")
    return "it builds the same wheel"


def check_metadata(tools: Path) -> str:
    run([tools, "-m", "twine", "check", "--strict", built("*.whl"), built("*.tar.gz")])
    return "twine check --strict"


def write_sbom(tools: Path, folder: Path) -> str:
    """Install the wheel with the locked versions of what it needs, and list them. The tool validates what it writes."""
    folder.mkdir()
    pins = pins_of(*(lock.read_text(encoding="utf-8") for lock in (ROOT / "requirements.lock", newest_spark_lock())))
    constraints, project, env = folder / "pins.txt", folder / "pyproject.toml", folder / "env"
    constraints.write_text("".join(f"{name}=={version}\n" for name, version in pins.items()), encoding="utf-8")
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    project.write_text(text.replace('dynamic = ["version"]', f'version = "{own_version()}"'), encoding="utf-8")
    run([sys.executable, "-m", "venv", "--without-pip", env])  # pip itself is not a part of the product
    quiet = ("--quiet", "--disable-pip-version-check")
    run([tools, "-m", "pip", "--python", env, "install", *quiet, "--constraint", constraints, built("*.whl")])
    sbom = DIST / f"headgate-{own_version()}.cdx.json"
    kind = ("--validate", "--output-reproducible", "--mc-type", "library", "--pyproject", project)
    run([tools, "-m", "cyclonedx_py", "environment", *kind, "--output-file", sbom, env])
    contents = json.loads(sbom.read_text(encoding="utf-8"))
    refuse(list(sbom_problems(contents, required_by(built("*.whl")), own_version(), pins)))
    shutil.rmtree(folder)  # Spark is large
    return f"{sbom.name}, {len(contents['components'])} packages, CycloneDX {contents['specVersion']}, valid"


def newest_spark_lock() -> Path:
    return max(
        ROOT.glob("requirements-spark-*.lock"), key=lambda lock: [int(part) for part in re.findall(r"\d+", lock.name)]
    )


def refuse(problems: list[str]) -> None:
    if problems:
        raise StepFailed("\n".join(problems))


def try_python(version: str, tools: Path, folder: Path) -> bool | None:
    """Install and try the wheel with one Python. Return None if there is no such Python here."""
    python = find_python(version)
    if python is None:
        say(f"Python {version}", "missing: neither on PATH nor installed by pyenv or uv")
        return None
    passed = step(f"Python {version}", lambda: try_wheel(python, tools, folder))
    shutil.rmtree(folder, ignore_errors=True)  # half a gigabyte each
    return passed


def try_wheel(python: Path, tools: Path, folder: Path) -> str:
    """Do what a user does in an empty, activated environment: install, check, run, and check the types."""
    run([python, "-m", "venv", folder / "env"])
    path = os.pathsep.join((str(folder / "env" / "bin"), os.environ["PATH"]))
    inside = folder / "env" / "bin" / "python"
    run([inside, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", f"{built('*.whl')}[pyspark]"])
    run([inside, "-m", "pip", "--disable-pip-version-check", "check"])
    work = folder / "work"
    work.mkdir()
    run([folder / "env" / "bin" / "headgate", "check"], cwd=work, PATH=path)
    for program, line in PROGRAMS.items():
        copy = shutil.copy(ROOT / program, work)
        said = run([inside, copy], cwd=work, PATH=path)
        if line not in said.splitlines():
            raise StepFailed(f"{program} was to print {line!r}, but printed:\n{said}")
    check_types(inside, tools, folder / "types")
    versions = run([inside, "-m", "headgate", "version"], cwd=work).split()
    return f"Python {versions[5]}, Spark {versions[3]}: headgate check, {', '.join(PROGRAMS)}, mypy, pyright"


def check_types(python: Path, tools: Path, folder: Path) -> None:
    """Check the user's program, and every public name, against the installed wheel.

    This finds incomplete types that other checks miss.
    """
    folder.mkdir()
    shutil.copy(TYPED_PROGRAM, folder)
    (folder / "every_name.py").write_text(every_name(), encoding="utf-8")
    programs = [TYPED_PROGRAM.name, "every_name.py"]
    strict = {"typeCheckingMode": "strict", "include": programs}
    (folder / "pyrightconfig.json").write_text(json.dumps(strict), encoding="utf-8")
    run([sys.executable, "-m", "mypy", "--strict", "--python-executable", python, *programs], cwd=folder)
    run([tools.with_name("basedpyright"), "--project", folder, "--pythonpath", python], cwd=folder)


def every_name() -> str:
    """Return a program that mentions every name of the front door."""
    modules = [importlib.import_module(name) for name in FRONT_DOOR]
    names = [f"    {module.__name__}.{name},\n" for module in modules for name in module.__all__]
    return "".join(f"import {name}\n" for name in FRONT_DOOR) + f"\nNAMES: list[object] = [\n{''.join(names)}]\n"


if __name__ == "__main__":
    sys.exit(main())
