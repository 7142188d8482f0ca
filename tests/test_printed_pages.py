# SPDX-License-Identifier: Apache-2.0

"""The pages that are printed from the code are current, and what they print says what to do."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields

import pytest

import headgate.sinks
import headgate.sources
from headgate import CheckpointConfig, GatewayLimits, SidecarLimits
from tests.printed_pages import PAGES, ROOT, every_error

REMEDY = re.compile(
    r"\b(says?|names?|correct|check|choose|use|make|restore|give|raise|catch|let|pass|wait|run|enter|attach|take|close"
    r"|ask|install|send|try|start|look|nothing has to be done|nothing is lost|none is tried|can be used again)\b",
    re.IGNORECASE,
)
WITH_A_PROMISE = {
    "sources": ("FileSource", "KafkaSource", "PostgresSource", "RedisStreamsSource"),
    "sinks": ("FileSink", "PostgresSink", "DeltaSink", "IcebergSink", "RedisStreamsSink"),
}


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_what_the_code_prints(page: str) -> None:
    assert (ROOT / page).read_text(encoding="utf-8") == PAGES[page](), "run `python -m tests.printed_pages`"


def test_the_docstring_of_each_error_says_what_to_do() -> None:
    bases = {"HeadgateError", "ProtocolError"}  # which are caught and never raised
    silent = [name for name, error in every_error().items() if not REMEDY.search(inspect.getdoc(error) or "")]
    assert sorted(set(silent) - bases) == []


@pytest.mark.parametrize(
    ("folder", "name"), [(folder, name) for folder, names in WITH_A_PROMISE.items() for name in names]
)
def test_a_page_promises_what_the_docstring_of_its_class_does(folder: str, name: str) -> None:
    doc = inspect.getdoc(getattr(getattr(headgate, folder), name)) or ""
    (promise,) = [text for text in doc.split("\n\n") if text.startswith("Exactly once")]
    said = " ".join(promise.split()).replace("``", "`")
    pages = [" ".join(page.read_text(encoding="utf-8").split()) for page in (ROOT / "docs" / folder).glob("*.md")]
    assert [page.count(f"## Exactly once {said}") for page in pages].count(1) == 1, said


NO_LIMITS = {"freeze_heap", "mode", "interval_s", "hold_events"}
"""Fields of settings that bound nothing."""


@pytest.mark.parametrize("settings", [SidecarLimits, GatewayLimits, CheckpointConfig], ids=lambda one: one.__name__)
def test_the_page_of_limits_has_each_limit_that_can_be_set(settings: type) -> None:
    names = {field.name for field in fields(settings)} - NO_LIMITS
    page = (ROOT / "docs" / "reference" / "limits.md").read_text(encoding="utf-8")
    assert [name for name in sorted(names) if f"{name}=..." not in page] == []
