"""A network on this machine: hosts, each with an address of its own, behind links of a limited rate to one switch.

Each host is a network namespace, and so is the switch (a bridge). Nothing of it has a name outside: a process holds
each namespace, which ends with the one that has made the network, however that ends, and the links with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Iterator

from benchmarks.common.debian import NotThere, program
from benchmarks.common.redis_server import REDIS
from benchmarks.common.web_server import NGINX

# RFC 2544: addresses for benchmarks, which no host of the Internet has.
SUBNET = "198.18.0"
LINK = "eth0"
_CLONE_NEWNET = 0x40000000
# What a link may send at once, and how long it may hold the rest back: some segments, of 64 KiB each at most.
_BURST, _HELD_BACK = "512kb", "50ms"


class NoNetwork(Exception):
    """This process cannot make a network; the message says what is missing."""


class Host:
    """One of a network, or, without the process that holds its namespace, this machine by one of its addresses."""

    def __init__(self, address: str, holder: int = 0) -> None:
        self.address = address
        self.is_apart = bool(holder)
        self._holder = holder

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """What this thread starts, and each socket that it makes, belongs to the host until the context ends."""
        if not self.is_apart:
            yield
            return
        own, there = (os.open(path, os.O_RDONLY) for path in ("/proc/thread-self/ns/net", self._namespace))
        try:
            _enter(there)
            yield
        finally:
            _enter(own)
            os.close(own)
            os.close(there)

    @property
    def entering(self) -> str:
        """Python by which another process enters for good."""
        return f"import ctypes, os; ctypes.CDLL(None).setns(os.open({self._namespace!r}, os.O_RDONLY), {_CLONE_NEWNET})"

    def link(self, state: str) -> None:
        """`up`, or `down`: then nothing comes or goes, and no one gets an error."""
        with self.entered():
            _run("ip", "link", "set", LINK, state)

    @property
    def _namespace(self) -> str:
        return f"/proc/{self._holder}/ns/net"


@contextlib.contextmanager
def network(count: int, rate: str = "1gbit") -> Iterator[list[Host]]:
    """So many hosts; each link carries this much in each direction, as tc(8) writes it. Raises NoNetwork."""
    # A host reaches no server of packages.
    for server in (NGINX, REDIS):
        program(*server)
    with contextlib.ExitStack() as stack:
        holders = [stack.enter_context(_namespace()) for _ in range(count + 1)]
        switch, *hosts = (Host(f"{SUBNET}.{number}", holder) for number, holder in enumerate(holders))
        with switch.entered():
            _run("ip", "link", "add", "switch", "type", "bridge")
            _run("ip", "link", "set", "switch", "up")
            for number, holder in enumerate(holders[1:]):
                _run("ip", "link", "add", f"port{number}", *f"type veth peer name {LINK} netns {holder}".split())
                _run("ip", "link", "set", f"port{number}", "master", "switch", "up")
                _limit(f"port{number}", rate)
        for host in hosts:
            with host.entered():
                _run("ip", "address", "add", f"{host.address}/24", "dev", LINK)
                for link in ("lo", LINK):
                    _run("ip", "link", "set", link, "up")
                _limit(LINK, rate)
        yield hosts


@contextlib.contextmanager
def _namespace() -> Iterator[int]:
    """The process that holds it: it ends when its input does, as when this process has been killed."""
    # A session of its own, so that Ctrl-C reaches us alone.
    holder = subprocess.Popen(
        [_program("unshare", "util-linux"), "--net", "cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    assert holder.stderr is not None
    try:
        with contextlib.suppress(BrokenPipeError):
            holder.stdin.write(b"there\n")
            holder.stdin.flush()
        if not holder.stdout.readline():
            raise NoNetwork(f"{holder.stderr.read().decode().strip()} (root may, with CAP_SYS_ADMIN and CAP_NET_ADMIN)")
        yield holder.pid
    finally:
        holder.kill()
        holder.wait()
        for pipe in (holder.stdin, holder.stdout, holder.stderr):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def _limit(link: str, rate: str) -> None:
    _run("tc", "qdisc", "add", "dev", link, "root", *f"tbf rate {rate} burst {_BURST} latency {_HELD_BACK}".split())


def _run(name: str, *words: str) -> None:
    try:
        subprocess.run([_program(name, "iproute2"), *words], capture_output=True, check=True)
    except subprocess.CalledProcessError as exc:
        raise NoNetwork(f"{name} {' '.join(words)}: {exc.stderr.decode().strip()}") from exc


def _program(name: str, package: str) -> str:
    try:
        return program(name, package)
    except NotThere as exc:
        raise NoNetwork(str(exc)) from exc


def _enter(namespace: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, _CLONE_NEWNET):
        raise NoNetwork(f"setns: {os.strerror(ctypes.get_errno())}")
