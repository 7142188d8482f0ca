# SPDX-License-Identifier: Apache-2.0

"""A status on its way to another process: nothing is lost, or what is left out is counted."""

from __future__ import annotations

import json
import zlib
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spark_bridge.observability.status import OperatorStatus, SidecarStatus
from spark_bridge.standalone.status_bytes import cut, pack_status, unpack_status
from tests.spark_bridge.observability.statuses import attempt, checkpoint, operator, sidecar

FINITE = st.floats(allow_nan=False, allow_infinity=False)
st.register_type_strategy(float, FINITE)

STATUSES = st.builds(
    lambda status, operators, failures: replace(
        status, operators={one.operator_id: one for one in operators}, display_failures=failures
    ),
    st.from_type(SidecarStatus),
    st.lists(st.from_type(OperatorStatus), max_size=2),
    st.dictionaries(st.text(), st.integers(0)),
)


@given(status=STATUSES)
@settings(max_examples=8, suppress_health_check=[HealthCheck.data_too_large, HealthCheck.too_slow])
def test_nothing_is_lost_on_the_way_to_json_and_back(status: SidecarStatus) -> None:
    assert SidecarStatus.from_dict(json.loads(json.dumps(status.to_dict()))) == status


@given(status=STATUSES)
@settings(max_examples=8, suppress_health_check=[HealthCheck.data_too_large, HealthCheck.too_slow])
def test_nothing_is_lost_on_the_way_to_another_process(status: SidecarStatus) -> None:
    assert unpack_status(pack_status(status)) == status


@pytest.mark.parametrize(
    "change",
    [
        lambda plain: plain.pop("relay"),
        lambda plain: plain.update(new=1),
        lambda plain: plain["relay"].pop("kind"),
        lambda plain: plain.update(operators=3),
        lambda plain: plain.update(relay=None),
    ],
)
def test_a_status_of_another_release_is_refused(change: object) -> None:
    plain = sidecar(operator()).to_dict()
    assert callable(change)
    change(plain)
    with pytest.raises(ValueError, match=r"has the fields|not a status of this release"):
        SidecarStatus.from_dict(plain)


def test_ten_thousand_subtasks_fit_with_a_checkpoint_in_progress() -> None:
    attempts = tuple(
        attempt(number, task_attempt_id=number * 7919, heard_at=number / 7, host=f"10.0.{number % 97}.{number % 251}")
        for number in range(10_000)
    )
    progress = checkpoint("closing")._replace(subtasks=dict.fromkeys(range(10_000), "close"))
    status = sidecar(operator(attempts=attempts, parallelism=10_000, checkpoints=(progress,)))
    packed = pack_status(status)
    assert unpack_status(packed) == status
    assert len(packed) < 2**20


def test_what_does_not_fit_is_left_out_and_counted() -> None:
    small, large = (
        operator(operator_id=name, attempts=tuple(map(attempt, range(count))))
        for name, count in (("small", 10), ("large", 1000))
    )
    status = sidecar(large, small)
    shorter = cut(status, 100)
    assert list(shorter.operators) == ["large", "small"]
    assert shorter.operators["small"] == small
    assert shorter.operators["large"].attempts == large.attempts[:90]
    assert shorter.operators["large"].attempts_left_out == 910
    packed = pack_status(status, bytes_max=2000)
    assert len(packed) <= 2000
    told = unpack_status(packed).operators["large"]
    assert len(told.attempts) + told.attempts_left_out == 1000
    assert 0 < len(told.attempts) < 1000


@pytest.mark.parametrize(
    "packed",
    [b"", b"no zlib", zlib.compress(b"[]"), zlib.compress(b"{}"), zlib.compress(b"x"), zlib.compress(b"{}")[:4]],
)
def test_what_is_not_a_status_is_refused(packed: bytes) -> None:
    with pytest.raises(ValueError, match=r"not a status|has the fields"):
        unpack_status(packed)


def test_a_bomb_is_refused() -> None:
    with pytest.raises(ValueError, match="of more than"):
        unpack_status(zlib.compress(bytes(2**26 + 1)))
