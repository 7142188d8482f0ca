# SPDX-License-Identifier: Apache-2.0

"""Sinks that commit exactly once, with the checkpoints of a streaming operator.

``two_phase`` has the pattern, and each other package one sink.

Nothing is loaded here or in these packages, because executors import them too.
"""
