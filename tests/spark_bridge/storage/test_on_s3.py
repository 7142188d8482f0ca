# SPDX-License-Identifier: Apache-2.0

"""Checkpoints in an object store that speaks S3."""

from __future__ import annotations

from typing import Any

import pytest

from spark_bridge.storage import StorageFenced
from tests.spark_bridge.s3 import new_bucket
from tests.spark_bridge.storage.checkpoints import a_checkpoint, a_prepared_storage


def test_checkpoints_are_stored_restored_retained_and_fenced(s3: dict[str, Any]) -> None:  # H50, H51, H52, H81
    url = f"s3://{new_bucket(s3)}/checkpoints"
    first = a_prepared_storage(url, options=s3, retained=1)
    ids = list(first.reserve_ids(3))
    first.start_from("words", None, first=ids[0])
    for checkpoint_id in ids:
        first.store("words", a_checkpoint(checkpoint_id, state=bytes(100_000)))
    assert [info.checkpoint_id for info in first.list()] == ids[-2:]
    second = a_prepared_storage(url, options=s3)
    (next_id,) = second.reserve_ids(1)
    assert second.restore_latest("words", first=next_id) == a_checkpoint(ids[-1], state=bytes(100_000))
    with pytest.raises(StorageFenced, match="was taken over"):
        first.store("words", a_checkpoint(ids[-1]))
    second.store("words", a_checkpoint(next_id))
    assert second.verify() == []
