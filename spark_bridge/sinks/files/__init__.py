# SPDX-License-Identifier: Apache-2.0

"""Exactly-once files from a streaming operator: sealed in the snapshot, visible when the checkpoint completes.

In the task, ``FileWriter`` writes rows into part files in a directory that readers ignore. On the driver,
``FileCommitter`` moves the listed files to the readers' directory when the checkpoint that covers them is complete.
``two_phase/ledger`` explains why nothing is lost or written twice.
"""
