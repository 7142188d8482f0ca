"""What differs between the supported releases of PySpark, as far as the tests see it. The product needs none of it."""

from __future__ import annotations

from py4j.protocol import Py4JError
from pyspark import __version__ as VERSION

LEAVES_SOCKETS = VERSION.startswith("4.1.")
"""It leaves it to the garbage collector to close its own sockets."""

RAISED_BY_CTRL_C: type[BaseException] = Py4JError if VERSION.startswith("4.1.") else KeyboardInterrupt
"""What an action raises that a Ctrl-C ends: up to 4.1, Spark's handler fails at speaking to the JVM and raises that."""
