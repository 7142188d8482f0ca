# SPDX-License-Identifier: Apache-2.0

"""Rows in a Delta table: files written by tasks, added to the table by the driver."""
