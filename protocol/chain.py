# SPDX-License-Identifier: Apache-2.0

"""The state of a chain, of its coordinators as of its operators: one value of bytes made of those of its parts (H80).

If no named part has a state, it is the main part's state itself. Otherwise it is ``MAGIC``, and then each part's name
and state with their lengths; the main part, whose name is empty, comes first. A main state that itself begins with
``MAGIC`` is always written that way, so no state has two meanings.

A ready-made part without a state has no entry. A stage always has one: to the user's code, an empty state that is
restored is something else than none.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from struct import Struct
from struct import error as StructError

from protocol.errors import LocalProtocolError
from protocol.wire.state import Steps, join_in_steps, run_steps

__all__ = ["join_states", "join_states_in_steps", "split_states", "split_states_in_steps"]

MAGIC = b"\xc1headgate-chain-1"  # 0xc1 begins no msgpack value
_LENGTHS = Struct(">IQ")


def join_states(main: bytes, parts: Mapping[str, bytes], stages: Container[str] = ()) -> bytes:
    """Return one state. Empty states of named parts are left out, except for ``stages``."""
    state: bytes = run_steps(join_states_in_steps(main, parts, stages))
    return state


def join_states_in_steps(main: bytes, parts: Mapping[str, bytes], stages: Container[str] = ()) -> Steps[bytes]:
    """Like ``join_states``, for an event loop: the states may be large."""
    kept = {name: state for name, state in parts.items() if state or name in stages}
    if not kept and not main.startswith(MAGIC):
        return main
    pieces = [MAGIC]
    for name, state in ("", main), *kept.items():
        encoded = name.encode()
        pieces += (_LENGTHS.pack(len(encoded), len(state)), encoded, state)
    return (yield from join_in_steps(pieces))


def split_states(state: bytes, known: Container[str]) -> tuple[bytes, dict[str, bytes]]:
    """``split_states_in_steps`` without a pause."""
    states: tuple[bytes, dict[str, bytes]] = run_steps(split_states_in_steps(state, known))
    return states


def split_states_in_steps(state: bytes, known: Container[str]) -> Steps[tuple[bytes, dict[str, bytes]]]:
    """Return the main state, and those of the named parts that have one. An empty state of an unknown part is dropped.

    Raises:
        LocalProtocolError: there is the state of a part that is not ``known``, which would be lost; or the bytes are
            damaged.
    """
    if not state.startswith(MAGIC):
        return state, {}
    parts: dict[str, bytes] = {}
    at = len(MAGIC)
    while at < len(state):
        try:
            name_length, length = _LENGTHS.unpack_from(state, at)
            at += _LENGTHS.size
            name = state[at : at + name_length].decode()
        except (StructError, UnicodeDecodeError) as error:
            raise LocalProtocolError(
                f"the state of a chain is damaged: {error}. Restore an earlier checkpoint"
            ) from error
        at += name_length
        parts[name] = yield from join_in_steps((memoryview(state)[at : at + length],))
        at += length
    if at != len(state) or "" not in parts:
        raise LocalProtocolError(
            "the state of a chain is damaged: it does not end where its last part does. Restore an earlier checkpoint"
        )
    main = parts.pop("")
    if unknown := sorted(name for name, kept in parts.items() if kept and name not in known):
        raise LocalProtocolError(
            f"the checkpoint has a state of {', '.join(map(repr, unknown))}, which this operator does not use: pass it "
            "to coordinate(..., uses=[...]) or, if it is a stage, to chain(...) under the same name, or start without "
            'the checkpoint (restore="none")'
        )
    return main, {name: kept for name, kept in parts.items() if name in known}
