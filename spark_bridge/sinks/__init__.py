# SPDX-License-Identifier: Apache-2.0

"""Sinks that commit exactly once, with the checkpoints of a streaming operator.

``two_phase`` has the pattern, and each other package one sink.

Nothing is loaded here, because executors import this package too.
"""
