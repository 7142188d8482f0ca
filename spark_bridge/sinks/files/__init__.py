# SPDX-License-Identifier: Apache-2.0

"""Exactly-once files from a streaming operator: sealed in the snapshot, visible when the checkpoint completes.

The sink has two halves. In the task, ``SinkWriter`` (or ``FileSinkOperator`` around it) writes rows into part files in
a directory that readers ignore, and sends the list of sealed files as an event inside its snapshot. On the driver,
``SinkCommitter`` (or ``FileSinkCoordinator`` around it) moves the listed files to the readers' directory when the
checkpoint that covers them is complete. ``ledger`` explains why nothing is lost or written twice.

Nothing is loaded here, because executors import this package too.
"""
