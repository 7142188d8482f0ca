"""Headgate for Apache Spark: what runs on the driver, and (in ``spark_bridge.subtask``) what runs in its tasks.

Users import from ``headgate``. Nothing is loaded here, because executors import this package too.
"""
