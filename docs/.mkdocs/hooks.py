# SPDX-License-Identifier: Apache-2.0

"""Pages that link to a file outside docs/ get it: the site has a page for each such source, and a copy of the rest.

A link in docs/ is one that works in a clone: `../examples/squares.py`. On the site that file is a page with the
source, so the site needs no other host.

`llms.txt` lists the pages for programs that read documentation, in the order of the navigation.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent.parent
WIDE_PAGES = (
    "index.md",
    "tutorial.md",
    "concepts.md",
    "troubleshooting.md",
)  # nothing lies beside them, so they need no list of pages
PROJECT_PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)]*)?\))")
LANGUAGES = {".py": "python", ".json": "json", ".toml": "toml"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name in PROJECT_PAGES:
        files.append(File.generated(config, name, content=(ROOT / name).read_text(encoding="utf-8")))
    for page in [file for file in files if file.is_documentation_page()]:
        for _, target, _ in LINK.findall(page.content_string):
            path = outside(page.src_uri, target)
            if path is not None and files.get_file_from_path(address(path)) is None:
                files.append(file_of(path, config))
    files.append(File.generated(config, "llms.txt", content=llms(config, files)))
    return files


def llms(config: MkDocsConfig, files: Files) -> str:
    """Each page of the navigation with the first sentence of its text, as https://llmstxt.org describes it."""
    lines = [f"# {config.site_name}", "", f"> {config.site_description}"]
    for entry in config.nav or []:
        ((section, below),) = entry.items()
        lines += ["", f"## {section}", ""]
        for uri in pages_below(below):
            page = files.src_uris[uri]
            title, sentence = beginning(page.content_string)
            lines.append(f"- [{title}]({page.url}): {sentence}")
    return "\n".join(lines) + "\n"


def pages_below(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    else:
        for one in entry.values() if isinstance(entry, dict) else entry:
            yield from pages_below(one)


def beginning(markdown: str) -> tuple[str, str]:
    """The title of a page, and the first sentence that is plain text."""
    title, *blocks = markdown.removeprefix("# ").split("\n\n")
    text = next((" ".join(block.split()) for block in blocks if re.match(r"\w|`[^`]|\[", block)), "")
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return title.strip("` \n"), re.split(r"(?<=\.)\s", text)[0]


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    def link(match: re.Match[str]) -> str:
        before, target, after = match.groups()
        path = outside(page.file.src_uri, target)
        if path is None:
            return match[0]
        return before + posixpath.relpath(address(path), posixpath.dirname(page.file.src_uri) or ".") + after

    if page.file.src_uri in WIDE_PAGES:
        page.meta.setdefault("hide", ["navigation"])
    return LINK.sub(link, markdown)


def outside(page: str, target: str) -> str | None:
    """The path of a link's target from the root of the repository, if it is a file there that docs/ does not hold."""
    if "://" in target or target.startswith("mailto:"):
        return None
    folder = "" if page in PROJECT_PAGES else "docs"
    path = posixpath.normpath(posixpath.join(folder, posixpath.dirname(page), target))
    if path.startswith("..") or not (ROOT / path).is_file():
        return None
    if not path.startswith("docs/"):
        return path
    return path if folder == "" else None


def address(path: str) -> str:
    """Where the file is among the pages."""
    if path in PROJECT_PAGES:
        return path
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path == "README.md":
        return "index.md"
    return f"source/{path}.md" if Path(path).suffix in LANGUAGES else f"source/{path}"


def file_of(path: str, config: MkDocsConfig) -> File:
    language = LANGUAGES.get(Path(path).suffix)
    if language is None:
        return File.generated(config, address(path), abs_src_path=str(ROOT / path))
    text = (ROOT / path).read_text(encoding="utf-8")
    heading = f"---\ntitle: {Path(path).name}\nsearch:\n  exclude: true\n---\n# `{path}`\n\n"
    return File.generated(config, address(path), content=f"{heading}````{language}\n{text}````\n")
