# SPDX-License-Identifier: Apache-2.0

"""The scenarios of ``make spark`` that need no RDDs, run by a client of Spark Connect: see docs/spark-faults.md.

They are the same functions: here, their benches are those of ``tests/spark/connect/bench.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from pyspark import cloudpickle

from headgate import Addresses, Sidecar, SidecarConfig
from spark_bridge.driver.config import Way
from tests.spark import growing, operators
from tests.spark.cluster import StandaloneCluster
from tests.spark.connect import frames
from tests.spark.connect.bench import ConnectBench, listening_beside
from tests.spark.connect.conftest import SHOWING
from tests.spark.connect.server import ConnectServer
from tests.spark.faults import (
    directing,
    file_gates,
    noting,
    rows,
    test_growing_splits,
    test_network,
    test_shapes,
    test_speculation,
    test_stages,
    waiting,
)
from tests.spark.faults.test_dying import (  # noqa: F401
    test_a_node_dies,
    test_a_python_worker_dies_by_sigkill,
    test_an_exception_in_user_code,
    test_an_executor_dies_by_sigkill,
)
from tests.spark.faults.test_facts import (  # noqa: F401
    test_a_kill_requested_while_the_relay_is_away_happens_when_it_is_back,
)
from tests.spark.faults.test_growing_splits import (  # noqa: F401
    test_a_success_is_revoked_while_the_splits_of_others_are_still_found,
    test_output_that_is_lost_between_two_actions_is_read_again_as_it_was,
)
from tests.spark.faults.test_killing import (  # noqa: F401
    test_a_job_group_is_cancelled,
    test_a_running_job_is_cancelled,
    test_a_task_fails_as_often_as_it_may,
)
from tests.spark.faults.test_network import (  # noqa: F401
    test_a_cut_longer_than_the_confirmation_timeout_fails_the_receiving_attempt,
    test_a_task_with_a_permanently_lost_connection_is_failed_and_killed,
    test_tasks_that_cannot_reconnect_in_time_are_run_again,
)
from tests.spark.faults.test_shapes import (  # noqa: F401
    test_a_subtask_without_records,
    test_adaptive_execution_chooses_the_number_of_partitions,
    test_adaptive_execution_leaves_repartition_alone,
    test_an_operator_in_each_of_two_stages,
    test_an_operator_is_used_again_in_a_second_job,
    test_cached_partitions_are_lost_and_recomputed,
    test_coalesced_partitions,
    test_more_subtasks_than_slots,
    test_splits_of_kept_partitions_are_not_handed_out_again,
    test_two_concurrent_jobs_over_one_operator,
    test_two_concurrent_jobs_with_one_operator_each,
    test_two_operators_in_one_stage_fail_as_one,
)
from tests.spark.faults.test_speculation import (  # noqa: F401
    test_a_copy_fails_while_its_original_runs,
    test_a_copy_reads_the_splits_of_its_original,
    test_both_attempts_fail,
    test_one_of_two_attempts_wins,
    test_there_is_no_copy_in_streaming_mode,
    test_two_attempts_end_at_the_same_time,
)
from tests.spark.faults.test_stages import (  # noqa: F401
    test_a_success_is_revoked_while_its_stage_runs,
    test_map_output_is_lost_when_half_of_the_reducers_have_read_it,
    test_one_task_of_a_barrier_stage_fails,
    test_zombies_in_streaming_mode,
    test_zombies_of_a_resubmitted_stage,
)

pytestmark = [pytest.mark.spark, pytest.mark.long]

TRAVELLING = (
    *(operators, growing, frames, directing, file_gates, noting, rows, waiting),
    *(test_growing_splits, test_network, test_shapes, test_speculation, test_stages),
)

Benches = Callable[[dict[str, str]], ConnectBench]


@pytest.fixture(scope="module", autouse=True)
def scenarios_travel_by_value() -> Iterator[None]:
    for module in TRAVELLING:
        cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]
    yield
    for module in TRAVELLING:
        cloudpickle.unregister_pickle_by_value(module)  # type: ignore[no-untyped-call]


@pytest.fixture(scope="module", params=["direct", "tunnel"])
def way(request: pytest.FixtureRequest) -> Way:
    """How the tasks reach the sidecar."""
    chosen: Way = request.param
    return chosen


@pytest.fixture(scope="module")
def benches(way: Way) -> Iterator[Benches]:
    """The bench for these settings of Spark; there is one server at a time, on one cluster."""
    cluster = StandaloneCluster(environment={"PYTHONPATH": ""})
    cluster.start()
    current = ExitStack()
    made: list[tuple[dict[str, str], ConnectBench]] = []

    def bench_with(settings: dict[str, str]) -> ConnectBench:
        if not made or made[0][0] != settings:
            made.clear()
            current.close()
            made.append((settings, started(settings)))
        return made[0][1]

    def started(settings: dict[str, str]) -> ConnectBench:
        server = ConnectServer(
            cluster.master_url,
            {**SHOWING, "spark.eventLog.enabled": "false", "spark.executor.memory": "512m", **settings},
        )
        current.callback(server.stop)
        server.start()
        session = server.session()
        current.callback(session.stop)
        session.conf.set("spark.sql.adaptive.enabled", "false")  # one job for each action, as over RDDs
        sidecar = current.enter_context(Sidecar(session, SidecarConfig(addresses=Addresses(way=way))))
        records = current.enter_context(listening_beside(sidecar, session))
        bench = ConnectBench(session, sidecar, cluster, server, records)
        bench.wait_for_executors()
        return bench

    yield bench_with
    current.close()
    cluster.stop()


@pytest.fixture
def bench(benches: Benches) -> ConnectBench:
    return benches({})


@pytest.fixture
def speculating(benches: Benches) -> ConnectBench:
    return benches(test_speculation.SETTINGS)
