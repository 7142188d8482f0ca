# SPDX-License-Identifier: Apache-2.0

"""The driver's half of an operator's parts: which coordinators there are, and what each is given (H80, R101).

``part`` has a ``Part`` for each, with its current *incarnation*. ``incarnation`` is what the others know of it: who
acts, and whether it still may. ``context`` and ``gateway`` have the one class that implements ``CoordinatorContext``
and ``SubtaskGateway``, and the sight of all gateways together. Each of their objects belongs to one incarnation of one
part. ``given`` turns what a user has given for a part into a coordinator, or refuses it. Nothing here imports
``engine/``.
"""
