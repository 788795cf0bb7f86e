"""The things that all processes of one mount share; the supervisor makes them before it forks."""

from __future__ import annotations

import logging
import os
import random
import socket
from collections.abc import Awaitable, Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import trio

from spiderfs.archives.indexer_process import Indexers
from spiderfs.archives.source import ArchiveSource
from spiderfs.core.memory import memory_bounds
from spiderfs.core.rooms import NO_VIEWS, ViewsRoom
from spiderfs.daemon.cache_directory import bind_to_view, same_file
from spiderfs.daemon.pipes import open_pipe
from spiderfs.daemon.restarts import REFUSED_AFTER
from spiderfs.errors import ConfigError, MountError, StoreError
from spiderfs.forms.partition import MOST_AUGMENTED, FormSizes, Split, view_share
from spiderfs.forms.profile import Record, landing_bytes, load_record
from spiderfs.fuse.kernel import Kernel
from spiderfs.fuse.resent_requests import ResentRequests
from spiderfs.fuse.session import MAX_WAITING
from spiderfs.linux import steady_clock
from spiderfs.metrics import Counters, SharedCounters
from spiderfs.options.model import Options
from spiderfs.options.types import AUTO, ONE_FORM
from spiderfs.packages import DIRECTORY
from spiderfs.protocol.requests import socket_address
from spiderfs.shared.layout import DATA_FILE, EXTENTS_FILE, EXTENTS_MAP_FILE, CacheLayout, RunLayout
from spiderfs.shared.read_log import ReadLog
from spiderfs.shared.shared_memory import MANAGER, Flights, Notice, SharedSlots
from spiderfs.sources.client import Read, SourceClient, SourceLimits
from spiderfs.sources.in_flight import InFlight
from spiderfs.sources.listed_files import ListedSource, read_list
from spiderfs.sources.members import Members
from spiderfs.sources.node_names import live_name, own_url, weights_of
from spiderfs.sources.object_source import ObjectSource, Place
from spiderfs.sources.open import OpenedSource, identity_between_nodes, is_url
from spiderfs.sources.peers import PeerSource
from spiderfs.sources.ranges import Grids, RangeSource
from spiderfs.sources.read_process import ReadProcess
from spiderfs.sources.single_flight import RecentTimeouts
from spiderfs.sources.slow import SlowSettings, SlowSource
from spiderfs.sources.source import Source
from spiderfs.store import environment
from spiderfs.store.content import LmdbContent, RecordWriter
from spiderfs.store.disks import Disks
from spiderfs.store.records import LmdbRecords
from spiderfs.store.spare_records import SharedRows, SpareRecords
from spiderfs.store.store import BLOCK_BYTES, Content, Records
from spiderfs.vfs.catalogue import TABLES, Catalogue
from spiderfs.vfs.control_files import CONTROL_DIRECTORY
from spiderfs.vfs.fetch_lock import FetchLock
from spiderfs.vfs.fetcher import Episode, Fetcher, ShownViews
from spiderfs.vfs.large_files import Touches
from spiderfs.vfs.lister import Lister
from spiderfs.vfs.on_demand import Supply
from spiderfs.vfs.redirects import PendingReads
from spiderfs.vfs.unstored_bytes import UnstoredBytes
from spiderfs.views.recipe import NO_VIEW, ORIGINAL, Recipe
from spiderfs.views.tree import Forms, MakerPool, TreeSource, ViewSource, unknown_length

log = logging.getLogger(__name__)


class Partition(NamedTuple):
    """`split` is that of the capacity, None if there is none.

    `view_share` is the share of all files that the root shows as views, if it shows a view at all, and
    `partials_share` the share of the capacity that augmented samples may take.
    """

    split: Split | None
    view_share: float
    partials_share: float

    def status(self, view: bool) -> dict[str, str | float | None]:
        """`view`: whether the root shows a view."""
        split = None if self.split is None else str(self.split)
        return {"split": split, "view_share": self.view_share if view else 0.0}


def chosen_partition(options: Options, record_path: Path) -> Partition:
    """The partition of a mount with these options; raises ConfigError if it needs a profile that is not there."""
    if options.forms == ONE_FORM:
        return Partition(None, 1.0, options.partials_share)
    view = None if options.view == NO_VIEW else options.view
    if options.forms == AUTO:
        record = load_record(record_path)
        profile = None if record is None else record.profile
        if record is None or profile is None or (view is not None and view not in profile.views):
            raise _unprofiled(options, "--loader MODULE:FUNCTION" + (f" --view {view}" if view is not None else ""))
        split = replace(profile, cache_bytes=float(_capacity_bytes(options, record))).best(view)
    else:
        split = Split.parse(options.forms)
        record = load_record(record_path) if split.decoded else None
        if split.decoded and (record is None or view not in record.sample_bytes):
            raise _unprofiled(options, f"--view {view}")
    share = 0.0
    if split.decoded and record is not None and view is not None:
        capacity = _capacity_bytes(options, record)
        sizes = FormSizes(record.sample_bytes[NO_VIEW], record.sample_bytes[view], 0.0)
        share = view_share(split, capacity, landing_bytes(capacity, sizes), record.samples, sizes)
    return Partition(split, share, min(split.augmented, MOST_AUGMENTED))


class NextPartition:
    """The partition that a mount would have if it were mounted now: see `chosen_partition`."""

    def __init__(self, record_path: Path) -> None:
        self._record_path = record_path
        self._of: tuple[object, ...] = ()
        self._found: Partition | None = None

    def found(self, options: Options) -> Partition | None:
        """None if these options need another profile; a new one takes some tenths of a second with forms=auto."""
        try:
            status = os.stat(self._record_path)
            written = status.st_ino, status.st_mtime_ns
        except OSError:
            written = 0, 0
        of = (*written, options.forms, options.view, options.capacity, options.partials_share)
        if of != self._of:
            self._of = of
            try:
                self._found = chosen_partition(options, self._record_path)
            except ConfigError:
                self._found = None
        return self._found


def _capacity_bytes(options: Options, record: Record) -> int:
    """A share of the source is one of what was profiled."""
    return options.capacity.budget_bytes(int(record.samples * record.sample_bytes[NO_VIEW]))


def _unprofiled(options: Options, words: str) -> ConfigError:
    return ConfigError(
        f"forms={options.forms} needs to know what samples take: mount without forms once and run"
        f" 'spiderfs profile {options.mountpoint} {words}'"
    )


# Files that are pushed ahead and may wait for the source at a time: for each fetch of a worker, and in all, from a
# directory and from an object store. At first it is a few, and more only while more of them bring more
# (`core/plans/fetch_limits.py`). From a source 5 ms away, 16 at a time are 3,000 files a second at most; object stores
# are tens of milliseconds away.
PUSHES_PER_FETCH, MOST_PUSHES, MOST_PUSHES_OF_STORES = 4, 96, 256

SUPERVISOR_ROW, MANAGER_ROW, FIRST_WORKER_ROW = 0, 1, 2
_BACKLOG = 128
# Threads of one process, which are made one after the other, hardly ever have numbers that are equal modulo this. A
# reader whose sample was left out of a full table of samples, half a megabyte, may get a substitute.
_PUSHER_THREADS, _PUSHED_SAMPLES = 1 << 10, 1 << 16
# One that was left out may be asked of yet another node, if the nodes' lists of members differ.
_ASKED_SAMPLES = 1 << 16
# A sample that was left out of this table is stored in vain.
_PASSING_SAMPLES = 1 << 12


class MountContext:
    def __init__(self, options: Options, opened: OpenedSource, missing: Collection[Path] = ()) -> None:
        """All cache locks but those of the directories in `missing` are held; raises ConfigError, MountError."""
        layout = CacheLayout(options.cache_dir.first)
        self.options, self.layout = options, layout
        others, gone = ([CacheLayout(path).content for path in paths] for paths in (options.cache_dir.others, missing))
        self.disks = Disks(layout.content, others, gone)
        self.partition = chosen_partition(options, layout.profile)
        self.forms = Forms(
            options.recipes,
            options.shown_form,
            self.partition.view_share,
            partial(_fingerprint, options),
            steady_clock.now(),
        )
        # Later the processes would find it out one by one.
        self.forms.fingerprint(self.forms.shown)
        self.control_listener = open_run_directory(layout.run)
        self.slow = SlowSettings.in_memory(**options.slow_settings())
        """What makes the source slow and unreliable, for experiments."""
        self.identity = opened.identity
        """See `OpenedSource`."""
        self.shared_identity = identity_between_nodes(opened)
        """See `identity_between_nodes`."""
        self.asked_by_peers = SharedSlots(_ASKED_SAMPLES)
        """Those of `members`: the versions that other nodes have asked for. They are read from the source alone."""
        self.members: Members | None = None
        """The nodes that share out the samples, by the option `peers`."""
        if options.peers:
            self.members = Members(1 + options.workers, self.shared_identity, self.asked_by_peers)
            # The addresses of a name are found by the manager: a name server may take its time.
            if not live_name(options.peers):
                self.members.change(weights_of(options.peers), (own_url(options.peers, options.peer_self),))
        self.event_reader, self.event_writer = open_pipe()
        self.memory = memory_bounds(options.memory_limit, options.workers)
        shown = RangeSource(_with_names(SlowSource(opened, self.slow), options))
        self.source = _with_archives(shown, options, layout.archives)
        self.connect: Callable[[], object] = opened.connect if isinstance(opened, ObjectSource) else lambda: None
        """Has a process connect to an object store before it asks something."""
        self.root_fd = opened.root_fd
        """A descriptor of the source's root, which stays valid when the root is renamed; None for object stores."""
        self.counters = SharedCounters(2 * _rows_of_processes(options) - MANAGER_ROW)
        self.resent = ResentRequests(options.workers, MAX_WAITING, REFUSED_AFTER)
        self.names_asked = SharedSlots(options.workers)
        """The workers, counted from 1, that have the kernel ask for each name.

        In an immutable mount the kernel trusts names for good, until a trainer comes that may be given substitutes.
        From then on each worker answers names for the next open alone. The kernel has to drop the names that it trusted
        before, and with them the pages of files.
        """
        self.notice = Notice(options.workers)
        self.flights = Flights(options.workers)
        self.unstored = UnstoredBytes(self.memory.unstored)
        self.lately = UnstoredBytes(self.memory.recent)
        """The small files that were fetched last."""
        self.pending_reads = PendingReads()
        self.pusher_threads = SharedSlots(_PUSHER_THREADS)
        """The threads that push files ahead: what they look up and read is asked for by the mount and by no reader."""
        self.pushed_samples = SharedSlots(_PUSHED_SAMPLES)
        """The inodes of pushed samples that wait for readers, who need no substitutes: the kernel has them, or soon."""
        self.passing_samples = SharedSlots(_PASSING_SAMPLES)
        """Those of them that are being fetched, and that the store is not to take: the engine would not keep them."""
        self.touches = Touches()
        self.read_log = ReadLog(options.workers, options.mountpoint)
        self.spare_nodes = SharedRows()
        self.timeouts = RecentTimeouts()
        self.supervisor_pid = os.getpid()
        self._later_parts: set[Path] = set()

    @property
    def mounted_at_s(self) -> float:
        return self.forms.mounted_at_s

    def begin_run_directory(self) -> None:
        """Make `run/` again, for processes that are started from now on; raises OSError."""
        listener = open_run_directory(self.layout.run)
        self.control_listener.close()
        self.control_listener = listener

    def lost_part(self, lock: int) -> Path | None:
        """A part of the cache directory that the mount needs and that is gone; `lock` is the descriptor of its lock."""
        layout = self.layout
        missing = self._missing_part() if same_file(layout.lock, lock) else layout.lock
        if missing is not None:
            # The cache begins again, so the parts that come later come again.
            self._later_parts.clear()
        return layout.cache if missing is not None and not layout.cache.is_dir() else missing

    def _missing_part(self) -> Path | None:
        layout = self.layout
        needed = [layout.run.control_socket, *(environment / DATA_FILE for environment in layout.environments)]
        # These come with the first file that needs them.
        for path in (layout.content / EXTENTS_FILE, layout.content / EXTENTS_MAP_FILE):
            if path in self._later_parts or os.path.lexists(path):
                self._later_parts.add(path)
                needed.append(path)
        return next((path for path in needed if not os.path.lexists(path)), None)

    @property
    def pushes(self) -> int:
        """How many files that are pushed ahead may wait for the source at a time."""
        if not self.options.immutable:
            return 0
        most = MOST_PUSHES_OF_STORES if is_url(self.options.source) else MOST_PUSHES
        return min(PUSHES_PER_FETCH * self.options.fetches, most)

    def claim_store(self) -> str | None:
        """Mark the store, which no one has open, as in use; returns why it was wiped, if it was. Raises MountError."""
        wiped = environment.claim(self.layout.store)
        self.disks.bind()
        archives = f" {self.options.archives}".encode() if self.options.archives else b""
        bind_to_view(self.layout, self.forms.of_root + archives)
        return wiped

    def asks_for_names(self) -> bool:
        """Whether the kernel asks a worker for each name, or soon may, since readers may be given substitutes."""
        return not self.notice.taken_over() or any(
            index + 1 in self.names_asked for index in range(self.options.workers)
        )

    def row(self, index: int) -> Counters:
        return self.counters.row(index)

    def reading(self, row: int, kernel: Kernel, delivers: bool, cautious: bool = False) -> ReadProcess:
        """Fork the reading process of the process with this row of counters.

        Call this before any thread is made and before a store is opened.
        One that `delivers` keeps the FUSE descriptor, where there is one, and writes answers to requests that wait for
        the bytes to it, and what it pushes; any other leaves the kernel. `cautious`: see `ReadProcess`.
        """
        options = self.options
        deliver_to = kernel.descriptor if delivers else None
        longest = max(unknown_length(options.sample_max_bytes), BLOCK_BYTES)
        makers = MakerPool(options.view_workers, options.sample_max_bytes, int(options.view_megapixels * 1e6))
        # A row of its own: two processes that add to one row could lose a count.
        counters = self.row(row + _rows_of_processes(options) - MANAGER_ROW)
        originals: Source = self.source
        if self.members is not None:
            peer_counts = self.members.row(row - MANAGER_ROW)
            # A reader gives up after the time limit of the source, which must have its turn before that.
            longest_s = options.source_timeout_s / 2
            originals = PeerSource(
                self.source, self.members, options.peer_timeout, longest_s, peer_counts, self.asked_by_peers
            )
        writer = RecordWriter(self.layout.content, self.disks)
        # The manager may never read anything.
        connect = self.connect if row != MANAGER_ROW else lambda: None
        source = ViewSource(originals, self.forms, makers, options.sample_max_bytes, counters.add)
        # A reader's fetch never queues behind files that are pushed ahead; no push comes to the manager.
        at_a_time = options.fetches if row == MANAGER_ROW else options.fetches + self.pushes
        in_flight = InFlight(self.memory.in_flight, self.row(row).set_in_flight)
        return ReadProcess(
            source,
            at_a_time,
            longest,
            kernel.leave if deliver_to is None else lambda: None,
            deliver_to,
            cautious,
            writer,
            writer.write_part,
            connect,
            in_flight,
            self.flights.awaited,
        )

    @property
    def archives(self) -> ArchiveSource | None:
        """The source, if neighbours in its archives may be read together: as they are, and from nowhere else."""
        source = self.source
        if isinstance(source, ArchiveSource) and self.members is None and self.forms.shown == ORIGINAL:
            return source
        return None

    def views_room(self, catalogue: Catalogue) -> ViewsRoom:
        """What of the cache is for views, where the root shows both these and originals."""
        if (split := self.partition.split) is None or not self.forms.mixed:
            return NO_VIEWS
        return ViewsRoom(split.views, catalogue.is_shown_as_view)

    def supply(
        self,
        counters: Counters,
        read: Read,
        content: Content,
        records: Records,
        full_disk: Episode,
        caught_up: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint,
        process: int = MANAGER,
        in_flight: InFlight | None = None,
    ) -> Supply:
        """What a process brings files by: `read` reads files for it; the last three are as for `Fetcher`."""
        is_worker = process != MANAGER
        client, catalogue = self._client(counters, read), Catalogue(records, forms=self.forms)
        views = ShownViews(catalogue, self.options.sample_max_bytes)
        fetcher = Fetcher(
            client,
            content,
            FetchLock(self.layout.run.fetch_lock),
            full_disk,
            counters,
            alone=is_worker and self.options.workers == 1,
            caught_up=caught_up,
            views=views,
            unstored=self.unstored if is_worker else None,
            lately=self.lately,
            passing=self.passing_samples if is_worker else (),
            flights=self.flights,
            process=process,
            memory=self.memory,
            in_flight=in_flight,
        )
        lister = Lister(catalogue, client, since_s=self.mounted_at_s, mountpoint=os.fsencode(self.options.mountpoint))
        grids = Grids(self.layout.run.grids)
        read_log = self.read_log.of_worker(process - 1) if is_worker else self.read_log
        return Supply(content, records, client, catalogue, lister, fetcher, counters, views, grids, read_log)

    def _client(self, counters: Counters, read: Read) -> SourceClient:
        # A source that is a mount of spiderfs has control files too.
        shown = TreeSource(self.source, self.forms, (CONTROL_DIRECTORY, DIRECTORY))
        return SourceClient(
            shown,
            _limits(self.options),
            rng=random.Random(),
            on_event=counters.add,
            on_reachable=counters.set_source_reachable,
            read=read,
            timeouts=self.timeouts,
        )

    def open_content(self) -> LmdbContent:
        """Open the store, only for reading if its disk cannot be written; raises StoreError if there is no store."""
        try:
            return LmdbContent(self.layout.content, disks=self.disks)
        except StoreError as exc:
            log.warning(
                "%s: the mount continues, and puts nothing into the cache; free the disk or make it writable", exc
            )
            return LmdbContent(self.layout.content, readonly=True, disks=self.disks)

    def open_records(self) -> SpareRecords:
        """Open the records of names: on the disk if it can be read, else in memory alone."""
        for readonly in (False, True):
            try:
                return SpareRecords(LmdbRecords(self.layout.names, TABLES, readonly), TABLES, self.spare_nodes)
            except StoreError as exc:
                log.warning("%s: the mount continues, and keeps new names in memory", exc)
        return SpareRecords(None, TABLES, self.spare_nodes)


def _limits(options: Options) -> SourceLimits:
    return SourceLimits(
        timeout_s=options.source_timeout_s,
        scan_timeout_s=20 * options.source_timeout_s,
        attempts=options.source_attempts,
        max_concurrent=options.fetches,
    )


def _with_names(source: Source, options: Options) -> Source:
    """The source with the names of a list, where options name one; raises ConfigError."""
    if options.names is None:
        return source
    prefix = Place.parse(str(options.source)).prefix if is_url(options.source) else ""
    return ListedSource(source, read_list(options.names, prefix))


def _with_archives(source: Source, options: Options, indices: Path) -> Source:
    """The source with its archives as directories, where options ask for that; raises MountError."""
    indexers = Indexers(_limits(options))
    for depth in range(options.archive_depth):
        directory = indices / str(depth)
        shown = ArchiveSource(source, options.archive_kinds, directory, options.sample_max_bytes, indexers)
        try:
            shown.indices.forget_failures()
        except OSError as exc:
            raise MountError(f"{exc.filename} cannot be deleted ({exc.strerror}): delete it yourself") from exc
        source = shown
    return source


def _fingerprint(options: Options, recipe: Recipe) -> bytes:
    # Where no view is used, no one waits until Pillow is imported.
    from spiderfs.views.making import fingerprint

    return fingerprint(recipe, int(options.view_megapixels * 1e6), options.sample_max_bytes)


def _rows_of_processes(options: Options) -> int:
    """The rows of supervisor, manager and workers; those of the reading processes of the latter two come behind."""
    return FIRST_WORKER_ROW + options.workers


def open_run_directory(run: RunLayout) -> socket.socket:
    """Make `run/` an empty directory, and return its socket for control questions; raises OSError."""
    run.directory.mkdir(mode=0o700, exist_ok=True)
    for leftover in run.directory.iterdir():
        leftover.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with socket_address(run.control_socket) as address:
        listener.bind(address)
    listener.listen(_BACKLOG)
    run.control_socket.chmod(0o600)
    return listener
