# SPDX-License-Identifier: Apache-2.0

"""What is asked of a Spark Connect session, and what each answer means. tests/spark/connect has real servers."""

from __future__ import annotations

import re
import socket
import sys
import threading
import zipfile
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog.testing

from protocol.wire.keys import KeyRing, Purpose
from spark_bridge.bridge.relay_jar import FUNCTION_CLASS, LISTENER_CLASS, jar_bytes
from spark_bridge.common.errors import ConnectRefused
from spark_bridge.connect import remote_session
from spark_bridge.connect.opening import OPEN_TAG, Artifact, Installed, Wanted, opening_of
from spark_bridge.connect.remote_session import BESIDE, HERE, Listener, RemoteSession
from spark_bridge.driver import shipping
from spark_bridge.task_entry import ACTION_TAG, ExecutorLook


class Policy:
    """A policy of PySpark's retries."""

    def can_retry(self, error: BaseException) -> bool:
        return isinstance(error, OSError)


class Session:
    """As much of a session as is used. ``fails`` maps what is called to the error of the server."""

    session_id = "the-session"

    def __init__(self, host: str = "127.0.0.1", version: str = "4.3.0", **settings: str) -> None:
        self.client = self.conf = self.udf = self
        self.host = host
        self.version = version
        self.settings = {name.replace("_", "."): text for name, text in settings.items()}
        self.fails: dict[str, Exception] = {}
        self.told: list[Any] = []
        self.tags: list[str] = []
        self.artifacts: dict[str, bytes] = {}
        self.policies: list[Any] = [Policy()]
        self.rows: list[Any] = []
        self.answers: list[str] = []
        self.in_a_job: list[str] = []

    def _meet(self, what: str) -> None:
        if what in self.fails:
            raise self.fails[what]

    def get(self, name: str, default: str | None) -> str | None:
        self._meet("get")
        return self.settings.get(name, default)

    def get_retry_policies(self) -> list[Any]:
        return self.policies

    def set_retry_policies(self, policies: list[Any]) -> None:
        self.policies = policies

    def addArtifacts(self, path: str, **kind: bool) -> None:
        self._meet("addArtifacts")
        self.artifacts[Path(path).name] = Path(path).read_bytes()
        self.told.append(kind)

    def addTag(self, tag: str) -> None:
        self.tags.append(tag)

    def removeTag(self, tag: str) -> None:
        self.tags.remove(tag)

    def interruptTag(self, tag: str) -> None:
        self.told.append(("interrupt", tag))

    def range(self, *numbers: int) -> Session:
        self.told.append(("range", *numbers))
        return self

    def mapInArrow(self, look: Any, schema: Any) -> Session:
        self.told.append(look)
        return self

    def registerJavaFunction(self, name: str, java_class: str, kind: str) -> None:
        self._meet("register")
        self.told.append((java_class, kind))

    def sql(self, query: str, args: list[Any] | None = None) -> Session:
        self._meet("drop" if query.startswith("DROP") else "sql")
        if args is not None:
            self.told.append(args)
            self.rows = [(self.answers.pop(0),)]
        else:
            self.told.append("dropped")
        return self

    def collect(self) -> list[Any]:
        self.in_a_job = list(self.tags)
        self._meet("collect")
        return self.rows


@pytest.mark.parametrize("version", ["3.5.9", "4.0.2", "unknown", ""])
def test_an_older_server_is_refused(version: str) -> None:
    with pytest.raises(ConnectRefused, match=f"runs Spark {version}, but"):
        RemoteSession(Session(version=version)).check_version()


def test_an_older_client_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyspark.__version__", "4.0.1")
    with pytest.raises(ConnectRefused, match=r"this Python has Spark 4\.0\.1, but .* update PySpark"):
        RemoteSession(Session(version="4.3.0")).check_version()


@pytest.mark.parametrize("version", ["4.1.0", "4.3.0-SNAPSHOT", "5.0.0"])
def test_a_supported_server_is_accepted(version: str) -> None:
    RemoteSession(Session(version=version)).check_version()


@pytest.mark.parametrize("host", ["localhost", "127.0.0.9", "::1", "local", "local[4]"])
def test_a_server_on_this_machine_dials_loopback(host: str) -> None:
    assert RemoteSession(Session(host)).own_address() == "127.0.0.1"


def test_a_server_elsewhere_dials_the_address_that_leads_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    resolved = [(socket.AF_INET, socket.SOCK_DGRAM, 0, "", ("127.0.0.2", 1))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *_, **__: resolved if host == "server.example" else [])
    assert RemoteSession(Session("server.example")).own_address().startswith("127.")


def test_a_server_that_is_not_found_says_which_settings_help(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise socket.gaierror("unknown name")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    with pytest.raises(ConnectRefused, match=r"'server.example' can reach is not known \(unknown name\): set Sidecar"):
        RemoteSession(Session("server.example")).own_address()


def test_settings_are_those_that_the_server_tells() -> None:
    told = RemoteSession(Session(spark_default_parallelism="12", spark_io_encryption_enabled="TRUE"))
    assert (told.cores(), told.encrypts_files(), told.setting("spark.other")) == (12, True, None)
    silent = RemoteSession(Session(spark_default_parallelism="many"))
    assert (silent.cores(), silent.encrypts_files()) == (None, False)


def test_of_a_server_that_does_not_tell_its_settings_the_careful_one_is_assumed() -> None:
    session = Session(spark_default_parallelism="12")
    session.fails["get"] = RuntimeError("not allowed")
    refused = RemoteSession(session)
    assert (refused.cores(), refused.encrypts_files(), refused.setting("spark.other")) == (None, True, None)


def test_retries_go_on_as_the_policy_says_until_they_are_stopped() -> None:
    session = Session()
    remote, given = RemoteSession(session), session.policies
    remote.watch_retries()
    [watched] = session.policies
    assert watched is not given[0]
    assert watched.can_retry(OSError())
    assert not watched.can_retry(ValueError())
    remote.stop_retries()
    assert not watched.can_retry(OSError())


def test_a_session_that_is_no_longer_used_gets_its_policies_back_unless_its_server_is_gone() -> None:
    session = Session()
    remote, given = RemoteSession(session), session.policies
    remote.unwatch_retries()
    assert session.policies is given
    remote.watch_retries()
    remote.unwatch_retries()
    assert session.policies == given
    session.policies = []
    remote.unwatch_retries()
    assert session.policies == []
    session.policies = given
    remote.watch_retries()
    remote.stop_retries()
    remote.unwatch_retries()
    assert not session.policies[0].can_retry(OSError())
    remote.unwatch_retries()
    session.policies = given
    remote.watch_retries()
    assert session.policies[0].can_retry(OSError())


def test_a_look_at_the_session_is_not_repeated_by_pyspark() -> None:
    class Looked(Session):
        def get(self, name: str, default: str | None) -> str | None:
            self.told.append(self.policies[0].can_retry(OSError()))
            raise OSError("closed channel")

    session = Looked()
    remote = RemoteSession(session)
    remote.watch_retries()
    assert remote.why_closed() == "closed channel"
    assert session.told == [False]
    assert session.policies[0].can_retry(OSError())


def test_the_relay_travels_under_a_name_for_its_content(tmp_path: Path) -> None:
    session = Session()
    RemoteSession(session).ship_relay()
    [(name, content)] = session.artifacts.items()
    assert name.startswith("headgate-relay-")
    assert name.endswith(".jar")
    assert (content, session.told) == (jar_bytes(), [{}])


def test_the_packages_travel_as_an_archive_of_python_files(tmp_path: Path) -> None:
    session = Session()
    RemoteSession(session).ship_packages()
    [(name, content)] = session.artifacts.items()
    (tmp_path / name).write_bytes(content)
    assert "spark_bridge/task_entry.py" in zipfile.ZipFile(tmp_path / name).namelist()
    assert session.told == [{"pyfile": True}]


def test_nothing_travels_from_an_installation_that_is_an_archive_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session()
    monkeypatch.setattr(remote_session, "packages_are_files", lambda: False)
    RemoteSession(session).ship_packages()
    assert session.artifacts == {}
    assert shipping.packages_are_files()


def test_a_server_that_forbids_artifacts_is_refused_if_they_are_needed() -> None:
    session = Session()
    session.fails["addArtifacts"] = RuntimeError("forbidden\nwith a stack")
    with pytest.raises(
        ConnectRefused, match=r"refused the artifact headgate-[\w-]+\.jar \(forbidden\): let the server's"
    ):
        RemoteSession(session).ship_relay()
    with pytest.raises(ConnectRefused, match=r"\(forbidden\)"):
        RemoteSession(session).ship_packages()
    with structlog.testing.capture_logs() as logs:
        RemoteSession(session).ship_packages(needed=False)
    assert [line["event"] for line in logs] == ["packages not added, artifact refused"]


def test_an_executor_is_looked_at_by_a_small_task_of_a_separate_job() -> None:
    session = Session()
    session.rows = [SimpleNamespace(problem="")]
    RemoteSession(session).check_executors("10.0.0.1", 7077)
    assert session.told[0] == ("range", 0, 1, 1, 1)
    assert vars(session.told[1]) == vars(ExecutorLook("10.0.0.1", 7077))
    assert session.in_a_job[0].startswith("headgate.look.")
    assert session.tags == []


@pytest.mark.parametrize("listener", [HERE, BESIDE])
def test_an_executor_that_does_not_reach_the_sidecar_is_refused_with_the_reason(listener: Any) -> None:
    session = Session()
    session.rows = [SimpleNamespace(problem="timed out")]
    with pytest.raises(ConnectRefused) as refused:
        RemoteSession(session, listener).check_executors("10.0.0.1", 7077)
    assert f"cannot reach {listener.name} at 10.0.0.1:7077 (timed out): {listener.reachable}" in str(refused.value)


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (
            "stack\nPython in worker has different version: 3.9 than that in driver",
            f"workers run Python 3.9, but this client runs Python {sys.version_info.major}.{sys.version_info.minor}: ",
        ),
        (
            "Traceback\n  ImportError: first\nmore\n   pickle.UnpicklingError: the last\nat Spark",
            "cannot run a subtask: pickle.UnpicklingError: the last",
        ),
        ("  something else \n", "cannot run a subtask: something else"),
    ],
)
def test_an_executor_that_cannot_run_a_subtask_is_refused_with_what_the_worker_said(error: str, why: str) -> None:
    session = Session()
    session.fails["collect"] = RuntimeError(error)
    with pytest.raises(ConnectRefused) as refused:
        RemoteSession(session).check_executors("10.0.0.1", 7077)
    assert why in str(refused.value)
    assert session.tags == []


def test_executors_without_the_packages_are_explained_by_the_artifact_that_was_refused() -> None:
    session = Session()
    session.fails |= {
        "addArtifacts": RuntimeError("forbidden"),
        "collect": RuntimeError("ModuleNotFoundError: No module named 'spark_bridge'"),
    }
    remote = RemoteSession(session)
    with pytest.raises(ConnectRefused, match="cannot run a subtask: ModuleNotFoundError"):
        remote.check_executors("10.0.0.1", 7077)
    remote.ship_packages(needed=False)
    with pytest.raises(ConnectRefused, match=r"refused the artifact .*, or `pip install headgate` for the Python"):
        remote.check_executors("10.0.0.1", 7077)
    session.fails["collect"] = RuntimeError("OSError: disk full")
    with pytest.raises(ConnectRefused, match="cannot run a subtask: OSError: disk full"):
        remote.check_executors("10.0.0.1", 7077)


def test_a_cluster_without_a_free_slot_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_session, "_EXECUTOR_TIMEOUT_S", 0.0)

    class Full(Session):
        interrupted = threading.Event()

        def collect(self) -> list[Any]:
            self.interrupted.wait(60)
            raise RuntimeError("[OPERATION_CANCELED] The operation was canceled.")

        def interruptTag(self, tag: str) -> None:
            super().interruptTag(tag)
            self.interrupted.set()

    session = Full()
    with structlog.testing.capture_logs() as logs:
        RemoteSession(session).check_executors("10.0.0.1", 7077)
    assert [line["event"] for line in logs] == ["executors not checked, no task ran in time"]
    assert session.told[-1][0] == "interrupt"
    RemoteSession(session).run_tagged("a tag")
    assert session.told[-1] == ("interrupt", "a tag")


def test_the_job_of_a_tag_has_this_tag_alone() -> None:
    session = Session()
    RemoteSession(session).run_tagged("a tag")
    assert (session.in_a_job, session.tags) == (["a tag"], [])
    session.fails["collect"] = RuntimeError("refused\nstack")
    with pytest.raises(ConnectRefused, match=r"could not run a small job, which opens the relay: refused\. Find out"):
        RemoteSession(session).run_tagged("a tag")
    assert session.tags == []


def test_the_jobs_of_an_action_have_its_tag_until_it_ends() -> None:
    session = Session()
    with suppress(KeyError), RemoteSession(session).marked("7"):
        assert session.tags == [ACTION_TAG + "7"]
        raise KeyError
    assert session.tags == []


# --- the two ways to open a relay ---------------------------------------------------------------------------------

KEYS = KeyRing(b"k" * 32)


def wanted(tasks_at: tuple[str, int] | None = None, certificate: bytes = b"") -> Wanted:
    return Wanted(KEYS.key(Purpose.RELAY, b"i" * 16), ("10.0.0.1", 7077), tasks_at, 1.5, certificate)


def with_an_artifact(session: Session, wish: Wanted | None = None) -> None:
    Artifact().open(RemoteSession(session), wish or wanted())


def test_a_relay_is_opened_by_a_function_that_the_session_has_only_meanwhile() -> None:
    session = Session()
    session.answers = [f"offered {'ab' * 256}", "opened"]
    with_an_artifact(session, wanted(("10.0.0.1", 7078), b"\xca\xfe"))
    assert next(iter(session.artifacts)).startswith("headgate-relay-")
    _, function, [offer], [opened], dropped = session.told
    assert (function, dropped) == ((FUNCTION_CLASS, "string"), "dropped")
    identity = (b"i" * 16).hex()
    assert offer.split(" ")[:2] == ["offer", identity]
    words = opened.split(" ")
    assert (words[:2], words[3:]) == (
        ["open", identity],
        ["1500", "cafe", "10.0.0.1", "7077", "10.0.0.1", "7078"],
    )
    assert wanted().key.secret.hex() not in opened


def test_without_an_address_for_tasks_and_without_a_certificate_it_says_so() -> None:
    session = Session()
    session.answers = [f"offered {'ab' * 256}", "opened"]
    with_an_artifact(session)
    assert session.told[3][0].split(" ")[3:] == ["1500", "-", "10.0.0.1", "7077"]


@pytest.mark.parametrize(
    ("answers", "why"),
    [
        (["no offer"], "unexpected answer of the relay on the server: 'no offer'"),
        ([f"offered {'ab' * 256}", "closed"], "unexpected answer of the relay on the server: 'closed'"),
        (
            [f"offered {'ab' * 256}", "unreachable 10.0.0.1 7077 timed out"],
            f"the server cannot reach {HERE.name} at 10.0.0.1:7077 (timed out): {HERE.reachable}",
        ),
        (["elsewhere"], "evaluated the relay's function in a task, not on its driver: remove ConvertToLocalRelation"),
    ],
)
def test_a_relay_that_is_not_opened_is_refused_and_leaves_no_function(answers: list[str], why: str) -> None:
    session = Session()
    session.answers = list(answers)
    with pytest.raises(ConnectRefused) as refused:
        with_an_artifact(session)
    assert why.replace("the server cannot", "the Spark Connect server cannot") in str(refused.value)
    assert session.told[-1] == "dropped"


def test_a_server_that_refuses_functions_or_queries_is_refused_with_its_words() -> None:
    session = Session()
    session.fails["register"] = RuntimeError("no classes\nstack")
    with pytest.raises(ConnectRefused, match=r"refused the Java function of the relay \(no classes\): let the"):
        with_an_artifact(session)
    session.fails = {"sql": RuntimeError("no queries\nstack"), "drop": RuntimeError("neither")}
    with pytest.raises(ConnectRefused, match=r"could not be opened on the server: no queries\. The server's log"):
        with_an_artifact(session)


@pytest.mark.parametrize(
    ("listener", "advice"),
    [
        (HERE, r"and set SidecarConfig\(addresses=Addresses\(relay_secret_file=FILE\)\)$"),
        (BESIDE, r"and give the sidecar FILE as its --secret-file, and pass relay_installed=True$"),
    ],
)
def test_in_the_definitions_of_a_pipeline_the_relay_must_be_installed(listener: Listener, advice: str) -> None:
    """Nothing that the server's administrator allows would help there."""
    session = Session()
    forbidden = "[SESSION_MUTATION_IN_DECLARATIVE_PIPELINE.REGISTER_JAVA_UDF] Session mutation is not allowed."
    session.fails["register"] = RuntimeError(forbidden)
    with pytest.raises(ConnectRefused, match=rf"\({re.escape(forbidden)}\): run `headgate connect-server.*{advice}"):
        Artifact().open(RemoteSession(session, listener), wanted())


@pytest.mark.parametrize("listeners", [LISTENER_CLASS, f"a.B, {LISTENER_CLASS}", f"{LISTENER_CLASS} ,a.B"])
def test_an_installed_relay_is_asked_by_the_tag_of_a_job_with_a_proof_of_the_secret(listeners: str) -> None:
    session = Session(spark_extraListeners=listeners)
    installed = Installed(b"s" * 32)
    key = installed.keys(KEYS).key(Purpose.RELAY, b"i" * 16)
    tags = []
    for secret in (b"s" * 32, b"t" * 32):
        of_this = KeyRing(secret).key(Purpose.RELAY, b"i" * 16)
        installed.open(RemoteSession(session), Wanted(of_this, ("10.0.0.1", 7077), None, 1.5, b"\xca\xfe"))
        tags += session.in_a_job
    assert key == KeyRing(b"s" * 32).key(Purpose.RELAY, b"i" * 16)
    (text, proof), (same, other) = (tag.removeprefix(OPEN_TAG).split(".") for tag in tags)
    assert bytes.fromhex(text).decode() == f"{(b'i' * 16).hex()} 1500 cafe 10.0.0.1 7077 the-session"
    assert text == same
    assert proof != other


@pytest.mark.parametrize("listeners", [{}, {"spark_extraListeners": f"{LISTENER_CLASS}2"}])
def test_a_server_without_an_installed_relay_is_refused_before_a_job_runs(listeners: dict[str, str]) -> None:
    session = Session(**listeners)
    with pytest.raises(ConnectRefused, match=r"no relay is installed on the .*, or leave relay_installed out, so"):
        Installed(b"s" * 32).open(RemoteSession(session, BESIDE), wanted())
    assert session.told == []


def test_the_secret_of_the_client_decides_which_way_is_taken(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("ab" * 32, encoding="utf-8")
    file.chmod(0o600)
    assert isinstance(opening_of(None), Artifact)
    assert isinstance(opening_of(file), Installed)
    assert Artifact().keys(KEYS) is KEYS
    assert "did not authenticate" in Artifact().why_silent(("a", 1), HERE)
    assert HERE.reachable in Installed(b"s" * 32).why_silent(("a", 1), HERE)
