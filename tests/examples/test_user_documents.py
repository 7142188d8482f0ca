"""The snippets of README and guide are parts of the examples, and every `make` target is documented."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import dedent

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
TARGET = re.compile(r"^([a-z-]+):.*## ", re.MULTILINE)
ROW = re.compile(r"^\| `make ([a-z-]+)", re.MULTILINE)


def without_indents(text: str) -> str:
    return "\n".join(line.strip() for line in text.strip().splitlines())


def parts_of(document: str) -> list[str]:
    """The Python of a document; two empty lines separate what may stand apart in the example."""
    blocks = BLOCK.findall((ROOT / document).read_text(encoding="utf-8"))
    return [part for block in blocks for part in dedent(block).split("\n\n\n")]


@pytest.mark.parametrize("document", ["README.md", "docs/guide.md"])
def test_every_snippet_is_a_part_of_an_example(document: str) -> None:
    examples = [without_indents(file.read_text(encoding="utf-8")) for file in (ROOT / "examples").glob("*.py")]
    parts = parts_of(document)

    assert parts
    assert [part for part in parts if not any(without_indents(part) in example for example in examples)] == []


def test_the_contributors_page_lists_every_make_target() -> None:
    targets = TARGET.findall((ROOT / "Makefile").read_text(encoding="utf-8"))
    listed = ROW.findall((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))

    assert sorted(listed) == sorted(target for target in targets if target != "help")
