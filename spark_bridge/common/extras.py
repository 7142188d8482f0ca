# SPDX-License-Identifier: Apache-2.0

"""The packages of optional extras, and what to do if one is missing."""

from __future__ import annotations

import sys
from importlib.util import find_spec

__all__ = ["require"]


def require(package: str, extra: str) -> None:
    """Raise ``ModuleNotFoundError`` if this Python has no ``package``; the text says which extra brings it, and where.

    Call it before the import of anything that imports the package.
    """
    if package not in sys.modules and find_spec(package) is None:
        raise ModuleNotFoundError(
            f"the package {package} is not installed for this Python, {sys.executable}: pip install "
            f"'headgate[{extra}]', on the driver and for the workers' Python on every executor",
            name=package,
        )
