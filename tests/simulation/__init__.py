# SPDX-License-Identifier: Apache-2.0

"""Simulate a whole application in one thread: the real machines, a simulated engine, a lossy network, one seed.

``python -m tests.simulation --seeds 200`` runs many worlds. ``--seed N`` runs one and prints its story.
"""
