# SPDX-License-Identifier: Apache-2.0

"""Mutants: what shows, exports or logs something harms what it shows."""

from __future__ import annotations

from tests.mutants.mutant import catalogue

LOOKING = catalogue(
    """
a-display-takes-the-sidecar-along [found; H155]
  A failure of the tab escalates, and the sidecar ends with all its jobs.
  @ spark_bridge.observability.displays:_DisplayActor._contained
  ~ self._displays.failed(self._name, error) => raise
a-subscriber-harms-the-operator [new; H155]
  What a trace raises reaches the operator that it watches.
  @ spark_bridge.observability.displays:Displays.run
  ~ self.failed(name, error) => raise
a-broken-display-never-pauses [new; H155]
  A display that is broken permanently is tried each time.
  @ spark_bridge.observability.displays:Displays.failed
  ~ pauses = display.in_a_row >= FAILURES_MAX => pauses = False
every-failure-of-a-display-is-logged [new; H155]
  The log has a line for each failure, once a second.
  @ spark_bridge.observability.displays:Displays.failed
  ~ is_new = kind not in display.told => is_new = True
a-line-that-cannot-be-written-raises [new; H155]
  A processor of the log fails the coordinator that writes a line.
  @ actors.logs:Log._write
  ~ return None => raise
a-bar-keeps-the-lock-of-all-bars [found; H155]
  A progress bar that cannot be drawn makes the program wait forever.
  @ spark_bridge.observability.progress:Progress._draw
  - self._bar_class.get_lock().release()
nan-is-counted [found; H156]
  A NaN is counted, and reaches JSON.
  @ spark_bridge.primitives.counters.book:_number
  ~ if type(number) is float and isfinite(number): => if type(number) is float:
a-forged-book-fails-the-job [new; H156]
  What a forged task sends fails the job of its operator.
  @ actors.coordination.engine.coordinator:CoordinatorActor._handle_event
  - self._condemn(attempt, f"a forged event from the task: {error}")
  + self.raise_global_failure("handle_event_from_operator", error)
json-has-what-no-reader-takes [found; H156]
  A status has a NaN, which strict readers of JSON refuse.
  @ protocol.describing:as_json
  ~ ensure_ascii=False, allow_nan=False) => ensure_ascii=False)
a-terminal-obeys-a-name [found; H156]
  A control character reaches the terminal.
  @ protocol.describing:line
  ~ if text.isprintable(): => if text:
an-event-of-another-form-ends-the-history [found; H155]
  One damaged event ends the command with a traceback.
  @ spark_bridge.observability.history:read_timeline
  ~ skipped += 1 => raise
a-line-that-was-skipped-has-no-place [new; H155]
  Nobody learns which line of an event log cannot be read.
  @ spark_bridge.observability.history:read_timeline
  - first_skipped = first_skipped or f"line {number} of {file}"
a-sum-becomes-infinite [found; H156]
  Finite counts add up to infinity, and two of these to NaN.
  @ spark_bridge.primitives.counters.book:plus
  ~ return int(one) + int(other) if type(total) is float and not isfinite(total) else total => return total
a-sum-of-what-was-observed-becomes-nan [found; H156]
  What two tasks have observed adds up to NaN.
  @ spark_bridge.primitives.counters.book:Book.add
  ~ known[1] = plus(known[1], total) => known[1] += total
a-long-sum-of-what-was-observed-cannot-leave [found; H156]
  A task whose observed values add up above all floats fails when it reports them.
  @ spark_bridge.primitives.counters.book:Book.as_value
  ~ [times, _packed(total), *rest] => [times, total, *rest]
a-total-keeps-what-a-lost-attempt-had-counted [new; H156]
  The total on the page has the counts of attempts that were lost.
  @ spark_bridge.primitives.counters.driver:CountersCoordinator._recount
  - total.add(-before.get(name, 0))
a-total-rounds-as-it-adds [found; H156]
  A large count that was lost takes small ones along.
  @ spark_bridge.primitives.counters.book:Total.add
  - self._floats += above * (_SMALLEST // below)
  + self._floats = round(float(self._floats / _SMALLEST + number)) * _SMALLEST
a-forged-infinity-is-a-count [new; H156]
  A forged task makes the sum of all tasks infinite.
  @ spark_bridge.primitives.counters.book:_is_finite
  ~ isfinite(number) => True
a-count-has-no-visible-name [found; H156]
  A counter is named with a blank.
  @ spark_bridge.primitives.counters.book:_is_name
  ~ bool(str.strip(name)) => len(name) > 0
an-operator-has-no-visible-name [found; H156]
  An operator is named with a blank.
  @ protocol.arguments:_is_label
  ~ bool(str.strip(value)) => value != ""
the-value-of-an-unknown-argument-is-shown [found; H156]
  A secret that was given with a misspelt option is in the log.
  @ spark_bridge.command:_shown
  ~ return f"{name}{equals and '=...'}" if name.startswith("--") else "..." => return argument
an-option-may-be-abbreviated [found; H156]
  A token is taken for the name of the file in which it should be.
  @ spark_bridge.command:parser
  ~ allow_abbrev=False => allow_abbrev=True
a-value-where-none-is-taken-is-shown [found; H156]
  A secret after an option that takes no value is in the log.
  @ spark_bridge.command:_Parser.error
  ~ _GIVEN.sub(r"\\1 (not shown)", message) => message
a-reader-that-leaves-is-an-error [found; H155]
  Help that nobody reads to its end ends with a text of Python's.
  @ spark_bridge.command:main
  - sys.stdout.flush()
an-older-trace-can-be-read-by-others [found; H155]
  A trace that replaces one of mode 0644 has this mode.
  @ spark_bridge.observability.trace:_created
  - os.fchmod(descriptor, 0o600)
a-tab-that-cannot-be-opened-is-not-counted [found; H155]
  The status does not say that the tab is missing.
  @ spark_bridge.observability.spark_ui:SparkTabActor.receive
  ~ raise SidecarError(f"Spark's UI cannot have a tab: {cause}") from None => return
gauges-that-cannot-be-registered-are-not-counted [found; H155]
  The status does not say that the gauges are missing.
  @ spark_bridge.observability.spark_metrics:SparkGaugesActor.receive
  ~ raise SidecarError(f"Spark cannot register the gauges: {cause}") from None => return
notes-that-cannot-be-posted-are-not-counted [found; H155]
  The status does not say that the event log has no notes.
  @ spark_bridge.observability.event_log:EventLogActor._flush
  ~ raise SidecarError(f"Spark cannot take notes for its event log: {cause}") from None => return
spans-that-cannot-begin-end-the-sidecar [found; H155]
  A provider of spans that raises lets no sidecar begin.
  @ spark_bridge.driver.runtime:SidecarRuntime._enter
  ~ spans = self._displays.run("spans", Spans, journal) => spans = Spans(journal)
nobody-counts-what-a-bar-fails-at [found; H155]
  The status does not say that a progress bar is broken.
  @ spark_bridge.driver.handle:OperatorHandle.progress
  ~ displays=self._displays => displays=None
a-bar-that-cannot-begin-ends-the-program [found; H155]
  A progress bar raises before the action that it would show.
  @ spark_bridge.observability.progress:Progress.__enter__
  ~ self._displays.run("progress", self._begin) => self._begin()
a-browser-rounds-a-count [found; H156]
  The page shows another integer than the one that was counted, or infinity.
  @ spark_bridge.observability.page_data:_number
  ~ return str(number) if type(number) is int and abs(number) > FLOATS_EXACT_MAX else number => return number
a-list-of-checkpoints-is-json-that-strict-readers-refuse [found; H156]
  The name of a file is not Unicode, and is in JSON as a lone surrogate.
  @ spark_bridge.storage.inspection:run
  ~ plain([asdict(info) for info in infos]) => [asdict(info) for info in infos]
spans-stay-in-the-driver [new; H179]
  What a coordinator sends does not carry the span that is current there.
  @ actors.coordination.host.gateway:Gateway._send
  - if OPENTELEMETRY in modules:
  + if False:
spans-stay-in-the-task [new; H179]
  A request of a task does not carry its span.
  @ spark_bridge.subtask.context:SubtaskContext.request
  - if OPENTELEMETRY in modules:
  + if False:
spans-outlive-their-handler [new; H179]
  After a method of the coordinator its sender's span stays the current one.
  @ actors.coordination.host.traces:inside_span
  ~ result = await call(*args, **options) => return await call(*args, **options)
spans-are-in-files [new; H179]
  The file of a checkpoint says in which span an event was sent.
  @ protocol.wire.checkpoint_format:_held
  - yield split_traceparent(_bytes(event.payload, "a held event"))[1]
  + yield _bytes(event.payload, "a held event")
long-texts-of-peers [new; H179]
  A text of any length is taken for a span's.
  @ protocol.wire.traces:split_traceparent
  - if len(text) <= TRACEPARENT_BYTES_MAX else ""
  + if True else ""
"""
)
