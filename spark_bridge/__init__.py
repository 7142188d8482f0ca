# SPDX-License-Identifier: Apache-2.0

"""Headgate for Apache Spark: what runs on the driver, and (in ``spark_bridge.subtask``) what runs in its tasks.

Users import from ``headgate``. Executors import this package too, so only what every import of it needs happens here:
the path is checked, and msgpack is made importable, because any module can be the first that a worker unpickles.
"""

from contextlib import suppress

from spark_bridge.common.bootstrap import ensure_msgpack
from spark_bridge.common.foreign_packages import refuse_foreign_packages

refuse_foreign_packages()
with suppress(
    ModuleNotFoundError
):  # `spark_bridge.subtask` says what to do; the front door can be looked at without it
    ensure_msgpack()
del ensure_msgpack, refuse_foreign_packages, suppress
