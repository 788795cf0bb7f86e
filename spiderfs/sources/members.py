"""The nodes that share the samples of a source, known to all processes of one mount.

The manager looks the nodes' names up again and again (`daemon/caching/membership.py`) and says here who is a member,
and at which addresses. The reading processes take over from here, at their next read, whom they ask (`peers.py`).

Each node has a **place**, and keeps it as long as it is a member; place 0 is this node's own. The homes of samples are
a table of places. List and table lie in memory that all processes share, and only the manager writes them. Whoever
reads between two writes may ask a node that is not the home, which costs a question at most: no bytes depend on it.

A node that is no member (yet) is the home of nothing: it asks the others, and keeps what a plan reads next alone.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import zlib
from collections.abc import Collection, Container, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from spiderfs.core.homes import GROUPS, Homes
from spiderfs.errors import ConfigError
from spiderfs.sources.node_names import Node, as_named, is_server
from spiderfs.sources.source import HASH_MASK

# For each of them, to draw the homes takes a megabyte for a moment.
MOST_MEMBERS = 256
# `resting` has the mark of the node that the process lets rest, and so says nothing of one that has the place after it.
FIELDS = ("hits", "bytes", "absent", "timeouts", "resting")
OWN = 0
# A node that had none of so many files shows another source, or other versions of its files.
_NONE_OF = 100
_LIST_BYTES = 1 << 20
# The number of the edition, how long its text is, and a checksum: a text that is half written is not trusted.
_HEADER = struct.Struct("@QII")


# So many blocks of a large file have a home of their own.
STRIPE_BLOCKS = 8
STRIPE_BYTES = STRIPE_BLOCKS << 20
_KEY = struct.Struct("<QQ")


def key_at(number: int, offset: int) -> int:
    """The number by which the bytes at an offset of the version with this `number` have their home."""
    stripe = offset // STRIPE_BYTES
    return xxhash.xxh3_64_intdigest(_KEY.pack(number, stripe)) & HASH_MASK if stripe else number


def salt_of(identity: str) -> int:
    """What the numbers of versions of a source's files are combined with (xor) in questions to nodes and servers.

    `identity`: see `identity_between_nodes`; the empty one has no salt. The last bits, by which samples have their
    homes, stay as they are.
    """
    return xxhash.xxh3_64_intdigest(os.fsencode(identity)) & HASH_MASK & -GROUPS if identity else 0


def other_source(theirs: str, ours: str) -> str:
    """The message about two names for what may be one source."""
    return (
        f"its source is {theirs!r:.300}, and this mount's {ours!r:.300}: give other data another name, "
        "and one source the same name on all nodes"
    )


def mark_of(url: str) -> int:
    """A number above 0 for a node."""
    return 1 + zlib.crc32(url.encode(errors="surrogateescape"))


class PeerStatus(NamedTuple):
    up: bool
    hits: int
    bytes: int
    absent: int
    timeouts: int

    def stranger(self, url: str) -> str:
        """The message about a node that answers and has nothing; a server has only what it was given."""
        has_nothing = not self.hits and self.absent >= _NONE_OF and not is_server(url)
        return "has had no file that it was asked for: see that it shows the same source" if has_nothing else ""


class Members(Homes):
    """Homes whose members may change, and what the reading processes have had from each; make it before these.

    `members` has the URLs by their places, empty where no one is, as this process has read them last (`nodes`).
    """

    def __init__(self, processes: int = 1, identity: str = "", asked: Container[int] = ()) -> None:
        """So many `processes` count what they have. `identity` is that of the source between nodes; other nodes have
        asked this one for the stripes in `asked`.
        """
        self.own, self._asked = OWN, asked
        self.identity, self.salt = identity, salt_of(identity)
        self.members = [""]
        self._drawn_for: object = None
        self._home_of = memoryview(mmap.mmap(-1, 2 * GROUPS)).cast("H")
        self._list = mmap.mmap(-1, _LIST_BYTES)
        self._processes, self._width = processes, MOST_MEMBERS * len(FIELDS)
        self._counts = memoryview(mmap.mmap(-1, 8 * processes * self._width)).cast("Q")

    def home(self, key: int) -> int:
        return self._home_of[key % GROUPS]

    def of_all(self, keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.intp]:
        found: npt.NDArray[np.intp] = np.frombuffer(self._home_of, np.uint16)[keys % np.uint64(GROUPS)].astype(np.intp)
        return found

    def is_remote(self, key: object) -> bool:
        assert isinstance(key, int)
        return self._home_of[key % GROUPS] != OWN

    def passes(self, number: int, block: int) -> bool:
        place = self.home(key := key_at(number, (block - 1) // STRIPE_BLOCKS * STRIPE_BYTES))
        # A server keeps no parts of files. What others ask for whose home is down, this node keeps in its place.
        is_of_node = OWN != place < len(self.members) and not is_server(self.members[place])
        return is_of_node and key not in self._asked

    @property
    def has_own(self) -> bool:
        """Whether this node is a member."""
        return bool(self.members[OWN])

    @property
    def edition(self) -> int:
        """Another number whenever the nodes are others, or their addresses."""
        edition: int = _HEADER.unpack_from(self._list)[0]
        return edition

    def nodes(self) -> list[Node | None]:
        """The nodes by their places; no places, not even this node's, while the manager writes them."""
        _, size, checksum = _HEADER.unpack_from(self._list)
        text = self._list[_HEADER.size : _HEADER.size + size]
        # The number of bytes is 0 for a moment while the header is written.
        if not size or zlib.crc32(text) != checksum:
            return []
        nodes = [node and Node(*node)._replace(shards=tuple(node[3])) for node in json.loads(text)]
        self.members = [node.url if node else "" for node in nodes]
        return nodes

    def change(
        self, weights: Mapping[str, float], own: Collection[str], found: Mapping[str, Node] | None = None
    ) -> bool:
        """Have these members; those in `own` are this node. `found` has what is known of them beside their URLs.

        Returns whether a sample has another home, for this node, than before. For the manager alone, and before it.
        Raises ConfigError for more members than there are places.
        """
        # Another manager may have changed them, and may have died while it wrote: of its homes nothing is known.
        self.nodes()
        urls = sorted(weights)
        others = [url for url in urls if url not in own]
        places = self._placed(others)
        nodes: list[Node | None] = [None] * (1 + max(places.values(), default=0))
        for url in urls:
            nodes[places.get(url, OWN)] = (found or {}).get(url) or as_named(url)
        rooms = {node.url: node.room for node in nodes if node and node.room < GROUPS}
        if rooms and own:
            nodes[OWN] = nodes[OWN] or as_named(min(own))
        drawing, have_moved = (os.getpid(), dict(weights), set(own), rooms), False
        if self._drawn_for != drawing:
            homes = np.zeros(GROUPS, np.uint16)
            if others:
                drawn = Homes(weights, urls[0])
                of_member = np.array([places.get(url, OWN) for url in drawn.members], np.uint16)
                room_of = np.array([rooms.get(url, GROUPS) for url in drawn.members])
                groups = np.arange(GROUPS, dtype=np.uint64)
                member = drawn.of_all(groups)
                homes = np.where(groups < room_of[member], of_member[member], np.uint16(OWN))
            now = np.frombuffer(self._home_of, np.uint16)
            have_moved = bool(((now == OWN) != (homes == OWN)).any())
            now[:] = homes
        self._publish(nodes)
        self._drawn_for = drawing
        return have_moved

    def _placed(self, urls: Sequence[str]) -> dict[str, int]:
        """The places of other nodes: those that they have, or the first ones that are free."""
        if len(urls) >= MOST_MEMBERS:
            raise ConfigError(f"peers has more than {MOST_MEMBERS} nodes: name fewer")
        places = {url: place for place, url in enumerate(self.members) if place != OWN and url in urls}
        free = sorted(set(range(OWN + 1, MOST_MEMBERS)) - set(places.values()), reverse=True)
        for url in (url for url in urls if url not in places):
            places[url] = place = free.pop()
            for row in range(self._processes):
                self._cells(row, place)[:] = memoryview(bytes(8 * len(FIELDS))).cast("Q")
        return places

    def _publish(self, nodes: Sequence[Node | None]) -> None:
        text = json.dumps(nodes).encode()
        if len(text) > _LIST_BYTES - _HEADER.size:
            raise ConfigError("the URLs of peers are too long: shorten them")
        self._list[_HEADER.size : _HEADER.size + len(text)] = text
        _HEADER.pack_into(self._list, 0, self.edition + 1, len(text), zlib.crc32(text))
        self.members = [node.url if node else "" for node in nodes]

    # -- what was had from them

    def row(self, process: int) -> memoryview:
        """What this process counts: for each place the cells of FIELDS."""
        return self._counts[process * self._width : (process + 1) * self._width]

    def _cells(self, process: int, place: int) -> memoryview:
        return self.row(process)[place * len(FIELDS) : (place + 1) * len(FIELDS)]

    def status(self, place: int) -> PeerStatus:
        """The sums over all processes; a peer is up while no process lets it rest."""
        rows = (self._cells(row, place) for row in range(self._processes))
        *counts, resting = zip(*rows, strict=True)
        return PeerStatus(mark_of(self.members[place]) not in resting, *map(sum, counts))

    def statuses(self) -> dict[str, PeerStatus]:
        """What was had from each other member, by its URL."""
        return {url: self.status(place) for place, url in enumerate(self.members) if url and place != OWN}
