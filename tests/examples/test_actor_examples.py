# SPDX-License-Identifier: Apache-2.0

"""The examples of actors without Spark run, end, and show what they claim; their own tests run, too."""

from __future__ import annotations

import asyncio
import json
import re

import pytest

from examples.bounded_mailbox import (
    test_lines_of_one_producer_keep_their_order,
    test_senders_wait_for_space_and_lose_nothing,
)
from examples.supervised_sensors import Sensor, Station
from headgate.actors.testing import deterministic_system
from tests.examples.conftest import RunExample

__all__ = ["test_lines_of_one_producer_keep_their_order", "test_senders_wait_for_space_and_lose_nothing"]


def test_the_first_actor_counts_for_the_loop_and_for_threads(run_example: RunExample) -> None:
    ended = run_example("first_actor")

    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == [
        "total: 5",
        "total, after work in a thread: 1371",
        "total, seen from a thread: 1381",
    ]
    assert ended.stderr == ""


def test_a_broken_sensor_is_retried_with_growing_pauses_and_replaced(run_example: RunExample) -> None:
    ended = run_example("supervised_sensors")

    assert ended.returncode == 0, ended.stderr
    decisions = re.findall(r"failed \((\w+)\(.*\): (.+)", ended.stdout)
    assert decisions == [
        ("ValueError", "resume"),
        ("ConnectionError", "restart after 0.1 s"),
        ("ConnectionError", "restart after 0.2 s"),
        ("ConnectionError", "restart after 0.4 s"),
        ("ConnectionError", "stop"),
    ]
    assert re.findall(r"^  (\w+): ([\d.]+)$", ended.stdout, re.MULTILINE) == [
        ("primary", "17.2"),
        ("primary", "17.3"),
        *[("backup", "17.0")] * 3,
    ]
    assert ended.stdout.endswith("5 readings, and every actor has stopped\n")
    assert ended.stderr == ""


async def test_the_reader_restarts_after_0_1_0_2_and_0_4_seconds() -> None:
    enough = asyncio.Event()
    async with deterministic_system() as kit:
        sensors = [Sensor("primary", []), Sensor("backup", reliable=True)]
        kit.system.spawn(lambda: Station(sensors, 1, enough), name="station")
        await kit.advance(0.1 + 0.2 + 0.4 - 0.001)
        assert not enough.is_set()
        await kit.advance(0.001)
        assert enough.is_set()


async def test_the_station_fails_once_no_sensor_is_left() -> None:
    async def lose_every_sensor() -> None:
        async with deterministic_system() as kit:
            kit.system.spawn(lambda: Station([Sensor("only")], 1, asyncio.Event()), name="station")
            await kit.advance(1.0)

    with pytest.raises(LookupError, match="no sensor is left"):
        await lose_every_sensor()


@pytest.mark.parametrize(
    ("policy", "figures"),
    [
        ("wait", "0 dropped, 0 refused, at most 4 in the mailbox"),
        ("refuse", r"0 dropped, \d+ refused, at most 4 in the mailbox"),
        ("drop-newest", r"(\d+) dropped, 0 refused, at most 4 in the mailbox\n\1 dead letters: .* drops new messages"),
        ("drop-oldest", r"(\d+) dropped, 0 refused, at most 4 in the mailbox\n\1 dead letters: .* its oldest message"),
    ],
)
def test_a_full_mailbox_does_what_was_chosen(run_example: RunExample, policy: str, figures: str) -> None:
    ended = run_example("bounded_mailbox", "--on-full", policy, "--lines", 10)

    assert ended.returncode == 0, ended.stderr
    assert re.search(figures, ended.stdout), ended.stdout
    written = re.search(r"30 lines sent, (\d+) written", ended.stdout)
    assert written is not None
    assert (int(written[1]) == 30) == (policy == "wait")
    assert ("waits for space in writer" in ended.stdout) == (policy == "wait")
    assert ended.stderr == ""


@pytest.mark.parametrize("name", ["supervised_sensors", "bounded_mailbox"])
def test_the_options_are_explained(run_example: RunExample, name: str) -> None:
    ended = run_example(name, "--help")

    assert ended.returncode == 0
    assert "default:" in ended.stdout


def test_each_way_to_configure_the_log_shows_what_it_says(run_example: RunExample) -> None:
    shown = {way: run_example("log_setup", way) for way in ("default", "more", "as_json", "with_structlog")}
    assert {ended.returncode for ended in shown.values()} == {0}
    assert {ended.stdout for ended in shown.values()} == {""}
    lines = {way: ended.stderr.splitlines() for way, ended in shown.items()}
    (line,) = lines["default"]
    assert line.endswith(
        " WARNING headgate.actors: message not understood actor=talker system=example message='good morning'"
    )
    assert [re.split(r"[ ,]", line)[3] for line in lines["more"]] == ["INFO", "WARNING"]
    for way in ("as_json", "with_structlog"):
        plain = [json.loads(line) for line in lines[way]]
        assert [entry["event"] for entry in plain] == ["message received", "message not understood"]
        assert all((entry["actor"], entry["message"]) == ("talker", "good morning") for entry in plain)
