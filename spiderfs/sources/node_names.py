"""The names and addresses of nodes that share out the samples of a source (`members.py`).

A node's name is the URL of the web server over its mount. The option `peers` lists the names, or it is one URL, each
address of whose host is a member, with a name of its own, or the nodes announce theirs (`spiderfs/cluster.py`). Or
it lists servers of Redis, or clusters of these, each with its share of the samples; what these leave is at home on each
node.

A name server may lose its memory for a while. So a look-up that fails changes nothing, and an address leaves only when
MISSED answers in a row do not have it; a new one counts at once.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from spiderfs.core.homes import GROUPS
from spiderfs.errors import ConfigError

MISSED = 3
# This node, beside servers of Redis.
HERE = "here"
# What `peers` begins with where the nodes announce themselves by the server of `cluster`.
BY_CLUSTER = "cluster/"


class Node(NamedTuple):
    url: str
    """Its name, by which homes are drawn: the same on all nodes."""
    host: str
    """What its certificate is for."""
    addresses: list[str]
    shards: Sequence[Sequence[Any]] = ()
    """Of a cluster of Redis: URL, host and address of each shard, and its slots, as pairs of the first and last."""
    room: int = GROUPS
    """It is the home of so many groups of samples at most, the first ones; this node is that of the others."""

    def servers(self) -> dict[str, Node]:
        """Those that hold its samples, by their URLs: it is one itself, or those of its shards."""
        return {url: Node(url, host, [address]) for url, host, address, _ in self.shards} or {self.url: self}


def as_named(url: str) -> Node:
    """The node with this URL; its addresses are known if the URL has one."""
    host = urlsplit(url).hostname or ""
    return Node(url, host, [host] if is_address(host) else [])


def at_address(url: str, address: str) -> Node:
    """The node at one of the addresses of the name in a URL."""
    parts = urlsplit(url)
    host = f"[{address}]" if ":" in address else address
    netloc = host if parts.port is None else f"{host}:{parts.port}"
    return Node(parts._replace(netloc=netloc).geturl(), parts.hostname or "", [address])


def live_name(urls: Collection[str]) -> str:
    """What says who the members are, which come and go: a URL with a name, or BY_CLUSTER and a name; "" for a list."""
    return next((url for url in urls if len(urls) == 1 and not is_server(url)), "")


def data_set_of(urls: Collection[str]) -> str:
    """The name under which the nodes announce themselves; empty if they do not."""
    return next((url.removeprefix(BY_CLUSTER) for url in urls if url.startswith(BY_CLUSTER)), "")


def is_web_server(url: str) -> bool:
    """Whether this is the URL of a web server, or of a directory there, without a login."""
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # the port is no number, or too large
        return False
    return bool(known) and url.isprintable() and not (parts.query or parts.fragment or set("@ ") & set(url))


def is_server(url: str) -> bool:
    """Whether this is no node, but a server of Redis that holds samples for all."""
    return url.startswith("redis")


def name_of(urls: Collection[str], given: str) -> str:
    """The URL of this node: `given`, or that by which it announces itself, or ""."""
    return given or (f"http://{socket.gethostname()}:8443" if data_set_of(urls) else "")


def weights_of(urls: Mapping[str, float]) -> dict[str, float]:
    """The weights of all members that `peers` lists; of servers, the share that these leave to this node.

    Servers whose share is not written share what the others leave, and this node has what they have no room for.
    """
    left = 1.0 - sum(urls.values()) if all(map(is_server, urls)) else 0.0
    found = [url for url, weight in urls.items() if not weight]
    if found:
        return {**urls, **dict.fromkeys(found, left / len(found))}
    return {**urls, HERE: left} if left > 1e-9 else dict(urls)


def is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def addresses_of(host: str) -> list[str]:
    """The addresses of a name, those of IPv4 if it has any; none if they cannot be had. May take half a minute."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return []
    by_family: dict[int, set[str]] = {}
    for family, _, _, _, address in found:
        by_family.setdefault(family, set()).add(str(address[0]))
    return sorted(by_family.get(socket.AF_INET, by_family.get(socket.AF_INET6, ())))


def own_url(urls: Mapping[str, float], given: str) -> str:
    """Which node's URL is this machine's: `given`, or the only one with an address of it; raises ConfigError."""
    if given or any(map(is_server, urls)):
        return given or HERE
    own = [url for url in urls if is_here(addresses_of(urlsplit(url).hostname or ""))]
    if len(own) != 1:
        which = "several nodes" if own else "no node"
        raise ConfigError(f"peers names {which} with an address of this machine: set peer_self=URL for this one")
    return own[0]


def is_here(addresses: Sequence[str]) -> bool:
    """Whether one of the addresses is this machine's."""
    for address in addresses:
        try:
            with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.bind((address, 0))
                return True
        except OSError:
            continue
    return False


class Roll:
    """Those that count, addresses or URLs, by answers one after the other."""

    def __init__(self, known: Collection[str] = ()) -> None:
        self._missed = dict.fromkeys(known, 0)

    def after(self, answer: Collection[str], gone: Collection[str] = ()) -> list[str]:
        """Those that count after this answer, which is none if it could not be had; `gone` say that they leave."""
        if answer:
            missed = {one: times + 1 for one, times in self._missed.items()} | dict.fromkeys(answer, 0)
            self._missed = {one: times for one, times in missed.items() if times < MISSED and one not in gone}
        return sorted(self._missed)
