"""The manager: the one process in which decisions are made.

It folds the workers' events through the cache control, measures the source where the capacity is a share of it, answers
for the control files, records traces, and keeps the store in order. It may die at any time: reads go on without it,
events wait in the pipe, and the next manager learns everything from the store.
"""

from __future__ import annotations

import logging
import signal
import struct
import time
from collections.abc import Callable, Sequence

import trio

from spiderfs.core.events import Access
from spiderfs.daemon.caching.cache_control import CacheControl
from spiderfs.daemon.caching.packer import Packer
from spiderfs.daemon.caching.patterns import Pattern
from spiderfs.daemon.caching.prefetcher import Prefetcher
from spiderfs.daemon.caching.superseded import Superseded
from spiderfs.daemon.caching.survey import Survey
from spiderfs.daemon.caching.warmer import Warmer
from spiderfs.daemon.context import (
    MANAGER_ROW,
    MountContext,
    client_terms_of,
    publish_options,
    published_options,
)
from spiderfs.daemon.control.access_log import AccessLog
from spiderfs.daemon.control.channel import answer_questions
from spiderfs.daemon.control.table import ControlTable
from spiderfs.daemon.pipes.client_pipe import ClientPipe
from spiderfs.daemon.pipes.event_pipe import EventWriter, read_events
from spiderfs.daemon.training.hook_server import HookServer, listen
from spiderfs.daemon.training.training import Training
from spiderfs.errors import SpiderfsError, Stale, StoreError
from spiderfs.options.model import Options
from spiderfs.packages.format import PackageDirectory
from spiderfs.sources.faults import FAULTS
from spiderfs.sources.read_process import ReadProcess
from spiderfs.store.environment import exit_if_corrupt
from spiderfs.vfs.catalogue import Catalogue
from spiderfs.vfs.fetcher import Episode, Fetcher, Interlock
from spiderfs.vfs.lister import Lister

log = logging.getLogger(__name__)

# Between two looks at the event pipe; the events of that time share one transaction.
FOLD_PAUSE_S = 0.005
LOG_INTERVAL_S = 0.25
SAVE_INTERVAL_S = 30.0
# Saving the order of millions of records takes seconds; at most this share of the manager's time goes into it.
SAVE_SHARE = 0.02
HOUSEKEEPING_INTERVAL_S = 5.0

_SOURCE_BYTES = struct.Struct("<Q")
_STATE_FACT, _SOURCE_BYTES_FACT, _RATIO_FACT = "policy state", "source bytes", "ratio"


async def manage(context: MountContext) -> None:
    """Run until SIGTERM, then write down what the next mount should know."""
    reading = context.reading()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(reading.attend)
        nursery.start_soon(reading.watch)
        manager = Manager(context, reading)
        await manager.run(nursery)
        nursery.cancel_scope.cancel()
    manager.close()


class Manager:
    def __init__(self, context: MountContext, reading: ReadProcess) -> None:
        directories = context.directories
        self.context = context
        self.options = published_options(directories.run, context.options)
        self.counters = context.row(MANAGER_ROW)
        self.content, self.records = context.open_content(), context.open_records()
        self.catalogue = Catalogue(self.records)
        self.client = context.client(self.counters, reading.read)
        lister = Lister(self.catalogue, self.client)
        interlock = Interlock(directories.run.fetch_lock)
        self._full_disk = Episode(directories.run.full_disk)
        fetcher = Fetcher(self.client, self.content, interlock, self._full_disk, self.counters)
        self._events = EventWriter(context.event_writer, self.counters)
        self.client_pipe = ClientPipe(directories.run, client_terms_of(self.options), self.counters)
        self.warmer = Warmer(
            self.catalogue,
            lister,
            fetcher,
            self.content,
            self.counters,
            self.options.sample_max_bytes,
            self._events.note,
        )
        self.cache = CacheControl(self.content, self.options.policy, self.options.large_share, self.counters)
        known = self.catalogue.fact(_SOURCE_BYTES_FACT)
        self.survey = Survey(lister, _SOURCE_BYTES.unpack(known)[0] if known else 0)
        self.training = Training(
            self.catalogue,
            lister,
            self.records,
            self.cache,
            self.counters,
            directories.run.trainers,
            directories.scores,
            self.options,
            lambda: self.access_log.trace,
            lambda: self.prefetcher.wake(),
        )
        self.prefetcher = Prefetcher(
            self.cache,
            self.catalogue,
            fetcher,
            self.client,
            self.content,
            self.counters,
            self.options.sample_max_bytes,
            self.options.fetches,
            lambda inode: self.options.substitute_when == "miss" and self.training.redirects.has_stand_in(inode),
        )
        self._packer = Packer(
            self.cache,
            self.catalogue,
            fetcher,
            self.client,
            context.source,
            self.content,
            self.counters,
            PackageDirectory(context.root_fd, directories.package_key),
        )
        self.access_log = AccessLog(
            directories.run,
            self.options.access_log,
            self.options.trace,
            self.path_of,
            size_of=self._size_of,
            dataset_of=self.training.trainers.number_of_list,
        )
        self._superseded = Superseded(self.catalogue, self.content, self.cache)
        self.hook_server = HookServer(self.training.guide, self.counters.add)
        self._reserve_failed = False

    async def run(self, nursery: trio.Nursery) -> None:
        try:
            with exit_if_corrupt():
                self.cache.restore(self._budget_bytes(), self.catalogue.fact(_STATE_FACT))
        except StoreError as exc:
            # Taken stock of as soon as the disk allows it (`reconcile`).
            log.warning("%s: nothing enters or leaves the cache until the disk can be written to", exc)
        self.training.begin(self.catalogue.fact(_RATIO_FACT))
        nursery.start_soon(self.client.watch)
        try:
            nursery.start_soon(self.hook_server.serve, listen(self.context.directories.run.hook_socket))
        except OSError as exc:
            log.warning(
                "cannot make the hook's socket (%s): trainers cannot attach; make cache_dir writable, and mount again",
                exc.strerror,
            )
        nursery.start_soon(answer_questions, self.context.control_listener, ControlTable(self, nursery), nursery)
        nursery.start_soon(self._fold_events, self.context.event_reader, self._read_workers)
        nursery.start_soon(self._fold_events, self.client_pipe.fd, self.client_pipe.read)
        nursery.start_soon(self._write_log)
        nursery.start_soon(self._keep_house)
        nursery.start_soon(self._save_now_and_then)
        nursery.start_soon(self._superseded.run)
        nursery.start_soon(self.warmer.run)
        nursery.start_soon(self.prefetcher.run)
        if self.options.packages == "source":
            nursery.start_soon(self._packer.run)
        if self.options.capacity.unit == "percent":
            nursery.start_soon(self.survey.run, self._measured)
        with trio.open_signal_receiver(signal.SIGTERM) as signals:
            self.counters.add("process_starts")
            async for _ in signals:
                break
        self.training.end()

    def close(self) -> None:
        self._events.flush()
        for read in (self._read_workers, self.client_pipe.read):
            while events := read():
                self._fold(events)
        try:
            self.training.scoring.save()
            with exit_if_corrupt():
                self._save()
        except (SpiderfsError, OSError) as exc:
            log.warning("the order of the cached files could not be saved: %s", exc)
        self.access_log.close()
        # The store is not closed: a thread that was given up on may still come back from the source and write to it.

    # -- events

    def _read_workers(self) -> list[Access]:
        return read_events(self.context.event_reader)

    async def _fold_events(self, fd: int, read: Callable[[], list[Access]]) -> None:
        while True:
            await trio.lowlevel.wait_readable(fd)
            self._fold(read())
            self.prefetcher.wake()
            await self.training.redirects.publish()
            await trio.sleep(FOLD_PAUSE_S)

    def _fold(self, events: list[Access]) -> None:
        try:
            with exit_if_corrupt():
                self.cache.fold(events)
            self.training.note(events)
        except SpiderfsError as exc:
            # What was fetched stays in landing until it is pushed out; nobody waits for it to be kept.
            log.warning("%s", exc)
        self.access_log.note(events)

    def path_of(self, inode: int) -> bytes:
        try:
            return self.catalogue.node(inode).path
        except Stale:
            return b"?"

    def _size_of(self, inode: int) -> int:
        try:
            return self.catalogue.node(inode).stat.size
        except Stale:
            return 0

    async def _write_log(self) -> None:
        while True:
            self._events.flush()
            self.access_log.write()
            self.counters.set_source_reachable(self.client.reachable)
            await trio.sleep(LOG_INTERVAL_S)

    # -- upkeep

    async def _keep_house(self) -> None:
        restarts = -1
        while True:
            # A worker that was killed may have written what it could not record any more.
            before, restarts = restarts, self.context.counters.totals()["worker_restarts"]
            await trio.to_thread.run_sync(self._free, restarts != before)
            self.cache.engine.compare_paces(time.time())
            await self.training.declared_lists.let_go()
            with exit_if_corrupt():
                self.content.clear_dead_readers()
                self.records.clear_dead_readers()
            try:
                self.records.reserve()
            except OSError as exc:
                if not self._reserve_failed and self._full_disk.begin():
                    log.warning("no room to keep for names (%s): new ones may soon not be found", exc.strerror)
                self._reserve_failed = True
            else:
                if self._reserve_failed:
                    self._full_disk.end()
                self._reserve_failed = False
            await trio.sleep(HOUSEKEEPING_INTERVAL_S)

    def _free(self, killed: bool) -> None:
        """Give the disk back what blocks took that were dropped while they were in use, in a thread."""
        try:
            with exit_if_corrupt():
                if killed:
                    self.content.sweep()
                self.content.free()
        except (SpiderfsError, OSError) as exc:
            log.warning("%s", exc)
        try:
            self.content.reserve()
        except OSError as exc:
            log.debug("no room to keep for making room: %s", exc)

    async def _save_now_and_then(self) -> None:
        took_s = 0.0
        while True:
            await trio.sleep(max(SAVE_INTERVAL_S, took_s / SAVE_SHARE))
            started = time.monotonic()
            try:
                await self.training.scoring.save_in_thread()
                with exit_if_corrupt():
                    self._save()
                    self.access_log.flush()
                    self.cache.reconcile()
            except (SpiderfsError, OSError) as exc:
                log.warning("%s", exc)
            took_s = time.monotonic() - started

    def _save(self) -> None:
        self.catalogue.record_fact(_STATE_FACT, self.cache.saved_state())
        self.catalogue.record_fact(_RATIO_FACT, self.training.ratio.state())

    # -- the capacity and other things that can be changed

    def _budget_bytes(self) -> int:
        return self.options.capacity.budget_bytes(self.survey.source_bytes)

    def _measured(self) -> None:
        try:
            with exit_if_corrupt():
                self.cache.set_capacity(self._budget_bytes())
                if self.survey.done:
                    self.catalogue.record_fact(_SOURCE_BYTES_FACT, _SOURCE_BYTES.pack(self.survey.source_bytes))
        except StoreError as exc:
            log.warning("%s: the capacity stays as it is", exc)

    async def evict(self, patterns: Sequence[Pattern]) -> None:
        """Drop what the patterns mean from the cache."""
        await self.warmer.evict(patterns, self.cache.evict)

    def change(self, options: Options, nursery: trio.Nursery) -> None:
        """Take over options of which some live ones are different; the workers follow within a moment.

        Raises SpiderfsError where that cannot be done, and then nothing has changed but what was evicted.
        """
        before = self.options
        # Done first, and shown when it is done: on a full disk any of it may fail.
        self._act_on(before, options)
        try:
            publish_options(self.context.directories.run, options)
        except SpiderfsError:
            self._act_on(options, before)
            raise
        self.options = options
        if options.capacity != before.capacity and options.capacity.unit == "percent" and not self.survey.done:
            nursery.start_soon(self.survey.run, self._measured)
        if options.policy != before.policy:
            # The new policy knows nothing of what the old one had learned and published.
            nursery.start_soon(self.training.policy_changed)
        self.training.change(options)
        faults = options.source_faults()
        for name in FAULTS:
            if faults[name] != before.source_faults()[name]:
                self.context.source.faults.set(name, faults[name])
        self.client_pipe.change(client_terms_of(options))

    def _act_on(self, before: Options, after: Options) -> None:
        if after.capacity != before.capacity:
            self.cache.set_capacity(after.capacity.budget_bytes(self.survey.source_bytes))
        if after.policy != before.policy:
            self.cache.set_policy(after.policy)

    # -- what control files show

    def uptime_s(self) -> float:
        return time.time() - self.context.mounted_at_s

    def gauges(self) -> dict[str, float]:
        """The metrics of `metrics.GAUGES`, computed now."""
        usage = self.content.usage()
        totals = self.context.counters.totals()
        opens = totals["opens"]
        return {
            "capacity_bytes": usage.capacity_bytes,
            "used_bytes": usage.used_bytes,
            "entries": usage.landing_entries + usage.kept_entries,
            "disk_bytes": self.content.file_bytes(),
            "known_files": self.catalogue.known_files(),
            "hit_ratio": totals["opens_hit"] / opens if opens else 0.0,
            "origin_bytes_per_open": totals["origin_bytes"] / opens if opens else 0.0,
            "source_reachable": float(self.context.counters.source_reachable()),
            "workers": self.options.workers,
            "uptime_seconds": self.uptime_s(),
        }
