# SPDX-License-Identifier: Apache-2.0

"""The programs on the pages of sources and sinks run as they are, and print what the page says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```(python|text)\n(.*?)^```", re.MULTILINE | re.DOTALL)
PAGES = {
    str(page.relative_to(ROOT)): page.read_text(encoding="utf-8")
    for folder in ("sources", "sinks")
    for page in sorted((ROOT / "docs" / folder).glob("*.md"))
    if "```python" in page.read_text(encoding="utf-8")
}
SERVERS = {
    "CONNINFO": ("postgres", "conninfo"),
    "REDIS_URL": ("redis_server", "url"),
    "KAFKA_SERVERS": ("kafka", "servers"),
}
"""The variable that names a server, the fixture that starts one, and its attribute."""


@pytest.mark.long
@pytest.mark.spark
@pytest.mark.parametrize("page", PAGES)
def test_a_page_prints_what_it_says(page: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    blocks = BLOCK.findall(PAGES[page])
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for variable, (fixture, attribute) in SERVERS.items():
        if variable in PAGES[page]:
            environment[variable] = getattr(request.getfixturevalue(fixture), attribute)
    program = tmp_path / "page.py"
    program.write_text("\n".join(text for kind, text in blocks if kind == "python"), encoding="utf-8")

    command = [sys.executable, str(program)]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "".join(text for kind, text in blocks if kind == "text"), ended.stderr
