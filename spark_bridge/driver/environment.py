# SPDX-License-Identifier: Apache-2.0

"""Settings of the driver's Spark: its hosts, its limits, and the Python of its workers."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from actors.logs import get_logger
from protocol.arguments import Rule, given
from spark_bridge.bridge.relay import require_driver
from spark_bridge.common.errors import SidecarError

SPARK_OLDEST, SPARK_NEWEST = (4, 1), (4, 3)
"""The releases that the tests run with. Later ones are tried with a warning."""

_log = get_logger("headgate.sidecar")
_PROBE = "import sys, msgpack; print('%d.%d' % sys.version_info[:2])"


def is_remote(spark: object) -> bool:
    """Whether this is a Spark Connect session."""
    return type(spark).__module__.startswith("pyspark.sql.connect")


def _context_class() -> Any:
    """Return PySpark's ``SparkContext``; None if it is not imported, or is not there, as in ``pyspark-client``."""
    return getattr(sys.modules.get("pyspark"), "SparkContext", None)


def active_context() -> Any:
    """Return the classic ``SparkContext`` of this process, running or stopped; None if there is none."""
    return getattr(_context_class(), "_active_spark_context", None)


def _is_spark(value: Any) -> bool:
    if is_remote(value):
        return True
    context_class = _context_class()
    return context_class is not None and isinstance(getattr(value, "sparkContext", value), context_class)


SPARK = Rule("the SparkSession or the SparkContext that runs the tasks", _is_spark, is_type=True)


def driver_context(spark: Any) -> Any:
    """The classic, running ``SparkContext`` behind a session or a context.

    Raises ``TypeError`` for something else, what ``check_release`` raises, and what ``require_driver`` raises: a
    Connect session, a stopped context.
    """
    if not _is_spark(spark):
        raise TypeError(f"spark must be {SPARK.expected}, not {given('spark', spark, None)}")
    context = require_driver(spark)
    check_release("this Python has", pyspark_version(), "PySpark")
    return context


def pyspark_version() -> str:
    """Return the version of the PySpark that Python imports, whichever distribution or folder it comes from."""
    import pyspark

    return str(pyspark.__version__)


def spark_release(version: str) -> tuple[int, int]:
    """Return the first two numbers of a version, such as (4, 1) of "4.1.0+vendor"; (0, 0) if there are none."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def check_release(found: str, version: str, update: str, refused: type[SidecarError] = SidecarError) -> None:
    """Refuse a release of Spark that is too old: nothing that is installed with Headgate has chosen it (H170).

    Raises ``refused``. Logs a release that is newer than those that Headgate is tested with.
    """
    release = spark_release(version)
    if release < SPARK_OLDEST:
        raise refused(
            f"{found} Spark {version}, but Headgate supports {_shown(SPARK_OLDEST)} and later: update {update}"
        )
    if release > SPARK_NEWEST:
        _log.warning("spark release not tested", found=found, version=version, newest=_shown(SPARK_NEWEST))


def _shown(release: tuple[int, int]) -> str:
    return ".".join(map(str, release))


def advertised_and_bind_host(context: Any, bind_host: str | None, advertised_host: str | None) -> tuple[str, str]:
    """The host to listen on and the host that tasks connect to (H63). Blocks for a few Py4J calls.

    A ``local`` master runs its tasks on this machine, so loopback is enough, and other machines cannot connect.
    """
    conf = context.getConf()
    local = is_local(context)
    driver_host = conf.get("spark.driver.host", None)
    if bind_host is None:
        bind_host = "127.0.0.1" if local else conf.get("spark.driver.bindAddress", None) or driver_host
    if advertised_host is None:
        advertised_host = bind_host if local else driver_host or bind_host
    if bind_host is None or advertised_host is None:
        raise SidecarError(
            "Spark does not name a driver host: set spark.driver.host, or "
            "SidecarConfig(host=..., addresses=Addresses(advertised_host=...))"
        )
    return bind_host, advertised_host


def is_local(context: Any) -> bool:
    """Whether tasks run in the driver's own JVM or in executors that it starts on this machine."""
    return str(context.master).startswith("local")


def task_failures_max(context: Any) -> int:
    """How often Spark itself lets a task fail: F of ``local[N,F]``, else ``spark.task.maxFailures``. Blocks for a call.

    A plain ``local[N]`` lets none fail, whatever is set (spark-facts 31). For kills the setting's value holds there,
    too: a kill does not mean that the user's code has failed.
    """
    found = re.fullmatch(r"local\[[^,\]]+,\s*(\d+)\s*\]", str(context.master))
    return int(found.group(1) if found else context.getConf().get("spark.task.maxFailures", "4"))


def encrypts_files(context: Any) -> bool:
    """Whether Spark encrypts what it writes to local directories. Blocks for a call."""
    return str(context.getConf().get("spark.io.encryption.enabled", "false")).lower() == "true"


def task_slots(context: Any) -> int | None:
    """How many tasks the application's executors can run at the same time, now. Blocks for a few calls.

    None once the context has stopped.
    """
    from py4j.protocol import Py4JError

    try:
        executors = context._jsc.sc().statusStore().executorList(True)
        cores = sum(executors.apply(place).totalCores() for place in range(executors.size()))
        return int(cores) // int(context.getConf().get("spark.task.cpus", "1"))
    except (AttributeError, Py4JError):  # the context stopped meanwhile
        return None


def allocates_executors(context: Any) -> bool:
    """Whether Spark starts executors when tasks wait for them. Blocks for a call."""
    return str(context.getConf().get("spark.dynamicAllocation.enabled", "false")).lower() == "true"


def check_worker_python(context: Any) -> None:
    """Refuse workers that cannot run a subtask, before any task is tried. Blocks (it may start one interpreter).

    Only workers on this machine can be checked. Elsewhere, Spark itself refuses another Python version, and the task
    entry reports other problems.

    Raises ``SidecarError`` naming both interpreters and the fix.
    """
    worker = str(context.pythonExec)
    if not is_local(context) or worker == sys.executable:
        return
    fix = (
        f"set PYSPARK_PYTHON={sys.executable} (in the environment, or os.environ before the session is built) "
        "and recreate the session"
    )
    path = shutil.which(worker)
    if path is None:
        raise SidecarError(f"cannot start Spark's workers: Python {worker!r} was not found: {fix}")
    if Path(path).absolute() == Path(sys.executable).absolute():
        return
    try:
        probe = subprocess.run([path, "-c", _PROBE], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SidecarError(f"cannot start Spark's workers: {path} does not run ({error}): {fix}") from error
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    if probe.returncode != 0:
        why = (probe.stderr.strip().splitlines() or ["it failed"])[-1]
        raise SidecarError(f"Spark's workers use {path}, which lacks what a subtask needs ({why}): {fix}")
    if probe.stdout.strip() != here:
        raise SidecarError(
            f"Spark's workers use {path} (Python {probe.stdout.strip()}), but the driver runs Python {here}: {fix}"
        )


def why_no_subtask(text: str, *, of_server: bool) -> str:
    """What an error of Spark's worker says, with its fix."""
    version = re.search(r"Python in worker has different version: ([\d.]+\d)", text)
    if version is not None:
        here = f"{sys.version_info.major}.{sys.version_info.minor}"
        if of_server:
            return (
                f"the server's workers run Python {version[1]}, but this client runs Python {here}: use the same minor "
                "version here, or have the server set PYSPARK_PYTHON"
            )
        return (
            f"Spark's workers run Python {version[1]}, but the driver runs Python {here}: set PYSPARK_PYTHON to a "
            f"Python {here} that the executors have, or run the driver with Python {version[1]}"
        )
    raised = re.findall(r"^\s*([\w.]*(?:Error|Exception|Warning)\b.*)$", text, re.MULTILINE)
    executors = "the server's executors" if of_server else "the executors"
    return f"a task on {executors} cannot run a subtask: {raised[-1] if raised else text.strip()}"


def executor_ids(context: Any) -> set[str]:
    """The executors that tasks run on, now: the driver, if the master is ``local``. Blocks for a few calls."""
    found = context._jsc.sc().statusStore().executorList(True)
    ids = {str(found.apply(place).id()) for place in range(found.size())}
    return ids if re.fullmatch(r"local(\[.*\])?", context.master) else ids - {"driver"}
