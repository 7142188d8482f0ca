# SPDX-License-Identifier: Apache-2.0

"""Another distribution's ``protocol`` or ``actors`` in front of ours: the error names it and says what to do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from spark_bridge.driver.shipping import write_archive

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("actors", "headgate", "protocol", "spark_bridge")


def install(folder: Path, distribution: str, package: str, **files: str) -> None:
    """Create the files that ``pip install --target folder`` writes for a distribution with one package."""
    (folder / package).mkdir(parents=True, exist_ok=True)
    for name, text in {"__init__": "", **files}.items():
        (folder / package / f"{name}.py").write_text(text)
    metadata = folder / f"{distribution.replace('-', '_')}-9.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 9.1\n")
    (metadata / "RECORD").write_text(f"{package}/__init__.py,,\n{metadata.name}/METADATA,,\n")


def python(program: str, *path: Path, site: bool = True) -> subprocess.CompletedProcess[str]:
    """Run ``program`` with ``path`` in front of Python's other paths."""
    command = [sys.executable, *(() if site else ("-S",)), "-c", program]
    env = {"PYTHONPATH": os.pathsep.join(map(str, path)), "PATH": os.environ["PATH"]}
    return subprocess.run(command, cwd="/", env=env, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("package", ["protocol", "actors"])
@pytest.mark.parametrize(
    "imported",
    [
        "from headgate import Sidecar",
        "import headgate; headgate.Request",
        "import headgate.actors",
        "import headgate.testing",
    ],
)
def test_the_error_names_the_distribution_that_stands_in_front(tmp_path: Path, package: str, imported: str) -> None:
    install(tmp_path, "wire-things", package)
    done = python(imported, tmp_path, ROOT)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"ImportError: Headgate needs its own package {package!r}, but Python ({sys.executable}) finds another one in "
        f"{tmp_path / package}. The distribution wire-things 9.1 installed it. Uninstall it (pip uninstall "
        "wire-things), or install Headgate into a separate environment"
    )


@pytest.mark.parametrize("path", ["protocol.py", "protocol/__init__.py"])
def test_a_module_of_the_users_own_is_named_by_its_path(tmp_path: Path, path: str) -> None:
    file = tmp_path / path
    file.parent.mkdir(exist_ok=True)
    file.touch()
    done = python("from headgate import Sidecar", tmp_path, ROOT)
    assert done.returncode == 1
    assert (
        f"finds another one in {tmp_path / path.partition('/')[0]}. No installed distribution brought it. Rename it, "
        in (done.stderr)
    )


def test_one_that_is_loaded_already_is_found_too(tmp_path: Path) -> None:
    install(tmp_path, "wire-things", "protocol")
    done = python(
        f"import sys, protocol; sys.path.remove({str(tmp_path)!r}); from headgate.errors import HeadgateError",
        tmp_path,
        ROOT,
    )
    assert f"finds another one in {tmp_path / 'protocol'}." in done.stderr


def test_the_tests_of_a_project_that_uses_none_of_it_run_beside_such_packages(tmp_path: Path) -> None:
    """pytest loads the fixtures wherever Headgate is installed."""
    install(tmp_path, "wire-things", "protocol")
    install(tmp_path, "acting-things", "actors")
    (tmp_path / "test_it.py").write_text(
        "import protocol, actors, pytest\n"
        "@pytest.fixture\n"
        "def headgate_spark(): return None\n"
        "def test_theirs(): assert protocol.__file__.startswith(actors.__path__[0][:-6])\n"
        "def test_ours(headgate_sidecar): pass\n"
    )
    program = f"import pytest; pytest.main(['-q', '--rootdir={tmp_path}', '{tmp_path}/test_it.py'])"
    done = python(program, tmp_path, ROOT)
    assert "1 passed, 1 error" in done.stdout
    assert "Headgate needs its own package 'protocol'" in done.stdout


def test_a_folder_without_code_is_not_a_package(tmp_path: Path) -> None:
    (tmp_path / "protocol").mkdir()
    done = python("from headgate import GatewayLimits", tmp_path, ROOT)
    assert done.returncode == 0, done.stderr


def test_a_second_headgate_is_not_foreign(tmp_path: Path) -> None:
    """A worker that has taken one package from its installed Headgate takes the rest from the archive."""
    archive = write_archive(tmp_path)
    program = f"import protocol.errors, sys; sys.path.insert(1, {str(archive)!r})\nimport spark_bridge as ours"
    done = python(f"{program}; print(ours.__file__)", ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(archive))


def test_a_worker_names_it_too(tmp_path: Path) -> None:
    """Spark puts the archive after the folder in which the worker was started."""
    install(tmp_path / "foreign", "wire-things", "protocol")
    done = python("import spark_bridge.task_entry", tmp_path / "foreign", write_archive(tmp_path), site=False)
    assert done.returncode == 1
    assert "The distribution wire-things 9.1 installed it. Uninstall it" in done.stderr


def test_one_that_was_installed_over_ours_is_named_when_a_name_is_missing(tmp_path: Path) -> None:
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    install(tmp_path, "wire-things", "protocol", errors="class WireError(Exception): ...\n")
    done = python("import headgate; headgate.HeadgateError", tmp_path)
    assert done.returncode == 1
    assert "the distribution wire-things 9.1 installed a package 'protocol' over Headgate's own in" in done.stderr
    assert "then reinstall Headgate" in done.stderr
    done = python("from spark_bridge.driver.installation import check_packages; check_packages()", tmp_path)
    assert "the distribution wire-things 9.1 installed a package 'protocol' over" in done.stderr.splitlines()[-1]


def test_the_command_says_it_in_its_last_line(tmp_path: Path) -> None:
    install(tmp_path, "wire-things", "actors")
    done = python(
        "import runpy, sys; sys.argv[1:] = ['check']; runpy.run_module('headgate', run_name='__main__')", tmp_path, ROOT
    )
    assert done.returncode == 1
    assert "The distribution wire-things 9.1 installed it" in done.stderr.splitlines()[-1]


DRIVER = """
from pyspark.sql import SparkSession
from headgate import Sidecar, SourceCoordinator, SplitReader, StaticSplitEnumerator

spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
try:
    with Sidecar(spark) as sidecar:
        source = SourceCoordinator(lambda state: StaticSplitEnumerator([1], state))
        job = sidecar.coordinate("numbers", source, parallelism=1)
        spark.sparkContext.parallelize([0], 1).mapPartitions(job.subtask(SplitReader)).collect()
finally:
    spark.stop()
"""


@pytest.mark.spark
@pytest.mark.long
def test_a_worker_of_spark_that_starts_in_such_a_folder_names_it(tmp_path: Path) -> None:
    install(tmp_path / "foreign", "wire-things", "protocol")
    program = tmp_path / "driver.py"
    program.write_text(DRIVER)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYSPARK_PYTHON": sys.executable}
    done = subprocess.run(
        [sys.executable, str(program)],
        cwd=tmp_path / "foreign",
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 1
    assert f"finds another one in {tmp_path / 'foreign' / 'protocol'}. The distribution wire-things 9.1" in done.stderr
