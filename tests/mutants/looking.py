# SPDX-License-Identifier: Apache-2.0

"""Mutants: what shows, exports or logs something harms what it shows."""

from __future__ import annotations

from tests.mutants.mutant import catalogue

LOOKING = catalogue(
    """
a-display-takes-the-sidecar-along [found; H155]
  A failure of the tab escalates, and the sidecar ends with all its jobs.
  @ spark_bridge.observability.displays:_DisplayActor._contained
  - self._displays.failed(self._name, error)
  + raise
a-subscriber-harms-the-operator [new; H155]
  What a trace raises reaches the operator that it watches.
  @ spark_bridge.observability.displays:Displays.run
  - self.failed(name, error)
  + raise
a-broken-display-never-pauses [new; H155]
  A display that is broken permanently is tried each time.
  @ spark_bridge.observability.displays:Displays.failed
  - pauses = display.in_a_row >= FAILURES_MAX
  + pauses = False
every-failure-of-a-display-is-logged [new; H155]
  The log has a line for each failure, once a second.
  @ spark_bridge.observability.displays:Displays.failed
  - is_new = kind not in display.told
  + is_new = True
a-line-that-cannot-be-written-raises [new; H155]
  A processor of the log fails the coordinator that writes a line.
  @ actors.logs:Log._write
  - return None
  + raise
a-bar-keeps-the-lock-of-all-bars [found; H155]
  A progress bar that cannot be drawn makes the program wait forever.
  @ spark_bridge.observability.progress:Progress._draw
  - self._bar_class.get_lock().release()
  + pass
nan-is-counted [found; H156]
  A NaN is counted, and reaches JSON.
  @ spark_bridge.primitives.counters.book:_number
  - if type(number) is float and isfinite(number):
  + if type(number) is float:
a-forged-book-fails-the-job [new; H156]
  What a forged task sends fails the job of its operator.
  @ actors.coordination.coordinator:CoordinatorActor._handle_event
  - self._condemn(attempt, f"a forged event from the task: {error}")
  + self.raise_global_failure("handle_event_from_operator", error, context)
json-has-what-no-reader-takes [found; H156]
  A status has a NaN, which strict readers of JSON refuse.
  @ protocol.describing:as_json
  - ensure_ascii=False, allow_nan=False)
  + ensure_ascii=False)
a-terminal-obeys-a-name [found; H156]
  A control character reaches the terminal.
  @ protocol.describing:line
  - if text.isprintable():
  + if text:
an-event-of-another-form-ends-the-history [found; H155]
  One damaged event ends the command with a traceback.
  @ spark_bridge.observability.history:read_timeline
  - skipped += 1
  + raise
"""
)
