"""Packages on an executor that has none of them.

The archive that the driver ships (``spark_bridge.driver.shipping``) carries msgpack's pure-Python half and fsspec in a
separate folder, so that installed ones come first: an installed msgpack is faster, and the installed filesystems were
made for the installed fsspec.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

__all__ = ["VENDORED", "ensure_importable", "ensure_msgpack"]

VENDORED = "headgate_vendored"


def ensure_msgpack() -> None:
    """Make ``msgpack`` importable. Raises ``ModuleNotFoundError`` with the fix when that cannot be done."""
    ensure_importable("msgpack")


def ensure_importable(package: str) -> None:
    """Make ``package`` importable, if it is one that travels. Raises as ``ensure_msgpack``."""
    if importlib.util.find_spec(package) is not None:
        return
    vendored = str(Path(__file__).parent.parent.parent / VENDORED)
    added = vendored not in sys.path
    if added:
        sys.path.append(vendored)  # last: whatever else the user put on the path comes first
    importlib.invalidate_caches()
    if importlib.util.find_spec(package) is None:
        if added:
            sys.path.remove(vendored)
        raise ModuleNotFoundError(
            f"no module named {package!r} for the Python of this Spark worker, {sys.executable}. Either set "
            f"PYSPARK_PYTHON to a Python that has {package} (before the session is built), or let the sidecar ship "
            "headgate's packages to the executors",
            name=package,
        )
