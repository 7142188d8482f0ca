# SPDX-License-Identifier: Apache-2.0

"""Chance from a record: the draws that it returns, and its answers when the record does not match."""

from __future__ import annotations

from functools import partial

import pytest

from tests.simulation.choices import (
    TAME,
    Choices,
    Record,
    RecordedChoices,
    StoryTooLong,
    half_tame,
    seeded,
    tame,
)


def draw_all(choices: Choices) -> list[float]:
    """Draw a few values of each kind, over three steps."""
    drawn: list[float] = []
    for _ in range(3):
        drawn += [choices.random(), choices.uniform(0.0, 2.0), choices.expovariate(10.0)]
        drawn += [choices.choice([5, 6, 7, 8]), choices.randint(0, 9), choices.randrange(9), choices.randrange(2, 9, 2)]
        choices.begin_step()
    return drawn


def walk() -> None:
    pass


def jump() -> None:
    pass


def pick(choices: Choices, *options: object) -> object:
    return choices.choice(options)


def test_a_seed_gives_the_same_whether_it_is_written_down_or_not() -> None:
    for seed in range(20):
        assert draw_all(RecordedChoices(Record(seed), seeded(seed))) == draw_all(Choices(seed))


def test_a_record_gives_again_what_was_drawn() -> None:
    written = RecordedChoices(Record(7), seeded(7))
    drawn = draw_all(written)
    replayed = RecordedChoices(written.given(), tame())
    assert draw_all(replayed) == drawn
    assert replayed.given() == written.given()


def test_what_is_tame_is_not_written_down() -> None:
    choices = RecordedChoices(Record(1), tame())
    assert draw_all(choices) == [TAME, 0.0, 0.0, 5, 0, 0, 2] * 3
    assert choices.given() == Record(1, None, ({},))
    assert choices.given().wild == 0


def test_a_draw_answers_the_function_that_asked_for_it() -> None:
    def first(choices: Choices) -> float:
        return choices.random()

    def second(choices: Choices) -> float:
        return choices.random()

    written = RecordedChoices(Record(1), seeded(1))
    first(written)
    wanted = second(written)
    assert second(RecordedChoices(written.given(), tame())) == wanted


def test_what_is_done_is_found_by_its_name() -> None:
    written = RecordedChoices(Record(0, None, ({"pick": ["jump 1"]},)), tame())
    options = [walk, jump, partial(jump)]
    assert pick(written, *options) is options[2]
    record = written.given()
    assert record.steps == ({"pick": ["jump 1"]},)
    assert pick(RecordedChoices(record, tame()), jump, walk, *options) is options[1]
    assert pick(RecordedChoices(record, tame()), walk, jump) is jump  # the last one of that name
    assert pick(RecordedChoices(record, tame()), walk, walk) is walk  # the action is no longer available


@pytest.mark.parametrize("unfit", ["walk 0", 4, -1, 0.5, None])
def test_what_does_not_fit_is_tame(unfit: float | str | None) -> None:
    assert pick(RecordedChoices(Record(0, None, ({"pick": [unfit]},)), seeded(0)), 5, 6, 7, 8) == 5


def test_beyond_its_end_a_record_leaves_the_answer_to_others() -> None:
    choices = RecordedChoices(Record(3, None, ({},)), seeded(3))
    assert choices.random() == TAME
    choices.begin_step()
    assert choices.random() == Choices(3).random()


def test_half_of_the_functions_are_tame() -> None:
    half = half_tame(5)
    draws = {place: half(place).random() for place in map(str, range(100))}
    assert 20 < sum(draw == TAME for draw in draws.values()) < 80


def test_a_story_that_gets_too_long_is_stopped() -> None:
    choices = RecordedChoices(Record(0), tame(), 2)
    choices.begin_step()
    choices.begin_step()
    with pytest.raises(StoryTooLong):
        choices.begin_step()


def test_a_draw_that_cannot_be_written_down_is_refused() -> None:
    with pytest.raises(TypeError, match="randrange"):
        RecordedChoices(Record(0), tame()).shuffle([1, 2, 3])
