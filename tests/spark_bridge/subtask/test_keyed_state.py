# SPDX-License-Identifier: Apache-2.0

"""Values by key in RocksDB, in the test kit: what a model has, at any parallelism (H52, H190)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from headgate import CheckpointConfig, OperatorCoordinator, SubtaskContext, SubtaskOperator, chain
from headgate.testing import running_operator
from headgate.types import KeyedState, KeyGroups, RestoredFiles, StateFiles
from protocol.errors import LocalProtocolError
from protocol.key_groups import Key, encode_key
from tests.pages import FENCE, ROOT

GROUPS = KeyGroups(16)
DAY_S = 86_400.0


class Clock:
    """The time of a test, in seconds."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


def a_state(folder: Path, clock: Callable[[], float], *, subtask: int = 0, parallelism: int = 1) -> KeyedState:
    def snapshot_folder(checkpoint_id: int) -> Path:
        made = folder / f"snapshot-{checkpoint_id}"
        made.mkdir()
        return made

    (folder / "state").mkdir(parents=True, exist_ok=True)
    context: Any = SimpleNamespace(
        subtask=subtask,
        parallelism=parallelism,
        state_folder=folder / "state",
        snapshot_folder=snapshot_folder,
        _check_key_groups=lambda groups: None,
    )
    return KeyedState(context, GROUPS, now=clock)


KEYS: list[Key] = [
    0,
    -7,
    2**63,
    b"",
    b"\0x",
    b"ab",
    "",
    "a",
    "ab",
    "b",
    ("a",),
    ("a", 1),
    ("a", 2),
    ("b", ("a", b"\0")),
]


def test_random_calls_have_the_results_of_a_model(tmp_path: Path) -> None:
    for seed in range(20):
        random, clock = Random(seed), Clock()
        state = a_state(tmp_path / str(seed), clock)
        model: dict[Key, tuple[bytes, float]] = {}
        alive: dict[Key, bytes] = {}
        for step in range(200):
            key = random.choice(KEYS)
            match random.randrange(5):
                case 0 | 1:
                    ttl_s = random.choice((None, 5.0, 50.0))
                    state.put(key, b"%d" % step, ttl_s=ttl_s)
                    model[key] = b"%d" % step, float("inf") if ttl_s is None else clock.now + ttl_s
                case 2:
                    state.delete(key)
                    model.pop(key, None)
                case 3:
                    clock.now += random.choice((1.0, 20.0))
                case _:
                    state.expire()
            alive = {key: value for key, (value, until) in model.items() if until > clock.now}
            assert state.get(key) == alive.get(key), seed
        expected = [(key, alive[key]) for key in sorted(alive, key=encode_key)]
        assert list(state.scan()) == expected, seed
        state.close()


def test_a_state_that_is_closed_says_what_to_do(tmp_path: Path) -> None:
    state = a_state(tmp_path, Clock())
    state.put("a", b"v")
    state.close()
    state.close()
    for use in (
        lambda: state.put("a", b"v"),
        lambda: state.put("a", b"v", ttl_s=1.0),
        lambda: state.get("a"),
        lambda: state.delete("a"),
        lambda: next(state.scan()),
        state.expire,
        lambda: state.snapshot(1),
    ):
        with pytest.raises(LocalProtocolError, match=r"is closed: use it from open\(\) to close\(\)"):
            use()


def test_a_scan_has_a_prefix_and_may_have_a_group(tmp_path: Path) -> None:
    state = a_state(tmp_path, Clock())
    for key in KEYS:
        state.put(key, b"v")
    for prefix in ("a", b"a", ("a",), (), 0):
        begins = encode_key(prefix)
        found = [key for key, _ in state.scan(prefix)]
        assert found == sorted((key for key in KEYS if encode_key(key).startswith(begins)), key=encode_key)
    for group in range(GROUPS.count):
        assert {key for key, _ in state.scan(group=group)} == {key for key in KEYS if GROUPS.of(key) == group}
    state.close()


def test_what_has_expired_is_deleted_by_a_snapshot_and_what_was_set_again_is_not(tmp_path: Path) -> None:
    clock = Clock()
    state = a_state(tmp_path, clock)
    state.put("a", b"1", ttl_s=10)
    state.put("b", b"1", ttl_s=10)
    clock.now += 5
    state.put("b", b"2", ttl_s=10)
    clock.now += 5
    assert (state.get("a"), state.get("b")) == (None, b"2")
    assert state.expire() == 1
    assert state.expire() == 0
    clock.now += 5
    state.snapshot(1)
    assert list(state._store.keys()) == []
    state.close()


def test_a_merge_has_the_keys_that_count_and_no_others(tmp_path: Path) -> None:  # H52
    """What stayed of other groups would come back with a later change of the parallelism, although it was deleted."""
    for n in range(2):
        state = a_state(tmp_path / str(n), Clock(), subtask=n, parallelism=2)
        for key in range(200):
            if GROUPS.subtask_of(key, 2) == n:
                state.put(key, b"%d" % n, ttl_s=10)
        state.snapshot(1)
        state.close()
    pieces = [
        RestoredFiles(tmp_path / str(n) / "snapshot-1", b"", groups)
        for n, groups in ((1, range(8, 11)), (0, range(5, 7)))
    ]
    assert KeyedState.merge(pieces) == b""
    (tmp_path / "merged").mkdir()
    pieces[0].folder.rename(tmp_path / "merged" / "state")
    clock = Clock()
    merged = a_state(tmp_path / "merged", clock)
    counts = dict(merged.scan())
    assert counts == {
        key: b"%d" % GROUPS.subtask_of(key, 2) for key in range(200) if GROUPS.of(key) in (5, 6, 8, 9, 10)
    }
    clock.now += 10
    assert merged.expire() == len(counts)
    assert list(merged._store.keys()) == []
    merged.close()


def test_a_key_of_another_subtask_is_refused(tmp_path: Path) -> None:  # H52
    """It would be lost with the next change of the parallelism."""
    state = a_state(tmp_path, Clock(), subtask=1, parallelism=4)
    mine, other = (next(n for n in range(100) if (GROUPS.subtask_of(n, 4) == 1) is own) for own in (True, False))
    state.put(mine, b"")
    calls: list[Callable[[], object]] = [
        lambda: state.put(other, b""),
        lambda: state.get(other),
        lambda: state.delete(other),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"send records to KeyGroups\.subtask_of"):
            call()
    state.close()


@pytest.mark.parametrize("group", [3, 8, -1, 16, 99_999, "4"])
def test_a_scan_of_the_group_of_another_subtask_is_refused(tmp_path: Path, group: Any) -> None:  # H52
    """It would find nothing, whatever that subtask has."""
    state = a_state(tmp_path, Clock(), subtask=1, parallelism=4)
    with pytest.raises(ValueError, match="subtask 1 has the key groups from 4 to 7"):
        list(state.scan(group=group))
    state.close()


def test_a_merge_of_states_without_key_groups_says_what_to_do(tmp_path: Path) -> None:  # H52
    a_state(tmp_path, Clock()).close()
    with pytest.raises(TypeError, match="without key groups"):
        KeyedState.merge([RestoredFiles(tmp_path / "state", b"", None)])


@pytest.mark.parametrize(
    ("arguments", "settings"),
    [
        (("a", "text"), {}),
        (("a", b""), {"ttl_s": 0}),
        (("a", b""), {"ttl_s": "5"}),
        (("a", b""), {"ttl_s": True}),
        (("a", b""), {"ttl": 5}),
    ],
)
def test_wrong_arguments_are_refused(tmp_path: Path, arguments: Any, settings: Any) -> None:  # H165
    state = a_state(tmp_path, Clock())
    with pytest.raises((TypeError, ValueError), match=r"value|ttl"):
        state.put(*arguments, **settings)
    state.close()


class Distinct(SubtaskOperator):
    """Yields each key once in seven days."""

    counts_records = False
    clock = Clock()

    def open(self, context: SubtaskContext, state: bytes | RestoredFiles | None) -> None:
        self.seen = KeyedState(context, GROUPS, now=self.clock)

    def merge_files(self, pieces: Sequence[RestoredFiles]) -> bytes:
        return KeyedState.merge(pieces)

    def process(self, records: Iterator[str]) -> Iterator[str]:
        for key in records:
            if self.seen.get(key) is None:
                self.seen.put(key, b"", ttl_s=7 * DAY_S)
                yield key

    def snapshot_state(self, checkpoint_id: int) -> StateFiles:
        return self.seen.snapshot(checkpoint_id)

    def close(self) -> None:
        self.seen.close()


async def test_a_key_comes_once_in_seven_days_at_any_parallelism() -> None:
    """H52, H190: 4, 8, 3 and 5 subtasks."""
    random, clock = Random(4), Distinct.clock
    until: dict[str, float] = {}
    expected: Counter[str] = Counter()
    outputs: Counter[str] = Counter()
    checkpoint = None
    config = CheckpointConfig(tolerated_failures=10)
    for parallelism in (4, 8, 3, 5):
        world_of = running_operator(
            OperatorCoordinator, mode="streaming", parallelism=parallelism, restored=checkpoint, checkpoint=config
        )
        async with world_of as world:
            tasks = [await world.launch_operator(n, Distinct) for n in range(parallelism)]
            assert [task.error for task in tasks] == [None] * parallelism
            for _ in range(3):
                clock.now += 2 * DAY_S
                for _ in range(60):
                    key = f"key {random.randrange(80)}"
                    tasks[GROUPS.subtask_of(key, parallelism)].feed(key)
                    if until.get(key, 0.0) <= clock.now:
                        until[key] = clock.now + 7 * DAY_S
                        expected[key] += 1
                await world.settle()
            await world.checkpoint()
            checkpoint = world.checkpoints[-1]
            for task in tasks:
                outputs.update(task.outputs)
    assert outputs == expected


async def test_another_number_of_key_groups_is_found_before_anything_is_read() -> None:
    """H52: the keys of this subtask would belong to groups of others."""

    class Changed(Distinct):
        def open(self, context: SubtaskContext, state: bytes | RestoredFiles | None) -> None:
            self.seen = KeyedState(context, KeyGroups(8))

    async with running_operator(OperatorCoordinator, parallelism=1, mode="streaming") as world:
        await world.launch_operator(0, Distinct)
        await world.checkpoint()
        checkpoint = world.checkpoints[-1]
    async with running_operator(OperatorCoordinator, parallelism=1, mode="streaming", restored=checkpoint) as world:
        task = await world.launch_operator(0, Changed)
        assert "the restored state has 16 key groups, and key_groups now says 8" in str(task.error)


def of_the_page() -> dict[str, Any]:
    """The operators of the page, whose programs need RocksDB and so are not run with the others."""
    page = (ROOT / "docs/how-to/keep-a-large-state.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    for block in FENCE.finditer(page):
        if block["remark"] == "not run" and "Keyed" in block["text"]:
            exec(block["text"], names)
    return names


class Written(SubtaskOperator):
    """Yields what it gets. Skips as many as it has yielded if all comes again, as sinks do."""

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self.done = int(state or 0) if context.input_begins_again else 0

    def process(self, records: Iterator[Any]) -> Iterator[Any]:
        for record in islice(records, self.done, None):
            yield record
            self.done += 1

    def snapshot_state(self, checkpoint_id: int) -> bytes:
        return b"%d" % self.done


@pytest.mark.parametrize(
    ("name", "records", "outputs"),
    [
        ("Distinct", ["a", "b", "a", "c", "b"], ["a", "b", "c"]),
        ("PerDay", [("a", 0), ("b", 0), ("a", 1), ("a", DAY_S), ("b", DAY_S)], [("a", 0, 2), ("b", 0, 1)]),
    ],
)
async def test_the_stages_of_the_page_take_each_record_once_although_a_task_dies(
    name: str, records: list[Any], outputs: list[Any]
) -> None:
    """H174: the records of Spark begin again, and the restored state has the first ones."""
    stages = chain(kept=of_the_page()[name], written=Written)
    for done in range(len(records) + 1):
        async with running_operator(stages, mode="streaming", parallelism=1) as world:
            task = await world.launch_operator(0)
            task.feed(*records[:done])
            await world.settle()
            await world.checkpoint()
            counted = list(task.outputs)
            task.feed(*records[done:])
            await world.settle()
            await world.kill(task)
            retried = await world.launch_operator(0, records=records)
            assert retried.error is None
            assert counted + retried.outputs == outputs, done
