"""The manager's part in `peers`: it finds the nodes, and publishes them to all processes (`members.py`)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial

import trio

from spiderfs.cluster import BEAT_S, Beats
from spiderfs.errors import ConfigError
from spiderfs.options.model import Options
from spiderfs.sources import node_names
from spiderfs.sources.members import MOST_MEMBERS, OWN, Members
from spiderfs.sources.node_names import addresses_of, as_named, at_address, is_here, live_name, weights_of
from spiderfs.sources.redis_client import Survey

log = logging.getLogger(__name__)

# How often a name is looked up, and how soon again if that has failed. No one waits for it.
LOOK_UP_S, AGAIN_S = 10.0, 2.0
# The same for names in a list, whose addresses change rarely.
LISTED_S = 60.0
# How often a server of Redis is asked for its shards and its room.
SURVEY_S = 2.0
# How long the end of a mount waits until the others can know of it.
LEAVE_S = 1.0


class Membership:
    def __init__(self, members: Members | None, options: Options, rehomed: Callable[[], None]) -> None:
        """`members`: those that all processes share, None without `peers`; `rehomed` is called when homes move."""
        self._members, self._rehomed, self._options = members, rehomed, options
        # A manager before this one has had answers too.
        known = members.nodes() if members is not None else []
        self._found = {node.url: node for node in known if node is not None}
        self._roll = node_names.Roll([address for node in self._found.values() for address in node.addresses])
        self._published: object = None
        self._one_at_a_time = trio.Lock()
        self._changed = trio.Event()

    def change(self, options: Options) -> None:
        """Take over the option; raises ConfigError where that takes a new mount."""
        if options.peers == self._options.peers:
            return
        if not options.peers or not self._options.peers:
            raise ConfigError("a mount cannot begin or end with peers: unmount, then mount with the others")
        # Where nodes are that stay is known until a look-up says otherwise.
        staying = [
            node for url, node in self._found.items() if url in options.peers and node.host == as_named(url).host
        ]
        self._options, self._found, self._roll = options, {node.url: node for node in staying}, node_names.Roll()
        self._changed.set()

    async def run(self) -> None:
        """Find out for ever who the nodes are, and where."""
        while self._members is not None:
            self._changed, peers = trio.Event(), self._options.peers
            async with trio.open_nursery() as nursery:
                if node_names.data_set_of(peers):
                    nursery.start_soon(self._exchange_beats, self._members)
                else:
                    nursery.start_soon(self._follow_all, weights_of(peers), live_name(peers), trio.CancelScope())
                for url in filter(node_names.is_server, peers):
                    nursery.start_soon(self._survey, url, self._members.identity)
                nursery.start_soon(self._look_for_strangers, self._members)
                await self._changed.wait()
                nursery.cancel_scope.cancel()

    @property
    def _name(self) -> str:
        return node_names.name_of(self._options.peers, self._options.peer_self)

    async def _exchange_beats(self, members: Members) -> None:
        """Announce this node to the others, and find them; at the end announce that it leaves."""
        # It may follow servers of Redis, which are no nodes.
        options, known = self._options, list(filter(node_names.is_web_server, members.members))
        name, identity = node_names.data_set_of(options.peers), members.identity
        beats = Beats(options.cluster, name, self._name, known, identity)
        present, following = list[str](), trio.CancelScope()
        try:
            async with trio.open_nursery() as nursery:
                while True:
                    before, present = present, await trio.to_thread.run_sync(beats.beat, abandon_on_cancel=True)
                    if present != before:
                        following.cancel()
                        following = trio.CancelScope()
                        # As many as there are places; all nodes leave out the same ones.
                        weights = dict.fromkeys(present[: MOST_MEMBERS - 1], 1.0)
                        nursery.start_soon(self._follow_all, weights, "", following)
                    await trio.sleep(BEAT_S)
        finally:
            with trio.move_on_after(LEAVE_S, shield=True):
                await trio.to_thread.run_sync(beats.leave, abandon_on_cancel=True)

    async def _follow_all(self, weights: Mapping[str, float], name: str, until: trio.CancelScope) -> None:
        """Look the nodes' names up, or the one `name` whose addresses they are."""
        # A name that is not answered for keeps a thread for half a minute, and no other name waiting.
        threads = trio.CapacityLimiter(len(weights))
        with until:
            if not name:
                await self._take_over(weights)
            async with trio.open_nursery() as nursery:
                for url in weights:
                    nursery.start_soon(self._follow, url, weights, name, threads)

    async def _follow(self, url: str, weights: Mapping[str, float], name: str, threads: trio.CapacityLimiter) -> None:
        node, options, is_known = as_named(url), self._options, True
        if node.addresses or not node.host or url == self._name:
            return
        while True:
            find = partial(addresses_of, node.host)
            found = await trio.to_thread.run_sync(find, abandon_on_cancel=True, limiter=threads)
            if self._options is not options:
                return
            if is_known != bool(found):
                is_known = not is_known
                if is_known:
                    log.info("peers: %s is known again", node.host)
                else:
                    log.warning("peers: %s cannot be looked up: the nodes that are known stay", node.host)
            if name:
                # As many as there are places; all nodes leave out the same ones.
                counted = self._roll.after(found)[: MOST_MEMBERS - 1]
                self._found = {member.url: member for member in (at_address(url, address) for address in counted)}
            elif found:
                self._found[url] = self._found.get(url, node)._replace(addresses=found)
            if found:
                await self._take_over(dict.fromkeys(self._found, 1.0) if name else weights)
            await trio.sleep((LOOK_UP_S if name else LISTED_S) if found else AGAIN_S)

    async def _look_for_strangers(self, members: Members) -> None:
        """Log once of a node that it has none of the files that it was asked for."""
        logged = set[str]()
        while True:
            await trio.sleep(LOOK_UP_S)
            for url, peer in members.statuses().items():
                if url not in logged and (said := peer.stranger(url)):
                    logged.add(url)
                    log.warning("peers: %s %s, %s", url, said, members.identity)

    async def _survey(self, url: str, source: str) -> None:
        """Ask a server of Redis again and again which shards it has, and how much room."""
        options, thread = self._options, trio.CapacityLimiter(1)
        with closing(Survey(url, not options.peers[url], source)) as survey:
            while True:
                known = self._found.get(url) or as_named(url)
                node = await trio.to_thread.run_sync(survey.look, known, abandon_on_cancel=True, limiter=thread)
                if self._options is not options:
                    return
                if node != known:
                    # Its addresses may be others by now.
                    self._found[url] = self._found.get(url, node)._replace(shards=node.shards, room=node.room)
                    await self._take_over(weights_of(options.peers))
                await trio.sleep(SURVEY_S)

    async def _take_over(self, weights: Mapping[str, float]) -> None:
        assert self._members is not None
        # To draw the homes takes some milliseconds for each node.
        with trio.CancelScope(shield=True):
            async with self._one_at_a_time:
                own, found = self._own(weights), dict(self._found)
                known = (dict(weights), own, found)
                if known == self._published:
                    return
                try:
                    has_moved = await trio.to_thread.run_sync(self._members.change, weights, own, found)
                except ConfigError as exc:
                    log.warning("%s", exc)
                    return
                self._published = known
                log.info("peers: %d nodes, and this is %s", len(weights), self._members.members[OWN] or "none of them")
                if has_moved:
                    self._rehomed()

    def _own(self, weights: Mapping[str, float]) -> set[str]:
        """Which of the nodes is this one: the one that the option names, or was it before, or has an address of it."""
        assert self._members is not None
        if self._name:
            return {self._name}
        if any(map(node_names.is_server, weights)):
            return {node_names.HERE}
        if self._members.members[OWN] in weights and not live_name(self._options.peers):
            return {self._members.members[OWN]}
        return {url for url in weights if is_here((self._found.get(url) or as_named(url)).addresses)}
