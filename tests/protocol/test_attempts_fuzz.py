"""The attempt ledger under input that no engine would give: whatever comes, its state stays possible (H19)."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.attempts import (
    AttemptCondemned,
    AttemptLedger,
    ConnectionExpired,
    GlobalFailureRaised,
    LedgerInput,
    OperatorAdded,
    OperatorEnded,
    OperatorOpened,
    OperatorRemoved,
    RegistrationArrived,
    SubtaskFailed,
    SubtaskReady,
)
from protocol.errors import ProtocolError
from protocol.facts import (
    ApplicationEnded,
    ExecutorLost,
    FactsDropped,
    JobEnded,
    JobStarted,
    StageCompleted,
    StageSubmitted,
    StatusReported,
    TaskEnded,
    TaskOutcome,
    TaskStarted,
    TaskState,
)
from protocol.machine import TimePassed
from protocol.wire.messages import Register

few = st.integers(0, 2)
tasks = st.integers(0, 5)
operators = st.sampled_from(["a", "b"])
failure = st.sampled_from(["", "it raised"])
registers = st.builds(
    Register, tasks, operators, few, few, few, st.integers(0, 1), st.just(2), st.just("h"), st.just("3")
)
inputs: st.SearchStrategy[LedgerInput] = st.one_of(
    st.builds(RegistrationArrived, tasks, registers),
    st.builds(RegistrationArrived, tasks, registers),
    st.builds(OperatorOpened, operators, tasks),
    st.builds(OperatorEnded, operators, tasks, failure),
    st.builds(ConnectionExpired, operators, tasks),
    st.builds(AttemptCondemned, operators, tasks, failure),
    st.builds(GlobalFailureRaised, operators, failure),
    st.builds(OperatorAdded, operators, st.integers(0, 3)),
    st.builds(OperatorRemoved, operators),
    st.builds(JobStarted, few, st.tuples(few, few)),
    st.builds(JobEnded, few, st.booleans()),
    st.builds(StageSubmitted, few, few, st.just(3), st.booleans(), st.sampled_from((0, 0, 3, 1))),
    st.builds(StageCompleted, few, few, st.none() | st.just("bad")),
    st.builds(TaskStarted, tasks, few, few, few, few, st.booleans(), st.sampled_from(["e1", "e2"])),
    st.builds(TaskEnded, tasks, few, few, few, few, st.sampled_from(TaskOutcome)),
    st.builds(ExecutorLost, st.sampled_from(["e1", "e2"])),
    st.builds(FactsDropped, few),
    st.builds(
        StatusReported,
        st.dictionaries(few, st.booleans()),
        st.dictionaries(tasks, st.sampled_from(TaskState)),
    ),
    st.just(TimePassed()),
)


@settings(max_examples=400)
@given(st.lists(st.tuples(inputs, st.sampled_from([0.0, 0.5, 6.0, 40.0])), max_size=60), st.booleans())
def test_whatever_comes_the_state_stays_possible_and_failures_are_told_once(
    steps: list[tuple[LedgerInput, float]], ends: bool
) -> None:
    ledger = AttemptLedger()
    ledger.handle(OperatorAdded("a", 3), 0.0)
    ledger.handle(OperatorAdded("b", 2), 0.0)
    now = 0.0
    told: set[tuple[str, int, int]] = set()
    for step, wait in [*steps, (ApplicationEnded(), 0.0)] if ends else steps:
        now += wait
        try:
            effects = ledger.handle(step, now)
        except ProtocolError:
            effects = ()
        ledger.check_invariants()
        for effect in effects:
            if isinstance(effect, SubtaskFailed | SubtaskReady):
                a = effect.attempt
                key = (a.operator_id, a.subtask, a.attempt)
                assert key not in told, "told after it was told to be over"
                if isinstance(effect, SubtaskFailed):
                    told.add(key)
        if isinstance(step, OperatorRemoved):  # added again, it begins a new life, and its numbers with it
            told.clear()
    if ends:
        assert ledger.next_deadline() is None
