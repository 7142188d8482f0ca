# SPDX-License-Identifier: Apache-2.0

"""Bugs that no simulated world reaches, each caught by its own test: limits, turns of the loop, who speaks for whom."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from functools import partial
from inspect import isawaitable
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from headgate import CheckpointConfig
from spark_bridge.common.certificates import encryption
from tests import test_arguments
from tests.actors.coordination import test_failures_after_a_run
from tests.fuzz import pure, test_large_events
from tests.headgate import test_hostile_values
from tests.mutants.mutant import Mutant, catalogue
from tests.primitives import test_shared_value_files
from tests.protocol import test_codec, test_event_classes, test_event_values, test_fragments, test_handshake, test_state
from tests.spark_bridge import (
    test_actions,
    test_broken_operators,
    test_restarts,
    test_router,
    test_server_incomplete,
    test_server_shares,
    test_several_jobs,
    test_tls,
    test_wrong_arguments,
)
from tests.spark_bridge.sinks import test_tables

CATALOGUE = catalogue(r"""
forged-file [new; H110]
  A task takes whatever is in a file of its executor for the shared value.
  @ spark_bridge.primitives.shared_value.files:ValueFiles.read
  T if digest_of(payload) == digest:
all-fetch [new; H110]
  Each process of an executor fetches a large shared value, although another one fetches it.
  @ spark_bridge.primitives.shared_value.files:ValueFiles.begin
  - fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
no-token-check [X6; H74]
  Any task of an operator may resume any attempt of it.
  @ spark_bridge.bridge.router:ConnectionRouter._why_not_believed
  F if not hmac.compare_digest(token, message.token):
key-of-another-operator [X4; H76]
  A task of one operator may register and resume for another one.
  @ spark_bridge.bridge.router:ConnectionRouter._why_not_believed
  ~ connection.authenticated_as != identity_of(message.operator_id) => False
no-proof-check [X5; H61]
  Whatever a peer sends as its proof is believed.
  @ protocol.wire.handshake:_Handshake._take_proof
  F if not right or self._key is _NO_KEY:
no-key-is-a-key [X4; H76]
  An identity for which there is no key is served with a key of zeros, which anybody knows.
  @ protocol.wire.handshake:_Handshake._take_proof
  ~ if not right or self._key is _NO_KEY: => if not right:
identity-outside-the-transcript [X4; H76]
  The identity in the hello can be replaced on the way.
  @ protocol.wire.handshake:_Handshake._take_hello
  - + self._identify(identity) + self._in_order(peer_nonce)
  + + (self._identify(identity) and b"") + self._in_order(peer_nonce)
certificate-not-pinned [X7; H77]
  A task accepts any certificate, and so anybody between it and the sidecar.
  @ spark_bridge.common.tls:TlsStream._shake_hands
  F if self._pin is not None:
no-container-bound [X8; H62]
  An event may have any number of lists and maps: 4 MiB of empty maps take 300 MiB and seconds.
  @ protocol.wire.events:_Counts.add
  ~ self._containers > self._limits.event_containers_max => False
no-entry-bound [X8; H62]
  Only each list by itself has a limit of entries, and an event has many lists.
  @ protocol.wire.events:_Counts.add
  ~ self._items > self._limits.event_items_max => False
no-container-bound-at-the-sender [X8; H62]
  A sender learns only from the end of its attempt that an event has too many lists and maps.
  @ protocol.wire.events:_check_value
  ~ containers > limits.event_containers_max => False
large-maps [X8; H62]
  A map may have as many entries as a list: with crafted keys one map takes seconds.
  @ protocol.wire.events:_event_unpacker
  - , limits.event_map_entries_max
  +
members-of-one-hash [X8; H62 H95]
  A set may have thousands of decimals with one hash, and each is compared with all before it.
  @ protocol.wire.events:_refuse_equal_hashes
  ~ most > _EQUAL_HASHES_MAX => False
nesting-in-tuples [the closed table; H62 H95]
  Only lists and maps count as levels of an event, and its tuples and sets nest without a limit.
  @ protocol.wire.events:_check_nesting
  F if not _flat.issuperset(map(type, level)):
nesting-in-classes [the closed table; H62 H97]
  The values of users' classes nest without a limit.
  @ protocol.wire.events:_NestingBuilder._depth_over
  ~ deepest >= self._limits.event_nesting_max => False
decoded-in-one-step [X8; H62 H65]
  The coordinator's actor decodes an event of any size in one turn of the loop.
  @ actors.coordination.engine.coordinator:CoordinatorActor._decoded
  T if len(payload) <= EVENT_STEP_BYTES:
whole-reads [X9; H65]
  A connection hands over everything that a read delivers, in one turn of the loop.
  @ spark_bridge.server.connection:Connection._take_frames
  ~ len(bodies) > LIGHT => False
no-bound-over-incomplete-frames [X11; H62]
  Each connection may have an incomplete frame of the largest size at the same time.
  @ spark_bridge.server.connection:IncompleteFrames.changed
  - self._total <= self._bytes_max
  + True
no-deadline-of-a-frame [X11; H62]
  A peer that never sends the rest of a frame is kept.
  @ spark_bridge.server.connection:IncompleteFrames._why_too_slow
  - frame.size - before < PROGRESS_BYTES
  + False
small-ones-are-progress [new; H113]
  A peer that sends heartbeats between the parts need never send the rest of a large message.
  @ protocol.wire.fragments:FragmentDecoder._feed_large
  - bodies = self._frames.feed(data)
  + bodies = self._frames.feed(data); self.is_another |= bool(bodies)
any-claim [new; H62 H113]
  A large message may claim any size.
  @ protocol.wire.fragments:FragmentDecoder._begin
  F if not least <= size <= most:
everything-passes [new; H22 H112]
  What is sent after a large event leaves before it.
  @ protocol.wire.fragments:Outbox.put
  T if not self.busy or type(message) in PASSING:
no-patience-with-a-slow-reader [new; H114]
  A task that reads a large event slowly is killed, although it reads all the time.
  @ protocol.gateway.outbound:GatewayOutbound.progress
  - self._progressed = now - self._paused_s
all-parts-together [new; H113]
  A large message goes to the socket's buffer as a whole, however slowly the peer reads.
  @ spark_bridge.server.connection:Connection._pump
  - if not self._is_sending_large or self.is_write_paused or self._transport.is_closing():
  + if not self._is_sending_large or self._transport.is_closing():
nan-is-a-number [feared; H165]
  A setting that is not a number, or infinite, is accepted.
  @ protocol.arguments:_is_finite
  ~ return isfinite(value) => return True
any-type [feared; H165]
  A text is accepted for a number, and what is not a function for one.
  @ protocol.arguments:_Expected.check
  ~ if not has_type(value, self.hint) or ( => if (
keys-for-elements [found; H165]
  A dict passes where a list is meant, and its values are dropped.
  @ protocol.arguments:_has_elements
  ~ and not issubclass(origin, collections.abc.Mapping): => and False:
array-of-anything [found; H165]
  A collection that is neither a list nor a set may have any elements.
  @ protocol.arguments:_has_elements
  - if not args or not _is(value, collections.abc.Collection):
  + if not args or not _is(value, list | tuple | set | frozenset | dict):
value-called-an-event [found; H165]
  The error for a value that cannot be carried speaks of an event, which its caller does not know.
  @ protocol.wire.events:encode_argument
  ~ str(error).replace(_EVENT, name, 1) => str(error)
last-line-of-a-failure [found; H69]
  The text of a failure is the last line of the exception.
  @ spark_bridge.driver.restarts:_in_one_line
  - " ".join(takewhile(lambda line: line[:1].strip(), lines))
  + [*takewhile(lambda line: line[:1].strip(), lines), ""][-2]
nameless-row [found; H171]
  A row that UTF-8 cannot encode is refused without its name.
  @ spark_bridge.sinks.rows:_refused
  - LONE_SURROGATE if isinstance(why, UnicodeEncodeError) else why
  + why
any-old-state [found; H164]
  Any bytes that decode are a state of an earlier release.
  @ protocol.wire.state:decode_state_in_steps
  F if type(value) is not old:
any-element [feared; H165]
  A list of seconds may contain what is not a number of seconds.
  @ protocol.arguments:_Expected.check
  F if not all(_keeps(one, self.each) for one in many):
async-for-plain [feared; H165]
  An async function is accepted whose coroutine nobody awaits.
  @ protocol.arguments:_is_function
  ~ return not is_async(value) => return True
stranger-class [feared; H165]
  A class is accepted as a factory, whatever it makes.
  @ protocol.arguments:_is_function
  ~ return _makes(value, result) => return True
any-signature [feared; H165]
  A function is accepted that cannot be called with what Headgate passes to it.
  @ protocol.arguments:_is_function
  F if isinstance(given, list) and not _takes(value, len(given)):
any-attribute [feared; H165]
  A setting that is an attribute of a user's class has any value.
  @ protocol.arguments:check_settings
  F if not hasattr(type(value), "__get__"):
asked-for-its-class [feared; H165]
  An exception whose __class__ raises breaks the operator.
  @ protocol.describing:is_a
  ~ return issubclass(type(value), kind) => return isinstance(value, kind)
asked-for-its-name [feared; H165]
  An exception whose class does not say its name breaks the operator.
  @ protocol.describing:class_name
  ~ name: str = _NAME(kind) => name: str = kind.__name__
unprintable-in-the-log [feared; H165]
  An exception that Python cannot print breaks the one who logs it.
  @ actors.logs:Log._written
  ~ keys = _printable(keys) => bool(keys["exc_info"])
jobs-of-two-partitions [N5: a coordinator has only the last job of take(); H55]
  An action of two jobs over one partition each counts as two actions.
  @ spark_bridge.bridge.runs:JobsOfAction.note
  ~ self._later = True => self._later = False
one-setting-in-two-places [feared; H165]
  Heartbeats that coordinate() is given beside gateway= are refused like a misspelt argument.
  @ protocol.arguments:_check_not_moved
  ~ if gone := [name for name in given if name in places]: => if gone := []:
broken-operator-is-not-noticed [feared; H165]
  The job of an operator whose actors have ended waits for them.
  @ spark_bridge.bridge.actor:BridgeActor._add_operator
  - context.watch(message.tracker_ref)
broken-operator-takes-tasks [feared; H165]
  A later task of an operator whose actors have ended waits for them.
  @ spark_bridge.bridge.actor:BridgeActor._why_refused
  F if register.operator_id in self._broken:
broken-operator-is-run-again [feared; H165]
  An action is called again although its operator has ended for good.
  @ spark_bridge.driver.restarts:Restarter._delay
  F if is_a(cause, OperatorBroken):
another's-failure [E2: a counter of the whole sidecar; H65]
  A failed run of any operator counts for every action that is being called.
  @ spark_bridge.bridge.runs:RunningJobs.failed
  ~ else its_action == action_id: => else True:
silent-commit [E13: nothing was raised; H71]
  A coordinator that cannot commit the final checkpoint of a good run is logged, and nobody is told.
  @ actors.coordination.engine.coordinator:CoordinatorActor.receive
  ~ replace(settled, failed=self._failed_after) => settled
""")


def fuzz_some_counts() -> None:
    for seed in range(10):
        pure._forest(Random(seed))


def bound(accepted: Any, refused: Any, told_to_the_sender: str, told_to_the_receiver: str) -> Callable[[], Any]:
    check = test_codec.test_the_containers_and_entries_of_a_whole_event_are_bounded_on_both_ends
    return partial(check, accepted, refused, told_to_the_sender, told_to_the_receiver)


def in_a_folder(test: Callable[[Path], None]) -> Callable[[], None]:
    def run() -> None:
        with TemporaryDirectory() as folder:
            test(Path(folder))

    return run


def a_decimal_of_hash_1(number: int) -> Decimal:
    return Decimal(1 + number * (2**61 - 1))


too_many_maps = bound([{}] * 299, [{}] * 300, "more than 300 lists and maps", "more than 300 lists and maps")
too_many_entries = bound([[0] * 198] * 10, [[0] * 200] * 10, "more than 2000 entries", "more than 2000 entries")
one_large_map = bound(dict.fromkeys(range(400)), dict.fromkeys(range(401)), "a map at most 400", "exceeds max_")


async def broken_operators() -> None:
    await test_broken_operators.test_an_error_of_headgate_in_one_operator_fails_its_job_and_leaves_the_others_alone(
        "the tracker", pytest.MonkeyPatch()
    )


def refused(parameter: str) -> None:
    """The test of one parameter."""
    (found,) = (one for one in test_arguments.PARAMETERS if str(one) == parameter)
    test_arguments.test_a_wrong_argument_is_refused_with_its_name_what_was_given_and_what_is_expected(found)


CAUGHT_BY: dict[str, list[Callable[[], Any]]] = {
    "forged-file": [in_a_folder(test_shared_value_files.test_a_file_with_other_bytes_is_not_read_and_removed)],
    "all-fetch": [in_a_folder(test_shared_value_files.test_one_process_at_a_time_fetches_a_value)],
    "no-token-check": [test_router.test_an_attempt_is_resumed_only_with_its_token],
    "key-of-another-operator": [test_router.test_a_task_cannot_register_for_another_operator],
    "no-proof-check": [test_handshake.test_a_peer_with_another_secret_is_refused_and_gets_no_proof],
    "no-key-is-a-key": [test_handshake.test_an_identity_without_a_key_is_refused_like_a_wrong_key],
    "identity-outside-the-transcript": [test_handshake.test_a_proof_for_one_identity_is_none_for_another],
    "certificate-not-pinned": [
        lambda: test_tls.test_a_task_refuses_another_certificate(encryption(True, test_tls.KEYS))
    ],
    "no-container-bound": [too_many_maps, fuzz_some_counts],
    "no-entry-bound": [too_many_entries, fuzz_some_counts],
    "no-container-bound-at-the-sender": [too_many_maps],
    "large-maps": [one_large_map],
    "members-of-one-hash": [
        partial(test_event_values.test_members_that_all_have_one_hash_are_refused, dict.fromkeys, a_decimal_of_hash_1)
    ],
    "nesting-in-tuples": [
        partial(test_event_values.test_nesting_counts_through_extensions_on_both_ends, lambda value: (value,), 1)
    ],
    "nesting-in-classes": [test_event_classes.test_nesting_and_counts_hold_inside_registered_values],
    "decoded-in-one-step": [
        test_large_events.test_another_operators_events_are_handled_while_the_largest_event_is_decoded
    ],
    "whole-reads": [test_server_shares.test_a_single_message_waits_for_one_share_of_four_floods],
    "no-bound-over-incomplete-frames": [
        test_server_incomplete.test_states_that_exceed_the_limit_together_wait_at_their_sockets_and_all_arrive
    ],
    "no-deadline-of-a-frame": [
        test_server_incomplete.test_a_frame_that_makes_no_progress_between_two_checks_is_dropped
    ],
    "small-ones-are-progress": [
        test_server_incomplete.test_small_messages_between_the_parts_are_not_progress_of_a_large_one,
        test_fragments.test_small_messages_do_not_hide_that_a_large_one_does_not_grow,
    ],
    "any-claim": [
        partial(test_fragments.test_fragments_that_no_sender_makes_are_refused, test_fragments.start(4097), "4097")
    ],
    "everything-passes": [test_fragments.test_only_what_has_no_place_among_the_items_passes_a_large_message],
    "no-patience-with-a-slow-reader": [test_fragments.test_what_is_late_is_counted_from_the_last_part_that_left],
    "all-parts-together": [
        test_server_incomplete.test_other_messages_leave_between_the_parts_for_a_peer_that_reads_slowly
    ],
    "nan-is-a-number": [
        partial(test_wrong_arguments.test_no_setting_accepts_what_is_not_a_finite_number, CheckpointConfig)
    ],
    "any-type": [partial(test_wrong_arguments.test_no_setting_accepts_what_is_not_a_finite_number, CheckpointConfig)],
    "one-setting-in-two-places": [
        partial(test_wrong_arguments.test_heartbeats_are_set_in_one_place, "heartbeat_interval_s")
    ],
    "broken-operator-is-not-noticed": [broken_operators],
    "broken-operator-takes-tasks": [broken_operators],
    "keys-for-elements": [partial(refused, "StaticSplitEnumerator(splits)")],
    "array-of-anything": [partial(refused, "Sidecar.run(operators)")],
    "value-called-an-event": [
        partial(
            test_arguments.test_a_value_that_an_event_cannot_carry_is_refused_by_its_name, "value", object(), " is of"
        )
    ],
    "last-line-of-a-failure": [
        partial(
            test_restarts.test_the_text_has_the_lines_of_the_exception_up_to_an_empty_or_indented_one, "a\nb", "a b"
        )
    ],
    "nameless-row": [
        in_a_folder(
            partial(test_tables.test_a_row_with_a_lone_surrogate_is_named_with_its_column, make=test_tables.delta)
        )
    ],
    "any-old-state": [test_state.test_another_kind_a_later_version_and_other_bytes_are_refused],
    "any-element": [partial(refused, "sinks.TwoPhaseSinkCoordinator(retry_delays_s)")],
    "async-for-plain": [partial(refused, "SharedValue.update(function)")],
    "stranger-class": [partial(refused, "SourceCoordinator(enumerator)")],
    "any-signature": [partial(refused, "SourceCoordinator(enumerator)")],
    "any-attribute": [
        partial(
            test_arguments.test_a_wrong_attribute_is_refused_with_its_name_what_was_given_and_what_is_expected,
            "a subclass of SplitReader",
        )
    ],
    "asked-for-its-class": [
        partial(
            test_hostile_values.test_a_hostile_exception_fails_what_it_was_raised_in, where="ready", kind="__class__"
        )
    ],
    "asked-for-its-name": [
        partial(
            test_hostile_values.test_a_hostile_exception_fails_what_it_was_raised_in, where="ready", kind="metaclass"
        )
    ],
    "unprintable-in-the-log": [
        partial(test_hostile_values.test_a_hostile_exception_fails_what_it_was_raised_in, where="ready", kind="all")
    ],
    "jobs-of-two-partitions": [
        partial(test_several_jobs.test_several_jobs_of_one_action_are_reported_once_and_explained, [[0], [1]], 2)
    ],
    "broken-operator-is-run-again": [test_broken_operators.test_an_action_is_not_called_again_after_its_operator_broke],
    "another's-failure": [test_actions.test_a_failure_belongs_to_the_action_of_its_run_and_to_no_other],
    "silent-commit": [
        partial(
            test_failures_after_a_run.test_a_coordinator_that_fails_after_a_good_run_says_so_when_it_is_settled,
            "notify_checkpoint_complete",
        )
    ],
}


@pytest.mark.parametrize(
    ("mutant", "check"),
    [pytest.param(mutant, check, id=mutant.name) for mutant in CATALOGUE for check in CAUGHT_BY[mutant.name]],
)
async def test_a_bug_is_caught_by_its_own_test(mutant: Mutant, check: Callable[[], Any]) -> None:
    # H61, H62, H65, H71, H74, H76, H77, H165: without the bug the suite runs the same tests by themselves
    async def run() -> None:
        result = check()
        if isawaitable(result):
            await result

    with pytest.MonkeyPatch.context() as monkeypatch:
        mutant.apply(monkeypatch)
        with pytest.raises((AssertionError, pytest.fail.Exception)):
            await run()
