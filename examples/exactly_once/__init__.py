# SPDX-License-Identifier: Apache-2.0

"""The parts of ``examples/exactly_once_pipeline.py``: ``pipeline`` is what a user would write, the rest tests it."""
