# SPDX-License-Identifier: Apache-2.0

"""The actors of an operator, and what they tell each other.

``barrier_tracker``, ``coordinator`` and ``gateway`` have one actor each, ``messages`` what they send each other. The
tracker and the gateway each have a machine of ``protocol/`` inside, and do what it decides: they send, store and wait.
The coordinator calls the parts that ``host/`` has.
"""
