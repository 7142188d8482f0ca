# SPDX-License-Identifier: Apache-2.0

"""Hostile input for everything that reads bytes from outside: codec, framing, handshake, checkpoint files, relay
records, and the server with everything behind it (H60, H61, H62).

``python -m tests.fuzz`` runs the targets for the requested time; the tests here run a short part of each.
"""
