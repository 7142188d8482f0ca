# SPDX-License-Identifier: Apache-2.0

"""Who asks a part's half on the driver for something, and which of its requests it is."""

from __future__ import annotations

from typing import NamedTuple


class Asker(NamedTuple):
    """An attempt."""

    operator_id: str
    subtask: int
    attempt: int


class Ticket(NamedTuple):
    """A request. ``number`` is the asker's own, and never comes again after it was given up or released."""

    asker: Asker
    number: int
