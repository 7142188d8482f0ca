# SPDX-License-Identifier: Apache-2.0

"""A host with a separate network: a Linux network namespace with one cable that can be pulled out."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.spark.cluster import StandaloneCluster

PREFIX = "headgate-"
_NOBODY = "10.255.255.254"
"""A neighbour that does not exist."""


@dataclass
class HostOfItsOwn:
    """``address`` is the host's, ``our_address`` is this machine's on the cable between them.

    ``create`` and ``remove`` it; every process that was started in it must have ended before.
    """

    number: int = field(default_factory=os.getpid)  # distinguishes concurrent test runs
    _rules_of_ours: list[list[str]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{PREFIX}{self.number}"

    @property
    def inside(self) -> tuple[str, ...]:
        """Prefix for a command that starts it on the host."""
        return ("ip", "netns", "exec", self.name)

    @property
    def our_address(self) -> str:
        return self._address(1)

    @property
    def address(self) -> str:
        return self._address(2)

    def create(self) -> None:
        """Skip the test if this machine does not allow it, and say what is missing."""
        if shutil.which("ip") is None:
            pytest.skip("network namespaces need the command `ip` (iproute2)")
        if os.geteuid() != 0:
            pytest.skip("network namespaces need root")
        try:
            _remove_those_of_the_dead()
            self._build()
        except subprocess.CalledProcessError as error:
            self.remove()
            pytest.skip(f"network namespaces are not allowed here: {error.stderr.strip()}")

    def _build(self) -> None:
        _ip("netns", "add", self.name)
        ours, theirs = f"hg{self.number}a", f"hg{self.number}b"
        _ip("link", "add", ours, "type", "veth", "peer", "name", theirs, "netns", self.name)
        _ip("address", "add", f"{self.our_address}/30", "dev", ours)
        _ip("link", "set", ours, "up")
        _ip("-n", self.name, "address", "add", f"{self.address}/30", "dev", theirs)
        _ip("-n", self.name, "link", "set", theirs, "up")
        _ip("-n", self.name, "link", "set", "lo", "up")

    def remove(self) -> None:
        """Remove the namespace, and the cable with it. Idempotent."""
        while self._rules_of_ours:
            _ip("rule", "delete", *self._rules_of_ours.pop())
        if self.name in _namespaces():
            with contextlib.suppress(subprocess.CalledProcessError):  # it may not have been made
                _ip("link", "delete", f"hg{self.number}a")  # otherwise it goes later, when the kernel has time
            _ip("netns", "delete", self.name)

    def cut(self) -> None:
        """Pull the cable out: nothing passes, and neither side is notified."""
        _ip("-n", self.name, "link", "set", f"hg{self.number}b", "down")

    def heal(self) -> None:
        """Plug the cable in again."""
        _ip("-n", self.name, "link", "set", f"hg{self.number}b", "up")

    def drop(self, port: int, *, of_host: bool = False) -> None:
        """Let a firewall drop silently what goes to a TCP port of this machine from the host, or of the host from here.

        Nothing has to be installed for it: the packets are sent to a network card that nobody has.
        """
        prefix, device, target = ((), f"hg{self.number}a", self.address) if of_host else self._of_the_host()
        _ip(*prefix, "neighbour", "replace", _NOBODY, "lladdr", "02:00:00:00:00:01", "dev", device, "nud", "permanent")
        _ip(*prefix, "route", "replace", target, "via", _NOBODY, "dev", device, "onlink", "table", self._table)
        _ip(*prefix, "rule", "add", "to", target, "ipproto", "tcp", "dport", str(port), "lookup", self._table)
        self._rules_of_ours += [["to", target, "ipproto", "tcp", "dport", str(port), "lookup", self._table]] * of_host

    def refuse(self, port: int) -> None:
        """Let a firewall refuse what the host sends to a TCP port of this machine, and say so."""
        prefix, _, target = self._of_the_host()
        _ip(*prefix, "rule", "add", "to", target, "ipproto", "tcp", "dport", str(port), "unreachable")

    def _of_the_host(self) -> tuple[tuple[str, ...], str, str]:
        return ("-n", self.name), f"hg{self.number}b", self.our_address

    @property
    def _table(self) -> str:
        return str(1000 + self.number)

    def retransmissions(self, our_port: int) -> int:
        """How often the kernel has retransmitted to the host from this local port without success."""
        counts = [0]
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            _, local, remote, _, _, _, retransmissions, *_ = line.split()
            if int(local.split(":")[1], 16) == our_port and _dotted(remote.split(":")[0]) == self.address:
                counts.append(int(retransmissions, 16))
        return max(counts)

    def _address(self, last: int) -> str:
        return f"10.231.{self.number >> 6 & 255}.{(self.number & 63) * 4 + last}"


def _dotted(address: str) -> str:
    """Convert an address from the format of the kernel's tables: hexadecimal, the last byte first."""
    return ".".join(str(byte) for byte in reversed(bytes.fromhex(address)))


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, check=True).stdout


def _namespaces() -> list[str]:
    return [line.split()[0] for line in _ip("netns", "list").splitlines() if line.strip()]


def _remove_those_of_the_dead() -> None:
    """Remove what a killed test run has left behind."""
    for name in _namespaces():
        match = re.fullmatch(rf"{PREFIX}(\d+)", name)
        if match and not Path("/proc", match[1]).exists():
            with contextlib.suppress(subprocess.CalledProcessError):  # another test run may be removing it, too
                _ip("netns", "delete", name)


@contextlib.contextmanager
def host_apart() -> Iterator[HostOfItsOwn]:
    """A host with a separate network, as long as the block runs."""
    host = HostOfItsOwn()
    host.create()
    try:
        yield host
    finally:
        host.remove()


@contextlib.contextmanager
def cluster_on_both(far: HostOfItsOwn) -> Iterator[StandaloneCluster]:
    """A cluster with one worker on this host and one on ``far``."""
    near = far.our_address
    cluster = StandaloneCluster(hosts=(near, far.address), master_host=near, inside={far.address: far.inside})
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
