# SPDX-License-Identifier: Apache-2.0

"""The archive for the executors contains what a task needs."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any, cast

from pyspark import SparkContext

from spark_bridge.common.bootstrap import VENDORED
from spark_bridge.driver.shipping import archive_contents, ship_packages, write_archive

# A worker has the archive and the standard library. `-S` leaves out site-packages.
BARE_PYTHON = [sys.executable, "-S", "-c"]


def in_bare_python(*paths: Path, program: str, status: int = 0) -> tuple[str, str]:
    """Run a program that finds modules here, too; return what it writes to standard output and standard error."""
    whole = f"import sys; sys.path[1:1] = {[str(path) for path in paths]!r}\n{program}"
    done = subprocess.run(
        [*BARE_PYTHON, whole], capture_output=True, text=True, timeout=300, check=False, cwd="/", env={}
    )
    assert done.returncode == status, done.stderr
    return done.stdout.strip(), done.stderr


def unpacked(archive: Path, folder: Path, *, without: str) -> Path:
    with zipfile.ZipFile(archive) as content:
        content.extractall(folder, [name for name in content.namelist() if not name.startswith(without)])
    return folder


def test_the_packages_are_shipped_without_tests() -> None:
    names = set(archive_contents())
    assert {"protocol/subtask/machine.py", "spark_bridge/task_entry.py", "spark_bridge/subtask/runner.py"} <= names
    assert {name.split("/")[0] for name in names} <= {"actors", "headgate", "protocol", "spark_bridge", VENDORED}


def test_the_same_content_makes_the_same_archive(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    first, second = write_archive(one), write_archive(two)
    assert first.name == second.name, "a session of Spark Connect may get it again, from another sidecar"
    assert first.read_bytes() == second.read_bytes()
    assert zipfile.ZipFile(first).testzip() is None


IMPORTS_A_TASK = "import spark_bridge.subtask, protocol.wire.messages as module; print(module.__spec__.origin)"


def test_what_a_task_imports_need_not_be_compiled(tmp_path: Path) -> None:
    archive = write_archive(tmp_path)
    origin, _ = in_bare_python(archive, program=IMPORTS_A_TASK)
    assert origin == f"{archive}/protocol/wire/messages.pyc"


def test_another_python_takes_the_sources(tmp_path: Path) -> None:
    archive, theirs = write_archive(tmp_path), tmp_path / "theirs.zip"
    with zipfile.ZipFile(archive) as ours, zipfile.ZipFile(theirs, "w") as other:
        for name in ours.namelist():
            content = ours.read(name)
            other.writestr(name, b"\0\0" + content[2:] if name.endswith(".pyc") else content)
    origin, _ = in_bare_python(theirs, program=IMPORTS_A_TASK)
    assert origin == f"{theirs}/protocol/wire/messages.py"


def test_a_python_without_msgpack_uses_the_shipped_one(tmp_path: Path) -> None:  # spark-facts 21, 27
    said, _ = in_bare_python(
        write_archive(tmp_path),
        program="import spark_bridge.subtask, msgpack\n"
        "from protocol.wire.codec import decode_event, encode_event\n"
        "print(decode_event(encode_event({'a': [1, None]})), msgpack.__file__)\n",
    )
    assert said.startswith("{'a': [1, None]}")
    assert VENDORED in said


IMPORTS_A_MODULE_OF_EACH_FOLDER_FIRST = """
import importlib, zipfile
modules = {
    name.rpartition("/")[0]: name.removesuffix(".py").replace("/", ".")
    for name in zipfile.ZipFile(sys.path[1]).namelist()
    if name.startswith("spark_bridge/") and name.endswith(".py") and not name.endswith("/__init__.py")
}
path, loaded = list(sys.path), set(sys.modules)
for module in ["spark_bridge.streams.task", "spark_bridge.task_source", *modules.values()]:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name == "msgpack":
            print(module)
    sys.path[:] = path
    for name in set(sys.modules) - loaded:
        if name.split(".")[0] in ("headgate", "actors", "protocol", "spark_bridge", "msgpack"):
            del sys.modules[name]
print(len(modules) > 20)
"""


def test_without_an_installed_msgpack_any_module_can_be_the_first(tmp_path: Path) -> None:  # spark-facts 21, 27
    """A worker unpickles whatever refers to one of ours, and so imports that module before all others."""
    said, _ = in_bare_python(write_archive(tmp_path), program=IMPORTS_A_MODULE_OF_EACH_FOLDER_FIRST)
    assert said == "True"


def test_an_installed_msgpack_is_preferred(tmp_path: Path) -> None:
    archive = write_archive(tmp_path)
    installed = tmp_path / "installed"
    (installed / "msgpack").mkdir(parents=True)
    with zipfile.ZipFile(archive) as content:
        for name in content.namelist():
            if name.startswith(f"{VENDORED}/msgpack/"):
                (installed / "msgpack" / Path(name).name).write_bytes(content.read(name))
    said, _ = in_bare_python(
        archive, installed, program="import spark_bridge.subtask, msgpack\nprint(msgpack.__file__)"
    )
    assert str(installed) in said


def test_a_python_without_fsspec_writes_files_with_the_shipped_one(tmp_path: Path) -> None:
    said, _ = in_bare_python(
        write_archive(tmp_path),
        program="from headgate.sinks import FileSink, SinkWriterContext\n"
        f"writer = FileSink({str(tmp_path / 'out')!r}).writer(SinkWriterContext('out', 0, 0))\n"
        "writer.write('a row')\n"
        "import fsspec; print(writer.prepare()[0].payload[0], fsspec.__file__)\n",
    )
    assert said.startswith("1 ")
    assert VENDORED in said


def test_the_archive_is_compressed_and_contains_no_tests_of_dependencies(tmp_path: Path) -> None:
    contents = archive_contents()
    assert [name for name in contents if "tests" in name.split("/")] == []
    archive = write_archive(tmp_path)
    with zipfile.ZipFile(archive) as content:
        assert archive.stat().st_size < sum(info.file_size for info in content.infolist()) / 2


def test_without_fsspec_the_error_names_the_fix(tmp_path: Path) -> None:
    """And what the archive provided before, msgpack, is still importable afterwards."""
    said, _ = in_bare_python(
        unpacked(write_archive(tmp_path), tmp_path / "bare", without=f"{VENDORED}/fsspec/"),
        program="import spark_bridge.subtask\n"
        "from spark_bridge.common.bootstrap import VENDORED\n"
        "try:\n    import spark_bridge.sinks.files.task\n"
        "except ModuleNotFoundError as error:\n"
        "    print(error.name, error, any(VENDORED in entry for entry in sys.path))\n",
    )
    assert said.startswith("fsspec ")
    assert "PYSPARK_PYTHON" in said
    assert said.endswith("True")


def test_without_any_msgpack_the_error_names_the_python_and_the_fix(tmp_path: Path) -> None:  # spark-facts 21
    bare = unpacked(write_archive(tmp_path), tmp_path / "bare", without=VENDORED)
    _, error = in_bare_python(bare, program="import spark_bridge.subtask", status=1)
    assert "PYSPARK_PYTHON" in error
    assert sys.executable in error


class _Context:
    """The part of a SparkContext that shipping uses."""

    def __init__(self) -> None:
        self.added: list[str] = []

    def addPyFile(self, path: str) -> None:  # pyspark's name
        self.added.append(path)


def test_each_context_gets_the_archive_once_and_the_file_stays() -> None:
    contexts: list[Any] = [_Context(), _Context()]
    for context in contexts * 2:
        ship_packages(cast(SparkContext, context))
    for context in contexts:
        (path,) = context.added
        assert zipfile.is_zipfile(path)
