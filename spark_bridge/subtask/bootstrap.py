"""msgpack on an executor that has none.

The archive that the driver ships (``spark_bridge.shipping``) carries msgpack's pure-Python half in a folder
of its own, so that it is never preferred to an installed msgpack, which is faster.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

__all__ = ["VENDORED", "ensure_msgpack"]

VENDORED = "headgate_vendored"


def ensure_msgpack() -> None:
    """Make ``msgpack`` importable. Raises ``ModuleNotFoundError`` with the mend when that cannot be done."""
    if importlib.util.find_spec("msgpack") is not None:
        return
    vendored = str(Path(__file__).parent.parent.parent / VENDORED)
    if vendored not in sys.path:
        sys.path.append(vendored)  # last: whatever else the user put on the path comes first
    importlib.invalidate_caches()
    if importlib.util.find_spec("msgpack") is None:
        sys.path.remove(vendored)
        raise ModuleNotFoundError(
            f"no module named 'msgpack' for the Python of this Spark worker, {sys.executable}. Either set "
            "PYSPARK_PYTHON to a Python that has msgpack (before the session is built), or let the sidecar ship "
            "headgate's packages to the executors",
            name="msgpack",
        )
