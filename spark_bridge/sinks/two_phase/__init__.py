# SPDX-License-Identifier: Apache-2.0

"""The pattern of all sinks: prepared in the snapshot, committed when the checkpoint completes.

``sink`` is what a new sink implements: a writer for the tasks, a committer for the driver. Everything else is ready:
``task`` has the operator, which writes and lists what was prepared, and ``driver`` the coordinator, which decides what
is committed and what is destroyed. ``ledger`` explains why nothing is lost or written twice.
"""
