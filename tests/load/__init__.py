# SPDX-License-Identifier: Apache-2.0

"""The load test: thousands of subtask ends under kills, strangers and a flooding neighbour. ``__main__`` runs it.

It is a test, not a benchmark: it fails if an event is lost, doubled or out of order, and its figures have no raw
baseline. The subtask ends and the simulated Spark come from ``benchmarks``, the strangers from ``tests.fuzz``.
"""
