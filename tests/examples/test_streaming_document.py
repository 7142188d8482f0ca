"""What the page on streaming mode shows is what the exactly-once and the streaming example do."""

from __future__ import annotations

from tests.examples.test_user_documents import ROOT, parts_of, without_indents


def test_every_snippet_on_streaming_is_a_part_of_an_example() -> None:
    files = [*(ROOT / "examples" / "exactly_once").glob("*.py"), ROOT / "examples" / "streaming_lines.py"]
    examples = [without_indents(file.read_text(encoding="utf-8")) for file in files]
    parts = parts_of("docs/streaming.md")

    assert parts
    assert [part for part in parts if not any(without_indents(part) in example for example in examples)] == []
