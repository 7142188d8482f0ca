# SPDX-License-Identifier: Apache-2.0

"""Whether a run that begins has the input of the restored checkpoint: every cell of the table, and labels."""

from __future__ import annotations

import random
import string
from typing import Any

import pytest

from actors.coordination.engine.inputs import (
    INPUT_ID_CHARS_MAX,
    ActionId,
    BatchInput,
    Comparison,
    Input,
    InputPosition,
    NamedInput,
    NoInput,
    UnnamedInput,
    check_input_id,
    compare,
    why_refused,
)

SAME, OTHER = Comparison.SAME, Comparison.OTHER
INTERRUPTED, PLACE, EARLIER = Comparison.INTERRUPTED, Comparison.OTHER_PLACE, Comparison.EARLIER_RUN

BATCH = BatchInput("q", 3)
NAMED = NamedInput("2026-11-26", 1)
UNNAMED = UnnamedInput("aaaa", 1, 4)
PLAIN = UnnamedInput("", 0, 5)

# What is found, what begins, the comparison if it is begun, and if it is done.
TABLE: list[tuple[Input, Input, Comparison, Comparison]] = [
    (BATCH, BATCH, SAME, SAME),
    (BATCH, BatchInput("q", 4), OTHER, OTHER),
    (BATCH, BatchInput("r", 3), OTHER, OTHER),
    (BATCH, NAMED, INTERRUPTED, OTHER),
    (BATCH, UNNAMED, INTERRUPTED, OTHER),
    (BATCH, PLAIN, INTERRUPTED, OTHER),
    (NAMED, NAMED, SAME, SAME),
    (NAMED, NamedInput("2026-11-26", 0), EARLIER, EARLIER),
    (NAMED, NamedInput("2026-11-26", 2), INTERRUPTED, OTHER),
    (NAMED, NamedInput("2026-11-27", 1), INTERRUPTED, OTHER),
    (NAMED, NamedInput("2026-11-27", 0), INTERRUPTED, OTHER),
    (NAMED, UNNAMED, INTERRUPTED, OTHER),
    (NAMED, PLAIN, INTERRUPTED, OTHER),
    (NAMED, BATCH, INTERRUPTED, OTHER),
    (UNNAMED, UNNAMED, SAME, SAME),
    (UNNAMED, UnnamedInput("aaaa", 1, 0), SAME, SAME),  # a sidecar that was restarted has forgotten what was finished
    (UNNAMED, UnnamedInput("aaaa", 0, 4), EARLIER, EARLIER),
    (UNNAMED, UnnamedInput("aaaa", 2, 4), INTERRUPTED, OTHER),
    (UNNAMED, UnnamedInput("bbbb", 1, 4), SAME, OTHER),  # another application, or another call in this one
    (UNNAMED, UnnamedInput("bbbb", 0, 5), SAME, OTHER),
    (UNNAMED, UnnamedInput("bbbb", 0, 4), PLACE, OTHER),
    (UNNAMED, PLAIN, SAME, OTHER),
    (UNNAMED, UnnamedInput("", 0, 0), PLACE, OTHER),
    (UNNAMED, NAMED, INTERRUPTED, OTHER),
    (UNNAMED, BATCH, INTERRUPTED, OTHER),
    (PLAIN, PLAIN, SAME, OTHER),  # a plain action is equal to no other
    (PLAIN, UnnamedInput("", 0, 0), PLACE, OTHER),
    (PLAIN, UNNAMED, SAME, OTHER),
    (PLAIN, NAMED, INTERRUPTED, OTHER),
    (PLAIN, BATCH, INTERRUPTED, OTHER),
    (NoInput(), BATCH, OTHER, OTHER),
    (NoInput(), NAMED, OTHER, OTHER),
    (NoInput(), PLAIN, OTHER, OTHER),
]


@pytest.mark.parametrize(("found", "begins", "begun", "done"), TABLE)
def test_each_cell_of_the_table(found: Input, begins: Input, begun: Comparison, done: Comparison) -> None:  # H174
    assert compare(InputPosition(found, done=False), begins) is begun
    assert compare(InputPosition(found, done=True), begins) is done


def test_a_named_input_that_was_finished_before_another_one_is_not_written_again() -> None:  # H174
    for done in (False, True):
        found = InputPosition(NamedInput("third"), done, ("first", "second"))
        assert InputPosition.read(str(found)) == found
        assert compare(found, NamedInput("first")) is Comparison.FINISHED
        assert Comparison.FINISHED.refused
        why = why_refused(Comparison.FINISHED, found, NamedInput("first"))
        assert "input 'first' is finished, and input 'third' came after it" in why
        assert 'restored_input="other"' in why
    assert compare(InputPosition(NamedInput("third"), True, ("first",)), NamedInput("fourth")) is OTHER


@pytest.mark.parametrize("begins", [BATCH, NAMED, UNNAMED, PLAIN])
def test_a_checkpoint_without_a_label_is_refused(begins: Input) -> None:  # H174
    assert compare(None, begins) is Comparison.UNKNOWN
    assert Comparison.UNKNOWN.refused


@pytest.mark.parametrize(("found", "begins", "begun", "done"), TABLE)
def test_each_refusal_says_what_was_found_and_both_ways_out(
    found: Input, begins: Input, begun: Comparison, done: Comparison
) -> None:  # H174
    for comparison, position in ((begun, InputPosition(found, done=False)), (done, InputPosition(found, done=True))):
        if comparison.refused:
            why = why_refused(comparison, position, begins)
            assert 'restored_input="other"' in why
            assert ('restored_input="same"' in why) == (comparison is not EARLIER), "its positions are a later run's"
            if isinstance(found, NamedInput) and comparison is INTERRUPTED:
                assert f"input_id={found.input_id!r}" in why
            assert ("adopt=True" in why) == isinstance(begins, BatchInput)


@pytest.mark.parametrize(
    "one", [BATCH, NAMED, UNNAMED, PLAIN, NoInput(), BatchInput("a-b-c", 0), NamedInput('a "b": c')]
)
@pytest.mark.parametrize("done", [False, True])
def test_a_label_is_read_as_it_was_written(one: Input, done: bool) -> None:
    position = InputPosition(one, done)
    assert InputPosition.read(str(position)) == position


@pytest.mark.parametrize(
    "label",
    ["", "x", "batch 01 of q: done", "batch 1 of q", "run 0 of call a after 0: done", "run 1 of input 2: done",
     'run 1 of input "a: done', "run 1 of call a after -1: begun", "words: a stream", "no input: perhaps"],
)  # fmt: skip
def test_what_is_not_a_label_is_not_read(label: str) -> None:
    assert InputPosition.read(label) is None


def test_every_label_and_action_of_a_random_name_is_read_as_it_was_written() -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    chance = random.Random(seed)
    alphabet = [*string.printable, "é", "日", "\U0001f600", ":", '"', "\\"]
    for _ in range(2000):
        name = "".join(chance.choices(alphabet, k=chance.randint(1, INPUT_ID_CHARS_MAX)))
        if not name.isprintable():
            continue
        position = InputPosition(NamedInput(name, chance.randrange(9)), chance.random() < 0.5)
        assert InputPosition.read(str(position)) == position
        action = ActionId("0123456789abcdef", chance.randrange(9), name)
        assert ActionId.read(str(action)) == action
        assert "," not in str(action), "Spark allows none in a tag"


def test_an_action_of_an_earlier_release_is_a_call_without_restarts() -> None:
    assert ActionId.read("0123456789abcdef") == ActionId("0123456789abcdef")
    assert ActionId.read("0123456789abcdef.2") == ActionId("0123456789abcdef", 2)
    for claimed in (
        "",
        "a\nlabel: done",
        "0123456789abcdef.2.zz",
        "0123456789abcdef.2.ff",
        "0123456789abcdef.2.",
        "a" * 9999,
    ):
        assert ActionId.read(claimed) == ActionId(""), "a plain action"


@pytest.mark.parametrize("wrong", [5, b"x", ["x"], True])
def test_an_input_id_that_is_not_a_text_is_a_type_error(wrong: Any) -> None:  # H165
    with pytest.raises(TypeError, match=r"input_id must be a str .*, not "):
        check_input_id(wrong)


@pytest.mark.parametrize("wrong", ["", "x" * (INPUT_ID_CHARS_MAX + 1), "a\nb", "\ud800"])
def test_an_input_id_that_cannot_be_shown_is_a_value_error(wrong: str) -> None:  # H165
    with pytest.raises(ValueError, match="input_id must "):
        check_input_id(wrong)
