"""What holds for the whole suite: the order of the tests."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the pure tests first: what they find, they find within seconds, a real Spark takes minutes."""
    items.sort(key=lambda item: item.get_closest_marker("spark") is not None)
