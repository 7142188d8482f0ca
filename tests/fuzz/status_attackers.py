# SPDX-License-Identifier: Apache-2.0

"""Hostile peers at the status port, and requests over HTTP that cost more than they should (H157, H158).

The port logs nothing about its peers, so these attacks are worth no lines.
"""

from __future__ import annotations

import asyncio
import socket
import time
from random import Random

from spark_bridge.observability.status_server import Content, StatusServer
from tests.fuzz import mutations
from tests.fuzz.attackers import Attack, Intruder
from tests.fuzz.line import Line
from tests.fuzz.target import Target, about_input

GOOD = b"GET / HTTP/1.1\r\nHost: localhost\r\nAccept: text/html\r\n\r\n"
REQUEST_CPU_S_MAX = 0.1
"""For a request of 16 KiB; the most costly ones known take 0.015 s on a slow machine, and 0.5 s was a fault."""
TRIES = 3
_CROWD = 40
_DRIPS = 20
_PIECES = (
    *(b"a", b"=", b";", b'"', b"\\a", b",", b" ", b"\t", b":", b"%", b"%41", b"&", b"[", b"]", b"/", b"?", b"@"),
    *(b"\xff", b"0", b".", b"(", b"<", b"\x00", b"--", b"=?utf-8?q?a?=", b"\\", b"'", b"+", b"#", b"{", b"1"),
)
_NAMES = (b"Cookie", b"Host", b"Authorization", b"Accept", b"Content-Length", b"Expect", b"X", b"Transfer-Encoding")


def hostile_requests(random: Random) -> list[bytes]:
    """Requests of up to 16 KiB with the same content in different places: something short, again and again."""
    piece = b"".join(random.choices(_PIECES, k=random.choice((1, 1, 2, 3))))
    content = piece * (random.choice((1, 100, 15_000, 15_000)) // len(piece) + 1)
    requests = [mutations.mutated(random, GOOD) + b"\r\n\r\n"]
    for body in (content, b'a="' + content[:15_000] + b'"', b"a=" + content):
        requests += [b"GET / HTTP/1.1\r\n" + name + b": " + body + b"\r\n\r\n" for name in _NAMES]
    in_line = content.replace(b" ", b"").replace(b"\t", b"")
    return [
        *requests,
        b"GET / HTTP/1.1\r\n" + (b"X: " + content[:50] + b"\r\n") * 200 + b"\r\n",
        b"GET / HTTP/1.1\r\nX: a\r\n " + content.replace(b"a", b"\r\n ") + b"\r\n\r\n",
        b"GET /" + in_line + b" HTTP/1.1\r\n\r\n",
        b"GET /?token=" + in_line + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/" + in_line + b"\r\n\r\n",
        in_line + b" / HTTP/1.1\r\n\r\n",
    ]


async def _open(intruder: Intruder) -> Line:
    return await Line.open(intruder.address)


async def costly_requests(intruder: Intruder) -> None:
    for request in intruder.random.sample(hostile_requests(intruder.random), k=10):
        line = await _open(intruder)
        await line.send(request)
        line.half_close()
        await line.until_closed()
        await line.close()


async def crowd_without_requests(intruder: Intruder) -> None:
    """More idle peers than there are places, which give way to those who come later."""
    lines = [await _open(intruder) for _ in range(_CROWD)]
    for line in lines:
        await line.send(GOOD[: intruder.random.randrange(len(GOOD))])
    for line in lines:
        line.reset()
        await line.close()


async def drip_a_request(intruder: Intruder) -> None:
    line = await _open(intruder)
    for byte in GOOD[:_DRIPS]:
        await line.send(bytes([byte]))
        await asyncio.sleep(0.05)
    line.reset()
    await line.close()


async def never_read_the_answer(intruder: Intruder) -> None:
    line = await _open(intruder)
    line.stop_reading()
    await line.send(GOOD.replace(b"GET / ", b"GET /metrics "))
    await asyncio.sleep(intruder.random.random())
    line.reset()
    await line.close()


async def talk_after_the_answer(intruder: Intruder) -> None:
    """Send more after a whole request: another request, or bytes without an end."""
    line = await _open(intruder)
    await line.send(GOOD + intruder.random.choice((GOOD, b"x" * 200_000)))
    await line.until_closed()
    await line.close()


STATUS_ATTACKS: tuple[Attack, ...] = (
    costly_requests,
    crowd_without_requests,
    drip_a_request,
    never_read_the_answer,
    talk_after_the_answer,
)


# --- without a port -----------------------------------------------------------------------------------------------


def _case(random: Random) -> None:
    server = StatusServer("0.0.0.0", 0, {"/": lambda request: Content("text/plain", repr(request).encode())}, "t" * 20)
    server.close()
    for request in hostile_requests(random):
        with about_input(request):
            taken_s = _seconds_for(server, request)
            if taken_s > REQUEST_CPU_S_MAX:  # something else may have taken it
                taken_s = min(_seconds_for(server, request) for _ in range(TRIES))
            assert taken_s < REQUEST_CPU_S_MAX, f"{len(request)} bytes took {taken_s:.3f} s of the processor"


def _seconds_for(server: StatusServer, request: bytes) -> float:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(request)
        theirs.shutdown(socket.SHUT_WR)
        began_s = time.thread_time()
        server._converse(ours)
        return time.thread_time() - began_s


TARGETS = (Target("http", "requests to the status port, each of which may cost little", _case),)
