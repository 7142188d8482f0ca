# SPDX-License-Identifier: Apache-2.0

"""Parquet files that tasks write next to a table's own, and that a table format's commit makes visible."""
