"""What holds for the whole suite: the order of the tests, and which of pyspark's leaks are forgiven where."""

from __future__ import annotations

import pytest

# pyspark and py4j leave sockets, pipes and child processes to the garbage collector. Our own leaks must still
# fail a test, so this is forgiven in tests that start a real Spark and nowhere else.
SPARK_LEAKS = (
    "ignore:unclosed <socket.socket:ResourceWarning",
    "ignore:unclosed file <_io:ResourceWarning",
    "ignore:subprocess \\d+ is still running:ResourceWarning",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the pure tests first: they fail within seconds, and Spark's leaks cannot show up among them."""
    for item in items:
        if item.get_closest_marker("spark"):
            for leak in SPARK_LEAKS:
                item.add_marker(pytest.mark.filterwarnings(leak))
    items.sort(key=lambda item: item.get_closest_marker("spark") is not None)
