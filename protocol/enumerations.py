# SPDX-License-Identifier: Apache-2.0

"""Decides whether a run continues the previous run's enumeration of splits or starts a new one (H56, H68).

A new action starts a new enumeration. But sometimes Spark computes only some of the partitions, and combines them with
results of an earlier run. Then both runs together must read each split once, so the enumeration continues:

- Spark has kept a part of an output (a persisted RDD, shuffle files), has lost the rest, and computes it again. The
  tasks must read the same splits as before.
- Spark computes some partitions first and others later, as ``take`` does. No partition is computed twice.

If an older enumeration filled the output and its assignments are forgotten, nothing can be combined with it. Then the
run fails, because its result could be wrong.
"""

from __future__ import annotations

from protocol.errors import LocalProtocolError
from protocol.facts import StageLook

OUTPUTS_MAX = 65_536
"""How many outputs of earlier enumerations are remembered. The oldest are dropped first."""


class CurrentEnumeration:
    """The outputs that the runs of one enumeration have computed. Not thread-safe; nothing to close."""

    __slots__ = ("_earlier_outputs", "_outputs", "_partitions", "_runs")

    def __init__(self) -> None:
        self._partitions: set[int] = set()
        self._outputs: set[int] = set()
        self._earlier_outputs: dict[int, None] = {}
        self._runs = 0

    def goes_on_in(self, look: StageLook) -> bool:
        """Whether the run that ``look`` describes belongs to this enumeration. Changes nothing.

        Raises ``LocalProtocolError`` if its results would be combined with an output of an older enumeration.
        """
        lost_books = look.kept & self._earlier_outputs.keys() - self._outputs
        if lost_books:
            raise LocalProtocolError(
                "Spark lost a part of an earlier action's output and computes it again, but a later action has"
                " enumerated the splits again since: call unpersist() on cached data, or build the RDD again, so"
                " that all of it is computed"
            )
        if look.kept & self._outputs:
            return True
        wants_a_part = len(look.partitions) < look.partition_count and not look.kept
        return bool(self._runs) and wants_a_part and not look.partitions & self._partitions

    def meet(self, look: StageLook) -> bool:
        """The run that ``look`` describes has begun: whether it continues, as ``goes_on_in`` says, or begins again."""
        goes_on = self.goes_on_in(look)
        self.see(look, anew=not goes_on)
        return goes_on

    def see(self, look: StageLook, *, anew: bool) -> None:
        """The run has begun. ``anew``: with a new enumeration."""
        if anew:
            self._earlier_outputs.update(dict.fromkeys(sorted(self._outputs)))
            while len(self._earlier_outputs) > OUTPUTS_MAX:
                del self._earlier_outputs[next(iter(self._earlier_outputs))]
            self._partitions, self._outputs, self._runs = set(), set(), 0
        self._partitions |= look.partitions
        self._outputs |= look.outputs
        self._runs += 1
