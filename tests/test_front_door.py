# SPDX-License-Identifier: Apache-2.0

"""``import headgate`` is one place to import from, and loads only the names that are used."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import headgate
import headgate.errors
import headgate.sinks
import headgate.sources
import headgate.types

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", *sorted(str(file.relative_to(ROOT)) for file in (ROOT / "docs").rglob("*.md")))
LAYERS = ("actors", "protocol", "spark_bridge")
FRONT: tuple[ModuleType, ...] = (headgate, headgate.sinks, headgate.sources, headgate.errors, headgate.types)
NAMES = [(module, name) for module in FRONT for name in module.__all__]
ERRORS: list[type[BaseException]] = [getattr(module, name) for module, name in NAMES if module is headgate.errors]


def run(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_every_name_of_the_front_door_can_be_loaded_and_is_explained(module: ModuleType, name: str) -> None:
    assert (getattr(module, name).__doc__ or "").strip()


def test_a_program_needs_few_names() -> None:
    """What fewer programs need is in other modules, so that the front door stays short."""
    assert len(FRONT[0].__all__) <= 51


def test_a_name_is_in_one_place() -> None:
    names = [name for _, name in NAMES]
    assert {name for name in names if names.count(name) > 1} == {"HeadgateError"}


@pytest.mark.parametrize("module", FRONT)
def test_each_name_is_written_once_and_exported_to_type_checkers(module: ModuleType) -> None:
    """The import under TYPE_CHECKING is the registry: ``import X as X`` is an export for mypy and pyright."""
    code = Path(module.__file__ or "").read_text(encoding="utf-8").replace(module.__doc__ or "", "")
    for name in module.__all__:
        assert code.count(f" import {name} as {name}\n") == 1
        assert f'"{name}"' not in code


@pytest.mark.parametrize("module", FRONT)
def test_completion_shows_the_names_and_nothing_of_the_machinery(module: ModuleType) -> None:
    shown = {name for name in dir(module) if not name.startswith("__")}
    assert shown == set(module.__all__)


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'headgate' has no attribute 'Sidecars'"):
        headgate.Sidecars  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("PostgresSink", "write 'from headgate.sinks import PostgresSink'"),
        ("FileSource", "write 'from headgate.sources import FileSource'"),
        ("RequestFailed", "write 'from headgate.errors import RequestFailed'"),
        ("Confirmation", "write 'from headgate.types import Confirmation'"),
        ("Sidcar", r"did you mean Sidecar\?"),
    ],
)
def test_a_name_that_is_elsewhere_is_an_error_that_says_where(name: str, hint: str) -> None:
    with pytest.raises(AttributeError, match=f"module 'headgate' has no attribute '{name}': {hint}$"):
        getattr(headgate, name)
    with pytest.raises(ImportError, match=f"module 'headgate' has no attribute '{name}': {hint}$"):
        exec(f"from headgate import {name}")


def test_a_module_that_was_not_imported_is_an_error_that_says_so() -> None:
    program = "import headgate\ntry: headgate.testing\nexcept AttributeError as error: print(error)"
    expected = "module 'headgate' has no attribute 'testing': it is a module, write 'import headgate.testing'\n"
    assert run(program) == expected


def test_importing_it_loads_no_layer() -> None:
    names = ", ".join(module.__name__ for module in FRONT)
    loaded = json.loads(run(f"import {names}, json, sys; print(json.dumps(sorted(sys.modules)))"))
    ours = [name for name in loaded if name.partition(".")[0] in (*LAYERS, "pyspark", "anyio", "structlog")]
    assert not ours
    assert "headgate.testing" not in loaded


def test_what_a_task_needs_loads_no_code_of_the_driver() -> None:
    program = "import sys\n" + "".join(f"sys.modules[{n!r}] = None\n" for n in ("actors", "anyio", "pyspark", "py4j"))
    program += (
        "from headgate import SplitReader, SubtaskOperator\n"
        "from headgate.errors import AttemptOver, RequestFailed\n"
        "from headgate.sinks import TwoPhaseSinkOperator, TwoPhaseWriter\n"
        "from headgate.types import GroupCheckpoint, RestoreMode\n"
    )
    run(program)


def test_every_error_of_the_front_door_has_the_one_base() -> None:
    assert len(ERRORS) > 15
    assert [error.__name__ for error in ERRORS if not issubclass(error, headgate.HeadgateError)] == []


def test_the_docstring_draws_the_tree_of_errors() -> None:
    drawn = "\n".join(f"{' ' * 4 * (depth + 1)}{error.__name__}" for error, depth in tree(headgate.HeadgateError))
    assert f"::\n\n{drawn}\n\n" in (headgate.errors.__doc__ or "")


def tree(error: type[BaseException], depth: int = 0) -> Iterator[tuple[type[BaseException], int]]:
    """Yield an error, then those directly below it, sorted, each with its depth. Unexported classes are left out."""
    yield error, depth
    for below in sorted(ERRORS, key=lambda one: one.__name__):
        if next((base for base in below.__mro__[1:] if base in ERRORS), None) is error:
            yield from tree(below, depth + 1)


@pytest.mark.parametrize("module", FRONT)
def test_the_docstring_names_everything_under_a_title(module: ModuleType) -> None:
    """Each name once or more; the errors are drawn as a tree instead."""
    if module is not headgate.errors:
        told = re.split(r"^\S.*[^:]:$", module.__doc__ or "", flags=re.M)[1:]
        assert set(module.__all__) - set(re.findall(r"``(\w+)``", "".join(told))) == set()


def test_every_public_error_of_the_layers_has_the_one_base() -> None:
    program = (
        "import importlib, pathlib\n"
        f"for top in {LAYERS!r}:\n"
        "    for file in sorted(pathlib.Path(top).rglob('*.py')):\n"
        "        path = file.with_suffix('')\n"
        "        parts = path.parts[:-1] if path.name == '__init__' else path.parts\n"
        "        module = importlib.import_module('.'.join(parts))\n"
        "        for name, value in vars(module).items():\n"
        "            own = isinstance(value, type) and value.__module__ == module.__name__\n"
        "            if own and issubclass(value, Exception) and not name.startswith('_'):\n"
        "                print(module.__name__, name, [base.__name__ for base in value.__mro__])\n"
    )
    # Each of these is caught where it is raised, or appears only as the cause of another error.
    internal = {
        "CheckFailed", "ConnectionBroken", "CoordinatorTraceback", "Interrupted", "NotRegular", "RecordDecodeError",
        "TunnelClosed", "Unavailable", "Unreadable",
    }  # fmt: skip
    strays = {line.split()[1] for line in run(program).splitlines() if "HeadgateError" not in line}
    assert strays <= internal, f"without the base HeadgateError: {sorted(strays - internal)}"


@pytest.mark.parametrize("page", PAGES)
def test_a_page_for_users_imports_from_the_front_door_alone(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert re.findall(rf"^\s*(?:from|import) (?:{'|'.join(LAYERS)})\b.*", text, re.MULTILINE) == []


@pytest.mark.parametrize("file", sorted(str(f.relative_to(ROOT)) for f in (ROOT / "examples").rglob("*.py")))
def test_an_example_imports_from_the_front_door_alone(file: str) -> None:
    """An example is one file, so that it runs from wherever it is copied; only the pipeline is several."""
    text = (ROOT / file).read_text(encoding="utf-8")
    refused = LAYERS if "exactly_once" in file else (*LAYERS, "examples")
    found = re.findall(rf"^\s*(?:from|import) (?:{'|'.join(refused)})\b.*", text, re.MULTILINE)
    assert found == []


@pytest.mark.parametrize("mode", list(headgate.types.RestoreMode))
def test_a_mode_may_be_given_by_its_name(mode: headgate.types.RestoreMode) -> None:
    assert headgate.types.RestoreMode.named(mode.name.lower()) is headgate.types.RestoreMode.named(mode) is mode


@pytest.mark.parametrize("wrong", ["", "stream", "STREAMING", 1, None])
def test_another_mode_is_refused_with_the_ones_that_exist(wrong: object) -> None:
    with pytest.raises(ValueError, match="mode must be 'batch' or 'streaming', not "):
        headgate.types.RestoreMode.named(wrong)  # type: ignore[arg-type]
