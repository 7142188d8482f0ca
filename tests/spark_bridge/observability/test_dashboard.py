# SPDX-License-Identifier: Apache-2.0

"""The Grafana dashboard names only figures and labels that exist; tests/spark/observability asks a real Prometheus."""

from __future__ import annotations

import re

from spark_bridge.observability.figures import FAMILIES
from tests.spark_bridge.observability.dashboard import alerts, dashboard, queries

SUFFIXES = re.compile("_(sum|count|bucket)$")
BY_NAME = {family.full_name: family for family in FAMILIES}


def test_every_query_asks_for_figures_and_labels_that_exist() -> None:
    for panel, query in queries("1m").items():
        asked = re.findall(r"(headgate_\w+)\{([^}]*)\}", query)
        assert asked, panel
        assert "$" not in query, panel
        for name, selector in asked:
            family = BY_NAME.get(name) or BY_NAME[SUFFIXES.sub("", name)]
            labels = set(re.findall(r"(\w+)=", selector))
            allowed = {"job", *family.labels} | ({"le"} if family.kind == "histogram" else set())
            assert labels <= allowed, panel
            assert ("operator" in labels) == ("operator" in family.labels), panel
        for grouped in re.findall(r"by \((\w+)", query):
            assert all(grouped in BY_NAME[SUFFIXES.sub("", name)].labels for name, _ in asked), panel


def test_counters_are_shown_as_rates_and_gauges_as_they_are() -> None:
    for panel, query in queries("1m").items():
        for name in re.findall(r"headgate_\w+", query):
            counts = name.endswith(("_total", "_sum", "_count", "_bucket"))
            assert counts == bool(re.search(rf"(rate|increase)\({name}", query)), panel


def test_panels_have_titles_descriptions_and_do_not_overlap() -> None:
    panels = [panel for panel in dashboard()["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in dashboard()["panels"]}) == len(dashboard()["panels"])
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        assert panel["title"]
        assert panel["description"].endswith(".")
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


def test_the_alerts_of_the_page_name_figures_that_exist() -> None:
    assert len(alerts()) == 6
    for alert, expression in alerts().items():
        assert all(name in BY_NAME for name in re.findall(r"headgate_\w+", expression)), alert
