# SPDX-License-Identifier: Apache-2.0

"""Deliberate bugs: each is a named change of one line of the product, which the hunters must detect.

``python -m tests.mutants`` changes the product in memory, one mutant at a time, and runs the simulation and the
exploration on it until one of their checkers objects. ``--list`` lists the mutants, ``NAME`` hunts one of them.
"""
