"""What the processes of one mount have in common, made by the supervisor before it forks."""

from __future__ import annotations

import json
import logging
import os
import random
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from spiderfs.daemon.cache_directory import CHOOSE_ANOTHER
from spiderfs.daemon.pipes.event_pipe import open_pipe
from spiderfs.errors import MountError, SpiderfsError, StoreCorrupt, StoreError
from spiderfs.metrics import Counters, SharedCounters
from spiderfs.options.model import Options
from spiderfs.packages.directory import DIRECTORY
from spiderfs.shared.bypass_terms import Terms, pid_namespace
from spiderfs.shared.layout import DATA_FILE, CacheLayout, RunLayout
from spiderfs.sources.client import Read, SourceClient, SourceLimits
from spiderfs.sources.faults import FaultState
from spiderfs.sources.open import OpenedSource, open_source
from spiderfs.sources.read_process import ReadProcess
from spiderfs.sources.recent_timeouts import RecentTimeouts
from spiderfs.store.content import LmdbContent
from spiderfs.store.records import LmdbRecords
from spiderfs.store.spare_records import SharedRows, SpareRecords
from spiderfs.store.store import BLOCK_BYTES
from spiderfs.vfs.catalogue import TABLES
from spiderfs.vfs.pending_reads import PendingReads
from spiderfs.vfs.permissions import Ownership
from spiderfs.vfs.rules import Settings

log = logging.getLogger(__name__)

SUPERVISOR_ROW, MANAGER_ROW, FIRST_WORKER_ROW = 0, 1, 2
_BACKLOG = 128


def same_file(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except OSError:
        return False


@dataclass
class MountContext:
    options: Options
    directories: CacheLayout
    source: OpenedSource
    counters: SharedCounters
    event_reader: int
    event_writer: int
    control_listener: socket.socket
    pending_reads: PendingReads = field(default_factory=PendingReads)
    brought: PendingReads = field(default_factory=PendingReads)
    spare_nodes: SharedRows = field(default_factory=SharedRows)
    timeouts: RecentTimeouts = field(default_factory=RecentTimeouts)
    supervisor_pid: int = field(default_factory=os.getpid)
    mounted_at_s: float = field(default_factory=time.time)

    def begin_run_directory(self) -> None:
        """Make `run/` anew, for processes that are started from now on; raises OSError."""
        listener = open_run_directory(self.directories.run)
        self.control_listener.close()
        self.control_listener = listener

    def lost_part(self, lock: int) -> Path | None:
        """What a mount in use cannot do without and is not there any more; `lock` is the descriptor of its lock."""
        layout = self.directories
        if not same_file(layout.lock, lock):
            return layout.cache if not layout.cache.is_dir() else layout.lock
        needed = (layout.run.control_socket, *(environment / DATA_FILE for environment in layout.environments))
        return next((path for path in needed if not os.path.lexists(path)), None)

    def row(self, index: int) -> Counters:
        return self.counters.row(index)

    def reading(
        self, before: Callable[[], object] = lambda: None, deliver_to: int | None = None, cautious: bool = False
    ) -> ReadProcess:
        """A process that reads for this one; make it before any thread, and before a store is opened: it is forked.

        It calls `before` first. `deliver_to` is the FUSE descriptor, for what waits there for the bytes. `cautious`:
        see `ReadProcess`.
        """
        longest = max(self.options.sample_max_bytes, BLOCK_BYTES)
        return ReadProcess(self.source.everything, self.options.fetches, longest, before, deliver_to, cautious)

    def client(self, counters: Counters, read: Read) -> SourceClient:
        options = self.options
        limits = SourceLimits(
            timeout_s=options.source_timeout_s,
            scan_timeout_s=max(options.source_timeout_s, 20 * options.source_timeout_s),
            attempts=options.source_attempts,
            max_concurrent=options.fetches,
        )
        rng = random.Random()
        return SourceClient(
            self.source.shown, limits, rng=rng, on_event=counters.add, read=read, timeouts=self.timeouts
        )

    def open_content(self) -> LmdbContent:
        """The store, as a disk that can only be read has it if need be; raises StoreError where there is none."""
        try:
            return LmdbContent(self.directories.content)
        except StoreCorrupt:
            raise
        except StoreError as exc:
            log.warning(
                "%s: the mount goes on, and puts nothing into the cache; free the disk or make it writable", exc
            )
            return LmdbContent(self.directories.content, readonly=True)

    def open_records(self) -> SpareRecords:
        """The names, as far as the disk has them."""
        for readonly in (False, True):
            try:
                return SpareRecords(LmdbRecords(self.directories.names, TABLES, readonly), TABLES, self.spare_nodes)
            except StoreCorrupt:
                raise
            except StoreError as exc:
                log.warning("%s: the mount goes on, and keeps new names in memory", exc)
        return SpareRecords(None, TABLES, self.spare_nodes)


def create_context(options: Options) -> MountContext:
    """The caller holds the cache directory's lock and has claimed the store; raises ConfigError, MountError."""
    directories = CacheLayout(options.cache_dir)
    listener = open_run_directory(directories.run)
    faults = FaultState.create(directories.run.faults, **options.source_faults())
    reader, writer = open_pipe()
    return MountContext(
        options=options,
        directories=directories,
        source=open_source(os.fspath(options.source), faults, hidden=DIRECTORY),
        counters=SharedCounters(FIRST_WORKER_ROW + options.workers),
        event_reader=reader,
        event_writer=writer,
        control_listener=listener,
    )


def open_run_directory(run: RunLayout) -> socket.socket:
    """Empty `run/`, or make it; returns the socket there for control questions. Raises OSError."""
    run.directory.mkdir(mode=0o700, exist_ok=True)
    for leftover in run.directory.iterdir():
        leftover.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with _Short(run.control_socket) as address:
        listener.bind(address)
    listener.listen(_BACKLOG)
    run.control_socket.chmod(0o600)
    return listener


class _Short:
    """An address for a Unix socket whose path may be longer than the 107 bytes that sockaddr_un holds (unix(7))."""

    def __init__(self, path: Path) -> None:
        self._directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._name = path.name

    def __enter__(self) -> str:
        return f"/proc/self/fd/{self._directory}/{self._name}"

    def __exit__(self, *_: object) -> None:
        os.close(self._directory)


def socket_address(path: Path) -> _Short:
    """Use as `with socket_address(path) as address: connect(address)`."""
    return _Short(path)


def settings_of(options: Options) -> Settings:
    """The part of the options that requests depend on."""
    return Settings(
        ttl_s=options.ttl,
        negative_ttl_s=options.negative_ttl,
        dir_ttl_s=options.dir_ttl,
        sample_max_bytes=options.sample_max_bytes,
        wait_for_fetches=options.substitute_when == "late",
        ownership=Ownership(options.uid, options.gid, options.file_mode, options.dir_mode),
        checks_permissions=options.allow_other,
    )


def client_terms_of(options: Options) -> Terms:
    """The part of the options that readers around FUSE depend on."""
    settings = settings_of(options)
    return Terms(
        ttl_s=settings.ttl_s,
        sample_max_bytes=settings.sample_max_bytes,
        wait_for_fetches=settings.wait_for_fetches,
        substitute=options.substitute,
        checks_permissions=settings.checks_permissions,
        pid_namespace=pid_namespace(),
        **settings.ownership._asdict(),
    )


def publish_options(run: RunLayout, options: Options) -> None:
    """Let every process know options that were changed live; raises SpiderfsError where that is not possible."""
    text = json.dumps({row.name: row.value for row in options.as_table()})
    temporary = run.options.with_suffix(".new")
    try:
        try:
            temporary.write_text(text)
            temporary.rename(run.options)
        except OSError:
            # The disk is full, and a smaller capacity may be what is told: the old file's block is there to be used.
            temporary.unlink(missing_ok=True)
            with open(run.options, "r+b", buffering=0) as file:
                file.write(text.encode().ljust(run.options.stat().st_size))
    except OSError as exc:
        raise SpiderfsError(f"the options cannot be written to {run.directory} ({exc.strerror})") from exc


def published_options(run: RunLayout, options: Options) -> Options:
    """`options`, brought up to what was published last; as they are where that has gone with the cache directory."""
    try:
        values = json.loads(run.options.read_text())
    except (OSError, ValueError) as exc:
        log.warning("the options changed while mounted are lost (%s): set them again with spiderfs config", exc)
        return options
    for row in options.as_table():
        if row.live and values[row.name] != row.value:
            options = options.changed(row.name, values[row.name])
    return options


def bind_to_source(directories: CacheLayout, source: Path) -> None:
    """A cache directory belongs to the source it was first used with; raises MountError for another one."""
    path = os.fsencode(os.path.realpath(source))
    try:
        bound_to = directories.source.read_bytes().removesuffix(b"\n") if directories.source.exists() else path
        if bound_to != path:
            raise MountError(
                f"the cache directory {directories.cache} holds the files of {os.fsdecode(bound_to)}: "
                f"{CHOOSE_ANOTHER}, or delete it"
            )
        directories.source.write_bytes(path + b"\n")
    except OSError as exc:
        raise MountError(
            f"the cache directory {directories.cache} cannot be used ({exc.strerror}): {CHOOSE_ANOTHER}"
        ) from exc
