# SPDX-License-Identifier: Apache-2.0

"""What the attempts of one Python worker share, and what they must not leave behind (H57; spark-facts 18)."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from protocol.wire.messages import Opened, Register
from spark_bridge.subtask import AttemptOver, SubtaskContext, TaskIdentity, run_subtask
from spark_bridge.subtask.channel import SubtaskChannel, attached_keys
from tests.spark_bridge.subtask.operators import Calling, Recorder, channel_of
from tests.spark_bridge.subtask.peer import PATIENCE_S, TASK_ID, Peer, RunningTask, registered


def test_while_a_task_is_attached_threads_take_turns_more_often(peer: Peer) -> None:  # H23; spark-facts 23
    usual = sys.getswitchinterval()
    for _ in range(2):  # Spark runs the next task in the same process
        task, _ = peer.run(Calling(lambda context: sys.getswitchinterval()))
        assert peer.finish(task) == [pytest.approx(0.0005)]
        assert sys.getswitchinterval() == usual


def test_a_switch_interval_of_zero_leaves_the_interpreter_alone(peer: Peer) -> None:
    usual = sys.getswitchinterval()
    task, _ = peer.run(Calling(lambda context: sys.getswitchinterval()), switch_interval_s=0)
    assert peer.finish(task) == [usual]


def test_two_attempts_in_one_process_do_not_meet(peer: Peer) -> None:  # H1: keyed by task attempt
    one = RunningTask(Recorder, peer.endpoint(), [1], task_attempt_id=1)
    first = peer.accept()
    assert first.expect(Register).task_attempt_id == 1
    two = RunningTask(Recorder, peer.endpoint(), [2], task_attempt_id=2)
    second = peer.accept()
    assert second.expect(Register).task_attempt_id == 2
    assert attached_keys() == [(1, "words"), (2, "words")]
    for connection, task_id in ((second, 2), (first, 1)):
        connection.send(registered(task_id))
        connection.expect(Opened)
        connection.finish()
    assert (one.outputs(), two.outputs()) == ([1], [2])


def test_two_operators_may_share_a_task(peer: Peer) -> None:
    def chained() -> Iterator[Any]:
        yield from run_subtask(Recorder, peer.endpoint(operator_id="inner"), _identity(TASK_ID), [1, 2])

    task, outer = peer.run(Recorder, chained(), operator_id="outer")
    inner = peer.take_task()
    assert attached_keys() == [(TASK_ID, "inner"), (TASK_ID, "outer")]
    inner.finish()
    outer.finish()
    assert task.outputs() == [1, 2]


def test_the_next_task_of_a_worker_ends_what_the_last_one_left_behind(peer: Peer) -> None:  # spark-facts 18
    kept: list[Any] = []

    def worker() -> Iterator[Any]:
        first = run_subtask(Recorder, peer.endpoint(), _identity(1), [1, 2, 3])
        kept.append(first)  # as a traceback or a cache of the user's might
        yield next(first)
        yield from run_subtask(lambda: Calling(lambda context: attached_keys()), peer.endpoint(), _identity(2), [])

    task = RunningTask(Recorder, peer.endpoint(), body=worker)
    first = peer.take_task()
    peer.take_task()
    first.expect_end()
    assert peer.finish(task) == [1, [(2, "words")]]
    with pytest.raises(AttemptOver):
        next(kept[0])


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # Python 3.12 warns about what is tested here
def test_a_forked_child_lets_go_without_a_word(peer: Peer) -> None:
    usual = sys.getswitchinterval()

    def body(context: SubtaskContext) -> int:
        child = os.fork()
        if child == 0:
            try:
                quiet = attached_keys() == [] and context.cancelled and sys.getswitchinterval() == usual
                try:
                    context.send_event("from the child")
                except AttemptOver as error:
                    quiet = quiet and "forked" in str(error)
                else:
                    quiet = False
            except BaseException:
                quiet = False
            os._exit(0 if quiet else 1)
        _, status = os.waitpid(child, 0)
        return os.waitstatus_to_exitcode(status)

    task, _ = peer.run(Calling(body))
    assert peer.finish(task) == [0]  # on the same connection


def test_a_generator_in_a_cycle_is_ended_by_the_garbage_collector(peer: Peer) -> None:  # H57
    def worker() -> Iterator[Any]:
        cycle: list[Any] = [run_subtask(Recorder, peer.endpoint(), _identity(1), [1, 2])]
        cycle.append(cycle)
        yield next(cycle[0])
        del cycle
        gc.collect()
        yield attached_keys()

    task = RunningTask(Recorder, peer.endpoint(), body=worker)
    connection = peer.take_task()
    assert connection.finish().failure == ""
    connection.expect_end()
    assert task.outputs() == [1, []]


def test_the_garbage_collector_may_end_a_task_on_any_thread(peer: Peer) -> None:
    # H57: in that case without a completion message
    def worker() -> Iterator[Any]:
        left = [run_subtask(Recorder, peer.endpoint(), _identity(1), [1, 2])]
        yield next(left[0])
        thread = threading.Thread(target=left.clear)
        thread.start()
        thread.join()
        yield attached_keys()

    task = RunningTask(Recorder, peer.endpoint(), body=worker)
    peer.take_task().expect_end()
    assert task.outputs() == [1, []]


def test_the_garbage_collector_may_end_a_task_on_the_io_thread_of_that_task(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:  # H57: which cannot wait for itself, and leaves nothing behind
    operator, left, pass_time = Recorder(), list[Iterator[Any]](), SubtaskChannel.pass_time

    def collect(channel: SubtaskChannel) -> float | None:
        left.clear()
        return pass_time(channel)

    def worker() -> Iterator[Any]:
        left.append(run_subtask(lambda: operator, peer.endpoint(), _identity(1), [1, 2]))
        yield next(left[0])
        channel = channel_of(operator)
        monkeypatch.setattr(SubtaskChannel, "pass_time", collect)
        channel.waker.wake()
        assert channel._thread is not None
        channel._thread.join(PATIENCE_S)
        yield attached_keys()

    task = RunningTask(Recorder, peer.endpoint(), body=worker)
    peer.take_task().expect_end()
    assert task.outputs() == [1, []]


def _identity(task_attempt_id: int) -> TaskIdentity:
    return TaskIdentity(task_attempt_id=task_attempt_id, subtask=0, run_id=0, attempt_number=0)
