"""The documents agree with the repository: links lead somewhere, and rules that are cited exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
FOLDERS = ("actors", "headgate", "protocol", "spark_bridge", "tests", "benchmarks", "examples")

LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
RULE = re.compile(r"^- \*\*(H\d+)\*\*", re.MULTILINE)
CITED = re.compile(r"\bH[1-9]\d?\b")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_inside_the_repository_leads_somewhere(document: Path) -> None:
    targets = [link for link in LINK.findall(document.read_text(encoding="utf-8")) if "://" not in link]
    assert [target for target in targets if not (document.parent / target).exists()] == []


def rules() -> list[str]:
    return RULE.findall((ROOT / "docs" / "contract.md").read_text(encoding="utf-8"))


def test_the_rules_of_the_contract_are_numbered_once_and_in_order() -> None:
    numbers = [int(rule[1:]) for rule in rules()]
    assert numbers
    assert numbers == sorted(set(numbers))


def test_every_rule_that_the_code_cites_is_in_the_contract() -> None:
    known = set(rules())
    unknown = [
        f"{file.relative_to(ROOT)}: {cited}"
        for folder in FOLDERS
        for file in sorted((ROOT / folder).rglob("*.py"))
        for cited in CITED.findall(file.read_text(encoding="utf-8"))
        if cited not in known
    ]
    assert unknown == []


FAULTS = ROOT / "tests" / "spark" / "faults"
NAMED_TEST = re.compile(r"`(?:tests/spark/)?(test_\w+\.py)::(test_\w+)")


def test_every_fault_that_is_tried_stands_in_the_table_and_every_test_that_it_names_exists() -> None:
    text = (ROOT / "docs" / "spark-faults.md").read_text(encoding="utf-8")
    named = set(NAMED_TEST.findall(text))
    tried = {
        (file.name, name)
        for file in FAULTS.glob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", file.read_text(encoding="utf-8"), re.MULTILINE)
    }
    elsewhere = {
        (file.name, name)
        for file in (ROOT / "tests" / "spark").glob("test_*.py")
        for name in re.findall(r"^(?:async )?def (test_\w+)", file.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert sorted(named - tried - elsewhere) == []
    assert sorted(tried - named) == []
