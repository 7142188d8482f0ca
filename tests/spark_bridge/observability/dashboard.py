# SPDX-License-Identifier: Apache-2.0

"""The queries of the Grafana dashboard, as Grafana would send them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[3] / "docs"
FILE = DOCS / "observability" / "headgate-dashboard.json"


def dashboard() -> dict[str, Any]:
    """The dashboard."""
    read: dict[str, Any] = json.loads(FILE.read_text())
    return read


def queries(rate_interval: str) -> dict[str, str]:
    """Every expression by panel and letter, with Grafana's variables replaced."""
    return {
        f"{panel['title']} {target['refId']}": target["expr"]
        .replace("$__rate_interval", rate_interval)
        .replace("$job", ".*")
        .replace("$operator", ".*")
        for panel in dashboard()["panels"]
        for target in panel.get("targets", ())
    }


def alerts() -> dict[str, str]:
    """The expressions of the alerts that the page recommends, by their names."""
    section = (
        (DOCS / "observability" / "metrics.md").read_text().partition("| alert | expression |")[2].partition("\n\n")[0]
    )
    return dict(re.findall(r"^\| (.+) \| `(.+)` \|$", section, re.MULTILINE))
