"""Exactly-once files out of a streaming operator: sealed at the snapshot, visible when the checkpoint completes.

Two halves. In the task, ``SinkWriter`` (or ``FileSinkOperator`` around it) writes rows into part files under a
directory that readers do not look at, and sends the list of what it sealed as an event inside its snapshot. On the
driver, ``SinkCommitter`` (or ``FileSinkCoordinator`` around it) moves the listed files to where readers look, once the
checkpoint that covers them is complete. ``books`` explains why nothing is lost or doubled.

Nothing is loaded here, because executors import this package too.
"""
