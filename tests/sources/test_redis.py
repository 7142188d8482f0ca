# SPDX-License-Identifier: Apache-2.0

"""Redis Streams as a source, read from a real server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow
import pytest
import redis

from headgate import CheckpointConfig, chain
from headgate.sinks import RedisStreamsSink, SinkCommitterContext, SinkWriterContext
from headgate.sources import RedisStreamsSource, SplitAt
from headgate.testing import running_operator
from spark_bridge.sources.errors import SourceDataLost, SourceUnreachable
from spark_bridge.sources.redis import task
from spark_bridge.sources.redis.task import RedisReader, _Count
from tests.redis_server import RedisServer, RedisServers
from tests.spark_bridge.object_stores import free_port

pytestmark = pytest.mark.anyio

SCHEMA = pyarrow.schema([("at", pyarrow.string()), ("id", pyarrow.int64()), ("name", pyarrow.string())])


@pytest.fixture(autouse=True)
def _checked_in_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "CHECK_EVERY_S", 0.0)


@pytest.fixture
def client(redis_server: RedisServer) -> Iterator[Any]:
    with redis_server.connect() as client:
        client.flushdb()
        yield client


def add(client: Any, stream: str, ids: range) -> list[str]:
    return [client.xadd(stream, {"id": one, **({"name": f"n{one}"} if one % 2 else {})}) for one in ids]


def read(source: RedisStreamsSource, split: Any, position: Any = None) -> list[tuple[Any, Any]]:
    make: Any = source.operator
    reader: RedisReader = make()
    try:
        return [item for item in reader.read_from(split, position) if item is not None]
    finally:
        reader.close()


def test_entries_are_rows_with_the_types_of_the_schema(redis_server: RedisServer, client: Any) -> None:  # H130
    ids = add(client, "orders", range(5))
    source = RedisStreamsSource(redis_server.url, ["orders"], SCHEMA, id_column="at", bounded=True, batch_rows=2)
    (split,) = source.splits()
    batches = read(source, split)
    assert [position for position, _ in batches] == [ids[1], ids[3], ids[4]]
    assert [row for _, batch in batches for row in batch.to_pylist()] == [
        {"at": ids[one], "id": one, "name": f"n{one}" if one % 2 else None} for one in range(5)
    ]
    behind = read(source, split, ids[3])
    assert [row["id"] for _, batch in behind for row in batch.to_pylist()] == [4]


def test_a_round_of_all_streams_is_one_command_whatever_their_number(redis_server: RedisServer, client: Any) -> None:
    def commands() -> int:
        return int(client.info("commandstats").get("cmdstat_xread", {"calls": 0})["calls"])

    source = RedisStreamsSource(redis_server.url, ["a", "b", "c"], SCHEMA)
    make: Any = source.operator
    reader: RedisReader = make()
    followed = [reader.read_from([stream, None], None) for stream in "abc"]
    before = commands()
    for _ in range(4):
        assert [next(one) for one in followed] == [None, None, None]
    assert commands() - before == 4
    add(client, "c", range(2))
    assert [item is not None for item in map(next, followed)] == [False, False, True]
    reader.close()


def test_a_bounded_source_ends_where_the_stream_ended_when_the_run_began(
    redis_server: RedisServer, client: Any
) -> None:
    add(client, "orders", range(3))
    source = RedisStreamsSource(redis_server.url, ["orders", "none"], SCHEMA, bounded=True)
    first, empty = source.splits()
    add(client, "orders", range(3, 9))
    assert sum(batch.num_rows for _, batch in read(source, first)) == 3
    assert read(source, empty) == []


def test_a_stream_is_cut_where_it_is_now(redis_server: RedisServer, client: Any) -> None:  # H133
    source = RedisStreamsSource(redis_server.url, ["orders"], SCHEMA)
    assert source.next_part(["orders", None], None) is None
    ids = add(client, "orders", range(3))
    part, position = source.next_part(["orders", None], None) or ("", "")
    assert (part, position) == (SplitAt(["orders", ids[-1]], None), ids[-1])
    assert source.next_part(["orders", None], position) is None
    more = add(client, "orders", range(3, 5))
    part, _ = source.next_part(["orders", None], position) or (SplitAt("", ""), "")
    assert [row["id"] for _, batch in read(source, part.split, part.position) for row in batch.to_pylist()] == [3, 4]
    assert part.split == ["orders", more[-1]]


def test_streams_of_a_pattern_are_found_and_new_ones_begin_at_their_end(redis_server: RedisServer, client: Any) -> None:
    ids = add(client, "orders:1", range(3))
    add(client, "other", range(3))
    client.set("orders:text", "no stream")
    source = RedisStreamsSource(redis_server.url, "orders:*", SCHEMA, start="new")
    assert source.splits() == [SplitAt(["orders:1", None], ids[-1])]


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"start": "old"}, "start must be"),
        ({"batch_rows": 0}, "at least 1"),
        ({"id_column": "x"}, "id_column must be a column of the schema"),
    ],
)
def test_wrong_settings_are_refused(more: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        RedisStreamsSource("redis://nowhere", ["orders"], SCHEMA, **more)


async def test_a_task_reads_all_streams_of_a_pattern_in_turns(redis_server: RedisServer, client: Any) -> None:
    """H130, H131: 40 streams and one task, restored in the middle; no stream waits for the end of another one."""
    source = RedisStreamsSource(
        redis_server.url, "many:*", SCHEMA, batch_rows=5, discover_every_s=1.0, rate_limit_per_s=100
    )
    streams = [f"many:{one:02}" for one in range(40)]
    for number, stream in enumerate(streams):
        add(client, stream, range(100 * number, 100 * number + 12))

    async def read_for(seconds: float, restored: Any) -> tuple[list[list[int]], Any]:
        settings = CheckpointConfig(tolerated_failures=100)
        async with running_operator(
            source.coordinator, parallelism=1, mode="streaming", checkpoint=settings, restored=restored
        ) as world:
            task = await world.launch_operator(0, source.operator)
            await world.advance(seconds)
            await world.checkpoint()
            return [batch["id"].to_pylist() for batch in task.outputs], world.checkpoints[-1]

    first, checkpoint = await read_for(1.0, None)
    assert 40 < len(first) < 100
    assert {batch[0] // 100 for batch in first[:42]} == set(range(40)), "each stream has its turn"
    for number in range(0, 40, 7):
        add(client, streams[number], range(100 * number + 12, 100 * number + 15))
    add(client, "many:new", range(5000, 5003))
    second, _ = await read_for(10.0, checkpoint)
    numbers = [number for batch in [*first, *second] for number in batch]
    expected = [100 * one + entry for one in range(40) for entry in range(12 if one % 7 else 15)]
    assert sorted(numbers) == [*expected, *range(5000, 5003)]


async def test_streams_of_a_list_are_dealt_out_evenly(redis_server: RedisServer, client: Any) -> None:  # H131
    streams = [f"listed:{one}" for one in range(4)]
    for stream in streams:
        add(client, stream, range(3))
    source = RedisStreamsSource(redis_server.url, streams, SCHEMA)
    async with running_operator(source.coordinator, parallelism=2, mode="streaming", checkpoint=None) as world:
        tasks = [await world.launch_operator(subtask, source.operator) for subtask in range(2)]
        await world.advance(1.0)
        assert [sum(batch.num_rows for batch in task.outputs) for task in tasks] == [6, 6]


def test_the_backlog_of_a_stream_is_the_entries_behind_the_position(redis_server: RedisServer, client: Any) -> None:
    ids = add(client, "orders", range(10))
    source = RedisStreamsSource(redis_server.url, ["orders", "none"], SCHEMA, batch_rows=4)
    make: Any = source.operator
    reader, restored = make(), make()
    split = ["orders", None]
    assert reader.backlog(split, None) == 10, "it waits in the task"
    assert reader.backlog(["none", None], None) == 0
    reading = reader.read_from(split, None)
    position, _ = next(reading)
    assert (position, reader.backlog(split, position)) == (ids[3], 6)
    position, _ = next(reading)
    add(client, "orders", range(10, 15))
    assert reader.backlog(split, position) == 7
    client.xtrim("orders", maxlen=3, approximate=False)
    assert reader.backlog(split, position) == 3, "not more than there are"
    # After a restore, exact when it has been at the end.
    (last,) = (entry for entry, _ in client.xrevrange("orders", count=1))
    assert 0 < restored.backlog(split, ids[0]) <= 3
    following = restored.read_from(split, last)
    assert next(following) is None
    assert restored.backlog(split, last) == 0
    add(client, "orders", range(15, 20))
    assert restored.backlog(split, last) == 5
    position, _ = next(following)
    assert restored.backlog(split, position) == 1
    reader.close()
    restored.close()


async def test_the_backlog_of_a_source_is_known_before_and_while_it_is_read(
    redis_server: RedisServer, client: Any
) -> None:
    for stream in range(3):
        add(client, f"left:{stream}", range(20))
    source = RedisStreamsSource(
        redis_server.url, [f"left:{one}" for one in range(3)], SCHEMA, batch_rows=4, rate_limit_per_s=8
    )
    coordinator = source.coordinator
    async with running_operator(coordinator, parallelism=1, mode="streaming", checkpoint=None) as world:
        await world.settle()
        assert coordinator.backlog[:3] == (3, 0, 60)
        task = await world.launch_operator(0, source.operator)
        await world.advance(2.6)
        read = sum(batch.num_rows for batch in task.outputs)
        pending, in_hand, left = coordinator.backlog[:3]
        assert (pending, in_hand) == (0, 3)
        assert left is not None
        assert 0 < 60 - read <= left < 60


async def test_a_stream_that_is_read_to_its_present_end_counts_before_and_what_was_begun_does_not(
    redis_server: RedisServer, client: Any
) -> None:
    add(client, "some", range(20))
    ends = RedisStreamsSource(redis_server.url, ["some"], SCHEMA, bounded=True).coordinator
    begun = RedisStreamsSource(redis_server.url, ["some"], SCHEMA, start="new").coordinator
    for coordinator, left in ((ends, 20), (begun, 0)):
        async with running_operator(coordinator, parallelism=1, mode="streaming", checkpoint=None) as world:
            await world.settle()
            assert coordinator.backlog[:3] == (1, 0, left)


def test_entries_that_were_deleted_before_the_first_read_do_not_count(redis_server: RedisServer, client: Any) -> None:
    add(client, "cut", range(10))
    client.xtrim("cut", maxlen=4, approximate=False)
    make: Any = RedisStreamsSource(redis_server.url, ["cut"], SCHEMA, batch_rows=2).operator
    reader: RedisReader = make()
    assert reader.backlog(["cut", None], None) == 4
    reading = reader.read_from(["cut", None], None)
    position, _ = next(reading) or (None, None)
    assert reader.backlog(["cut", None], None) == 2
    assert reader.backlog(["cut", None], position) == 2
    reader.close()


def test_what_is_left_up_to_an_end_is_estimated_from_the_times(redis_server: RedisServer, client: Any) -> None:
    for number in range(20):
        client.xadd("even", {"id": number}, id=f"{1000 + 100 * number}-0")
    client.xadd("one", {"id": 1}, id="1000-0")
    make: Any = RedisStreamsSource(redis_server.url, ["even"], SCHEMA, bounded=True).operator
    reader: RedisReader = make()
    positions = (None, "1500-0", "1900-0", "2500-0")
    assert [reader.backlog(["even", "1900-0"], position) for position in positions] == [10, 5, 0, 0]
    assert reader.backlog(["even", "2900-0"], None) == 20
    assert [reader.backlog(["one", "1000-0"], position) for position in (None, "1000-0")] == [1, 0]
    reader.close()


def test_a_server_that_does_not_count_what_was_added_gets_an_estimate(client: Any) -> None:
    for number in range(11):
        client.xadd("old", {"id": number}, id=f"{1000 + 100 * number}-0")
    info = {name: value for name, value in client.xinfo_stream("old").items() if name != "entries-added"}
    count = _Count(from_start=True)
    assert [count.left(info, position) for position in (None, "1500-0", "2000-0")] == [11, 6, 0]


def test_a_key_that_is_not_a_stream_is_named(redis_server: RedisServer, client: Any) -> None:
    client.set("text", "a")
    with pytest.raises(ValueError, match="the key 'text' is a string, not a stream: correct it in streams"):
        RedisStreamsSource(redis_server.url, ["none", "text"], SCHEMA).splits()


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedisServers]:
    servers = RedisServers()
    yield servers
    servers.close()


def ids_of(batches: list[tuple[Any, Any]]) -> list[int]:
    return [row["id"] for _, batch in batches for row in batch.to_pylist()]


def some(rows: Iterator[Any], count: int) -> list[tuple[Any, Any]]:
    """What comes until there are so many rows."""
    found: list[tuple[Any, Any]] = []
    while sum(batch.num_rows for _, batch in found) < count:
        found += [item for item in [next(rows)] if item is not None]
    return found


def test_a_pattern_finds_the_streams_of_all_servers_of_a_cluster_and_reads_them_over_a_failover(
    cluster: RedisServers,
) -> None:  # H170
    names = [f"orders:{number}" for number in range(8)]
    with redis.RedisCluster.from_url(cluster.servers[0].url) as client:
        for number, name in enumerate(names):
            client.xadd(name, {"id": number})
        bounded = RedisStreamsSource(cluster.servers[1].url, "orders:*", SCHEMA, bounded=True)
        splits = bounded.splits()
        assert [split[0] for split in splits] == names
        assert [ids_of(read(bounded, split)) for split in splits] == [[number] for number in range(8)]
        source = RedisStreamsSource(cluster.servers[1].url, "orders:*", SCHEMA)
        make: Any = source.operator
        reader: RedisReader = make()
        logs = [reader.read_from(split, None) for split in source.splits()]
        assert [ids_of(some(log, 1)) for log in logs] == [[number] for number in range(8)]
        cluster.fail_over()
        for number, name in enumerate(names):
            client.xadd(name, {"id": number + 100})
        assert [ids_of(some(log, 1)) for log in logs] == [[number + 100] for number in range(8)]
        reader.close()
        assert [split[0] for split in source.splits()] == names


def test_the_sink_writes_to_a_stream_of_another_server_of_the_cluster(cluster: RedisServers) -> None:  # H170
    for stream in ("{a}sink", "{b}sink", "{c}sink"):
        sink = RedisStreamsSink(cluster.servers[1].url, stream, ["id"])
        writer = sink.writer(SinkWriterContext("out", 0, 0))
        writer.write({"id": 1})
        parts = writer.prepare()
        writer.close()
        committer = sink.committer(SinkCommitterContext("out", "out", log=None))
        committer.open()
        committer.commit(parts)
        assert not list(committer.prepared())
        committer.close()
        with redis.RedisCluster.from_url(cluster.servers[1].url) as client:
            assert [fields for _, fields in client.xrange(stream)] == [{b"id": b"1"}]


@pytest.mark.parametrize("what", ["deleted", "filled again with smaller ids"])
def test_a_stream_that_is_another_one_is_not_read_on(redis_server: RedisServer, client: Any, what: str) -> None:  # H170
    (*_, position) = add(client, "orders", range(3))
    bounded = RedisStreamsSource(redis_server.url, ["orders"], SCHEMA, bounded=True)
    source = RedisStreamsSource(redis_server.url, ["orders"], SCHEMA)
    make: Any = source.operator
    reader: RedisReader = make()
    log = reader.read_from(["orders", None], position)
    assert next(log) is None
    client.delete("orders")
    if what != "deleted":
        client.xadd("orders", {"id": 7}, id="1-1")
    said = f"stream 'orders' was read up to the entry {position}.*start again without a checkpoint"
    with pytest.raises(SourceDataLost, match=said):
        source.next_part(["orders", None], position)
    with pytest.raises(SourceDataLost, match=said):
        read(bounded, bounded.splits()[0], position)
    with pytest.raises(SourceDataLost, match=said):
        some(log, 1)
    reader.close()


def test_a_stream_that_was_filled_again_with_greater_ids_is_noticed_while_it_is_read(
    redis_server: RedisServer, client: Any
) -> None:  # H170
    add(client, "orders", range(5))
    make: Any = RedisStreamsSource(redis_server.url, ["orders"], SCHEMA).operator
    reader: RedisReader = make()
    log = reader.read_from(["orders", None], None)
    some(log, 5)
    assert next(log) is None
    client.delete("orders")
    add(client, "orders", range(2))
    with pytest.raises(SourceDataLost, match="deleted and filled again"):
        some(log, 3)
    reader.close()


async def test_a_later_run_fails_if_its_stream_was_filled_again(redis_server: RedisServer, client: Any) -> None:  # H170
    restored: Any = None
    for day in range(2):
        client.delete("orders")
        client.xadd("orders", {"id": day}, id=f"{9 - day}-1")
        source = RedisStreamsSource(redis_server.url, ["orders"], SCHEMA, bounded=True)
        async with running_operator(chain(read=source), parallelism=1, mode="streaming", restored=restored) as world:
            operator = await world.launch_operator(0)
            for _ in range(100):
                if operator.outcome:
                    break
                await world.advance(0.1)
            await world.advance(1.0)
            restored = world.checkpoints[-1] if day == 0 else None
            assert operator.outcome == ("success" if day == 0 else "failed")


def test_entries_that_were_trimmed_are_not_read_and_those_after_them_are(
    redis_server: RedisServer, client: Any
) -> None:
    (*_, position) = add(client, "orders", range(3))
    source = RedisStreamsSource(redis_server.url, ["orders"], SCHEMA)
    client.xtrim("orders", maxlen=0, approximate=False)
    assert source.next_part(["orders", None], position) is None
    add(client, "orders", range(3, 5))
    part, _ = source.next_part(["orders", None], position) or (SplitAt("", ""), "")
    assert ids_of(read(source, part.split, part.position)) == [3, 4]


def test_a_value_that_does_not_fit_is_named_with_its_stream_and_field(redis_server: RedisServer, client: Any) -> None:
    first = client.xadd("odd", {"id": "1"})
    last = client.xadd("odd", {"id": "many"})
    source = RedisStreamsSource(redis_server.url, ["odd"], SCHEMA, bounded=True)
    words = f"stream 'odd', entries {first} to {last}: a value of the field 'id' is not of the type int64 .*'many'"
    with pytest.raises(ValueError, match=words):
        read(source, source.splits()[0])


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("127.0.0.1:{closed}", "Connection refused"),
        ("nobody:wrong@127.0.0.1:{port}", "invalid username-password pair"),
    ],
)
def test_a_server_that_cannot_be_reached_is_said_with_what_to_do(
    redis_server: RedisServer, address: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task, "RETRIES", 1)
    url = "redis://" + address.format(port=redis_server.port, closed=free_port())
    source = RedisStreamsSource(url, ["orders"], SCHEMA)
    with pytest.raises(
        SourceUnreachable, match=rf"RedisStreamsSource\(\('orders',\)\) cannot reach Redis: .*{words}.*\. Check the url"
    ) as raised:
        source.splits()
    assert "wrong" not in str(raised.value), "it does not show the password"
    with pytest.raises(SourceUnreachable, match="cannot reach Redis"):
        source.next_part(["orders", None], None)
