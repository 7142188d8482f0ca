# SPDX-License-Identifier: Apache-2.0

"""Checkpoints that earlier code wrote are restored by the code of today, and none of their state is lost (H50)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from protocol.wire.checkpoint_format import FORMAT_VERSION, decode_checkpoint
from tests.golden.applications import APPLICATIONS, RESCALED, SUBTASKS, goes_on, with_files, with_pieces, without_files

CONTENTS = {path.name: path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.checkpoint"))}


def test_there_is_a_file_of_each_application_and_of_each_format_that_was_ever_written() -> None:
    assert {data[11] for data in CONTENTS.values()} == set(range(1, FORMAT_VERSION + 1))
    assert {decode_checkpoint(data).operator_id for data in CONTENTS.values()} == set(APPLICATIONS)


@pytest.mark.parametrize("name", CONTENTS)
async def test_an_application_goes_on_from_what_earlier_code_wrote(name: str) -> None:  # H50, H52
    stored = decode_checkpoint(CONTENTS[name])
    if CONTENTS[name][11] >= 6:  # the operator's own state is whole without the files, which nothing stored
        own = without_files(stored.checkpoint)
        assert stored.checkpoint == (with_files if CONTENTS[name][11] == 6 else with_pieces)(own) != own
        stored = replace(stored, checkpoint=own)
    for parallelism in (SUBTASKS, 1, 5) if stored.operator_id in RESCALED else (SUBTASKS,):
        await goes_on(stored.operator_id, stored.checkpoint, parallelism)
