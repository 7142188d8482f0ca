"""Whether a run goes on with the enumeration of the run before it, or needs a new one (H56, H68).

A new action is a new enumeration. But sometimes the engine runs only a part of the partitions, and joins the results
with others that an earlier run has computed. Then the two together must have read each split once, so the enumeration
goes on:

- It has kept a part of an output (a persisted RDD, shuffle files), has lost the rest, and computes that again. What is
  computed again must read what it read before.
- It computes some partitions first, and others when it wants more, as ``take`` does. None of them is computed twice.

An output that an older enumeration has filled, whose books are gone, can be joined with nothing: rather no result than
a wrong one.
"""

from __future__ import annotations

from protocol.errors import LocalProtocolError
from protocol.facts import StageLook

__all__ = ["CurrentEnumeration"]

OUTPUTS_MAX = 65_536
"""How many outputs of earlier enumerations are remembered; the oldest go first."""


class CurrentEnumeration:
    """What the runs of one enumeration have computed. One thread at a time; nothing to close."""

    __slots__ = ("_earlier_outputs", "_outputs", "_partitions", "_runs")

    def __init__(self) -> None:
        self._partitions: set[int] = set()
        self._outputs: set[int] = set()
        self._earlier_outputs: dict[int, None] = {}
        self._runs = 0

    def goes_on_in(self, look: StageLook) -> bool:
        """Whether the run that ``look`` shows belongs to this enumeration. Nothing changes.

        Raises ``LocalProtocolError`` where it would have to be joined with an output of an older one.
        """
        lost_books = look.kept & self._earlier_outputs.keys() - self._outputs
        if lost_books:
            raise LocalProtocolError(
                "Spark has lost a part of an earlier action's output and computes it again, but a later action has"
                " enumerated the splits anew since: call unpersist() on what is cached, or build the RDD again, so"
                " that all of it is computed"
            )
        if look.kept & self._outputs:
            return True
        wants_a_part = len(look.partitions) < look.partition_count and not look.kept
        return bool(self._runs) and wants_a_part and not look.partitions & self._partitions

    def see(self, look: StageLook, *, anew: bool) -> None:
        """The run has begun, with a new enumeration if ``anew``."""
        if anew:
            self._earlier_outputs.update(dict.fromkeys(sorted(self._outputs)))
            while len(self._earlier_outputs) > OUTPUTS_MAX:
                del self._earlier_outputs[next(iter(self._earlier_outputs))]
            self._partitions, self._outputs, self._runs = set(), set(), 0
        self._partitions |= look.partitions
        self._outputs |= look.outputs
        self._runs += 1
