# SPDX-License-Identifier: Apache-2.0

"""Tests for actors: virtual time, a repeatable order of delivery, and probes.

Everything here is also importable from ``actors.testing``, and is the same object.
"""

import actors.testing as _testing
from actors.testing import *  # noqa: F403

__all__: list[str] = []
__all__ += _testing.__all__


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
