# SPDX-License-Identifier: Apache-2.0

"""Marked passwords in every setting of real servers, failures of each kind, and a search of all that came out (H76)."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
import redis

from tests.postgres import Postgres
from tests.redis_server import RedisServer
from tests.spark.cluster import ROOT
from tests.spark.memory import children, command_of
from tests.spark_bridge.s3 import s3_server
from tests.spark_bridge.test_secret_texts import (
    HEAD,
    TAIL,
    a_store_that_says_what_it_heard,
    free_port,
    marks_in,
    wanting_passwords,
)

__all__ = ["wanting_passwords"]

pytestmark = [pytest.mark.spark, pytest.mark.long]

SECRET = f"{HEAD}/+&{TAIL}"


@pytest.fixture
def redis_with_a_password(redis_server: RedisServer) -> Iterator[RedisServer]:
    client = redis_server.connect()
    client.config_set("requirepass", "another")
    yield redis_server
    redis.Redis(port=redis_server.port, password="another").config_set("requirepass", "")
    client.close()


def environment_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().decode("latin-1")
    except OSError:  # it has ended
        return ""


def test_no_part_of_a_password_comes_out_of_a_run_with_failures_of_each_kind(
    wanting_passwords: Postgres,
    redis_with_a_password: RedisServer,
    tmp_path: Path,
) -> None:
    """H76: logs of Headgate and Spark, exceptions, status, metrics, top, event log, history, trace, command lines."""
    port, nobody = wanting_passwords.port, free_port()
    with psycopg.connect(wanting_passwords.conninfo, autocommit=True) as owner:
        owner.execute(f"ALTER ROLE me PASSWORD '{SECRET}'".encode())
        owner.execute("CREATE TABLE kept (id bigint PRIMARY KEY)")
        owner.execute("GRANT ALL ON SCHEMA public TO me")
        owner.execute("GRANT ALL ON kept TO me")

    def conninfo(at: int, password: str) -> str:
        return f"host=127.0.0.1 port={at} user=me dbname=postgres password='{password}' connect_timeout=5"

    with s3_server() as store, a_store_that_says_what_it_heard() as denying:
        keys = {"key": f"{HEAD}key", "secret": SECRET, "token": f"{TAIL}{HEAD}"}
        asked: dict[str, Any] = {
            "folder": str(tmp_path),
            "owner": wanting_passwords.conninfo,
            "conninfo": conninfo(port, SECRET),
            "conninfo, wrong password": conninfo(port, f"{TAIL}{HEAD}"),
            "conninfo, refused": conninfo(nobody, SECRET),
            "redis, wrong password": f"redis://:{HEAD}%2F{TAIL}@127.0.0.1:{redis_with_a_password.port}/0",
            "redis, refused": f"redis://:{HEAD}%2F{TAIL}@127.0.0.1:{nobody}/0",
            "store": {**keys, "endpoint_url": store["endpoint_url"]},
            "denying": {**keys, "endpoint_url": denying},
            "status token": f"{HEAD}-{TAIL}.{HEAD}",
        }
        (tmp_path / "out").touch()
        texts = run(asked, tmp_path)
    tried = set(re.findall("(?m)^--- (?!failed|the end)(.+)$", texts["out"]))
    assert len(tried) == 19
    assert set(re.findall("(?m)^--- failed: (.+)$", texts["out"])) == tried, "each for the reason that is meant"
    for name, text in texts.items():
        places = [line for line in text.splitlines() if marks_in(line)]
        assert places == [], f"{name}: {places[:5]}"


def run(asked: dict[str, Any], folder: Path) -> dict[str, str]:
    """Everything that comes out of the program, by the name of where."""
    texts = {"processes": ""}
    command = [sys.executable, "-m", "tests.spark.failing_program"]
    with (folder / "out").open("w") as out:
        program = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=out, stderr=out, text=True)
        over = threading.Event()

        def look() -> None:
            while not over.wait(0.2):
                for pid in (program.pid, *children(program.pid)):
                    seen = f"{command_of(pid)}\n{environment_of(pid)}\n"
                    texts["processes"] += "" if seen in texts["processes"] else seen

        looking = threading.Thread(target=look)
        looking.start()
        try:
            program.communicate(json.dumps(asked))
        finally:
            program.kill()
            over.set()
            looking.join()
    texts |= {str(path.relative_to(folder)): path.read_text("latin-1") for path in folder.rglob("*") if path.is_file()}
    assert "--- the end" in texts["out"], texts["out"][-5000:]
    [log] = (folder / "events").iterdir()
    keys = {
        "AWS_ACCESS_KEY_ID": "any",
        "AWS_SECRET_ACCESS_KEY": "any",
        "AWS_ENDPOINT_URL": asked["store"]["endpoint_url"],
    }
    for name, what in (("history", str(log)), ("checkpoints", "s3://kept/x")):
        command = [sys.executable, "-m", "headgate", name, what]
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, **keys}, capture_output=True, text=True, check=False
        )
        texts[name] = done.stdout + done.stderr
    assert "python -m pyspark.daemon" in texts["processes"].replace("\0", " "), "the search must find what is there"
    return texts
