# SPDX-License-Identifier: Apache-2.0

"""Rows in a PostgreSQL table: staged or prepared by tasks, committed by the driver."""
