"""The manager: the one process in which decisions are made.

It folds the workers' events through the cache control, measures the source where the capacity is a share of it, answers
for the control files, records traces, and keeps the store in order. The manager may die at any time: reads go on
without it, events wait in the pipe, and the next manager learns everything from the store.

`Manager.__init__` makes the components, each after those that it needs; `Manager.run` starts their tasks. No component
knows the manager: it gets its collaborators when it is made, and shows its state by a `status()` that does not change.
"""

from __future__ import annotations

import json
import logging
import os
import signal
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import trio

from spiderfs.archives.source import forget_gone
from spiderfs.core.events import Access
from spiderfs.core.memory import UNBOUNDED, MemoryBounds
from spiderfs.core.policy import HubLimits
from spiderfs.core.rooms import VIEWS
from spiderfs.daemon.caching.cache_control import CacheCapacity, CacheControl, Superseded
from spiderfs.daemon.caching.membership import Membership
from spiderfs.daemon.caching.packer import Packer
from spiderfs.daemon.caching.planned_reads import PlannedReads
from spiderfs.daemon.caching.prefetch_backend import Wakeup
from spiderfs.daemon.caching.prefetcher import Prefetcher
from spiderfs.daemon.caching.push_ahead import PushAhead
from spiderfs.daemon.caching.warmer import Warmer
from spiderfs.daemon.context import MANAGER_ROW, MountContext, NextPartition, Partition
from spiderfs.daemon.control import commands, texts
from spiderfs.daemon.control.access_log import AccessLog
from spiderfs.daemon.control.channel import Act, ControlTable, Render, answer_questions
from spiderfs.daemon.control.commands import LiveOptions
from spiderfs.daemon.pipes import ClientPipe, EventWriter, read_events
from spiderfs.daemon.published_options import client_terms_of, publish_options, published_options
from spiderfs.daemon.training.connection.hook_server import HookServer, listen
from spiderfs.daemon.training.connection.partial_connection import PartialKeeper
from spiderfs.daemon.training.service import Training
from spiderfs.errors import SpiderfsError, StoreError
from spiderfs.fuse.kernel import Kernel
from spiderfs.linux import steady_clock
from spiderfs.linux.memory import anonymous_bytes, give_back_freed_memory, keep_freed_memory
from spiderfs.options.model import Options
from spiderfs.options.units import format_size, round_size
from spiderfs.packages import PackageDirectory
from spiderfs.shared.published import publish_trainers
from spiderfs.shared.shared_memory import MANAGER
from spiderfs.sources.read_process import ReadProcess
from spiderfs.store.store import ContentKey
from spiderfs.trace import noted_in, recording_to
from spiderfs.vfs.fetcher import Episode
from spiderfs.views.recipe import ORIGINAL

log = logging.getLogger(__name__)


class Memory:
    """The manager makes it before it learns of any sample: what it takes later, it takes for samples."""

    def __init__(
        self,
        limit_bytes: int | None,
        bounds: MemoryBounds,
        in_flight_bytes: Callable[[], int],
        pushed_bytes: Callable[[], int],
        own_bytes: Callable[[], int] = anonymous_bytes,
    ) -> None:
        """`in_flight_bytes` of all processes; `own_bytes` are all of this one."""
        self._limit_bytes, self._bounds = limit_bytes, bounds
        self._in_flight_bytes, self._pushed_bytes, self._own_bytes = in_flight_bytes, pushed_bytes, own_bytes
        self._first_bytes = own_bytes()
        self._has_warned = False

    def status(self) -> Mapping[str, int | None]:
        """What is held, each with its bound (of what is in flight that of each process); None: no bound."""
        in_flight, pushed, samples = self._bounds.in_flight, self._bounds.pushed, self._bounds.samples
        return {
            "limit_bytes": self._limit_bytes,
            "in_flight_bytes": self._in_flight_bytes(),
            "in_flight_limit_bytes": None if in_flight == UNBOUNDED else in_flight,
            "pushed_bytes": self._pushed_bytes(),
            "pushed_limit_bytes": pushed,
            "samples_bytes": self._samples_bytes(),
            "samples_limit_bytes": None if samples == UNBOUNDED else samples,
        }

    def check(self) -> None:
        """Warn once if samples take more than is left for them."""
        taken, left = self._samples_bytes(), self._bounds.samples
        if self._limit_bytes is not None and taken > left and not self._has_warned:
            self._has_warned = True
            log.warning(
                "names, plans and scores of samples take %s of memory, and memory_limit=%s leaves %s for them: mount"
                " with a higher limit, or declare fewer samples",
                *(round_size(taken), format_size(self._limit_bytes), round_size(left)),
            )

    def _samples_bytes(self) -> int:
        return max(0, self._own_bytes() - self._first_bytes)


# Between two looks at the event pipe; the events of that time share one transaction.
FOLD_PAUSE_S = 0.005
SAVE_INTERVAL_S = 30.0
# Saving the order of millions of records takes seconds; at most this share of the manager's time goes into it.
SAVE_SHARE = 0.02
HOUSEKEEPING_INTERVAL_S = 5.0
# Sizes of views that a status looks at: 0.1 s of the manager's time.
_LOOKED_AT = 100_000

_STATE_FACT, _LEARNED_FACT = "policy state", "learned"


async def manage(context: MountContext, kernel: Kernel) -> None:
    """Run until SIGTERM, then write down what the next mount should know."""
    if context.options.memory_limit is not None:
        keep_freed_memory(context.memory.freed)
    reading = context.reading(MANAGER_ROW, kernel, delivers=context.options.immutable)
    kernel.leave()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(reading.attend)
        nursery.start_soon(reading.watch)
        manager = Manager(context, reading)
        await manager.run(nursery)
        nursery.cancel_scope.cancel()
    manager.close()


class Manager:
    def __init__(self, context: MountContext, reading: ReadProcess) -> None:
        """`reading` reads file content from the source, beside this process."""
        self._context = context
        layout, run = context.layout, context.layout.run
        options = published_options(run, context.options)
        counters = self._counters = context.row(MANAGER_ROW)
        in_flight = context.counters.in_flight_bytes
        self._memory = Memory(options.memory_limit, context.memory, in_flight, lambda: self._prefetcher.pushed_bytes)
        context.slow.change(options.slow_settings())

        # The store, the source, and the way from one to the other.
        self._full_disk = Episode(run.full_disk)
        content, records = self._content, self._records = context.open_content(), context.open_records()
        supply = context.supply(counters, reading.read, content, records, self._full_disk, in_flight=reading.in_flight)
        client, catalogue = self._client, self._catalogue = supply.client, supply.catalogue
        self._fetcher = supply.fetcher

        # The workers and clients report what was read, and the cache control decides what is kept.
        self._events = EventWriter(context.event_writer, counters)
        self._read_workers = partial(read_events, context.event_reader)
        self._client_pipe = ClientPipe(run, client_terms_of(options, context.mounted_at_s), counters)
        recording = self._recording = recording_to(options.trace)
        cache = self._cache = CacheControl(
            content,
            options.policy,
            options.large_share,
            counters,
            _hub_limits(options),
            noted_in(recording),
            context.partition.partials_share,
            context.views_room(catalogue),
            context.members,
        )
        self._capacity = CacheCapacity(options, cache, catalogue, supply.lister)

        def rehomed() -> None:
            # What others asked for when it was at home here may be at home with them now.
            context.asked_by_peers.replace(())
            cache.engine.rerank()

        self._membership = Membership(context.members, options, rehomed)

        # Trainers feed the cache.
        self._wakeup = Wakeup()
        training = self._training = Training(
            supply,
            cache,
            context.notice.after(partial(publish_trainers, run.trainers)),
            layout.scores,
            options,
            recording,
            self._wakeup.ring,
            context.notice.taken_over,
            context.shared_identity,
        )
        self._superseded = Superseded(catalogue, content, cache, training.declared_lists.superseded)
        partials = PartialKeeper(content, cache, options.sample_max_bytes)
        self._hook_server = HookServer(training, counters.add, partials=partials)

        # Prefetcher, warmer and packer fetch on their own.
        self._prefetcher = Prefetcher(
            cache,
            supply,
            options,
            self._wakeup,
            lambda: client.reachable and self._context.counters.source_reachable(),
            training.redirects.has_substitute,
            training.accounts.fetched_ahead,
            partial(
                PushAhead,
                options,
                context.pusher_threads,
                context.pushed_samples,
                context.passing_samples,
                counters,
                cache,
                context.pushes,
                context.asks_for_names,
                most_bytes=context.memory.pushed,
            )
            if options.immutable
            else None,
            context.archives,
            PlannedReads(reading, context.flights, cache, content, supply),
        )
        self._warmer = Warmer(supply, options.sample_max_bytes, self._events.record_access, self._prefetcher.rate)
        self._packer: Packer | None = None
        if options.packages == "source":
            assert context.root_fd is not None
            packages = PackageDirectory(context.root_fd, layout.package_key)
            self._packer = Packer(cache, supply, context.source, packages)

        # Users look at all of it, and change it.
        self._access_log = AccessLog(run, options.access_log, catalogue.path_of)
        self._options = LiveOptions(
            options,
            context.notice.after(partial(publish_options, run)),
            (
                self._capacity.change,
                lambda changed: cache.limit_hubs(_hub_limits(changed)),
                lambda changed: cache.set_policy(changed.policy),
                training.change,
                self._prefetcher.change,
                self._membership.change,
                lambda changed: context.slow.change(changed.slow_settings()),
                lambda changed: self._client_pipe.change(client_terms_of(changed, context.mounted_at_s)),
            ),
            training.policy_changed,
        )
        self._next_partition = NextPartition(layout.profile)
        self._table = self._control_table(options)
        self._reserve_failed = False

    def _control_table(self, options: Options) -> ControlTable:
        """For each control file, the text that reading shows and the effect that writing has."""
        content, records, catalogue, training = self._content, self._records, self._catalogue, self._training
        renders: dict[str, Render] = {
            "stats.json": lambda: json.dumps(self.status(), indent=2).encode() + b"\n",
            "metrics": lambda: texts.metrics(self.status(), self._context.counters),
            "config": lambda: texts.config(self._options.current, self._table.last_refusal),
            "warm": lambda: self._warmer.status().line().encode(),
            "pin": lambda: (
                b"%(files)d files pinned (%(bytes)d bytes, at most %(limit_bytes)d)\n"
                % {name.encode(): value for name, value in self._cache.status()["pins"].items()}
            ),
            "unpin": lambda: b"%d files unpinned by the last request\n" % self._warmer.last_unpinned,
            "evict": lambda: b"%d records evicted by the last request\n" % self._warmer.last_evicted,
            "epochs": lambda: texts.epochs(training.accounts.epochs()),
            "ratio": lambda: json.dumps(texts.plain(training.feed.status())).encode() + b"\n",
            "hook": lambda: os.fsencode(self._context.layout.run.hook_socket) + b"\n",
            "log": self._access_log.render,
            "cache": lambda: texts.cached(content, catalogue, self._cache.score),
            "redirects": lambda: texts.redirects(records, catalogue),
            "scores": lambda: texts.scores(training.job_datasets, training.scoring, catalogue),
            "graph": lambda: texts.graph(training.job_datasets, training.scoring),
        }
        acts: dict[str, Act] = {
            "config": partial(commands.change_config, self._options),
            "ratio": partial(commands.pin_ratio, training),
        }
        for name in commands.OF_FILES:
            acts[name] = partial(commands.act_on_files, name, self._warmer, self._cache, options, catalogue.forms)
        return ControlTable(renders, acts)

    def status(self) -> dict[str, Any]:
        """The status of every component, by its name in `stats.json`; the figures of the cache have no name."""
        context, options, members = self._context, self._options.current, self._context.members
        link, view = self._training.link_status(), options.shown_form != ORIGINAL
        peers = members.statuses().items() if members else ()
        remounted = self._next_partition.found(options) or Partition(None, 0.0, 0.0)
        ahead = self._prefetcher.status()
        figures = texts.plain(
            {
                **texts.options_status(options),
                **self._cache.status(),
                "pid": context.supervisor_pid,
                "uptime_s": steady_clock.now() - context.mounted_at_s,
                "disk_bytes": self._content.file_bytes(),
                "cache_dirs": self._content.disks(),
                "known_files": self._catalogue.known_files(),
                "source_bytes": self._capacity.measured_bytes,
                "source_reachable": context.counters.source_reachable(),
                "forms": self._cached_forms(),
                **context.partition.status(view),
                **{f"next_{name}": figure for name, figure in remounted.status(view).items()},
                "trainers": [trainer.status() for trainer in self._hook_server.trainers],
                "jobs": self._training.jobs(),
                "ratio": self._training.feed.status(),
                "plans": ahead.pop("plans"),
                "fetches_ahead": ahead,
                "peers": {url: {**peer._asdict(), "remark": peer.stranger(url)} for url, peer in peers},
                "is_member": members.has_own if members else None,
                "memory": self._memory.status(),
                "cluster": link,
                "cluster_up": link is None or link.up,
            }
        )
        return texts.with_metrics(figures, context.counters)

    def _cached_forms(self) -> Mapping[str, int]:
        """How many samples are cached in which form."""
        # Else a read that is still open would show the store as it was then.
        self._content.end_read()
        forms = self._catalogue.forms
        looked_at = self._catalogue.looked_at(_LOOKED_AT)
        cached = Counter(form for inode, form in looked_at if self._content.has(ContentKey(inode)))
        others = max(0, self._cache.samples - cached.total())
        # The length of a view is noted before the view is cached. Of views that are not looked at, most are the root's.
        cached[ORIGINAL if len(looked_at) < _LOOKED_AT else forms.shown] += others
        if len(looked_at) == _LOOKED_AT and forms.mixed:
            surplus = max(0, cached[forms.shown] - self._cache.engine.section_entries[VIEWS])
            cached.update({ORIGINAL: surplus, forms.shown: -surplus})
        return {
            form: cached[form] for form in (ORIGINAL, *forms.recipes) if cached[form] or form in (ORIGINAL, forms.shown)
        }

    async def run(self, nursery: trio.Nursery) -> None:
        """Begin with what the store has, start all tasks, and wait for SIGTERM."""
        try:
            self._content.fit(self._capacity.budget_bytes)
            self._cache.restore(self._capacity.budget_bytes, self._catalogue.fact(_STATE_FACT))
        except StoreError as exc:
            # `reconcile` takes stock as soon as the disk allows it.
            log.warning("%s: nothing enters or leaves the cache until the disk can be written to", exc)
        self._training.begin(self._catalogue.fact(_LEARNED_FACT))
        nursery.start_soon(self._fetcher.rest, give_back_freed_memory)
        nursery.start_soon(self._context.flights.attend, MANAGER)
        self._listen_for_trainers(nursery)
        nursery.start_soon(answer_questions, self._context.control_listener, self._table, nursery)
        nursery.start_soon(self._fold_events, self._context.event_reader, self._read_workers)
        nursery.start_soon(self._fold_events, self._client_pipe.fd, self._client_pipe.read)
        nursery.start_soon(forget_gone, self._context.source)
        for component in (self._capacity, self._superseded, self._warmer, self._prefetcher, self._membership):
            nursery.start_soon(component.run)
        share, watch, flush = self._training.share_with_other_nodes, self._client.watch, self._events.flush_in_time
        for task in (watch, flush, self._access_log.run, self._keep_house, self._save_now_and_then, share):
            nursery.start_soon(task)
        if self._packer is not None:
            nursery.start_soon(self._packer.run)
        with trio.open_signal_receiver(signal.SIGTERM) as signals:
            self._counters.add("process_starts")
            async for _ in signals:
                break
        # Connections end before the cache is saved: what trainers have pinned is to be saved all the same.
        self._training.pinboard.forget()

    def _listen_for_trainers(self, nursery: trio.Nursery) -> None:
        path = self._context.layout.run.hook_socket
        try:
            listener = listen(path)
        except OSError as exc:
            log.warning(
                "cannot make the hook's socket (%s): trainers cannot attach; make cache_dir writable, and mount again",
                exc.strerror,
            )
        else:
            nursery.start_soon(self._hook_server.serve, listener, path)

    def close(self) -> None:
        """Fold what still waits in the pipes, and save; the tasks have ended."""
        self._events.flush()
        for read in (self._read_workers, self._client_pipe.read):
            while events := read():
                self._fold(events)
        try:
            self._training.scoring.save()
            self._save()
        except (SpiderfsError, OSError) as exc:
            log.warning("the order of the cached files could not be saved: %s", exc)
        if self._recording is not None:
            self._recording.close()
        # The store is not closed: a thread that was given up on may still come back from the source and write to it.

    async def _fold_events(self, fd: int, read: Callable[[], list[Access]]) -> None:
        while True:
            await trio.lowlevel.wait_readable(fd)
            self._fold(read())
            self._wakeup.ring()
            await self._training.redirects.publish()
            await trio.sleep(FOLD_PAUSE_S)

    def _fold(self, events: list[Access]) -> None:
        events = self._prefetcher.on_events(events)
        try:
            self._cache.fold(events, self._training.on_access)
            self._training.record_accesses(events)
        except SpiderfsError as exc:
            # The fetched records stay in landing until they are pushed out; no one waits until they are kept.
            log.warning("%s", exc)
        self._access_log.record_accesses(events)

    async def _keep_house(self) -> None:
        restarts = -1
        while True:
            # A worker that was killed may have written what it could not record any more.
            before, restarts = restarts, self._context.counters.totals()["worker_restarts"]
            if await trio.to_thread.run_sync(self._free, restarts != before):
                self._cache.reconcile()
            self._cache.engine.compare_paces(steady_clock.now())
            await self._training.keep_house()
            self._memory.check()
            await self._options.settle()
            self._content.clear_dead_readers()
            self._records.clear_dead_readers()
            self._reserve_room_for_names()
            await trio.sleep(HOUSEKEEPING_INTERVAL_S)

    def _free(self, killed: bool) -> bool:
        """Free what dropped blocks took, in a thread; returns whether a disk has failed, and records were dropped."""
        dropped = False
        try:
            dropped = self._content.fit(self._content.usage().capacity_bytes)
            if killed:
                self._content.sweep()
            self._content.free()
        except (SpiderfsError, OSError) as exc:
            log.warning("%s", exc)
        try:
            self._content.reserve()
        except OSError as exc:
            log.debug("no room to keep for making room: %s", exc)
        return dropped

    def _reserve_room_for_names(self) -> None:
        try:
            self._records.reserve()
        except OSError as exc:
            if not self._reserve_failed and self._full_disk.begin():
                log.warning("no room to keep for names (%s): new ones may soon not be found", exc.strerror)
            self._reserve_failed = True
        else:
            if self._reserve_failed:
                self._full_disk.end()
            self._reserve_failed = False

    async def _save_now_and_then(self) -> None:
        took_s = 0.0
        while True:
            await trio.sleep(max(SAVE_INTERVAL_S, took_s / SAVE_SHARE))
            started = steady_clock.now()
            try:
                await self._training.scoring.in_turn(self._training.scoring.save)
                self._save()
                self._cache.reconcile()
            except (SpiderfsError, OSError) as exc:
                log.warning("%s", exc)
            if self._recording is not None:
                self._recording.flush()
            took_s = steady_clock.now() - started

    def _save(self) -> None:
        self._catalogue.record_fact(_STATE_FACT, self._cache.saved_state())
        self._catalogue.record_fact(_LEARNED_FACT, self._training.learned())


def _hub_limits(options: Options) -> HubLimits:
    return HubLimits(options.hub_substitutions, options.hub_neighbours)
