# SPDX-License-Identifier: Apache-2.0

"""The documents agree with the repository: links resolve, and every name and rule is described."""

from __future__ import annotations

import importlib
import pkgutil
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit

import pytest

import headgate.errors
from protocol.wire.keys import MAY_HOLD, Holder, Purpose

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
FOLDERS = ("actors", "headgate", "protocol", "spark_bridge", "tests", "benchmarks", "examples")

LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
RULE = re.compile(r"^- \*\*(H\d+)\*\*", re.MULTILINE)
CITED = re.compile(r"\bH[1-9]\d?\b")


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_every_link_inside_the_repository_leads_somewhere(document: Path) -> None:
    targets = [link for link in LINK.findall(document.read_text(encoding="utf-8")) if "://" not in link]
    assert [target for target in targets if not (document.parent / target).exists()] == []


CONTRACT = ROOT / "docs" / "contract"
# A row of the index, such as `| H20 to H28 | [events to a subtask](contract/events.md#events-to-a-subtask) |`.
INDEXED = re.compile(r"^\| H(\d+)(?: to H(\d+))? \| \[(.+)\]\(contract/([\w-]+\.md)#[\w-]+\) \|$", re.MULTILINE)


def rules() -> list[str]:
    return [rule for page in sorted(CONTRACT.glob("*.md")) for rule in RULE.findall(page.read_text(encoding="utf-8"))]


def test_the_rules_of_the_contract_are_numbered_once_and_in_order_on_each_page() -> None:
    for page in CONTRACT.glob("*.md"):
        numbers = [int(rule[1:]) for rule in RULE.findall(page.read_text(encoding="utf-8"))]
        assert numbers == sorted(numbers)
    assert len(rules()) == len(set(rules())) > 0


def test_the_index_of_the_contract_leads_to_each_rule() -> None:
    index = [
        (page, title.lower(), int(first), int(last or first))
        for first, last, title, page in INDEXED.findall((ROOT / "docs" / "contract.md").read_text(encoding="utf-8"))
    ]
    sections = [
        (page.name, title.lower(), int(numbers[0][1:]), int(numbers[-1][1:]))
        for page in CONTRACT.glob("*.md")
        for title, text in re.findall(r"^## (.+)\n((?:(?!## ).*\n?)*)", page.read_text(encoding="utf-8"), re.MULTILINE)
        for numbers in [RULE.findall(text)]
    ]
    assert index == sorted(sections, key=lambda section: section[2])


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


@pytest.mark.parametrize(
    ("page", "entry"),
    [("spark-facts.md", r"^(\d+)\. "), ("flink-parity.md", r"^\| ([RGS]\d+) \| ")],
    ids=["spark-facts", "flink-parity"],
)
def test_the_index_of_a_page_has_the_numbers_of_each_section(page: str, entry: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    index = re.findall(r"^\| \[.+\]\(#[\w-]+\) \| (\w+)(?: to (\w+))? \|$", text, re.MULTILINE)
    sections = [re.findall(entry, section, re.MULTILINE) for section in text.split("\n## ")[1:]]
    assert [(first, last or first) for first, last in index] == [(numbers[0], numbers[-1]) for numbers in sections]


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


# --- the reference ------------------------------------------------------------------------------------------------

FRONT = ("headgate", "headgate.sinks", "headgate.sources", "headgate.errors", "headgate.types")
ENTRY = re.compile(r"^::: ([\w.]+)$", re.MULTILINE)
BRANCH = re.compile(r"^([│├└─ ]*)(\w+)(?: {2,}|$)", re.MULTILINE)


def front_names() -> list[str]:
    """`HeadgateError` counts once: its place is with the other errors."""
    names = [f"{module}.{name}" for module in FRONT for name in importlib.import_module(module).__all__]
    return [name for name in names if name != "headgate.HeadgateError"]


def reference_text() -> str:
    return "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs" / "reference").glob("*.md")))


def test_every_name_of_the_front_door_has_one_entry_in_the_reference() -> None:
    """A new name needs a line such as `::: headgate.NAME` on the page of docs/reference/ where it belongs."""
    entries = [name for name in ENTRY.findall(reference_text()) if name.rpartition(".")[0] in FRONT]
    assert sorted(entries) == sorted(front_names())


def every_error() -> dict[str, type[BaseException]]:
    """Return every class of the packages that derives from `HeadgateError`, with its name."""
    for top in ("actors", "protocol", "spark_bridge"):
        package = importlib.import_module(top)
        for module in pkgutil.walk_packages(package.__path__, f"{top}."):
            importlib.import_module(module.name)
    found: dict[str, type[BaseException]] = {}
    waiting: list[type[BaseException]] = [headgate.HeadgateError]
    while waiting:
        error = waiting.pop()
        found[error.__name__] = error
        waiting += error.__subclasses__()
    return found


def test_the_tree_of_errors_is_that_of_the_classes() -> None:
    page = (ROOT / "docs" / "reference" / "errors.md").read_text(encoding="utf-8")
    tree = page.split("```text\n")[1].split("```")[0]
    known = every_error()
    path: list[str] = []
    shown = set()
    for indent, name in BRANCH.findall(tree):
        depth = len(indent) // 4
        assert name in known, f"{name} is not an error of Headgate"
        del path[depth:]
        if path:
            assert known[path[-1]] in known[name].__bases__, f"{name} does not derive from {path[-1]}"
        path.append(name)
        shown.add(name)
    assert sorted(set(vars(headgate.errors)["__all__"]) - shown) == []


# --- the contributors' page ---------------------------------------------------------------------------------------


def test_the_contributors_page_lists_every_make_target() -> None:
    targets = re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    listed = re.findall(r"^\| `make ([a-z-]+)", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(target for target in targets if target != "help")


# --- the site -----------------------------------------------------------------------------------------------------


class Anchors(HTMLParser):
    """The ids, links and loaded files of a page."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value for name, value in attrs if value is not None}
        self.ids |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        self.loads += [found[name] for name in ("src", "href") if name in found and tag != "a"]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the site, built as `make docs` builds it: a warning is an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.long
def test_the_site_needs_no_other_host(site: Path) -> None:
    pages = {page: Anchors(page) for page in site.rglob("*.html")}
    assert len(pages) > 20
    assert [load for page in pages.values() for load in page.loads if urlsplit(load).netloc] == []


@pytest.mark.long
def test_every_link_of_the_site_leads_to_a_place_on_it(site: Path) -> None:
    pages = {page: Anchors(page) for page in site.rglob("*.html") if page.name != "404.html"}
    broken = []
    for page, anchors in pages.items():
        for link in anchors.links:
            path, anchor = urldefrag(link)
            if urlsplit(link).scheme:
                continue
            target = (page.parent / unquote(path)).resolve() if path else page
            target = target / "index.html" if target.is_dir() else target
            found = target.exists() and (not anchor or target not in pages or unquote(anchor) in pages[target].ids)
            if not found and link not in ("#", "."):
                broken.append(f"{page.relative_to(site)}: {link}")
    assert broken == []


def test_a_list_on_the_site_begins_with_the_number_that_it_is_written_with(site: Path) -> None:
    """The code cites facts about Spark by their numbers, which go on from section to section."""
    written = re.findall(
        r"^## .+\n\n(\d+)\. ", (ROOT / "docs" / "spark-facts.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    page = (site / "spark-facts.html").read_text(encoding="utf-8")
    assert ["1", *re.findall(r'<ol start="(\d+)">', page)] == written


def test_the_site_has_an_entry_for_every_name_of_the_front_door(site: Path) -> None:
    ids = {name for page in (site / "reference").glob("*.html") for name in Anchors(page).ids}
    assert [name for name in front_names() if name not in ids] == []


COLUMN_OF_A_KEY = {
    None: "secret",
    Purpose.TASKS: "tasks",
    Purpose.RELAY: "relay",
    Purpose.CONTROL: "requests",
    Purpose.STREAMS: "plan",
    Purpose.ATTEMPTS: "tokens",
    Purpose.CERTIFICATE: "certificate",
}


def test_the_page_on_security_says_which_processes_may_have_which_key() -> None:
    """H76: the table is that of the code, which a test compares with the memory of real processes."""
    head = ["process", *(COLUMN_OF_A_KEY[purpose] for purpose in MAY_HOLD)]
    rows = [[one.value, *("yes" if one in holders else "-" for holders in MAY_HOLD.values())] for one in Holder]
    lines = [f"| {' | '.join(row)} |" for row in (head, *rows)]
    table = "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])
    assert table + "\n\n" in (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    assert set(MAY_HOLD) == {None, *Purpose}
