# SPDX-License-Identifier: Apache-2.0

"""The bench of ``tests/spark/faults`` for a client of Spark Connect: the same scenarios, told the same.

The server uses a standalone cluster of two hosts. Neither its Python nor that of the executors has Headgate.
"""

from __future__ import annotations

import re
import secrets
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from anyio.from_thread import start_blocking_portal

from headgate import Addresses, Sidecar, SidecarConfig
from protocol.wire.keys import KEY_BYTES, KeyRing
from spark_bridge.bridge.relay import RelayedFact
from spark_bridge.common.certificates import encryption
from spark_bridge.connect.opening import Artifact
from spark_bridge.connect.reach import Reach
from spark_bridge.connect.relay import ConnectRelay
from spark_bridge.connect.remote_session import RemoteSession
from tests.spark.cluster import StandaloneCluster
from tests.spark.connect.frames import FrameJobs
from tests.spark.connect.server import ConnectServer, page
from tests.spark.faults.bench import Bench
from tests.spark.faults.heard import Heard
from tests.spark.faults.network import LINES_HOST, SIDECARS_HOST, Line
from tests.spark.faults.own_process import free_ports
from tests.spark.faults.waiting import wait_until


class ListeningRelay(ConnectRelay):
    """Is told everything of the session's jobs, as the relay of a sidecar is not."""

    async def hold_back(self) -> None:
        await self.ping()


@contextmanager
def listening_beside(sidecar: Sidecar, session: Any) -> Iterator[list[Heard]]:
    """Another relay of the sidecar's session within the block. The last of the list records what it is told."""
    status = sidecar.status()
    records: list[Heard] = []

    def hear(relayed: RelayedFact) -> None:
        for heard in records[-1:]:
            heard.receive(relayed)

    async def open_relay() -> ListeningRelay:
        keys = KeyRing(secrets.token_bytes(KEY_BYTES))
        remote = RemoteSession(session)
        relay = ListeningRelay(
            remote,
            Artifact(),
            Reach(remote, "direct", 120.0, "127.0.0.1", ships=True, on_lost=lambda why: None),
            hear,
            lambda error: None,
            listens_at=("127.0.0.1", 0, "127.0.0.1"),
            tasks_at=lambda: (status.host, status.port),
            lease_s=120.0,
            encryption=encryption(False, keys),
            keys=keys,
        )
        await relay.start()
        return relay

    with start_blocking_portal("asyncio", name="heard") as portal:
        relay = portal.call(open_relay)
        try:
            yield records
        finally:
            portal.call(relay.close)


def by_two_lines(tasks: Line, relay: Line, relay_lease_s: float = 30.0) -> SidecarConfig:
    """Settings for a sidecar at the other end of both lines."""
    return SidecarConfig(
        host=SIDECARS_HOST,
        port=tasks.port,
        addresses=Addresses(advertised_host=LINES_HOST, relay_port=relay.port, relay_lease_s=relay_lease_s),
    )


class ConnectBench(FrameJobs, Bench):
    """``server`` shows its UI, and ``records`` are those of ``listening_beside`` the sidecar."""

    def __init__(
        self, session: Any, sidecar: Sidecar, cluster: StandaloneCluster, server: ConnectServer, records: list[Heard]
    ) -> None:
        Bench.__init__(self, session, sidecar, cluster)
        self.server = server
        self._records = records

    @contextmanager
    def listening(self) -> Iterator[Heard]:
        self._records.append(Heard())
        try:
            yield self._records[-1]
        finally:
            self._records.pop()

    def wait_for_executors(self) -> None:
        """As the server's log says: an executor that is lost is known as such when its loss has been told."""

        def on_each_host() -> bool:
            log = self.server.log
            lost = set(re.findall(r"Lost executor (\d+) on", log))
            known = re.findall(r"Registering block manager .*BlockManagerId\((\d+), ([\d.]+),", log)
            return {host for executor, host in known if executor not in lost} == set(self.cluster.hosts)

        wait_until(on_each_host, "an executor on each host")

    def places_in_the_task_set(self, stage_id: int, stage_attempt: int) -> dict[int, int]:
        tasks = self.server.rest(f"stages/{stage_id}/{stage_attempt}/taskList?length=100")
        return {task["partitionId"]: task["index"] for task in tasks}

    def behind_a_line(self, line: Line) -> AbstractContextManager[Sidecar]:
        [port] = free_ports(1)
        line.leads_to = LINES_HOST, port
        return self._another(SidecarConfig(host=LINES_HOST, port=port, addresses=Addresses(advertised_port=line.port)))

    def behind_two_lines(self, tasks: Line, relay: Line) -> AbstractContextManager[Sidecar]:
        return self._another(by_two_lines(tasks, relay))

    @contextmanager
    def _another(self, config: SidecarConfig) -> Iterator[Sidecar]:
        with Sidecar(self.spark, config) as sidecar:
            for heard in self._records:
                heard.forget_a_job()  # the look at an executor
            yield sidecar

    # --- with the links of the server's UI, and the interrupts of a session ----------------------------------------

    def cancel_stage(self, stage_id: int) -> str:
        self._press("stages/stage/kill", stage_id)
        return "killed via the Web UI"

    def cancel_job(self, job_id: int) -> str:
        self._press("jobs/job/kill", job_id)
        return f"Job {job_id} cancelled"

    def cancel_all_jobs(self) -> str:
        self.spark.interruptAll()
        return "cancel"

    def in_group(self, group: str, collect: Callable[[], list[Any]]) -> Callable[[], list[Any]]:
        """A tag is what a job group is without Connect."""

        def action() -> list[Any]:
            self.spark.addTag(group)
            return collect()

        return action

    def cancel_group(self, group: str) -> str:
        self.spark.interruptTag(group)
        return "cancel"

    def _press(self, link: str, number: int) -> None:
        """Press a "kill" link of the UI: send the fields of its form, as soon as the page has it."""
        found: list[list[tuple[str, str]]] = []

        def look() -> bool:
            listing = page(f"{self.server.ui}/{link.partition('/')[0]}/")
            forms = re.findall(rf'action="[^"]*{link}/"(.*?)</form>', listing, re.DOTALL)
            fields = (re.findall(r'name="(\w+)" value="([^"]*)"', form) for form in forms)
            found.extend(form for form in fields if ("id", str(number)) in form)
            return bool(found)

        wait_until(look, f"a link to {link} {number}")
        form = urllib.parse.urlencode(found[0]).encode()
        urllib.request.urlopen(f"{self.server.ui}/{link}/", form, timeout=60).close()
