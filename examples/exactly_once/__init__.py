# SPDX-License-Identifier: Apache-2.0

"""The exactly-once pipeline: ``pipeline`` is what a user would write, the rest tests it."""
