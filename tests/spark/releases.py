# SPDX-License-Identifier: Apache-2.0

"""Differences between the supported releases of PySpark that matter to the tests. The product needs none of them."""

from __future__ import annotations

from py4j.protocol import Py4JError
from pyspark import __version__ as VERSION

LEAVES_SOCKETS = VERSION.startswith("4.1.")
"""This release leaves it to the garbage collector to close PySpark's sockets."""

RAISED_BY_CTRL_C: type[BaseException] = Py4JError if VERSION.startswith("4.1.") else KeyboardInterrupt
"""What an action ended by Ctrl-C raises: up to 4.1, Spark's handler fails to reach the JVM and raises that error."""

HAS_DARK_MODE = not VERSION.startswith("4.1.")
"""Whether Spark's UI follows the browser into dark mode."""
