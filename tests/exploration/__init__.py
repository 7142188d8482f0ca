# SPDX-License-Identifier: Apache-2.0

"""Explores every interleaving of the machines together, in small scopes.

    from tests.exploration import SCOPES, explore

    result = explore(SCOPES["tiny"])
    assert result.violation is None, result.violation

``explore`` visits every reachable state of a scope with the current code of the machines: nothing is kept between two
calls. ``result.violation`` is None, or has ``rule``, ``text`` and ``path``, a shortest story.
"""

from tests.exploration.scopes import SCOPES, Scope
from tests.exploration.search import FoundViolation, Result, Search, Tell

__all__ = ["SCOPES", "FoundViolation", "Result", "Scope", "explore"]


def explore(scope: Scope, *, tell: Tell | None = None, reduce: bool = True, states_max: int | None = None) -> Result:
    """Explore one scope, up to its first violation. ``tell`` receives the progress, about once a second.

    ``reduce=False`` leaves no order out, which takes much longer and reaches the same ends. ``states_max`` stops the
    exploration beyond that number of states; ``result.complete`` is then False.
    """
    return Search(scope, reduce=reduce).run(tell, states_max=states_max)
