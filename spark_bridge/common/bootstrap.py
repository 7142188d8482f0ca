# SPDX-License-Identifier: Apache-2.0

"""Makes packages importable on an executor that has not installed them.

The archive that the driver ships (``spark_bridge.driver.shipping``) carries msgpack's pure-Python half and fsspec in a
separate folder, so that installed ones take precedence: an installed msgpack is faster, and installed filesystems match
the installed fsspec.
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
    """Make ``package`` importable, if the driver ships it. Raises as ``ensure_msgpack``."""
    if importlib.util.find_spec(package) is not None:
        return
    vendored = str(Path(__file__).parent.parent.parent / VENDORED)
    added = vendored not in sys.path
    if added:
        sys.path.append(vendored)  # last, so that everything on the user's path takes precedence
    importlib.invalidate_caches()
    if importlib.util.find_spec(package) is None:
        if added:
            sys.path.remove(vendored)
        raise ModuleNotFoundError(
            f"no module named {package!r} for the Python of this Spark worker, {sys.executable}. Either set "
            f"PYSPARK_PYTHON to a Python that has {package}, before the session is created, or let the sidecar ship "
            "Headgate's packages to the executors",
            name=package,
        )
