# SPDX-License-Identifier: Apache-2.0

"""No part of a password is in what a setting that has one makes anything say.

A marked secret, in shapes that parsers cut, goes into every setting that may have one; then the setting is used, with
real clients, on real servers that refuse it, or on none.
"""

from __future__ import annotations

import inspect
import random
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote
from xml.sax.saxutils import escape

import psycopg
import pyarrow
import pytest

import headgate
import headgate.sinks
import headgate.sources
from actors.logs import get_logger
from headgate import CheckpointFile, CheckpointStorage, SidecarConfig, StorageDetails, TlsCertificate, Watching
from headgate.sinks import (
    DeltaSink,
    FileSink,
    IcebergSink,
    PostgresSink,
    RedisStreamsSink,
    SinkCommitterContext,
    SinkWriterContext,
)
from headgate.sources import FileSource, KafkaSource, PostgresSource, RedisStreamsSource
from protocol import arguments
from spark_bridge.common.secret_texts import Secrets
from spark_bridge.sinks.files.directory import SinkDirectory
from spark_bridge.sinks.parquet.folder import DataFolder
from spark_bridge.storage import StorageError
from tests.postgres import Postgres
from tests.redis_server import RedisServer

HEAD, TAIL = "Zq7" + "Xw", "Kv9" + "Ym"
"""What is around the characters that parsers stumble over. Four of these in a row appear nowhere else."""
MARKS = tuple(one[at : at + 4] for one in (HEAD, TAIL) for at in range(2))
TROUBLE = ["", "@", " ", "'", '"', "%", "%4", "%zz", "\\", ":", "/", "?", "#", "&", "=", ";", "ü", "℀", "[", "]", "\t"]
SHAPES = [f"{HEAD}{one}{TAIL}" for one in TROUBLE] + [f"{HEAD}@{HEAD}:{TAIL}/{TAIL}", f" {HEAD}'{TAIL}' x={TAIL}"]
SCHEMA = pyarrow.schema([("id", pyarrow.int64())])
ROWS = ["id"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def all_texts(error: BaseException | None) -> Iterator[str]:
    """Everything that anybody may print of an error, and of those behind it."""
    if error is not None:
        yield "".join(traceback.format_exception(error))
    while error is not None:
        yield from (str(error), repr(error), repr(error.args))
        error = error.__cause__ or error.__context__


def marks_in(text: str) -> list[str]:
    readings = (text, text.replace("\\", ""), text.lower())
    return [mark for mark in MARKS for one in readings if mark in one or mark.lower() in one]


def said_by(use: Callable[[], Any]) -> str:
    """What an object shows of itself, and what its use raises."""
    said: list[str] = []
    try:
        used = use()
        said += [repr(used), str(used)]
    except Exception as error:
        said += all_texts(error)
    return "\n".join(said)


def use_of_sink(sink: Any) -> Iterator[Callable[[], Any]]:
    yield lambda: sink
    yield lambda: sink.target
    yield lambda: sink.committer(SinkCommitterContext("out", "out", get_logger("test"))).open()
    yield lambda: list(sink.committer(SinkCommitterContext("out", "out", get_logger("test"))).prepared())

    def write() -> None:
        writer = sink.writer(SinkWriterContext("out", 0, 0))
        writer.write((1,))
        writer.prepare()

    yield write


def use_of_source(source: Any) -> Iterator[Callable[[], Any]]:
    yield lambda: source
    yield lambda: source.schema
    yield lambda: list(source.splits())
    yield lambda: list(source.operator().read_from(["x", None, None], None))


def uses(make: Callable[[], Any], use: Callable[[Any], Iterator[Callable[[], Any]]]) -> Iterator[Callable[[], Any]]:
    try:
        made = make()
    except Exception:
        yield make
    else:
        yield from use(made)


def of_conninfo(conninfo: str) -> Iterator[Callable[[], Any]]:
    yield from uses(lambda: PostgresSink(conninfo, "t", ROWS), use_of_sink)
    yield from uses(lambda: PostgresSource(conninfo, "t", "id"), use_of_source)


def of_redis(url: str) -> Iterator[Callable[[], Any]]:
    yield from uses(lambda: RedisStreamsSink(url, "s", ROWS), use_of_sink)
    yield from uses(lambda: RedisStreamsSource(url, ["x"], SCHEMA, bounded=True), use_of_source)


def of_options(url: Any, options: dict[str, Any]) -> Iterator[Callable[[], Any]]:
    yield from uses(lambda: FileSink(url, options=options), use_of_sink)
    yield from uses(lambda: FileSource(url, "json", options=options), use_of_source)
    yield lambda: CheckpointStorage(url, options=options)
    yield lambda: SidecarConfig(storage=url, storage_details=StorageDetails(options=options))
    if url.startswith("s3:"):
        return  # the client would look for credentials in the network
    yield from uses(
        lambda: DeltaSink(url, SCHEMA, options=options, storage_options={k: str(v) for k, v in options.items()}),
        use_of_sink,
    )
    catalog = {"type": "sql", **{name: str(value) for name, value in options.items()}}
    yield from uses(lambda: IcebergSink(catalog, "n.t", url, SCHEMA, options=options), use_of_sink)


def conninfos(secret: str, port: int) -> Iterator[str]:
    quoted = secret.replace("\\", r"\\").replace("'", r"\'")
    yield f"host=127.0.0.1 port={port} user=me dbname=shop password='{quoted}' connect_timeout=5"
    yield f"host=127.0.0.1 port={port} user=me password={secret} dbname=shop connect_timeout=5"
    yield f"postgresql://me:{secret}@127.0.0.1:{port}/shop?connect_timeout=5"
    yield f"postgresql://me:{quote(secret, safe='')}@127.0.0.1:{port}/shop?connect_timeout=5"
    yield f"postgresql://127.0.0.1:{port}/shop?connect_timeout=5&user=me&password={secret}"


def redis_urls(secret: str, port: int) -> Iterator[str]:
    yield f"redis://:{secret}@127.0.0.1:{port}/0"
    yield f"redis://me:{quote(secret, safe='')}@127.0.0.1:{port}/0"
    yield f"redis://{secret}@127.0.0.1:{port}/0"
    yield f"redis://127.0.0.1:{port}/0?password={secret}"
    yield f"no-redis://:{secret}@127.0.0.1:{port}/0"


def others(secret: str) -> Iterator[Callable[[], Any]]:
    """Settings without a server: file systems, catalogs, brokers, and arguments of a wrong type or name."""
    wrong: Any = secret.encode()
    some: Any
    port = free_port()
    for url in (f"ftp://me:{secret}@127.0.0.1:{port}/x", f"sftp://me:{quote(secret)}@127.0.0.1/x"):
        yield from of_options(url, {})
    yield from of_options(f"ftp://127.0.0.1:{port}/x", {"username": "me", "password": secret})
    yield from of_options("s3://b/x", {"key": "k", "secret": secret, "client_kwargs": {"no_such": secret}})
    yield from of_options("s3://b/x", {"secret": secret, "client_kwargs": {"endpoint_url": f"no://me:{secret}@h"}})
    yield from of_options(f"no-such-{port}://x/y", {"token": secret, "uri": f"sqlite://me:{secret}@h/x"})
    for name in ("sasl.password", "ssl.key.password", "no.such.setting", "message.max.bytes", "security.protocol"):
        some = {"sasl.password": secret, "security.protocol": "ssl", name: secret}
        yield from uses(partial(KafkaSource, f"127.0.0.1:{port}", ["t"], config=some), kafka_client)
    for some in (PostgresSink, PostgresSource):
        yield partial(some, wrong, "t", ROWS)
        yield partial(some, "", "t", ROWS, password=secret)
    for some in (RedisStreamsSink, RedisStreamsSource, FileSource):
        yield partial(some, wrong, ["t"], SCHEMA)
    yield lambda: FileSource("/x", options=wrong)
    yield lambda: KafkaSource("h", ["t"], config=wrong)
    yield lambda: IcebergSink(wrong, "n.t", "/x", SCHEMA)
    yield lambda: TlsCertificate("c", "k", wrong)
    yield lambda: TlsCertificate("c", "k", secret)
    yield lambda: SidecarConfig(watching=Watching(status_token=wrong))
    yield lambda: SidecarConfig(watching=Watching(status_token=f"{secret}x" * 4, status_port=1))
    yield lambda: SidecarConfig(storage_details=StorageDetails(options=wrong))


def kafka_client(source: KafkaSource) -> Iterator[Callable[[], Any]]:
    """Only what fails before a broker is asked, which takes a client half a minute."""
    from spark_bridge.sources.kafka.task import KafkaClient

    yield lambda: source
    yield lambda: source._settings
    yield lambda: KafkaClient(source._settings).close()


RETRIES = "spark_bridge.sources.redis.task.RETRIES"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RETRIES, 0)


def check(how: str, using: Iterator[Callable[[], Any]]) -> None:
    for number, use in enumerate(using):
        found = marks_in(said := said_by(use))
        assert not found, f"{how}, use {number}: {said}"


@pytest.mark.parametrize("secret", SHAPES)
def test_an_unreachable_or_unreadable_database_setting_does_not_say_the_password(secret: str) -> None:
    port = free_port()
    for conninfo in conninfos(secret, port):
        check("conninfo", of_conninfo(conninfo))
    for url in redis_urls(secret, port):
        check("url", of_redis(url))


@pytest.mark.parametrize("secret", SHAPES)
def test_no_other_setting_says_a_password(secret: str) -> None:
    """H76"""
    check("settings", others(secret))


@pytest.fixture(scope="module")
def wanting_passwords(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Postgres]:
    """A server that wants a password of everyone but its owner."""
    rules = Path("/tmp") / f"{tmp_path_factory.mktemp('hba').name}-{free_port()}.conf"
    rules.write_text("host all headgate 127.0.0.1/32 trust\nhost all all 127.0.0.1/32 scram-sha-256\n")
    rules.chmod(0o644)
    server = Postgres(hba_file=str(rules))
    with psycopg.connect(server.conninfo, autocommit=True) as connection:
        connection.execute("CREATE ROLE me LOGIN PASSWORD 'another'")
    yield server
    server.close()
    rules.unlink()


@pytest.mark.parametrize("secret", SHAPES)
def test_a_server_that_refuses_a_password_does_not_make_a_client_say_it(
    secret: str, wanting_passwords: Postgres, redis_server: RedisServer
) -> None:
    for conninfo in conninfos(secret, wanting_passwords.port):
        check("conninfo", of_conninfo(conninfo))
    for url in redis_urls(secret, redis_server.port):
        check("url", of_redis(url))


def test_an_error_without_a_part_of_a_secret_is_shown_with_its_cause(wanting_passwords: Postgres) -> None:
    conninfo = f"host=127.0.0.1 port={wanting_passwords.port} user=me dbname=postgres password={HEAD}"
    with pytest.raises(Exception, match='password authentication failed for user "me"') as raised:
        _ = PostgresSource(conninfo, "t", "id").schema
    assert isinstance(raised.value.__cause__, psycopg.OperationalError)


def test_random_texts_of_clients_are_left_out_exactly_if_a_part_of_the_secret_is_in_them() -> None:
    """H76: in whichever notation, and neither is its cause chained."""
    seed = random.randrange(2**32)
    print("seed", seed)
    chance = random.Random(seed)
    letters = "".join(map(chr, range(33, 127))) + "äß€ "
    notations: list[Callable[[str], str]] = [str, repr, quote, lambda text: text.encode("unicode_escape").decode()]
    for _ in range(500):
        secret = "".join(chance.choices(letters, k=chance.randint(4, 24)))
        start = chance.randrange(len(secret) - 3)
        part = secret[start : start + chance.randint(4, 24)]
        written = chance.choice(notations)(part)
        with pytest.raises(TimeoutError) as raised, Secrets("options", {"password": secret}).kept():
            raise TimeoutError(f"0000 {written} 0000") from ValueError(part)
        shown = f"{raised.value} {raised.value.__cause__} {raised.value.__context__}"
        assert part not in shown, (secret, part)
        assert written not in shown, (secret, part)
    with pytest.raises(OSError, match=r"^nothing of it$"), Secrets("options", {"password": "§§§§"}).kept():
        raise OSError("nothing of it")


@contextmanager
def a_store_that_says_what_it_heard() -> Iterator[str]:
    """As S3 answers a request whose signature is wrong: with the key, the token and the canonical request."""

    class Denied(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            said = escape(f"{self.path} {self.headers}")
            body = f"<Error><Code>SignatureDoesNotMatch</Code><Message>{said}</Message></Error>".encode()
            self.send_response(403)
            self.send_header("Content-Type", "application/xml")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = answer

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Denied)
    with closing(server.socket):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_what_a_store_answers_is_in_no_error_of_a_filesystem_a_table_or_a_checkpoint() -> None:
    """H76: while files are opened, written, closed, moved, listed and read."""
    with a_store_that_says_what_it_heard() as url:
        options: dict[str, Any] = {
            "key": f"{HEAD}key",
            "secret": f"{TAIL}secret",
            "token": f"{HEAD}/{TAIL}",
            "endpoint_url": url,
            "skip_instance_cache": True,
        }
        properties = {
            "aws_access_key_id": options["key"],
            "aws_secret_access_key": options["secret"],
            "aws_session_token": options["token"],
            "aws_endpoint_url": url,
            "aws_allow_http": "true",
            "aws_region": "us-east-1",
            "retry_timeout": "1s",
        }
        catalog = {
            "type": "sql",
            "uri": "sqlite://",
            "s3.endpoint": url,
            "s3.access-key-id": options["key"],
            "s3.secret-access-key": options["secret"],
            "s3.session-token": options["token"],
            "s3.region": "us-east-1",
        }
        sinks: list[Any] = [
            FileSink("s3://b/x", options=options),
            DeltaSink("s3://b/x", SCHEMA, options=options, storage_options=properties),
            IcebergSink(catalog, "n.t", "s3://b/x", SCHEMA, options=options),
        ]
        for sink in sinks:
            check(f"{sink}", use_of_sink(sink))
            check(f"{sink}", steps_of_a_file(sink, options))
        check("source", use_of_source(FileSource("s3://b/x", "json", schema=SCHEMA, options=options)))
        check("split", read_a_split(options))
        check("checkpoints", use_of_storage(CheckpointStorage("s3://b/x", options=options)))
        with pytest.raises(PermissionError, match="text left out, because a part of options may be in it"):
            DataFolder("s3://b/x", "out", options).create("0123.parquet")


def steps_of_a_file(sink: Any, options: dict[str, Any]) -> Iterator[Callable[[], Any]]:
    """Each step after the ones before it, which failed, so that every one is seen to fail."""
    directory, data = SinkDirectory("s3://b/x", "out", options), DataFolder("s3://b/x", "out", options)
    name = "0123.parquet"
    folders: list[Any] = [directory, data]
    for folder in folders:
        filesystem = folder._filesystem
        yield partial(folder.create, name)
        file = filesystem.open("b/x/y", "wb")
        yield partial(file.write, bytes(6 << 20))  # more than a block, so it is sent
        yield file.close
        yield partial(folder.delete, name)
        yield partial(filesystem.cat_file, "b/x/y")
    yield directory.prepare
    yield partial(directory.publish, name)
    yield directory.staged
    yield partial(directory.read, name)
    yield partial(directory.write, name, b"x")
    yield partial(directory._move, "b/x", "b/y")
    yield partial(data.size, name)
    yield data.staged
    committer = sink.committer(SinkCommitterContext("out", "out", get_logger("test")))
    yield partial(committer.abort, [name])


def read_a_split(options: dict[str, Any]) -> Iterator[Callable[[], Any]]:
    reader = FileSource("s3://b/x", "json", schema=SCHEMA, options=options).operator()
    yield lambda: list(reader.read_from(["s3://b/x", 0, 100], None))


def use_of_storage(storage: CheckpointStorage) -> Iterator[Callable[[], Any]]:
    yield lambda: storage
    yield storage.prepare
    yield storage.list
    yield partial(storage.reserve_ids, 1)
    yield partial(storage.latest, "out")
    yield storage.verify


WORDS = (
    *("sig", "Signature", "X-Amz-Signature", "X-Amz-Security-Token", "X-Amz-Credential", "AWSAccessKeyId", "token"),
    *("access_token", "api_key", "apikey", "password", "%73ig", "X-Goog-Signature", "sas", "client_secret", "auth"),
)


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("before", ["?", "?a=1&", ";", "#"])
def test_a_url_with_a_token_in_its_query_is_refused_and_not_shown(word: str, before: str) -> None:
    """H76: the URL of files is in errors, logs and the status, so it must not have what opens them."""
    for secret in (f"{HEAD}{TAIL}", f"{HEAD}%2F{TAIL}", f"{HEAD}&{TAIL}"):
        url = f"s3://bucket/folder{before}{word}={secret}"
        check("url", of_options(url, {}))
        for make in OF_A_URL.values():
            with pytest.raises((ValueError, StorageError), match="must not have the parameter") as refused:
                make(url)
            assert marks_in("".join(all_texts(refused.value))) == []


OF_A_URL: dict[tuple[str, str], Callable[[str], Any]] = {
    ("CheckpointStorage", "url"): CheckpointStorage,
    ("CheckpointFile", "url"): CheckpointFile,
    ("DeltaSink", "url"): lambda url: DeltaSink(url, SCHEMA),
    ("FileSink", "url"): FileSink,
    ("FileSource", "url"): FileSource,
    ("IcebergSink", "location"): lambda url: IcebergSink({"type": "sql"}, "n.t", url, SCHEMA),
    ("SidecarConfig", "storage"): lambda url: SidecarConfig(storage=url),
    ("StorageDetails", "savepoint_roots"): lambda url: StorageDetails(savepoint_roots=[url]),
}
"""Every public setting that is a URL of files, and what is made of it."""


@pytest.mark.parametrize(
    "url",
    [
        "/data/?key=*/x",
        "/data#1;sort=2",
        "s3://bucket/key=5/token=6/x",
        "s3://bucket/x?versionId=abc",
        "s3://bucket/x?key=",
        "https://h/x?author=me&design=1",
    ],
)
def test_a_url_or_a_pattern_without_a_secret_is_taken(url: str) -> None:
    assert url in repr(FileSource(url))


def test_a_command_says_no_password() -> None:
    url = f"ftp://me:{HEAD}@{TAIL}@127.0.0.1:{free_port()}/x"
    done = subprocess.run(
        [sys.executable, "-m", "headgate", "checkpoints", url], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "give it in options" in done.stderr
    assert marks_in(done.stdout + done.stderr) == []


COVERED = {
    ("CheckpointStorage", "options"),
    ("DeltaSink", "options"),
    ("DeltaSink", "storage_options"),
    ("FileSink", "options"),
    ("FileSource", "options"),
    ("IcebergSink", "catalog"),
    ("IcebergSink", "options"),
    ("KafkaSource", "config"),
    ("PostgresSink", "conninfo"),
    ("PostgresSource", "conninfo"),
    ("StorageDetails", "options"),
    ("TlsCertificate", "password"),
    ("Watching", "status_token"),
}


def test_every_public_setting_that_may_have_a_secret_is_tried_here() -> None:
    found, urls = set(), set()
    for module in (headgate, headgate.sinks, headgate.sources):
        for name in module.__all__:
            with suppress(TypeError, ValueError):
                for parameter in inspect.signature(getattr(module, name)).parameters:
                    if arguments._is_secret(parameter):
                        found.add((name, parameter))
                    if parameter in ("url", "location", "storage", "savepoint_roots"):
                        urls.add((name, parameter))
    assert {one for one in found if one[1] != "config" or one[0] == "KafkaSource"} == COVERED
    assert {one for one in urls if not one[0].startswith("Redis")} == set(OF_A_URL)  # its URL may have a password


LOGINS = [
    "{}://u:{}@h/x",
    "{}://u%3a{}@h/x",
    "{}://u%253A{}@h/x",
    "{}://u%3A{}%40h/x",
    "{}://u%3A{}/x@h/x",
    "{}:u:{}@h/x",
    "{}::ftp://u:{}@h",
]


@pytest.mark.parametrize("setting", OF_A_URL, ids=str)
def test_a_login_in_a_url_is_refused_in_every_notation(setting: tuple[str, str]) -> None:
    """H76"""
    for login in LOGINS:
        for scheme in ("ftp", "s3", "simplecache", "hdfs"):
            text = str(refused(OF_A_URL[setting], login.format(scheme, HEAD)))
            assert marks_in(text) == [], text


def refused(make: Callable[[str], Any], url: str) -> Exception:
    with pytest.raises((ValueError, TypeError, StorageError)) as raised:
        print(make(url))
    return raised.value


@pytest.mark.parametrize("certificate", ["certificate", "private_key"])
def test_a_pem_text_in_place_of_its_file_is_refused_and_not_shown(certificate: str) -> None:
    """H76"""
    begins = "-----BEGIN PRIVATE KEY-----\n"
    for text in (begins + HEAD, f"\n{begins}{HEAD}\n-----END PRIVATE KEY-----", Path(begins + HEAD)):
        files: Any = {"certificate": "c.pem", "private_key": "k.pem", certificate: text}
        expected = f"^{certificate} must be a str or a path of a file, not what is in"
        with pytest.raises(ValueError, match=expected) as raised:
            TlsCertificate(**files)
        assert marks_in("".join(all_texts(raised.value))) == []
