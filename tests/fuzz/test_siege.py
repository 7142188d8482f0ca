# SPDX-License-Identifier: Apache-2.0

"""The server under attack, with everything behind it, in a separate process (H61, H62)."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from typing import Any

import pytest

from tests.fuzz import siege
from tests.fuzz.__main__ import main
from tests.fuzz.line import Line
from tests.fuzz.target import Target, run_cases

HALF_OPEN = 3000
FILES_BESIDE = 200


@pytest.mark.parametrize("target", siege.TARGETS, ids=lambda target: target.name)
def test_honest_tasks_are_not_harmed_by_any_form_of_attack(target: Target) -> None:  # H22, H30, H61, H62, H77
    run_cases(target, first=1, count=1)


@pytest.fixture
def half_open_count() -> Any:
    """Return the number of connections that this process's files allow."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = HALF_OPEN + FILES_BESIDE
    if soft < wanted:
        with contextlib.suppress(ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted if hard < 0 else min(wanted, hard), hard))
    now, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield min(HALF_OPEN, now - FILES_BESIDE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_thousands_of_half_open_connections_cost_little_and_keep_nobody_out(half_open_count: int) -> None:  # H62
    readings: list[dict[str, Any]] = []

    async def besiege() -> None:
        async with siege.besieged(authenticate_timeout_s=60.0) as half:
            first = await half.honest_task(0)
            before = await half.until(lambda reading: reading["taken"][0] > 10, "that the honest task is at work")
            lines: list[Line] = []
            while len(lines) < half_open_count:
                lines += await asyncio.gather(*(Line.open(half.address) for _ in range(250)))
                for line in lines[-100:]:
                    await line.send(b"HDGT\x00"[: len(lines) % 6])
                readings.append(await half.reading())
            second = await half.honest_task(1)
            await half.until(lambda reading: reading["taken"][1] > 10, "that another task is taken")
            ends = await asyncio.gather(*(asyncio.to_thread(task.finish) for task in (first, second)))
            await half.until(lambda reading: reading["taken"] == [*ends, 0, 0], "that each event has come once")
            for line in lines:
                await line.close()
            after = await half.until(
                lambda reading: reading["connections"]["unauthenticated"] == 0, "that the strangers are gone"
            )
            growth = max(reading["resident_bytes"] for reading in readings) - before["resident_bytes"]
            assert growth < 32 * 2**20, f"{len(lines)} half-open connections took {growth} bytes"
            assert max(reading["connections"]["unauthenticated"] for reading in readings) <= siege.UNAUTHENTICATED_MAX
            assert max(reading["files"] for reading in readings) <= before["files"] + 2 * siege.UNAUTHENTICATED_MAX
            assert after["files"] <= before["files"]
            assert not [line for line in half.log if line["log_level"] == "error"]  # the loop never ran out of files

    siege.run(besiege)


def test_the_targets_can_be_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    assert "siege" in capsys.readouterr().out


def test_a_run_says_how_far_it_is_and_that_nothing_was_broken(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--target", "relay", "--seed", "5", "--cases", "20"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("first case 5\n")
    assert "relay 20\nnothing was broken\n" in out


@pytest.mark.parametrize("options", [["--seconds", "-1"], ["--target", "nothing"], ["--cases", "few"]])
def test_bad_options_are_refused(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(options)
    assert options[0] in capsys.readouterr().err
