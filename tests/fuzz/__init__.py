"""Hostile input for everything that reads bytes from outside: codec, framing, handshake, checkpoint files, relay
records, and the server with all that it serves (H60, H61, H62).

``python -m tests.fuzz`` runs the targets for as long as it is told; the tests here run a short part of each.
"""
