# SPDX-License-Identifier: Apache-2.0

"""The handle of a state in files: it survives a round trip, and nothing else is taken for one (H190, H191)."""

from __future__ import annotations

import re
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import LocalProtocolError, RemoteProtocolError
from protocol.wire import messages as m
from protocol.wire.codec import FrameDecoder, decode_message, encode_message
from protocol.wire.state_handles import (
    HANDLE_BYTES_MAX,
    KEY_GROUPS_MAX,
    KeyGroupRange,
    StateHandle,
    check_file_name,
    pack_handle,
    pack_piece,
    unpack_handle,
    unpack_piece,
)

HANDLE = StateHandle("123-4-ab12cd34/17-2210-ff00aa11", 4711, bytes(range(32)), 2**33, 24)
DIVIDED = HANDLE._replace(key_groups=KeyGroupRange(16, 48, 128))

_PART = re.compile(r"[\w.=-]{0,8}[\w=-]", re.ASCII)
_NAMES = st.lists(st.from_regex(_PART, fullmatch=True), min_size=1, max_size=5).map("/".join)
_GROUPS = st.sets(st.integers(0, KEY_GROUPS_MAX - 1), min_size=3, max_size=3).map(sorted)
_RANGES = _GROUPS.map(lambda three: KeyGroupRange(*three))
HANDLES = st.builds(
    StateHandle,
    _NAMES,
    st.integers(1, 2**27),
    st.binary(min_size=32, max_size=32),
    st.integers(0, 2**63 - 1),
    st.integers(0, 2**18),
    st.none() | _RANGES,
)


@given(HANDLES)
def test_a_handle_comes_back_as_it_was_with_its_own_types(handle: StateHandle) -> None:  # H190
    data = pack_handle(handle)
    assert unpack_handle(data) == handle
    assert type(unpack_handle(data)) is StateHandle
    assert len(data) <= HANDLE_BYTES_MAX


def test_a_handle_takes_some_80_bytes() -> None:
    assert len(pack_handle(HANDLE)) == 57 + len(HANDLE.manifest) < 90


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_a_handle_or_refused(data: bytes) -> None:  # H62
    try:
        handle = unpack_handle(data)
    except ValueError:
        return
    assert unpack_handle(pack_handle(handle)) == handle


@pytest.mark.parametrize(
    "name",
    [
        "",
        "/a",
        "a/",
        "a//b",
        ".",
        "..",
        "../evil",
        "a/../b",
        "a/..",
        "./a",
        "a/.",
        "a\\b",
        "a b",
        "é",
        "a\0",
        "a\n",
        "x" * 201,
        7,
    ],
)
def test_a_name_that_could_point_outside_of_the_folder_is_refused(name: Any) -> None:  # H191
    with pytest.raises(ValueError, match="must"):
        check_file_name(name)
    with pytest.raises(ValueError, match="must name its manifest"):
        pack_handle(HANDLE._replace(manifest=name))
    if isinstance(name, str):
        with pytest.raises(ValueError, match="must"):
            unpack_handle(pack_handle(HANDLE)[:57] + name.encode())


@pytest.mark.parametrize("name", ["a", "a.sst", "...", "..a/b..", "7-1-ab/0-12-cd-manifest", "x" * 200])
def test_a_name_below_the_folder_is_taken(name: str) -> None:
    assert check_file_name(name) == name


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"size": 0}, "the size of its manifest as an integer from 1 to"),
        ({"size": 2**27 + 1}, "the size of its manifest as an integer from 1 to"),
        ({"size": True}, "the size of its manifest"),
        ({"sha256": bytes(31)}, "a digest of 32 bytes"),
        ({"sha256": "x" * 32}, "a digest of 32 bytes"),
        ({"total_bytes": -1}, "the size of its files"),
        ({"total_bytes": 2**63}, "the size of its files"),
        ({"files": 2**18 + 1}, "the number of its files"),
        ({"files": -1}, "the number of its files"),
        ({"key_groups": KeyGroupRange(3, 3, 8)}, "the end of its key groups"),
        ({"key_groups": KeyGroupRange(0, 9, 8)}, "the end of its key groups"),
        ({"key_groups": KeyGroupRange(-1, 3, 8)}, "the first of its key groups"),
        ({"key_groups": KeyGroupRange(0, 3, 2**15 + 1)}, "how many key groups there are"),
    ],
)
def test_a_handle_with_a_wrong_field_neither_leaves_nor_arrives(change: dict[str, Any], why: str) -> None:  # H62
    with pytest.raises(ValueError, match=why):
        pack_handle(HANDLE._replace(**change))


@pytest.mark.parametrize("groups", [None, (16, 48), (17, 18), (47, 48)])
def test_a_piece_comes_back_with_its_groups_and_differs_from_a_handle(groups: tuple[int, int] | None) -> None:  # H190
    data = pack_piece(DIVIDED, groups)
    assert unpack_piece(data) == (DIVIDED, groups)
    if groups is None:
        assert data == pack_handle(DIVIDED)
    else:
        with pytest.raises(ValueError, match="of a whole state, is one of a piece"):
            unpack_handle(data)


@pytest.mark.parametrize(
    ("handle", "groups", "why"),
    [
        (DIVIDED, (15, 20), "the first key group that counts"),
        (DIVIDED, (20, 49), "the end of the key groups that count"),
        (DIVIDED, (20, 20), "the end of the key groups that count"),
        (HANDLE, (0, 5), "must have key groups, because it is a piece"),
    ],
)
def test_a_piece_has_only_groups_of_its_files(handle: StateHandle, groups: tuple[int, int], why: str) -> None:  # H62
    with pytest.raises(ValueError, match=why):
        pack_piece(handle, groups)


def test_a_handle_of_another_version_or_length_is_refused() -> None:
    data = pack_handle(HANDLE)
    with pytest.raises(ValueError, match="of version 1 or 2, is one of version 3"):
        unpack_handle(b"\x03" + data[1:])
    for wrong in (b"", data[:57], data + b"x" * 200):
        with pytest.raises(ValueError, match="must have 58 to 263 bytes"):
            unpack_handle(wrong)
    wrong_size = data[:1] + bytes(8) + data[9:]
    with pytest.raises(ValueError, match="the size of its manifest"):
        unpack_handle(wrong_size)
    assert unpack_handle(data[:53] + b"\0\x05\0\x06" + data[57:]) == HANDLE
    divided = pack_handle(DIVIDED)
    with pytest.raises(ValueError, match="the end of its key groups"):
        unpack_handle(divided[:53] + b"\0\x05\0\0" + divided[57:])
    with pytest.raises(ValueError, match="must name its manifest"):
        unpack_handle(divided[:63])


def registered(*states: Any, files_from: Any = "") -> m.Registered:
    return m.Registered(7, 2, 9, states, (), 0.5, 100, 1000, (8,), files_from=files_from)


def test_the_files_of_each_state_arrive_with_what_a_task_restores() -> None:  # H190, H60
    said = registered(
        m.SubtaskState(1, b"inline", HANDLE),
        m.SubtaskState(2, b"data", DIVIDED, (16, 20)),
        m.SubtaskState(5, b""),
        files_from="s3://b/savepoint-x.state",
    )
    (body,) = FrameDecoder().feed(encode_message(said))
    assert decode_message(body) == said


@pytest.mark.parametrize(
    ("state", "why"),
    [
        ((1, b"", b"\x01", None), r"Registered\.states must be a StateHandle, is bytes"),
        ((1, b"", HANDLE._replace(size=0), None), r"Registered\.states must say the size"),
        ((1, b"", "files", None), r"Registered\.states must be a StateHandle, is str"),
        ((1, b"", None, (0, 1)), r"Registered\.states must be a StateHandle, is None"),
        ((1, b""), r"Registered\.states must hold lists of 4: subtask, state, files, groups"),
    ],
)
def test_a_state_whose_files_are_not_a_handle_does_not_leave(state: Any, why: str) -> None:  # H62
    with pytest.raises(LocalProtocolError, match=why):
        encode_message(registered(state))


@pytest.mark.parametrize("files", [b"\x01", b"x" * 80, b"x" * 1000, "text", None, 7, True])
def test_a_state_whose_files_are_not_a_handle_is_refused(files: Any) -> None:  # H62
    (body,) = FrameDecoder().feed(encode_message(registered(m.SubtaskState(1, b"", HANDLE))))
    values = msgpack.unpackb(body)
    values[4] = [[1, b"", files]]
    with pytest.raises(RemoteProtocolError, match=r"Registered\.states must"):
        decode_message(bytes(msgpack.packb(values)))


@pytest.mark.parametrize("folder", ["x" * 4097, b"bytes", "lone \udcff"])
def test_a_folder_is_never_truncated(folder: Any) -> None:
    with pytest.raises(LocalProtocolError, match=re.compile("files_from must|cannot be encoded")):
        encode_message(registered(files_from=folder))
