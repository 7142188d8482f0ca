# SPDX-License-Identifier: Apache-2.0

"""The groups of keys: the same in each process and each release, and each in exactly one subtask (H52, H190)."""

from __future__ import annotations

import random
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.barrier_tracker import CompletedCheckpoint, SubtaskSnapshot
from protocol.barrier_tracker.rescale import rescaled
from protocol.key_groups import KeyGroups, cut, decode_key, encode_key
from protocol.wire.messages import SubtaskState
from protocol.wire.state_handles import KeyGroupRange, StateHandle

CHAINS = 20_000
INTEGERS = st.integers(-(2**64) + 1, 2**64 - 1)
SINGLE = INTEGERS | st.binary(max_size=6) | st.text(max_size=6)
KEYS = st.recursive(SINGLE, lambda keys: st.lists(keys, max_size=3).map(tuple), max_leaves=6)
PINNED: dict[Any, int] = {
    "": 24437,
    "a": 6041,
    b"a": 8356,
    0: 5970,
    1: 3991,
    -1: 10922,
    2**64 - 1: 569,
    "grüße": 26760,
    (): 18562,
    ("user", 17): 24523,
    ("user", (b"\x00", "x\x00")): 7223,
}


def test_the_group_of_a_key_is_the_same_in_each_release() -> None:
    """H190: otherwise a key would be looked for in another subtask than the one that has it."""
    assert {key: KeyGroups(2**15).of(key) for key in PINNED} == PINNED


def test_the_group_of_a_key_is_the_same_in_each_process() -> None:
    code = "from protocol.key_groups import KeyGroups; print(KeyGroups().of(('user', 17, b'x')))"
    of = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert of == {b"%d\n" % KeyGroups().of(("user", 17, b"x"))}


def _rank(key: Any) -> Any:
    """By which Python compares two keys as their bytes do."""
    if isinstance(key, tuple):
        return 3, [_rank(one) for one in key]
    return (0, key) if isinstance(key, int) else (1, key) if isinstance(key, bytes) else (2, key.encode())


@given(KEYS, KEYS)
def test_different_keys_have_different_bytes_which_are_in_their_order(one: Any, other: Any) -> None:
    assert (encode_key(one) < encode_key(other)) is (_rank(one) < _rank(other))
    assert (encode_key(one) == encode_key(other)) is (_rank(one) == _rank(other))


@given(KEYS)
def test_a_key_comes_back_from_its_bytes(key: Any) -> None:
    decoded = decode_key(encode_key(key))
    assert (decoded, type(decoded)) == (key, type(key))


@given(st.lists(KEYS, max_size=3), KEYS)
def test_the_bytes_of_a_tuple_begin_with_those_of_its_beginning(beginning: list[Any], last: Any) -> None:
    assert encode_key((*beginning, last)).startswith(encode_key(tuple(beginning)))


@pytest.mark.parametrize("key", [None, True, 1.5, ["a"], ("a", None), bytearray(b"a"), frozenset()])
def test_what_cannot_be_a_key_is_refused(key: Any) -> None:  # H165
    with pytest.raises(TypeError, match="a key must be a str, bytes, an int, or a tuple of these, is "):
        KeyGroups().of(key)


@pytest.mark.parametrize("key", [2**64, -(2**64), (1, 2**64)])
def test_an_integer_of_more_than_64_bits_is_refused(key: Any) -> None:  # H165
    with pytest.raises(ValueError, match="an integer in a key must have at most 8 bytes"):
        KeyGroups().of(key)


@given(st.integers(1, 2**15), st.data())
def test_each_group_is_in_one_subtask_and_none_is_empty(count: int, data: st.DataObject) -> None:
    groups, parallelism = KeyGroups(count), data.draw(st.integers(1, min(count, 50)))
    ranges = [groups.range_of(subtask, parallelism) for subtask in range(parallelism)]
    assert [group for one in ranges for group in one] == list(range(count))
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1
    key = data.draw(KEYS)
    assert groups.of(key) in ranges[groups.subtask_of(key, parallelism)]


@pytest.mark.parametrize("count", [0, -1, 2**15 + 1, "128", 1.5, True, None])
def test_a_number_of_groups_that_cannot_be_is_refused(count: Any) -> None:  # H165
    with pytest.raises((TypeError, ValueError), match="count must be"):
        KeyGroups(count)


def test_a_subtask_or_parallelism_that_cannot_be_is_refused() -> None:  # H165
    for parallelism in (0, 9):
        with pytest.raises(ValueError, match="parallelism must be "):
            KeyGroups(8).range_of(0, parallelism)
        with pytest.raises(ValueError, match="parallelism must be from 1 to 8, the number of key groups"):
            KeyGroups(8).subtask_of("a", parallelism)
    for subtask in (-1, 4):
        with pytest.raises(ValueError, match="subtask must be "):
            KeyGroups(8).range_of(subtask, 4)


def test_pieces_that_overlap_or_differ_are_not_cut() -> None:
    with pytest.raises(ValueError, match="two of its states have key group 3"):
        cut([KeyGroupRange(0, 4, 8), KeyGroupRange(3, 8, 8)], 3)
    with pytest.raises(ValueError, match="have 8 and 16 key groups"):
        cut([KeyGroupRange(0, 4, 8), KeyGroupRange(8, 16, 16)], 3)
    with pytest.raises(ValueError, match="8 is the highest parallelism"):
        cut([KeyGroupRange(0, 4, 8)], 9)


# --- random chains of rescales --------------------------------------------------------------------------------------


class Chain:
    """A checkpoint that is rescaled several times, while some subtasks take snapshots in between.

    ``newest``: by group, the number of the folder that its keys are in, unless its subtask never had a state.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.count = self.random.choice([1, 7, 128])
        self.groups = KeyGroups(self.count)
        self.folders = 0
        self.newest: dict[int, int] = {}
        parallelism = self._parallelism()
        self.checkpoint = CompletedCheckpoint(4, parallelism, b"")
        for subtask in range(parallelism):
            if self.random.random() < 0.95:
                self._snapshot(subtask)

    def _parallelism(self) -> int:
        return self.random.randint(1, min(self.count, 12))

    def _snapshot(self, subtask: int) -> None:
        own = self.groups.range_of(subtask, self.checkpoint.parallelism)
        self.folders += 1
        groups = KeyGroupRange(own.start, own.stop, self.count)
        handle = StateHandle(f"m{self.folders}", 1, bytes(32), 0, 0, groups)
        state = SubtaskState(subtask, b"%d" % self.folders, handle)
        self.checkpoint.subtask_states[subtask] = SubtaskSnapshot((state,))
        self.newest |= dict.fromkeys(own, self.folders)

    def step(self) -> None:
        self.checkpoint = rescaled(self.checkpoint, self._parallelism())
        self.judge()
        for subtask in range(self.checkpoint.parallelism):
            if self.random.random() < 0.4:
                self._snapshot(subtask)

    def judge(self) -> None:
        found: dict[int, int] = {}
        for subtask, snapshot in self.checkpoint.subtask_states.items():
            own = self.groups.range_of(subtask, self.checkpoint.parallelism)
            for _, data, handle, groups in snapshot.states:
                assert handle is not None
                assert handle.key_groups is not None
                low, high = groups or handle.key_groups[:2]
                assert own.start <= low < high <= own.stop
                assert handle.key_groups.first <= low < high <= handle.key_groups.end
                assert handle.manifest == f"m{data.decode()}"
                for group in range(low, high):
                    assert group not in found, "a group came twice"
                    found[group] = int(data)
        assert found == self.newest


def test_each_group_comes_once_and_from_its_newest_folder() -> None:
    """H52, H190: after up to five changes of the parallelism, whichever subtasks restored in between."""
    first = random.randrange(2**32)
    print(f"seeds {first} to {first + CHAINS - 1}")
    for seed in range(first, first + CHAINS):
        chain = Chain(seed)
        try:
            for _ in range(chain.random.randint(1, 5)):
                chain.step()
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
