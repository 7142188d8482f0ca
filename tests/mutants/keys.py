# SPDX-License-Identifier: Apache-2.0

"""Mutants: a key or a password is where it must not be."""

from __future__ import annotations

from tests.mutants.mutant import catalogue

KEYS = catalogue(
    r"""
a-part-of-a-password-is-shown [found; H76]
  An error of a client is shown although a part of a password is in it.
  @ spark_bridge.common.secret_texts:Secrets.are_in
  ~ any(part in reading for reading in readings for part in self._parts) => False
a-traceback-shows-the-password [new; H76]
  An error whose text is left out is chained, so a traceback shows it.
  @ spark_bridge.common.secret_texts:Secrets.kept
  ~ made.__context__ = None => made.__context__ = error
a-filesystem-shows-what-its-store-says [found; H76]
  An error of a filesystem that is in use is shown, with the key that a store repeats in it.
  @ spark_bridge.common.secret_texts:Secrets.guarding
  ~ _Guarded(used, self) if self._parts else used => used
an-open-file-shows-what-its-store-says [found; H76]
  Only what a filesystem raises by itself is guarded, and not what an open file raises.
  @ spark_bridge.common.secret_texts:_Guarded.__call__
  ~ _Guarded(result, self._secrets) if hasattr(result, "readable") else result => result
a-token-in-a-url-is-shown [found; H76]
  The URL of files may have a token in its query.
  @ spark_bridge.common.secret_texts:check_no_password
  ~ _SECRET_PARAMETER.search(unquoted(url)) => None
savepoint-roots-are-not-looked-at [found; H76]
  A URL below which savepoints may be written may have a password in it.
  @ spark_bridge.driver.config:StorageDetails.__post_init__
  ~ for root in self.savepoint_roots or (): => for root in ():
planners-key-in-a-batch [found; H76]
  Spark sends the data source of a batch to the tasks, with the key of its planner.
  @ spark_bridge.task_source:source_format
  ~ (_Planned, name) if self._planned else (type(self), self.options) => (type(self), self.options)
planners-key-in-a-stream [found; H76]
  The source of a stream is sent to the tasks with the key of its planner.
  @ spark_bridge.task_source:source_format
  - self._planned = True
  -             return _StreamReader
  + self._planned = False
  +             return _StreamReader
planners-key-in-a-reader [found; H76]
  What reads a stream in tasks is what plans it, with its key.
  @ spark_bridge.task_source:_StreamReader.__reduce__
  - _BatchReader, (self._name, self._task, self._parallelism, self._schema)
  + _StreamReader, (self._name, self._task, self._stream, self._parallelism, self._schema)
a-task-may-plan [new; H76]
  The table says that a task may have the key of a planner, although none has it.
  By: tests/spark/test_keys_in_memory.py::test_a_batch_of_a_source_is_read_by_tasks_that_cannot_open_its_plan
  @ protocol.wire.keys:MAY_HOLD
  - Purpose.STREAMS: _SPARK | {Holder.DRIVER, Holder.CLIENT, Holder.PLANNER}
  + Purpose.STREAMS: _SPARK | {Holder.DRIVER, Holder.CLIENT, Holder.PLANNER, Holder.TASK}
a-planner-may-have-no-key-of-tasks [new; H76]
  The table leaves out a key that a planner passes on to the tasks.
  By: tests/spark/test_keys_in_memory.py::test_each_process_of_a_driver_has_the_keys_of_the_table_and_no_others
  @ protocol.wire.keys:MAY_HOLD
  ~ {Holder.PLANNER, Holder.TASK} => {Holder.TASK}
every-job-is-the-sessions [found; H159]
  A client is told about every job of the server.
  By: tests/spark/connect/test_connect.py::test_two_clients_with_the_same_operator_name_learn_only_of_their_jobs
  @ spark_bridge.connect:SessionRelay.java
  ~ return origin.equals(originOf(job)); => return true;
any-job-is-cancelled [found; H159]
  A client cancels a job of another session by its id.
  By: tests/spark/connect/test_connect.py::
  test_a_client_neither_learns_of_the_jobs_of_another_one_nor_commands_them
  @ spark_bridge.bridge.relay:TaskEventRelay.java
  ~ if (includes((Properties) null) || jobIsActive(jobId)) { => if (true) {
any-task-is-killed [found; H159]
  A client kills a task of another session by its id.
  By: tests/spark/connect/test_connect.py::
  test_a_client_neither_learns_of_the_jobs_of_another_one_nor_commands_them
  @ spark_bridge.bridge.relay:TaskEventRelay.java
  ~ known == null ? includes((Properties) null) : => known == null ? true :
any-running-task-is-told [found; H159]
  A client learns whether a task of another session runs, and where.
  By: tests/spark/connect/test_connect.py::
  test_a_client_neither_learns_of_the_jobs_of_another_one_nor_commands_them
  @ spark_bridge.bridge.relay:TaskEventRelay.java
  ~ place == null || !includes(place.taskSet().properties()) => place == null
any-ended-task-is-told [new; H159]
  A client learns from Spark's store how a task of another session has ended.
  By: tests/spark/connect/test_connect.py::
  test_a_client_neither_learns_of_the_jobs_of_another_one_nor_commands_them
  @ spark_bridge.bridge.relay:TaskEventRelay.java
  ~ if (!includesStage(data.stageId())) { => if (false) {
any-job-is-told [found; H159]
  A client learns whether a job of another session is active.
  By: tests/spark/connect/test_connect.py::
  test_a_client_neither_learns_of_the_jobs_of_another_one_nor_commands_them
  @ spark_bridge.bridge.relay:TaskEventRelay.java
  ~ return includes((ActiveJob) found.get()); => return true;
any-stage-is-told [found; H159]
  A client learns what a stage of another session computes.
  By: tests/spark/connect/test_connect.py::
  test_a_client_neither_learns_of_the_jobs_of_another_one_nor_commands_them
  @ spark_bridge.bridge.relay:TaskEventRelay.java
  ~ boolean included = includesStage(stageId); => boolean included = true;
all-stages-are-told [found; H159]
  A sidecar that takes over is told the stages of all sessions.
  By: tests/spark/connect/test_connect.py::
  test_a_client_neither_learns_of_the_jobs_of_another_one_nor_commands_them
  @ spark_bridge.bridge.relay:TaskEventRelay.java
  - if (!includes(job)) {
  -                 continue;
  -             }
  -             scala.collection.Iterator stages
  + includes(job);
  +             scala.collection.Iterator stages
a-look-tells-all-jobs [found; H159]
  A client that asks about one job is told about all that are active.
  By: tests/spark/connect/test_connect.py::
  test_a_client_neither_learns_of_the_jobs_of_another_one_nor_commands_them
  @ spark_bridge.bridge.relay:TaskEventRelay.java
  - if (!includes(job)) {
  -                     continue;
  -                 }
  -                 List stageIds
  + includes(job);
  +                 List stageIds
a-relay-outlives-its-session [found; H159]
  The relay of a session that has ended goes on.
  By: tests/spark/connect/test_connect.py::test_each_session_of_a_client_has_its_own_relay_which_ends_with_it
  @ spark_bridge.connect:SessionRelay.java
  ~ return sessionEnded || System => return System
a-setting-names-the-session [found; H159]
  A client says in spark.job.tags whose jobs it is told about.
  By: tests/spark/connect/test_connect.py::
  test_a_client_whose_jobs_bear_the_name_of_another_session_gets_no_relay_for_that
  @ spark_bridge.connect:SessionFunction.java
  ~ origin == null || SQLConf.get().contains(SessionRelay.TAGS) => origin == null
a-request-names-the-session [found; H159]
  A client that has a secret of the server's asks for the relay of another session.
  By: tests/spark/connect/test_connect_installed.py::
  test_a_client_whose_jobs_bear_the_name_of_another_session_gets_no_relay_for_that
  @ spark_bridge.connect:InstalledRelays.java
  ~ if (!words[5].equals(session)) { => if (false) {
"""
)
