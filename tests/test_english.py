# SPDX-License-Identifier: Apache-2.0

"""Words and phrases that the English of this repository does without, in documents, code, comments and test names."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("actors", "benchmarks", "docs", "examples", "headgate", "protocol", "spark_bridge", "tests")
SUFFIXES = (".html", ".java", ".js", ".md", ".py")
GAP = r"(?:\s+(?:#\s+|\*\s+)?|_)"  # between two words, over the end of a line too, or inside a name
# The words, and what to write. A `~` stands for a gap.
INSTEAD = {
    r"mend(s|ed|ing)?": "fix",
    r"lest": "so that ... not",
    r"who(m)?ever": "anyone who, no matter who",
    r"told~of": "notified of",
    r"deaf": "unresponsive",
    r"doom(ed)?": "mark as failed",
    r"minted": "generated",
    r"midst": "middle",
    r"borne": "tolerated",
    r"(\w+_)?rooms?(_\w+)?": "capacity, space, memory, a free slot ...",
    r"in~vain": "without success",
    r"for~ever": "forever, permanently",
    r"at~once": "immediately, or concurrently",
    r"of~(its|their|our|your|one's|my)~(\w+~)?own": "separate, your own ...",
    r"(?<![Tt]here[\s_])(is|are|was|were)~no~(?!longer|more|one)[a-z]+": "is not a",
}


@functools.cache
def texts() -> dict[Path, str]:
    """Return every text of the repository, except the list above."""
    inside = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]
    paths = sorted([*ROOT.glob("*.md"), *inside])
    return {path: path.read_text(encoding="utf-8") for path in paths if path != Path(__file__).resolve()}


def found(phrase: str, text: str) -> list[int]:
    """Return the lines on which the phrase begins."""
    hits = re.finditer(rf"(?<![A-Za-z]){phrase.replace('~', GAP)}(?![A-Za-z])", text, re.IGNORECASE)
    return [text.count("\n", 0, hit.start()) + 1 for hit in hits]


@pytest.mark.parametrize("phrase", INSTEAD)
def test_nothing_is_said_in_words_that_a_native_speaker_would_not_use(phrase: str) -> None:
    hits = [f"{path.relative_to(ROOT)}:{line}" for path, text in texts().items() for line in found(phrase, text)]
    assert hits == [], f"write {INSTEAD[phrase]!r}"
