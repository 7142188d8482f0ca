# SPDX-License-Identifier: Apache-2.0

"""The ready-made coordinator that divides splits among readers, and the enumerators that find them.

It is a coordinator like a user's: nothing here imports from ``engine/`` or ``host/``.
"""
