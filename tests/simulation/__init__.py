"""A whole application in one thread: the real machines, a pretended engine, a lossy network, one seed.

``python -m tests.simulation --seeds 200`` runs many worlds, ``--seed N`` one of them, with its story.
"""
