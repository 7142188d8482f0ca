# SPDX-License-Identifier: Apache-2.0

"""Headgate for Apache Spark: what runs on the driver, and (in ``spark_bridge.subtask``) what runs in its tasks.

Users import from ``headgate``. Only a check of the path is loaded here, because executors import this package too.
"""

from spark_bridge.foreign_packages import refuse_foreign_packages

refuse_foreign_packages()
del refuse_foreign_packages
