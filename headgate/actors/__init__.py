# SPDX-License-Identifier: Apache-2.0

"""The actor runtime: typed messages, bounded mailboxes, supervision, and a virtual clock for tests.

It needs neither Spark nor Java. Everything here is also importable from ``actors``, and is the same object::

    from headgate.actors import Actor, ActorContext, ActorSystem
"""

import spark_bridge.common  # noqa: F401, I001  # first: refuses a foreign package in the place of ours
import actors as _actors
from actors import *  # noqa: F403

__all__: list[str] = []
__all__ += _actors.__all__


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
