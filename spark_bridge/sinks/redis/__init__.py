# SPDX-License-Identifier: Apache-2.0

"""Entries of a Redis stream: staged by tasks, moved to the stream by the driver, in one script."""
