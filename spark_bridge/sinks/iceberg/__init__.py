# SPDX-License-Identifier: Apache-2.0

"""Rows in an Iceberg table: files written by tasks, added to the table by the driver."""
