"""Bugs on purpose: each a named change of one line of the product, and proof that the hunters see it.

``python -m tests.mutants`` changes the product, one mutant at a time and never on the disk, and lets the simulation and
the exploration run on it until one of their checkers objects. ``--list`` says what there is, ``NAME`` hunts one mutant.
"""
